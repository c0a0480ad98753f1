package lowp

import (
	"math"
	"math/rand/v2"
	"testing"
)

// Published scales for E4M3: largest magnitude, plain scale, power of two, and the exponent byte of that.
func TestScaleTable(t *testing.T) {
	for _, c := range []struct {
		amax, plain, pow2 float32
		code              byte
	}{
		{1, .00223214, 0x1p-8, 119}, {448, 1, 1, 127}, {449, 1.0022, 2, 128}, {0.5, .00111607, 0x1p-9, 118},
		{3.7, .00825893, 0x1p-6, 121}, {1e-9, 2.2321e-7, 0x1p-22, 105}, {0, 2.2321e-7, 0x1p-22, 105},
	} {
		if got := ScaleF32.Scale(E4M3, c.amax); math.Abs(float64(got/c.plain-1)) > 5e-5 {
			t.Errorf("amax %v has scale %v, want %v", c.amax, got, c.plain)
		}
		got := ScalePow2.Scale(E4M3, c.amax)
		if got != c.pow2 {
			t.Errorf("amax %v has power-of-two scale %v, want %v", c.amax, got, c.pow2)
		}
		if code := EncodeE8M0(got); code != c.code || EncodeE8M0(ScaleF32.Scale(E4M3, c.amax)) != c.code || DecodeE8M0(code) != got {
			t.Errorf("amax %v has exponent byte %d, want %d", c.amax, code, c.code)
		}
		// MX has no lower bound, so the two agree from 1e-4 on.
		if c.amax >= 1e-4 && ScaleE8M0.Scale(E4M3, c.amax) != got {
			t.Errorf("amax %v has MX scale %v, want %v", c.amax, ScaleE8M0.Scale(E4M3, c.amax), got)
		}
	}
	inf, nan := float32(math.Inf(1)), float32(math.NaN())
	for _, k := range []ScaleKind{ScaleF32, ScalePow2} {
		if k.Scale(E4M3, inf) != 1 || k.Scale(E4M3, nan) != 1 {
			t.Errorf("%v: scales of lost tiles are %v, %v", k, k.Scale(E4M3, inf), k.Scale(E4M3, nan))
		}
	}
	for _, c := range []struct {
		amax float32
		want byte
	}{{0, 0}, {1e-45, 0}, {448 * 0x1p-127, 0}, {448 * 0x1p-126, 1}, {449 * 0x1p-127, 1}, {1e-9, 89}, {math.MaxFloat32, 247}, {inf, 0xFE}, {nan, 0xFF}} {
		m := New(mx, 1, 1, nil)
		QuantizeRow(m, 0, []float32{c.amax})
		if s := ScaleE8M0.Scale(E4M3, c.amax); m.Exponents[0] != c.want || !same(s, DecodeE8M0(c.want)) {
			t.Errorf("MX: amax %v has exponent byte %d and scale %v, want %d", c.amax, m.Exponents[0], s, c.want)
		}
	}
}

func TestE8M0(t *testing.T) {
	for code := range 255 {
		v := DecodeE8M0(byte(code))
		if float64(v) != math.Ldexp(1, code-127) {
			t.Errorf("code %d is %v", code, v)
		}
		if got := EncodeE8M0(v); got != byte(code) {
			t.Errorf("code %d comes back as %d", code, got)
		}
		if up := EncodeE8M0(math.Nextafter32(v, math.MaxFloat32)); up != byte(min(code+1, 254)) {
			t.Errorf("what follows 2^%d has code %d", code-127, up)
		}
	}
	if v := DecodeE8M0(255); v == v {
		t.Errorf("code 255 is %v", v)
	}
	if c := EncodeE8M0(float32(math.NaN())); c != 255 {
		t.Errorf("NaN has code %d", c)
	}
	if c := EncodeE8M0(0); c != 0 {
		t.Errorf("zero has code %d", c)
	}
}

