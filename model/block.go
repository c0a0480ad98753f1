package model

import (
	"context"

	"moetor/internal/kernel"
	"moetor/internal/tensor"
)

// block is one pre-norm transformer layer with a dense or a MoE feed-forward network:
//
//	mid = x + attention(norm(x))        out = mid + ffn(norm(mid))       all [R, d]
type block struct {
	layer     int
	norm1     norm
	attention *attention
	norm2     norm
	dense     *ffn // one of the two
	moe       *moe
}

type blockPass struct {
	x, normed1, mid, normed2 tensor.Mat
	rstd1, rstd2             []float32
	attention                attentionPass
	dense                    ffnPass
	moe                      moePass
}

func newBlock(c Config, part Part, layer int, byName map[string]*tensor.Param, rope *rope, x Exchange) *block {
	prefix := layerName(layer)
	b := &block{
		layer:     layer,
		norm1:     normOf(byName[prefix+"input_layernorm.weight"], c.NormEps),
		attention: newAttention(c, prefix, byName, rope),
		norm2:     normOf(byName[prefix+"post_attention_layernorm.weight"], c.NormEps),
	}
	if c.dense(layer) {
		b.dense = newFFN(prefix+"mlp.", byName)
	} else {
		b.moe = newMoE(c, part, layer, byName, x)
	}
	return b
}

// forward sets out; real are the rows that the router may send to experts.
func (b *block) forward(ctx context.Context, p *pass, act *blockPass, out, x tensor.Mat, real []int32) error {
	m, rows, d := p.arena, x.Rows, x.Cols
	act.x = x
	act.normed1, act.rstd1 = m.Mat(rows, d), m.Floats(rows)
	b.norm1.forward(act.normed1, x, act.rstd1)
	act.mid = m.Mat(rows, d)
	copy(act.mid.Data, x.Data)
	b.attention.forward(p, &act.attention, act.mid, act.normed1)
	p.watch(act.mid, false, b.layer, placeAttention, -1)
	return b.feed(ctx, p, act, out, real)
}

// feed is the second half of forward: out = mid + ffn(norm(mid)).
func (b *block) feed(ctx context.Context, p *pass, act *blockPass, out tensor.Mat, real []int32) error {
	m, rows, d := p.arena, act.mid.Rows, act.mid.Cols
	act.normed2, act.rstd2 = m.Mat(rows, d), m.Floats(rows)
	b.norm2.forward(act.normed2, act.mid, act.rstd2)
	copy(out.Data, act.mid.Data)
	if b.dense != nil {
		b.dense.forward(p, &act.dense, out, act.normed2)
	} else if err := b.moe.forward(ctx, p, &act.moe, out, act.normed2, real); err != nil {
		return err
	}
	p.watch(out, false, b.layer, placeBlock, -1)
	return nil
}

// backward returns dx given dout, which must stay as it is until the pass's BackwardWeight, as dx must.
func (b *block) backward(ctx context.Context, p *pass, act *blockPass, dout tensor.Mat) (dx tensor.Mat, err error) {
	m, rows, d := p.arena, dout.Rows, dout.Cols
	dmid := m.Mat(rows, d)
	if b.dense != nil {
		b.dense.backward(p, &act.dense, dmid, dout, act.normed2)
	} else if err := b.moe.backward(ctx, p, &act.moe, dmid, dout, act.normed2); err != nil {
		return dx, err
	}
	b.norm2.backward(dmid, dmid, act.mid, act.rstd2)
	kernel.Add(dmid.Data, dout.Data)

	dx = m.Mat(rows, d)
	b.attention.backward(p, &act.attention, dx, dmid, act.normed1)
	b.norm1.backward(dx, dx, act.x, act.rstd1)
	kernel.Add(dx.Data, dmid.Data)
	p.watch(dx, true, b.layer, placeBlock, -1)
	return dx, nil
}
