package model

import (
	"math"

	"moetor/internal/kernel"
	"moetor/internal/tensor"
)

// attention is multi-head latent attention (DeepSeek-V3 §2.1.1, equations 1 to 11). Queries, and keys and values
// together, pass through low-rank latents; position is carried by extra rotary columns, whose key is one for all heads.
//
//	x    [R, d]            normed input          q  [R, H(nope+rope)]  queries
//	cq   [R, q_lora]       query latent          kv [R, H(nope+v)]     per head: key without position, value
//	c    [R, kv_lora]      key-value latent      k  [R, H(nope+rope)]  keys
//	kr   [R, rope]         shared rotary key     o  [R, H v]           heads' outputs
//	lse  [H, R]            log-sum-exp of the scores
type attention struct {
	Attention
	plan  *plan
	rope  *rope
	scale float32

	query      linear // without query compression
	queryDown  linear
	queryNorm  norm
	queryUp    linear
	latentDown linear // to c
	latentNorm norm
	latentUp   linear // to kv
	ropeKey    linear // to kr
	output     linear

	// What runs on all threads: the heads of all segments through kernel.Parallel, and loops over rows. The functions and
	// their operands live here so that a call allocates nothing.
	call                 attentionCall
	runHead, runHeadGrad func(i int)
	turnQ, turnK         *rowLoop
	join, split          *rowLoop
}

type attentionPass struct {
	cqIn, cIn          tensor.Mat
	cq, c              operand
	cqRstd, cRstd, lse []float32
	kr                 tensor.Mat
	q, k, kv, o        tensor.Mat // while they are there as matrices
	keptQ, keptKV, out operand    // as they wait for the backward
}

// Operands of the attention, beside attentionInput.
const (
	queryLatent    = "self_attn.q_latent"
	keyValueLatent = "self_attn.kv_latent"
	queries        = "self_attn.q"
	keysValues     = "self_attn.kv"
	headsOutput    = "self_attn.heads"
)

type attentionCall struct {
	pass *pass
	act  *attentionPass

	do, dq, dk, dkv, dkr tensor.Mat
}

func newAttention(c Config, pl *plan, prefix string, byName map[string]*tensor.Param, rope *rope) *attention {
	at := c.Attention
	get := func(name string) *tensor.Param { return byName[prefix+"self_attn."+name+".weight"] }
	project := func(name string) linear { return pl.pack(linearOf(get(name))) }
	a := &attention{Attention: at, plan: pl, rope: rope, scale: float32(1 / math.Sqrt(float64(at.qk())))}
	if at.QLora > 0 {
		a.queryDown, a.queryNorm, a.queryUp = project("q_a_proj"), normOf(get("q_a_layernorm"), c.NormEps), project("q_b_proj")
	} else {
		a.query = project("q_proj")
	}
	down := linearOf(get("kv_a_proj_with_mqa"))
	a.latentDown, a.ropeKey = pl.pack(down.outputs(0, at.KVLora)), pl.pack(down.outputs(at.KVLora, at.KVLora+at.Rope))
	a.latentNorm, a.latentUp = normOf(get("kv_a_layernorm"), c.NormEps), project("kv_b_proj")
	a.output = project("o_proj")
	a.runHead, a.runHeadGrad = a.head, a.headGrad
	a.turnQ, a.turnK, a.join, a.split = loopOf(a.turnQueries), loopOf(a.turnKeys), loopOf(a.joinRows), loopOf(a.splitRows)
	return a
}

// forward adds the attention of x to y.
func (a *attention) forward(p *pass, act *attentionPass, y tensor.Mat, x operand) {
	rows, mark := x.rows(), p.temp.Mark()
	a.project(p, act, x)
	a.values(p, act)
	a.round(p, act, p.keepUnless(a.plan.up))
	a.keys(p, act)
	act.o, act.lse = p.keepUnless(a.plan.AttnOut != nil).Mat(rows, a.Heads*a.V), p.arena.Floats(a.Heads*rows)
	kernel.Parallel(len(p.segments)*a.Heads, a.runHead)
	act.out = p.operand(p.arena, headsOutput, act.o, a.plan.AttnOut, a.plan.AttnOutT)
	a.output.forward(y, act.out, 1)
	p.temp.Release(mark)
}

