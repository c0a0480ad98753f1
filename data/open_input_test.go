package data

import (
	"bytes"
	"errors"
	"fmt"
	"io"
	"slices"
	"strings"
	"testing"

	"github.com/klauspost/compress/gzip"
)

func gzipped(t *testing.T, text string) []byte {
	t.Helper()
	var b bytes.Buffer
	w := gzip.NewWriter(&b)
	if _, err := io.WriteString(w, text); err != nil {
		t.Fatal(err)
	}
	if err := w.Close(); err != nil {
		t.Fatal(err)
	}
	return b.Bytes()
}

func fileOf(t *testing.T, path string) File {
	t.Helper()
	files, err := Files("--data", SourceConfig{Path: path})
	if err != nil || len(files) != 1 || files[0].Name() != path {
		t.Fatalf("%v, %v", files, err)
	}
	return files[0]
}

func TestFileOpen(t *testing.T) {
	long := strings.Repeat("text ", 1000)
	for name, content := range map[string][]byte{"plain": []byte(long), "small": []byte("ab"), "empty": nil, "packed.gz": gzipped(t, long)} {
		want := string(content)
		if name == "packed.gz" {
			want = long
		}
		f := fileOf(t, write(t, name, content))
		r, err := f.Open()
		if err != nil {
			t.Fatal(err)
		}
		got, err := io.ReadAll(r)
		if err != nil || string(got) != want || r.Close() != nil {
			t.Errorf("%s: %d bytes, %v", name, len(got), err)
		}
		at, size, done, err := f.OpenAt()
		if err != nil {
			t.Fatal(err)
		}
		got, err = io.ReadAll(io.NewSectionReader(at, 0, size))
		if err != nil || string(got) != want || done() != nil {
			t.Errorf("%s at: %d of %d bytes, %v", name, len(got), size, err)
		}
	}
	if r, err := fileOf(t, "embedded:shakespeare").Open(); err != nil {
		t.Error(err)
	} else if b, err := io.ReadAll(r); err != nil || !bytes.HasPrefix(b, []byte("First Citizen:")) {
		t.Errorf("embedded: %.20q, %v", b, err)
	}
	cut := write(t, "cut.gz", gzipped(t, fmt.Sprint(long, 1))[:20])
	r, err := fileOf(t, cut).Open()
	if err != nil {
		t.Fatal(err)
	}
	if _, err := io.ReadAll(r); err == nil || err.Error() != cut+": compressed data ends too early, the file is cut off" {
		t.Errorf("cut off: %v", err)
	}
	if _, _, _, err := fileOf(t, cut).OpenAt(); err == nil || !strings.Contains(err.Error(), "cut off") {
		t.Errorf("cut off at: %v", err)
	}
	twice := write(t, "twice.gz", gzipped(t, string(gzipped(t, long))))
	if _, err := fileOf(t, twice).Open(); err == nil || !strings.Contains(err.Error(), "compressed twice") {
		t.Errorf("twice: %v", err)
	}
	not := write(t, "not.zst", []byte("no zstd"))
	if _, err := fileOf(t, not).Open(); err == nil || err.Error() != not+": named .zst but is not zstd data" {
		t.Errorf("not zstd: %v", err)
	}
}

func TestScanLines(t *testing.T) {
	var got []string
	err := ScanLines(t.Context(), strings.NewReader("\ufeffone\r\n\n \t\n two \nb\xffd\nlast"), func(n int64, line []byte, reason string) error {
		got = append(got, fmt.Sprintf("%d:%s:%s", n, line, reason))
		return nil
	})
	want := []string{"1:one:", "4:two:", "5:b\xffd:not valid UTF-8", "6:last:"}
	if err != nil || !slices.Equal(got, want) {
		t.Errorf("lines %q, %v", got, err)
	}
	stop := errors.New("stop")
	if err := ScanLines(t.Context(), strings.NewReader("a\nb"), func(int64, []byte, string) error { return stop }); err != stop {
		t.Errorf("error %v", err)
	}
}
