package model

import (
	"context"
	"slices"
	"strings"
	"testing"
)

// late is step with all forwards first, then all gradients of inputs, and weight gradients at the very end.
func (p pipe) late(t testing.TB, micros []Micro, s Settings) []Sums {
	t.Helper()
	ctx := context.Background()
	for _, c := range p {
		c.Bind(micros, s)
		c.ZeroGrads()
	}
	var err error
	for i := range micros {
		var x []float32
		for _, c := range p {
			x, err = c.Forward(ctx, i, x)
			check(t, err)
		}
	}
	for i := range micros {
		var x []float32
		for j := len(p) - 1; j >= 0; j-- {
			x, err = p[j].BackwardInput(ctx, i, x)
			check(t, err)
		}
	}
	sums := make([]Sums, len(micros))
	for i := range micros {
		for _, c := range p {
			check(t, c.BackwardWeight(ctx, i))
			sums[i] = sums[i].add(c.MicroSums(i))
		}
	}
	return sums
}

// whole runs a step whose backwards are not split.
func (p pipe) whole(t *testing.T, micros []Micro, s Settings) []Sums {
	t.Helper()
	ctx, sums := context.Background(), make([]Sums, len(micros))
	for _, c := range p {
		c.Bind(micros, s)
		c.ZeroGrads()
	}
	for i := range micros {
		var x []float32
		var err error
		for _, c := range p {
			x, err = c.Forward(ctx, i, x)
			check(t, err)
		}
		x = nil
		for j := len(p) - 1; j >= 0; j-- {
			x, err = p[j].Backward(ctx, i, x)
			check(t, err)
			sums[i] = sums[i].add(p[j].MicroSums(i))
		}
	}
	return sums
}

// TestRecompute: what is made again has the bits it had, whatever the split and the schedule, and takes less memory.
func TestRecompute(t *testing.T) {
	settings := Settings{MTPWeight: 0.3}
	for name, r := range recipes() {
		if name == "hopper" {
			continue // fp8 with other products
		}
		c := tiny()
		c.Recipe, c.MTP.Depth, c.MoE.SeqAux = r, 2, 0.01
		micros := []Micro{micro(c, 1, 2, 16), {}, micro(c, 2, 1, 9), micro(c, 3, 3, 7)}
		whole := cut(t, c, 5, 0)
		want := whole.step(t, micros, settings)
		grads := whole.grads()
		load := Load{Seqs: 2, Len: 16}
		none := MemoryOf(c, Whole(c), load)
		for _, again := range recomputes() {
			c.Recompute = again
			for _, stages := range [][]int{{0}, {0, 2}, {0, 1, 2, 3}} {
				for _, run := range []func(pipe) []Sums{
					func(p pipe) []Sums { return p.step(t, micros, settings) },
					func(p pipe) []Sums { return p.late(t, micros, settings) },
					func(p pipe) []Sums { return p.whole(t, micros, settings) },
				} {
					p := cut(t, c, 5, stages...)
					if got := run(p); !slices.EqualFunc(got, want, Sums.equal) {
						t.Errorf("%s, recompute %v, stages %v: sums %v, want %v", name, again, stages, got, want)
					}
					for n, g := range p.grads() {
						if !slices.Equal(g, grads[n]) {
							t.Errorf("%s, recompute %v, stages %v: gradient of %s is off by %.2g", name, again, stages, n, distance(g, grads[n]))
						}
					}
				}
			}
			// SwiGLU's output is not kept in any case if it has codes.
			got := MemoryOf(c, Whole(c), load)
			saves := len(again) > 0 && (r.Weight == nil || strings.Join(again, "") != RecomputeSwiGLU)
			if got.Pass > none.Pass || (got.Pass < none.Pass) != saves || got.Kept > none.Kept || (got.Kept < none.Kept) != saves {
				t.Errorf("%s, recompute %v: %d values kept of %d, %d without", name, again, got.Kept, got.Pass, none.Kept)
			}
		}
	}
}
