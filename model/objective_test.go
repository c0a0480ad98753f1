package model

import (
	"context"
	"encoding/json"
	"fmt"
	"math"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"testing"

	"moetor/internal/kernel"
)

// A perSequence objective sees one value of each sequence: the sum or mean of its log-probabilities, or its last score.
type perSequence struct {
	value string // sum | mean | last
	loss  func(m *Micro, v, dv []float64, metrics []float64) (loss, weight float64)
	v, dv []float64
}

func (o *perSequence) Metrics() []string { return metricNames }

var metricNames = []string{"margin", "sequences"}

func (o *perSequence) Loss(m *Micro, y []float64, slope []float32, metrics []float64) (loss, weight float64) {
	o.v, o.dv = grow(o.v, m.Seqs), grow(o.dv, m.Seqs)
	clear(o.v)
	clear(o.dv)
	walk := func(f func(seq, row int, share float64)) {
		for s := range m.Seqs {
			count, last := 0, -1
			for r := s * m.Len; r < (s+1)*m.Len; r++ {
				if m.Weight[r] != 0 {
					count, last = count+1, r
				}
			}
			for r := s * m.Len; r < (s+1)*m.Len; r++ {
				switch {
				case m.Weight[r] == 0 || o.value == "last" && r != last:
				case o.value == "last":
					f(s, r, 1)
				case o.value == "mean":
					f(s, r, -1/float64(count))
				default:
					f(s, r, -1)
				}
			}
		}
	}
	walk(func(s, r int, share float64) { o.v[s] += share * y[r] })
	loss, weight = o.loss(m, o.v, o.dv, metrics)
	metrics[1] += float64(m.Seqs)
	walk(func(s, r int, share float64) { slope[r] = float32(o.dv[s] * share) })
	return loss, weight
}

func sigmoid(x float64) float64  { return 1 / (1 + math.Exp(-x)) }
func softplus(x float64) float64 { return max(x, 0) + math.Log1p(math.Exp(-math.Abs(x))) } // -log sigmoid(-x)

// pairs makes the loss of a pair one of the loss of its two values, which returns its derivatives too.
func pairs(f func(m *Micro, i int, w, l float64) (loss, dw, dl float64)) func(*Micro, []float64, []float64, []float64) (float64, float64) {
	return func(m *Micro, v, dv []float64, metrics []float64) (sum, weight float64) {
		for i := 0; i < m.Seqs; i += 2 {
			var loss float64
			loss, dv[i], dv[i+1] = f(m, i, v[i], v[i+1])
			sum += loss
			metrics[0] += v[i] - v[i+1]
			if m.Ref != nil {
				metrics[0] -= m.Ref[i] - m.Ref[i+1]
			}
		}
		return sum, float64(m.Seqs / 2)
	}
}

func dpo(beta, smoothing float64) *perSequence {
	return &perSequence{value: "sum", loss: pairs(func(m *Micro, i int, w, l float64) (loss, dw, dl float64) {
		x := beta * ((w - m.Ref[i]) - (l - m.Ref[i+1]))
		d := -beta*(1-smoothing)*sigmoid(-x) + beta*smoothing*sigmoid(x)
		return (1-smoothing)*softplus(-x) + smoothing*softplus(x), d, -d
	})}
}

// logistic is -log sigmoid of the difference of the two values, times beta and less gamma.
func logistic(value string, beta, gamma float64) *perSequence {
	return &perSequence{value: value, loss: pairs(func(_ *Micro, _ int, w, l float64) (loss, dw, dl float64) {
		x := beta*(w-l) - gamma
		return softplus(-x), -beta * sigmoid(-x), beta * sigmoid(-x)
	})}
}

