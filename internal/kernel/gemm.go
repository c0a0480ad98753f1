package kernel

import (
	"fmt"
	"unsafe"
)

// A Layout says which operands of a product are stored transposed.
type Layout uint8

const (
	NN Layout = iota // C[m,n] = A[m,k]   * B[k,n]
	NT               // C[m,n] = A[m,k]   * B[n,k]^T
	TN               // C[m,n] = A[k,m]^T * B[k,n]
)

// Block sizes, after Goto and van de Geijn, Anatomy of High-Performance Matrix Multiplication, 2008. A block of A is to stay
// in the second cache level while the panels of a block of B, of the width of a tile, pass through the first; a block of B
// stands in the third. Blocks are blockDepth values of k deep: a tile of C goes through all of them while it is in the
// first level, so that C is read and written once for so many values and not for every cut.
//
// blockK is part of the numeric contract: it is where the sum over k is cut, so it is one constant for all implementations
// and shapes.
const (
	blockK     = 512
	blockDepth = 2 * blockK
	depthTN    = blockK            // of TN, where values of k lie in as many pages of A
	blockA     = 63 * blockDepth   // values of a block of A
	blockB     = 1024 * blockDepth // values of a block of B
	fewRows    = 252               // so many rows of A in place use a panel of B at once, so that only a panel of it is copied
	onceA      = 3 * blockA        // so many values of A in place, if they are all of A, pass a panel of a large B at once likewise
)

// Operands that lie as the tile routines read them need no copy: A in all layouts, B of NN and TN. A is always read in
// place, B up to directRows rows of C: beyond, a copy that fits the first cache level pays. Not so where the rows lie a
// multiple of aliasing values (a memory page) apart, in the same sets of the first cache level.
const (
	directRows = 640
	aliasing   = 1024
)

// readsB reports whether B is read in place, readsA whether A is.
func (p *product) readsB() bool {
	return p.layout != NT && (p.m <= 2*maxTileRows || p.m <= directRows && p.ldb%aliasing != 0)
}

func (p *product) readsA() bool {
	return p.lda%aliasing != 0
}

// deepest is the depth of the deepest block.
func (p *product) deepest() int {
	if p.layout == TN {
		return min(depthTN, p.k)
	}
	return min(blockDepth, p.k)
}

// product is one call of Gemm.
type product struct {
	layout      Layout
	m, n, k     int
	alpha, beta float32
	a, b, c     []float32
	lda, ldb    int
	ldc         int
}

// Gemm sets C = alpha*op(A)*op(B) + beta*C for row-major matrices with leading dimensions. beta 0 never reads C. C must
// not overlap A or B. With k = 0 the product is zero.
//
// The value of one element of C depends only on its row of op(A), its column of op(B), k, alpha, beta and its old
// value: not on m, n, the position in the matrix or the number of threads.
func Gemm(l Layout, m, n, k int, alpha float32, a []float32, lda int, b []float32, ldb int, beta float32, c []float32, ldc int) {
	p := product{layout: l, m: m, n: n, k: k, alpha: alpha, beta: beta, a: a, b: b, c: c, lda: lda, ldb: ldb, ldc: ldc}
	p.check("Gemm")
	if m == 0 || n == 0 {
		return
	}
	countFlops(m, n, k)
	if threads := splitWays(m, n, k); threads > 1 && workers.try() {
		workers.runProduct(&p, threads)
		workers.release()
		return
	}
	w := borrowWorkspace()
	w.multiply(active.Load().micro, &p)
	w.giveBack()
}

func (p *product) check(routine string) {
	if p.m < 0 || p.n < 0 || p.k < 0 {
		panic(fmt.Sprintf("kernel.%s: m=%d n=%d k=%d", routine, p.m, p.n, p.k))
	}
	switch p.layout {
	case NN:
		checkMat(routine, "A", len(p.a), p.m, p.k, p.lda)
		checkMat(routine, "B", len(p.b), p.k, p.n, p.ldb)
	case NT:
		checkMat(routine, "A", len(p.a), p.m, p.k, p.lda)
		checkMat(routine, "B", len(p.b), p.n, p.k, p.ldb)
	case TN:
		checkMat(routine, "A", len(p.a), p.k, p.m, p.lda)
		checkMat(routine, "B", len(p.b), p.k, p.n, p.ldb)
	default:
		panic(fmt.Sprintf("kernel.%s: layout %d", routine, p.layout))
	}
	checkMat(routine, "C", len(p.c), p.m, p.n, p.ldc)
}

// part returns the product that computes rows i0..i1 and columns j0..j1 of C.
func (p *product) part(i0, i1, j0, j1 int) product {
	q := *p
	q.m, q.n = i1-i0, j1-j0
	q.c = p.c[i0*p.ldc+j0:]
	if p.k == 0 {
		return q
	}
	if p.layout == TN {
		q.a = p.a[i0:]
	} else {
		q.a = p.a[i0*p.lda:]
	}
	if p.layout == NT {
		q.b = p.b[j0*p.ldb:]
	} else {
		q.b = p.b[j0:]
	}
	return q
}

