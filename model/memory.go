package model

import "strings"

// Memory is what a part of a model holds beside what the runtime and the exchange between ranks need: float32 values, but
// where it says bytes.
type Memory struct {
	Dense  int64 // weights that every data rank has; as many gradients, likewise below
	Expert int64 // weights of this rank's routed experts
	Tied   int64 // the copy of the embedding table, which has no moments
	Packed int64 // bytes: codes and scales of weights, in the order of both products
	Room   int64 // bytes per thread: codes and scales of the largest weight, on their way to be packed; twice that as it grew
	Pass   int64 // most values that a micro-batch has in its arena, padding of the arena included
	Kept   int64 // the part of Pass that waits for the backward: the cached activations
	Temp   int64 // most values in the arena for temporary ones, which all micro-batches share
	Index  int64 // int32 values of a micro-batch beside its arena: positions, real rows, choices of experts and their places
	Logits int64 // of the head, for one chunk of rows
	Tables int64 // cosines and sines of the rotary positions
	Head   int64 // what the head holds per row, beside the logits
	Wire   int64 // the widest row that goes to another expert rank
}

// A Load is the micro-batch that memory is counted for.
type Load struct {
	Seqs, Len int // all tokens real, each sequence one segment
	// Arrived are the rows that this rank's experts get in one MoE layer, of all ranks that share them; 0: as many as the
	// micro-batch sends, which is exact for one expert rank and the mean of several. MTP depth k has (Len-k-1)/Len of them.
	Arrived int
	Split   bool // BackwardInput and BackwardWeight are called apart, instead of Backward
	Judged  bool // under an Objective, which has no MTP modules
}

// MemoryOf counts the memory of a part of a model in training, by going through forward and backward as Chunk does. It is
// exact: the arenas of such a micro-batch have just these peaks. With padding or shorter segments it takes no more. Where
// codes of experts' rows have tiles of several rows, which begin anew with each expert, it takes no more than this however
// the rows are spread, and at most a scale less for each expert and column.
func MemoryOf(c Config, p Part, l Load) Memory { return memoryOf(c, p, l, nil) }

// memoryOf is MemoryOf; spread, if there, says how many rows each local expert of a layer gets.
func memoryOf(c Config, p Part, l Load, spread func(layer int) []int) Memory {
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
	m.pack(c, p)
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
	s := sketch{c: c, plan: newPlan(c), load: l, rows: l.Seqs * l.Len, alone: p.ExpertSize == 1, spread: spread}
	from, to := p.experts(c.MoE.Experts)
	s.experts = to - from
	s.chunk(p)
	m.Pass, m.Kept, m.Temp, m.Index = int64(s.arena.peak), int64(s.kept), int64(s.temp.peak), int64(s.index)
	if !s.alone && c.hasMoE() {
		m.Wire = int64(max(s.words(c.Recipe.Dispatch), s.words(c.Recipe.Combine)))
	}
	return m
}

// pack counts the codes of the weights of Linears, each of the two halves of a split matrix by itself.
func (m *Memory) pack(c Config, p Part) {
	if c.Recipe.Weight == nil {
		return
	}
	count := func(out, in int) {
		q, t := c.Recipe.Weight, c.Recipe.WeightT
		if t == nil {
			t = q
		}
		y, dx := scaleBytes(q, out, in, nil), scaleBytes(t, out, in, nil)
		m.Packed += int64(in*q.Format.RowBytes((out+31)&^31) + y + out*q.Format.RowBytes((in+31)&^31) + dx) // columns as kernel.PackedWeight has them
		m.Room = max(m.Room, int64(q.CodeBytes(out, in)+max(y, dx)))
	}
	for _, t := range Tensors(c) {
		if len(t.Shape) < 2 || t.Layer < 0 || t.Layer == c.Layers+c.MTP.Depth || strings.HasSuffix(t.Name, "mlp.gate.weight") || !p.owns(c, t) {
			continue
		}
		switch out, in := t.Shape[0], t.Shape[1]; {
		case strings.HasSuffix(t.Name, "kv_a_proj_with_mqa.weight"):
			count(c.Attention.KVLora, in)
			count(c.Attention.Rope, in)
		case strings.HasSuffix(t.Name, "eh_proj.weight"):
			count(out, in/2)
			count(out, in/2)
		default:
			count(out, in)
		}
	}
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

// TempPeak is the most values that the arena for temporary ones has held, to compare with Memory.Temp.
func (c *Chunk) TempPeak() int64 { return int64(c.temp.Peak()) }

// PackedBytes is the memory of the codes of weights, to compare with Memory.Packed.
func (c *Chunk) PackedBytes() (n int64) {
	for _, w := range c.plan.weights {
		n += int64(w.y.Bytes() + w.dx.Bytes())
	}
	return n
}
