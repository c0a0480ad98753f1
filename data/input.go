package data

import (
	"bufio"
	"bytes"
	"context"
	"crypto/sha256"
	"embed"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"maps"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"unicode/utf8"

	"github.com/klauspost/compress/gzip"
	"github.com/klauspost/compress/zstd"
)

const (
	formatText  = "text"
	formatJSONL = "jsonl"

	embeddedPrefix = "embedded:"

	chunkBytes = 256 << 10 // text is read and encoded in pieces of this size
	maxLine    = 64 << 20  // a longer JSONL line is a bad line: no document is, but a file of another kind may have no newline
	maxBadKept = 5         // bad lines kept with their reason; all are counted
)

//go:embed embedded/*.zst
var embeddedFS embed.FS

// embeddedFiles are the texts compiled in; embedded/ATTRIBUTION.md says where they come from.
var embeddedFiles = map[string]string{
	"shakespeare":     "embedded/tinyshakespeare.txt.zst",
	"tldr":            "embedded/tldr-chat.jsonl.zst",
	"gsm8k-solutions": "embedded/gsm8k-model-solutions.jsonl.zst",
}

func embeddedNames() string {
	names := slices.Sorted(maps.Keys(embeddedFiles))
	for i, n := range names {
		names[i] = embeddedPrefix + n
	}
	return strings.Join(names, ", ")
}

// An input is one file of a source.
type input struct {
	name string
	open func() (io.ReadCloser, error)
}

// resolve lists the files of src in order; at is the name of the setting that holds the path.
func resolve(at string, src SourceConfig) ([]input, error) {
	if err := checkPath(at, src.Path); err != nil {
		return nil, err
	}
	if name, ok := strings.CutPrefix(src.Path, embeddedPrefix); ok {
		file := embeddedFiles[name]
		return []input{{name: src.Path, open: func() (io.ReadCloser, error) { return embeddedFS.Open(file) }}}, nil
	}
	names := []string{src.Path}
	if _, err := os.Stat(src.Path); err != nil {
		if !errors.Is(err, fs.ErrNotExist) {
			return nil, fmt.Errorf("%s=%s: %w", at, src.Path, cause(err))
		}
		if !strings.ContainsAny(src.Path, "*?[") {
			return nil, fmt.Errorf("%s=%s: no such file", at, src.Path)
		}
		if names, err = filepath.Glob(src.Path); err != nil {
			return nil, fmt.Errorf("%s=%s: not a valid pattern", at, src.Path)
		}
		if len(names) == 0 {
			return nil, fmt.Errorf("%s=%s: no file matches", at, src.Path)
		}
		slices.Sort(names)
	}
	files := make([]input, len(names))
	for i, name := range names {
		switch st, err := os.Stat(name); {
		case err != nil:
			return nil, fmt.Errorf("%s=%s: %s: %w", at, src.Path, name, cause(err))
		case st.IsDir() && name == src.Path:
			return nil, fmt.Errorf("%s=%s: is a directory; name its files, such as %s", at, name, filepath.Join(name, "*.txt"))
		case st.IsDir():
			return nil, fmt.Errorf("%s=%s: %s is a directory", at, src.Path, name)
		case !st.Mode().IsRegular(): // a pipe cannot be read again by the next rank
			return nil, fmt.Errorf("%s=%s: %s is not a regular file", at, src.Path, name)
		}
		files[i] = input{name: name, open: func() (io.ReadCloser, error) { return os.Open(name) }}
	}
	return files, nil
}

// cause strips the operation and path that the caller names anyway.
func cause(err error) error {
	if pe, ok := err.(*fs.PathError); ok {
		return pe.Err
	}
	return err
}

// hash is the SHA-256 of the file as it is stored.
func (f input) hash() (sum [sha256.Size]byte, err error) {
	r, err := f.open()
	if err != nil {
		return sum, fmt.Errorf("%s: %w", f.name, cause(err))
	}
	defer r.Close()
	h := sha256.New()
	if _, err := io.Copy(h, r); err != nil {
		return sum, fmt.Errorf("%s: %w", f.name, cause(err))
	}
	h.Sum(sum[:0])
	return sum, nil
}

// format of the file as src reads it.
func (f input) format(src SourceConfig) string {
	if src.Format != "" {
		return src.Format
	}
	name := strings.ToLower(f.name)
	for _, ext := range []string{".gz", ".zst"} {
		name = strings.TrimSuffix(name, ext)
	}
	switch filepath.Ext(name) {
	case ".jsonl", ".ndjson", ".json":
		return formatJSONL
	}
	return formatText
}

// A sink takes documents piece by piece. No piece ends within a UTF-8 character; p may not be kept.
type sink interface {
	text(p []byte) error
	endDocument() error
}

