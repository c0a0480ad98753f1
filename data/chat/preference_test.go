package chat

import (
	"fmt"
	"math/rand/v2"
	"slices"
	"strings"
	"testing"

	"moetor/data"
)

// choice is a pair of answers to a prompt.
func choice(prompt, chosen, rejected string) object {
	say := func(role, s string) []object { return []object{{"role": role, "content": s}} }
	return object{"prompt": say("user", prompt), "chosen": say("assistant", chosen), "rejected": say("assistant", rejected)}
}

// judged is an answer with a label.
func judged(prompt, completion string, good bool) object {
	return object{"prompt": prompt, "completion": completion, "label": good}
}

func TestPairs(t *testing.T) {
	cfg := OpenConfig{Sources: []data.SourceConfig{file(t, "p.jsonl", choice("p", "abc", "d"), choice("qqqqqqqqqqqqqqqq", "e", "ff"))}, Len: 64}
	c := opened(t, cfg, OpenPreference)
	if c.Train.Samples() != 4 {
		t.Fatalf("%d samples of 2 pairs", c.Train.Samples())
	}
	b := read(t, c.Scan, 0, 2)
	// user p end assistant a b c [end]: 7 positions in a batch of 16
	if b.Len != 16 || !slices.Equal(b.Tokens[:8], []int32{userID, 'p', endID, asstID, 'a', 'b', 'c', pad}) ||
		!slices.Equal(b.Targets[:8], []int32{'p', endID, asstID, 'a', 'b', 'c', endID, pad}) ||
		!slices.Equal(b.Weight[:8], []float32{0, 0, 0, 1, 1, 1, 1, 0}) ||
		!slices.Equal(b.Weight[16:22], []float32{0, 0, 0, 1, 1, 0}) ||
		!slices.Equal(b.Valid, []int32{7, 5}) || !slices.Equal(b.Starts, []int32{0, 16}) ||
		!slices.Equal(b.IDs, []int64{0, 0}) || !slices.Equal(b.Labels, []int8{1, -1}) || !b.Pairs {
		t.Errorf("%+v", b)
	}
	segments(t, b, pad)
	b = read(t, c.Scan, 0, 4)
	if b.Len != 32 || !slices.Equal(b.IDs, []int64{0, 0, 1, 1}) || !slices.Equal(b.Valid, []int32{7, 5, 20, 21}) {
		t.Errorf("two pairs: length %d, ids %v, valid %v", b.Len, b.IDs, b.Valid)
	}
	// In any epoch both sequences of a pair stand together.
	b = read(t, c.Train, 0, 40)
	for i := 0; i < 40; i += 2 {
		if b.IDs[i] != b.IDs[i+1] || b.Labels[i] != 1 || b.Labels[i+1] != -1 {
			t.Errorf("samples %d and %d: ids %d, %d, labels %d, %d", i, i+1, b.IDs[i], b.IDs[i+1], b.Labels[i], b.Labels[i+1])
		}
	}
	l := c.Report.Sources[0]
	if l.Read != (Count{2, 8 + 6 + 21 + 22}) || l.Train != l.Read || l.Trained != 4+2+2+3 {
		t.Error(l)
	}
	if b := read(t, c.Train, 2, 0); b.Seqs != 0 || !b.Pairs {
		t.Errorf("an empty read gives %+v", b)
	}
	for _, r := range [][2]int64{{0, 3}, {1, 2}, {1, 1}} {
		err := c.Train.Read(t.Context(), r[0], int(r[1]), new(data.Batch))
		if err == nil || !strings.Contains(err.Error(), "parallel.microbatch") {
			t.Errorf("read of %d from %d: %v", r[1], r[0], err)
		}
	}
}

func TestImplicitPairs(t *testing.T) {
	explicit := file(t, "e.jsonl", choice("p", "abc", "d"))
	implicit := file(t, "i.jsonl", object{"chosen": turns("p", "abc"), "rejected": turns("p", "d")})
	a := opened(t, OpenConfig{Sources: []data.SourceConfig{explicit}, Len: 64}, OpenPreference)
	b := opened(t, OpenConfig{Sources: []data.SourceConfig{implicit}, Len: 64}, OpenPreference)
	if !slices.Equal(texts(t, a.Train), texts(t, b.Train)) || b.Report.Sources[0].Shape != PreferenceImplicit {
		t.Errorf("%q and %q", texts(t, a.Train), texts(t, b.Train))
	}
}

