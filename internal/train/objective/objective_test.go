package objective

import (
	"encoding/json"
	"fmt"
	"math"
	"math/rand/v2"
	"os"
	"strings"
	"testing"

	"moetor/model"
)

// must makes an objective.
func must(t *testing.T, name string, c Config) model.Objective {
	t.Helper()
	o, _, err := New(name, c)
	if err != nil {
		t.Fatal(err)
	}
	return o
}

// checked is what o says of a micro-batch: nil, or why its loss is NaN.
func checked(o model.Objective, m *model.Micro) error {
	return o.(interface{ check(*model.Micro) error }).check(m)
}

// micro makes a micro-batch of answers given by their y, each padded to the longest; chosen and rejected take turns.
func micro(ref []float64, answers ...[]float64) (*model.Micro, []float64) {
	m := &model.Micro{Seqs: len(answers), Pairs: len(answers)%2 == 0, Ref: ref}
	for _, a := range answers {
		m.Len = max(m.Len, len(a)+2)
	}
	m.Weight = make([]float32, m.Rows())
	y := make([]float64, m.Rows())
	for s, a := range answers {
		m.Labels = append(m.Labels, int8(1-2*(s%2)))
		for i, v := range a { // a prompt row before them and a row after them stay without weight
			m.Weight[s*m.Len+1+i], y[s*m.Len+1+i] = 1, v
		}
	}
	return m, y
}

func near(got, want, tol float64) bool { return math.Abs(got-want) <= tol*max(1, math.Abs(want)) }

// run calls Loss with everything it may fill.
func run(o model.Objective, m *model.Micro, y []float64) (loss, weight float64, slope []float32, metrics []float64) {
	slope, metrics = make([]float32, m.Rows()), make([]float64, len(o.Metrics()))
	loss, weight = o.Loss(m, y, slope, metrics)
	return loss, weight, slope, metrics
}

// TestGolden: values known from the papers' formulas at Delta = 2 and beta = 0.1, computed apart from this code.
func TestGolden(t *testing.T) {
	delta2 := func() (*model.Micro, []float64) { return micro([]float64{-5, -3}, []float64{1, 3}, []float64{2, 2}) } // 1 - (-1)
	means := func(w, l float64) func() (*model.Micro, []float64) {
		return func() (*model.Micro, []float64) { return micro(nil, []float64{-w, -w, -w}, []float64{-l, -l}) }
	}
	for _, c := range []struct {
		name  string
		c     Config
		batch func() (*model.Micro, []float64)
		loss  float64
		slope float64 // by each y of the chosen answer; NaN: no known value
	}{
		{DPO, Config{Beta: 0.1}, delta2, 0.5981388694, 0.0450166},
		{CDPO, Config{Beta: 0.1, Smoothing: 0.1}, delta2, 0.6181388694, math.NaN()},
		{Robust, Config{Beta: 0.1, Smoothing: 0.1}, delta2, 0.5731388694, math.NaN()},
		{IPO, Config{Beta: 0.1}, delta2, 9, 6},
		{IPO, Config{Beta: 0.1, Average: true}, delta2, 16, 4},
		{Hinge, Config{Beta: 0.1}, delta2, 0.8, 0.1},
		{SimPO, Config{Beta: 2, Gamma: 1}, means(-1, -1.3), 0.9130152524, math.NaN()},
		{SimPO, Config{Beta: 2, Gamma: 1}, means(-1, -1), 1.313262, math.NaN()},
		{ORPO, Config{Lambda: 0.1}, means(-1, -1.5), 1.0401135488, math.NaN()},
		{ORPO, Config{Lambda: 0.1}, means(-1, -1), 1.0693147, math.NaN()},
	} {
		t.Run(fmt.Sprintf("%s %+v", c.name, c.c), func(t *testing.T) {
			m, y := c.batch()
			loss, weight, slope, _ := run(must(t, c.name, c.c), m, y)
			if !near(loss, c.loss, 1e-6) || weight != 1 {
				t.Errorf("loss %.10f of weight %v, want %.10f of 1", loss, weight, c.loss)
			}
			if got := float64(slope[1]); !math.IsNaN(c.slope) && !near(got, c.slope, 1e-6) {
				t.Errorf("slope %v, want %v", got, c.slope)
			}
		})
	}
	if got := log1mexp(-1) - log1mexp(-1.5); !near(0.5-got, 0.7061926865, 1e-9) {
		t.Errorf("log odds ratio of (-1, -1.5) = %.10f, want 0.7061926865", 0.5-got)
	}
}

