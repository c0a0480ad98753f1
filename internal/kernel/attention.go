package kernel

import (
	"fmt"
	"math"
)

// A block of scores is attentionRows queries against attentionKeys keys: few enough for two of them to stay in the
// second cache level, enough to reuse a panel of keys. Blocks start at multiples of these within the segment, so what a
// row is made of, to the bit, does not depend on the segment's length. Both are multiples of every vector and of the
// AVX-512 tile in both directions.
const (
	attentionRows = 112
	attentionKeys = 224
	// The leading dimension of a block of scores: an odd number of cache lines, so that its rows do not meet in the same
	// sets of the first level.
	attentionLD = attentionKeys + 16
)

// Attention is causal softmax attention of ONE head over ONE segment of T rows: O = softmax(Scale*Q*K^T, masked to
// s <= t)*V. It never holds a T x T matrix: blocks of queries meet blocks of keys in turn, with a running maximum and sum
// per row, and the backward computes the probabilities again from LSE (Dao et al., FlashAttention, 2022, algorithms 1
// and 4; Milakov and Gimelshein, Online normalizer calculation for softmax, 2018). Scratch is linear in T: a copy of K
// and V as panels, in the backward another of K.
//
// Row t of Q is Q[t*LDQ : t*LDQ+DQ]; K likewise with DQ columns; V and O have DV columns. LSE (T values) receives the
// log-sum-exp of the scaled scores of each row.
type Attention struct {
	T, DQ, DV          int
	Scale              float32
	Q, K, V, O         []float32
	LDQ, LDK, LDV, LDO int
	LSE                []float32
}

// AttentionScratch returns the bytes of scratch that a thread keeps for segments of up to T rows: what Backward borrows,
// and Forward uses again. It is linear in T.
func AttentionScratch(T, DQ, DV int) int64 {
	cols := active.Load().micro.cols
	var bytes int64
	for _, n := range []int{
		roundUp(T, cols) * DQ, roundUp(T, cols) * DV, T * roundUp(DQ, cols),
		attentionRows * attentionLD, attentionRows * attentionLD, attentionRows * roundUp(DQ, cols), attentionRows * roundUp(DV, cols),
	} {
		bytes += 4 << scratchClass(n)
	}
	return bytes
}

// Forward writes O and LSE. Row t depends on rows 0..t of K and V and on row t of Q only, to the bit, as long as V is
// finite.
func (a *Attention) Forward() {
	a.check("Attention.Forward")
	countPairs(a.T, a.DQ+a.DV)
	h := head{t: active.Load().micro, w: borrowWorkspace(), T: a.T}
	keys, values := h.transposed(a.K, a.LDK, a.DQ), h.columns(a.V, a.LDV, a.T, a.DV)
	scores, out := borrowScratch(attentionRows*attentionLD), borrowScratch(attentionRows*roundUp(a.DV, h.t.cols))
	soft := runningSoftmax{o: out.f, ldo: roundUp(a.DV, h.t.cols)}
	for r0 := 0; r0 < a.T; r0 += attentionRows {
		r1 := min(r0+attentionRows, a.T)
		soft.begin(r0)
		for k0 := 0; k0 < r1; k0 += attentionKeys {
			b := attentionBlock{max(r0, k0), r1, k0, min(k0+attentionKeys, r1)}
			h.scores(scores.f, b, a.Scale, a.Q, a.LDQ, a.DQ, keys.f)
			for i := b.r0; i < r1; i += h.t.rows {
				soft.add(scores.f[(i-b.r0)*attentionLD:], b, i, min(i+h.t.rows, r1))
			}
			h.times(soft.rows(b.r0), soft.ldo, b, scores.f, a.DV, values.f, 1)
		}
		soft.end(a, r1)
	}
	out.giveBack()
	scores.giveBack()
	values.giveBack()
	keys.giveBack()
	h.w.giveBack()
}

