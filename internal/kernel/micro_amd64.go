//go:build !purego

package kernel

import (
	"unsafe"

	"golang.org/x/sys/cpu"
)

// vectorImpls returns the implementations in assembly that this processor (and its operating system) can run, best
// first. This is the only place that asks for features.
func vectorImpls() []impl {
	var list []impl
	x := &cpu.X86
	if x.HasAVX512F && x.HasAVX512DQ && x.HasAVX512BW && x.HasAVX512VL {
		list = append(list, impl{name: "avx512", vectors: lanes16, micro: &micro{
			rows: 14, cols: 32, narrow: 16, lanes: 16,
			run: runAVX512, runRows: runRowsAVX512, transpose: transposeAVX512, copyRows: copyRowsAVX512, peak: peakAVX512,
		}})
	}
	if x.HasAVX2 && x.HasFMA {
		list = append(list, impl{name: "avx2", vectors: lanes8, micro: &micro{
			rows: 6, cols: 16, narrow: 8, lanes: 8,
			run: runAVX2, runRows: runRowsAVX2, transpose: transposeAVX2, copyRows: copyRowsAVX2, peak: peakAVX2,
		}})
	}
	return list
}

// down moves a pointer by n values.
func down(p *float32, n int) *float32 { return (*float32)(unsafe.Add(unsafe.Pointer(p), 4*n)) }

// runAVX512 is micro.run: a whole tile by one routine, a lower one in strips of 8, 4, 2 and 1 rows.
func runAVX512(rows, cols, k int, a, b *float32, ldb int, c *float32, ldc int, alpha, beta float32) {
	wide := cols == 32
	for rows > 0 {
		n := 1
		switch {
		case rows >= 14:
			n = 14
			if wide {
				gemm14x32AVX512(k, a, b, ldb, c, ldc, alpha, beta)
			} else {
				gemm14x16AVX512(k, a, b, ldb, c, ldc, alpha, beta)
			}
		case rows >= 8:
			n = 8
			if wide {
				gemm8x32AVX512(k, a, b, ldb, c, ldc, alpha, beta)
			} else {
				gemm8x16AVX512(k, a, b, ldb, c, ldc, alpha, beta)
			}
		case rows >= 4:
			n = 4
			if wide {
				gemm4x32AVX512(k, a, b, ldb, c, ldc, alpha, beta)
			} else {
				gemm4x16AVX512(k, a, b, ldb, c, ldc, alpha, beta)
			}
		case rows >= 2:
			n = 2
			if wide {
				gemm2x32AVX512(k, a, b, ldb, c, ldc, alpha, beta)
			} else {
				gemm2x16AVX512(k, a, b, ldb, c, ldc, alpha, beta)
			}
		case wide:
			gemm1x32AVX512(k, a, b, ldb, c, ldc, alpha, beta)
		default:
			gemm1x16AVX512(k, a, b, ldb, c, ldc, alpha, beta)
		}
		if rows -= n; rows > 0 {
			a, c = down(a, n), down(c, n*ldc)
		}
	}
}

// runRowsAVX512 is micro.runRows: a whole tile by one routine, a lower one in strips of 8, 4, 2 and 1 rows.
func runRowsAVX512(rows, cols, k int, a *float32, lda int, b *float32, ldb int, c *float32, ldc int, alpha, beta float32) {
	wide := cols == 32
	for rows > 0 {
		n := 1
		switch {
		case rows >= 14:
			n = 14
			if wide {
				gemmRows14x32AVX512(k, a, lda, b, ldb, c, ldc, alpha, beta)
			} else {
				gemmRows14x16AVX512(k, a, lda, b, ldb, c, ldc, alpha, beta)
			}
		case rows >= 8:
			n = 8
			if wide {
				gemmRows8x32AVX512(k, a, lda, b, ldb, c, ldc, alpha, beta)
			} else {
				gemmRows8x16AVX512(k, a, lda, b, ldb, c, ldc, alpha, beta)
			}
		case rows >= 4:
			n = 4
			if wide {
				gemmRows4x32AVX512(k, a, lda, b, ldb, c, ldc, alpha, beta)
			} else {
				gemmRows4x16AVX512(k, a, lda, b, ldb, c, ldc, alpha, beta)
			}
		case rows >= 2:
			n = 2
			if wide {
				gemmRows2x32AVX512(k, a, lda, b, ldb, c, ldc, alpha, beta)
			} else {
				gemmRows2x16AVX512(k, a, lda, b, ldb, c, ldc, alpha, beta)
			}
		case wide:
			gemmRows1x32AVX512(k, a, lda, b, ldb, c, ldc, alpha, beta)
		default:
			gemmRows1x16AVX512(k, a, lda, b, ldb, c, ldc, alpha, beta)
		}
		if rows -= n; rows > 0 {
			a, c = down(a, n*lda), down(c, n*ldc)
		}
	}
}

