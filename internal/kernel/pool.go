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
// does its work itself, so nesting cannot deadlock and never starts more threads than were set. The operands of a job are
// kept in a package variable beside its code, written by who holds the pool, so that a warm call allocates nothing.
type pool struct {
	running sync.Mutex // held while a job runs
	workers []*worker  // all but the caller, who works too
	threads atomic.Int32

	// The job. Written by the holder of running while open is false and inside is 0.
	f      func(i int)
	queues []queue // one for each thread

	serial atomic.Uint64 // number of the last job; a change tells workers to look
	open   atomic.Bool   // the job may have parts that nobody has begun
	inside atomic.Int32  // workers that may be reading the job
}

// A queue holds the parts of a job that a thread begins with. Neighbouring parts work on neighbouring rows, and a thread has
// the same queue in every job: what it wrote in one job is still in its own cache when it reads it in the next. Whoever is
// done with its own queue helps with those of others.
type queue struct {
	next atomic.Int64
	end  int64
	_    [cacheLine - 16]byte
}

const cacheLine = 64

type worker struct {
	asleep atomic.Bool
	wake   chan struct{} // one message for each time that asleep was taken back by another
	leave  atomic.Bool
}

var workers = newPool()

func newPool() *pool {
	p := &pool{queues: make([]queue, 1)}
	p.threads.Store(1)
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
		go p.serve(w, len(p.workers), p.serial.Load())
	}
	for len(p.workers) > n-1 {
		last := len(p.workers) - 1
		w := p.workers[last]
		p.workers = p.workers[:last]
		w.leave.Store(true)
		w.rouse()
	}
	p.queues = make([]queue, n)
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

// serve is the life of a worker, which is thread number id; seen is the last job it has nothing to do with.
func (p *pool) serve(w *worker, id int, seen uint64) {
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
			p.work(id)
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
	p.f = nil
	p.running.Unlock()
}

// run does a job of n parts with the caller as one of the workers. Queues get equal numbers of parts.
func (p *pool) run(n int, f func(i int)) { p.runQueues(n, f, nil) }

// runQueues is run with queue q ending at part ends[q], where the number of parts says nothing about their work.
func (p *pool) runQueues(n int, f func(i int), ends []int) {
	p.f = f
	from := 0
	for i := range p.queues {
		to := (i + 1) * n / len(p.queues)
		if ends != nil {
			to = ends[i]
		}
		p.queues[i].next.Store(int64(from))
		p.queues[i].end = int64(to)
		from = to
	}
	p.open.Store(true)
	p.serial.Add(1)
	for _, w := range p.workers[:min(len(p.workers), n-1)] {
		w.rouse()
	}
	p.work(0)
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

// work does parts of the job as thread number id: those of its own queue, then what is left in others.
func (p *pool) work(id int) {
	for k := range p.queues {
		q := &p.queues[(id+k)%len(p.queues)]
		for i := q.next.Add(1) - 1; i < q.end; i = q.next.Add(1) - 1 {
			p.f(int(i))
		}
	}
}
