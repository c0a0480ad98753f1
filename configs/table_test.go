package configs

import (
	"math"
	"slices"
	"strings"
	"testing"

	"moetor/model"
)

// TestV3Preset holds the preset to published counts: parameters of the main model, of one token, of the MTP module.
func TestV3Preset(t *testing.T) {
	r, err := Load("deepseek-v3", nil)
	if err != nil {
		t.Fatal(err)
	}
	m, err := r.ModelFor(264)
	if err != nil {
		t.Fatal(err)
	}
	n := model.Count(m)
	if n.Total != 671_026_404_352 || n.Active != 37_552_282_624 || n.MTP != 11_610_067_968 {
		t.Errorf("counted %+v", n)
	}
	table, err := ScheduleTable(r, 2048, nil)
	if err != nil {
		t.Fatal(err)
	}
	// 14,997 steps of ramp (an integral; whole sequences add a few) and 227,785 at the full batch.
	if steps := table.Totals[0].Step; steps < 242_782 || steps > 242_788 {
		t.Errorf("%d steps", steps)
	}
	// Each phase begins with the first step that has its tokens behind it.
	for change, c := range map[string]struct {
		tokens int64
		value  func(Row) float64
		want   float64
	}{
		"rate decays":   {10e12, func(r Row) float64 { return r.Rate }, 2.2e-4},
		"rate constant": {14.3e12, func(r Row) float64 { return r.Rate }, 2.2e-5},
		"rate tail":     {14.633e12, func(r Row) float64 { return r.Rate }, 7.3e-6},
		"full batch":    {469e9, func(r Row) float64 { return float64(r.Batch) }, 15360},
		"bias speed":    {14.3e12, func(r Row) float64 { return r.BiasSpeed }, 0},
		"MTP weight":    {10e12, func(r Row) float64 { return r.MTPWeight }, 0.1},
	} {
		i := slices.IndexFunc(table.Rows, func(r Row) bool { return slices.Contains(r.Changes, change) })
		if i < 0 {
			t.Errorf("no row says %q", change)
			continue
		}
		row := table.Rows[i]
		if row.Tokens < c.tokens || row.Tokens >= c.tokens+15360*4096 || math.Abs(c.value(row)-c.want) > 1e-6*c.want {
			t.Errorf("%s: %+v", change, row)
		}
	}
	last := table.Rows[len(table.Rows)-1]
	if last.Step != table.Totals[0].Step || table.Rows[0].Step != 1 || table.Rows[0].Rate != 2.2e-4/2000 || table.Rows[0].Micros != 24 {
		t.Errorf("first %+v, last %+v", table.Rows[0], last)
	}
}

// TestBenchShapes: the speed presets have the shapes of the PyTorch peer they are measured against, so as many weights.
func TestBenchShapes(t *testing.T) {
	for name, want := range map[string]struct {
		dim, heads, q, kv, dense, experts, topK, inter, groups, top int
		scale                                                       float64
	}{
		"bench-s":    {384, 6, 192, 128, 1024, 16, 4, 256, 1, 1, 1},
		"bench-fine": {256, 4, 128, 64, 768, 64, 8, 96, 8, 4, 2.5},
	} {
		r, err := Load(name, nil)
		if err != nil {
			t.Fatal(err)
		}
		m, err := r.ModelFor(264)
		if err != nil {
			t.Fatal(err)
		}
		a, e := m.Attention, m.MoE
		if m.Vocab != 4096 || m.Layers != 6 || m.DenseLayers != 1 || a.Nope != 64 || a.Rope != 32 || a.V != 64 || m.MTP.Depth != 0 || m.TieEmbed ||
			m.Dim != want.dim || a.Heads != want.heads || a.QLora != want.q || a.KVLora != want.kv || m.DenseInter != want.dense ||
			e.Experts != want.experts || e.TopK != want.topK || e.Inter != want.inter || e.Groups != want.groups || e.TopGroups != want.top ||
			e.Scale != want.scale || e.Shared != 1 || !e.Normalize || e.Score != "sigmoid" {
			t.Errorf("%s: %+v", name, m)
		}
		d, h := int64(want.dim), int64(want.heads)
		attention := d*int64(want.q) + int64(want.q)*h*96 + d*int64(want.kv+32) + int64(want.kv)*h*128 + h*64*d + int64(want.q+want.kv)
		moe := d*int64(want.experts) + 3*d*int64(want.inter)*int64(want.experts+1)
		params := 2*4096*d + d + 6*(attention+2*d) + 3*d*int64(want.dense) + 5*moe
		if n := model.Count(m).Total; n != params {
			t.Errorf("%s: %d parameters, the peer has %d", name, n, params)
		}
		if s := r.Stages[0]; s.Batch.Start*m.Context != 4096 || r.Parallel.Microbatch != 4 || s.Optimizer.Clip != 1 || s.Optimizer.WeightDecay != 0.1 {
			t.Errorf("%s: %+v", name, s)
		}
	}
}