// meta is what is counted while a source is read. It is stored with the tokens.
type meta struct {
	Documents int64     `json:"documents"`
	Empty     int64     `json:"empty"` // documents without a token, left out
	Bytes     int64     `json:"bytes"` // of text
	Lines     int64     `json:"lines"` // of JSONL, blank ones aside
	BadLines  int64     `json:"bad_lines"`
	Bad       []metaBad `json:"bad,omitempty"`     // the first maxBadKept
	Unknown   int64     `json:"unknown,omitempty"` // characters outside the vocabulary
	Digest    []byte    `json:"digest"`            // SHA-256 of tokens and document bounds
}

// metaBad is a BadLine with the file by number, since a file may move and stay the same file.
type metaBad struct {
	File   int    `json:"file"`
	Line   int64  `json:"line"`
	Reason string `json:"reason"`
}

// scan reads the file into out and returns the SHA-256 of the stored bytes it saw. Bad lines are counted in m under the
// file number.
func (f input) scan(ctx context.Context, src SourceConfig, out sink, m *meta, number int) (sum [sha256.Size]byte, err error) {
	raw, err := f.open()
	if err != nil {
		return sum, fmt.Errorf("%s: %w", f.name, cause(err))
	}
	defer raw.Close()
	before := m.Bytes
	h := sha256.New()
	stored := bufio.NewReaderSize(io.TeeReader(raw, h), chunkBytes)
	plain, done, err := decompress(stored, f.name)
	if err != nil {
		return sum, fmt.Errorf("%s: %w", f.name, err)
	}
	defer done()
	text := bufio.NewReaderSize(plain, 4096) // larger reads go past its buffer
	if head, _ := text.Peek(4); plain != io.Reader(stored) && packed(head) {
		return sum, fmt.Errorf("%s: is compressed twice; decompress it once", f.name)
	}
	if f.format(src) == formatJSONL {
		err = scanJSONL(ctx, text, src.field(), out, m, number)
	} else {
		err = scanText(ctx, text, make([]byte, chunkBytes), out, m)
	}
	if errors.Is(err, io.ErrUnexpectedEOF) {
		err = fmt.Errorf("compressed data ends too early, the file is cut off (after %d bytes of text)", m.Bytes-before)
	}
	if err != nil {
		return sum, fmt.Errorf("%s: %w", f.name, cause(err))
	}
	if _, err := io.Copy(io.Discard, stored); err != nil {
		return sum, fmt.Errorf("%s: %w", f.name, cause(err))
	}
	h.Sum(sum[:0])
	return sum, nil
}

var gzipMagic, zstdMagic = []byte{0x1f, 0x8b}, []byte{0x28, 0xb5, 0x2f, 0xfd}

// packed tells whether data that begins so is compressed.
func packed(head []byte) bool {
	return bytes.HasPrefix(head, gzipMagic) || bytes.HasPrefix(head, zstdMagic)
}

// decompress recognises gzip and zstd by their first bytes, and refuses a name that promises what the content is not.
func decompress(r *bufio.Reader, name string) (io.Reader, func(), error) {
	head, err := r.Peek(4)
	if err != nil && err != io.EOF {
		return nil, nil, err
	}
	name = strings.ToLower(name)
	switch {
	case bytes.HasPrefix(head, gzipMagic):
		z, err := gzip.NewReader(r)
		if err == io.EOF {
			err = io.ErrUnexpectedEOF
		}
		if errors.Is(err, io.ErrUnexpectedEOF) {
			return nil, nil, errors.New("gzip header is cut off")
		}
		if err != nil {
			return nil, nil, err
		}
		return z, func() { z.Close() }, nil
	case bytes.HasPrefix(head, zstdMagic):
		z, err := zstd.NewReader(r, zstd.WithDecoderConcurrency(1))
		if err != nil {
			return nil, nil, err
		}
		return z, z.Close, nil
	case strings.HasSuffix(name, ".gz") && len(head) > 0:
		return nil, nil, errors.New("named .gz but is not gzip data")
	case strings.HasSuffix(name, ".zst") && len(head) > 0:
		return nil, nil, errors.New("named .zst but is not zstd data")
	}
	return r, func() {}, nil
}

// scanText hands the bytes of one document to out as they are, in pieces of buf's size.
func scanText(ctx context.Context, r io.Reader, buf []byte, out sink, m *meta) error {
	held := 0 // bytes at the head of buf that begin a character
	for {
		if err := ctx.Err(); err != nil {
			return err
		}
		n, err := fill(r, buf[held:])
		if err != nil && err != io.EOF {
			return err
		}
		m.Bytes += int64(n)
		n += held
		held = 0
		if err == nil {
			held = incomplete(buf[:n])
		}
		if err := out.text(buf[:n-held]); err != nil {
			return err
		}
		if err == io.EOF {
			return out.endDocument()
		}
		copy(buf, buf[n-held:n])
	}
}

