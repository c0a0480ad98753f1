package chat

import (
	"context"
	"encoding/json"
	"fmt"
	"math/rand/v2"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"moetor/data"
)

// Special ids of the byte tokenizer.
const (
	eos = 256 + iota
	pad
	sysID
	userID
	asstID
	toolID
	endID
)

func bytesTok(t testing.TB) data.Tokenizer {
	t.Helper()
	tok, err := data.NewTokenizer(data.TokenizerConfig{Kind: data.KindByte}, nil)
	if err != nil {
		t.Fatal(err)
	}
	return tok
}

// file writes one object per line and returns the source.
func file(t testing.TB, name string, rows ...any) data.SourceConfig {
	t.Helper()
	var s strings.Builder
	for _, r := range rows {
		b, err := json.Marshal(r)
		if err != nil {
			t.Fatal(err)
		}
		s.Write(b)
		s.WriteByte('\n')
	}
	path := filepath.Join(t.TempDir(), name)
	if err := os.WriteFile(path, []byte(s.String()), 0o666); err != nil {
		t.Fatal(err)
	}
	return data.SourceConfig{Path: path}
}

type object = map[string]any

// turns makes the messages of texts, of a user and the assistant in turn.
func turns(texts ...string) []object {
	var out []object
	for i, s := range texts {
		out = append(out, object{"role": []string{"user", "assistant"}[i%2], "content": s})
	}
	return out
}

func talk(texts ...string) object { return object{"messages": turns(texts...)} }

func instruct(t testing.TB, cfg OpenConfig) *Corpus {
	t.Helper()
	return opened(t, cfg, OpenInstruct)
}

func opened(t testing.TB, cfg OpenConfig, open func(context.Context, OpenConfig) (*Corpus, error)) *Corpus {
	t.Helper()
	if cfg.Tokenizer == nil {
		cfg.Tokenizer = bytesTok(t)
	}
	c, err := open(t.Context(), cfg)
	if err != nil {
		t.Fatal(err)
	}
	return c
}

func read(t testing.TB, src data.Source, first int64, n int) *data.Batch {
	t.Helper()
	b := new(data.Batch)
	if err := src.Read(t.Context(), first, n, b); err != nil {
		t.Fatal(err)
	}
	return b
}

// A segment is what a batch has between two bounds.
type segment struct {
	row             int
	tokens, targets []int32
	weight          []float32
}

// text writes the segment's tokens, and the last target: special tokens by name, trained ones in upper case or with a star.
func (s segment) text(tok data.Tokenizer) string {
	var out strings.Builder
	put := func(id int32, trained bool) {
		switch name := tok.Special(id); {
		case name != "" && trained:
			out.WriteString(name + "*")
		case name != "":
			out.WriteString(name)
		case trained:
			out.WriteString(strings.ToUpper(tok.Decode([]int32{id})))
		default:
			out.WriteString(tok.Decode([]int32{id}))
		}
	}
	put(s.tokens[0], false)
	for i, id := range s.targets {
		put(id, s.weight[i] != 0)
	}
	return out.String()
}

