package model

import (
	"context"
	"encoding/binary"
	"encoding/json"
	"fmt"
	"math"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"testing"

	"github.com/goccy/go-yaml"

	"moetor/internal/kernel"
	"moetor/internal/tensor"
)

// golden is what testdata/reference.py wrote of one model: PyTorch's values in float64, stored as float32.
type golden struct {
	Config   json.RawMessage
	Settings struct {
		MTPWeight float64 `json:"mtp_weight"`
		LR, Beta1, Beta2,
		Eps, Decay, Clip float64
		BiasSpeed float64 `json:"bias_speed"`
	}
	Bias      map[string][]float64
	FinalBias map[string][]float64 `json:"final_bias"`
	Steps     []struct {
		Micros []struct {
			Seqs, Len       int
			Tokens, Targets []int32
			Weight          []float32
			Starts, Valid   []int32
		}
		Terms  [][3]float64 // per micro-batch: loss, MTP, balance
		Loss   float64
		Norm   float64
		Counts map[string][]int64
	}
	Index map[string]struct{ At, Len int }

	config Config
	values []float32
}

var goldens = []string{"full", "softmax_tied_mtp2", "plain_tied"}

func readGolden(t testing.TB, name string) *golden {
	t.Helper()
	g := &golden{}
	text, err := os.ReadFile(filepath.Join("testdata", name+".json"))
	check(t, err)
	check(t, json.Unmarshal(text, g))
	check(t, yaml.Unmarshal(g.Config, &g.config))
	g.config.Attention.Kind = "mla"
	data, err := os.ReadFile(filepath.Join("testdata", name+".bin"))
	check(t, err)
	g.values = make([]float32, len(data)/4)
	for i := range g.values {
		g.values[i] = math.Float32frombits(binary.LittleEndian.Uint32(data[4*i:]))
	}
	return g
}

func (g *golden) get(t testing.TB, key string) []float32 {
	t.Helper()
	at, ok := g.Index[key]
	if !ok {
		t.Fatalf("the reference has no %q", key)
	}
	return g.values[at.At : at.At+at.Len]
}

func (g *golden) micros(step int) []Micro {
	var list []Micro
	for _, m := range g.Steps[step].Micros {
		list = append(list, Micro{Seqs: m.Seqs, Len: m.Len, Tokens: m.Tokens, Targets: m.Targets, Weight: m.Weight, Starts: m.Starts, Valid: m.Valid})
	}
	return list
}

func check(t testing.TB, err error) {
	t.Helper()
	if err != nil {
		t.Fatal(err)
	}
}

// A pipe is a whole model cut into chunks, driven by hand.
type pipe []*Chunk

// cut makes a model of pieces that start at the given layers.
func cut(t testing.TB, c Config, seed uint64, at ...int) pipe {
	t.Helper()
	var p pipe
	at = append(at, c.Layers)
	for i, first := range at[:len(at)-1] {
		ch, err := New(c, Part{First: first, Last: at[i+1], Embed: i == 0, Head: i == len(at)-2}, seed, nil)
		check(t, err)
		p = append(p, ch)
	}
	return p
}

func (p pipe) load(t testing.TB, g *golden) {
	t.Helper()
	for _, c := range p {
		for _, q := range c.Params() {
			w := g.get(t, "weight "+q.Name)
			if len(w) != q.Len() {
				t.Fatalf("%s has %d numbers in the reference", q, len(w))
			}
			copy(q.Value, w)
		}
		for _, r := range c.Routers() {
			if r.Bias == nil {
				continue
			}
			for e, b := range g.Bias[strconv.Itoa(r.Layer)] {
				r.Bias[e] = float32(b)
			}
		}
	}
}

// step runs all micro-batches forward and back, and returns their sums.
func (p pipe) step(t testing.TB, micros []Micro, s Settings) []Sums {
	t.Helper()
	for _, c := range p {
		c.Bind(micros, s)
		c.ZeroGrads()
	}
	ctx := context.Background()
	sums := make([]Sums, len(micros))
	for i := range micros {
		var x []float32
		var err error
		for _, c := range p {
			x, err = c.Forward(ctx, i, x)
			check(t, err)
		}
		for j := len(p) - 1; j >= 0; j-- {
			x, err = p[j].BackwardInput(ctx, i, x)
			check(t, err)
			x = slices.Clone(x)
		}
		for _, c := range p {
			check(t, c.BackwardWeight(ctx, i))
			sums[i] = sums[i].add(c.MicroSums(i))
		}
	}
	return sums
}

func (p pipe) evaluate(t testing.TB, micros []Micro, s Settings) []Sums {
	t.Helper()
	for _, c := range p {
		c.Bind(micros, s)
	}
	sums := make([]Sums, len(micros))
	for i := range micros {
		var x []float32
		var err error
		for _, c := range p {
			x, err = c.Evaluate(context.Background(), i, x)
			check(t, err)
			sums[i] = sums[i].add(c.MicroSums(i))
		}
	}
	return sums
}

