package objective

import (
	"math"

	"moetor/model"
)

// Metrics of objectives on pairs, in order; each is a sum over pairs.
const (
	rewardChosen = iota // implicit reward of the chosen answer
	rewardRejected
	rewardMargin   // difference of the two
	rewardAccuracy // pairs with a margin above 0
	logpChosen     // log p of the whole answer
	logpRejected
	nllChosen // mean NLL per token; only where it is part of the loss
)

var pairMetrics = []string{"reward_chosen", "reward_rejected", "reward_margin", "reward_accuracy", "logp_chosen", "logp_rejected", "nll_chosen"}

// pairs is a loss on pairs of answers. From each answer comes one number u:
//
//	log p - Ref, log p or the score, divided by the answer's length if average
//
// and from the two numbers comes the loss.
type pairs struct {
	name    string
	needs   Needs
	average bool
	reward  float64                                               // implicit reward = reward * u
	sft     float64                                               // weight of the chosen answer's mean NLL
	loss    func(chosen, rejected float64) (loss, dc, dr float64) // value and derivatives by u
	metrics []string
}

func newPairs(p pairs) model.Objective {
	switch {
	case p.needs.Score:
		p.metrics = pairMetrics[:logpChosen]
	case p.sft != 0:
		p.metrics = pairMetrics
	default:
		p.metrics = pairMetrics[:nllChosen]
	}
	return &p
}

// byDifference is a loss of x = scale*(chosen - rejected): f returns its value and derivative.
func byDifference(scale float64, f func(x float64) (loss, dx float64)) func(c, r float64) (loss, dc, dr float64) {
	return func(c, r float64) (loss, dc, dr float64) {
		loss, dx := f(scale * (c - r))
		return loss, scale * dx, -scale * dx
	}
}

// logistic is -log sigmoid(x) + tilt*x.
func logistic(tilt float64) func(x float64) (loss, dx float64) {
	return func(x float64) (loss, dx float64) { return softplus(-x) + tilt*x, tilt - sigmoid(-x) }
}

// newDPO is -log sigmoid(beta*Delta), Delta the difference of the log-ratios (Rafailov et al. 2023, eq. 7).
func newDPO(n Needs, c Config) model.Objective {
	return newPairs(pairs{name: DPO, needs: n, reward: c.Beta, sft: c.SFT, loss: byDifference(c.Beta, logistic(0))})
}

// newCDPO is -(1-e) log sigmoid(x) - e log sigmoid(-x) of x = beta*Delta (Mitchell 2023, conservative DPO). Since
// log sigmoid(-x) = log sigmoid(x) - x, that is -log sigmoid(x) + e*x: exactly ln 2 at 0.
func newCDPO(n Needs, c Config) model.Objective {
	return newPairs(pairs{name: CDPO, needs: n, reward: c.Beta, sft: c.SFT, loss: byDifference(c.Beta, logistic(c.Smoothing))})
}

// newRobust is [-(1-e) log sigmoid(x) + e log sigmoid(-x)] / (1-2e) (Chowdhury et al. 2024, eq. 12), the same way.
func newRobust(n Needs, c Config) model.Objective {
	return newPairs(pairs{name: Robust, needs: n, reward: c.Beta, sft: c.SFT,
		loss: byDifference(c.Beta, logistic(-c.Smoothing/(1-2*c.Smoothing)))})
}

// newIPO is (Delta - 1/(2 beta))^2 (Azar et al. 2023, eq. 17). Whether log-ratios are sums, as in the paper, or means per
// token, as in TRL, changes what beta means: the target 1/(2 beta) is one of nats per answer or per token.
func newIPO(n Needs, c Config) model.Objective {
	target := 1 / (2 * c.Beta)
	return newPairs(pairs{name: IPO, needs: n, average: c.Average, reward: c.Beta, sft: c.SFT,
		loss: byDifference(1, func(x float64) (loss, dx float64) { return (x - target) * (x - target), 2 * (x - target) })})
}

// newHinge is max(0, 1 - beta*Delta) (Zhao et al. 2023, SLiC, with a reference).
func newHinge(n Needs, c Config) model.Objective {
	return newPairs(pairs{name: Hinge, needs: n, reward: c.Beta, sft: c.SFT,
		loss: byDifference(c.Beta, func(x float64) (loss, dx float64) {
			switch {
			case math.IsNaN(x):
				return x, x
			case x >= 1:
				return 0, 0
			}
			return 1 - x, -1
		})})
}

