package model

import (
	"math"
	"math/rand/v2"
	"slices"
	"testing"

	"moetor/internal/tensor"
)

// score runs a gate over rows whose scores before the sigmoid are given: its weight is the identity.
func score(t *testing.T, m MoE, bias []float32, logits ...[]float32) (*Router, *pass, *gatePass, tensor.Mat) {
	t.Helper()
	e := m.Experts
	gate := &tensor.Param{Name: "gate", Shape: []int{e, e}}
	tensor.Allocate([]*tensor.Param{gate})
	for i := range e {
		gate.Value[i*e+i] = 1
	}
	r := newRouter(Config{MoE: m}, 0, gate)
	copy(r.Bias, bias)
	x := tensor.NewMat(len(logits), e)
	for i, l := range logits {
		copy(x.Row(i), l)
	}
	p := &pass{arena: tensor.NewArena(0), temp: tensor.NewArena(0)}
	weight := make([]float32, len(logits))
	for i := range weight {
		weight[i] = 1
	}
	micro := &Micro{Seqs: 1, Len: len(logits), Tokens: make([]int32, len(logits)), Targets: make([]int32, len(logits)), Weight: weight}
	p.begin(Config{MoE: m}, 0, micro, true)
	act := &gatePass{}
	r.forward(p, act, x, p.real)
	return r, p, act, x
}

// TestGateExample is the worked example: bias and groups steer the selection, weights come
// from the unbiased scores.
func TestGateExample(t *testing.T) {
	m := MoE{Experts: 8, TopK: 3, Groups: 4, TopGroups: 2, Score: Sigmoid, Normalize: true, Scale: 2.5}
	logits := []float32{0.2, 1.0, -0.5, 0.8, 1.5, -1.0, 0.0, 0.3}
	bias := []float32{0, -0.2, 0.1, 0, -0.5, 0.3, 0.4, 0}
	r, _, act, _ := score(t, m, bias, logits)
	if want := []int32{6, 3, 7}; !slices.Equal(act.chosen, want) {
		t.Errorf("chose %v, want %v", act.chosen, want)
	}
	for i, want := range []float64{.549834, .731059, .377541, .689974, .817574, .268941, .5, .574443} {
		near(t, "score", float64(act.score.Row(0)[i]), want, 5e-7)
	}
	for j, want := range []float64{.708449, .977624, .813927} {
		near(t, "weight", float64(act.weight.Row(0)[j]), want, 5e-7)
	}
	if want := []int64{0, 0, 0, 1, 0, 0, 1, 1}; !slices.Equal(r.Counts, want) {
		t.Errorf("counts %v, want %v", r.Counts, want)
	}
	for g, want := range []float64{1.080893, 1.167515, .886516, 1.474443} {
		near(t, "group score", float64(r.scratch[0].groupScore[g]), want, 1e-6)
	}
	m.Groups, m.TopGroups = 1, 1
	if _, _, act, _ = score(t, m, nil, logits); !slices.Equal(act.chosen, []int32{4, 1, 3}) {
		t.Errorf("without bias and groups chose %v, want [4 1 3]", act.chosen)
	}
}

// A softmax gate ranks groups by their best expert and does not renormalise (DeepSeek-V2).
func TestSoftmaxGate(t *testing.T) {
	m := MoE{Experts: 4, TopK: 2, Groups: 2, TopGroups: 1, Score: Softmax, Scale: 16}
	p := []float64{0.3, 0.3, 0.35, 0.05}
	logits := make([]float32, 4)
	for i, v := range p {
		logits[i] = float32(math.Log(v))
	}
	r, _, act, _ := score(t, m, nil, logits)
	if want := []int32{2, 3}; !slices.Equal(act.chosen, want) { // the sum of two would have kept the other group
		t.Errorf("chose %v, want %v", act.chosen, want)
	}
	near(t, "weight", float64(act.weight.Row(0)[0]), 16*0.35, 1e-5)
	near(t, "weight", float64(act.weight.Row(0)[1]), 16*0.05, 1e-5)
	if r.Bias != nil {
		t.Error("a softmax gate has a bias")
	}
	r.UpdateBias(r.Counts, 1) // has nothing to move
}

// A group that is left out counts as minus infinity, not as zero: a negative biased score in a kept group wins.
func TestUnselectedGroupsAreMinusInfinity(t *testing.T) {
	m := MoE{Experts: 4, TopK: 2, Groups: 2, TopGroups: 1, Score: Sigmoid, Scale: 1}
	_, _, act, _ := score(t, m, []float32{1, -0.9, -0.2, -0.2}, []float32{0, 0, 0, 0})
	if want := []int32{0, 1}; !slices.Equal(act.chosen, want) {
		t.Errorf("chose %v, want %v", act.chosen, want)
	}
}

