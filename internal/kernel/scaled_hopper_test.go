package kernel

import (
	"fmt"
	"math"
	"math/rand/v2"
	"testing"

	"moetor/internal/lowp"
)

// hopperValues are kinds of operands: one whose products are what the emulation is for, and those at the ends of FP32.
var hopperValues = []struct {
	name  string
	value func(r *rand.Rand) float32
}{
	{"codes", func(r *rand.Rand) float32 { return lowp.E4M3.Decode(uint16(r.IntN(0x7F) | r.IntN(2)<<7)) }},
	{"normal", func(r *rand.Rand) float32 { return float32(r.NormFloat64()) }},
	{"sparse", func(r *rand.Rand) float32 {
		return float32(btoi(r.IntN(20) == 0)) * float32(r.NormFloat64()) * float32(1-2*r.IntN(2)) // zeros of either sign
	}},
	{"spread", func(r *rand.Rand) float32 { return hopperPower(r, -63, 63) }},
	{"overflow", func(r *rand.Rand) float32 { return hopperPower(r, 58, 64) }},
	{"tiny", func(r *rand.Rand) float32 { return hopperPower(r, -70, -54) }},     // largest products around the refused
	{"denormal", func(r *rand.Rand) float32 { return hopperPower(r, -77, -70) }}, // products
	{"denormals", func(r *rand.Rand) float32 { return hopperPower(r, -149, -120) }},
	{"bits", func(r *rand.Rand) float32 { return math.Float32frombits(r.Uint32()) }},
	{"special", func(r *rand.Rand) float32 {
		if r.IntN(100) > 0 {
			return float32(r.NormFloat64())
		}
		return []float32{float32(math.NaN()), float32(math.Inf(1)), float32(math.Inf(-1)), 0, math.MaxFloat32}[r.IntN(5)]
	}},
	{"infinite", func(r *rand.Rand) float32 {
		return []float32{float32(math.Inf(1)), float32(math.Copysign(0, -1)), 0}[r.IntN(3)]
	}},
}

// hopperPower is a value of either sign with an exponent from low up to high.
func hopperPower(r *rand.Rand, low, high int) float32 {
	return float32(math.Ldexp((1+r.Float64())*float64(1-2*r.IntN(2)), low+r.IntN(high-low)))
}

// sameNumbers is sameBits where every NaN is the same.
func sameNumbers(t *testing.T, name string, got, want []float32) {
	t.Helper()
	for i, v := range got {
		if math.Float32bits(v) != math.Float32bits(want[i]) && (v == v || want[i] == want[i]) {
			t.Fatalf("%s: value %d is %v (%08x), want %v (%08x)", name, i, v, math.Float32bits(v), want[i], math.Float32bits(want[i]))
		}
	}
}

// The routines have the bits of hopperAdd and of the loop that promotes.
func TestHopperRoutines(t *testing.T) {
	eachImpl(t, func(t *testing.T) {
		routines := active.Load().micro.hopper
		r := rand.New(rand.NewPCG(5, 6))
		nan := float32(math.NaN())
		for turn := range 300 * len(hopperValues) {
			kind := hopperValues[turn%len(hopperValues)]
			rows, cols, k := 1+r.IntN(hopperRows), 1+r.IntN(scaledWidth), 1+r.IntN(hopperGroup)
			if r.IntN(2) == 0 {
				rows = hopperRows
			}
			if r.IntN(4) == 0 {
				cols, k = scaledWidth, hopperGroup
			}
			name := fmt.Sprintf("%s, %dx%dx%d", kind.name, rows, cols, k)
			fill := func() float32 { return kind.value(r) }
			a := newGuarded(rows, k, scaledDepth, fill) // a NaN from k on
			b := newGuarded(k, scaledWidth, scaledWidth, fill)
			sums := newGuarded(rows, scaledWidth, scaledWidth, func() float32 {
				if r.IntN(3) == 0 {
					return 0
				}
				return kind.value(r) * kind.value(r)
			})
			want := sums.clone()
			routines.add(rows, cols, k, &a.data()[0], &b.data()[0], &sums.data()[0])
			for i := range rows {
				for j := range cols {
					at := i*scaledWidth + j
					want.data()[at] = hopperAdd(want.data()[at], a.data()[i*scaledDepth:][:k], b.data()[j:])
				}
				sameNumbers(t, name, sums.data()[i*scaledWidth:][:cols], want.data()[i*scaledWidth:][:cols])
			}
			sums.check(t, name)

			c := newGuarded(rows, cols, scaledWidth+5, fill)
			rowScale, colScale := make([]float32, rows), make([]float32, scaledWidth)
			for i := range rowScale {
				rowScale[i] = kind.value(r)
			}
			for j := range colScale {
				colScale[j] = nan
				if j < cols {
					colScale[j] = kind.value(r)
				}
			}
			sum, after := want.clone(), c.clone()
			routines.promote(rows, cols, &sum.data()[0], &c.data()[0], c.ld, &rowScale[0], &colScale[0])
			for i := range rows {
				for j := range cols {
					after.data()[i*c.ld+j] += float32(float32(want.data()[i*scaledWidth+j]*rowScale[i]) * colScale[j])
				}
				sameNumbers(t, name+" promoted", c.data()[i*c.ld:][:cols], after.data()[i*c.ld:][:cols])
				sameBits(t, name+" cleared", sum.data()[i*scaledWidth:][:cols], make([]float32, cols))
			}
			sum.check(t, name)
			c.check(t, name)
		}
	})
}

