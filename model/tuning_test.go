package model

import (
	"context"
	"math"
	"slices"
	"testing"
)

// TestIsolation is pitfall P27: another sample in the same row changes neither what is said of this one, nor its share of
// the gradients, to the bit.
func TestIsolation(t *testing.T) {
	c := tiny()
	c.MoE.SeqAux = 0 // the balance loss is of whole rows
	const cutAt, v = 11, 29
	row := micro(c, 1, 1, 27)
	row.Starts = []int32{0, cutAt}
	clear(row.Weight[:cutAt]) // so all gradients are the second sample's
	a, b := cut(t, c, 5, 0), cut(t, c, 5, 0)
	other := row
	other.Tokens, other.Targets = slices.Clone(row.Tokens), slices.Clone(row.Targets)
	for r := range cutAt {
		other.Tokens[r], other.Targets[r] = (row.Tokens[r]+7)%v, (row.Targets[r]+5)%v
	}
	if !slices.Equal(a.logits(t, row)[cutAt*v:], b.logits(t, other)[cutAt*v:]) {
		t.Error("another first sample changes the second's logits")
	}
	for name, s := range map[string]Settings{"cross-entropy": {MTPWeight: 0.3}, "objective": {Objective: byWeight{}}} {
		want, got := a.step(t, []Micro{row}, s), b.step(t, []Micro{other}, s)
		if !got[0].equal(want[0]) {
			t.Errorf("%s: sums %v, want %v", name, got, want)
		}
		grads := b.grads()
		for n, g := range a.grads() {
			if !slices.Equal(grads[n], g) {
				t.Errorf("%s: gradient of %s is off by %g", name, n, distance(grads[n], g))
			}
		}
	}
}

// TestPackedSum: loss and gradients of packed samples are the sums of those of the samples alone, weighted by token.
func TestPackedSum(t *testing.T) {
	c := tiny()
	c.MoE.SeqAux = 0
	packed := micro(c, 1, 2, 32)
	packed.Starts, packed.Valid = []int32{0, 9, 14, 32, 51}, []int32{32, 28}
	for r := range packed.Weight {
		packed.Weight[r] = float32(r%3) / 2
		if r >= 60 {
			packed.Weight[r] = 0
		}
	}
	var alone []Micro
	for i, from := range packed.Starts {
		to := append(slices.Clone(packed.Starts), 60)[i+1]
		alone = append(alone, Micro{Seqs: 1, Len: int(to - from), Tokens: packed.Tokens[from:to], Targets: packed.Targets[from:to], Weight: packed.Weight[from:to]})
	}
	a, b := cut(t, c, 5, 0), cut(t, c, 5, 0)
	want, got := total(a.step(t, alone, Settings{MTPWeight: 0.3})), total(b.step(t, []Micro{packed}, Settings{MTPWeight: 0.3}))
	near(t, "loss", got.Loss, want.Loss, 1e-9*want.Loss)
	near(t, "MTP loss", got.MTP, want.MTP, 1e-9*want.MTP)
	if got.Weight != want.Weight {
		t.Errorf("weight %v, want %v", got.Weight, want.Weight)
	}
	grads := b.grads()
	for n, g := range a.grads() {
		if d := distance(grads[n], g); d > 1e-5 {
			t.Errorf("gradient of %s is off by %.2g", n, d)
		}
	}
}

// TestSeqAux: a stage's alpha takes the place of the model's, for as long as it is bound, and SeqWeight that of the
// target weights.
func TestSeqAux(t *testing.T) {
	c := tiny()
	c.MoE.SeqAux = 0.5
	m := answers(micro(c, 1, 2, 16))
	alpha := func(x float64) *float64 { return &x }
	p := cut(t, c, 5, 0, 2)
	base := total(p.step(t, []Micro{m}, Settings{}))
	if base.Aux == 0 {
		t.Fatal("no balance loss")
	}
	off := c
	off.MoE.SeqAux = 0
	none := cut(t, off, 5, 0, 2)
	none.step(t, []Micro{m}, Settings{})
	if s := total(p.step(t, []Micro{m}, Settings{SeqAux: alpha(0)})); s.Aux != 0 {
		t.Errorf("balance loss %v with alpha 0", s.Aux)
	}
	grads := p.grads()
	for n, g := range none.grads() {
		if !slices.Equal(grads[n], g) {
			t.Errorf("gradient of %s is not that of a model without balance loss", n)
		}
	}
	near(t, "balance loss at twice alpha", total(p.step(t, []Micro{m}, Settings{SeqAux: alpha(1)})).Aux, 2*base.Aux, 1e-6)
	near(t, "balance loss of the next step", total(p.step(t, []Micro{m}, Settings{})).Aux, base.Aux, 0)
	m.SeqWeight = []float64{2, 2} // the target weights are 8 and 8
	near(t, "balance loss of a quarter of the weight", total(p.step(t, []Micro{m}, Settings{})).Aux, base.Aux/4, 1e-6)
}