// project fills the queries, with their latent where there is one, the latent c and the shared rotary key: these two are
// all that a cache has to keep of a token.
func (a *attention) project(p *pass, act *attentionPass, x operand) {
	rows, m, normed := x.rows(), p.arena, p.keepUnless(a.plan.norm)
	act.q = a.core(p).Mat(rows, a.Heads*a.qk())
	a.call = attentionCall{pass: p, act: act}
	if a.QLora > 0 {
		act.cqIn, act.cqRstd = m.Mat(rows, a.QLora), m.Floats(rows)
		a.queryDown.forward(act.cqIn, x, 0)
		act.cq = a.plan.normed(p, normed, queryLatent, a.queryNorm, act.cqIn, act.cqRstd, tensor.Mat{})
		a.queryUp.forward(act.q, act.cq, 0)
	} else {
		a.query.forward(act.q, x, 0)
	}
	a.turnQ.run(rows)
	act.cIn, act.cRstd, act.kr = m.Mat(rows, a.KVLora), m.Floats(rows), m.Mat(rows, a.Rope)
	a.latentDown.forward(act.cIn, x, 0)
	act.c = a.plan.normed(p, normed, keyValueLatent, a.latentNorm, act.cIn, act.cRstd, tensor.Mat{})
	a.ropeKey.forward(act.kr, x, 0)
	a.turnK.run(rows)
}

// values fills kv from the latent.
func (a *attention) values(p *pass, act *attentionPass) {
	act.kv = a.core(p).Mat(act.c.rows(), a.Heads*(a.Nope+a.V))
	a.latentUp.forward(act.kv, act.c, 0)
}

// round stores queries, keys and values as the recipe has them, and goes on with what it stored: the backward makes the
// probabilities again from these, and from the log-sum-exp of the forward, so both must see the same numbers.
func (a *attention) round(p *pass, act *attentionPass, to *tensor.Arena) {
	if a.plan.Core != nil {
		act.keptQ, act.keptKV = p.operand(to, queries, act.q, a.plan.Core, nil), p.operand(to, keysValues, act.kv, a.plan.Core, nil)
		act.q, act.kv = p.load(act.keptQ), p.load(act.keptKV)
	}
}

// keys fills k from kv and the shared key.
func (a *attention) keys(p *pass, act *attentionPass) {
	act.k = a.core(p).Mat(act.kv.Rows, a.Heads*a.qk())
	a.join.run(act.kv.Rows)
}

// core is where queries, keys and values are made: they stay if the backward wants them as they are.
func (a *attention) core(p *pass) *tensor.Arena { return p.keepUnless(a.plan.up || a.plan.Core != nil) }

// again makes what the kernel's backward reads and forward did not keep, among the temporary values, and what jobs need in
// the pass's arena.
func (a *attention) again(p *pass, act *attentionPass, x operand) {
	rows := x.rows()
	if a.plan.norm {
		if a.QLora > 0 {
			act.cq = a.plan.normed(p, p.arena, queryLatent, a.queryNorm, act.cqIn, act.cqRstd, tensor.Mat{})
		}
		act.c = a.plan.normed(p, p.arena, keyValueLatent, a.latentNorm, act.cIn, act.cRstd, tensor.Mat{})
	}
	a.call = attentionCall{pass: p, act: act}
	switch {
	case a.plan.up:
		act.q = p.temp.Mat(rows, a.Heads*a.qk())
		if a.QLora > 0 {
			a.queryUp.forward(act.q, act.cq, 0)
		} else {
			a.query.forward(act.q, x, 0)
		}
		a.turnQ.run(rows)
		a.values(p, act)
		a.round(p, act, p.temp)
		a.keys(p, act)
	case a.plan.Core != nil:
		act.q, act.kv = p.load(act.keptQ), p.load(act.keptKV)
		a.keys(p, act)
	}
	act.o = p.load(act.out)
}

// turnQueries and turnKeys turn the rotary columns of queries and shared key to their positions.
func (a *attention) turnQueries(from, to int) {
	c := &a.call
	for r := from; r < to; r++ {
		q := c.act.q.Row(r)
		for h := range a.Heads {
			a.rope.rotate(q[h*a.qk()+a.Nope:], c.pass.position[r])
		}
	}
}

func (a *attention) turnKeys(from, to int) {
	c := &a.call
	for r := from; r < to; r++ {
		a.rope.rotate(c.act.kr.Row(r), c.pass.position[r])
	}
}

// joinRows joins the heads' own keys and the shared one.
func (a *attention) joinRows(from, to int) {
	c := &a.call
	for r := from; r < to; r++ {
		k, kv, shared := c.act.k.Row(r), c.act.kv.Row(r), c.act.kr.Row(r)
		for h := range a.Heads {
			head := k[h*a.qk() : (h+1)*a.qk()]
			copy(head, kv[h*(a.Nope+a.V):][:a.Nope])
			copy(head[a.Nope:], shared)
		}
	}
}

