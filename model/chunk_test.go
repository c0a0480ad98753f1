package model

import (
	"context"
	"errors"
	"fmt"
	"math"
	"math/rand/v2"
	"slices"
	"strings"
	"testing"

	"moetor/internal/kernel"
)

// micro makes sequences of random tokens; every target counts.
func micro(c Config, seed uint64, seqs, length int) Micro {
	rng := rand.New(rand.NewPCG(seed, 1))
	m := Micro{Seqs: seqs, Len: length}
	for range seqs {
		next := int32(rng.IntN(c.vocab()))
		for range length {
			m.Tokens = append(m.Tokens, next)
			next = int32(rng.IntN(c.vocab()))
			m.Targets = append(m.Targets, next)
			m.Weight = append(m.Weight, 1)
		}
	}
	return m
}

// rows returns sequences [from, to) of m as a micro-batch.
func (m Micro) slice(from, to int) Micro {
	a, b := from*m.Len, to*m.Len
	return Micro{Seqs: to - from, Len: m.Len, Tokens: m.Tokens[a:b], Targets: m.Targets[a:b], Weight: m.Weight[a:b]}
}

func clones(p pipe) map[string][]float32 { return p.grads() }

// TestBatchCut is pitfalls P01 and P32: losses and gradients do not depend on how a batch is cut into micro-batches, nor
// on the split into stages.
func TestBatchCut(t *testing.T) {
	c := tiny()
	c.MoE.SeqAux = 0.5
	all := micro(c, 1, 4, 16)
	for i := range all.Weight {
		all.Weight[i] = float32(i%3) / 2
	}
	var want Sums
	var grads map[string][]float32
	for _, stages := range [][]int{{0}, {0, 2}, {0, 1, 2, 3}} {
		for _, size := range []int{4, 2, 1} {
			p := cut(t, c, 5, stages...)
			var micros []Micro
			for s := 0; s < 4; s += size {
				micros = append(micros, all.slice(s, s+size))
			}
			sums := total(p.step(t, micros, Settings{MTPWeight: 0.3}))
			eval := total(p.evaluate(t, micros, Settings{MTPWeight: 0.3}))
			if grads == nil {
				want, grads = sums, clones(p)
			}
			for _, got := range []Sums{sums, eval} {
				near(t, "loss", got.Loss/got.Weight, want.Loss/want.Weight, 1e-6)
				near(t, "MTP loss", got.MTP/got.Weight, want.MTP/want.Weight, 1e-6)
				near(t, "balance loss", got.Aux/got.Weight, want.Aux/want.Weight, 1e-6)
			}
			for n, g := range clones(p) {
				if d := distance(g, grads[n]); d > 1e-5 || strings.HasSuffix(n, "mlp.gate.weight") && d > 1e-6 {
					t.Errorf("stages %v, %d sequences a micro-batch: gradient of %s is off by %.2g", stages, size, n, d)
				}
			}
		}
	}
}

// Every schedule that takes micro-batches in order gives the same bits: all forwards first, one after the other, or
// weights at the very end; tied and with MTP, where one gradient has several sources.
func TestScheduleOrder(t *testing.T) {
	c := tiny()
	c.TieEmbed = true
	micros := []Micro{micro(c, 1, 2, 8), micro(c, 2, 1, 16), micro(c, 3, 2, 4)}
	ctx := context.Background()
	var want [][]float32
	for _, order := range []string{"F0 I0 W0 F1 I1 W1 F2 I2 W2", "F0 F1 F2 I0 W0 I1 W1 I2 W2", "F0 F1 I0 F2 I1 I2 W0 W1 W2", "F0 F1 I0 W0 F2 I1 W1 I2 W2"} {
		p := cut(t, c, 5, 0)
		ch := p[0]
		ch.Bind(micros, Settings{MTPWeight: 0.3})
		for _, a := range strings.Fields(order) {
			i := int(a[1] - '0')
			var err error
			switch a[0] {
			case 'F':
				_, err = ch.Forward(ctx, i, nil)
			case 'I':
				_, err = ch.BackwardInput(ctx, i, nil)
			case 'W':
				err = ch.BackwardWeight(ctx, i)
			}
			check(t, err)
		}
		var got [][]float32
		for _, q := range ch.Params() {
			got = append(got, q.Grad)
		}
		if want == nil {
			want = got
		}
		for i, q := range ch.Params() {
			if !slices.Equal(got[i], want[i]) {
				t.Errorf("%s: gradient of %s has other bits", order, q.Name)
			}
		}
	}
}

