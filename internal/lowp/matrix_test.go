package lowp

import (
	"fmt"
	"math"
	"math/rand/v2"
	"slices"
	"testing"
)

const guardByte = 0xA5

// guarded is New with a stride longer than rows and marked bytes between and behind them.
func guarded(q Quant, rows, cols int, groups []int) *Matrix {
	m := New(q, rows, cols, groups)
	m.Stride += 5
	m.Codes = slices.Repeat([]byte{guardByte}, rows*m.Stride+40)
	return m
}

func checkGuards(t *testing.T, m *Matrix) {
	t.Helper()
	row := m.Format.RowBytes(m.Cols)
	for i, b := range m.Codes {
		if (i/m.Stride >= m.Rows || i%m.Stride >= row) && b != guardByte {
			t.Fatalf("byte %d of %d rows of %d bytes was overwritten", i, m.Rows, m.Stride)
		}
	}
}

// tilesOf lists the rows and columns of tiles by the words of the contract: groups follow each other, tiles begin anew in
// each, those at the edges are smaller.
func tilesOf(q Quant, rows, cols int, groups []int) (tiles [][4]int) {
	if groups == nil || q.TileRows == 0 {
		groups = []int{rows}
	}
	high, wide := q.TileRows, q.TileCols
	if high == 0 {
		high = rows
	}
	if wide == 0 {
		wide = cols
	}
	from := 0
	for _, g := range groups {
		for i := 0; i < g; i += high {
			for j := 0; j < cols; j += wide {
				tiles = append(tiles, [4]int{from + i, from + min(i+high, g), j, min(j+wide, cols)})
			}
		}
		from += g
	}
	return tiles
}

// scaleOf is the scale of a tile by definition.
func scaleOf(q Quant, amax float64) float32 {
	most := float64(q.Format.Max())
	bad := amax != amax || math.IsInf(amax, 0)
	switch q.Scale {
	case ScaleF32:
		if bad {
			return 1
		}
		return max(float32(amax), 1e-4) / q.Format.Max()
	case ScalePow2:
		if bad {
			return 1
		}
		return powerAbove(max(amax, float64(float32(1e-4))) / most)
	case ScaleE8M0:
		if amax != amax {
			return float32(math.NaN())
		}
		if bad {
			return 0x1p127
		}
		return max(0x1p-127, powerAbove(amax/most))
	}
	return 1
}

// powerAbove is the smallest power of two that is not below x; 0 for 0.
func powerAbove(x float64) float32 {
	if x == 0 {
		return 0
	}
	fraction, e := math.Frexp(x)
	if fraction == 0.5 {
		e--
	}
	return float32(math.Ldexp(1, e))
}

func same(a, b float32) bool {
	return math.Float32bits(a) == math.Float32bits(b) || a != a && b != b
}

// checkQuantized compares a matrix with the definition, value by value.
func checkQuantized(t *testing.T, m *Matrix, x []float32, ld int) {
	t.Helper()
	tiles := tilesOf(m.Quant, m.Rows, m.Cols, m.Groups)
	if n := m.ScaleCount(m.Rows, m.Cols, m.Groups); m.Scale != ScaleNone && n != len(tiles) {
		t.Fatalf("%d scales, want %d", n, len(tiles))
	}
	across := max(1, m.TilesAcross())
	for n, tile := range tiles {
		amax := 0.0
		for i := tile[0]; i < tile[1]; i++ {
			for j := tile[2]; j < tile[3]; j++ {
				amax = max(amax, math.Abs(float64(x[i*ld+j]))) // NaN wins
			}
		}
		want := scaleOf(m.Quant, amax)
		if got := m.TileScale(n/across, n%across); !same(got, want) {
			t.Fatalf("tile %d, amax %v, has scale %v, want %v", n, amax, got, want)
		}
		for i := tile[0]; i < tile[1]; i++ {
			if s := m.StripOf(i); s != n/across {
				t.Fatalf("row %d is in strip %d, want %d", i, s, n/across)
			}
			for j := tile[2]; j < tile[3]; j++ {
				v := x[i*ld+j]
				y := v / want
				infinite := math.IsInf(float64(y), 0)
				c := m.Format.Encode(y, m.Format != BF16 && !infinite)
				if got := code(m.Format, m.Row(i), j); got != c {
					t.Fatalf("value %d, %d is %v/%v and has code %#x, want %#x", i, j, v, want, got, c)
				}
				if want := m.Format.Decode(c) * want; !same(m.At(i, j), want) {
					t.Fatalf("value %d, %d is %v, want %v", i, j, m.At(i, j), want)
				}
				if (v != v || math.IsInf(float64(v), 0)) && m.At(i, j)-m.At(i, j) == 0 {
					t.Fatalf("value %d, %d was %v and is now %v", i, j, v, m.At(i, j))
				}
			}
		}
	}
	if m.Format == E5M6 && m.Cols%2 == 1 {
		for i := range m.Rows {
			if last := m.Row(i)[m.Format.RowBytes(m.Cols)-1]; last > 0xF {
				t.Fatalf("row %d ends with %#x", i, last)
			}
		}
	}
	checkGuards(t, m)
}

