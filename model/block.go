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
	plan      *plan
	layer     int
	norm1     norm
	attention *attention
	norm2     norm
	dense     *ffn // one of the two
	moe       *moe
}

type blockPass struct {
	x, mid           tensor.Mat
	normed1, normed2 operand
	rstd1, rstd2     []float32
	attention        attentionPass
	dense            hiddenPass
	moe              moePass
}

// Operands of a block, beside those in attention.go and hiddenNames.
const (
	attentionInput = "self_attn.input"
	ffnInput       = "mlp.input"
)

func newBlock(c Config, pl *plan, part Part, layer int, byName map[string]*tensor.Param, rope *rope, x Exchange) *block {
	prefix := layerName(layer)
	b := &block{
		plan:      pl,
		layer:     layer,
		norm1:     normOf(byName[prefix+"input_layernorm.weight"], c.NormEps),
		attention: newAttention(c, pl, prefix, byName, rope),
		norm2:     normOf(byName[prefix+"post_attention_layernorm.weight"], c.NormEps),
	}
	if c.dense(layer) {
		b.dense = newFFN(pl, prefix, "mlp.", byName)
	} else {
		b.moe = newMoE(c, pl, part, layer, byName, x)
	}
	return b
}

// forward sets out; real are the rows that the router may send to experts.
func (b *block) forward(ctx context.Context, p *pass, act *blockPass, out, x tensor.Mat, real []int32) error {
	m, rows, d := p.arena, x.Rows, x.Cols
	act.x, p.layer = x, b.layer
	mark := p.temp.Mark()
	act.rstd1 = m.Floats(rows)
	act.normed1 = b.plan.normed(p, p.keepUnless(b.plan.norm), attentionInput, b.norm1, x, act.rstd1, tensor.Mat{})
	act.mid = m.Mat(rows, d)
	kernel.Copy(act.mid.Data, x.Data)
	b.attention.forward(p, &act.attention, act.mid, act.normed1)
	p.temp.Release(mark)
	p.watch(act.mid, false, b.layer, placeAttention, -1)
	return b.feed(ctx, p, act, out, real)
}

// feed is the second half of forward: out = mid + ffn(norm(mid)).
func (b *block) feed(ctx context.Context, p *pass, act *blockPass, out tensor.Mat, real []int32) error {
	mark := p.temp.Mark()
	act.rstd2 = p.arena.Floats(act.mid.Rows)
	var full tensor.Mat
	act.normed2, full = b.second(p, act, p.keepUnless(b.plan.norm))
	kernel.Copy(out.Data, act.mid.Data)
	if b.dense != nil {
		b.dense.forward(p, &act.dense, out, act.normed2)
	} else if err := b.moe.forward(ctx, p, &act.moe, out, act.normed2, full, real); err != nil {
		return err
	}
	p.temp.Release(mark)
	p.watch(out, false, b.layer, placeBlock, -1)
	return nil
}

// second is norm(mid), as Linears read it and as it is; the router reads that.
func (b *block) second(p *pass, act *blockPass, a *tensor.Arena) (x operand, full tensor.Mat) {
	if !b.plan.low() || b.dense != nil {
		x = b.plan.normed(p, a, ffnInput, b.norm2, act.mid, act.rstd2, tensor.Mat{})
		return x, x.mat
	}
	full = p.temp.Mat(act.mid.Rows, act.mid.Cols)
	return b.plan.normed(p, a, ffnInput, b.norm2, act.mid, act.rstd2, full), full
}

// backward sets dx given dout, which must stay as it is until the weight gradients are done, as dx must.
func (b *block) backward(ctx context.Context, p *pass, act *blockPass, dx, dout tensor.Mat) error {
	m, rows, d, mark := p.arena, dout.Rows, dout.Cols, p.temp.Mark()
	p.layer = b.layer
	dmid := b.plan.gradients(p).Mat(rows, d)
	inner := p.temp.Mark()
	full := act.normed2.mat
	if b.plan.norm {
		act.normed2, full = b.second(p, act, m)
	} else if b.plan.low() && b.moe != nil {
		full = p.temp.Mat(rows, d)
		b.norm2.forward(full, act.mid, act.rstd2)
	}
	if b.dense != nil {
		b.dense.backward(p, &act.dense, dmid, dout, act.normed2)
	} else if err := b.moe.backward(ctx, p, &act.moe, dmid, dout, act.normed2, full); err != nil {
		return err
	}
	p.temp.Release(inner)
	b.norm2.backward(dmid, dmid, act.mid, act.rstd2)
	kernel.Add(dmid.Data, dout.Data)

	if b.plan.norm {
		act.normed1 = b.plan.normed(p, m, attentionInput, b.norm1, act.x, act.rstd1, tensor.Mat{})
	}
	b.attention.backward(p, &act.attention, dx, dmid, act.normed1)
	b.norm1.backward(dx, dx, act.x, act.rstd1)
	kernel.Add(dx.Data, dmid.Data)
	p.watch(dx, true, b.layer, placeBlock, -1)
	p.temp.Release(mark)
	return nil
}