func (s Sums) add(o Sums) Sums {
	n := Sums{Loss: s.Loss + o.Loss, Weight: s.Weight + o.Weight, MTP: s.MTP + o.MTP, Aux: s.Aux + o.Aux}
	for i := range max(len(s.Metrics), len(o.Metrics)) {
		var m float64
		if i < len(s.Metrics) {
			m = s.Metrics[i]
		}
		if i < len(o.Metrics) {
			m += o.Metrics[i]
		}
		n.Metrics = append(n.Metrics, m)
	}
	return n
}

func (s Sums) equal(o Sums) bool {
	return s.Loss == o.Loss && s.Weight == o.Weight && s.MTP == o.MTP && s.Aux == o.Aux && slices.Equal(s.Metrics, o.Metrics)
}

func total(sums []Sums) (n Sums) {
	for _, s := range sums {
		n = n.add(s)
	}
	return n
}

// grads are the gradients by name, the two parts of a tied table added.
func (p pipe) grads() map[string][]float32 {
	m := map[string][]float32{}
	for _, c := range p {
		for _, q := range c.Params() {
			if have, ok := m[q.Name]; ok {
				for i, v := range q.Grad {
					have[i] += v
				}
				continue
			}
			m[q.Name] = slices.Clone(q.Grad)
		}
	}
	return m
}

// distance is |a-b|/|b| in the Euclidean norm, or |a| where b is 0.
func distance(a, b []float32) float64 {
	var diff, norm float64
	for i := range b {
		d := float64(a[i]) - float64(b[i])
		diff += d * d
		norm += float64(b[i]) * float64(b[i])
	}
	if norm == 0 {
		return math.Sqrt(diff)
	}
	return math.Sqrt(diff / norm)
}

func near(t testing.TB, what string, got, want, tolerance float64) {
	t.Helper()
	if !(math.Abs(got-want) <= tolerance) {
		t.Errorf("%s is %.9g, want %.9g within %g", what, got, want, tolerance)
	}
}

// cuts are the first layers of the chunks, for a model of any variant.
func cuts(c Config) [][]int {
	list := [][]int{{0}, {0, 1}, {0, c.Layers}}
	if c.Layers > 2 {
		return append(list, []int{0, 1, 2})
	}
	return append(list, []int{0, 1, 1})
}

// TestReference compares logits, loss terms, every gradient and ten optimizer steps with PyTorch, and demands that the
// model cut in two and three gives the same bits as the whole.
func TestReference(t *testing.T) {
	for _, name := range goldens {
		for _, impl := range kernel.Impls() {
			t.Run(name+"/"+impl, func(t *testing.T) {
				restore, ok := kernel.Use(impl)
				if !ok {
					t.Fatalf("%s kernels cannot run", impl)
				}
				defer restore()
				g := readGolden(t, name)
				g.compareCuts(t)
			})
		}
	}
}

func (g *golden) compareCuts(t *testing.T) {
	t.Helper()
	settings := Settings{MTPWeight: g.Settings.MTPWeight}
	var whole map[string][]float32
	var wholeSums []Sums
	for _, at := range cuts(g.config) {
		p := cut(t, g.config, 1, at...)
		p.load(t, g)
		sums := p.step(t, g.micros(0), settings)
		grads := p.grads()
		if whole == nil {
			whole, wholeSums = grads, sums
			g.compareStep(t, p, sums, grads)
			continue
		}
		if !slices.EqualFunc(sums, wholeSums, Sums.equal) {
			t.Errorf("cut at %v: sums %v, whole %v", at, sums, wholeSums)
		}
		for n, want := range whole {
			if !slices.Equal(grads[n], want) {
				t.Errorf("cut at %v: gradient of %s differs from the whole model's by %g", at, n, distance(grads[n], want))
			}
		}
	}
}