// pitfalls P30: a context of 10, an answer of 14 and a prompt of 3 leave a trained answer token, or the pair is dropped.
func TestTruncatePairs(t *testing.T) {
	prompt := "123"
	for _, test := range []struct {
		name             string
		chosen, rejected string
		length           int
		truncate         string
		want             []string
		truncated        Count
		long, equal      Count
	}{
		// The prompt is user 1 2 3 end assistant: 6 tokens. Eleven tokens give ten positions.
		{"fits", "abcd", "efg", 10, "", []string{"<|user|>123<|end|><|assistant|>ABCD<|end|>*", "<|user|>123<|end|><|assistant|>EFG<|end|>*"}, Count{}, Count{}, Count{}},
		{"prompt cut", "abcdef", "g", 10, "", []string{"23<|end|><|assistant|>ABCDEF<|end|>*", "23<|end|><|assistant|>G<|end|>*"}, Count{1, 4}, Count{}, Count{}},
		{"answer of 14", "abcdefghijklm", "nop", 10, "", []string{"<|assistant|>ABCDEFGHIJ", "<|assistant|>NOP<|end|>*"}, Count{1, 14}, Count{}, Count{}},
		{"answer of 14, drop", "abcdefghijklm", "nop", 10, TruncateDrop, nil, Count{}, Count{1, 20 + 10}, Count{}},
		{"alike in what fits", "abcdefghijklm", "abcdefghijxyz", 10, "", nil, Count{}, Count{}, Count{1, 40}},
		{"least context", "abc", "de", 2, "", []string{"<|assistant|>AB", "<|assistant|>DE"}, Count{1, 13}, Count{}, Count{}},
	} {
		keep := choice("k", "l", "m") // so that something is left
		cfg := OpenConfig{Sources: []data.SourceConfig{file(t, "p.jsonl", choice(prompt, test.chosen, test.rejected), keep)}, Len: test.length,
			Chat: Config{Truncate: test.truncate}}
		c := opened(t, cfg, OpenPreference)
		got := texts(t, c.Scan)
		l := c.Report.Sources[0]
		if test.length >= 5 { // keep is whole
			got = got[:len(got)-2]
		} else {
			got = got[:2]
			l.Truncated.Examples--
			l.Truncated.Tokens -= 6
		}
		if !slices.Equal(got, test.want) && len(got)+len(test.want) > 0 {
			t.Errorf("%s: %q, want %q", test.name, got, test.want)
		}
		if l.Truncated != test.truncated || l.Long != test.long || l.Equal != test.equal {
			t.Errorf("%s: %s", test.name, l)
		}
	}
}

