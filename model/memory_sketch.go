package model

import "moetor/internal/lowp"

// A sketch walks through a pass as the model does and counts instead of computing. Each method stands for the one of the same
// name in its model file and asks for memory in the same order.
type sketch struct {
	c       Config
	plan    *plan
	load    Load
	rows    int
	alone   bool                  // the rows are not exchanged with other expert ranks
	experts int                   // local ones
	spread  func(layer int) []int // see memoryOf

	arena, temp gauge
	kept, index int
}

// A gauge is an arena's count of values.
type gauge struct{ used, peak int }

// mat counts a matrix; see tensor.Arena.Floats.
func (g *gauge) mat(rows, cols int) {
	g.used += (rows*cols + 15) &^ 15
	g.peak = max(g.peak, g.used)
}

// codes counts those of a matrix; see pass.codes.
func (g *gauge) codes(q *lowp.Quant, rows, cols int, groups []int) {
	if q.TileRows <= 1 {
		groups = nil
	}
	g.mat(1, (q.CodeBytes(rows, cols)+3)/4)
	g.mat(1, (scaleBytes(q, rows, cols, groups)+3)/4)
}

func scaleBytes(q *lowp.Quant, rows, cols int, groups []int) int {
	n := q.ScaleCount(rows, cols, groups)
	if q.Scale == lowp.ScaleE8M0 {
		return n
	}
	return 4 * n
}

// release is Arena.Release to what was in use at a mark.
func (g *gauge) release(mark int) { g.used = mark }

func (s *sketch) keepUnless(again bool) *gauge {
	if again {
		return &s.temp
	}
	return &s.arena
}

func (s *sketch) chunk(p Part) {
	d := s.c.Dim
	s.index = 4 * s.rows // all, position, end, real
	for k := range s.c.MTP.Depth {
		s.index += s.real(k) // depthReal
	}
	s.arena.mat(s.rows, d)
	for l := p.First; l < p.Last; l++ {
		s.arena.mat(s.rows, d)
		s.block(l, s.rows)
	}
	depth := 0
	if p.Head {
		s.arena.mat(s.rows, d)
		s.arena.mat(s.rows, 1)
		for k := range s.c.MTP.Depth {
			if s.load.Judged {
				break
			}
			depth = k + 1
			s.mtp(k)
		}
	}
	s.kept = s.arena.used
	if p.Head {
		s.arena.mat(s.rows, d) // dHidden
		if s.c.Score {
			s.arena.mat(s.rows, 1) // scores
		}
		for range depth {
			s.arena.mat(s.rows, d) // dState
		}
		for k := depth - 1; k >= 0; k-- {
			s.mtpBackward(k)
		}
	} else {
		s.arena.mat(s.rows, d) // the gradient that the next stage sends
	}
	if !s.load.Split {
		s.arena.mat(s.rows, d) // gradients between blocks, in turn
		s.arena.mat(s.rows, d)
	}
	for l := p.Last - 1; l >= p.First; l-- {
		mark := s.arena.used
		if s.load.Split {
			s.arena.mat(s.rows, d) // dx
		}
		s.blockBackward(l, s.rows)
		if !s.load.Split {
			s.arena.release(mark)
		}
	}
}

// real are the rows of MTP module k that have a token to look ahead to.
func (s *sketch) real(k int) int { return s.load.Seqs * (s.load.Len - k - 1) }

func (s *sketch) mtp(k int) {
	d := s.c.Dim
	s.arena.mat(s.rows, d) // embed
	mark := s.temp.used
	s.arena.mat(1, s.rows)
	s.arena.mat(1, s.rows)
	s.inputs(s.keepUnless(s.plan.norm))
	s.arena.mat(s.rows, d) // z
	s.arena.mat(s.rows, d) // out
	s.temp.release(mark)
	s.block(s.c.Layers+k, s.real(k))
	s.arena.mat(s.rows, d) // state
	s.arena.mat(1, s.rows)
}

// inputs are those of an MTP module's matrix.
func (s *sketch) inputs(g *gauge) {
	s.normed(g, s.c.Dim, false)
	s.normed(g, s.c.Dim, false)
}