// TestFirstStep: a policy that is its reference has margin 0 and the loss and slope of Delta = 0, to the bit.
func TestFirstStep(t *testing.T) {
	answers := [][]float64{{0.3, 1.7, 2.9, 0.1}, {4.1, 0.7}, {0.123456789}, {1e-9, 20, 3}}
	var ref []float64
	for _, a := range answers {
		var lp float64
		for _, y := range a {
			lp -= y
		}
		ref = append(ref, lp)
	}
	m, y := micro(ref, answers...)
	for _, c := range []struct {
		name       string
		loss, tilt float64 // per pair; slope of a chosen row
	}{
		{DPO, math.Ln2, 0.05}, {CDPO, math.Ln2, 0.1 * (0.5 - 0.1)}, {Robust, math.Ln2, 0.1 * (0.5 + 0.125)},
		{IPO, 25, 10}, {Hinge, 1, 0.1}, {KTO, 1, 0.025},
	} {
		loss, weight, slope, metrics := run(must(t, c.name, Default(c.name)), m, y)
		if loss != 2*c.loss {
			t.Errorf("%s: loss %v, want exactly %v", c.name, loss, 2*c.loss)
		}
		if want := map[bool]float64{true: 4, false: 2}[c.name == KTO]; weight != want {
			t.Errorf("%s: weight %v, want %v", c.name, weight, want)
		}
		if !near(float64(slope[1]), c.tilt, 1e-7) || slope[0] != 0 || slope[m.Len+1] != -slope[1] {
			t.Errorf("%s: slopes %v, want %v of chosen rows and the opposite of rejected", c.name, slope, c.tilt)
		}
		for i, name := range must(t, c.name, Default(c.name)).Metrics() {
			if strings.HasPrefix(name, "reward") && metrics[i] != 0 {
				t.Errorf("%s: %s = %v, want exactly 0", c.name, name, metrics[i])
			}
		}
	}
}

// A torchCase is one of testdata/reference.json, written by reference.py.
type torchCase struct {
	Name          string
	Config        torchConfig
	Seqs, Len     int
	Weight        []float32
	Labels        []int8
	Ref, Y, Slope []float64
	Loss          float64
	Each          []float64
}

func torchCases(t *testing.T) (cases []torchCase) {
	t.Helper()
	readJSON(t, "testdata/reference.json", &cases)
	return cases
}

func readJSON(t *testing.T, path string, v any) {
	t.Helper()
	b, err := os.ReadFile(path)
	if err != nil {
		t.Fatal(err)
	}
	if err := json.Unmarshal(b, v); err != nil {
		t.Fatal(err)
	}
}

// torchConfig are settings as reference.py names them; Z is what SetKL gets.
type torchConfig struct {
	Beta, Smoothing, Gamma, Lambda, Desirable, Undesirable, SFT, Z float64
	Average                                                        bool
}

func (s torchConfig) objective(t *testing.T, name string) model.Objective {
	t.Helper()
	o := must(t, name, Config{s.Beta, s.Smoothing, s.Gamma, s.Lambda, s.Desirable, s.Undesirable, s.SFT, s.Average})
	if k, ok := o.(KLSetter); ok {
		k.SetKL(s.Z)
	}
	return o
}

func (c torchCase) objective(t *testing.T) (model.Objective, *model.Micro) {
	t.Helper()
	o := c.Config.objective(t, c.Name)
	return o, &model.Micro{Seqs: c.Seqs, Len: c.Len, Weight: c.Weight, Labels: c.Labels, Pairs: c.Name != KTO, Ref: c.Ref}
}