// TestPadding is pitfall P02: a padded tail changes neither losses, counts nor gradients.
func TestPadding(t *testing.T) {
	c := tiny()
	c.MoE.SeqAux = 0.5
	short := micro(c, 1, 2, 9)
	long := Micro{Seqs: 2, Len: 16, Valid: []int32{9, 9}}
	for s := range 2 {
		pad := make([]int32, 7)
		long.Tokens = append(append(long.Tokens, short.Tokens[s*9:(s+1)*9]...), pad...)
		long.Targets = append(append(long.Targets, short.Targets[s*9:(s+1)*9]...), pad...)
		long.Weight = append(append(long.Weight, short.Weight[s*9:(s+1)*9]...), make([]float32, 7)...)
	}
	a, b := cut(t, c, 5, 0), cut(t, c, 5, 0)
	want, got := a.step(t, []Micro{short}, Settings{MTPWeight: 0.3}), b.step(t, []Micro{long}, Settings{MTPWeight: 0.3})
	if !slices.EqualFunc(got, want, Sums.equal) {
		t.Errorf("padded %v, not padded %v", got, want)
	}
	for i, r := range a.routers() {
		if !slices.Equal(r.Counts, b.routers()[i].Counts) {
			t.Errorf("layer %d: counts %v padded, %v not", r.Layer, b.routers()[i].Counts, r.Counts)
		}
	}
	grads := b.grads()
	for n, g := range a.grads() {
		if d := distance(grads[n], g); d > 1e-6 {
			t.Errorf("gradient of %s is off by %.2g", n, d)
		}
	}
}

// TestCounts is pitfall P03: each token is counted once for each of its experts, in MTP modules too, and only in training.
func TestCounts(t *testing.T) {
	c := tiny()
	p := cut(t, c, 5, 0, 2)
	m := []Micro{micro(c, 1, 2, 16), micro(c, 2, 2, 16)}
	p.step(t, m, Settings{MTPWeight: 0.3})
	layers := []int{1, 2, 3}
	for i, r := range p.routers() {
		var n int64
		for _, v := range r.Counts {
			n += v
		}
		want := int64(64 * c.MoE.TopK)
		if r.Layer == c.Layers { // the last position of each sequence has nothing to predict
			want -= int64(4 * c.MoE.TopK)
		}
		if r.Layer != layers[i] || n != want {
			t.Errorf("router %d is of layer %d with %d counts, want layer %d with %d", i, r.Layer, n, layers[i], want)
		}
	}
	p.evaluate(t, m, Settings{MTPWeight: 0.3})
	for _, r := range p.routers() {
		if slices.Max(r.Counts) != 0 {
			t.Errorf("layer %d: Evaluate counts %v", r.Layer, r.Counts)
		}
	}
}

// TestSegments is pitfall P27: packed documents do not see each other, to the bit, and each is what it is alone.
func TestSegments(t *testing.T) {
	c := tiny()
	packed := micro(c, 1, 1, 24)
	packed.Starts = []int32{0, 7, 20}
	p := cut(t, c, 5, 0)
	v := c.vocab()
	logits := p.logits(t, packed)
	for i, from := range packed.Starts {
		to := append(slices.Clone(packed.Starts), 24)[i+1]
		alone := Micro{Seqs: 1, Len: int(to - from), Tokens: packed.Tokens[from:to], Targets: packed.Targets[from:to], Weight: packed.Weight[from:to]}
		if !slices.Equal(p.logits(t, alone), logits[int(from)*v:int(to)*v]) {
			t.Errorf("document %d has other logits alone", i)
		}
	}
	changed := packed
	changed.Tokens = slices.Clone(packed.Tokens)
	for i := range 7 {
		changed.Tokens[i] = (changed.Tokens[i] + 1) % int32(v)
	}
	if !slices.Equal(p.logits(t, changed)[7*v:], logits[7*v:]) {
		t.Error("another first document changes the later ones")
	}
	packed.Starts = []int32{0}
	if slices.Equal(p.logits(t, packed)[7*v:], logits[7*v:]) {
		t.Error("bounds make no difference")
	}
}

// TestRowIndependence is pitfall P09: a token's output has the same bits whatever else is in the batch.
func TestRowIndependence(t *testing.T) {
	c := tiny()
	p := cut(t, c, 5, 0)
	v := c.vocab()
	all := micro(c, 1, 4, 8)
	want := p.logits(t, all)[:8*v]
	other := all
	other.Tokens = slices.Clone(all.Tokens)
	for i := 8; i < 32; i++ {
		other.Tokens[i] = 0
	}
	for name, m := range map[string]Micro{"other sequences": other, "no other sequences": all.slice(0, 1)} {
		if !slices.Equal(p.logits(t, m)[:8*v], want) {
			t.Errorf("%s change the first sequence", name)
		}
	}
}

