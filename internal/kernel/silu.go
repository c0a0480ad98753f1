package kernel

// Sigmoid sets dst = 1/(1+exp(-src)). dst may be src.
func Sigmoid(dst, src []float32) {
	checkLen("Sigmoid", "dst", len(dst), len(src))
	dst = dst[:len(src)]
	for i, v := range src {
		dst[i] = sigmoid(v)
	}
}

// rowEnds are copies of what is left of up to five rows after their whole vectors.
type rowEnds [5][lanes16]float32

// SwiGLU sets dst = gate*sigmoid(gate)*up elementwise (Shazeer, GLU Variants Improve Transformer, 2020). dst may be
// gate or up.
func SwiGLU(dst, gate, up []float32) {
	checkLen("SwiGLU", "dst", len(dst), len(gate))
	checkLen("SwiGLU", "up", len(up), len(gate))
	if shareLoop(len(gate)) {
		finishLoop(&loop{part: swiGLUPart, n: len(gate), chunk: loopChunk, a: dst, b: gate, c: up})
		return
	}
	swiGLU(dst, gate, up)
}

func swiGLUPart(q *loop, from, to int) { swiGLU(q.a[from:to], q.b[from:to], q.c[from:to]) }

func swiGLU(dst, gate, up []float32) {
	dst, up = dst[:len(gate)], up[:len(gate)]
	if l := active.Load().vectors; l != scalar {
		for len(gate) >= int(l) {
			n := min(len(gate), vectorChunk) / int(l)
			swiGLUVectors(l, &dst[0], &gate[0], &up[0], n)
			n *= int(l)
			dst, gate, up = dst[n:], gate[n:], up[n:]
		}
		if len(gate) > 0 {
			var e rowEnds
			copy(e[0][:], gate)
			copy(e[1][:], up)
			swiGLUVectors(l, &e[2][0], &e[0][0], &e[1][0], 1)
			copy(dst, e[2][:])
		}
		return
	}
	for i, g := range gate {
		dst[i] = g * sigmoid(g) * up[i]
	}
}

// SwiGLUGrad is the backward of SwiGLU: given dy it sets dup = dy*silu(gate) and
// dgate = dy*up*s*(1+gate*(1-s)) with s = sigmoid(gate). dgate and dup may alias gate and up, or dy.
func SwiGLUGrad(dgate, dup, dy, gate, up []float32) {
	checkLen("SwiGLUGrad", "dgate", len(dgate), len(gate))
	checkLen("SwiGLUGrad", "dup", len(dup), len(gate))
	checkLen("SwiGLUGrad", "dy", len(dy), len(gate))
	checkLen("SwiGLUGrad", "up", len(up), len(gate))
	if shareLoop(len(gate)) {
		finishLoop(&loop{part: swiGLUGradPart, n: len(gate), chunk: loopChunk, a: dgate, b: dup, c: dy, d: gate, e: up})
		return
	}
	swiGLUGrad(dgate, dup, dy, gate, up)
}

func swiGLUGradPart(q *loop, from, to int) {
	swiGLUGrad(q.a[from:to], q.b[from:to], q.c[from:to], q.d[from:to], q.e[from:to])
}

func swiGLUGrad(dgate, dup, dy, gate, up []float32) {
	n := len(gate)
	dgate, dup, dy, up = dgate[:n], dup[:n], dy[:n], up[:n]
	if l := active.Load().vectors; l != scalar {
		for len(gate) >= int(l) {
			n := min(len(gate), vectorChunk) / int(l)
			swiGLUGradVectors(l, &dgate[0], &dup[0], &dy[0], &gate[0], &up[0], n)
			n *= int(l)
			dgate, dup, dy, gate, up = dgate[n:], dup[n:], dy[n:], gate[n:], up[n:]
		}
		if len(gate) > 0 {
			var e rowEnds
			copy(e[0][:], dy)
			copy(e[1][:], gate)
			copy(e[2][:], up)
			swiGLUGradVectors(l, &e[3][0], &e[4][0], &e[0][0], &e[1][0], &e[2][0], 1)
			copy(dgate, e[3][:])
			copy(dup, e[4][:])
		}
		return
	}
	for i, g := range gate {
		s, d, u := sigmoid(g), dy[i], up[i]
		dgate[i] = d * u * s * (1 + g*(1-s))
		dup[i] = d * g * s
	}
}
