package data

import (
	"bytes"
	"crypto/sha256"
	"encoding/hex"
	"encoding/json"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"unicode/utf8"

	"github.com/klauspost/compress/gzip"
	"github.com/klauspost/compress/zstd"
)

// A collector is a sink that keeps the documents.
type collector struct {
	docs    []string
	current []byte
}

func (c *collector) text(p []byte) error {
	c.current = append(c.current, p...)
	return nil
}

func (c *collector) endDocument() error {
	c.docs = append(c.docs, string(c.current))
	c.current = c.current[:0]
	return nil
}

func read(t testing.TB, src SourceConfig) ([]string, meta, error) {
	t.Helper()
	files, err := resolve("path", src)
	if err != nil {
		return nil, meta{}, err
	}
	var c collector
	var m meta
	for i, f := range files {
		sum, err := f.scan(t.Context(), src, &c, &m, i)
		if err != nil {
			return nil, m, err
		}
		if h, err := f.hash(); err != nil || h != sum {
			t.Fatalf("%s: hash while reading %x, of the file %x, %v", f.name, sum, h, err)
		}
	}
	return c.docs, m, nil
}

func gz(t testing.TB, b []byte) []byte {
	var buf bytes.Buffer
	w := gzip.NewWriter(&buf)
	if _, err := w.Write(b); err != nil {
		t.Fatal(err)
	}
	if err := w.Close(); err != nil {
		t.Fatal(err)
	}
	return buf.Bytes()
}

func zst(t testing.TB, b []byte) []byte {
	w, err := zstd.NewWriter(nil)
	if err != nil {
		t.Fatal(err)
	}
	defer w.Close()
	return w.EncodeAll(b, nil)
}

func TestReadFormats(t *testing.T) {
	dir := t.TempDir()
	text := "one\r\ntwo\n\xff\x00"
	lines := "\ufeff{\"text\":\"a\"}\n\n  {\"text\":\"\",\"n\":1}\r\n{\"n\":{\"text\":1},\"text\":\"b\\u00e9\\ud83d\\ude00\\\\ud800\"}"
	docs := []string{"a", "", "bé😀\\ud800"}
	for name, content := range map[string][]byte{
		"b.txt": []byte(text), "a.txt.gz": gz(t, []byte(text)), "c.md.zst": zst(t, []byte(text)),
		"two.gz": append(gz(t, []byte(text[:5])), gz(t, []byte(text[5:]))...), "odd.name": zst(t, []byte(text)),
		"l.jsonl": []byte(lines), "l.ndjson.zst": zst(t, []byte(lines)), "l.json.gz": gz(t, []byte(lines)),
	} {
		path := write(t, filepath.Join(dir, name), content)
		want := []string{text}
		if strings.HasPrefix(name, "l.") {
			want = docs
		}
		got, m, err := read(t, SourceConfig{Path: path})
		if err != nil || !slices.Equal(got, want) || m.BadLines != 0 {
			t.Errorf("%s: %q, %d bad, %v; want %q", name, got, m.BadLines, err, want)
		}
	}
	got, _, err := read(t, SourceConfig{Path: filepath.Join(dir, "l.jsonl"), Format: formatText})
	if err != nil || !slices.Equal(got, []string{lines}) {
		t.Errorf("format text: %q, %v", got, err)
	}
}

func TestGlobIsSortedAndLiteralNamesWin(t *testing.T) {
	dir := t.TempDir()
	for _, n := range []string{"10.txt", "2.txt", "1.txt", "[1].txt"} {
		write(t, filepath.Join(dir, n), []byte(n))
	}
	got, _, err := read(t, SourceConfig{Path: filepath.Join(dir, "[0-9]*.txt")})
	if want := []string{"1.txt", "10.txt", "2.txt"}; err != nil || !slices.Equal(got, want) {
		t.Errorf("got %q, %v; want %q", got, err, want)
	}
	if got, _, err = read(t, SourceConfig{Path: filepath.Join(dir, "[1].txt")}); err != nil || !slices.Equal(got, []string{"[1].txt"}) {
		t.Errorf("literal name: %q, %v", got, err)
	}
}

func TestEmbeddedShakespeare(t *testing.T) {
	got, m, err := read(t, SourceConfig{Path: "embedded:shakespeare"})
	if err != nil || len(got) != 1 {
		t.Fatalf("%d documents, %v", len(got), err)
	}
	sum := sha256.Sum256([]byte(got[0]))
	attribution, err := os.ReadFile("embedded/ATTRIBUTION.md")
	if err != nil {
		t.Fatal(err)
	}
	if m.Bytes != 1115394 || !bytes.Contains(attribution, []byte(hex.EncodeToString(sum[:]))) {
		t.Fatalf("%d bytes with sha256 %x, not those of ATTRIBUTION.md", m.Bytes, sum)
	}
}