// TestRewardModel: what there is, what it counts, and where a score comes from.
func TestRewardModel(t *testing.T) {
	c := tiny()
	c.TieEmbed, c.Context = true, 16
	r := c.RewardModel()
	if errs := r.Validate(); len(errs) > 0 {
		t.Fatal(errs)
	}
	bad := r
	bad.MTP.Depth = 1
	if errs := bad.Validate(); len(errs) != 1 {
		t.Errorf("a reward model with MTP modules: %v", errs)
	} else {
		fails(t, errs[0], "model.mtp.depth=1")
	}
	lm := c
	lm.MTP.Depth = 0
	got, want := Count(r), Count(lm)
	want.Total, want.Active = want.Total+int64(c.Dim), want.Active+int64(c.Dim)
	want.ActiveNoEmbed = want.Active - int64(c.Vocab*c.Dim)
	if got != want {
		t.Errorf("counts %+v, want %+v", got, want)
	}
	if got, want := FLOPs(lm, 16).Forward-FLOPs(r, 16).Forward, float64(2*c.Dim*(c.Vocab-1)); got != want {
		t.Errorf("the score saves %v FLOPs, want %v", got, want)
	}
	var layers float64
	for _, x := range LayerCosts(r) {
		layers += x
	}
	if layers != FLOPs(r, 16).Forward+float64(c.Dim) {
		t.Errorf("layer costs sum to %v", layers)
	}
	names := func(c Config) (list []string) {
		ch, err := New(c, Whole(c), 5, nil)
		check(t, err)
		for _, q := range ch.Params() {
			list = append(list, q.Name)
		}
		return list
	}
	untied := lm
	untied.TieEmbed = false
	plain := names(untied)
	plain[slices.Index(plain, "lm_head.weight")] = "score.weight"
	if !slices.Equal(names(r), plain) {
		t.Errorf("parameters %v, want %v", names(r), plain)
	}

	p := cut(t, r, 5, 0, 1)
	head := p[1]
	q := head.Params()[len(head.Params())-1]
	var square float64
	for _, v := range q.Value {
		square += float64(v) * float64(v)
	}
	if deviation := math.Sqrt(square / 16); q.Name != "score.weight" || !q.Decay || !slices.Equal(q.Shape, []int{1, 16}) || deviation < 0.1 || deviation > 0.3 {
		t.Errorf("%v with shape %v, decay %v and deviation %.3f, want about %v", q, q.Shape, q.Decay, deviation, r.InitStd)
	}
	m := micro(r, 1, 3, 8)
	clear(m.Weight[5:8])  // first sequence ends at row 4
	clear(m.Weight[8:15]) // second has its last row only
	clear(m.Weight[16:24])
	sums := p.evaluate(t, []Micro{m}, Settings{})
	if !sums[0].equal(Sums{Aux: sums[0].Aux}) || head.LogProbs(0) != nil {
		t.Errorf("a reward model has the sums %+v and log-probabilities %v", sums[0], head.LogProbs(0))
	}
	whole := cut(t, r, 5, 0)
	whole[0].Bind([]Micro{m}, Settings{Objective: byWeight{}})
	_, err := whole[0].Forward(context.Background(), 0, nil)
	check(t, err)
	hidden := whole[0].flying[0].head.hidden
	for s, row := range []int{4, 15} {
		var score float64
		for i, w := range q.Value {
			score += float64(w) * float64(hidden.Row(row)[i])
		}
		near(t, "score", head.Scores(0)[s], score, 1e-6)
	}
	if got := head.Scores(0); len(got) != 3 || !math.IsNaN(got[2]) {
		t.Errorf("scores %v, want the third to be NaN", got)
	}
	p[0].Bind([]Micro{m}, Settings{})
	_, err = p[0].Forward(context.Background(), 0, nil)
	fails(t, err, "objective")
	_, err = NewDecoder(p...)
	fails(t, err, "reward model")
}
