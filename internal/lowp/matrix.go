package lowp

import "fmt"

// Quant says how an operand is stored.
type Quant struct {
	Format Format
	Scale  ScaleKind
	// A tile's rows and columns; 0 means all of the matrix, so that 0 x 0 is one scale per tensor.
	TileRows, TileCols int
}

func (q Quant) String() string {
	side := func(n int) string {
		if n == 0 {
			return "all"
		}
		return fmt.Sprint(n)
	}
	return fmt.Sprintf("%v %sx%s %v", q.Format, side(q.TileRows), side(q.TileCols), q.Scale)
}

// CodeBytes is the size of the codes of a matrix without gaps between rows.
func (q Quant) CodeBytes(rows, cols int) int { return rows * q.Format.RowBytes(cols) }

// ScaleCount is the number of scales of a matrix, float32 or bytes; groups as in [Matrix].
func (q Quant) ScaleCount(rows, cols int, groups []int) int {
	if q.Scale == ScaleNone {
		return 0
	}
	return strips(q.TileRows, rows, groups) * tilesAcross(q.TileCols, cols)
}

// Matrix is Rows x Cols codes, row-major, with a scale for each tile.
type Matrix struct {
	Quant
	Rows, Cols int
	Stride     int // bytes from row to row
	Codes      []byte

	// The scales, tile by tile in row-major order. With ScaleE8M0 they stand in Exponents, else in Scales.
	Scales    []float32
	Exponents []byte

	// Groups are the numbers of rows of groups that follow each other and fill the matrix: the tokens of one expert
	// each. No tile spans two groups; a tile as high as the matrix ignores them. nil is one group.
	Groups []int
}

// New allocates a matrix without gaps between rows.
func New(q Quant, rows, cols int, groups []int) *Matrix {
	m := &Matrix{Quant: q, Rows: rows, Cols: cols, Groups: groups,
		Stride: q.Format.RowBytes(cols), Codes: make([]byte, q.CodeBytes(rows, cols))}
	if n := q.ScaleCount(rows, cols, groups); q.Scale == ScaleE8M0 {
		m.Exponents = make([]byte, n)
	} else {
		m.Scales = make([]float32, n)
	}
	return m
}

func tilesAcross(tile, n int) int {
	if n == 0 {
		return 0
	}
	if tile == 0 {
		return 1
	}
	return (n + tile - 1) / tile
}

func strips(tile, rows int, groups []int) int {
	if groups == nil || tile == 0 {
		return tilesAcross(tile, rows)
	}
	n := 0
	for _, g := range groups {
		n += tilesAcross(tile, g)
	}
	return n
}

// TilesAcross is the number of tiles side by side.
func (m *Matrix) TilesAcross() int { return tilesAcross(m.TileCols, m.Cols) }

// Strips is the number of rows of tiles.
func (m *Matrix) Strips() int { return strips(m.TileRows, m.Rows, m.Groups) }

// Strip returns the rows of a row of tiles.
func (m *Matrix) Strip(i int) (first, rows int) {
	if m.TileRows == 0 {
		return 0, m.Rows
	}
	if m.Groups == nil {
		first = i * m.TileRows
		return first, min(m.TileRows, m.Rows-first)
	}
	at := 0
	for _, g := range m.Groups {
		n := tilesAcross(m.TileRows, g)
		if i < n {
			first = i * m.TileRows
			return at + first, min(m.TileRows, g-first)
		}
		i -= n
		at += g
	}
	panic("lowp.Matrix.Strip: no such strip")
}

// StripOf returns the row of tiles in which a row lies.
func (m *Matrix) StripOf(row int) int {
	if m.TileRows == 0 {
		return 0
	}
	if m.Groups == nil {
		return row / m.TileRows
	}
	strip := 0
	for _, g := range m.Groups {
		if row < g {
			return strip + row/m.TileRows
		}
		strip += tilesAcross(m.TileRows, g)
		row -= g
	}
	panic("lowp.Matrix.StripOf: no such row")
}

// tileWidth is the number of columns of a tile, at least 1.
func (m *Matrix) tileWidth() int {
	if m.TileCols == 0 {
		return max(1, m.Cols)
	}
	return m.TileCols
}

