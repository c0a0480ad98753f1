// Package expert moves routed rows between the ranks that share the experts of a layer. The direct exchange sends every row
// straight to the rank that owns its expert, once per chosen expert, after the counts have been exchanged; nothing is
// dropped and no capacity exists (the pattern of DeepSeek-V3 §3.2.2 without its two-hop step).
//
// The rank at position r of an expert group of S owns the experts [r*E/S, (r+1)*E/S).
package expert

import (
	"context"
	"fmt"

	"moetor/comm"
	"moetor/internal/kernel"
	"moetor/internal/tensor"
)

// An Exchange makes the Routes of one rank. Its Routes share working memory, so it serves one goroutine at a time, and all
// members of the group must use theirs in the same order.
type Exchange struct {
	g       *comm.Group
	experts int
	bounds  []int // member r owns experts [bounds[r], bounds[r+1])

	// Working memory, grown to the largest use.
	rows      []float32 // received, by source
	sendElems []int
	recvElems []int
	counts    []int32 // to send
	ones      []int   // experts per member, for the exchange of counts
	mine      []int   // local experts once per member

	routes  []*Route // for reuse; routes[used:] are free
	used    int
	recycle bool // Reset has been called
	sent    Traffic
}

// Traffic counts what a rank sent to others.
type Traffic struct{ Rows, Bytes int64 }

// New makes the exchange of a rank over its expert group. Every member owns at least one expert.
func New(g *comm.Group, experts int) (*Exchange, error) {
	n := g.Size()
	if experts < n {
		return nil, fmt.Errorf("model.moe.experts=%d are fewer than the %d ranks that share them (parallel.expert)", experts, n)
	}
	x := &Exchange{
		g: g, experts: experts, bounds: make([]int, n+1),
		sendElems: make([]int, n), recvElems: make([]int, n),
		counts: make([]int32, experts), ones: make([]int, n), mine: make([]int, n),
	}
	for r := range x.bounds {
		x.bounds[r] = r * experts / n
	}
	first, last := x.Local()
	for r := range n {
		x.ones[r], x.mine[r] = x.bounds[r+1]-x.bounds[r], last-first
	}
	return x, nil
}

// Local returns the experts [first, last) that this rank owns.
func (x *Exchange) Local() (first, last int) {
	return x.bounds[x.g.Rank()], x.bounds[x.g.Rank()+1]
}

// Sent is what this rank has sent to others since New: rows by Dispatch and Combine, and their bytes (the exchanged counts
// are not included).
func (x *Exchange) Sent() Traffic { return x.sent }

// Reset takes back every Route made since the last Reset, to be reused; call it when no backward needs them any more, which
// is at the start of a step. Before the first Reset, Routes are left to the garbage collector.
func (x *Exchange) Reset() { x.used, x.recycle = 0, true }

// Route fixes where the rows of one micro-batch in one layer go: this rank has rowsPerExpert[e] rows for expert e, of all
// experts. Ranks may have no row at all. The Route stays valid until Reset.
func (x *Exchange) Route(ctx context.Context, rowsPerExpert []int) (*Route, error) {
	if len(rowsPerExpert) != x.experts {
		return nil, fmt.Errorf("expert exchange: row counts for %d experts, the model has %d", len(rowsPerExpert), x.experts)
	}
	for e, n := range rowsPerExpert {
		if n < 0 || n != int(int32(n)) {
			return nil, fmt.Errorf("expert exchange: %d rows for expert %d", n, e)
		}
		x.counts[e] = int32(n)
	}
	r := x.route()
	if err := comm.AllToAll(ctx, x.g, r.from, x.counts, x.mine, x.ones); err != nil {
		return nil, fmt.Errorf("expert exchange: counts: %w", err)
	}
	if err := r.fill(rowsPerExpert); err != nil {
		return nil, err
	}
	return r, nil
}

// route returns a Route with tables of the right size and undefined content.
func (x *Exchange) route() *Route {
	if x.used < len(x.routes) {
		x.used++
		return x.routes[x.used-1]
	}
	n := x.g.Size()
	local := x.mine[0]
	r := &Route{x: x, send: make([]int, n), recv: make([]int, n), rows: make([]int, local), from: make([]int32, n*local)}
	if x.recycle {
		x.routes = append(x.routes, r)
		x.used++
	}
	return r
}

// A Route moves the rows of one micro-batch in one layer to the ranks that own their experts, and back. Dispatch and
// Combine are each the adjoint of the other, so the backward of one is the other.
type Route struct {
	x    *Exchange
	send []int   // rows to each member
	recv []int   // rows from each member
	rows []int   // rows received per local expert
	from []int32 // [member][local expert]: rows received
	nin  int     // sum of rows
	nout int     // sum of send
}

func (r *Route) fill(rowsPerExpert []int) error {
	x, local := r.x, len(r.rows)
	clear(r.rows)
	r.nin, r.nout = 0, 0
	for m := range r.send {
		r.send[m], r.recv[m] = 0, 0
		for _, n := range rowsPerExpert[x.bounds[m]:x.bounds[m+1]] {
			r.send[m] += n
		}
		for e, n := range r.from[m*local : (m+1)*local] {
			if n < 0 {
				return fmt.Errorf("expert exchange: rank %d announces %d rows", x.g.Ranks()[m], n)
			}
			r.recv[m] += int(n)
			r.rows[e] += int(n)
		}
		r.nin += r.recv[m]
		r.nout += r.send[m]
	}
	return nil
}

