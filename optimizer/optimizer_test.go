package optimizer

import (
	"encoding/json"
	"math"
	"os"
	"strings"
	"testing"

	"moetor/internal/tensor"
)

// TestAdamWPyTorch follows ten steps of torch.optim.AdamW with torch.nn.utils.clip_grad_norm_; testdata/adamw.py says how
// gradients are made.
func TestAdamWPyTorch(t *testing.T) {
	text, err := os.ReadFile("testdata/adamw.json")
	if err != nil {
		t.Fatal(err)
	}
	var want struct {
		Rates []float64
		Clip  float64
		Norms []float64
		Steps [][]float64
	}
	if err := json.Unmarshal(text, &want); err != nil {
		t.Fatal(err)
	}
	matrix := &tensor.Param{Name: "matrix", Shape: []int{4, 6}, Decay: true}
	vector := &tensor.Param{Name: "vector", Shape: []int{7}}
	values, grads := tensor.Allocate([]*tensor.Param{matrix, vector})
	for i := range values {
		values[i] = float32(math.Cos(0.3 * float64(i)))
	}
	// The matrix is cut into shards as ZeRO-1 cuts it: that must not matter.
	slices := []Slice{Rows(matrix, 0, 1), Rows(matrix, 1, 4), Rows(vector, 0, 7)}
	cfg := Config{Kind: "adamw", Moments: FP32, Beta1: 0.9, Beta2: 0.95, Eps: 1e-8, WeightDecay: 0.1, Clip: want.Clip}
	opt, err := NewAdamW(cfg, slices)
	if err != nil {
		t.Fatal(err)
	}
	clipped := 0
	for step := 1; step <= 10; step++ {
		var sum float64
		for i := range grads {
			grads[i] = float32(3 * math.Sin(0.7*float64(i)+1.3*float64(step)) * float64(1+i%5) / float64(step))
			sum += float64(grads[i]) * float64(grads[i])
		}
		norm := math.Sqrt(sum)
		if math.Abs(norm-want.Norms[step-1]) > 1e-5*norm {
			t.Fatalf("step %d: norm %v, PyTorch %v: not the same gradients", step, norm, want.Norms[step-1])
		}
		scale := ClipFactor(norm, want.Clip)
		if scale < 1 {
			clipped++
		}
		opt.Step(want.Rates[step-1], scale, int64(step))
		for i, w := range want.Steps[step-1] {
			if math.Abs(float64(values[i])-w) > 2e-6 {
				t.Errorf("step %d: weight %d is %v, PyTorch %v", step, i, values[i], w)
			}
		}
	}
	if clipped == 0 || clipped == 10 {
		t.Errorf("%d of 10 steps were clipped: the case must have both", clipped)
	}
}

// TestAdamWResume: moments taken from Slices and given to a new optimizer continue to the bit.
func TestAdamWResume(t *testing.T) {
	for _, moments := range MomentTypes() {
		t.Run(moments, func(t *testing.T) { resume(t, moments) })
	}
}

func resume(t *testing.T, moments string) {
	cfg := Config{Kind: "adamw", Moments: moments, Beta1: 0.9, Beta2: 0.95, Eps: 1e-8, WeightDecay: 0.1}
	newParam := func() *tensor.Param {
		p := &tensor.Param{Name: "w", Shape: []int{3, 5}, Decay: true}
		tensor.Allocate([]*tensor.Param{p})
		for i := range p.Value {
			p.Value[i] = float32(i) - 7
		}
		return p
	}
	steps := func(p *tensor.Param, o *AdamW, from, to int) {
		for s := from; s <= to; s++ {
			for i := range p.Grad {
				p.Grad[i] = float32(math.Sin(float64(i * s)))
			}
			o.Step(0.01, 0.5, int64(s))
		}
	}
	straight := newParam()
	o, err := NewAdamW(cfg, []Slice{Rows(straight, 0, 3)})
	if err != nil {
		t.Fatal(err)
	}
	steps(straight, o, 1, 6)

	first := newParam()
	o, _ = NewAdamW(cfg, []Slice{Rows(first, 0, 3)})
	steps(first, o, 1, 3)
	second := newParam()
	copy(second.Value, first.Value)
	s := Rows(second, 0, 3)
	held := o.Slices()[0]
	s.M, s.V, s.M16, s.V16 = held.M, held.V, held.M16, held.V16
	if bytes := 4*(len(s.M)+len(s.V)) + 2*(len(s.M16)+len(s.V16)); bytes != cfg.MomentBytes()*len(s.Value) {
		t.Errorf("moments of %d values take %d bytes, not %d each", len(s.Value), bytes, cfg.MomentBytes())
	}
	o, err = NewAdamW(cfg, []Slice{s})
	if err != nil {
		t.Fatal(err)
	}
	steps(second, o, 4, 6)
	for i := range straight.Value {
		if straight.Value[i] != second.Value[i] {
			t.Fatalf("weight %d: %v in one go, %v resumed", i, straight.Value[i], second.Value[i])
		}
	}
}

