package comm

import (
	"context"
	"encoding/binary"
	"reflect"
	"unsafe"
)

// Number lists the element types that collectives carry.
type Number interface {
	~float32 | ~float64 | ~int32 | ~int64 | ~uint8
}

// An elem is the element type as it stands in the header of a collective.
type elem uint8

const (
	elemNone elem = iota
	elemFloat32
	elemFloat64
	elemInt32
	elemInt64
	elemUint8
)

var elemNames = [...]string{"nothing", "float32", "float64", "int32", "int64", "uint8"}

func (e elem) String() string {
	if int(e) < len(elemNames) {
		return elemNames[e]
	}
	return "unknown type"
}

func elemOf[T Number]() elem {
	switch reflect.TypeFor[T]().Kind() {
	case reflect.Float32:
		return elemFloat32
	case reflect.Float64:
		return elemFloat64
	case reflect.Int32:
		return elemInt32
	case reflect.Int64:
		return elemInt64
	default:
		return elemUint8
	}
}

func sizeOf[T Number]() int {
	var z T
	return int(unsafe.Sizeof(z))
}

// bytesOf views the memory of x as bytes.
func bytesOf[T Number](x []T) []byte {
	return unsafe.Slice((*byte)(unsafe.Pointer(unsafe.SliceData(x))), len(x)*sizeOf[T]())
}

// viewOf is the inverse of bytesOf. b must be aligned for T, as the group's own buffers are.
func viewOf[T Number](b []byte) []T {
	return unsafe.Slice((*T)(unsafe.Pointer(unsafe.SliceData(b))), len(b)/sizeOf[T]())
}

// alignedBytes makes n bytes that begin on an 8-byte boundary.
func alignedBytes(n int) []byte {
	return bytesOf(make([]int64, (n+7)/8))[:n]
}

func littleEndian() bool {
	x := uint16(1)
	return binary.LittleEndian.Uint16(unsafe.Slice((*byte)(unsafe.Pointer(&x)), 2)) == 1
}

// SendSlice sends x to rank to without copying it into a byte buffer first. Errors are those of Transport.Send.
func SendSlice[T Number](ctx context.Context, t Transport, to int, tag Tag, x []T) error {
	return t.Send(ctx, to, tag, bytesOf(x))
}

// RecvSlice receives exactly len(x) elements from rank from into x. Errors are those of Transport.Recv.
func RecvSlice[T Number](ctx context.Context, t Transport, from int, tag Tag, x []T) error {
	return t.Recv(ctx, from, tag, bytesOf(x))
}
