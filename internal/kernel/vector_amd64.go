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

func adamWBF16Vectors(l lanes, scalars, w, g *float32, m, v *uint16, vectors int) {
	if l == lanes16 {
		adamWBF16AVX512(scalars, w, g, m, v, vectors)
	} else {
		adamWBF16AVX2(scalars, w, g, m, v, vectors)
	}
}

func addVectors(l lanes, dst, src *float32, vectors int) {
	if l == lanes16 {
		addAVX512(dst, src, vectors)
	} else {
		addAVX2(dst, src, vectors)
	}
}

func axpyVectors(l lanes, dst *float32, a float32, src *float32, vectors int) {
	if l == lanes16 {
		axpyAVX512(dst, a, src, vectors)
	} else {
		axpyAVX2(dst, a, src, vectors)
	}
}

func scaledVectors(l lanes, dst *float32, a float32, src *float32, vectors int) {
	if l == lanes16 {
		scaledAVX512(dst, a, src, vectors)
	} else {
		scaledAVX2(dst, a, src, vectors)
	}
}

func finiteVectors(l lanes, sums, src *float32, vectors int) {
	if l == lanes16 {
		finiteAVX512(sums, src, vectors)
	} else {
		finiteAVX2(sums, src, vectors)
	}
}

func maxRowsVectors(l lanes, tops, x *float32, ld, rows, vectors int) {
	if l == lanes16 {
		maxRowsAVX512(tops, x, ld, rows, vectors)
	} else {
		maxRowsAVX2(tops, x, ld, rows, vectors)
	}
}

func expRowsVectors(l lanes, sums, x, shift *float32, ld, rows, vectors int) {
	if l == lanes16 {
		expRowsAVX512(sums, x, shift, ld, rows, vectors)
	} else {
		expRowsAVX2(sums, x, shift, ld, rows, vectors)
	}
}

func gradRowsVectors(l lanes, p, ds, lse, d *float32, ld, rows, vectors int) {
	if l == lanes16 {
		gradRowsAVX512(p, ds, lse, d, ld, rows, vectors)
	} else {
		gradRowsAVX2(p, ds, lse, d, ld, rows, vectors)
	}
}

func scaleRowsVectors(l lanes, dst *float32, lddst int, src *float32, ldsrc int, factors *float32, rows, vectors int) {
	if l == lanes16 {
		scaleRowsAVX512(dst, lddst, src, ldsrc, factors, rows, vectors)
	} else {
		scaleRowsAVX2(dst, lddst, src, ldsrc, factors, rows, vectors)
	}
}

func rmsNormVectors(l lanes, dst, src, gain *float32, rstd float32, vectors int) {
	if l == lanes16 {
		rmsNormAVX512(dst, src, gain, rstd, vectors)
	} else {
		rmsNormAVX2(dst, src, gain, rstd, vectors)
	}
}

func rmsNormGradVectors(l lanes, dx, dgain, dy, x, gain *float32, rstd, mean float32, vectors int) {
	if l == lanes16 {
		rmsNormGradAVX512(dx, dgain, dy, x, gain, rstd, mean, vectors)
	} else {
		rmsNormGradAVX2(dx, dgain, dy, x, gain, rstd, mean, vectors)
	}
}

func sumSquaresVectors(l lanes, sums *float64, x *float32, blocks int) {
	if l == lanes16 {
		sumSquaresAVX512(sums, x, blocks)
	} else {
		sumSquaresAVX2(sums, x, blocks)
	}
}

func dotVectors(l lanes, sums *float64, x, y *float32, blocks int) {
	if l == lanes16 {
		dotAVX512(sums, x, y, blocks)
	} else {
		dotAVX2(sums, x, y, blocks)
	}
}

func dotWeightedVectors(l lanes, sums *float64, x, y, gain *float32, blocks int) {
	if l == lanes16 {
		dotWeightedAVX512(sums, x, y, gain, blocks)
	} else {
		dotWeightedAVX2(sums, x, y, gain, blocks)
	}
}
