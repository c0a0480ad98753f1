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

// TestBatchDecoder: samples in one batch have the bits of samples alone, whichever of them have ended, through two prompts.
func TestBatchDecoder(t *testing.T) {
	configs := []Config{tiny()}
	configs[0].Context = 300
	for _, name := range goldens {
		configs = append(configs, readGolden(t, name).config)
	}
	for _, c := range configs {
		p := cut(t, c, 5, 0, 1)
		for _, r := range p.routers() {
			for e := range r.Bias {
				r.Bias[e] = 0.1 * float32(e%3)
			}
		}
		const n = 5
		ends := []int{3, 0, 5, 1, 5} // steps after which each sample ends
		b, err := NewBatchDecoder(n, p...)
		check(t, err)
		var alone []*Decoder
		for range n {
			d, err := NewDecoder(p...)
			check(t, err)
			alone = append(alone, d)
		}
		tokens := micro(c, 3, 1, c.Context).Tokens
		same := func(what string, got, want []float32) {
			t.Helper()
			if !slices.Equal(got, want) {
				t.Errorf("%s differs", what)
			}
		}
		begin := 0
		for _, prompt := range [][]int32{tokens[:c.Context-14], tokens[c.Context-14 : c.Context-8]} {
			got, err := b.Prefill(prompt)
			check(t, err)
			got = slices.Clone(got)
			begin += len(prompt)
			for i, d := range alone {
				d.Reset()
				want, err := d.Prefill(tokens[:c.Context-14])
				check(t, err)
				if begin > len(prompt) {
					want, err = d.Prefill(prompt)
					check(t, err)
				}
				same("the prompt's end", got, want)
				if b.Len(i) != begin {
					t.Errorf("sample %d has %d tokens, want %d", i, b.Len(i), begin)
				}
			}
			for step := range 5 {
				next := make([]int32, n)
				for i := range next {
					if next[i] = int32(i*7+step*3) % int32(c.vocab()); step >= ends[i] {
						next[i] = -1
					}
				}
				logits, err := b.Step(next)
				check(t, err)
				for i, d := range alone {
					if next[i] < 0 {
						if logits[i] != nil || b.Len(i) != begin+ends[i] {
							t.Errorf("sample %d went on after its end", i)
						}
						continue
					}
					want, err := d.Step(next[i])
					check(t, err)
					same("sample "+string(rune('0'+i)), logits[i], want)
				}
			}
		}
		logits, err := b.Step([]int32{-1, -1, -1, -1, -1})
		check(t, err)
		if len(logits) != n || logits[2] != nil {
			t.Errorf("logits of no sample: %v", logits)
		}
		for range 3 {
			_, err = b.Step([]int32{-1, -1, 0, -1, -1})
			check(t, err)
		}
		_, err = b.Step([]int32{0, -1, 0, -1, -1})
		fails(t, err, "exceeds model.context=")
		if b.Len(0) != begin+3 {
			t.Error("a refused step moved a sample")
		}
		_, err = b.Step([]int32{0})
		fails(t, err, "1 tokens for 5 samples")
		b.Reset()
		_, err = b.Step([]int32{0, 0, 0, 0, 0})
		fails(t, err, "no prompt")
		long := slices.Clone(tokens)
		long[len(long)-1] = -1
		_, err = b.Prefill(long) // fails in its last part
		fails(t, err, "outside the vocabulary")
		if b.Len(0) != 0 || b.prompt.Len() != 0 {
			t.Error("a refused prompt was taken in part")
		}
	}
	_, err := NewBatchDecoder(0, cut(t, tiny(), 5, 0)...)
	fails(t, err, "0 samples")
	for _, change := range []func(*Config){func(c *Config) { c.Recipe = recipes()["fp8"] }, func(c *Config) { c.Recompute = []string{RecomputeNorm} }} {
		c := tiny()
		change(&c)
		_, err = NewDecoder(cut(t, c, 5, 0)...)
		fails(t, err, "works in FP32")
	}
}

// Answers as long as the context are scored, and what cannot be is refused.
func TestLogProb(t *testing.T) {
	c := tiny()
	p := cut(t, c, 5, 0)
	d, err := NewDecoder(p...)
	check(t, err)
	tokens := micro(c, 3, 1, c.Context+1).Tokens
	want, err := d.Logits(tokens[:c.Context])
	check(t, err)
	var sum float64
	for r := 2; r < c.Context; r++ {
		var z float64
		for _, v := range want.Row(r) {
			z += math.Exp(float64(v))
		}
		sum += float64(want.Row(r)[tokens[r+1]]) - math.Log(z)
	}
	got, err := d.LogProb(tokens[:3], tokens[3:])
	check(t, err)
	near(t, "log-probability", got, sum, 1e-4)
	_, err = d.LogProb(tokens[:4], tokens[3:])
	fails(t, err, "model.context=32")
	_, err = d.LogProb(nil, tokens[3:])
	fails(t, err, "each needs one")
	_, err = d.LogProb(tokens[:4], nil)
	fails(t, err, "each needs one")
	_, err = d.LogProb(tokens[:4], []int32{3, 29})
	fails(t, err, "token 29 at row 5 is outside")
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
