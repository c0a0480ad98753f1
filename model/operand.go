package model

import (
	"moetor/internal/kernel"
	"moetor/internal/lowp"
	"moetor/internal/tensor"
)

// An operand is the input of a Linear: a matrix, or its codes where the recipe has them.
type operand struct {
	mat   tensor.Mat
	codes *lowp.Matrix
	tall  *lowp.Quant // how the weight gradient, which contracts the rows, wants the codes
}

func (o operand) rows() int {
	if o.codes != nil {
		return o.codes.Rows
	}
	return o.mat.Rows
}

// A gradient is that of a Linear's output: a matrix, or its codes for the gradient of the input (flat, until the operation
// ends) and for that of the weight (tall, until the pass ends).
type gradient struct {
	mat        tensor.Mat
	flat, tall *lowp.Matrix
}

// A plan is the recipe of a chunk, and what its passes do not keep but make again in the backward (Config.Recompute).
type plan struct {
	Recipe
	norm, up, swiGLU bool
	weights          []*packed // all that have codes
	hopper           *kernel.Hopper
}

func newPlan(c Config) *plan {
	pl := &plan{Recipe: c.Recipe}
	if c.Recipe.Hopper {
		pl.hopper = &kernel.Hopper{Promote: c.Recipe.Promote}
	}
	for _, r := range c.Recompute {
		switch r {
		case RecomputeNorm:
			pl.norm = true
		case RecomputeUp:
			pl.up = true
		case RecomputeSwiGLU:
			pl.swiGLU = true
		}
	}
	return pl
}

// low reports whether Linears multiply codes.
func (pl *plan) low() bool { return pl.Weight != nil }

// Arenas: what waits for the backward stays in the pass's own, and unless is set goes to the one for temporary values.
func (p *pass) keepUnless(again bool) *tensor.Arena {
	if again {
		return p.temp
	}
	return p.arena
}

// codes returns a matrix of codes in an arena, of any content. groups are the rows of each expert, or nil.
func (p *pass) codes(a *tensor.Arena, name string, q *lowp.Quant, rows, cols int, groups []int) *lowp.Matrix {
	if p.headersUsed == len(p.headers) {
		p.headers = append(p.headers, &header{})
	}
	h := p.headers[p.headersUsed]
	p.headersUsed++
	h.layer, h.name, h.temporary = p.layer, name, a == p.temp
	m := &h.Matrix
	*m = lowp.Matrix{Quant: *q, Rows: rows, Cols: cols, Stride: q.Format.RowBytes(cols), Codes: a.Bytes(q.CodeBytes(rows, cols))}
	if q.TileRows > 1 {
		m.Groups = groups
	}
	if n := q.ScaleCount(rows, cols, m.Groups); q.Scale == lowp.ScaleE8M0 {
		m.Exponents = a.Bytes(n)
	} else if n > 0 {
		m.Scales = a.Floats(n)
	}
	return m
}

// whole reports whether a matrix has one scale for all, which is known only when all values are.
func whole(q *lowp.Quant) bool {
	return q.Scale != lowp.ScaleNone && (q.TileRows == 0 || q.TileCols == 0)
}

// unfused reports whether values are to be made before they are quantised, and not piece by piece.
func (p *pass) unfused(q *lowp.Quant) bool { return whole(q) || p.watching != nil }

// quantize stores x in one or two ways, both made from x, so that nothing is rounded twice.
func (p *pass) quantize(name string, flat, tall *lowp.Matrix, x tensor.Mat) {
	s := kernel.Storage{Floats: x.Data}
	for i, m := range [2]*lowp.Matrix{flat, tall} {
		switch {
		case m == nil || i == 1 && m == flat:
		case whole(&m.Quant) || !x.Contiguous():
			lowp.Quantize(m, x.Data, x.Stride)
		case m.Scale != lowp.ScaleNone && m.TileRows > 1:
			s.Tall = m
		default:
			s.Flat = m
		}
	}
	if s.Flat != nil || s.Tall != nil {
		s.Quantize(x.Cols)
	}
	if p.watching != nil {
		p.measure(name, flat, x)
		if tall != nil && tall != flat {
			p.measure(name, tall, x)
		}
	}
}

// operand stores x, called name, as q says, in an arena. x itself is part of it if q is nil.
func (p *pass) operand(a *tensor.Arena, name string, x tensor.Mat, q, tall *lowp.Quant) operand {
	if q == nil {
		return operand{mat: x}
	}
	o := operand{codes: p.codes(a, name, q, x.Rows, x.Cols, nil), tall: tall}
	p.quantize(name, o.codes, nil, x)
	return o
}

