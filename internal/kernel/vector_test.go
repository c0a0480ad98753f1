package kernel

import (
	"fmt"
	"math"
	"math/rand/v2"
	"testing"
)

// ulps is the distance of got from the exact value in units of the last place of float32 at that value.
func ulps(got float32, exact float64) float64 {
	unit := math.SmallestNonzeroFloat32
	if _, e := math.Frexp(exact); exact != 0 && e-24 > -149 {
		unit = math.Ldexp(1, e-24)
	}
	return math.Abs(float64(got)-exact) / unit
}

// expAll runs the exponential of the active implementation on a slice, by the way the callers take.
func expAll(x []float32) []float32 {
	y := make([]float32, len(x))
	expShifted(y, x, 0)
	return y
}

// A sweep over all float32 exponents, both signs: every 1021st bit pattern, about 4 million values.
func TestExpSweep(t *testing.T) {
	eachImpl(t, func(t *testing.T) {
		x := make([]float32, 0, 1<<16)
		worst, worstAt := 0.0, float32(0)
		flush := func() {
			for i, y := range expAll(x) {
				v := x[i]
				exact := math.Exp(float64(v))
				switch {
				case v != v:
					if y == y {
						t.Fatalf("exp(NaN %08x) = %v", math.Float32bits(v), y)
					}
				case exact >= math.MaxFloat32*(1+0x1p-25): // rounds to infinity
					if !math.IsInf(float64(y), 1) {
						t.Fatalf("exp(%v) = %v, want +Inf", v, y)
					}
				default:
					if u := ulps(y, exact); u > worst {
						worst, worstAt = u, v
					}
				}
			}
			x = x[:0]
		}
		for bits := uint64(0); bits < 1<<32; bits += 1021 {
			if x = append(x, math.Float32frombits(uint32(bits))); len(x) == cap(x) {
				flush()
			}
		}
		// Every value next to the bounds, and a fine sweep of the range that softmax uses.
		for _, edge := range []float32{0, 88.7228, 89, -87.3365, -88, -103.97, -104, 0.34657, -0.34657} {
			at := math.Float32bits(edge)
			for d := uint32(0); d < 2000; d++ {
				x = append(x, math.Float32frombits(at+d-min(1000, at)))
			}
			flush()
		}
		for v := float32(-110); v < 95; v += 1.0 / 4096 {
			if x = append(x, v); len(x) == cap(x) {
				flush()
			}
		}
		flush()
		t.Logf("largest error %.3f ulp at %v", worst, worstAt)
		if worst > 1.1 {
			t.Errorf("exp(%v) is off by %.3f ulp", worstAt, worst)
		}
	})
}

func TestExpSpecial(t *testing.T) {
	inf := float32(math.Inf(1))
	eachImpl(t, func(t *testing.T) {
		x := []float32{0, float32(math.Copysign(0, -1)), inf, -inf, math.MaxFloat32, -math.MaxFloat32,
			math.SmallestNonzeroFloat32, -math.SmallestNonzeroFloat32}
		sameBits(t, "exp", expAll(x), []float32{1, 1, inf, 0, inf, 0, 1, 1})
		if y := expAll([]float32{float32(math.NaN())}); y[0] == y[0] {
			t.Errorf("exp(NaN) = %v", y[0])
		}
	})
}

// The value of an element, and the sum of a row with zeros behind it, do not depend on the length or the place.
func TestExpElementsIndependent(t *testing.T) {
	eachImpl(t, func(t *testing.T) {
		x := randomMat(1, 200)
		want, sum := make([]float32, 200), float64(0)
		sum = expShifted(want, x, 0.5)
		for from := 0; from < 40; from += 3 {
			for _, n := range []int{1, 2, 7, 8, 15, 16, 17, 31, 33, 100} {
				y := make([]float32, n)
				expShifted(y, x[from:from+n], 0.5)
				sameBits(t, fmt.Sprintf("%d:+%d", from, n), y, want[from:from+n])
			}
		}
		for _, more := range []int{1, 5, 16, 60} {
			longer := append(append([]float32(nil), x...), make([]float32, more)...)
			for i := range more {
				longer[200+i] = -1000
			}
			if got := expShifted(make([]float32, 200+more), longer, 0.5); got != sum {
				t.Errorf("sum with %d zeros behind is %v, want %v", more, got, sum)
			}
		}
	})
}

