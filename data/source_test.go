package data

import (
	"context"
	"errors"
	"fmt"
	"math"
	"path/filepath"
	"reflect"
	"slices"
	"strings"
	"testing"
)

// numbered is a source whose sample i, at length 4, begins with byte i: 4n+1 tokens with the EOS.
func numbered(t testing.TB, name string, from, n int) SourceConfig {
	var b strings.Builder
	for i := range n {
		b.Write([]byte{byte(from + i), 'x', 'y', 'z'})
	}
	return SourceConfig{Path: write(t, name, []byte(b.String()))}
}

// ids are the first bytes of samples [first, first+n).
func ids(t testing.TB, s Source, first int64, n int) []int {
	t.Helper()
	var b Batch
	if err := s.Read(t.Context(), first, n, &b); err != nil {
		t.Fatal(err)
	}
	var out []int
	for r := range n {
		out = append(out, int(b.Tokens[r*b.Len]))
	}
	return out
}

func isPermutation(ids []int, from, n int) bool {
	s := slices.Sorted(slices.Values(ids))
	for i, id := range s {
		if id != from+i {
			return false
		}
	}
	return len(s) == n
}

// P24: each sample once per epoch, at any number of ranks, also when it changes within an epoch.
func TestEpochsAtAnyRankCount(t *testing.T) {
	cfg := OpenConfig{Sources: []SourceConfig{numbered(t, "a.bin", 0, 16)}, Len: 4, Seed: 3}
	const batch = 4
	plain := open(t, cfg)
	if n := plain.Train.Samples(); n != 16 {
		t.Fatalf("%d samples", n)
	}
	want := ids(t, plain.Train, 0, 80)
	for _, ranks := range [][]int{{1}, {2}, {4}, {1, 2, 4}, {4, 1}} {
		var got []int
		for first := int64(0); first < 80; first += batch { // a step, each at another number of ranks and newly opened
			n := ranks[int(first/batch)%len(ranks)]
			src := open(t, cfg).Train
			for rank := range n {
				got = append(got, ids(t, src, first+int64(rank*batch/n), batch/n)...)
			}
		}
		if !slices.Equal(got, want) {
			t.Errorf("ranks %v: %v, want %v", ranks, got, want)
		}
	}
	for e := 0; e < 80; e += 16 {
		if !isPermutation(want[e:e+16], 0, 16) {
			t.Errorf("epoch %d: %v", e/16, want[e:e+16])
		}
		for f := 0; f < e; f += 16 {
			if slices.Equal(want[e:e+16], want[f:f+16]) {
				t.Errorf("epochs %d and %d have one order", f/16, e/16)
			}
		}
	}
	cfg.Seed++
	if slices.Equal(ids(t, open(t, cfg).Train, 0, 16), want[:16]) {
		t.Error("another seed, the same order")
	}
}

// Batches may straddle epochs, and the size of a read changes nothing.
func TestReadIsRandomAccess(t *testing.T) {
	for name, cfg := range map[string]OpenConfig{
		"joined":   {Sources: []SourceConfig{numbered(t, "a.bin", 0, 7), numbered(t, "b.bin", 100, 5)}},
		"weighted": {Sources: []SourceConfig{numbered(t, "a.bin", 0, 7), numbered(t, "b.bin", 100, 5)}},
		"isolated": {Sources: []SourceConfig{{Path: write(t, "d.jsonl", []byte("{\"text\":\"abcdefg\"}\n{\"text\":\"h\"}\n{\"text\":\"ijk\"}"))}}, Pack: PackConfig{Isolate: true}},
	} {
		cfg.Len = 4
		if name == "weighted" {
			cfg.Sources[0].Weight, cfg.Sources[1].Weight = 1, 2
		}
		src := open(t, cfg).Train
		for _, first := range []int64{0, 5, 1e15, math.MaxInt64 - 40} {
			var all, one Batch
			if err := src.Read(t.Context(), first, 40, &all); err != nil {
				t.Fatal(err)
			}
			starts := slices.Clone(all.Starts)
			for r := range 40 {
				if err := src.Read(t.Context(), first+int64(r), 1, &one); err != nil {
					t.Fatal(err)
				}
				row := Batch{Seqs: 1, Len: 4, Tokens: all.Tokens[4*r : 4*r+4], Targets: all.Targets[4*r : 4*r+4],
					Weight: all.Weight[4*r : 4*r+4], Valid: all.Valid[r : r+1]}
				for len(starts) > 0 && int(starts[0]) < 4*r+4 {
					row.Starts = append(row.Starts, starts[0]-int32(4*r))
					starts = starts[1:]
				}
				if !reflect.DeepEqual(row, one) {
					t.Fatalf("%s: sample %d: %+v alone, %+v among others", name, first+int64(r), one, row)
				}
			}
		}
	}
}

