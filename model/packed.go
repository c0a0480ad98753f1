package model

import (
	"sync"

	"moetor/internal/kernel"
	"moetor/internal/lowp"
	"moetor/internal/tensor"
)

// packed are the codes of a weight, made once per step for all micro-batches, in the order in which products take them.
type packed struct {
	plan *plan
	name string
	w    tensor.Mat
	y    kernel.PackedWeight // y = x Wᵀ
	dx   kernel.PackedWeight // dx = dy W
}

// pack gives a weight codes if the recipe has any.
func (pl *plan) pack(l linear) linear {
	if pl.low() {
		l.packed = pl.packed(l.name, l.w)
	}
	return l
}

func (pl *plan) packed(name string, w tensor.Mat) *packed {
	p := &packed{plan: pl, name: name, w: w}
	pl.weights = append(pl.weights, p)
	return p
}

// sums are how products from codes are summed, where not in FP32.
func (w *packed) sums() *kernel.Hopper {
	if w == nil {
		return nil
	}
	return w.plan.hopper
}

func (w *packed) forward(y tensor.Mat, x operand, beta float32) {
	if sums := w.sums(); sums != nil {
		sums.ScaledGemmPacked(x.codes, &w.y, beta, y.Data, y.Stride)
		return
	}
	kernel.ScaledGemmPacked(x.codes, &w.y, beta, y.Data, y.Stride)
}

func (w *packed) backward(dx tensor.Mat, dy gradient, beta float32) {
	if sums := w.sums(); sums != nil {
		sums.ScaledGemmPacked(dy.flat, &w.dx, beta, dx.Data, dx.Stride)
		return
	}
	kernel.ScaledGemmPacked(dy.flat, &w.dx, beta, dx.Data, dx.Stride)
}

// A packer makes the codes of all weights of a chunk, on all threads.
type packer struct {
	plan     *plan
	part     func(i int)
	watching *watching

	lock sync.Mutex
	free []*lowp.Matrix // room for the codes of one weight
}

func newPacker(pl *plan) *packer {
	k := &packer{plan: pl}
	k.part = func(i int) { k.pack(pl.weights[i]) }
	return k
}

// run is to be called whenever the weights have changed.
func (k *packer) run() { kernel.Parallel(len(k.plan.weights), k.part) }

func (k *packer) pack(w *packed) {
	pl := k.plan
	m := k.take()
	w.y.Pack(kernel.NT, encode(m, pl.Weight, w.w))
	if k.watching != nil {
		k.lock.Lock()
		k.watching.add(-1, w.name, lowp.Measure(m, w.w.Data, w.w.Stride))
		k.lock.Unlock()
	}
	if pl.WeightT != nil {
		encode(m, pl.WeightT, w.w)
	}
	w.dx.Pack(kernel.NN, m)
	k.lock.Lock()
	k.free = append(k.free, m)
	k.lock.Unlock()
}

func (k *packer) take() *lowp.Matrix {
	k.lock.Lock()
	defer k.lock.Unlock()
	if last := len(k.free) - 1; last >= 0 {
		m := k.free[last]
		k.free = k.free[:last]
		return m
	}
	return &lowp.Matrix{}
}

// encode stores w in m, whose memory it keeps or grows.
func encode(m *lowp.Matrix, q *lowp.Quant, w tensor.Mat) *lowp.Matrix {
	scales, exponents := q.ScaleCount(w.Rows, w.Cols, nil), 0
	if q.Scale == lowp.ScaleE8M0 {
		scales, exponents = 0, scales
	}
	*m = lowp.Matrix{Quant: *q, Rows: w.Rows, Cols: w.Cols, Stride: q.Format.RowBytes(w.Cols),
		Codes: grow(m.Codes, q.CodeBytes(w.Rows, w.Cols)), Scales: grow(m.Scales, scales), Exponents: grow(m.Exponents, exponents)}
	lowp.Quantize(m, w.Data, w.Stride)
	return m
}
