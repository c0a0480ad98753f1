package kernel

import (
	"fmt"
	"math"
	"math/rand/v2"
	"testing"

	"moetor/internal/lowp"
)

// rowsOf is a matrix of some rows of m, which begin and end with tiles; the codes of all others are NaN.
func rowsOf(m *lowp.Matrix, from, to int) *lowp.Matrix {
	part := *m
	part.Rows, part.Groups = to-from, nil
	part.Codes = append([]byte(nil), m.Codes...)
	for i := range part.Codes {
		if row := i / m.Stride; row < from || row >= to {
			part.Codes[i] = 0xFF
		}
	}
	part.Codes = part.Codes[from*m.Stride:]
	if m.TileRows > 0 && m.Scale != lowp.ScaleNone {
		at := m.StripOf(from) * m.TilesAcross()
		if m.Scale == lowp.ScaleE8M0 {
			part.Exponents = m.Exponents[at:]
		} else {
			part.Scales = m.Scales[at:]
		}
	}
	return &part
}

// An element depends on its row, its column and k: rows anywhere, with any number of others, give the bits they have in
// one large product, on any number of threads.
func TestScaledElementsIndependent(t *testing.T) {
	const m, n, k = 283, 101, 280
	eachImpl(t, func(t *testing.T) {
		for _, r := range []recipe{recipes[0], recipes[2], recipes[5]} {
			for _, l := range []Layout{NT, NN, TN} {
				qa, qb := r.quants(l)
				ra, ca, rb, cb := shapeOf(l, m, n, k)
				a, _, _ := quantised(1, qa, ra, ca, nil)
				b, _, _ := quantised(2, qb, rb, cb, nil)
				old := randomMat(3, m*n)
				want := append([]float32(nil), old...)
				ScaledGemm(l, a, b, 1, want, n)
				for _, threads := range []int{2, 3, 5} {
					withThreads(t, threads)
					got := append([]float32(nil), old...)
					ScaledGemm(l, a, b, 1, got, n)
					sameBits(t, fmt.Sprintf("%s, layout %d, %d threads", r.name, l, threads), got, want)
					SetThreads(1)
				}
				if l == TN {
					continue
				}
				var w PackedWeight
				w.Pack(l, b)
				for _, rows := range [][2]int{{0, 1}, {0, 2}, {7, 8}, {7, 20}, {20, 34}, {240, 283}, {282, 283}, {1, 270}} {
					got := append([]float32(nil), old[rows[0]*n:rows[1]*n]...)
					ScaledGemmPacked(rowsOf(a, rows[0], rows[1]), &w, 1, got, n)
					sameBits(t, fmt.Sprintf("%s, layout %d, rows %v", r.name, l, rows), got, want[rows[0]*n:rows[1]*n])
				}
			}
			// Columns: rows of a weight of NT, in whole tiles.
			a, _, _ := quantised(1, r.along, 20, k, nil)
			b, _, _ := quantised(2, r.weight, 300, k, nil)
			want := make([]float32, 20*300)
			ScaledGemm(NT, a, b, 0, want, 300)
			for _, cols := range [][2]int{{0, 128}, {128, 300}, {256, 300}} {
				width := cols[1] - cols[0]
				got := make([]float32, 20*width)
				ScaledGemm(NT, a, rowsOf(b, cols[0], cols[1]), 0, got, width)
				for i := range 20 {
					sameBits(t, fmt.Sprintf("%s, columns %v, row %d", r.name, cols, i), got[i*width:(i+1)*width],
						want[i*300+cols[0]:i*300+cols[1]])
				}
			}
		}
	})
}

// The vector implementations fuse alike and agree to the bit.
func TestScaledVectorImplsAgree(t *testing.T) {
	const m, n, k = 45, 70, 300
	a, _, _ := quantised(1, recipes[0].along, m, k, nil)
	b, _, _ := quantised(2, recipes[0].weight, n, k, nil)
	var want []float32
	for _, name := range Impls() {
		if name == "portable" {
			continue
		}
		restore, _ := Use(name)
		c := make([]float32, m*n)
		ScaledGemm(NT, a, b, 0, c, n)
		restore()
		if want == nil {
			want = c
		}
		sameBits(t, name, c, want)
	}
}

