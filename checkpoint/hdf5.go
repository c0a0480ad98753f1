//go:build cgo

package checkpoint

/*
#cgo linux CFLAGS: -I/usr/include/hdf5/serial
#cgo linux,amd64 LDFLAGS: -L/usr/lib/x86_64-linux-gnu/hdf5/serial
#cgo linux,arm64 LDFLAGS: -L/usr/lib/aarch64-linux-gnu/hdf5/serial
#cgo LDFLAGS: -lhdf5
#include <hdf5.h>
#include <stdio.h>
#include <stdlib.h>

// The first failure since ck_listen: what went wrong at the bottom, and which call of the library it ended.
static char ck_cause[2048], ck_call[256];
static const char *ck_the_cause(void) { return ck_cause; }
static const char *ck_the_call(void) { return ck_call; }

static herr_t ck_note(unsigned n, const H5E_error2_t *e, void *unused) {
	if (n == 0)
		snprintf(ck_cause, sizeof ck_cause, "%s", e->desc ? e->desc : "no description");
	snprintf(ck_call, sizeof ck_call, "%s", e->func_name ? e->func_name : ""); // the last is the outermost
	return 0;
}

static herr_t ck_record(hid_t stack, void *unused) {
	if (ck_cause[0] == 0)
		H5Ewalk2(stack, H5E_WALK_UPWARD, ck_note, NULL);
	return 0;
}

// ck_listen takes the place of the library's automatic printing of errors to stderr: errors are noted instead.
static void ck_listen(void) {
	ck_cause[0] = ck_call[0] = 0;
	H5Eset_auto2(H5E_DEFAULT, ck_record, NULL);
}

// ck_create makes a contiguous dataset. Object times are off, so that equal states give equal bytes.
static herr_t ck_create(hid_t loc, const char *name, hid_t type, int rank, const hsize_t *dims) {
	hid_t space = rank ? H5Screate_simple(rank, dims, NULL) : H5Screate(H5S_SCALAR);
	hid_t plist = H5Pcreate(H5P_DATASET_CREATE);
	hid_t set = -1;
	if (space >= 0 && plist >= 0 && H5Pset_obj_track_times(plist, 0) >= 0)
		set = H5Dcreate2(loc, name, type, space, H5P_DEFAULT, plist, H5P_DEFAULT);
	if (plist >= 0) H5Pclose(plist);
	if (space >= 0) H5Sclose(space);
	return set < 0 ? -1 : H5Dclose(set);
}

static hid_t ck_string_type(void) {
	hid_t type = H5Tcopy(H5T_C_S1);
	if (type >= 0 && (H5Tset_size(type, H5T_VARIABLE) < 0 || H5Tset_cset(type, H5T_CSET_UTF8) < 0)) {
		H5Tclose(type);
		return -1;
	}
	return type;
}

static herr_t ck_write_string_attr(hid_t obj, const char *name, const char *text) {
	herr_t rc = -1;
	hid_t type = ck_string_type(), space = H5Screate(H5S_SCALAR);
	if (type >= 0 && space >= 0) {
		hid_t attr = H5Acreate2(obj, name, type, space, H5P_DEFAULT, H5P_DEFAULT);
		if (attr >= 0) {
			rc = H5Awrite(attr, type, &text);
			if (H5Aclose(attr) < 0) rc = -1;
		}
	}
	if (space >= 0) H5Sclose(space);
	if (type >= 0) H5Tclose(type);
	return rc;
}

// ck_read_string_attr reads a scalar of variable length. The caller frees it with H5free_memory.
static char *ck_read_string_attr(hid_t obj, const char *name) {
	char *text = NULL;
	hid_t attr = H5Aopen(obj, name, H5P_DEFAULT);
	if (attr < 0) return NULL;
	hid_t type = H5Aget_type(attr), space = H5Aget_space(attr), mem = ck_string_type();
	if (type >= 0 && space >= 0 && mem >= 0 && H5Tis_variable_str(type) > 0 && H5Sget_simple_extent_npoints(space) == 1 &&
	    H5Aread(attr, mem, &text) < 0)
		text = NULL;
	if (mem >= 0) H5Tclose(mem);
	if (space >= 0) H5Sclose(space);
	if (type >= 0) H5Tclose(type);
	H5Aclose(attr);
	return text;
}

static herr_t ck_set_utf8(hid_t type) {
	return H5Tset_cset(type, H5T_CSET_UTF8) < 0 ? -1 : H5Tset_strpad(type, H5T_STR_NULLPAD);
}
*/
import "C"