func TestBadLines(t *testing.T) {
	good := `{"text":"ok"}`
	rows := []struct{ line, reason string }{
		{`{"text":"ok"`, "not JSON"},
		{`{"text":"ok"} {"text":"more"}`, "not JSON"},
		{`{"other":"x"}`, `no field "text"`},
		{`{"Text":"x"}`, `no field "text"`},
		{`{"text": 7}`, "not a string"},
		{`{"text": null}`, "not a string"},
		{`{"text": ["a"]}`, "not a string"},
		{`"text"`, "not a JSON object"},
		{`null`, "not a JSON object"},
		{`[{"text":"x"}]`, "not a JSON object"},
		{"{\"text\":\"\xff\"}", "not valid UTF-8"},
		{`{"text":"\x41"}`, "not JSON"},
		{`{"text":"\ud800"}`, "surrogate"},
		{`{"text":"\udc00\ud800"}`, "surrogate"},
		{`{"text":"\ud83dA"}`, "surrogate"},
		{`{"text":"\\\ud83d\n"}`, "surrogate"},
		{"{\"text\":\"a\tb\"}", "not JSON"},
	}
	for _, r := range rows {
		path := write(t, "x.jsonl", []byte(good+"\n\n"+r.line+"\n"+good))
		docs, m, err := read(t, SourceConfig{Path: path})
		if err != nil || !slices.Equal(docs, []string{"ok", "ok"}) || m.Lines != 3 || m.BadLines != 1 {
			t.Fatalf("%s: %q, %+v, %v", r.line, docs, m, err)
		}
		if b := m.Bad[0]; b.Line != 3 || !strings.Contains(b.Reason, r.reason) {
			t.Errorf("%s: %+v, want line 3 and %q", r.line, b, r.reason)
		}
	}
}

func TestBadShare(t *testing.T) {
	dir := t.TempDir()
	var b strings.Builder
	for i := range 200 {
		if i == 4 || i == 9 || i == 100 {
			b.WriteString("oops\n")
		} else {
			fmt.Fprintf(&b, "{\"text\":\"document %d\"}\n", i)
		}
	}
	write(t, filepath.Join(dir, "a.jsonl"), []byte("{\"text\":\"first\"}\n"))
	write(t, filepath.Join(dir, "b.jsonl"), []byte(b.String()))
	cfg := OpenConfig{Sources: []SourceConfig{{Path: filepath.Join(dir, "*.jsonl")}}, Tokenizer: byteTokenizer{}, Len: 8, Cache: CacheOff}
	_, err := Open(t.Context(), cfg)
	want := fmt.Sprintf("data.0.path=%s: 3 of 201 lines are bad, above max_bad_share=0.01; first: %s:5: not JSON",
		cfg.Sources[0].Path, filepath.Join(dir, "b.jsonl"))
	if err == nil || !strings.HasPrefix(err.Error(), want) {
		t.Fatalf("error %v, want %s", err, want)
	}
	share := 3.0 / 201
	cfg.Sources[0].MaxBadShare = &share
	c, err := Open(t.Context(), cfg)
	if err != nil {
		t.Fatal(err)
	}
	defer c.Close()
	r := c.Report.Sources[0]
	if r.BadLines != 3 || r.Lines != 201 || r.Documents != 198 || len(r.Bad) != 3 || r.Bad[2].Line != 101 || r.Bad[1].File != filepath.Join(dir, "b.jsonl") {
		t.Errorf("report %+v", r)
	}
	none := 0.0
	cfg.Sources[0].MaxBadShare = &none
	if _, err := Open(t.Context(), cfg); err == nil {
		t.Error("max_bad_share=0 lets bad lines pass")
	}
}

func TestLongLine(t *testing.T) {
	var c collector
	var m meta
	r := io.MultiReader(strings.NewReader("{\"text\":\"a\"}\n"), io.LimitReader(endless('x'), maxLine+1), strings.NewReader("\n{\"text\":\"b\"}"))
	if err := scanJSONL(t.Context(), r, "text", &c, &m, 0); err != nil {
		t.Fatal(err)
	}
	if !slices.Equal(c.docs, []string{"a", "b"}) || m.BadLines != 1 || m.Bad[0].Line != 2 || m.Bad[0].Reason != "longer than 64 MiB" {
		t.Errorf("%q, %+v", c.docs, m)
	}
}

type endless byte

func (e endless) Read(p []byte) (int, error) {
	for i := range p {
		p[i] = byte(e)
	}
	return len(p), nil
}