// A NaN in an operand, which is quantised as the NaN that it is, reaches its row or column of C and nothing else.
func TestScaledNaNFlows(t *testing.T) {
	const m, n, k, row, col = 45, 70, 300, 17, 41
	nan := float32(math.NaN())
	eachImpl(t, func(t *testing.T) {
		for _, r := range recipes {
			if r.name == "tensor" {
				continue // one scale for all: a NaN may spoil the whole matrix
			}
			for _, l := range []Layout{NN, NT, TN} {
				for _, side := range []string{"A", "B"} {
					qa, qb := r.quants(l)
					ra, ca, rb, cb := shapeOf(l, m, n, k)
					x, y := randomMat(1, m*k), randomMat(2, n*k)
					if side == "A" {
						x[map[bool]int{true: 200*m + row, false: row*k + 200}[l == TN]] = nan
					} else {
						y[map[bool]int{true: col*k + 200, false: 200*n + col}[l == NT]] = nan
					}
					a, _ := store(qa, x, ra, ca, nil)
					b, _ := store(qb, y, rb, cb, nil)
					check := func(what string, c []float32) {
						t.Helper()
						for i := range m {
							for j := range n {
								want := side == "A" && i == row || side == "B" && j == col
								if isNaN := c[i*n+j] != c[i*n+j]; isNaN != want {
									t.Fatalf("%s, %s, layout %d, NaN in %s: C[%d,%d] = %v", r.name, what, l, side, i, j, c[i*n+j])
								}
							}
						}
					}
					c := make([]float32, m*n)
					ScaledGemm(l, a, b, 0, c, n)
					check("product", c)
					if l != TN {
						var w PackedWeight
						w.Pack(l, b)
						ScaledGemmPacked(a, &w, 0, c, n)
						check("packed", c)
					}
					Hopper{Promote: 128}.ScaledGemm(l, a, b, 0, c, n)
					check("hopper", c)
				}
			}
		}
	})
}

// Infinities of formats that have them give infinities, and NaN against a zero.
func TestScaledInfFlows(t *testing.T) {
	const m, n, k = 20, 33, 140
	x, y := randomMat(1, m*k), randomMat(2, n*k)
	x[3*k+130] = float32(math.Inf(1))
	y[7*k+130] = 0
	eachImpl(t, func(t *testing.T) {
		for _, q := range []lowp.Quant{recipes[2].along, recipes[3].along} {
			a, _ := store(q, x, m, k, nil)
			b, _ := store(recipes[3].along, y, n, k, nil)
			c := make([]float32, m*n)
			ScaledGemm(NT, a, b, 0, c, n)
			for i := range c {
				v, row, col := float64(c[i]), i/n, i%n
				if math.IsNaN(v) != (row == 3 && col == 7) || math.IsInf(v, 0) != (row == 3 && col != 7) {
					t.Fatalf("%v: C[%d,%d] = %v", q, row, col, v)
				}
			}
		}
	})
}

func TestScaledEmpty(t *testing.T) {
	eachImpl(t, func(t *testing.T) {
		empty := func(rows, cols int) *lowp.Matrix { return lowp.New(recipes[0].along, rows, cols, nil) }
		c := []float32{1, 2, 3, 4}
		ScaledGemm(NT, empty(0, 3), empty(2, 3), 0, nil, 2)
		ScaledGemm(NT, empty(2, 3), empty(0, 3), 0, nil, 0)
		ScaledGemm(NN, empty(2, 0), empty(0, 2), 1, c, 2)
		sameBits(t, "k=0, beta 1", c, []float32{1, 2, 3, 4})
		ScaledGemm(NN, empty(2, 0), empty(0, 2), 0, c, 2)
		sameBits(t, "k=0, beta 0", c, []float32{0, 0, 0, 0})
		ScaledGroupedGemm(nil, empty(0, 3), nil, 0, nil)
		ScaledGroupedGemm([]int{0, 0}, empty(0, 3), make([]*PackedWeight, 2), 0, nil)
		ScaledGroupedGemmTN([]int{0}, empty(0, 3), empty(0, 2), [][]float32{nil})
	})
}

