package optimizer

import (
	"math"
	"math/bits"
)

// A Position says how much of a stage is done. The zero Position is its start.
type Position struct {
	Step    int64 `json:"step"`    // completed optimizer steps
	Tokens  int64 `json:"tokens"`  // consumed tokens: Samples times the context length
	Samples int64 `json:"samples"` // consumed sequences, the index of the next one
}

// Values are the numbers of one step.
type Values struct {
	Batch     int     // sequences of the global batch
	Rate      float64 // learning rate
	BiasSpeed float64 // gamma of the router bias update
	MTPWeight float64 // lambda of the multi-token prediction loss
}

// Length is how long a stage is: exactly one field is positive.
type Length struct {
	Steps   int64
	Tokens  int64
	Samples int64 // epochs times the samples of one
}

// A Schedule gives the values of every step of a stage. All methods are pure.
//
// Everything but the warm-up is a function of the tokens consumed BEFORE the step, never of a step count converted with
// some batch size, so it holds for any batch-size ramp.
type Schedule struct {
	Length    Length
	Context   int // tokens per sequence
	Batch     BatchSize
	Rate      Rate
	BiasSpeed Piecewise
	MTPWeight Piecewise
}

// At returns the values of the step that starts at p. A stage whose length is in tokens or samples ends exactly:
// its last batch is cut to the sequences that are left (in tokens: rounded up to whole sequences).
func (s *Schedule) At(p Position) Values {
	b := int64(s.Batch.At(p.Tokens))
	if total := s.samples(); total > 0 {
		b = max(0, min(b, total-p.Samples))
	}
	return Values{
		Batch:     int(b),
		Rate:      s.Rate.At(p.Step, p.Tokens),
		BiasSpeed: s.BiasSpeed.At(p.Tokens),
		MTPWeight: s.MTPWeight.At(p.Tokens),
	}
}

// Advance returns the position after the step that starts at p.
func (s *Schedule) Advance(p Position) Position { return s.forward(p, int64(s.At(p).Batch), 1) }

// Done reports whether the stage ends at p.
func (s *Schedule) Done(p Position) bool {
	if total := s.samples(); total > 0 {
		return p.Samples >= total
	}
	return p.Step >= s.Length.Steps
}

// End is the position at which the stage is done, so its Step is the number of steps of the stage.
func (s *Schedule) End() Position { return s.Seek(Position{}, math.MaxInt64, math.MaxInt64) }

// Seek returns the first position at or after p that has reached the given step or the given tokens or the end of the
// stage. It equals repeated Advance but jumps over steps of equal batch, so it is fast for millions of them.
func (s *Schedule) Seek(p Position, step, tokens int64) Position {
	total := s.samples()
	for !s.Done(p) && p.Step < step && p.Tokens < tokens {
		b := int64(s.At(p).Batch)
		until := min(tokens, s.Batch.Next(p.Tokens))
		n := min(ceilDiv(until-p.Tokens, b*int64(s.Context)), step-p.Step)
		if total > 0 {
			n = min(n, max(1, (total-p.Samples)/b))
		} else {
			n = min(n, s.Length.Steps-p.Step)
		}
		p = s.forward(p, b, n)
	}
	return p
}

func (s *Schedule) forward(p Position, batch, steps int64) Position {
	p.Step += steps
	p.Samples += steps * batch
	p.Tokens = p.Samples * int64(s.Context)
	return p
}

// samples is the length in samples, 0 if it is given in steps.
func (s *Schedule) samples() int64 {
	if s.Length.Tokens > 0 {
		return ceilDiv(s.Length.Tokens, int64(s.Context))
	}
	return s.Length.Samples
}

func ceilDiv(a, b int64) int64 { return (a-1)/b + 1 } // a > 0

// Rate is the learning rate: linear warm-up in steps, then phases in tokens as in DeepSeek-V3 (technical report §4.2):
// constant, cosine, constant tails.
type Rate struct {
	Peak           float64 `yaml:"peak"`
	WarmupSteps    int64   `yaml:"warmup_steps"`
	ConstantTokens int64   `yaml:"constant_tokens"` // tokens, from the start of the stage, until which Peak holds
	DecayTokens    int64   `yaml:"decay_tokens"`    // length of the cosine from Peak to Floor after that; 0 = none
	Floor          float64 `yaml:"floor"`           // rate at the end of the cosine, and from then on
	Tail           []Tail  `yaml:"tail"`            // further constant phases after the cosine
}

// Tail is a constant phase: Rate holds for Tokens tokens. The last tail holds to the end of the stage.
type Tail struct {
	Rate   float64 `yaml:"rate"`
	Tokens int64   `yaml:"tokens"`
}

