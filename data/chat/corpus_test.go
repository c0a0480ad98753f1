package chat

import (
	"context"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"moetor/data"
)

func TestHoldOut(t *testing.T) {
	keys := func(s string) []promptKey {
		var out []promptKey
		for i := range len(s) {
			out = append(out, promptKey{s[i]})
		}
		return out
	}
	for _, test := range []struct {
		keys  string
		share float64
		want  string // v: validation
	}{
		{"abcdefghij", 0.2, "........vv"},
		{"abcdefghij", 0.24, "........vv"},
		{"abcdefghij", 0.25, ".......vvv"}, // 2 and 3 are equally near
		{"abcdefghij", 0.04, ".........."},
		{"abcdefghij", 0, ".........."},
		{"aabbccddee", 0.2, "........vv"},
		{"abababcccc", 0.4, "......vvvv"}, // the four of c
		{"abcabcabca", 0.3, "..v..v..v."}, // c appears first after a and b
		{"abcccccccc", 0.2, "vv........"}, // c would be far too many
	} {
		held := holdOut(keys(test.keys), test.share, make(map[promptKey]bool))
		got := ""
		for _, h := range held {
			got += map[bool]string{true: "v", false: "."}[h]
		}
		if got != test.want {
			t.Errorf("%s, share %v: %s, want %s", test.keys, test.share, got, test.want)
		}
	}
	// What another source decided holds.
	side := map[promptKey]bool{{'a'}: true, {'j'}: false}
	if held := holdOut(keys("abcdefghij"), 0.2, side); !held[0] || held[9] || !held[8] || slices.Index(held[1:8], true) >= 0 {
		t.Errorf("%v", held)
	}
}

// No prompt is on both sides, over all sources, and every example is on one.
func TestSplitKeepsPromptsTogether(t *testing.T) {
	var a, b []any
	for i := range 40 {
		a = append(a, choice(fmt.Sprintf("prompt %d", i/4), fmt.Sprintf("good %d", i), fmt.Sprintf("bad %d", i)))
		b = append(b, choice(fmt.Sprintf("prompt %d", 5+i/4), fmt.Sprintf("fine %d", i), fmt.Sprintf("poor %d", i)))
	}
	cfg := OpenConfig{Sources: []data.SourceConfig{file(t, "a.jsonl", a...), file(t, "b.jsonl", b...)}, Len: 128, Val: data.ValConfig{Share: 0.2}}
	c := opened(t, cfg, OpenPreference)
	prompts := func(src data.Source) (list []string) {
		for _, s := range texts(t, src) {
			p, _, _ := strings.Cut(s, "<|assistant|>")
			list = append(list, p)
		}
		return list
	}
	train, val := prompts(c.Train), prompts(c.Val)
	for _, p := range val {
		if slices.Contains(train, p) {
			t.Errorf("%s is on both sides", p)
		}
	}
	if len(train)+len(val) != 160 || len(val) < 24 || len(val) > 40 {
		t.Errorf("%d sequences to train on and %d to validate", len(train), len(val))
	}
	// Of conversations the words before the first answer count.
	var rows []any
	for i := range 20 {
		rows = append(rows, talk(fmt.Sprintf("ask %d", i/2), fmt.Sprintf("say %d", i), "more", "yes"))
	}
	i := instruct(t, OpenConfig{Sources: []data.SourceConfig{file(t, "c.jsonl", rows...)}, Len: 128, Val: data.ValConfig{Share: 0.15}})
	held := texts(t, i.Val)
	if len(held) != 2 && len(held) != 4 {
		t.Errorf("%d conversations held out", len(held))
	}
	for _, s := range held {
		p, _, _ := strings.Cut(s, "<|assistant|>")
		if slices.ContainsFunc(texts(t, i.Train), func(s string) bool { return strings.HasPrefix(s, p) }) {
			t.Errorf("%s is on both sides", p)
		}
	}
}