func TestOpenErrors(t *testing.T) {
	dir := t.TempDir()
	file := func(name string, b []byte) string { return write(t, filepath.Join(dir, name), b) }
	long := []byte(strings.Repeat("some text, and more of it. ", 500) + fmt.Sprint(os.Getpid()))
	zg, zz := gz(t, long), zst(t, long)
	if err := os.Mkdir(filepath.Join(dir, "sub.txt"), 0o755); err != nil {
		t.Fatal(err)
	}
	good := file("good.txt", long)
	file("copy.text", long)
	for _, c := range []struct {
		name string
		cfg  OpenConfig
		want string
	}{
		{"missing", source(filepath.Join(dir, "nowhere.txt")), "data.0.path=" + dir + "/nowhere.txt: no such file"},
		{"glob", source(filepath.Join(dir, "no*.txt")), "data.0.path=" + dir + "/no*.txt: no file matches"},
		{"pattern", source(filepath.Join(dir, "a[.txt")), "not a valid pattern"},
		{"double star", source(dir + "/**/x.txt"), "** is not supported"},
		{"directory", source(dir), "is a directory"},
		{"directory in glob", source(dir + "/*.txt"), "sub.txt is a directory"},
		{"not a file", source(os.DevNull), "not a regular file"},
		{"no path", source(""), "data.0.path: names no file"},
		{"embedded", source("embedded:homer"), "no such embedded text; there is embedded:gsm8k-solutions, embedded:shakespeare"},
		{"empty", source(file("empty", nil)), "empty: holds no text"},
		{"empty gz", source(file("empty.gz", nil)), "empty.gz: holds no text"},
		{"gz of nothing", source(file("nothing.gz", gz(t, nil))), "nothing.gz: holds no text"},
		{"blank jsonl", source(file("blank.jsonl", []byte("\n \n{\"text\":\"\"}\n"))), "blank.jsonl: holds no text"},
		{"bad jsonl", source(file("bad.jsonl", []byte("x\ny\n"))), "2 of 2 lines are bad"},
		{"cut gz", source(file("cut.gz", zg[:len(zg)-9])), "cut.gz: compressed data ends too early"},
		{"cut gz header", source(file("head.gz", zg[:5])), "head.gz: gzip header is cut off"},
		{"cut gz jsonl", source(file("cut.jsonl.gz", zg[:len(zg)-9])), "cut.jsonl.gz: compressed data ends too early"},
		{"cut zst", source(file("cut.zst", zz[:len(zz)-3])), "cut.zst: compressed data ends too early"},
		{"wrong gz", source(file("wrong.gz", long)), "wrong.gz: named .gz but is not gzip data"},
		{"wrong zst", source(file("wrong.zst", zg[2:])), "wrong.zst: named .zst but is not zstd data"},
		{"corrupt gz", source(file("corrupt.gz", append(bytes.Clone(zg[:len(zg)-8]), 1, 2, 3, 4, 5, 6, 7, 8))), "corrupt.gz: gzip: invalid checksum"},
		{"short", source(file("short", nil), file("short2.jsonl", nil)), "short: holds no text"},
		{"weight", OpenConfig{Sources: []SourceConfig{{Path: good, Weight: -1}}}, "data.0.weight=-1"},
		{"weights", OpenConfig{Sources: []SourceConfig{{Path: good, Weight: 2}, {Path: good}}}, "data.1.weight=0 but data.0.weight=2"},
		{"format", OpenConfig{Sources: []SourceConfig{{Path: good, Format: "csv"}}}, "data.0.format=csv: want text or jsonl"},
		{"share", OpenConfig{Sources: []SourceConfig{{Path: good}}, Val: ValConfig{Share: 1}}, "val.share=1: a share"},
		{"tiny share", OpenConfig{Sources: []SourceConfig{{Path: good}}, Val: ValConfig{Share: 1e-5}}, "1 of them for validation after val.share=1e-05"},
		{"both", OpenConfig{Sources: []SourceConfig{{Path: good}}, Val: ValConfig{Share: .1, Data: []SourceConfig{{Path: good}}}}, "set one of the two"},
		{"overlap", OpenConfig{Sources: []SourceConfig{{Path: good}}, Val: ValConfig{Data: []SourceConfig{{Path: dir + "/copy*"}}}}, "may not overlap"},
		{"val weight", OpenConfig{Sources: []SourceConfig{{Path: good}}, Val: ValConfig{Data: []SourceConfig{{Path: good, Weight: 1}}}}, "val.data.0.weight=1: has no effect"},
		{"none", OpenConfig{}, "data: names no source"},
		{"flag", OpenConfig{Val: ValConfig{Data: []SourceConfig{{Path: "nowhere.txt"}}}, At: "--data"}, "--data=nowhere.txt: no such file"},
		{"nested", OpenConfig{Sources: []SourceConfig{{Path: good}, {Path: "nowhere.txt"}}, At: "stages.2"}, "stages.2.data.1.path=nowhere.txt: no such file"},
	} {
		c.cfg.Tokenizer, c.cfg.Cache = byteTokenizer{}, filepath.Join(dir, "cache")
		c.cfg.Len = 64
		got, err := Open(t.Context(), c.cfg)
		if err == nil {
			got.Close()
			t.Errorf("%s: no error", c.name)
			continue
		}
		if !strings.Contains(err.Error(), c.want) || strings.Contains(err.Error(), "\n") {
			t.Errorf("%s: error %q, want one line with %q", c.name, err, c.want)
		}
	}
}

