package objective

import (
	"math"

	"moetor/model"
)

// Metrics of KTO, in order. Each is a sum over the answers of one label (chosen: desirable), the accuracy one over all: it
// counts answers on their label's side of the reference point. The last is there only with an SFT term.
var ktoMetrics = []string{"reward_chosen", "reward_rejected", "reward_accuracy", "logp_chosen", "logp_rejected", "count_chosen", "count_rejected", "nll_chosen"}

const (
	ktoReward   = 0 // + label
	ktoAccuracy = 2
	ktoLogp     = 3 // + label
	ktoCount    = 5 // + label
	ktoNLL      = 7
)

// kto is the loss of single answers with a label (Ethayarajh et al. 2024, eq. 8): with r the log-ratio of policy and
// reference and z the reference point,
//
//	desirable    lambda_D (1 - sigmoid(beta (r - z)))
//	undesirable  lambda_U (1 - sigmoid(beta (z - r)))
type kto struct {
	needs   Needs
	c       Config
	z       float64 // reference point
	metrics []string
}

func newKTO(n Needs, c Config) model.Objective {
	k := &kto{needs: n, c: c, metrics: ktoMetrics}
	if c.SFT == 0 {
		k.metrics = ktoMetrics[:ktoNLL]
	}
	return k
}

// SetKL implements KLSetter.
func (k *kto) SetKL(z float64) { k.z = max(0, z) }

// Metrics implements model.Objective.
func (k *kto) Metrics() []string { return k.metrics }

func (k *kto) check(m *model.Micro) error { return check(KTO, k.needs, m) }

// Loss implements model.Objective. Its weight is the number of answers.
func (k *kto) Loss(m *model.Micro, y []float64, slope []float32, metrics []float64) (loss, weight float64) {
	clear(slope)
	if k.check(m) != nil {
		return math.NaN(), 0
	}
	for s := range m.Seqs {
		a := read(m, y, s)
		if a.length == 0 {
			continue
		}
		ratio := a.logp - m.Ref[s]
		label, side, scale := 0, 1.0, k.c.Desirable
		if m.Labels[s] < 0 {
			label, side, scale = 1, -1, k.c.Undesirable
		}
		x := side * k.c.Beta * (ratio - k.z)
		loss += scale * sigmoid(-x) // 1 - sigmoid(x)
		weight++
		slopeOf := scale * side * k.c.Beta * sigmoid(x) * sigmoid(-x) // the ratio falls by 1 as y grows by 1
		nll := -a.logp / a.length
		if sft := k.c.SFT; sft != 0 && label == 0 {
			loss += sft * nll
			slopeOf += sft / a.length
		}
		a.spread(m, slope, slopeOf)
		if metrics == nil {
			continue
		}
		metrics[ktoReward+label] += k.c.Beta * ratio
		metrics[ktoLogp+label] += a.logp
		metrics[ktoCount+label]++
		if x > 0 {
			metrics[ktoAccuracy]++
		}
		if k.c.SFT != 0 && label == 0 {
			metrics[ktoNLL] += nll
		}
	}
	return loss, weight
}

// report divides by the answers of each label. A margin is the difference of two means, and there only with both labels.
func (k *kto) report(sums []float64, weight float64) []Value {
	if weight == 0 {
		return nil
	}
	var out []Value
	chosen, rejected := sums[ktoCount], sums[ktoCount+1]
	add := func(i int, count float64) {
		if count > 0 {
			out = append(out, Value{k.metrics[i], sums[i] / count})
		}
	}
	add(ktoReward, chosen)
	add(ktoReward+1, rejected)
	if chosen > 0 && rejected > 0 {
		out = append(out, Value{pairMetrics[rewardMargin], sums[ktoReward]/chosen - sums[ktoReward+1]/rejected})
	}
	add(ktoAccuracy, weight)
	add(ktoLogp, chosen)
	add(ktoLogp+1, rejected)
	if k.c.SFT != 0 {
		add(ktoNLL, chosen)
	}
	return out
}
