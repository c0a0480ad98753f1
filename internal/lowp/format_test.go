package lowp

import (
	"math"
	"os"
	"testing"
)

var formats = []Format{E4M3, E5M2, E5M6, BF16}

// definition is a format as its paper gives it, apart from the tables of format.go.
type definition struct {
	exponentBits, mantissaBits, bias int
	hasInf                           bool
}

var definitions = map[Format]definition{
	E4M3: {4, 3, 7, false},
	E5M2: {5, 2, 15, true},
	E5M6: {5, 6, 15, true},
	BF16: {8, 7, 127, true},
}

// value is the value of a code without its sign, or NaN or infinity.
func (d definition) value(code int) float64 {
	e, m := code>>d.mantissaBits, code&(1<<d.mantissaBits-1)
	top := 1<<d.exponentBits - 1
	switch {
	case d.hasInf && e == top && m == 0:
		return math.Inf(1)
	case d.hasInf && e == top, !d.hasInf && e == top && m == 1<<d.mantissaBits-1:
		return math.NaN()
	case e == 0:
		return math.Ldexp(float64(m), 1-d.bias-d.mantissaBits)
	}
	return math.Ldexp(1+float64(m)/float64(int(1)<<d.mantissaBits), e-d.bias)
}

// magnitudes are the codes of one sign.
func (d definition) magnitudes() int { return 1 << (d.exponentBits + d.mantissaBits) }

// bounds returns for every finite code, and for the first one beyond, the bits of the smallest float32 that rounds to it
// or to a larger one: the middle between two neighbours, which goes to the even code, or what follows it.
func (d definition) bounds(t *testing.T) []uint32 {
	var list []uint32
	last := math.NaN()
	for code := range d.magnitudes() {
		v := d.value(code)
		if code == 0 {
			list, last = append(list, 0), 0
			continue
		}
		overflow := v != v || math.IsInf(v, 0)
		if overflow {
			// As if the exponents went on: the next value is as far away as the last one was.
			v = 2*last - d.value(code-2)
		}
		middle := (last + v) / 2
		if float64(float32(middle)) != middle {
			t.Fatalf("the middle %v below code %#x is no float32", middle, code)
		}
		bits := math.Float32bits(float32(middle))
		if code%2 != 0 {
			bits++
		}
		list, last = append(list, bits), v
		if overflow {
			break
		}
	}
	return list
}

func TestDecode(t *testing.T) {
	for _, f := range formats {
		d := definitions[f]
		signs := uint16(d.magnitudes())
		finite, infinite, nans, sum := 0, 0, 0, 0.0
		for c := range 2 * d.magnitudes() {
			code := uint16(c)
			want := d.value(c & (d.magnitudes() - 1))
			if code&signs != 0 {
				want = -want
			}
			got := f.Decode(code)
			if want != want {
				nans++
				if got == got {
					t.Errorf("%v: code %#x is %v, want NaN", f, code, got)
				}
			} else {
				if float64(got) != want || math.Signbit(float64(got)) != (code&signs != 0) {
					t.Errorf("%v: code %#x is %v, want %v", f, code, got, want)
				}
				if math.IsInf(want, 0) {
					infinite++
				} else if finite++; want > 0 {
					sum += want
				}
			}
			for _, saturate := range []bool{false, true} {
				back := f.Encode(got, saturate)
				if saturate && math.IsInf(want, 0) {
					if f.Decode(back) != float32(math.Copysign(float64(f.Max()), want)) {
						t.Errorf("%v: infinity saturates to %#x", f, back)
					}
				} else if want != want && f != BF16 {
					if f.Decode(back) == f.Decode(back) || back&signs != code&signs {
						t.Errorf("%v: NaN %#x comes back as %#x", f, code, back)
					}
				} else if back != code && !(want != want && back == code|0x40) {
					t.Errorf("%v: code %#x comes back as %#x", f, code, back)
				}
			}
		}
		type counts struct {
			finite, infinite, nans int
		}
		got := counts{finite, infinite, nans}
		want := map[Format]counts{E4M3: {254, 0, 2}, E5M2: {248, 2, 6}, E5M6: {2 * 31 * 64, 2, 2 * 63}, BF16: {2 * 255 * 128, 2, 2 * 127}}[f]
		if got != want {
			t.Errorf("%v has %+v codes, want %+v", f, got, want)
		}
		if want, ok := map[Format]float64{E4M3: 5407.875, E5M2: 360447.9997558594}[f]; ok && math.Abs(sum-want) > 1e-9 {
			t.Errorf("%v: positive values sum to %.10f, want %.10f", f, sum, want)
		}
		if f.Max() != f.Decode(uint16(len(d.bounds(t))-2)) {
			t.Errorf("%v: Max is %v", f, f.Max())
		}
	}
	if got := E5M6.Max(); got != 65024 {
		t.Errorf("E5M6 ends at %v", got)
	}
}

