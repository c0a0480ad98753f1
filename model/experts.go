package model

import (
	"context"
	"fmt"

	"moetor/internal/kernel"
	"moetor/internal/lowp"
	"moetor/internal/tensor"
)

// An Exchange fixes the route of one micro-batch from how many rows this rank has for each expert (all experts, global
// numbering). It is a function type so that wiring is a closure over parallel/expert. It is called once for every MoE
// layer of every micro-batch, in the same order on all ranks of an expert group, also with no rows at all. A single expert
// rank needs none.
type Exchange func(ctx context.Context, layer int, rowsPerExpert []int) (Route, error)

// A Route moves rows to the ranks that own their experts, and back. It only moves: gate weights are the model's.
// Each direction is the adjoint of the other: the backward of Dispatch is Combine and the reverse.
// Dispatch: src has the rows of this rank sorted by expert (sum of rowsPerExpert rows); dst has sum(Rows()) rows, sorted
// by local expert, within it by source rank, within it in the source's order. Combine is the inverse move.
// A route is used until the BackwardInput of its micro-batch, its Rows until the BackwardWeight.
type Route interface {
	Rows() []int // rows received, per local expert
	Dispatch(ctx context.Context, dst, src tensor.Mat) error
	Combine(ctx context.Context, dst, src tensor.Mat) error
}

// localRoute is the identity route of a single expert rank. Rows have arrived where they were sorted: dst is src.
type localRoute struct{ rows []int }

func (r *localRoute) Rows() []int                                       { return r.rows }
func (r *localRoute) Dispatch(_ context.Context, _, _ tensor.Mat) error { return nil }
func (r *localRoute) Combine(_ context.Context, _, _ tensor.Mat) error  { return nil }

// moe is a DeepSeekMoE layer (DeepSeek-V3 §2.1.2): every token passes the shared experts, and the K experts that the
// router chose for it, weighted. No token is dropped, and padding goes to no routed expert.
//
//	x        [R, d]     normed input
//	sorted   [N K, d]   rows by expert, within an expert by token; dispatch turns them into
//	arrived  [M, d]     rows of this rank's experts, from all ranks of the expert group
//	gate, up, hidden [M, inter]   out [M, d] experts' outputs; combine turns them into
//	returned [N K, d]   outputs in the order of sorted
type moe struct {
	plan     *plan
	layer    int
	router   *Router
	shared   *ffn
	exchange Exchange // nil with one expert rank

	first          int // global number of the first local expert
	gate, up, down experts
	inter          int
	wire           *wire
	names          *hiddenNames
}

type moePass struct {
	gatePass
	hiddenPass
	shared            hiddenPass
	place             []int32 // N K: place of a token's slot among the sorted rows
	fill              []int   // E: scratch of the sort
	local             localRoute
	route             Route
	arrived, returned operand
}

func newMoE(c Config, pl *plan, part Part, layer int, byName map[string]*tensor.Param, x Exchange) *moe {
	prefix := layerName(layer) + "mlp."
	m := &moe{plan: pl, wire: newWire(), names: namesOf("experts."), layer: layer, inter: c.MoE.Inter, router: newRouter(c, layer, byName[prefix+"gate.weight"])}
	if part.ExpertSize > 1 {
		m.exchange = x
	}
	if c.MoE.Shared > 0 {
		m.shared = newFFN(pl, prefix, "shared_experts.", byName)
	}
	from, to := part.experts(c.MoE.Experts)
	m.first = from
	for e := from; e < to; e++ {
		get := func(name string) *tensor.Param { return byName[fmt.Sprintf("%sexperts.%d.%s.weight", prefix, e, name)] }
		m.gate.add(pl, get("gate_proj"))
		m.up.add(pl, get("up_proj"))
		m.down.add(pl, get("down_proj"))
	}
	return m
}

