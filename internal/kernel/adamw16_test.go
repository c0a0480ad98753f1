package kernel

import (
	"fmt"
	"math"
	"testing"
)

// nearestBF16 is the BF16 nearest to x, of two the one with an even last bit, found among the two around it by distance.
func nearestBF16(x float32) uint16 {
	low := uint16(math.Float32bits(x) >> 16) // toward zero
	if x != x {
		return low | 0x40
	}
	if math.IsInf(float64(x), 0) {
		return low
	}
	at := func(b uint16) float64 {
		if b&0x7FFF == 0x7F80 { // what would follow the largest, if the exponents went on
			return math.Copysign(0x1p128, float64(x))
		}
		return float64(math.Float32frombits(uint32(b) << 16))
	}
	down, up := math.Abs(float64(x)-at(low)), math.Abs(at(low+1)-float64(x))
	if up < down || up == down && low&1 == 1 {
		return low + 1
	}
	return low
}

// edgesBF16 are float32 values around every BF16 and around the middle to the next, NaN with any upper half among them.
func edgesBF16() []float32 {
	x := make([]float32, 0, 7<<16)
	for high := range uint32(1 << 16) {
		for _, low := range []uint32{0, 1, 0x7FFF, 0x8000, 0x8001, 0xC123, 0xFFFF} {
			x = append(x, math.Float32frombits(high<<16|low))
		}
	}
	return x
}

func TestBF16(t *testing.T) {
	x := edgesBF16()
	y, back := make([]uint16, len(x)), make([]float32, len(x))
	ToBF16(y, x)
	FromBF16(back, y)
	for i, v := range x {
		if want := nearestBF16(v); y[i] != want {
			t.Fatalf("BF16 of %v (%08x) is %04x, want %04x", v, math.Float32bits(v), y[i], want)
		}
		if bits := math.Float32bits(back[i]); bits != uint32(y[i])<<16 {
			t.Fatalf("%04x widens to %08x", y[i], bits)
		}
	}
	mustPanic(t, "ToBF16", func() { ToBF16(make([]uint16, 1), make([]float32, 2)) })
	mustPanic(t, "FromBF16", func() { FromBF16(make([]float32, 1), make([]uint16, 2)) })
}

// The rounding inside the update: with Beta1 = 0 the first moment is the gradient, whatever value that is.
func TestAdamWBF16Rounding(t *testing.T) {
	eachImpl(t, func(t *testing.T) {
		g := edgesBF16()
		w, m, v := make([]float32, len(g)), make([]uint16, len(g)), make([]uint16, len(g))
		AdamWBF16(AdamWArgs{GradScale: 1, Step: 1}, w, g, m, v)
		for i, x := range g {
			if x == 0 { // the old moment, +0, adds up with -0 to +0
				x = 0
			}
			if want := nearestBF16(x); m[i] != want {
				t.Fatalf("moment of gradient %v (%08x) is %04x, want %04x", x, math.Float32bits(x), m[i], want)
			}
		}
	})
}

// specAdamWBF16 is the update of one value, step by step in float32.
func specAdamWBF16(a AdamWArgs, w, g float32, m, v uint16) (float32, uint16, uint16) {
	round := func(x float64) float32 { return float32(x) } // of one sum, product or quotient of two float32: exact before
	mul := func(a, b float32) float32 { return round(float64(a) * float64(b)) }
	add := func(a, b float32) float32 { return round(float64(a) + float64(b)) }
	wide := func(b uint16) float32 { return math.Float32frombits(uint32(b) << 16) }
	g = mul(g, a.GradScale)
	mi := add(mul(a.Beta1, wide(m)), mul(add(1, -a.Beta1), g))
	vi := add(mul(a.Beta2, wide(v)), mul(add(1, -a.Beta2), mul(g, g)))
	correct := func(beta float32) float32 { return round(1 / (1 - math.Pow(float64(beta), float64(a.Step)))) }
	root := round(math.Sqrt(float64(mul(vi, correct(a.Beta2)))))
	update := round(float64(mul(mi, correct(a.Beta1))) / float64(add(root, a.Eps)))
	return add(w, -mul(a.LR, add(update, mul(a.Decay, w)))), nearestBF16(mi), nearestBF16(vi)
}

