package kernel

import (
	"fmt"
	"math"
	"math/rand/v2"
	"slices"
	"testing"
)

// gemmCase is a product with operands in guarded buffers.
type gemmCase struct {
	layout      Layout
	m, n, k     int
	alpha, beta float32
	a, b, c     guarded
}

func newGemmCase(r *rand.Rand, l Layout, m, n, k int, alpha, beta float32, padA, padB, padC int) gemmCase {
	normal := func() float32 { return float32(r.NormFloat64()) }
	g := gemmCase{layout: l, m: m, n: n, k: k, alpha: alpha, beta: beta}
	ra, ca, rb, cb := m, k, k, n
	if l == TN {
		ra, ca = k, m
	}
	if l == NT {
		rb, cb = n, k
	}
	g.a = newGuarded(ra, ca, ca+padA, normal)
	g.b = newGuarded(rb, cb, cb+padB, normal)
	old := normal
	if beta == 0 {
		old = func() float32 { return float32(math.NaN()) } // must not be read
	}
	g.c = newGuarded(m, n, n+padC, old)
	return g
}

func (g gemmCase) String() string {
	return fmt.Sprintf("%s %dx%dx%d alpha %v beta %v ld %d %d %d",
		[]string{"NN", "NT", "TN"}[g.layout], g.m, g.n, g.k, g.alpha, g.beta, g.a.ld, g.b.ld, g.c.ld)
}

func (g gemmCase) run(f func(Layout, int, int, int, float32, []float32, int, []float32, int, float32, []float32, int), c guarded) {
	f(g.layout, g.m, g.n, g.k, g.alpha, g.a.data(), g.a.ld, g.b.data(), g.b.ld, g.beta, c.data(), c.ld)
}

// verify runs the case and compares with the specification, within the error bound of a sum of k products in any order:
// k+3 roundings of the sum of absolute products.
func (g gemmCase) verify(t *testing.T) {
	t.Helper()
	want, bound, got := g.c.clone(), g.c.clone(), g.c.clone()
	g.run(gemmRef, want)
	absolute := g
	absolute.a, absolute.b = g.a.clone(), g.b.clone()
	for _, x := range [][]float32{absolute.a.data(), absolute.b.data(), bound.data()} {
		for i, v := range x {
			x[i] = float32(math.Abs(float64(v)))
		}
	}
	absolute.alpha, absolute.beta = float32(math.Abs(float64(g.alpha))), float32(math.Abs(float64(g.beta)))
	absolute.run(gemmRef, bound)
	a, b := g.a.clone(), g.b.clone()
	g.run(Gemm, got)
	sameBits(t, g.String()+": A", g.a.buf, a.buf)
	sameBits(t, g.String()+": B", g.b.buf, b.buf)
	got.check(t, g.String())
	for i := range g.m {
		for j := range g.n {
			at := i*got.ld + j
			diff := math.Abs(float64(got.data()[at]) - float64(want.data()[at]))
			if limit := float64(g.k+3) * 0x1p-24 * float64(bound.data()[at]); !(diff <= limit) {
				t.Fatalf("%v: C[%d,%d] = %v, want %v within %v", g, i, j, got.data()[at], want.data()[at], limit)
			}
		}
	}
}

// scalars are pairs of alpha and beta; the first has the plain product.
var scalars = [][2]float32{{1, 0}, {1, 1}, {-0.5, 0}, {2, 0.75}, {0, 1}, {1, float32(math.Copysign(0, -1))}}

func TestGemmReference(t *testing.T) {
	eachImpl(t, func(t *testing.T) {
		mk := active.Load().micro
		var ms, ns []int
		for m := 1; m <= mk.rows+2; m++ {
			ms = append(ms, m)
		}
		ms = append(ms, 2*mk.rows-1, 2*mk.rows, 2*mk.rows+1, 43)
		for _, w := range []int{0, mk.cols / 2, mk.cols, mk.cols + mk.cols/2, 2 * mk.cols} {
			ns = append(ns, max(w-1, 1), max(w, 2), w+1)
		}
		ks := []int{0, 1, 2, 3, 4, 5, 8, 31, blockK - 1, blockK, blockK + 1}
		r := rand.New(rand.NewPCG(1, 1))
		count := 0
		for _, m := range ms {
			for _, n := range ns {
				for _, k := range ks {
					if k > 100 && count%3 != 0 {
						k = 7 + count%50
					}
					for _, l := range []Layout{NN, NT, TN} {
						s := scalars[count%len(scalars)]
						newGemmCase(r, l, m, n, k, s[0], s[1], count%5, count%3, count%4).verify(t)
						count++
					}
				}
			}
		}
	})
}