func TestExplicitValidation(t *testing.T) {
	train := file(t, "a.jsonl", talk("a", "b"), talk("c", "d"))
	c := instruct(t, OpenConfig{Sources: []data.SourceConfig{train}, Len: 16,
		Val: data.ValConfig{Data: []data.SourceConfig{file(t, "v.jsonl", talk("c", "x"), talk("e", "f"), talk("g", "h"))}}})
	got := texts(t, c.Val)
	slices.Sort(got)
	if !slices.Equal(got, []string{"<|user|>e<|end|><|assistant|>F<|end|>*", "<|user|>g<|end|><|assistant|>H<|end|>*"}) {
		t.Errorf("%q", got)
	}
	if l := c.Report.Sources[1]; l.Leaked != (Count{1, 6}) || l.Val != (Count{2, 12}) || l.Train != (Count{}) {
		t.Error(l)
	}
	only, err := OpenInstruct(t.Context(), OpenConfig{Val: data.ValConfig{Data: []data.SourceConfig{train}}, Len: 16, Tokenizer: bytesTok(t)})
	if err != nil || only.Train != nil || only.Scan != nil || only.Val.Samples() != 1 {
		t.Errorf("validation alone: %+v, %v", only, err)
	}
}

func TestWeightedSources(t *testing.T) {
	many := func(name string, n int) []any {
		var rows []any
		for i := range n {
			rows = append(rows, talk(fmt.Sprint(name, i), "y"))
		}
		return rows
	}
	a, b := file(t, "a.jsonl", many("a", 30)...), file(t, "b.jsonl", many("b", 10)...)
	a.Weight, b.Weight = 1, 3
	c := instruct(t, OpenConfig{Sources: []data.SourceConfig{a, b}, Len: 16})
	if c.Train.Samples() != c.Scan.Samples() {
		t.Errorf("%d samples, %d of them in Scan", c.Train.Samples(), c.Scan.Samples())
	}
	// Rows have conversations of one source only.
	count := map[byte]int{}
	for _, s := range segments(t, read(t, c.Train, 0, 400), pad) {
		count[byte(s.tokens[1])]++
	}
	if count['b'] != 3*count['a'] {
		t.Errorf("%v", count)
	}
	scan := texts(t, c.Scan)
	if len(scan) != 40 || !strings.HasPrefix(scan[0], "<|user|>a") || !strings.HasPrefix(scan[39], "<|user|>b") {
		t.Errorf("%d in Scan", len(scan))
	}
	// Without weights conversations of all sources share rows.
	a.Weight, b.Weight = 0, 0
	c = instruct(t, OpenConfig{Sources: []data.SourceConfig{a, b}, Len: 1000})
	if c.Train.Samples() != 1 {
		t.Errorf("%d rows", c.Train.Samples())
	}
}

func TestFingerprint(t *testing.T) {
	rows := []any{choice("p", "a", "b"), choice("q", "c", "d"), choice("r", "e", "f")}
	base := func() OpenConfig {
		return OpenConfig{Sources: []data.SourceConfig{file(t, "p.jsonl", rows...)}, Len: 32, Seed: 1}
	}
	open := func(change func(*OpenConfig)) string {
		cfg := base()
		change(&cfg)
		return opened(t, cfg, OpenPreference).Train.Fingerprint()
	}
	same := open(func(*OpenConfig) {})
	if again := open(func(*OpenConfig) {}); again != same || len(same) != 32 { // in another folder
		t.Errorf("%s and %s", same, again)
	}
	for name, change := range map[string]func(*OpenConfig){
		"data":      func(c *OpenConfig) { c.Sources[0] = file(t, "p.jsonl", choice("p", "a", "x"), rows[1], rows[2]) },
		"swapped":   func(c *OpenConfig) { c.Sources[0] = file(t, "p.jsonl", choice("p", "b", "a"), rows[1], rows[2]) },
		"order":     func(c *OpenConfig) { c.Sources[0] = file(t, "p.jsonl", rows[1], rows[0], rows[2]) },
		"length":    func(c *OpenConfig) { c.Len = 33 },
		"seed":      func(c *OpenConfig) { c.Seed = 2 },
		"template":  func(c *OpenConfig) { c.Chat.Template = ChatMLTemplate },
		"truncate":  func(c *OpenConfig) { c.Chat.Truncate = TruncateDrop },
		"score":     func(c *OpenConfig) { c.Score = true },
		"split":     func(c *OpenConfig) { c.Val.Share = 0.34 },
		"tokenizer": func(c *OpenConfig) { c.Tokenizer = charTok(t, "abcdefghijklmnopqrstuvwxyz") },
	} {
		if got := open(change); got == same {
			t.Errorf("another %s has the same fingerprint", name)
		}
	}
	seen := map[string]string{}
	for name, chat := range map[string]Config{"defaults": {}, "last": {TrainOn: TrainLast}, "all": {TrainOn: TrainAll},
		"sequential": {Pack: PackSequential}, "none": {Pack: PackNone}, "head": {Truncate: TruncateHead}} {
		c := instruct(t, OpenConfig{Sources: []data.SourceConfig{file(t, "a.jsonl", talk("a", "b", "c", "d"), talk("e", "f"))}, Len: 32, Chat: chat})
		f := c.Train.Fingerprint()
		if other := seen[f]; other != "" {
			t.Errorf("%s and %s have one fingerprint", name, other)
		}
		if seen[f] = name; f == c.Scan.Fingerprint() {
			t.Errorf("%s: Train and Scan have one fingerprint", name)
		}
	}
}