// segments takes a batch apart and checks what holds for every batch of packed or single sequences.
func segments(t testing.TB, b *data.Batch, padID int32) []segment {
	t.Helper()
	if len(b.Tokens) != b.Seqs*b.Len || len(b.Targets) != b.Seqs*b.Len || len(b.Weight) != b.Seqs*b.Len ||
		len(b.Valid) != b.Seqs || len(b.IDs) != b.Seqs {
		t.Fatalf("%d rows of %d: %d tokens, %d targets, %d weights, %d valid, %d ids", b.Seqs, b.Len, len(b.Tokens), len(b.Targets),
			len(b.Weight), len(b.Valid), len(b.IDs))
	}
	var out []segment
	for i, from := range b.Starts {
		row := int(from) / b.Len
		if (i == 0 || int(b.Starts[i-1])/b.Len != row) && int(from) != row*b.Len {
			t.Fatalf("row %d begins with a segment at %d", row, int(from)-row*b.Len)
		}
		to := row*b.Len + int(b.Valid[row])
		if i+1 < len(b.Starts) {
			to = min(to, int(b.Starts[i+1]))
		}
		s := segment{row, b.Tokens[from:to], b.Targets[from:to], b.Weight[from:to]}
		for k, id := range s.tokens[min(1, len(s.tokens)):] {
			if s.targets[k] != id {
				t.Fatalf("segment %d: target %d at position %d before token %d", i, s.targets[k], k, id)
			}
		}
		out = append(out, s)
	}
	for r := range b.Seqs {
		for i := r*b.Len + int(b.Valid[r]); i < (r+1)*b.Len; i++ {
			if b.Tokens[i] != padID || b.Targets[i] != padID || b.Weight[i] != 0 {
				t.Fatalf("row %d: padding of %d, %d, weight %v", r, b.Tokens[i], b.Targets[i], b.Weight[i])
			}
		}
	}
	return out
}

// texts are the segments of all samples of a source's first epoch as text.
func texts(t testing.TB, src data.Source) []string {
	t.Helper()
	tok := bytesTok(t)
	var out []string
	for _, s := range segments(t, read(t, src, 0, int(src.Samples())), pad) {
		out = append(out, s.text(tok))
	}
	return out
}

func TestInstructRow(t *testing.T) {
	c := instruct(t, OpenConfig{Sources: []data.SourceConfig{file(t, "a.jsonl", talk("a", "bc"), talk("d", "e"))}, Len: 12,
		Chat: Config{Pack: PackSequential}})
	b := read(t, c.Train, 0, 1)
	want := data.Batch{Seqs: 1, Len: 12,
		// user a end assistant b c [end] | user d end assistant e [end] | pad
		Tokens:  []int32{userID, 'a', endID, asstID, 'b', 'c', userID, 'd', endID, asstID, 'e', pad},
		Targets: []int32{'a', endID, asstID, 'b', 'c', endID, 'd', endID, asstID, 'e', endID, pad},
		Weight:  []float32{0, 0, 0, 1, 1, 1, 0, 0, 0, 1, 1, 0},
		Starts:  []int32{0, 6}, Valid: []int32{11}, IDs: []int64{0}}
	if fmt.Sprint(*b) != fmt.Sprint(want) {
		t.Errorf("got  %+v\nwant %+v", *b, want)
	}
	if c.Report.TrainRows != 1 || c.Report.TrainFill != 11./12 {
		t.Errorf("%d rows filled to %v", c.Report.TrainRows, c.Report.TrainFill)
	}
	l := c.Report.Sources[0]
	if l.Read != (Count{2, 13}) || l.Train != (Count{2, 13}) || l.Trained != 5 || l.Masked != 8 || l.Shape != Messages {
		t.Errorf("%+v", l)
	}
}

func TestTrainOn(t *testing.T) {
	src := file(t, "a.jsonl", object{"messages": append([]object{{"role": "system", "content": "s"}}, turns("a", "b", "c", "d", "e")...)})
	for how, want := range map[string]string{
		"":             "<|system|>s<|end|><|user|>a<|end|><|assistant|>B<|end|>*<|user|>c<|end|><|assistant|>D<|end|>*<|user|>e<|end|>",
		TrainAssistant: "<|system|>s<|end|><|user|>a<|end|><|assistant|>B<|end|>*<|user|>c<|end|><|assistant|>D<|end|>*<|user|>e<|end|>",
		TrainLast:      "<|system|>s<|end|><|user|>a<|end|><|assistant|>b<|end|><|user|>c<|end|><|assistant|>D<|end|>*<|user|>e<|end|>",
		TrainAll: "<|system|>S<|end|>*<|user|>*A<|end|>*<|assistant|>*B<|end|>*<|user|>*C<|end|>*<|assistant|>*D<|end|>*" +
			"<|user|>*E<|end|>*",
	} {
		c := instruct(t, OpenConfig{Sources: []data.SourceConfig{src}, Len: 32, Chat: Config{TrainOn: how}})
		if got := texts(t, c.Train); !slices.Equal(got, []string{want}) {
			t.Errorf("train_on=%s:\n%s\nwant\n%s", how, got, want)
		}
	}
}

