package kernel

import (
	"fmt"
	"math"

	"moetor/internal/lowp"
)

// side is an operand of a scaled product as the contraction sees it: lines of k values, which are the rows of op(A) or
// the columns of op(B). Lines are rows of the matrix, or its columns if the contraction runs down.
type side struct {
	m      *lowp.Matrix
	panels []byte // the codes of a packed weight; m then has none
	down   bool
	line   int // row or column of the matrix that is line 0
	start  int // row of the matrix where the contraction begins, and its strip of tiles; 0 unless down
	strip  int
	tile   int  // values of a line that share a scale
	fold   bool // scales change within a cut of the contraction: they are multiplied in when codes are decoded
}

func newSide(m *lowp.Matrix, down bool, k int) side {
	s := side{m: m, down: down, tile: m.TileCols}
	if down {
		s.tile = m.TileRows
	}
	if s.tile == 0 || m.Scale == lowp.ScaleNone {
		s.tile = math.MaxInt
	}
	s.fold = s.tile < k && s.tile%scaledDepth != 0
	return s
}

// begin makes the contraction begin at row at, the first of group e.
func (s *side) begin(e, at int) {
	s.start = at
	if s.tile == math.MaxInt {
		return
	}
	if s.tile == 1 {
		s.strip = at
		return
	}
	for _, rows := range s.m.Groups[:min(e, len(s.m.Groups))] {
		s.strip += (rows + s.tile - 1) / s.tile
	}
}

// checkScaled panics unless a matrix holds what its shape says, and its tiles suit the contraction over k values, down its
// rows or along them.
func checkScaled(routine, name string, m *lowp.Matrix, down bool, k int) {
	if m.Rows == 0 || m.Cols == 0 {
		return
	}
	row := m.Format.RowBytes(m.Cols)
	if need := (m.Rows-1)*m.Stride + row; m.Rows < 0 || m.Cols < 0 || m.Stride < row || len(m.Codes) < need {
		panic(fmt.Sprintf("kernel.%s: %s is %dx%d with %d bytes of codes and a stride of %d, needs %d and %d", routine, name,
			m.Rows, m.Cols, len(m.Codes), m.Stride, need, row))
	}
	have := len(m.Scales)
	if m.Scale == lowp.ScaleE8M0 {
		have = len(m.Exponents)
	}
	if need := m.ScaleCount(m.Rows, m.Cols, m.Groups); have < need {
		panic(fmt.Sprintf("kernel.%s: %s has %d scales, needs %d", routine, name, have, need))
	}
	if s := newSide(m, down, k); s.fold && (m.Scale == lowp.ScaleF32 || m.Format == lowp.E5M6 && s.tile%2 != 0) {
		panic(fmt.Sprintf("kernel.%s: %s has scales of %d values of k (%v), which is not a multiple of %d, and they are not powers of two",
			routine, name, s.tile, m.Quant, scaledDepth))
	}
}

// scales sets dst to the scales of lines from line on, at value p of the contraction.
func (s *side) scales(dst []float32, line, p int) {
	m := s.m
	line += s.line
	across := m.TilesAcross()
	switch {
	case m.Scale == lowp.ScaleNone:
		for i := range dst {
			dst[i] = 1
		}
		return
	case m.Scale != lowp.ScaleE8M0 && s.down && m.TileCols == 1: // gradients of weights: they stand side by side
		copy(dst, m.Scales[(s.strip+p/s.tile)*across+line:])
		return
	case !s.down && m.TileRows == 1: // activations: no need to look for runs
		at := line*across + p/s.tile
		if m.Scale == lowp.ScaleE8M0 {
			for i := range dst {
				dst[i] = lowp.DecodeE8M0(m.Exponents[at])
				at += across
			}
			return
		}
		for i := range dst {
			dst[i] = m.Scales[at]
			at += across
		}
		return
	}
	for i := 0; i < len(dst); {
		var strip, tile, end int
		if s.down {
			strip, end = s.strip+p/s.tile, line+len(dst)
			if w := m.TileCols; w > 0 {
				tile = (line + i) / w
				end = (tile + 1) * w
			}
		} else {
			strip, tile, end = line+i, p/s.tile, line+i+1
			if m.TileRows != 1 {
				strip = m.StripOf(line + i)
				first, rows := m.Strip(strip)
				end = first + rows
			}
		}
		v := m.TileScale(strip, tile)
		for end = min(end-line, len(dst)); i < end; i++ {
			dst[i] = v
		}
	}
}

// nextTile is the end of the tile in which value p of the contraction lies, at most end.
func (s *side) nextTile(p, end int) int {
	if s.tile >= end {
		return end
	}
	return min(p-p%s.tile+s.tile, end)
}

// decodeLines writes n lines, values k0..k1 each, scaledDepth apart. Lines must be rows of the matrix.
func (s *side) decodeLines(dst []float32, line, n, k0, k1 int, scale []float32) {
	m := s.m
	codes := m.Codes[(s.line+line)*m.Stride:]
	if !s.fold {
		lowp.DecodePanel(m.Format, dst, scaledDepth, codes[m.Format.RowBytes(k0):], m.Stride, nil, 0, n, k1-k0)
		return
	}
	for p := k0; p < k1; {
		end := s.nextTile(p, k1)
		s.scales(scale[:n], line, p)
		lowp.DecodePanel(m.Format, dst[p-k0:], scaledDepth, codes[m.Format.RowBytes(p):], m.Stride, scale, 1, n, end-p)
		p = end
	}
}

// decodeSteps writes values k0..k1 of n lines, step after step, ld apart. The contraction must run down the matrix; or the
// lines are those of a panel of a packed weight.
func (s *side) decodeSteps(dst []float32, ld, line, n, k0, k1 int, scale []float32) {
	m := s.m
	codes, stride := s.panels, m.Format.RowBytes(scaledWidth)
	if s.panels != nil {
		codes = s.panel(line, k0, k1)
	} else {
		stride = m.Stride
		codes = m.Codes[(s.start+k0)*stride+m.Format.RowBytes(s.line+line):]
	}
	if !s.fold {
		lowp.DecodePanel(m.Format, dst, ld, codes, stride, nil, 0, k1-k0, n)
		return
	}
	for p := k0; p < k1; {
		end := s.nextTile(p, k1)
		s.scales(scale[:n], line, p)
		lowp.DecodePanelCols(m.Format, dst[(p-k0)*ld:], ld, codes[(p-k0)*stride:], stride, scale, end-p, n)
		p = end
	}
}
