package data

import (
	"bytes"
	"context"
	"encoding/json"
	"fmt"
	"io"
	"slices"
	"strings"
	"unicode/utf8"
)

// Tokenizer kinds.
const (
	KindByte = "byte"
	KindChar = "char"
)

// Names of the special tokens that conversations are written with; every tokenizer has them. TokenReserved is left to chat
// templates that need a token of their own.
const (
	TokenSystem    = "<|system|>"
	TokenUser      = "<|user|>"
	TokenAssistant = "<|assistant|>"
	TokenTool      = "<|tool|>"
	TokenEnd       = "<|end|>" // ends a turn
	TokenReserved  = "<|reserved|>"
)

// chatTokens are their names in the order of their ids.
var chatTokens = [...]string{TokenSystem, TokenUser, TokenAssistant, TokenTool, TokenEnd, TokenReserved}

// TokenizerKinds lists the kinds a TokenizerConfig may ask for.
func TokenizerKinds() []string { return []string{KindByte, KindChar} }

// A Tokenizer turns text into ids 0..Size-1 and back. Special ids stand after all others and no text encodes to one
// (KindChar's unknown id aside), so a document that spells "<eos>" does not end there.
type Tokenizer interface {
	Kind() string
	Size() int // vocabulary, special tokens included
	Encode(text string) []int32
	// Decode is the inverse of Encode. Special ids decode to nothing; the unknown id and ids outside the vocabulary decode
	// to U+FFFD.
	Decode(ids []int32) string
	EOS() int32 // ends every document
	Pad() int32 // fills samples; never EOS, so that masking padding cannot mask the end of a document
	// Special names a special id ("<eos>"), "" for an id of text.
	Special(id int32) string
	// SpecialID is the inverse of Special.
	SpecialID(name string) (int32, bool)
	Marshal() ([]byte, error) // stored in checkpoints; LoadTokenizer restores
}

// NewTokenizer builds the tokenizer of cfg. The vocabulary of KindChar is read from cfg.File or, without it, from the
// first of sources: all of it, the part held out for validation included.
func NewTokenizer(cfg TokenizerConfig, sources []SourceConfig) (Tokenizer, error) {
	if errs := cfg.Validate("tokenizer"); len(errs) > 0 {
		return nil, errs[0]
	}
	if cfg.Kind == KindByte {
		return byteTokenizer{}, nil
	}
	src, at := SourceConfig{Path: cfg.File}, "tokenizer.file"
	if cfg.File == "" {
		if len(sources) == 0 {
			return nil, fmt.Errorf("tokenizer.kind=%s: needs tokenizer.file or a source to read the characters from", cfg.Kind)
		}
		src, at = sources[0], "data.0.path"
	}
	files, err := resolve(at, src)
	if err != nil {
		return nil, err
	}
	set := make(runeSet)
	for _, f := range files {
		if _, err := f.scan(context.Background(), src, set, new(meta), 0); err != nil {
			return nil, err
		}
	}
	if len(set) == 0 {
		return nil, fmt.Errorf("%s=%s: has no characters to make a vocabulary of", at, src.Path)
	}
	chars := make([]rune, 0, len(set))
	for r := range set {
		chars = append(chars, r)
	}
	slices.Sort(chars)
	return newCharTokenizer(chars), nil
}

// tokenizerFile is the stored form of a tokenizer.
type tokenizerFile struct {
	Kind    string `json:"kind"`
	Version int    `json:"version"`
	Chars   string `json:"chars,omitempty"` // KindChar: the characters in order of their ids
}

// Version 2 of KindChar has the tokens of conversations. A tokenizer stored as version 1 stays without them, since the model
// beside it has no rows for them.
const (
	tokenizerVersion     = 1
	tokenizerVersionChat = 2
)

