//go:build !cgo

package checkpoint

import (
	"context"
	"crypto/sha256"
	"encoding/hex"
	"os"
	"path/filepath"
	"strings"
	"testing"
)

// TestWithoutHDF5: a build without cgo says so wherever it would need the library, and leaves what it cannot read alone.
func TestWithoutHDF5(t *testing.T) {
	root := t.TempDir()
	refused := func(err error) {
		t.Helper()
		wantError(t, err, "built without cgo", "CGO_ENABLED=1", "libhdf5-dev")
	}
	refused(supported())
	next := Dir(root, "pretrain", 9)
	refused(Begin(next))
	if left, _ := os.ReadDir(root); len(left) > 0 {
		t.Errorf("a refused Begin left %v", left)
	}

	// A checkpoint as a build with HDF5 would leave it, as far as sizes and checksums tell.
	for step := int64(1); step <= 3; step++ {
		dir, content := Dir(root, "pretrain", step), []byte("the bytes of a file")
		if err := os.Mkdir(dir+partialSuffix, 0o777); err != nil {
			t.Fatal(err)
		}
		if err := os.WriteFile(filepath.Join(dir+partialSuffix, fileName(0)), content, 0o666); err != nil {
			t.Fatal(err)
		}
		sum := sha256.Sum256(content)
		f := File{Name: fileName(0), Size: int64(len(content)), SHA256: hex.EncodeToString(sum[:]),
			Slices: []SliceInfo{{Info{"w", Weight, []int{2, 2}}, dtypeF32, 0, 2}}}
		if err := Commit(dir, testMeta("pretrain", step, 1), []File{f}); err != nil {
			t.Fatal(err)
		}
	}
	if err := Prune(root, "pretrain", 2); err != nil {
		t.Fatal(err)
	}
	list, err := List(root)
	if err != nil || len(list) != 2 || list[0].Step != 2 || list[1].Step != 3 || list[0].Err != nil || list[1].Err != nil {
		t.Fatalf("list %+v, %v", list, err)
	}
	r, skipped, err := OpenLatest(root, "pretrain")
	if err != nil || len(skipped) > 0 || r.Meta().Step != 3 {
		t.Fatal(skipped, err)
	}
	if err := r.Check([]Want{{"w", Weight, []int{2, 2}}}); err != nil {
		t.Error(err)
	}
	dst := []float32{1, 2, 3, 4}
	refused(r.Read("w", Weight, 0, 2, dst))
	if dst[0] != 1 || dst[3] != 4 {
		t.Errorf("a refused read wrote %v", dst)
	}
	refused(r.Verify(context.Background()))
	_, err = Inspect(context.Background(), r.Dir())
	refused(err)
	if err := r.Close(); err != nil {
		t.Error(err)
	}

	// Without Begin's refusal, too.
	if err := os.Mkdir(next+partialSuffix, 0o777); err != nil {
		t.Fatal(err)
	}
	_, err = WriteRank(next, 0, nil, testMeta("pretrain", 9, 1))
	refused(err)
	if left, _ := os.ReadDir(next + partialSuffix); len(left) > 0 {
		t.Errorf("a refused write left %v", left)
	}
	if err := Discard(next); err != nil {
		t.Fatal(err)
	}

	// What needs no library is found as ever: here a flipped bit.
	if err := os.WriteFile(filepath.Join(Dir(root, "pretrain", 3), fileName(0)), []byte("the bytes of a fild"), 0o666); err != nil {
		t.Fatal(err)
	}
	r, skipped, err = OpenLatest(root, "pretrain")
	if err != nil || r.Meta().Step != 2 || len(skipped) != 1 || !strings.Contains(skipped[0], "damaged") {
		t.Fatalf("%v, skipped %q", err, skipped)
	}
	if err := r.Close(); err != nil {
		t.Error(err)
	}
}
