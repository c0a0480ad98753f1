package model

import (
	"context"

	"moetor/internal/kernel"
	"moetor/internal/tensor"
)

// logitRows is how many rows have logits at one time.
const logitRows = 512

// head is what follows the last block: final norm, MTP modules, and the shared projection to the vocabulary with its
// loss.
//
// The forward of a training pass stops at the normed states. Loss and gradients come from one walk over chunks of
// logitRows rows in BackwardInput: logits, their cross-entropy and its gradient in place, gradient of the states, gradient
// of the projection. So logits of a whole micro-batch never exist, none are computed twice (a loss in the forward would
// cost a fourth product beside the three), and the projection's gradient is summed in the order of BackwardInput. Chunks
// in which no row has a weight are passed over. An [Objective] takes two walks.
//
// The head of a reward model (Config.Score) projects to one number instead, and has no MTP modules.
type head struct {
	layer   int // number after all layers and MTP modules
	score   bool
	place   Place // of the projection
	norm    norm
	project linear // [V, d], or [1, d] to a score
	mtp     []*mtpModule
	logits  []float32

	lambda    float64   // MTP weight of the step
	objective Objective // of the step, or nil
	y         []float64 // R: what the objective gets
	slope     []float32 // R: what it gives

	shifted []int32 // R: targets and weights of one MTP depth
	weights []float32

	call   headCall // operands of a loop on all threads
	losses *rowLoop
}

type headCall struct {
	logits  tensor.Mat
	y       []float64
	targets []int32
	weight  []float32
}

type headPass struct {
	x, hidden tensor.Mat // input and normed state, [R, d]
	rstd      []float32
	mtp       []mtpPass
}

func newHead(c Config, pl *plan, part Part, byName map[string]*tensor.Param, rope *rope, x Exchange) *head {
	table := byName[tiedKey]
	h := &head{layer: c.Layers + c.MTP.Depth, norm: normOf(byName["model.norm.weight"], c.NormEps)}
	h.losses = loopOf(h.lossRows)
	if c.Score {
		h.score, h.place, h.project = true, placeScore, linearOf(byName[scoreName])
		return h
	}
	h.place, h.logits = placeHead, make([]float32, logitRows*c.vocab())
	if c.TieEmbed {
		h.project = linearOf(table)
	} else {
		h.project = linearOf(byName["lm_head.weight"])
	}
	for k := range c.MTP.Depth {
		h.mtp = append(h.mtp, newMTP(c, pl, part, k, byName, table, rope, x))
	}
	return h
}

// forward normalises the last block's output and runs the MTP modules, which an objective has no use for.
func (h *head) forward(ctx context.Context, p *pass, x tensor.Mat) error {
	act := &p.head
	act.x, act.hidden, act.rstd = x, p.arena.Mat(x.Rows, x.Cols), p.arena.Floats(x.Rows)
	h.norm.forward(act.hidden, x, act.rstd)
	if len(h.mtp) == 0 || h.objective != nil || !p.keep && h.lambda == 0 {
		return nil
	}
	act.mtp = grow(act.mtp, len(h.mtp))
	state := act.hidden
	for k, m := range h.mtp {
		if err := m.forward(ctx, p, &act.mtp[k], state); err != nil {
			return err
		}
		state = act.mtp[k].state
	}
	return nil
}

// evaluate adds the losses to the pass. Without an objective, a reward model has none.
func (h *head) evaluate(p *pass) {
	if h.objective != nil {
		h.judge(p)
		return
	}
	if h.lambda != 0 { // first, since LogProbs takes what is last in y
		for k := range h.mtp {
			h.shift(p, k)
			p.sums.MTP += h.loss(p.head.mtp[k].state, h.shifted, h.weights) / float64(len(h.mtp))
		}
	}
	h.measure(p)
	if h.score {
		return
	}
	for r, w := range p.micro.Weight {
		p.sums.Weight += float64(w)
		p.sums.Loss += float64(w) * h.y[r]
	}
}

