package kernel

import (
	"fmt"
	"math"
	"testing"
	"time"
)

// benchProduct reports the fastest call, and its share of the fastest window of the register-only loop measured just
// before and after: on a shared machine a mean measures the neighbours.
func benchProduct(b *testing.B, l Layout, m, n, k int) {
	a, bb, c := randomMat(1, m*k), randomMat(2, k*n), make([]float32, m*n)
	lda, ldb := k, n
	switch l {
	case NT:
		ldb = k
	case TN:
		lda = m
	}
	run := func() { Gemm(l, m, n, k, 1, a, lda, bb, ldb, 0, c, n) }
	run()
	peak, best := PeakGFLOPS(1, 20), time.Duration(math.MaxInt64)
	for b.Loop() {
		begin := time.Now()
		run()
		best = min(best, time.Since(begin))
	}
	peak = max(peak, PeakGFLOPS(1, 20))
	rate := 2 * float64(m) * float64(n) * float64(k) / best.Seconds() / 1e9
	b.ReportMetric(rate, "GFLOP/s")
	b.ReportMetric(rate/peak, "of-peak")
}

// BenchmarkGemm runs every implementation and layout on a square product and on shapes of training, decoding and
// attention.
func BenchmarkGemm(b *testing.B) {
	for _, impl := range Impls() {
		for _, s := range [][3]int{{1024, 1024, 1024}, {2048, 1024, 384}, {2048, 384, 1024}, {384, 1024, 2048},
			{128, 256, 384}, {128, 384, 256}, {20, 256, 384}, {1, 1024, 384}, {64, 256, 48}, {256, 48, 64}} {
			for l, name := range []string{"NN", "NT", "TN"} {
				b.Run(fmt.Sprintf("%s/%s/%dx%dx%d", impl, name, s[0], s[1], s[2]), func(b *testing.B) {
					restore, _ := Use(impl)
					defer restore()
					benchProduct(b, Layout(l), s[0], s[1], s[2])
				})
			}
		}
	}
}

// benchEach runs a benchmark once per implementation and reports the time per value.
func benchEach(b *testing.B, values int, f func()) {
	for _, name := range Impls() {
		b.Run(name, func(b *testing.B) {
			restore, _ := Use(name)
			defer restore()
			f()
			best := time.Duration(math.MaxInt64)
			for b.Loop() {
				begin := time.Now()
				f()
				best = min(best, time.Since(begin))
			}
			b.ReportMetric(float64(best.Nanoseconds())/float64(values), "ns/value")
		})
	}
}

func BenchmarkSoftmax(b *testing.B) {
	x, y := randomMat(1, 64*1024), make([]float32, 64*1024)
	benchEach(b, len(x), func() { Softmax(y, x, 1024) })
}

func BenchmarkSwiGLU(b *testing.B) {
	g, u, y := randomMat(1, 1<<16), randomMat(2, 1<<16), make([]float32, 1<<16)
	benchEach(b, len(g), func() { SwiGLU(y, g, u) })
}

func BenchmarkSwiGLUGrad(b *testing.B) {
	g, u, dy := randomMat(1, 1<<16), randomMat(2, 1<<16), randomMat(3, 1<<16)
	dg, du := make([]float32, 1<<16), make([]float32, 1<<16)
	benchEach(b, len(g), func() { SwiGLUGrad(dg, du, dy, g, u) })
}

func BenchmarkAdamW(b *testing.B) {
	w, g, m, v := randomMat(1, 1<<16), randomMat(2, 1<<16), make([]float32, 1<<16), make([]float32, 1<<16)
	a := AdamWArgs{LR: 1e-3, Beta1: 0.9, Beta2: 0.95, Eps: 1e-8, Decay: 0.1, GradScale: 1, Step: 10}
	benchEach(b, len(w), func() { AdamW(a, w, g, m, v) })
}

func BenchmarkRMSNorm(b *testing.B) {
	x, y, gain, rstd := randomMat(1, 1<<16), make([]float32, 1<<16), randomMat(2, 256), make([]float32, 256)
	benchEach(b, len(x), func() { RMSNorm(y, x, gain, rstd, 256, 1e-6) })
}

// BenchmarkAttention runs a head forward and backward; a value is a pair of query and key at or before it.
func BenchmarkAttention(b *testing.B) {
	for _, T := range []int{256, 1024} {
		const DQ, DV = 48, 32
		a := newAttentionCase(1, T, DQ, DV, 0).attention()
		dO, dQ, dK, dV := randomMat(2, T*DV), make([]float32, T*DQ), make([]float32, T*DQ), make([]float32, T*DV)
		b.Run(fmt.Sprint("forward/", T), func(b *testing.B) { benchEach(b, T*(T+1)/2, a.Forward) })
		b.Run(fmt.Sprint("backward/", T), func(b *testing.B) {
			benchEach(b, T*(T+1)/2, func() { a.Backward(dO, DV, dQ, DQ, dK, DQ, dV, DV) })
		})
	}
}

// BenchmarkGroupedGemm is the expert layer of a fine-grained model: 64 experts, uneven rows, 128 on average.
func BenchmarkGroupedGemm(b *testing.B) {
	const experts, n, k = 64, 256, 384
	rows, total := make([]int, experts), 0
	w := make([][]float32, experts)
	for e := range rows {
		rows[e] = 4 * (e + 1)
		total += rows[e]
		w[e] = randomMat(uint64(e), n*k)
	}
	a, c := randomMat(1, total*k), make([]float32, total*n)
	for _, name := range Impls() {
		b.Run(name, func(b *testing.B) {
			restore, _ := Use(name)
			defer restore()
			peak, best := PeakGFLOPS(1, 20), time.Duration(math.MaxInt64)
			for b.Loop() {
				begin := time.Now()
				GroupedGemm(NT, rows, n, k, a, w, 0, c)
				best = min(best, time.Since(begin))
			}
			rate := 2 * float64(total) * n * k / best.Seconds() / 1e9
			b.ReportMetric(rate, "GFLOP/s")
			b.ReportMetric(rate/max(peak, PeakGFLOPS(1, 20)), "of-peak")
		})
	}
}
