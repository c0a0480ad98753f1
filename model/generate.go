package model

import (
	"context"
	"errors"
	"fmt"

	"moetor/internal/kernel"
	"moetor/internal/tensor"
)

// prefillRows is how many tokens of a prompt are taken at once.
const prefillRows = 128

// Decoder continues one sequence token by token. Of every past token and layer it keeps what latent attention has to
// keep: the compressed latent c, normed, and the shared rotary key, rotated. Keys and values are never made: their
// projection is absorbed into the query and the output (DeepSeek-V2 §2.1.2):
//
//	score = (W_UKᵀ q_nope)·c + q_rope·k_rope        o = W_UV (Σ p c)
//
// It reads the chunks' weights where they are and does not change the chunks. MTP modules are not used.
type Decoder struct {
	config  Config
	embed   *tensor.Param
	blocks  []*block
	head    *head
	caches  []cache // by layer
	length  int     // tokens cached
	pass    *pass
	zeros   []int32
	weights []float32
}

// cache of one layer.
type cache struct{ c, kr tensor.Mat } // [context, kv_lora], [context, rope]

// NewDecoder makes a decoder over a model that one process holds, in one chunk or in several given in order.
func NewDecoder(chunks ...*Chunk) (*Decoder, error) {
	if len(chunks) == 0 {
		return nil, errors.New("model: a decoder needs a model")
	}
	d := &Decoder{config: chunks[0].config}
	next := 0
	for _, c := range chunks {
		if c.part.First != next || c.part.ExpertSize != 1 {
			return nil, fmt.Errorf("model: a decoder needs all layers and experts in order, not layers [%d, %d) of expert rank %d/%d after layer %d",
				c.part.First, c.part.Last, c.part.ExpertRank, c.part.ExpertSize, next)
		}
		next = c.part.Last
		d.blocks = append(d.blocks, c.blocks...)
		if c.embed != nil {
			d.embed = c.embed
		}
		if c.head != nil {
			d.head = c.head
		}
	}
	if next != d.config.Layers || d.embed == nil || d.head == nil {
		return nil, fmt.Errorf("model: a decoder needs embedding, all %d layers and the head", d.config.Layers)
	}
	n, at := d.config.Context, d.config.Attention
	for range d.blocks {
		d.caches = append(d.caches, cache{tensor.NewMat(n, at.KVLora), tensor.NewMat(n, at.Rope)})
	}
	d.pass = &pass{arena: tensor.NewArena(0), blocks: make([]blockPass, len(d.blocks))}
	return d, nil
}

// Len is the number of tokens the decoder has taken.
func (d *Decoder) Len() int { return d.length }

// Reset forgets all tokens.
func (d *Decoder) Reset() { d.length = 0 }

// Prefill takes a prompt and returns the logits of the token after it, valid until the next call.
func (d *Decoder) Prefill(tokens []int32) ([]float32, error) {
	if len(tokens) == 0 {
		return nil, errors.New("model: the prompt has no tokens")
	}
	if n := d.length + len(tokens); n > d.config.Context {
		return nil, fmt.Errorf("a sequence of %d tokens exceeds model.context=%d", n, d.config.Context)
	}
	var x tensor.Mat
	for len(tokens) > 0 {
		n := min(len(tokens), prefillRows)
		var err error
		if x, err = d.advance(tokens[:n]); err != nil {
			return nil, err
		}
		tokens = tokens[n:]
	}
	return d.project(x.RowRange(x.Rows-1, x.Rows)).Data, nil
}

// Step takes one token and returns the logits of the next, valid until the next call.
func (d *Decoder) Step(token int32) ([]float32, error) {
	one := [1]int32{token}
	return d.Prefill(one[:])
}

// Logits runs the model over a whole sequence without the cache and returns logits [T, V], valid until the next call. It
// neither reads nor changes the tokens taken so far.
func (d *Decoder) Logits(tokens []int32) (tensor.Mat, error) {
	x, y, err := d.start(tokens, 0)
	if err != nil {
		return x, err
	}
	for i, b := range d.blocks {
		if err := b.forward(context.Background(), d.pass, &d.pass.blocks[i], y, x, d.pass.real); err != nil {
			return x, err
		}
		x, y = y, x
	}
	return d.project(x), nil
}