func (s *sketch) mtpBackward(k int) {
	s.arena.mat(s.rows, s.c.Dim) // dz
	s.blockBackward(s.c.Layers+k, s.real(k))
	mark := s.temp.used
	if s.plan.norm {
		s.inputs(&s.arena)
	}
	s.temp.mat(s.rows, s.c.Dim) // dNormed
	s.gradient(s.rows, s.c.Dim, nil)
	s.temp.release(mark)
}

// block is the forward of one; real are the rows that are routed.
func (s *sketch) block(layer, real int) {
	d, mark := s.c.Dim, s.temp.used
	s.arena.mat(1, s.rows)
	s.normed(s.keepUnless(s.plan.norm), d, false)
	s.arena.mat(s.rows, d) // mid
	s.attention()
	s.temp.release(mark)
	s.arena.mat(1, s.rows)
	s.second(layer, s.keepUnless(s.plan.norm))
	if s.c.dense(layer) {
		s.ffn(s.c.DenseInter)
	} else {
		s.moe(layer, real)
	}
	s.temp.release(mark)
}

func (s *sketch) second(layer int, g *gauge) {
	full := s.plan.low() && !s.c.dense(layer)
	if full {
		s.temp.mat(s.rows, s.c.Dim)
	}
	s.normed(g, s.c.Dim, full)
}

func (s *sketch) blockBackward(layer, real int) {
	d, mark := s.c.Dim, s.temp.used
	s.gradients().mat(s.rows, d) // dmid
	inner := s.temp.used
	if s.plan.norm {
		s.second(layer, &s.arena)
	} else if s.plan.low() && !s.c.dense(layer) {
		s.temp.mat(s.rows, d)
	}
	if s.c.dense(layer) {
		s.ffnBackward(s.c.DenseInter)
	} else {
		s.moeBackward(layer, real)
	}
	s.temp.release(inner)
	if s.plan.norm {
		s.normed(&s.arena, d, false)
	}
	s.attentionBackward()
	s.temp.release(mark)
}

func (s *sketch) attention() {
	a, mark := s.c.Attention, s.temp.used
	core := s.keepUnless(s.plan.up || s.plan.Core != nil)
	core.mat(s.rows, a.Heads*a.qk())
	if a.QLora > 0 {
		s.arena.mat(s.rows, a.QLora)
		s.arena.mat(1, s.rows)
		s.normed(s.keepUnless(s.plan.norm), a.QLora, false)
	}
	s.arena.mat(s.rows, a.KVLora)
	s.arena.mat(1, s.rows)
	s.arena.mat(s.rows, a.Rope)
	s.normed(s.keepUnless(s.plan.norm), a.KVLora, false)
	core.mat(s.rows, a.Heads*(a.Nope+a.V))
	s.round(s.keepUnless(s.plan.up))
	core.mat(s.rows, a.Heads*a.qk())
	s.keepUnless(s.plan.AttnOut != nil).mat(s.rows, a.Heads*a.V)
	s.arena.mat(a.Heads, s.rows) // lse
	s.operand(&s.arena, s.rows, a.Heads*a.V, s.plan.AttnOut)
	s.temp.release(mark)
}

// round is that of queries, keys and values.
func (s *sketch) round(g *gauge) {
	if s.plan.Core == nil {
		return
	}
	for _, cols := range []int{s.c.Attention.Heads * s.c.Attention.qk(), s.c.Attention.Heads * (s.c.Attention.Nope + s.c.Attention.V)} {
		s.operand(g, s.rows, cols, s.plan.Core)
		s.temp.mat(s.rows, cols)
	}
}

// again makes anew what forward did not keep.
func (s *sketch) again() {
	a := s.c.Attention
	if s.plan.norm {
		if a.QLora > 0 {
			s.normed(&s.arena, a.QLora, false)
		}
		s.normed(&s.arena, a.KVLora, false)
	}
	if s.plan.up || s.plan.Core != nil {
		q, kv := a.Heads*a.qk(), a.Heads*(a.Nope+a.V)
		s.temp.mat(s.rows, q)
		s.temp.mat(s.rows, kv)
		if s.plan.up {
			s.round(&s.temp)
		}
		s.temp.mat(s.rows, q)
	}
	s.loaded(s.rows, a.Heads*a.V, s.plan.AttnOut)
}

