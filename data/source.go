package data

import (
	"context"
	"crypto/sha256"
	"encoding/hex"
	"errors"
	"fmt"
	"math"
	"sort"
	"sync"
)

// sequence is the Source of parts of stores. Without weights the parts are one: an epoch has each sample of each part once.
// With weights they are interleaved by a cycle and each part runs through its own epochs.
type sequence struct {
	open        *openStores
	parts       []part
	ends        []int64 // running sum of the parts' samples
	weighted    bool
	cycle       cycle
	shuffle     bool
	seed        uint64
	fingerprint string
}

// openStores guards the mapped memory that sources read.
type openStores struct {
	mu     sync.RWMutex
	closed bool
	stores []*store
}

func (o *openStores) close() error {
	o.mu.Lock()
	defer o.mu.Unlock()
	o.closed = true
	var errs []error
	for _, s := range o.stores {
		errs = append(errs, s.close())
	}
	return errors.Join(errs...)
}

// newSequence makes a source of parts, none of them without samples. weights may be nil; shuffle false reads in order.
func newSequence(open *openStores, parts []part, weights []float64, shuffle bool, seed uint64, tokState []byte) *sequence {
	s := &sequence{open: open, parts: parts, shuffle: shuffle, seed: seed, weighted: weights != nil && len(parts) > 1}
	sum := int64(0)
	for i := range parts {
		sum += parts[i].samples()
		s.ends = append(s.ends, sum)
	}
	h := sha256.New()
	fmt.Fprintf(h, "sequence 1\ntokenizer %d %s\nshuffle %t seed %d\n", len(tokState), tokState, shuffle, seed)
	for i, p := range parts {
		fmt.Fprintf(h, "part %x [%d, %d) of %d, length %d isolate %t drop %t", p.Digest, p.lo, p.hi, p.tokens, p.n, p.isolate, p.dropTail)
		if s.weighted {
			fmt.Fprintf(h, " weight %v", weights[i])
		}
		fmt.Fprintln(h)
	}
	if s.weighted {
		s.cycle = newCycle(weights)
	}
	s.fingerprint = hex.EncodeToString(h.Sum(nil)[:16])
	return s
}

func (s *sequence) Samples() int64      { return s.ends[len(s.ends)-1] }
func (s *sequence) Fingerprint() string { return s.fingerprint }

func (s *sequence) Read(ctx context.Context, first int64, n int, b *Batch) error {
	if err := ctx.Err(); err != nil {
		return context.Cause(ctx)
	}
	if first < 0 || n < 0 || first > math.MaxInt64-int64(n) {
		return fmt.Errorf("data: no samples [%d, %d+%d)", first, first, n)
	}
	s.open.mu.RLock()
	defer s.open.mu.RUnlock()
	if s.open.closed {
		return errors.New("data: read from a closed corpus")
	}
	b.reset(n, s.parts[0].n)
	for r := range n {
		p, k := s.locate(first + int64(r))
		p.fill(b, r, k)
	}
	return nil
}

// locate returns the part and the sample of it at place g of the global sequence.
func (s *sequence) locate(g int64) (*part, int64) {
	if s.weighted {
		i, visit := s.cycle.at(g)
		p := &s.parts[i]
		n := p.samples()
		return p, s.place(visit%n, n, uint64(i)+1, visit/n)
	}
	n := s.Samples()
	k := s.place(g%n, n, 0, g/n)
	i := sort.Search(len(s.ends), func(i int) bool { return s.ends[i] > k })
	if i > 0 {
		k -= s.ends[i-1]
	}
	return &s.parts[i], k
}

func (s *sequence) place(i, n int64, source uint64, epoch int64) int64 {
	if !s.shuffle {
		return i
	}
	return shuffled(i, n, orderKey(s.seed, source, epoch))
}
