//go:build !purego

package lowp

import "golang.org/x/sys/cpu"

// vectorImpls returns the implementations in assembly that this processor (and its operating system) can run, best
// first, under the names and conditions of package kernel. This is the only place that asks for features.
func vectorImpls() []impl {
	var list []impl
	x := &cpu.X86
	if !x.HasAVX2 || !x.HasF16C || !x.HasFMA {
		return nil
	}
	if x.HasAVX512F && x.HasAVX512DQ && x.HasAVX512BW && x.HasAVX512VL {
		list = append(list, impl{name: "avx512", vectors: lanes16})
	}
	return append(list, impl{name: "avx2", vectors: lanes8})
}

// The vector routines, called directly: through function values the stack buffers for scales would move to the heap. l is
// never scalar here.

// decodeVectors takes no notice of the scales for BF16.
func decodeVectors(l lanes, f Format, dst *float32, ld int, src *byte, stride int, scales *float32, step, blocks, rows int) {
	if l == lanes16 {
		switch f {
		case E4M3:
			decodeE4M3AVX512(dst, ld, src, stride, scales, step, blocks, rows)
		case E5M2:
			decodeE5M2AVX512(dst, ld, src, stride, scales, step, blocks, rows)
		case E5M6:
			decodeE5M6AVX512(dst, ld, src, stride, scales, step, blocks, rows)
		case BF16:
			decodeBF16AVX512(dst, ld, src, stride, blocks, rows)
		}
		return
	}
	switch f {
	case E4M3:
		decodeE4M3AVX2(dst, ld, src, stride, scales, step, blocks, rows)
	case E5M2:
		decodeE5M2AVX2(dst, ld, src, stride, scales, step, blocks, rows)
	case E5M6:
		decodeE5M6AVX2(dst, ld, src, stride, scales, step, blocks, rows)
	case BF16:
		decodeBF16AVX2(dst, ld, src, stride, blocks, rows)
	}
}

func decodeColsVectors(l lanes, f Format, dst *float32, ld int, src *byte, stride int, scales *float32, blocks, rows int) {
	if l == lanes16 {
		switch f {
		case E4M3:
			decodeE4M3ColsAVX512(dst, ld, src, stride, scales, blocks, rows)
		case E5M2:
			decodeE5M2ColsAVX512(dst, ld, src, stride, scales, blocks, rows)
		case E5M6:
			decodeE5M6ColsAVX512(dst, ld, src, stride, scales, blocks, rows)
		case BF16:
			decodeBF16AVX512(dst, ld, src, stride, blocks, rows)
		}
		return
	}
	switch f {
	case E4M3:
		decodeE4M3ColsAVX2(dst, ld, src, stride, scales, blocks, rows)
	case E5M2:
		decodeE5M2ColsAVX2(dst, ld, src, stride, scales, blocks, rows)
	case E5M6:
		decodeE5M6ColsAVX2(dst, ld, src, stride, scales, blocks, rows)
	case BF16:
		decodeBF16AVX2(dst, ld, src, stride, blocks, rows)
	}
}

// encodeVectors takes no notice of the scales for BF16.
func encodeVectors(l lanes, f Format, dst *byte, stride int, src *float32, ld int, scales *float32, step, blocks, rows int) {
	if l == lanes16 {
		switch f {
		case E4M3:
			encodeE4M3AVX512(dst, stride, src, ld, scales, step, blocks, rows)
		case E5M2:
			encodeE5M2AVX512(dst, stride, src, ld, scales, step, blocks, rows)
		case E5M6:
			encodeE5M6AVX512(dst, stride, src, ld, scales, step, blocks, rows)
		case BF16:
			encodeBF16AVX512(dst, stride, src, ld, blocks, rows)
		}
		return
	}
	switch f {
	case E4M3:
		encodeE4M3AVX2(dst, stride, src, ld, scales, step, blocks, rows)
	case E5M2:
		encodeE5M2AVX2(dst, stride, src, ld, scales, step, blocks, rows)
	case E5M6:
		encodeE5M6AVX2(dst, stride, src, ld, scales, step, blocks, rows)
	case BF16:
		encodeBF16AVX2(dst, stride, src, ld, blocks, rows)
	}
}

func encodeColsVectors(l lanes, f Format, dst *byte, stride int, src *float32, ld int, scales *float32, blocks, rows int) {
	if l == lanes16 {
		switch f {
		case E4M3:
			encodeE4M3ColsAVX512(dst, stride, src, ld, scales, blocks, rows)
		case E5M2:
			encodeE5M2ColsAVX512(dst, stride, src, ld, scales, blocks, rows)
		case E5M6:
			encodeE5M6ColsAVX512(dst, stride, src, ld, scales, blocks, rows)
		case BF16:
			encodeBF16AVX512(dst, stride, src, ld, blocks, rows)
		}
		return
	}
	switch f {
	case E4M3:
		encodeE4M3ColsAVX2(dst, stride, src, ld, scales, blocks, rows)
	case E5M2:
		encodeE5M2ColsAVX2(dst, stride, src, ld, scales, blocks, rows)
	case E5M6:
		encodeE5M6ColsAVX2(dst, stride, src, ld, scales, blocks, rows)
	case BF16:
		encodeBF16AVX2(dst, stride, src, ld, blocks, rows)
	}
}

func amaxTilesVectors(l lanes, amax *uint32, step int, src *float32, ld, blocks, rows int) {
	if l == lanes16 {
		amaxTilesAVX512(amax, step, src, ld, blocks, rows)
	} else {
		amaxTilesAVX2(amax, step, src, ld, blocks, rows)
	}
}

func amaxColsVectors(l lanes, amax *uint32, src *float32, ld, blocks, rows int) {
	if l == lanes16 {
		amaxColsAVX512(amax, src, ld, blocks, rows)
	} else {
		amaxColsAVX2(amax, src, ld, blocks, rows)
	}
}