// forward adds the layer's output for x to y; full is x as it is. real are the rows that are routed.
func (m *moe) forward(ctx context.Context, p *pass, act *moePass, y tensor.Mat, x operand, full tensor.Mat, real []int32) error {
	if m.shared != nil {
		m.shared.forward(p, &act.shared, y, x)
	}
	m.router.forward(p, &act.gatePass, full, real)
	m.sort(act)
	var err error
	if m.exchange == nil {
		act.local.rows = act.rows
		act.route = &act.local
	} else if act.route, err = m.exchange(ctx, m.layer, act.rows); err != nil {
		return fmt.Errorf("layer %d: expert exchange: %w", m.layer, err)
	}
	act.names = m.names
	rows, slots := act.route.Rows(), m.slots(act, full.Cols)
	if act.arrived, err = m.dispatch(ctx, p, act, slots, full); err != nil {
		return fmt.Errorf("layer %d: dispatch: %w", m.layer, err)
	}
	gate, up := m.plan.inputs(p, act.arrived.rows(), m.inter)
	m.gate.forward(rows, gate, act.arrived)
	m.up.forward(rows, up, act.arrived)
	out := p.keepUnless(m.exchange != nil || m.plan.Combine != nil).Mat(act.arrived.rows(), full.Cols)
	m.down.forward(rows, out, m.plan.hidden(p, &act.hiddenPass, gate, up))
	m.watch(p, rows, out, false)
	if act.returned, err = m.combine(ctx, p, act, p.arena, expertOutput, out); err != nil {
		return fmt.Errorf("layer %d: combine: %w", m.layer, err)
	}
	slots.Combine(y.Data, y.Stride, act.weight.Data, p.load(act.returned).Data) // in order of the scores, whatever rank they come from
	return nil
}

// Operands on their way to the experts and back.
const (
	expertInput  = "experts.input"
	expertOutput = "experts.output"
)

// dispatch sends a row of x for each choice of a token to its expert. Codes are multiplied as they arrive.
func (m *moe) dispatch(ctx context.Context, p *pass, act *moePass, slots kernel.Slots, x tensor.Mat) (operand, error) {
	n, sent, d, q := sumRows(act.route.Rows()), len(act.chosen), x.Cols, m.plan.Dispatch
	if q == nil {
		arrived := p.arena.Mat(n, d)
		sorted := arrived
		if m.exchange != nil {
			sorted = p.temp.Mat(sent, d)
		}
		slots.Scatter(sorted.Data, x.Data, x.Stride)
		return operand{mat: arrived}, act.route.Dispatch(ctx, arrived, sorted)
	}
	arrived := p.codes(p.arena, expertInput, q, n, d, nil)
	sorted := arrived
	if m.exchange != nil {
		sorted = p.codes(p.temp, expertInput, q, sent, d, nil)
	}
	slots.ScatterQuantized(sorted, x.Data, x.Stride)
	if p.watching != nil {
		p.operand(p.temp, expertInput, x, q, nil)
	}
	return operand{codes: arrived, tall: m.plan.InputT}, m.move(ctx, p, act.route.Dispatch, arrived, sorted)
}

// combine sends the rows of experts back to where their tokens are.
func (m *moe) combine(ctx context.Context, p *pass, act *moePass, a *tensor.Arena, name string, out tensor.Mat) (operand, error) {
	sent, q := len(act.chosen), m.plan.Combine
	if q == nil {
		returned := out
		if m.exchange != nil {
			returned = a.Mat(sent, out.Cols)
		}
		return operand{mat: returned}, act.route.Combine(ctx, returned, out)
	}
	if m.exchange == nil {
		return p.operand(a, name, out, q, nil), nil
	}
	returned := p.codes(a, name, q, sent, out.Cols, nil)
	return operand{codes: returned}, m.move(ctx, p, act.route.Combine, returned, p.operand(p.temp, name, out, q, nil).codes)
}

// dispatchGrad is the backward of combine and of the weights: it sends the gradients of the experts' outputs to them.
// values are these gradients.
func (m *moe) dispatchGrad(ctx context.Context, p *pass, act *moePass, values tensor.Mat) (gradient, error) {
	rows, d, q := act.route.Rows(), values.Cols, m.plan.Dispatch
	if q == nil {
		dOut := values
		if m.exchange != nil {
			dOut = p.arena.Mat(act.arrived.rows(), d)
		}
		return gradient{mat: dOut}, act.route.Dispatch(ctx, dOut, values)
	}
	same := *q == *m.plan.GradT
	flat := p.codes(p.keepUnless(!same), m.names.dOut, q, act.arrived.rows(), d, nil)
	sent := flat
	if m.exchange != nil {
		sent = p.codes(p.temp, m.names.dOut, q, values.Rows, d, nil)
	}
	p.quantize(m.names.dOut, sent, nil, values)
	if err := m.move(ctx, p, act.route.Dispatch, flat, sent); err != nil || same {
		return gradient{flat: flat, tall: flat}, err
	}
	g := gradient{flat: flat, tall: p.codes(p.arena, m.names.dOut, m.plan.GradT, flat.Rows, d, rows)}
	kernel.Requantize(g.tall, flat)
	return g, nil
}