import (
	"errors"
	"fmt"
	"regexp"
	"runtime"
	"slices"
	"strconv"
	"strings"
	"sync"
	"syscall"
	"unsafe"

	"gonum.org/v1/hdf5"
)

// supported is nil where this build reads and writes HDF5, and says what is missing where it does not.
func supported() error { return nil }

// An h5file is an open HDF5 file.
type h5file = hdf5.File

// openH5 opens a file for reading.
func openH5(path string) (*h5file, error) {
	f, err := hdf5.OpenFile(path, hdf5.F_ACC_RDONLY)
	if err != nil {
		return nil, errors.New("open") // the library's account follows
	}
	return f, nil
}

// libhdf5 as distributed by Debian is not thread-safe: one lock for the process.
var hdf5Lock sync.Mutex

// withHDF5 runs f while no other goroutine is inside the library. An error of f gains the cause that the library
// noted, because the binding reports nothing but "code -1".
func withHDF5(f func() error) error {
	hdf5Lock.Lock()
	defer hdf5Lock.Unlock()
	// A thread-safe build of the library keeps the error handler per thread.
	runtime.LockOSThread()
	defer runtime.UnlockOSThread()
	C.ck_listen()
	err := f()
	if err == nil {
		return nil
	}
	cause := C.GoString(C.ck_the_cause())
	if cause == "" {
		return err
	}
	return withCause(err, C.GoString(C.ck_the_call()), cause)
}

var causeErrno = regexp.MustCompile(`errno = (\d+), error message = '`)

// withCause turns the library's account into an error. Where the operating system refused something, its errno is the
// cause, so that errors.Is(err, syscall.ENOSPC) holds; the rest of such an account (buffers, descriptors) is noise.
func withCause(err error, call, cause string) error {
	// The binding's own text is only a code.
	what := strings.TrimSuffix(err.Error(), ": code -1")
	if m := causeErrno.FindStringSubmatch(cause); m != nil {
		n, _ := strconv.Atoi(m[1])
		hint := ""
		if strings.HasPrefix(cause, "unable to lock file") {
			hint = " (a file system without locks: set HDF5_USE_FILE_LOCKING=FALSE in the environment)"
		}
		return fmt.Errorf("%s: %s: %w%s", what, call, syscall.Errno(n), hint)
	}
	return fmt.Errorf("%s: %s: %s", what, call, cause)
}

var errH5 = errors.New("code -1")

func h5err(rc C.herr_t) error {
	if rc < 0 {
		return errH5
	}
	return nil
}

func hid(id hdf5.Identifier) C.hid_t { return C.hid_t(id.ID()) }

// createDataset makes an empty dataset and opens it. The binding's own call is not used: it never releases its copy of
// the datatype, so a long run would grow with every checkpoint, and it stamps times into the file.
func createDataset(g *hdf5.CommonFG, name string, typ *hdf5.Datatype, dims []int) (*hdf5.Dataset, error) {
	cdims := make([]C.hsize_t, len(dims))
	for i, d := range dims {
		cdims[i] = C.hsize_t(d)
	}
	cname := C.CString(name)
	defer C.free(unsafe.Pointer(cname))
	if err := h5err(C.ck_create(hid(g.Identifier), cname, hid(typ.Identifier), C.int(len(dims)), unsafe.SliceData(cdims))); err != nil {
		return nil, err
	}
	return g.OpenDataset(name)
}

// storedAs gives the datatypes in which element types are stored.
var storedAs = map[string]*hdf5.Datatype{dtypeF32: hdf5.T_IEEE_F32LE, dtypeBF16: hdf5.T_STD_U16LE}

// writeSlice stores a slice of a tensor straight from its Go memory.
func writeSlice(g *hdf5.CommonFG, s *Slice) (err error) {
	dims := append([]int{s.Rows}, s.Shape[1:]...)
	ds, err := createDataset(g, s.Name, storedAs[s.dtype()], dims)
	if err != nil {
		return err
	}
	defer closing(ds, s.Name, &err)
	var data any = &s.Data
	if s.BF16 != nil {
		data = &s.BF16
	}
	if err := ds.Write(data); err != nil {
		return err
	}
	shape := make([]int64, len(s.Shape))
	for i, d := range s.Shape {
		shape[i] = int64(d)
	}
	if err := writeInts(ds, "shape", shape); err != nil {
		return err
	}
	if err := writeInt(ds, "row0", int64(s.Row0)); err != nil {
		return err
	}
	return writeStringAttr(ds.Identifier, "dtype", s.dtype())
}

