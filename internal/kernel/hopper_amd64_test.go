//go:build !purego

package kernel

import (
	"math"
	"testing"
)

// The assembly does ordinary groups itself, and refuses those for which its scaling is not exact without touching a sum.
func TestHopperRefuses(t *testing.T) {
	type routine struct {
		name       string
		rows, cols int
		add        func(k int, a, b, sums *float32) bool
	}
	routines := map[string][]routine{
		"avx512": {{"hopper4x32AVX512", 4, 32, hopper4x32AVX512}, {"hopper1x32AVX512", 1, 32, hopper1x32AVX512}},
		"avx2":   {{"hopper4x8AVX2", 4, 8, hopper4x8AVX2}, {"hopper1x8AVX2", 1, 8, hopper1x8AVX2}},
	}
	inf := float32(math.Inf(1))
	for _, name := range Impls() {
		for _, r := range routines[name] {
			for _, c := range []struct {
				a, b, sum float32 // of one element
				ok        bool
			}{
				{0, 0, 0, true}, {3, -5, 7, true}, {0, 0, -7, true}, {0x1p-60, 0x1p-53, 0, true}, {0x1p-60, 0x1p-149, 0x1p-113, true},
				{0x1p63, 0x1p63, 0, true}, {0x1p-60, 0x1p-54, 0, false}, {0x1p-60, 0x1p-89, 0, false}, {0, 0, 0x1p-114, false},
				{0x1p64, -0x1p64, 0, false}, {0, inf, 0, false}, {inf, 1, 0, false}, {float32(math.NaN()), 1, 0, false},
				{1, float32(math.NaN()), 0, false}, {0, 0, -inf, false}, {0, 0, float32(math.NaN()), false},
			} {
				// Groups of ones, but for one element, which has one product, and the row and column that cross in it.
				a, b, sums := make([]float32, r.rows*scaledDepth), make([]float32, hopperGroup*scaledWidth), make([]float32, r.rows*scaledWidth)
				row, col, step := r.rows-1, r.cols-3, 17
				for i := range a {
					a[i] = float32(btoi(i/scaledDepth != row && i%scaledDepth != step))
				}
				for i := range b {
					b[i] = float32(btoi(i%scaledWidth != col && i/scaledWidth != step))
				}
				a[row*scaledDepth+step], b[step*scaledWidth+col], sums[row*scaledWidth+col] = c.a, c.b, c.sum
				before := append([]float32(nil), sums...)
				if got := r.add(hopperGroup, &a[0], &b[0], &sums[0]); got != c.ok {
					t.Errorf("%s of %v * %v + %v: %v, want %v", r.name, c.a, c.b, c.sum, got, c.ok)
				}
				if !c.ok {
					sameBits(t, r.name, sums, before)
				}
			}
		}
	}
}
