package chat

import (
	"bufio"
	"context"
	"crypto/sha256"
	"encoding/binary"
	"encoding/hex"
	"encoding/json"
	"errors"
	"fmt"
	"hash"
	"io"
	"maps"
	"slices"
	"strings"
	"unicode/utf8"

	"moetor/data"
)

const maxBadKept = 5 // bad rows kept with their reason; all are counted

// A BadRow is an error with which the function given to [Read] refuses an example: the row is counted as a bad one.
type BadRow struct{ Reason string }

func (b BadRow) Error() string { return b.Reason }

// Read calls each with the examples of a source in order and reports what it found. at is the name of the source's settings
// ("stages.1.data.0") or the flag that names it ("--data"), for errors.
//
// Files hold JSON lines, one JSON array, or Parquet, which is seen from their content; all may be compressed by gzip or zstd.
// The shape is that of the first good row, and a row of another shape is bad. Bad too are rows with an unknown role, a
// content that is no string, an empty answer, no answer at all, or a system message that is not the first turn. Bad rows are
// skipped and counted, and above the source's max_bad_share the source is refused. Allowed are a first turn of the assistant
// (a prompt may be an empty list), several turns of one role in a row, empty turns that are no answer, and conversations that
// end without an answer; what is unusual is noted. Common other names of roles (human, gpt, model, function and so on) are
// read as the four, and noted too.
//
// An error of each ends the reading, except that a [BadRow] makes the row a bad one.
func Read(ctx context.Context, src data.SourceConfig, at string, each func(Example) error) (ReadReport, error) {
	return ReadShapes(ctx, src, at, nil, each)
}

// ReadShapes is Read for sources of the shapes in want only; nil means all. Where a row fits several shapes, as a preference
// with its conversation under "messages" does, want decides.
func ReadShapes(ctx context.Context, src data.SourceConfig, at string, want []Shape, each func(Example) error) (ReadReport, error) {
	name := pathName(at)
	if errs := src.Validate(at); len(errs) > 0 {
		return ReadReport{}, errs[0]
	}
	src = src.Resolved()
	switch {
	case src.Format == "text":
		return ReadReport{}, fmt.Errorf("%s=%s: format=text holds no conversations; want JSONL or Parquet", name, src.Path)
	case src.Field != (data.SourceConfig{}).Resolved().Field:
		return ReadReport{}, fmt.Errorf("%s=%s: field=%s has no effect, the fields of conversations are found by their shape", name, src.Path, src.Field)
	}
	files, err := data.Files(name, src)
	if err != nil {
		return ReadReport{}, err
	}
	if want == nil {
		want = allShapes
	}
	r := reader{want: want, each: each, parser: parser{alias: make(map[string]int64)}, hash: sha256.New()}
	r.report.Files = len(files)
	for _, f := range files {
		if err := r.file(ctx, f); err != nil {
			return r.report, err
		}
	}
	if limit := *src.MaxBadShare; float64(r.report.Bad) > limit*float64(r.report.Rows) {
		return r.report, fmt.Errorf("%s=%s: %d of %d rows are bad, above max_bad_share=%v; first: %s",
			name, src.Path, r.report.Bad, r.report.Rows, limit, r.report.BadRows[0])
	}
	if r.report.Shape == 0 {
		return r.report, fmt.Errorf("%s=%s: holds no conversations", name, src.Path)
	}
	r.report.Digest = hex.EncodeToString(r.hash.Sum(nil))
	r.report.Notes = r.parser.notes()
	return r.report, nil
}

func pathName(at string) string {
	if at == "" {
		return "path"
	}
	if strings.HasPrefix(at, "--") {
		return at
	}
	return at + ".path"
}

// reader reads the files of one source.
type reader struct {
	want   []Shape
	each   func(Example) error
	parser parser
	report ReadReport
	hash   hash.Hash
}

// file reads one file by what its content looks like.
func (r *reader) file(ctx context.Context, f data.File) error {
	content, err := f.Open()
	if err != nil {
		return err
	}
	defer content.Close()
	br := bufio.NewReader(content)
	head, err := br.Peek(4)
	if err != nil && err != io.EOF {
		return err
	}
	if string(head) == parquetMagic {
		content.Close()
		return r.parquet(ctx, f)
	}
	if first, err := firstByte(br); err != nil {
		return err
	} else if first == '[' {
		return r.array(ctx, f.Name(), br)
	}
	return data.ScanLines(ctx, br, func(line int64, row []byte, reason string) error {
		return r.json(f.Name(), line, row, reason)
	})
}