// checkDequantized compares all ways back with At.
func checkDequantized(t *testing.T, m *Matrix, r *rand.Rand) {
	t.Helper()
	const mark = 0x7FC0BEEF
	ld := m.Cols + 3
	y := make([]float32, m.Rows*ld)
	check := func(row, rows, col, cols int) {
		t.Helper()
		for i, v := range y {
			at, j := i/ld, i%ld
			if at < rows && j < cols {
				if want := m.At(row+at, col+j); !same(v, want) {
					t.Fatalf("%dx%d at %d, %d: value %d, %d is %v, want %v", rows, cols, row, col, at, j, v, want)
				}
			} else if math.Float32bits(v) != mark {
				t.Fatalf("%dx%d at %d, %d: value %d, %d was overwritten", rows, cols, row, col, at, j)
			}
		}
	}
	clean := func() {
		for i := range y {
			y[i] = math.Float32frombits(mark)
		}
	}
	clean()
	Dequantize(y, ld, m)
	check(0, m.Rows, 0, m.Cols)
	for range 4 {
		clean()
		row, col := r.IntN(m.Rows), r.IntN(m.Cols)
		rows, cols := r.IntN(m.Rows-row+1), r.IntN(m.Cols-col+1)
		DequantizePart(y, ld, m, row, rows, col, cols)
		check(row, rows, col, cols)
	}
}

// values returns floats of the magnitudes that networks have, a tenth of them far away from the others; the rough ones
// with infinities and NaN in some places.
func values(r *rand.Rand, n int, rough bool) []float32 {
	x := make([]float32, n)
	for i := range x {
		x[i] = float32(r.NormFloat64())
		switch r.IntN(10) {
		case 0:
			x[i] *= float32(math.Exp2(float64(r.IntN(60) - 40)))
		case 1:
			x[i] = 0
		}
		if rough && r.IntN(97) == 0 {
			x[i] = []float32{float32(math.Inf(1)), float32(math.Inf(-1)), float32(math.NaN()), -float32(math.NaN()),
				math.MaxFloat32, -1e-44, 3e38}[r.IntN(7)]
		}
	}
	return x
}

var quants = []Quant{
	perToken, perBlock, perColumn, perTensor, mx, mxCols, attention, bfloat,
	{Format: E4M3, Scale: ScalePow2, TileRows: 1, TileCols: 128},
	{Format: E5M2, Scale: ScaleF32, TileRows: 1, TileCols: 128},
	{Format: E5M2, Scale: ScalePow2, TileRows: 128, TileCols: 1},
	{Format: E5M2, Scale: ScaleE8M0, TileRows: 16, TileCols: 48},
	{Format: E5M6, Scale: ScalePow2, TileRows: 128, TileCols: 1},
	{Format: E5M6, Scale: ScaleF32, TileRows: 3, TileCols: 5},
	{Format: E5M6, Scale: ScaleF32, TileRows: 1, TileCols: 7},
	{Format: E5M6, Scale: ScaleE8M0, TileRows: 1, TileCols: 16},
	{Format: E4M3, Scale: ScaleF32, TileRows: 0, TileCols: 64},
	{Format: E4M3, Scale: ScaleF32, TileRows: 1, TileCols: 0},
	{Format: E5M2, Scale: ScaleE8M0, TileRows: 1, TileCols: 64},
	{Format: BF16, TileRows: 128, TileCols: 1},
	{Format: E4M3, Scale: ScaleNone},
	{Format: E5M2, Scale: ScaleNone, TileRows: 1},
}