// load makes the values of an operand again, among the temporary ones, or returns the matrix that it is.
func (p *pass) load(o operand) tensor.Mat {
	if o.codes == nil {
		return o.mat
	}
	x := p.temp.Mat(o.codes.Rows, o.codes.Cols)
	kernel.Dequantize(x.Data, o.codes)
	return x
}

// gradients are where gradients of Linears' outputs go: to the pass's own arena if they wait for BackwardWeight as they
// are.
func (pl *plan) gradients(p *pass) *tensor.Arena { return p.keepUnless(pl.low()) }

// gradient stores the gradient of an output, called name.
func (pl *plan) gradient(p *pass, name string, dy tensor.Mat) gradient {
	if !pl.low() {
		return gradient{mat: dy}
	}
	g := pl.gradientCodes(p, name, dy.Rows, dy.Cols, nil)
	p.quantize(name, g.flat, g.tall, dy)
	return g
}

func (pl *plan) gradientCodes(p *pass, name string, rows, cols int, groups []int) (g gradient) {
	g.tall = p.codes(p.arena, name, pl.GradT, rows, cols, groups)
	if g.flat = g.tall; *pl.Grad != *pl.GradT {
		g.flat = p.codes(p.temp, name, pl.Grad, rows, cols, nil)
	}
	return g
}

// normed is norm(x), called name, as Linears read it, in an arena. full gets the values, if it is not empty.
func (pl *plan) normed(p *pass, a *tensor.Arena, name string, n norm, x tensor.Mat, rstd []float32, full tensor.Mat) operand {
	if !pl.low() {
		o := operand{mat: a.Mat(x.Rows, x.Cols)}
		n.forward(o.mat, x, rstd)
		return o
	}
	o := operand{codes: p.codes(a, name, pl.Input, x.Rows, x.Cols, nil), tall: pl.InputT}
	switch {
	case x.Rows == 0:
	case p.unfused(pl.Input):
		mark := p.temp.Mark()
		if full.Data == nil {
			full = p.temp.Mat(x.Rows, x.Cols)
		}
		n.forward(full, x, rstd)
		p.quantize(name, o.codes, nil, full)
		p.temp.Release(mark)
	default:
		kernel.RMSNormQuantize(kernel.Storage{Floats: full.Data, Flat: o.codes}, x.Data, n.gain, rstd, x.Cols, n.eps)
	}
	return o
}

// A hiddenPass is what SwiGLU keeps: its inputs, as they were or as codes, and its output.
type hiddenPass struct {
	names            *hiddenNames
	gate, up, hidden operand
}

// hiddenNames are what an FFN's operands and gradients are called.
type hiddenNames struct{ gate, up, hidden, dGate, dUp, dOut string }

func namesOf(prefix string) *hiddenNames {
	return &hiddenNames{prefix + "gate", prefix + "up", prefix + "hidden",
		gradientOf + prefix + "gate", gradientOf + prefix + "up", gradientOf + prefix + "output"}
}

// gradientOf begins the names of gradients.
const gradientOf = "gradient of "

// inputs are where gate and up are to be made.
func (pl *plan) inputs(p *pass, rows, inter int) (gate, up tensor.Mat) {
	a := p.keepUnless(pl.low())
	return a.Mat(rows, inter), a.Mat(rows, inter)
}

// hidden is SwiGLU of gate and up as the down projection reads it.
func (pl *plan) hidden(p *pass, act *hiddenPass, gate, up tensor.Mat) operand {
	rows, inter := gate.Rows, gate.Cols
	if !pl.low() {
		act.gate, act.up = operand{mat: gate}, operand{mat: up}
		act.hidden = operand{mat: p.keepUnless(pl.swiGLU).Mat(rows, inter)}
		kernel.SwiGLU(act.hidden.mat.Data, gate.Data, up.Data)
		return act.hidden
	}
	act.gate.codes, act.up.codes = p.codes(p.arena, act.names.gate, pl.SwiGLU, rows, inter, nil), p.codes(p.arena, act.names.up, pl.SwiGLU, rows, inter, nil)
	h := operand{codes: p.codes(p.temp, act.names.hidden, pl.Input, rows, inter, nil)}
	switch {
	case rows == 0:
	case p.unfused(pl.Input) || whole(pl.SwiGLU):
		p.quantize(act.names.gate, act.gate.codes, nil, gate)
		p.quantize(act.names.up, act.up.codes, nil, up)
		kernel.SwiGLU(gate.Data, gate.Data, up.Data)
		p.quantize(act.names.hidden, h.codes, nil, gate)
	default:
		kernel.SwiGLUQuantize(kernel.Storage{Flat: h.codes}, gate.Data, up.Data, act.gate.codes, act.up.codes, inter)
	}
	return h
}