// Backward overwrites dQ and ADDS to dK and dV, given dO; their rows are as in Q, K, V with leading dimensions of their
// own. It reads O and LSE as Forward left them. Per row t, with P the probabilities and D = dO·O:
//
//	dV += P^T*dO;  dS = P∘(dO*V^T - D);  dQ = Scale*dS*K;  dK += Scale*dS^T*Q
//
// Blocks of query rows are added to dK and dV in order.
func (a *Attention) Backward(dO []float32, lddo int, dQ []float32, lddq int, dK []float32, lddk int, dV []float32, lddv int) {
	a.check("Attention.Backward")
	checkMat("Attention.Backward", "dO", len(dO), a.T, a.DV, lddo)
	checkMat("Attention.Backward", "dQ", len(dQ), a.T, a.DQ, lddq)
	checkMat("Attention.Backward", "dK", len(dK), a.T, a.DQ, lddk)
	checkMat("Attention.Backward", "dV", len(dV), a.T, a.DV, lddv)
	countPairs(a.T, 3*a.DQ+2*a.DV)
	h := head{t: active.Load().micro, w: borrowWorkspace(), T: a.T}
	keysT, valuesT, keys := h.transposed(a.K, a.LDK, a.DQ), h.transposed(a.V, a.LDV, a.DV), h.columns(a.K, a.LDK, a.T, a.DQ)
	scores, grads := borrowScratch(attentionRows*attentionLD), borrowScratch(attentionRows*attentionLD)
	p, dS := scores.f, grads.f
	var d [attentionRows]float32
	for r0 := 0; r0 < a.T; r0 += attentionRows {
		r1 := min(r0+attentionRows, a.T)
		q, do := h.columns(a.Q[r0*a.LDQ:], a.LDQ, r1-r0, a.DQ), h.columns(dO[r0*lddo:], lddo, r1-r0, a.DV)
		for r := r0; r < r1; r++ {
			d[r-r0] = float32(dot(dO[r*lddo:r*lddo+a.DV], a.O[r*a.LDO:r*a.LDO+a.DV]))
		}
		for k0 := 0; k0 < r1; k0 += attentionKeys {
			b := attentionBlock{max(r0, k0), r1, k0, min(k0+attentionKeys, r1)}
			h.scores(p, b, a.Scale, a.Q, a.LDQ, a.DQ, keysT.f)
			h.scores(dS, b, 1, dO, lddo, a.DV, valuesT.f)
			for i := b.r0; i < r1; i += h.t.rows {
				at, i1 := (i-b.r0)*attentionLD, min(i+h.t.rows, r1)
				gradRows(p[at:], dS[at:], a.LSE[i:i1], d[i-r0:], attentionLD, min(i1, b.k1)-k0)
			}
			h.clearMasked(p, dS, b)
			h.times(dQ[b.r0*lddq:], lddq, b, dS, a.DQ, keys.f, a.Scale)
			h.timesTransposed(dV, lddv, b, p, a.DV, do.f, r0, 1)
			h.timesTransposed(dK, lddk, b, dS, a.DQ, q.f, r0, a.Scale)
		}
		do.giveBack()
		q.giveBack()
	}
	grads.giveBack()
	scores.giveBack()
	keys.giveBack()
	valuesT.giveBack()
	keysT.giveBack()
	h.w.giveBack()
}

// attentionBlock is the queries r0..r1 and the keys k0..k1, no key later than the last query and no query earlier than
// the first key. Element (r,s) of a matrix over a block stands at [(r-r0)*attentionLD+s-k0]. Of what is above the
// diagonal only tiles that the diagonal passes are computed and read.
type attentionBlock struct{ r0, r1, k0, k1 int }

// head has what the products of one head need.
type head struct {
	t *micro
	w *workspace
	T int
}

// transposed returns the T rows of x as columns of panels.
func (h *head) transposed(x []float32, ld, cols int) *scratch {
	s := borrowScratch(roundUp(h.T, h.t.cols) * cols)
	h.w.packTransposed(h.t, s.f, x, ld, h.T, h.T, cols)
	return s
}

// columns returns rows of x as rows of panels.
func (h *head) columns(x []float32, ld, rows, cols int) *scratch {
	s := borrowScratch(roundUp(cols, h.t.cols) * rows)
	packColumns(h.t, s.f, x, ld, cols, rows)
	return s
}

// scores sets the block dst = alpha*x*y^T for rows of x and panels of transposed rows y, depth values each.
func (h *head) scores(dst []float32, b attentionBlock, alpha float32, x []float32, ldx, depth int, y []float32) {
	t := h.t
	for j := b.k0; j < b.k1; j += t.cols {
		first := b.r0 + max(j-b.r0, 0)/t.rows*t.rows // the first tile that is not wholly above the diagonal
		for i := first; i < b.r1; i += t.rows {
			rows, width := min(t.rows, b.r1-i), t.cols
			if i+rows-j <= t.narrow {
				width = t.narrow
			}
			t.tile(t.byRows, rows, width)(depth, &x[i*ldx], ldx, &y[j*depth], t.cols, &dst[(i-b.r0)*attentionLD+j-b.k0], attentionLD, alpha, 0, address(x), 0)
		}
	}
}

// times sets dst = alpha*p*y, added to what dst holds unless the block has the first keys: p a block, y all keys' rows of
// cols values as panels. Row r0 of the result is the first of dst.
func (h *head) times(dst []float32, ld int, b attentionBlock, p []float32, cols int, y []float32, alpha float32) {
	t, beta := h.t, float32(1)
	if b.k0 == 0 {
		beta = 0
	}
	for j := 0; j < cols; j += t.cols {
		for i := b.r0; i < b.r1; i += t.rows {
			h.w.tile(t, t.byRows, min(t.rows, b.r1-i), min(t.cols, cols-j), min(i+t.rows, b.k1)-b.k0,
				&p[(i-b.r0)*attentionLD], attentionLD, &y[j*h.T+b.k0*t.cols], t.cols, dst[(i-b.r0)*ld+j:], ld, alpha, beta, nil)
		}
	}
}