func TestTopK(t *testing.T) {
	nan, inf := float32(math.NaN()), float32(math.Inf(1))
	for _, test := range []struct {
		score []float32
		want  []int32
	}{
		{[]float32{1, 3, 3, 2}, []int32{1, 2}},
		{[]float32{0, 0, 0}, []int32{0, 1, 2}},
		{[]float32{-inf, nan, -1, nan}, []int32{2, 0, 1}},
		{[]float32{nan, nan}, []int32{0, 1}},
	} {
		got := make([]int32, len(test.want))
		topK(got, test.score)
		if !slices.Equal(got, test.want) {
			t.Errorf("top %d of %v is %v, want %v", len(got), test.score, got, test.want)
		}
	}
	rng := rand.New(rand.NewPCG(1, 2))
	for range 200 {
		score := make([]float32, 1+rng.IntN(20))
		for i := range score {
			score[i] = float32(rng.IntN(6))
		}
		order := make([]int32, len(score))
		for i := range order {
			order[i] = int32(i)
		}
		slices.SortStableFunc(order, func(a, b int32) int { return int(score[b]) - int(score[a]) })
		got := make([]int32, 1+rng.IntN(len(score)))
		topK(got, score)
		if !slices.Equal(got, order[:len(got)]) {
			t.Fatalf("top %d of %v is %v, want %v", len(got), score, got, order[:len(got)])
		}
	}
}

func logit(p float64) float32 { return float32(math.Log(p / (1 - p))) }

// TestBalanceLoss has a worked example, computed by hand, and that perfect balance gives alpha.
func TestBalanceLoss(t *testing.T) {
	m := MoE{Experts: 4, TopK: 1, Groups: 1, TopGroups: 1, Score: Sigmoid, Scale: 1, SeqAux: 0.1}
	_, p, act, _ := score(t, m, []float32{0, 0, 9, 0}, // the bias sends all tokens to expert 2, and the loss does not care
		[]float32{logit(.9), logit(.1), logit(.1), logit(.1)}, []float32{logit(.2), logit(.6), logit(.1), logit(.1)})
	if !slices.Equal(act.chosen, []int32{2, 2}) {
		t.Errorf("chose %v", act.chosen)
	}
	near(t, "balance loss", p.sums.Aux, 2*0.1*1.6333333, 1e-6) // times the sequence's weight of 2
	var rows [][]float32
	for i := range 4 {
		row := []float32{-1, -1, -1, -1}
		row[i] = 1
		rows = append(rows, row)
	}
	_, p, _, _ = score(t, m, nil, rows...)
	near(t, "balance loss in balance", p.sums.Aux/4, 0.1, 1e-8)
}

// Pitfall P02: the loss sees every token, none dropped: all eight tokens at expert 0 with probability .7 give 2.8 alpha,
// total collapse gives E alpha.
func TestBalanceLossOfCollapse(t *testing.T) {
	m := MoE{Experts: 4, TopK: 1, Groups: 1, TopGroups: 1, Score: Softmax, Scale: 1, SeqAux: 1}
	for _, test := range []struct {
		logits []float32
		want   float64
	}{
		{[]float32{float32(math.Log(7)), 0, 0, 0}, 2.8},
		{[]float32{50, 0, 0, 0}, 4},
	} {
		rows := slices.Repeat([][]float32{test.logits}, 8)
		_, p, _, _ := score(t, m, nil, rows...)
		near(t, "balance loss", p.sums.Aux/8, test.want, 1e-6)
	}
}

