package model

import (
	"context"
	"fmt"

	"moetor/internal/kernel"
	"moetor/internal/tensor"
)

// An Exchange fixes the route of one micro-batch from how many rows this rank has for each expert (all experts, global
// numbering). It is a function type so that wiring is a closure over parallel/expert. It is called once for every MoE
// layer of every micro-batch, in the same order on all ranks of an expert group, also with no rows at all.
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

// localRoute is the identity route of a single expert rank.
type localRoute struct{ rows []int }

// LocalExchange is the Exchange of a single expert rank. New uses it (without its allocation) when it gets none.
func LocalExchange(_ context.Context, _ int, rowsPerExpert []int) (Route, error) {
	return &localRoute{rowsPerExpert}, nil
}

func (r *localRoute) Rows() []int { return r.rows }

func (r *localRoute) Dispatch(_ context.Context, dst, src tensor.Mat) error {
	kernel.Copy(dst.Data, src.Data)
	return nil
}

func (r *localRoute) Combine(_ context.Context, dst, src tensor.Mat) error {
	kernel.Copy(dst.Data, src.Data)
	return nil
}

// moe is a DeepSeekMoE layer (DeepSeek-V3 §2.1.2): every token passes the shared experts, and the K experts that the
// router chose for it, weighted. No token is dropped, and padding goes to no routed expert.
//
//	x        [R, d]     normed input
//	sorted   [N K, d]   rows by expert, within an expert by token; dispatch turns them into
//	arrived  [M, d]     rows of this rank's experts, from all ranks of the expert group
//	gate, up, hidden [M, inter]   out [M, d] experts' outputs; combine turns them into
//	returned [N K, d]   outputs in the order of sorted
type moe struct {
	layer    int
	router   *Router
	shared   *ffn
	exchange Exchange

	first          int         // global number of the first local expert
	gate, up, down [][]float32 // weights of the local experts
	gateGrad       [][]float32
	upGrad         [][]float32
	downGrad       [][]float32
	inter          int
}

type moePass struct {
	gatePass
	shared                    ffnPass
	rows                      []int   // E: rows of this rank for each expert
	place                     []int32 // N K: place of a token's slot among the sorted rows
	fill                      []int   // E: scratch of the sort
	local                     localRoute
	route                     Route
	arrived, gate, up, hidden tensor.Mat
	returned                  tensor.Mat
}

func newMoE(c Config, part Part, layer int, byName map[string]*tensor.Param, x Exchange) *moe {
	prefix := layerName(layer) + "mlp."
	m := &moe{layer: layer, exchange: x, inter: c.MoE.Inter, router: newRouter(c, layer, byName[prefix+"gate.weight"])}
	if c.MoE.Shared > 0 {
		m.shared = newFFN(prefix+"shared_experts.", byName)
	}
	from, to := part.experts(c.MoE.Experts)
	m.first = from
	for e := from; e < to; e++ {
		add := func(name string, values, grads *[][]float32) {
			p := byName[fmt.Sprintf("%sexperts.%d.%s.weight", prefix, e, name)]
			*values, *grads = append(*values, p.Value), append(*grads, p.Grad)
		}
		add("gate_proj", &m.gate, &m.gateGrad)
		add("up_proj", &m.up, &m.upGrad)
		add("down_proj", &m.down, &m.downGrad)
	}
	return m
}

// forward adds the layer's output for x to y. real are the rows that are routed.
func (m *moe) forward(ctx context.Context, p *pass, act *moePass, y, x tensor.Mat, real []int32) error {
	if m.shared != nil {
		m.shared.forward(p, &act.shared, y, x)
	}
	m.router.forward(p, &act.gatePass, x, real)
	m.sort(act)
	var err error
	if m.exchange == nil {
		act.local.rows = act.rows
		act.route = &act.local
	} else if act.route, err = m.exchange(ctx, m.layer, act.rows); err != nil {
		return fmt.Errorf("layer %d: expert exchange: %w", m.layer, err)
	}
	rows := act.route.Rows()
	arrived, sent, d := 0, len(act.chosen), x.Cols
	for _, n := range rows {
		arrived += n
	}
	a := p.arena
	act.arrived, act.returned = a.Mat(arrived, d), a.Mat(sent, d)
	act.gate, act.up, act.hidden = a.Mat(arrived, m.inter), a.Mat(arrived, m.inter), a.Mat(arrived, m.inter)
	mark := a.Mark()
	sorted, out := a.Mat(sent, d), a.Mat(arrived, d)
	m.gather(act, sorted, x)
	if err := act.route.Dispatch(ctx, act.arrived, sorted); err != nil {
		return fmt.Errorf("layer %d: dispatch: %w", m.layer, err)
	}
	kernel.GroupedGemm(kernel.NT, rows, m.inter, d, act.arrived.Data, m.gate, 0, act.gate.Data)
	kernel.GroupedGemm(kernel.NT, rows, m.inter, d, act.arrived.Data, m.up, 0, act.up.Data)
	kernel.SwiGLU(act.hidden.Data, act.gate.Data, act.up.Data)
	kernel.GroupedGemm(kernel.NT, rows, d, m.inter, act.hidden.Data, m.down, 0, out.Data)
	m.watch(p, rows, out, false)
	if err := act.route.Combine(ctx, act.returned, out); err != nil {
		return fmt.Errorf("layer %d: combine: %w", m.layer, err)
	}
	a.Release(mark)
	k := m.router.moe.TopK
	for n, r := range act.real { // slots in order of their scores, whatever rank they come from
		for j, g := range act.weight.Row(n) {
			kernel.Axpy(y.Row(int(r)), g, act.returned.Row(int(act.place[n*k+j])))
		}
	}
	return nil
}