// Shapes beyond one block in each direction.
func TestGemmBlocks(t *testing.T) {
	eachImpl(t, func(t *testing.T) {
		r := rand.New(rand.NewPCG(2, 1))
		for _, s := range [][3]int{{fewRows + 31, 33, 9}, {31, maxTileCols*16 + 47, 6}, {30, 35, 2*blockK + 5}, {3, 32*maxTileCols + 1, 4},
			{2*fewRows + 1, 5, blockK + 3}, {64, 48, 64}, {fewRows + 9, 3, blockDepth + blockK + 5},
			{fewRows + 1, blockB/blockDepth + 3, blockDepth + 2}, {fewRows + 1, blockB/blockDepth + 6, blockK + 5}, {fewRows + 1, 70, 2*blockK + 5}} {
			for i, l := range []Layout{NN, NT, TN} {
				sc := scalars[(i+s[0])%len(scalars)]
				newGemmCase(r, l, s[0], s[1], s[2], sc[0], sc[1], 1, 2, 3).verify(t)
			}
		}
		// Operands that are copied though they might be read in place: many rows, leading dimensions of a page.
		for i, l := range []Layout{NN, NT, TN} {
			sc := scalars[i]
			newGemmCase(r, l, directRows+1, 35, 21, sc[0], sc[1], 1, 2, 3).verify(t)
			page := func(cols int) int { return aliasing - cols }
			for _, s := range [][3]int{{45, 35, 21}, {15, 64, 40}, {1, 33, 18}} {
				ca, cb := s[2], s[1]
				if l == TN {
					ca = s[0]
				}
				if l == NT {
					cb = s[2]
				}
				newGemmCase(r, l, s[0], s[1], s[2], sc[0], sc[1], page(ca), page(cb), 0).verify(t)
			}
		}
	})
}

func TestGemmEmpty(t *testing.T) {
	eachImpl(t, func(t *testing.T) {
		c := []float32{1, 2, 3, 4}
		Gemm(NN, 0, 2, 3, 1, nil, 3, make([]float32, 6), 2, 0, c, 2)
		Gemm(NT, 2, 0, 3, 1, make([]float32, 6), 3, nil, 3, 0, c, 2)
		sameBits(t, "empty result", c, []float32{1, 2, 3, 4})
		Gemm(TN, 2, 2, 0, 1, nil, 2, nil, 2, 0.5, c, 2)
		sameBits(t, "k=0, beta=0.5", c, []float32{0.5, 1, 1.5, 2})
		Gemm(NN, 2, 2, 0, 1, nil, 0, nil, 2, 0, c, 2)
		sameBits(t, "k=0, beta=0", c, []float32{0, 0, 0, 0})
	})
}

func TestGemmRefusesShortSlices(t *testing.T) {
	x := make([]float32, 100)
	mustPanic(t, "A", func() { Gemm(NN, 3, 4, 5, 1, x[:14], 5, x, 4, 0, x, 4) })
	mustPanic(t, "B", func() { Gemm(NT, 3, 4, 5, 1, x, 5, x[:19], 5, 0, x, 4) })
	mustPanic(t, "C", func() { Gemm(TN, 3, 4, 5, 1, x, 3, x, 4, 0, x[:11], 4) })
	mustPanic(t, "ld", func() { Gemm(NN, 3, 4, 5, 1, x, 4, x, 4, 0, x, 4) })
	mustPanic(t, "negative", func() { Gemm(NN, -1, 4, 5, 1, x, 5, x, 4, 0, x, 4) })
	mustPanic(t, "layout", func() { Gemm(3, 3, 4, 5, 1, x, 5, x, 4, 0, x, 4) })
	mustPanic(t, "groups", func() { GroupedGemm(NN, []int{1, 2}, 2, 2, x, [][]float32{x}, 0, x) })
	mustPanic(t, "grouped layout", func() { GroupedGemm(TN, []int{1}, 2, 2, x, [][]float32{x}, 0, x) })
	mustPanic(t, "grouped weight", func() { GroupedGemm(NN, []int{1}, 2, 2, x, [][]float32{x[:3]}, 0, x) })
	mustPanic(t, "grouped gradient", func() { GroupedGemmTN([]int{1}, 2, 2, x, x, [][]float32{x[:3]}) })
	mustPanic(t, "group rows", func() { GroupedGemmTN([]int{-1}, 2, 2, x, x, [][]float32{x}) })
}