var shapes = []struct {
	rows, cols int
	groups     []int
}{
	{1, 1, nil}, {1, 128, nil}, {2, 31, nil}, {3, 33, nil}, {5, 97, nil}, {128, 128, nil}, {129, 130, nil}, {127, 47, nil},
	{4, 300, nil}, {261, 64, []int{0, 1, 3, 0, 128, 129}}, {131, 49, []int{131}}, {3, 129, []int{1, 1, 1}}, {1, 777, nil},
}

func TestQuantize(t *testing.T) {
	eachImpl(t, "all", func(t *testing.T) {
		r := rand.New(rand.NewPCG(1, 2))
		for _, q := range quants {
			for _, s := range shapes {
				for _, rough := range []bool{false, true} {
					t.Run(fmt.Sprintf("%v/%dx%d/%v/%v", q, s.rows, s.cols, s.groups != nil, rough), func(t *testing.T) {
						ld := s.cols + r.IntN(3)
						x := values(r, s.rows*ld, rough)
						m := guarded(q, s.rows, s.cols, s.groups)
						Quantize(m, x, ld)
						checkQuantized(t, m, x, ld)
						checkDequantized(t, m, r)

						// Strips in any order, as threads take them.
						strips := guarded(q, s.rows, s.cols, s.groups)
						for _, i := range r.Perm(m.Strips()) {
							QuantizeStrip(strips, i, x, ld)
						}
						sameMatrix(t, strips, m)
						if q.TileRows == 1 {
							for i := range s.rows {
								clear(strips.Row(i))
								QuantizeRow(strips, i, x[i*ld:i*ld+s.cols])
							}
							sameMatrix(t, strips, m)
						}
					})
				}
			}
		}
	})
}

func sameMatrix(t *testing.T, got, want *Matrix) {
	t.Helper()
	if !slices.Equal(got.Codes, want.Codes) {
		t.Fatal("codes differ")
	}
	if !slices.EqualFunc(got.Scales, want.Scales, same) || !slices.Equal(got.Exponents, want.Exponents) {
		t.Fatal("scales differ")
	}
}

// A row's codes and scales must not depend on where it stands, nor on its neighbours.
func TestRowsAreIndependent(t *testing.T) {
	eachImpl(t, "all", func(t *testing.T) {
		const cols = 200
		x := values(rand.New(rand.NewPCG(4, 4)), 9*cols, false)
		for _, q := range []Quant{perToken, mx, attention} {
			all := New(q, 9, cols, nil)
			Quantize(all, x, cols)
			for i := range 9 {
				alone := New(q, 1, cols, nil)
				Quantize(alone, x[i*cols:], cols)
				n := alone.TilesAcross()
				if !slices.Equal(alone.Row(0), all.Row(i)) || q.Scale == ScaleE8M0 && !slices.Equal(alone.Exponents, all.Exponents[i*n:(i+1)*n]) ||
					q.Scale != ScaleE8M0 && !slices.Equal(alone.Scales, all.Scales[i*n:(i+1)*n]) {
					t.Errorf("%v: row %d differs", q, i)
				}
			}
		}
	})
}