// The routines for rows of a block of scores, on rows with gaps and whole vectors of values, against float64.
func TestRows(t *testing.T) {
	eachImpl(t, func(t *testing.T) {
		l := max(int(active.Load().vectors), 1)
		for _, rows := range []int{1, 2, 5, maxTileRows} {
			for _, width := range []int{max(l, 2), 2 * l, 7 * l} {
				name := fmt.Sprintf("%d rows of %d", rows, width)
				r := rand.New(rand.NewPCG(uint64(rows), uint64(width)))
				block := func() guarded {
					return newGuarded(rows, width, width+l+3, func() float32 { return float32(3 * r.NormFloat64()) })
				}
				column := func(f func() float32) guarded { return newGuarded(1, rows, rows, f) }
				inf := func() float32 { return float32(math.Inf(-1)) }

				x, tops, sums, f := block(), column(inf), column(inf), column(func() float32 { return float32(r.NormFloat64()) })
				x.data()[0] = float32(math.NaN())
				x.data()[(rows-1)*x.ld+width-1] = 50
				tops.data()[rows/2] = 40
				maxRows(tops.data(), x.data(), x.ld, width)
				for i := range rows {
					want := float32(math.Inf(-1))
					if i == rows/2 {
						want = 40
					}
					for _, v := range x.data()[i*x.ld : i*x.ld+width] {
						if v > want {
							want = v
						}
					}
					if got := tops.data()[i]; got != want {
						t.Fatalf("%s: largest of row %d is %v, want %v", name, i, got, want)
					}
				}

				x.data()[0] = float32(math.Inf(-1))
				e, shift := x.clone(), tops
				expRows(sums.data(), e.data(), shift.data(), e.ld, width)
				p, ds, d := x.clone(), block(), column(func() float32 { return float32(r.NormFloat64()) })
				before := ds.clone()
				gradRows(p.data(), ds.data(), shift.data(), d.data(), p.ld, width)
				sameBits(t, name+": p", p.buf, e.buf)
				y := newGuarded(rows, width+1, width+2, func() float32 { return 7 })
				wide := newGuarded(rows, width+1, width+9, func() float32 { return float32(r.NormFloat64()) })
				timesRows(y.data(), y.ld, wide.data(), wide.ld, f.data(), width+1)
				for i := range rows {
					var sum float64
					for j := range width {
						exact := math.Exp(float64(x.data()[i*x.ld+j]) - float64(shift.data()[i]))
						got := float64(e.data()[i*e.ld+j])
						if !(math.Abs(got-exact) <= 4e-6*exact) { // the difference is rounded, up to 50
							t.Fatalf("%s: exp of %d,%d is %v, want %v", name, i, j, got, exact)
						}
						sum += got
						want := e.data()[i*e.ld+j] * (before.data()[i*ds.ld+j] - d.data()[i])
						if got := ds.data()[i*ds.ld+j]; got != want {
							t.Fatalf("%s: ds of %d,%d is %v, want %v", name, i, j, got, want)
						}
					}
					if got := float64(sums.data()[i]); !(math.Abs(got-sum) <= 2e-6*sum) {
						t.Fatalf("%s: sum of row %d is %v, want %v", name, i, got, sum)
					}
					for j := range width + 1 {
						if got, want := y.data()[i*y.ld+j], f.data()[i]*wide.data()[i*wide.ld+j]; got != want {
							t.Fatalf("%s: scaled %d,%d is %v, want %v", name, i, j, got, want)
						}
					}
				}
				for _, g := range []guarded{x, tops, sums, f, e, p, ds, d, y, wide} {
					g.check(t, name)
				}
			}
		}
	})
}

var vectorSizes = []int{0, 1, 2, 7, 8, 9, 15, 16, 17, 31, 32, 33, 63, 65, 100, 257}

// wide returns values over several magnitudes and both signs, large enough to saturate a sigmoid.
func wide(seed uint64, n int) []float32 {
	x := randomMat(seed, n)
	for i := range x {
		x[i] *= float32([]float64{0.01, 1, 5, 30, 200}[i%5])
	}
	return x
}

// row puts values into a guarded buffer.
func row(x []float32) guarded {
	i := -1
	return newGuarded(1, len(x), len(x), func() float32 { i++; return x[i] })
}

func sigmoid64(x float64) float64 { return 1 / (1 + math.Exp(-x)) }

