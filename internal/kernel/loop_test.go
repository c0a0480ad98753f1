package kernel

import (
	"fmt"
	"math"
	"testing"
)

// loopCases run every loop that threads share, on n values in rows of cols, and return all they wrote.
func loopCases(n, cols int) map[string]func() []float32 {
	rows := n / cols
	x, y, z, gain := randomMat(1, n), randomMat(2, n), randomMat(3, n), randomMat(4, cols)
	copies := func(x []float32) []float32 { return append([]float32(nil), x...) }
	word := func(v float64) []float32 {
		b := math.Float64bits(v)
		return []float32{float32(b >> 42), float32(b >> 21 & (1<<21 - 1)), float32(b & (1<<21 - 1))}
	}
	targets, weight := make([]int32, rows), randomMat(5, rows)
	for r := range targets {
		targets[r] = int32(r * 7 % cols)
	}
	weight[1] = 0
	rstd := make([]float32, rows)
	RMSNorm(make([]float32, n), x, gain, rstd, cols, 1e-5)
	s := Slots{K: 2, Cols: cols}
	for t := range rows / 2 {
		s.Rows = append(s.Rows, int32(rows/2-1-t))
		s.Places = append(s.Places, int32(t), int32(rows/2+t))
	}
	return map[string]func() []float32{
		"Add":        func() []float32 { d := copies(x); Add(d, y); return d },
		"Axpy":       func() []float32 { d := copies(x); Axpy(d, 0.3, y); return d },
		"Scale":      func() []float32 { d := copies(x); Scale(d, 0.3); return d },
		"Zero":       func() []float32 { d := copies(x); Zero(d); return d },
		"Copy":       func() []float32 { d := make([]float32, n); Copy(d, x); return d },
		"SumSquares": func() []float32 { return word(SumSquares(x)) },
		"SwiGLU":     func() []float32 { d := make([]float32, n); SwiGLU(d, x, y); return d },
		"SwiGLUGrad": func() []float32 {
			d := make([]float32, 2*n)
			SwiGLUGrad(d[:n], d[n:], z, x, y)
			return d
		},
		"AdamW": func() []float32 {
			d := append(copies(x), make([]float32, 2*n)...)
			AdamW(AdamWArgs{LR: 0.01, Beta1: 0.9, Beta2: 0.95, Eps: 1e-8, Decay: 0.1, GradScale: 1, Step: 2}, d[:n], y, d[n:2*n], d[2*n:])
			return d
		},
		"AdamWBF16": func() []float32 {
			d, m := append(copies(x), make([]float32, 2*n)...), make([]uint16, 2*n)
			ToBF16(m[:n], z)
			AdamWBF16(AdamWArgs{LR: 0.01, Beta1: 0.9, Beta2: 0.95, Eps: 1e-8, Decay: 0.1, GradScale: 1, Step: 2}, d[:n], y, m[:n], m[n:])
			FromBF16(d[n:], m)
			return d
		},
		"RMSNorm": func() []float32 {
			d := make([]float32, n+rows)
			RMSNorm(d[:n], x, gain, d[n:], cols, 1e-5)
			return d
		},
		"RMSNormGrad": func() []float32 {
			d := append(make([]float32, n), gain...)
			RMSNormGrad(d[:n], d[n:], y, x, gain, rstd, cols)
			return d
		},
		"CrossEntropyRows": func() []float32 {
			d, loss := copies(x), make([]float64, rows)
			CrossEntropyRows(loss, d, cols, targets, weight, 0.5)
			for _, v := range loss {
				d = append(d, word(v)...)
			}
			return d
		},
		"Slots.Scatter": func() []float32 {
			d := make([]float32, n)
			s.Scatter(d, y, cols)
			return d
		},
		"Slots.Combine": func() []float32 {
			d := copies(x)
			s.Combine(d, cols, weight, y)
			s.Combine(d, cols, nil, z)
			return d
		},
		"Slots.CombineGrad": func() []float32 {
			d := append(copies(x), weight...)
			s.CombineGrad(d[n:], d[:n], y, cols, weight)
			return d
		},
	}
}

// No loop's result depends on the number of threads, on sizes that are shared among them and do not fill the last chunk.
func TestLoopsIndependentOfThreads(t *testing.T) {
	const cols = 100
	n := (loopValues/cols + 2*gainRows + 4) / 2 * 2 * cols
	eachImpl(t, func(t *testing.T) {
		for name, f := range loopCases(n, cols) {
			want := f()
			for _, threads := range []int{2, 3} {
				withThreads(t, threads)
				sameBits(t, fmt.Sprintf("%s on %d threads", name, threads), f(), want)
			}
			SetThreads(1)
		}
	})
}