func source(paths ...string) OpenConfig {
	var cfg OpenConfig
	for _, p := range paths {
		cfg.Sources = append(cfg.Sources, SourceConfig{Path: p})
	}
	return cfg
}

func FuzzScanText(f *testing.F) {
	f.Add([]byte("aé漢😀\xff\xe6\xbc\xf0\x9f"), uint8(1))
	f.Fuzz(func(t *testing.T, text []byte, size uint8) {
		var c collector
		buf := make([]byte, int(size)+utf8.UTFMax)
		if err := scanText(t.Context(), bytes.NewReader(text), buf, &c, new(meta)); err != nil {
			t.Fatal(err)
		}
		if len(c.docs) != 1 || c.docs[0] != string(text) {
			t.Fatalf("%q in pieces of %d: %q", text, len(buf), c.docs)
		}
		// Encoding the pieces is encoding the whole.
		tok := newCharTokenizer([]rune("aé漢"))
		var out buffer
		b, err := newBuilder(&out, tok, new(meta))
		if err != nil {
			t.Fatal(err)
		}
		if err := scanText(t.Context(), bytes.NewReader(text), buf, b, new(meta)); err != nil {
			t.Fatal(err)
		}
		header, err := b.finish(make([]byte, 32))
		if err != nil {
			t.Fatal(err)
		}
		copy(out, header)
		s, err := parseStore(out, nil)
		if err != nil {
			t.Fatal(err)
		}
		var want []int32
		if len(text) > 0 {
			want = append(tok.Encode(string(text)), tok.EOS())
		}
		got := make([]int32, s.tokens)
		s.read(got, 0)
		if !slices.Equal(got, want) {
			t.Fatalf("%q in pieces of %d: %v, want %v", text, len(buf), got, want)
		}
	})
}

func FuzzTextOf(f *testing.F) {
	f.Add([]byte(`{"text":"a\ud83d\ude00"}`))
	f.Add([]byte(`{"text":"\ud83d"}`))
	f.Fuzz(func(t *testing.T, line []byte) {
		text, reason := textOf(line, "text")
		if reason != "" {
			return
		}
		// What was taken means the same after it is written again, and U+FFFD stands only where the line has it.
		js, err := json.Marshal(map[string]string{"text": text})
		if err != nil {
			t.Fatal(err)
		}
		if again, reason := textOf(js, "text"); again != text || reason != "" {
			t.Fatalf("%q becomes %q (%s)", text, again, reason)
		}
		if strings.ContainsRune(text, utf8.RuneError) && !bytes.Contains(line, []byte("\ufffd")) && !bytes.Contains(bytes.ToLower(line), []byte(`\ufffd`)) {
			t.Fatalf("%q gives %q", line, text)
		}
	})
}

// TestCompressedTwice: what a first decompression leaves compressed is no text.
func TestCompressedTwice(t *testing.T) {
	plain := []byte(strings.Repeat("a text that compresses. ", 100))
	enc, err := zstd.NewWriter(nil)
	if err != nil {
		t.Fatal(err)
	}
	for name, content := range map[string][]byte{
		"a.txt.gz.gz": gz(t, gz(t, plain)), "a.zst.gz": gz(t, enc.EncodeAll(plain, nil)), "a.gz.zst": enc.EncodeAll(gz(t, plain), nil),
	} {
		path := filepath.Join(t.TempDir(), name)
		if err := os.WriteFile(path, content, 0o644); err != nil {
			t.Fatal(err)
		}
		if _, _, err := read(t, SourceConfig{Path: path}); err == nil || !strings.Contains(err.Error(), name) || !strings.Contains(err.Error(), "twice") {
			t.Errorf("%s: error %v, want one that names the file and says twice", name, err)
		}
	}
	path := filepath.Join(t.TempDir(), "short.txt.gz") // shorter than the bytes that are looked at
	if err := os.WriteFile(path, gz(t, []byte("ab")), 0o644); err != nil {
		t.Fatal(err)
	}
	if docs, _, err := read(t, SourceConfig{Path: path}); err != nil || len(docs) != 1 || docs[0] != "ab" {
		t.Errorf("documents %q, %v", docs, err)
	}
}