// endIsPad is a tokenizer that pads with the token that ends documents and turns.
type endIsPad struct{ data.Tokenizer }

func (endIsPad) Pad() int32 { return endID }
func (endIsPad) EOS() int32 { return endID }

// pitfalls P28: with the pad id equal to the end id, each turn of the assistant has its end token trained, and padding none.
func TestEndTokenTrainedWherePadIsEnd(t *testing.T) {
	for _, template := range []string{BuiltinTemplate, ChatMLTemplate} {
		c := instruct(t, OpenConfig{Sources: []data.SourceConfig{file(t, "a.jsonl", talk("a", "b", "c", "d"))}, Len: 64,
			Chat: Config{Template: template}, Tokenizer: endIsPad{bytesTok(t)}})
		b := read(t, c.Train, 0, 1)
		segments(t, b, endID)
		trained, untrained := 0, 0
		for i, id := range b.Targets {
			switch {
			case id == endID && b.Weight[i] == 1:
				trained++
				if at := b.Tokens[i]; at != 'b' && at != 'd' {
					t.Errorf("%s: the end token after %d is trained", template, at)
				}
			case id == endID && i < int(b.Valid[0]):
				untrained++
			}
		}
		if trained != 2 || untrained != 2 {
			t.Errorf("%s: %d end tokens trained and %d not, want 2 of the assistant and 2 of the user", template, trained, untrained)
		}
	}
}

func TestTruncateConversations(t *testing.T) {
	// Tokens: 16 with an early and a late answer, 8, 13 with a late answer only, 9 with an early answer only.
	src := file(t, "a.jsonl", talk("a", "bc", "defg", "h"), talk("i", "jkl"), talk("mnopqrst", "u"), talk("v", "w", "x"))
	for _, test := range []struct {
		how             string
		want            []string
		truncated, long Count
		untrained       Count
	}{
		{TruncateTail, []string{"<|user|>a<|end|><|assistant|>BC<|end|>*<|user|>d", "<|user|>i<|end|><|assistant|>JKL<|end|>*",
			"<|user|>v<|end|><|assistant|>W<|end|>*<|user|>x<|end|>"}, Count{1, 7}, Count{}, Count{1, 13}},
		{TruncateHead, []string{"<|user|>defg<|end|><|assistant|>H<|end|>*", "<|user|>i<|end|><|assistant|>JKL<|end|>*",
			"pqrst<|end|><|assistant|>U<|end|>*", "<|user|>v<|end|><|assistant|>W<|end|>*<|user|>x<|end|>"}, Count{2, 11}, Count{}, Count{}},
		{TruncateDrop, []string{"<|user|>i<|end|><|assistant|>JKL<|end|>*", "<|user|>v<|end|><|assistant|>W<|end|>*<|user|>x<|end|>"},
			Count{}, Count{2, 29}, Count{}},
	} {
		c := instruct(t, OpenConfig{Sources: []data.SourceConfig{src}, Len: 8, Chat: Config{Truncate: test.how, Pack: PackNone}})
		if got := texts(t, c.Scan); !slices.Equal(got, test.want) {
			t.Errorf("%s: %q, want %q", test.how, got, test.want)
		}
		l := c.Report.Sources[0]
		if l.Truncated != test.truncated || l.Long != test.long || l.Untrained != test.untrained {
			t.Errorf("%s: %s", test.how, l)
		}
	}
}

// byHand is what a conversation looks like by the definition of the built-in template; trained tokens are marked as in text.
func byHand(texts []string, how string) (ids []int32, trained []bool) {
	last := len(texts) - 1 - len(texts)%2
	for i, s := range texts {
		role, answer := int32(userID), i%2 == 1
		if answer {
			role = asstID
		}
		on := answer && (how != TrainLast || i == last)
		ids, trained = append(ids, role), append(trained, how == TrainAll)
		for j := range len(s) {
			ids, trained = append(ids, int32(s[j])), append(trained, on || how == TrainAll)
		}
		ids, trained = append(ids, endID), append(trained, on || how == TrainAll)
	}
	return ids, trained
}