func charTok(t testing.TB, chars string) data.Tokenizer {
	t.Helper()
	path := filepath.Join(t.TempDir(), "chars.txt")
	if err := os.WriteFile(path, []byte(chars), 0o666); err != nil {
		t.Fatal(err)
	}
	tok, err := data.NewTokenizer(data.TokenizerConfig{Kind: data.KindChar, File: path}, nil)
	if err != nil {
		t.Fatal(err)
	}
	return tok
}

func TestUnknownCharactersAreCounted(t *testing.T) {
	cfg := OpenConfig{Sources: []data.SourceConfig{file(t, "a.jsonl", talk("abc", "äbä"))}, Len: 32, Tokenizer: charTok(t, "abc")}
	c := opened(t, cfg, OpenInstruct)
	if l := c.Report.Sources[0]; l.Unknown != 2 || !strings.Contains(l.String(), "2 unknown characters") {
		t.Error(l)
	}
}

func TestOpenErrors(t *testing.T) {
	good := file(t, "a.jsonl", talk("a", "b"))
	pairs := file(t, "p.jsonl", choice("a", "b", "c"))
	for _, test := range []struct {
		name   string
		open   func(context.Context, OpenConfig) (*Corpus, error)
		change func(*OpenConfig)
		want   []string
	}{
		{"no source", OpenInstruct, func(c *OpenConfig) { c.Sources = nil }, []string{"stages.1.data: names no source"}},
		{"no file", OpenInstruct, func(c *OpenConfig) { c.Sources[0].Path = "/no/such" }, []string{"stages.1.data.0.path=/no/such", "no such file"}},
		{"pack", OpenInstruct, func(c *OpenConfig) { c.Chat.Pack = "tight" }, []string{"stages.1.chat.pack=tight", "ffd or sequential or none"}},
		{"pack of pairs", OpenPreference, func(c *OpenConfig) { c.Sources[0] = pairs; c.Chat.Pack = PackFFD },
			[]string{"stages.1.chat.pack=ffd: of preference pairs want none"}},
		{"train_on of pairs", OpenPreference, func(c *OpenConfig) { c.Sources[0] = pairs; c.Chat.TrainOn = TrainAll }, []string{"stages.1.chat.train_on=all"}},
		{"template", OpenInstruct, func(c *OpenConfig) { c.Chat.Template = "/no/template.json" }, []string{"stages.1.chat.template=/no/template.json: no such file"}},
		{"conversations as pairs", OpenPreference, func(c *OpenConfig) {}, []string{"stages.1.data.0.path", "is messages, want one of: preference"}},
		{"pairs as conversations", OpenInstruct, func(c *OpenConfig) { c.Sources[0] = pairs }, []string{"p.jsonl:1: is preference"}},
		{"no answer", OpenInstruct, func(c *OpenConfig) {
			c.Sources[0] = file(t, "n.jsonl", talk("only a question, and no answer", "b"))
			c.Len = 12
		},
			[]string{"stages.1.data.0.path", "no example is left to train on", "1 examples (nothing to train on)"}},
		{"share", OpenInstruct, func(c *OpenConfig) { c.Val.Share = 0.3 }, []string{"stages.1.val.share=0.3: holds out none of the 1 examples"}},
		{"share of all", OpenInstruct, func(c *OpenConfig) { c.Val.Share = 0.9 }, []string{"stages.1.data.0.path", "no example is left to train on"}},
		{"the same file", OpenInstruct, func(c *OpenConfig) { c.Val.Data = []data.SourceConfig{file(t, "b.jsonl", talk("a", "b"))} },
			[]string{"stages.1.val.data.0.path", "a.jsonl", "may not overlap"}},
		{"the same prompts", OpenInstruct, func(c *OpenConfig) { c.Val.Data = []data.SourceConfig{file(t, "b.jsonl", talk("a", "c"))} },
			[]string{"stages.1.val.data.0.path", "no example is left to validate", "prompt is trained on"}},
		{"context", OpenInstruct, func(c *OpenConfig) { c.Len = 1 }, []string{"a context of 1 tokens"}},
		{"score", OpenInstruct, func(c *OpenConfig) { c.Score = true }, []string{"a reward model learns from preferences"}},
	} {
		cfg := OpenConfig{Sources: []data.SourceConfig{good}, Len: 32, At: "stages.1", Tokenizer: bytesTok(t)}
		test.change(&cfg)
		_, err := test.open(t.Context(), cfg)
		if err == nil {
			t.Errorf("%s: no error", test.name)
			continue
		}
		for _, want := range test.want {
			if !strings.Contains(err.Error(), want) || strings.Contains(err.Error(), "\n") {
				t.Errorf("%s: %v, want %q in one line", test.name, err, want)
			}
		}
	}
}

