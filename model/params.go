package model

import (
	"fmt"
	"math"

	"moetor/internal/tensor"
)

// Info describes one tensor of the whole model under its Hugging Face deepseek_v3 name.
type Info struct {
	Name   string
	Shape  []int // matrices are [out, in]
	Layer  int   // owning block; MTP module k is layer Config.Layers+k-1; -1: embedding; Config.Layers+MTP.Depth: final norm and head
	Expert int   // routed expert (global number), or -1
	Buffer bool  // not a parameter: the selection bias, moved by UpdateBias and not by the optimizer
}

// Len is the number of elements.
func (t Info) Len() int64 {
	n := int64(1)
	for _, d := range t.Shape {
		n *= int64(d)
	}
	return n
}

// Tensors lists the tensors of the whole model in their canonical order: embedding, layers, final norm, head, MTP
// modules. The MTP modules share embedding and head, so they have neither here.
func Tensors(c Config) []Info {
	var list []Info
	layer := -1
	expert := -1
	add := func(name string, shape ...int) {
		list = append(list, Info{Name: name, Shape: shape, Layer: layer, Expert: expert})
	}
	add(embedName, c.vocab(), c.Dim)
	block := func(l int) {
		layer = l
		at, m := c.Attention, c.MoE
		p := layerName(l)
		add(p+"input_layernorm.weight", c.Dim)
		if at.QLora > 0 {
			add(p+"self_attn.q_a_proj.weight", at.QLora, c.Dim)
			add(p+"self_attn.q_a_layernorm.weight", at.QLora)
			add(p+"self_attn.q_b_proj.weight", at.Heads*at.qk(), at.QLora)
		} else {
			add(p+"self_attn.q_proj.weight", at.Heads*at.qk(), c.Dim)
		}
		add(p+"self_attn.kv_a_proj_with_mqa.weight", at.KVLora+at.Rope, c.Dim)
		add(p+"self_attn.kv_a_layernorm.weight", at.KVLora)
		add(p+"self_attn.kv_b_proj.weight", at.Heads*(at.Nope+at.V), at.KVLora)
		add(p+"self_attn.o_proj.weight", c.Dim, at.Heads*at.V)
		add(p+"post_attention_layernorm.weight", c.Dim)
		ffn := func(prefix string, inter int) {
			add(prefix+"gate_proj.weight", inter, c.Dim)
			add(prefix+"up_proj.weight", inter, c.Dim)
			add(prefix+"down_proj.weight", c.Dim, inter)
		}
		if c.dense(l) {
			ffn(p+"mlp.", c.DenseInter)
			return
		}
		add(p+"mlp.gate.weight", m.Experts, c.Dim)
		if m.Score == Sigmoid {
			add(p+"mlp.gate.e_score_correction_bias", m.Experts)
			list[len(list)-1].Buffer = true
		}
		for e := range m.Experts {
			expert = e
			ffn(fmt.Sprintf("%smlp.experts.%d.", p, e), m.Inter)
		}
		expert = -1
		if m.Shared > 0 {
			ffn(p+"mlp.shared_experts.", m.Shared*m.Inter)
		}
	}
	for l := range c.Layers {
		block(l)
	}
	layer = c.Layers + c.MTP.Depth
	add("model.norm.weight", c.Dim)
	if c.Score {
		add(scoreName, 1, c.Dim)
	} else if !c.TieEmbed {
		add("lm_head.weight", c.vocab(), c.Dim)
	}
	for l := c.Layers; l < c.Layers+c.MTP.Depth; l++ {
		layer = l
		p := layerName(l)
		add(p+"enorm.weight", c.Dim)
		add(p+"hnorm.weight", c.Dim)
		add(p+"eh_proj.weight", c.Dim, 2*c.Dim)
		block(l)
		add(p+"shared_head.norm.weight", c.Dim)
	}
	return list
}

const (
	embedName = "model.embed_tokens.weight"
	scoreName = "score.weight"
)

func layerName(l int) string { return fmt.Sprintf("model.layers.%d.", l) }

// Part says which part of the model a chunk is, and which experts are local.
type Part struct {
	First, Last            int  // layers [First, Last)
	Embed, Head            bool // owns the embedding / the final norm + head (+ MTP)
	ExpertRank, ExpertSize int  // local experts are [ExpertRank*E/ExpertSize, (ExpertRank+1)*E/ExpertSize); ExpertSize 0 means 1
}

