package data

import (
	"bytes"
	"io"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"unicode/utf8"
)

// shakespeareChars is the vocabulary that nanoGPT's data/shakespeare_char/prepare.py prints.
const shakespeareChars = "\n !$&',-.3:;?ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz"

func write(t testing.TB, name string, content []byte) string {
	t.Helper()
	path := name
	if !filepath.IsAbs(name) {
		path = filepath.Join(t.TempDir(), name)
	}
	if err := os.WriteFile(path, content, 0o644); err != nil {
		t.Fatal(err)
	}
	return path
}

func charsOf(t testing.TB, text string) Tokenizer {
	t.Helper()
	tok, err := NewTokenizer(TokenizerConfig{Kind: KindChar, File: write(t, "chars.txt", []byte(text))}, nil)
	if err != nil {
		t.Fatal(err)
	}
	return tok
}

func TestByteTokenizer(t *testing.T) {
	tok, err := NewTokenizer(TokenizerConfig{Kind: KindByte}, nil)
	if err != nil {
		t.Fatal(err)
	}
	all := make([]byte, 256)
	for i := range all {
		all[i] = byte(i)
	}
	ids := tok.Encode(string(all))
	for i, id := range ids {
		if id != int32(i) {
			t.Fatalf("byte %d is id %d", i, id)
		}
	}
	if got := tok.Decode(ids); got != string(all) {
		t.Fatalf("256 bytes come back as %q", got)
	}
	if got := tok.Decode([]int32{'a', tok.EOS(), tok.Pad(), 263, 'b', -1, 264}); got != "ab\ufffd\ufffd" {
		t.Fatalf("special and unknown ids decode to %q", got)
	}
}

func TestCharTokenizerShakespeare(t *testing.T) {
	tok, err := NewTokenizer(TokenizerConfig{Kind: KindChar}, []SourceConfig{{Path: "embedded:shakespeare"}})
	if err != nil {
		t.Fatal(err)
	}
	if tok.Size() != 65+3+6 {
		t.Fatalf("size %d", tok.Size())
	}
	for id, c := range shakespeareChars {
		if got := tok.Encode(string(c)); !slices.Equal(got, []int32{int32(id)}) {
			t.Fatalf("%q is %v, want %d", c, got, id)
		}
	}
}

func TestCharTokenizerUTF8(t *testing.T) {
	tok := charsOf(t, "aé\ufffd漢\xff")
	if tok.Size() != 4+3+6 { // a é 漢 U+FFFD; the byte ff is no character
		t.Fatalf("size %d", tok.Size())
	}
	unk := int32(4 + 2)
	got := tok.Encode("漢a\xe6\xbczé\ufffd\xff")
	if want := []int32{2, 0, unk, unk, unk, 1, 3, unk}; !slices.Equal(got, want) {
		t.Fatalf("got %v, want %v", got, want)
	}
	if s := tok.Decode([]int32{2, unk, tok.EOS(), tok.Pad(), unk + 1, unk + 6, 1, unk + 7}); s != "漢\ufffdé\ufffd" {
		t.Fatalf("decoded %q", s)
	}
}

// The ids of the chat tokens are part of trained models: 258..263 of bytes, the six after <unk> of characters.
func TestChatTokens(t *testing.T) {
	names := []string{"<|system|>", "<|user|>", "<|assistant|>", "<|tool|>", "<|end|>", "<|reserved|>"}
	for tok, first := range map[Tokenizer]int32{byteTokenizer{}: 258, charsOf(t, "abc"): 6} {
		for i, name := range names {
			if id, ok := tok.SpecialID(name); !ok || id != first+int32(i) || tok.Special(id) != name {
				t.Errorf("%s: %s is id %d %t, Special gives %q", tok.Kind(), name, id, ok, tok.Special(id))
			}
		}
		for _, name := range []string{"", "a", "<|eos|>", "<|user|", "<reserved_0>"} {
			if id, ok := tok.SpecialID(name); ok {
				t.Errorf("%s: %q is special id %d", tok.Kind(), name, id)
			}
		}
		if id, ok := tok.SpecialID("<eos>"); !ok || id != tok.EOS() {
			t.Errorf("%s: <eos> is id %d %t", tok.Kind(), id, ok)
		}
		if tok.Size() != int(first)+6 {
			t.Errorf("%s: size %d", tok.Kind(), tok.Size())
		}
	}
}