// Every mantissa: an exponent is raised exactly when amax is above a power of two times the format's largest value.
func TestPowersOfTwoAreExact(t *testing.T) {
	for _, f := range []Format{E4M3, E5M2, E5M6} {
		for mantissa := range uint32(1 << 23) {
			if testing.Short() && mantissa%1009 != 0 && mantissa&(mantissa+1)&0xFFFF != 0 {
				continue
			}
			amax := math.Float32frombits(130<<23 | mantissa)
			s := ScalePow2.Scale(f, amax)
			if amax > s*f.Max() || amax <= s/2*f.Max() {
				t.Fatalf("%v: amax %v has scale %v", f, amax, s)
			}
		}
	}
}

// In a tile of at least 1e-4, plain scales use the largest code, and powers of two one of the upper half.
func TestScalesFillTheRange(t *testing.T) {
	eachImpl(t, "all", func(t *testing.T) {
		r := rand.New(rand.NewPCG(8, 9))
		const rows, cols = 40, 128
		for range 30 {
			x := make([]float32, rows*cols)
			for i := range x {
				x[i] = float32(r.NormFloat64() * math.Exp2(float64(i/cols-12)))
			}
			for _, q := range []Quant{perToken, {Format: E4M3, Scale: ScalePow2, TileRows: 1, TileCols: 128}} {
				m := New(q, rows, cols, nil)
				Quantize(m, x, cols)
				for i := range rows {
					top := byte(0)
					for _, c := range m.Row(i) {
						top = max(top, c&0x7F)
					}
					if top == 0x7F || q.Scale == ScaleF32 && top != 0x7E || E4M3.Decode(uint16(top)) < 224 {
						t.Fatalf("%v: row %d of amax above 1e-4 has %#x as its largest code", q, i, top)
					}
				}
			}
		}
	})
}

// With scales that are powers of two, 1x128 to 128x1 loses only what a larger scale pushes below the normal range.
func TestPowerOfTwoRequantizeIsLossless(t *testing.T) {
	eachImpl(t, "all", func(t *testing.T) {
		r := rand.New(rand.NewPCG(10, 11))
		const rows, cols = 128, 256
		x := make([]float32, rows*cols)
		for i := range x {
			x[i] = float32(r.NormFloat64() * math.Exp2(float64(i/cols%8)))
		}
		from := New(Quant{Format: E4M3, Scale: ScalePow2, TileRows: 1, TileCols: 128}, rows, cols, nil)
		to := New(Quant{Format: E4M3, Scale: ScalePow2, TileRows: 128, TileCols: 1}, rows, cols, nil)
		Quantize(from, x, cols)
		Requantize(to, from)
		lossy := 0
		for i := range rows {
			for j := range cols {
				before, after := from.At(i, j), to.At(i, j)
				if before == after {
					continue
				}
				lossy++
				if s := to.TileScale(0, j); math.Abs(float64(before)) >= float64(s)*0x1p-6 {
					t.Fatalf("value %d, %d went from %v to %v at a scale of %v", i, j, before, after, s)
				}
			}
		}
		if lossy == 0 || lossy > rows*cols/5 {
			t.Errorf("%d of %d values changed: the test does not see both cases", lossy, rows*cols)
		}
	})
}

// Blocks of zeros, of tiny values, and around one large value (an all-zero tile must not get a scale of 0).
func TestSparseBlocks(t *testing.T) {
	eachImpl(t, "all", func(t *testing.T) {
		const n = 256
		for _, q := range []Quant{perBlock, perToken, perColumn, perTensor, mx, mxCols, attention} {
			x := make([]float32, n*n)
			x[0] = 1
			x[n*n-1] = 1e-30
			m, y := New(q, n, n, nil), make([]float32, n*n)
			Quantize(m, x, n)
			Dequantize(y, n, m)
			for i, v := range y {
				want := 0.0
				if i == 0 {
					want = 1
				}
				if d := math.Abs(float64(v) - want); !(d <= want/16+1e-30) {
					t.Fatalf("%v: value %d is %v, want %v", q, i, v, want)
				}
			}
			if last := y[n*n-1]; (q.Scale == ScaleE8M0) != (last != 0) {
				t.Errorf("%v: a lone 1e-30 is %v; only MX, without the bound of 1e-4, should keep it", q, last)
			}
		}
	})
}