// One element of a product depends on its row, its column and k. Every element of one large product must come out with
// the same bits from products of any part of the rows and columns, at any place, with any neighbours, on any threads.
func TestGemmElementsIndependent(t *testing.T) {
	const m, n, k = 67, 75, 2*blockK + 37
	eachImpl(t, func(t *testing.T) {
		for _, l := range []Layout{NN, NT, TN} {
			r := rand.New(rand.NewPCG(3, uint64(l)))
			g := newGemmCase(r, l, m, n, k, 0.7, 1.3, 0, 0, 0)
			old := g.c.clone()
			g.run(Gemm, g.c)
			want := g.c.data()

			part := func(name string, a guarded, i0, i1, j0, j1 int) {
				t.Helper()
				p := product{layout: l, m: m, n: n, k: k, a: a.data(), lda: a.ld, b: g.b.data(), ldb: g.b.ld,
					c: old.clone().data(), ldc: n}
				q := p.part(i0, i1, j0, j1)
				Gemm(l, q.m, q.n, k, g.alpha, q.a, q.lda, q.b, q.ldb, g.beta, q.c, q.ldc)
				for i := range q.m {
					sameBits(t, fmt.Sprintf("layout %d, %s, rows %d:%d, columns %d:%d, row %d", l, name, i0, i1, j0, j1, i0+i),
						q.c[i*n:i*n+q.n], want[(i0+i)*n+j0:(i0+i)*n+j1])
				}
			}
			for i := range m {
				part("one row", g.a, i, i+1, 0, n)
			}
			for _, i1 := range []int{2, 3, 5, 13, 14, 15, 28, 29, 41, m} {
				part("first rows", g.a, 0, i1, 0, n)
				part("last rows", g.a, m-i1, m, 1, n-1)
			}
			for _, j1 := range []int{1, 8, 15, 16, 17, 32, 33, 48} {
				part("columns", g.a, 0, m, 0, j1)
				part("columns", g.a, 10, 20, n-j1, n)
			}
			// Operands that are copied instead of read in place: the same values a page apart.
			paged := func(x guarded) guarded {
				i := -1
				return newGuarded(x.rows, x.cols, 2*aliasing, func() float32 { i++; return x.data()[i/x.cols*x.ld+i%x.cols] })
			}
			a, b, c := paged(g.a), paged(g.b), old.clone()
			Gemm(l, m, n, k, g.alpha, a.data(), a.ld, b.data(), b.ld, g.beta, c.data(), n)
			sameBits(t, fmt.Sprintf("layout %d, copied operands", l), c.data(), want)
			// Other rows hold something else, NaN included.
			other := g.a.clone()
			for i := range m {
				for p := range k {
					at := i*other.ld + p
					if l == TN {
						at = p*other.ld + i
					}
					if i < 20 || i >= 33 {
						other.data()[at] = float32(math.NaN())
					}
				}
			}
			part("rows among NaN", other, 20, 33, 0, n)
			poisoned := old.clone()
			Gemm(l, m, n, k, g.alpha, other.data(), other.ld, g.b.data(), g.b.ld, g.beta, poisoned.data(), n)
			sameBits(t, "rows among NaN rows", poisoned.data()[20*n:33*n], want[20*n:33*n])

			for _, threads := range []int{2, 3, 5} {
				withThreads(t, threads)
				if splitWays(m, n, k) != threads {
					t.Fatalf("product too small to be split")
				}
				got := old.clone()
				Gemm(l, m, n, k, g.alpha, g.a.data(), g.a.ld, g.b.data(), g.b.ld, g.beta, got.data(), n)
				sameBits(t, fmt.Sprintf("%d threads", threads), got.data(), want)
				SetThreads(1)
			}
		}
	})
}