// timesTransposed adds alpha*p^T*y to the rows of dst that belong to the keys of the block p; y is rows of cols values,
// from query r0 on, as panels.
func (h *head) timesTransposed(dst []float32, ld int, b attentionBlock, p []float32, cols int, y []float32, r0 int, alpha float32) {
	t := h.t
	for j := 0; j < cols; j += t.cols {
		panel := y[j*(b.r1-r0):]
		for i := b.k0; i < b.k1; i += t.rows {
			r := max(b.r0, i) // queries before the first key of the tile have nothing to add
			h.w.tile(t, t.byCols, min(t.rows, b.k1-i), min(t.cols, cols-j), b.r1-r,
				&p[(r-b.r0)*attentionLD+i-b.k0], attentionLD, &panel[(r-r0)*t.cols], t.cols, dst[i*ld+j:], ld, alpha, 1, nil)
		}
	}
}

// clearMasked clears what is above the diagonal of blocks as far as timesTransposed reads it.
func (h *head) clearMasked(p, dS []float32, b attentionBlock) {
	for r := b.r0; r < min(b.r1, b.k1); r++ {
		at := (r - b.r0) * attentionLD
		from, to := at+r+1-b.k0, at+min(r+h.t.rows, b.k1)-b.k0
		clear(p[from:to])
		clear(dS[from:to])
	}
}

// runningSoftmax is the state of a block of queries from r0 on. Of each row: the largest score so far, the sum of
// exp(score-top), and in o the sum of exp(score-top) times rows of V.
type runningSoftmax struct {
	r0       int
	top, sum [attentionRows]float32
	o        []float32
	ldo      int // whole panels, so that o has no edge
}

func (s *runningSoftmax) begin(r0 int) {
	s.r0 = r0
	for i := range s.top {
		s.top[i], s.sum[i] = float32(math.Inf(-1)), 0
	}
}

// rows returns o from row r on.
func (s *runningSoftmax) rows(r int) []float32 { return s.o[(r-s.r0)*s.ldo:] }

// add takes in rows i0..i1, a tile's at most, of a block of scores, the first of which is p's first, and replaces them by
// exp(score-top), masked ones by 0. What the rows have gathered before is brought to the new maximum.
func (s *runningSoftmax) add(p []float32, b attentionBlock, i0, i1 int) {
	width := roundUp(min(i1, b.k1)-b.k0, max(int(active.Load().vectors), 1))
	for i := i0; i < i1; i++ {
		for j := i + 1 - b.k0; j < width; j++ {
			p[(i-i0)*attentionLD+j] = float32(math.Inf(-1))
		}
	}
	var buffers [3][maxTileRows]float32
	n := i1 - i0
	before, more, factors := buffers[0][:n], buffers[1][:n], buffers[2][:n]
	top, sum := s.top[i0-s.r0:i1-s.r0], s.sum[i0-s.r0:i1-s.r0]
	copy(before, top)
	maxRows(top, p, attentionLD, width)
	expRows(more, p, top, attentionLD, width)
	changed := false
	for i, now := range top {
		factors[i] = 1
		if b.k0 > 0 && now != before[i] {
			factors[i], changed = expf(before[i]-now), true
		}
		sum[i] = sum[i]*factors[i] + more[i]
	}
	if changed {
		o := s.rows(i0)
		timesRows(o, s.ldo, o, s.ldo, factors, s.ldo)
	}
}

// end divides by the sums and writes rows up to r1 of a.
func (s *runningSoftmax) end(a *Attention, r1 int) {
	for i := range r1 - s.r0 {
		a.LSE[s.r0+i] = float32(float64(s.top[i]) + math.Log(float64(s.sum[i])))
		s.sum[i] = 1 / s.sum[i]
	}
	timesRows(a.O[s.r0*a.LDO:], a.LDO, s.o, s.ldo, s.sum[:r1-s.r0], a.DV)
}

// roundUp returns the multiple of unit that is not less than n.
func roundUp(n, unit int) int { return (n + unit - 1) / unit * unit }

func (a *Attention) check(routine string) {
	checkMat(routine, "Q", len(a.Q), a.T, a.DQ, a.LDQ)
	checkMat(routine, "K", len(a.K), a.T, a.DQ, a.LDK)
	checkMat(routine, "V", len(a.V), a.T, a.DV, a.LDV)
	checkMat(routine, "O", len(a.O), a.T, a.DV, a.LDO)
	checkLen(routine, "LSE", len(a.LSE), a.T)
}

// checkMat panics unless a slice of have values holds rows x cols with leading dimension ld.
func checkMat(routine, name string, have, rows, cols, ld int) {
	if rows < 0 || cols < 0 {
		panic(fmt.Sprintf("kernel.%s: %s is %d x %d", routine, name, rows, cols))
	}
	if rows == 0 || cols == 0 {
		return
	}
	if ld < cols {
		panic(fmt.Sprintf("kernel.%s: %s has leading dimension %d, less than its %d columns", routine, name, ld, cols))
	}
	if need := (rows-1)*ld + cols; have < need {
		panic(fmt.Sprintf("kernel.%s: %s has %d values, needs %d for %d x %d with leading dimension %d",
			routine, name, have, need, rows, cols, ld))
	}
}
