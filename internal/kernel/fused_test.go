package kernel

import (
	"bytes"
	"fmt"
	"testing"

	"moetor/internal/lowp"
)

func sameMatrix(t *testing.T, what string, got, want *lowp.Matrix) {
	t.Helper()
	for i := range want.Rows {
		if !bytes.Equal(got.Row(i), want.Row(i)) {
			t.Fatalf("%s: codes of row %d are %x, want %x", what, i, got.Row(i), want.Row(i))
		}
	}
	sameBits(t, what+": scales", got.Scales, want.Scales)
	if !bytes.Equal(got.Exponents, want.Exponents) {
		t.Fatalf("%s: exponents differ", what)
	}
}

// storageCase makes storage of a recipe, and what it must hold in the end, given the floats.
type storageCase struct {
	recipe
	rows, cols int
	groups     []int
}

func (s storageCase) storage(floats bool) Storage {
	d := Storage{Flat: lowp.New(s.along, s.rows, s.cols, nil), Tall: lowp.New(s.down, s.rows, s.cols, s.groups)}
	if floats {
		d.Floats = make([]float32, s.rows*s.cols)
	}
	return d
}

func (s storageCase) check(t *testing.T, what string, got Storage, want []float32) {
	t.Helper()
	if got.Floats != nil {
		sameBits(t, what+": floats", got.Floats, want)
	}
	for i, m := range []*lowp.Matrix{got.Flat, got.Tall} {
		if m != nil {
			q := lowp.New(m.Quant, s.rows, s.cols, m.Groups)
			lowp.Quantize(q, want, s.cols)
			sameMatrix(t, fmt.Sprintf("%s, %s: storage %d", what, s.name, i), m, q)
		}
	}
}

// Every producer stores what the loop without codes makes, quantised afterwards, to the bit.
func TestFusedProducers(t *testing.T) {
	shapes := []struct {
		rows, cols int
		groups     []int
	}{
		{1, 100, nil}, {300, 128, []int{0, 1, 127, 0, 128, 44}}, {129, 300, []int{129}}, {600, 260, []int{472, 128}}, {256, 33, nil}, {0, 16, nil},
	}
	for _, threads := range []int{1, 3} {
		withThreads(t, threads)
		eachImpl(t, func(t *testing.T) {
			for i, shape := range shapes {
				for _, r := range recipes {
					if r.name == "tensor" {
						continue
					}
					s := storageCase{r, shape.rows, shape.cols, shape.groups}
					n := s.rows * s.cols
					what := fmt.Sprintf("%d threads, %dx%d", threads, s.rows, s.cols)

					x, gain, rstd := randomMat(1, n), randomMat(2, s.cols), make([]float32, s.rows)
					want, wantRstd := make([]float32, n), make([]float32, s.rows)
					RMSNorm(want, x, gain, wantRstd, s.cols, 1e-6)
					got := s.storage(i%2 == 0)
					RMSNormQuantize(got, x, gain, rstd, s.cols, 1e-6)
					s.check(t, what+", RMSNorm", got, want)
					sameBits(t, what+", rstd", rstd, wantRstd)
					got = s.storage(i%2 == 1)
					got.Tall = nil
					RMSNormQuantize(got, x, gain, rstd, s.cols, 1e-6)
					s.check(t, what+", RMSNorm without tall tiles", got, want)

					gate, up := randomMat(3, n), randomMat(4, n)
					SwiGLU(want, gate, up)
					gateCodes, upCodes := lowp.New(r.along, s.rows, s.cols, nil), lowp.New(r.along, s.rows, s.cols, nil)
					got = s.storage(false)
					SwiGLUQuantize(got, gate, up, gateCodes, upCodes, s.cols)
					s.check(t, what+", SwiGLU", got, want)
					s.check(t, what+", gate", Storage{Flat: gateCodes}, gate)
					s.check(t, what+", up", Storage{Flat: upCodes}, up)

					lowp.Dequantize(gate, s.cols, gateCodes)
					lowp.Dequantize(up, s.cols, upCodes)
					dy, dgate, dup := randomMat(5, n), make([]float32, n), make([]float32, n)
					SwiGLUGrad(dgate, dup, dy, gate, up)
					SwiGLU(want, gate, up)
					gotGate, gotUp, h := s.storage(false), s.storage(true), s.storage(false)
					h.Flat = nil
					SwiGLUGradQuantize(gotGate, gotUp, h, dy, gateCodes, upCodes)
					s.check(t, what+", dgate", gotGate, dgate)
					s.check(t, what+", dup", gotUp, dup)
					s.check(t, what+", h", h, want)
					gotGate, gotUp = s.storage(true), s.storage(false)
					SwiGLUGradQuantize(gotGate, gotUp, Storage{}, dy, gateCodes, upCodes)
					s.check(t, what+", dgate alone", gotGate, dgate)
					s.check(t, what+", dup alone", gotUp, dup)

					got = s.storage(false)
					got.Floats = dy
					got.Quantize(s.cols)
					s.check(t, what+", quantised", got, dy)

					tall := lowp.New(r.down, s.rows, s.cols, s.groups)
					Requantize(tall, gateCodes)
					s.check(t, what+", requantised", Storage{Tall: tall}, gate)
				}
			}
		})
	}
}

