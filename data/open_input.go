package data

import (
	"bufio"
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"unicode/utf8"
)

// A File is one file of a source, for packages that read rows of their own from it.
type File struct{ in input }

// Files lists the files of src in the order in which Open reads them; at names the setting that holds the path.
func Files(at string, src SourceConfig) ([]File, error) {
	list, err := resolve(at, src)
	if err != nil {
		return nil, err
	}
	files := make([]File, len(list))
	for i, in := range list {
		files[i] = File{in}
	}
	return files, nil
}

// Name is the path of the file, or embedded:NAME.
func (f File) Name() string { return f.in.name }

// Open returns the content, decompressed. Errors name the file, those of Read too.
func (f File) Open() (io.ReadCloser, error) {
	raw, err := f.in.open()
	if err != nil {
		return nil, f.in.fault(err)
	}
	stored := bufio.NewReaderSize(raw, chunkBytes)
	plain, done, err := decompress(stored, f.in.name)
	if err != nil {
		raw.Close()
		return nil, f.in.fault(err)
	}
	content := bufio.NewReader(plain)
	if head, _ := content.Peek(4); plain != io.Reader(stored) && packed(head) {
		done()
		raw.Close()
		return nil, f.in.fault(errors.New("is compressed twice; decompress it once"))
	}
	return &openFile{in: f.in, r: content, close: func() error { done(); return raw.Close() }}, nil
}

// OpenAt is Open for formats that are read from their end. A compressed file is decompressed into memory.
func (f File) OpenAt() (r io.ReaderAt, size int64, close func() error, err error) {
	raw, err := f.in.open()
	if err != nil {
		return nil, 0, nil, f.in.fault(err)
	}
	if file, ok := raw.(*os.File); ok {
		var head [4]byte
		if _, err := file.ReadAt(head[:], 0); err == nil && !packed(head[:]) {
			st, err := file.Stat()
			if err != nil {
				raw.Close()
				return nil, 0, nil, f.in.fault(err)
			}
			return file, st.Size(), file.Close, nil
		}
	}
	raw.Close()
	content, err := f.Open()
	if err != nil {
		return nil, 0, nil, err
	}
	defer content.Close()
	b, err := io.ReadAll(content)
	if err != nil {
		return nil, 0, nil, err
	}
	return bytes.NewReader(b), int64(len(b)), func() error { return nil }, nil
}

func (f input) fault(err error) error {
	if errors.Is(err, io.ErrUnexpectedEOF) {
		err = errors.New("compressed data ends too early, the file is cut off")
	}
	return fmt.Errorf("%s: %w", f.name, cause(err))
}

type openFile struct {
	in    input
	r     io.Reader
	close func() error
}

func (f *openFile) Read(p []byte) (int, error) {
	n, err := f.r.Read(p)
	if err != nil && err != io.EOF {
		err = f.in.fault(err)
	}
	return n, err
}

func (f *openFile) Close() error { return f.close() }

// ScanLines calls each for the lines of r that are not blank, with their numbers from 1 and without the space around them.
// reason says why a line cannot be a row (too long, not UTF-8), or is empty. line may not be kept.
func ScanLines(ctx context.Context, r io.Reader, each func(number int64, line []byte, reason string) error) error {
	br := bufio.NewReaderSize(r, chunkBytes)
	var buf []byte
	for number := int64(1); ; number++ {
		if ctx.Err() != nil {
			return context.Cause(ctx)
		}
		line, long, err := readLine(br, &buf)
		if err != nil && err != io.EOF {
			return err
		}
		if number == 1 {
			line = bytes.TrimPrefix(line, []byte("\ufeff"))
		}
		if line = bytes.TrimSpace(line); len(line) > 0 {
			reason := ""
			switch {
			case long:
				reason = fmt.Sprintf("longer than %d MiB", maxLine>>20)
			case !utf8.Valid(line):
				reason = "not valid UTF-8"
			}
			if err := each(number, line, reason); err != nil {
				return err
			}
		}
		if err == io.EOF {
			return nil
		}
	}
}

// LoneSurrogate says whether a \u escape in valid JSON is half a UTF-16 surrogate pair, for which encoding/json would put
// U+FFFD without a word.
func LoneSurrogate(raw []byte) bool { return loneSurrogate(raw) }
