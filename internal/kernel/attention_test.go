package kernel

import (
	"fmt"
	"math"
	"math/rand/v2"
	"runtime"
	"testing"
)

// naiveAttention is attention in float64 with whole matrices; operands are dense rows.
type naiveAttention struct {
	T, DQ, DV  int
	scale      float64
	q, k, v, o []float64
	lse        []float64
}

func (a *naiveAttention) probabilities(t int) []float64 {
	p := make([]float64, t+1)
	top, sum := math.Inf(-1), 0.0
	for s := range p {
		for d := range a.DQ {
			p[s] += a.scale * a.q[t*a.DQ+d] * a.k[s*a.DQ+d]
		}
		top = max(top, p[s])
	}
	for s := range p {
		p[s] = math.Exp(p[s] - top)
		sum += p[s]
	}
	for s := range p {
		p[s] /= sum
	}
	a.lse[t] = top + math.Log(sum)
	return p
}

func (a *naiveAttention) forward() {
	for t := range a.T {
		a.row(t)
	}
}

// row computes row t of o, and its log-sum-exp.
func (a *naiveAttention) row(t int) {
	o := a.o[t*a.DV : (t+1)*a.DV]
	clear(o)
	for s, p := range a.probabilities(t) {
		for d := range o {
			o[d] += p * a.v[s*a.DV+d]
		}
	}
}

// backward is the derivative of the softmax written out: dS[s] = sum over r of dP[r]*P[r]*(delta_rs - P[s]).
func (a *naiveAttention) backward(dO []float64) (dQ, dK, dV []float64) {
	dQ, dK, dV = make([]float64, a.T*a.DQ), make([]float64, a.T*a.DQ), make([]float64, a.T*a.DV)
	for t := range a.T {
		p := a.probabilities(t)
		dP := make([]float64, len(p))
		for s := range p {
			for d := range a.DV {
				dP[s] += dO[t*a.DV+d] * a.v[s*a.DV+d]
				dV[s*a.DV+d] += p[s] * dO[t*a.DV+d]
			}
		}
		for s := range p {
			var dS float64
			for r := range p {
				delta := 0.0
				if r == s {
					delta = 1
				}
				dS += dP[r] * p[r] * (delta - p[s])
			}
			for d := range a.DQ {
				dQ[t*a.DQ+d] += a.scale * dS * a.k[s*a.DQ+d]
				dK[s*a.DQ+d] += a.scale * dS * a.q[t*a.DQ+d]
			}
		}
	}
	return dQ, dK, dV
}

// attentionCase holds operands in guarded buffers with strides of their own.
type attentionCase struct {
	T, DQ, DV  int
	q, k, v, o guarded
	lse        guarded
	scale      float32
}

func newAttentionCase(seed uint64, T, DQ, DV, pad int) attentionCase {
	r := rand.New(rand.NewPCG(seed, 5))
	normal := func() float32 { return float32(r.NormFloat64()) }
	nan := func() float32 { return float32(math.NaN()) }
	return attentionCase{T: T, DQ: DQ, DV: DV, scale: float32(1 / math.Sqrt(float64(DQ))),
		q: newGuarded(T, DQ, DQ+pad, normal), k: newGuarded(T, DQ, DQ+2*pad, normal), v: newGuarded(T, DV, DV+3*pad, normal),
		o: newGuarded(T, DV, DV+pad, nan), lse: newGuarded(1, T, T, nan)}
}

func (c attentionCase) attention() *Attention {
	return &Attention{T: c.T, DQ: c.DQ, DV: c.DV, Scale: c.scale, Q: c.q.data(), K: c.k.data(), V: c.v.data(), O: c.o.data(),
		LDQ: c.q.ld, LDK: c.k.ld, LDV: c.v.ld, LDO: c.o.ld, LSE: c.lse.data()}
}

