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

	// The heads of all segments run through kernel.Parallel; the two functions and their argument live here so that a
	// call allocates nothing.
	call                 attentionCall
	runHead, runHeadGrad func(i int)
}

type attentionPass struct {
	cqIn, cq, cIn, c, q, k, kv, o tensor.Mat
	cqRstd, cRstd, lse            []float32
}

type attentionCall struct {
	pass            *pass
	act             *attentionPass
	do, dq, dk, dkv tensor.Mat
}

func newAttention(c Config, prefix string, byName map[string]*tensor.Param, rope *rope) *attention {
	at := c.Attention
	get := func(name string) *tensor.Param { return byName[prefix+"self_attn."+name+".weight"] }
	a := &attention{Attention: at, rope: rope, scale: float32(1 / math.Sqrt(float64(at.qk())))}
	if at.QLora > 0 {
		a.queryDown, a.queryNorm, a.queryUp = linearOf(get("q_a_proj")), normOf(get("q_a_layernorm"), c.NormEps), linearOf(get("q_b_proj"))
	} else {
		a.query = linearOf(get("q_proj"))
	}
	down := linearOf(get("kv_a_proj_with_mqa"))
	a.latentDown, a.ropeKey = down.outputs(0, at.KVLora), down.outputs(at.KVLora, at.KVLora+at.Rope)
	a.latentNorm, a.latentUp = normOf(get("kv_a_layernorm"), c.NormEps), linearOf(get("kv_b_proj"))
	a.output = linearOf(get("o_proj"))
	a.runHead, a.runHeadGrad = a.head, a.headGrad
	return a
}

// forward adds the attention of x to y.
func (a *attention) forward(p *pass, act *attentionPass, y, x tensor.Mat) {
	rows, m := x.Rows, p.arena
	a.queries(p, act, x)
	kr := m.Mat(rows, a.Rope)
	a.latent(p, act, kr, x)
	act.kv = m.Mat(rows, a.Heads*(a.Nope+a.V))
	a.latentUp.forward(act.kv, act.c, 0)

	act.k = m.Mat(rows, a.Heads*a.qk())
	for r := range rows {
		k, kv, shared := act.k.Row(r), act.kv.Row(r), kr.Row(r)
		for h := range a.Heads {
			head := k[h*a.qk() : (h+1)*a.qk()]
			copy(head, kv[h*(a.Nope+a.V):][:a.Nope])
			copy(head[a.Nope:], shared)
		}
	}
	act.o, act.lse = m.Mat(rows, a.Heads*a.V), m.Floats(a.Heads*rows)
	a.call = attentionCall{pass: p, act: act}
	kernel.Parallel(len(p.segments)*a.Heads, a.runHead)
	a.output.forward(y, act.o, 1)
}

// queries fills q, with its latent where there is one.
func (a *attention) queries(p *pass, act *attentionPass, x tensor.Mat) {
	rows, m := x.Rows, p.arena
	act.q = m.Mat(rows, a.Heads*a.qk())
	if a.QLora > 0 {
		act.cqIn, act.cq, act.cqRstd = m.Mat(rows, a.QLora), m.Mat(rows, a.QLora), m.Floats(rows)
		a.queryDown.forward(act.cqIn, x, 0)
		a.queryNorm.forward(act.cq, act.cqIn, act.cqRstd)
		a.queryUp.forward(act.q, act.cq, 0)
	} else {
		a.query.forward(act.q, x, 0)
	}
	for r := range rows {
		for h := range a.Heads {
			a.rope.rotate(act.q.Row(r)[h*a.qk()+a.Nope:], p.position[r])
		}
	}
}

// latent fills c and the shared rotary key: all that a cache has to keep of a token.
func (a *attention) latent(p *pass, act *attentionPass, kr, x tensor.Mat) {
	rows, m := x.Rows, p.arena
	act.cIn, act.c, act.cRstd = m.Mat(rows, a.KVLora), m.Mat(rows, a.KVLora), m.Floats(rows)
	a.latentDown.forward(act.cIn, x, 0)
	a.latentNorm.forward(act.c, act.cIn, act.cRstd)
	a.ropeKey.forward(kr, x, 0)
	for r := range rows {
		a.rope.rotate(kr.Row(r), p.position[r])
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
func (a *attention) backward(p *pass, act *attentionPass, dx, dy, x tensor.Mat) {
	rows, m := x.Rows, p.arena
	dq, dkv := m.Mat(rows, a.Heads*a.qk()), tensor.MatOf(rows, act.kv.Cols, m.Zeros(rows*act.kv.Cols))
	dkr := tensor.MatOf(rows, a.Rope, m.Zeros(rows*a.Rope))
	mark := m.Mark()
	do, dk := m.Mat(rows, a.Heads*a.V), tensor.MatOf(rows, dq.Cols, m.Zeros(rows*dq.Cols))
	a.output.backward(p, do, dy, act.o, 0)
	a.call = attentionCall{p, act, do, dq, dk, dkv}
	kernel.Parallel(len(p.segments)*a.Heads, a.runHeadGrad)
	for r := range rows {
		shared := dkr.Row(r)
		for h := range a.Heads {
			head := dk.Row(r)[h*a.qk() : (h+1)*a.qk()]
			copy(dkv.Row(r)[h*(a.Nope+a.V):], head[:a.Nope])
			for j, v := range head[a.Nope:] {
				shared[j] += v
			}
			a.rope.unrotate(dq.Row(r)[h*a.qk()+a.Nope:], p.position[r])
		}
		a.rope.unrotate(shared, p.position[r])
	}
	m.Release(mark)

	if a.QLora > 0 {
		dcq := m.Mat(rows, a.QLora)
		a.queryUp.backward(p, dcq, dq, act.cq, 0)
		a.queryNorm.backward(dcq, dcq, act.cqIn, act.cqRstd)
		a.queryDown.backward(p, dx, dcq, x, 0)
	} else {
		a.query.backward(p, dx, dq, x, 0)
	}
	dc := m.Mat(rows, a.KVLora)
	a.latentUp.backward(p, dc, dkv, act.c, 0)
	a.latentNorm.backward(dc, dc, act.cIn, act.cRstd)
	a.latentDown.backward(p, dx, dc, x, 1)
	a.ropeKey.backward(p, dx, dkr, x, 1)
}