// TestTorch: values and slopes of every objective against PyTorch, and pairs one by one against all at once.
func TestTorch(t *testing.T) {
	seen := map[string]bool{LM: true}
	for i, c := range torchCases(t) {
		seen[c.Name] = true
		t.Run(fmt.Sprintf("%d-%s", i, c.Name), func(t *testing.T) {
			o, m := c.objective(t)
			loss, weight, slope, metrics := run(o, m, c.Y)
			if !near(loss, c.Loss, 1e-9) || weight != float64(len(c.Each)) {
				t.Errorf("loss %v of weight %v, PyTorch %v of %d", loss, weight, c.Loss, len(c.Each))
			}
			for r, s := range slope {
				if !near(float64(s), c.Slope[r], 1e-7) {
					t.Errorf("slope %d = %v, PyTorch %v", r, s, c.Slope[r])
				}
			}
			step := c.Seqs / len(c.Each) // sequences of a part
			var sum float64
			parts := make([]float64, len(metrics))
			for p, want := range c.Each {
				from, to := p*step, (p+1)*step
				one := &model.Micro{Seqs: step, Len: c.Len, Weight: c.Weight[from*c.Len : to*c.Len], Labels: c.Labels[from:to], Pairs: m.Pairs}
				if c.Ref != nil {
					one.Ref = c.Ref[from:to]
				}
				alone := make([]float32, one.Rows())
				loss, _ := o.Loss(one, c.Y[from*c.Len:to*c.Len], alone, parts)
				sum += loss
				if !near(loss, want, 1e-9) {
					t.Errorf("part %d: loss %v, PyTorch %v", p, loss, want)
				}
				for r, s := range alone {
					if s != slope[from*c.Len+r] {
						t.Errorf("part %d, row %d: slope %v alone, %v among others", p, r, s, slope[from*c.Len+r])
					}
				}
			}
			if sum != loss {
				t.Errorf("parts sum to %v, all at once %v", sum, loss)
			}
			for k, v := range parts {
				if v != metrics[k] {
					t.Errorf("%s: parts sum to %v, all at once %v", o.Metrics()[k], v, metrics[k])
				}
			}
			if again, w := o.Loss(m, c.Y, nil, nil); again != loss || w != weight {
				t.Errorf("loss without slopes and metrics %v of %v, with them %v of %v", again, w, loss, weight)
			}
		})
	}
	for _, name := range Names() {
		if !seen[name] {
			t.Errorf("no case of %s", name)
		}
	}
}

// TestFiniteDifferences: every slope of every objective at random points.
func TestFiniteDifferences(t *testing.T) {
	rng := rand.New(rand.NewPCG(1, 2))
	for round := range 5 {
		for i, c := range torchCases(t) {
			o, m := c.objective(t)
			y := make([]float64, m.Rows())
			for r := range y {
				if m.Weight[r] != 0 {
					y[r] = 0.05 + 3*rng.Float64()
				}
			}
			_, _, slope, _ := run(o, m, y)
			for r := range y {
				if m.Weight[r] == 0 {
					if slope[r] != 0 {
						t.Errorf("round %d case %d %s: slope %v of a row without weight", round, i, c.Name, slope[r])
					}
					continue
				}
				const h = 1e-5
				at := y[r]
				y[r] = at + h
				up, _ := o.Loss(m, y, nil, nil)
				y[r] = at - h
				down, _ := o.Loss(m, y, nil, nil)
				y[r] = at
				if want := (up - down) / (2 * h); !near(float64(slope[r]), want, 2e-6) {
					t.Errorf("round %d case %d %s: slope %v of row %d, differences %v", round, i, c.Name, slope[r], r, want)
				}
			}
		}
	}
}

// swap exchanges the answers of each pair.
func swap(m *model.Micro, y []float64) (*model.Micro, []float64) {
	s, z := *m, make([]float64, len(y))
	s.Weight, s.Ref = make([]float32, len(m.Weight)), append([]float64(nil), m.Ref...)
	for q := range m.Seqs {
		copy(s.Weight[q*m.Len:(q+1)*m.Len], m.Weight[(q^1)*m.Len:])
		copy(z[q*m.Len:(q+1)*m.Len], y[(q^1)*m.Len:])
		if m.Ref != nil {
			s.Ref[q] = m.Ref[q^1]
		}
	}
	return &s, z
}