// Threads change no bit.
func TestThreads(t *testing.T) {
	defer kernel.SetThreads(kernel.Threads())
	for name, r := range recipes() {
		c := tiny()
		c.Dim, c.MoE.SeqAux, c.Recipe = 80, 0.5, r // more than one range of columns
		m := []Micro{micro(c, 1, 5, 32)}
		var want map[string][]float32
		var sums []Sums
		for _, n := range []int{1, 3} {
			kernel.SetThreads(n)
			p := cut(t, c, 5, 0)
			s := append(p.step(t, m, Settings{MTPWeight: 0.3}), p.evaluate(t, m, Settings{MTPWeight: 0.3})...)
			if want == nil {
				want, sums = p.grads(), s
				continue
			}
			if !slices.EqualFunc(s, sums, Sums.equal) {
				t.Errorf("%s, %d threads: sums %v, want %v", name, n, s, sums)
			}
			for param, g := range p.grads() {
				if !slices.Equal(g, want[param]) {
					t.Errorf("%s, %d threads: gradient of %s has other bits", name, n, param)
				}
			}
		}
	}
}

// An empty micro-batch, and a chunk without layers, are legal.
func TestEmpty(t *testing.T) {
	for name, r := range recipes() {
		c := tiny()
		c.Recipe = r
		full := micro(c, 1, 2, 8)
		a, b := cut(t, c, 5, 0), cut(t, c, 5, 0, 0, 1, 1, 3)
		want := a.step(t, []Micro{full}, Settings{MTPWeight: 0.3})
		got := b.step(t, []Micro{{Len: 8}, full, {}}, Settings{MTPWeight: 0.3})
		if !got[0].equal(Sums{}) || !got[2].equal(Sums{}) || !got[1].equal(want[0]) {
			t.Errorf("%s: sums %v, want %v between zeros", name, got, want)
		}
		grads := b.grads()
		for n, g := range a.grads() {
			if !slices.Equal(grads[n], g) {
				t.Errorf("%s: gradient of %s has other bits", name, n)
			}
		}
	}
}

// TestLossNearUniform: small weights give about ln V.
func TestLossNearUniform(t *testing.T) {
	c := tiny()
	c.InitStd = 0.006
	s := total(cut(t, c, 5, 0).evaluate(t, []Micro{micro(c, 1, 2, 32)}, Settings{MTPWeight: 1}))
	near(t, "loss", s.Loss/s.Weight, math.Log(float64(c.vocab())), 0.02)
	near(t, "MTP loss", s.MTP/s.Weight, math.Log(float64(c.vocab()))*31/32, 0.02) // divided by T, with T-1 terms
}

// TestWarmStepAllocatesNothing over the identity route.
func TestWarmStepAllocatesNothing(t *testing.T) {
	defer kernel.SetThreads(kernel.Threads())
	for name, r := range recipes() {
		for _, again := range [][]string{nil, recomputable} {
			if name == "hopper" && again != nil {
				continue // slow
			}
			c := tiny()
			c.MTP.Depth, c.MoE.SeqAux, c.Recipe, c.Recompute = 2, 0.5, r, again
			ch := cut(t, c, 5, 0)[0]
			micros := []Micro{micro(c, 1, 4, 32), micro(c, 2, 4, 32)} // more than one range of rows
			ctx := context.Background()
			step := func() {
				ch.Bind(micros, Settings{MTPWeight: 0.3})
				ch.ZeroGrads()
				for i := range micros {
					if _, err := ch.Forward(ctx, i, nil); err != nil {
						t.Fatal(err)
					}
				}
				for i := range micros {
					if _, err := ch.BackwardInput(ctx, i, nil); err != nil {
						t.Fatal(err)
					}
					if err := ch.BackwardWeight(ctx, i); err != nil {
						t.Fatal(err)
					}
				}
				for i := range micros {
					if _, err := ch.Evaluate(ctx, i, nil); err != nil {
						t.Fatal(err)
					}
				}
			}
			for _, threads := range []int{1, 2} {
				kernel.SetThreads(threads)
				step()
				step()
				if n := testing.AllocsPerRun(5, step); n != 0 {
					t.Errorf("%s, recompute %v, %d threads: a warm step makes %v allocations", name, again, threads, n)
				}
			}
		}
	}
}