// A character tokenizer stored before there were chat tokens keeps its size, or its model would not fit it.
func TestTokenizerVersion1(t *testing.T) {
	old := `{"kind":"char","version":1,"chars":"ab"}`
	tok, err := LoadTokenizer([]byte(old))
	if err != nil {
		t.Fatal(err)
	}
	if _, ok := tok.SpecialID("<|end|>"); ok || tok.Size() != 2+3 || tok.Special(5) != "" || tok.Decode([]int32{5}) != "\ufffd" {
		t.Errorf("size %d, <|end|> %t, id 5 is %q", tok.Size(), ok, tok.Special(5))
	}
	if b, err := tok.Marshal(); err != nil || string(b) != old {
		t.Errorf("stored again as %s, %v", b, err)
	}
}

func TestSpecialTokens(t *testing.T) {
	for _, tok := range []Tokenizer{byteTokenizer{}, charsOf(t, "<eos>padunk")} {
		names := map[string]bool{}
		for id := range int32(tok.Size()) {
			if name := tok.Special(id); name != "" {
				if names[name] {
					t.Errorf("%s: two ids named %s", tok.Kind(), name)
				}
				names[name] = true
				for _, got := range tok.Encode(name) {
					if tok.Special(got) != "" && tok.Special(got) != "<unk>" {
						t.Errorf("%s: text %q encodes to the special id %d", tok.Kind(), name, got)
					}
				}
			}
		}
		if tok.EOS() == tok.Pad() || tok.Special(tok.EOS()) != "<eos>" || tok.Special(tok.Pad()) != "<pad>" {
			t.Errorf("%s: eos %d pad %d", tok.Kind(), tok.EOS(), tok.Pad())
		}
		if tok.Special(-1) != "" || tok.Special(int32(tok.Size())) != "" {
			t.Errorf("%s: an id outside the vocabulary has a name", tok.Kind())
		}
	}
}

func TestTokenizerMarshal(t *testing.T) {
	for _, tok := range []Tokenizer{byteTokenizer{}, charsOf(t, "zß\x00\"\\\n\u2028")} {
		b, err := tok.Marshal()
		if err != nil {
			t.Fatal(err)
		}
		back, err := LoadTokenizer(b)
		if err != nil {
			t.Fatal(err)
		}
		text := "z\x00ß?\"\\\n\u2028\xfe"
		if back.Kind() != tok.Kind() || back.Size() != tok.Size() || back.Special(int32(tok.Size()-1)) != "<|reserved|>" || !slices.Equal(back.Encode(text), tok.Encode(text)) {
			t.Errorf("%s differs after a round trip", tok.Kind())
		}
	}
	for in, want := range map[string]string{
		``:                            "EOF",
		`{"kind":"bpe","version":1}`:  `kind "bpe"`,
		`{"kind":"byte","version":2}`: "version 2 of kind byte, this program reads versions 1 to 1",
		`{"kind":"char","version":3,"chars":"a"}`:  "version 3",
		`{"kind":"char","version":0,"chars":"a"}`:  "version 0",
		`{"kind":"byte","version":1}x`:             "after its end",
		`{"kind":"char","version":1}`:              "without characters",
		`{"kind":"char","version":1,"x":1}`:        "unknown field",
		`{"kind":"byte","version":1,"chars":"a"}`:  "has characters",
		`{"kind":"char","version":1,"chars":"ba"}`: "ascending",
		`{"kind":"char","version":1,"chars":"aa"}`: "ascending",
	} {
		if _, err := LoadTokenizer([]byte(in)); err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("%s: error %v, want %q", in, err, want)
		}
	}
}

func TestNewTokenizerErrors(t *testing.T) {
	empty := write(t, "empty.txt", nil)
	for _, c := range []struct {
		cfg  TokenizerConfig
		src  []SourceConfig
		want string
	}{
		{TokenizerConfig{Kind: "bpe"}, nil, "tokenizer.kind=bpe: want byte or char"},
		{TokenizerConfig{Kind: KindByte, File: "x"}, nil, "tokenizer.file=x: has no effect with tokenizer.kind=byte"},
		{TokenizerConfig{Kind: KindChar}, nil, "needs tokenizer.file or a source"},
		{TokenizerConfig{Kind: KindChar, File: "nowhere.txt"}, nil, "tokenizer.file=nowhere.txt: no such file"},
		{TokenizerConfig{Kind: KindChar, File: "embedded:x"}, nil, "tokenizer.file=embedded:x: no such embedded text; there is embedded:"},
		{TokenizerConfig{Kind: KindChar, File: empty}, nil, "has no characters"},
		{TokenizerConfig{Kind: KindChar}, []SourceConfig{{Path: "nowhere.txt"}}, "data.0.path=nowhere.txt: no such file"},
	} {
		if _, err := NewTokenizer(c.cfg, c.src); err == nil || !strings.Contains(err.Error(), c.want) {
			t.Errorf("%+v: error %v, want %q", c.cfg, err, c.want)
		}
	}
}

