package lowp

import (
	"fmt"
	"math"
	"sync"
)

// The scales of so many tiles are made at once, on the stack: of tiles one column wide, and of others.
const (
	chunkCols  = 128
	chunkTiles = 32
)

// Values are read twice, for the scale and for the codes. chunkValues bounds what is read before it is read again by what
// a second-level cache holds, rowsValues that of some rows by the first level.
const (
	chunkValues = 1 << 15
	rowsValues  = 1 << 13
)

// Quantize fills a matrix with codes and scales of src, row-major with leading dimension ld.
func Quantize(dst *Matrix, src []float32, ld int) {
	dst.check("Quantize")
	checkFloats("Quantize", len(src), dst.Rows, dst.Cols, ld)
	if dst.Cols == 0 {
		return
	}
	if dst.TileRows == 1 && dst.TileCols != 1 {
		some := min(chunkTiles, max(1, rowsValues/dst.Cols))
		for i := 0; i < dst.Rows; i += some {
			dst.quantizeRows(i, min(some, dst.Rows-i), src[i*ld:], ld)
		}
		return
	}
	for i := range dst.Strips() {
		first, rows := dst.Strip(i)
		dst.quantizeCols(i, first, rows, 0, dst.Cols, src[first*ld:], ld)
	}
}

// QuantizeStrip is Quantize for one row of tiles; src and ld are those of the whole matrix.
func QuantizeStrip(dst *Matrix, strip int, src []float32, ld int) {
	dst.check("QuantizeStrip")
	checkFloats("QuantizeStrip", len(src), dst.Rows, dst.Cols, ld)
	first, rows := dst.Strip(strip)
	dst.quantizeCols(strip, first, rows, 0, dst.Cols, src[first*ld:], ld)
}

// QuantizeRow fills one row of a matrix whose tiles are one row high.
func QuantizeRow(dst *Matrix, row int, src []float32) {
	if dst.TileRows != 1 {
		panic(fmt.Sprintf("lowp.QuantizeRow: tiles of %d rows", dst.TileRows))
	}
	checkFloats("QuantizeRow", len(src), 1, dst.Cols, dst.Cols)
	dst.quantizeCols(row, row, 1, 0, dst.Cols, src, dst.Cols)
}

// quantizeRows fills at most chunkTiles rows of tiles one row high, which src begins with.
func (m *Matrix) quantizeRows(row, rows int, src []float32, ld int) {
	width, across := m.tileWidth(), m.TilesAcross()
	if across >= rows {
		for r := range rows {
			m.quantizeCols(row+r, row+r, 1, 0, m.Cols, src[r*ld:], ld)
		}
		return
	}
	// The tiles below each other make a grid.
	var amaxes [chunkTiles]uint32
	var buf [chunkTiles]float32
	c := codes{f: m.Format, b: m.Codes[row*m.Stride:], stride: m.Stride}
	for tile := range across {
		at := tile * width
		cols := min(width, m.Cols-at)
		x := src[at:]
		c.col = at
		amax := amaxes[:rows]
		clear(amax)
		if m.Format != BF16 {
			amaxRows(amax, 1, x, ld, rows, cols)
		}
		scales := m.makeScales(row*across+tile, across, amax, buf[:])
		c.encode(x, ld, scales, 1, rows, cols)
		for r, a := range amax {
			if a >= infBits {
				lost := c
				lost.b = c.b[r*m.Stride:]
				lost.encodePlain(x[r*ld:], 0, scales[r], 1, cols)
			}
		}
	}
	c.padRows(rows, m.Cols)
}

// quantizeCols fills the tiles of a strip from column from to column to, both at the edges of tiles. src begins at the
// first of these rows and columns.
func (m *Matrix) quantizeCols(strip, first, rows, from, to int, src []float32, ld int) {
	if rows == 0 {
		return
	}
	if m.tileWidth() == 1 {
		var amax [chunkCols]uint32
		var buf [chunkCols]float32
		m.quantizeChunks(strip, first, rows, from, to, src, ld, amax[:], buf[:])
	} else {
		var amax [chunkTiles]uint32
		var buf [chunkTiles]float32
		m.quantizeChunks(strip, first, rows, from, to, src, ld, amax[:], buf[:])
	}
}