func (s *sketch) attentionBackward() {
	a, mark, g := s.c.Attention, s.temp.used, s.gradients()
	q, kv := a.Heads*a.qk(), a.Heads*(a.Nope+a.V)
	s.again()
	g.mat(s.rows, q)
	g.mat(s.rows, kv)
	g.mat(s.rows, a.Rope)
	s.temp.mat(s.rows, a.Heads*a.V)
	s.temp.mat(s.rows, q)
	s.gradient(s.rows, s.c.Dim, nil)
	s.owed(s.plan.AttnOut, s.plan.AttnOutT, s.rows, a.Heads*a.V, nil)
	s.gradient(s.rows, q, nil)
	if a.QLora > 0 {
		g.mat(s.rows, a.QLora)
		s.gradient(s.rows, a.QLora, nil)
		s.owed(s.plan.Input, s.plan.InputT, s.rows, a.QLora, nil)
	}
	s.owed(s.plan.Input, s.plan.InputT, s.rows, s.c.Dim, nil)
	g.mat(s.rows, a.KVLora)
	s.gradient(s.rows, kv, nil)
	s.owed(s.plan.Input, s.plan.InputT, s.rows, a.KVLora, nil)
	s.gradient(s.rows, a.KVLora, nil)
	s.gradient(s.rows, a.Rope, nil)
	s.temp.release(mark)
}

func (s *sketch) ffn(inter int) {
	mark := s.temp.used
	s.hidden(s.rows, inter)
	s.temp.release(mark)
}

func (s *sketch) ffnBackward(inter int) {
	mark := s.temp.used
	s.temp.mat(s.rows, inter) // dHidden
	s.gradient(s.rows, s.c.Dim, nil)
	s.hiddenGrad(s.rows, inter, nil)
	s.owed(s.plan.Input, s.plan.InputT, s.rows, s.c.Dim, nil)
	s.temp.release(mark)
}

func (s *sketch) moe(layer, real int) {
	m, d := s.c.MoE, s.c.Dim
	if m.Shared > 0 {
		s.ffn(m.Shared * m.Inter)
	}
	s.arena.mat(s.rows, m.Experts) // score
	s.arena.mat(real, m.TopK)      // weight
	if m.SeqAux != 0 {
		s.arena.mat(s.load.Seqs, m.Experts) // slope
	}
	sent, arrived := real*m.TopK, sumRows(s.groups(layer, real))
	s.index += 2*sent + 4*m.Experts // chosen, place; rows and fill in 64 bits
	if q := s.plan.Dispatch; q == nil {
		s.arena.mat(arrived, d)
		if !s.alone {
			s.temp.mat(sent, d)
		}
	} else {
		s.arena.codes(q, arrived, d, nil)
		if !s.alone {
			s.temp.codes(q, sent, d, nil)
		}
		s.move(q, arrived, sent)
	}
	s.hidden(arrived, m.Inter)
	s.keepUnless(!s.alone || s.plan.Combine != nil).mat(arrived, d) // out
	s.combine(&s.arena, arrived, sent)
	s.loaded(sent, d, s.plan.Combine)
}

// groups are the rows of each local expert: all but the first with one, if it is not known better, which takes the most
// tiles.
func (s *sketch) groups(layer, real int) []int {
	if s.spread != nil {
		return s.spread(layer)
	}
	arrived := real * s.c.MoE.TopK
	if s.load.Arrived != 0 {
		arrived = s.load.Arrived * real / max(s.rows, 1)
	}
	rows := make([]int, s.experts)
	for e := range rows {
		if n := min(arrived, 1); e > 0 {
			rows[e] = n
			arrived -= n
		}
	}
	rows[0] = arrived
	return rows
}

func (s *sketch) combine(g *gauge, arrived, sent int) {
	d := s.c.Dim
	switch q := s.plan.Combine; {
	case q == nil && !s.alone:
		g.mat(sent, d)
	case q == nil:
	case s.alone:
		g.codes(q, arrived, d, nil)
	default:
		g.codes(q, sent, d, nil)
		s.temp.codes(q, arrived, d, nil)
		s.move(q, arrived, sent)
	}
}

// move counts both sides of a wire.
func (s *sketch) move(q *lowp.Quant, arrived, sent int) {
	if s.alone {
		return
	}
	s.temp.mat(sent, s.words(q))
	s.temp.mat(arrived, s.words(q))
}

