package optimizer

import (
	"fmt"
	"math"
	"math/rand/v2"
	"testing"
)

const trillion = 1_000_000_000_000

// v3 is the published schedule of DeepSeek-V3 (arXiv 2412.19437, §4.2).
func v3() *Schedule {
	return &Schedule{
		Length:  Length{Tokens: 14.8 * trillion},
		Context: 4096,
		Batch:   BatchSize{Start: 3072, End: 15360, RampTokens: 469_000_000_000, Step: 1},
		Rate: Rate{Peak: 2.2e-4, WarmupSteps: 2000, ConstantTokens: 10 * trillion, DecayTokens: 4.3 * trillion, Floor: 2.2e-5,
			Tail: []Tail{{2.2e-5, 333_000_000_000}, {7.3e-6, 167_000_000_000}}},
		BiasSpeed: Piecewise{{14.3 * trillion, 0.001}, {0, 0}},
		MTPWeight: Piecewise{{10 * trillion, 0.3}, {0, 0.1}},
	}
}

func near(got, want, rel float64) bool { return math.Abs(got-want) <= rel*math.Abs(want) }

// TestV3Rate: numbers computed outside of this code from the cosine between 10T and 14.3T tokens.
func TestV3Rate(t *testing.T) {
	s := v3()
	for _, c := range []struct {
		tokens int64
		want   float64
	}{
		{5 * trillion, 2.2e-4},
		{10 * trillion, 2.2e-4},
		{11 * trillion, 1.947324461e-4},
		{12.15 * trillion, 1.21e-4},
		{14 * trillion, 2.436848812e-5},
		{14.3 * trillion, 2.2e-5},
		{14.5 * trillion, 2.2e-5},
		{14.632 * trillion, 2.2e-5},
		{14.633 * trillion, 7.3e-6},
		{14.7 * trillion, 7.3e-6},
	} {
		if got := s.Rate.At(100_000, c.tokens); !near(got, c.want, 1e-9) {
			t.Errorf("rate at %d tokens is %.10g, want %.10g", c.tokens, got, c.want)
		}
	}
	for step, want := range map[int64]float64{0: 2.2e-4 / 2000, 999: 1.1e-4, 1999: 2.2e-4, 2000: 2.2e-4} {
		if got := s.Rate.At(step, step*12_582_912); !near(got, want, 1e-12) {
			t.Errorf("rate of step %d is %v, want %v", step, got, want)
		}
	}
}

func TestV3Phases(t *testing.T) {
	s := v3()
	for _, c := range []struct {
		tokens    int64
		bias, mtp float64
	}{
		{0, 0.001, 0.3}, {10*trillion - 1, 0.001, 0.3}, {10 * trillion, 0.001, 0.1},
		{14.3*trillion - 1, 0.001, 0.1}, {14.3 * trillion, 0, 0.1}, {14.8 * trillion, 0, 0.1},
	} {
		if b, m := s.BiasSpeed.At(c.tokens), s.MTPWeight.At(c.tokens); b != c.bias || m != c.mtp {
			t.Errorf("at %d tokens: bias speed %v, MTP weight %v, want %v, %v", c.tokens, b, m, c.bias, c.mtp)
		}
	}
}

// TestV3Steps: the ramp is an integral, 469e9/(4096*12288) * ln(15360/3072) = 14,997 steps when the batch grows linearly
// in tokens (rounding down to whole sequences adds a few), and 14.331T tokens at the full batch are 227,785 steps.
func TestV3Steps(t *testing.T) {
	s := v3()
	ramp := s.Seek(Position{}, math.MaxInt64, 469_000_000_000)
	if ramp.Step < 14_997 || ramp.Step > 15_003 {
		t.Errorf("the ramp takes %d steps, want 14,997 and a few", ramp.Step)
	}
	if b := s.At(ramp).Batch; b != 15360 {
		t.Errorf("batch after the ramp is %d", b)
	}
	if n := s.End().Step - ramp.Step; n != 227_785 {
		t.Errorf("%d steps after the ramp, want 227,785", n)
	}
	if b := s.At(Position{}).Batch * 4096; b != 12_582_912 {
		t.Errorf("first batch has %d tokens, want 12,582,912", b)
	}
}