// TestObjectiveReference compares the loss and every gradient of five objectives with PyTorch.
func TestObjectiveReference(t *testing.T) {
	g := readGolden(t, "preference")
	var file struct {
		Settings struct {
			Beta, Smoothing, Gamma, Lam, Desirable, Undesirable, Z float64
			SimPO                                                  float64 `json:"simpo_beta"`
		}
		Micros []struct {
			Seqs, Len       int
			Tokens, Targets []int32
			Weight          []float32
			Valid           []int32
			Labels          []int8
			Ref, SeqWeight  []float64
		}
		Results map[string]struct {
			Losses [][2]float64 // per micro-batch: objective, balance
			Said   [][]float64  // per micro-batch and sequence: log-probability or score
		}
	}
	text, err := os.ReadFile(filepath.Join("testdata", "preference.json"))
	check(t, err)
	check(t, json.Unmarshal(text, &file))
	var micros []Micro
	for _, m := range file.Micros {
		micros = append(micros, Micro{Seqs: m.Seqs, Len: m.Len, Tokens: m.Tokens, Targets: m.Targets, Weight: m.Weight, Valid: m.Valid,
			Labels: m.Labels, Pairs: true, Ref: m.Ref, SeqWeight: m.SeqWeight})
	}
	s := file.Settings
	objectives := map[string]*perSequence{
		"dpo": dpo(s.Beta, s.Smoothing), "simpo": logistic("mean", s.SimPO, s.Gamma), "reward": logistic("last", 1, 0),
		"orpo": {value: "mean", loss: pairs(func(_ *Micro, _ int, w, l float64) (loss, dw, dl float64) {
			// d/da of a - log(1-e^a) is 1/(1-e^a).
			x := (w - l) - (math.Log1p(-math.Exp(w)) - math.Log1p(-math.Exp(l)))
			d := -s.Lam * sigmoid(-x)
			return -w + s.Lam*softplus(-x), -1 + d/(1-math.Exp(w)), -d / (1 - math.Exp(l))
		})},
		"kto": {value: "sum", loss: func(m *Micro, v, dv, _ []float64) (loss, weight float64) {
			for i, label := range m.Labels {
				sign, lambda := 1.0, s.Desirable
				if label < 0 {
					sign, lambda = -1, s.Undesirable
				}
				p := sigmoid(sign * s.Beta * (v[i] - m.Ref[i] - s.Z))
				loss += lambda * (1 - p)
				dv[i] = -lambda * sign * s.Beta * p * (1 - p)
			}
			return loss, float64(m.Seqs)
		}},
	}
	if len(file.Results) != len(objectives) {
		t.Errorf("%d results", len(file.Results))
	}
	for name, want := range file.Results {
		for _, impl := range kernel.Impls() {
			t.Run(name+"/"+impl, func(t *testing.T) {
				restore, ok := kernel.Use(impl)
				if !ok {
					t.Fatalf("%s kernels cannot run", impl)
				}
				defer restore()
				c := g.config
				if name == "reward" {
					c = c.RewardModel()
				}
				var whole map[string][]float32
				for _, at := range [][]int{{0}, {0, 1}, {0, 1, 2}} {
					p := cut(t, c, 1, at...)
					p.load(t, g)
					settings := Settings{Objective: objectives[name]}
					eval := p.evaluate(t, micros, settings)
					head := p[len(p)-1]
					for i, said := range want.Said {
						got := head.LogProbs(i)
						if name == "reward" {
							got = head.Scores(i)
						}
						if len(got) != len(said) {
							t.Fatalf("%d values of %d sequences", len(got), len(said))
						}
						for s, v := range said {
							near(t, fmt.Sprintf("what is said of sequence %d of micro-batch %d", s, i), got[s], v, 1e-4)
						}
					}
					sums := p.step(t, micros, settings)
					for i, l := range want.Losses {
						near(t, fmt.Sprintf("loss of micro-batch %d", i), sums[i].Loss, l[0], 1e-4*l[0])
						near(t, fmt.Sprintf("balance loss of micro-batch %d", i), sums[i].Aux, l[1], 1e-5*l[1])
						if !eval[i].equal(sums[i]) {
							t.Errorf("Evaluate sums %v, training %v", eval[i], sums[i])
						}
					}
					grads := p.grads()
					compared := 0
					for n, grad := range grads {
						if d := distance(grad, g.get(t, name+" "+n)); !(d <= 1e-4) {
							t.Errorf("gradient of %s is off by %.2g of its norm", n, d)
						}
						if whole != nil && !slices.Equal(grad, whole[n]) {
							t.Errorf("cut at %v: gradient of %s has other bits", at, n)
						}
						compared++
					}
					// The index has W weights and, for five objectives, the gradients of all but the other head.
					if whole = grads; 6*compared+1 != len(g.Index) {
						t.Errorf("compared %d gradients", compared)
					}
				}
			})
		}
	}
}