func TestAdamWBF16(t *testing.T) {
	const mark = 0xBEEF
	eachImpl(t, func(t *testing.T) {
		for _, n := range append([]int{5000}, vectorSizes...) {
			w := row(randomMat(1, n))
			moments := make([]uint16, 2*n+3*guardSize)
			for i := range moments {
				moments[i] = mark
			}
			m, v := moments[guardSize:guardSize+n], moments[2*guardSize+n:2*guardSize+2*n]
			clear(m)
			clear(v)
			wantW, wantM, wantV := append([]float32(nil), w.data()...), make([]uint16, n), make([]uint16, n)
			for step := 1; step <= 4; step++ {
				g := row(wide(uint64(10+step), n))
				a := AdamWArgs{LR: 0.01, Beta1: 0.9, Beta2: 0.95, Eps: 1e-8, Decay: 0.1, GradScale: 0.37, Step: step}
				AdamWBF16(a, w.data(), g.data(), m, v)
				for i, gi := range g.data() {
					wantW[i], wantM[i], wantV[i] = specAdamWBF16(a, wantW[i], gi, wantM[i], wantV[i])
					if m[i] != wantM[i] || v[i] != wantV[i] {
						t.Fatalf("n %d step %d: moments %d are %04x and %04x, want %04x and %04x", n, step, i, m[i], v[i], wantM[i], wantV[i])
					}
				}
				sameBits(t, fmt.Sprintf("n %d step %d w", n, step), w.data(), wantW)
				w.check(t, "AdamWBF16")
				g.check(t, "AdamWBF16")
			}
			for i, b := range moments {
				if at := i - guardSize; b != mark && !(at >= 0 && at < n || at >= n+guardSize && at < 2*n+guardSize) {
					t.Fatalf("n %d: guard %d of the moments was overwritten", n, i)
				}
			}
		}
	})
	mustPanic(t, "AdamWBF16", func() {
		AdamWBF16(AdamWArgs{Step: 1}, make([]float32, 3), make([]float32, 3), make([]uint16, 2), make([]uint16, 3))
	})
}

// A moment without gradient decays from every value with MaxBetaBF16, and stays for ever with a beta a little larger.
func TestMaxBetaBF16(t *testing.T) {
	stays := func(beta float32) (n int) {
		for b := uint16(0x0081); b < 0x7F80; b++ { // all above the smallest normal one
			w, g, m, v := []float32{0}, []float32{0}, []uint16{b}, []uint16{0}
			AdamWBF16(AdamWArgs{Beta1: beta, GradScale: 1, Step: 1}, w, g, m, v)
			if m[0] == b {
				n++
			}
		}
		return n
	}
	if n := stays(MaxBetaBF16); n > 0 {
		t.Errorf("%d moments do not decay with beta %v", n, MaxBetaBF16)
	}
	if stays(0.999) == 0 {
		t.Error("every moment decays with beta 0.999: the bound is too low")
	}
}

// FuzzAdamWBF16 compares every implementation with the specification on bits of the fuzzer's choice.
func FuzzAdamWBF16(f *testing.F) {
	f.Add(uint32(0x3F800000), uint32(0x3F800001), uint16(0x3F80), uint16(0x7F80), uint8(3), uint8(17), float32(0.9), float32(0.95))
	f.Add(uint32(0x7FC00000), uint32(0x00000001), uint16(0x8000), uint16(0x0001), uint8(1), uint8(5), float32(0.5), float32(0))
	f.Fuzz(func(t *testing.T, wBits, gBits uint32, m, v uint16, step, n uint8, beta1, beta2 float32) {
		if !(beta1 >= 0 && beta1 < 1 && beta2 >= 0 && beta2 < 1) {
			t.Skip()
		}
		size := int(n)%40 + 1
		a := AdamWArgs{LR: 0.01, Beta1: beta1, Beta2: beta2, Eps: 1e-8, Decay: 0.1, GradScale: 0.5, Step: int(step)%50 + 1}
		for _, name := range Impls() {
			restore, _ := Use(name)
			w, g, ms, vs := make([]float32, size), make([]float32, size), make([]uint16, size), make([]uint16, size)
			for i := range w {
				d := uint32(i) * 0x01010101
				w[i], g[i] = math.Float32frombits(wBits+d), math.Float32frombits(gBits^d)
				ms[i], vs[i] = m+uint16(d), v&0x7FFF^uint16(i)
			}
			oldW, oldM, oldV := append([]float32(nil), w...), append([]uint16(nil), ms...), append([]uint16(nil), vs...)
			AdamWBF16(a, w, g, ms, vs)
			restore()
			for i := range w {
				x, mi, vi := specAdamWBF16(a, oldW[i], g[i], oldM[i], oldV[i])
				if !sameValue(w[i], x) || !sameBF16(ms[i], mi) || !sameBF16(vs[i], vi) {
					t.Fatalf("%s %+v: value %d is %v %04x %04x, want %v %04x %04x", name, a, i, w[i], ms[i], vs[i], x, mi, vi)
				}
			}
		}
	})
}

// sameValue compares to the bit; which of two NaN a sum returns is the processor's choice.
func sameValue(a, b float32) bool {
	return math.Float32bits(a) == math.Float32bits(b) || a != a && b != b
}

func sameBF16(a, b uint16) bool {
	return sameValue(math.Float32frombits(uint32(a)<<16), math.Float32frombits(uint32(b)<<16))
}
