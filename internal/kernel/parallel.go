package kernel

import "slices"

// splitFlops is the size of product from which waking workers pays (some 10 µs of work for one core).
const splitFlops = 1 << 21

// A product is cut into at most maxParts parts per thread of at least partFlops, so that the others finish what is left
// when the system takes a core away for a while. Every part packs its operands anew.
const (
	partFlops = 1 << 27
	maxParts  = 4
)

// splitWays returns the number of threads for a product.
func splitWays(m, n, k int) int {
	t := Threads()
	if t > 1 && 2*int64(m)*int64(n)*int64(k) >= splitFlops {
		return t
	}
	return 1
}

// runProduct cuts C into rectangles of whole tiles, some per thread. k is never cut.
func (p *pool) runProduct(q *product, threads int) {
	p.product = *q
	flops := 2 * int64(q.m) * int64(q.n) * int64(q.k)
	perThread := int(min(max(flops/(int64(threads)*partFlops), 1), maxParts))
	p.rowParts, p.columnParts = grid(active.Load().micro, q.m, q.n, threads*perThread)
	p.run(p.rowParts*p.columnParts, p.productPart)
}

func (p *pool) runProductPart(i int) {
	t, q := active.Load().micro, &p.product
	i0, i1 := share(i/p.columnParts, p.rowParts, q.m, t.rows)
	j0, j1 := share(i%p.columnParts, p.columnParts, q.n, t.cols)
	if i0 == i1 || j0 == j1 {
		return
	}
	part := q.part(i0, i1, j0, j1)
	w := borrowWorkspace()
	w.multiply(t, &part)
	w.giveBack()
}

// grid chooses into how many parts rows and columns are cut: the largest part should be small, and then the operands
// that parts have to pack anew.
func grid(t *micro, m, n, threads int) (rowParts, columnParts int) {
	best := int64(-1)
	for r := 1; r <= threads; r++ {
		c := threads / r
		_, rows := share(0, r, m, t.rows)
		_, cols := share(0, c, n, t.cols)
		// A packed value costs about as much as some 16 multiply-adds.
		cost := int64(rows)*int64(cols) + 16*int64(rows+cols)
		if best < 0 || cost < best {
			best, rowParts, columnParts = cost, r, c
		}
	}
	return rowParts, columnParts
}

// share returns the bounds of part i of n values cut into parts of whole tiles; the first parts are the larger ones.
func share(i, parts, n, tile int) (from, to int) {
	tiles := (n + tile - 1) / tile
	each, more := tiles/parts, tiles%parts
	from = i*each + min(i, more)
	to = from + each
	if i < more {
		to++
	}
	return min(from*tile, n), min(to*tile, n)
}

// groupPart is rows i0..i1 and columns j0..j1 of the product of a group, whose rows begin at row at.
type groupPart struct {
	group, at      int
	i0, i1, j0, j1 int
	work           int
}

// runGroups makes every group a part, or several where it is more than a fair piece, and hands them out largest first.
func (p *pool) runGroups(g *groups, threads int) {
	p.groups = *g
	t := active.Load().micro
	total := 0
	for e := range g.rows {
		m, n, k := g.shape(e)
		total += m * n * k
	}
	fair := max(total/(4*threads), 1)
	p.groupParts = p.groupParts[:0]
	at := 0
	for e, r := range g.rows {
		if m, n, k := g.shape(e); m*n*k > 0 {
			rowParts, columnParts := grid(t, m, n, min((m*n*k+fair-1)/fair, 4*threads))
			for i := range rowParts * columnParts {
				part := groupPart{group: e, at: at}
				part.i0, part.i1 = share(i/columnParts, rowParts, m, t.rows)
				part.j0, part.j1 = share(i%columnParts, columnParts, n, t.cols)
				if part.work = (part.i1 - part.i0) * (part.j1 - part.j0) * k; part.work > 0 {
					p.groupParts = append(p.groupParts, part)
				}
			}
		} else if r > 0 && m*n > 0 { // k = 0: the product is zero
			p.groupParts = append(p.groupParts, groupPart{group: e, at: at, i1: m, j1: n})
		}
		at += r
	}
	slices.SortStableFunc(p.groupParts, func(a, b groupPart) int { return b.work - a.work })
	p.run(len(p.groupParts), p.runGroup)
}

func (p *pool) runGroupPart(i int) {
	g, q := &p.groups, &p.groupParts[i]
	whole := g.product(q.group, q.at)
	part := whole.part(q.i0, q.i1, q.j0, q.j1)
	w := borrowWorkspace()
	w.multiply(active.Load().micro, &part)
	w.giveBack()
}