// words is the width of a row on the wire.
func (s *sketch) words(q *lowp.Quant) int {
	if q == nil {
		return s.c.Dim
	}
	return wireWords(&lowp.Matrix{Quant: *q, Cols: s.c.Dim})
}

func (s *sketch) moeBackward(layer, real int) {
	m, d := s.c.MoE, s.c.Dim
	if m.Shared > 0 {
		s.ffnBackward(m.Shared * m.Inter)
	}
	rows := s.groups(layer, real)
	sent, arrived := real*m.TopK, sumRows(rows)
	s.arena.mat(real, m.TopK) // dWeight
	s.loaded(sent, d, s.plan.Combine)
	if q := s.plan.Dispatch; q == nil {
		if !s.alone {
			s.arena.mat(arrived, d) // dOut
		}
	} else {
		same := *q == *s.plan.GradT
		s.keepUnless(!same).codes(q, arrived, d, nil)
		if !s.alone {
			s.temp.codes(q, sent, d, nil)
		}
		s.move(q, arrived, sent)
		if !same {
			s.arena.codes(s.plan.GradT, arrived, d, rows)
		}
	}
	s.temp.mat(arrived, m.Inter) // dHidden
	s.temp.mat(arrived, d)
	s.hiddenGrad(arrived, m.Inter, rows)
	s.owed(s.plan.Dispatch, s.plan.InputT, arrived, d, rows)
	s.combine(&s.temp, arrived, sent)
	s.loaded(sent, d, s.plan.Combine)
	s.arena.mat(s.rows, m.Experts) // dz
}

// The rest stands for operand.go.

func (s *sketch) normed(g *gauge, cols int, full bool) {
	if !s.plan.low() {
		g.mat(s.rows, cols)
		return
	}
	g.codes(s.plan.Input, s.rows, cols, nil)
	if whole(s.plan.Input) && !full {
		mark := s.temp.used
		s.temp.mat(s.rows, cols)
		s.temp.release(mark)
	}
}

func (s *sketch) operand(g *gauge, rows, cols int, q *lowp.Quant) {
	if q != nil {
		g.codes(q, rows, cols, nil)
	}
}

// loaded counts what load makes of an operand.
func (s *sketch) loaded(rows, cols int, q *lowp.Quant) {
	if q != nil {
		s.temp.mat(rows, cols)
	}
}

func (s *sketch) gradients() *gauge { return s.keepUnless(s.plan.low()) }

func (s *sketch) gradient(rows, cols int, groups []int) {
	if !s.plan.low() {
		return
	}
	s.arena.codes(s.plan.GradT, rows, cols, groups)
	if *s.plan.Grad != *s.plan.GradT {
		s.temp.codes(s.plan.Grad, rows, cols, nil)
	}
}

// hidden is inputs and hidden.
func (s *sketch) hidden(rows, inter int) {
	g := s.keepUnless(s.plan.low())
	g.mat(rows, inter)
	g.mat(rows, inter)
	if !s.plan.low() {
		s.keepUnless(s.plan.swiGLU).mat(rows, inter)
		return
	}
	s.arena.codes(s.plan.SwiGLU, rows, inter, nil)
	s.arena.codes(s.plan.SwiGLU, rows, inter, nil)
	s.temp.codes(s.plan.Input, rows, inter, nil)
}

func (s *sketch) hiddenGrad(rows, inter int, groups []int) {
	if !s.plan.low() {
		if s.plan.swiGLU {
			s.arena.mat(rows, inter)
		}
		return
	}
	s.gradient(rows, inter, groups)
	s.gradient(rows, inter, groups)
	s.arena.codes(s.plan.InputT, rows, inter, groups)
	if whole(s.plan.Grad) && rows > 0 {
		for range 3 { // gate, up and their product
			s.temp.mat(rows, inter)
		}
	}
}

// owed counts the codes that BackwardWeight makes of an operand, one after the other, when nothing else is temporary.
func (s *sketch) owed(q, tall *lowp.Quant, rows, cols int, groups []int) {
	if q != nil && *q != *tall {
		var g gauge
		g.codes(tall, rows, cols, groups)
		s.temp.peak = max(s.temp.peak, g.peak)
	}
}
