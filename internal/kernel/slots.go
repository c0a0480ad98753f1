package kernel

import "fmt"

// Slots says which rows of a matrix of slots belong to which tokens: token n is row Rows[n] of a token matrix (rows of
// Cols values, leading dimension ld), and its K slots are rows Places[n*K:(n+1)*K] of a slot matrix without gaps. Rows
// may not name a row twice, nor Places. It moves tokens to their experts and the experts' outputs back.
type Slots struct {
	Rows, Places []int32
	K, Cols      int
}

// Scatter copies every token into its slots.
func (s Slots) Scatter(slots, x []float32, ld int) {
	s.check("Slots.Scatter", slots, x, ld)
	q := loop{part: scatterPart, slots: s, a: slots, b: x, ld: ld}
	if !s.shared(&q) {
		scatterPart(&q, 0, len(s.Rows))
	}
}

func scatterPart(q *loop, from, to int) {
	s := &q.slots
	for n := from; n < to; n++ {
		x := s.token(q.b, q.ld, n)
		for _, at := range s.Places[n*s.K : (n+1)*s.K] {
			copy(s.slot(q.a, at), x)
		}
	}
}

// Combine adds to every token the sum of its slots, one after the other, each multiplied by its weight (K per token); no
// weights are weights of 1.
func (s Slots) Combine(y []float32, ld int, weight, slots []float32) {
	s.check("Slots.Combine", slots, y, ld)
	if weight != nil {
		checkLen("Slots.Combine", "weight", len(weight), len(s.Rows)*s.K)
	}
	q := loop{part: combinePart, slots: s, a: y, ld: ld, b: weight, c: slots}
	if !s.shared(&q) {
		combinePart(&q, 0, len(s.Rows))
	}
}

func combinePart(q *loop, from, to int) {
	s := &q.slots
	for n := from; n < to; n++ {
		y := s.token(q.a, q.ld, n)
		for j, at := range s.Places[n*s.K : (n+1)*s.K] {
			if q.b == nil {
				add(y, s.slot(q.c, at))
			} else {
				axpy(y, q.b[n*s.K+j], s.slot(q.c, at))
			}
		}
	}
}

// CombineGrad is the backward of Combine, given the gradient dy of the tokens: dWeight, K per token, becomes the inner
// product of dy with each slot, and the slot its own gradient, its weight times dy.
func (s Slots) CombineGrad(dWeight, slots, dy []float32, ld int, weight []float32) {
	s.check("Slots.CombineGrad", slots, dy, ld)
	checkLen("Slots.CombineGrad", "weight", len(weight), len(s.Rows)*s.K)
	checkLen("Slots.CombineGrad", "dWeight", len(dWeight), len(s.Rows)*s.K)
	q := loop{part: combineGradPart, slots: s, a: dWeight, b: slots, c: dy, ld: ld, d: weight}
	if !s.shared(&q) {
		combineGradPart(&q, 0, len(s.Rows))
	}
}

func combineGradPart(q *loop, from, to int) {
	s := &q.slots
	for n := from; n < to; n++ {
		dy := s.token(q.c, q.ld, n)
		for j, at := range s.Places[n*s.K : (n+1)*s.K] {
			slot := s.slot(q.b, at)
			q.a[n*s.K+j] = float32(dot(dy, slot))
			scaled(slot, q.d[n*s.K+j], dy)
		}
	}
}

func (s *Slots) token(x []float32, ld, n int) []float32 {
	at := int(s.Rows[n]) * ld
	return x[at : at+s.Cols]
}

func (s *Slots) slot(slots []float32, at int32) []float32 {
	return slots[int(at)*s.Cols : (int(at)+1)*s.Cols]
}

// shared runs a loop over the tokens on all threads if that pays.
func (s *Slots) shared(q *loop) bool {
	if !shareLoop(len(s.Places) * s.Cols) {
		return false
	}
	q.n, q.chunk = len(s.Rows), rowChunk(s.K*s.Cols)
	finishLoop(q)
	return true
}

// check refuses matrices too small for their rows.
func (s *Slots) check(routine string, slots, tokens []float32, ld int) {
	if s.K < 0 || s.Cols < 0 || len(s.Places) != len(s.Rows)*s.K {
		panic(fmt.Sprintf("kernel.%s: %d places for %d rows with %d slots of %d columns", routine, len(s.Places), len(s.Rows), s.K, s.Cols))
	}
	high := func(rows []int32) int {
		top := int32(-1)
		for _, r := range rows {
			top = max(top, r)
		}
		return int(top) + 1
	}
	checkMat(routine, "tokens", len(tokens), high(s.Rows), s.Cols, ld)
	checkMat(routine, "slots", len(slots), high(s.Places), s.Cols, s.Cols)
}
