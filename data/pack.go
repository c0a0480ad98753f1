package data

import (
	"math"
	"sort"
)

// A part is a range of a store's tokens cut into samples. A sample is a run of n (input, target) pairs of which a target is
// the token after its input, so samples that follow each other share a token and every target is in one of them.
//
// The pairs of running documents are all neighbouring tokens: tokens-1 pairs. Isolated documents leave out the pairs of an
// EOS with the first token of the next document; with d whole or cut documents these are tokens-d pairs, and pair q of
// document j has its input at lo+q+j: one EOS per earlier document is no input.
type part struct {
	*store
	lo, hi   int64 // tokens [lo, hi)
	doc      int   // the document that lo lies in
	docCount int   // documents in the range
	n        int   // pairs per sample
	isolate  bool
	dropTail bool
	pad      int32
}

// newPart is the part [lo, hi) of s, which holds at least one token.
func newPart(s *store, lo, hi int64, n int, cfg PackConfig, pad int32) part {
	first := sort.Search(s.docs(), func(d int) bool { return s.start(d) > lo }) - 1
	end := sort.Search(s.docs(), func(d int) bool { return s.start(d) >= hi })
	return part{store: s, lo: lo, hi: hi, doc: first, docCount: end - first, n: n,
		isolate: cfg.Isolate, dropTail: cfg.DropTail, pad: pad}
}

// pairs is how many targets the part has.
func (p *part) pairs() int64 {
	if p.isolate {
		return p.hi - p.lo - int64(p.docCount)
	}
	return p.hi - p.lo - 1
}

func (p *part) samples() int64 {
	n := int64(p.n)
	if p.dropTail {
		return p.pairs() / n
	}
	return (p.pairs() + n - 1) / n
}

// dropped is how many targets are in no sample.
func (p *part) dropped() int64 { return max(p.pairs()-p.samples()*int64(p.n), 0) }

// pairStart is the number of the first pair of document j of the part, isolated.
func (p *part) pairStart(j int) int64 {
	if j == 0 {
		return 0
	}
	if j == p.docCount {
		return p.pairs()
	}
	return p.start(p.doc+j) - p.lo - int64(j)
}

// fill writes sample k into row r of b.
func (p *part) fill(b *Batch, r int, k int64) {
	q := k * int64(p.n)
	row := r * p.n
	count := int(min(int64(p.n), p.pairs()-q))
	tokens, targets, weight := b.Tokens[row:row+p.n], b.Targets[row:row+p.n], b.Weight[row:row+p.n]
	if p.isolate {
		// Of documents without a pair the last is found, which is followed by one that has some.
		j := sort.Search(p.docCount, func(j int) bool { return p.pairStart(j) > q }) - 1
		for i := 0; i < count; j++ {
			m := int(min(int64(count-i), p.pairStart(j+1)-q))
			if m == 0 {
				continue
			}
			b.Starts = append(b.Starts, int32(row+i))
			at := p.lo + q + int64(j)
			p.read(tokens[i:i+m], at)
			p.read(targets[i:i+m], at+1)
			i, q = i+m, q+int64(m)
		}
	} else {
		b.Starts = append(b.Starts, int32(row))
		p.read(tokens[:count], p.lo+q)
		p.read(targets[:count], p.lo+q+1)
	}
	for i := range weight {
		if i < count {
			weight[i] = 1
		} else {
			tokens[i], targets[i], weight[i] = p.pad, p.pad, 0
		}
	}
	b.Valid[r] = int32(count)
}

// cut is the token at which the last share of s begins; see ValConfig.Share.
func cut(s *store, share float64) int64 {
	at := int64(math.Floor(float64(s.tokens) * (1 - share)))
	bound := int64(0)
	d := sort.Search(s.docs(), func(d int) bool { return s.start(d) >= at })
	if d < s.docs() {
		bound = s.start(d)
	}
	if d > 0 && (bound == 0 || at-s.start(d-1) <= bound-at) {
		bound = s.start(d - 1)
	}
	if bound > 0 && max(bound-at, at-bound) <= (s.tokens-at)/2 {
		return bound
	}
	return at
}