// sort counts the rows for each expert, and gives each slot of a token its place among them: by expert, within an expert
// by token.
func (m *moe) sort(act *moePass) {
	experts := m.router.moe.Experts
	act.rows, act.fill, act.place = grow(act.rows, experts), grow(act.fill, experts), grow(act.place, len(act.chosen))
	clear(act.rows)
	for _, e := range act.chosen {
		act.rows[e]++
	}
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

// gather copies the rows of x to their places.
func (m *moe) gather(act *moePass, sorted, x tensor.Mat) {
	k := m.router.moe.TopK
	for n, r := range act.real {
		for _, to := range act.place[n*k : (n+1)*k] {
			copy(sorted.Row(int(to)), x.Row(int(r)))
		}
	}
}

// watch looks for numbers that are not finite in each local expert's rows.
func (m *moe) watch(p *pass, rows []int, y tensor.Mat, backward bool) {
	at := 0
	for e, n := range rows {
		p.watch(y.RowRange(at, at+n), backward, m.layer, placeExpert, m.first+e)
		at += n
	}
}

// backward sets dx, given the gradient dy of forward's y. Gradients travel the same route, and take the places of what
// they are gradients of where that is spent: the returned outputs, gate and up.
func (m *moe) backward(ctx context.Context, p *pass, act *moePass, dx, dy, x tensor.Mat) error {
	if m.shared != nil {
		m.shared.backward(p, &act.shared, dx, dy, x)
	} else {
		clear(dx.Data)
	}
	k, d, rows, a := m.router.moe.TopK, x.Cols, act.route.Rows(), p.arena
	dWeight, dOut := a.Mat(len(act.real), k), a.Mat(act.arrived.Rows, d)
	mark := a.Mark()
	for n, r := range act.real {
		from := dy.Row(int(r))
		for j, g := range act.weight.Row(n) {
			out := act.returned.Row(int(act.place[n*k+j]))
			dWeight.Row(n)[j] = dot(from, out)
			for i, v := range from {
				out[i] = g * v
			}
		}
	}
	if err := act.route.Dispatch(ctx, dOut, act.returned); err != nil {
		return fmt.Errorf("layer %d: dispatch of gradients: %w", m.layer, err)
	}
	dHidden, dArrived := a.Mat(dOut.Rows, m.inter), a.Mat(dOut.Rows, d)
	kernel.GroupedGemm(kernel.NN, rows, m.inter, d, dOut.Data, m.down, 0, dHidden.Data)
	kernel.SwiGLUGrad(act.gate.Data, act.up.Data, dHidden.Data, act.gate.Data, act.up.Data)
	kernel.GroupedGemm(kernel.NN, rows, d, m.inter, act.gate.Data, m.gate, 0, dArrived.Data)
	kernel.GroupedGemm(kernel.NN, rows, d, m.inter, act.up.Data, m.up, 1, dArrived.Data)
	p.jobs = append(p.jobs,
		gradJob{rows: rows, grads: m.downGrad, dy: dOut, x: act.hidden, dn: d, xn: m.inter},
		gradJob{rows: rows, grads: m.gateGrad, dy: act.gate, x: act.arrived, dn: m.inter, xn: d},
		gradJob{rows: rows, grads: m.upGrad, dy: act.up, x: act.arrived, dn: m.inter, xn: d})
	m.watch(p, rows, dArrived, true)
	if err := act.route.Combine(ctx, act.returned, dArrived); err != nil {
		return fmt.Errorf("layer %d: combine of gradients: %w", m.layer, err)
	}
	a.Release(mark)
	for n, r := range act.real {
		for _, at := range act.place[n*k : (n+1)*k] {
			kernel.Add(dx.Row(int(r)), act.returned.Row(int(at)))
		}
	}
	m.router.backward(p, &act.gatePass, dx, dWeight, x)
	return nil
}

// dot is the inner product in eight running sums, whose order does not depend on the machine.
func dot(a, b []float32) float32 {
	var s [8]float32
	n := len(a) &^ 7
	for i := 0; i < n; i += 8 {
		x, y := a[i:i+8:i+8], b[i:i+8:i+8]
		for l := range s {
			s[l] += x[l] * y[l]
		}
	}
	for i := n; i < len(a); i++ {
		s[0] += a[i] * b[i]
	}
	return ((s[0] + s[4]) + (s[2] + s[6])) + ((s[1] + s[5]) + (s[3] + s[7]))
}