// Published vectors: x, code when saturating, code when not.
func TestEncodeGolden(t *testing.T) {
	inf, nan := float32(math.Inf(1)), float32(math.NaN())
	zero := float32(math.Copysign(0, -1))
	above := func(x float32) float32 { return math.Nextafter32(x, inf) }
	for _, c := range []struct {
		f              Format
		x              float32
		saturate, wrap uint16
	}{
		{E4M3, 0, 0, 0}, {E4M3, zero, 0x80, 0x80}, {E4M3, 0x1p-10, 0, 0}, {E4M3, above(0x1p-10), 1, 1},
		{E4M3, 0x3p-10, 2, 2}, {E4M3, 0x1p-9, 1, 1}, {E4M3, 7.5 * 0x1p-9, 8, 8}, {E4M3, 0x1p-6, 8, 8},
		{E4M3, 0.1, 0x1D, 0x1D}, {E4M3, -0.3, 0xAA, 0xAA}, {E4M3, 1, 0x38, 0x38}, {E4M3, 1.0625, 0x38, 0x38},
		{E4M3, 1.1875, 0x3A, 0x3A}, {E4M3, 3.14159, 0x45, 0x45}, {E4M3, 17, 0x58, 0x58}, {E4M3, 240, 0x77, 0x77},
		{E4M3, 416, 0x7D, 0x7D}, {E4M3, 432, 0x7E, 0x7E}, {E4M3, 448, 0x7E, 0x7E}, {E4M3, 464, 0x7E, 0x7E},
		{E4M3, 464.01, 0x7E, 0x7F}, {E4M3, 480, 0x7E, 0x7F}, {E4M3, inf, 0x7E, 0x7F}, {E4M3, -inf, 0xFE, 0xFF},
		{E4M3, nan, 0x7F, 0x7F}, {E4M3, 500, 0x7E, 0x7F}, {E4M3, -500, 0xFE, 0xFF},
		{E5M2, 0x1p-17, 0, 0}, {E5M2, above(0x1p-17), 1, 1}, {E5M2, 0x3p-17, 2, 2}, {E5M2, 0x1p-16, 1, 1},
		{E5M2, 0x1p-14, 4, 4}, {E5M2, 0.1, 0x2E, 0x2E}, {E5M2, -0.3, 0xB5, 0xB5}, {E5M2, 1, 0x3C, 0x3C},
		{E5M2, 1.125, 0x3C, 0x3C}, {E5M2, 1.375, 0x3E, 0x3E}, {E5M2, 3.14159, 0x42, 0x42}, {E5M2, 57344, 0x7B, 0x7B},
		{E5M2, 61439, 0x7B, 0x7B}, {E5M2, 61440, 0x7B, 0x7C}, {E5M2, inf, 0x7B, 0x7C}, {E5M2, -inf, 0xFB, 0xFC},
		{BF16, 1.00390625, 0x3F80, 0x3F80}, {BF16, 1.01171875, 0x3F82, 0x3F82}, {BF16, -0.1, 0xBDCD, 0xBDCD},
		{BF16, 65504, 0x4780, 0x4780}, {BF16, 3.4e38, 0x7F7F, 0x7F80},
		// A NaN whose payload lies below the cut must not become infinity.
		{BF16, math.Float32frombits(0x7F800001), 0x7FC0, 0x7FC0},
	} {
		if got := c.f.Encode(c.x, true); got != c.saturate {
			t.Errorf("%v: %v saturating is %#x, want %#x", c.f, c.x, got, c.saturate)
		}
		if got := c.f.Encode(c.x, false); got != c.wrap {
			t.Errorf("%v: %v is %#x, want %#x", c.f, c.x, got, c.wrap)
		}
	}
}