// The loops without transcendental functions round every product and sum apart, so all implementations agree to the bit.
func TestLoopsAgree(t *testing.T) {
	want := map[string][]float32{}
	for _, impl := range Impls() {
		restore, _ := Use(impl)
		for _, cols := range []int{1, 7, 31, 33, 100} {
			for name, f := range loopCases(6*cols, cols) {
				switch name {
				case "SwiGLU", "SwiGLUGrad", "CrossEntropyRows", "AdamW":
					continue
				}
				key := fmt.Sprintf("%s of rows of %d", name, cols)
				if want[key] == nil {
					want[key] = f()
				}
				sameBits(t, impl+": "+key, f(), want[key])
			}
		}
		restore()
	}
}

func TestLoopsAllocateNothing(t *testing.T) {
	const n, cols = 2 * loopValues, 128
	x, y, z, gain := make([]float32, n), randomMat(1, n), make([]float32, n), randomMat(2, cols)
	rstd, dgain, loss := make([]float32, n/cols), make([]float32, cols), make([]float64, n/cols)
	targets := make([]int32, n/cols)
	m, v := make([]uint16, n), make([]uint16, n)
	s := Slots{K: 1, Cols: cols, Rows: targets[:1], Places: targets[:1]}
	for _, threads := range []int{1, 2} {
		withThreads(t, threads)
		eachImpl(t, func(t *testing.T) {
			got := testing.AllocsPerRun(30, func() {
				Add(x, y)
				Axpy(x, 1, y)
				Scale(x, 0.5)
				Copy(x, y)
				SumSquares(x)
				Finite(x)
				SwiGLU(z, x, y)
				SwiGLUGrad(z, x, z, x, y)
				RMSNorm(x, y, gain, rstd, cols, 1e-5)
				RMSNormGrad(x, dgain, z, y, gain, rstd, cols)
				CrossEntropyRows(loss, x, cols, targets, rstd, 1)
				s.Scatter(x, y, cols)
				s.Combine(y, cols, gain, x)
				AdamW(AdamWArgs{Step: 1}, x, y, z, z)
				AdamWBF16(AdamWArgs{Step: 1}, x, y, m, v)
				Zero(z)
			})
			if got != 0 {
				t.Errorf("%d threads: %v allocations", threads, got)
			}
		})
	}
}

func TestZeroCopyFinite(t *testing.T) {
	eachImpl(t, func(t *testing.T) {
		for _, threads := range []int{1, 2} {
			withThreads(t, threads)
			for _, n := range append([]int{loopValues + 5}, vectorSizes...) {
				x, y := row(randomMat(1, n)), row(randomMat(2, n))
				Copy(y.data(), x.data())
				sameBits(t, "Copy", y.buf, x.buf)
				if !Finite(x.data()[:n]) {
					t.Fatalf("%d values are not finite", n)
				}
				for _, at := range []int{0, n / 2, n - 1} {
					for _, bad := range []float64{math.NaN(), math.Inf(1), math.Inf(-1)} {
						if n == 0 {
							continue
						}
						old := x.data()[at]
						x.data()[at] = float32(bad)
						if Finite(x.data()[:n]) {
							t.Fatalf("%v at %d of %d passes as finite", bad, at, n)
						}
						x.data()[at] = old
					}
				}
				if large := []float32{math.MaxFloat32, math.MaxFloat32, -math.MaxFloat32, 0}; !Finite(large) {
					t.Fatal("the largest numbers pass as not finite")
				}
				Zero(x.data()[:n])
				x.check(t, "Zero")
				for i, v := range x.data()[:n] {
					if v != 0 {
						t.Fatalf("Zero left %v at %d", v, i)
					}
				}
			}
		}
	})
}

// SumSquares is added in float64: the error is that of float64, whatever the length.
func TestSumSquaresAccuracy(t *testing.T) {
	eachImpl(t, func(t *testing.T) {
		for _, n := range []int{1, 31, 32, 33, sumChunk - 1, sumChunk, sumChunk + 1, 5*sumChunk + 77} {
			x := wide(uint64(n), n)
			var want float64
			for _, v := range x {
				want += float64(v) * float64(v)
			}
			if got := SumSquares(x); math.Abs(got-want) > 1e-12*want {
				t.Errorf("n %d: %v, want %v", n, got, want)
			}
		}
		if got := SumSquares([]float32{1e30, float32(math.NaN())}); got == got {
			t.Errorf("a NaN is lost: %v", got)
		}
	})
}