// The ledger against what is in the batches and what a listing by hand says, over all settings.
func TestLedgerConservesTokens(t *testing.T) {
	rng := rand.New(rand.NewPCG(7, 8))
	for round := range 120 {
		cfg := Config{TrainOn: []string{TrainAssistant, TrainLast, TrainAll}[rng.IntN(3)],
			Pack:     []string{PackFFD, PackSequential, PackNone}[rng.IntN(3)],
			Truncate: []string{TruncateTail, TruncateHead, TruncateDrop}[rng.IntN(3)]}
		length := 8 + rng.IntN(30)
		var rows []any
		want := make(map[string]int) // segments as text, with how often they occur
		var sum Ledger
		tok := bytesTok(t)
		for range 1 + rng.IntN(40) {
			var said []string
			for range 2 + rng.IntN(4) {
				said = append(said, strings.Repeat(string(rune('a'+rng.IntN(26))), 1+rng.IntN(12)))
			}
			rows = append(rows, talk(said...))
			ids, trained := byHand(said, cfg.TrainOn)
			sum.Read.add(int64(len(ids)))
			if over := len(ids) - length - 1; over > 0 {
				switch cfg.Truncate {
				case TruncateDrop:
					continue
				case TruncateTail:
					ids, trained = ids[:length+1], trained[:length+1]
				case TruncateHead:
					ids, trained = ids[over:], trained[over:]
				}
			}
			s := segment{tokens: ids[:len(ids)-1], targets: ids[1:]}
			any := false
			for _, on := range trained[1:] {
				w := float32(0)
				if on {
					w, any = 1, true
				}
				s.weight = append(s.weight, w)
			}
			if any {
				want[s.text(tok)]++
			}
		}
		if len(want) == 0 {
			continue
		}
		var val data.ValConfig
		if round%2 == 0 && len(want) > 10 {
			val.Share = 0.3
		}
		c := instruct(t, OpenConfig{Sources: []data.SourceConfig{file(t, "a.jsonl", rows...)}, Val: val, Len: length, Chat: cfg, Seed: uint64(round)})
		l := c.Report.Sources[0]
		var placed, trained, examples int64
		for _, src := range []data.Source{c.Train, c.Val} {
			if src == nil {
				continue
			}
			for _, s := range segments(t, read(t, src, 0, int(src.Samples())), pad) {
				want[s.text(tok)]--
				examples++
				placed += int64(len(s.tokens)) + 1
				for _, w := range s.weight {
					trained += int64(w)
				}
			}
		}
		for text, n := range want {
			if n != 0 {
				t.Fatalf("%+v length %d: %d too few of %s", cfg, length, n, text)
			}
		}
		dropped := l.Dropped()
		if l.Read != sum.Read || l.Placed() != (Count{examples, placed}) || l.Trained != trained || l.Trained+l.Masked != placed ||
			l.Read.Examples != examples+dropped.Examples || l.Read.Tokens != placed+l.Truncated.Tokens+dropped.Tokens {
			t.Fatalf("%+v length %d: read %v, in batches %d examples, %d tokens, %d trained: %s", cfg, length, sum.Read, examples, placed, trained, l)
		}
	}
}

// pitfalls P26 with tokens: conversations of 10, 8, 9 and 7 tokens in rows of 9 positions, which hold ten tokens.
func TestPackedTokens(t *testing.T) {
	src := file(t, "a.jsonl", talk("abcd", "ef"), talk("gh", "ij"), talk("kl", "mno"), talk("p", "qr"), talk("", "s"), talk("", "t"))
	c := instruct(t, OpenConfig{Sources: []data.SourceConfig{src}, Len: 9})
	l := c.Report.Sources[0]
	if l.Placed() != (Count{6, 10 + 8 + 9 + 7 + 5 + 5}) || l.Dropped() != (Count{}) || l.Truncated != (Count{}) {
		t.Error(l)
	}
	if c.Train.Samples() != 5 || c.Report.TrainFill != 38./45 { // 9, 8, 7, 6 and 4+4
		t.Errorf("%d rows filled to %v", c.Train.Samples(), c.Report.TrainFill)
	}
}