func TestReadErrors(t *testing.T) {
	c := instruct(t, OpenConfig{Sources: []data.SourceConfig{file(t, "a.jsonl", talk("a", "b"))}, Len: 32})
	var b data.Batch
	cancelled, cancel := context.WithCancel(t.Context())
	cancel()
	if err := c.Train.Read(cancelled, 0, 1, &b); err != context.Canceled {
		t.Error(err)
	}
	for _, r := range [][2]int{{-1, 1}, {0, -1}} {
		if err := c.Train.Read(t.Context(), int64(r[0]), r[1], &b); err == nil {
			t.Errorf("read of %d from %d", r[1], r[0])
		}
	}
	if err := c.Close(); err != nil {
		t.Error(err)
	}
	for _, src := range []data.Source{c.Train, c.Scan} {
		if err := src.Read(t.Context(), 0, 1, &b); err == nil || !strings.Contains(err.Error(), "closed") {
			t.Error(err)
		}
	}
}

func TestConfigResolved(t *testing.T) {
	if c := (Config{}).Resolved(Instruct); c != (Config{"builtin", "assistant", "ffd", "tail"}) {
		t.Errorf("%+v", c)
	}
	for _, f := range []Form{Preference, SingleLabel} {
		c := (Config{Template: "chatml"}).Resolved(f)
		if c != (Config{"chatml", "assistant", "none", "head"}) || len(c.Validate("chat", f)) > 0 {
			t.Errorf("%s: %+v", f, c)
		}
	}
}

// badTemplate refuses what it is told to.
type badTemplate struct{ Template }

func (b badTemplate) Render(msgs []Message, prompt bool) ([]Piece, error) {
	if len(msgs) > 2 {
		return nil, fmt.Errorf("roles must\nalternate")
	}
	return b.Template.Render(msgs, prompt)
}

func TestRowsThatTheTemplateRefusesAreBad(t *testing.T) {
	rows := []any{talk("a", "b"), talk("a", "b", "c", "d")}
	for limit, want := range map[float64]string{0.5: "", 0.4: "1 of 2 rows are bad"} {
		cfg := OpenConfig{Sources: []data.SourceConfig{file(t, "a.jsonl", rows...)}, Len: 32, Tokenizer: bytesTok(t)}
		cfg.Sources[0].MaxBadShare = &limit
		o, err := newOpener(cfg, Instruct)
		if err != nil {
			t.Fatal(err)
		}
		o.template = badTemplate{o.template}
		err = o.read(t.Context(), []Shape{Messages}, o.conversation)
		if (err == nil) != (want == "") || err != nil && (!strings.Contains(err.Error(), want) || !strings.Contains(err.Error(), "a.jsonl:2: roles must alternate")) {
			t.Errorf("max_bad_share %v: %v", limit, err)
		}
		if err == nil {
			if l := o.corpus().Report.Sources[0]; l.BadRows != 1 || l.Rows != 2 || l.Read.Examples != 1 || l.Bad[0].Line != 2 {
				t.Error(l)
			}
		}
	}
}
