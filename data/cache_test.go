package data

import (
	"bytes"
	"context"
	"errors"
	"os"
	"path/filepath"
	"runtime"
	"slices"
	"strings"
	"sync"
	"testing"
)

func open(t testing.TB, cfg OpenConfig) *Corpus {
	t.Helper()
	if cfg.Tokenizer == nil {
		cfg.Tokenizer = byteTokenizer{}
	}
	if cfg.Cache == "" {
		cfg.Cache = CacheOff
	}
	c, err := Open(t.Context(), cfg)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := c.Close(); err != nil {
			t.Error(err)
		}
	})
	return c
}

// text is the tokens of a source in its order, which must be that of the text.
func text(t testing.TB, s Source) string {
	t.Helper()
	var b Batch
	if err := s.Read(t.Context(), 0, int(s.Samples()), &b); err != nil {
		t.Fatal(err)
	}
	ids := b.Tokens[:1:1]
	for r := range b.Seqs {
		ids = append(ids, b.Targets[r*b.Len:][:b.Valid[r]]...)
	}
	return byteTokenizer{}.Decode(ids)
}

func valOnly(path string) OpenConfig {
	return OpenConfig{Val: ValConfig{Data: []SourceConfig{{Path: path}}}, Len: 5}
}

func TestCacheIsUsedAndRebuilt(t *testing.T) {
	path := write(t, "a.txt", []byte("first version"))
	cfg := valOnly(path)
	cfg.Cache = filepath.Join(t.TempDir(), "new", "cache")
	look := func(why string, cached bool, want string) *Corpus {
		t.Helper()
		c := open(t, cfg)
		if c.Report.Sources[0].Cached != cached || text(t, c.Val) != want || len(c.Report.Notes) > 0 {
			t.Fatalf("%s: cached %t %q %q", why, c.Report.Sources[0].Cached, text(t, c.Val), c.Report.Notes)
		}
		return c
	}
	first := look("empty cache", false, "first version")
	look("again", true, "first version")

	st, err := os.Stat(path)
	if err != nil {
		t.Fatal(err)
	}
	write(t, path, []byte("other version"))
	if err := os.Chtimes(path, st.ModTime(), st.ModTime()); err != nil {
		t.Fatal(err)
	}
	second := look("same size and time, other content", false, "other version")
	if first.Val.Fingerprint() == second.Val.Fingerprint() {
		t.Error("other content, same fingerprint")
	}
	write(t, path, []byte("first version"))
	moved := filepath.Join(filepath.Dir(path), "moved.txt")
	if err := os.Rename(path, moved); err != nil {
		t.Fatal(err)
	}
	cfg.Val.Data[0].Path = moved
	look("first content under another name", true, "first version")
	cfg.Tokenizer = newCharTokenizer([]rune(" abcdefghijklmnopqrstuvwxyz"))
	if c := open(t, cfg); c.Report.Sources[0].Cached {
		t.Error("another tokenizer, same tokens")
	}
	cfg.Tokenizer = newCharTokenizer([]rune(" !bcdefghijklmnopqrstuvwxyz"))
	if c := open(t, cfg); c.Report.Sources[0].Cached {
		t.Error("another vocabulary of the same size, same tokens")
	}
	cfg.Val.Data[0].Format = formatJSONL
	cfg.Tokenizer = byteTokenizer{}
	if _, err := Open(t.Context(), cfg); err == nil {
		t.Error("text that was cached passes as jsonl")
	}
}

func TestCacheKeepsTheReport(t *testing.T) {
	path := write(t, "a.jsonl", []byte("{\"text\":\"abc\"}\nx\n{\"text\":\"\"}\n{\"text\":\"ad\"}"))
	share := 0.25
	cfg := OpenConfig{Sources: []SourceConfig{{Path: path, MaxBadShare: &share}}, Len: 3, Cache: t.TempDir(), Tokenizer: newCharTokenizer([]rune("abc"))}
	one, two := open(t, cfg).Report.Sources[0], open(t, cfg).Report.Sources[0]
	if one.Unknown != 1 || one.Empty != 1 || one.Bad[0].File != path || one.Tokens != 7 || one.Bytes != 5 {
		t.Errorf("report %+v", one)
	}
	if !two.Cached || one.String() != two.String() || !slices.Equal(one.Bad, two.Bad) {
		t.Errorf("from the cache %+v, built %+v", two, one)
	}
}

