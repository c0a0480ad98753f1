package model

import (
	"fmt"
	"slices"
	"strings"
)

// What Config.Recompute may name (DeepSeek-V3 §3.2.3 recomputes all three): outputs of norms that Linears read; queries, keys
// and values, from their latents; outputs of SwiGLU, which recipes with codes make again in any case.
const (
	RecomputeNorm   = "norm"
	RecomputeUp     = "mla_up"
	RecomputeSwiGLU = "swiglu"
)

var recomputable = []string{RecomputeNorm, RecomputeUp, RecomputeSwiGLU}

// Config is the architecture: DeepSeek-V3's, scaled by its numbers. The yaml names are the settings' names, and every
// message about a setting uses its full path (model.attention.rope).
type Config struct {
	Vocab       int       `yaml:"-"`              // effective vocabulary; set from the tokenizer
	VocabSize   int       `yaml:"vocab"`          // vocabulary without a tokenizer (inspect of a published model); 0: the tokenizer's
	Dim         int       `yaml:"dim"`            // width d of the residual stream
	Layers      int       `yaml:"layers"`         // transformer blocks of the main model, MTP modules not counted
	DenseLayers int       `yaml:"dense_layers"`   // leading layers with a dense FFN of width DenseInter
	DenseInter  int       `yaml:"dense_inter"`    // FFN width of the dense layers
	TieEmbed    bool      `yaml:"tie_embeddings"` // the head multiplies by the embedding table
	InitStd     float64   `yaml:"init_std"`       // standard deviation of the initial weights
	NormEps     float64   `yaml:"norm_eps"`       // epsilon of every RMSNorm
	Context     int       `yaml:"context"`        // longest sequence
	Recompute   []string  `yaml:"recompute"`      // activations to make again in the backward: norm, mla_up, swiglu
	Recipe      Recipe    `yaml:"-"`              // how operands are stored; from precision.recipe
	Attention   Attention `yaml:"attention"`
	MoE         MoE       `yaml:"moe"`
	MTP         MTP       `yaml:"mtp"`
	Score       bool      `yaml:"-"` // a reward model; see RewardModel
}

// Attention is the shape of multi-head latent attention (DeepSeek-V2 §2.1, DeepSeek-V3 §2.1.1).
type Attention struct {
	Kind      string  `yaml:"kind"` // mla
	Heads     int     `yaml:"heads"`
	QLora     int     `yaml:"q_lora"`  // width of the compressed query; 0: no compression
	KVLora    int     `yaml:"kv_lora"` // width of the compressed latent that a cache keeps
	Nope      int     `yaml:"nope"`    // columns of a query or key head without position
	Rope      int     `yaml:"rope"`    // columns with rotary position; the key's are shared by all heads
	V         int     `yaml:"v"`       // columns of a value head
	RopeTheta float64 `yaml:"rope_theta"`
}

// MoE is the shape of the mixture-of-experts layers and the rule of their gate (DeepSeek-V3 §2.1.2).
type MoE struct {
	Experts   int     `yaml:"experts"`
	TopK      int     `yaml:"top_k"`
	Shared    int     `yaml:"shared"` // shared experts, run as one FFN of width Shared*Inter
	Inter     int     `yaml:"inter"`  // FFN width of one expert
	Groups    int     `yaml:"groups"`
	TopGroups int     `yaml:"top_groups"`
	Score     string  `yaml:"score"`     // sigmoid | softmax
	Normalize bool    `yaml:"normalize"` // selected weights sum to one before Scale
	Scale     float64 `yaml:"scale"`     // factor of the routed weights
	SeqAux    float64 `yaml:"seq_aux"`   // alpha of the sequence-wise balance loss
}

// MTP is multi-token prediction (DeepSeek-V3 §2.2).
type MTP struct {
	Depth int `yaml:"depth"` // modules, each predicting one token further
}

// Scores of the gate.
const (
	Sigmoid = "sigmoid"
	Softmax = "softmax"
)

func (c Config) vocab() int {
	if c.Vocab > 0 {
		return c.Vocab
	}
	return c.VocabSize
}

// hasMoE reports whether any layer or MTP module routes to experts.
func (c Config) hasMoE() bool { return c.Layers > c.DenseLayers || c.MTP.Depth > 0 }

// dense reports whether a layer (MTP modules are layers Layers, Layers+1, …) has a dense FFN.
func (c Config) dense(layer int) bool { return layer < c.DenseLayers }

// tiedCopy reports whether the head stage keeps a copy of the embedding table.
func (c Config) tiedCopy() bool { return !c.Score && (c.MTP.Depth > 0 || c.TieEmbed) }

// RewardModel is the reward model over a language model's blocks: where that has its head and MTP modules, it has
// score.weight [1, d], which gives every position a score (Ouyang et al., 2022). It is trained by an [Objective] only.
func (c Config) RewardModel() Config {
	c.Score, c.MTP.Depth = true, 0
	return c
}

func (a Attention) qk() int { return a.Nope + a.Rope } // columns of a query or key head

