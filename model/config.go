// SKELETON (the model author owns this package; fields and yaml names are fixed by design.md §6)
package model

// Config is the architecture: DeepSeek-V3's, scaled by its numbers.
type Config struct {
	Vocab       int       `yaml:"-"`     // from the tokenizer (or vocab: for inspect of published configurations)
	VocabSize   int       `yaml:"vocab"` // 0: the tokenizer's size
	Dim         int       `yaml:"dim"`
	Layers      int       `yaml:"layers"`
	DenseLayers int       `yaml:"dense_layers"` // leading layers with a dense FFN of width DenseInter
	DenseInter  int       `yaml:"dense_inter"`
	TieEmbed    bool      `yaml:"tie_embeddings"`
	InitStd     float64   `yaml:"init_std"`
	NormEps     float64   `yaml:"norm_eps"`
	Context     int       `yaml:"context"`
	Recompute   []string  `yaml:"recompute"`
	Attention   Attention `yaml:"attention"`
	MoE         MoE       `yaml:"moe"`
	MTP         MTP       `yaml:"mtp"`
}

type Attention struct {
	Kind      string  `yaml:"kind"` // mla
	Heads     int     `yaml:"heads"`
	QLora     int     `yaml:"q_lora"` // 0: no query compression
	KVLora    int     `yaml:"kv_lora"`
	Nope      int     `yaml:"nope"`
	Rope      int     `yaml:"rope"`
	V         int     `yaml:"v"`
	RopeTheta float64 `yaml:"rope_theta"`
}

type MoE struct {
	Experts   int     `yaml:"experts"`
	TopK      int     `yaml:"top_k"`
	Shared    int     `yaml:"shared"`
	Inter     int     `yaml:"inter"`
	Groups    int     `yaml:"groups"`
	TopGroups int     `yaml:"top_groups"`
	Score     string  `yaml:"score"` // sigmoid | softmax
	Normalize bool    `yaml:"normalize"`
	Scale     float64 `yaml:"scale"`
	SeqAux    float64 `yaml:"seq_aux"` // alpha of the sequence-wise balance loss
}

type MTP struct {
	Depth int `yaml:"depth"`
}
