package kernel

import "fmt"

// GroupedGemm runs one product per group over contiguous rows: rows[e] rows of A and of C belong to group e and meet
// the weight w[e]. With NT, w[e] is [n,k]; with NN it is [k,n]. C_e = A_e*op(w[e]) + beta*C_e; A has k columns, C has n,
// no gaps. Rows may be 0, and then w[e] is not read.
func GroupedGemm(l Layout, rows []int, n, k int, a []float32, w [][]float32, beta float32, c []float32) {
	if l != NN && l != NT {
		panic(fmt.Sprintf("kernel.GroupedGemm: layout %d", l))
	}
	total := checkGroups("GroupedGemm", rows, len(w))
	checkMat("GroupedGemm", "A", len(a), total, k, k)
	checkMat("GroupedGemm", "C", len(c), total, n, n)
	for e, r := range rows {
		if r > 0 {
			checkLen("GroupedGemm", "w[e]", len(w[e]), n*k)
		}
	}
	countFlops(total, n, k)
	g := groups{layout: l, rows: rows, n: n, k: k, a: a, w: w, beta: beta, c: c}
	g.run(splitWays(total, n, k))
}

// GroupedGemmTN accumulates weight gradients: for every group e, c[e] (m x n) += A_e^T * B_e with A_e of rows[e] x m and
// B_e of rows[e] x n, both contiguous by group. A group without rows leaves c[e] alone.
func GroupedGemmTN(rows []int, m, n int, a, b []float32, c [][]float32) {
	total := checkGroups("GroupedGemmTN", rows, len(c))
	checkMat("GroupedGemmTN", "A", len(a), total, m, m)
	checkMat("GroupedGemmTN", "B", len(b), total, n, n)
	for e, r := range rows {
		if r > 0 {
			checkLen("GroupedGemmTN", "c[e]", len(c[e]), m*n)
		}
	}
	countFlops(m, n, total)
	g := groups{layout: TN, rows: rows, m: m, n: n, a: a, b: b, grads: c}
	g.run(splitWays(m, n, total))
}

// checkGroups returns the number of rows of all groups.
func checkGroups(routine string, rows []int, matrices int) int {
	if matrices < len(rows) {
		panic(fmt.Sprintf("kernel.%s: %d groups of rows, %d matrices", routine, len(rows), matrices))
	}
	total := 0
	for e, r := range rows {
		if r < 0 {
			panic(fmt.Sprintf("kernel.%s: group %d has %d rows", routine, e, r))
		}
		total += r
	}
	return total
}

// groups is one call of a grouped product.
type groups struct {
	layout  Layout
	rows    []int
	m, n, k int
	beta    float32
	a, b, c []float32   // by rows; b of TN only, c of NN and NT only
	w       [][]float32 // NN, NT: the second operands
	grads   [][]float32 // TN: the results
}

func (g *groups) run(threads int) {
	if threads > 1 && workers.try() {
		workers.runGroups(g, threads)
		workers.release()
		return
	}
	t, w, at := active.Load().micro, borrowWorkspace(), 0
	for e, r := range g.rows {
		if r > 0 {
			p := g.product(e, at)
			w.multiply(t, &p)
		}
		at += r
	}
	w.giveBack()
}

// shape returns the sizes of the product of group e.
func (g *groups) shape(e int) (m, n, k int) {
	if g.layout == TN {
		return g.m, g.n, g.rows[e]
	}
	return g.rows[e], g.n, g.k
}

// product returns the product of group e, whose rows begin at row at. It must not be empty.
func (g *groups) product(e, at int) product {
	r := g.rows[e]
	switch g.layout {
	case TN:
		return product{layout: TN, m: g.m, n: g.n, k: r, alpha: 1, beta: 1,
			a: g.a[at*g.m:], lda: g.m, b: g.b[at*g.n:], ldb: g.n, c: g.grads[e], ldc: g.n}
	case NN:
		return product{layout: NN, m: r, n: g.n, k: g.k, alpha: 1, beta: g.beta,
			a: g.a[at*g.k:], lda: g.k, b: g.w[e], ldb: g.n, c: g.c[at*g.n:], ldc: g.n}
	default:
		return product{layout: NT, m: r, n: g.n, k: g.k, alpha: 1, beta: g.beta,
			a: g.a[at*g.k:], lda: g.k, b: g.w[e], ldb: g.k, c: g.c[at*g.n:], ldc: g.n}
	}
}
