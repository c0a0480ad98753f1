package model

import (
	"context"
	"testing"

	"moetor/internal/kernel"
)

// BenchmarkStep is one warm training pass of a micro-batch on one thread. The share of the peak that the products reach,
// measured in the same run, is what the code around them leaves.
func BenchmarkStep(b *testing.B) {
	defer kernel.SetThreads(kernel.Threads())
	kernel.SetThreads(1)
	c := tiny()
	c.Vocab, c.Dim, c.Layers, c.DenseInter, c.Context, c.InitStd = 1024, 256, 3, 768, 256, 0.02
	c.Attention = Attention{Kind: "mla", Heads: 4, QLora: 128, KVLora: 64, Nope: 64, Rope: 32, V: 64, RopeTheta: 10000}
	c.MoE = MoE{Experts: 16, TopK: 4, Shared: 1, Inter: 128, Groups: 1, TopGroups: 1, Score: Sigmoid, Normalize: true, Scale: 1, SeqAux: 1e-4}
	ch, err := New(c, Whole(c), 1, nil)
	check(b, err)
	m := []Micro{micro(c, 1, 2, c.Context)}
	ctx := context.Background()
	step := func() {
		ch.Bind(m, Settings{MTPWeight: 0.3})
		ch.ZeroGrads()
		_, err := ch.Forward(ctx, 0, nil)
		check(b, err)
		_, err = ch.BackwardInput(ctx, 0, nil)
		check(b, err)
		check(b, ch.BackwardWeight(ctx, 0))
	}
	step()
	before := kernel.Flops()
	for b.Loop() {
		step()
	}
	rate := float64(kernel.Flops()-before) / 1e9 / b.Elapsed().Seconds()
	b.ReportMetric(float64(b.N*m[0].Rows())/b.Elapsed().Seconds(), "tok/s")
	b.ReportMetric(rate, "GFLOP/s")
	b.ReportMetric(100*rate/kernel.PeakGFLOPS(1, 100), "%peak")
}
