package checkpoint

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"sync"

	"moetor/internal/kernel"
)

// A Reader reads one complete checkpoint. It is safe for concurrent use.
type Reader struct {
	dir     string
	m       *manifest
	tensors []placed // by name and kind

	mu   sync.Mutex // guards the fields below; taken before the library's lock
	open []*h5file  // by rank, nil until needed
	sums []bool     // by rank: the file's SHA-256 has been found right
}

// Open opens the checkpoint dir. It checks the manifest and that every file is there in its right size, but reads no
// tensor; see [Reader.Verify]. Close it after use.
func Open(dir string) (*Reader, error) {
	fail := func(err error) (*Reader, error) { return nil, fmt.Errorf("checkpoint %s: %w", dir, err) }
	data, err := os.ReadFile(filepath.Join(dir, manifestName))
	if err != nil {
		if errors.Is(err, os.ErrNotExist) {
			if exists(dir) {
				return fail(fmt.Errorf("not complete: no %s", manifestName))
			}
			return fail(os.ErrNotExist)
		}
		return fail(err)
	}
	m, err := decodeManifest(data)
	if err != nil {
		return fail(fmt.Errorf("%s: %w", manifestName, err))
	}
	tensors, err := m.index()
	if err != nil {
		return fail(fmt.Errorf("%s: %w", manifestName, err))
	}
	for _, f := range m.Files {
		st, err := os.Stat(filepath.Join(dir, f.Name))
		if err != nil {
			return fail(err)
		}
		if !st.Mode().IsRegular() || st.Size() != f.Size {
			return fail(fmt.Errorf("%s has %d bytes, the manifest says %d", f.Name, st.Size(), f.Size))
		}
	}
	return &Reader{dir: dir, m: m, tensors: tensors, open: make([]*h5file, len(m.Files)), sums: make([]bool, len(m.Files))}, nil
}

// Close releases the files.
func (r *Reader) Close() error {
	r.mu.Lock()
	defer r.mu.Unlock()
	return withHDF5(func() error {
		var err error
		for i, f := range r.open {
			if f != nil {
				closing(f, r.m.Files[i].Name, &err)
				r.open[i] = nil
			}
		}
		return err
	})
}

// Dir is the directory given to [Open].
func (r *Reader) Dir() string { return r.dir }

// Meta is the state of the run. The caller must not change what it points at.
func (r *Reader) Meta() Meta { return r.m.Meta }

// Files lists the files in the order of ranks, with their slices.
func (r *Reader) Files() []File { return r.m.Files }

// Tensors lists all tensors, sorted by name and kind.
func (r *Reader) Tensors() []Info {
	list := make([]Info, len(r.tensors))
	for i, t := range r.tensors {
		list[i] = t.Info
	}
	return list
}

func (r *Reader) find(name string, kind Kind) *placed {
	i, ok := slices.BinarySearchFunc(r.tensors, tensorKey{name, kind}, func(t placed, k tensorKey) int {
		return cmp.Or(cmp.Compare(t.Name, k.name), cmp.Compare(t.Kind, k.kind))
	})
	if !ok {
		return nil
	}
	return &r.tensors[i]
}

// Lookup tells whether the checkpoint has a tensor, and its shape.
func (r *Reader) Lookup(name string, kind Kind) (Info, bool) {
	if t := r.find(name, kind); t != nil {
		return t.Info, true
	}
	return Info{}, false
}

// Read reads rows [row0, row0+rows) of a tensor into dst, whose length must be rows times the product of the other
// dims. The rows may lie in any number of files. A file is checked against its SHA-256 before it is first used. What is
// stored as BF16 is widened, which is exact.
func (r *Reader) Read(name string, kind Kind, row0, rows int, dst []float32) error {
	return readTensor(r, name, kind, row0, rows, dst, dtypeF32, kernel.FromBF16)
}

// ReadBF16 is Read into BF16 values. What is stored as F32 is rounded to nearest even.
func (r *Reader) ReadBF16(name string, kind Kind, row0, rows int, dst []uint16) error {
	return readTensor(r, name, kind, row0, rows, dst, dtypeBF16, kernel.ToBF16)
}