// Whole is the part of a model that is not split.
func Whole(c Config) Part {
	return Part{First: 0, Last: c.Layers, Embed: true, Head: true, ExpertSize: 1}
}

func (p Part) check(c Config) error {
	switch {
	case p.First < 0 || p.First > p.Last || p.Last > c.Layers:
		return fmt.Errorf("model: layers [%d, %d) are not within the model's %d", p.First, p.Last, c.Layers)
	case p.Embed && p.First != 0:
		return fmt.Errorf("model: the part with the embedding starts at layer %d", p.First)
	case p.Head && p.Last != c.Layers:
		return fmt.Errorf("model: the part with the head ends at layer %d of %d", p.Last, c.Layers)
	case p.ExpertSize < 1 || p.ExpertRank < 0 || p.ExpertRank >= p.ExpertSize:
		return fmt.Errorf("model: expert rank %d of %d", p.ExpertRank, p.ExpertSize)
	case c.hasMoE() && p.ExpertSize > c.MoE.Experts:
		return fmt.Errorf("model: %d expert ranks for model.moe.experts=%d", p.ExpertSize, c.MoE.Experts)
	}
	return nil
}

// experts returns the local experts [from, to).
func (p Part) experts(total int) (from, to int) {
	return p.ExpertRank * total / p.ExpertSize, (p.ExpertRank + 1) * total / p.ExpertSize
}

// owns reports whether the part holds a tensor.
func (p Part) owns(c Config, t Info) bool {
	if t.Expert >= 0 {
		if from, to := p.experts(c.MoE.Experts); t.Expert < from || t.Expert >= to {
			return false
		}
	}
	switch {
	case t.Layer < 0:
		return p.Embed
	case t.Layer >= c.Layers:
		return p.Head
	}
	return p.First <= t.Layer && t.Layer < p.Last
}

// params makes the parameters of a part in canonical order, a tied copy of the embedding table last, in one block of
// values and one of gradients, with their initial values.
//
// The copy is a Param of its own even when the part owns the embedding too: then the gradient of the table is the sum of
// the same two numbers whether the pipeline is split or not.
func params(c Config, p Part, seed uint64) (list []*tensor.Param, byName map[string]*tensor.Param, values, grads []float32) {
	byName = map[string]*tensor.Param{}
	for _, t := range Tensors(c) {
		if t.Buffer || !p.owns(c, t) {
			continue
		}
		q := &tensor.Param{Name: t.Name, Shape: t.Shape, Expert: t.Expert >= 0, Decay: len(t.Shape) > 1}
		list = append(list, q)
		byName[t.Name] = q
	}
	if p.Head && c.tiedCopy() {
		q := &tensor.Param{Name: embedName, Shape: []int{c.vocab(), c.Dim}, Decay: true, Tied: true}
		list = append(list, q)
		byName[tiedKey] = q
	}
	values, grads = tensor.Allocate(list)
	for _, q := range list {
		initialize(q, seed, c.InitStd)
	}
	return list, byName, values, grads
}

const tiedKey = "tied " + embedName

// initialize fills a matrix from normal(0, std) and a norm gain with ones. The numbers depend on the seed, the
// parameter's name (which has the expert's global number) and the position only, so every split of a model starts from
// the same weights. Pairs of uniforms from a counter become pairs of normals (Box and Muller, 1958).
func initialize(p *tensor.Param, seed uint64, std float64) {
	if len(p.Shape) == 1 {
		for i := range p.Value {
			p.Value[i] = 1
		}
		return
	}
	key := mix(seed ^ 0x9e3779b97f4a7c15)
	for _, b := range []byte(p.Name) {
		key = mix(key ^ uint64(b))
	}
	for i := 0; i < len(p.Value); i += 2 {
		u := (float64(mix(key+uint64(i))>>11) + 0.5) / (1 << 53) // in (0, 1)
		v := float64(mix(key+uint64(i)+1)>>11) / (1 << 53)
		r := std * math.Sqrt(-2*math.Log(u))
		sin, cos := math.Sincos(2 * math.Pi * v)
		p.Value[i] = float32(r * cos)
		if i+1 < len(p.Value) {
			p.Value[i+1] = float32(r * sin)
		}
	}
}

// mix is the output function of SplitMix64 (Steele, Lea, Flood, 2014) applied to a counter.
func mix(x uint64) uint64 {
	x += 0x9e3779b97f4a7c15
	x = (x ^ x>>30) * 0xbf58476d1ce4e5b9
	x = (x ^ x>>27) * 0x94d049bb133111eb
	return x ^ x>>31
}
