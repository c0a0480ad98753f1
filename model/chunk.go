package model

import (
	"context"
	"fmt"

	"moetor/internal/kernel"
	"moetor/internal/tensor"
)

// Chunk is layers First..Last-1 of the model (stage 0 also owns the embedding, the last stage final norm, head and MTP)
// with the activations of the micro-batches in flight. It implements pipeline.Stage. It is used by one goroutine at a
// time.
type Chunk struct {
	config   Config
	part     Part
	plan     *plan
	packer   *packer
	watching *watching
	temp     *tensor.Arena // see pass

	params        []*tensor.Param
	values, grads []float32
	embed         *embedding // nil without the embedding
	blocks        []*block
	head          *head // nil without the head
	routers       []*Router

	micros    []Micro
	settings  Settings
	flying    []*pass     // by micro-batch; nil when not in flight
	free      []*pass     // first in, first out
	sums      []Sums      // by micro-batch
	outs      [][]float32 // outputs of Evaluate, by micro-batch
	metrics   []float64   // the objective's, by micro-batch
	perMicro  int         // how many of them
	ofSeq     [][]float64 // by micro-batch, what LogProbs or Scores give
	nonFinite *NonFiniteError
}

// New makes the part of a model that p says, with weights drawn from the seed. The exchange is that of several expert ranks;
// with one it is not used, and may be nil.
func New(c Config, p Part, seed uint64, x Exchange) (*Chunk, error) {
	if errs := c.Validate(); len(errs) > 0 {
		return nil, errs[0]
	}
	if p.ExpertSize == 0 {
		p.ExpertSize = 1
	}
	if err := p.check(c); err != nil {
		return nil, err
	}
	if x == nil && p.ExpertSize > 1 {
		return nil, fmt.Errorf("model: %d expert ranks need an exchange", p.ExpertSize)
	}
	ch := &Chunk{config: c, part: p, plan: newPlan(c), temp: tensor.NewArena(0)}
	var byName map[string]*tensor.Param
	ch.params, byName, ch.values, ch.grads = params(c, p, seed)
	rope := newRope(c.Context, c.Attention.Rope, c.Attention.RopeTheta)
	for l := p.First; l < p.Last; l++ {
		ch.blocks = append(ch.blocks, newBlock(c, ch.plan, p, l, byName, rope, x))
	}
	if p.Embed {
		ch.embed = embeddingOf(byName[embedName])
	}
	blocks := ch.blocks
	if p.Head {
		ch.head = newHead(c, ch.plan, p, byName, rope, x)
		for _, m := range ch.head.mtp {
			blocks = append(blocks[:len(blocks):len(blocks)], m.block)
		}
	}
	ch.packer = newPacker(ch.plan)
	for _, b := range blocks {
		if b.moe != nil {
			ch.routers = append(ch.routers, b.moe.router)
		}
	}
	return ch, nil
}

// Config and Part are what the chunk was made from.
func (c *Chunk) Config() Config { return c.config }
func (c *Chunk) Part() Part     { return c.part }

// Params lists the chunk's parameters in the model's canonical order. The tied copy of the embedding table, if the chunk
// has one, is the last, a parameter and gradient of its own even where the chunk owns the table itself.
func (c *Chunk) Params() []*tensor.Param { return c.params }

// Blocks are the memory of all Params: their values, and their gradients, each in one block in the order of Params.
func (c *Chunk) Blocks() (values, grads []float32) { return c.values, c.grads }

// Routers lists the MoE layers of this chunk in order (MTP modules included, as layers numbered Config.Layers+k).
func (c *Chunk) Routers() []*Router { return c.routers }

// Bind gives the chunk the micro-batches of the coming step (index = micro number) and the step's settings, and zeroes sums
// and counts. Gradients are zeroed by ZeroGrads. What was in flight, after a step that failed, is dropped.
func (c *Chunk) Bind(m []Micro, s Settings) {
	if !s.SameWeights {
		c.packer.run()
	}
	c.micros = append(c.micros[:0], m...)
	c.settings = s
	for i, p := range c.flying {
		if p != nil {
			c.release(i)
		}
	}
	c.flying, c.sums, c.outs, c.ofSeq = grow(c.flying, len(m)), grow(c.sums, len(m)), grow(c.outs, len(m)), grow(c.ofSeq, len(m))
	clear(c.flying)
	clear(c.sums)
	for i := range c.ofSeq {
		c.ofSeq[i] = c.ofSeq[i][:0]
	}
	alpha := c.config.MoE.SeqAux
	if s.SeqAux != nil {
		alpha = *s.SeqAux
	}
	for _, r := range c.routers {
		clear(r.Counts)
		r.moe.SeqAux = alpha
	}
	c.nonFinite = nil
	if c.head != nil {
		c.head.lambda, c.head.objective = s.MTPWeight, s.Objective
		if c.perMicro = 0; s.Objective != nil {
			c.perMicro = len(s.Objective.Metrics())
		}
		c.metrics = grow(c.metrics, c.perMicro*len(m))
	}
}