func TestSourcesWithoutWeightsAreOne(t *testing.T) {
	cfg := OpenConfig{Sources: []SourceConfig{numbered(t, "a.bin", 0, 9), numbered(t, "b.bin", 9, 3)}, Len: 4}
	c := open(t, cfg)
	if n := c.Train.Samples(); n != 12 {
		t.Fatalf("%d samples", n)
	}
	for e := range int64(3) {
		if got := ids(t, c.Train, 12*e, 12); !isPermutation(got, 0, 12) {
			t.Errorf("epoch %d: %v", e, got)
		}
	}
	if s := c.Report.Sources; s[0].Share != 0.75 || s[1].Share != 0.25 {
		t.Errorf("shares %v %v", s[0].Share, s[1].Share)
	}
}

func TestWeightedSources(t *testing.T) {
	a, b := numbered(t, "a.bin", 0, 10), numbered(t, "b.bin", 100, 4)
	a.Weight, b.Weight = 3, 1
	c := open(t, OpenConfig{Sources: []SourceConfig{a, b}, Len: 4, Seed: 9})
	if s := c.Report.Sources; s[0].Share != 0.75 || s[1].Share != 0.25 || c.Train.Samples() != 14 {
		t.Errorf("shares %v %v, %d samples", s[0].Share, s[1].Share, c.Train.Samples())
	}
	var first, second []int
	for i, id := range ids(t, c.Train, 0, 160) {
		if id < 100 {
			first = append(first, id)
		} else {
			second = append(second, id)
		}
		if n := float64(i+1) * 3 / 4; math.Abs(float64(len(first))-n) > 1 {
			t.Fatalf("%d of %d samples are of the source with weight 3 of 4", len(first), i+1)
		}
	}
	for i := 0; i < 120; i += 10 { // each source has its own epochs
		if !isPermutation(first[i:i+10], 0, 10) {
			t.Errorf("first source, epoch %d: %v", i/10, first[i:i+10])
		}
	}
	for i := 0; i < 40; i += 4 {
		if !isPermutation(second[i:i+4], 100, 4) {
			t.Errorf("second source, epoch %d: %v", i/4, second[i:i+4])
		}
	}
}

func TestSplit(t *testing.T) {
	dir := t.TempDir()
	for i := range 40 {
		write(t, filepath.Join(dir, fmt.Sprintf("%02d.txt", i)), []byte(fmt.Sprintf("document %02d, all of it;", i)))
	}
	one := write(t, "one.txt", []byte(strings.Repeat("0123456789", 100)))
	for _, isolate := range []bool{false, true} {
		c := open(t, OpenConfig{Sources: []SourceConfig{{Path: filepath.Join(dir, "*.txt")}, {Path: one}}, Val: ValConfig{Share: 0.1}, Pack: PackConfig{Isolate: isolate}, Len: 7})
		// Every token is a target of one split, or the first of a split (isolated: of a document), or both splits'
		// inputs, and the text of the two together is the text.
		r := c.Report.Sources
		if r[0].Tokens != 40*24 || r[1].Tokens != 1001 {
			t.Fatalf("tokens %d %d", r[0].Tokens, r[1].Tokens)
		}
		for _, s := range r {
			if s.TrainTargets+s.ValTargets+s.FirstTokens+s.Dropped != s.Tokens {
				t.Errorf("isolate %t: report does not add up: %+v", isolate, s)
			}
		}
		valFirst := map[bool][]int64{false: {95, 100}, true: {92, 100}}[isolate] // 4 documents of 24; 101 tokens of the one text
		if r[0].ValTargets != valFirst[0] || r[1].ValTargets != valFirst[1] {
			t.Errorf("isolate %t: %d and %d targets to validate", isolate, r[0].ValTargets, r[1].ValTargets)
		}
		got := map[string]int{}
		for name, src := range map[string]Source{"train": c.Train, "val": c.Val} {
			var b Batch
			if err := src.Read(t.Context(), 0, int(src.Samples()), &b); err != nil {
				t.Fatal(err)
			}
			for row := range b.Seqs {
				got[name+" targets"] += int(b.Valid[row])
				rowText := byteTokenizer{}.Decode(b.Targets[row*b.Len:][:b.Valid[row]])
				for d := range 40 {
					if strings.Contains(rowText, fmt.Sprintf("t %02d,", d)) && (d >= 36) != (name == "val") {
						t.Errorf("document %d is in %s", d, name)
					}
				}
			}
		}
		if got["train targets"] != int(r[0].TrainTargets+r[1].TrainTargets) || got["val targets"] != int(r[0].ValTargets+r[1].ValTargets) {
			t.Errorf("isolate %t: read %v, report %+v", isolate, got, r)
		}
	}
	// One text: validation is its end, and together they are all of it.
	c := open(t, OpenConfig{Sources: []SourceConfig{{Path: one}}, Val: ValConfig{Share: 0.1}, Len: 9})
	var b Batch
	if err := c.Train.Read(t.Context(), 0, int(c.Train.Samples()), &b); err != nil {
		t.Fatal(err)
	}
	sum := 0
	for i, w := range b.Weight {
		if w > 0 && (b.Tokens[i]-'0'+1)%10 != b.Targets[i]-'0' {
			t.Fatalf("%c is followed by %c", b.Tokens[i], b.Targets[i])
		}
		sum += int(w)
	}
	if want := strings.Repeat("0123456789", 10); sum != 899 || text(t, c.Val) != want {
		t.Errorf("%d targets to train on, validation %q", sum, text(t, c.Val))
	}
}