// smallStore is the bytes of a store of three documents.
func smallStore(t testing.TB) []byte {
	var out buffer
	b, err := newBuilder(&out, byteTokenizer{}, new(meta))
	if err != nil {
		t.Fatal(err)
	}
	for _, doc := range []string{"one", "", "2", "three"} {
		if err := errors.Join(b.text([]byte(doc)), b.endDocument()); err != nil {
			t.Fatal(err)
		}
	}
	h, err := b.finish(bytes.Repeat([]byte{7}, 32))
	if err != nil {
		t.Fatal(err)
	}
	copy(out, h)
	return out
}

func TestCorruptStoreIsRefused(t *testing.T) {
	good := smallStore(t)
	name := bytes.Repeat([]byte{7}, 32)
	s, err := parseStore(good, name)
	if err != nil {
		t.Fatal(err)
	}
	if s.tokens != 12 || s.docs() != 3 || s.start(1) != 4 || s.start(2) != 6 || s.Empty != 1 {
		t.Fatalf("%d tokens, %d documents, %+v", s.tokens, s.docs(), s.meta)
	}
	for n := range len(good) {
		if _, err := parseStore(good[:n], name); err == nil {
			t.Fatalf("cut off at %d of %d bytes: taken for whole", n, len(good))
		}
	}
	for i := range good {
		bad := bytes.Clone(good)
		bad[i] ^= 0x10
		if _, err := parseStore(bad, name); err == nil {
			t.Fatalf("byte %d changed: taken for good", i)
		}
	}
	if _, err := parseStore(append(bytes.Clone(good), 0), name); err == nil {
		t.Error("a byte too many: taken for good")
	}
	if _, err := parseStore(good, bytes.Repeat([]byte{8}, 32)); err == nil {
		t.Error("made from something else: taken for good")
	}
}

func FuzzParseStore(f *testing.F) {
	f.Add(smallStore(f))
	f.Fuzz(func(t *testing.T, b []byte) {
		if s, err := parseStore(b, nil); err == nil {
			s.read(make([]int32, s.tokens), 0)
		}
	})
}

func TestCorruptCacheIsRebuilt(t *testing.T) {
	cfg := valOnly(write(t, "a.txt", []byte("some text in a cache")))
	cfg.Cache = t.TempDir()
	open(t, cfg)
	files, _ := filepath.Glob(filepath.Join(cfg.Cache, "*"))
	if len(files) != 1 {
		t.Fatalf("cache holds %v", files)
	}
	whole, err := os.ReadFile(files[0])
	if err != nil {
		t.Fatal(err)
	}
	flipped := bytes.Clone(whole)
	flipped[headerSize+3]++
	for what, b := range map[string][]byte{"empty": nil, "cut": whole[:len(whole)-5], "flipped": flipped} {
		if err := os.Remove(files[0]); err != nil { // a new file, since the old one is mapped
			t.Fatal(err)
		}
		write(t, files[0], b)
		write(t, files[0]+".tmp-killed", []byte("left by a killed process"))
		c := open(t, cfg)
		if c.Report.Sources[0].Cached || text(t, c.Val) != "some text in a cache" {
			t.Errorf("%s: used", what)
		}
		if c := open(t, cfg); !c.Report.Sources[0].Cached {
			t.Errorf("%s: not rebuilt", what)
		}
	}
	if left, _ := filepath.Glob(filepath.Join(cfg.Cache, "*")); runtime.GOOS == "linux" && len(left) != 1 {
		t.Errorf("left behind: %v", left)
	}
}

func TestRanksBuildOnce(t *testing.T) {
	cfg := OpenConfig{Sources: []SourceConfig{{Path: "embedded:shakespeare"}}, Len: 64, Cache: t.TempDir(), Tokenizer: byteTokenizer{}}
	var wg sync.WaitGroup
	corpora := make([]*Corpus, 8)
	for i := range corpora {
		wg.Go(func() {
			c, err := Open(context.Background(), cfg)
			if err != nil {
				t.Error(err)
				return
			}
			corpora[i] = c
		})
	}
	wg.Wait()
	built := 0
	for _, c := range corpora {
		if c == nil {
			t.FailNow()
		}
		if !c.Report.Sources[0].Cached {
			built++
		}
		if c.Train.Fingerprint() != corpora[0].Train.Fingerprint() {
			t.Error("fingerprints differ")
		}
		if err := c.Close(); err != nil {
			t.Error(err)
		}
	}
	if (runtime.GOOS == "linux" || runtime.GOOS == "darwin") && built != 1 {
		t.Errorf("%d of %d built", built, len(corpora))
	}
	if left, _ := filepath.Glob(filepath.Join(cfg.Cache, "*")); len(left) != 1 {
		t.Errorf("cache holds %v", left)
	}
}

