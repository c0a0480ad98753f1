package model

// Memory is what a part of a model holds in float32 values, beside what the runtime and the exchange between ranks need.
type Memory struct {
	Dense  int64 // weights that every data rank has; as many gradients, likewise below
	Expert int64 // weights of this rank's routed experts
	Tied   int64 // the copy of the embedding table, which has no moments
	Pass   int64 // most values that a micro-batch has in its arena, padding of the arena included
	Index  int64 // int32 values of a micro-batch beside its arena: positions, real rows, choices of experts and their places
	Logits int64 // of the head, for one chunk of rows
	Tables int64 // cosines and sines of the rotary positions
	Head   int64 // what the head holds per row, beside the logits
}

// A Load is the micro-batch that memory is counted for.
type Load struct {
	Seqs, Len int // all tokens real, each sequence one segment
	// Arrived are the rows that this rank's experts get in one MoE layer, of all ranks that share them; 0: as many as the
	// micro-batch sends, which is exact for one expert rank and the mean of several. MTP depth k has (Len-k-1)/Len of them.
	Arrived int
	Judged  bool // under an Objective, which has no MTP modules
}

// MemoryOf counts the memory of a part of a model in training, by going through forward and backward as Chunk does. It is
// exact: the arena of such a micro-batch has just this peak. With padding or shorter segments it takes no more.
func MemoryOf(c Config, p Part, l Load) Memory {
	if p.ExpertSize == 0 {
		p.ExpertSize = 1
	}
	var m Memory
	for _, t := range Tensors(c) {
		if !t.Buffer && p.owns(c, t) {
			if t.Expert < 0 {
				m.Dense += t.Len()
			} else {
				m.Expert += t.Len()
			}
		}
	}
	rows := int64(l.Seqs * l.Len)
	m.Tables = 2 * int64(c.Context) * int64(c.Attention.Rope/2)
	if p.Head {
		if c.tiedCopy() {
			m.Tied = int64(c.vocab()) * int64(c.Dim)
		}
		m.Head = 2 * rows // y, in float64
		if !c.Score {
			m.Logits = logitRows * int64(c.vocab())
		}
		if l.Judged {
			m.Head += rows
		} else if c.MTP.Depth > 0 {
			m.Head += 2 * rows
		}
	}
	s := sketch{c: c, load: l, rows: rows}
	s.chunk(p)
	m.Pass, m.Index = s.peak, s.index
	return m
}

// ArenaPeaks is, for every micro-batch that was ever in flight beside others, the most values its arena has held, to compare
// with Memory.Pass. It counts those that are not in flight now: all, between steps.
func (c *Chunk) ArenaPeaks() []int64 {
	peaks := make([]int64, len(c.free))
	for i, p := range c.free {
		peaks[i] = int64(p.arena.Peak())
	}
	return peaks
}

// A sketch walks through a pass as the model does and counts instead of computing. Each method stands for the one of the same
// name in its model file and asks for memory in the same order.
type sketch struct {
	c    Config
	load Load
	rows int64

	used, peak int64
	index      int64
}

// mat counts a matrix of the arena; see tensor.Arena.Floats.
func (s *sketch) mat(rows, cols int64) {
	s.used += (rows*cols + 15) &^ 15
	s.peak = max(s.peak, s.used)
}

// release is Arena.Release to what was in use at a mark.
func (s *sketch) release(mark int64) { s.used = mark }

func (s *sketch) chunk(p Part) {
	d := int64(s.c.Dim)
	s.index = 3 * s.rows // position, end, real
	for k := range s.c.MTP.Depth {
		s.index += s.real(k) // depthReal
	}
	s.mat(s.rows, d)
	for l := p.First; l < p.Last; l++ {
		s.mat(s.rows, d)
		s.forward(l, s.rows)
	}
	depth := int64(0)
	if p.Head {
		s.mat(s.rows, d)
		s.mat(s.rows, 1)
		if !s.load.Judged {
			depth = int64(s.c.MTP.Depth)
		}
		for k := range depth {
			s.mtpForward(int(k))
		}
		s.mat(s.rows, d) // dHidden
		if s.c.Score {
			s.mat(s.rows, 1) // scores
		}
		for range depth {
			s.mat(s.rows, d) // dState
		}
		for k := depth - 1; k >= 0; k-- {
			s.backward(s.c.Layers+int(k), s.real(int(k)))
			s.mat(s.rows, d) // dNormed
		}
	} else {
		s.mat(s.rows, d) // the gradient that the next stage sends
	}
	for l := p.Last - 1; l >= p.First; l-- {
		s.backward(l, s.rows)
	}
}

