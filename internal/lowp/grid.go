package lowp

import "math"

// The loops that everything here is made of. They work on a grid: rows of float32 at a distance of ld values, and their
// codes in rows at a distance of stride bytes, from a column on. A grid may be a panel of a matrix, or the tiles of one
// row below each other. A scale belongs to a row of the grid (row i has scales[step*i]) or to a column.
//
// The plain body of a loop is its specification. Vectors take as many columns as fill blocks of them, first of wide ones,
// then of narrow ones; the plain body does the others, and all give the same bits.

// codes are those of a grid.
type codes struct {
	f      Format
	b      []byte
	stride int
	col    int
}

// at is the place of a code that begins on a byte.
func (c codes) at(row, col int) int { return row*c.stride + (c.col+col)*c.f.Bits()/8 }

// values writes the values of a row's codes from a column on. It is what decoding spends its time on without vectors.
func (c codes) values(dst []float32, row, col int) {
	b := c.b[row*c.stride:]
	switch col += c.col; c.f {
	case E4M3:
		for j, code := range b[col : col+len(dst)] {
			dst[j] = e4m3Values[code]
		}
	case E5M2:
		for j, code := range b[col : col+len(dst)] {
			dst[j] = e5m2Values[code]
		}
	case BF16:
		b = b[2*col : 2*(col+len(dst))]
		for j := range dst {
			dst[j] = math.Float32frombits(uint32(b[2*j])<<16 | uint32(b[2*j+1])<<24)
		}
	default:
		for j := range dst {
			dst[j] = c.f.Decode(code(c.f, b, col+j))
		}
	}
}

func (c codes) put(row, col int, v float32) {
	putCode(c.f, c.b[row*c.stride:], c.col+col, c.f.encodeInTile(v))
}

// spans cuts columns into blocks of wide vectors, then of narrow ones; done is the number of columns in them.
func spans(cols int) (wide, narrow, done int) {
	switch active.Load().vectors {
	case lanes16:
		wide, narrow = cols/wideBlock, cols%wideBlock/narrowBlock
	case lanes8:
		narrow = cols / narrowBlock
	}
	return wide, narrow, wide*wideBlock + narrow*narrowBlock
}

// A block is two vectors.
const (
	wideBlock   = 2 * int(lanes16)
	narrowBlock = 2 * int(lanes8)
)

func (c codes) spans(cols int) (wide, narrow, done int) {
	if !byteAligned(c.f, c.col) {
		return 0, 0, 0
	}
	return spans(cols)
}

// byteAligned reports whether a code at a column begins on a byte.
func byteAligned(f Format, col int) bool { return f != E5M6 || col%2 == 0 }

// callValues bounds the work of one call of assembly, which the scheduler cannot interrupt: a few microseconds. Loops with
// scales for columns, of which there are not as many in one call, count on whole rows only.
const callValues = 1 << 15

// callRows is the number of rows for one call.
func callRows(rows, cols int) int {
	if rows*cols <= callValues {
		return rows
	}
	return max(1, callValues/cols)
}

// encode writes the codes of src divided by scales. A finite value saturates. The vectors are right for finite quotients
// only; values of the format BF16 may be any, and have no scales.
func (c codes) encode(src []float32, ld int, scales []float32, step, rows, cols int) {
	if rows == 0 || cols == 0 {
		return
	}
	_, _ = src[(rows-1)*ld+cols-1], scales[(rows-1)*step]
	for ; cols > callValues; cols -= callValues {
		c.encode(src, ld, scales, step, rows, callValues)
		c.col, src = c.col+callValues, src[callValues:]
	}
	wide, narrow, done := c.spans(cols)
	_ = c.b[max(0, c.at(rows-1, done)-1)]
	for i, most := 0, callRows(rows, cols); i < rows && done > 0; i += most {
		n := min(most, rows-i)
		if wide > 0 {
			encodeVectors(lanes16, c.f, &c.b[c.at(i, 0)], c.stride, &src[i*ld], ld, &scales[i*step], step, wide, n)
		}
		if narrow > 0 {
			j := wide * wideBlock
			encodeVectors(lanes8, c.f, &c.b[c.at(i, j)], c.stride, &src[i*ld+j], ld, &scales[i*step], step, narrow, n)
		}
	}
	if done == cols {
		return
	}
	for i := range rows {
		s := scales[i*step]
		for j, v := range src[i*ld+done : i*ld+cols] {
			c.put(i, done+j, v/s)
		}
	}
}

// encodeCols is encode with a scale for each column.
func (c codes) encodeCols(src []float32, ld int, scales []float32, rows, cols int) {
	if rows == 0 || cols == 0 {
		return
	}
	_, _ = src[(rows-1)*ld+cols-1], scales[cols-1]
	wide, narrow, done := c.spans(cols)
	_ = c.b[max(0, c.at(rows-1, done)-1)]
	for i, most := 0, callRows(rows, cols); i < rows && done > 0; i += most {
		n := min(most, rows-i)
		if wide > 0 {
			encodeColsVectors(lanes16, c.f, &c.b[c.at(i, 0)], c.stride, &src[i*ld], ld, &scales[0], wide, n)
		}
		if narrow > 0 {
			j := wide * wideBlock
			encodeColsVectors(lanes8, c.f, &c.b[c.at(i, j)], c.stride, &src[i*ld+j], ld, &scales[j], narrow, n)
		}
	}
	if done == cols {
		return
	}
	for i := range rows {
		for j, v := range src[i*ld+done : i*ld+cols] {
			c.put(i, done+j, v/scales[done+j])
		}
	}
}