// Of all pairs in all contexts: an answer token is trained in each sequence, both prompts are equal, and no token is lost.
func TestPairsConserveTokens(t *testing.T) {
	rng := rand.New(rand.NewPCG(9, 10))
	word := func() string { return strings.Repeat(string(rune('a'+rng.IntN(3))), 1+rng.IntN(20)) }
	for range 60 {
		var rows []any
		want := Count{}
		for range 2 + rng.IntN(20) {
			p, a, b := word(), word(), word()
			if a == b { // no pair
				continue
			}
			rows = append(rows, choice(p, a, b))
			want.add(int64(2*len(p) + 6 + len(a) + len(b) + 2))
		}
		rows = append(rows, choice("k", "x", "y"))
		want.add(12)
		length := 2 + rng.IntN(40)
		how := []string{TruncateHead, TruncateDrop}[rng.IntN(2)]
		if length < 5 {
			how = TruncateHead
		}
		cfg := OpenConfig{Sources: []data.SourceConfig{file(t, "p.jsonl", rows...)}, Len: length, Chat: Config{Truncate: how}}
		c := opened(t, cfg, OpenPreference)
		b := read(t, c.Train, 0, int(c.Train.Samples()))
		if b.Len > length || b.Len%16 != 0 && b.Len != length {
			t.Fatalf("context %d: a batch of length %d", length, b.Len)
		}
		placed, trained, prompts := int64(0), int64(0), [2][]int32{}
		for i, s := range segments(t, b, pad) {
			n := slices.Index(s.weight, 1)
			if n < 0 || slices.Contains(s.weight[n:], 0) {
				t.Fatalf("context %d: weights %v", length, s.weight)
			}
			placed += int64(len(s.tokens)) + 1
			trained += int64(len(s.weight) - n)
			prompts[i%2] = s.tokens[:n+1]
			if i%2 == 1 && !slices.Equal(prompts[0], prompts[1]) {
				t.Fatalf("context %d: prompts %v", length, prompts)
			}
		}
		l := c.Report.Sources[0]
		d := l.Dropped()
		if l.Read != want || l.Placed().Tokens != placed || l.Trained != trained || l.Read.Tokens != placed+l.Truncated.Tokens+d.Tokens ||
			l.Read.Examples != int64(b.Seqs/2)+d.Examples || l.Masked != placed-trained {
			t.Fatalf("context %d: read %v, placed %d, trained %d: %s", length, want, placed, trained, l)
		}
	}
}

func TestSeveralTurnsAnswer(t *testing.T) {
	// Turns of the assistant in the prompt are not trained; in the answer a tool's turn is not.
	row := object{"prompt": turns("a", "b", "c"),
		"chosen":   []object{{"role": "assistant", "content": "d"}, {"role": "tool", "content": "e"}, {"role": "assistant", "content": "f"}},
		"rejected": []object{{"role": "assistant", "content": "g"}}}
	jinja := file(t, "tokenizer_config.json", object{"bos_token": "<eos>", "chat_template": "{{ bos_token }}{% for m in messages %}" +
		"{{ '<|' + m.role + '|>' + m.content + '<|end|>' }}{% endfor %}{% if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"}).Path
	for _, template := range []string{BuiltinTemplate, ChatMLTemplate, jinja} {
		c := opened(t, OpenConfig{Sources: []data.SourceConfig{file(t, "p.jsonl", row)}, Len: 128, Chat: Config{Template: template}}, OpenPreference)
		want := []string{"<|user|>a<|end|><|assistant|>b<|end|><|user|>c<|end|><|assistant|>D<|end|>*<|tool|>e<|end|><|assistant|>F<|end|>*",
			"<|user|>a<|end|><|assistant|>b<|end|><|user|>c<|end|><|assistant|>G<|end|>*"}
		if template == jinja {
			want = []string{"<eos>" + want[0], "<eos>" + want[1]}
		}
		if template == ChatMLTemplate {
			for i := range want {
				for _, role := range []string{"user", "assistant", "tool"} {
					want[i] = strings.ReplaceAll(want[i], "<|"+role+"|>", "<|reserved|>"+role+"\n")
				}
				want[i] = strings.ReplaceAll(want[i], "<|end|><", "<|end|>\n<")
				want[i] = strings.ReplaceAll(want[i], "<|end|>*<", "<|end|>*\n<")
			}
		}
		if got := texts(t, c.Scan); !slices.Equal(got, want) {
			t.Errorf("%s: %q, want %q", template, got, want)
		}
	}
}