// ZeroGrads sets all gradients to zero.
func (c *Chunk) ZeroGrads() { kernel.Zero(c.grads) }

// NonFinite is the first number that was not finite since Bind, or nil.
func (c *Chunk) NonFinite() *NonFiniteError { return c.nonFinite }

// MicroSums of a micro-batch, after its Evaluate or, of a training pass, after its BackwardInput (the head computes
// loss and gradient in one walk; see head).
func (c *Chunk) MicroSums(micro int) Sums { return c.sums[micro] }

// take begins a pass for a micro-batch.
func (c *Chunk) take(micro int, in []float32, keep bool) (*pass, error) {
	if micro < 0 || micro >= len(c.micros) {
		return nil, fmt.Errorf("micro-batch %d of %d", micro, len(c.micros))
	}
	if c.flying[micro] != nil {
		return nil, fmt.Errorf("micro-batch %d is in flight already", micro)
	}
	switch s := c.settings; {
	case s.Objective != nil && s.MTPWeight != 0:
		return nil, fmt.Errorf("micro-batch %d: an objective has no multi-token prediction, so its weight must be 0, not %v", micro, s.MTPWeight)
	case c.config.Score && s.Objective == nil && keep:
		return nil, fmt.Errorf("micro-batch %d: a reward model learns by an objective, and there is none", micro)
	}
	m := &c.micros[micro]
	if err := m.check(c.config, micro); err != nil {
		return nil, err
	}
	if c.embed == nil && len(in) != m.Rows()*c.config.Dim {
		return nil, fmt.Errorf("micro-batch %d: input of %d numbers for %d rows of model.dim=%d", micro, len(in), m.Rows(), c.config.Dim)
	}
	var p *pass
	if len(c.free) > 0 {
		p = c.free[0]
		copy(c.free, c.free[1:])
		c.free = c.free[:len(c.free)-1]
	} else {
		p = &pass{arena: c.newArena(m, keep), temp: c.temp, blocks: make([]blockPass, len(c.blocks))}
	}
	p.watching = c.watching
	p.begin(c.config, micro, m, keep)
	p.metrics = nil
	if c.perMicro > 0 {
		p.metrics = c.metrics[micro*c.perMicro:][:c.perMicro:c.perMicro]
	}
	c.flying[micro] = p
	return p, nil
}

// newArena is one with room for all of a training pass over a micro-batch of this shape, in one block. Experts may receive more
// rows, and then it grows. A pass without a backward gives memory back after each block, and begins with none.
func (c *Chunk) newArena(m *Micro, keep bool) *tensor.Arena {
	if !keep {
		return tensor.NewArena(0)
	}
	size := MemoryOf(c.config, c.part, Load{Seqs: m.Seqs, Len: m.Len, Judged: c.settings.Objective != nil})
	if c.temp.Cap() == 0 {
		*c.temp = *tensor.NewArena(int(size.Temp))
	}
	return tensor.NewArena(int(size.Pass))
}

// release ends a pass and keeps its memory for another.
func (c *Chunk) release(micro int) {
	p := c.flying[micro]
	c.flying[micro] = nil
	c.free = append(c.free, p)
}

// note takes over what a pass found and summed.
func (c *Chunk) note(p *pass) {
	c.sums[p.index] = p.sums
	c.ofSeq[p.index] = append(c.ofSeq[p.index][:0], p.ofSeq...)
	if n := p.nonFinite; n != nil && (c.nonFinite == nil || n.Before(c.nonFinite)) {
		c.nonFinite = n
	}
}

func (c *Chunk) inFlight(micro int) (*pass, error) {
	if micro < 0 || micro >= len(c.flying) || c.flying[micro] == nil {
		return nil, fmt.Errorf("micro-batch %d is not in flight", micro)
	}
	return c.flying[micro], nil
}

// input sets x to the embedding of the tokens, or to what the stage before sent.
func (c *Chunk) input(p *pass, x tensor.Mat, in []float32) {
	if c.embed == nil {
		kernel.Copy(x.Data, in)
		return
	}
	c.embed.forward(x, p.all, p.micro.Tokens)
	p.watch(x, false, -1, placeBlock, -1)
}