// A product is what hopperAdd gives, group by group, from the values of one row and one column, whatever blocks, panels and
// scales it goes through.
func TestHopperProduct(t *testing.T) {
	shapes := [][3]int{{1, 1, 1}, {4, 32, 128}, {7, 45, 300}, {stripWidth + 5, 33, 161}, {3, scaledBlockN + 70, 40}}
	for _, r := range recipes {
		for _, l := range []Layout{NN, NT, TN} {
			for _, s := range shapes {
				m, n, k := s[0], s[1], s[2]
				if (m > stripWidth || n > scaledBlockN) && r.name != "fp8" && r.name != "mxfp8" {
					continue
				}
				qa, qb := r.quants(l)
				ra, ca, rb, cb := shapeOf(l, m, n, k)
				a, _, _ := quantised(1, qa, ra, ca, nil)
				b, _, _ := quantised(2, qb, rb, cb, nil)
				a.Codes[a.Stride*(ra/2)+a.Format.RowBytes(ca/4*2)] = 0xFF // a NaN of E4M3
				for _, promote := range []int{0, 32, 128, 256} {
					want := hopperProduct(l, m, n, k, a, b, promote)
					eachImpl(t, func(t *testing.T) {
						name := fmt.Sprintf("%s, layout %d, %dx%dx%d, promotion every %d", r.name, l, m, n, k, promote)
						c := newGuarded(m, n, n+3, func() float32 { return 2 })
						Hopper{Promote: promote}.ScaledGemm(l, a, b, 1, c.data(), c.ld)
						for i := range m {
							sameNumbers(t, name, c.data()[i*c.ld:][:n], want[i*n:][:n])
						}
						c.check(t, name)
					})
				}
			}
		}
	}
}

// hopperProduct adds a product to twos, element by element.
func hopperProduct(l Layout, m, n, k int, a, b *lowp.Matrix, promote int) []float32 {
	if promote == 0 {
		promote = k
	}
	// lines returns the values of n lines, and the scale of each value.
	lines := func(q *lowp.Matrix, down bool, n int) (values, scales [][]float32) {
		values, scales = make([][]float32, n), make([][]float32, n)
		rows := make([][]float32, q.Rows)
		for i := range rows {
			rows[i] = make([]float32, q.Cols)
			lowp.DecodeRow(q.Format, rows[i], q.Row(i))
		}
		width := q.TileCols
		if width == 0 {
			width = q.Cols
		}
		for i := range n {
			for p := range k {
				row, col := i, p
				if down {
					row, col = p, i
				}
				values[i] = append(values[i], rows[row][col])
				scales[i] = append(scales[i], q.TileScale(q.StripOf(row), col/width))
			}
		}
		return values, scales
	}
	va, sa := lines(a, l == TN, m)
	vb, sb := lines(b, l != NT, n)
	// A scale that holds from promotion to promotion multiplies sums.
	holds := func(scales [][]float32) bool {
		for _, line := range scales {
			for p := 1; p < k; p++ {
				if p%promote != 0 && line[p] != line[p-1] {
					return false
				}
			}
		}
		return true
	}
	fold := !holds(sa) || !holds(sb)
	c := make([]float32, m*n)
	column := make([]float32, hopperGroup*scaledWidth)
	line := make([]float32, hopperGroup)
	for i := range m {
		for j := range n {
			c[i*n+j] = 2
			sum := float32(0)
			for q := 0; q < k; q += hopperGroup {
				end := min(q+hopperGroup, k)
				for p := q; p < end; p++ {
					line[p-q], column[(p-q)*scaledWidth] = va[i][p], vb[j][p]
					if fold {
						line[p-q] *= sa[i][p]
						column[(p-q)*scaledWidth] *= sb[j][p]
					}
				}
				sum = hopperAdd(sum, line[:end-q], column)
				if end == k || end%promote == 0 {
					if !fold {
						sum = float32(sum*sa[i][end-1]) * sb[j][end-1]
					}
					c[i*n+j] += sum
					sum = 0
				}
			}
		}
	}
	return c
}

// BenchmarkHopper runs a product of a linear layer on emulated sums, in the recipe of DeepSeek-V3.
func BenchmarkHopper(b *testing.B) {
	const m, n, k = 512, 256, 384
	x, y, z := lowp.New(recipes[0].along, m, k, nil), lowp.New(recipes[0].weight, n, k, nil), make([]float32, m*n)
	lowp.Quantize(x, randomMat(1, m*k), k)
	lowp.Quantize(y, randomMat(2, n*k), k)
	for _, name := range Impls() {
		b.Run(name, func(b *testing.B) {
			restore, _ := Use(name)
			defer restore()
			for b.Loop() {
				Hopper{Promote: 128}.ScaledGemm(NT, x, y, 0, z, n)
			}
			b.ReportMetric(2*m*n*k*float64(b.N)/b.Elapsed().Seconds()/1e9, "GFLOP/s")
		})
	}
}