// readTensor reads rows of a tensor into dst of element type dtype. convert is from the other type.
func readTensor[T, Other float32 | uint16](r *Reader, name string, kind Kind, row0, rows int, dst []T, dtype string, convert func([]T, []Other)) error {
	fail := func(err error) error { return fmt.Errorf("checkpoint %s: read %v %s: %w", r.dir, kind, name, err) }
	t := r.find(name, kind)
	if t == nil {
		return fail(errors.New("no such tensor"))
	}
	if row0 < 0 || rows < 0 || row0 > t.Shape[0]-rows {
		return fail(fmt.Errorf("rows %d..%d are outside its shape %v", row0, row0+rows, t.Shape))
	}
	n := t.rowLen()
	if len(dst) != rows*n {
		return fail(fmt.Errorf("%d rows of shape %v are %d values, the destination has %d", rows, t.Shape, rows*n, len(dst)))
	}
	r.mu.Lock()
	defer r.mu.Unlock()
	for i := range t.pieces {
		p := &t.pieces[i]
		from, to := max(row0, p.Row0), min(row0+rows, p.Row0+p.Rows)
		if from >= to {
			continue
		}
		f, err := r.file(p.file)
		if err == nil {
			part := dst[(from-row0)*n : (to-row0)*n]
			if p.DType == dtype {
				err = withHDF5(func() error { return readRows(f, &p.SliceInfo, from-p.Row0, to-from, part) })
			} else {
				other := make([]Other, len(part))
				err = withHDF5(func() error { return readRows(f, &p.SliceInfo, from-p.Row0, to-from, other) })
				convert(part, other)
			}
		}
		if err != nil {
			return fail(fmt.Errorf("%s: %w", r.m.Files[p.file].Name, err))
		}
	}
	return nil
}

// file gives an open file whose checksum holds. The check comes first because libhdf5 trusts what it reads: a damaged
// file must not reach it. Caller holds r.mu.
func (r *Reader) file(i int) (*h5file, error) {
	if r.open[i] != nil {
		return r.open[i], nil
	}
	if !r.sums[i] {
		if err := r.checkSum(context.Background(), i); err != nil {
			return nil, err
		}
	}
	err := withHDF5(func() error {
		f, err := openH5(filepath.Join(r.dir, r.m.Files[i].Name))
		if err == nil {
			r.open[i] = f
		}
		return err
	})
	return r.open[i], err
}

// checkSum reads file i and compares size and SHA-256 with the manifest. Caller holds r.mu.
func (r *Reader) checkSum(ctx context.Context, i int) error {
	f := &r.m.Files[i]
	r.sums[i] = false
	size, sum, err := hashFile(ctx, filepath.Join(r.dir, f.Name))
	if err != nil {
		return err
	}
	if size != f.Size || sum != f.SHA256 {
		return fmt.Errorf("damaged: %d bytes with SHA-256 %.16s…, the manifest says %d with %.16s…", size, sum, f.Size, f.SHA256)
	}
	r.sums[i] = true
	return nil
}

// verifySums checks every file's checksum and reports the first that fails.
func (r *Reader) verifySums(ctx context.Context) error {
	r.mu.Lock()
	defer r.mu.Unlock()
	for i, f := range r.m.Files {
		if err := r.checkSum(ctx, i); err != nil {
			return fmt.Errorf("%s: %w", f.Name, err)
		}
	}
	return nil
}

// Verify reads everything: it checks the SHA-256 of every file, that each file holds exactly the datasets that the
// manifest lists, in their shapes, and that rank 0's /state says the same as the manifest.
func (r *Reader) Verify(ctx context.Context) error {
	for i := range r.m.Files {
		if err := r.VerifyFile(ctx, i); err != nil {
			return err
		}
	}
	return nil
}

// VerifyFile does the work of [Reader.Verify] for the file of one rank.
func (r *Reader) VerifyFile(ctx context.Context, rank int) error {
	if rank < 0 || rank >= len(r.m.Files) {
		return fmt.Errorf("checkpoint %s: no file of rank %d among %d", r.dir, rank, len(r.m.Files))
	}
	r.mu.Lock()
	defer r.mu.Unlock()
	m := &r.m.Files[rank]
	err := r.checkSum(ctx, rank)
	if err == nil {
		var f *h5file
		if f, err = r.file(rank); err == nil {
			err = withHDF5(func() error { return verifyHDF5(ctx, f, m, &r.m.Meta) })
		}
	}
	if err != nil {
		return fmt.Errorf("checkpoint %s: %s: %w", r.dir, m.Name, err)
	}
	return nil
}
