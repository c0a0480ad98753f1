package data

import "sort"

// An Order is the endless global sequence of the samples of several parts, for sources made outside this package. Without
// weights the parts are one: an epoch has each sample of each part once. With weights they are interleaved by a cycle of
// fixed length and each part runs through epochs of its own. Both are what the sources of Open do.
type Order struct {
	ends    []int64 // running sum of the parts' samples
	cycle   *cycle  // nil without weights
	shuffle bool
	seed    uint64
}

// NewOrder returns the order of parts with these numbers of samples, all above 0. weights may be nil, and else are above 0,
// one for each part. Each epoch is shuffled anew by seed, or read in order. There are at most as many parts as a list of
// sources may have (ValidateSources).
func NewOrder(samples []int64, weights []float64, shuffle bool, seed uint64) *Order {
	o := &Order{shuffle: shuffle, seed: seed}
	sum := int64(0)
	for _, n := range samples {
		sum += n
		o.ends = append(o.ends, sum)
	}
	if weights != nil && len(samples) > 1 {
		c := newCycle(weights)
		o.cycle = &c
	}
	return o
}

// Samples of all parts together.
func (o *Order) Samples() int64 { return o.ends[len(o.ends)-1] }

// Base is the number of the first sample of a part where the samples of all parts are numbered through.
func (o *Order) Base(part int) int64 {
	if part == 0 {
		return 0
	}
	return o.ends[part-1]
}

// At returns which sample, numbered through all parts, stands at place g >= 0 of the sequence, and which part it is of.
func (o *Order) At(g int64) (part int, sample int64) {
	if o.cycle != nil {
		part, visit := o.cycle.at(g)
		base := o.Base(part)
		n := o.ends[part] - base
		return part, base + o.place(visit%n, n, uint64(part)+1, visit/n)
	}
	n := o.Samples()
	k := o.place(g%n, n, 0, g/n)
	return sort.Search(len(o.ends), func(i int) bool { return o.ends[i] > k }), k
}

func (o *Order) place(i, n int64, source uint64, epoch int64) int64 {
	if !o.shuffle {
		return i
	}
	return shuffled(i, n, orderKey(o.seed, source, epoch))
}

// Permuted returns the number at place i of a permutation of 0..n-1 that seed chooses, 0 <= i < n.
func Permuted(i, n int64, seed uint64) int64 { return shuffled(i, n, orderKey(seed, 0, 0)) }

// Reset makes b hold seqs rows of n tokens of any content with an ID each, and labels if asked for, in the memory it has if
// that is enough. Starts is empty and Pairs false.
func (b *Batch) Reset(seqs, n int, labels bool) {
	ids, marks := b.IDs, b.Labels
	b.reset(seqs, n)
	b.IDs = sized(ids, seqs)
	if labels {
		b.Labels = sized(marks, seqs)
	}
}
