package model

import (
	"moetor/internal/kernel"
	"moetor/internal/tensor"
)

// A linear is y = x Wᵀ with W [out, in]. Weight and gradient are views, so that a range of rows or columns of a
// parameter is a linear of its own.
type linear struct{ w, g tensor.Mat }

func linearOf(p *tensor.Param) linear { return linear{p.Mat(), p.GradMat()} }

// outputs and inputs view part of the output rows or input columns.
func (l linear) outputs(from, to int) linear {
	return linear{l.w.RowRange(from, to), l.g.RowRange(from, to)}
}

func (l linear) inputs(from, to int) linear {
	return linear{l.w.ColRange(from, to), l.g.ColRange(from, to)}
}

// forward sets y = x Wᵀ + beta y.
func (l linear) forward(y, x tensor.Mat, beta float32) {
	if x.Rows > 0 {
		kernel.Gemm(kernel.NT, x.Rows, l.w.Rows, l.w.Cols, 1, x.Data, x.Stride, l.w.Data, l.w.Stride, beta, y.Data, y.Stride)
	}
}

// backward sets dx = dy W + beta dx, and owes dW += dyᵀ x: dy and x must stay as they are until the pass's BackwardWeight.
func (l linear) backward(p *pass, dx, dy, x tensor.Mat, beta float32) {
	if x.Rows == 0 {
		return
	}
	kernel.Gemm(kernel.NN, dy.Rows, l.w.Cols, l.w.Rows, 1, dy.Data, dy.Stride, l.w.Data, l.w.Stride, beta, dx.Data, dx.Stride)
	p.jobs = append(p.jobs, gradJob{grad: l.g, dy: dy, x: x})
}

// A gradJob is a weight gradient still to be added: grad += dyᵀ x, or the same for each expert's rows.
type gradJob struct {
	grad   tensor.Mat
	dy, x  tensor.Mat
	rows   []int       // rows of each expert; nil: one matrix
	grads  [][]float32 // each expert's gradient
	dn, xn int         // columns of dy and x
}

func (j *gradJob) run() {
	if j.rows != nil {
		kernel.GroupedGemmTN(j.rows, j.dn, j.xn, j.dy.Data, j.x.Data, j.grads)
		return
	}
	kernel.Gemm(kernel.TN, j.dy.Cols, j.x.Cols, j.x.Rows, 1, j.dy.Data, j.dy.Stride, j.x.Data, j.x.Stride, 1, j.grad.Data, j.grad.Stride)
}

// A norm is RMSNorm (Zhang and Sennrich, 2019): y = x / sqrt(mean(x²)+eps) * gain.
type norm struct {
	gain, grad []float32
	eps        float32
}

func normOf(p *tensor.Param, eps float64) norm { return norm{p.Value, p.Grad, float32(eps)} }

// forward normalises contiguous rows; rstd (R) is kept for the backward.
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
