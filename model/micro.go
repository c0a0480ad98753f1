package model

import (
	"fmt"

	"moetor/internal/kernel"
	"moetor/internal/tensor"
)

// A Micro is what a chunk needs to know about one micro-batch. All stages of a pipeline read the same one.
// Rows = Seqs*Len; Seqs may be 0 (an empty micro-batch still takes part in every exchange).
type Micro struct {
	Seqs, Len       int
	Tokens, Targets []int32   // Rows; Targets[i] is the token after Tokens[i]
	Weight          []float32 // Rows: share of each target in the loss; 0 also where there is no target
	Starts          []int32   // first row of every attention segment, ascending; positions restart there; every sequence starts one. nil: each sequence is one segment
	Valid           []int32   // Seqs: real tokens of each sequence, the rest is padding at its end; nil: all are real

	// What objectives read; the model does not. Each may be nil.
	IDs    []int64   // Seqs: number of the example in its source's epoch; both sequences of a pair have the pair's
	Labels []int8    // Seqs: +1 desirable or chosen, -1 undesirable or rejected
	Pairs  bool      // sequences 2i and 2i+1 are the chosen and the rejected answer of one pair
	Ref    []float64 // Seqs: the reference model's LogProbs

	SeqWeight []float64 // Seqs: share of each sequence in the balance loss; nil: the sum of its target weights
}

// Rows is the number of token positions.
func (m *Micro) Rows() int { return m.Seqs * m.Len }

// check returns what is wrong with a micro-batch.
func (m *Micro) check(c Config, index int) error {
	rows := m.Rows()
	fail := func(format string, args ...any) error {
		return fmt.Errorf("micro-batch %d: %s", index, fmt.Sprintf(format, args...))
	}
	switch {
	case m.Seqs < 0 || m.Len < 0:
		return fail("%d sequences of %d tokens", m.Seqs, m.Len)
	case m.Seqs > 0 && m.Len > c.Context:
		return fail("sequences of %d tokens exceed model.context=%d", m.Len, c.Context)
	case len(m.Tokens) != rows || len(m.Targets) != rows || len(m.Weight) != rows:
		return fail("%d tokens, %d targets and %d weights for %d rows", len(m.Tokens), len(m.Targets), len(m.Weight), rows)
	case m.Valid != nil && len(m.Valid) != m.Seqs:
		return fail("%d counts of real tokens for %d sequences", len(m.Valid), m.Seqs)
	}
	for _, l := range []struct {
		name string
		has  bool
		n    int
	}{{"IDs", m.IDs != nil, len(m.IDs)}, {"labels", m.Labels != nil, len(m.Labels)}, {"reference log-probabilities", m.Ref != nil, len(m.Ref)},
		{"balance weights", m.SeqWeight != nil, len(m.SeqWeight)}} {
		if l.has && l.n != m.Seqs {
			return fail("%d %s for %d sequences", l.n, l.name, m.Seqs)
		}
	}
	if m.Pairs && m.Seqs%2 != 0 {
		return fail("%d sequences are no pairs", m.Seqs)
	}
	for s, v := range m.Valid {
		if v < 0 || int(v) > m.Len {
			return fail("sequence %d has %d real tokens of %d", s, v, m.Len)
		}
	}
	for i, t := range m.Tokens {
		if t < 0 || int(t) >= c.vocab() {
			return fail("token %d at row %d is outside the vocabulary of %d", t, i, c.vocab())
		}
		if w, y := m.Weight[i], m.Targets[i]; w != 0 && (y < 0 || int(y) >= c.vocab()) {
			return fail("target %d at row %d is outside the vocabulary of %d", y, i, c.vocab())
		}
	}
	if m.Starts == nil {
		return nil
	}
	next := 0 // next sequence that must start a segment
	for i, s := range m.Starts {
		if s < 0 || int(s) >= rows || i > 0 && s <= m.Starts[i-1] {
			return fail("segment %d starts at row %d", i, s)
		}
		if int(s) > next*m.Len {
			break
		}
		if int(s) == next*m.Len {
			next++
		}
	}
	if next < m.Seqs {
		return fail("no segment starts at row %d, where sequence %d does", next*m.Len, next)
	}
	return nil
}

// Sums of one micro-batch's loss terms, unscaled (the trainer divides by the global weight). Only the last stage fills
// Loss, MTP and Weight; every stage with MoE layers fills Aux.
type Sums struct {
	Loss    float64   // sum over targets of weight * -log p; or the objective's loss
	Weight  float64   // sum of weights; or the objective's
	MTP     float64   // sum over depths of weight * -log p, divided by depth count; without mtp_weight
	Aux     float64   // balance loss as sum over sequences of (balance weight of the sequence) * alpha*sum f P, over layers
	Metrics []float64 // the objective's, on the last stage; nil without one; valid until the next Bind
}

