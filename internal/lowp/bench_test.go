package lowp

import (
	"fmt"
	"math"
	"math/rand/v2"
	"testing"
	"time"
)

// fastest runs f until the benchmark is over and reports the bytes of float32 of the fastest call, per second: on a
// shared machine a mean measures the neighbours.
func fastest(b *testing.B, values int, f func()) {
	f()
	best := time.Duration(math.MaxInt64)
	for b.Loop() {
		begin := time.Now()
		for range 16 {
			f()
		}
		best = min(best, time.Since(begin)/16)
	}
	b.ReportMetric(4*float64(values)/float64(best.Nanoseconds()), "GB/s")
	b.ReportMetric(16*float64(best.Nanoseconds())/float64(values), "ns/16")
}

func randomFloats(seed uint64, n int) []float32 {
	r := rand.New(rand.NewPCG(seed, 3))
	x := make([]float32, n)
	for i := range x {
		x[i] = float32(r.NormFloat64())
	}
	return x
}

// BenchmarkRows compares the loops with a copy of the same floats, in a first-level cache.
func BenchmarkRows(b *testing.B) {
	const n = 4096
	x, y := randomFloats(1, n), make([]float32, n)
	b.Run("copy", func(b *testing.B) { fastest(b, n, func() { copy(y, x) }) })
	for _, impl := range Impls() {
		restore, _ := Use(impl)
		for _, f := range formats {
			row := make([]byte, f.RowBytes(n))
			scale := []float32{2}
			b.Run(fmt.Sprintf("encode/%v/%s", f, impl), func(b *testing.B) {
				fastest(b, n, func() { codes{f: f, b: row}.encode(x, 0, scale, 0, 1, n) })
			})
			b.Run(fmt.Sprintf("decode/%v/%s", f, impl), func(b *testing.B) {
				fastest(b, n, func() { codes{f: f, b: row}.decode(y, 0, scale, 0, 1, n) })
			})
		}
		amax := make([]uint32, n)
		b.Run("amaxTiles/"+impl, func(b *testing.B) {
			fastest(b, n, func() { amaxTiles(amax[:n/128], x, 0, 1, n, 128) })
		})
		b.Run("amaxCols/"+impl, func(b *testing.B) {
			fastest(b, n, func() { amaxCols(amax[:128], x, 128, n/128, 128) })
		})
		restore()
	}
}

// The tilings in use.
var (
	perToken  = Quant{Format: E4M3, Scale: ScaleF32, TileRows: 1, TileCols: 128}
	perBlock  = Quant{Format: E4M3, Scale: ScaleF32, TileRows: 128, TileCols: 128}
	perColumn = Quant{Format: E4M3, Scale: ScaleF32, TileRows: 128, TileCols: 1}
	perTensor = Quant{Format: E4M3, Scale: ScaleF32}
	mx        = Quant{Format: E4M3, Scale: ScaleE8M0, TileRows: 1, TileCols: 32}
	mxCols    = Quant{Format: E4M3, Scale: ScaleE8M0, TileRows: 32, TileCols: 1}
	attention = Quant{Format: E5M6, Scale: ScalePow2, TileRows: 1, TileCols: 128}
	bfloat    = Quant{Format: BF16}
)

// BenchmarkMatrix quantises, dequantises and requantises 512 x 1024 values, next to a copy of the floats.
func BenchmarkMatrix(b *testing.B) {
	const rows, cols = 512, 1024
	x, y := randomFloats(2, rows*cols), make([]float32, rows*cols)
	b.Run("copy", func(b *testing.B) { fastest(b, rows*cols, func() { copy(y, x) }) })
	for _, impl := range Impls()[:max(1, len(Impls())-1)] {
		restore, _ := Use(impl)
		for _, q := range []Quant{perToken, perBlock, perColumn, perTensor, mx, attention, bfloat} {
			m := New(q, rows, cols, nil)
			b.Run(fmt.Sprintf("quantize/%v/%s", q, impl), func(b *testing.B) { fastest(b, rows*cols, func() { Quantize(m, x, cols) }) })
			b.Run(fmt.Sprintf("dequantize/%v/%s", q, impl), func(b *testing.B) { fastest(b, rows*cols, func() { Dequantize(y, cols, m) }) })
		}
		from, to := New(perToken, rows, cols, nil), New(perColumn, rows, cols, nil)
		Quantize(from, x, cols)
		b.Run("requantize/1x128 to 128x1/"+impl, func(b *testing.B) { fastest(b, rows*cols, func() { Requantize(to, from) }) })
		restore()
	}
}
