package kernel

import (
	"fmt"
	"slices"

	"moetor/internal/lowp"
)

// A scaled product cuts the sum over k every scaledDepth values, where DeepSeek-V3 promotes the sums of the tensor cores
// (report, section 3.3.2): each part is summed in FP32 from the values of the codes alone, then multiplied by the scales of
// its row and column, and added to C. Panels of B are scaledWidth columns wide for every implementation, so that packed
// weights do not depend on it. scaledBlockN bounds the decoded panels that wait in the second cache level for the next
// block of A.
const (
	scaledDepth  = 128
	scaledWidth  = 32
	scaledBlockN = 512
)

// ScaledGemm sets C = op(A)*op(B) + beta*C from matrices of few bits; op(A) is m x k and op(B) k x n as in [Gemm], beta is 0
// or 1. With values a, b of the codes and scales s, t of their tiles,
//
//	C[i,j] = sum over cuts K of 128 values of k: (sum over p in K: a[i,p]*b[p,j]) * s[i,K] * t[K,j]
//
// in FP32, in the order of k. So a tile must span whole cuts along k: 128 values, a multiple, or all. Smaller tiles (MX) are
// taken too if their scales are powers of two, which are then multiplied into the values beforehand, exactly. In general
// power-of-two scales give the bits of a product of dequantised values.
//
// An element depends on its row, its column and k alone, as with Gemm. A NaN, of a code or a scale, reaches the
// elements of its row or column and no other.
func ScaledGemm(l Layout, a, b *lowp.Matrix, beta float32, c []float32, ldc int) {
	g := scaledGemm("ScaledGemm", l, a, b, beta, c, ldc)
	g.run("ScaledGemm")
}

func scaledGemm(routine string, l Layout, a, b *lowp.Matrix, beta float32, c []float32, ldc int) scaledGroups {
	g := scaledGroups{layout: l, a: a, b: b, beta: beta, c: c, ldc: ldc, m: a.Rows, n: b.Cols, k: a.Cols}
	inner := b.Rows
	switch l {
	case NN:
	case NT:
		g.n, inner = b.Rows, b.Cols
	case TN:
		g.m, g.k = a.Cols, a.Rows
	default:
		panic(fmt.Sprintf("kernel.%s: layout %d", routine, l))
	}
	if inner != g.k {
		panic(fmt.Sprintf("kernel.%s: op(A) has %d columns, op(B) %d rows", routine, g.k, inner))
	}
	if l == TN && (len(a.Groups) > 1 || len(b.Groups) > 1) || l == NN && len(b.Groups) > 1 {
		panic("kernel." + routine + ": k runs over the rows of several groups")
	}
	checkMat(routine, "C", len(c), g.m, g.n, ldc)
	return g
}

// ScaledGemmPacked is [ScaledGemm] with a packed weight, which says whether the layout is NN or NT.
func ScaledGemmPacked(a *lowp.Matrix, w *PackedWeight, beta float32, c []float32, ldc int) {
	g := scaledGemmPacked("ScaledGemmPacked", a, w, beta, c, ldc)
	g.run("ScaledGemmPacked")
}

func scaledGemmPacked(routine string, a *lowp.Matrix, w *PackedWeight, beta float32, c []float32, ldc int) scaledGroups {
	if a.Cols != w.k {
		panic(fmt.Sprintf("kernel.%s: A has %d columns, the weight %d", routine, a.Cols, w.k))
	}
	checkMat(routine, "C", len(c), a.Rows, w.n, ldc)
	return scaledGroups{layout: w.layout, a: a, packed: w, beta: beta, c: c, ldc: ldc, m: a.Rows, n: w.n, k: w.k}
}

// ScaledGroupedGemm runs one product per group over contiguous rows, as [GroupedGemm]: rows[e] rows of A and of C meet the
// weight w[e]; C = A*op(w) + beta*C has no gaps. Weights are packed for one layout, with equal shapes; that of a group
// without rows is not read.
func ScaledGroupedGemm(rows []int, a *lowp.Matrix, w []*PackedWeight, beta float32, c []float32) {
	g := scaledGrouped("ScaledGroupedGemm", rows, a, w, beta, c)
	g.run("ScaledGroupedGemm")
}

func scaledGrouped(routine string, rows []int, a *lowp.Matrix, w []*PackedWeight, beta float32, c []float32) scaledGroups {
	total := checkGroups(routine, rows, len(w))
	if total != a.Rows {
		panic(fmt.Sprintf("kernel.%s: groups of %d rows in a matrix of %d", routine, total, a.Rows))
	}
	if total == 0 {
		return scaledGroups{rows: rows, a: a}
	}
	first := slices.IndexFunc(rows, func(r int) bool { return r > 0 })
	n, k := w[first].n, w[first].k
	for e, r := range rows {
		if r > 0 && (w[e].n != n || w[e].k != k || w[e].k != a.Cols || w[e].layout != w[first].layout) {
			panic(fmt.Sprintf("kernel.%s: weight %d is %dx%d (layout %d), weight %d %dx%d (layout %d), A has %d columns", routine,
				e, w[e].k, w[e].n, w[e].layout, first, k, n, w[first].layout, a.Cols))
		}
	}
	checkMat(routine, "C", len(c), total, n, n)
	return scaledGroups{layout: w[first].layout, rows: rows, a: a, weights: w, beta: beta, c: c, ldc: n, n: n, k: k}
}

