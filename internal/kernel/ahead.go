package kernel

import "unsafe"

// ahead says which memory tiles ask for while they compute: what is needed next and is not in the cache. First that is the
// next panel of B, where it is still to be copied or to be read in place for the first time; and towards the end of a block of A, lest it be
// displaced again, the next block of A. A call of a tile asks for 128 bytes in each of its turns, a constant stride apart.
type ahead struct {
	idle  uintptr // what is in the cache anyway
	turns int     // of the main loop of a tile, in most calls
	calls int     // left in this block of A

	b       uintptr
	bLeft   int     // calls for the panel of B
	bStride int     // values between the turns
	bStep   uintptr // bytes between the calls

	a              uintptr
	aLeft          int // calls for the block of A
	aStride        int
	aStep          uintptr // bytes between groups of calls
	aPieces, piece int     // calls of a group, each for 128 bytes beside the last
}

// address is where values begin. It is a number and not a pointer: asking for memory reads nothing, and may go past the end.
func address(v []float32) uintptr { return uintptr(unsafe.Pointer(&v[0])) }

// next is what one call of a tile asks for, and the stride.
func (h *ahead) next() (at uintptr, stride int) {
	h.calls--
	switch {
	case h.bLeft > 0:
		at, stride = h.b, h.bStride
		h.bLeft--
		h.b += h.bStep
	case h.calls < h.aLeft:
		at, stride = h.a+uintptr(h.piece)*128, h.aStride
		h.aLeft--
		if h.piece++; h.piece == h.aPieces {
			h.piece = 0
			h.a += h.aStep
		}
	default:
		return h.idle, 0
	}
	return at, stride
}

// block begins rows i0..i1 of A, so many tiles high, with a block of B.
func (h *ahead) block(p *product, b *panels, i0, i1, tiles int) *ahead {
	depth := b.depth()
	cuts := (depth + blockK - 1) / blockK
	*h = ahead{idle: address(p.a), turns: max(1, min(blockK, depth)/4), calls: b.count * tiles * cuts, aPieces: 1}
	i, k := i1, b.k0
	if i1 == p.m {
		i, k = 0, b.k1
	}
	if k == p.k {
		return h
	}
	rows := min(i1-i0, p.m-i)
	if p.layout == TN {
		h.a = address(p.a) + 4*uintptr(k*p.lda+i)
		h.aPieces = (4*rows + 127) / 128
		h.aLeft = h.aPieces * ((min(depth, p.k-k) + h.turns - 1) / h.turns)
		h.aStride, h.aStep = p.lda, 4*uintptr(h.turns*p.lda)
		return h
	}
	h.a, h.aStride = address(p.a)+4*uintptr(i*p.lda+k), 32
	if p.lda < 2*depth { // rows as one piece of memory
		h.aLeft = (rows*p.lda + 32*h.turns - 1) / (32 * h.turns)
		h.aStep = uintptr(128 * h.turns)
	} else {
		h.aStride = (depth + h.turns - 1) / h.turns
		h.aLeft, h.aStep = rows, 4*uintptr(p.lda)
	}
	return h
}

// panel begins a panel of B, after which panel next comes.
func (h *ahead) panel(t *micro, p *product, b *panels, next int) {
	h.bLeft = 0
	if b.state[next].Load() != panelEmpty {
		return
	}
	depth, j := b.depth(), b.j0+next*t.cols
	switch {
	case p.layout != NT:
		h.b, h.bStride = address(p.b)+4*uintptr(b.k0*p.ldb+j), p.ldb
		h.bLeft, h.bStep = (depth+h.turns-1)/h.turns, 4*uintptr(h.turns*p.ldb)
	case p.ldb < 2*depth: // rows as one piece of memory
		h.b, h.bStride = address(p.b)+4*uintptr(j*p.ldb+b.k0), 32
		h.bLeft, h.bStep = (min(t.cols, b.j1-j)*p.ldb+32*h.turns-1)/(32*h.turns), uintptr(128*h.turns)
	}
}
