package model

import (
	"moetor/internal/kernel"
	"moetor/internal/tensor"
)

// ffn is the SwiGLU feed-forward network (Shazeer, 2020): y = (silu(x Gᵀ) ∘ (x Uᵀ)) Dᵀ. It is the FFN of a dense layer,
// and all shared experts of a MoE layer side by side.
//
//	x [R, d]   gate, up, hidden [R, inter]
type ffn struct{ gate, up, down linear }

type ffnPass struct{ gate, up, hidden tensor.Mat }

func newFFN(prefix string, byName map[string]*tensor.Param) *ffn {
	get := func(name string) linear { return linearOf(byName[prefix+name+".weight"]) }
	return &ffn{get("gate_proj"), get("up_proj"), get("down_proj")}
}

// forward adds the FFN of x to y.
func (f *ffn) forward(p *pass, act *ffnPass, y, x tensor.Mat) {
	rows, inter := x.Rows, f.gate.w.Rows
	act.gate, act.up, act.hidden = p.arena.Mat(rows, inter), p.arena.Mat(rows, inter), p.arena.Mat(rows, inter)
	f.gate.forward(act.gate, x, 0)
	f.up.forward(act.up, x, 0)
	kernel.SwiGLU(act.hidden.Data, act.gate.Data, act.up.Data)
	f.down.forward(y, act.hidden, 1)
}

// backward sets dx, given the gradient dy of forward's y. The gradients of gate and up take their places.
func (f *ffn) backward(p *pass, act *ffnPass, dx, dy, x tensor.Mat) {
	mark := p.arena.Mark()
	dHidden := p.arena.Mat(x.Rows, f.gate.w.Rows)
	f.down.backward(p, dHidden, dy, act.hidden, 0)
	kernel.SwiGLUGrad(act.gate.Data, act.up.Data, dHidden.Data, act.gate.Data, act.up.Data)
	p.arena.Release(mark)
	f.gate.backward(p, dx, act.gate, x, 0)
	f.up.backward(p, dx, act.up, x, 1)
}
