package model

import (
	"unsafe"

	"moetor/internal/lowp"
	"moetor/internal/tensor"
)

// A wire turns rows of codes into rows of words for a Route, and back, on all threads. A row is its codes, the scales of its
// tiles (one row high), and up to three bytes without meaning.
type wire struct {
	out, in *rowLoop
	words   tensor.Mat
	codes   *lowp.Matrix
}

func newWire() *wire {
	w := &wire{}
	w.out, w.in = loopOf(w.packRows), loopOf(w.unpackRows)
	return w
}

// wireWords is the number of float32 words of a row.
func wireWords(m *lowp.Matrix) int {
	n := m.Format.RowBytes(m.Cols)
	switch m.Scale {
	case lowp.ScaleNone:
	case lowp.ScaleE8M0:
		n += m.TilesAcross()
	default:
		n += 4 * m.TilesAcross()
	}
	return (n + 3) / 4
}

func (w *wire) pack(dst tensor.Mat, src *lowp.Matrix) {
	w.words, w.codes = dst, src
	w.out.run(src.Rows)
}

func (w *wire) unpack(dst *lowp.Matrix, src tensor.Mat) {
	w.words, w.codes = src, dst
	w.in.run(dst.Rows)
}

func (w *wire) packRows(from, to int) {
	for r := from; r < to; r++ {
		row, scales := w.row(r)
		n := copy(row, w.codes.Row(r))
		n += copy(row[n:], scales)
		clear(row[n:])
	}
}

func (w *wire) unpackRows(from, to int) {
	for r := from; r < to; r++ {
		row, scales := w.row(r)
		n := copy(w.codes.Row(r), row)
		copy(scales, row[n:])
	}
}

// row returns a row of words as bytes, and its scales likewise.
func (w *wire) row(r int) (words, scales []byte) {
	m, across := w.codes, w.codes.TilesAcross()
	switch m.Scale {
	case lowp.ScaleNone:
	case lowp.ScaleE8M0:
		scales = m.Exponents[r*across : (r+1)*across]
	default:
		scales = asBytes(m.Scales[r*across : (r+1)*across])
	}
	return asBytes(w.words.Row(r)), scales
}

// asBytes views words as bytes. Words that go over a wire are never used as numbers, so no bit of them changes.
func asBytes(x []float32) []byte {
	if len(x) == 0 {
		return nil
	}
	return unsafe.Slice((*byte)(unsafe.Pointer(&x[0])), 4*len(x))
}