// The send buffer holds every token's codes and scales in all its slots, and nothing else changes.
func TestScatterQuantized(t *testing.T) {
	for _, threads := range []int{1, 3} {
		withThreads(t, threads)
		eachImpl(t, func(t *testing.T) {
			for _, c := range []struct{ tokens, k, cols, ld int }{{5, 3, 130, 140}, {300, 2, 260, 260}, {4, 0, 20, 20}, {0, 2, 20, 20}} {
				for _, r := range recipes {
					if r.name == "tensor" {
						continue
					}
					s := Slots{K: c.k, Cols: c.cols}
					rows := 2*c.tokens*c.k + 1
					for n := range c.tokens {
						s.Rows = append(s.Rows, int32(c.tokens-1-n))
						for j := range c.k {
							s.Places = append(s.Places, int32(2*(j*c.tokens+n)+1)) // every second row
						}
					}
					x := randomMat(1, c.tokens*c.ld)
					got, want := lowp.New(r.along, rows, c.cols, nil), lowp.New(r.along, rows, c.cols, nil)
					marks := randomMat(2, rows*c.cols)
					lowp.Quantize(got, marks, c.cols)
					s.ScatterQuantized(got, x, c.ld)
					for n := range c.tokens {
						for _, at := range s.Places[n*c.k : (n+1)*c.k] {
							copy(marks[int(at)*c.cols:][:c.cols], x[int(s.Rows[n])*c.ld:])
						}
					}
					lowp.Quantize(want, marks, c.cols)
					sameMatrix(t, fmt.Sprintf("%s, %v, %d threads", r.name, c, threads), got, want)
				}
			}
		})
	}
}

func TestFusedRefuses(t *testing.T) {
	s := storageCase{recipes[0], 5, 200, nil}
	x, gain, rstd := make([]float32, 1000), make([]float32, 200), make([]float32, 5)
	bad := func(name string, spoil func(d *Storage)) {
		d := s.storage(true)
		spoil(&d)
		mustPanic(t, name, func() { RMSNormQuantize(d, x, gain, rstd, 200, 1e-6) })
	}
	bad("floats", func(d *Storage) { d.Floats = d.Floats[1:] })
	bad("shape", func(d *Storage) { d.Flat = lowp.New(s.along, 4, 200, nil) })
	bad("tall for flat", func(d *Storage) { d.Flat = d.Tall })
	bad("one scale", func(d *Storage) { d.Tall = lowp.New(recipes[4].along, 5, 200, nil) })
	bad("codes", func(d *Storage) { d.Flat.Codes = d.Flat.Codes[1:] })
	other := s.storage(true)
	other.Tall = lowp.New(s.down, 5, 200, []int{2, 3})
	codes := lowp.New(s.along, 5, 200, nil)
	mustPanic(t, "groups", func() { SwiGLUGradQuantize(s.storage(true), other, Storage{}, x, codes, codes) })
	mustPanic(t, "up", func() { SwiGLUGradQuantize(other, other, Storage{}, x, codes, lowp.New(s.along, 5, 199, nil)) })
	mustPanic(t, "dy", func() { SwiGLUGradQuantize(other, other, Storage{}, x[1:], codes, codes) })
	slots := Slots{Rows: []int32{0}, Places: []int32{5}, K: 1, Cols: 200}
	mustPanic(t, "place", func() { slots.ScatterQuantized(codes, x, 200) })
	slots.Places[0] = 4
	mustPanic(t, "tokens", func() { slots.ScatterQuantized(codes, x[:199], 200) })
	mustPanic(t, "tall send buffer", func() { slots.ScatterQuantized(lowp.New(s.down, 5, 200, nil), x, 200) })
}

func TestFusedAllocatesNothing(t *testing.T) {
	s := storageCase{recipes[0], 600, 200, []int{400, 200}}
	n := s.rows * s.cols
	x, gain, rstd := randomMat(1, n), randomMat(2, s.cols), make([]float32, s.rows)
	d, e, h, flat := s.storage(false), s.storage(false), s.storage(true), s.storage(false)
	flat.Tall = nil
	gate, up := lowp.New(s.along, s.rows, s.cols, nil), lowp.New(s.along, s.rows, s.cols, nil)
	slots := Slots{K: 2, Cols: s.cols}
	for i := range s.rows / 2 {
		slots.Rows = append(slots.Rows, int32(i))
		slots.Places = append(slots.Places, int32(2*i), int32(2*i+1))
	}
	for _, threads := range []int{1, 2} {
		withThreads(t, threads)
		eachImpl(t, func(t *testing.T) {
			// Many runs: on a busy machine a worker may get its first part, and its scratch, late.
			if got := testing.AllocsPerRun(30, func() {
				RMSNormQuantize(flat, x, gain, rstd, s.cols, 1e-6)
				RMSNormQuantize(d, x, gain, rstd, s.cols, 1e-6)
				SwiGLUQuantize(d, x, x, gate, up, s.cols)
				SwiGLUGradQuantize(d, e, h, x, gate, up)
				h.Quantize(s.cols)
				Requantize(e.Tall, gate)
				slots.ScatterQuantized(gate, x, s.cols)
			}); got != 0 {
				t.Errorf("%d threads: %v allocations", threads, got)
			}
		})
	}
}