// TestSwap: exchanging chosen and rejected turns every margin, and -log sigmoid(-x) is -log sigmoid(x) + x.
func TestSwap(t *testing.T) {
	m, y := micro([]float64{-3, -4, -6, -1}, []float64{0.5, 1}, []float64{2, 2, 1.5}, []float64{3}, []float64{0.2, 0.3})
	turned, yt := swap(m, y)
	for _, name := range []string{DPO, CDPO, Robust, IPO, Hinge, SimPO, ORPO, Reward} {
		o := must(t, name, Default(name))
		loss, _, _, a := run(o, m, y)
		back, _, slope, b := run(o, turned, yt)
		if a[rewardMargin] == 0 || a[rewardMargin] != -b[rewardMargin] || a[rewardChosen] != b[rewardRejected] || a[rewardAccuracy]+b[rewardAccuracy] != 2 {
			t.Errorf("%s: metrics %v and, with the answers exchanged, %v", name, a, b)
		}
		x := a[rewardMargin] // of both pairs together
		var want float64
		switch name {
		case DPO, Reward:
			want = loss + x
		case CDPO:
			want = loss + (1-2*0.1)*x
		case Robust:
			want = loss + x*(1+2*0.1/(1-2*0.1))
		case IPO:
			want = loss + 4*(x/0.1)*5 // (-D-5)^2 - (D-5)^2 = 20 D
		default:
			continue
		}
		if !near(back, want, 1e-12) {
			t.Errorf("%s: loss %v with the answers exchanged, want %v", name, back, want)
		}
		if name == DPO && (slope[1] <= 0 || slope[m.Len+1] >= 0) {
			t.Errorf("dpo: slopes %v do not raise the chosen answer and lower the rejected", slope)
		}
	}
}

// TestShift: a constant added to all logits, or to the log-probabilities of policy and reference alike, changes nothing.
func TestShift(t *testing.T) {
	rng := rand.New(rand.NewPCG(3, 4))
	logits := make([][]float64, 8)
	for r := range logits {
		for range 5 {
			logits[r] = append(logits[r], 4*rng.NormFloat64())
		}
	}
	ofLogits := func(shift float64) (*model.Micro, []float64) {
		var a [4][]float64
		for r, row := range logits {
			var sum float64
			for _, l := range row {
				sum += math.Exp(l + shift)
			}
			a[r/2] = append(a[r/2], math.Log(sum)-(row[r%5]+shift))
		}
		return micro([]float64{-3, -5, -4, -2}, a[:]...)
	}
	for _, name := range Names()[1:] {
		o := must(t, name, Default(name))
		m, y := ofLogits(0)
		want, _, slope, _ := run(o, m, y)
		m, y = ofLogits(17)
		got, _, shifted, _ := run(o, m, y)
		if !near(got, want, 1e-12) {
			t.Errorf("%s: loss %v, with all logits shifted %v", name, want, got)
		}
		for r := range slope {
			if !near(float64(shifted[r]), float64(slope[r]), 1e-6) {
				t.Errorf("%s: slope %v, with all logits shifted %v", name, slope[r], shifted[r])
			}
		}
		if k, _ := kindOf(name); !k.needs.Reference {
			continue
		}
		for r := range y {
			if m.Weight[r] != 0 {
				y[r] += 0.75
			}
		}
		for s := range m.Ref {
			m.Ref[s] -= 2 * 0.75 // two tokens each
		}
		if got, _, _, _ := run(o, m, y); !near(got, want, 1e-12) {
			t.Errorf("%s: loss %v, with policy and reference shifted alike %v", name, want, got)
		}
	}
}

// TestLengths: losses of mean log-probabilities do not see the length of an answer, those of sums do, and no loss sees
// rows without weight.
func TestLengths(t *testing.T) {
	short, ys := micro([]float64{0, 0}, []float64{1, 1}, []float64{2})
	long, yl := micro([]float64{0, 0}, []float64{1, 1, 1, 1, 1}, []float64{2})
	for _, c := range []struct {
		name string
		c    Config
		same bool
	}{{SimPO, Default(SimPO), true}, {ORPO, Default(ORPO), true}, {IPO, Config{Beta: 0.1, Average: true}, true}, {IPO, Default(IPO), false}, {DPO, Default(DPO), false}} {
		o := must(t, c.name, c.c)
		a, _, _, _ := run(o, short, ys)
		b, _, slope, _ := run(o, long, yl)
		if (a == b) != c.same {
			t.Errorf("%s %+v: loss %v of 2 tokens, %v of 5", c.name, c.c, a, b)
		}
		before := append([]float64(nil), yl...)
		yl[0], yl[long.Len-1] = 1e6, math.NaN()
		again, _, same, _ := run(o, long, yl)
		copy(yl, before)
		if again != b || fmt.Sprint(same) != fmt.Sprint(slope) {
			t.Errorf("%s: rows without weight change the loss from %v to %v", c.name, b, again)
		}
	}
}