// hiddenGrad is the backward of hidden. It also returns the output again, as the weight gradient of the down projection
// reads it. The gradients take the places of gate and up where these are matrices.
func (pl *plan) hiddenGrad(p *pass, act *hiddenPass, dHidden tensor.Mat, groups []int) (dGate, dUp gradient, hidden operand) {
	rows, inter := dHidden.Rows, dHidden.Cols
	if !pl.low() {
		gate, up := act.gate.mat, act.up.mat
		if pl.swiGLU {
			act.hidden.mat = p.arena.Mat(rows, inter)
			kernel.SwiGLU(act.hidden.mat.Data, gate.Data, up.Data)
		}
		kernel.SwiGLUGrad(gate.Data, up.Data, dHidden.Data, gate.Data, up.Data)
		return gradient{mat: gate}, gradient{mat: up}, act.hidden
	}
	dGate, dUp = pl.gradientCodes(p, act.names.dGate, rows, inter, groups), pl.gradientCodes(p, act.names.dUp, rows, inter, groups)
	hidden = operand{codes: p.codes(p.arena, act.names.hidden, pl.InputT, rows, inter, groups), tall: pl.InputT}
	switch {
	case rows == 0:
	case p.unfused(pl.Grad):
		gate, up := p.load(act.gate), p.load(act.up)
		h := p.temp.Mat(rows, inter)
		kernel.SwiGLU(h.Data, gate.Data, up.Data)
		kernel.SwiGLUGrad(gate.Data, up.Data, dHidden.Data, gate.Data, up.Data)
		p.quantize(act.names.hidden, hidden.codes, nil, h)
		p.quantize(act.names.dGate, dGate.flat, dGate.tall, gate)
		p.quantize(act.names.dUp, dUp.flat, dUp.tall, up)
	default:
		kernel.SwiGLUGradQuantize(dGate.storage(), dUp.storage(), kernel.Storage{Tall: hidden.codes}, dHidden.Data, act.gate.codes, act.up.codes)
	}
	return dGate, dUp, hidden
}

func (g gradient) storage() kernel.Storage {
	if g.flat == g.tall {
		return kernel.Storage{Tall: g.tall}
	}
	return kernel.Storage{Flat: g.flat, Tall: g.tall}
}

// A gradJob is a weight gradient still to be added: grad += dyᵀ x, or the same for each expert's rows.
type gradJob struct {
	grad  tensor.Mat
	dy    gradient
	x     operand
	rows  []int          // rows of each expert; nil: one matrix
	grads [][]float32    // each expert's gradient
	sums  *kernel.Hopper // of products from codes, where not in FP32
}

// settle does at once what is owed beyond the first jobs.
func (p *pass) settle(jobs int) {
	for i := range p.jobs[jobs:] {
		p.jobs[jobs+i].run(p)
	}
	p.jobs = p.jobs[:jobs]
}

func (j *gradJob) run(p *pass) {
	if j.dy.tall != nil {
		j.runCodes(p)
		return
	}
	dy, x := j.dy.mat, j.x.mat
	if j.rows != nil {
		kernel.GroupedGemmTN(j.rows, dy.Cols, x.Cols, dy.Data, x.Data, j.grads)
		return
	}
	kernel.Gemm(kernel.TN, dy.Cols, x.Cols, x.Rows, 1, dy.Data, dy.Stride, x.Data, x.Stride, 1, j.grad.Data, j.grad.Stride)
}

// runCodes stores x anew with tiles along the rows, if it has others (DeepSeek-V3 §3.3.3), and multiplies.
func (j *gradJob) runCodes(p *pass) {
	mark, headers, x := p.temp.Mark(), p.headersUsed, j.x.codes
	if *j.x.tall != x.Quant {
		x = p.codes(p.temp, "", j.x.tall, x.Rows, x.Cols, j.rows)
		kernel.Requantize(x, j.x.codes)
	}
	switch sums := j.sums; {
	case j.rows != nil && sums == nil:
		kernel.ScaledGroupedGemmTN(j.rows, j.dy.tall, x, j.grads)
	case j.rows != nil:
		sums.ScaledGroupedGemmTN(j.rows, j.dy.tall, x, j.grads)
	case sums == nil:
		kernel.ScaledGemm(kernel.TN, j.dy.tall, x, 1, j.grad.Data, j.grad.Stride)
	default:
		sums.ScaledGemm(kernel.TN, j.dy.tall, x, 1, j.grad.Data, j.grad.Stride)
	}
	p.temp.Release(mark)
	p.headersUsed = headers
}