// LoadTokenizer restores a tokenizer from what Marshal returned.
func LoadTokenizer(b []byte) (Tokenizer, error) {
	var f tokenizerFile
	dec := json.NewDecoder(bytes.NewReader(b))
	dec.DisallowUnknownFields()
	if err := dec.Decode(&f); err != nil {
		return nil, fmt.Errorf("tokenizer: %w", err)
	}
	if _, err := dec.Token(); err != io.EOF {
		return nil, fmt.Errorf("tokenizer: data after its end")
	}
	newest, known := map[string]int{KindByte: tokenizerVersion, KindChar: tokenizerVersionChat}[f.Kind]
	if known && (f.Version < tokenizerVersion || f.Version > newest) {
		return nil, fmt.Errorf("tokenizer: version %d of kind %s, this program reads versions %d to %d", f.Version, f.Kind, tokenizerVersion, newest)
	}
	switch f.Kind {
	case KindByte:
		if f.Chars != "" {
			return nil, fmt.Errorf("tokenizer: kind %s has characters", f.Kind)
		}
		return byteTokenizer{}, nil
	case KindChar:
		chars := []rune(f.Chars)
		for i := 1; i < len(chars); i++ {
			if chars[i-1] >= chars[i] {
				return nil, fmt.Errorf("tokenizer: characters %q and %q are not in ascending order", chars[i-1], chars[i])
			}
		}
		if len(chars) == 0 {
			return nil, fmt.Errorf("tokenizer: kind %s without characters", f.Kind)
		}
		t := newCharTokenizer(chars)
		t.chat = f.Version >= tokenizerVersionChat
		return t, nil
	}
	return nil, fmt.Errorf("tokenizer: kind %q, want %s", f.Kind, strings.Join(TokenizerKinds(), " or "))
}

// byteTokenizer's ids are the 256 bytes, then <eos>, <pad> and the tokens of conversations; 264 is a multiple of 8.
type byteTokenizer struct{}

const (
	byteEOS = 256 + iota
	bytePad
	byteChat // the first of chatTokens
	byteSize = 264
)

func (byteTokenizer) Kind() string { return KindByte }
func (byteTokenizer) Size() int    { return byteSize }
func (byteTokenizer) EOS() int32   { return byteEOS }
func (byteTokenizer) Pad() int32   { return bytePad }

func (t byteTokenizer) Encode(text string) []int32 {
	ids := make([]int32, len(text))
	for i := range len(text) {
		ids[i] = int32(text[i])
	}
	return ids
}

func (byteTokenizer) appendTokens(dst []int32, text []byte) []int32 {
	for _, c := range text {
		dst = append(dst, int32(c))
	}
	return dst
}

func (t byteTokenizer) Decode(ids []int32) string {
	b := make([]byte, 0, len(ids))
	for _, id := range ids {
		b = t.appendText(b, id)
	}
	return string(b)
}

func (byteTokenizer) appendText(dst []byte, id int32) []byte {
	switch {
	case id < 0 || id >= byteSize:
		return utf8.AppendRune(dst, utf8.RuneError)
	case id >= 256:
		return dst
	}
	return append(dst, byte(id))
}

func (byteTokenizer) Special(id int32) string {
	switch {
	case id == byteEOS:
		return "<eos>"
	case id == bytePad:
		return "<pad>"
	case id >= byteChat && id < byteSize:
		return chatTokens[id-byteChat]
	}
	return ""
}

func (t byteTokenizer) SpecialID(name string) (int32, bool) { return specialID(t, 256, name) }

// specialID looks for name among the ids from first on.
func specialID(t Tokenizer, first int, name string) (int32, bool) {
	for id := int32(first); name != "" && int(id) < t.Size(); id++ {
		if t.Special(id) == name {
			return id, true
		}
	}
	return 0, false
}

func (byteTokenizer) Marshal() ([]byte, error) {
	return json.Marshal(tokenizerFile{Kind: KindByte, Version: tokenizerVersion})
}

// charTokenizer's ids are the characters (Unicode code points) of one text in ascending order, then <eos>, <pad>, <unk> and
// the tokens of conversations.
// A character that is not in the vocabulary, and every byte that is not part of valid UTF-8, encodes to <unk>.
type charTokenizer struct {
	chars []rune
	ascii [utf8.RuneSelf]int32
	ids   map[rune]int32 // characters above ASCII
	chat  bool           // has chatTokens
}

func newCharTokenizer(chars []rune) *charTokenizer {
	t := &charTokenizer{chars: chars, ids: make(map[rune]int32), chat: true}
	for c := range t.ascii {
		t.ascii[c] = t.unk()
	}
	for id, c := range chars {
		if c < utf8.RuneSelf {
			t.ascii[c] = int32(id)
		} else {
			t.ids[c] = int32(id)
		}
	}
	return t
}

