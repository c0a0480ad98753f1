package checkpoint

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"slices"
)

// Name is the directory name of a checkpoint: STAGE-00000200.
func Name(stage string, step int64) string { return fmt.Sprintf("%s-%08d", stage, step) }

// Dir is the directory of a checkpoint under root.
func Dir(root, stage string, step int64) string { return filepath.Join(root, Name(stage, step)) }

// Begin makes room for the checkpoint dir: it creates the directory that [WriteRank] writes into (dir + ".partial"),
// after removing what an interrupted write of the same name left. A complete checkpoint that stands at dir already
// stays until [Commit]. One process calls it, before any other calls WriteRank.
func Begin(dir string) error {
	fail := func(err error) error { return fmt.Errorf("checkpoint %s: begin: %w", dir, err) }
	root, partial := filepath.Dir(dir), dir+partialSuffix
	if err := supported(); err != nil {
		return fail(err)
	}
	if err := os.MkdirAll(root, 0o777); err != nil {
		return fail(err)
	}
	if err := restore(dir); err != nil {
		return fail(err)
	}
	if err := removeDir(partial); err != nil && !errors.Is(err, os.ErrNotExist) {
		return fail(err)
	}
	step("mkdir", partial)
	if err := os.Mkdir(partial, 0o777); err != nil {
		return fail(err)
	}
	if err := syncPath(root); err != nil {
		return fail(err)
	}
	return nil
}

// Discard removes what has been written of the checkpoint dir and not committed. It frees the space after a failed
// write; the next [Begin] or [Prune] would do so too.
func Discard(dir string) error {
	if err := removeDir(dir + partialSuffix); err != nil && !errors.Is(err, os.ErrNotExist) {
		return fmt.Errorf("checkpoint %s: discard: %w", dir, err)
	}
	return nil
}

// WriteRank writes and makes durable the one file of a rank, and returns what [Commit] needs of it. Rank 0 passes the
// state of the run, all others nil. The slices' memory is read, not kept. A file holds at most one slice of a tensor.
// On an error the file is removed again.
func WriteRank(dir string, rank int, parts []Slice, meta *Meta) (File, error) {
	f := File{Name: fileName(rank), Rank: rank}
	path := filepath.Join(dir+partialSuffix, f.Name)
	fail := func(err error) (File, error) { return File{}, fmt.Errorf("checkpoint %s: %w", path, err) }
	if (rank == 0) != (meta != nil) || rank < 0 {
		return fail(fmt.Errorf("rank %d: rank 0 writes the state of the run, and no other", rank))
	}
	if meta != nil {
		if err := meta.validate(); err != nil {
			return fail(err)
		}
	}
	seen := map[tensorKey]bool{}
	for i := range parts {
		s := &parts[i]
		info := SliceInfo{Info{s.Name, s.Kind, slices.Clone(s.Shape)}, s.dtype(), s.Row0, s.Rows}
		if err := info.validate(); err != nil {
			return fail(err)
		}
		if have, want := len(s.Data)+len(s.BF16), s.Rows*info.rowLen(); have != want || s.Data != nil && s.BF16 != nil {
			return fail(fmt.Errorf("%v: %d values for %d rows, want %d of one type", info.Info, have, s.Rows, want))
		}
		if s.Rows == 0 {
			continue
		}
		key := tensorKey{s.Name, s.Kind}
		if seen[key] {
			return fail(fmt.Errorf("%v: two slices in one file", info.Info))
		}
		seen[key] = true
		f.Slices = append(f.Slices, info)
	}
	step("create", path)
	if _, err := os.Stat(filepath.Dir(path)); err != nil {
		return fail(fmt.Errorf("no Begin before the write: %w", err))
	}
	if exists(path) {
		return fail(errors.New("this rank has written its file already"))
	}
	if err := withHDF5(func() error { return writeHDF5(path, rank, parts, meta) }); err != nil {
		// If closing failed too, the library holds the file open for ever: emptied, it gives its space back all the same.
		if exists(path) {
			err = errors.Join(err, os.Truncate(path, 0), os.Remove(path))
		}
		return fail(err)
	}
	err := syncPath(path)
	if err == nil {
		err = syncPath(filepath.Dir(path))
	}
	if err == nil {
		f.Size, f.SHA256, err = hashFile(context.Background(), path)
	}
	if err != nil {
		os.Remove(path)
		return fail(err)
	}
	return f, nil
}

// Commit turns the files of all ranks into the checkpoint dir: it refuses them unless every row of every tensor is
// stored exactly once, writes the manifest, and publishes the directory under its final name. dir must be the [Dir]
// of meta's stage and step. Until Commit has returned nil, an earlier checkpoint is what a reader finds; once it has,
// this one is durable. Rank 0 calls it, with the same meta that it gave to [WriteRank].
func Commit(dir string, meta *Meta, files []File) error {
	fail := func(err error) error { return fmt.Errorf("checkpoint %s: commit: %w", dir, err) }
	partial, old, root := dir+partialSuffix, dir+oldSuffix, filepath.Dir(dir)
	if want := Name(meta.Stage, meta.Step); filepath.Base(dir) != want {
		return fail(fmt.Errorf("directory name is not %s, the name of its stage and step", want))
	}
	m := &manifest{Format: formatName, Version: FormatVersion, Meta: *meta, Files: slices.Clone(files)}
	slices.SortFunc(m.Files, func(a, b File) int { return a.Rank - b.Rank })
	if err := m.validate(); err != nil {
		return fail(err)
	}
	for _, f := range m.Files {
		st, err := os.Stat(filepath.Join(partial, f.Name))
		if err != nil {
			return fail(err)
		}
		if st.Size() != f.Size {
			return fail(fmt.Errorf("%s has %d bytes, rank %d wrote %d", f.Name, st.Size(), f.Rank, f.Size))
		}
	}
	data, err := encodeManifest(m)
	if err != nil {
		return fail(err)
	}
	if err := writeFile(filepath.Join(partial, manifestName), data); err != nil {
		return fail(err)
	}
	// The new checkpoint is whole and durable from here on; only its name is missing.
	replace := exists(dir)
	if replace && complete(dir) != nil {
		if err := removeDir(dir); err != nil {
			return fail(err)
		}
		replace = false
	}
	if replace {
		// Between these renames dir does not exist, and readers take dir.old for it.
		if err := rename(dir, old); err != nil {
			return fail(err)
		}
		if err := syncPath(root); err != nil {
			return fail(err)
		}
	}
	if err := rename(partial, dir); err != nil {
		if replace {
			err = errors.Join(err, os.Rename(old, dir))
		}
		return fail(err)
	}
	if err := syncPath(root); err != nil {
		return fail(err)
	}
	if replace {
		if err := removeDir(old); err != nil {
			return fail(err)
		}
	}
	return nil
}
