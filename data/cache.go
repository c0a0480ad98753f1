package data

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
	"hash/crc32"
	"io"
	"os"
	"path/filepath"
	"time"
)

// A source's tokens are kept in one file, named by a SHA-256 over everything they follow from: this format's version, the
// tokenizer, how the source is read and the content of its files. A file is written under a temporary name and renamed, so
// it is whole or absent; it is never written again, so a mapping of it stays good while another rank replaces it.
//
//	offset  size  (little endian)
//	0       8     "moetoken"
//	8       4     version
//	12      4     width of a token in bytes, 2 or 4
//	16      8     T: tokens
//	24      8     D: documents
//	32      8     M: bytes of meta
//	40      32    the SHA-256 of the name
//	72      4     CRC-32C of all that follows the header
//	76      4     CRC-32C of bytes 0..75
//	80            T tokens, zeros up to a multiple of 8
//	              D times 8 bytes: index of a document's first token, ascending, the first 0
//	              meta as JSON
const (
	storeMagic   = "moetoken"
	storeVersion = 1
	headerSize   = 80
)

var castagnoli = crc32.MakeTable(crc32.Castagnoli)

// A store is the tokens of a source: documents one after another, each ended by EOS.
type store struct {
	meta
	raw    []byte // the file, mapped or read
	width  int
	tokens int64
	starts []byte // document starts, 8 bytes each
	unmap  func() error
}

// parseStore reads a store from b, which it keeps. A nil want accepts any key.
func parseStore(b []byte, want []byte) (*store, error) {
	if len(b) < headerSize || string(b[:8]) != storeMagic {
		return nil, errors.New("not a token file")
	}
	le := binary.LittleEndian
	if crc32.Checksum(b[:76], castagnoli) != le.Uint32(b[76:]) {
		return nil, errors.New("header is corrupt")
	}
	if v := le.Uint32(b[8:]); v != storeVersion {
		return nil, fmt.Errorf("version %d, want %d", v, storeVersion)
	}
	width, tokens, docs, metaLen := uint64(le.Uint32(b[12:])), le.Uint64(b[16:]), le.Uint64(b[24:]), le.Uint64(b[32:])
	size := uint64(len(b))
	if width != 2 && width != 4 || tokens > size || docs > size || metaLen > size ||
		size != headerSize+pad8(tokens*width)+docs*8+metaLen {
		return nil, fmt.Errorf("length %d does not fit its header", size)
	}
	if want != nil && string(b[40:72]) != string(want) {
		return nil, errors.New("made from something else")
	}
	if crc32.Checksum(b[headerSize:], castagnoli) != le.Uint32(b[72:]) {
		return nil, errors.New("checksum is wrong")
	}
	at := headerSize + pad8(tokens*width)
	s := &store{raw: b, width: int(width), tokens: int64(tokens), starts: b[at : at+docs*8]}
	if err := json.Unmarshal(b[at+docs*8:], &s.meta); err != nil {
		return nil, err
	}
	for d := range int(docs) {
		if i := s.start(d); d == 0 && i != 0 || d > 0 && i <= s.start(d-1) || i >= s.tokens {
			return nil, errors.New("document bounds are wrong")
		}
	}
	return s, nil
}

func pad8(n uint64) uint64 { return (n + 7) &^ 7 }

func (s *store) docs() int { return len(s.starts) / 8 }

// start is the index of document d's first token.
func (s *store) start(d int) int64 { return int64(binary.LittleEndian.Uint64(s.starts[8*d:])) }

// read fills dst with the tokens from index first on.
func (s *store) read(dst []int32, first int64) {
	if s.width == 2 {
		b := s.raw[headerSize+2*first:]
		for i := range dst {
			dst[i] = int32(binary.LittleEndian.Uint16(b[2*i:]))
		}
		return
	}
	b := s.raw[headerSize+4*first:]
	for i := range dst {
		dst[i] = int32(binary.LittleEndian.Uint32(b[4*i:]))
	}
}

func (s *store) close() error {
	if s.unmap == nil {
		return nil
	}
	err := s.unmap()
	s.raw, s.starts, s.unmap = nil, nil, nil
	return err
}

// A builder is the sink that writes a store: a header of zeros first, the header that finish returns to be put there last.
type builder struct {
	tok   Tokenizer
	enc   appender
	unk   int32 // id counted as unknown, -1: the kind has none
	meta  *meta
	file  *bufio.Writer
	out   io.Writer // file, crc and digest
	crc   hash.Hash32
	sum   hash.Hash
	ids   []int32
	bytes []byte
	width int

	tokens, opened int64 // all tokens; those before the document being read
	starts         []int64
}

// An appender is a tokenizer that encodes without allocating: what Encode returns, appended to dst.
type appender interface {
	appendTokens(dst []int32, text []byte) []int32
}