func writeBytes(g *hdf5.CommonFG, name string, b []byte) (err error) {
	ds, err := createDataset(g, name, hdf5.T_STD_U8LE, []int{len(b)})
	if err != nil {
		return err
	}
	defer closing(ds, name, &err)
	return ds.Write(&b)
}

// An attributed object is a group or a dataset.
type attributed interface {
	CreateAttribute(string, *hdf5.Datatype, *hdf5.Dataspace) (*hdf5.Attribute, error)
	OpenAttribute(string) (*hdf5.Attribute, error)
}

func writeInt(obj attributed, name string, v int64) error {
	space, err := hdf5.CreateDataspace(hdf5.S_SCALAR)
	if err != nil {
		return err
	}
	return writeAttr(obj, name, hdf5.T_STD_I64LE, space, &v)
}

func writeUint(obj attributed, name string, v uint64) error {
	space, err := hdf5.CreateDataspace(hdf5.S_SCALAR)
	if err != nil {
		return err
	}
	return writeAttr(obj, name, hdf5.T_STD_U64LE, space, &v)
}

func writeInts(obj attributed, name string, v []int64) error {
	space, err := hdf5.CreateSimpleDataspace([]uint{uint(len(v))}, nil)
	if err != nil {
		return err
	}
	return writeAttr(obj, name, hdf5.T_STD_I64LE, space, &v[0])
}

// writeAttr takes over space. first points at the first value.
func writeAttr(obj attributed, name string, typ *hdf5.Datatype, space *hdf5.Dataspace, first any) (err error) {
	defer closing(space, "dataspace", &err)
	a, err := obj.CreateAttribute(name, typ, space)
	if err != nil {
		return fmt.Errorf("attribute %s: %w", name, err)
	}
	defer closing(a, name, &err)
	return a.Write(first, typ)
}

func writeStringAttr(obj hdf5.Identifier, name, text string) error {
	cname, ctext := C.CString(name), C.CString(text)
	defer C.free(unsafe.Pointer(cname))
	defer C.free(unsafe.Pointer(ctext))
	return h5err(C.ck_write_string_attr(hid(obj), cname, ctext))
}

// textType is a string of n bytes of UTF-8. HDF5 has no string of no bytes: an empty one is one zero byte.
func textType(n int) (*hdf5.Datatype, error) {
	typ, err := hdf5.T_C_S1.Copy()
	if err != nil {
		return nil, err
	}
	if err := typ.SetSize(max(1, n)); err != nil {
		typ.Close()
		return nil, err
	}
	if err := h5err(C.ck_set_utf8(hid(typ.Identifier))); err != nil {
		typ.Close()
		return nil, err
	}
	return typ, nil
}

// writeText stores a string of any length as a scalar dataset (attributes are bounded by 64 KiB).
func writeText(g *hdf5.CommonFG, name, text string) (err error) {
	typ, err := textType(len(text))
	if err != nil {
		return err
	}
	defer closing(typ, "datatype", &err)
	ds, err := createDataset(g, name, typ, nil)
	if err != nil {
		return err
	}
	defer closing(ds, name, &err)
	data := make([]byte, max(1, len(text)))
	copy(data, text)
	return ds.Write(&data)
}

// sameText tells whether the scalar string dataset holds text.
func sameText(g *hdf5.CommonFG, name, text string) (same bool, err error) {
	typ, err := textType(len(text))
	if err != nil {
		return false, err
	}
	defer closing(typ, "datatype", &err)
	ds, err := openSet(g, name, typ, nil)
	if err != nil {
		return false, err
	}
	defer closing(ds, name, &err)
	data := make([]byte, max(1, len(text)))
	if err := ds.Read(&data); err != nil {
		return false, err
	}
	return string(data[:len(text)]) == text && (text != "" || data[0] == 0), nil
}

func readStringAttr(obj hdf5.Identifier, name string) (string, error) {
	cname := C.CString(name)
	defer C.free(unsafe.Pointer(cname))
	text := C.ck_read_string_attr(hid(obj), cname)
	if text == nil {
		return "", fmt.Errorf("attribute %s: not a readable string", name)
	}
	defer C.H5free_memory(unsafe.Pointer(text))
	return C.GoString(text), nil
}