func TestExplicitValidation(t *testing.T) {
	train, val := write(t, "train.txt", []byte("text to train on")), write(t, "val.txt", []byte("text to validate"))
	c := open(t, OpenConfig{Sources: []SourceConfig{{Path: train}}, Val: ValConfig{Data: []SourceConfig{{Path: val}}}, Pack: PackConfig{DropTail: true}, Len: 5})
	if got := text(t, c.Val); got != "text to validate" { // its tail is not dropped
		t.Errorf("validation %q", got)
	}
	if r := c.Report.Sources; r[0].TrainTargets != 15 || r[0].Dropped != 1 || r[1].ValTargets != 16 || r[1].Dropped != 0 {
		t.Errorf("report %+v", r)
	}
	if c := open(t, OpenConfig{Sources: []SourceConfig{{Path: train}}, Len: 5}); c.Val != nil {
		t.Error("validation from nothing")
	}
}

// P32: sums over the validation text do not depend on how it is cut into batches.
func TestValidationInBatches(t *testing.T) {
	c := open(t, valOnly(write(t, "a.txt", []byte(strings.Repeat("some text. ", 20)))))
	want := 220 // 220 bytes and EOS, less the first
	for _, n := range []int64{1, 2, 4, 7} {
		sum := 0
		for first := int64(0); first < c.Val.Samples(); first += n {
			var b Batch
			if err := c.Val.Read(t.Context(), first, int(min(n, c.Val.Samples()-first)), &b); err != nil {
				t.Fatal(err)
			}
			for _, w := range b.Weight {
				sum += int(w)
			}
		}
		if sum != want {
			t.Errorf("batches of %d: %d targets, want %d", n, sum, want)
		}
	}
}

func TestReadArguments(t *testing.T) {
	c := open(t, OpenConfig{Sources: []SourceConfig{numbered(t, "a.bin", 0, 3)}, Len: 4})
	b := Batch{Starts: []int32{1, 2}, Valid: []int32{1}}
	if err := c.Train.Read(t.Context(), 7, 0, &b); err != nil || b.Seqs != 0 || b.Len != 4 || len(b.Tokens)+len(b.Targets)+len(b.Weight)+len(b.Starts)+len(b.Valid) != 0 {
		t.Errorf("no samples: %+v, %v", b, err)
	}
	for _, a := range [][2]int64{{-1, 1}, {0, -1}, {math.MaxInt64, 1}} {
		if err := c.Train.Read(t.Context(), a[0], int(a[1]), &b); err == nil {
			t.Errorf("samples from %d, %d of them: no error", a[0], a[1])
		}
	}
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	if err := c.Train.Read(ctx, 0, 1, &b); !errors.Is(err, context.Canceled) {
		t.Errorf("cancelled: %v", err)
	}
	if err := c.Close(); err != nil {
		t.Fatal(err)
	}
	if err := c.Train.Read(t.Context(), 0, 1, &b); err == nil {
		t.Error("closed: no error")
	}
}