// Forward: in is Rows x Dim (nil for the embedding stage); out is valid until BackwardWeight of that micro (nil from the head stage).
func (c *Chunk) Forward(ctx context.Context, micro int, in []float32) (out []float32, err error) {
	p, err := c.take(micro, in, true)
	if err != nil {
		return nil, err
	}
	rows, d := p.micro.Rows(), c.config.Dim
	x := p.arena.Mat(rows, d)
	c.input(p, x, in)
	for i, b := range c.blocks {
		y := p.arena.Mat(rows, d)
		if err := b.forward(ctx, p, &p.blocks[i], y, x, p.real); err != nil {
			return nil, err
		}
		x = y
	}
	if c.head != nil {
		err = c.head.forward(ctx, p, x)
		x.Data = nil
	}
	c.note(p)
	return x.Data, err
}

// BackwardInput: dout is Rows x Dim (nil for the head stage), and is not used after the call; din is valid until the
// next Forward after BackwardWeight of that micro (nil from the embedding stage).
func (c *Chunk) BackwardInput(ctx context.Context, micro int, dout []float32) (din []float32, err error) {
	return c.backward(ctx, micro, dout, false)
}

// Backward is BackwardInput and BackwardWeight in one, which needs less memory: each block's weight gradients are added right
// after it, and what it made is given back. din is valid until the next Forward.
func (c *Chunk) Backward(ctx context.Context, micro int, dout []float32) (din []float32, err error) {
	if din, err = c.backward(ctx, micro, dout, true); err != nil {
		return nil, err
	}
	return din, c.BackwardWeight(ctx, micro)
}

func (c *Chunk) backward(ctx context.Context, micro int, dout []float32, whole bool) (din []float32, err error) {
	p, err := c.inFlight(micro)
	if err != nil {
		return nil, err
	}
	rows, d := p.micro.Rows(), c.config.Dim
	var dx tensor.Mat
	if c.head != nil {
		if dx, err = c.head.backward(ctx, p); err != nil {
			return nil, err
		}
	} else {
		if len(dout) != rows*d {
			return nil, fmt.Errorf("micro-batch %d: gradient of %d numbers for %d rows of model.dim=%d", micro, len(dout), rows, d)
		}
		dx = p.arena.Mat(rows, d)
		kernel.Copy(dx.Data, dout)
	}
	var turns [2]tensor.Mat // gradients between blocks, where only two at a time are needed
	if whole {
		turns = [2]tensor.Mat{p.arena.Mat(rows, d), p.arena.Mat(rows, d)}
	}
	for i := len(c.blocks) - 1; i >= 0; i-- {
		mark, next := p.arena.Mark(), turns[i%2]
		if !whole {
			next = p.arena.Mat(rows, d)
		}
		if err := c.blocks[i].backward(ctx, p, &p.blocks[i], next, dx); err != nil {
			return nil, err
		}
		if dx = next; whole {
			p.settle(0)
			p.arena.Release(mark)
		}
	}
	c.note(p)
	if c.embed == nil {
		return dx.Data, nil
	}
	c.embed.backward(dx, p.all, p.micro.Tokens)
	return nil, nil
}

// BackwardWeight adds the weight gradients that the micro-batch still owes, and ends it.
func (c *Chunk) BackwardWeight(_ context.Context, micro int) error {
	p, err := c.inFlight(micro)
	if err != nil {
		return err
	}
	for i := range p.jobs {
		p.jobs[i].run(p)
	}
	c.release(micro)
	return nil
}

// Evaluate is Forward without keeping activations, without gradients in the loss and without counting tokens. out stays
// valid until the next Bind. MTP modules run only if Settings.MTPWeight is not 0.
func (c *Chunk) Evaluate(ctx context.Context, micro int, in []float32) (out []float32, err error) {
	p, err := c.take(micro, in, false)
	if err != nil {
		return nil, err
	}
	defer c.release(micro)
	x, err := c.evaluate(ctx, p, in)
	if err != nil {
		return nil, err
	}
	if c.head == nil {
		c.outs[micro] = append(c.outs[micro][:0], x.Data...)
		out = c.outs[micro]
	} else {
		if err := c.head.forward(ctx, p, x); err != nil {
			return nil, err
		}
		c.head.evaluate(p)
	}
	c.note(p)
	return out, nil
}

// evaluate runs the blocks and gives each one's memory back after it.
func (c *Chunk) evaluate(ctx context.Context, p *pass, in []float32) (tensor.Mat, error) {
	rows, d := p.micro.Rows(), c.config.Dim
	x, y := p.arena.Mat(rows, d), p.arena.Mat(rows, d)
	c.input(p, x, in)
	mark := p.arena.Mark()
	for i, b := range c.blocks {
		if err := b.forward(ctx, p, &p.blocks[i], y, x, p.real); err != nil {
			return x, err
		}
		p.arena.Release(mark)
		x, y = y, x
	}
	return x, nil
}