func sumRows(rows []int) (n int) {
	for _, r := range rows {
		n += r
	}
	return n
}

// slots says where a token's rows stand among the sorted ones.
func (m *moe) slots(act *moePass, cols int) kernel.Slots {
	return kernel.Slots{Rows: act.real, Places: act.place, K: m.router.moe.TopK, Cols: cols}
}

// sort gives each slot of a token its place among the sorted rows: by expert, within an expert by token.
func (m *moe) sort(act *moePass) {
	act.fill, act.place = grow(act.fill, len(act.rows)), grow(act.place, len(act.chosen))
	at := 0
	for e, n := range act.rows {
		act.fill[e] = at
		at += n
	}
	for i, e := range act.chosen {
		act.place[i] = int32(act.fill[e])
		act.fill[e]++
	}
}

// watch looks for numbers that are not finite, and if there are any, for the local expert that they are of.
func (m *moe) watch(p *pass, rows []int, y tensor.Mat, backward bool) {
	if kernel.Finite(y.Data) {
		return
	}
	at := 0
	for e, n := range rows {
		p.watch(y.RowRange(at, at+n), backward, m.layer, placeExpert, m.first+e)
		at += n
	}
}

// backward sets dx, given the gradient dy of forward's y. Gradients travel the same route.
func (m *moe) backward(ctx context.Context, p *pass, act *moePass, dx, dy tensor.Mat, x operand, full tensor.Mat) error {
	if m.shared != nil {
		m.shared.backward(p, &act.shared, dx, dy, x)
	} else {
		kernel.Zero(dx.Data)
	}
	rows, slots, n := act.route.Rows(), m.slots(act, full.Cols), act.arrived.rows()
	dWeight, values := p.arena.Mat(len(act.real), slots.K), p.load(act.returned)
	slots.CombineGrad(dWeight.Data, values.Data, dy.Data, dy.Stride, act.weight.Data)
	dOut, err := m.dispatchGrad(ctx, p, act, values)
	if err != nil {
		return fmt.Errorf("layer %d: dispatch of gradients: %w", m.layer, err)
	}
	dHidden, dArrived := p.temp.Mat(n, m.inter), p.temp.Mat(n, full.Cols)
	m.down.backward(rows, dHidden, dOut, 0)
	dGate, dUp, hidden := m.plan.hiddenGrad(p, &act.hiddenPass, dHidden, rows)
	m.gate.backward(rows, dArrived, dGate, 0)
	m.up.backward(rows, dArrived, dUp, 1)
	m.down.owe(p, rows, dOut, hidden)
	m.gate.owe(p, rows, dGate, act.arrived)
	m.up.owe(p, rows, dUp, act.arrived)
	m.watch(p, rows, dArrived, true)
	dSorted, err := m.combine(ctx, p, act, p.temp, gradientOf+expertInput, dArrived)
	if err != nil {
		return fmt.Errorf("layer %d: combine of gradients: %w", m.layer, err)
	}
	slots.Combine(dx.Data, dx.Stride, nil, p.load(dSorted).Data)
	owed := len(p.jobs)
	m.router.backward(p, &act.gatePass, dx, dWeight, full)
	if m.plan.low() { // full is temporary
		p.settle(owed)
	}
	return nil
}

// move sends codes along a route, as rows of words: the codes of a row and then its scales, moved as they are.
func (m *moe) move(ctx context.Context, p *pass, along func(ctx context.Context, dst, src tensor.Mat) error, dst, src *lowp.Matrix) error {
	if m.exchange == nil {
		return nil // they are where they belong
	}
	words := wireWords(src)
	from, to := p.temp.Mat(src.Rows, words), p.temp.Mat(dst.Rows, words)
	m.wire.pack(from, src)
	if err := along(ctx, to, from); err != nil {
		return err
	}
	m.wire.unpack(dst, to)
	return nil
}
