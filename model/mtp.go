package model

import (
	"context"

	"moetor/internal/kernel"
	"moetor/internal/tensor"
)

// mtpModule is depth k of multi-token prediction (DeepSeek-V3 §2.2): a block over
//
//	z_i = M [norm(Emb(t_{i+k})) ; norm(h_i)]        h' = block(z)       state = norm(h')
//
// whose state predicts t_{i+k+1} through the shared head. The embedding stands first, as in the released weights (the
// report's equation 21 has it second). h is the state that the head reads one depth before, so after the final norm, as
// in vLLM and Megatron; the report does not say. The embedding is looked up in the head stage's copy of the table.
//
// A position without a real token that far ahead in its segment has a zero for its embedding, is not routed and has no
// loss; no other position sees it.
type mtpModule struct {
	plan      *plan
	depth     int // from 0: the module looks depth+1 tokens ahead
	table     *embedding
	embedNorm norm
	stateNorm norm
	fromEmbed linear // the two halves of M's columns
	fromState linear
	block     *block
	outNorm   norm
}

// All [R, d].
type mtpPass struct {
	embed, h, z, out, state   tensor.Mat
	embedNormed, hNormed      operand
	embedRstd, hRstd, outRstd []float32
	dState                    tensor.Mat
	block                     blockPass
}

func newMTP(c Config, pl *plan, part Part, k int, byName map[string]*tensor.Param, table *tensor.Param, rope *rope, x Exchange) *mtpModule {
	layer := c.Layers + k
	p := layerName(layer)
	m := linearOf(byName[p+"eh_proj.weight"])
	return &mtpModule{
		plan:  pl,
		depth: k, table: embeddingOf(table),
		embedNorm: normOf(byName[p+"enorm.weight"], c.NormEps),
		stateNorm: normOf(byName[p+"hnorm.weight"], c.NormEps),
		fromEmbed: pl.pack(m.inputs(0, c.Dim)), fromState: pl.pack(m.inputs(c.Dim, 2*c.Dim)),
		block:   newBlock(c, pl, part, layer, byName, rope, x),
		outNorm: normOf(byName[p+"shared_head.norm.weight"], c.NormEps),
	}
}

func (m *mtpModule) forward(ctx context.Context, p *pass, act *mtpPass, h tensor.Mat) error {
	a, rows, d := p.arena, h.Rows, h.Cols
	real := p.depthReal[m.depth]
	act.h, p.layer = h, m.block.layer
	act.embed = zeroMat(a, rows, d)
	m.table.forward(act.embed, real, m.ahead(p))
	mark := p.temp.Mark()
	act.embedRstd, act.hRstd = a.Floats(rows), a.Floats(rows)
	m.inputs(p, act, p.keepUnless(m.plan.norm))
	act.z, act.out = a.Mat(rows, d), a.Mat(rows, d)
	m.fromEmbed.forward(act.z, act.embedNormed, 0)
	m.fromState.forward(act.z, act.hNormed, 1)
	p.temp.Release(mark)
	if err := m.block.forward(ctx, p, &act.block, act.out, act.z, real); err != nil {
		return err
	}
	act.state, act.outRstd = a.Mat(rows, d), a.Floats(rows)
	m.outNorm.forward(act.state, act.out, act.outRstd)
	return nil
}

// inputs makes what M reads.
func (m *mtpModule) inputs(p *pass, act *mtpPass, a *tensor.Arena) {
	act.embedNormed = m.plan.normed(p, a, "embedding", m.embedNorm, act.embed, act.embedRstd, tensor.Mat{})
	act.hNormed = m.plan.normed(p, a, "state", m.stateNorm, act.h, act.hRstd, tensor.Mat{})
}

// backward adds the gradient of h to dh, given the gradient of the module's state in act.dState.
func (m *mtpModule) backward(ctx context.Context, p *pass, act *mtpPass, dh tensor.Mat) error {
	rows, d := dh.Rows, dh.Cols
	m.outNorm.backward(act.dState, act.dState, act.out, act.outRstd)
	dz := p.arena.Mat(rows, d)
	if err := m.block.backward(ctx, p, &act.block, dz, act.dState); err != nil {
		return err
	}
	mark := p.temp.Mark()
	if m.plan.norm {
		m.inputs(p, act, p.arena)
	}
	dNormed, dOut := p.temp.Mat(rows, d), m.plan.gradient(p, gradientOf+"eh_proj", dz)
	m.fromState.backward(p, dNormed, dOut, act.hNormed, 0)
	m.stateNorm.backward(dNormed, dNormed, act.h, act.hRstd)
	kernel.Add(dh.Data, dNormed.Data)

	m.fromEmbed.backward(p, dNormed, dOut, act.embedNormed, 0)
	m.embedNorm.backward(dNormed, dNormed, act.embed, act.embedRstd)
	m.table.backward(dNormed, p.depthReal[m.depth], m.ahead(p))
	p.temp.Release(mark)
	return nil
}

// ahead are the tokens that the rows look ahead to.
func (m *mtpModule) ahead(p *pass) []int32 {
	return p.micro.Tokens[min(m.depth+1, len(p.micro.Tokens)):]
}
