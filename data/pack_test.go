package data

import (
	"errors"
	"math/rand/v2"
	"slices"
	"testing"
)

// A pair is an input and its target, as one would list them without packing.
type pair struct {
	in, target int32
	starts     bool // first of an isolated document
}

// listPairs is the specification of a part: all neighbouring tokens of [lo, hi), isolated without those of two documents.
func listPairs(docs [][]int32, lo, hi int, isolate bool) []pair {
	var pairs []pair
	at := 0
	last, lastDoc := int32(-1), -1
	for d, doc := range docs {
		for _, id := range doc {
			if at >= lo && at < hi {
				if at > lo && (!isolate || lastDoc == d) {
					pairs = append(pairs, pair{last, id, isolate && (len(pairs) == 0 || !sameDoc(docs, at-1, at-2) || at-1 == lo)})
				}
				last, lastDoc = id, d
			}
			at++
		}
	}
	return pairs
}

func sameDoc(docs [][]int32, a, b int) bool {
	at := 0
	for _, doc := range docs {
		if a >= at && a < at+len(doc) {
			return b >= at && b < at+len(doc)
		}
		at += len(doc)
	}
	return false
}

func storeOf(t testing.TB, docs [][]int32) *store {
	t.Helper()
	var out buffer
	b, err := newBuilder(&out, byteTokenizer{}, new(meta))
	if err != nil {
		t.Fatal(err)
	}
	for _, d := range docs { // without its EOS
		if err := errors.Join(b.write(d[:len(d)-1]...), b.endDocument()); err != nil {
			t.Fatal(err)
		}
	}
	h, err := b.finish(make([]byte, 32))
	if err != nil {
		t.Fatal(err)
	}
	copy(out, h)
	s, err := parseStore(out, nil)
	if err != nil {
		t.Fatal(err)
	}
	return s
}

// documents makes documents of the given lengths, EOS included, in which no byte follows itself.
func documents(lengths ...int) [][]int32 {
	var docs [][]int32
	next := int32(0)
	for _, n := range lengths {
		var d []int32
		for range n - 1 {
			d = append(d, next%251)
			next++
		}
		docs = append(docs, append(d, byteEOS))
	}
	return docs
}

func TestPackingAgainstList(t *testing.T) {
	rng := rand.New(rand.NewPCG(1, 2))
	for range 400 {
		lengths := make([]int, 1+rng.IntN(6))
		total := 0
		for i := range lengths {
			lengths[i] = 2 + rng.IntN(7)
			total += lengths[i]
		}
		docs := documents(lengths...)
		s := storeOf(t, docs)
		lo := rng.IntN(total)
		hi := lo + 1 + rng.IntN(total-lo)
		n := 1 + rng.IntN(9)
		cfg := PackConfig{Isolate: rng.IntN(2) == 0, DropTail: rng.IntN(2) == 0}
		p := newPart(s, int64(lo), int64(hi), n, cfg, bytePad)
		want := listPairs(docs, lo, hi, cfg.Isolate)
		if p.pairs() != int64(len(want)) {
			t.Fatalf("documents %v tokens [%d, %d) %+v: %d pairs, want %d", lengths, lo, hi, cfg, p.pairs(), len(want))
		}
		samples := len(want) / n
		if !cfg.DropTail && len(want)%n > 0 {
			samples++
		}
		if p.samples() != int64(samples) || p.dropped() != int64(max(len(want)-samples*n, 0)) {
			t.Fatalf("%d pairs by %d, %+v: %d samples, %d dropped", len(want), n, cfg, p.samples(), p.dropped())
		}
		var b Batch
		b.reset(samples, n)
		for i := range b.Tokens {
			b.Tokens[i], b.Targets[i], b.Weight[i] = -9, -9, -9
		}
		for k := range samples {
			p.fill(&b, k, int64(k))
		}
		var starts []int32
		for i := range samples * n {
			in, target, weight := int32(bytePad), int32(bytePad), float32(0)
			if i < len(want) {
				in, target, weight = want[i].in, want[i].target, 1
			}
			if i%n == 0 || i < len(want) && want[i].starts {
				starts = append(starts, int32(i))
			}
			if b.Tokens[i] != in || b.Targets[i] != target || b.Weight[i] != weight {
				t.Fatalf("documents %v tokens [%d, %d) by %d %+v: element %d is %d>%d weight %v, want %d>%d weight %v",
					lengths, lo, hi, n, cfg, i, b.Tokens[i], b.Targets[i], b.Weight[i], in, target, weight)
			}
		}
		if !slices.Equal(b.Starts, starts) {
			t.Fatalf("documents %v tokens [%d, %d) by %d %+v: starts %v, want %v", lengths, lo, hi, n, cfg, b.Starts, starts)
		}
		for k, v := range b.Valid {
			if want := min(n, len(want)-k*n); int(v) != want {
				t.Fatalf("row %d: %d real tokens, want %d", k, v, want)
			}
		}
	}
}

