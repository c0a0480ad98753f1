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

// productJob is the product that the workers are at, in parts of rows and columns; or, with shared, in parts of rows that
// share a copied block of B.
var productJob struct {
	product
	rowParts, columnParts int
	shared                *panels
}

// sharedTiles is how many tiles high a part must be at least for parts to be of rows alone, so that they can share B: fewer
// would leave each too little to do with a panel.
const sharedTiles = 8

// runProduct cuts C into rectangles of whole tiles, some per thread. k is not cut.
func (p *pool) runProduct(q *product, threads int) {
	t, j := active.Load().micro, &productJob
	j.product = *q
	flops := 2 * int64(q.m) * int64(q.n) * int64(q.k)
	perThread := int(min(max(flops/(int64(threads)*partFlops), 1), maxParts))
	j.rowParts, j.columnParts = grid(t.rows, t.cols, q.m, q.n, threads*perThread)
	if (q.m+t.rows-1)/t.rows >= sharedTiles*threads*perThread {
		j.rowParts, j.columnParts = threads*perThread, 1
	}
	_, rows := share(0, j.rowParts, q.m, t.rows)
	part := q.part(0, rows, 0, q.n)
	if j.columnParts == 1 && j.rowParts > 1 && !part.readsB() {
		w := borrowWorkspace()
		j.shared = &w.panels
		across := blockB / q.deepest() / t.cols * t.cols
		for j0 := 0; j0 < q.n; j0 += across {
			for k0 := 0; k0 < q.k; k0 += q.deepest() {
				j.shared.begin(t, false, j0, min(j0+across, q.n), k0, min(k0+q.deepest(), q.k))
				p.run(j.rowParts, runSharedPart)
			}
		}
		j.shared = nil
		w.giveBack()
	} else {
		p.run(j.rowParts*j.columnParts, runProductPart)
	}
	j.product = product{} // hold on to nobody's matrices
}

func runSharedPart(i int) {
	t, q := active.Load().micro, &productJob
	i0, i1 := share(i, q.rowParts, q.m, t.rows)
	if i0 == i1 {
		return
	}
	part := q.part(i0, i1, 0, q.n)
	w := borrowWorkspace()
	w.blocks(t, &part, q.shared, part.readsA(), blockA, i*q.shared.count/q.rowParts)
	w.giveBack()
}

func runProductPart(i int) {
	t, q := active.Load().micro, &productJob
	i0, i1 := share(i/q.columnParts, q.rowParts, q.m, t.rows)
	j0, j1 := share(i%q.columnParts, q.columnParts, q.n, t.cols)
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
func grid(rowTile, columnTile, m, n, threads int) (rowParts, columnParts int) {
	best := int64(-1)
	for r := 1; r <= threads; r++ {
		c := threads / r
		_, rows := share(0, r, m, rowTile)
		_, cols := share(0, c, n, columnTile)
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

// groupParts are the parts of a grouped product, and where the queue of each thread ends among them.
type groupParts struct {
	parts []groupPart
	ends  []int
}

// cut makes every group a part, or several of whole tiles where it is more than one of as many fair pieces of the total. One
// group is cut into just so many, where it has the tiles. shape returns the sizes of the
// product of a group, and how many rows it takes. Each queue gets neighbouring groups of about equal work in all, and
// begins with the largest part.
func (g *groupParts) cut(groups, rowTile, columnTile, total, pieces, threads int, shape func(e int) (m, n, k, rows int)) {
	g.parts, g.ends = g.parts[:0], g.ends[:0]
	at, fair := 0, max((total+pieces-1)/pieces, 1)
	for e := range groups {
		m, n, k, rows := shape(e)
		if m*n*k > 0 {
			rowParts, columnParts := grid(rowTile, columnTile, m, n, min((m*n*k+fair-1)/fair, maxParts*threads))
			for i := range rowParts * columnParts {
				part := groupPart{group: e, at: at}
				part.i0, part.i1 = share(i/columnParts, rowParts, m, rowTile)
				part.j0, part.j1 = share(i%columnParts, columnParts, n, columnTile)
				if part.i0 < part.i1 && part.j0 < part.j1 {
					part.work = (part.i1 - part.i0) * (part.j1 - part.j0) * k
					g.parts = append(g.parts, part)
				}
			}
		}
		at += rows
	}
	done, from := 0, 0
	for i, part := range g.parts {
		for len(g.ends) < threads-1 && done+part.work/2 >= (len(g.ends)+1)*total/threads {
			g.ends = append(g.ends, i)
		}
		done += part.work
	}
	for len(g.ends) < threads {
		g.ends = append(g.ends, len(g.parts))
	}
	for _, end := range g.ends {
		slices.SortStableFunc(g.parts[from:end], func(a, b groupPart) int { return b.work - a.work })
		from = end
	}
}

// groupJob is the grouped product that the workers are at.
var groupJob struct {
	groups
	groupParts
}

func (p *pool) runGroups(g *groups, threads int) {
	j := &groupJob
	j.groups = *g
	total := 0
	for e := range g.rows {
		m, n, k := g.shape(e)
		total += m * n * k
	}
	t := active.Load().micro
	j.cut(len(g.rows), t.rows, t.cols, total, maxParts*threads, threads, func(e int) (m, n, k, rows int) {
		m, n, k = g.shape(e)
		return m, n, k, g.rows[e]
	})
	p.runQueues(len(j.parts), runGroupPart, j.ends)
	j.groups = groups{} // hold on to nobody's matrices
}

func runGroupPart(i int) {
	q := &groupJob.parts[i]
	whole := groupJob.product(q.group, q.at)
	part := whole.part(q.i0, q.i1, q.j0, q.j1)
	w := borrowWorkspace()
	w.multiply(active.Load().micro, &part)
	w.giveBack()
}