// multiply runs a product on one thread.
func (w *workspace) multiply(t *micro, p *product) {
	if p.k == 0 {
		scaleRows(p)
		return
	}
	directA, directB := p.readsA(), p.readsB()
	deep, across, values := blockK, p.n, blockA
	switch {
	case directB:
	case directA && p.m <= fewRows:
		across = t.cols
	default:
		deep = p.deepest()
		across = blockB / deep / t.cols * t.cols
		if directA && p.m*p.k <= onceA && p.n*p.k > blockB/2 {
			values = onceA
		}
	}
	for j0 := 0; j0 < p.n; j0 += across {
		j1 := min(j0+across, p.n)
		for k0 := 0; k0 < p.k; k0 += deep {
			w.panels.begin(t, directB, j0, j1, k0, min(k0+deep, p.k))
			w.blocks(t, p, &w.panels, directA, values, 0)
		}
	}
}

// blocks multiplies all rows of A with a block of B, in which it begins with panel first. Blocks of A have about so many
// values, and equal numbers of rows.
func (w *workspace) blocks(t *micro, p *product, b *panels, directA bool, values, first int) {
	fit := max(1, values/(b.depth()+rowGap))
	count := max(1, (p.m+fit/2)/fit)
	for i := range count {
		w.block(t, p, b, directA, i*p.m/count, (i+1)*p.m/count, first)
	}
}

// tilesOf is the number of tiles for some rows. They get about equal heights: a tile of few rows waits for its own sums.
func (t *micro) tilesOf(rows int) int { return (rows + t.rows - 1) / t.rows }

// block multiplies a block of A, copied or, when direct, with its rows in place, with a block of B.
func (w *workspace) block(t *micro, p *product, b *panels, directA bool, i0, i1, first int) {
	depth, rows := b.depth(), i1-i0
	form, a, lda := t.byRows, p.a, p.lda
	if p.layout == TN {
		form = t.byCols
	}
	switch {
	case !directA:
		a, lda = w.packA(p, b.k0, b.k1, i0, i1)
	case p.layout == TN:
		a = a[b.k0*lda+i0:]
	default:
		a = a[i0*lda+b.k0:]
	}
	step, next := lda, 1 // how far rows of A lie apart in a, and values of a row
	if p.layout == TN {
		step, next = 1, lda
	}
	tiles := t.tilesOf(rows)
	low, higher := rows/tiles, rows%tiles // so many tiles are a row higher than low
	ahead := w.ahead.block(p, b, i0, i1, tiles)
	for x := range b.count {
		at := (first + x) % b.count
		j := b.j0 + at*t.cols
		cols := min(t.cols, b.j1-j)
		panel, ldb := b.panel(w, t, p, at)
		ahead.panel(t, p, b, (at+1)%b.count)
		for i, tile := 0, 0; tile < tiles; tile++ {
			height := low
			if tile < higher {
				height++
			}
			beta := p.beta
			if b.k0 > 0 {
				beta = 1 // the cuts of k add up in C, in order
			}
			for cut := 0; cut < depth; cut += blockK {
				w.tile(t, form, height, cols, min(blockK, depth-cut), &a[i*step+cut*next], lda, &panel[cut*ldb], ldb,
					p.c[(i0+i)*p.ldc+j:], p.ldc, p.alpha, beta, ahead)
				beta = 1
			}
			i += height
		}
	}
}

// tile computes one tile of any width. At the right edge of a matrix a tile is computed whole, by the same routine, on a
// copy; columns of B must be there for it.
func (w *workspace) tile(t *micro, form *tiles, rows, cols, depth int, a *float32, lda int, b *float32, ldb int, c []float32, ldc int, alpha, beta float32, h *ahead) {
	at, stride := uintptr(unsafe.Pointer(a)), 0
	if h != nil {
		at, stride = h.next()
	}
	if t.fits(cols) {
		t.tile(form, rows, cols)(depth, a, lda, b, ldb, &c[0], ldc, alpha, beta, at, stride)
		return
	}
	if beta != 0 {
		for r := range rows {
			copy(w.edgeTile[r*t.cols:], c[r*ldc:r*ldc+cols])
		}
	}
	form[rows][0](depth, a, lda, b, ldb, &w.edgeTile[0], t.cols, alpha, beta, at, stride)
	for r := range rows {
		copy(c[r*ldc:r*ldc+cols], w.edgeTile[r*t.cols:])
	}
}

// scaleRows is a product of depth 0: C = beta*C.
func scaleRows(p *product) {
	for i := range p.m {
		row := p.c[i*p.ldc : i*p.ldc+p.n]
		if p.beta == 0 {
			clear(row)
		} else {
			scaled(row, p.beta, row)
		}
	}
}
