package model

import "moetor/internal/kernel"

// loopRows is how many rows of a loop a thread takes at a time.
const loopRows = 64

// A rowLoop is a loop over rows that runs on all threads: f gets ranges of rows, cut at multiples of loopRows. It is made
// once, and f, a method, finds its operands in its struct, so that a run allocates nothing.
type rowLoop struct {
	rows int
	part func(i int)
}

func loopOf(f func(from, to int)) *rowLoop {
	l := &rowLoop{}
	l.part = func(i int) { f(i*loopRows, min((i+1)*loopRows, l.rows)) }
	return l
}

func (l *rowLoop) run(rows int) {
	l.rows = rows
	kernel.Parallel(ranges(rows), l.part)
}

// ranges is how many ranges a loop has.
func ranges(rows int) int { return (rows + loopRows - 1) / loopRows }