// TestBalanceLossGradient is pitfall P06: the loss reaches the router, as finite differences say, in proportion to alpha.
func TestBalanceLossGradient(t *testing.T) {
	for _, kind := range []string{Sigmoid, Softmax} {
		m := MoE{Experts: 4, TopK: 2, Groups: 1, TopGroups: 1, Score: kind, Normalize: true, Scale: 1.5, SeqAux: 1}
		logits := [][]float32{{0.3, -0.8, 0.9, 0.1}, {1.2, 0.4, -0.5, 0.2}, {0.7, -0.1, 0.3, -1.3}}
		grad := func(m MoE) []float32 {
			r, p, act, x := score(t, m, nil, logits...)
			dx := tensor.NewMat(3, 4)
			r.backward(p, act, dx, tensor.NewMat(3, 2), x)
			return dx.Data
		}
		got := grad(m)
		loss := func() float64 {
			_, p, _, _ := score(t, m, nil, logits...)
			return p.sums.Aux
		}
		const h = 1e-2
		for i := range logits {
			for j := range logits[i] {
				old := logits[i][j]
				logits[i][j] = old + h
				up := loss()
				logits[i][j] = old - h
				down := loss()
				logits[i][j] = old
				near(t, kind+" gradient", float64(got[4*i+j]), (up-down)/(2*h), 2e-4)
			}
		}
		var size float64
		m.SeqAux = 2
		for i, v := range grad(m) {
			size += math.Abs(float64(v))
			near(t, "gradient of twice alpha", float64(v), 2*float64(got[i]), 1e-6)
		}
		if size < 0.1 {
			t.Errorf("%s: the gradient is next to nothing: %v", kind, got)
		}
	}
}

func TestUpdateBias(t *testing.T) {
	bias := func(counts []int64, speed float32) []float32 {
		r := &Router{Bias: make([]float32, len(counts))}
		r.UpdateBias(counts, speed)
		return r.Bias
	}
	for _, test := range []struct {
		counts []int64
		speed  float32
		want   []float32
	}{
		{[]int64{3, 1}, 0.3, []float32{-0.3, 0.3}}, // P03
		{[]int64{10, 2, 4, 4}, 0.001, []float32{-0.001, 0.001, 0.001, 0.001}},
		{[]int64{5, 5}, 1, []float32{0, 0}},
		{[]int64{0, 0}, 1, []float32{0, 0}},
		{[]int64{3, 1}, 0, []float32{0, 0}},
		{[]int64{40840, 40850}, 1, []float32{1, -1}},                 // P04: equal in bfloat16
		{[]int64{1<<53 + 2, 1<<53 + 1}, 1, []float32{-1, 1}},         // equal in float64
		{[]int64{40840, 40850, 40845}, 0.5, []float32{0.5, -0.5, 0}}, // the mean itself
	} {
		if got := bias(test.counts, test.speed); !slices.Equal(got, test.want) {
			t.Errorf("counts %v move the bias by %v, want %v", test.counts, got, test.want)
		}
	}
}

func TestBalanceStatistics(t *testing.T) {
	vio, dead, entropy := Balance([]int64{10, 2, 4, 4})
	if vio != 1 || dead != 0 {
		t.Errorf("MaxVio %v, dead %d, want 1 and 0", vio, dead)
	}
	near(t, "entropy", entropy, -(0.5*math.Log(0.5) + 0.1*math.Log(0.1) + 2*0.2*math.Log(0.2)), 1e-12)
	vio, dead, entropy = Balance([]int64{4, 0, 0, 0})
	if vio != 3 || dead != 3 || entropy != 0 {
		t.Errorf("collapsed: %v %d %v", vio, dead, entropy)
	}
	vio, dead, entropy = Balance([]int64{2, 2})
	near(t, "entropy of balance", entropy, math.Ln2, 1e-12)
	if vio != 0 || dead != 0 {
		t.Errorf("balanced: %v %d", vio, dead)
	}
	if vio, dead, entropy = Balance([]int64{0, 0}); vio != 0 || dead != 0 || entropy != 0 {
		t.Errorf("no tokens: %v %d %v", vio, dead, entropy)
	}
}

// The angles of DeepSeek-V3's rotary embedding: pair j turns by position * 10000^(-2j/64).
func TestRope(t *testing.T) {
	p := newRope(8, 64, 10000)
	x := make([]float32, 64)
	for i := range x {
		x[i] = float32(i%5) - 2
	}
	y := slices.Clone(x)
	p.rotate(y, 7)
	for j := range 32 {
		angle := 7 * math.Pow(10000, -float64(j)/32)
		a, b := float64(x[2*j]), float64(x[2*j+1])
		near(t, "even", float64(y[2*j]), a*math.Cos(angle)-b*math.Sin(angle), 1e-6)
		near(t, "odd", float64(y[2*j+1]), a*math.Sin(angle)+b*math.Cos(angle), 1e-6)
	}
	near(t, "theta_10", math.Asin(float64(p.sin[1*32+10])), 0.0562341325, 1e-8)
	p.unrotate(y, 7)
	for i := range x {
		near(t, "turned back", float64(y[i]), float64(x[i]), 1e-6)
	}
}