func TestReadAllocatesNothing(t *testing.T) {
	for _, weight := range []float64{0, 1} {
		a, b := numbered(t, "a.bin", 0, 30), numbered(t, "b.bin", 100, 20)
		a.Weight, b.Weight = weight, weight
		for _, isolate := range []bool{false, true} {
			src := open(t, OpenConfig{Sources: []SourceConfig{a, b}, Pack: PackConfig{Isolate: isolate}, Len: 4}).Train
			var batch Batch
			ctx, first := t.Context(), int64(0)
			if n := testing.AllocsPerRun(20, func() {
				if err := src.Read(ctx, first, 16, &batch); err != nil {
					t.Fatal(err)
				}
				first += 16
			}); n != 0 {
				t.Errorf("weight %v isolate %t: %v allocations", weight, isolate, n)
			}
		}
	}
}

func TestFingerprint(t *testing.T) {
	base := func() OpenConfig {
		return OpenConfig{Sources: []SourceConfig{numbered(t, "a.bin", 1, 60), numbered(t, "b.bin", 2, 50)}, Val: ValConfig{Share: .2},
			Tokenizer: newCharTokenizer([]rune("xyz")), Len: 4, Seed: 1}
	}
	same := open(t, base()) // other files, same content
	want := same.Train.Fingerprint()
	if open(t, base()).Train.Fingerprint() != want || len(want) != 32 {
		t.Fatalf("fingerprint %q differs between equal corpora", want)
	}
	seen := map[string]string{want: "base", same.Val.Fingerprint(): "val"}
	for name, change := range map[string]func(*OpenConfig){
		"seed":      func(c *OpenConfig) { c.Seed = 2 },
		"length":    func(c *OpenConfig) { c.Len = 5 },
		"isolate":   func(c *OpenConfig) { c.Pack.Isolate = true },
		"drop tail": func(c *OpenConfig) { c.Pack.DropTail = true },
		"split":     func(c *OpenConfig) { c.Val.Share = .3 },
		"tokenizer": func(c *OpenConfig) { c.Tokenizer = newCharTokenizer([]rune("wxyz")) },
		"order":     func(c *OpenConfig) { slices.Reverse(c.Sources) },
		"source":    func(c *OpenConfig) { c.Sources = c.Sources[:1] },
		"weights":   func(c *OpenConfig) { c.Sources[0].Weight, c.Sources[1].Weight = 1, 1 },
		"weights 2": func(c *OpenConfig) { c.Sources[0].Weight, c.Sources[1].Weight = 1, 2 },
		"content":   func(c *OpenConfig) { c.Sources[1].Path = write(t, "b.bin", []byte(strings.Repeat("xyzx", 50))) },
	} {
		cfg := base()
		change(&cfg)
		f := open(t, cfg).Train.Fingerprint()
		if other := seen[f]; other != "" {
			t.Errorf("%s: fingerprint of %s", name, other)
		}
		seen[f] = name
	}
}

// The published setting: nanoGPT trains on the first nine tenths of the text and validates on the rest.
func TestShakespeareSplit(t *testing.T) {
	tok, err := NewTokenizer(TokenizerConfig{Kind: KindChar}, []SourceConfig{{Path: "embedded:shakespeare"}})
	if err != nil {
		t.Fatal(err)
	}
	c := open(t, OpenConfig{Sources: []SourceConfig{{Path: "embedded:shakespeare"}}, Val: ValConfig{Share: 0.1}, Tokenizer: tok, Len: 64})
	r := c.Report.Sources[0]
	// 1,115,394 characters and one EOS; nanoGPT has 1,003,854 and 111,540 tokens.
	if r.Tokens != 1115395 || r.TrainTargets != 1003854 || r.ValTargets != 111539 || r.TrainSamples != 15686 || r.ValSamples != 1743 {
		t.Errorf("report %+v", r)
	}
}

func BenchmarkRead(b *testing.B) {
	c := open(b, OpenConfig{Sources: []SourceConfig{{Path: "embedded:shakespeare"}}, Len: 256})
	var batch Batch
	b.SetBytes(16 * 256)
	first := int64(0)
	for b.Loop() {
		if err := c.Train.Read(b.Context(), first, 16, &batch); err != nil {
			b.Fatal(err)
		}
		first += 16
	}
}