// pitfalls P27, the data's side: what shares a row does not change a conversation's tokens, targets or weights.
func TestPackedNeighboursDoNotShow(t *testing.T) {
	all := func(a string) []string {
		c := instruct(t, OpenConfig{Sources: []data.SourceConfig{file(t, "a.jsonl", talk("q", a), talk("x", "yz"), talk("u", "v"))}, Len: 40})
		if c.Train.Samples() != 1 {
			t.Fatalf("%d rows", c.Train.Samples())
		}
		got := texts(t, c.Train)
		slices.Sort(got)
		return got
	}
	a, b := all("aaaa"), all("bbbbbb")
	if !slices.Equal(a[1:], b[1:]) || a[0] == b[0] || len(a) != 3 {
		t.Errorf("%q and %q", a, b)
	}
}

func TestRowsOncePerEpochOnAnyRanks(t *testing.T) {
	var rows []any
	for i := range 23 {
		rows = append(rows, talk(fmt.Sprint("question ", i), strings.Repeat("x", i%7)+"."))
	}
	c := instruct(t, OpenConfig{Sources: []data.SourceConfig{file(t, "a.jsonl", rows...)}, Len: 50, Seed: 3})
	n := c.Train.Samples()
	orders := make([][]int64, 2)
	for epoch := range orders {
		seen := make(map[int64]bool)
		for first := int64(0); first < n; first++ {
			b := read(t, c.Train, int64(epoch)*n+first, 1)
			seen[b.IDs[0]] = true
			orders[epoch] = append(orders[epoch], b.IDs[0])
		}
		if int64(len(seen)) != n {
			t.Errorf("epoch %d has %d of %d rows", epoch, len(seen), n)
		}
	}
	if slices.Equal(orders[0], orders[1]) || slices.IsSorted(orders[0]) {
		t.Errorf("orders %v", orders)
	}
	whole := read(t, c.Train, 0, int(n))
	if !slices.Equal(whole.IDs, orders[0]) {
		t.Errorf("%v in one read, %v row by row", whole.IDs, orders[0])
	}
	for r := range int(n) {
		one := read(t, c.Train, int64(r), 1)
		if !slices.Equal(one.Tokens, whole.Tokens[r*50:(r+1)*50]) || !slices.Equal(one.Weight, whole.Weight[r*50:(r+1)*50]) {
			t.Errorf("row %d differs alone", r)
		}
		if s := read(t, c.Scan, one.IDs[0], 1); s.IDs[0] != one.IDs[0] || !slices.Equal(s.Tokens, one.Tokens) {
			t.Errorf("row %d of Scan is not that of Train", one.IDs[0])
		}
	}
	if b := read(t, c.Train, 5, 0); b.Seqs != 0 || len(b.Starts) != 0 {
		t.Errorf("an empty read gives %+v", b)
	}
}

func TestWarmReadAllocatesNothing(t *testing.T) {
	c := instruct(t, OpenConfig{Sources: []data.SourceConfig{file(t, "a.jsonl", talk("a", "b"), talk("c", "d"), talk("e", "f"))}, Len: 8})
	p := opened(t, OpenConfig{Sources: []data.SourceConfig{file(t, "p.jsonl", choice("q", "a", "b"), choice("r", "c", "d"))}, Len: 8}, OpenPreference)
	for _, src := range []data.Source{c.Train, p.Train} {
		var b data.Batch
		ctx := t.Context()
		if n := testing.AllocsPerRun(20, func() { src.Read(ctx, 0, 2, &b) }); n != 0 {
			t.Errorf("%v allocations", n)
		}
	}
}
