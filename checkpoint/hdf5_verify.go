//go:build cgo

package checkpoint

import (
	"cmp"
	"context"
	"fmt"
	"slices"
)

// verifyHDF5 compares an open file with the manifest's record of it, and that of rank 0 with the state of the run.
func verifyHDF5(ctx context.Context, file *h5file, m *File, meta *Meta) (err error) {
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
func verifyCount(file *h5file, path string, want uint) (err error) {
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

func verifySlice(file *h5file, s *SliceInfo) (err error) {
	ds, err := openSet(&file.CommonFG, kindGroups[s.Kind]+"/"+s.Name, storedAs[s.DType], append([]int{s.Rows}, s.Shape[1:]...))
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

func verifyState(file *h5file, m *Meta) (err error) {
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