// Threads that share a packed block of B: several blocks deep, columns that end within a panel, operands that are copied and
// such that are not; and more columns than a block has.
func TestGemmSharedBlock(t *testing.T) {
	eachImpl(t, func(t *testing.T) {
		testSharedBlock(t, 330, 6*maxTileCols+37, blockDepth+blockK+7)
		if active.Load().vectors != scalar { // 2 GFLOP a product
			testSharedBlock(t, 900, blockB/blockDepth+37, blockDepth)
			testSharedBlock(t, 900, blockB/depthTN+37, depthTN)
		}
	})
}

func testSharedBlock(t *testing.T, m, n, k int) {
	for _, l := range []Layout{NN, NT, TN} {
		for _, pad := range []int{0, aliasing} { // rows a page apart
			ld := func(cols int) int {
				if pad == 0 {
					return cols
				}
				return (cols + pad - 1) / pad * pad
			}
			rows, aCols, bRows, bCols := m, k, k, n
			if l == TN {
				rows, aCols = k, m
			}
			if l == NT {
				bRows, bCols = n, k
			}
			a, b, c := randomMat(1, rows*ld(aCols)), randomMat(2, bRows*ld(bCols)), randomMat(3, m*n)
			run := func(threads int) []float32 {
				withThreads(t, threads)
				got := slices.Clone(c)
				Gemm(l, m, n, k, 1, a, ld(aCols), b, ld(bCols), 0.5, got, n)
				SetThreads(1)
				return got
			}
			want := run(1)
			for _, threads := range []int{2, 3} {
				sameBits(t, fmt.Sprintf("layout %d, %d threads", l, threads), run(threads), want)
			}
		}
	}
}

// The vector implementations fuse every multiply-add and cut k at the same places, so they agree to the bit.
func TestVectorImplsAgree(t *testing.T) {
	const m, n, k = 45, 70, 300
	var want []float32
	for _, name := range Impls() {
		if name == "portable" {
			continue
		}
		restore, _ := Use(name)
		c := make([]float32, m*n)
		Gemm(NT, m, n, k, 1, randomMat(1, m*k), k, randomMat(2, n*k), k, 0, c, n)
		restore()
		if want == nil {
			want = c
		}
		sameBits(t, name, c, want)
	}
}

func TestGemmNaNAndInfFlow(t *testing.T) {
	eachImpl(t, func(t *testing.T) {
		a, b, c := randomMat(1, 20*6), randomMat(2, 6*20), make([]float32, 20*20)
		a[3*6+2] = float32(math.Inf(1))
		b[2*20+7] = 0
		Gemm(NN, 20, 20, 6, 1, a, 6, b, 20, 0, c, 20)
		for i := range 20 {
			for j := range 20 {
				v := float64(c[i*20+j])
				if isNaN, isInf := math.IsNaN(v), math.IsInf(v, 0); isNaN != (i == 3 && j == 7) || isInf != (i == 3 && j != 7) {
					t.Fatalf("C[%d,%d] = %v", i, j, v)
				}
			}
		}
	})
}

func TestGemmAllocatesNothing(t *testing.T) {
	const m, n, k = 50, 70, 300
	a, b, c := randomMat(1, m*k), randomMat(2, k*n), make([]float32, m*n)
	for _, threads := range []int{1, 2} {
		withThreads(t, threads)
		eachImpl(t, func(t *testing.T) {
			for l, ld := range [][2]int{{k, n}, {k, k}, {m, n}} {
				if got := testing.AllocsPerRun(30, func() { Gemm(Layout(l), m, n, k, 1, a, ld[0], b, ld[1], 0, c, n) }); got != 0 {
					t.Errorf("layout %d, %d threads: %v allocations", l, threads, got)
				}
			}
		})
	}
}
