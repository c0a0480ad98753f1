package kernel

import (
	"math/bits"
	"sync"
)

// scratch is a buffer from the free list of its size class. A sync.Pool would not do: the collector empties it, and a
// warm step must allocate nothing.
type scratch struct {
	f     []float32
	class int
}

var scratches struct {
	sync.Mutex
	free [64][]*scratch // by class: buffers of 2^class values
}

// scratchClass returns the smallest class whose buffers have n values.
func scratchClass(n int) int { return bits.Len(uint(max(n, 1) - 1)) }

// borrowScratch returns a buffer of at least n values of any content.
func borrowScratch(n int) *scratch {
	class := scratchClass(n)
	scratches.Lock()
	list := scratches.free[class]
	if last := len(list) - 1; last >= 0 {
		s := list[last]
		scratches.free[class] = list[:last]
		scratches.Unlock()
		return s
	}
	scratches.Unlock()
	return &scratch{f: make([]float32, 1<<class), class: class}
}

func (s *scratch) giveBack() {
	scratches.Lock()
	scratches.free[s.class] = append(scratches.free[s.class], s)
	scratches.Unlock()
}