// real are the rows of MTP module k that have a token to look ahead to.
func (s *sketch) real(k int) int64 { return int64(s.load.Seqs) * int64(s.load.Len-k-1) }

func (s *sketch) mtpForward(k int) {
	d := int64(s.c.Dim)
	s.mat(s.rows, d) // embed
	for range 2 {    // embedNormed, hNormed
		s.mat(s.rows, d)
		s.mat(s.rows, 1)
	}
	s.mat(s.rows, d) // z
	s.mat(s.rows, d) // out
	s.forward(s.c.Layers+k, s.real(k))
	s.mat(s.rows, d) // state
	s.mat(s.rows, 1)
}

// forward is that of a block with attention and FFN; real are the rows that are routed.
func (s *sketch) forward(layer int, real int64) {
	r, d, a := s.rows, int64(s.c.Dim), s.c.Attention
	heads, qk := int64(a.Heads), int64(a.qk())
	s.mat(r, d) // normed1
	s.mat(r, 1)
	s.mat(r, d) // mid
	s.mat(r, heads*qk)
	if a.QLora > 0 {
		s.mat(r, int64(a.QLora))
		s.mat(r, int64(a.QLora))
		s.mat(r, 1)
	}
	s.mat(r, int64(a.Rope))
	s.mat(r, int64(a.KVLora))
	s.mat(r, int64(a.KVLora))
	s.mat(r, 1)
	s.mat(r, heads*int64(a.Nope+a.V))
	s.mat(r, heads*qk)
	s.mat(r, heads*int64(a.V))
	s.mat(heads, r) // lse
	s.mat(r, d)     // normed2
	s.mat(r, 1)
	if s.c.dense(layer) {
		s.ffn(int64(s.c.DenseInter))
		return
	}
	s.moeForward(real)
}

func (s *sketch) ffn(inter int64) {
	for range 3 { // gate, up, hidden
		s.mat(s.rows, inter)
	}
}

func (s *sketch) moeForward(real int64) {
	m, d := s.c.MoE, int64(s.c.Dim)
	if m.Shared > 0 {
		s.ffn(int64(m.Shared * m.Inter))
	}
	s.mat(s.rows, int64(m.Experts)) // score
	s.mat(real, int64(m.TopK))      // weight
	if m.SeqAux != 0 {
		s.mat(int64(s.load.Seqs), int64(m.Experts)) // slope
	}
	sent, arrived := real*int64(m.TopK), s.arrived(real)
	s.index += 2*sent + 4*int64(m.Experts) // chosen, place; rows and fill in 64 bits
	s.mat(arrived, d)
	s.mat(sent, d) // returned
	for range 3 {  // gate, up, hidden
		s.mat(arrived, int64(m.Inter))
	}
	mark := s.used
	s.mat(sent, d) // sorted
	s.mat(arrived, d)
	s.release(mark)
}

func (s *sketch) arrived(real int64) int64 {
	if s.load.Arrived == 0 {
		return real * int64(s.c.MoE.TopK)
	}
	return int64(s.load.Arrived) * real / max(s.rows, 1)
}

func (s *sketch) backward(layer int, real int64) {
	r, d, a := s.rows, int64(s.c.Dim), s.c.Attention
	heads, qk := int64(a.Heads), int64(a.qk())
	s.mat(r, d) // dmid
	if s.c.dense(layer) {
		s.ffnBackward(int64(s.c.DenseInter))
	} else {
		s.moeBackward(real)
	}
	s.mat(r, d) // dx
	s.mat(r, heads*qk)
	s.mat(r, heads*int64(a.Nope+a.V))
	s.mat(r, int64(a.Rope))
	mark := s.used
	s.mat(r, heads*int64(a.V))
	s.mat(r, heads*qk)
	s.release(mark)
	if a.QLora > 0 {
		s.mat(r, int64(a.QLora))
	}
	s.mat(r, int64(a.KVLora))
}

func (s *sketch) ffnBackward(inter int64) {
	mark := s.used
	s.mat(s.rows, inter) // dHidden
	s.release(mark)
}

func (s *sketch) moeBackward(real int64) {
	m, d := s.c.MoE, int64(s.c.Dim)
	if m.Shared > 0 {
		s.ffnBackward(int64(m.Shared * m.Inter))
	}
	arrived := s.arrived(real)
	s.mat(real, int64(m.TopK)) // dWeight
	s.mat(arrived, d)          // dOut
	mark := s.used
	s.mat(arrived, int64(m.Inter))
	s.mat(arrived, d)
	s.release(mark)
	s.mat(s.rows, int64(m.Experts)) // dz
}