func (m *Matrix) quantizeChunks(strip, first, rows, from, to int, src []float32, ld int, amaxes []uint32, buf []float32) {
	width, across := m.tileWidth(), m.TilesAcross()
	c := codes{f: m.Format, b: m.Codes[first*m.Stride:], stride: m.Stride}
	chunk := min(len(amaxes), max(1, chunkValues/(rows*width)))
	for at := from; at < to; at += chunk * width {
		cols := min(chunk*width, to-at)
		x := src[at-from:]
		c.col = at
		amax := amaxes[:tilesAcross(width, cols)]
		clear(amax)
		if m.Format != BF16 { // which needs no scales, and no care of large values
			amaxTiles(amax, x, ld, rows, cols, width)
		}
		scales := m.makeScales(strip*across+at/width, 1, amax, buf)
		c.encodeTiles(x, ld, scales, rows, cols, width)
		for t, a := range amax {
			if a >= infBits {
				lost := c
				lost.col = at + t*width
				lost.encodePlain(x[t*width:], ld, scales[t], rows, min(width, cols-t*width))
			}
		}
	}
	if to == m.Cols {
		c.padRows(rows, m.Cols)
	}
}

// makeScales makes the scales of tiles, which stand in memory from at on and step apart, by their largest magnitudes.
func (m *Matrix) makeScales(at, step int, amax []uint32, buf []float32) []float32 {
	scales := buf[:len(amax)]
	m.Scale.scales(scales, m.Format, amax)
	switch m.Scale {
	case ScaleNone:
	case ScaleE8M0:
		for i, s := range scales {
			m.Exponents[at+i*step] = byte(math.Float32bits(s) >> 23)
		}
	default:
		for i, s := range scales {
			m.Scales[at+i*step] = s
		}
	}
	return scales
}

// amaxTiles raises amax[t] to the largest magnitude in tile t of a grid cut into tiles that are as high as the grid; the
// last one may be narrower.
func amaxTiles(amax []uint32, src []float32, ld, rows, cols, width int) {
	switch whole := cols / width; {
	case width == 1:
		amaxCols(amax, src, ld, rows, cols)
	case rows == 1:
		amaxRows(amax, 1, src, width, whole, width)
		if rest := cols - whole*width; rest > 0 {
			amaxRows(amax[whole:], 0, src[whole*width:], 0, 1, rest)
		}
	default:
		for t := range amax {
			amaxRows(amax[t:], 0, src[t*width:], ld, rows, min(width, cols-t*width))
		}
	}
}

// encodeTiles writes the codes of a grid cut as in amaxTiles, with a scale for each tile.
func (c codes) encodeTiles(src []float32, ld int, scales []float32, rows, cols, width int) {
	switch {
	case width == 1:
		c.encodeCols(src, ld, scales, rows, cols)
		return
	case rows == 1 && byteAligned(c.f, width):
		// The tiles of a row stand below each other as a grid.
		whole := cols / width
		row := codes{f: c.f, b: c.b, stride: c.f.RowBytes(width), col: c.col}
		row.encode(src, width, scales, 1, whole, width)
		c.col, src, scales, cols = c.col+whole*width, src[whole*width:], scales[whole:], cols-whole*width
	}
	for t := range scales {
		c.encode(src[t*width:], ld, scales[t:], 0, rows, min(width, cols-t*width))
		c.col += width
	}
}

// Dequantize writes all values, code times scale rounded to float32, with leading dimension ld.
func Dequantize(dst []float32, ld int, src *Matrix) {
	src.check("Dequantize")
	checkFloats("Dequantize", len(dst), src.Rows, src.Cols, ld)
	src.dequantize(dst, ld, 0, src.Rows, 0, src.Cols)
}

// DequantizePart is Dequantize for a rectangle, which goes to the head of dst.
func DequantizePart(dst []float32, ld int, src *Matrix, row, rows, col, cols int) {
	src.check("DequantizePart")
	checkFloats("DequantizePart", len(dst), rows, cols, ld)
	if row < 0 || row+rows > src.Rows || col < 0 || col+cols > src.Cols {
		panic(fmt.Sprintf("lowp.DequantizePart: %dx%d at %d, %d of %dx%d", rows, cols, row, col, src.Rows, src.Cols))
	}
	src.dequantize(dst, ld, row, rows, col, cols)
}

func (m *Matrix) dequantize(dst []float32, ld, row, rows, col, cols int) {
	if rows == 0 || cols == 0 {
		return
	}
	for end := row + rows; ; {
		n := 1
		switch width := m.tileWidth(); {
		case m.TileRows == 1 && width < narrowTile && byteAligned(m.Format, width):
			m.dequantizeRow(dst, row, col, cols)
		case m.TileRows == 1:
			n = min(chunkCols, end-row)
			m.dequantizeRows(dst, ld, row, n, col, cols)
		default:
			strip := m.StripOf(row)
			first, high := m.Strip(strip)
			n = min(first+high, end) - row
			m.dequantizeStrip(dst, ld, strip, row, n, col, cols)
		}
		if row += n; row == end {
			return
		}
		dst = dst[n*ld:]
	}
}

// narrowTile is the width from which on it pays to go down the rows, tile by tile, and not along them.
const narrowTile = 64