func dense64(g guarded) []float64 {
	x := make([]float64, 0, g.rows*g.cols)
	for i := range g.rows {
		for _, v := range g.data()[i*g.ld : i*g.ld+g.cols] {
			x = append(x, float64(v))
		}
	}
	return x
}

// reference returns the case in float64, nothing computed yet.
func (c attentionCase) reference() *naiveAttention {
	return &naiveAttention{T: c.T, DQ: c.DQ, DV: c.DV, scale: float64(c.scale), q: dense64(c.q), k: dense64(c.k), v: dense64(c.v),
		o: make([]float64, c.T*c.DV), lse: make([]float64, c.T)}
}

func (c attentionCase) naive() *naiveAttention {
	a := c.reference()
	a.forward()
	return a
}

// near compares with a tolerance relative to the norm of the wanted values per value.
func near(t *testing.T, name string, got, want []float64, tolerance float64) {
	t.Helper()
	var norm float64
	for _, v := range want {
		norm += v * v
	}
	scale := math.Sqrt(norm/float64(max(len(want), 1))) + 1e-6
	for i := range want {
		if diff := math.Abs(got[i] - want[i]); !(diff <= tolerance*max(scale, math.Abs(want[i]))) {
			t.Fatalf("%s: value %d is %v, want %v (scale %v)", name, i, got[i], want[i], scale)
		}
	}
}

var attentionShapes = [][3]int{{1, 4, 3}, {2, 5, 8}, {63, 16, 16}, {64, 48, 32}, {65, 24, 40}, {130, 48, 32}, {200, 7, 33},
	{attentionRows + 1, 16, 48}, {attentionKeys, 30, 65}, {2*attentionKeys + 20, 20, 12}}

func TestAttentionForward(t *testing.T) {
	eachImpl(t, func(t *testing.T) {
		for _, s := range attentionShapes {
			c := newAttentionCase(uint64(s[0]), s[0], s[1], s[2], 3)
			c.attention().Forward()
			want := c.naive()
			name := fmt.Sprintf("T %d DQ %d DV %d", s[0], s[1], s[2])
			near(t, name+" O", dense64(c.o), want.o, 2e-6)
			near(t, name+" LSE", dense64(c.lse), want.lse, 2e-6)
			for _, g := range []guarded{c.q, c.k, c.v, c.o, c.lse} {
				g.check(t, name)
			}
		}
	})
}

func TestAttentionBackward(t *testing.T) {
	eachImpl(t, func(t *testing.T) {
		for _, s := range attentionShapes {
			T, DQ, DV := s[0], s[1], s[2]
			c := newAttentionCase(uint64(T), T, DQ, DV, 2)
			a := c.attention()
			a.Forward()
			r := rand.New(rand.NewPCG(9, uint64(T)))
			normal := func() float32 { return float32(r.NormFloat64()) }
			nan := func() float32 { return float32(math.NaN()) }
			dO, dQ := newGuarded(T, DV, DV+1, normal), newGuarded(T, DQ, DQ+2, nan)
			dK, dV := newGuarded(T, DQ, DQ+3, normal), newGuarded(T, DV, DV+4, normal)
			wantQ, wantK, wantV := c.naive().backward(dense64(dO))
			for i, v := range dense64(dK) { // the backward adds to what stood there
				wantK[i] += v
			}
			for i, v := range dense64(dV) {
				wantV[i] += v
			}
			a.Backward(dO.data(), dO.ld, dQ.data(), dQ.ld, dK.data(), dK.ld, dV.data(), dV.ld)
			name := fmt.Sprintf("T %d DQ %d DV %d", T, DQ, DV)
			near(t, name+" dQ", dense64(dQ), wantQ, 1e-5)
			near(t, name+" dK", dense64(dK), wantK, 1e-5)
			near(t, name+" dV", dense64(dV), wantV, 1e-5)
			for _, g := range []guarded{c.q, c.k, c.v, c.o, c.lse, dO, dQ, dK, dV} {
				g.check(t, name)
			}
		}
	})
}

