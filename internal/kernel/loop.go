package kernel

// Loops over vectors run in chunks of loopChunk values, some microseconds of work each, and on more than one thread from
// loopValues values on, where waking a worker pays.
const (
	loopChunk  = 1 << 14
	loopValues = 1 << 16
)

// loop is a job over n items (values or rows) in chunks. The names of its operands say nothing: each part has a use of
// its own for them.
type loop struct {
	part     func(q *loop, from, to int) // a function, not a closure: a warm call allocates nothing
	n, chunk int

	a, b, c, d, e, f []float32
	rstd             []float32
	x, y             float32
	cols             int
	sums             []float64
	slots            Slots
	ld               int
	targets          []int32
	scale            float64
}

// loopJob is the loop that the workers are at.
var loopJob loop

// runLoop does a loop on all threads.
func (p *pool) runLoop(q *loop) {
	loopJob = *q
	p.run((q.n+q.chunk-1)/q.chunk, runLoopPart)
	loopJob = loop{} // hold on to nobody's vectors
}

func runLoopPart(i int) {
	q := &loopJob
	from := i * q.chunk
	q.part(q, from, min(from+q.chunk, q.n))
}

// shareLoop reports whether a loop over so many values is to run on all threads, and takes the pool for it.
func shareLoop(values int) bool {
	return values >= loopValues && Threads() > 1 && workers.try()
}

// finishLoop runs a loop on the pool that shareLoop took, and gives it back.
func finishLoop(q *loop) {
	workers.runLoop(q)
	workers.release()
}

// rowChunk is the number of rows of a chunk.
func rowChunk(cols int) int { return max(1, loopChunk/max(cols, 1)) }