// TestRampIterations is a batch ramp whose lengths another engine converted with the final batch size (pitfall P33):
// start 8, step 8, ramp over 160 samples, final 16, 100 iterations, warm-up of 10, decay over the last 20.
func TestRampIterations(t *testing.T) {
	const ctx = 10
	s := &Schedule{
		Length: Length{Steps: 100}, Context: ctx,
		Batch: BatchSize{Start: 8, End: 16, RampTokens: 160 * ctx, Step: 8},
		Rate:  Rate{Peak: 1, WarmupSteps: 10, ConstantTokens: 1120 * ctx, DecayTokens: 320 * ctx},
	}
	if end := s.End(); end.Samples != 1440 || end.Step != 100 {
		t.Errorf("the stage ends at %+v, want 1440 samples in 100 steps", end)
	}
	var p Position
	for ; !s.Done(p); p = s.Advance(p) {
		v := s.At(p)
		if want := map[bool]int{true: 8, false: 16}[p.Samples < 160]; v.Batch != want {
			t.Errorf("step %d: batch %d, want %d", p.Step, v.Batch, want)
		}
		if warm := v.Rate < 1 && p.Samples < 1120; warm != (p.Samples < 72) { // the tenth step, from sample 72 to 80, has the peak
			t.Errorf("step %d at sample %d: rate %v", p.Step, p.Samples, v.Rate)
		}
		if decays := p.Samples > 1120; decays != (v.Rate < 1 && p.Step > 10) {
			t.Errorf("step %d at sample %d: rate %v", p.Step, p.Samples, v.Rate)
		}
		switch p.Step {
		case 10:
			if p.Samples != 80 {
				t.Errorf("warm-up ends at sample %d, want 80", p.Samples)
			}
		case 80:
			if p.Samples != 1120 {
				t.Errorf("decay starts at sample %d, want 1120", p.Samples)
			}
		case 90:
			if !near(v.Rate, 0.5, 1e-12) {
				t.Errorf("rate half way through the decay is %v, want 0.5", v.Rate)
			}
		}
	}
}

// TestRateTable is the table in the doc comment of Rate.At, written out by hand (pitfall P34), for every split of the ten
// steps into a run and its continuation.
func TestRateTable(t *testing.T) {
	s := &Schedule{
		Length: Length{Steps: 10}, Context: 4, Batch: BatchSize{Start: 2, End: 2},
		Rate: Rate{Peak: 1, WarmupSteps: 4, ConstantTokens: 6 * 8, DecayTokens: 4 * 8},
	}
	want := []float64{0.25, 0.5, 0.75, 1, 1, 1, 1, 0.8535533905932737, 0.5, 0.14644660940672627}
	for k := range 11 {
		var got []float64
		var p Position
		for range k {
			got = append(got, s.At(p).Rate)
			p = s.Advance(p)
		}
		saved := p // all that a checkpoint keeps
		for p = saved; !s.Done(p); p = s.Advance(p) {
			got = append(got, s.At(p).Rate)
		}
		if len(got) != len(want) {
			t.Fatalf("split at %d: %d steps", k, len(got))
		}
		for i := range want {
			if math.Abs(got[i]-want[i]) > 1e-15 {
				t.Errorf("split at %d: rate of step %d is %v, want %v", k, i, got[i], want[i])
			}
		}
	}
}

func TestRatePhases(t *testing.T) {
	for _, c := range []struct {
		name   string
		r      Rate
		tokens int64
		want   float64
	}{
		{"constant", Rate{Peak: 2}, 1 << 40, 2},
		{"floor holds", Rate{Peak: 2, ConstantTokens: 10, DecayTokens: 10, Floor: 0.5}, 1000, 0.5},
		{"cosine from the start", Rate{Peak: 2, DecayTokens: 10, Floor: 1}, 5, 1.5},
		{"tail without cosine", Rate{Peak: 2, ConstantTokens: 10, Tail: []Tail{{1, 5}}}, 10, 1},
		{"before that tail", Rate{Peak: 2, ConstantTokens: 10, Tail: []Tail{{1, 5}}}, 9, 2},
		{"last tail holds", Rate{Peak: 2, ConstantTokens: 10, Tail: []Tail{{1, 5}, {0.25, 5}}}, 1000, 0.25},
		{"first of two tails", Rate{Peak: 2, ConstantTokens: 10, Tail: []Tail{{1, 5}, {0.25, 5}}}, 14, 1},
	} {
		if got := c.r.At(100, c.tokens); got != c.want {
			t.Errorf("%s: %v, want %v", c.name, got, c.want)
		}
	}
	// Warm-up longer than the constant phase scales the cosine: no jump when it ends.
	r := Rate{Peak: 2, WarmupSteps: 10, DecayTokens: 10}
	if got := r.At(4, 5); !near(got, 0.5, 1e-12) {
		t.Errorf("half warmed up, half decayed: %v, want 0.5", got)
	}
}

