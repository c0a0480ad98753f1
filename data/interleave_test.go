package data

import (
	"math"
	"testing"
)

func TestOrderVisitsEachSampleOnceAnEpoch(t *testing.T) {
	for _, shuffle := range []bool{false, true} {
		o := NewOrder([]int64{3, 1, 5}, nil, shuffle, 7)
		if o.Samples() != 9 || o.Base(0) != 0 || o.Base(1) != 3 || o.Base(2) != 4 {
			t.Fatalf("%d samples, bases %d %d %d", o.Samples(), o.Base(0), o.Base(1), o.Base(2))
		}
		var first []int64
		differs := false
		for epoch := range int64(3) {
			seen := map[int64]bool{}
			for i := range int64(9) {
				part, k := o.At(epoch*9 + i)
				if want := []int{0, 0, 0, 1, 2, 2, 2, 2, 2}[k]; part != want {
					t.Errorf("sample %d is of part %d, want %d", k, part, want)
				}
				seen[k] = true
				if epoch == 0 {
					first = append(first, k)
				} else if first[i] != k {
					differs = true
				}
				if !shuffle && k != i {
					t.Errorf("in order, place %d has sample %d", i, k)
				}
			}
			if len(seen) != 9 {
				t.Errorf("shuffle %t: epoch %d has %d of 9 samples", shuffle, epoch, len(seen))
			}
		}
		if differs != shuffle {
			t.Errorf("shuffle %t: epochs differ: %t", shuffle, differs)
		}
	}
}

func TestOrderIsThatOfSources(t *testing.T) {
	// The same numbers of samples give the same sequence as Open's sources.
	docs := [][][]int32{documents(9, 12), documents(30)}
	var parts []part
	var samples []int64
	for _, d := range docs {
		s := storeOf(t, d)
		parts = append(parts, newPart(s, 0, s.tokens, 4, PackConfig{}, bytePad))
		samples = append(samples, parts[len(parts)-1].samples())
	}
	for _, weights := range [][]float64{nil, {3, 1}} {
		s := newSequence(new(openStores), parts, weights, true, 11, nil)
		o := NewOrder(samples, weights, true, 11)
		count := make([]float64, 2)
		for g := range int64(1000) {
			p, k := s.locate(g)
			part, sample := o.At(g)
			if &s.parts[part] != p || sample-o.Base(part) != k {
				t.Fatalf("weights %v: place %d is sample %d of part %d, want %d", weights, g, sample-o.Base(part), part, k)
			}
			count[part]++
		}
		if weights != nil && math.Abs(count[0]-750) > 1 {
			t.Errorf("%v of 1000 places for a weight of 3 to 1", count[0])
		}
	}
}

func TestPermuted(t *testing.T) {
	seen := map[int64]bool{}
	moved := 0
	for i := range int64(100) {
		p := Permuted(i, 100, 3)
		if p < 0 || p >= 100 || seen[p] {
			t.Fatalf("place %d has %d", i, p)
		}
		seen[p] = true
		if p != i {
			moved++
		}
	}
	if moved < 80 {
		t.Errorf("only %d of 100 places moved", moved)
	}
}

func TestBatchReset(t *testing.T) {
	var b Batch
	b.Reset(4, 3, true)
	b.Pairs = true
	if len(b.Tokens) != 12 || len(b.IDs) != 4 || len(b.Labels) != 4 {
		t.Fatalf("%d tokens, %d ids, %d labels", len(b.Tokens), len(b.IDs), len(b.Labels))
	}
	b.Reset(2, 3, false)
	if len(b.Tokens) != 6 || len(b.IDs) != 2 || b.Labels != nil || b.Pairs {
		t.Errorf("%d tokens, %d ids, labels %v, pairs %t", len(b.Tokens), len(b.IDs), b.Labels, b.Pairs)
	}
}