// TestObjectiveGradient: along the gradient of every parameter, the loss changes by the gradient's norm.
func TestObjectiveGradient(t *testing.T) {
	c := tiny()
	c.MoE.SeqAux, c.MTP.Depth = 0, 0
	c.MoE.TopK, c.MoE.TopGroups = 8, 4 // no choice of experts, so no jumps
	micros := []Micro{answers(micro(c, 1, 2, 9)), answers(micro(c, 2, 4, 7))}
	for _, objective := range []Objective{logistic("sum", 0.3, 0.1), logistic("last", 1, 0.5)} {
		c := c
		if objective.(*perSequence).value == "last" {
			c = c.RewardModel()
		}
		for _, at := range [][]int{{0}, {0, 2}} {
			p := cut(t, c, 5, at...)
			settings := Settings{Objective: objective}
			p.step(t, micros, settings)
			compared := 0
			for _, ch := range p {
				for _, q := range ch.Params() {
					norm := math.Sqrt(kernel.SumSquares(q.Grad))
					if norm < 1e-2 { // float32 activations cannot show less
						continue
					}
					const h = 2e-3
					value := slices.Clone(q.Value)
					move := func(by float64) float64 {
						for i := range value {
							q.Value[i] = float32(float64(value[i]) + by*float64(q.Grad[i])/norm)
						}
						loss := total(p.evaluate(t, micros, settings)).Loss
						copy(q.Value, value)
						return loss
					}
					slope := (move(h) - move(-h)) / (2 * h)
					near(t, fmt.Sprintf("%T cut at %v: slope along the gradient of %s", objective, at, q.Name), slope, norm, 0.01*norm+2e-4)
					compared++
				}
			}
			if compared < 40 {
				t.Errorf("compared %d gradients", compared)
			}
		}
	}
}

// answers gives weight to the second half of each sequence only.
func answers(m Micro) Micro {
	m.Weight = slices.Clone(m.Weight)
	for r := range m.Weight {
		if r%m.Len < m.Len/2 {
			m.Weight[r] = 0
		}
	}
	m.Pairs = true
	return m
}

// byWeight is cross-entropy as an objective.
type byWeight struct{}

func (byWeight) Metrics() []string { return nil }

func (byWeight) Loss(m *Micro, y []float64, slope []float32, _ []float64) (loss, weight float64) {
	for r, w := range m.Weight {
		loss += float64(w) * y[r]
		weight += float64(w)
		if slope[r] = w; w == 0 {
			slope[r] = 9 // nobody's business
		}
	}
	return loss, weight
}

// TestObjectiveOfWeights: an objective whose slopes are the weights has the gradients of plain cross-entropy to the bit,
// chunks of logits without weights included. The loss is within 1e-8: CrossEntropyLoss sums exponentials in other pieces.
func TestObjectiveOfWeights(t *testing.T) {
	c := tiny()
	c.MTP.Depth, c.Vocab = 0, 700
	m := micro(c, 1, 13, 32) // 416 rows
	for r := range m.Weight {
		m.Weight[r] = float32(r%4) / 2
		if r < 130 || r >= 256 && r < 390 {
			m.Weight[r], m.Targets[r] = 0, -100
		}
	}
	micros := []Micro{m, {Len: 3}}
	plain, own := cut(t, c, 5, 0), cut(t, c, 5, 0, 2)
	want, got := plain.step(t, micros, Settings{}), own.step(t, micros, Settings{Objective: byWeight{}})
	near(t, "loss", got[0].Loss, want[0].Loss, 1e-8*want[0].Loss)
	if got[0].Weight != want[0].Weight || got[0].Aux != want[0].Aux || !got[1].equal(Sums{}) {
		t.Errorf("sums %v, want %v", got, want)
	}
	few := cut(t, c, 5, 0)
	few.step(t, []Micro{m.slice(4, 13)}, Settings{}) // the first chunk of logits has no weight
	grads, less := own.grads(), few.grads()
	for n, g := range plain.grads() {
		if !slices.Equal(grads[n], g) {
			t.Errorf("gradient of %s is off by %g", n, distance(grads[n], g))
		}
		if d := distance(less[n], g); d > 1e-5 {
			t.Errorf("gradient of %s is off by %.2g without the sequences that have no weight", n, d)
		}
	}
	if eval := own.evaluate(t, micros, Settings{Objective: byWeight{}}); !eval[0].equal(got[0]) {
		t.Errorf("Evaluate sums %v, training %v", eval[0], got[0])
	}
}