// The float64 backward above against finite differences of the float64 forward, and the kernel against both: a mistake
// in the written-out derivative would otherwise stand unnoticed in two places.
func TestAttentionFiniteDifferences(t *testing.T) {
	const T, DQ, DV, h = 9, 5, 4, 1e-5
	c := newAttentionCase(77, T, DQ, DV, 0)
	n := c.naive()
	dO := make([]float64, T*DV)
	for i := range dO {
		dO[i] = math.Sin(float64(3*i + 1))
	}
	loss := func() float64 {
		n.forward()
		var sum float64
		for i, v := range n.o {
			sum += v * dO[i]
		}
		return sum
	}
	dQ, dK, dV := n.backward(dO)
	for _, x := range []struct {
		name       string
		value, got []float64
	}{{"dQ", n.q, dQ}, {"dK", n.k, dK}, {"dV", n.v, dV}} {
		want := make([]float64, len(x.value))
		for i := range x.value {
			old := x.value[i]
			x.value[i] = old + h
			up := loss()
			x.value[i] = old - h
			want[i] = (up - loss()) / (2 * h)
			x.value[i] = old
		}
		near(t, x.name, x.got, want, 1e-7)
	}
	dO32 := make([]float32, len(dO))
	for i, v := range dO {
		dO32[i] = float32(v)
	}
	a := c.attention()
	a.Forward()
	gQ, gK, gV := newGuarded(T, DQ, DQ, func() float32 { return 0 }), newGuarded(T, DQ, DQ, func() float32 { return 0 }), newGuarded(T, DV, DV, func() float32 { return 0 })
	a.Backward(dO32, DV, gQ.data(), DQ, gK.data(), DQ, gV.data(), DV)
	near(t, "kernel dQ", dense64(gQ), dQ, 1e-5)
	near(t, "kernel dK", dense64(gK), dK, 1e-5)
	near(t, "kernel dV", dense64(gV), dV, 1e-5)
}

// Row t of the output, and its log-sum-exp, have the same bits whether the segment ends at t or later, and whatever
// stands in later rows. dQ likewise.
func TestAttentionRowsCausal(t *testing.T) {
	const T, DQ, DV = attentionKeys + attentionRows + 9, 24, 40
	eachImpl(t, func(t *testing.T) {
		whole := newAttentionCase(5, T, DQ, DV, 0)
		whole.attention().Forward()
		dO := randomMat(8, T*DV)
		dQ, dK, dV := make([]float32, T*DQ), make([]float32, T*DQ), make([]float32, T*DV)
		whole.attention().Backward(dO, DV, dQ, DQ, dK, DQ, dV, DV)
		for _, n := range []int{1, 2, 5, 17, 63, 64, 65, attentionRows - 1, attentionRows, attentionRows + 1, 128, attentionKeys - 1, attentionKeys, attentionKeys + 1, 240} {
			part := newAttentionCase(5, T, DQ, DV, 0)
			a := part.attention()
			a.T = n
			for i := n * DQ; i < T*DQ; i++ {
				a.Q[i], a.K[i] = float32(math.NaN()), float32(math.NaN())
			}
			a.Forward()
			sameBits(t, fmt.Sprintf("O of %d rows", n), a.O[:n*DV], whole.o.data()[:n*DV])
			sameBits(t, fmt.Sprintf("LSE of %d rows", n), a.LSE[:n], whole.lse.data()[:n])
			gotQ := make([]float32, T*DQ)
			a.Backward(dO, DV, gotQ, DQ, dK, DQ, dV, DV)
			sameBits(t, fmt.Sprintf("dQ of %d rows", n), gotQ[:n*DQ], dQ[:n*DQ])
		}
		changed := newAttentionCase(5, T, DQ, DV, 0)
		for i := 70; i < T; i++ {
			for d := range DQ {
				changed.k.data()[i*DQ+d] = 1000
			}
			changed.v.data()[i*DV] = -1e30
		}
		changed.attention().Forward()
		sameBits(t, "O before changed rows", changed.o.data()[:70*DV], whole.o.data()[:70*DV])
	})
}

