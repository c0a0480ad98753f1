//go:build !purego

package kernel

// The vector routines of an implementation, called directly: through function values the stack buffers for row ends
// would move to the heap. l is the active implementation's vector length, never scalar here.

func expVectors(l lanes, dst, src *float32, factor, shift float32, sums *float32, vectors int) {
	if l == lanes16 {
		expAVX512(dst, src, factor, shift, sums, vectors)
	} else {
		expAVX2(dst, src, factor, shift, sums, vectors)
	}
}

func maxVectors(l lanes, tops, src *float32, vectors int) {
	if l == lanes16 {
		maxAVX512(tops, src, vectors)
	} else {
		maxAVX2(tops, src, vectors)
	}
}

func swiGLUVectors(l lanes, dst, gate, up *float32, vectors int) {
	if l == lanes16 {
		swiGLUAVX512(dst, gate, up, vectors)
	} else {
		swiGLUAVX2(dst, gate, up, vectors)
	}
}

func swiGLUGradVectors(l lanes, dgate, dup, dy, gate, up *float32, vectors int) {
	if l == lanes16 {
		swiGLUGradAVX512(dgate, dup, dy, gate, up, vectors)
	} else {
		swiGLUGradAVX2(dgate, dup, dy, gate, up, vectors)
	}
}

func adamWVectors(l lanes, scalars, w, g, m, v *float32, vectors int) {
	if l == lanes16 {
		adamWAVX512(scalars, w, g, m, v, vectors)
	} else {
		adamWAVX2(scalars, w, g, m, v, vectors)
	}
}