func newBuilder(w io.Writer, tok Tokenizer, m *meta) (*builder, error) {
	enc, ok := tok.(appender)
	if !ok {
		return nil, fmt.Errorf("tokenizer kind %s cannot encode a stream", tok.Kind())
	}
	b := &builder{tok: tok, enc: enc, unk: -1, meta: m, file: bufio.NewWriterSize(w, chunkBytes),
		crc: crc32.New(castagnoli), sum: sha256.New(), width: 2}
	if c, ok := tok.(*charTokenizer); ok {
		b.unk = c.unk()
	}
	if tok.Size() > 1<<16 {
		b.width = 4
	}
	b.out = io.MultiWriter(b.file, b.crc, b.sum)
	_, err := b.file.Write(make([]byte, headerSize))
	return b, err
}

func (b *builder) text(p []byte) error {
	b.ids = b.enc.appendTokens(b.ids[:0], p)
	if b.unk >= 0 {
		for _, id := range b.ids {
			if id == b.unk {
				b.meta.Unknown++
			}
		}
	}
	return b.write(b.ids...)
}

func (b *builder) endDocument() error {
	if b.tokens == b.opened {
		b.meta.Empty++
		return nil
	}
	b.meta.Documents++
	b.starts = append(b.starts, b.opened)
	err := b.write(b.tok.EOS())
	b.opened = b.tokens
	return err
}

func (b *builder) write(ids ...int32) error {
	b.bytes = b.bytes[:0]
	for _, id := range ids {
		if b.width == 2 {
			b.bytes = binary.LittleEndian.AppendUint16(b.bytes, uint16(id))
		} else {
			b.bytes = binary.LittleEndian.AppendUint32(b.bytes, uint32(id))
		}
	}
	b.tokens += int64(len(ids))
	_, err := b.out.Write(b.bytes)
	return err
}

// finish writes what follows the tokens and returns the header.
func (b *builder) finish(name []byte) ([]byte, error) {
	n := uint64(b.tokens) * uint64(b.width)
	tail := make([]byte, pad8(n)-n)
	for _, s := range b.starts {
		tail = binary.LittleEndian.AppendUint64(tail, uint64(s))
	}
	if _, err := b.out.Write(tail); err != nil {
		return nil, err
	}
	b.meta.Digest = b.sum.Sum(nil)
	js, err := json.Marshal(b.meta)
	if err != nil {
		return nil, err
	}
	if _, err := b.out.Write(js); err != nil {
		return nil, err
	}
	if err := b.file.Flush(); err != nil {
		return nil, err
	}
	le := binary.LittleEndian
	h := append(make([]byte, 0, headerSize), storeMagic...)
	h = le.AppendUint32(h, storeVersion)
	h = le.AppendUint32(h, uint32(b.width))
	h = le.AppendUint64(h, uint64(b.tokens))
	h = le.AppendUint64(h, uint64(len(b.starts)))
	h = le.AppendUint64(h, uint64(len(js)))
	h = append(h, name...)
	h = le.AppendUint32(h, b.crc.Sum32())
	return le.AppendUint32(h, crc32.Checksum(h, castagnoli)), nil
}

// A loader turns sources into stores, through the cache directory if dir is not empty.
type loader struct {
	tok   Tokenizer
	state []byte // tok.Marshal
	dir   string
}

// cacheDir makes the directory that setting names ("" is the user's own, CacheOff none), or says why there is none.
func cacheDir(setting string) (dir, note string) {
	if setting == CacheOff {
		return "", ""
	}
	dir = setting
	if dir == "" {
		base, err := os.UserCacheDir()
		if err != nil {
			return "", fmt.Sprintf("tokens are kept in memory, not in a cache: %v", err)
		}
		dir = filepath.Join(base, "moetor", "tokens")
	}
	if err := os.MkdirAll(dir, 0o777); err != nil {
		return "", fmt.Sprintf("tokens are kept in memory: no cache directory %s: %v", dir, cause(err))
	}
	return dir, ""
}