// Validate returns everything that is wrong with the configuration, each error naming its setting and value.
func (c Config) Validate() []error {
	var errs []error
	bad := func(format string, args ...any) { errs = append(errs, fmt.Errorf(format, args...)) }
	atLeast := func(name string, v, low int) {
		if v < low {
			bad("model.%s=%d must be at least %d", name, v, low)
		}
	}
	positive := func(name string, v float64) {
		if !(v > 0) || v > 1e30 {
			bad("model.%s=%v must be a positive number", name, v)
		}
	}
	if c.Vocab < 0 || c.VocabSize < 0 {
		bad("model.vocab=%d must not be negative", min(c.Vocab, c.VocabSize))
	} else if c.vocab() == 0 {
		bad("model.vocab is 0 and no tokenizer gives a vocabulary")
	}
	if c.Vocab > 0 && c.VocabSize > 0 && c.VocabSize < c.Vocab {
		bad("model.vocab=%d is smaller than the tokenizer's vocabulary of %d", c.VocabSize, c.Vocab)
	}
	atLeast("dim", c.Dim, 1)
	atLeast("layers", c.Layers, 1)
	atLeast("context", c.Context, 1)
	if c.DenseLayers < 0 || c.DenseLayers > c.Layers {
		bad("model.dense_layers=%d must be between 0 and model.layers=%d", c.DenseLayers, c.Layers)
	} else if c.DenseLayers > 0 {
		atLeast("dense_inter", c.DenseInter, 1)
	}
	positive("init_std", c.InitStd)
	positive("norm_eps", c.NormEps)
	for i, r := range c.Recompute {
		if !slices.Contains(recomputable, r) {
			bad("model.recompute names %q; known: %s", r, strings.Join(recomputable, ", "))
		} else if slices.Contains(c.Recompute[:i], r) {
			bad("model.recompute names %q twice", r)
		}
	}

	a := c.Attention
	if a.Kind != "mla" {
		bad("model.attention.kind=%q is unknown; known: mla", a.Kind)
	}
	atLeast("attention.heads", a.Heads, 1)
	atLeast("attention.q_lora", a.QLora, 0)
	atLeast("attention.kv_lora", a.KVLora, 1)
	atLeast("attention.nope", a.Nope, 1)
	atLeast("attention.rope", a.Rope, 2)
	if a.Rope > 0 && a.Rope%2 != 0 {
		bad("model.attention.rope=%d must be even: positions rotate pairs", a.Rope)
	}
	atLeast("attention.v", a.V, 1)
	positive("attention.rope_theta", a.RopeTheta)

	atLeast("mtp.depth", c.MTP.Depth, 0)
	if c.MTP.Depth >= c.Context && c.Context > 0 {
		bad("model.mtp.depth=%d leaves no position to predict in model.context=%d", c.MTP.Depth, c.Context)
	}
	if c.Score && c.MTP.Depth > 0 {
		bad("model.mtp.depth=%d must be 0 for a reward model: its head predicts no tokens", c.MTP.Depth)
	}
	if c.hasMoE() {
		errs = append(errs, c.MoE.validate()...)
	}
	return errs
}

func (m MoE) validate() []error {
	var errs []error
	bad := func(format string, args ...any) { errs = append(errs, fmt.Errorf(format, args...)) }
	counted := true
	for _, s := range []struct {
		name   string
		v, low int
	}{{"experts", m.Experts, 1}, {"top_k", m.TopK, 1}, {"shared", m.Shared, 0}, {"inter", m.Inter, 1},
		{"groups", m.Groups, 1}, {"top_groups", m.TopGroups, 1}} {
		if s.v < s.low {
			bad("model.moe.%s=%d must be at least %d", s.name, s.v, s.low)
			counted = false
		}
	}
	if !slices.Contains([]string{Sigmoid, Softmax}, m.Score) {
		bad("model.moe.score=%q is unknown; known: %s, %s", m.Score, Sigmoid, Softmax)
	}
	if !(m.Scale > 0) || m.Scale > 1e30 {
		bad("model.moe.scale=%v must be a positive number", m.Scale)
	}
	if !(m.SeqAux >= 0) || m.SeqAux > 1e6 {
		bad("model.moe.seq_aux=%v must be between 0 and 1e6", m.SeqAux)
	}
	if !counted {
		return errs
	}
	if m.TopK > m.Experts {
		bad("model.moe.top_k=%d exceeds model.moe.experts=%d", m.TopK, m.Experts)
	}
	if m.TopK == 1 && m.Normalize {
		bad("model.moe.top_k=1 with model.moe.normalize=true makes every routed weight constant, so the router learns nothing; set normalize to false")
	}
	switch {
	case m.Experts%m.Groups != 0:
		bad("model.moe.groups=%d does not divide model.moe.experts=%d", m.Groups, m.Experts)
	case m.TopGroups > m.Groups:
		bad("model.moe.top_groups=%d exceeds model.moe.groups=%d", m.TopGroups, m.Groups)
	case m.TopGroups*(m.Experts/m.Groups) < m.TopK && m.TopK <= m.Experts:
		bad("model.moe.top_groups=%d keeps %d experts, fewer than model.moe.top_k=%d", m.TopGroups, m.TopGroups*(m.Experts/m.Groups), m.TopK)
	}
	return errs
}
