package kernel

import (
	"fmt"
	"math"
)

// attentionRows is the number of query rows handled at once. Blocks start at multiples of it within the segment, so
// the block a row stands in, and with it every bit of its output, does not depend on the segment's length.
const attentionRows = 64

// Attention is causal softmax attention of ONE head over ONE segment of T rows: O = softmax(Scale*Q*K^T, masked to
// s <= t)*V. It never holds a T x T matrix: queries are taken in blocks of rows, each against the keys up to its own
// end, and the backward computes the probabilities again from LSE (Dao et al., FlashAttention, 2022, algorithm 4;
// scores of a block are whole rows here, so no rescaling is needed). Scratch is linear in T.
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

// Forward writes O and LSE. Row t depends on rows 0..t of K and V and on row t of Q only, to the bit.
func (a *Attention) Forward() {
	a.check("Attention.Forward")
	s := borrowScratch(attentionRows * a.T)
	for r0 := 0; r0 < a.T; r0 += attentionRows {
		r1 := min(r0+attentionRows, a.T)
		scores := s.f[:(r1-r0)*r1]
		a.scores(scores, r0, r1)
		for t := r0; t < r1; t++ {
			row := scores[(t-r0)*r1 : (t-r0+1)*r1]
			top := maxOf(row[:t+1])
			sum := expShifted(row[:t+1], row[:t+1], top)
			clear(row[t+1:]) // keys after t: an exact zero adds nothing to the product with V
			a.LSE[t] = float32(float64(top) + math.Log(sum))
			// The row is normalised before the product, so that O needs no second pass.
			scaled(row[:t+1], float32(1/sum), row[:t+1])
		}
		Gemm(NN, r1-r0, a.DV, r1, 1, scores, r1, a.V, a.LDV, 0, a.O[r0*a.LDO:], a.LDO)
	}
	s.giveBack()
}

// scores sets dst ((r1-r0) x r1) = Scale * Q[r0:r1] * K[0:r1]^T.
func (a *Attention) scores(dst []float32, r0, r1 int) {
	Gemm(NT, r1-r0, r1, a.DQ, a.Scale, a.Q[r0*a.LDQ:], a.LDQ, a.K, a.LDK, 0, dst, r1)
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
	s := borrowScratch(2 * attentionRows * a.T)
	for r0 := 0; r0 < a.T; r0 += attentionRows {
		r1 := min(r0+attentionRows, a.T)
		rows := r1 - r0
		p, dS := s.f[:rows*r1], s.f[rows*r1:2*rows*r1]
		a.scores(p, r0, r1)
		for t := r0; t < r1; t++ {
			row := p[(t-r0)*r1 : (t-r0+1)*r1]
			expShifted(row[:t+1], row[:t+1], a.LSE[t])
			clear(row[t+1:])
		}
		Gemm(TN, r1, a.DV, rows, 1, p, r1, dO[r0*lddo:], lddo, 1, dV, lddv)
		Gemm(NT, rows, r1, a.DV, 1, dO[r0*lddo:], lddo, a.V, a.LDV, 0, dS, r1)
		for t := r0; t < r1; t++ {
			d := float32(dot(dO[t*lddo:t*lddo+a.DV], a.O[t*a.LDO:t*a.LDO+a.DV]))
			row, pr := dS[(t-r0)*r1:(t-r0+1)*r1], p[(t-r0)*r1:(t-r0+1)*r1]
			dSoftmax(row[:t+1], pr, d)
			clear(row[t+1:])
		}
		Gemm(NN, rows, a.DQ, r1, a.Scale, dS, r1, a.K, a.LDK, 0, dQ[r0*lddq:], lddq)
		Gemm(TN, r1, a.DQ, rows, a.Scale, dS, r1, a.Q[r0*a.LDQ:], a.LDQ, 1, dK, lddk)
	}
	s.giveBack()
}

// dSoftmax sets ds = p*(ds-d).
func dSoftmax(ds, p []float32, d float32) {
	p = p[:len(ds)]
	if l := active.Load().vectors; l != scalar {
		for len(ds) >= int(l) {
			n := min(len(ds), vectorChunk) / int(l)
			dSoftmaxVectors(l, &ds[0], &p[0], d, n)
			n *= int(l)
			ds, p = ds[n:], p[n:]
		}
	}
	for i, v := range p {
		ds[i] = v * (ds[i] - d)
	}
}

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