// Scores far outside the range of exp must not overflow.
func TestAttentionLargeScores(t *testing.T) {
	eachImpl(t, func(t *testing.T) {
		c := newAttentionCase(6, 70, 8, 8, 0)
		Scale(c.q.data(), 300)
		c.attention().Forward()
		near(t, "O", dense64(c.o), c.naive().o, 1e-3) // scores of some thousands carry errors of 1e-4
	})
}

func TestAttentionAllocatesNothing(t *testing.T) {
	const T, DQ, DV = 150, 48, 32
	c := newAttentionCase(1, T, DQ, DV, 0)
	a := c.attention()
	dO, dQ, dK, dV := randomMat(2, T*DV), make([]float32, T*DQ), make([]float32, T*DQ), make([]float32, T*DV)
	eachImpl(t, func(t *testing.T) {
		if got := testing.AllocsPerRun(30, func() {
			a.Forward()
			a.Backward(dO, DV, dQ, DQ, dK, DQ, dV, DV)
		}); got != 0 {
			t.Errorf("%v allocations", got)
		}
	})
}

func TestAttentionEmpty(t *testing.T) {
	a := Attention{DQ: 4, DV: 4, LDQ: 4, LDK: 4, LDV: 4, LDO: 4}
	a.Forward()
	a.Backward(nil, 4, nil, 4, nil, 4, nil, 4)
	short := Attention{T: 2, DQ: 4, DV: 4, LDQ: 4, LDK: 4, LDV: 4, LDO: 4, Q: make([]float32, 7), K: make([]float32, 8),
		V: make([]float32, 8), O: make([]float32, 8), LSE: make([]float32, 2)}
	mustPanic(t, "short Q", short.Forward)
}

// A segment of 8,192 rows works in memory linear in its length, and its late rows are right.
func TestAttentionLong(t *testing.T) {
	const DQ, DV = 24, 16
	whole := newAttentionCase(12, 8192, DQ, DV, 0)
	run := func(T int) uint64 {
		a := whole.attention()
		a.T = T
		dO, dQ, dK, dV := randomMat(2, T*DV), make([]float32, T*DQ), make([]float32, T*DQ), make([]float32, T*DV)
		scratches.Lock()
		kept := scratches.free
		scratches.free = [64][]*scratch{}
		scratches.Unlock()
		var before, after runtime.MemStats
		runtime.ReadMemStats(&before)
		a.Forward()
		a.Backward(dO, DV, dQ, DQ, dK, DQ, dV, DV)
		runtime.ReadMemStats(&after)
		scratches.Lock()
		scratches.free = kept
		scratches.Unlock()
		return after.TotalAlloc - before.TotalAlloc
	}
	new(Attention).Forward() // the packing buffers, if no other test was first
	half, all := run(4096), run(8192)
	t.Logf("%d KiB for 4,096 rows, %d KiB for 8,192", half>>10, all>>10)
	if all > 2*half {
		t.Errorf("%d bytes for 8,192 rows, %d for half of them", all, half)
	}
	if want := uint64(AttentionScratch(8192, DQ, DV)); all < want || all > want+want/10 {
		t.Errorf("%d bytes, AttentionScratch says %d", all, want)
	}
	want, o, lse := whole.reference(), dense64(whole.o), dense64(whole.lse)
	for _, r := range []int{4095, 4096, 8000, 8191} {
		want.row(r)
		near(t, fmt.Sprintf("row %d of O", r), o[r*DV:(r+1)*DV], want.o[r*DV:(r+1)*DV], 1e-5)
		near(t, fmt.Sprintf("LSE of row %d", r), lse[r:r+1], want.lse[r:r+1], 1e-6)
	}
}