// encodePlain is encode and encodeCols for tiles of any content: vectors have seen what they cannot do.
func (c codes) encodePlain(src []float32, ld int, scale float32, rows, cols int) {
	for i := range rows {
		for j, v := range src[i*ld : i*ld+cols] {
			c.put(i, j, v/scale)
		}
	}
}

// maxVectorScale is the largest scale of a row for the vectors: those of E4M3 multiply it by 256.
const maxVectorScale = 0x1p119

// decode writes the values of codes times scales.
func (c codes) decode(dst []float32, ld int, scales []float32, step, rows, cols int) {
	if rows == 0 || cols == 0 {
		return
	}
	_, _ = dst[(rows-1)*ld+cols-1], scales[(rows-1)*step]
	for ; cols > callValues; cols -= callValues {
		c.decode(dst, ld, scales, step, rows, callValues)
		c.col, dst = c.col+callValues, dst[callValues:]
	}
	wide, narrow, done := c.spans(cols)
	for i := range rows {
		if s := scales[i*step]; s > maxVectorScale && s <= math.MaxFloat32 {
			wide, narrow, done = 0, 0, 0
		}
		if step == 0 {
			break
		}
	}
	_ = c.b[max(0, c.at(rows-1, done)-1)]
	for i, most := 0, callRows(rows, cols); i < rows && done > 0; i += most {
		n := min(most, rows-i)
		if wide > 0 {
			decodeVectors(lanes16, c.f, &dst[i*ld], ld, &c.b[c.at(i, 0)], c.stride, &scales[i*step], step, wide, n)
		}
		if narrow > 0 {
			j := wide * wideBlock
			decodeVectors(lanes8, c.f, &dst[i*ld+j], ld, &c.b[c.at(i, j)], c.stride, &scales[i*step], step, narrow, n)
		}
	}
	if done == cols {
		return
	}
	for i := range rows {
		x, s := dst[i*ld+done:i*ld+cols], scales[i*step]
		c.values(x, i, done)
		for j := range x {
			x[j] *= s
		}
	}
}

// decodeCols is decode with a scale for each column.
func (c codes) decodeCols(dst []float32, ld int, scales []float32, rows, cols int) {
	if rows == 0 || cols == 0 {
		return
	}
	_, _ = dst[(rows-1)*ld+cols-1], scales[cols-1]
	wide, narrow, done := c.spans(cols)
	_ = c.b[max(0, c.at(rows-1, done)-1)]
	for i, most := 0, callRows(rows, cols); i < rows && done > 0; i += most {
		n := min(most, rows-i)
		if wide > 0 {
			decodeColsVectors(lanes16, c.f, &dst[i*ld], ld, &c.b[c.at(i, 0)], c.stride, &scales[0], wide, n)
		}
		if narrow > 0 {
			j := wide * wideBlock
			decodeColsVectors(lanes8, c.f, &dst[i*ld+j], ld, &c.b[c.at(i, j)], c.stride, &scales[j], narrow, n)
		}
	}
	if done == cols {
		return
	}
	for i := range rows {
		x := dst[i*ld+done : i*ld+cols]
		c.values(x, i, done)
		for j := range x {
			x[j] *= scales[done+j]
		}
	}
}

// amaxRows raises amax[step*i] to the largest magnitude in row i, as bits without the sign: their order as integers is
// that of the magnitudes, with infinity and then NaN on top.
func amaxRows(amax []uint32, step int, src []float32, ld, rows, cols int) {
	if rows == 0 || cols == 0 {
		return
	}
	_, _ = src[(rows-1)*ld+cols-1], amax[(rows-1)*step]
	for ; cols > callValues; cols -= callValues {
		amaxRows(amax, step, src, ld, rows, callValues)
		src = src[callValues:]
	}
	wide, narrow, done := spans(cols)
	for i, most := 0, callRows(rows, cols); i < rows && done > 0; i += most {
		n := min(most, rows-i)
		if wide > 0 {
			amaxTilesVectors(lanes16, &amax[i*step], step, &src[i*ld], ld, wide, n)
		}
		if narrow > 0 {
			amaxTilesVectors(lanes8, &amax[i*step], step, &src[i*ld+wide*wideBlock], ld, narrow, n)
		}
	}
	if done == cols {
		return
	}
	for i := range rows {
		top := amax[i*step]
		for _, v := range src[i*ld+done : i*ld+cols] {
			top = max(top, math.Float32bits(v)&^signBit)
		}
		amax[i*step] = top
	}
}

// amaxCols raises amax[j] to the largest magnitude in column j, as amaxRows.
func amaxCols(amax []uint32, src []float32, ld, rows, cols int) {
	if rows == 0 || cols == 0 {
		return
	}
	_, _ = src[(rows-1)*ld+cols-1], amax[cols-1]
	wide, narrow, done := spans(cols)
	for i, most := 0, callRows(rows, cols); i < rows && done > 0; i += most {
		n := min(most, rows-i)
		if wide > 0 {
			amaxColsVectors(lanes16, &amax[0], &src[i*ld], ld, wide, n)
		}
		if narrow > 0 {
			j := wide * wideBlock
			amaxColsVectors(lanes8, &amax[j], &src[i*ld+j], ld, narrow, n)
		}
	}
	if done == cols {
		return
	}
	for i := range rows {
		for j, v := range src[i*ld+done : i*ld+cols] {
			amax[done+j] = max(amax[done+j], math.Float32bits(v)&^signBit)
		}
	}
}
