package model

import (
	"math"
	"slices"
	"strings"
	"testing"
)

// tiny is a small model with everything in it.
func tiny() Config {
	return Config{
		Vocab: 29, Dim: 16, Layers: 3, DenseLayers: 1, DenseInter: 24, InitStd: 0.2, NormEps: 1e-6, Context: 32,
		Attention: Attention{Kind: "mla", Heads: 2, QLora: 8, KVLora: 6, Nope: 4, Rope: 4, V: 4, RopeTheta: 10000},
		MoE:       MoE{Experts: 8, TopK: 2, Shared: 1, Inter: 8, Groups: 4, TopGroups: 2, Score: Sigmoid, Normalize: true, Scale: 2.5, SeqAux: 0.01},
		MTP:       MTP{Depth: 1},
	}
}

// The published configurations (config.json of each on Hugging Face; DeepSeek-V3 §4.2, DeepSeek-V2 appendix B).
func deepseekV3() Config {
	return Config{
		VocabSize: 129280, Dim: 7168, Layers: 61, DenseLayers: 3, DenseInter: 18432, InitStd: 0.006, NormEps: 1e-6, Context: 4096,
		Attention: Attention{Kind: "mla", Heads: 128, QLora: 1536, KVLora: 512, Nope: 128, Rope: 64, V: 128, RopeTheta: 10000},
		MoE:       MoE{Experts: 256, TopK: 8, Shared: 1, Inter: 2048, Groups: 8, TopGroups: 4, Score: Sigmoid, Normalize: true, Scale: 2.5, SeqAux: 0.0001},
		MTP:       MTP{Depth: 1},
	}
}

func deepseekV2() Config {
	c := deepseekV3()
	c.VocabSize, c.Dim, c.Layers, c.DenseLayers, c.DenseInter, c.MTP.Depth = 102400, 5120, 60, 1, 12288, 0
	c.MoE = MoE{Experts: 160, TopK: 6, Shared: 2, Inter: 1536, Groups: 8, TopGroups: 3, Score: Softmax, Scale: 16}
	return c
}

func deepseekV2Lite() Config {
	c := deepseekV2()
	c.Dim, c.Layers, c.DenseInter = 2048, 27, 10944
	c.Attention.Heads, c.Attention.QLora = 16, 0
	c.MoE = MoE{Experts: 64, TopK: 6, Shared: 2, Inter: 1408, Groups: 1, TopGroups: 1, Score: Softmax, Scale: 1}
	return c
}

func TestCountPublished(t *testing.T) {
	for _, test := range []struct {
		name string
		c    Config
		want Counts
	}{
		{"V3", deepseekV3(), Counts{Total: 671_026_404_352, Active: 37_552_282_624, ActiveNoEmbed: 36_625_603_584, MTP: 11_610_067_968}},
		{"V2", deepseekV2(), Counts{Total: 235_741_434_880}},
		{"V2-Lite", deepseekV2Lite(), Counts{Total: 15_706_484_224}},
	} {
		if errs := test.c.Validate(); len(errs) > 0 {
			t.Errorf("%s: %v", test.name, errs)
		}
		got := Count(test.c)
		if test.want.Active == 0 { // only the total is published exactly
			got = Counts{Total: got.Total}
		}
		if got != test.want {
			t.Errorf("%s: %+v, want %+v", test.name, got, test.want)
		}
	}
	lite := Count(deepseekV2Lite())
	if got := math.Round(float64(lite.Active)/1e7) / 100; got != 2.66 {
		t.Errorf("V2-Lite: %.2fB active, want 2.66B", got)
	}
	if got := math.Round(float64(lite.ActiveNoEmbed)/1e7) / 100; got != 2.45 {
		t.Errorf("V2-Lite: %.2fB active without embedding, want 2.45B", got)
	}
	biases, expert := int64(0), int64(0)
	for _, x := range Tensors(deepseekV3()) {
		if x.Buffer && x.Layer < 61 {
			biases += x.Len()
		}
		if strings.HasPrefix(x.Name, "model.layers.9.mlp.experts.255.") {
			expert += x.Len()
		}
	}
	if biases != 58*256 || expert != 44_040_192 {
		t.Errorf("%d bias scalars and %d weights an expert", biases, expert)
	}
}

