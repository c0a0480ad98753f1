//go:build !purego

package kernel

// runScaledAVX512 is micro.runScaled: a whole tile by one routine, a lower one in strips of 8, 4, 2 and 1 rows.
func runScaledAVX512(rows, cols, k int, a, b, c *float32, ldc int, rowScale, colScale *float32, accumulate bool) {
	wide := cols == 32
	for {
		n := 1
		switch {
		case rows >= 14:
			n = 14
			if wide {
				scaled14x32AVX512(k, a, b, c, ldc, rowScale, colScale, accumulate)
			} else {
				scaled14x16AVX512(k, a, b, c, ldc, rowScale, colScale, accumulate)
			}
		case rows >= 8:
			n = 8
			if wide {
				scaled8x32AVX512(k, a, b, c, ldc, rowScale, colScale, accumulate)
			} else {
				scaled8x16AVX512(k, a, b, c, ldc, rowScale, colScale, accumulate)
			}
		case rows >= 4:
			n = 4
			if wide {
				scaled4x32AVX512(k, a, b, c, ldc, rowScale, colScale, accumulate)
			} else {
				scaled4x16AVX512(k, a, b, c, ldc, rowScale, colScale, accumulate)
			}
		case rows >= 2:
			n = 2
			if wide {
				scaled2x32AVX512(k, a, b, c, ldc, rowScale, colScale, accumulate)
			} else {
				scaled2x16AVX512(k, a, b, c, ldc, rowScale, colScale, accumulate)
			}
		case wide:
			scaled1x32AVX512(k, a, b, c, ldc, rowScale, colScale, accumulate)
		default:
			scaled1x16AVX512(k, a, b, c, ldc, rowScale, colScale, accumulate)
		}
		if rows -= n; rows == 0 {
			return
		}
		a, c, rowScale = down(a, n*scaledDepth), down(c, n*ldc), down(rowScale, n)
	}
}

// runScaledAVX2 is micro.runScaled: a whole tile by one routine, a lower one in strips of 4, 2 and 1 rows.
func runScaledAVX2(rows, cols, k int, a, b, c *float32, ldc int, rowScale, colScale *float32, accumulate bool) {
	wide := cols == 16
	for {
		n := 1
		switch {
		case rows >= 6:
			n = 6
			if wide {
				scaled6x16AVX2(k, a, b, c, ldc, rowScale, colScale, accumulate)
			} else {
				scaled6x8AVX2(k, a, b, c, ldc, rowScale, colScale, accumulate)
			}
		case rows >= 4:
			n = 4
			if wide {
				scaled4x16AVX2(k, a, b, c, ldc, rowScale, colScale, accumulate)
			} else {
				scaled4x8AVX2(k, a, b, c, ldc, rowScale, colScale, accumulate)
			}
		case rows >= 2:
			n = 2
			if wide {
				scaled2x16AVX2(k, a, b, c, ldc, rowScale, colScale, accumulate)
			} else {
				scaled2x8AVX2(k, a, b, c, ldc, rowScale, colScale, accumulate)
			}
		case wide:
			scaled1x16AVX2(k, a, b, c, ldc, rowScale, colScale, accumulate)
		default:
			scaled1x8AVX2(k, a, b, c, ldc, rowScale, colScale, accumulate)
		}
		if rows -= n; rows == 0 {
			return
		}
		a, c, rowScale = down(a, n*scaledDepth), down(c, n*ldc), down(rowScale, n)
	}
}