// TestEmptyAnswer: a pair of which an answer lost all its tokens adds nothing, and its neighbours stay what they were.
func TestEmptyAnswer(t *testing.T) {
	whole, yw := micro([]float64{-1, -2}, []float64{1, 2}, []float64{3})
	m, y := micro([]float64{-1, -2, -3, -4}, []float64{1, 2}, []float64{3}, []float64{1}, nil)
	for _, name := range Names()[1:] {
		o := must(t, name, Default(name))
		want, n, _, wantMetrics := run(o, whole, yw)
		got, weight, slope, metrics := run(o, m, y)
		if name == KTO { // its third answer stands on its own
			if weight != 3 || math.IsNaN(got) {
				t.Errorf("kto: loss %v of weight %v, want 3", got, weight)
			}
			continue
		}
		if got != want || weight != n || fmt.Sprint(metrics) != fmt.Sprint(wantMetrics) || slope[2*m.Len+1] != 0 {
			t.Errorf("%s: loss %v of %v and %v, want %v of %v and %v", name, got, weight, metrics, want, n, wantMetrics)
		}
	}
}

// TestExtremes: far answers and certain ones give finite losses and slopes.
func TestExtremes(t *testing.T) {
	for _, a := range [][2]float64{{0, 1e4}, {1e4, 0}, {0, 0}, {1e4, 1e4}, {1e-300, 50}, {50, 1e-300}} {
		m, y := micro([]float64{0, 0}, []float64{a[0], a[0]}, []float64{a[1]})
		for _, name := range Names()[1:] {
			loss, _, slope, metrics := run(must(t, name, Default(name)), m, y)
			ok := !math.IsNaN(loss) && !math.IsInf(loss, 0) && loss >= -1e4
			for _, s := range slope {
				ok = ok && !math.IsNaN(float64(s)) && !math.IsInf(float64(s), 0)
			}
			for _, v := range metrics {
				ok = ok && !math.IsNaN(v) && !math.IsInf(v, 0)
			}
			if !ok {
				t.Errorf("%s at %v: loss %v, slopes %v, metrics %v", name, a, loss, slope, metrics)
			}
		}
	}
	for _, name := range []string{DPO, Hinge, KTO} { // what is not a number is not hidden
		m, y := micro([]float64{0, 0}, []float64{math.NaN()}, []float64{1})
		if loss, _, _, _ := run(must(t, name, Default(name)), m, y); !math.IsNaN(loss) {
			t.Errorf("%s: loss %v of an answer that is not a number", name, loss)
		}
	}
}

// TestKL: the reference point counts from 0 and moves both labels; its metrics are told apart by label.
func TestKL(t *testing.T) {
	m, y := micro([]float64{-3, -3, -3}, []float64{1}, []float64{1}, []float64{4}) // log-ratios 2, 2, -1
	m.Labels = []int8{1, -1, 1}
	o := must(t, KTO, Config{Beta: 0.5, Desirable: 2, Undesirable: 3})
	want := func(z float64) float64 {
		s := func(x float64) float64 { return 1 / (1 + math.Exp(-x)) }
		return 2*(1-s(0.5*(2-z))) + 3*(1-s(0.5*(z-2))) + 2*(1-s(0.5*(-1-z)))
	}
	for _, z := range []float64{0, 1.5, -4} {
		o.(KLSetter).SetKL(z)
		loss, weight, _, sums := run(o, m, y)
		if !near(loss, want(max(0, z)), 1e-12) || weight != 3 {
			t.Errorf("z %v: loss %v of %v, want %v of 3", z, loss, weight, want(max(0, z)))
		}
		got := fmt.Sprint(Report(o, sums, weight))
		if want := "[{reward_chosen 0.25} {reward_rejected 1} {reward_margin -0.75} {reward_accuracy 0.3333333333333333} {logp_chosen -2.5} {logp_rejected -1}]"; got != want {
			t.Errorf("z %v: report %s, want %s", z, got, want)
		}
	}
	m.Labels = []int8{1, 1, 1}
	_, weight, _, sums := run(o, m, y)
	for _, v := range Report(o, sums, weight) {
		if strings.Contains(v.Name, "rejected") || v.Name == "reward_margin" {
			t.Errorf("%s = %v with no undesirable answer", v.Name, v.Value)
		}
	}
}