// ScaledGroupedGemmTN accumulates weight gradients, as [GroupedGemmTN]: for every group e, c[e] += A_e^T * B_e from rows[e]
// rows of A and of B. The sum over the rows of a group is cut every 128 rows from the group's first on, where its tiles
// begin: Groups of A and B must be rows, unless their tiles are as high as the matrix or the group is the only one.
func ScaledGroupedGemmTN(rows []int, a, b *lowp.Matrix, c [][]float32) {
	g := scaledGroupedTN("ScaledGroupedGemmTN", rows, a, b, c)
	g.run("ScaledGroupedGemmTN")
}

func scaledGroupedTN(routine string, rows []int, a, b *lowp.Matrix, c [][]float32) scaledGroups {
	total := checkGroups(routine, rows, len(c))
	for i, m := range []*lowp.Matrix{a, b} {
		if m.Rows != total {
			panic(fmt.Sprintf("kernel.%s: groups of %d rows in a matrix of %d", routine, total, m.Rows))
		}
		if grouped := m.Scale != lowp.ScaleNone && m.TileRows > 1; grouped && len(rows) > 1 && !slices.Equal(m.Groups, rows) {
			panic(fmt.Sprintf("kernel.%s: the tiles of operand %d are of groups %v, not %v", routine, i, m.Groups, rows))
		}
	}
	for e, r := range rows {
		if r > 0 {
			checkLen(routine, "c[e]", len(c[e]), a.Cols*b.Cols)
		}
	}
	return scaledGroups{layout: TN, rows: rows, a: a, b: b, beta: 1, grads: c, ldc: b.Cols, m: a.Cols, n: b.Cols, k: total}
}

// scaledGroups is one call of a scaled product.
type scaledGroups struct {
	layout  Layout
	rows    []int // of the groups; nil is a single product
	m, n, k int
	beta    float32
	a       *lowp.Matrix
	b       *lowp.Matrix    // or
	packed  *PackedWeight   // or
	weights []*PackedWeight // by group
	c       []float32
	ldc     int
	grads   [][]float32 // TN of groups: the results
	emulate bool        // on the sums of hopper
	hopper  Hopper
}

func (g *scaledGroups) count() int {
	if g.rows == nil {
		return 1
	}
	return len(g.rows)
}

// shape returns the sizes of the product of group e, and the number of its rows among those of A.
func (g *scaledGroups) shape(e int) (m, n, k, rows int) {
	switch {
	case g.rows == nil:
		return g.m, g.n, g.k, 0
	case g.layout == TN:
		return g.m, g.n, g.rows[e], g.rows[e]
	}
	return g.rows[e], g.n, g.k, g.rows[e]
}

// product returns the product of group e, whose rows begin at row at and, where k runs over them, strip of tiles strip.
func (g *scaledGroups) product(e, at int) scaledProduct {
	m, n, k, _ := g.shape(e)
	p := scaledProduct{m: m, n: n, k: k, accumulate: g.beta != 0, c: g.c, ldc: g.ldc}
	p.a = newSide(g.a, g.layout == TN, k)
	switch {
	case g.packed != nil:
		p.b = g.packed.side()
	case g.weights != nil:
		p.b = g.weights[e].side()
	default:
		p.b = newSide(g.b, g.layout != NT, k)
	}
	switch {
	case g.grads != nil:
		p.c = g.grads[e]
		p.a.begin(e, at)
		p.b.begin(e, at)
	case g.rows != nil:
		p.c = g.c[at*g.ldc:]
		p.a.line = at
	}
	return p
}

func (g *scaledGroups) run(routine string) {
	if g.beta != 0 && g.beta != 1 {
		panic(fmt.Sprintf("kernel.%s: beta %v is neither 0 nor 1", routine, g.beta))
	}
	checkScaled(routine, "A", g.a, g.layout == TN, g.k)
	if g.b != nil {
		checkScaled(routine, "B", g.b, g.layout != NT, g.k)
	}
	m := g.m
	if g.layout != TN {
		m = g.a.Rows
	}
	countFlops(m, g.n, g.k)
	if threads := splitWays(m, g.n, g.k); threads > 1 && workers.try() {
		splitScaled(g, threads)
		workers.runQueues(len(scaledJob.parts), runScaledPart, scaledJob.ends)
		scaledJob.groups = scaledGroups{} // hold on to nobody's matrices
		workers.release()
		return
	}
	t, w, at := active.Load().micro, borrowScaledSpace(), 0
	for e := range g.count() {
		m, n, _, rows := g.shape(e)
		if m > 0 && n > 0 {
			p := g.product(e, at)
			g.multiply(w, t, &p)
		}
		at += rows
	}
	w.giveBack()
}

func (g *scaledGroups) multiply(w *scaledSpace, t *micro, p *scaledProduct) {
	if g.emulate {
		w.emulate(p, g.hopper)
	} else {
		w.multiply(t, p)
	}
}

// scaledJob is the scaled product that the workers are at.
var scaledJob struct {
	groups scaledGroups
	groupParts
}

// maxScaledParts is maxParts for scaled products, where a part costs more: it decodes its operands anew.
const maxScaledParts = 2

// splitScaled cuts the products of all groups into parts, columns at whole panels of B.
func splitScaled(g *scaledGroups, threads int) {
	total := 0
	for e := range g.count() {
		m, n, k, _ := g.shape(e)
		total += m * n * k
	}
	perThread := min(max(total/(threads*partFlops/2), 1), maxScaledParts)
	scaledJob.groups = *g
	scaledJob.cut(g.count(), active.Load().micro.rows, scaledWidth, total, perThread*threads, threads, g.shape)
}

func runScaledPart(i int) {
	q := &scaledJob.parts[i]
	p := scaledJob.groups.product(q.group, q.at)
	p.part(q.i0, q.i1, q.j0, q.j1)
	w := borrowScaledSpace()
	scaledJob.groups.multiply(w, active.Load().micro, &p)
	w.giveBack()
}
