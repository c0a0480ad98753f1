package tensor

import "unsafe"

// An Arena hands out the memory of one micro-batch and takes it back at once. It grows by whole blocks when a
// micro-batch needs more than any before it (routing decides how many rows an expert rank receives) and keeps
// the blocks, so a warm step allocates nothing. An Arena is not safe for concurrent use.
type Arena struct {
	blocks []block
	at     int // block being filled
	peak   int // most floats ever in use
}

type block struct {
	buf  []float32
	used int
}

const minBlock = 1 << 16

// NewArena returns an arena whose first block holds the given number of floats.
func NewArena(floats int) *Arena {
	a := &Arena{}
	if floats > 0 {
		a.blocks = append(a.blocks, block{buf: make([]float32, floats)})
	}
	return a
}

// Floats returns n floats with undefined content, aligned to 16 floats relative to the block.
func (a *Arena) Floats(n int) []float32 {
	need := (n + 15) &^ 15
	for a.at < len(a.blocks) {
		b := &a.blocks[a.at]
		if b.used+need <= len(b.buf) {
			s := b.buf[b.used : b.used+n : b.used+n]
			b.used += need
			return s
		}
		if a.at+1 == len(a.blocks) {
			break
		}
		a.at++
	}
	size := max(need, minBlock, a.Cap()/2)
	a.blocks = append(a.blocks, block{buf: make([]float32, size), used: need})
	a.at = len(a.blocks) - 1
	return a.blocks[a.at].buf[:n:n]
}

// Mat returns a contiguous matrix with undefined content.
func (a *Arena) Mat(rows, cols int) Mat {
	return Mat{Rows: rows, Cols: cols, Stride: cols, Data: a.Floats(rows * cols)}
}

// Bytes returns n bytes with undefined content, aligned as Floats are.
func (a *Arena) Bytes(n int) []byte {
	if n == 0 {
		return nil
	}
	f := a.Floats((n + 3) / 4)
	return unsafe.Slice((*byte)(unsafe.Pointer(&f[0])), n)
}

// A Mark is a position to release to.
type Mark struct{ block, used int }

// Mark returns the present position.
func (a *Arena) Mark() Mark {
	if len(a.blocks) == 0 {
		return Mark{}
	}
	return Mark{a.at, a.blocks[a.at].used}
}

// Release takes back everything handed out since m.
func (a *Arena) Release(m Mark) {
	a.peak = max(a.peak, a.InUse())
	for i := m.block + 1; i < len(a.blocks); i++ {
		a.blocks[i].used = 0
	}
	if m.block < len(a.blocks) {
		a.blocks[m.block].used = m.used
	}
	a.at = m.block
}

// Reset takes everything back.
func (a *Arena) Reset() { a.Release(Mark{}) }

// InUse is the number of floats handed out now, padding included.
func (a *Arena) InUse() int {
	n := 0
	for _, b := range a.blocks {
		n += b.used
	}
	return n
}

// Cap is the number of floats held.
func (a *Arena) Cap() int {
	n := 0
	for _, b := range a.blocks {
		n += len(b.buf)
	}
	return n
}

// Peak is the most floats that were in use at any Release or Reset.
func (a *Arena) Peak() int { return max(a.peak, a.InUse()) }