// TestFlopsCounter compares the model's FLOPs with what the kernels count, up to the two differences that Flops names.
func TestFlopsCounter(t *testing.T) {
	for _, change := range []func(*Config){
		func(*Config) {},
		func(c *Config) { c.Attention.QLora, c.MTP.Depth, c.MoE.Shared = 0, 0, 0 },
		func(c *Config) { c.MTP.Depth, c.TieEmbed, c.DenseLayers = 2, true, 0 },
		func(c *Config) { *c = c.RewardModel() },
		func(c *Config) { c.Recipe = recipes()["fp8"] },
	} {
		c := tiny()
		change(&c)
		const length = 32
		ch := cut(t, c, 5, 0)[0]
		m := []Micro{micro(c, 1, 1, length)}
		ctx := context.Background()
		settings := Settings{MTPWeight: 0.3}
		if c.Score {
			settings = Settings{Objective: byWeight{}}
		}
		ch.Bind(m, settings)
		count := func(f func()) int64 {
			before := kernel.Flops()
			f()
			return kernel.Flops() - before
		}
		var err error
		forward := count(func() { _, err = ch.Forward(ctx, 0, nil) })
		check(t, err)
		backward := count(func() {
			_, err = ch.BackwardInput(ctx, 0, nil)
			check(t, err)
			err = ch.BackwardWeight(ctx, 0)
		})
		check(t, err)

		// What the attention kernels multiply for one head.
		a := c.Attention
		x, lse := make([]float32, length*max(a.qk(), a.V)), make([]float32, length)
		one := kernel.Attention{T: length, DQ: a.qk(), DV: a.V, Scale: 1, Q: x, K: x, V: x, O: slices.Clone(x), LDQ: a.qk(), LDK: a.qk(), LDV: a.V, LDO: a.V, LSE: lse}
		headForward := count(one.Forward)
		headBackward := count(func() {
			one.Backward(x, a.V, slices.Clone(x), a.qk(), slices.Clone(x), a.qk(), slices.Clone(x), a.V)
		})
		blocks := int64(c.Layers + c.MTP.Depth)
		kernels := blocks * int64(a.Heads) * (headForward + headBackward)

		// The positions that MTP modules do not route: one more per module.
		unrouted := int64(c.MTP.Depth * (c.MTP.Depth + 1) / 2 * c.MoE.TopK)
		expert := int64(2 * 3 * c.Dim * c.MoE.Inter)

		f := FLOPs(c, length)
		want := int64(length*(f.Training-3*f.Attention)) - 3*unrouted*expert + kernels
		if forward+backward != want {
			t.Errorf("the kernels count %d, the model %d with the differences", forward+backward, want)
		}
		if float64(forward+backward) < length*f.Training*0.95 {
			t.Errorf("model FLOPs %v exceed the %d of the kernels: utilisation could pass 100 %%", length*f.Training, forward+backward)
		}
	}
}

// TestNonFinite: the first bad number is named with layer, tensor, expert and micro-batch.
func TestNonFinite(t *testing.T) {
	c := tiny()
	c.MoE.Groups, c.MoE.TopGroups, c.MoE.TopK = 1, 1, 4
	micros := []Micro{micro(c, 1, 1, 8), micro(c, 2, 2, 16)}
	settings := Settings{MTPWeight: 0.3}
	inf := float32(math.Inf(1))
	for _, test := range []struct {
		param string
		want  NonFiniteError
	}{
		{"model.layers.1.mlp.experts.3.up_proj.weight", NonFiniteError{Layer: 1, Tensor: "model.layers.1.mlp.experts.3", Expert: 3}},
		{"model.layers.2.self_attn.o_proj.weight", NonFiniteError{Layer: 2, Tensor: "model.layers.2.self_attn", Expert: -1}},
		{"model.layers.0.mlp.down_proj.weight", NonFiniteError{Layer: 0, Tensor: "model.layers.0", Expert: -1}},
		{"lm_head.weight", NonFiniteError{Backward: true, Layer: 4, Tensor: "lm_head", Expert: -1}},
	} {
		p := cut(t, c, 5, 0, 2)
		p.step(t, micros, settings)
		for _, ch := range p {
			if e := ch.NonFinite(); e != nil {
				t.Fatal(e)
			}
			for _, q := range ch.Params() {
				if q.Name == test.param {
					for i := range q.Value {
						q.Value[i] = inf
					}
				}
			}
		}
		p.step(t, micros, settings)
		var first *NonFiniteError
		for _, ch := range p {
			if e := ch.NonFinite(); e != nil && (first == nil || e.Before(first)) {
				first = e
			}
		}
		if first == nil {
			t.Errorf("%s: nothing noted", test.param)
			continue
		}
		got := *first
		got.Place = 0
		if got != test.want {
			t.Errorf("%s: %+v, want %+v", test.param, got, test.want)
		}
		if !strings.Contains(first.Error(), test.want.Tensor) || !strings.Contains(first.Error(), "micro-batch 0") {
			t.Errorf("message %q", first)
		}
		p.step(t, nil, settings)
		if e := p[0].NonFinite(); e != nil {
			t.Errorf("noted after the next Bind: %v", e)
		}
	}
}

