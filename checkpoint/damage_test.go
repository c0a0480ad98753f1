//go:build cgo

package checkpoint

import (
	"bytes"
	"context"
	"errors"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"gonum.org/v1/hdf5"
)

func waitForNextSecond() {
	time.Sleep(time.Until(time.Now().Truncate(time.Second).Add(1010 * time.Millisecond)))
}

// positions are the bytes of a file that a test damages on disk: some at both ends, and some forty between.
func positions(size int) []int {
	var at []int
	for i := 0; i < size; i++ {
		if i < 4 || i >= size-4 || i%(size/40) == 0 {
			at = append(at, i)
		}
	}
	return at
}

// damaged lets do damage each file of the newest of two checkpoints, at one position after the other, and checks that
// the earlier one is taken.
func damaged(t *testing.T, do func(data []byte, at int) []byte) {
	root := t.TempDir()
	mustSave(t, root, "pretrain", 1, 2)
	mustSave(t, root, "pretrain", 2, 2)
	dir := Dir(root, "pretrain", 2)
	for _, name := range []string{manifestName, fileName(0), fileName(1)} {
		path := filepath.Join(dir, name)
		whole, err := os.ReadFile(path)
		if err != nil {
			t.Fatal(err)
		}
		if name == manifestName { // no byte of it is left out
			for at := range whole {
				if _, err := decodeManifest(do(bytes.Clone(whole), at)); err == nil {
					t.Fatalf("manifest damaged at byte %d of %d: accepted", at, len(whole))
				}
			}
		}
		for _, at := range positions(len(whole)) {
			if err := os.WriteFile(path, do(bytes.Clone(whole), at), 0o666); err != nil {
				t.Fatal(err)
			}
			r, skipped, err := OpenLatest(root, "pretrain")
			if err != nil {
				t.Fatalf("%s at %d: %v", name, at, err)
			}
			if got := r.Meta().Step; got != 1 {
				t.Fatalf("%s damaged at byte %d of %d: taken for complete", name, at, len(whole))
			}
			if len(skipped) != 1 || !strings.Contains(skipped[0], dir) || !strings.Contains(skipped[0], name) {
				t.Fatalf("%s at %d: skipped %q", name, at, skipped)
			}
			r.Close()
			// Opened by name, it must fail before a tensor comes out of it.
			if r, err := Open(dir); err == nil {
				err = holds(r, smallModel(), 2)
				if err == nil {
					t.Fatalf("%s damaged at byte %d: all tensors were read", name, at)
				}
				wantError(t, err, name)
				r.Close()
			}
		}
		if err := os.WriteFile(path, whole, 0o666); err != nil {
			t.Fatal(err)
		}
	}
	r, skipped, err := OpenLatest(root, "pretrain")
	if err != nil || len(skipped) != 0 {
		t.Fatalf("restored: %v, skipped %v", err, skipped)
	}
	defer r.Close()
	if err := holds(r, smallModel(), 2); err != nil {
		t.Error(err)
	}
}

func TestCutOffAtAnyByte(t *testing.T) {
	damaged(t, func(data []byte, at int) []byte { return data[:at] })
}

func TestFlippedByte(t *testing.T) {
	damaged(t, func(data []byte, at int) []byte { data[at] ^= 1 << (at % 8); return data })
}

func TestMissingFile(t *testing.T) {
	root := t.TempDir()
	mustSave(t, root, "pretrain", 1, 2)
	dir := Dir(root, "pretrain", 1)
	if err := os.Remove(filepath.Join(dir, fileName(1))); err != nil {
		t.Fatal(err)
	}
	_, err := Open(dir)
	wantError(t, err, "rank-0001.h5")
	_, _, err = OpenLatest(root, "pretrain")
	if !errors.Is(err, ErrNotFound) || !strings.Contains(err.Error(), "rank-0001.h5") {
		t.Errorf("OpenLatest: %v", err)
	}
}

// reseal replaces text in the manifest and gives it a new valid seal.
func reseal(t *testing.T, dir, from, to string) {
	t.Helper()
	path := filepath.Join(dir, manifestName)
	data, err := os.ReadFile(path)
	if err != nil {
		t.Fatal(err)
	}
	body := string(data[:len(data)-sealLen])
	changed := strings.Replace(body, from, to, 1)
	if changed == body {
		t.Fatalf("manifest has no %q", from)
	}
	if err := os.WriteFile(path, seal([]byte(changed)), 0o666); err != nil {
		t.Fatal(err)
	}
}