// start begins a pass of tokens from a position on, and returns their embeddings and room for as many rows.
func (d *Decoder) start(tokens []int32, from int) (x, y tensor.Mat, err error) {
	n, p := len(tokens), d.pass
	d.zeros, d.weights = grow(d.zeros, n), grow(d.weights, n)
	clear(d.weights)
	m := &Micro{Seqs: 1, Len: n, Tokens: tokens, Targets: d.zeros, Weight: d.weights}
	if err := m.check(d.config, 0); err != nil {
		return x, y, err
	}
	p.begin(d.config, 0, m, false)
	x, y = p.arena.Mat(n, d.config.Dim), p.arena.Mat(n, d.config.Dim)
	table := d.embed.Mat()
	for r, t := range tokens {
		p.position[r] += int32(from)
		copy(x.Row(r), table.Row(int(t)))
	}
	return x, y, nil
}

// advance takes tokens into the cache and returns the last block's output.
func (d *Decoder) advance(tokens []int32) (tensor.Mat, error) {
	x, y, err := d.start(tokens, d.length)
	if err != nil {
		return x, err
	}
	p, a := d.pass, d.pass.arena
	for i, b := range d.blocks {
		mark := a.Mark()
		act := &p.blocks[i]
		normed, rstd := a.Mat(x.Rows, x.Cols), a.Floats(x.Rows)
		b.norm1.forward(normed, x, rstd)
		act.mid = a.Mat(x.Rows, x.Cols)
		copy(act.mid.Data, x.Data)
		b.attention.cached(p, &act.attention, act.mid, normed, d.caches[i], d.length)
		if err := b.feed(context.Background(), p, act, y, p.real); err != nil {
			return x, err
		}
		a.Release(mark)
		x, y = y, x
	}
	d.length += len(tokens)
	return x, nil
}

// project returns the logits of the rows of the last block's output.
func (d *Decoder) project(x tensor.Mat) tensor.Mat {
	a := d.pass.arena
	hidden, logits := a.Mat(x.Rows, x.Cols), a.Mat(x.Rows, d.config.vocab())
	d.head.norm.forward(hidden, tensor.MatOf(x.Rows, x.Cols, x.Data), a.Floats(x.Rows))
	d.head.project.forward(logits, hidden, 0)
	return logits
}

// cached adds to y the attention of new tokens x, at positions from length on, to themselves and to all cached ones. It
// appends them to the cache.
func (a *attention) cached(p *pass, act *attentionPass, y, x tensor.Mat, past cache, length int) {
	rows, m, total := x.Rows, p.arena, length+x.Rows
	a.queries(p, act, x)
	a.latent(p, act, past.kr.RowRange(length, total), x)
	copy(past.c.RowRange(length, total).Data, act.c.Data)

	absorbed, mixed := m.Mat(rows, a.KVLora), m.Mat(rows, a.KVLora)
	scores := m.Mat(rows, total)
	o := m.Mat(rows, a.Heads*a.V)
	for h := range a.Heads {
		q := act.q.ColRange(h*a.qk(), (h+1)*a.qk())
		up := a.latentUp.w.RowRange(h*(a.Nope+a.V), (h+1)*(a.Nope+a.V))
		key, value := up.RowRange(0, a.Nope), up.RowRange(a.Nope, a.Nope+a.V)
		kernel.Gemm(kernel.NN, rows, a.KVLora, a.Nope, 1, q.Data, q.Stride, key.Data, key.Stride, 0, absorbed.Data, a.KVLora)
		kernel.Gemm(kernel.NT, rows, total, a.KVLora, a.scale, absorbed.Data, a.KVLora, past.c.Data, a.KVLora, 0, scores.Data, total)
		kernel.Gemm(kernel.NT, rows, total, a.Rope, a.scale, q.Data[a.Nope:], q.Stride, past.kr.Data, a.Rope, 1, scores.Data, total)
		for r := range rows {
			seen, later := scores.Row(r)[:length+r+1], scores.Row(r)[length+r+1:]
			kernel.Softmax(seen, seen, len(seen))
			clear(later)
		}
		kernel.Gemm(kernel.NN, rows, a.KVLora, total, 1, scores.Data, total, past.c.Data, a.KVLora, 0, mixed.Data, a.KVLora)
		kernel.Gemm(kernel.NT, rows, a.V, a.KVLora, 1, mixed.Data, a.KVLora, value.Data, value.Stride, 0, o.Data[h*a.V:], o.Stride)
	}
	a.output.forward(y, o, 1)
}
