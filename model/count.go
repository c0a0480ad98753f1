package model

// Counts are parameter counts. Selection biases, which are not trained, are in none of them.
type Counts struct {
	Total         int64 // main model
	Active        int64 // what one token meets: top_k of the routed experts
	ActiveNoEmbed int64 // Active without the embedding table, which is looked up and not multiplied (a tied table stays: it is the head)
	MTP           int64 // the MTP modules' own, embedding and head shared with the main model
}

// Count counts the parameters of a model.
func Count(c Config) Counts {
	var n Counts
	for _, t := range Tensors(c) {
		size := t.Len()
		switch {
		case t.Buffer:
		case t.Layer >= c.Layers && t.Layer < c.Layers+c.MTP.Depth:
			n.MTP += size
		default:
			n.Total += size
			if t.Expert < 0 || t.Expert < c.MoE.TopK { // all experts have one shape: the first top_k stand for those chosen
				n.Active += size
			}
		}
	}
	n.ActiveNoEmbed = n.Active
	if !c.TieEmbed || c.Score {
		n.ActiveNoEmbed -= int64(c.vocab()) * int64(c.Dim)
	}
	return n
}

// Flops are floating-point operations (a multiply-add is two) of one token, averaged over one sequence.
//
// They are model FLOPs: the products that the mathematics asks for. Active experts only; causal attention as the
// T(T+1)/2 pairs of query and key that are not masked; the router and every MTP module included; embedding look-up,
// norms, softmax and activations not. What the kernels multiply differs in two places. Attention works in blocks of rows,
// multiplies the masked part of a block on the diagonal, and computes the scores again in the backward. MTP module k
// routes k positions of a sequence fewer, those without a target; they are counted here.
type Flops struct {
	Forward  float64
	Training float64 // forward and backward: three times Forward, since each product has two in its backward
	// Attention is the part of Forward that is scores and weighted values; it alone grows with the sequence.
	Attention float64
}

// FLOPs counts the model FLOPs of one token in a sequence of seqLen tokens.
func FLOPs(c Config, seqLen int) Flops {
	attention := c.attentionFlops(seqLen) * float64(c.Layers+c.MTP.Depth)
	forward := c.headFlops(seqLen)
	for l := range c.Layers {
		forward += c.layerFlops(l, seqLen)
	}
	return Flops{Forward: forward, Training: 3 * forward, Attention: attention}
}

// attentionFlops are scores and weighted values of one layer, per token: (T+1)/2 pairs of (qk + v) multiply-adds a head.
func (c Config) attentionFlops(seqLen int) float64 {
	a := c.Attention
	return float64(a.Heads) * float64(a.qk()+a.V) * float64(seqLen+1)
}

// layerFlops are the forward FLOPs of one block per token.
func (c Config) layerFlops(layer, seqLen int) float64 {
	a, m := c.Attention, c.MoE
	d := float64(c.Dim)
	q := d * float64(a.Heads*a.qk())
	if a.QLora > 0 {
		q = float64(a.QLora) * (d + float64(a.Heads*a.qk()))
	}
	kv := d*float64(a.KVLora+a.Rope) + float64(a.KVLora)*float64(a.Heads*(a.Nope+a.V))
	o := float64(a.Heads*a.V) * d
	ffn := 3 * d * float64(c.DenseInter)
	if !c.dense(layer) {
		ffn = d*float64(m.Experts) + 3*d*float64(m.Inter)*float64(m.Shared+m.TopK)
	}
	return 2*(q+kv+o+ffn) + c.attentionFlops(seqLen)
}

// headFlops are the forward FLOPs of head and MTP modules per token.
func (c Config) headFlops(seqLen int) float64 {
	d := float64(c.Dim)
	head := 2 * d * float64(c.vocab())
	if c.Score {
		head = 2 * d
	}
	n := head
	for k := range c.MTP.Depth {
		n += 2*d*2*d + c.layerFlops(c.Layers+k, seqLen) + head
	}
	return n
}

// LayerCosts are the forward FLOPs per token of each layer at the model's context, for splitting the layers over pipeline
// stages. What the first and last stage hold beside layers is added to the first and last layer: an embedding look-up
// (as one pass over a row, which is next to nothing), the head and the MTP modules.
func LayerCosts(c Config) []float64 {
	costs := make([]float64, c.Layers)
	for l := range costs {
		costs[l] = c.layerFlops(l, c.Context)
	}
	costs[0] += float64(c.Dim)
	costs[c.Layers-1] += c.headFlops(c.Context)
	return costs
}