// backward adds the losses to the pass and returns the gradient of the last block's output.
func (h *head) backward(ctx context.Context, p *pass) (dx tensor.Mat, err error) {
	act := &p.head
	dHidden := p.arena.Mat(act.x.Rows, act.x.Cols)
	if h.objective != nil {
		h.judge(p)
		if h.score {
			h.scoreGrad(dHidden, act.hidden)
		} else {
			h.lossGrad(dHidden, act.hidden, p.micro.Targets, h.slope, 1)
		}
		return h.out(p, dHidden), nil
	}
	p.sums.Loss = h.lossGrad(dHidden, act.hidden, p.micro.Targets, p.micro.Weight, 1)
	for _, w := range p.micro.Weight {
		p.sums.Weight += float64(w)
	}
	for k := range h.mtp {
		h.shift(p, k)
		m := &act.mtp[k]
		m.dState = p.arena.Mat(act.x.Rows, act.x.Cols)
		depths := float64(len(h.mtp))
		p.sums.MTP += h.lossGrad(m.dState, m.state, h.shifted, h.weights, h.lambda/depths) / depths
	}
	for k := len(h.mtp) - 1; k >= 0; k-- {
		below := dHidden
		if k > 0 {
			below = act.mtp[k-1].dState
		}
		if err := h.mtp[k].backward(ctx, p, &act.mtp[k], below); err != nil {
			return dx, err
		}
	}
	return h.out(p, dHidden), nil
}

// out turns the gradient of the normed states into that of the last block's output, in place.
func (h *head) out(p *pass, dHidden tensor.Mat) tensor.Mat {
	h.norm.backward(dHidden, dHidden, p.head.x, p.head.rstd)
	p.watch(dHidden, true, h.layer, h.place, -1)
	return dHidden
}

// shift makes the targets of MTP depth k (from 0): position i predicts the target of position i+k+1, where that position
// is real and in the same segment; elsewhere the weight is 0.
func (h *head) shift(p *pass, k int) {
	rows := len(p.position)
	h.shifted, h.weights = grow(h.shifted, rows), grow(h.weights, rows)
	clear(h.weights)
	clear(h.shifted)
	for _, r := range p.depthReal[k] {
		h.shifted[r], h.weights[r] = p.micro.Targets[int(r)+k+1], p.micro.Weight[int(r)+k+1]
	}
}

// loss sets y to -log p(target) of the rows of hidden that have a weight, and returns the sum of weight * y, in float64 and
// in order.
func (h *head) loss(hidden tensor.Mat, targets []int32, weight []float32) (sum float64) {
	v := h.project.w.Rows
	h.y = grow(h.y, hidden.Rows)
	clear(h.y)
	for from := 0; from < hidden.Rows; from += logitRows {
		to := min(from+logitRows, hidden.Rows)
		if zeros(weight[from:to]) {
			continue
		}
		logits := tensor.MatOf(to-from, v, h.logits)
		h.project.forward(logits, operand{mat: hidden.RowRange(from, to)}, 0)
		h.call = headCall{logits, h.y[from:to], targets[from:to], weight[from:to]}
		h.losses.run(to - from)
		sum = weighted(sum, h.y[from:to], weight[from:to])
	}
	return sum
}

func (h *head) lossRows(from, to int) {
	c := &h.call
	for r := from; r < to; r++ {
		if c.weight[r] != 0 {
			c.y[r] = kernel.CrossEntropyLoss(c.logits.Row(r), int(c.targets[r]))
		}
	}
}

// weighted returns sum + weight · y, added in order.
func weighted(sum float64, y []float64, weight []float32) float64 {
	for r, w := range weight {
		if w != 0 {
			sum += float64(w) * y[r]
		}
	}
	return sum
}

// lossGrad is loss, and sets dHidden and adds the projection's gradient, both of scale * loss. It leaves
// anything in y.
func (h *head) lossGrad(dHidden, hidden tensor.Mat, targets []int32, weight []float32, scale float64) (sum float64) {
	w, g := h.project.w, h.project.g
	v, d := w.Rows, w.Cols
	h.y = grow(h.y, hidden.Rows)
	for from := 0; from < hidden.Rows; from += logitRows {
		to := min(from+logitRows, hidden.Rows)
		if zeros(weight[from:to]) {
			clear(dHidden.Data[from*d : to*d])
			continue
		}
		x := hidden.RowRange(from, to)
		logits := tensor.MatOf(to-from, v, h.logits)
		h.project.forward(logits, operand{mat: x}, 0)
		kernel.CrossEntropyRows(h.y[from:to], logits.Data, v, targets[from:to], weight[from:to], scale)
		sum = weighted(sum, h.y[from:to], weight[from:to])
		kernel.Gemm(kernel.NN, x.Rows, d, v, 1, logits.Data, v, w.Data, d, 0, dHidden.Data[from*d:], d)
		kernel.Gemm(kernel.TN, v, d, x.Rows, 1, logits.Data, v, x.Data, d, 1, g.Data, d)
	}
	return sum
}

func zeros(x []float32) bool {
	for _, v := range x {
		if v != 0 {
			return false
		}
	}
	return true
}