// at describes head i%H of segment i/H to the kernel.
func (a *attention) at(i int) (k kernel.Attention, s segment, head int) {
	p, act := a.call.pass, a.call.act
	s, head = p.segments[i/a.Heads], i%a.Heads
	kv := act.kv.Data[s.from*act.kv.Stride+head*(a.Nope+a.V)+a.Nope:]
	k = kernel.Attention{
		T: s.to - s.from, DQ: a.qk(), DV: a.V, Scale: a.scale,
		Q: act.q.Data[s.from*act.q.Stride+head*a.qk():], LDQ: act.q.Stride,
		K: act.k.Data[s.from*act.k.Stride+head*a.qk():], LDK: act.k.Stride,
		V: kv, LDV: act.kv.Stride,
		O: act.o.Data[s.from*act.o.Stride+head*a.V:], LDO: act.o.Stride,
		LSE: act.lse[head*len(p.position)+s.from:][:s.to-s.from],
	}
	return k, s, head
}

func (a *attention) head(i int) {
	k, _, _ := a.at(i)
	k.Forward()
}

func (a *attention) headGrad(i int) {
	k, s, head := a.at(i)
	c := &a.call
	k.Backward(
		c.do.Data[s.from*c.do.Stride+head*a.V:], c.do.Stride,
		c.dq.Data[s.from*c.dq.Stride+head*a.qk():], c.dq.Stride,
		c.dk.Data[s.from*c.dk.Stride+head*a.qk():], c.dk.Stride,
		c.dkv.Data[s.from*c.dkv.Stride+head*(a.Nope+a.V)+a.Nope:], c.dkv.Stride)
}

// backward sets dx, given the gradient dy of forward's y (whose own path past the attention is the caller's).
func (a *attention) backward(p *pass, act *attentionPass, dx, dy tensor.Mat, x operand) {
	rows, mark, pl, g := x.rows(), p.temp.Mark(), a.plan, a.plan.gradients(p)
	a.again(p, act, x)
	dq, dkv, dkr := g.Mat(rows, a.Heads*a.qk()), zeroMat(g, rows, act.kv.Cols), g.Mat(rows, a.Rope)
	do, dk := p.temp.Mat(rows, a.Heads*a.V), zeroMat(p.temp, rows, dq.Cols)
	a.output.backward(p, do, pl.gradient(p, gradientOf+"self_attn.output", dy), act.out, 0)
	a.call = attentionCall{pass: p, act: act, do: do, dq: dq, dk: dk, dkv: dkv, dkr: dkr}
	kernel.Parallel(len(p.segments)*a.Heads, a.runHeadGrad)
	a.split.run(rows)

	if a.QLora > 0 {
		dcq := g.Mat(rows, a.QLora)
		a.queryUp.backward(p, dcq, pl.gradient(p, gradientOf+queries, dq), act.cq, 0)
		a.queryNorm.backward(dcq, dcq, act.cqIn, act.cqRstd)
		a.queryDown.backward(p, dx, pl.gradient(p, gradientOf+queryLatent, dcq), x, 0)
	} else {
		a.query.backward(p, dx, pl.gradient(p, gradientOf+queries, dq), x, 0)
	}
	dc := g.Mat(rows, a.KVLora)
	a.latentUp.backward(p, dc, pl.gradient(p, gradientOf+keysValues, dkv), act.c, 0)
	a.latentNorm.backward(dc, dc, act.cIn, act.cRstd)
	a.latentDown.backward(p, dx, pl.gradient(p, gradientOf+keyValueLatent, dc), x, 1)
	a.ropeKey.backward(p, dx, pl.gradient(p, gradientOf+"self_attn.k_rope", dkr), x, 1)
	p.temp.Release(mark)
}

// splitRows is the backward of joinRows and turnRows: it splits dk into the heads' own part, in dkv, and that of the shared
// key, and turns the rotary columns back.
func (a *attention) splitRows(from, to int) {
	c := &a.call
	for r := from; r < to; r++ {
		dq, dk, dkv, shared, at := c.dq.Row(r), c.dk.Row(r), c.dkv.Row(r), c.dkr.Row(r), c.pass.position[r]
		clear(shared)
		for h := range a.Heads {
			head := dk[h*a.qk() : (h+1)*a.qk()]
			copy(dkv[h*(a.Nope+a.V):], head[:a.Nope])
			for j, v := range head[a.Nope:] {
				shared[j] += v
			}
			a.rope.unrotate(dq[h*a.qk()+a.Nope:], at)
		}
		a.rope.unrotate(shared, at)
	}
}
