package objective

import (
	"fmt"
	"math"

	"moetor/model"
)

// A KLSetter is an objective with a reference point that the trainer measures: the mean log-ratio of policy and
// reference over answers that belong to other prompts (KTO).
type KLSetter interface {
	// SetKL sets the mean for the coming losses. What is below 0 counts as 0. Its gradient is not taken.
	SetKL(z float64)
}

// check is what all preference losses want of a micro-batch: nil, or why one cannot be read. Its loss is then NaN.
func check(name string, needs Needs, m *model.Micro) error {
	switch {
	case len(m.Weight) != m.Rows():
		return fmt.Errorf("objective %s: %d weights for %d rows", name, len(m.Weight), m.Rows())
	case m.Seqs == 0:
		return nil
	case needs.Reference && m.Ref == nil:
		return fmt.Errorf("objective %s needs the reference's log-probabilities, and the micro-batch has none", name)
	case needs.Reference && len(m.Ref) != m.Seqs:
		return fmt.Errorf("objective %s: %d log-probabilities of the reference for %d sequences", name, len(m.Ref), m.Seqs)
	case needs.Pairs && !m.Pairs:
		return fmt.Errorf("objective %s needs pairs of a chosen and a rejected answer, and the micro-batch has none", name)
	case needs.Pairs && m.Seqs%2 != 0:
		return fmt.Errorf("objective %s needs pairs, and the micro-batch has %d sequences", name, m.Seqs)
	case needs.Unpaired && len(m.Labels) != m.Seqs:
		return fmt.Errorf("objective %s needs a label for each answer: %d labels for %d sequences", name, len(m.Labels), m.Seqs)
	}
	if needs.Unpaired {
		for s, l := range m.Labels {
			if l != 1 && l != -1 {
				return fmt.Errorf("objective %s: label %d of sequence %d is neither 1 (desirable) nor -1 (undesirable)", name, l, s)
			}
		}
	}
	return nil
}

// An answer is the trained part of one sequence.
type answer struct {
	from, to int     // rows of the sequence
	last     int     // last trained row
	length   float64 // trained rows
	logp     float64 // sum of -y over them
}

// read sums up the answer of sequence s. A sum of -y is the negative of the sum of y to the bit, so it equals what
// Chunk.LogProbs gave for the reference.
func read(m *model.Micro, y []float64, s int) answer {
	a := answer{from: s * m.Len, to: (s + 1) * m.Len}
	for r := a.from; r < a.to; r++ {
		if m.Weight[r] != 0 {
			a.logp -= y[r]
			a.length++
			a.last = r
		}
	}
	return a
}

// spread sets the slope of the answer's rows to v. slope is nil where only the loss is wanted.
func (a answer) spread(m *model.Micro, slope []float32, v float64) {
	if slope == nil {
		return
	}
	for r := a.from; r < a.to; r++ {
		if m.Weight[r] != 0 {
			slope[r] = float32(v)
		}
	}
}

// softplus is log(1 + e^x) without overflow. -log sigmoid(x) is softplus(-x).
func softplus(x float64) float64 { return max(x, 0) + math.Log1p(math.Exp(-math.Abs(x))) }

// sigmoid is 1/(1 + e^-x) with full relative precision on both sides.
func sigmoid(x float64) float64 {
	if x >= 0 {
		return 1 / (1 + math.Exp(-x))
	}
	e := math.Exp(x)
	return e / (1 + e)
}

// log1mexp is log(1 - e^a) of a < 0. Each form loses digits where the other is exact: e^a near 1 cancels in 1-e^a, e^a
// near 0 in expm1. The switch at -ln 2 is Mächler's (Accurately Computing log(1-exp(-|a|)), 2012).
func log1mexp(a float64) float64 {
	if a > -math.Ln2 {
		return math.Log(-math.Expm1(a))
	}
	return math.Log1p(-math.Exp(a))
}

// A Value is a metric as users read it.
type Value struct {
	Name  string
	Value float64
}

// Report turns the metrics of a step or a validation, summed over all micro-batches and ranks in the order of
// o.Metrics(), into means: of a pairs' objective per pair, of KTO per answer of the label. weight is the summed weight
// that Loss returned. What nothing was measured of is left out.
func Report(o model.Objective, sums []float64, weight float64) []Value {
	if r, ok := o.(interface {
		report(sums []float64, weight float64) []Value
	}); ok {
		return r.report(sums, weight)
	}
	if o == nil || weight == 0 {
		return nil
	}
	var out []Value
	for i, name := range o.Metrics() {
		out = append(out, Value{name, sums[i] / weight})
	}
	return out
}