func TestTensorsNamesAndParts(t *testing.T) {
	c := tiny()
	var all []string
	for _, x := range Tensors(c) {
		if slices.Contains(all, x.Name) {
			t.Errorf("%s twice", x.Name)
		}
		all = append(all, x.Name)
	}
	for _, name := range []string{
		"model.embed_tokens.weight", "model.layers.0.mlp.gate_proj.weight", "model.layers.1.mlp.experts.7.down_proj.weight",
		"model.layers.1.mlp.gate.e_score_correction_bias", "model.layers.2.mlp.shared_experts.up_proj.weight",
		"model.layers.2.self_attn.kv_a_proj_with_mqa.weight", "model.layers.3.eh_proj.weight", "model.layers.3.shared_head.norm.weight",
		"model.layers.3.mlp.gate.weight", "model.norm.weight", "lm_head.weight",
	} {
		if !slices.Contains(all, name) {
			t.Errorf("no %s", name)
		}
	}
	// Any split holds every parameter, the copies of one with equal values, and those of the whole model.
	whole, err := New(c, Whole(c), 7, nil)
	check(t, err)
	values := map[string][]float32{}
	for _, p := range whole.Params() {
		if p.Tied == (values[p.Name] == nil) {
			t.Errorf("%s: tied %v, seen before %v", p.Name, p.Tied, values[p.Name] != nil)
		}
		values[p.Name] = p.Value
		if p.Decay != (len(p.Shape) == 2) || p.Expert != strings.Contains(p.Name, ".experts.") {
			t.Errorf("%s: decay %v, expert %v", p.Name, p.Decay, p.Expert)
		}
	}
	seen := map[string]int{}
	for rank := range 3 { // 3 does not divide 8 experts
		for _, part := range []Part{{First: 0, Last: 2, Embed: true}, {First: 2, Last: 3, Head: true}} {
			part.ExpertRank, part.ExpertSize = rank, 3
			ch, err := New(c, part, 7, newMeeting(3, c.MoE.Experts).exchange(rank))
			check(t, err)
			for _, p := range ch.Params() {
				seen[p.Name]++
				if !slices.Equal(p.Value, values[p.Name]) {
					t.Errorf("%s has other values in part %+v", p.Name, part)
				}
			}
		}
	}
	for name := range values {
		want := 3
		if strings.Contains(name, ".experts.") {
			want = 1
		} else if name == embedName {
			want = 6
		}
		if seen[name] != want {
			t.Errorf("%s stands in %d parts, want %d", name, seen[name], want)
		}
	}
	firsts := map[float32]string{}
	for _, p := range whole.Params() {
		if len(p.Shape) == 2 && !p.Tied {
			if name, ok := firsts[p.Value[0]]; ok {
				t.Errorf("%s starts like %s", p.Name, name)
			}
			firsts[p.Value[0]] = p.Name
		}
	}
	other, err := New(c, Whole(c), 8, nil)
	check(t, err)
	if slices.Equal(other.Params()[0].Value, whole.Params()[0].Value) {
		t.Error("another seed gives the same weights")
	}
}

func TestInitialDistribution(t *testing.T) {
	c := tiny()
	c.Vocab, c.Dim, c.InitStd = 1000, 64, 0.006
	ch, err := New(c, Part{Embed: true}, 3, nil)
	check(t, err)
	var sum, square, within float64
	w := ch.Params()[0].Value
	for _, v := range w {
		sum += float64(v)
		square += float64(v) * float64(v)
		if math.Abs(float64(v)) < c.InitStd {
			within++
		}
	}
	n := float64(len(w))
	near(t, "mean", sum/n, 0, 5*c.InitStd/math.Sqrt(n))
	near(t, "standard deviation", math.Sqrt(square/n), c.InitStd, 0.02*c.InitStd)
	near(t, "share within one standard deviation", within/n, 0.6827, 0.01)
}

