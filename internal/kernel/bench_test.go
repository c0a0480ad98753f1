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

// BenchmarkGemm runs every implementation and layout on square products and on shapes of decoding and attention.
func BenchmarkGemm(b *testing.B) {
	for _, impl := range Impls() {
		for _, s := range [][3]int{{1024, 1024, 1024}, {2048, 2048, 2048}, {20, 256, 384}, {1, 1024, 384}, {64, 256, 96}, {256, 64, 64}} {
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

// BenchmarkLinear runs the three products of a linear layer, forward (NT), gradient of the input (NN) and of the weight
// (TN), on the layers of bench-s and bench-fine: rows, outputs, inputs.
func BenchmarkLinear(b *testing.B) {
	for _, s := range [][3]int{
		{2048, 192, 384}, {2048, 576, 192}, {2048, 128, 384}, {2048, 768, 128}, {2048, 384, 384}, {2048, 1024, 384},
		{2048, 384, 1024}, {2048, 256, 384}, {512, 256, 384}, {512, 384, 256}, {128, 4096, 384},
		{2048, 128, 256}, {2048, 512, 64}, {2048, 768, 256}, {2048, 96, 256}, {2048, 64, 256}, {256, 96, 256}, {256, 256, 96},
		{128, 4096, 256},
	} {
		rows, out, in := s[0], s[1], s[2]
		for _, c := range []struct {
			name    string
			layout  Layout
			m, n, k int
		}{{"NT", NT, rows, out, in}, {"NN", NN, rows, in, out}, {"TN", TN, out, in, rows}} {
			b.Run(fmt.Sprintf("%s/%dx%dx%d", c.name, c.m, c.n, c.k), func(b *testing.B) {
				benchProduct(b, c.layout, c.m, c.n, c.k)
			})
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

func BenchmarkAdamWBF16(b *testing.B) {
	w, g, m, v := randomMat(1, 1<<16), randomMat(2, 1<<16), make([]uint16, 1<<16), make([]uint16, 1<<16)
	a := AdamWArgs{LR: 1e-3, Beta1: 0.9, Beta2: 0.95, Eps: 1e-8, Decay: 0.1, GradScale: 1, Step: 10}
	benchEach(b, len(w), func() { AdamWBF16(a, w, g, m, v) })
}

func BenchmarkRMSNorm(b *testing.B) {
	x, y, gain, rstd := randomMat(1, 1<<16), make([]float32, 1<<16), randomMat(2, 256), make([]float32, 256)
	benchEach(b, len(x), func() { RMSNorm(y, x, gain, rstd, 256, 1e-6) })
}

// benchPeak reports the rate of the fastest call, by the FLOPs it counts, and its share of the fastest window of the
// register-only loop on as many threads.
func benchPeak(b *testing.B, f func()) {
	f()
	before := Flops()
	f()
	work := float64(Flops() - before)
	peak, best := PeakGFLOPS(Threads(), 20), time.Duration(math.MaxInt64)
	for b.Loop() {
		begin := time.Now()
		f()
		best = min(best, time.Since(begin))
	}
	rate := work / best.Seconds() / 1e9
	b.ReportMetric(rate, "GFLOP/s")
	b.ReportMetric(rate/max(peak, PeakGFLOPS(Threads(), 20)), "of-peak")
}

// BenchmarkLoops runs the loops that move or change whole vectors, warm.
func BenchmarkLoops(b *testing.B) {
	const n, cols = 1 << 16, 256
	x, y, z := randomMat(1, n), randomMat(2, n), make([]float32, n)
	gain, dgain, rstd := randomMat(3, cols), make([]float32, cols), make([]float32, n/cols)
	RMSNorm(z, x, gain, rstd, cols, 1e-6)
	for _, c := range []struct {
		name string
		f    func()
	}{
		{"Add", func() { Add(z, y) }},
		{"Axpy", func() { Axpy(z, 1e-9, y) }},
		{"Scale", func() { Scale(z, 1) }},
		{"SumSquares", func() { SumSquares(x) }},
		{"Finite", func() { Finite(x) }},
		{"RMSNormGrad", func() { RMSNormGrad(z, dgain, y, x, gain, rstd, cols) }},
	} {
		b.Run(c.name, func(b *testing.B) { benchEach(b, n, c.f) })
	}
}

// BenchmarkAttention runs one head forward and backward, the widths those of DeepSeek's ratio at 64.
func BenchmarkAttention(b *testing.B) {
	for _, T := range []int{512, 4096} {
		const DQ, DV = 96, 64
		a := newAttentionCase(1, T, DQ, DV, 0).attention()
		dO, dQ, dK, dV := randomMat(2, T*DV), make([]float32, T*DQ), make([]float32, T*DQ), make([]float32, T*DV)
		b.Run(fmt.Sprint("forward/", T), func(b *testing.B) { benchPeak(b, a.Forward) })
		b.Run(fmt.Sprint("backward/", T), func(b *testing.B) {
			benchPeak(b, func() { a.Backward(dO, DV, dQ, DQ, dK, DQ, dV, DV) })
		})
	}
}

// BenchmarkGroupedGemm is an expert layer of a fine-grained model: 64 experts of width 96, 2,048 rows in uneven groups.
func BenchmarkGroupedGemm(b *testing.B) {
	const experts, inter, dim = 64, 96, 256
	rows, total := make([]int, experts), 0
	w, g := make([][]float32, experts), make([][]float32, experts)
	for e := range rows {
		rows[e] = e * 65 / 64
		if e == experts-1 {
			rows[e] = 2048 - total
		}
		total += rows[e]
		w[e], g[e] = randomMat(uint64(e), inter*dim), make([]float32, inter*dim)
	}
	x, h := randomMat(1, total*dim), make([]float32, total*inter)
	dx := make([]float32, total*dim)
	for _, threads := range []int{1, 2} {
		SetThreads(threads)
		b.Run(fmt.Sprint("NT/threads", threads), func(b *testing.B) {
			benchPeak(b, func() { GroupedGemm(NT, rows, inter, dim, x, w, 0, h) })
		})
		b.Run(fmt.Sprint("NN/threads", threads), func(b *testing.B) {
			benchPeak(b, func() { GroupedGemm(NN, rows, dim, inter, h, w, 0, dx) })
		})
		b.Run(fmt.Sprint("TN/threads", threads), func(b *testing.B) {
			benchPeak(b, func() { GroupedGemmTN(rows, inter, dim, h, x, g) })
		})
	}
	SetThreads(1)
}
