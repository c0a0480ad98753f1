package model

import "moetor/internal/tensor"

// ffn is the SwiGLU feed-forward network (Shazeer, 2020): y = (silu(x Gᵀ) ∘ (x Uᵀ)) Dᵀ. It is the FFN of a dense layer,
// and all shared experts of a MoE layer side by side.
//
//	x [R, d]   gate, up, hidden [R, inter]
type ffn struct {
	plan           *plan
	gate, up, down linear
	names          *hiddenNames
}

// newFFN makes the FFN that is called name in a layer.
func newFFN(pl *plan, layer, name string, byName map[string]*tensor.Param) *ffn {
	get := func(part string) linear { return pl.pack(linearOf(byName[layer+name+part+".weight"])) }
	return &ffn{pl, get("gate_proj"), get("up_proj"), get("down_proj"), namesOf(name)}
}

// forward adds the FFN of x to y.
func (f *ffn) forward(p *pass, act *hiddenPass, y tensor.Mat, x operand) {
	mark := p.temp.Mark()
	act.names = f.names
	gate, up := f.plan.inputs(p, x.rows(), f.gate.w.Rows)
	f.gate.forward(gate, x, 0)
	f.up.forward(up, x, 0)
	f.down.forward(y, f.plan.hidden(p, act, gate, up), 1)
	p.temp.Release(mark)
}

// backward sets dx, given the gradient dy of forward's y.
func (f *ffn) backward(p *pass, act *hiddenPass, dx, dy tensor.Mat, x operand) {
	mark := p.temp.Mark()
	dHidden, dOut := p.temp.Mat(dy.Rows, f.gate.w.Rows), f.plan.gradient(p, f.names.dOut, dy)
	f.down.backwardInput(dHidden, dOut, 0)
	dGate, dUp, hidden := f.plan.hiddenGrad(p, act, dHidden, nil)
	f.down.owe(p, dOut, hidden)
	f.gate.backward(p, dx, dGate, x, 0)
	f.up.backward(p, dx, dUp, x, 1)
	p.temp.Release(mark)
}