func TestValidate(t *testing.T) {
	if errs := tiny().Validate(); len(errs) > 0 {
		t.Fatal(errs)
	}
	for _, test := range []struct {
		change func(c *Config)
		want   []string // parts of one error
	}{
		{func(c *Config) { c.Recompute = []string{"norm", "attention"} }, []string{`model.recompute names "attention"`, "norm, mla_up, swiglu"}},
		{func(c *Config) { c.Recompute = []string{"norm", "swiglu", "norm"} }, []string{`model.recompute names "norm" twice`}},
		{func(c *Config) { c.Vocab = 0 }, []string{"model.vocab"}},
		{func(c *Config) { c.VocabSize = 3 }, []string{"model.vocab=3", "29"}},
		{func(c *Config) { c.Dim = 0 }, []string{"model.dim=0"}},
		{func(c *Config) { c.DenseLayers = 4 }, []string{"model.dense_layers=4", "model.layers=3"}},
		{func(c *Config) { c.DenseInter = 0 }, []string{"model.dense_inter=0"}},
		{func(c *Config) { c.InitStd = math.NaN() }, []string{"model.init_std=NaN"}},
		{func(c *Config) { c.NormEps = 0 }, []string{"model.norm_eps=0"}},
		{func(c *Config) { c.Recompute = []string{"moe"} }, []string{"model.recompute", "moe"}},
		{func(c *Config) { c.Attention.Kind = "mha" }, []string{"model.attention.kind", "mha", "mla"}},
		{func(c *Config) { c.Attention.Rope = 5 }, []string{"model.attention.rope=5", "even"}},
		{func(c *Config) { c.Attention.KVLora = 0 }, []string{"model.attention.kv_lora=0"}},
		{func(c *Config) { c.Attention.RopeTheta = -1 }, []string{"model.attention.rope_theta=-1"}},
		{func(c *Config) { c.MoE.Experts = 6 }, []string{"model.moe.groups=4", "model.moe.experts=6"}},
		{func(c *Config) { c.MoE.TopK = 9; c.MoE.TopGroups = 4 }, []string{"model.moe.top_k=9", "model.moe.experts=8"}},
		{func(c *Config) { c.MoE.TopK = 5 }, []string{"model.moe.top_groups=2", "model.moe.top_k=5"}},
		{func(c *Config) { c.MoE.TopGroups = 5 }, []string{"model.moe.top_groups=5", "model.moe.groups=4"}},
		{func(c *Config) { c.MoE.Score = "tanh" }, []string{"model.moe.score", "tanh", "sigmoid"}},
		{func(c *Config) { c.MoE.Scale = 0 }, []string{"model.moe.scale=0"}},
		{func(c *Config) { c.MoE.SeqAux = -1 }, []string{"model.moe.seq_aux=-1"}},
		{func(c *Config) { c.MoE.TopK = 1 }, []string{"model.moe.top_k=1", "model.moe.normalize"}}, // P06
		{func(c *Config) { c.MTP.Depth = 32 }, []string{"model.mtp.depth=32", "model.context=32"}},
	} {
		c := tiny()
		test.change(&c)
		errs := c.Validate()
		if len(errs) != 1 {
			t.Errorf("want one error with %q, got %v", test.want, errs)
			continue
		}
		for _, part := range test.want {
			if !strings.Contains(errs[0].Error(), part) {
				t.Errorf("%q does not name %q", errs[0], part)
			}
		}
		if _, err := New(c, Whole(c), 1, nil); err == nil {
			t.Errorf("New takes a configuration with the error %q", errs[0])
		}
	}
	c := tiny()
	c.Dim, c.Attention.Heads, c.MoE.Inter = 0, 0, 0
	if errs := c.Validate(); len(errs) != 3 {
		t.Errorf("three faults give %v", errs)
	}
}

// TestFlopsGrowth is pitfall P38: what does and does not cost.
func TestFlopsGrowth(t *testing.T) {
	c := tiny()
	c.MoE.Groups, c.MoE.TopGroups = 1, 1
	base := FLOPs(c, 16)
	more := c
	more.MoE.Experts = 64
	routers := float64(c.Layers - c.DenseLayers + c.MTP.Depth)
	if got, want := FLOPs(more, 16).Forward-base.Forward, routers*2*float64(c.Dim)*(64-8); got != want {
		t.Errorf("8 to 64 experts add %v FLOPs a token, want the router's %v", got, want)
	}
	more = c
	more.Vocab *= 2
	if got, want := FLOPs(more, 16).Forward-base.Forward, 2*2*float64(c.Dim)*float64(c.Vocab); got != want {
		t.Errorf("twice the vocabulary adds %v FLOPs a token, want those of two heads, %v", got, want)
	}
	tied := c
	tied.TieEmbed = true
	if FLOPs(tied, 16) != base {
		t.Error("tying the embedding changes FLOPs")
	}
	if base.Training != 3*base.Forward {
		t.Errorf("training %v, forward %v", base.Training, base.Forward)
	}
	// 2 FLOPs for each active weight that is multiplied, and attention.
	v3 := deepseekV3()
	v3.MTP.Depth = 0
	var norms int64
	for _, x := range Tensors(v3) {
		if len(x.Shape) == 1 && !x.Buffer {
			norms += x.Len()
		}
	}
	f := FLOPs(v3, 4096)
	if got, want := f.Forward-f.Attention, 2*float64(Count(v3).ActiveNoEmbed-norms); got != want {
		t.Errorf("V3 without attention: %v FLOPs a token, want %v", got, want)
	}
	if got, want := f.Attention, 61*128*float64(192+128)*4097; got != want {
		t.Errorf("V3 attention: %v FLOPs a token, want %v", got, want)
	}
	var layers float64
	c.Context = 16
	for _, x := range LayerCosts(c) {
		layers += x
	}
	if layers != FLOPs(c, 16).Forward+float64(c.Dim) {
		t.Errorf("layer costs sum to %v, the model to %v", layers, FLOPs(c, 16).Forward)
	}
}
