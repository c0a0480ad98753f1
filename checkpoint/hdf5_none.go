//go:build !cgo

package checkpoint

import (
	"context"
	"errors"
)

// Without cgo there is no HDF5. What needs none still works: manifests, listing, sizes and checksums, pruning.

var errNoHDF5 = errors.New("this build has no HDF5: it was built without cgo; build with CGO_ENABLED=1 and libhdf5-dev")

// supported is nil where this build reads and writes HDF5, and says what is missing where it does not.
func supported() error { return errNoHDF5 }

// An h5file cannot exist in this build: openH5 is the only source of one.
type h5file struct{}

func (*h5file) Close() error { return errNoHDF5 }

func openH5(string) (*h5file, error) { return nil, errNoHDF5 }

// withHDF5 runs f: there is no library to hold.
func withHDF5(f func() error) error { return f() }

func writeHDF5(string, int, []Slice, *Meta) error { return errNoHDF5 }

func verifyHDF5(context.Context, *h5file, *File, *Meta) error { return errNoHDF5 }

func readRows[T float32 | uint16](*h5file, *SliceInfo, int, int, []T) error { return errNoHDF5 }
