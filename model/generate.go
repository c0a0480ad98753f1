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
	embed   *embedding
	blocks  []*block
	head    *head
	own     []*sequence // one
	pass    *pass
	tokens  []int32
	zeros   []int32
	weights []float32
}

// A sequence is what a decoder keeps of past tokens.
type sequence struct {
	caches []cache // by layer
	length int     // tokens cached
}

// cache of one layer.
type cache struct{ c, kr tensor.Mat } // [context, kv_lora], [context, rope]

func newSequence(c Config) *sequence {
	s, at := &sequence{}, c.Attention
	for range c.Layers {
		s.caches = append(s.caches, cache{tensor.NewMat(c.Context, at.KVLora), tensor.NewMat(c.Context, at.Rope)})
	}
	return s
}

// room returns an error if n more tokens are too many.
func (s *sequence) room(c Config, n int) error {
	if s.length+n > c.Context {
		return fmt.Errorf("a sequence of %d tokens exceeds model.context=%d", s.length+n, c.Context)
	}
	return nil
}

// NewDecoder makes a decoder over a model that one process holds, in one chunk or in several given in order.
func NewDecoder(chunks ...*Chunk) (*Decoder, error) {
	if len(chunks) == 0 {
		return nil, errors.New("model: a decoder needs a model")
	}
	d := &Decoder{config: chunks[0].config}
	if d.config.Score {
		return nil, errors.New("model: a reward model has no tokens to decode")
	}
	next := 0
	for _, c := range chunks {
		if c.plan.low() || len(c.config.Recompute) > 0 {
			return nil, errors.New("model: a decoder works in FP32 and recomputes nothing; make its model without a recipe and model.recompute")
		}
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
	d.own = []*sequence{newSequence(d.config)}
	d.pass = &pass{arena: tensor.NewArena(0), temp: tensor.NewArena(0), blocks: make([]blockPass, len(d.blocks))}
	return d, nil
}

// Len is the number of tokens the decoder has taken.
func (d *Decoder) Len() int { return d.own[0].length }

// Reset forgets all tokens.
func (d *Decoder) Reset() { d.own[0].length = 0 }

// Prefill takes a prompt and returns the logits of the token after it, valid until the next call.
func (d *Decoder) Prefill(tokens []int32) ([]float32, error) {
	if len(tokens) == 0 {
		return nil, errors.New("model: the prompt has no tokens")
	}
	if err := d.own[0].room(d.config, len(tokens)); err != nil {
		return nil, err
	}
	var x tensor.Mat
	before := d.Len()
	for len(tokens) > 0 {
		n := min(len(tokens), prefillRows)
		var err error
		if x, err = d.advance(d.own, tokens[:n]); err != nil {
			d.own[0].length = before
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
	x, err := d.uncached(tokens)
	if err != nil {
		return x, err
	}
	return d.project(x), nil
}

// LogProb returns the sum of log p over the tokens of an answer to a prompt, in float64: what multiple choice compares, by
// itself or divided by the number of tokens. Like Logits it leaves the tokens taken so far alone. Many answers are
// scored faster in micro-batches, by Chunk.Evaluate and Chunk.LogProbs, which give the same bits.
func (d *Decoder) LogProb(prompt, answer []int32) (float64, error) {
	if len(prompt) == 0 || len(answer) == 0 {
		return 0, fmt.Errorf("model: a prompt of %d tokens and an answer of %d; each needs one", len(prompt), len(answer))
	}
	d.tokens = append(append(d.tokens[:0], prompt...), answer...)
	n := len(d.tokens) - 1
	if t := d.tokens[n]; t < 0 || int(t) >= d.config.vocab() {
		return 0, fmt.Errorf("token %d at row %d is outside the vocabulary of %d", t, n, d.config.vocab())
	}
	x, err := d.uncached(d.tokens[:n])
	if err != nil {
		return 0, err
	}
	for r := len(prompt) - 1; r < n; r++ {
		d.weights[r] = 1
	}
	return -d.head.loss(d.normed(x), d.tokens[1:], d.weights), nil
}

// uncached runs the blocks over a whole sequence.
func (d *Decoder) uncached(tokens []int32) (tensor.Mat, error) {
	x, y, err := d.start(tokens, 1)
	if err != nil {
		return x, err
	}
	for i, b := range d.blocks {
		if err := b.forward(context.Background(), d.pass, &d.pass.blocks[i], y, x, d.pass.real); err != nil {
			return x, err
		}
		x, y = y, x
	}
	return x, nil
}

// start begins a pass of as many tokens for each of some sequences, from position 0 on, and returns their embeddings and
// room for as many rows.
func (d *Decoder) start(tokens []int32, seqs int) (x, y tensor.Mat, err error) {
	n, p := len(tokens), d.pass
	d.zeros, d.weights = grow(d.zeros, n), grow(d.weights, n)
	clear(d.weights)
	m := &Micro{Seqs: seqs, Len: n / seqs, Tokens: tokens, Targets: d.zeros, Weight: d.weights}
	if err := m.check(d.config, 0); err != nil {
		return x, y, err
	}
	p.begin(d.config, 0, m, false)
	x, y = p.arena.Mat(n, d.config.Dim), p.arena.Mat(n, d.config.Dim)
	d.embed.forward(x, p.all, tokens)
	return x, y, nil
}

// advance takes as many tokens for each of some sequences into their caches and returns the last block's output.
func (d *Decoder) advance(seqs []*sequence, tokens []int32) (tensor.Mat, error) {
	x, y, err := d.start(tokens, len(seqs))
	if err != nil {
		return x, err
	}
	p, a, n := d.pass, d.pass.arena, len(tokens)/len(seqs)
	for r := range tokens {
		p.position[r] += int32(seqs[r/n].length)
	}
	for i, b := range d.blocks {
		mark := a.Mark()
		act := &p.blocks[i]
		normed, rstd := a.Mat(x.Rows, x.Cols), a.Floats(x.Rows)
		b.norm1.forward(normed, x, rstd)
		act.mid = a.Mat(x.Rows, x.Cols)
		kernel.Copy(act.mid.Data, x.Data)
		b.attention.cached(p, &act.attention, act.mid, operand{mat: normed}, seqs, i)
		if err := b.feed(context.Background(), p, act, y, p.real); err != nil {
			return x, err
		}
		a.Release(mark)
		x, y = y, x
	}
	for _, s := range seqs {
		s.length += n
	}
	return x, nil
}

// project returns the logits of the rows of the last block's output.
func (d *Decoder) project(x tensor.Mat) tensor.Mat {
	logits := d.pass.arena.Mat(x.Rows, d.config.vocab())
	d.head.project.forward(logits, operand{mat: d.normed(x)}, 0)
	return logits
}

func (d *Decoder) normed(x tensor.Mat) tensor.Mat {
	hidden := d.pass.arena.Mat(x.Rows, x.Cols)
	d.head.norm.forward(hidden, tensor.MatOf(x.Rows, x.Cols, x.Data), d.pass.arena.Floats(x.Rows))
	return hidden
}

// cached adds to y the attention of new tokens x, as many for each sequence, to themselves and to all that the sequence has
// cached in the layer. It appends them to the caches. What is not of one sequence alone runs for all rows at once; each
// row has the same bits either way.
func (a *attention) cached(p *pass, act *attentionPass, y tensor.Mat, x operand, seqs []*sequence, layer int) {
	rows, m := x.rows(), p.arena
	n, total := rows/len(seqs), 0
	a.project(p, act, x)
	for i, s := range seqs {
		past, to := s.caches[layer], s.length+n
		copy(past.kr.RowRange(s.length, to).Data, act.kr.RowRange(i*n, (i+1)*n).Data)
		copy(past.c.RowRange(s.length, to).Data, act.c.mat.RowRange(i*n, (i+1)*n).Data)
		total = max(total, to)
	}
	absorbed, mixed := m.Mat(rows, a.KVLora), m.Mat(rows, a.KVLora)
	room := m.Floats(n * total)
	o := m.Mat(rows, a.Heads*a.V)
	for h := range a.Heads {
		q := act.q.ColRange(h*a.qk(), (h+1)*a.qk())
		up := a.latentUp.w.RowRange(h*(a.Nope+a.V), (h+1)*(a.Nope+a.V))
		key, value := up.RowRange(0, a.Nope), up.RowRange(a.Nope, a.Nope+a.V)
		kernel.Gemm(kernel.NN, rows, a.KVLora, a.Nope, 1, q.Data, q.Stride, key.Data, key.Stride, 0, absorbed.Data, a.KVLora)
		for i, s := range seqs {
			past, to := s.caches[layer], s.length+n
			q, absorbed, mixed := q.RowRange(i*n, (i+1)*n), absorbed.RowRange(i*n, (i+1)*n), mixed.RowRange(i*n, (i+1)*n)
			scores := tensor.MatOf(n, to, room[:n*to])
			kernel.Gemm(kernel.NT, n, to, a.KVLora, a.scale, absorbed.Data, a.KVLora, past.c.Data, a.KVLora, 0, scores.Data, to)
			kernel.Gemm(kernel.NT, n, to, a.Rope, a.scale, q.Data[a.Nope:], q.Stride, past.kr.Data, a.Rope, 1, scores.Data, to)
			for r := range n {
				seen, later := scores.Row(r)[:s.length+r+1], scores.Row(r)[s.length+r+1:]
				kernel.Softmax(seen, seen, len(seen))
				clear(later)
			}
			kernel.Gemm(kernel.NN, n, a.KVLora, to, 1, scores.Data, to, past.c.Data, a.KVLora, 0, mixed.Data, a.KVLora)
		}
		kernel.Gemm(kernel.NT, rows, a.V, a.KVLora, 1, mixed.Data, a.KVLora, value.Data, value.Stride, 0, o.Data[h*a.V:], o.Stride)
	}
	a.output.forward(y, operand{mat: o}, 1)
}
