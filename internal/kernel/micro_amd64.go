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
			rows: 14, cols: 32, narrow: 16, lanes: 16, byRows: &rowsAVX512, byCols: &colsAVX512,
			transpose: transposeAVX512, copyRows: copyRowsAVX512, peak: peakAVX512,
			runScaled: runScaledAVX512, prefetch: prefetchLines,
			hopper: hopperRoutines{addHopperAVX512, promoteHopperAVX512},
		}})
	}
	if x.HasAVX2 && x.HasFMA {
		list = append(list, impl{name: "avx2", vectors: lanes8, micro: &micro{
			rows: 6, cols: 16, narrow: 8, lanes: 8, byRows: &rowsAVX2, byCols: &colsAVX2,
			transpose: transposeAVX2, copyRows: copyRowsAVX2, peak: peakAVX2,
			runScaled: runScaledAVX2, prefetch: prefetchLines,
			hopper: hopperRoutines{addHopperAVX2, promoteHopperAVX2},
		}})
	}
	return list
}

// down moves a pointer by n values.
func down(p *float32, n int) *float32 { return (*float32)(unsafe.Add(unsafe.Pointer(p), 4*n)) }

var rowsAVX512 = tiles{
	1:  {gemmRows1x32AVX512, gemmRows1x16AVX512},
	2:  {gemmRows2x32AVX512, gemmRows2x16AVX512},
	3:  {gemmRows3x32AVX512, gemmRows3x16AVX512},
	4:  {gemmRows4x32AVX512, gemmRows4x16AVX512},
	5:  {gemmRows5x32AVX512, gemmRows5x16AVX512},
	6:  {gemmRows6x32AVX512, gemmRows6x16AVX512},
	7:  {gemmRows7x32AVX512, gemmRows7x16AVX512},
	8:  {gemmRows8x32AVX512, gemmRows8x16AVX512},
	9:  {gemmRows9x32AVX512, gemmRows9x16AVX512},
	10: {gemmRows10x32AVX512, gemmRows10x16AVX512},
	11: {gemmRows11x32AVX512, gemmRows11x16AVX512},
	12: {gemmRows12x32AVX512, gemmRows12x16AVX512},
	13: {gemmRows13x32AVX512, gemmRows13x16AVX512},
	14: {gemmRows14x32AVX512, gemmRows14x16AVX512},
}

var colsAVX512 = tiles{
	1:  {gemmCols1x32AVX512, gemmCols1x16AVX512},
	2:  {gemmCols2x32AVX512, gemmCols2x16AVX512},
	3:  {gemmCols3x32AVX512, gemmCols3x16AVX512},
	4:  {gemmCols4x32AVX512, gemmCols4x16AVX512},
	5:  {gemmCols5x32AVX512, gemmCols5x16AVX512},
	6:  {gemmCols6x32AVX512, gemmCols6x16AVX512},
	7:  {gemmCols7x32AVX512, gemmCols7x16AVX512},
	8:  {gemmCols8x32AVX512, gemmCols8x16AVX512},
	9:  {gemmCols9x32AVX512, gemmCols9x16AVX512},
	10: {gemmCols10x32AVX512, gemmCols10x16AVX512},
	11: {gemmCols11x32AVX512, gemmCols11x16AVX512},
	12: {gemmCols12x32AVX512, gemmCols12x16AVX512},
	13: {gemmCols13x32AVX512, gemmCols13x16AVX512},
	14: {gemmCols14x32AVX512, gemmCols14x16AVX512},
}

var rowsAVX2 = tiles{
	1: {gemmRows1x16AVX2, gemmRows1x8AVX2},
	2: {gemmRows2x16AVX2, gemmRows2x8AVX2},
	3: {gemmRows3x16AVX2, gemmRows3x8AVX2},
	4: {gemmRows4x16AVX2, gemmRows4x8AVX2},
	5: {gemmRows5x16AVX2, gemmRows5x8AVX2},
	6: {gemmRows6x16AVX2, gemmRows6x8AVX2},
}

var colsAVX2 = tiles{
	1: {gemmCols1x16AVX2, gemmCols1x8AVX2},
	2: {gemmCols2x16AVX2, gemmCols2x8AVX2},
	3: {gemmCols3x16AVX2, gemmCols3x8AVX2},
	4: {gemmCols4x16AVX2, gemmCols4x8AVX2},
	5: {gemmCols5x16AVX2, gemmCols5x8AVX2},
	6: {gemmCols6x16AVX2, gemmCols6x8AVX2},
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