func TestScaledRefuses(t *testing.T) {
	q := recipes[0]
	a, b, c := lowp.New(q.along, 5, 200, nil), lowp.New(q.weight, 6, 200, nil), make([]float32, 30)
	mustPanic(t, "C", func() { ScaledGemm(NT, a, b, 0, c[:29], 6) })
	mustPanic(t, "ld", func() { ScaledGemm(NT, a, b, 0, c, 5) })
	mustPanic(t, "beta", func() { ScaledGemm(NT, a, b, 0.5, c, 6) })
	mustPanic(t, "layout", func() { ScaledGemm(7, a, b, 0, c, 6) })
	mustPanic(t, "inner size", func() { ScaledGemm(NT, a, lowp.New(q.weight, 6, 199, nil), 0, c, 6) })
	for name, spoil := range map[string]func(m *lowp.Matrix){
		"codes":  func(m *lowp.Matrix) { m.Codes = m.Codes[:len(m.Codes)-1] },
		"scales": func(m *lowp.Matrix) { m.Scales = m.Scales[1:] },
		"stride": func(m *lowp.Matrix) { m.Stride-- },
		"tiles":  func(m *lowp.Matrix) { m.TileCols = 100; m.Scales = make([]float32, 100) },
	} {
		bad := *a
		spoil(&bad)
		mustPanic(t, name, func() { ScaledGemm(NT, &bad, b, 0, c, 6) })
	}
	var w, v PackedWeight
	mustPanic(t, "layout of a packed weight", func() { w.Pack(TN, b) })
	w.Pack(NT, b)
	v.Pack(NN, lowp.New(q.weight, 200, 6, nil))
	mustPanic(t, "columns", func() { ScaledGemmPacked(lowp.New(q.along, 5, 201, nil), &w, 0, c, 6) })
	mustPanic(t, "mixed layouts", func() { ScaledGroupedGemm([]int{2, 3}, a, []*PackedWeight{&w, &v}, 0, c) })
	mustPanic(t, "rows of groups", func() { ScaledGroupedGemm([]int{2, 2}, a, []*PackedWeight{&w, &w}, 0, c) })
	rows := []int{2, 3}
	d := lowp.New(q.down, 5, 3, rows)
	grads := [][]float32{make([]float32, 9), make([]float32, 9)}
	mustPanic(t, "tiles of other groups", func() { ScaledGroupedGemmTN(rows, d, lowp.New(q.down, 5, 3, []int{3, 2}), grads) })
	mustPanic(t, "tiles of no groups", func() { ScaledGroupedGemmTN(rows, d, lowp.New(q.down, 5, 3, nil), grads) })
	mustPanic(t, "gradient", func() { ScaledGroupedGemmTN(rows, d, d, [][]float32{grads[0][:8], grads[1]}) })
	mustPanic(t, "groups down k", func() { ScaledGemm(TN, d, d, 0, c, 3) })
	mustPanic(t, "promotion", func() { Hopper{Promote: 100}.ScaledGemm(NT, a, b, 0, c, 6) })
}

func TestScaledAllocatesNothing(t *testing.T) {
	const n, k = 70, 300
	rows := []int{0, 129, 5, 200}
	const m = 334
	g := recipes[0]
	a, _, _ := quantised(1, g.along, m, k, nil)
	b, _, _ := quantised(2, g.weight, n, k, nil)
	d, _, _ := quantised(3, g.down, m, k, rows)
	e, _, _ := quantised(4, g.down, m, n, rows)
	f, _, _ := quantised(4, g.down, m, n, nil)
	mx, _, _ := quantised(1, recipes[5].along, m, k, nil)
	c := make([]float32, m*n)
	var w, v PackedWeight
	grads := make([][]float32, len(rows))
	for i := range grads {
		grads[i] = make([]float32, n*k)
	}
	weights := []*PackedWeight{&w, &w, &w, &w}
	for _, threads := range []int{1, 2} {
		withThreads(t, threads)
		eachImpl(t, func(t *testing.T) {
			if got := testing.AllocsPerRun(30, func() {
				w.Pack(NT, b)
				v.Pack(NN, b)
				ScaledGemm(NT, a, b, 0, c, n)
				ScaledGemm(NT, mx, b, 0, c, n)
				ScaledGemmPacked(a, &w, 1, c, n)
				ScaledGroupedGemm(rows, a, weights, 0, c)
				ScaledGroupedGemmTN(rows, d, e, grads)
				ScaledGemm(TN, f, f, 0, c, n)
			}); got != 0 {
				t.Errorf("%d threads: %v allocations", threads, got)
			}
		})
	}
}