func TestSigmoid(t *testing.T) {
	eachImpl(t, func(t *testing.T) {
		for _, n := range vectorSizes {
			src, dst := row(wide(1, n)), row(make([]float32, n))
			Sigmoid(dst.data(), src.data())
			for i, v := range src.data() {
				want := sigmoid64(float64(v))
				if diff := math.Abs(float64(dst.data()[i]) - want); !(diff <= 4e-7*want+1e-37) {
					t.Fatalf("sigmoid(%v) = %v, want %v", v, dst.data()[i], want)
				}
			}
			dst.check(t, "Sigmoid")
			Sigmoid(src.data(), src.data())
			sameBits(t, "in place", src.data(), dst.data())
		}
	})
}

func TestSwiGLU(t *testing.T) {
	eachImpl(t, func(t *testing.T) {
		for _, n := range vectorSizes {
			gate, up, dy := row(wide(1, n)), row(randomMat(2, n)), row(randomMat(3, n))
			y, dgate, dup := row(make([]float32, n)), row(make([]float32, n)), row(make([]float32, n))
			SwiGLU(y.data(), gate.data(), up.data())
			SwiGLUGrad(dgate.data(), dup.data(), dy.data(), gate.data(), up.data())
			for i := range n {
				g, u, d := float64(gate.data()[i]), float64(up.data()[i]), float64(dy.data()[i])
				f := func(g float64) float64 { return g * sigmoid64(g) * u }
				const h = 1e-4
				for _, c := range []struct {
					name      string
					got       float32
					want, tol float64
				}{
					{"y", y.data()[i], f(g), 1e-6 * math.Abs(f(g))},
					{"dup", dup.data()[i], d * g * sigmoid64(g), 1e-6 * math.Abs(d*g)},
					{"dgate", dgate.data()[i], d * (f(g+h) - f(g-h)) / (2 * h), 2e-6 * math.Abs(d*u)},
				} {
					if !(math.Abs(float64(c.got)-c.want) <= c.tol+1e-30) {
						t.Fatalf("%s of gate %v up %v dy %v = %v, want %v", c.name, g, u, d, c.got, c.want)
					}
				}
			}
			for _, b := range []guarded{gate, up, dy, y, dgate, dup} {
				b.check(t, "SwiGLU")
			}
			g2, u2 := gate.clone(), up.clone()
			SwiGLUGrad(g2.data(), u2.data(), dy.data(), g2.data(), u2.data())
			sameBits(t, "dgate in place", g2.data(), dgate.data())
			sameBits(t, "dup in place", u2.data(), dup.data())
			u3 := up.clone()
			SwiGLU(u3.data(), gate.data(), u3.data())
			sameBits(t, "y in place", u3.data(), y.data())
		}
	})
}

func TestSoftmax(t *testing.T) {
	eachImpl(t, func(t *testing.T) {
		for _, cols := range vectorSizes[1:] {
			const rows = 3
			src, dst := row(wide(1, rows*cols)), row(make([]float32, rows*cols))
			Softmax(dst.data(), src.data(), cols)
			for r := range rows {
				x, y := src.data()[r*cols:(r+1)*cols], dst.data()[r*cols:(r+1)*cols]
				top, sum, total := math.Inf(-1), 0.0, 0.0
				for _, v := range x {
					top = max(top, float64(v))
				}
				for _, v := range x {
					sum += math.Exp(float64(v) - top)
				}
				for i, v := range x {
					if want := math.Exp(float64(v)-top) / sum; !(math.Abs(float64(y[i])-want) <= 2e-6*want+1e-37) {
						t.Fatalf("cols %d: softmax[%d] = %v, want %v", cols, i, y[i], want)
					}
					total += float64(y[i])
				}
				if math.Abs(total-1) > 1e-6 {
					t.Fatalf("cols %d: sums to %v", cols, total)
				}
			}
			dst.check(t, "Softmax")
			Softmax(src.data(), src.data(), cols)
			sameBits(t, "in place", src.data(), dst.data())
		}
		x := []float32{1, float32(math.NaN()), 2}
		Softmax(x, x, 3)
		for _, v := range x {
			if v == v {
				t.Errorf("softmax of a row with NaN holds %v", v)
			}
		}
	})
}

