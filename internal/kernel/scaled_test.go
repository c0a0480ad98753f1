package kernel

import (
	"fmt"
	"math"
	"math/rand/v2"
	"testing"

	"moetor/internal/lowp"
)

// Ways to store the operands of a product, by how the contraction runs: along the rows of the matrix, or down them.
type recipe struct {
	name          string
	along, weight lowp.Quant // activations or gradients; weights, whichever way
	down          lowp.Quant // both operands of a weight gradient
}

func tiled(f lowp.Format, s lowp.ScaleKind, rows, cols int) lowp.Quant {
	return lowp.Quant{Format: f, Scale: s, TileRows: rows, TileCols: cols}
}

var recipes = []recipe{
	{"fp8", tiled(lowp.E4M3, lowp.ScaleF32, 1, 128), tiled(lowp.E4M3, lowp.ScaleF32, 128, 128), tiled(lowp.E4M3, lowp.ScaleF32, 128, 1)},
	{"fp8-pow2", tiled(lowp.E4M3, lowp.ScalePow2, 1, 128), tiled(lowp.E4M3, lowp.ScalePow2, 128, 128), tiled(lowp.E4M3, lowp.ScalePow2, 128, 1)},
	{"e5m6", tiled(lowp.E5M6, lowp.ScalePow2, 1, 128), tiled(lowp.E5M2, lowp.ScaleF32, 128, 128), tiled(lowp.E5M6, lowp.ScalePow2, 128, 1)},
	{"bf16", tiled(lowp.BF16, lowp.ScaleNone, 0, 0), tiled(lowp.BF16, lowp.ScaleNone, 0, 0), tiled(lowp.BF16, lowp.ScaleNone, 0, 0)},
	{"tensor", tiled(lowp.E4M3, lowp.ScaleF32, 0, 0), tiled(lowp.E4M3, lowp.ScaleF32, 0, 0), tiled(lowp.E5M2, lowp.ScaleF32, 0, 0)},
	{"mxfp8", tiled(lowp.E4M3, lowp.ScaleE8M0, 1, 32), tiled(lowp.E4M3, lowp.ScaleE8M0, 1, 32), tiled(lowp.E4M3, lowp.ScaleE8M0, 32, 1)},
}

// quants returns how a and b are stored for a layout. MX tiles lie along the contraction, so the weight of NN has them
// the other way.
func (r recipe) quants(l Layout) (a, b lowp.Quant) {
	switch {
	case l == TN:
		return r.down, r.down
	case l == NN && r.name == "mxfp8":
		return r.along, r.down
	}
	return r.along, r.weight
}

// quantised returns a matrix of values of very different rows and columns, and its values in float64. Bytes between
// rows are NaN codes, which must not be read.
func quantised(seed uint64, q lowp.Quant, rows, cols int, groups []int) (m *lowp.Matrix, x []float32, values []float64) {
	r := rand.New(rand.NewPCG(seed, 11))
	x = make([]float32, rows*cols)
	for i := range rows {
		size := math.Exp2(float64(r.IntN(9) - 4))
		for j := range cols {
			x[i*cols+j] = float32(size * r.NormFloat64() * math.Exp2(float64(j%5)))
		}
	}
	m, values = store(q, x, rows, cols, groups)
	return m, x, values
}

func store(q lowp.Quant, x []float32, rows, cols int, groups []int) (*lowp.Matrix, []float64) {
	m := lowp.New(q, rows, cols, groups)
	m.Stride += 3
	m.Codes = make([]byte, rows*m.Stride)
	for i := range m.Codes {
		m.Codes[i] = 0xFF
	}
	lowp.Quantize(m, x, cols)
	return m, valuesOf(m)
}

// valuesOf multiplies codes with scales in float64.
func valuesOf(m *lowp.Matrix) []float64 {
	values := make([]float64, 0, m.Rows*m.Cols)
	row := make([]float32, m.Cols)
	width := m.TileCols
	if width == 0 {
		width = max(m.Cols, 1)
	}
	for i := range m.Rows {
		lowp.DecodeRow(m.Format, row, m.Row(i))
		strip := m.StripOf(i)
		for j, v := range row {
			values = append(values, float64(v)*float64(m.TileScale(strip, j/width)))
		}
	}
	return values
}

// product64 is the product in float64, and that of the magnitudes.
func product64(l Layout, m, n, k int, a, b []float64) (c, magnitude []float64) {
	c, magnitude = make([]float64, m*n), make([]float64, m*n)
	for i := range m {
		for j := range n {
			var sum, all float64
			for p := range k {
				x, y := a[i*k+p*btoi(l != TN)], b[j+p*n*btoi(l != NT)]
				switch l {
				case TN:
					x = a[p*m+i]
				case NT:
					y = b[j*k+p]
				}
				sum += x * y
				all += math.Abs(x * y)
			}
			c[i*n+j], magnitude[i*n+j] = sum, all
		}
	}
	return c, magnitude
}