// FuzzScaledGemm compares every implementation with float64 on shapes and storage of the fuzzer's choice.
func FuzzScaledGemm(f *testing.F) {
	f.Add(uint8(0), uint8(1), uint16(14), uint16(32), uint16(256), uint8(0))
	f.Add(uint8(1), uint8(0), uint16(29), uint16(17), uint16(129), uint8(3))
	f.Add(uint8(2), uint8(2), uint16(1), uint16(48), uint16(5), uint8(1))
	f.Add(uint8(5), uint8(2), uint16(260), uint16(3), uint16(127), uint8(0))
	f.Add(uint8(4), uint8(1), uint16(2), uint16(190), uint16(400), uint8(2))
	f.Fuzz(func(t *testing.T, r, layout uint8, m, n, k uint16, padC uint8) {
		s := scaledCase{recipes[int(r)%len(recipes)], Layout(layout % 3), int(m%300) + 1, int(n%200) + 1, int(k%500) + 1, int(padC)}
		for _, name := range Impls() {
			restore, _ := Use(name)
			s.verify(t)
			restore()
		}
	})
}

// Sums of 14 bits: fewer promotions, larger errors (facts of the emulator: K=4096, E4M3, uniform and normal values).
func TestHopperPromotion(t *testing.T) {
	const m, n, k = 4, 8, 4096
	whole := tiled(lowp.E4M3, lowp.ScalePow2, 0, 0)
	r := rand.New(rand.NewPCG(1, 2))
	for _, c := range []struct {
		name    string
		value   func() float64
		measure func(got []float32, want, magnitude []float64) float64
		about   [3]float64 // with promotion every 128 and 512 values, and at the end
	}{
		{"uniform", r.Float64, func(got []float32, want, _ []float64) (worst float64) {
			for i, v := range want {
				worst = max(worst, math.Abs(float64(got[i])-v)/math.Abs(v))
			}
			return worst
		}, [3]float64{0.00054, 0.0059, 0.072}},
		{"normal", r.NormFloat64, func(got []float32, want, _ []float64) float64 {
			x := make([]float64, len(got))
			for i, v := range got {
				x[i] = float64(v)
			}
			return relativeRMS(x, want)
		}, [3]float64{0.00013, 0.00036, 0.00108}},
	} {
		x, y := make([]float32, m*k), make([]float32, n*k)
		for _, v := range [][]float32{x, y} {
			for i := range v {
				v[i] = float32(c.value())
			}
		}
		a, va := store(whole, x, m, k, nil)
		b, vb := store(whole, y, n, k, nil)
		want, magnitude := product64(NT, m, n, k, va, vb)
		var errors [4]float64
		got := make([]float32, m*n)
		for i, promote := range []int{128, 512, 0} {
			Hopper{Promote: promote}.ScaledGemm(NT, a, b, 0, got, n)
			errors[i] = c.measure(got, want, magnitude)
		}
		ScaledGemm(NT, a, b, 0, got, n)
		errors[3] = c.measure(got, want, magnitude)
		t.Logf("%s: every 128 %.5f %%, 512 %.5f %%, never %.5f %%, FP32 %.6f %%", c.name, 100*errors[0], 100*errors[1], 100*errors[2], 100*errors[3])
		if !(errors[3] < errors[0]/20 && 1.5*errors[0] < errors[1] && 1.5*errors[1] < errors[2]) {
			t.Errorf("%s: errors %v are not in the order FP32, 128, 512, never", c.name, errors)
		}
		for i, e := range c.about {
			if errors[i] < e/2.5 || errors[i] > e*2.5 {
				t.Errorf("%s: error %.5f, an independent emulator had %.5f", c.name, errors[i], e)
			}
		}
	}
}

// hopperAdd is the definition of its sum, word for word.
func TestHopperAdd(t *testing.T) {
	r := rand.New(rand.NewPCG(3, 4))
	for range 2000 {
		n := 1 + r.IntN(hopperGroup)
		a, b := make([]float32, n), make([]float32, n*scaledWidth)
		summands := []float64{math.Ldexp(float64(r.IntN(1<<15)-1<<14), r.IntN(12)-12)}
		sum := float32(summands[0])
		for p := range a {
			a[p] = lowp.E4M3.Decode(uint16(r.IntN(0x7F) | r.IntN(2)<<7))
			b[p*scaledWidth] = lowp.E4M3.Decode(uint16(r.IntN(0x7F) | r.IntN(2)<<7))
			summands = append(summands, float64(a[p])*float64(b[p*scaledWidth]))
		}
		largest := 0.0
		for _, v := range summands {
			largest = max(largest, math.Abs(v))
		}
		want := 0.0
		if largest > 0 {
			unit := math.Ldexp(1, math.Ilogb(largest)-13)
			for _, v := range summands {
				want += math.Trunc(v/unit) * unit
			}
		}
		if got := hopperAdd(sum, a, b); float64(got) != want {
			t.Fatalf("%v + %v * %v = %v, want %v", sum, a, b, got, want)
		}
	}
}