// MTP modules stand still under an objective.
func TestObjectiveWithoutMTP(t *testing.T) {
	c := tiny()
	p := cut(t, c, 5, 0, 2)
	p.step(t, []Micro{answers(micro(c, 1, 2, 9))}, Settings{Objective: logistic("sum", 1, 0)})
	moved := 0
	for n, g := range p.grads() {
		zero := zeros(g)
		if layer := layerName(c.Layers); len(n) > len(layer) && n[:len(layer)] == layer {
			if !zero {
				t.Errorf("%s has a gradient", n)
			}
		} else if !zero {
			moved++
		}
	}
	if moved < 30 {
		t.Errorf("only %d gradients", moved)
	}
	for _, r := range p.routers() {
		if n := r.Counts[slices.Index(r.Counts, slices.Max(r.Counts))]; (n == 0) != (r.Layer == c.Layers) {
			t.Errorf("layer %d counts %v", r.Layer, r.Counts)
		}
	}
}

// TestReferenceIsPolicy is pitfall P31: with the log-probabilities of the same weights, taken in other batches with other
// padding and at another cut, the first DPO loss is ln 2 and the margin 0, to the bit.
func TestReferenceIsPolicy(t *testing.T) {
	c := tiny()
	c.Vocab = 300
	all := answers(micro(c, 1, 6, 20))
	all.Valid = []int32{20, 13, 11, 19, 15, 16}
	for r := range all.Weight {
		if int32(r%20) >= all.Valid[r/20] {
			all.Weight[r] = 0
		}
	}
	reference := cut(t, c, 5, 0)
	for s := range 6 { // each sequence alone, without its padding
		n := int(all.Valid[s])
		at := s * 20
		one := Micro{Seqs: 1, Len: n, Tokens: all.Tokens[at : at+n], Targets: all.Targets[at : at+n], Weight: all.Weight[at : at+n]}
		reference.evaluate(t, []Micro{one}, Settings{})
		all.Ref = append(all.Ref, reference[0].LogProbs(0)...)

		prompt := slices.Index(one.Weight, 1)
		d, err := NewDecoder(reference...)
		check(t, err)
		got, err := d.LogProb(one.Tokens[:prompt+1], one.Targets[prompt:n])
		check(t, err)
		if got != all.Ref[s] {
			t.Errorf("the decoder gives sequence %d %v, Evaluate %v", s, got, all.Ref[s])
		}
	}
	for _, at := range [][]int{{0}, {0, 1}, {0, 1, 2}} {
		p := cut(t, c, 5, at...)
		sums := p.step(t, []Micro{all}, Settings{Objective: dpo(0.1, 0)})
		if s := sums[0]; s.Loss != 3*math.Ln2 || s.Weight != 3 || !slices.Equal(s.Metrics, []float64{0, 6}) {
			t.Errorf("cut at %v: sums %+v, want loss 3 ln 2 = %v and margin 0", at, s, 3*math.Ln2)
		}
		if !slices.Equal(p[len(p)-1].LogProbs(0), all.Ref) {
			t.Error("the training pass has other log-probabilities")
		}
		if len(at) > 1 && (p[0].LogProbs(0) != nil || p[0].MicroSums(0).Metrics != nil) {
			t.Error("a stage without the head has log-probabilities or metrics")
		}
		p.step(t, nil, Settings{})
		if p[len(p)-1].LogProbs(0) != nil {
			t.Error("log-probabilities outlive Bind")
		}
	}
}