// fill is io.ReadFull, except that io.EOF alone means the end: io.ErrUnexpectedEOF is left to decompressors, where it means
// a file that is cut off.
func fill(r io.Reader, buf []byte) (n int, err error) {
	for n < len(buf) && err == nil {
		var k int
		k, err = r.Read(buf[n:])
		n += k
	}
	if n == len(buf) && err == io.EOF {
		err = nil // the next call sees it
	}
	return n, err
}

// scanJSONL hands field of the object on each line to out as a document. Blank lines are nothing.
func scanJSONL(ctx context.Context, r io.Reader, field string, out sink, m *meta, number int) error {
	br := bufio.NewReaderSize(r, chunkBytes)
	var buf []byte
	for line := int64(1); ; line++ {
		if err := ctx.Err(); err != nil {
			return err
		}
		row, long, err := readLine(br, &buf)
		if err != nil && err != io.EOF {
			return err
		}
		if line == 1 {
			row = bytes.TrimPrefix(row, []byte("\ufeff"))
		}
		if row = bytes.TrimSpace(row); len(row) > 0 {
			m.Lines++
			text, reason := "", fmt.Sprintf("longer than %d MiB", maxLine>>20)
			if !long {
				text, reason = textOf(row, field)
			}
			if reason != "" {
				m.BadLines++
				if len(m.Bad) < maxBadKept {
					m.Bad = append(m.Bad, metaBad{number, line, reason})
				}
			} else {
				m.Bytes += int64(len(text))
				if err := errors.Join(out.text([]byte(text)), out.endDocument()); err != nil {
					return err
				}
			}
		}
		if err == io.EOF {
			return nil
		}
	}
}

// readLine returns the next line, valid until the next call, and whether it was cut at maxLine.
func readLine(r *bufio.Reader, buf *[]byte) (line []byte, long bool, err error) {
	*buf = (*buf)[:0]
	for {
		part, err := r.ReadSlice('\n')
		if len(*buf)+len(part) > maxLine {
			part, long = part[:maxLine-len(*buf)], true
		}
		*buf = append(*buf, part...)
		if err != bufio.ErrBufferFull {
			return *buf, long, err
		}
	}
}

// textOf returns the string in field of the JSON object on a line, or why there is none. Where encoding/json would put
// U+FFFD in the place of what it cannot read, the line is bad: training text is taken as it is or not at all.
func textOf(line []byte, field string) (text, reason string) {
	if !utf8.Valid(line) {
		return "", "not valid UTF-8"
	}
	var object map[string]json.RawMessage
	if err := json.Unmarshal(line, &object); err != nil {
		if _, ok := errors.AsType[*json.UnmarshalTypeError](err); ok {
			return "", "not a JSON object"
		}
		return "", "not JSON: " + err.Error()
	}
	raw, ok := object[field]
	switch {
	case object == nil:
		return "", "not a JSON object"
	case !ok:
		return "", fmt.Sprintf("no field %q", field)
	case raw[0] != '"':
		return "", fmt.Sprintf("field %q is not a string", field)
	case loneSurrogate(raw):
		return "", fmt.Sprintf("field %q has half a surrogate pair", field)
	}
	if err := json.Unmarshal(raw, &text); err != nil {
		return "", "not JSON: " + err.Error()
	}
	return text, ""
}

// loneSurrogate says whether a valid JSON string has a \u escape of half a UTF-16 surrogate pair (RFC 8259 section 8.2).
func loneSurrogate(s []byte) bool {
	unit := func(i int) int { // the code unit escaped at s[i], or -1
		if i+6 > len(s) || s[i] != '\\' || s[i+1] != 'u' {
			return -1
		}
		v := 0
		for _, c := range s[i+2 : i+6] {
			d := int(c) - '0'
			if d > 9 {
				d = int(c|0x20) - 'a' + 10
			}
			v = v<<4 | d
		}
		return v
	}
	for i := 0; i < len(s); i++ {
		if s[i] != '\\' {
			continue
		}
		switch u := unit(i); {
		case u < 0:
			i++ // the escaped character, which may be a backslash
		case u >= 0xdc00 && u <= 0xdfff:
			return true
		case u >= 0xd800 && u <= 0xdbff:
			if low := unit(i + 6); low < 0xdc00 || low > 0xdfff {
				return true
			}
			i += 11
		default:
			i += 5
		}
	}
	return false
}