// load returns the tokens of files; sums are the hashes of the files' contents. A note says why the cache was not used.
func (l *loader) load(ctx context.Context, src SourceConfig, files []input, sums [][32]byte) (s *store, cached bool, note string, err error) {
	h := sha256.New()
	fmt.Fprintf(h, "tokens %d\n%d %s\n", storeVersion, len(l.state), l.state)
	for i, f := range files {
		fmt.Fprintf(h, "%s %q %x\n", f.format(src), src.field(), sums[i])
	}
	name := h.Sum(nil)
	if l.dir == "" {
		s, err = l.memory(ctx, src, files, sums, name)
		return s, false, "", err
	}
	path := filepath.Join(l.dir, hex.EncodeToString(name[:16])+".tokens")
	if s, err := openStore(path, name); err == nil {
		return s, true, "", nil
	}
	// Ranks of one host start together: the first builds, the others wait for it. Where files cannot be locked all build,
	// and each renames a whole file to the same name.
	unlock, locked, err := lockFile(ctx, path+".lock")
	if err != nil {
		return nil, false, "", err
	}
	defer unlock()
	if s, err := openStore(path, name); err == nil {
		return s, true, "", nil
	}
	if locked { // what a killed process left
		stale, _ := filepath.Glob(path + ".tmp-*")
		for _, f := range stale {
			os.Remove(f)
		}
	}
	err = l.file(ctx, src, files, sums, name, path)
	if err == nil {
		s, err = openStore(path, name)
	}
	if writeErr, ok := errors.AsType[*cacheError](err); ok {
		s, err = l.memory(ctx, src, files, sums, name)
		return s, false, fmt.Sprintf("tokens are kept in memory: %v", writeErr), err
	}
	return s, false, "", err
}

// cacheError is a failure of the cache, which training can do without, as opposed to one of the source.
type cacheError struct{ err error }

func (e *cacheError) Error() string { return "cache: " + e.err.Error() }
func (e *cacheError) Unwrap() error { return e.err }

// cacheWriter marks the errors of a cache file.
type cacheWriter struct{ w io.Writer }

func (c cacheWriter) Write(p []byte) (int, error) {
	n, err := c.w.Write(p)
	if err != nil {
		err = &cacheError{err}
	}
	return n, err
}

func openStore(path string, name []byte) (*store, error) {
	b, unmap, err := mapFile(path)
	if err != nil {
		return nil, &cacheError{err}
	}
	s, err := parseStore(b, name)
	if err != nil {
		unmap()
		return nil, &cacheError{fmt.Errorf("%s: %w", path, err)}
	}
	s.unmap = unmap
	return s, nil
}

func (l *loader) file(ctx context.Context, src SourceConfig, files []input, sums [][32]byte, name []byte, path string) (err error) {
	f, err := os.CreateTemp(l.dir, filepath.Base(path)+".tmp-*")
	if err != nil {
		return &cacheError{err}
	}
	defer func() {
		if err != nil {
			f.Close()
			os.Remove(f.Name())
		}
	}()
	header, err := l.build(ctx, cacheWriter{f}, src, files, sums, name)
	if err != nil {
		return err
	}
	if _, err := f.WriteAt(header, 0); err != nil {
		return &cacheError{err}
	}
	if err := f.Chmod(0o644); err != nil {
		return &cacheError{err}
	}
	if err := f.Close(); err != nil {
		return &cacheError{err}
	}
	if err := os.Rename(f.Name(), path); err != nil {
		return &cacheError{err}
	}
	return nil
}

func (l *loader) memory(ctx context.Context, src SourceConfig, files []input, sums [][32]byte, name []byte) (*store, error) {
	var buf buffer
	header, err := l.build(ctx, &buf, src, files, sums, name)
	if err != nil {
		return nil, err
	}
	copy(buf, header)
	return parseStore(buf, name)
}

type buffer []byte

func (b *buffer) Write(p []byte) (int, error) {
	*b = append(*b, p...)
	return len(p), nil
}

func (l *loader) build(ctx context.Context, w io.Writer, src SourceConfig, files []input, sums [][32]byte, name []byte) ([]byte, error) {
	m := new(meta)
	b, err := newBuilder(w, l.tok, m)
	if err != nil {
		return nil, err
	}
	for i, f := range files {
		sum, err := f.scan(ctx, src, b, m, i)
		if err != nil {
			return nil, err
		}
		if sum != sums[i] {
			return nil, fmt.Errorf("%s: changed while it was read", f.name)
		}
	}
	return b.finish(name)
}

// lockPoll is how often a rank that waits for another one's build looks again.
const lockPoll = 20 * time.Millisecond

// lockFile waits for the lock of that name. locked is false where the system or the file system has none, which is no
// error. unlock removes the file, so a lock counts only while the name still leads to the file that was locked.
func lockFile(ctx context.Context, path string) (unlock func(), locked bool, err error) {
	for {
		f, err := os.OpenFile(path, os.O_CREATE|os.O_RDWR, 0o666)
		if err != nil {
			return func() {}, false, nil
		}
		held, err := tryLock(f)
		if err != nil {
			os.Remove(path)
			f.Close()
			return func() {}, false, nil
		}
		if held {
			mine, err1 := f.Stat()
			named, err2 := os.Stat(path)
			if err1 == nil && err2 == nil && os.SameFile(mine, named) {
				return func() { os.Remove(path); f.Close() }, true, nil
			}
		}
		f.Close()
		if held {
			continue // the one before us removed it: try its successor
		}
		select {
		case <-ctx.Done():
			return nil, false, context.Cause(ctx)
		case <-time.After(lockPoll):
		}
	}
}