func btoi(b bool) int {
	if b {
		return 1
	}
	return 0
}

// shapeOf returns the rows and columns of the operands of a product.
func shapeOf(l Layout, m, n, k int) (ra, ca, rb, cb int) {
	ra, ca, rb, cb = m, k, k, n
	switch l {
	case TN:
		ra, ca = k, m
	case NT:
		rb, cb = n, k
	}
	return ra, ca, rb, cb
}

// scaledBound is the largest error of an element, in units of the sum of magnitudes: the products of the codes' values are
// exact in FP32, except of two BF16 or E5M6 (one rounding more); a part sums at most 128 of them; two scales round twice;
// the parts add up in C.
func scaledBound(k int) float64 {
	cuts := (k + scaledDepth - 1) / scaledDepth
	return float64(min(k, scaledDepth)+3+cuts) * 0x1p-24 * 1.001
}

// checkSum compares with float64.
func checkSum(t *testing.T, what string, got []float32, ldc, m, n int, want, magnitude, old []float64, k int) {
	t.Helper()
	for i := range m {
		for j := range n {
			w, all := want[i*n+j], magnitude[i*n+j]
			if old != nil {
				w += old[i*n+j]
				all += math.Abs(old[i*n+j])
			}
			limit := scaledBound(k)*all + 0x1p-148
			if diff := math.Abs(float64(got[i*ldc+j]) - w); !(diff <= limit) {
				t.Fatalf("%s: C[%d,%d] = %v, want %v within %v", what, i, j, got[i*ldc+j], w, limit)
			}
		}
	}
}

type scaledCase struct {
	recipe
	layout  Layout
	m, n, k int
	padC    int
}

// verify checks a product and, for NT and NN, that of the packed weight, alone and added to C.
func (s scaledCase) verify(t *testing.T) {
	t.Helper()
	qa, qb := s.quants(s.layout)
	ra, ca, rb, cb := shapeOf(s.layout, s.m, s.n, s.k)
	seed := uint64(s.m*31 + s.n*7 + s.k)
	a, _, va := quantised(seed, qa, ra, ca, nil)
	b, _, vb := quantised(seed+1, qb, rb, cb, nil)
	want, magnitude := product64(s.layout, s.m, s.n, s.k, va, vb)
	r := rand.New(rand.NewPCG(seed, 3))
	what := fmt.Sprintf("%s, layout %d, %dx%dx%d", s.name, s.layout, s.m, s.n, s.k)

	c := newGuarded(s.m, s.n, s.n+s.padC, func() float32 { return float32(math.NaN()) }) // must not be read
	ScaledGemm(s.layout, a, b, 0, c.data(), c.ld)
	c.check(t, what)
	checkSum(t, what, c.data(), c.ld, s.m, s.n, want, magnitude, nil, s.k)

	c1 := newGuarded(s.m, s.n, s.n+s.padC, func() float32 { return float32(r.NormFloat64()) })
	old := make([]float64, s.m*s.n)
	for i := range old {
		old[i] = float64(c1.data()[i/s.n*c1.ld+i%s.n])
	}
	before := c1.clone()
	ScaledGemm(s.layout, a, b, 1, c1.data(), c1.ld)
	c1.check(t, what)
	checkSum(t, what+", accumulated", c1.data(), c1.ld, s.m, s.n, want, magnitude, old, s.k)
	if s.layout == TN {
		return
	}
	var w PackedWeight
	w.Pack(s.layout, b)
	p := newGuarded(s.m, s.n, s.n+s.padC, func() float32 { return float32(math.NaN()) })
	ScaledGemmPacked(a, &w, 0, p.data(), p.ld)
	sameBits(t, what+", packed", p.buf, c.buf)
	ScaledGemmPacked(a, &w, 1, before.data(), before.ld)
	sameBits(t, what+", packed, accumulated", before.buf, c1.buf)
}

