package kernel

import (
	"runtime"
	"sync"
	"sync/atomic"
	"time"
)

// A step is a thousand small jobs with little between them, and waking a sleeping thread takes the system longer than
// many of them last (50 µs on a virtual machine, against 1 µs for a thread that looks). So a worker looks for its next
// job for spinTime before it sleeps; between two looks at the clock it pauses spinPauses times and lets other goroutines
// run.
const (
	spinTime   = 200 * time.Microsecond
	spinPauses = 32
)

// pool is the set of workers. One job runs at a time; who finds the pool taken (a nested call, or another goroutine)
// does its work itself, so nesting cannot deadlock and never starts more threads than were set.
type pool struct {
	running sync.Mutex // held while a job runs
	workers []*worker  // all but the caller, who works too
	threads atomic.Int32

	// The job. Written by the holder of running while open is false and inside is 0.
	n    int
	f    func(i int)
	next atomic.Int64

	serial atomic.Uint64 // number of the last job; a change tells workers to look
	open   atomic.Bool   // the job has parts that nobody has begun
	inside atomic.Int32  // workers that may be reading the job

	// Operands of the job where f is productPart, runGroup or loopPart; kept here so that a warm call allocates nothing.
	product               product
	rowParts, columnParts int
	groups                groups
	loop                  loop
	sums                  []float64 // partial sums of the job
	groupParts            []groupPart
	productPart, runGroup func(i int)
	loopPart              func(i int)
}

type worker struct {
	asleep atomic.Bool
	wake   chan struct{} // one message for each time that asleep was taken back by another
	leave  atomic.Bool
}

var workers = newPool()

func newPool() *pool {
	p := &pool{}
	p.threads.Store(1)
	p.productPart, p.runGroup, p.loopPart = p.runProductPart, p.runGroupPart, p.runLoopPart
	return p
}

// SetThreads sets the number of threads, at least 1, that one kernel call or one Parallel may use. It is 1 at start.
// Workers live until the number is lowered. Not to be called from inside Parallel.
func SetThreads(n int) {
	p := workers
	p.running.Lock()
	defer p.running.Unlock()
	n = max(n, 1)
	for len(p.workers) < n-1 {
		w := &worker{wake: make(chan struct{}, 1)}
		p.workers = append(p.workers, w)
		go p.serve(w, p.serial.Load())
	}
	for len(p.workers) > n-1 {
		last := len(p.workers) - 1
		w := p.workers[last]
		p.workers = p.workers[:last]
		w.leave.Store(true)
		w.rouse()
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

// serve is the life of a worker; seen is the last job it has nothing to do with.
func (p *pool) serve(w *worker, seen uint64) {
	for {
		if !p.look(w, seen) {
			w.asleep.Store(true)
			// Whoever makes a job or says leave does so before looking at asleep: one of the two sees the other.
			if p.serial.Load() == seen && !w.leave.Load() || !w.asleep.CompareAndSwap(true, false) {
				<-w.wake
			}
		}
		if w.leave.Load() {
			return
		}
		seen = p.serial.Load()
		// The caller closes the job and then waits for inside to be 0; open is asked after inside was raised, so a job
		// that is found open stays until this worker has left it.
		p.inside.Add(1)
		if p.open.Load() {
			p.work()
		}
		p.inside.Add(-1)
	}
}

// look waits for a job after seen, for spinTime at most.
func (p *pool) look(w *worker, seen uint64) bool {
	for began := time.Now(); ; {
		for range spinPauses {
			if p.serial.Load() != seen || w.leave.Load() {
				return true
			}
			pause()
		}
		if time.Since(began) > spinTime {
			return false
		}
		runtime.Gosched()
	}
}

// rouse wakes a worker that sleeps.
func (w *worker) rouse() {
	if w.asleep.CompareAndSwap(true, false) {
		w.wake <- struct{}{}
	}
}

func (p *pool) try() bool { return p.running.TryLock() }

func (p *pool) release() {
	p.f, p.product, p.groups, p.loop = nil, product{}, groups{}, loop{} // hold on to nobody's matrices
	p.running.Unlock()
}

// run does a job with the caller as one of the workers.
func (p *pool) run(n int, f func(i int)) {
	p.n, p.f = n, f
	p.next.Store(0)
	p.open.Store(true)
	p.serial.Add(1)
	for _, w := range p.workers[:min(len(p.workers), n-1)] {
		w.rouse()
	}
	p.work()
	p.open.Store(false)
	for began := time.Now(); p.inside.Load() != 0; {
		for range spinPauses {
			if p.inside.Load() == 0 {
				return
			}
			pause()
		}
		if time.Since(began) > spinTime { // a worker has a long part, or its thread is not running
			time.Sleep(spinTime / 4)
		}
		runtime.Gosched()
	}
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