func TestWaitingForAnotherBuildCanBeCancelled(t *testing.T) {
	path := filepath.Join(t.TempDir(), "x.lock")
	unlock, locked, err := lockFile(t.Context(), path)
	if err != nil {
		t.Fatal(err)
	}
	defer unlock()
	if !locked {
		t.Skip("no file locks here")
	}
	ctx, cancel := context.WithTimeout(t.Context(), 3*lockPoll)
	defer cancel()
	if _, _, err := lockFile(ctx, path); !errors.Is(err, context.DeadlineExceeded) {
		t.Fatalf("error %v", err)
	}
}

func TestUnwritableCache(t *testing.T) {
	path := write(t, "a.txt", []byte("text without a cache"))
	file := write(t, "file", nil)
	cfg := valOnly(path)
	cfg.Cache = filepath.Join(file, "cache")
	c := open(t, cfg)
	if len(c.Report.Notes) != 1 || !strings.Contains(c.Report.Notes[0], "kept in memory: no cache directory "+cfg.Cache) {
		t.Errorf("notes %q", c.Report.Notes)
	}
	if got := text(t, c.Val); got != "text without a cache" {
		t.Errorf("text %q", got)
	}

	// The directory goes away after it was made.
	l := &loader{tok: byteTokenizer{}, dir: filepath.Join(t.TempDir(), "gone")}
	files, err := resolve("path", SourceConfig{Path: path})
	if err != nil {
		t.Fatal(err)
	}
	sum, err := files[0].hash()
	if err != nil {
		t.Fatal(err)
	}
	s, cached, note, err := l.load(t.Context(), SourceConfig{}, files, [][32]byte{sum})
	if err != nil || cached || !strings.Contains(note, "kept in memory") || s.tokens != 21 {
		t.Errorf("cached %t, note %q, error %v", cached, note, err)
	}
	// A failing disk is the cache's fault, a failing source is not.
	if f, err := os.OpenFile("/dev/full", os.O_WRONLY, 0); err == nil {
		defer f.Close()
		var ce *cacheError
		if _, err := l.build(t.Context(), cacheWriter{f}, SourceConfig{}, files, [][32]byte{sum}, make([]byte, 32)); !errors.As(err, &ce) {
			t.Errorf("full disk: %v", err)
		}
	}
	sum[0]++
	l.dir = t.TempDir()
	if _, _, _, err := l.load(t.Context(), SourceConfig{}, files, [][32]byte{sum}); err == nil || !strings.Contains(err.Error(), "changed while it was read") {
		t.Errorf("source that changes: %v", err)
	}
	if left, _ := filepath.Glob(filepath.Join(l.dir, "*")); len(left) != 0 {
		t.Errorf("left behind: %v", left)
	}
}

func TestOpenIsCancelled(t *testing.T) {
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	cfg := valOnly(write(t, "a.txt", []byte("text")))
	cfg.Tokenizer, cfg.Cache = byteTokenizer{}, CacheOff
	if _, err := Open(ctx, cfg); !errors.Is(err, context.Canceled) {
		t.Fatalf("error %v", err)
	}
}

func TestMappingOutlivesReplacement(t *testing.T) {
	cfg := valOnly(write(t, "a.txt", []byte("mapped text")))
	cfg.Cache = t.TempDir()
	c := open(t, cfg)
	files, _ := filepath.Glob(filepath.Join(cfg.Cache, "*.tokens"))
	for _, f := range files {
		if err := os.Remove(f); err != nil {
			t.Fatal(err)
		}
	}
	other := open(t, cfg)
	if other.Report.Sources[0].Cached || text(t, c.Val) != text(t, other.Val) {
		t.Errorf("old mapping reads %q", text(t, c.Val))
	}
}

func TestWideTokens(t *testing.T) {
	chars := make([]rune, 0, 70000)
	for r := rune(0x10000); len(chars) < cap(chars); r++ {
		chars = append(chars, r)
	}
	tok := newCharTokenizer(chars)
	want := string(chars[0]) + string(chars[69999]) + string(chars[40000])
	cfg := valOnly(write(t, "a.txt", []byte(want)))
	cfg.Tokenizer, cfg.Cache = tok, t.TempDir()
	for range 2 {
		c := open(t, cfg)
		var b Batch
		if err := c.Val.Read(t.Context(), 0, 1, &b); err != nil {
			t.Fatal(err)
		}
		if !slices.Equal(b.Tokens, []int32{0, 69999, 40000, tok.Pad(), tok.Pad()}) || b.Targets[2] != tok.EOS() {
			t.Errorf("tokens %v targets %v", b.Tokens, b.Targets)
		}
	}
}