func (g *golden) compareStep(t *testing.T, p pipe, sums []Sums, grads map[string][]float32) {
	t.Helper()
	step := g.Steps[0]
	weight := total(sums).Weight
	for i, s := range sums {
		near(t, fmt.Sprintf("loss of micro-batch %d", i), s.Loss, step.Terms[i][0], 1e-5*weight)
		near(t, fmt.Sprintf("MTP loss of micro-batch %d", i), s.MTP, step.Terms[i][1], 1e-5*weight)
		near(t, fmt.Sprintf("balance loss of micro-batch %d", i), s.Aux, step.Terms[i][2], 1e-5*weight)
	}
	s := total(sums)
	near(t, "loss", (s.Loss+g.Settings.MTPWeight*s.MTP+s.Aux)/weight, step.Loss, 1e-5)
	for _, r := range p.routers() {
		if want := step.Counts[strconv.Itoa(r.Layer)]; !slices.Equal(r.Counts, want) {
			t.Errorf("layer %d: counts %v, want %v", r.Layer, r.Counts, want)
		}
	}
	compared := 0
	for n, sum := range grads {
		grad := slices.Clone(sum)
		for i := range grad {
			grad[i] = float32(float64(grad[i]) / weight)
		}
		if d := distance(grad, g.get(t, "grad "+n)); !(d <= 1e-4) {
			t.Errorf("gradient of %s is off by %.2g of its norm", n, d)
		}
		compared++
	}
	if want := len(g.Index); compared*3+1 != want {
		t.Errorf("compared %d gradients, the reference has %d", compared, (want-1)/3)
	}
	logits := g.get(t, "logits")
	at := 0
	for _, m := range g.micros(0) {
		x := p.logits(t, m)
		for i := range x {
			near(t, fmt.Sprintf("logit %d", at), float64(x[i]), float64(logits[at]), 1e-4)
			at++
		}
	}
	if at != len(logits) {
		t.Errorf("compared %d logits of %d", at, len(logits))
	}
}

func (p pipe) routers() (list []*Router) {
	for _, c := range p {
		list = append(list, c.Routers()...)
	}
	return list
}

// logits returns the logits of one micro-batch, of a model in one chunk.
func (p pipe) logits(t testing.TB, m Micro) []float32 {
	t.Helper()
	c := p[0]
	ctx := context.Background()
	c.Bind([]Micro{m}, Settings{})
	_, err := c.Forward(ctx, 0, nil)
	check(t, err)
	x := c.flying[0].head.hidden
	logits := tensor.NewMat(x.Rows, c.config.vocab())
	c.head.project.forward(logits, operand{mat: x}, 0)
	c.Bind(nil, Settings{})
	return logits.Data
}

// TestTenSteps follows PyTorch through ten steps of AdamW with clipping and moving selection biases.
func TestTenSteps(t *testing.T) {
	for _, name := range goldens {
		t.Run(name, func(t *testing.T) {
			g := readGolden(t, name)
			s := g.Settings
			p := cut(t, g.config, 1, 0, 1)
			p.load(t, g)
			type moments struct{ m, v []float32 }
			state := map[*tensor.Param]*moments{}
			for i, want := range g.Steps {
				sums := p.step(t, g.micros(i), Settings{MTPWeight: s.MTPWeight})
				all := total(sums)
				near(t, fmt.Sprintf("loss of step %d", i+1), (all.Loss+s.MTPWeight*all.MTP+all.Aux)/all.Weight, want.Loss, 1e-4)
				grads := p.grads()
				var norm float64
				for _, q := range grads {
					norm += kernel.SumSquares(q)
				}
				norm = math.Sqrt(norm) / all.Weight
				near(t, fmt.Sprintf("gradient norm of step %d", i+1), norm, want.Norm, 1e-4*want.Norm)
				scale := float32(min(1, s.Clip/norm) / all.Weight)
				for _, c := range p {
					for _, q := range c.Params() {
						st := state[q]
						if st == nil {
							st = &moments{make([]float32, q.Len()), make([]float32, q.Len())}
							state[q] = st
						}
						args := kernel.AdamWArgs{LR: float32(s.LR), Beta1: float32(s.Beta1), Beta2: float32(s.Beta2), Eps: float32(s.Eps), GradScale: scale, Step: i + 1}
						if q.Decay {
							args.Decay = float32(s.Decay)
						}
						kernel.AdamW(args, q.Value, grads[q.Name], st.m, st.v)
					}
				}
				for _, r := range p.routers() {
					if !slices.Equal(r.Counts, want.Counts[strconv.Itoa(r.Layer)]) {
						t.Errorf("step %d, layer %d: counts %v, want %v", i+1, r.Layer, r.Counts, want.Counts[strconv.Itoa(r.Layer)])
					}
					r.UpdateBias(r.Counts, float32(s.BiasSpeed))
				}
			}
			tied := map[string][]float32{}
			for _, c := range p {
				for _, q := range c.Params() {
					if d := distance(q.Value, g.get(t, "final "+q.Name)); !(d <= 1e-4) {
						t.Errorf("%s is off by %.2g of its norm after ten steps", q.Name, d)
					}
					if other, ok := tied[q.Name]; ok && !slices.Equal(other, q.Value) {
						t.Errorf("the two copies of %s have come apart", q.Name)
					}
					tied[q.Name] = q.Value
				}
			}
			for _, r := range p.routers() {
				for e, b := range r.Bias {
					near(t, "bias", float64(b), g.FinalBias[strconv.Itoa(r.Layer)][e], 1e-5)
				}
			}
		})
	}
}