// P26: lengths 4, 2, 3, 1 with room for 3, and lengths next to a power of two: tokens in are tokens placed or dropped.
func TestPackingConservesTokens(t *testing.T) {
	docs := documents(5, 3, 4, 2) // with their EOS: 14 tokens
	for _, c := range []struct {
		cfg                     PackConfig
		samples, dropped, first int64
	}{
		{PackConfig{}, 5, 0, 1},
		{PackConfig{DropTail: true}, 4, 1, 1},
		{PackConfig{Isolate: true}, 4, 0, 4},
		{PackConfig{Isolate: true, DropTail: true}, 3, 1, 4},
	} {
		p := newPart(storeOf(t, docs), 0, 14, 3, c.cfg, bytePad)
		if p.samples() != c.samples || p.dropped() != c.dropped || p.pairs() != 14-c.first {
			t.Errorf("%+v: %d samples, %d dropped, %d pairs", c.cfg, p.samples(), p.dropped(), p.pairs())
		}
	}
	long := storeOf(t, documents(3*8193+1))
	for _, n := range []int{8191, 8192, 8193} {
		p := newPart(long, 0, long.tokens, n, PackConfig{}, bytePad)
		if placed := p.samples() * int64(n); placed < 3*8193 || placed-3*8193 >= int64(n) {
			t.Errorf("length %d: %d samples", n, p.samples())
		}
	}
}

// P27: what is read of one isolated document does not change with another.
func TestIsolatedDocumentsAreIndependent(t *testing.T) {
	one, two := documents(9, 12, 7), documents(9, 12, 7)
	for i := range 8 {
		two[0][i] = 252
	}
	cfg := PackConfig{Isolate: true}
	var a, b Batch
	a.reset(1, 25)
	b.reset(1, 25)
	p, q := newPart(storeOf(t, one), 0, 28, 25, cfg, bytePad), newPart(storeOf(t, two), 0, 28, 25, cfg, bytePad)
	p.fill(&a, 0, 0)
	q.fill(&b, 0, 0)
	if !slices.Equal(a.Starts, []int32{0, 8, 19}) || !slices.Equal(a.Starts, b.Starts) {
		t.Fatalf("starts %v and %v", a.Starts, b.Starts)
	}
	if slices.Equal(a.Tokens[:8], b.Tokens[:8]) || !slices.Equal(a.Tokens[8:], b.Tokens[8:]) || !slices.Equal(a.Targets[8:], b.Targets[8:]) {
		t.Error("documents are not apart")
	}
	if slices.Contains(a.Tokens, byteEOS) {
		t.Error("an end of document predicts something")
	}
}

func TestCut(t *testing.T) {
	for _, c := range []struct {
		lengths []int
		share   float64
		want    int64
	}{
		{[]int{100}, 0.1, 90},          // one text: its end
		{[]int{50, 50}, 0.1, 90},       // the bound would give half of all
		{[]int{88, 12}, 0.1, 88},       // the bound nearby
		{[]int{88, 4, 8}, 0.1, 88},     // of two as near the earlier
		{[]int{85, 15}, 0.1, 85},       // half as much again is the limit
		{[]int{84, 16}, 0.1, 90},       // beyond it
		{[]int{50, 40, 5, 5}, 0.1, 90}, // exact
		{[]int{95, 5}, 0.1, 95},        // half of what was asked
		{[]int{96, 4}, 0.1, 90},        // less than half
		{[]int{2, 2, 2, 94}, 0.97, 2},  // nearly all
		{[]int{2, 98}, 0.9999, 0},      // nothing is left to train on
	} {
		s := storeOf(t, documents(c.lengths...))
		if got := cut(s, c.share); got != c.want {
			t.Errorf("documents %v share %v: cut at %d, want %d", c.lengths, c.share, got, c.want)
		}
	}
}
