package kernel

import "math"

// gainRows is the number of rows whose part of a gain's gradient is summed apart.
const gainRows = 64

// RMSNorm sets dst = src * rstd * gain per row of cols values, with rstd[r] = 1/sqrt(mean(src_r^2)+eps) (Zhang and
// Sennrich, Root Mean Square Layer Normalization, 2019). dst may be src. rstd has a value per row. The sum is that of
// SumSquares.
func RMSNorm(dst, src, gain, rstd []float32, cols int, eps float32) {
	rows := checkRows("RMSNorm", len(src), cols)
	checkLen("RMSNorm", "dst", len(dst), len(src))
	checkLen("RMSNorm", "gain", len(gain), cols)
	checkLen("RMSNorm", "rstd", len(rstd), rows)
	if shareLoop(len(src)) {
		finishLoop(&loop{part: rmsNormPart, n: rows, chunk: rowChunk(cols), a: dst, b: src, c: gain, rstd: rstd, cols: cols, x: eps})
		return
	}
	rmsNorm(dst, src, gain, rstd[:rows], cols, eps)
}

func rmsNormPart(q *loop, from, to int) {
	rmsNorm(q.a[from*q.cols:], q.b[from*q.cols:], q.c, q.rstd[from:to], q.cols, q.x)
}

func rmsNorm(dst, src, gain, rstd []float32, cols int, eps float32) {
	l := active.Load().vectors
	for r := range rstd {
		x, y, g := src[r*cols:(r+1)*cols], dst[r*cols:(r+1)*cols], gain[:cols]
		var squares float64
		if cols <= sumChunk {
			squares = sumSquares(x)
		} else {
			squares = SumSquares(x)
		}
		inv := float32(1 / math.Sqrt(squares/float64(cols)+float64(eps)))
		rstd[r] = inv
		if l != scalar {
			for len(x) >= int(l) {
				n := min(len(x), vectorChunk) / int(l)
				rmsNormVectors(l, &y[0], &x[0], &g[0], inv, n)
				n *= int(l)
				x, y, g = x[n:], y[n:], g[n:]
			}
		}
		y, g = y[:len(x)], g[:len(x)]
		for i, v := range x {
			y[i] = v * inv * g[i]
		}
	}
}

// RMSNormGrad is the backward of RMSNorm: it overwrites dx with the gradient of the input and adds the gradient of the
// gain to dgain. x and rstd are those of the forward; dx may be dy. With h = x*rstd and g = dy*gain:
//
//	dx    = rstd * (g - h*mean(g*h))
//	dgain += dy*h
//
// The gradient of the gain is summed over blocks of 64 rows, in order, and the blocks' sums are added to dgain in order.
func RMSNormGrad(dx, dgain, dy, x, gain, rstd []float32, cols int) {
	rows := checkRows("RMSNormGrad", len(x), cols)
	checkLen("RMSNormGrad", "dx", len(dx), len(x))
	checkLen("RMSNormGrad", "dy", len(dy), len(x))
	checkLen("RMSNormGrad", "gain", len(gain), cols)
	checkLen("RMSNormGrad", "dgain", len(dgain), cols)
	checkLen("RMSNormGrad", "rstd", len(rstd), rows)
	dgain = dgain[:cols]
	blocks := (rows + gainRows - 1) / gainRows
	if shareLoop(len(x)) {
		s := borrowScratch(blocks * cols)
		finishLoop(&loop{part: rmsNormGradPart, n: rows, chunk: gainRows, a: dx, b: s.f, c: dy, d: x, e: gain, rstd: rstd, cols: cols})
		for i := range blocks {
			add(dgain, s.f[i*cols:(i+1)*cols])
		}
		s.giveBack()
		return
	}
	s := borrowScratch(cols)
	for from := 0; from < rows; from += gainRows {
		at := from * cols
		rmsNormGrad(dx[at:], s.f[:cols], dy[at:], x[at:], gain, rstd[from:min(from+gainRows, rows)], cols)
		add(dgain, s.f[:cols])
	}
	s.giveBack()
}

func rmsNormGradPart(q *loop, from, to int) {
	at, block := from*q.cols, from/gainRows
	rmsNormGrad(q.a[at:], q.b[block*q.cols:(block+1)*q.cols], q.c[at:], q.d[at:], q.e, q.rstd[from:to], q.cols)
}

// rmsNormGrad does a block of rows; it overwrites dgain.
func rmsNormGrad(dx, dgain, dy, x, gain, rstd []float32, cols int) {
	l := active.Load().vectors
	clear(dgain)
	for r, inv := range rstd {
		v, d, o := x[r*cols:(r+1)*cols], dy[r*cols:(r+1)*cols], dx[r*cols:(r+1)*cols]
		g, dg := gain[:cols], dgain[:cols]
		// mean(g*h)*rstd, so that the inner loop multiplies x itself.
		mean := float32(dotWeighted(v, d, g) * float64(inv) * float64(inv) / float64(cols))
		if l != scalar {
			for len(v) >= int(l) {
				n := min(len(v), vectorChunk) / int(l)
				rmsNormGradVectors(l, &o[0], &dg[0], &d[0], &v[0], &g[0], inv, mean, n)
				n *= int(l)
				v, d, o, g, dg = v[n:], d[n:], o[n:], g[n:], dg[n:]
			}
		}
		// The conversions forbid fusing: the bits are those of the vector routines.
		for i, x := range v {
			y := d[i]
			dg[i] += float32(y * float32(x*inv))
			o[i] = inv * (float32(y*g[i]) - float32(x*mean))
		}
	}
}
