package model

import (
	"math"

	"moetor/internal/kernel"
	"moetor/internal/tensor"
)

// An Objective turns what the head says of a micro-batch's targets into a loss. Without one, the loss is cross-entropy
// weighted by Micro.Weight.
//
// A loss of whole sequences cannot be had in one walk over the logits: the slope of any row needs the log-probabilities of
// all. So a training pass walks the chunks of logits twice, first for y, then, for rows that have a slope, for gradients:
// a fourth product of the head's size in exchange for never holding the logits of a micro-batch.
type Objective interface {
	// Metrics names the sums that Loss adds to, in their order.
	Metrics() []string
	// Loss returns the summed loss of a micro-batch and its weight. y [R] is -log p(target) of every row with
	// Micro.Weight != 0, or the row's score under a score head, and 0 elsewhere. Loss sets slope [R], which is 0 when it
	// gets it, to dLoss/dy, and adds to metrics. Slopes of rows without weight are not used. It is not called for a
	// micro-batch without sequences.
	Loss(m *Micro, y []float64, slope []float32, metrics []float64) (loss, weight float64)
}

// judge measures the rows of a pass and asks the objective for the loss.
func (h *head) judge(p *pass) {
	m := p.micro
	h.measure(p)
	h.slope = grow(h.slope, m.Rows())
	clear(h.slope)
	clear(p.metrics)
	p.sums.Metrics = p.metrics
	if m.Seqs == 0 {
		return
	}
	p.sums.Loss, p.sums.Weight = h.objective.Loss(m, h.y, h.slope, p.metrics)
	for r, w := range m.Weight {
		if w == 0 {
			h.slope[r] = 0
		}
	}
	if sum := p.sums.Loss + p.sums.Weight; math.IsNaN(sum) || math.IsInf(sum, 0) || !kernel.Finite(h.slope) {
		p.report(false, h.layer, placeObjective, -1)
	}
}

// measure fills y, and what the pass says of each sequence.
func (h *head) measure(p *pass) {
	hidden, m := p.head.hidden, p.micro
	if h.score {
		scores := p.arena.Mat(m.Rows(), 1)
		h.project.forward(scores, operand{mat: hidden}, 0)
		h.y = grow(h.y, m.Rows())
		for r, s := range scores.Data {
			h.y[r] = 0
			if m.Weight[r] != 0 {
				h.y[r] = float64(s)
			}
		}
	} else {
		h.loss(hidden, m.Targets, m.Weight)
	}
	p.ofSeq = grow(p.ofSeq, m.Seqs)
	for s := range p.ofSeq {
		p.ofSeq[s] = 0
		if h.score {
			p.ofSeq[s] = math.NaN()
		}
		for r := s * m.Len; r < (s+1)*m.Len; r++ {
			switch {
			case m.Weight[r] == 0:
			case h.score:
				p.ofSeq[s] = h.y[r]
			default:
				p.ofSeq[s] -= h.y[r]
			}
		}
	}
	for _, y := range h.y {
		if math.IsNaN(y) || math.IsInf(y, 0) {
			p.report(false, h.layer, h.place, -1)
			break
		}
	}
}

// scoreGrad sets dHidden and adds the score weight's gradient, given slope.
func (h *head) scoreGrad(dHidden, hidden tensor.Mat) {
	rows, d := hidden.Rows, hidden.Cols
	if rows == 0 {
		return
	}
	kernel.Gemm(kernel.NN, rows, d, 1, 1, h.slope, 1, h.project.w.Data, d, 0, dHidden.Data, d)
	kernel.Gemm(kernel.TN, 1, d, rows, 1, h.slope, 1, hidden.Data, d, 1, h.project.g.Data, d)
}

// LogProbs are, per sequence of a micro-batch, the sum of log p(target) over its rows with Weight != 0, in float64 and in
// order of the rows: after its Evaluate, or its BackwardInput under an objective, and until the next Bind. nil before
// that, away from the head, and of a reward model. A row has the same bits whatever else is in its batch, and however far
// its sequence is padded.
func (c *Chunk) LogProbs(micro int) []float64 {
	if c.config.Score {
		return nil
	}
	return c.measured(micro)
}

// Scores are a reward model's LogProbs: per sequence, the score at its last row with Weight != 0, NaN where there is none.
func (c *Chunk) Scores(micro int) []float64 {
	if !c.config.Score {
		return nil
	}
	return c.measured(micro)
}

func (c *Chunk) measured(micro int) []float64 {
	if micro < 0 || micro >= len(c.ofSeq) || len(c.ofSeq[micro]) == 0 {
		return nil
	}
	return c.ofSeq[micro]
}
