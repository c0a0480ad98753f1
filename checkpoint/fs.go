package checkpoint

import (
	"context"
	"crypto/sha256"
	"encoding/hex"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"path/filepath"
	"syscall"
)

// trap, where a test has set it, is called before every step that changes the file system. A test dies in it, once
// per step.
var trap func(op, path string)

func step(op, path string) {
	if trap != nil {
		trap(op, path)
	}
}

func rename(from, to string) error {
	step("rename", to)
	return os.Rename(from, to)
}

// syncPath makes a file, or the entries of a directory, durable.
func syncPath(path string) error {
	step("fsync", path)
	f, err := os.Open(path)
	if err != nil {
		return err
	}
	err = f.Sync()
	// Some file systems know no fsync of a directory; there, order is all that can be had.
	if st, e := f.Stat(); e == nil && st.IsDir() && (errors.Is(err, syscall.EINVAL) || errors.Is(err, syscall.ENOTSUP)) {
		err = nil
	}
	return errors.Join(err, f.Close())
}

// writeFile writes a file durably: under a temporary name first, so that it appears whole or not at all.
func writeFile(path string, data []byte) (err error) {
	tmp := path + ".tmp"
	step("create", tmp)
	f, err := os.Create(tmp)
	if err != nil {
		return err
	}
	defer func() {
		if err != nil {
			os.Remove(tmp)
		}
	}()
	step("write", tmp)
	if _, err := f.Write(data); err != nil {
		f.Close()
		return err
	}
	step("fsync", tmp)
	if err := f.Sync(); err != nil {
		f.Close()
		return err
	}
	if err := f.Close(); err != nil {
		return err
	}
	if err := rename(tmp, path); err != nil {
		return err
	}
	return syncPath(filepath.Dir(path))
}

// removeDir deletes a directory of ours, its manifest first: whatever stops it, what is left is not a checkpoint.
func removeDir(dir string) error {
	manifest := filepath.Join(dir, manifestName)
	step("remove", manifest)
	switch err := os.Remove(manifest); {
	case err == nil:
		if err := syncPath(dir); err != nil {
			return err
		}
	case !errors.Is(err, fs.ErrNotExist):
		return err
	}
	step("remove", dir)
	return os.RemoveAll(dir)
}

// closing closes an object at the end of a function and keeps the first error.
func closing(c interface{ Close() error }, what string, err *error) {
	if e := c.Close(); e != nil && *err == nil {
		*err = fmt.Errorf("close %s: %w", what, e)
	}
}

func exists(path string) bool {
	_, err := os.Lstat(path)
	return err == nil
}

// hashFile gives the size and the SHA-256 of a file.
func hashFile(ctx context.Context, path string) (size int64, sum string, err error) {
	f, err := os.Open(path)
	if err != nil {
		return 0, "", err
	}
	defer f.Close()
	h := sha256.New()
	st, err := f.Stat()
	if err != nil {
		return 0, "", err
	}
	buf := make([]byte, min(1<<20, st.Size()+1))
	for {
		if err := context.Cause(ctx); err != nil {
			return 0, "", err
		}
		n, err := f.Read(buf)
		h.Write(buf[:n])
		size += int64(n)
		if err == io.EOF {
			return size, hex.EncodeToString(h.Sum(nil)), nil
		}
		if err != nil {
			return 0, "", err
		}
	}
}

// Names of directories beside the published NAME. A partial one is never read; an old one only while NAME is not whole.
const (
	partialSuffix = ".partial" // being written, or being deleted
	oldSuffix     = ".old"     // moved aside while a new checkpoint of the same name takes its place
)

// restore settles what an interrupted Commit over an existing checkpoint left: NAME.old is dropped if NAME is
// complete, and is NAME again if not.
func restore(dir string) error {
	old := dir + oldSuffix
	if !exists(old) {
		return nil
	}
	if complete(dir) == nil || complete(old) != nil {
		return removeDir(old)
	}
	if exists(dir) {
		if err := removeDir(dir); err != nil {
			return err
		}
	}
	if err := rename(old, dir); err != nil {
		return err
	}
	return syncPath(filepath.Dir(dir))
}

// complete reports why dir is not a complete checkpoint, judged by manifest and sizes.
func complete(dir string) error {
	r, err := Open(dir)
	if err != nil {
		return err
	}
	return r.Close()
}