func TestUnpaired(t *testing.T) {
	var rows []any
	for i := range 9 {
		rows = append(rows, judged(fmt.Sprintf("prompt %d", i/2), fmt.Sprintf("answer %d", i), i%3 == 0))
	}
	c := opened(t, OpenConfig{Sources: []data.SourceConfig{file(t, "u.jsonl", rows...)}, Len: 64, Seed: 5}, OpenUnpaired)
	if c.Train.Samples() != 9 {
		t.Fatalf("%d samples", c.Train.Samples())
	}
	b := read(t, c.Scan, 0, 9)
	if b.Pairs || !slices.Equal(b.Labels, []int8{1, -1, -1, 1, -1, -1, 1, -1, -1}) {
		t.Errorf("pairs %t labels %v", b.Pairs, b.Labels)
	}
	got, other := texts(t, c.Scan), texts(t, c.ScanMismatch)
	used := make(map[string]int)
	for i, s := range got {
		prompt, answer, _ := strings.Cut(s, "<|assistant|>")
		if want := fmt.Sprintf("<|user|>prompt %d<|end|>", i/2); prompt != want || answer != fmt.Sprintf("ANSWER %d<|end|>*", i) {
			t.Errorf("sample %d: %s", i, s)
		}
		mp, ma, _ := strings.Cut(other[i], "<|assistant|>")
		var j int
		if _, err := fmt.Sscanf(ma, "ANSWER %d<|end|>*", &j); err != nil || mp != prompt || j/2 == i/2 {
			t.Errorf("mismatch of sample %d: %s (%v)", i, other[i], err)
		}
		used[ma]++
	}
	if len(used) < 5 {
		t.Errorf("mismatched answers %v", used)
	}
	// Both sources go through the same order.
	for _, n := range []int{1, 3, 20} {
		a, b := read(t, c.Train, 11, n), read(t, c.Mismatch, 11, n)
		if !slices.Equal(a.IDs, b.IDs) || !slices.Equal(a.Labels, b.Labels) {
			t.Errorf("ids %v beside %v", a.IDs, b.IDs)
		}
	}
	_, err := OpenUnpaired(t.Context(), OpenConfig{Sources: []data.SourceConfig{file(t, "u.jsonl", judged("a", "b", true), judged("a", "c", false))},
		Len: 64, Tokenizer: bytesTok(t), At: "stages.2"})
	if err == nil || !strings.Contains(err.Error(), "stages.2.data: all 2 examples have one prompt") {
		t.Error(err)
	}
}

func TestUnpairedOfPairs(t *testing.T) {
	c := opened(t, OpenConfig{Sources: []data.SourceConfig{file(t, "p.jsonl", choice("p", "a", "b"), choice("q", "c", "d"))}, Len: 64}, OpenUnpaired)
	want := []string{"<|user|>p<|end|><|assistant|>A<|end|>*", "<|user|>p<|end|><|assistant|>B<|end|>*",
		"<|user|>q<|end|><|assistant|>C<|end|>*", "<|user|>q<|end|><|assistant|>D<|end|>*"}
	if got := texts(t, c.Scan); !slices.Equal(got, want) {
		t.Errorf("%q", got)
	}
	b := read(t, c.Scan, 0, 4)
	if !slices.Equal(b.Labels, []int8{1, -1, 1, -1}) || !slices.Equal(b.IDs, []int64{0, 1, 2, 3}) || b.Pairs {
		t.Errorf("%+v", b)
	}
}

func TestScore(t *testing.T) {
	src := file(t, "p.jsonl", choice("p", "abc", "d"), choice("q", "efghijklmnopqrst", "u"))
	c := opened(t, OpenConfig{Sources: []data.SourceConfig{src}, Len: 12, Score: true}, OpenPreference)
	b := read(t, c.Scan, 0, 4)
	// All tokens are inputs: user p end assistant a b c end. The longer answer is cut to what fits 12.
	if !slices.Equal(b.Tokens[:9], []int32{userID, 'p', endID, asstID, 'a', 'b', 'c', endID, pad}) || b.Targets[7] != eos ||
		!slices.Equal(b.Valid, []int32{8, 6, 12, 3}) || b.Len != 12 {
		t.Errorf("length %d, valid %v, tokens %v, targets %v", b.Len, b.Valid, b.Tokens, b.Targets)
	}
	for r, n := range b.Valid {
		for i := range b.Len {
			if want := float32(0); i == int(n)-1 && b.Weight[r*b.Len+i] != 1 || i != int(n)-1 && b.Weight[r*b.Len+i] != want {
				t.Errorf("sequence %d of %d tokens: weight %v at %d", r, n, b.Weight[r*b.Len+i], i)
			}
		}
	}
	if l := c.Report.Sources[0]; l.Trained != 4 || l.Read.Tokens != l.Placed().Tokens+l.Truncated.Tokens {
		t.Error(l)
	}
}
