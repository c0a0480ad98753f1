package kernel

import (
	"fmt"
	"testing"
)

// checkGrouped compares a grouped product with one Gemm per group: equal bits, for every implementation. The third
// size is k for NN and NT, m for TN.
func checkGrouped(t *testing.T, seed uint64, l Layout, rows []int, n, other int) {
	t.Helper()
	total := 0
	for _, r := range rows {
		total += r
	}
	one := func() float32 { return 1 }
	fill := func(s uint64, size int) guarded {
		g, values := newGuarded(1, size, size, one), randomMat(seed*10+s, size)
		copy(g.data(), values)
		return g
	}
	a, b := fill(1, total*other), fill(2, total*n)
	var mats []guarded
	for e := range rows {
		mats = append(mats, fill(uint64(3+e), n*other))
	}
	for _, name := range Impls() {
		restore, _ := Use(name)
		got, want := b.clone(), b.clone()
		var gotMats, wantMats [][]float32
		var gotGuards []guarded
		for _, m := range mats {
			g := m.clone()
			gotGuards = append(gotGuards, g)
			gotMats, wantMats = append(gotMats, g.data()), append(wantMats, m.clone().data())
		}
		at := 0
		for e, r := range rows {
			switch l {
			case NN:
				Gemm(NN, r, n, other, 1, a.data()[at*other:], other, wantMats[e], n, 0.5, want.data()[at*n:], n)
			case NT:
				Gemm(NT, r, n, other, 1, a.data()[at*other:], other, wantMats[e], other, 0.5, want.data()[at*n:], n)
			case TN:
				if r > 0 {
					Gemm(TN, other, n, r, 1, a.data()[at*other:], other, b.data()[at*n:], n, 1, wantMats[e], n)
				}
			}
			at += r
		}
		if l == TN {
			GroupedGemmTN(rows, other, n, a.data(), b.data(), gotMats)
		} else {
			GroupedGemm(l, rows, n, other, a.data(), gotMats, 0.5, got.data())
		}
		what := fmt.Sprintf("%s, layout %d, rows %v, n %d, other %d", name, l, rows, n, other)
		sameBits(t, what, got.buf, want.buf)
		for e := range rows {
			sameBits(t, fmt.Sprintf("%s, matrix %d", what, e), gotMats[e], wantMats[e])
			gotGuards[e].check(t, what)
		}
		restore()
	}
}

func TestGrouped(t *testing.T) {
	for _, threads := range []int{1, 3} {
		withThreads(t, threads)
		for _, l := range []Layout{NN, NT, TN} {
			checkGrouped(t, 1, l, []int{0, 1, 3, 1000}, 48, 33)
			checkGrouped(t, 2, l, []int{14, 0, 0, 15, 28, 29}, 96, 300)
			checkGrouped(t, 3, l, []int{700}, 130, 64)
			checkGrouped(t, 4, l, []int{0, 0}, 8, 8)
			checkGrouped(t, 5, l, nil, 8, 8)
		}
	}
}

// The rows of an expert do not change with the rows that other experts get.
func TestGroupedRowsIndependent(t *testing.T) {
	const n, k = 40, 70
	w := [][]float32{randomMat(1, n*k), randomMat(2, n*k), randomMat(3, n*k)}
	x := randomMat(4, 5*k)
	eachImpl(t, func(t *testing.T) {
		want := make([]float32, 5*n)
		GroupedGemm(NT, []int{0, 5, 0}, n, k, x, w, 0, want)
		for _, around := range [][2]int{{1, 0}, {0, 1}, {13, 29}, {100, 3}} {
			a := append(append(randomMat(5, around[0]*k), x...), randomMat(6, around[1]*k)...)
			c := make([]float32, (around[0]+5+around[1])*n)
			GroupedGemm(NT, []int{around[0], 5, around[1]}, n, k, a, w, 0, c)
			sameBits(t, fmt.Sprint(around), c[around[0]*n:(around[0]+5)*n], want)
		}
	})
}

func TestGroupedAllocatesNothing(t *testing.T) {
	const n, k = 40, 70
	rows := []int{0, 5, 200, 31}
	w := [][]float32{randomMat(1, n*k), randomMat(2, n*k), randomMat(3, n*k), randomMat(4, n*k)}
	a, c := randomMat(5, 236*k), make([]float32, 236*n)
	for _, threads := range []int{1, 2} {
		withThreads(t, threads)
		eachImpl(t, func(t *testing.T) {
			if got := testing.AllocsPerRun(30, func() {
				GroupedGemm(NT, rows, n, k, a, w, 0, c)
				GroupedGemm(NN, rows, n, k, a, w, 1, c)
				GroupedGemmTN(rows, k, n, a, c, w)
			}); got != 0 {
				t.Errorf("%d threads: %v allocations", threads, got)
			}
		})
	}
}