func TestManifestRefused(t *testing.T) {
	for _, c := range []struct{ from, to, say string }{
		{`"version":1`, `"version":2`, "version 2"},
		{formatName, "something-else", "something-else"},
		{`"rank-0001.h5"`, `"../../secret"`, "../../secret"},
		{`"rows":3`, `"rows":30`, "outside the tensor"},
		{`"rows":3`, `"rows":0`, "without rows"},
		{`"dtype":"F32"`, `"dtype":"F64"`, "F64"},
		{`"dtype":"F32"`, `"dtype":"BF16"`, "weights are F32"},
		{`"kind":"exp_avg_sq"`, `"kind":"momentum"`, "momentum"},
		{`"shape":[7,3]`, `"shape":[7,9223372036854775807]`, "impossible shape"},
		{`"shape":[7,3]`, `"shape":[]`, "0 dims"},
	} {
		root := t.TempDir()
		mustSave(t, root, "pretrain", 1, 2)
		dir := Dir(root, "pretrain", 1)
		reseal(t, dir, c.from, c.to)
		_, err := Open(dir)
		wantError(t, err, manifestName, c.say)
	}
}

// TestVerifyComparesFileAndManifest: the checksums hold, and yet file and manifest disagree.
func TestVerifyComparesFileAndManifest(t *testing.T) {
	for _, c := range []struct {
		from, to string
		say      []string
	}{
		{`"step":1`, `"step":7`, []string{"rank-0000.h5", "/state/step"}},
		{`"seed":18446744073709551612`, `"seed":18446744073709551611`, []string{"/state/seed"}},
		{`"config":"run`, `"config":"RUN`, []string{"/state/config"}},
		{`"stage":"pretrain"`, `"stage":"sft"`, []string{"/state/stage"}},
		{`"rng":"AAH/"`, `"rng":"AAL/"`, []string{"/state/rng"}},
		{`"rng":"AAH/"`, `"rng":"AAE="`, []string{"/state/rng"}},
		{`"rng":"AAH/",`, ``, []string{"/state/rng"}},
		{`"losses":[1.5`, `"losses":[2.5`, []string{"/state/extra/losses"}},
		{`"losses":[1.5,1.25],`, ``, []string{"/state/extra"}},
		{`"dtype":"BF16"`, `"dtype":"F32"`, []string{"exp_avg model.cube", "2 bytes"}},
		{`"shape":[4,2,3]`, `"shape":[4,3,2]`, []string{"model.cube"}},
	} {
		root := t.TempDir()
		mustSave(t, root, "pretrain", 1, 1)
		dir := Dir(root, "pretrain", 1)
		reseal(t, dir, c.from, c.to)
		if strings.Contains(c.from, "shape") {
			reseal(t, dir, c.from, c.to)
			reseal(t, dir, c.from, c.to)
		}
		r := mustOpen(t, dir)
		wantError(t, r.Verify(context.Background()), c.say...)
		if strings.Contains(c.from, "shape") {
			wantError(t, r.Read("model.cube", Weight, 0, 4, make([]float32, 24)), "model.cube", "[4 2 3]")
		}
	}
	// A tensor in the file that the manifest does not know.
	dir := Dir(t.TempDir(), "pretrain", 1)
	if err := Begin(dir); err != nil {
		t.Fatal(err)
	}
	meta := testMeta("pretrain", 1, 1)
	f, err := WriteRank(dir, 0, []Slice{{"a", Weight, []int{1}, 0, 1, []float32{1}, nil}, {"b", Weight, []int{1}, 0, 1, []float32{1}, nil}}, meta)
	if err != nil {
		t.Fatal(err)
	}
	f.Slices = f.Slices[:1]
	if err := Commit(dir, meta, []File{f}); err != nil {
		t.Fatal(err)
	}
	wantError(t, mustOpen(t, dir).Verify(context.Background()), "/model holds 2", "lists 1")
}

// TestLibraryErrorsSayTheCause: the binding itself reports "code -1".
func TestLibraryErrorsSayTheCause(t *testing.T) {
	path := filepath.Join(t.TempDir(), "x.h5")
	if err := os.WriteFile(path, bytes.Repeat([]byte("no HDF5 "), 100), 0o666); err != nil {
		t.Fatal(err)
	}
	open := func(path string) error {
		return withHDF5(func() error {
			f, err := hdf5.OpenFile(path, hdf5.F_ACC_RDONLY)
			if err == nil {
				f.Close()
			}
			return err
		})
	}
	wantError(t, open(path), "H5Fopen", "signature")
	err := open(path + ".none")
	wantError(t, err, "H5Fopen", "no such file")
	if !errors.Is(err, os.ErrNotExist) {
		t.Errorf("%v is not os.ErrNotExist", err)
	}
	err = withHDF5(func() error { return errors.New("of our own") })
	if err.Error() != "of our own" {
		t.Errorf("a cause of an earlier call is reported: %v", err)
	}
}