// TestAdamWDecay: with a zero gradient only decay moves a weight, by lr*decay of itself, and only where it applies.
func TestAdamWDecay(t *testing.T) {
	cfg := Config{Kind: "adamw", Moments: FP32, Beta1: 0.9, Beta2: 0.95, Eps: 1e-8, WeightDecay: 0.5}
	a := Slice{Name: "a", Value: []float32{2}, Grad: []float32{0}, Decay: true}
	b := Slice{Name: "b", Value: []float32{2}, Grad: []float32{0}}
	o, err := NewAdamW(cfg, []Slice{a, b})
	if err != nil {
		t.Fatal(err)
	}
	o.Step(0.25, 1, 1)
	if a.Value[0] != 1.75 || b.Value[0] != 2 {
		t.Errorf("got %v and %v, want 1.75 and 2", a.Value[0], b.Value[0])
	}
}

func TestNewAdamWRefuses(t *testing.T) {
	ok := Config{Kind: "adamw", Moments: FP32}
	for _, c := range []struct {
		cfg  Config
		s    Slice
		want string
	}{
		{Config{Kind: "muon"}, Slice{}, "optimizer.kind=muon is not available"},
		{ok, Slice{Name: "w", Value: make([]float32, 3), Grad: make([]float32, 2)}, "w: 3 values but 2 gradients"},
		{ok, Slice{Name: "w", Value: make([]float32, 3), Grad: make([]float32, 3), M: make([]float32, 4)}, "4 first and 3 second"},
		{Config{Kind: "adamw", Moments: BF16}, Slice{Name: "w", Value: make([]float32, 3), Grad: make([]float32, 3), M: make([]float32, 3)}, "6 first and 3 second"},
		{Config{Kind: "adamw", Moments: "fp8"}, Slice{Name: "w"}, "optimizer.moments=fp8 is not available"},
	} {
		if _, err := NewAdamW(c.cfg, []Slice{c.s}); err == nil || !strings.Contains(err.Error(), c.want) {
			t.Errorf("got %v, want %q", err, c.want)
		}
	}
}

func TestStepAllocatesNothing(t *testing.T) {
	for _, moments := range MomentTypes() {
		s := Slice{Name: "w", Value: make([]float32, 100), Grad: make([]float32, 100)}
		o, err := NewAdamW(Config{Kind: "adamw", Moments: moments, Beta1: 0.9, Beta2: 0.95, Eps: 1e-8}, []Slice{s})
		if err != nil {
			t.Fatal(err)
		}
		if n := testing.AllocsPerRun(20, func() { o.Step(1e-3, 1, 1) }); n != 0 {
			t.Errorf("%s: %v allocations a step", moments, n)
		}
	}
}

// TestAdamWBF16: moments of 2 bytes move weights nearly as those of 4 do. A stored moment is off by at most 2^-9 of itself
// for each of the steps that it remembers, some 1/(1-beta): the first by 10 and the root of the second by half of 20 of them,
// so a step's part of the update is off by at most 4 %.
func TestAdamWBF16(t *testing.T) {
	run := func(moments string) []float32 {
		s := Slice{Name: "w", Value: make([]float32, 200), Grad: make([]float32, 200)}
		o, err := NewAdamW(Config{Kind: "adamw", Moments: moments, Beta1: 0.9, Beta2: 0.95, Eps: 1e-8}, []Slice{s})
		if err != nil {
			t.Fatal(err)
		}
		for step := 1; step <= 100; step++ {
			for i := range s.Grad { // of one sign, so that a weight is the sum of its updates' sizes
				s.Grad[i] = float32((1.5 + math.Sin(0.7*float64(i)+1.3*float64(step))) * float64(1+i%5))
			}
			o.Step(0.01, 1, int64(step))
		}
		return s.Value
	}
	want, differ := run(FP32), false
	for i, got := range run(BF16) {
		if d := math.Abs(float64(got - want[i])); d > 0.04*math.Abs(float64(want[i])) {
			t.Errorf("weight %d is %v, with fp32 %v", i, got, want[i])
		}
		differ = differ || got != want[i]
	}
	if !differ {
		t.Error("moments in bf16 change nothing: they are not rounded")
	}
}

func TestClipFactor(t *testing.T) {
	for _, c := range []struct{ norm, clip, want float64 }{
		{0, 1, 1},            // nothing to clip, and no division by 0
		{0.5, 1, 1},          // below
		{4, 1, 1 / 4.000001}, // above, with the 1e-6 of torch.nn.utils.clip_grad_norm_
		{1, 1, 1 / 1.000001}, // a norm of exactly clip is scaled, as there
		{1 - 1e-6, 1, 1},     // the largest norm that is not
		{100, 0, 1},          // clip 0: none
		{1e300, 2, 2e-300},   // far above
		{math.Inf(1), 1, 0},  // the caller refuses such a step; the factor is not NaN
	} {
		if got := ClipFactor(c.norm, c.clip); math.Abs(got-c.want) > 1e-15*c.want {
			t.Errorf("ClipFactor(%v, %v) = %v, want %v", c.norm, c.clip, got, c.want)
		}
	}
}