// TileScale returns the scale of a tile, 1 if the matrix has none.
func (m *Matrix) TileScale(strip, tile int) float32 {
	switch m.Scale {
	case ScaleNone:
		return 1
	case ScaleE8M0:
		return DecodeE8M0(m.Exponents[strip*m.TilesAcross()+tile])
	}
	return m.Scales[strip*m.TilesAcross()+tile]
}

// scaleRow returns the scales of tiles of a strip, in buf unless they stand in memory as they are.
func (m *Matrix) scaleRow(strip, tile, n int, buf []float32) []float32 {
	at := strip*m.TilesAcross() + tile
	switch m.Scale {
	case ScaleNone:
		buf = buf[:n]
		for i := range buf {
			buf[i] = 1
		}
		return buf
	case ScaleE8M0:
		buf = buf[:n]
		for i, e := range m.Exponents[at : at+n] {
			buf[i] = DecodeE8M0(e)
		}
		return buf
	}
	return m.Scales[at : at+n]
}

// Row returns the codes of a row.
func (m *Matrix) Row(i int) []byte {
	return m.Codes[i*m.Stride:][:m.Format.RowBytes(m.Cols)]
}

// At returns a value: code times scale, rounded to float32.
func (m *Matrix) At(row, col int) float32 {
	return m.Format.Decode(code(m.Format, m.Row(row), col)) * m.TileScale(m.StripOf(row), col/m.tileWidth())
}

// code reads a code of a row.
func code(f Format, row []byte, col int) uint16 {
	switch f {
	case E5M6:
		at := col / 2 * 3
		if col%2 == 0 {
			return uint16(row[at]) | uint16(row[at+1])<<8&0xF00
		}
		return uint16(row[at+1])>>4 | uint16(row[at+2])<<4
	case BF16:
		return uint16(row[2*col]) | uint16(row[2*col+1])<<8
	}
	return uint16(row[col])
}

// putCode writes a code of a row, and leaves its neighbours as they are.
func putCode(f Format, row []byte, col int, c uint16) {
	switch f {
	case E5M6:
		at := col / 2 * 3
		if col%2 == 0 {
			row[at], row[at+1] = byte(c), row[at+1]&0xF0|byte(c>>8)
			return
		}
		row[at+1] = row[at+1]&0xF | byte(c<<4)
		row[at+2] = byte(c >> 4)
	case BF16:
		row[2*col], row[2*col+1] = byte(c), byte(c>>8)
	default:
		row[col] = byte(c)
	}
}

// check panics unless the slices hold what the shape says.
func (m *Matrix) check(routine string) {
	if m.Format == BF16 && m.Scale != ScaleNone {
		panic(fmt.Sprintf("lowp.%s: bf16 has the range of float32 and takes no scales, not %v", routine, m.Scale))
	}
	if m.Rows == 0 || m.Cols == 0 {
		return
	}
	row := m.Format.RowBytes(m.Cols)
	if need := (m.Rows-1)*m.Stride + row; m.Stride < row || len(m.Codes) < need {
		panic(fmt.Sprintf("lowp.%s: %d bytes of codes with a stride of %d, need %d with at least %d", routine, len(m.Codes), m.Stride, need, row))
	}
	have := len(m.Scales)
	if m.Scale == ScaleE8M0 {
		have = len(m.Exponents)
	}
	if need := m.ScaleCount(m.Rows, m.Cols, m.Groups); have < need {
		panic(fmt.Sprintf("lowp.%s: %d scales, need %d", routine, have, need))
	}
	if m.Groups != nil {
		sum := 0
		for _, g := range m.Groups {
			sum += g
		}
		if sum != m.Rows {
			panic(fmt.Sprintf("lowp.%s: groups of %d rows in a matrix of %d", routine, sum, m.Rows))
		}
	}
}

func checkFloats(routine string, have, rows, cols, ld int) {
	if rows == 0 || cols == 0 {
		return
	}
	if need := (rows-1)*ld + cols; ld < cols || have < need {
		panic(fmt.Sprintf("lowp.%s: %d floats with a leading dimension of %d, need %d with at least %d", routine, have, ld, need, cols))
	}
}