// dequantizeRow is dequantize for one row of tiles one row high. Tiles of a row stand below each other as a grid.
func (m *Matrix) dequantizeRow(dst []float32, row, col, cols int) {
	var buf [chunkTiles]float32
	width := m.tileWidth()
	grid := codes{f: m.Format, b: m.Codes[row*m.Stride:], stride: m.Format.RowBytes(width)}
	for at, end := col, col+cols; at < end; {
		tiles, wide := min(chunkTiles, (end-at)/width), width
		if in := at % width; in != 0 || tiles == 0 { // a part of a tile
			tiles, wide = 1, min(width-in, end-at)
		}
		grid.col = at
		grid.decode(dst[at-col:], width, m.scaleRow(row, at/width, tiles, buf[:]), 1, tiles, wide)
		at += tiles * wide
	}
}

// dequantizeRows is dequantize with tiles one row high, for at most chunkCols rows.
func (m *Matrix) dequantizeRows(dst []float32, ld, row, rows, col, cols int) {
	var buf [chunkCols]float32
	width, across := m.tileWidth(), m.TilesAcross()
	c := codes{f: m.Format, b: m.Codes[row*m.Stride:], stride: m.Stride}
	for at := col; at < col+cols; {
		tile := at / width
		n := min((tile+1)*width, col+cols) - at
		first := row*across + tile
		c.col = at
		switch m.Scale {
		case ScaleNone:
			c.decode(dst[at-col:], ld, one, 0, rows, n)
		case ScaleE8M0:
			for r := range rows {
				buf[r] = DecodeE8M0(m.Exponents[first+r*across])
			}
			c.decode(dst[at-col:], ld, buf[:], 1, rows, n)
		default:
			c.decode(dst[at-col:], ld, m.Scales[first:], across, rows, n)
		}
		at += n
	}
}

// dequantizeStrip is dequantize within one row of tiles.
func (m *Matrix) dequantizeStrip(dst []float32, ld, strip, row, rows, col, cols int) {
	var buf [chunkCols]float32
	width := m.tileWidth()
	c := codes{f: m.Format, b: m.Codes[row*m.Stride:], stride: m.Stride}
	for at := col; at < col+cols; {
		n := min(chunkCols, col+cols-at)
		c.col = at
		if width == 1 {
			c.decodeCols(dst[at-col:], ld, m.scaleRow(strip, at, n, buf[:]), rows, n)
		} else {
			tile := at / width
			n = min((tile+1)*width, col+cols) - at
			buf[0] = m.TileScale(strip, tile)
			c.decode(dst[at-col:], ld, buf[:], 0, rows, n)
		}
		at += n
	}
}

// Requantize fills dst, of whatever tiles and format, with the values of src, of the same shape. Between them stand a few
// tiles of float32 at a time.
func Requantize(dst, src *Matrix) {
	for i := range dst.Strips() {
		RequantizeStrip(dst, i, src)
	}
}

// RequantizeStrip is Requantize for one row of tiles of dst.
func RequantizeStrip(dst *Matrix, strip int, src *Matrix) {
	dst.check("Requantize")
	src.check("Requantize")
	if dst.Rows != src.Rows || dst.Cols != src.Cols {
		panic(fmt.Sprintf("lowp.Requantize: %dx%d from %dx%d", dst.Rows, dst.Cols, src.Rows, src.Cols))
	}
	first, rows := dst.Strip(strip)
	width := dst.tileWidth()
	panel := max(1, requantizeCols/width) * width
	x := borrow(rows * min(panel, dst.Cols))
	for at := 0; at < dst.Cols; at += panel {
		cols := min(panel, dst.Cols-at)
		src.dequantize(x.f, cols, first, rows, at, cols)
		dst.quantizeCols(strip, first, rows, at, at+cols, x.f, cols)
	}
	x.giveBack()
}

// requantizeCols is the width of the float panel of a requantisation: one tile of the usual source, so that a panel of 128
// rows takes 64 KiB.
const requantizeCols = 128

// scratch is a buffer from a free list, which the collector does not empty: a warm call allocates nothing.
type scratch struct{ f []float32 }

var scratches struct {
	sync.Mutex
	free []*scratch
}

func borrow(n int) *scratch {
	scratches.Lock()
	var s *scratch
	if last := len(scratches.free) - 1; last >= 0 {
		s, scratches.free = scratches.free[last], scratches.free[:last]
	} else {
		s = new(scratch)
	}
	scratches.Unlock()
	if len(s.f) < n {
		s.f = make([]float32, n)
	}
	return s
}

func (s *scratch) giveBack() {
	scratches.Lock()
	scratches.free = append(scratches.free, s)
	scratches.Unlock()
}