// TestMetrics: what users see of a stage on pairs.
func TestMetrics(t *testing.T) {
	m, y := micro([]float64{-4, -4, -1, -1}, []float64{1, 2}, []float64{6}, []float64{2}, []float64{1})
	for _, c := range []struct {
		name string
		c    Config
		want string
	}{
		{DPO, Config{Beta: 0.5}, "[{reward_chosen 0} {reward_rejected -0.5} {reward_margin 0.5} {reward_accuracy 0.5} {logp_chosen -2.5} {logp_rejected -3.5}]"},
		{DPO, Config{Beta: 0.5, SFT: 1}, "[{reward_chosen 0} {reward_rejected -0.5} {reward_margin 0.5} {reward_accuracy 0.5} {logp_chosen -2.5} {logp_rejected -3.5} {nll_chosen 1.75}]"},
		{SimPO, Config{Beta: 2, Gamma: 1}, "[{reward_chosen -3.5} {reward_rejected -7} {reward_margin 3.5} {reward_accuracy 0.5} {logp_chosen -2.5} {logp_rejected -3.5}]"},
		{ORPO, Config{Lambda: 2}, "[{reward_chosen -3.5} {reward_rejected -7} {reward_margin 3.5} {reward_accuracy 0.5} {logp_chosen -2.5} {logp_rejected -3.5} {nll_chosen 1.75}]"},
		{Reward, Config{}, "[{reward_chosen 2} {reward_rejected 3.5} {reward_margin -1.5} {reward_accuracy 0.5}]"},
	} {
		o := must(t, c.name, c.c)
		_, weight, _, sums := run(o, m, y)
		if got := fmt.Sprint(Report(o, sums, weight)); got != c.want {
			t.Errorf("%s %+v:\n%s, want\n%s", c.name, c.c, got, c.want)
		}
		if Report(o, make([]float64, len(sums)), 0) != nil {
			t.Errorf("%s: a report of nothing", c.name)
		}
	}
}

// TestCheck: micro-batches an objective cannot read are refused by what they lack, and their loss is no number.
func TestCheck(t *testing.T) {
	for name, c := range map[string]struct {
		objective string
		spoil     func(*model.Micro)
		want      string
	}{
		"no reference":    {DPO, func(m *model.Micro) { m.Ref = nil }, "objective dpo needs the reference's log-probabilities"},
		"short reference": {KTO, func(m *model.Micro) { m.Ref = m.Ref[:1] }, "1 log-probabilities of the reference for 2 sequences"},
		"no pairs":        {SimPO, func(m *model.Micro) { m.Pairs = false }, "objective simpo needs pairs"},
		"odd":             {ORPO, func(m *model.Micro) { m.Seqs, m.Weight = 1, m.Weight[:m.Len] }, "1 sequences"},
		"no labels":       {KTO, func(m *model.Micro) { m.Labels = nil }, "0 labels for 2 sequences"},
		"label":           {KTO, func(m *model.Micro) { m.Labels[1] = 0 }, "label 0 of sequence 1"},
		"weights":         {DPO, func(m *model.Micro) { m.Weight = m.Weight[1:] }, "weights for"},
	} {
		m, y := micro([]float64{0, 0}, []float64{1}, []float64{2})
		o := must(t, c.objective, Default(c.objective))
		if err := checked(o, m); err != nil {
			t.Errorf("%s: a good micro-batch is refused: %v", name, err)
		}
		c.spoil(m)
		if err := checked(o, m); err == nil || !strings.Contains(err.Error(), c.want) {
			t.Errorf("%s: error %v, want %q", name, err, c.want)
		}
		if loss, _ := o.Loss(m, y, make([]float32, len(y)), nil); !math.IsNaN(loss) {
			t.Errorf("%s: loss %v, want none", name, loss)
		}
		if err := checked(o, &model.Micro{}); err != nil {
			t.Errorf("%s: an empty micro-batch is refused: %v", name, err)
		}
	}
}

// TestAllocations: a warm step allocates nothing.
func TestAllocations(t *testing.T) {
	m, y := micro([]float64{-1, -2}, []float64{1, 2}, []float64{3})
	for _, name := range Names()[1:] {
		o := must(t, name, Default(name))
		slope, metrics := make([]float32, len(y)), make([]float64, len(o.Metrics()))
		if err := checked(o, m); err != nil {
			t.Error(err)
		}
		if n := testing.AllocsPerRun(10, func() { o.Loss(m, y, slope, metrics) }); n != 0 {
			t.Errorf("%s: %v allocations", name, n)
		}
	}
}
