package kernel

import (
	"sync"
	"sync/atomic"
)

// splitFlops is the size of product from which waking workers pays (some 10 µs of work for one core).
const splitFlops = 1 << 21

// pool is the set of workers. One job runs at a time; who finds the pool taken (a nested call, or another goroutine)
// does its work itself, so nesting cannot deadlock and never starts more threads than were set.
type pool struct {
	running sync.Mutex // held while a job runs
	threads atomic.Int32
	wake    chan bool // one message starts a worker on the job; false ends the worker

	// The job. Written by the holder of running before it wakes anyone.
	n    int
	f    func(i int)
	next atomic.Int64
	done sync.WaitGroup

	// Operands of the job where f is productPart or groupPart; kept here so that a warm call allocates nothing.
	product                product
	rowParts, columnParts  int
	groups                 groups
	productPart, groupPart func(i int)
}

var workers = newPool()

func newPool() *pool {
	p := &pool{wake: make(chan bool)}
	p.threads.Store(1)
	p.productPart, p.groupPart = p.runProductPart, p.runGroupPart
	return p
}

// SetThreads sets the number of threads, at least 1, that one kernel call or one Parallel may use. It is 1 at start.
// Workers live until the number is lowered. Not to be called from inside Parallel.
func SetThreads(n int) {
	p := workers
	p.running.Lock()
	defer p.running.Unlock()
	n = max(n, 1)
	for have := int(p.threads.Load()); have < n; have++ {
		go p.worker()
	}
	for have := int(p.threads.Load()); have > n; have-- {
		p.wake <- false
	}
	p.threads.Store(int32(n))
}

// Threads returns the number set by SetThreads.
func Threads() int { return int(workers.threads.Load()) }

// Parallel calls f(0) to f(n-1), spread over the threads of SetThreads in any order, and returns when all have
// returned. Kernel calls and Parallel inside f run on f's own thread.
func Parallel(n int, f func(i int)) {
	if n > 1 && Threads() > 1 && workers.try() {
		workers.run(n, f)
		workers.release()
		return
	}
	for i := range n {
		f(i)
	}
}

func (p *pool) worker() {
	for <-p.wake {
		p.work()
		p.done.Done()
	}
}

func (p *pool) try() bool { return p.running.TryLock() }

func (p *pool) release() {
	p.f, p.product, p.groups = nil, product{}, groups{} // hold on to nobody's matrices
	p.running.Unlock()
}

// run does a job with the caller as one of the workers.
func (p *pool) run(n int, f func(i int)) {
	p.n, p.f = n, f
	p.next.Store(0)
	helpers := min(Threads(), n) - 1
	p.done.Add(helpers)
	for range helpers {
		p.wake <- true
	}
	p.work()
	p.done.Wait()
}

func (p *pool) work() {
	for {
		i := int(p.next.Add(1)) - 1
		if i >= p.n {
			return
		}
		p.f(i)
	}
}

// splitWays returns the number of threads for a product.
func splitWays(m, n, k int) int {
	t := Threads()
	if t > 1 && 2*int64(m)*int64(n)*int64(k) >= splitFlops {
		return t
	}
	return 1
}

// runProduct cuts C into rectangles of whole tiles, one per thread. k is never cut.
func (p *pool) runProduct(q *product, threads int) {
	p.product = *q
	p.rowParts, p.columnParts = grid(active.Load().micro, q.m, q.n, threads)
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

// runGroups makes every group an item, cut along its columns when there are too few groups to keep threads busy.
func (p *pool) runGroups(g *groups, threads int) {
	p.groups = *g
	busy := 0
	for _, r := range g.rows {
		if r > 0 {
			busy++
		}
	}
	tile := active.Load().micro.cols
	p.groups.cuts = max(1, min((2*threads+busy-1)/max(busy, 1), (g.n+tile-1)/tile))
	p.run(len(g.rows)*p.groups.cuts, p.groupPart)
}

func (p *pool) runGroupPart(i int) {
	g := &p.groups
	e := i / g.cuts
	if g.rows[e] == 0 {
		return
	}
	t, at := active.Load().micro, 0
	for _, r := range g.rows[:e] {
		at += r
	}
	whole := g.product(e, at)
	j0, j1 := share(i%g.cuts, g.cuts, whole.n, t.cols)
	if whole.m == 0 || j0 == j1 {
		return
	}
	part := whole.part(0, whole.m, j0, j1)
	w := borrowWorkspace()
	w.multiply(t, &part)
	w.giveBack()
}
