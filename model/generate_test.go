package model

import (
	"math"
	"slices"
	"testing"
)

// TestDecoder: the cache of latents in its absorbed form gives the logits of the whole sequence, for prompts of any length
// and step by step.
func TestDecoder(t *testing.T) {
	long := tiny()
	long.Context, long.MoE.Shared = 300, 0
	configs := []Config{long}
	for _, name := range goldens {
		configs = append(configs, readGolden(t, name).config)
	}
	for i, c := range configs {
		p := cut(t, c, 5, 0, 1)
		for _, r := range p.routers() {
			for e := range r.Bias {
				r.Bias[e] = 0.1 * float32(e%3)
			}
		}
		d, err := NewDecoder(p...)
		check(t, err)
		m := micro(c, 9, 1, c.Context)
		want, err := d.Logits(m.Tokens)
		check(t, err)
		want.Data = slices.Clone(want.Data)
		compare := func(got []float32, position int) {
			t.Helper()
			for v, x := range got {
				near(t, "logit", float64(x), float64(want.Row(position)[v]), 1e-4)
			}
		}
		for _, prompt := range []int{1, 5, c.Context - 8, c.Context} {
			d.Reset()
			got, err := d.Prefill(m.Tokens[:prompt])
			check(t, err)
			compare(got, prompt-1)
			for at := prompt; at < min(c.Context, prompt+8); at++ {
				got, err = d.Step(m.Tokens[at])
				check(t, err)
				compare(got, at)
			}
			if d.Len() != min(c.Context, prompt+8) {
				t.Errorf("config %d: %d tokens taken", i, d.Len())
			}
		}
		_, err = d.Step(0)
		fails(t, err, "exceeds model.context=")
		d.Reset()
		_, err = d.Prefill(nil)
		fails(t, err, "no tokens")
		_, err = d.Prefill([]int32{int32(c.vocab())})
		fails(t, err, "outside the vocabulary")
		_, err = NewDecoder(p[1])
		fails(t, err, "layers")
		_, err = NewDecoder(p[0])
		fails(t, err, "head")
		if i == 0 { // the logits are those that the loss is made of
			whole := cut(t, c, 5, 0)
			for i, r := range whole.routers() {
				copy(r.Bias, p.routers()[i].Bias)
			}
			if !slices.Equal(whole.logits(t, m), want.Data) {
				t.Error("the decoder's uncached logits are not the chunk's")
			}
		}
	}
}

func TestSampler(t *testing.T) {
	logits := []float32{1, 3, float32(math.NaN()), 3, 0, 2}
	draw := func(s Sampling, n int) []float64 {
		sampler, err := NewSampler(s)
		check(t, err)
		share := make([]float64, len(logits))
		for range n {
			share[sampler.Next(logits)] += 1 / float64(n)
		}
		return share
	}
	if got := draw(Sampling{}, 5); got[1] < 0.999 {
		t.Errorf("temperature 0 does not take the first of the best: %v", got)
	}
	logits[2] = -1
	const n = 20000
	expect := func(s Sampling, kept ...int) {
		t.Helper()
		got := draw(s, n)
		var sum float64
		for _, i := range kept {
			sum += math.Exp(float64(logits[i]) / s.Temperature)
		}
		for i := range logits {
			want := 0.0
			if slices.Contains(kept, i) {
				want = math.Exp(float64(logits[i])/s.Temperature) / sum
			}
			if want == 0 && got[i] != 0 {
				t.Errorf("%+v draws %d", s, i)
			}
			near(t, "share", got[i], want, 0.02)
		}
	}
	expect(Sampling{Temperature: 1}, 0, 1, 2, 3, 4, 5)
	expect(Sampling{Temperature: 2, Seed: 4}, 0, 1, 2, 3, 4, 5)
	expect(Sampling{Temperature: 1, TopK: 3}, 1, 3, 5)
	expect(Sampling{Temperature: 1, TopP: 0.5}, 1, 3)
	expect(Sampling{Temperature: 1, TopK: 2, TopP: 0.1}, 1)
	a, _ := NewSampler(Sampling{Temperature: 1, Seed: 1})
	b, _ := NewSampler(Sampling{Temperature: 1, Seed: 1})
	c, _ := NewSampler(Sampling{Temperature: 1, Seed: 2})
	same := true
	for range 50 {
		x, y, z := a.Next(logits), b.Next(logits), c.Next(logits)
		if x != y {
			t.Fatal("equal seeds draw differently")
		}
		same = same && x == z
	}
	if same {
		t.Error("another seed draws the same")
	}
	for want, s := range map[string]Sampling{"temperature=-1": {Temperature: -1}, "temperature=NaN": {Temperature: math.NaN()}, "top-k=-1": {TopK: -1}, "top-p=2": {TopP: 2}} {
		_, err := NewSampler(s)
		fails(t, err, want)
	}
}
