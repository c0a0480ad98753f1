package kernel

import "math"

// RMSNorm sets dst = src * rstd * gain per row of cols values, with rstd[r] = 1/sqrt(mean(src_r^2)+eps) (Zhang and
// Sennrich, Root Mean Square Layer Normalization, 2019). dst may be src. rstd has a value per row.
func RMSNorm(dst, src, gain, rstd []float32, cols int, eps float32) {
	rows := checkRows("RMSNorm", len(src), cols)
	checkLen("RMSNorm", "dst", len(dst), len(src))
	checkLen("RMSNorm", "gain", len(gain), cols)
	checkLen("RMSNorm", "rstd", len(rstd), rows)
	gain = gain[:cols]
	for r := range rstd[:rows] {
		x, y := src[r*cols:(r+1)*cols], dst[r*cols:(r+1)*cols]
		inv := float32(1 / math.Sqrt(SumSquares(x)/float64(cols)+float64(eps)))
		rstd[r] = inv
		y = y[:len(x)]
		for i, v := range x {
			y[i] = v * inv * gain[i]
		}
	}
}

// RMSNormGrad is the backward of RMSNorm: it overwrites dx with the gradient of the input and adds the gradient of the
// gain to dgain, rows in order. x and rstd are those of the forward; dx may be dy. With h = x*rstd and g = dy*gain:
//
//	dx    = rstd * (g - h*mean(g*h))
//	dgain += dy*h
func RMSNormGrad(dx, dgain, dy, x, gain, rstd []float32, cols int) {
	rows := checkRows("RMSNormGrad", len(x), cols)
	checkLen("RMSNormGrad", "dx", len(dx), len(x))
	checkLen("RMSNormGrad", "dy", len(dy), len(x))
	checkLen("RMSNormGrad", "gain", len(gain), cols)
	checkLen("RMSNormGrad", "dgain", len(dgain), cols)
	checkLen("RMSNormGrad", "rstd", len(rstd), rows)
	gain, dgain = gain[:cols], dgain[:cols]
	for r, inv := range rstd[:rows] {
		xr, dyr, dxr := x[r*cols:(r+1)*cols], dy[r*cols:(r+1)*cols], dx[r*cols:(r+1)*cols]
		var dot float64
		for i, v := range xr {
			dot += float64(dyr[i]*gain[i]) * float64(v)
		}
		// mean(g*h)*rstd, so that the inner loop multiplies x itself.
		mean := float32(dot * float64(inv) * float64(inv) / float64(cols))
		for i, v := range xr {
			d := dyr[i]
			dgain[i] += d * (v * inv)
			dxr[i] = inv * (d*gain[i] - v*mean)
		}
	}
}
