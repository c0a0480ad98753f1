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

	"gonum.org/v1/hdf5"
)

// A Reader reads one complete checkpoint. It is safe for concurrent use.
type Reader struct {
	dir     string
	m       *manifest
	tensors []placed // by name and kind

	mu   sync.Mutex   // guards the fields below; taken before the library's lock
	open []*hdf5.File // by rank, nil until needed
	sums []bool       // by rank: the file's SHA-256 has been found right
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
	return &Reader{dir: dir, m: m, tensors: tensors, open: make([]*hdf5.File, len(m.Files)), sums: make([]bool, len(m.Files))}, nil
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
// dims. The rows may lie in any number of files. A file is checked against its SHA-256 before it is first used.
func (r *Reader) Read(name string, kind Kind, row0, rows int, dst []float32) error {
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
			err = withHDF5(func() error { return readRows(f, &p.SliceInfo, from-p.Row0, to-from, part) })
		}
		if err != nil {
			return fail(fmt.Errorf("%s: %w", r.m.Files[p.file].Name, err))
		}
	}
	return nil
}

// file gives an open file whose checksum holds. The check comes first because libhdf5 trusts what it reads: a damaged
// file must not reach it. Caller holds r.mu.
func (r *Reader) file(i int) (*hdf5.File, error) {
	if r.open[i] != nil {
		return r.open[i], nil
	}
	if !r.sums[i] {
		if err := r.checkSum(context.Background(), i); err != nil {
			return nil, err
		}
	}
	err := withHDF5(func() error {
		f, err := hdf5.OpenFile(filepath.Join(r.dir, r.m.Files[i].Name), hdf5.F_ACC_RDONLY)
		if err != nil {
			return errors.New("open")
		}
		r.open[i] = f
		return nil
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
		var f *hdf5.File
		if f, err = r.file(rank); err == nil {
			err = withHDF5(func() error { return verifyHDF5(ctx, f, m, &r.m.Meta) })
		}
	}
	if err != nil {
		return fmt.Errorf("checkpoint %s: %s: %w", r.dir, m.Name, err)
	}
	return nil
}

func verifyHDF5(ctx context.Context, file *hdf5.File, m *File, meta *Meta) (err error) {
	root, err := file.OpenGroup("/")
	if err != nil {
		return fmt.Errorf("open /: %w", err)
	}
	defer closing(root, "/", &err)
	if format, err := readStringAttr(root.Identifier, "format"); err != nil || format != formatName {
		return cmp.Or(err, fmt.Errorf("format %q, want %q", format, formatName))
	}
	for name, want := range map[string]int64{"version": FormatVersion, "rank": int64(m.Rank)} {
		if v, err := readInts(root, name, 1); err != nil || v[0] != want {
			return cmp.Or(err, fmt.Errorf("/%s is %v in the file, want %d", name, v, want))
		}
	}
	var count [numKinds]uint
	for i := range m.Slices {
		if err := context.Cause(ctx); err != nil {
			return err
		}
		s := &m.Slices[i]
		count[s.Kind]++
		if err := verifySlice(file, s); err != nil {
			return fmt.Errorf("%v: %w", s.Info, err)
		}
	}
	if len(m.Slices) > 0 {
		for k, path := range kindGroups {
			if err := verifyCount(file, path, count[k]); err != nil {
				return err
			}
		}
	}
	if m.Rank == 0 {
		return verifyState(file, meta)
	}
	return nil
}

// verifyCount: all that the manifest lists has been found, so equal numbers mean that there is nothing else.
func verifyCount(file *hdf5.File, path string, want uint) (err error) {
	g, err := file.OpenGroup(path)
	if err != nil {
		return fmt.Errorf("open %s: %w", path, err)
	}
	defer closing(g, path, &err)
	if n, err := g.NumObjects(); err != nil || n != want {
		return cmp.Or(err, fmt.Errorf("%s holds %d objects, the manifest lists %d", path, n, want))
	}
	return nil
}

func verifySlice(file *hdf5.File, s *SliceInfo) (err error) {
	ds, err := openSet(&file.CommonFG, kindGroups[s.Kind]+"/"+s.Name, hdf5.T_IEEE_F32LE, append([]int{s.Rows}, s.Shape[1:]...))
	if err != nil {
		return err
	}
	defer closing(ds, s.Name, &err)
	shape, err := readInts(ds, "shape", len(s.Shape))
	if err != nil {
		return err
	}
	if !slices.EqualFunc(shape, s.Shape, func(a int64, b int) bool { return a == int64(b) }) {
		return fmt.Errorf("global shape %v in the file", shape)
	}
	if row0, err := readInts(ds, "row0", 1); err != nil || row0[0] != int64(s.Row0) {
		return cmp.Or(err, fmt.Errorf("row0 %v in the file, %d in the manifest", row0, s.Row0))
	}
	if dtype, err := readStringAttr(ds.Identifier, "dtype"); err != nil || dtype != s.DType {
		return cmp.Or(err, fmt.Errorf("dtype %q in the file, %q in the manifest", dtype, s.DType))
	}
	return nil
}

func verifyState(file *hdf5.File, m *Meta) (err error) {
	differs := func(name string, err error) error {
		if err != nil {
			return fmt.Errorf("/state/%s: %w", name, err)
		}
		return fmt.Errorf("/state/%s is not what the manifest says", name)
	}
	g, err := file.OpenGroup("/state")
	if err != nil {
		return fmt.Errorf("open /state: %w", err)
	}
	defer closing(g, "/state", &err)
	for _, a := range stateTexts(m) {
		if s, err := readStringAttr(g.Identifier, a[0]); err != nil || s != a[1] {
			return differs(a[0], err)
		}
	}
	for _, a := range stateInts(m) {
		if v, err := readInts(g, a.name, 1); err != nil || v[0] != a.value {
			return differs(a.name, err)
		}
	}
	if same, err := sameText(&g.CommonFG, "config", m.Config); err != nil || !same {
		return differs("config", err)
	}
	if seed, err := readUint(g, "seed"); err != nil || seed != m.Seed {
		return differs("seed", err)
	}
	for _, b := range stateBlobs(m) {
		if data, err := readBytes(&g.CommonFG, b.name, len(b.data)); err != nil || !slices.Equal(data, b.data) {
			return differs(b.name, err)
		}
	}
	for _, k := range extraKeys(m) {
		if same, err := sameText(&g.CommonFG, "extra/"+k, string(m.Extra[k])); err != nil || !same {
			return differs("extra/"+k, err)
		}
	}
	return verifyCount(file, "/state/extra", uint(len(m.Extra)))
}
