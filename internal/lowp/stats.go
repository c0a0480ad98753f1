package lowp

import (
	"fmt"
	"math"
)

// Stats says what quantisation did to values. Those of parts add up with Add.
type Stats struct {
	Values    int
	NonFinite int     // of the source
	Saturated int     // finite, but too large for the format after scaling; with BF16 they became infinite
	Flushed   int     // not zero, but stored as zero
	Amax      float32 // of the finite ones
	Signal    float64 // sum of squares of the finite values that did not become infinite
	Noise     float64 // sum of squares of their errors
}

// Measure compares a matrix with what it was quantised from. It looks at every value twice and is meant for the eye, not
// for the step.
func Measure(m *Matrix, src []float32, ld int) Stats {
	m.check("Measure")
	checkFloats("Measure", len(src), m.Rows, m.Cols, ld)
	s := Stats{Values: m.Rows * m.Cols}
	width := m.tileWidth()
	for i := range m.Rows {
		row, strip := m.Codes[i*m.Stride:], m.StripOf(i)
		for at := 0; at < m.Cols; at += width {
			scale := m.TileScale(strip, at/width)
			for j := at; j < min(at+width, m.Cols); j++ {
				s.add(m.Format, src[i*ld+j], code(m.Format, row, j), scale)
			}
		}
	}
	return s
}

func (s *Stats) add(f Format, v float32, c uint16, scale float32) {
	if !isFinite(v) {
		s.NonFinite++
		return
	}
	s.Amax = max(s.Amax, float32(math.Abs(float64(v))))
	stored := f.Decode(c) * scale
	if !isFinite(f.Decode(f.Encode(v/scale, false))) {
		s.Saturated++
	}
	if stored == 0 && v != 0 {
		s.Flushed++
	}
	if isFinite(stored) {
		s.Signal += float64(v) * float64(v)
		s.Noise += (float64(v) - float64(stored)) * (float64(v) - float64(stored))
	}
}

// Add takes in the statistics of another part.
func (s *Stats) Add(o Stats) {
	s.Values += o.Values
	s.NonFinite += o.NonFinite
	s.Saturated += o.Saturated
	s.Flushed += o.Flushed
	s.Amax = max(s.Amax, o.Amax)
	s.Signal += o.Signal
	s.Noise += o.Noise
}

// SNR is the ratio of signal to noise in decibels: infinite without noise, NaN without a signal.
func (s Stats) SNR() float64 { return 10 * math.Log10(s.Signal/s.Noise) }

func isFinite(v float32) bool { return v-v == 0 }

// Position is a place in a matrix, and the tile it lies in.
type Position struct {
	Row, Col    int
	Strip, Tile int // the tile's row among rows of tiles, and its column
}

func (p Position) String() string {
	return fmt.Sprintf("row %d, column %d, in tile %d, %d", p.Row, p.Col, p.Strip, p.Tile)
}

// Position returns the place of a value.
func (m *Matrix) Position(row, col int) Position {
	return Position{row, col, m.StripOf(row), col / m.tileWidth()}
}

// FirstNonFinite finds the first value, in row-major order, that is NaN or infinite.
func (m *Matrix) FirstNonFinite() (at Position, found bool) {
	m.check("FirstNonFinite")
	var buf [256]float32
	for i := range m.Rows {
		for from := 0; from < m.Cols; from += len(buf) {
			x := buf[:min(len(buf), m.Cols-from)]
			m.dequantize(x, len(x), i, 1, from, len(x))
			for j, v := range x {
				if !isFinite(v) {
					return m.Position(i, from+j), true
				}
			}
		}
	}
	return Position{}, false
}