// newSimPO is -log sigmoid(beta*(mean_w - mean_l) - gamma) of mean log-probabilities per token, without a reference (Meng
// et al. 2024, eq. 6).
func newSimPO(n Needs, c Config) model.Objective {
	return newPairs(pairs{name: SimPO, needs: n, average: true, reward: c.Beta, sft: c.SFT,
		loss: byDifference(c.Beta, func(x float64) (loss, dx float64) { return logistic(0)(x - c.Gamma) })})
}

// certain is the largest mean log-probability ORPO works with. Where float32 logits round the probability of every token
// to 1 the odds would be infinite.
const certain = -1e-10

// newORPO is NLL(chosen) - lambda log sigmoid(lo), NLL and log-probabilities a as means per token, and lo the log odds
// ratio (a_w - a_l) - [log(1-e^a_w) - log(1-e^a_l)] (Hong et al. 2024, eq. 6 and 7). Only the answer counts for the NLL;
// some implementations add the prompt.
func newORPO(n Needs, c Config) model.Objective {
	return newPairs(pairs{name: ORPO, needs: n, average: true, reward: c.Lambda, sft: 1 + c.SFT,
		loss: func(chosen, rejected float64) (loss, dc, dr float64) {
			chosen, rejected = min(chosen, certain), min(rejected, certain)
			x := (chosen - rejected) - (log1mexp(chosen) - log1mexp(rejected))
			loss, dx := logistic(0)(x)
			// d/da of the log odds a - log(1-e^a) is 1/(1-e^a).
			return c.Lambda * loss, c.Lambda * dx / -math.Expm1(chosen), -c.Lambda * dx / -math.Expm1(rejected)
		}})
}

// newReward is -log sigmoid(score_w - score_l) (Bradley-Terry; Ouyang et al. 2022, eq. 1). The score of an answer is that
// of its last trained row.
func newReward(n Needs, _ Config) model.Objective {
	return newPairs(pairs{name: Reward, needs: n, reward: 1, loss: byDifference(1, logistic(0))})
}

// Metrics implements model.Objective.
func (p *pairs) Metrics() []string { return p.metrics }

func (p *pairs) check(m *model.Micro) error { return check(p.name, p.needs, m) }

// Loss implements model.Objective. Its weight is the number of pairs.
func (p *pairs) Loss(m *model.Micro, y []float64, slope []float32, metrics []float64) (loss, weight float64) {
	clear(slope)
	if p.check(m) != nil {
		return math.NaN(), 0
	}
	for s := 0; s < m.Seqs; s += 2 {
		w, l := read(m, y, s), read(m, y, s+1)
		if w.length == 0 || l.length == 0 {
			continue
		}
		uw, ul := p.value(m, y, w, s), p.value(m, y, l, s+1)
		pair, dw, dl := p.loss(uw, ul)
		nll := -w.logp / w.length
		if p.sft != 0 {
			pair += p.sft * nll
		}
		loss += pair
		weight++
		if p.needs.Score {
			if slope != nil {
				slope[w.last], slope[l.last] = float32(dw), float32(dl)
			}
		} else {
			if p.average {
				dw, dl = dw/w.length, dl/l.length
			}
			// u falls by 1 as y grows by 1; the NLL is the mean of y.
			w.spread(m, slope, p.sft/w.length-dw)
			l.spread(m, slope, -dl)
		}
		if metrics == nil {
			continue
		}
		metrics[rewardChosen] += p.reward * uw
		metrics[rewardRejected] += p.reward * ul
		metrics[rewardMargin] += p.reward * (uw - ul)
		if uw > ul {
			metrics[rewardAccuracy]++
		}
		if !p.needs.Score {
			metrics[logpChosen] += w.logp
			metrics[logpRejected] += l.logp
		}
		if p.sft != 0 {
			metrics[nllChosen] += nll
		}
	}
	return loss, weight
}

// value is the number u of the answer of sequence s.
func (p *pairs) value(m *model.Micro, y []float64, a answer, s int) float64 {
	if p.needs.Score {
		return y[a.last]
	}
	u := a.logp
	if p.needs.Reference {
		u -= m.Ref[s]
	}
	if p.average {
		u /= a.length
	}
	return u
}
