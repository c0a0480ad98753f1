package lowp

import (
	"math"
	"math/rand/v2"
	"testing"
)

func TestMeasure(t *testing.T) {
	inf, nan := float32(math.Inf(1)), float32(math.NaN())
	q := Quant{Format: E4M3} // no scales: the codes are those of the values
	x := []float32{500, -464, 0x1p-11, 0, nan, -inf, 1.0625, 448, -600}
	m := New(q, 1, len(x), nil)
	Quantize(m, x, len(x))
	got := Measure(m, x, len(x))
	signal := 500*500 + 464*464 + 0x1p-22 + 1.0625*1.0625 + 448*448 + 600*600
	noise := 52*52 + 16*16 + 0x1p-22 + 0.0625*0.0625 + 152*152
	want := Stats{Values: 9, NonFinite: 2, Saturated: 2, Flushed: 1, Amax: 600, Signal: signal, Noise: noise}
	if got != want {
		t.Errorf("got %+v, want %+v", got, want)
	}
	if snr := got.SNR(); math.Abs(snr-10*math.Log10(signal/noise)) > 1e-12 {
		t.Errorf("SNR %v", snr)
	}
	var sum Stats
	sum.Add(got)
	sum.Add(Stats{Values: 1, Amax: 3, Signal: 9, Noise: 1})
	if sum.Values != 10 || sum.Amax != 600 || sum.Signal != signal+9 || sum.Noise != noise+1 || sum.Saturated != 2 {
		t.Errorf("sum %+v", sum)
	}
}

// Values spread evenly over whole octaves, away from subnormals, with errors spread evenly over a unit of the last place:
// the SNR follows from two integrals. Scales are powers of two, because others would make the largest value exact.
func TestSNRFollowsTheory(t *testing.T) {
	r := rand.New(rand.NewPCG(12, 13))
	const rows, cols = 64, 512
	x := make([]float32, rows*cols)
	for i := range x {
		x[i] = float32(math.Exp2(-8 * r.Float64()))
	}
	// A value in [1, 2) with m bits behind the point has an error of variance (2^-m)^2/12; the mean of x^2 for x = 2^u, u
	// even in [0, 1), is 3/(2 ln 2).
	theory := func(mantissa int) float64 {
		return 10 * math.Log10(1.5/math.Ln2*12*math.Exp2(float64(2*mantissa)))
	}
	for f, mantissa := range map[Format]int{E4M3: 3, E5M2: 2, E5M6: 6} {
		m := New(Quant{Format: f, Scale: ScalePow2, TileRows: 1, TileCols: 128}, rows, cols, nil)
		Quantize(m, x, cols)
		s := Measure(m, x, cols)
		if snr := s.SNR(); math.Abs(snr-theory(mantissa)) > 0.2 {
			t.Errorf("%v: SNR %.2f dB, in theory %.2f", f, snr, theory(mantissa))
		}
		if s.Saturated != 0 || s.Flushed != 0 || s.NonFinite != 0 {
			t.Errorf("%v: %+v", f, s)
		}
	}
}

func TestFirstNonFinite(t *testing.T) {
	eachImpl(t, "all", func(t *testing.T) {
		const rows, cols = 300, 400
		groups := []int{100, 0, 200}
		for _, q := range []Quant{perToken, perColumn, perBlock, mx, attention, bfloat} {
			for _, bad := range []float32{float32(math.NaN()), float32(math.Inf(-1))} {
				x := randomFloats(14, rows*cols)
				m := New(q, rows, cols, groups)
				Quantize(m, x, cols)
				if at, found := m.FirstNonFinite(); found {
					t.Fatalf("%v: found %v among finite values", q, at)
				}
				x[233*cols+257] = bad
				Quantize(m, x, cols)
				at, found := m.FirstNonFinite()
				want := m.Position(233, 257)
				if q.Scale == ScaleE8M0 && bad != bad {
					want.Col = want.Tile * q.TileCols // the scale is NaN, and all the tile with it
				}
				if !found || at != want {
					t.Errorf("%v: %v is found %v at %v, want %v", q, bad, found, at, want)
				}
			}
		}
		// The third tile of rows: 100 rows make one, then rows 100 to 227 and 228 to 299.
		m := Matrix{Quant: perColumn, Rows: rows, Cols: cols, Groups: groups}
		if got := m.Position(233, 257).String(); got != "row 233, column 257, in tile 2, 257" {
			t.Error(got)
		}
	})
}