func TestStreamDecoder(t *testing.T) {
	d := NewStreamDecoder(byteTokenizer{})
	var got []string
	for _, id := range (byteTokenizer{}).Encode("aé漢\xf0\x9f\x98\x80\xe6z\xc3") {
		got = append(got, d.Add(id))
	}
	got = append(got, d.Flush(), d.Flush())
	want := []string{"a", "", "é", "", "", "漢", "", "", "", "😀", "", "\xe6z", "", "\xc3", ""}
	if !slices.Equal(got, want) {
		t.Fatalf("got %q, want %q", got, want)
	}
}

func FuzzTokenizers(f *testing.F) {
	f.Add([]byte("plain"), []byte("other"))
	f.Add([]byte("aé漢😀\xff\xe6\xbc"), []byte("<eos><pad>\x00"))
	f.Fuzz(func(t *testing.T, vocab, text []byte) {
		set := runeSet{}
		set.text(vocab)
		set['x'] = struct{}{}
		chars := []rune{}
		for r := range set {
			chars = append(chars, r)
		}
		slices.Sort(chars)
		for _, tok := range []Tokenizer{byteTokenizer{}, newCharTokenizer(chars)} {
			ids := tok.Encode(string(text))
			want := string(text)
			if tok.Kind() == KindChar {
				want = ""
				for i := 0; i < len(text); {
					r, n := utf8.DecodeRune(text[i:])
					if _, ok := set[r]; !ok || n == 1 && r == utf8.RuneError {
						r = utf8.RuneError
					}
					want += string(r)
					i += n
				}
			}
			if got := tok.Decode(ids); got != want {
				t.Fatalf("%s: %q comes back as %q", tok.Kind(), want, got)
			}
			for _, id := range ids {
				if s := tok.Special(id); id < 0 || int(id) >= tok.Size() || s != "" && s != "<unk>" {
					t.Fatalf("%s: text encodes to id %d %s", tok.Kind(), id, s)
				}
			}
			d, joined := NewStreamDecoder(tok), ""
			for _, id := range ids {
				joined += d.Add(id)
			}
			if joined += d.Flush(); joined != want {
				t.Fatalf("%s: streamed %q, want %q", tok.Kind(), joined, want)
			}
		}
	})
}

func BenchmarkTokenize(b *testing.B) {
	ctx := b.Context()
	r, err := embeddedFS.Open(embeddedFiles["shakespeare"])
	if err != nil {
		b.Fatal(err)
	}
	defer r.Close()
	files, err := resolve("path", SourceConfig{Path: "embedded:shakespeare"})
	if err != nil {
		b.Fatal(err)
	}
	var text collector
	if _, err := files[0].scan(ctx, SourceConfig{}, &text, new(meta), 0); err != nil {
		b.Fatal(err)
	}
	plain := []byte(text.docs[0])
	for _, tok := range []Tokenizer{byteTokenizer{}, newCharTokenizer([]rune(shakespeareChars))} {
		b.Run(tok.Kind(), func(b *testing.B) {
			b.SetBytes(int64(len(plain)))
			var ids []int32
			for b.Loop() {
				ids = tok.(appender).appendTokens(ids[:0], plain)
			}
		})
		b.Run(tok.Kind()+"-store", func(b *testing.B) {
			b.SetBytes(int64(len(plain)))
			for b.Loop() {
				w, err := newBuilder(io.Discard, tok, new(meta))
				if err != nil {
					b.Fatal(err)
				}
				if err := scanText(ctx, bytes.NewReader(plain), make([]byte, chunkBytes), w, new(meta)); err != nil {
					b.Fatal(err)
				}
				if _, err := w.finish(make([]byte, 32)); err != nil {
					b.Fatal(err)
				}
			}
		})
	}
}
