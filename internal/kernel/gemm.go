package kernel

import "fmt"

// A Layout says which operands of a product are stored transposed.
type Layout uint8

const (
	NN Layout = iota // C[m,n] = A[m,k]   * B[k,n]
	NT               // C[m,n] = A[m,k]   * B[n,k]^T
	TN               // C[m,n] = A[k,m]^T * B[k,n]
)

// Block sizes, after Goto and van de Geijn, Anatomy of High-Performance Matrix Multiplication, 2008. A panel of B
// (blockK x tile width) is to stay in the first cache level while the panels of a block of A (blockM x blockK) pass it
// from the second; a block of B (blockK x blockN) stands beside it or in the third. blockK is also part of the numeric
// contract: it is where the sum over k is cut, so it is one constant for all implementations and shapes.
const (
	blockK = 256
	blockM = 14 * 6 * 3 // a multiple of every tile height
	blockN = 512        // a multiple of every tile width
)

// Operands whose rows are as the tile routine reads them need no copy: B of NN and TN, A of NN and NT. Rows of A are
// always read in place, rows of B up to directRows rows of C: beyond, a copy that fits the first cache level pays. Not
// so where the rows lie a multiple of aliasing values (a memory page) apart, in the same sets of the first cache level.
const (
	directRows = 640
	aliasing   = 1024
)

// readsB reports whether rows of B are read in place, readsA whether those of A.
func (p *product) readsB() bool {
	return p.layout != NT && (p.m <= 2*maxTileRows || p.m <= directRows && p.ldb%aliasing != 0)
}

func (p *product) readsA(t *micro) bool {
	return p.layout != TN && t.runRows != nil && p.lda%aliasing != 0
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
	directA, directB := p.readsA(t), p.readsB()
	for j0 := 0; j0 < p.n; j0 += blockN {
		j1 := min(j0+blockN, p.n)
		for k0 := 0; k0 < p.k; k0 += blockK {
			k1 := min(k0+blockK, p.k)
			beta := p.beta
			if k0 > 0 {
				beta = 1 // the cuts of k add up in C, in order
			}
			if !directB {
				w.packB(t, p, k0, k1, j0, j1)
			} else if whole := j1 - (j1-j0)%t.cols; whole < j1 {
				w.packB(t, p, k0, k1, whole, j1) // the last columns do not fill a tile
			}
			for i0 := 0; i0 < p.m; i0 += blockM {
				i1 := min(i0+blockM, p.m)
				if !directA {
					w.packA(t, p, k0, k1, i0, i1)
				}
				w.block(t, p, beta, directA, directB, i0, i1, j0, j1, k0, k1)
			}
		}
	}
}

// block multiplies a block of A with a block of B, each packed, or its rows in place when direct.
func (w *workspace) block(t *micro, p *product, beta float32, directA, directB bool, i0, i1, j0, j1, k0, k1 int) {
	depth := k1 - k0
	for j := j0; j < j1; j += t.cols {
		cols := min(t.cols, j1-j)
		b, ldb := w.b[(j-j0)*depth:], t.cols
		if directB {
			b = w.b
			if cols == t.cols {
				b, ldb = p.b[k0*p.ldb+j:], p.ldb
			}
		}
		for i := i0; i < i1; i += t.rows {
			rows := min(t.rows, i1-i)
			c, ldc, width, edge := p.c[i*p.ldc+j:], p.ldc, cols, !t.fits(cols)
			if edge { // a tile at the right edge is computed whole, by the same routine, on a copy
				if beta != 0 {
					for r := range rows {
						copy(w.tile[r*t.cols:], c[r*p.ldc:r*p.ldc+cols])
					}
				}
				c, ldc, width = w.tile, t.cols, t.cols
			}
			if directA {
				t.runRows(rows, width, depth, &p.a[i*p.lda+k0], p.lda, &b[0], ldb, &c[0], ldc, p.alpha, beta)
			} else {
				t.run(rows, width, depth, &w.a[(i-i0)*depth], &b[0], ldb, &c[0], ldc, p.alpha, beta)
			}
			if edge {
				for r := range rows {
					at := (i+r)*p.ldc + j
					copy(p.c[at:at+cols], w.tile[r*t.cols:])
				}
			}
		}
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