// At is the rate of the step after `step` completed ones that consumed `tokens` tokens. With x the part of the cosine
// that is behind, it is
//
//	min(1, (step+1)/WarmupSteps) * phase(tokens)
//	phase = Peak; Floor + (Peak-Floor)*(1+cos(pi*x))/2; Tail[i].Rate
//
// so the first step has Peak/WarmupSteps, never 0, step number WarmupSteps is the first with the full rate, and the first
// step of the cosine still has Peak. Without DecayTokens and Tail, Peak holds for ever.
// Warm-up 4, peak 1, batches of one token, ConstantTokens 6, DecayTokens 4, Floor 0, ten steps:
//
//	0.25 0.5 0.75 1 | 1 1 | 1 0.8536 0.5 0.1464
func (r Rate) At(step, tokens int64) float64 {
	rate := r.phase(tokens)
	if step < r.WarmupSteps {
		rate *= float64(step+1) / float64(r.WarmupSteps)
	}
	return rate
}

func (r Rate) phase(tokens int64) float64 {
	if r.DecayTokens == 0 && len(r.Tail) == 0 || tokens < r.ConstantTokens {
		return r.Peak
	}
	past := tokens - r.ConstantTokens
	if past < r.DecayTokens {
		x := float64(past) / float64(r.DecayTokens)
		return r.Floor + (r.Peak-r.Floor)*0.5*(1+math.Cos(math.Pi*x))
	}
	if len(r.Tail) == 0 {
		return r.Floor
	}
	past -= r.DecayTokens
	// V3 states the rate after its cosine (2.2e-5 for 333B tokens) as a phase of its own: that is the first tail.
	for _, t := range r.Tail[:len(r.Tail)-1] {
		if past < t.Tokens {
			return t.Rate
		}
		past -= t.Tokens
	}
	return r.Tail[len(r.Tail)-1].Rate
}

// Changes are the token counts at which a phase of the rate begins.
func (r Rate) Changes() []int64 {
	var at []int64
	t := r.ConstantTokens
	if r.DecayTokens > 0 {
		at = append(at, t)
		t += r.DecayTokens
		at = append(at, t)
	} else if len(r.Tail) > 0 {
		at = append(at, t)
	}
	for i := 0; i+1 < len(r.Tail); i++ {
		t += r.Tail[i].Tokens
		at = append(at, t)
	}
	return at
}

// BatchSize is the number of sequences of the global batch: from Start it grows linearly in consumed tokens to End at
// RampTokens, rounded down to Start plus a multiple of Step. Start == End: constant.
type BatchSize struct {
	Start      int   `yaml:"start"`
	End        int   `yaml:"end"`
	RampTokens int64 `yaml:"ramp_tokens"`
	Step       int   `yaml:"step"` // growth happens in multiples of this; 0 counts as 1
}

// At is the batch of the step that starts after the given number of tokens.
func (b BatchSize) At(tokens int64) int {
	if b.End <= b.Start {
		return b.Start
	}
	if tokens >= b.RampTokens {
		return b.End
	}
	step := max(1, b.Step)
	hi, lo := bits.Mul64(uint64(b.End-b.Start), uint64(max(0, tokens)))
	grown, _ := bits.Div64(hi, lo, uint64(b.RampTokens)) // < End-Start, so no overflow
	return b.Start + int(grown)/step*step
}

// Next is the token count after `tokens` at which the batch may first differ from At(tokens); math.MaxInt64 if it never does.
func (b BatchSize) Next(tokens int64) int64 {
	if tokens >= b.RampTokens || b.End <= b.Start {
		return math.MaxInt64
	}
	want := b.At(tokens) - b.Start + max(1, b.Step)
	if want >= b.End-b.Start {
		return b.RampTokens
	}
	hi, lo := bits.Mul64(uint64(want), uint64(b.RampTokens))
	q, rem := bits.Div64(hi, lo, uint64(b.End-b.Start)) // want < End-Start, so q < RampTokens
	if rem > 0 {
		q++
	}
	return int64(q)
}

// Piecewise is a value that is constant between token counts. In YAML it is one number, or a list of phases such as
// [{until_tokens: 1000, value: 0.3}, {value: 0.1}]. An empty Piecewise is 0.
type Piecewise []Phase

// Phase holds Value until the stage has consumed UntilTokens tokens. The last phase has UntilTokens 0: to the end.
type Phase struct {
	UntilTokens int64   `yaml:"until_tokens"`
	Value       float64 `yaml:"value"`
}

// Constant is the Piecewise that is always v.
func Constant(v float64) Piecewise { return Piecewise{{Value: v}} }

// At is the value of the step that starts after the given number of tokens.
func (p Piecewise) At(tokens int64) float64 {
	for i, ph := range p {
		if i == len(p)-1 || tokens < ph.UntilTokens {
			return ph.Value
		}
	}
	return 0
}

// Zero reports whether the value is 0 throughout.
func (p Piecewise) Zero() bool {
	for _, ph := range p {
		if ph.Value != 0 {
			return false
		}
	}
	return true
}

// Changes are the token counts at which the value changes.
func (p Piecewise) Changes() []int64 {
	var at []int64
	for i := 0; i+1 < len(p); i++ {
		at = append(at, p[i].UntilTokens)
	}
	return at
}
