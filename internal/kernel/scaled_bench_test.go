package kernel

import (
	"fmt"
	"math"
	"testing"
	"time"

	"moetor/internal/lowp"
)

// benchPair runs two products in turn and reports the rate of the fastest call of the second, and how many times as fast as
// the fastest of the first it is.
func benchPair(b *testing.B, float, scaled func()) {
	float()
	scaled()
	before := Flops()
	scaled()
	work := float64(Flops() - before)
	best := [2]time.Duration{math.MaxInt64, math.MaxInt64}
	for b.Loop() {
		for i, f := range []func(){float, scaled} {
			begin := time.Now()
			f()
			best[i] = min(best[i], time.Since(begin))
		}
	}
	b.ReportMetric(work/best[1].Seconds()/1e9, "GFLOP/s")
	b.ReportMetric(best[0].Seconds()/best[1].Seconds(), "of-FP32")
}

// BenchmarkScaledGemm runs the three products of a linear layer in FP8, as in DeepSeek-V3 with weights packed, against Gemm
// on the layers of bench-s and bench-fine: rows, outputs, inputs.
func BenchmarkScaledGemm(b *testing.B) {
	for _, s := range [][3]int{
		{2048, 192, 384}, {2048, 576, 192}, {2048, 768, 128}, {2048, 384, 384}, {2048, 1024, 384}, {2048, 384, 1024},
		{512, 256, 384}, {512, 384, 256}, {2048, 128, 256}, {2048, 768, 256}, {2048, 96, 256}, {256, 96, 256}, {256, 256, 96},
	} {
		rows, out, in := s[0], s[1], s[2]
		for _, c := range []struct {
			name    string
			layout  Layout
			m, n, k int
		}{{"NT", NT, rows, out, in}, {"NN", NN, rows, in, out}, {"TN", TN, out, in, rows}} {
			b.Run(fmt.Sprintf("%s/%dx%dx%d", c.name, c.m, c.n, c.k), func(b *testing.B) {
				qa, qb := recipes[0].quants(c.layout)
				ra, ca, rb, cb := shapeOf(c.layout, c.m, c.n, c.k)
				x, y, z := randomMat(1, ra*ca), randomMat(2, rb*cb), make([]float32, c.m*c.n)
				qx, qy := lowp.New(qa, ra, ca, nil), lowp.New(qb, rb, cb, nil)
				lowp.Quantize(qx, x, ca)
				lowp.Quantize(qy, y, cb)
				float := func() { Gemm(c.layout, c.m, c.n, c.k, 1, x, ca, y, cb, 0, z, c.n) }
				scaled := func() { ScaledGemm(c.layout, qx, qy, 0, z, c.n) }
				if c.layout != TN {
					var w PackedWeight
					w.Pack(c.layout, qy)
					scaled = func() { ScaledGemmPacked(qx, &w, 0, z, c.n) }
				}
				benchPair(b, float, scaled)
			})
		}
	}
}

// BenchmarkScaledGrouped is 64 experts with eight rows each, whose weights of 2048 x 1408 stream from memory: 738 MB in
// FP32.
func BenchmarkScaledGrouped(b *testing.B) {
	const experts, each, out, in = 64, 8, 1408, 2048
	rows := make([]int, experts)
	float, packed := make([][]float32, experts), make([]*PackedWeight, experts)
	x := randomMat(1, experts*each*in)
	a := lowp.New(recipes[0].along, experts*each, in, nil)
	lowp.Quantize(a, x, in)
	q := lowp.New(recipes[0].weight, out, in, nil)
	for e := range rows {
		rows[e], float[e], packed[e] = each, make([]float32, out*in), new(PackedWeight)
		for i := range float[e] {
			float[e][i] = float32(i%251-125) / 64
		}
		lowp.Quantize(q, float[e], in)
		packed[e].Pack(NT, q)
	}
	c := make([]float32, experts*each*out)
	for _, threads := range []int{1, 2} {
		SetThreads(threads)
		b.Run(fmt.Sprint("threads", threads), func(b *testing.B) {
			benchPair(b, func() { GroupedGemm(NT, rows, out, in, x, float, 0, c) }, func() { ScaledGroupedGemm(rows, a, packed, 0, c) })
		})
	}
	SetThreads(1)
}

// BenchmarkPackWeight is what a weight costs once per optimizer step: quantising, and packing both ways.
func BenchmarkPackWeight(b *testing.B) {
	const out, in = 1024, 384
	w := randomMat(1, out*in)
	q := lowp.New(recipes[0].weight, out, in, nil)
	var nt, nn PackedWeight
	for _, c := range []struct {
		name string
		f    func()
	}{
		{"quantize", func() { lowp.Quantize(q, w, in) }},
		{"pack/NT", func() { nt.Pack(NT, q) }},
		{"pack/NN", func() { nn.Pack(NN, q) }},
	} {
		b.Run(c.name, func(b *testing.B) { benchEach(b, len(w), c.f) })
	}
}

// BenchmarkFused is what quantising costs a producer: alone, with its result quantised afterwards, and fused, per value.
func BenchmarkFused(b *testing.B) {
	const rows, cols = 2048, 384
	r := recipes[0]
	x, y, gain, rstd := randomMat(1, rows*cols), make([]float32, rows*cols), randomMat(2, cols), make([]float32, rows)
	u, du := randomMat(3, rows*cols), make([]float32, rows*cols)
	flat, tall := lowp.New(r.along, rows, cols, nil), lowp.New(r.down, rows, cols, nil)
	gate, up, other := lowp.New(r.along, rows, cols, nil), lowp.New(r.along, rows, cols, nil), lowp.New(r.down, rows, cols, nil)
	for _, c := range []struct {
		name string
		f    func()
	}{
		{"RMSNorm", func() { RMSNorm(y, x, gain, rstd, cols, 1e-6) }},
		{"RMSNorm/then", func() { RMSNorm(y, x, gain, rstd, cols, 1e-6); lowp.Quantize(flat, y, cols) }},
		{"RMSNorm/fused", func() { RMSNormQuantize(Storage{Flat: flat}, x, gain, rstd, cols, 1e-6) }},
		{"SwiGLU", func() { SwiGLU(y, x, u) }},
		{"SwiGLU/fused", func() { SwiGLUQuantize(Storage{Flat: flat}, x, u, gate, up, cols) }},
		{"SwiGLUGrad", func() { SwiGLUGrad(y, du, x, x, u) }},
		{"SwiGLUGrad/fused", func() {
			SwiGLUGradQuantize(Storage{Flat: flat, Tall: tall}, Storage{Flat: flat, Tall: tall}, Storage{Tall: other}, x, gate, up)
		}},
		{"Quantize/both", func() { Storage{Floats: x, Flat: flat, Tall: tall}.Quantize(cols) }},
		{"Requantize", func() { Requantize(tall, gate) }},
	} {
		b.Run(c.name, func(b *testing.B) {
			c.f()
			best := time.Duration(math.MaxInt64)
			for b.Loop() {
				begin := time.Now()
				c.f()
				best = min(best, time.Since(begin))
			}
			b.ReportMetric(float64(best.Nanoseconds())/(rows*cols), "ns/value")
		})
	}
}