func TestCrossEntropy(t *testing.T) {
	eachImpl(t, func(t *testing.T) {
		for _, n := range []int{1, 2, 7, 65, 256, 257, 1000} {
			logits := row(wide(uint64(n), n))
			target, weight := n/3, float32(0.7)
			top, sum := math.Inf(-1), 0.0
			for _, v := range logits.data() {
				top = max(top, float64(v))
			}
			for _, v := range logits.data() {
				sum += math.Exp(float64(v) - top)
			}
			want := math.Log(sum) + top - float64(logits.data()[target])
			before := logits.clone()
			if got := CrossEntropyLoss(logits.data(), target); math.Abs(got-want) > 1e-6*(1+want) {
				t.Fatalf("n %d: loss %v, want %v", n, got, want)
			}
			sameBits(t, "logits after CrossEntropyLoss", logits.buf, before.buf)
			if got := CrossEntropy(logits.data(), target, weight); math.Abs(got-want) > 1e-6*(1+want) {
				t.Fatalf("n %d: loss %v, want %v", n, got, want)
			}
			for i, v := range before.data() {
				g := math.Exp(float64(v)-top) / sum
				if i == target {
					g--
				}
				g *= float64(weight)
				if math.Abs(float64(logits.data()[i])-g) > 1e-6 {
					t.Fatalf("n %d: gradient[%d] = %v, want %v", n, i, logits.data()[i], g)
				}
			}
			logits.check(t, "CrossEntropy")
		}
		uniform := make([]float32, 256)
		if got := CrossEntropyLoss(uniform, 3); math.Abs(got-math.Log(256)) > 1e-12 {
			t.Errorf("loss of equal logits %v, want ln 256", got)
		}
		mustPanic(t, "target", func() { CrossEntropy(uniform, 256, 1) })
		mustPanic(t, "target", func() { CrossEntropyLoss(uniform, -1) })
	})
}

func TestRMSNorm(t *testing.T) {
	eachImpl(t, func(t *testing.T) {
		for _, cols := range vectorSizes[1:] {
			const rows, eps = 3, 1e-3
			x, gain, dy := row(randomMat(1, rows*cols)), row(randomMat(2, cols)), row(randomMat(3, rows*cols))
			y, rstd := row(make([]float32, rows*cols)), row(make([]float32, rows))
			dx, dgain := row(make([]float32, rows*cols)), row(randomMat(4, cols))
			old := dgain.clone()
			RMSNorm(y.data(), x.data(), gain.data(), rstd.data(), cols, eps)
			RMSNormGrad(dx.data(), dgain.data(), dy.data(), x.data(), gain.data(), rstd.data(), cols)

			x64, gain64 := dense64(x), dense64(gain)
			forward := func() []float64 {
				out := make([]float64, rows*cols)
				for r := range rows {
					var ms float64
					for _, v := range x64[r*cols : (r+1)*cols] {
						ms += v * v / float64(cols)
					}
					for i := range cols {
						out[r*cols+i] = x64[r*cols+i] / math.Sqrt(ms+eps) * gain64[i]
					}
				}
				return out
			}
			near(t, "y", dense64(y), forward(), 1e-6)
			difference := func(value []float64) []float64 {
				const h = 1e-5
				grads := make([]float64, len(value))
				for i := range value {
					v := value[i]
					value[i] = v + h
					up := forward()
					value[i] = v - h
					down := forward()
					value[i] = v
					for j := range up {
						grads[i] += float64(dy.data()[j]) * (up[j] - down[j]) / (2 * h)
					}
				}
				return grads
			}
			tolerance := 1e-5
			if cols == 1 {
				tolerance = 1e-3 // of one value the norm leaves little but its sign: the terms of dx cancel
			}
			near(t, fmt.Sprintf("cols %d dx", cols), dense64(dx), difference(x64), tolerance)
			wantGain := difference(gain64)
			for i := range wantGain {
				wantGain[i] += float64(old.data()[i])
			}
			near(t, "dgain", dense64(dgain), wantGain, 1e-5)
			for _, b := range []guarded{x, gain, dy, y, rstd, dx, dgain} {
				b.check(t, "RMSNorm")
			}
			inPlace, again := dy.clone(), old.clone()
			RMSNormGrad(inPlace.data(), again.data(), inPlace.data(), x.data(), gain.data(), rstd.data(), cols)
			sameBits(t, "dx over dy", inPlace.data(), dx.data())
			sameBits(t, "dgain with dx over dy", again.data(), dgain.data())
			RMSNorm(x.data(), x.data(), gain.data(), rstd.data(), cols, eps)
			sameBits(t, "y over x", x.data(), y.data())
		}
	})
}