// readInts reads an attribute of n signed 64-bit integers (n = 1 also for a scalar).
func readInts(obj attributed, name string, n int) ([]int64, error) {
	v := make([]int64, n)
	return v, readAttr(obj, name, hdf5.T_STD_I64LE, n, &v[0])
}

func readUint(obj attributed, name string) (uint64, error) {
	v := make([]uint64, 1)
	err := readAttr(obj, name, hdf5.T_STD_U64LE, 1, &v[0])
	return v[0], err
}

// readAttr reads an attribute of n values of 8 bytes; first points at the first of them.
func readAttr(obj attributed, name string, typ *hdf5.Datatype, n int, first any) (err error) {
	a, err := obj.OpenAttribute(name)
	if err != nil {
		return fmt.Errorf("attribute %s: %w", name, err)
	}
	defer closing(a, name, &err)
	space := a.Space()
	if space == nil {
		return fmt.Errorf("attribute %s: no dataspace", name)
	}
	defer closing(space, "dataspace", &err)
	if got := space.SimpleExtentNPoints(); got != n {
		return fmt.Errorf("attribute %s holds %d values, want %d", name, got, n)
	}
	return a.Read(first, typ)
}

// openSet opens a dataset and refuses it unless its element type and dims are as given: the binding reads with
// the type and size found in the file, whatever the room in memory.
func openSet(g *hdf5.CommonFG, path string, typ *hdf5.Datatype, dims []int) (*hdf5.Dataset, error) {
	ds, err := g.OpenDataset(path)
	if err != nil {
		return nil, err
	}
	if err := checkSet(ds, typ, dims); err != nil {
		ds.Close()
		return nil, err
	}
	return ds, nil
}

func checkSet(ds *hdf5.Dataset, typ *hdf5.Datatype, dims []int) (err error) {
	got, err := ds.Datatype()
	if err != nil {
		return err
	}
	defer closing(got, "datatype", &err)
	if !got.Equal(typ) {
		return fmt.Errorf("element type of %d bytes is not the one recorded", got.Size())
	}
	space := ds.Space()
	if space == nil {
		return errors.New("no dataspace")
	}
	defer closing(space, "dataspace", &err)
	var have []uint // of a scalar, which SimpleExtentDims cannot take
	if space.SimpleExtentNDims() > 0 {
		if have, _, err = space.SimpleExtentDims(); err != nil {
			return err
		}
	}
	if !slices.EqualFunc(have, dims, func(a uint, b int) bool { return a == uint(b) }) {
		return fmt.Errorf("dims %v in the file, %v in the manifest", have, dims)
	}
	return nil
}

// readRows reads rows [from, from+rows) of the dataset of slice s into dst, without a copy in between. The slice's element
// type must be that of dst: F32, or BF16 as uint16.
func readRows[T float32 | uint16](f *h5file, s *SliceInfo, from, rows int, dst []T) (err error) {
	dims := append([]int{s.Rows}, s.Shape[1:]...)
	typ := hdf5.T_IEEE_F32LE
	if _, ok := any(dst).([]uint16); ok {
		typ = hdf5.T_STD_U16LE
	}
	ds, err := openSet(&f.CommonFG, kindGroups[s.Kind]+"/"+s.Name, typ, dims)
	if err != nil {
		return err
	}
	defer closing(ds, s.Name, &err)
	if from == 0 && rows == s.Rows {
		return ds.Read(&dst)
	}
	offset, count := make([]uint, len(dims)), make([]uint, len(dims))
	for i, d := range dims {
		count[i] = uint(d)
	}
	offset[0], count[0] = uint(from), uint(rows)
	mem, err := hdf5.CreateSimpleDataspace(count, nil)
	if err != nil {
		return err
	}
	defer closing(mem, "dataspace", &err)
	file := ds.Space()
	if file == nil {
		return errors.New("no dataspace")
	}
	defer closing(file, "dataspace", &err)
	if err := file.SelectHyperslab(offset, nil, count, nil); err != nil {
		return err
	}
	return ds.ReadSubset(&dst, mem, file)
}

// readBytes reads the n bytes of a dataset; n = 0 expects that there is none.
func readBytes(g *hdf5.CommonFG, name string, n int) (b []byte, err error) {
	if n == 0 {
		if g.LinkExists(name) {
			return nil, errors.New("in the file and not in the manifest")
		}
		return nil, nil
	}
	ds, err := openSet(g, name, hdf5.T_STD_U8LE, []int{n})
	if err != nil {
		return nil, err
	}
	defer closing(ds, name, &err)
	b = make([]byte, n)
	return b, ds.Read(&b)
}