// Objectives meet empty micro-batches only as zeros, and their bad numbers are named.
func TestObjectiveNonFinite(t *testing.T) {
	c := tiny()
	good := answers(micro(c, 1, 2, 8))
	good.Ref = []float64{-3, -4}
	bad := good
	bad.Ref = []float64{-3, math.NaN()}
	p := cut(t, c, 5, 0, 2)
	settings := Settings{Objective: dpo(1, 0)}
	sums := p.step(t, []Micro{{Len: 4, Pairs: true}, good, bad}, settings)
	if s := sums[0]; !s.equal(Sums{Metrics: []float64{0, 0}}) {
		t.Errorf("an empty micro-batch has the sums %+v", s)
	}
	expect := func(p pipe, want string, micro int) {
		t.Helper()
		e := p[len(p)-1].NonFinite()
		if e == nil || e.Tensor != want || e.Micro != micro || e.Backward {
			t.Errorf("noted %v, want %s in micro-batch %d", e, want, micro)
		}
	}
	expect(p, "objective", 2)
	head := p[1].Params()
	for _, q := range head {
		if q.Name == "lm_head.weight" {
			q.Value[0] = float32(math.NaN())
		}
	}
	p.step(t, []Micro{good}, settings)
	expect(p, "lm_head", 0)
	r := cut(t, c.RewardModel(), 5, 0)
	r[0].Params()[len(r[0].Params())-1].Value[3] = float32(math.Inf(-1))
	r.step(t, []Micro{good}, Settings{Objective: logistic("last", 1, 0)})
	expect(r, "score", 0)
}

func TestObjectiveRefusals(t *testing.T) {
	c := tiny()
	good := answers(micro(c, 1, 2, 8))
	for want, change := range map[string]func(m *Micro){
		"1 IDs for 2 sequences":                         func(m *Micro) { m.IDs = []int64{4} },
		"3 labels for 2 sequences":                      func(m *Micro) { m.Labels = []int8{1, -1, 1} },
		"0 reference log-probabilities for 2 sequences": func(m *Micro) { m.Ref = []float64{} },
		"1 balance weights for 2 sequences":             func(m *Micro) { m.SeqWeight = []float64{1} },
		"1 sequences are no pairs":                      func(m *Micro) { *m = micro(c, 1, 1, 8); m.Pairs = true },
	} {
		m := good
		change(&m)
		ch := cut(t, c, 5, 0)[0]
		ch.Bind([]Micro{m}, Settings{})
		_, err := ch.Forward(context.Background(), 0, nil)
		fails(t, err, want)
	}
	ch := cut(t, c, 5, 0)[0]
	ch.Bind([]Micro{good}, Settings{Objective: byWeight{}, MTPWeight: 0.3})
	_, err := ch.Forward(context.Background(), 0, nil)
	fails(t, err, "must be 0, not 0.3")
	_, err = ch.Evaluate(context.Background(), 0, nil)
	fails(t, err, strconv.Itoa(0))
}

// TestObjectiveAllocatesNothing beyond what the objective itself does.
func TestObjectiveAllocatesNothing(t *testing.T) {
	defer kernel.SetThreads(kernel.Threads())
	kernel.SetThreads(1)
	c := tiny()
	for _, c := range []Config{c, c.RewardModel()} {
		ch := cut(t, c, 5, 0)[0]
		micros := []Micro{answers(micro(c, 1, 2, 16)), answers(micro(c, 2, 4, 16))}
		var objective Objective = byWeight{}
		ctx := context.Background()
		step := func() {
			ch.Bind(micros, Settings{Objective: objective})
			ch.ZeroGrads()
			for i := range micros {
				if _, err := ch.Forward(ctx, i, nil); err != nil {
					t.Fatal(err)
				}
				if _, err := ch.BackwardInput(ctx, i, nil); err != nil {
					t.Fatal(err)
				}
				if err := ch.BackwardWeight(ctx, i); err != nil {
					t.Fatal(err)
				}
				if _, err := ch.Evaluate(ctx, i, nil); err != nil {
					t.Fatal(err)
				}
			}
		}
		step()
		step()
		if n := testing.AllocsPerRun(5, step); n != 0 {
			t.Errorf("a warm step makes %v allocations", n)
		}
	}
}