// runAVX2 is micro.run: a whole tile by one routine, a lower one in strips of 4, 2 and 1 rows.
func runAVX2(rows, cols, k int, a, b *float32, ldb int, c *float32, ldc int, alpha, beta float32) {
	wide := cols == 16
	for rows > 0 {
		n := 1
		switch {
		case rows >= 6:
			n = 6
			if wide {
				gemm6x16AVX2(k, a, b, ldb, c, ldc, alpha, beta)
			} else {
				gemm6x8AVX2(k, a, b, ldb, c, ldc, alpha, beta)
			}
		case rows >= 4:
			n = 4
			if wide {
				gemm4x16AVX2(k, a, b, ldb, c, ldc, alpha, beta)
			} else {
				gemm4x8AVX2(k, a, b, ldb, c, ldc, alpha, beta)
			}
		case rows >= 2:
			n = 2
			if wide {
				gemm2x16AVX2(k, a, b, ldb, c, ldc, alpha, beta)
			} else {
				gemm2x8AVX2(k, a, b, ldb, c, ldc, alpha, beta)
			}
		case wide:
			gemm1x16AVX2(k, a, b, ldb, c, ldc, alpha, beta)
		default:
			gemm1x8AVX2(k, a, b, ldb, c, ldc, alpha, beta)
		}
		if rows -= n; rows > 0 {
			a, c = down(a, n), down(c, n*ldc)
		}
	}
}

// runRowsAVX2 is micro.runRows: a whole tile by one routine, a lower one in strips of 4, 2 and 1 rows.
func runRowsAVX2(rows, cols, k int, a *float32, lda int, b *float32, ldb int, c *float32, ldc int, alpha, beta float32) {
	wide := cols == 16
	for rows > 0 {
		n := 1
		switch {
		case rows >= 6:
			n = 6
			if wide {
				gemmRows6x16AVX2(k, a, lda, b, ldb, c, ldc, alpha, beta)
			} else {
				gemmRows6x8AVX2(k, a, lda, b, ldb, c, ldc, alpha, beta)
			}
		case rows >= 4:
			n = 4
			if wide {
				gemmRows4x16AVX2(k, a, lda, b, ldb, c, ldc, alpha, beta)
			} else {
				gemmRows4x8AVX2(k, a, lda, b, ldb, c, ldc, alpha, beta)
			}
		case rows >= 2:
			n = 2
			if wide {
				gemmRows2x16AVX2(k, a, lda, b, ldb, c, ldc, alpha, beta)
			} else {
				gemmRows2x8AVX2(k, a, lda, b, ldb, c, ldc, alpha, beta)
			}
		case wide:
			gemmRows1x16AVX2(k, a, lda, b, ldb, c, ldc, alpha, beta)
		default:
			gemmRows1x8AVX2(k, a, lda, b, ldb, c, ldc, alpha, beta)
		}
		if rows -= n; rows > 0 {
			a, c = down(a, n*lda), down(c, n*ldc)
		}
	}
}

func copyRowsAVX512(cols int, dst *float32, lddst int, src *float32, ldsrc int, rows int) {
	if cols == 32 {
		copy32AVX512(dst, lddst, src, ldsrc, rows)
	} else {
		copy16AVX512(dst, lddst, src, ldsrc, rows)
	}
}

func copyRowsAVX2(cols int, dst *float32, lddst int, src *float32, ldsrc int, rows int) {
	if cols == 16 {
		copy16AVX2(dst, lddst, src, ldsrc, rows)
	} else {
		copy8AVX2(dst, lddst, src, ldsrc, rows)
	}
}

// The turns make a call of some 10 µs.
const (
	peakTurnsAVX512 = 3000
	peakTurnsAVX2   = 6000
)

func peakAVX512() int64 {
	fmaPeakAVX512(peakTurnsAVX512)
	return peakTurnsAVX512 * 24 * 16 * 2
}

func peakAVX2() int64 {
	fmaPeakAVX2(peakTurnsAVX2)
	return peakTurnsAVX2 * 12 * 8 * 2
}