func TestBatchSize(t *testing.T) {
	b := BatchSize{Start: 10, End: 31, RampTokens: 100, Step: 4}
	for tokens, want := range map[int64]int{0: 10, 19: 10, 20: 14, 38: 14, 39: 18, 58: 22, 99: 30, 100: 31, 1 << 50: 31} {
		if got := b.At(tokens); got != want { // 10 + floor(21*tokens/100/4)*4
			t.Errorf("batch at %d tokens is %d, want %d", tokens, got, want)
		}
	}
	if got := (BatchSize{Start: 1, End: 1 << 24, RampTokens: 1e16}).At(1e16 - 1); got != 1<<24-1 {
		t.Errorf("large ramp: %d", got)
	}
	if got := (BatchSize{Start: 7}).At(5); got != 7 {
		t.Errorf("no end: %d, want the start", got)
	}
}

// TestSeek holds the fast walk to the plain one, step by step, over random schedules.
func TestSeek(t *testing.T) {
	rng := rand.New(rand.NewPCG(7, 7))
	for range 300 {
		s := &Schedule{Context: 1 + rng.IntN(9)}
		s.Batch.Start = 1 + rng.IntN(6)
		s.Batch.End = s.Batch.Start + rng.IntN(20)
		s.Batch.RampTokens = rng.Int64N(2000)
		s.Batch.Step = rng.IntN(6)
		switch rng.IntN(3) {
		case 0:
			s.Length.Steps = 1 + rng.Int64N(200)
		case 1:
			s.Length.Tokens = 1 + rng.Int64N(5000)
		case 2:
			s.Length.Samples = 1 + rng.Int64N(700)
		}
		steps, tokens := rng.Int64N(250), rng.Int64N(6000)
		name := fmt.Sprintf("%+v to step %d or token %d", s, steps, tokens)
		var p, mid Position
		for ; !s.Done(p) && p.Step < steps && p.Tokens < tokens; p = s.Advance(p) {
			if s.At(p).Batch < 1 {
				t.Fatalf("%s: empty batch at %+v", name, p)
			}
			if rng.IntN(10) == 0 {
				mid = p
			}
		}
		if got := s.Seek(Position{}, steps, tokens); got != p {
			t.Fatalf("%s: %+v, walked %+v", name, got, p)
		}
		if got := s.Seek(mid, steps, tokens); got != p {
			t.Fatalf("%s from %+v: %+v, walked %+v", name, mid, got, p)
		}
		for ; !s.Done(p); p = s.Advance(p) {
		}
		if got := s.End(); got != p {
			t.Fatalf("%s: end %+v, walked %+v", name, got, p)
		}
		if want := s.Length.Samples; want > 0 && p.Samples != want {
			t.Fatalf("%s: ends at sample %d, want %d", name, p.Samples, want)
		}
		if want := s.Length.Tokens; want > 0 && (p.Tokens < want || p.Tokens >= want+int64(s.Context)) {
			t.Fatalf("%s: ends at token %d, want %d", name, p.Tokens, want)
		}
	}
}

func TestPiecewise(t *testing.T) {
	if got := Piecewise(nil).At(3); got != 0 {
		t.Errorf("empty: %v", got)
	}
	if c := Constant(0.3); c.At(0) != 0.3 || c.At(math.MaxInt64) != 0.3 || c.Zero() || len(c.Changes()) != 0 {
		t.Errorf("constant: %v", c)
	}
	p := Piecewise{{10, 1}, {20, 2}, {0, 3}}
	for tokens, want := range map[int64]float64{0: 1, 9: 1, 10: 2, 19: 2, 20: 3, 1000: 3} {
		if got := p.At(tokens); got != want {
			t.Errorf("at %d: %v, want %v", tokens, got, want)
		}
	}
	if c := p.Changes(); len(c) != 2 || c[0] != 10 || c[1] != 20 {
		t.Errorf("changes: %v", c)
	}
}