// All layouts, recipes and edges against float64 on the dequantised operands.
func TestScaledGemm(t *testing.T) {
	eachImpl(t, func(t *testing.T) {
		mk := active.Load().micro
		var shapes [][3]int
		for m := 1; m <= mk.rows+1; m++ {
			shapes = append(shapes, [3]int{m, 33, 5 + m})
		}
		for n := 1; n <= 2*scaledWidth+1; n += 1 + n/18 {
			shapes = append(shapes, [3]int{5, n, 7})
		}
		for _, k := range []int{1, 2, 3, 4, 15, 16, 17, 31, 127, 128, 129, 160, 255, 256, 300} {
			shapes = append(shapes, [3]int{mk.rows + 3, 40, k})
		}
		for i, s := range shapes {
			for j, r := range recipes {
				if i%len(recipes) != j && (s[2] < 120 || testing.Short()) {
					continue
				}
				for _, l := range []Layout{NN, NT, TN} {
					scaledCase{r, l, s[0], s[1], s[2], i % 4}.verify(t)
				}
			}
		}
	})
}

// Products of more than one block in each direction.
func TestScaledGemmBlocks(t *testing.T) {
	eachImpl(t, func(t *testing.T) {
		for i, s := range [][3]int{{fewRows + 31, 70, 140}, {2*fewRows + 1, scaledBlockN + 45, 20}, {13, scaledBlockN + 33, 130}} {
			for _, l := range []Layout{NN, NT, TN} {
				scaledCase{recipes[0], l, s[0], s[1], s[2], 1}.verify(t)
				scaledCase{recipes[len(recipes)-1-i], l, s[0], s[1], s[2], 0}.verify(t)
			}
		}
	})
}

// The tile routines against their specification, on numbers that need no rounding: integers and powers of two.
func TestScaledTiles(t *testing.T) {
	eachImpl(t, func(t *testing.T) {
		mk := active.Load().micro
		r := rand.New(rand.NewPCG(5, 1))
		small := func() float32 { return float32(r.IntN(17) - 8) }
		for rows := 1; rows <= mk.rows; rows++ {
			for _, cols := range []int{mk.cols, mk.narrow} {
				if cols == 0 {
					continue
				}
				for _, k := range []int{1, 2, 3, 4, 5, 7, 8, 127, 128} {
					for _, accumulate := range []bool{false, true} {
						a := newGuarded(rows, k, scaledDepth, small)
						b := newGuarded(k, cols, scaledWidth, small)
						old := small
						if !accumulate {
							old = func() float32 { return float32(math.NaN()) }
						}
						c := newGuarded(rows, cols, cols+5, old)
						rowScale := newGuarded(1, rows, rows, func() float32 { return float32(math.Exp2(float64(r.IntN(7) - 3))) })
						colScale := newGuarded(1, cols, cols, func() float32 { return float32(math.Exp2(float64(r.IntN(7) - 3))) })
						want := c.clone()
						for i := range rows {
							for j := range cols {
								var sum float32
								for p := range k {
									sum += a.data()[i*scaledDepth+p] * b.data()[p*scaledWidth+j]
								}
								sum *= rowScale.data()[i] * colScale.data()[j]
								if accumulate {
									sum += c.data()[i*c.ld+j]
								}
								want.data()[i*c.ld+j] = sum
							}
						}
						mk.runScaled(rows, cols, k, &a.data()[0], &b.data()[0], &c.data()[0], c.ld, &rowScale.data()[0], &colScale.data()[0], accumulate)
						sameBits(t, fmt.Sprintf("%dx%dx%d, accumulate %v", rows, cols, k, accumulate), c.buf, want.buf)
					}
				}
			}
		}
	})
}

// Power-of-two scales change exponents only: the product has the bits of one whose operands had their scales multiplied in
// before. E4M3 times a power of two is a BF16 number, which takes no scales.
func TestScaledPow2FoldsExactly(t *testing.T) {
	const m, n, k = 37, 75, 300
	eachImpl(t, func(t *testing.T) {
		for _, r := range []recipe{recipes[1], recipes[5]} {
			for _, l := range []Layout{NN, NT, TN} {
				qa, qb := r.quants(l)
				ra, ca, rb, cb := shapeOf(l, m, n, k)
				a, _, va := quantised(1, qa, ra, ca, nil)
				b, _, vb := quantised(2, qb, rb, cb, nil)
				folded := func(values []float64, rows, cols int) *lowp.Matrix {
					x := make([]float32, len(values))
					for i, v := range values {
						x[i] = float32(v)
					}
					f, back := store(tiled(lowp.BF16, lowp.ScaleNone, 0, 0), x, rows, cols, nil)
					for i, v := range back {
						if v != values[i] {
							t.Fatalf("value %d is %v, and %v in BF16", i, values[i], v)
						}
					}
					return f
				}
				got, want := randomMat(3, m*n), randomMat(3, m*n)
				ScaledGemm(l, a, b, 1, got, n)
				ScaledGemm(l, folded(va, ra, ca), folded(vb, rb, cb), 1, want, n)
				sameBits(t, fmt.Sprintf("%s, layout %d", r.name, l), got, want)
			}
		}
	})
}