func (t *charTokenizer) Kind() string { return KindChar }
func (t *charTokenizer) EOS() int32   { return int32(len(t.chars)) }
func (t *charTokenizer) Pad() int32   { return int32(len(t.chars)) + 1 }
func (t *charTokenizer) unk() int32   { return int32(len(t.chars)) + 2 }

func (t *charTokenizer) Size() int {
	if t.chat {
		return int(t.unk()) + 1 + len(chatTokens)
	}
	return int(t.unk()) + 1
}

func (t *charTokenizer) Encode(text string) []int32 {
	return t.appendTokens(make([]int32, 0, len(text)), []byte(text))
}

func (t *charTokenizer) appendTokens(dst []int32, text []byte) []int32 {
	for i := 0; i < len(text); {
		if c := text[i]; c < utf8.RuneSelf {
			dst = append(dst, t.ascii[c])
			i++
			continue
		}
		r, size := utf8.DecodeRune(text[i:])
		i += size
		id, ok := t.ids[r]
		if !ok || size == 1 { // size 1: not UTF-8, even where the vocabulary has U+FFFD
			id = t.unk()
		}
		dst = append(dst, id)
	}
	return dst
}

func (t *charTokenizer) Decode(ids []int32) string {
	b := make([]byte, 0, len(ids))
	for _, id := range ids {
		b = t.appendText(b, id)
	}
	return string(b)
}

func (t *charTokenizer) appendText(dst []byte, id int32) []byte {
	switch {
	case id >= 0 && int(id) < len(t.chars):
		return utf8.AppendRune(dst, t.chars[id])
	case id == t.EOS() || id == t.Pad() || id > t.unk() && int(id) < t.Size():
		return dst
	}
	return utf8.AppendRune(dst, utf8.RuneError)
}

func (t *charTokenizer) Special(id int32) string {
	switch id {
	case t.EOS():
		return "<eos>"
	case t.Pad():
		return "<pad>"
	case t.unk():
		return "<unk>"
	}
	if id > t.unk() && int(id) < t.Size() {
		return chatTokens[id-t.unk()-1]
	}
	return ""
}

func (t *charTokenizer) SpecialID(name string) (int32, bool) { return specialID(t, len(t.chars), name) }

func (t *charTokenizer) Marshal() ([]byte, error) {
	version := tokenizerVersion
	if t.chat {
		version = tokenizerVersionChat
	}
	return json.Marshal(tokenizerFile{Kind: KindChar, Version: version, Chars: string(t.chars)})
}

// runeSet is a sink that collects the characters of documents.
type runeSet map[rune]struct{}

func (s runeSet) text(p []byte) error {
	for i := 0; i < len(p); {
		r, size := utf8.DecodeRune(p[i:])
		i += size
		if r == utf8.RuneError && size == 1 {
			continue
		}
		s[r] = struct{}{}
	}
	return nil
}

func (s runeSet) endDocument() error { return nil }

// A StreamDecoder decodes ids one by one, as they are generated, and never hands out half a character: bytes that may
// still become one are held back. All that Add and Flush return, joined, is what Decode returns for the same ids.
type StreamDecoder struct {
	tok     Tokenizer
	pending []byte
}

// NewStreamDecoder returns a decoder that has seen nothing.
func NewStreamDecoder(tok Tokenizer) *StreamDecoder { return &StreamDecoder{tok: tok} }

// Add returns the text that id completes, often none.
func (d *StreamDecoder) Add(id int32) string {
	d.pending = append(d.pending, d.tok.Decode([]int32{id})...)
	n := len(d.pending) - incomplete(d.pending)
	s := string(d.pending[:n])
	d.pending = append(d.pending[:0], d.pending[n:]...)
	return s
}

// Flush returns the bytes held back, which are not a whole character, and forgets them.
func (d *StreamDecoder) Flush() string {
	s := string(d.pending)
	d.pending = d.pending[:0]
	return s
}

// incomplete is how many bytes at the end of p begin a UTF-8 character that p does not end.
func incomplete(p []byte) int {
	for n := 1; n < utf8.UTFMax && n <= len(p); n++ {
		if tail := p[len(p)-n:]; utf8.RuneStart(tail[0]) {
			if utf8.FullRune(tail) {
				return 0
			}
			return n
		}
	}
	return 0
}