// TestRefusals: misuse and bad batches are errors that say what and where.
func TestRefusals(t *testing.T) {
	c := tiny()
	ctx := context.Background()
	good := micro(c, 1, 2, 8)
	for _, test := range []struct {
		change func(m *Micro)
		want   string
	}{
		{func(m *Micro) { m.Tokens = m.Tokens[1:] }, "15 tokens"},
		{func(m *Micro) { m.Tokens = slices.Repeat([]int32{29}, 16) }, "token 29 at row 0 is outside the vocabulary of 29"},
		{func(m *Micro) { m.Targets = slices.Repeat([]int32{-1}, 16) }, "target -1 at row 0"},
		{func(m *Micro) { m.Starts = []int32{0, 3} }, "no segment starts at row 8"},
		{func(m *Micro) { m.Starts = []int32{1, 8} }, "no segment starts at row 0"},
		{func(m *Micro) { m.Starts = []int32{0, 8, 8} }, "segment 2 starts at row 8"},
		{func(m *Micro) { m.Valid = []int32{3} }, "1 counts"},
		{func(m *Micro) { m.Valid = []int32{3, 9} }, "sequence 1 has 9 real tokens of 8"},
		{func(m *Micro) { *m = micro(c, 1, 1, 33) }, "33 tokens exceed model.context=32"},
	} {
		m := good
		test.change(&m)
		ch := cut(t, c, 5, 0)[0]
		ch.Bind([]Micro{good, m}, Settings{})
		if _, err := ch.Forward(ctx, 1, nil); err == nil || !strings.Contains(err.Error(), test.want) || !strings.Contains(err.Error(), "micro-batch 1") {
			t.Errorf("got %v, want an error with %q", err, test.want)
		}
	}
	m := good
	m.Targets, m.Weight = slices.Repeat([]int32{-100}, 16), make([]float32, 16)
	cut(t, c, 5, 0).step(t, []Micro{m}, Settings{MTPWeight: 1}) // targets of no weight may be anything

	p := cut(t, c, 5, 0, 1)
	p[1].Bind([]Micro{good}, Settings{})
	_, err := p[1].Forward(ctx, 0, make([]float32, 3))
	fails(t, err, "input of 3 numbers for 16 rows")
	p[0].Bind([]Micro{good}, Settings{})
	_, err = p[0].BackwardInput(ctx, 0, nil)
	fails(t, err, "not in flight")
	fails(t, p[0].BackwardWeight(ctx, 7), "micro-batch 7")
	_, err = p[0].Forward(ctx, 0, nil)
	check(t, err)
	_, err = p[0].Forward(ctx, 0, nil)
	fails(t, err, "in flight already")
	_, err = p[0].BackwardInput(ctx, 0, make([]float32, 1))
	fails(t, err, "gradient of 1 numbers")
	for _, part := range []Part{{First: 1, Last: 9}, {First: 1, Last: 2, Embed: true}, {First: 0, Last: 1, Head: true}, {Last: 3, ExpertRank: 2, ExpertSize: 2}, {Last: 3, ExpertSize: 9}} {
		_, err = New(c, part, 1, nil)
		fails(t, err, "model: ")
	}
	_, err = New(c, Part{Last: 3, ExpertSize: 2}, 1, nil)
	fails(t, err, "need an exchange")
	lost := errors.New("lost rank 3")
	part := Whole(c)
	part.ExpertSize = 2
	ch, err := New(c, part, 1, func(context.Context, int, []int) (Route, error) { return nil, lost })
	check(t, err)
	ch.Bind([]Micro{good}, Settings{})
	_, err = ch.Forward(ctx, 0, nil)
	if !errors.Is(err, lost) {
		t.Errorf("got %v, want one that wraps %v", err, lost)
	}
	fails(t, err, "layer 1")
}

func fails(t *testing.T, err error, want string) {
	t.Helper()
	if err == nil || !strings.Contains(fmt.Sprint(err), want) {
		t.Errorf("got %v, want an error with %q", err, want)
	}
}