// Rows returns how many rows this rank receives for each of its experts. The caller must not change it.
func (r *Route) Rows() []int { return r.rows }

// Dispatch moves src, the rows of this rank sorted by expert, to the experts. dst receives the rows for this rank's
// experts: sorted by expert, within one by source rank, within one source in its order. Shapes: src has the sum of
// rowsPerExpert rows, dst the sum of Rows(), both the same columns. They must not overlap.
func (r *Route) Dispatch(ctx context.Context, dst, src tensor.Mat) error {
	if err := r.check("dispatch", dst, src, r.nin, r.nout); err != nil {
		return err
	}
	if r.alone() {
		copyRows(dst, src)
		return nil
	}
	if !src.Contiguous() || !dst.Contiguous() {
		return fmt.Errorf("expert exchange: dispatch between matrices with gaps (strides %d and %d for %d columns)", src.Stride, dst.Stride, src.Cols)
	}
	// Rows sorted by expert are sorted by destination too. They arrive sorted by source, within it by expert.
	arrived := flat(dst)
	if len(r.rows) > 1 {
		arrived = r.x.scratch(r.nin * src.Cols)
	}
	if err := r.move(ctx, arrived, flat(src), r.recv, r.send, src.Cols); err != nil {
		return fmt.Errorf("expert exchange: dispatch: %w", err)
	}
	if len(r.rows) > 1 {
		r.permute(flat(dst), arrived, src.Cols, false)
	}
	return nil
}

// Combine is the inverse move: src has the rows in the order that Dispatch gave them, dst receives this rank's rows back,
// sorted by expert. Shapes: src has the sum of Rows() rows, dst the sum of rowsPerExpert. They must not overlap.
func (r *Route) Combine(ctx context.Context, dst, src tensor.Mat) error {
	if err := r.check("combine", dst, src, r.nout, r.nin); err != nil {
		return err
	}
	if r.alone() {
		copyRows(dst, src)
		return nil
	}
	if !src.Contiguous() || !dst.Contiguous() {
		return fmt.Errorf("expert exchange: combine between matrices with gaps (strides %d and %d for %d columns)", src.Stride, dst.Stride, src.Cols)
	}
	leaving := flat(src)
	if len(r.rows) > 1 {
		leaving = r.x.scratch(r.nin * src.Cols)
		r.permute(flat(src), leaving, src.Cols, true)
	}
	if err := r.move(ctx, flat(dst), leaving, r.send, r.recv, src.Cols); err != nil {
		return fmt.Errorf("expert exchange: combine: %w", err)
	}
	return nil
}

// alone reports whether there is nobody to exchange rows with: the order by expert is then the order on both sides.
func (r *Route) alone() bool { return len(r.send) == 1 }

func (r *Route) check(op string, dst, src tensor.Mat, dstRows, srcRows int) error {
	switch {
	case src.Rows != srcRows:
		return fmt.Errorf("expert exchange: %s of %d rows, the route has %d", op, src.Rows, srcRows)
	case dst.Rows != dstRows:
		return fmt.Errorf("expert exchange: %s into %d rows, the route gives %d", op, dst.Rows, dstRows)
	case src.Cols != dst.Cols:
		return fmt.Errorf("expert exchange: %s of %d columns into %d", op, src.Cols, dst.Cols)
	}
	return nil
}

// move exchanges whole rows; recv and send count rows per member.
func (r *Route) move(ctx context.Context, dst, src []float32, recv, send []int, cols int) error {
	x := r.x
	for m := range send {
		x.sendElems[m], x.recvElems[m] = send[m]*cols, recv[m]*cols
		if m != x.g.Rank() {
			x.sent.Rows += int64(send[m])
			x.sent.Bytes += 4 * int64(x.sendElems[m])
		}
	}
	return comm.AllToAll(ctx, x.g, dst, src, x.recvElems, x.sendElems)
}

// permute copies between the order by expert then source and the order by source then expert (to bySource if back).
func (r *Route) permute(byExpert, bySource []float32, cols int, back bool) {
	local, at := len(r.rows), 0
	for e := range r.rows {
		before := 0 // rows of the sources before m
		for m := range r.recv {
			in := before // rows of source m for the experts before e
			for _, n := range r.from[m*local : m*local+e] {
				in += int(n)
			}
			n := int(r.from[m*local+e])
			a, b := byExpert[at*cols:(at+n)*cols], bySource[in*cols:(in+n)*cols]
			if back {
				copy(b, a)
			} else {
				copy(a, b)
			}
			at += n
			before += r.recv[m]
		}
	}
}

// scratch returns n floats of working memory. All moves of the exchange share it: none outlives its call.
func (x *Exchange) scratch(n int) []float32 {
	if cap(x.rows) < n {
		x.rows = make([]float32, n+n/4)
	}
	return x.rows[:n]
}

func flat(m tensor.Mat) []float32 { return m.Data[:m.Rows*m.Cols] }

func copyRows(dst, src tensor.Mat) {
	if dst.Contiguous() && src.Contiguous() {
		kernel.Copy(flat(dst), flat(src))
		return
	}
	for r := range src.Rows {
		copy(dst.Row(r), src.Row(r))
	}
}