// sweep calls a test with stretches of floats of rising bits, those of one sign: all of them under MOETOR_EXHAUSTIVE, and
// always those next to the bounds of codes, with some in between.
func sweep(bounds []uint32, f func(x []float32)) {
	x := make([]float32, 0, 1<<12)
	flush := func() {
		f(x)
		x = x[:0]
	}
	add := func(bits uint32) {
		if x = append(x, math.Float32frombits(bits)); len(x) == cap(x) {
			flush()
		}
	}
	if os.Getenv("MOETOR_EXHAUSTIVE") != "" {
		for bits := range uint32(1 << 31) {
			add(bits)
		}
		flush()
		return
	}
	for bits := uint32(0); bits < 1<<31; bits += 9973 {
		add(bits)
	}
	flush()
	for _, b := range bounds {
		for d := range uint32(5) {
			if b+d >= 2 {
				add(b + d - 2)
			}
		}
	}
	flush()
	for _, special := range []uint32{1 << 23, infBits, infBits | quietBit, 1<<31 - 2} {
		for d := range uint32(5) {
			add(special + d - 3)
		}
	}
	flush()
}

// Rounding by the definition, through the bounds between codes, for all floats.
func TestEncodeSweep(t *testing.T) {
	for _, f := range formats {
		d := definitions[f]
		bounds := d.bounds(t)
		beyond := uint16(len(bounds) - 1) // the code of an overflow
		signs := uint16(d.magnitudes())
		eachImpl(t, f.String(), func(t *testing.T) {
			if testing.Short() {
				t.Skip("a sweep")
			}
			row := make([]byte, f.RowBytes(1<<12))
			sweep(bounds, func(x []float32) {
				for _, saturate := range []bool{false, true} {
					for _, sign := range []uint16{0, signs} {
						EncodeRow(f, row, x, saturate)
						at := 0
						for i, v := range x {
							got := code(f, row, i)
							bits := math.Float32bits(v) &^ signBit
							if bits > infBits {
								if y := f.Decode(got); y == y || got&signs != sign {
									t.Fatalf("%v: NaN %08x is %#x", f, bits, got)
								}
								continue
							}
							if bits < bounds[at] {
								at = 0 // special values do not go on rising
							}
							for at+1 < len(bounds) && bounds[at+1] <= bits {
								at++
							}
							want := uint16(at)
							if want == beyond && saturate {
								want--
							}
							if got != want|sign {
								t.Fatalf("%v: %v (%08x), saturating %v, is %#x, want %#x", f, v, bits, saturate, got, want|sign)
							}
						}
						for i := range x {
							x[i] = -x[i]
						}
					}
				}
			})
		})
	}
}

// eachImpl runs a test once per implementation.
func eachImpl(t *testing.T, name string, f func(t *testing.T)) {
	for _, impl := range Impls() {
		t.Run(name+"/"+impl, func(t *testing.T) {
			restore, ok := Use(impl)
			if !ok {
				t.Fatalf("Use(%q) refused a name that Impls returned", impl)
			}
			defer restore()
			f(t)
		})
	}
}