// Settings of a step that follow schedules.
type Settings struct {
	MTPWeight float64   // lambda; 0 with an Objective
	Objective Objective // nil: cross-entropy weighted by Micro.Weight
	SeqAux    *float64  // alpha of the balance loss, at least 0; nil: the model's

	SameWeights bool // no weight has changed since the last Bind: their codes are kept
}

// A segment is a range of rows whose tokens see each other.
type segment struct{ from, to int }

// A pass is one micro-batch on its way through a chunk: all its activations and the weight gradients it still owes.
// Passes are pooled, so their slices keep their capacity from step to step.
type pass struct {
	index int
	micro *Micro
	keep  bool // a backward follows
	// Activations, and gradients that a job still reads, stay in the pass's own arena until it ends; what a function needs
	// only itself comes from one that all passes of a chunk share, since one runs at a time, and goes back when it is done.
	arena, temp *tensor.Arena
	headers     []*header // of codes in the arenas
	headersUsed int
	layer       int       // of the block that is at work
	watching    *watching // nil: nothing is measured

	segments  []segment
	all       []int32   // R: 0, 1, 2, ...
	position  []int32   // R: position of a row within its segment
	end       []int32   // R: end of the real rows of a row's segment
	real      []int32   // N: rows of real tokens
	seqWeight []float64 // Seqs: share in the balance loss
	depthReal [][]int32 // per MTP depth: real rows that have a real token that far ahead

	x      tensor.Mat // input of the chunk's first block
	blocks []blockPass
	head   headPass
	jobs   []gradJob
	sums   Sums

	metrics []float64 // the objective's, zero or of an earlier pass; memory of the chunk
	ofSeq   []float64 // Seqs: see Chunk.LogProbs and Chunk.Scores; empty until measured

	nonFinite *NonFiniteError // first of this pass
}

// begin takes up a micro-batch.
func (p *pass) begin(c Config, index int, m *Micro, keep bool) {
	p.index, p.micro, p.keep, p.sums, p.nonFinite = index, m, keep, Sums{}, nil
	p.arena.Reset()
	p.temp.Reset()
	p.headersUsed = 0
	p.jobs, p.ofSeq = p.jobs[:0], p.ofSeq[:0]
	rows := m.Rows()
	p.segments = p.segments[:0]
	if m.Starts == nil {
		for s := range m.Seqs {
			p.segments = append(p.segments, segment{s * m.Len, (s + 1) * m.Len})
		}
	}
	for i, s := range m.Starts {
		to := rows
		if i+1 < len(m.Starts) {
			to = int(m.Starts[i+1])
		}
		p.segments = append(p.segments, segment{int(s), to})
	}
	p.all, p.position, p.end, p.real = grow(p.all, rows), grow(p.position, rows), grow(p.end, rows), p.real[:0]
	for r := range p.all {
		p.all[r] = int32(r)
	}
	for _, s := range p.segments {
		for r := s.from; r < s.to; r++ {
			p.position[r] = int32(r - s.from)
			seq := r / m.Len
			end := (seq + 1) * m.Len
			if m.Valid != nil {
				end = seq*m.Len + int(m.Valid[seq])
			}
			p.end[r] = int32(min(end, s.to))
			if r < end {
				p.real = append(p.real, int32(r))
			}
		}
	}
	p.seqWeight = grow(p.seqWeight, m.Seqs)
	for s := range m.Seqs {
		var w float64
		for _, v := range m.Weight[s*m.Len : (s+1)*m.Len] {
			w += float64(v)
		}
		p.seqWeight[s] = w
	}
	copy(p.seqWeight, m.SeqWeight)
	p.depthReal = grow(p.depthReal, c.MTP.Depth)
	for k := range p.depthReal {
		p.depthReal[k] = p.depthReal[k][:0]
		for _, r := range p.real {
			if r+int32(k)+1 < p.end[r] {
				p.depthReal[k] = append(p.depthReal[k], r)
			}
		}
	}
}

// zeroMat returns a matrix of zeros from an arena.
func zeroMat(a *tensor.Arena, rows, cols int) tensor.Mat {
	m := a.Mat(rows, cols)
	kernel.Zero(m.Data)
	return m
}

// grow returns s with length n, its old content kept where it fits.
func grow[T any](s []T, n int) []T {
	if n <= cap(s) {
		return s[:n]
	}
	t := make([]T, n, max(n, 2*cap(s)))
	copy(t, s[:cap(s)])
	return t
}