// Up to 128 values of k are one sum: with power-of-two scales the bits are those of Gemm on dequantised operands.
func TestScaledGemmIsGemm(t *testing.T) {
	const m, n, k = 30, 70, 128
	eachImpl(t, func(t *testing.T) {
		for _, l := range []Layout{NN, NT, TN} {
			qa, qb := recipes[1].quants(l)
			ra, ca, rb, cb := shapeOf(l, m, n, k)
			a, _, _ := quantised(1, qa, ra, ca, nil)
			b, _, _ := quantised(2, qb, rb, cb, nil)
			x, y := make([]float32, m*k), make([]float32, n*k)
			lowp.Dequantize(x, ca, a)
			lowp.Dequantize(y, cb, b)
			got, want := make([]float32, m*n), make([]float32, m*n)
			ScaledGemm(l, a, b, 0, got, n)
			Gemm(l, m, n, k, 1, x, ca, y, cb, 0, want, n)
			sameBits(t, fmt.Sprintf("layout %d", l), got, want)
		}
	})
}

// relativeRMS is the root of mean square of the differences, relative to that of want.
func relativeRMS(got, want []float64) float64 {
	var e, s float64
	for i, v := range want {
		e += (got[i] - v) * (got[i] - v)
		s += v * v
	}
	return math.Sqrt(e / s)
}

// Against the unquantised product. A value x with code exponent e rounds to multiples of 2^(e-3) of its scale: errors are
// even over half a step to either side, of variance step^2/12. Averaged over mantissas that are log-uniform this is a
// relative error of sqrt(3/(8 ln 2)/768) = 2.65 %; for the values at hand it is summed from their steps (without the
// largest of a tile, which an FP32 scale makes exact). Errors of two operands are independent of each other and of the
// values, so a product of independent random operands has a relative RMS error of sqrt(da^2 + db^2 + da^2 db^2), about
// 3.75 %, whatever its depth.
func TestScaledGemmQuantisationError(t *testing.T) {
	const m, n, k = 96, 128, 640
	theory := func(m *lowp.Matrix, x []float32) float64 {
		var e, s float64
		width := m.TileCols
		for i, v := range x {
			row, col := i/m.Cols, i%m.Cols
			scale := float64(m.TileScale(m.StripOf(row), col/width))
			exponent := max(math.Ilogb(float64(v)/scale), -6)
			step := math.Ldexp(scale, exponent-3)
			if m.Scale != lowp.ScaleF32 || math.Abs(float64(v)/scale) < 447.9 {
				e += step * step / 12
			}
			s += float64(v) * float64(v)
		}
		return math.Sqrt(e / s)
	}
	wide := func(x []float32) []float64 {
		y := make([]float64, len(x))
		for i, v := range x {
			y[i] = float64(v)
		}
		return y
	}
	for _, r := range recipes[:2] {
		for _, l := range []Layout{NN, NT, TN} {
			qa, qb := r.quants(l)
			ra, ca, rb, cb := shapeOf(l, m, n, k)
			xa, xb := randomMat(1, m*k), randomMat(2, n*k)
			a, va := store(qa, xa, ra, ca, nil)
			b, vb := store(qb, xb, rb, cb, nil)
			da, db := theory(a, xa), theory(b, xb)
			for i, d := range [][2]float64{{da, relativeRMS(va, wide(xa))}, {db, relativeRMS(vb, wide(xb))}} {
				if d[0] < 0.023 || d[0] > 0.030 || math.Abs(d[1]/d[0]-1) > 0.01 {
					t.Errorf("%s, layout %d, operand %d: relative RMS error %.5f, theory %.5f, log-uniform 0.0265", r.name, l, i, d[1], d[0])
				}
			}
			c := make([]float32, m*n)
			ScaledGemm(l, a, b, 0, c, n)
			want, _ := product64(l, m, n, k, wide(xa), wide(xb))
			got, expected := relativeRMS(wide(c), want), math.Sqrt(da*da+db*db+da*da*db*db)
			if math.Abs(got/expected-1) > 0.02 {
				t.Errorf("%s, layout %d: relative RMS error %.5f, theory %.5f", r.name, l, got, expected)
			}
			// DeepGEMM's measure of a kernel.
			var xy, xx float64
			for i, v := range want {
				xy += v * float64(c[i])
				xx += v*v + float64(c[i])*float64(c[i])
			}
			if d := 1 - 2*xy/xx; !(d < 0.001) {
				t.Errorf("%s, layout %d: 1 - 2<x,y>/(<x,x>+<y,y>) = %v", r.name, l, d)
			}
		}
	}
}