// firstByte returns the first byte that is neither space nor byte order mark, leaving it unread; 0 at the end.
func firstByte(br *bufio.Reader) (byte, error) {
	if head, _ := br.Peek(3); string(head) == "\ufeff" {
		br.Discard(3)
	}
	for n := 1; ; n++ { // not consumed: lines are counted from the first
		head, err := br.Peek(n)
		if len(head) < n {
			if err == io.EOF || err == bufio.ErrBufferFull {
				err = nil
			}
			return 0, err
		}
		if c := head[n-1]; !strings.ContainsRune(" \t\r\n", rune(c)) {
			return c, nil
		}
	}
}

// array reads a file that is one JSON array, as Alpaca and ShareGPT files are distributed.
func (r *reader) array(ctx context.Context, file string, in io.Reader) error {
	dec := json.NewDecoder(in)
	syntax := func(number int64, err error) error {
		if _, ok := errors.AsType[*json.SyntaxError](err); ok || err == io.EOF || err == io.ErrUnexpectedEOF {
			return fmt.Errorf("%s: element %d of the JSON array: not JSON: %w", file, number, err)
		}
		return err
	}
	if _, err := dec.Token(); err != nil {
		return syntax(1, err)
	}
	number := int64(1)
	for ; dec.More(); number++ {
		if ctx.Err() != nil {
			return context.Cause(ctx)
		}
		var row json.RawMessage
		if err := dec.Decode(&row); err != nil {
			return syntax(number, err)
		}
		reason := ""
		if !utf8.Valid(row) {
			reason = "not valid UTF-8"
		}
		if err := r.json(file, number, row, reason); err != nil {
			return err
		}
	}
	if _, err := dec.Token(); err != nil {
		return syntax(number, err)
	}
	if _, err := dec.Token(); err != io.EOF {
		return fmt.Errorf("%s: data after the end of the JSON array; conversations are one array or an object per line", file)
	}
	return nil
}

// json takes a row in JSON.
func (r *reader) json(file string, line int64, row []byte, reason string) error {
	var fields map[string]json.RawMessage
	if reason == "" {
		if err := json.Unmarshal(row, &fields); err != nil {
			reason = "not JSON: " + err.Error()
			if _, ok := errors.AsType[*json.UnmarshalTypeError](err); ok {
				reason = "not a JSON object"
			}
		} else if fields == nil {
			reason = "not a JSON object"
		}
	}
	return r.row(file, line, fields, reason)
}

// row takes one row, or the reason why it is none.
func (r *reader) row(file string, line int64, fields map[string]json.RawMessage, reason string) error {
	r.report.Rows++
	bad := func(reason string) error {
		r.report.Bad++
		if len(r.report.BadRows) < maxBadKept {
			r.report.BadRows = append(r.report.BadRows, data.BadLine{File: file, Line: line, Reason: reason})
		}
		return nil
	}
	if reason != "" {
		return bad(reason)
	}
	shape, ok := detect(fields, r.want)
	if !ok {
		return bad(r.unknownShape(fields))
	}
	if r.report.Shape != 0 && shape != r.report.Shape {
		return bad(fmt.Sprintf("is %s, but the first row is %s", shape, r.report.Shape))
	}
	e, err := r.parser.parse(fields, shape)
	if err != nil {
		return bad(err.Error())
	}
	e.File, e.Line = file, line
	if err := r.each(e); err != nil {
		if b, ok := errors.AsType[BadRow](err); ok {
			return bad(b.Reason)
		}
		return err
	}
	r.report.Shape = shape
	r.digest(shape, e)
	return nil
}

// unknownShape says what a row is that is none of the shapes wanted.
func (r *reader) unknownShape(fields map[string]json.RawMessage) string {
	names := make([]string, len(r.want))
	for i, s := range r.want {
		names[i] = s.String()
	}
	want := strings.Join(names, "; ")
	if s, ok := Detect(fields); ok {
		return fmt.Sprintf("is %s, want one of: %s", s, want)
	}
	have := slices.Sorted(maps.Keys(fields))
	if len(have) > 12 {
		have = append(have[:12], "…")
	}
	return fmt.Sprintf("has the fields [%.200s], want one of: %s", strings.Join(have, " "), want)
}

// digest adds e to the hash, every part after its length.
func (r *reader) digest(s Shape, e Example) {
	var b []byte
	b = append(b, byte(s))
	for _, list := range [][]Message{e.Prompt, e.Messages, e.Chosen, e.Rejected, e.Completion} {
		b = binary.AppendUvarint(b, uint64(len(list)))
		for _, m := range list {
			b = append(b, m.Role[0]) // the four differ in it
			b = binary.AppendUvarint(b, uint64(len(m.Content)))
			b = append(b, m.Content...)
		}
	}
	if e.Label {
		b = append(b, 1)
	} else {
		b = append(b, 0)
	}
	r.hash.Write(b)
}
