package model

import (
	"moetor/internal/kernel"
	"moetor/internal/tensor"
)

// A linear is y = x Wᵀ with W [out, in]. Weight and gradient are views, so that a range of rows or columns of a
// parameter is a linear of its own.
type linear struct {
	name   string
	w, g   tensor.Mat
	packed *packed // its codes, where the recipe has any
}

func linearOf(p *tensor.Param) linear { return linear{name: p.Name, w: p.Mat(), g: p.GradMat()} }

// outputs and inputs view part of the output rows or input columns.
func (l linear) outputs(from, to int) linear {
	return linear{name: l.name, w: l.w.RowRange(from, to), g: l.g.RowRange(from, to)}
}

func (l linear) inputs(from, to int) linear {
	return linear{name: l.name, w: l.w.ColRange(from, to), g: l.g.ColRange(from, to)}
}

// forward sets y = x Wᵀ + beta y.
func (l linear) forward(y tensor.Mat, x operand, beta float32) {
	switch {
	case x.rows() == 0:
	case l.packed != nil:
		l.packed.forward(y, x, beta)
	default:
		kernel.Gemm(kernel.NT, x.mat.Rows, l.w.Rows, l.w.Cols, 1, x.mat.Data, x.mat.Stride, l.w.Data, l.w.Stride, beta, y.Data, y.Stride)
	}
}

// backward sets dx = dy W + beta dx, and owes dW += dyᵀ x: dy and x must stay as they are until the pass's BackwardWeight.
func (l linear) backward(p *pass, dx tensor.Mat, dy gradient, x operand, beta float32) {
	l.backwardInput(dx, dy, beta)
	l.owe(p, dy, x)
}

func (l linear) backwardInput(dx tensor.Mat, dy gradient, beta float32) {
	switch {
	case dx.Rows == 0:
	case l.packed != nil:
		l.packed.backward(dx, dy, beta)
	default:
		kernel.Gemm(kernel.NN, dy.mat.Rows, l.w.Cols, l.w.Rows, 1, dy.mat.Data, dy.mat.Stride, l.w.Data, l.w.Stride, beta, dx.Data, dx.Stride)
	}
}

func (l linear) owe(p *pass, dy gradient, x operand) {
	if x.rows() > 0 {
		p.jobs = append(p.jobs, gradJob{grad: l.g, dy: dy, x: x, sums: l.packed.sums()})
	}
}

// experts are one Linear of each local expert, of equal shapes. Rows of operands are those of the experts, one after the
// other, as many for each as rows says.
type experts struct {
	out, in int
	w, g    [][]float32
	packed  []*packed
	y, dx   []*kernel.PackedWeight // of packed
	sums    *kernel.Hopper
}

func (e *experts) add(pl *plan, p *tensor.Param) {
	l := pl.pack(linearOf(p))
	e.out, e.in = l.w.Rows, l.w.Cols
	e.w, e.g = append(e.w, p.Value), append(e.g, p.Grad)
	if l.packed != nil {
		e.packed, e.y, e.dx, e.sums = append(e.packed, l.packed), append(e.y, &l.packed.y), append(e.dx, &l.packed.dx), pl.hopper
	}
}

// forward sets y = x Wᵀ.
func (e *experts) forward(rows []int, y tensor.Mat, x operand) {
	switch {
	case e.packed == nil:
		kernel.GroupedGemm(kernel.NT, rows, e.out, e.in, x.mat.Data, e.w, 0, y.Data)
	case e.sums != nil:
		e.sums.ScaledGroupedGemm(rows, x.codes, e.y, 0, y.Data)
	default:
		kernel.ScaledGroupedGemm(rows, x.codes, e.y, 0, y.Data)
	}
}

// backward sets dx = dy W + beta dx.
func (e *experts) backward(rows []int, dx tensor.Mat, dy gradient, beta float32) {
	switch {
	case e.packed == nil:
		kernel.GroupedGemm(kernel.NN, rows, e.in, e.out, dy.mat.Data, e.w, beta, dx.Data)
	case e.sums != nil:
		e.sums.ScaledGroupedGemm(rows, dy.flat, e.dx, beta, dx.Data)
	default:
		kernel.ScaledGroupedGemm(rows, dy.flat, e.dx, beta, dx.Data)
	}
}

// owe adds dW += dyᵀ x to what the pass's BackwardWeight does.
func (e *experts) owe(p *pass, rows []int, dy gradient, x operand) {
	p.jobs = append(p.jobs, gradJob{rows: rows, grads: e.g, dy: dy, x: x, sums: e.sums})
}

// A norm is RMSNorm (Zhang and Sennrich, 2019): y = x / sqrt(mean(x²)+eps) * gain.
type norm struct {
	gain, grad []float32
	eps        float32
}

func normOf(p *tensor.Param, eps float64) norm { return norm{p.Value, p.Grad, float32(eps)} }

// forward normalises contiguous rows; rstd (R) is needed by the backward.
func (n norm) forward(y, x tensor.Mat, rstd []float32) {
	if x.Rows > 0 {
		kernel.RMSNorm(y.Data, x.Data, n.gain, rstd, x.Cols, n.eps)
	}
}

// backward sets dx, which may be dy, and adds the gain's gradient row by row.
func (n norm) backward(dx, dy, x tensor.Mat, rstd []float32) {
	if x.Rows > 0 {
		kernel.RMSNormGrad(dx.Data, n.grad, dy.Data, x.Data, n.gain, rstd, x.Cols)
	}
}

// An embedding is a table [V, d] with a vector for each token.
type embedding struct {
	param     *tensor.Param
	copy, add *rowLoop
	call      embeddingCall // their operands
}

type embeddingCall struct {
	table, x     tensor.Mat // values or gradients
	rows, tokens []int32
}

func embeddingOf(p *tensor.Param) *embedding {
	e := &embedding{param: p}
	e.copy, e.add = loopOf(e.copyRows), loopOf(e.addColumns)
	return e
}

// forward sets each of the given rows r of x to the vector of tokens[r].
func (e *embedding) forward(x tensor.Mat, rows, tokens []int32) {
	e.call = embeddingCall{e.param.Mat(), x, rows, tokens}
	e.copy.run(len(rows))
}

func (e *embedding) copyRows(from, to int) {
	c := &e.call
	for _, r := range c.rows[from:to] {
		copy(c.x.Row(int(r)), c.table.Row(int(c.tokens[r])))
	}
}

// backward adds the given rows of dx to the gradient. Threads share the columns, so that the rows of one token are added in
// order.
func (e *embedding) backward(dx tensor.Mat, rows, tokens []int32) {
	e.call = embeddingCall{e.param.GradMat(), dx, rows, tokens}
	e.add.run(dx.Cols)
}

func (e *embedding) addColumns(from, to int) {
	c := &e.call
	for _, r := range c.rows {
		kernel.Add(c.table.Row(int(c.tokens[r]))[from:to], c.x.Row(int(r))[from:to])
	}
}