func TestCrossEntropyRows(t *testing.T) {
	const rows, cols = 5, 37
	eachImpl(t, func(t *testing.T) {
		logits := newGuarded(rows, cols, cols, func() float32 { return 0 })
		copy(logits.data(), wide(3, rows*cols))
		targets, weight := []int32{0, 36, -5, 9, 1}, []float32{1, 0.5, 0, -1, 2}
		want, loss := logits.clone(), make([]float64, rows)
		CrossEntropyRows(loss, logits.data()[:rows*cols], cols, targets, weight, 0.25)
		for r := range rows {
			x := want.data()[r*cols : (r+1)*cols]
			if weight[r] == 0 {
				clear(x)
				if loss[r] != 0 {
					t.Errorf("row without weight has loss %v", loss[r])
				}
				continue
			}
			if l := CrossEntropy(x, int(targets[r]), weight[r]*0.25); l != loss[r] {
				t.Errorf("row %d: loss %v, want %v", r, loss[r], l)
			}
		}
		sameBits(t, "gradients", logits.buf, want.buf)
	})
	mustPanic(t, "target", func() {
		CrossEntropyRows(make([]float64, 1), make([]float32, 4), 4, []int32{4}, []float32{1}, 1)
	})
	mustPanic(t, "rows", func() {
		CrossEntropyRows(make([]float64, 1), make([]float32, 5), 4, []int32{0}, []float32{1}, 1)
	})
}

// Slots against sums written out in float64.
func TestSlots(t *testing.T) {
	eachImpl(t, func(t *testing.T) {
		for _, cols := range []int{1, 15, 16, 33, 70} {
			const k, ldPad = 3, 2
			s := Slots{Rows: []int32{4, 0, 2}, Places: []int32{8, 0, 3, 1, 2, 7, 6, 5, 4}, K: k, Cols: cols}
			x := newGuarded(5, cols, cols+ldPad, func() float32 { return 0 })
			fill := randomMat(9, 5*cols)
			for r := range 5 {
				copy(x.data()[r*x.ld:r*x.ld+cols], fill[r*cols:])
			}
			weight := randomMat(10, len(s.Places))
			slots := newGuarded(9, cols, cols, func() float32 { return 0 })
			s.Scatter(slots.data(), x.data(), x.ld)
			slots.check(t, "Scatter")
			for n, r := range s.Rows {
				for j := range k {
					at := int(s.Places[n*k+j])
					sameBits(t, "Scatter", slots.data()[at*cols:(at+1)*cols], x.data()[int(r)*x.ld:int(r)*x.ld+cols])
				}
			}
			copy(slots.data(), randomMat(11, 9*cols))
			y, plain := x.clone(), x.clone()
			s.Combine(y.data(), y.ld, weight, slots.data())
			s.Combine(plain.data(), plain.ld, nil, slots.data())
			y.check(t, "Combine")
			grad, dWeight := slots.clone(), make([]float32, len(s.Places))
			s.CombineGrad(dWeight, grad.data(), x.data(), x.ld, weight)
			grad.check(t, "CombineGrad")
			for n, r := range s.Rows {
				for i := range cols {
					token := float64(x.data()[int(r)*x.ld+i])
					want, wantPlain := token, token
					for j := range k {
						v := float64(slots.data()[int(s.Places[n*k+j])*cols+i])
						want, wantPlain = want+float64(weight[n*k+j])*v, wantPlain+v
						g := float64(weight[n*k+j]) * token
						if got := float64(grad.data()[int(s.Places[n*k+j])*cols+i]); math.Abs(got-g) > 1e-6*math.Abs(g) {
							t.Fatalf("gradient of slot %v, want %v", got, g)
						}
					}
					at := int(r)*y.ld + i
					if math.Abs(float64(y.data()[at])-want) > 3e-6 || math.Abs(float64(plain.data()[at])-wantPlain) > 3e-6 {
						t.Fatalf("Combine %v and %v, want %v and %v", y.data()[at], plain.data()[at], want, wantPlain)
					}
				}
				for j := range k {
					var want float64
					for i := range cols {
						want += float64(x.data()[int(r)*x.ld+i]) * float64(slots.data()[int(s.Places[n*k+j])*cols+i])
					}
					if math.Abs(float64(dWeight[n*k+j])-want) > 1e-6*(1+math.Abs(want)) {
						t.Fatalf("gradient of weight %v, want %v", dWeight[n*k+j], want)
					}
				}
			}
			for _, r := range []int{1, 3} { // tokens without slots
				sameBits(t, "Combine of others", y.data()[r*y.ld:r*y.ld+cols], x.data()[r*x.ld:r*x.ld+cols])
			}
		}
		var none Slots
		none.Scatter(nil, nil, 0)
		none.Combine(nil, 0, nil, nil)
	})
	mustPanic(t, "places", func() { Slots{Rows: []int32{0}, Places: []int32{0}, K: 2, Cols: 1}.Scatter(nil, nil, 1) })
	mustPanic(t, "slots", func() {
		Slots{Rows: []int32{0}, Places: []int32{3}, K: 1, Cols: 2}.Scatter(make([]float32, 7), make([]float32, 2), 2)
	})
}