func TestAdamW(t *testing.T) {
	eachImpl(t, func(t *testing.T) {
		for _, n := range vectorSizes {
			w, m, v := row(randomMat(1, n)), row(make([]float32, n)), row(make([]float32, n))
			w64, m64, v64 := dense64(w), make([]float64, n), make([]float64, n)
			for step := 1; step <= 4; step++ {
				g := row(randomMat(uint64(10+step), n))
				// Scalars as the float32 values that the routine receives.
				a := AdamWArgs{LR: 0.01, Beta1: 0.9, Beta2: 0.95, Eps: 1e-8, Decay: 0.1, GradScale: 0.5, Step: step}
				AdamW(a, w.data(), g.data(), m.data(), v.data())
				lr, b1, b2 := float64(a.LR), float64(a.Beta1), float64(a.Beta2)
				for i, gi := range dense64(g) {
					gi *= float64(a.GradScale)
					m64[i] = b1*m64[i] + (1-b1)*gi
					v64[i] = b2*v64[i] + (1-b2)*gi*gi
					mhat, vhat := m64[i]/(1-math.Pow(b1, float64(step))), v64[i]/(1-math.Pow(b2, float64(step)))
					w64[i] -= lr * (mhat/(math.Sqrt(vhat)+float64(a.Eps)) + float64(a.Decay)*w64[i])
				}
				near(t, fmt.Sprintf("n %d step %d w", n, step), dense64(w), w64, 1e-6)
				near(t, "m", dense64(m), m64, 1e-6)
				near(t, "v", dense64(v), v64, 1e-6)
				for _, b := range []guarded{w, g, m, v} {
					b.check(t, "AdamW")
				}
			}
		}
	})
}

// The update of one element does not depend on how parameters are cut into shards.
func TestAdamWElementsIndependent(t *testing.T) {
	const n = 100
	a := AdamWArgs{LR: 0.01, Beta1: 0.9, Beta2: 0.95, Eps: 1e-8, Decay: 0.1, GradScale: 1, Step: 3}
	eachImpl(t, func(t *testing.T) {
		g := randomMat(2, n)
		run := func(cuts ...int) []float32 {
			w, m, v := randomMat(1, n), randomMat(3, n), make([]float32, n)
			from := 0
			for _, to := range append(cuts, n) {
				AdamW(a, w[from:to], g[from:to], m[from:to], v[from:to])
				from = to
			}
			return w
		}
		want := run()
		for _, cuts := range [][]int{{1}, {7, 40}, {16, 33, 50, 99}} {
			sameBits(t, fmt.Sprint(cuts), run(cuts...), want)
		}
	})
}

func TestElementwise(t *testing.T) {
	for _, n := range vectorSizes {
		x, y := row(randomMat(1, n)), row(randomMat(2, n))
		before := x.clone()
		Add(x.data(), y.data())
		for i := range n {
			if want := before.data()[i] + y.data()[i]; x.data()[i] != want {
				t.Fatalf("Add: %v, want %v", x.data()[i], want)
			}
		}
		x = before.clone()
		Axpy(x.data(), 0.3, y.data())
		for i := range n {
			want := float64(before.data()[i]) + float64(float32(0.3))*float64(y.data()[i])
			if math.Abs(float64(x.data()[i])-want) > 2e-7*(math.Abs(want)+math.Abs(float64(y.data()[i]))) {
				t.Fatalf("Axpy: %v, want %v", x.data()[i], want)
			}
		}
		x.check(t, "Axpy")
		x = before.clone()
		Scale(x.data(), -1.5)
		var want float64
		for i := range n {
			v := before.data()[i]
			if x.data()[i] != -1.5*v {
				t.Fatalf("Scale: %v, want %v", x.data()[i], -1.5*v)
			}
			want += float64(v) * float64(v)
		}
		x.check(t, "Scale")
		if got := SumSquares(before.data()); math.Abs(got-want) > 1e-14*want {
			t.Fatalf("SumSquares: %v, want %v", got, want)
		}
	}
	mustPanic(t, "Add", func() { Add(make([]float32, 3), make([]float32, 4)) })
	mustPanic(t, "Softmax", func() { Softmax(make([]float32, 4), make([]float32, 4), 3) })
	mustPanic(t, "AdamW", func() {
		AdamW(AdamWArgs{Step: 1}, make([]float32, 3), make([]float32, 2), make([]float32, 3), make([]float32, 3))
	})
}