// TestShakespeareChar: the published nanoGPT CPU setting, with at most 0.8M parameters active per token.
func TestShakespeareChar(t *testing.T) {
	r, err := Load("shakespeare-char", nil)
	if err != nil {
		t.Fatal(err)
	}
	m, err := r.ModelFor(68) // 65 characters and specials
	if err != nil {
		t.Fatal(err)
	}
	s := r.Stages[0]
	if n := model.Count(m).Active; n > 800_000 {
		t.Errorf("%d active parameters", n)
	}
	if m.Context != 64 || s.Batch.Start != 12 || s.Batch.End != 12 || s.Steps != 2000 || s.Val.Share != 0.1 || r.Tokenizer.Kind != "char" {
		t.Errorf("%+v", r)
	}
	if got, want := s.Rate.ConstantTokens+s.Rate.DecayTokens, int64(2000*12*64); got != want {
		t.Errorf("the rate ends at %d tokens, the run at %d", got, want)
	}
}

func TestModelFor(t *testing.T) {
	r := Default()
	if m, err := r.ModelFor(70); err != nil || m.Vocab != 70 {
		t.Errorf("vocabulary %d, %v", m.Vocab, err)
	}
	r.Model.VocabSize = 69
	if _, err := r.ModelFor(70); err == nil || !strings.HasPrefix(err.Error(), "model.vocab=69 is smaller than the 70 tokens") {
		t.Errorf("got %v", err)
	}
}

// TestScheduleTable checks a small table against one made by hand: batches 2, 2, 4, 4, 6, ... of 10 tokens a sequence.
func TestScheduleTable(t *testing.T) {
	r, err := Parse([]byte(`
model: {context: 10}
parallel: {microbatch: 1}
stages:
  - name: one
    epochs: 2
    data: [{path: x}]
    batch: {start: 2, end: 6, ramp_tokens: 80, step: 2}
    rate: {peak: 1, warmup_steps: 2, constant_tokens: 100, decay_tokens: 1000}
`), "f", nil)
	if err != nil {
		t.Fatal(err)
	}
	if err := Validate(r, 2); err != nil {
		t.Fatal(err)
	}
	table, err := ScheduleTable(r, 2, func(int) (int64, error) { return 14, nil })
	if err != nil {
		t.Fatal(err)
	}
	// tokens before: 0 20 40 80 140 200 260; the last of 28 samples are a batch of two.
	want := []Row{
		{Step: 1, Tokens: 0, Batch: 2, Micros: 1, Rate: 0.5, Changes: []string{"start"}},
		{Step: 2, Tokens: 20, Batch: 2, Micros: 1, Rate: 1, Changes: []string{"full rate"}},
		{Step: 3, Tokens: 40, Batch: 4, Micros: 2, Rate: 1, Changes: []string{"batch grows"}},
		{Step: 4, Tokens: 80, Batch: 6, Micros: 3, Rate: 1, Changes: []string{"full batch"}},
		{Step: 5, Tokens: 140, Batch: 6, Micros: 3, Rate: 0.5 + 0.5*math.Cos(math.Pi*0.04), Changes: []string{"rate decays"}},
		{Step: 6, Tokens: 200, Batch: 6, Micros: 3, Rate: 0.5 + 0.5*math.Cos(math.Pi*0.1)},
		{Step: 7, Tokens: 260, Batch: 2, Micros: 1, Rate: 0.5 + 0.5*math.Cos(math.Pi*0.16)},
	}
	if len(table.Rows) != len(want) {
		t.Fatalf("rows:\n%s", table)
	}
	for i, w := range want {
		g := table.Rows[i]
		if g.Step != w.Step || g.Tokens != w.Tokens || g.Samples != w.Tokens/10 || g.Batch != w.Batch || g.Micros != w.Micros ||
			math.Abs(g.Rate-w.Rate) > 1e-12 || g.BiasSpeed != 0.001 || !slices.Equal(g.Changes, w.Changes) || g.Stage != "one" {
			t.Errorf("row %d: %+v, want %+v", i, g, w)
		}
	}
	if total := table.Totals[0]; total.Step != 7 || total.Samples != 28 || total.Tokens != 280 {
		t.Errorf("total %+v", total)
	}
	text := table.String()
	for _, line := range []string{"batch grows", "one: 7 steps, 28 samples, 280 tokens"} {
		if !strings.Contains(text, line) {
			t.Errorf("no %q in\n%s", line, text)
		}
	}
	if _, err := ScheduleTable(r, 2, nil); err == nil || !strings.HasPrefix(err.Error(), "stages.0.epochs=2: the schedule needs") {
		t.Errorf("got %v", err)
	}
	if _, err := r.Schedule(0, 1<<60); err == nil || !strings.Contains(err.Error(), "more than 1e+16 tokens") {
		t.Errorf("got %v", err)
	}
}
