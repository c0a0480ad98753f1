package lowp

import "math"

// one is the scale of codes without scales.
var one = []float32{1}

// EncodeRow writes the codes of src to the head of dst, without scales. What is too large saturates or not, as in
// [Format.Encode].
func EncodeRow(f Format, dst []byte, src []float32, saturate bool) {
	const chunk = 1024 // even, and all in a first-level cache
	c := codes{f: f, b: dst}
	for ; c.col < len(src); c.col += chunk {
		x := src[c.col:min(c.col+chunk, len(src))]
		var amax [1]uint32
		if f != BF16 || saturate {
			amaxRows(amax[:], 0, x, 0, 1, len(x))
		}
		if amax[0] <= math.Float32bits(f.Max()) {
			c.encode(x, 0, one, 0, 1, len(x))
			continue
		}
		for j, v := range x {
			putCode(f, dst, c.col+j, f.Encode(v, saturate))
		}
	}
	c.padRows(1, len(src))
}

// padRows clears the half byte after an odd number of 12-bit codes in a row.
func (c codes) padRows(rows, n int) {
	if c.f == E5M6 && n%2 != 0 {
		for r := range rows {
			c.b[r*c.stride+c.f.RowBytes(n)-1] &= 0xF
		}
	}
}

// DecodeRow writes the values of the codes at the head of src, without scales.
func DecodeRow(f Format, dst []float32, src []byte) {
	codes{f: f, b: src}.decode(dst, 0, one, 0, 1, len(dst))
}

// DecodePanel writes the values of a panel of rows x cols codes: row i begins at src[stride*i], goes to dst[ld*i] and is
// multiplied by scales[step*i]; nil is no scales. It is what packing of an operand calls.
func DecodePanel(f Format, dst []float32, ld int, src []byte, stride int, scales []float32, step, rows, cols int) {
	if scales == nil {
		scales, step = one, 0
	}
	codes{f: f, b: src, stride: stride}.decode(dst, ld, scales, step, rows, cols)
}

// DecodePanelCols is DecodePanel with a scale for each column.
func DecodePanelCols(f Format, dst []float32, ld int, src []byte, stride int, scales []float32, rows, cols int) {
	codes{f: f, b: src, stride: stride}.decodeCols(dst, ld, scales, rows, cols)
}