// Requantisation is what dequantising all and quantising again would give.
func TestRequantize(t *testing.T) {
	eachImpl(t, "all", func(t *testing.T) {
		r := rand.New(rand.NewPCG(5, 6))
		for _, s := range shapes {
			x := values(r, s.rows*s.cols, s.rows == 129)
			for _, from := range []Quant{perToken, attention, mx, bfloat} {
				src := New(from, s.rows, s.cols, nil)
				Quantize(src, x, s.cols)
				floats := make([]float32, len(x))
				Dequantize(floats, s.cols, src)
				for _, to := range []Quant{perColumn, mxCols, perTensor, perBlock, attention} {
					got, want := guarded(to, s.rows, s.cols, s.groups), guarded(to, s.rows, s.cols, s.groups)
					Requantize(got, src)
					Quantize(want, floats, s.cols)
					t.Run(fmt.Sprintf("%v to %v/%dx%d", from, to, s.rows, s.cols), func(t *testing.T) {
						sameMatrix(t, got, want)
						checkGuards(t, got)
					})
				}
			}
		}
	})
}

func TestAllocations(t *testing.T) {
	eachImpl(t, "all", func(t *testing.T) {
		const rows, cols = 130, 257
		x := randomFloats(7, rows*cols)
		for _, q := range []Quant{perToken, perBlock, perColumn, perTensor, mx, mxCols, attention, bfloat} {
			m, token := New(q, rows, cols, nil), New(perToken, rows, cols, nil)
			work := func() {
				Quantize(m, x, cols)
				Requantize(m, token)
				Dequantize(x, cols, m)
			}
			work()
			if n := testing.AllocsPerRun(3, work); n != 0 {
				t.Errorf("%v: %v allocations", q, n)
			}
		}
	})
}

func TestPanics(t *testing.T) {
	x := make([]float32, 100)
	for name, f := range map[string]func(){
		"few floats":  func() { Quantize(New(perToken, 10, 11, nil), x, 11) },
		"short ld":    func() { Quantize(New(perToken, 10, 10, nil), x, 9) },
		"few codes":   func() { m := New(perToken, 10, 10, nil); m.Codes = m.Codes[:99]; Quantize(m, x, 10) },
		"few scales":  func() { m := New(perToken, 10, 10, nil); m.Scales = m.Scales[:9]; Quantize(m, x, 10) },
		"groups":      func() { Quantize(New(perColumn, 10, 10, []int{4, 5}), x, 10) },
		"bf16 scaled": func() { Quantize(New(Quant{Format: BF16, Scale: ScaleF32}, 10, 10, nil), x, 10) },
		"row":         func() { QuantizeRow(New(perBlock, 10, 10, nil), 0, x) },
		"part":        func() { DequantizePart(x, 10, New(perToken, 10, 10, nil), 5, 6, 0, 1) },
		"shapes":      func() { Requantize(New(perColumn, 10, 10, nil), New(perToken, 10, 9, nil)) },
	} {
		t.Run(name, func(t *testing.T) {
			defer func() {
				if recover() == nil {
					t.Error("no panic")
				}
			}()
			f()
		})
	}
}

func TestBytes(t *testing.T) {
	for _, c := range []struct {
		q             Quant
		rows, cols    int
		groups        []int
		codes, scales int
	}{
		{perToken, 10, 300, nil, 3000, 30},
		{perBlock, 300, 130, nil, 39000, 6},
		{perColumn, 300, 130, nil, 39000, 390},
		{perColumn, 258, 4, []int{0, 129, 128, 1}, 1032, 16},
		{perTensor, 258, 4, []int{129, 129}, 1032, 1},
		{mx, 2, 33, nil, 66, 4},
		{attention, 3, 5, nil, 24, 3},
		{bfloat, 3, 5, nil, 30, 0},
		{perToken, 0, 5, nil, 0, 0},
	} {
		if got := c.q.CodeBytes(c.rows, c.cols); got != c.codes {
			t.Errorf("%v %dx%d: %d bytes of codes, want %d", c.q, c.rows, c.cols, got, c.codes)
		}
		if got := c.q.ScaleCount(c.rows, c.cols, c.groups); got != c.scales {
			t.Errorf("%v %dx%d: %d scales, want %d", c.q, c.rows, c.cols, got, c.scales)
		}
	}
}
