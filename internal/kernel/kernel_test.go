package kernel

import (
	"fmt"
	"math"
	"math/rand/v2"
	"testing"
)

// guardSize is the number of NaN values before and after a guarded buffer.
const guardSize = 40

// guardBits is a NaN that no arithmetic produces, so a written guard shows even when NaN was written.
const guardBits = 0x7FC0BEEF

// randomMat returns n values of a standard normal distribution.
func randomMat(seed uint64, n int) []float32 {
	r := rand.New(rand.NewPCG(seed, 7))
	x := make([]float32, n)
	for i := range x {
		x[i] = float32(r.NormFloat64())
	}
	return x
}

// guarded is a matrix with leading dimension ld inside a buffer whose every other value is a marked NaN: a routine that
// reads a guard spoils its result, one that writes a guard is found by check.
type guarded struct {
	buf            []float32
	rows, cols, ld int
}

func newGuarded(rows, cols, ld int, fill func() float32) guarded {
	g := guarded{buf: make([]float32, 2*guardSize+rows*ld), rows: rows, cols: cols, ld: ld}
	for i := range g.buf {
		g.buf[i] = math.Float32frombits(guardBits)
	}
	for i := range rows {
		for j := range cols {
			g.data()[i*ld+j] = fill()
		}
	}
	return g
}

func (g guarded) data() []float32 { return g.buf[guardSize : len(g.buf)-guardSize] }

func (g guarded) clone() guarded {
	g.buf = append([]float32(nil), g.buf...)
	return g
}

func (g guarded) check(t *testing.T, name string) {
	t.Helper()
	for i, v := range g.buf {
		at := i - guardSize
		if at >= 0 && at < g.rows*g.ld && at%g.ld < g.cols {
			continue
		}
		if math.Float32bits(v) != guardBits {
			t.Fatalf("%s: guard value %d was overwritten with %v", name, at, v)
		}
	}
}

// eachImpl runs a test once per implementation.
func eachImpl(t *testing.T, f func(t *testing.T)) {
	for _, name := range Impls() {
		t.Run(name, func(t *testing.T) {
			restore, ok := Use(name)
			if !ok {
				t.Fatalf("Use(%q) refused a name that Impls returned", name)
			}
			defer restore()
			f(t)
		})
	}
}

// withThreads sets the number of threads for one test.
func withThreads(t *testing.T, n int) {
	before := Threads()
	SetThreads(n)
	t.Cleanup(func() { SetThreads(before) })
}

func sameBits(t *testing.T, name string, got, want []float32) {
	t.Helper()
	if len(got) != len(want) {
		t.Fatalf("%s: %d values, want %d", name, len(got), len(want))
	}
	for i := range got {
		if math.Float32bits(got[i]) != math.Float32bits(want[i]) {
			t.Fatalf("%s: value %d is %v (%08x), want %v (%08x)", name, i,
				got[i], math.Float32bits(got[i]), want[i], math.Float32bits(want[i]))
		}
	}
}

func mustPanic(t *testing.T, name string, f func()) {
	t.Helper()
	defer func() {
		if recover() == nil {
			t.Errorf("%s: no panic", name)
		}
	}()
	f()
}

func TestUse(t *testing.T) {
	if got := Active(); got != Impls()[0] {
		t.Errorf("Active() = %q before any Use, want the best, %q", got, Impls()[0])
	}
	if last := Impls()[len(Impls())-1]; last != "portable" {
		t.Errorf("last implementation is %q, want portable", last)
	}
	before := Active()
	restore, ok := Use("portable")
	if !ok || Active() != "portable" {
		t.Errorf("Use(portable): ok %v, Active %q", ok, Active())
	}
	restore()
	if Active() != before {
		t.Errorf("restore left %q, want %q", Active(), before)
	}
	if _, ok := Use("sse9"); ok || Active() != before {
		t.Errorf("Use of an unknown name: ok %v, Active %q", ok, Active())
	}
}

func TestPeak(t *testing.T) {
	eachImpl(t, func(t *testing.T) {
		for _, threads := range []int{0, 1, 2} {
			if p := PeakGFLOPS(threads, 5); p <= 0 || math.IsInf(p, 0) || math.IsNaN(p) {
				t.Errorf("PeakGFLOPS(%d, 5) = %v", threads, p)
			}
		}
	})
}

func TestFlops(t *testing.T) {
	count := func(f func()) int64 {
		before := Flops()
		f()
		return Flops() - before
	}
	x := make([]float32, 100*100)
	if got := count(func() { Gemm(NN, 3, 5, 7, 1, x, 7, x, 5, 0, x[5000:], 5) }); got != 2*3*5*7 {
		t.Errorf("Gemm counts %d", got)
	}
	w := [][]float32{x, x, x}
	if got := count(func() { GroupedGemm(NT, []int{2, 0, 5}, 4, 6, x, w, 0, x[5000:]) }); got != 2*7*4*6 {
		t.Errorf("GroupedGemm counts %d", got)
	}
	c := [][]float32{x[5000:], x[6000:], x[7000:]}
	if got := count(func() { GroupedGemmTN([]int{2, 0, 5}, 4, 6, x, x, c) }); got != 2*7*4*6 {
		t.Errorf("GroupedGemmTN counts %d", got)
	}
	// Pairs that are not masked: a score and its product with V.
	a := Attention{T: 10, DQ: 6, DV: 4, Scale: 1, Q: x, K: x, V: x, LDQ: 6, LDK: 6, LDV: 4, O: x[5000:], LDO: 4, LSE: x[7000:]}
	if got := count(a.Forward); got != 2*55*(6+4) {
		t.Errorf("Attention.Forward counts %d", got)
	}
}

func ExampleGemm() {
	a := []float32{1, 2, 3, 4} // 2 x 2
	w := []float32{10, 20}     // one output, two inputs: as a linear layer stores its weight
	y := make([]float32, 2)
	Gemm(NT, 2, 1, 2, 1, a, 2, w, 2, 0, y, 1)
	fmt.Println(y)
	// Output: [50 110]
}
