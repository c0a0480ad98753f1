package kernel

import (
	"fmt"
	"testing"
)

// Group sizes around the height of a tile, of a cut of the contraction, and of a block.
var scaledGroupRows = [][]int{
	{0, 1, 127, 128, 129},
	{129, 0, 0, 3, 128},
	{300},
	{14, 15, 1, 0},
	{0, 0},
}

// checkScaledGrouped compares grouped products with float64 on the dequantised operands, and to the bit with one product
// per group.
func checkScaledGrouped(t *testing.T, r recipe, l Layout, rows []int, n, k int) {
	t.Helper()
	what := fmt.Sprintf("%s, layout %d, rows %v", r.name, l, rows)
	qa, qb := r.quants(l)
	total := 0
	for _, m := range rows {
		total += m
	}
	a, _, va := quantised(1, qa, total, k, nil)
	weights, values := make([]*PackedWeight, len(rows)), make([][]float64, len(rows))
	for e, m := range rows {
		if m == 0 {
			continue // not read
		}
		_, _, rb, cb := shapeOf(l, m, n, k)
		b, _, vb := quantised(uint64(2+e), qb, rb, cb, nil)
		weights[e], values[e] = new(PackedWeight), vb
		weights[e].Pack(l, b)
	}
	c, h := newGuarded(1, total*n, total*n, func() float32 { return 1 }), make([]float32, total*n)
	copy(c.data(), randomMat(9, total*n))
	old := c.clone()
	ScaledGroupedGemm(rows, a, weights, 1, c.data())
	c.check(t, what)
	Hopper{Promote: 128}.ScaledGroupedGemm(rows, a, weights, 0, h)
	at := 0
	for e, m := range rows {
		if m > 0 {
			part := rowsOf(a, at, at+m)
			was := make([]float64, m*n)
			one := old.data()[at*n : (at+m)*n]
			for i, v := range one {
				was[i] = float64(v)
			}
			want, magnitude := product64(l, m, n, k, va[at*k:(at+m)*k], values[e])
			got := c.data()[at*n:]
			checkSum(t, what, got, n, m, n, want, magnitude, was, k)
			ScaledGemmPacked(part, weights[e], 1, one, n)
			sameBits(t, fmt.Sprintf("%s, group %d", what, e), got[:m*n], one)
			Hopper{Promote: 128}.ScaledGemmPacked(part, weights[e], 0, one, n)
			sameBits(t, fmt.Sprintf("%s, group %d, hopper", what, e), h[at*n:(at+m)*n], one)
		}
		at += m
	}
}

func checkScaledGroupedTN(t *testing.T, r recipe, rows []int, m, n int) {
	t.Helper()
	what := fmt.Sprintf("%s, TN, rows %v", r.name, rows)
	total := 0
	for _, k := range rows {
		total += k
	}
	a, _, va := quantised(1, r.down, total, m, rows)
	b, _, vb := quantised(2, r.down, total, n, rows)
	grads, hoppers := make([][]float32, len(rows)), make([][]float32, len(rows))
	var guards []guarded
	for e := range rows {
		g := newGuarded(1, m*n, m*n, func() float32 { return 0 })
		copy(g.data(), randomMat(uint64(e), m*n))
		grads[e], hoppers[e], guards = g.data(), make([]float32, m*n), append(guards, g)
	}
	ScaledGroupedGemmTN(rows, a, b, grads)
	Hopper{Promote: 128}.ScaledGroupedGemmTN(rows, a, b, hoppers)
	at := 0
	for e, k := range rows {
		guards[e].check(t, what)
		one := randomMat(uint64(e), m*n)
		if k == 0 {
			sameBits(t, what+", without rows", grads[e], one)
			continue
		}
		was := make([]float64, m*n)
		for i, v := range one {
			was[i] = float64(v)
		}
		want, magnitude := product64(TN, m, n, k, va[at*m:(at+k)*m], vb[at*n:(at+k)*n])
		checkSum(t, what, grads[e], n, m, n, want, magnitude, was, k)
		ScaledGemm(TN, rowsOf(a, at, at+k), rowsOf(b, at, at+k), 1, one, n)
		sameBits(t, fmt.Sprintf("%s, group %d", what, e), grads[e], one)
		Hopper{Promote: 128}.ScaledGemm(TN, rowsOf(a, at, at+k), rowsOf(b, at, at+k), 0, one, n)
		sameBits(t, fmt.Sprintf("%s, group %d, hopper", what, e), hoppers[e], one)
		at += k
	}
}

func TestScaledGrouped(t *testing.T) {
	for _, threads := range []int{1, 3} {
		withThreads(t, threads)
		eachImpl(t, func(t *testing.T) {
			for i, rows := range scaledGroupRows {
				for j, r := range recipes {
					if i > 0 && i%len(recipes) != j && j > 0 {
						continue
					}
					checkScaledGrouped(t, r, NT, rows, 48, 96)
					checkScaledGrouped(t, r, NN, rows, 66, 160)
					checkScaledGroupedTN(t, r, rows, 50, 66)
				}
			}
		})
	}
}

// The rows of an expert do not change with the rows that other experts get.
func TestScaledGroupedRowsIndependent(t *testing.T) {
	const n, k, m = 40, 200, 5
	r := recipes[0]
	weights := make([]*PackedWeight, 3)
	for e := range weights {
		b, _, _ := quantised(uint64(e), r.weight, n, k, nil)
		weights[e] = new(PackedWeight)
		weights[e].Pack(NT, b)
	}
	x := randomMat(4, m*k)
	eachImpl(t, func(t *testing.T) {
		want := make([]float32, m*n)
		a, _ := store(r.along, x, m, k, nil)
		ScaledGroupedGemm([]int{0, m, 0}, a, weights, 0, want)
		for _, around := range [][2]int{{1, 0}, {0, 1}, {13, 29}, {127, 3}, {128, 129}} {
			rows := []int{around[0], m, around[1]}
			all := append(append(randomMat(5, around[0]*k), x...), randomMat(6, around[1]*k)...)
			a, _ := store(r.along, all, around[0]+m+around[1], k, rows)
			c := make([]float32, a.Rows*n)
			ScaledGroupedGemm(rows, a, weights, 0, c)
			sameBits(t, fmt.Sprint(around), c[around[0]*n:(around[0]+m)*n], want)
		}
	})
}

// Weights keep memory: one code per value and the scales, and none anew the next time.
func TestPackedWeightBytes(t *testing.T) {
	b, _, _ := quantised(1, recipes[0].weight, 256, 384, nil)
	var w PackedWeight
	w.Pack(NT, b)
	if got, limit := float64(w.Bytes()), 0.27*4*256*384; got > limit {
		t.Errorf("a packed weight of 256x384 takes %v bytes, of at most %v", got, limit)
	}
	// A smaller weight in the same memory, and another orientation.
	small, _, vs := quantised(2, recipes[1].weight, 33, 130, nil)
	a, _, va := quantised(3, recipes[1].along, 7, 33, nil)
	w.Pack(NN, small)
	c := make([]float32, 7*130)
	ScaledGemmPacked(a, &w, 0, c, 130)
	want, magnitude := product64(NN, 7, 130, 33, va, vs)
	checkSum(t, "packed again", c, 130, 7, 130, want, magnitude, nil, 33)
	if w.Bytes() != cap(w.panels)+4*cap(w.tiles.Scales) || cap(w.panels) != 256*384 {
		t.Errorf("packing a smaller weight changed the memory: %d bytes of panels", cap(w.panels))
	}
}

// A Hopper whose promotions are further apart than tiles multiplies scales in before; the sums stay good to some 12 bits of
// the largest summands.
func TestHopperFolds(t *testing.T) {
	const m, n, k = 6, 40, 300
	for _, r := range recipes {
		for _, l := range []Layout{NN, NT, TN} {
			qa, qb := r.quants(l)
			ra, ca, rb, cb := shapeOf(l, m, n, k)
			a, _, va := quantised(1, qa, ra, ca, nil)
			b, _, vb := quantised(2, qb, rb, cb, nil)
			want, magnitude := product64(l, m, n, k, va, vb)
			for _, promote := range []int{0, 32, 96, 128, 256} {
				c := make([]float32, m*n)
				for i := range c {
					c[i] = 2
				}
				Hopper{Promote: promote}.ScaledGemm(l, a, b, 1, c, n)
				for i, v := range want {
					if diff := float64(c[i]) - 2 - v; !(diff*diff <= (magnitude[i]*0x1p-9+0x1p-20)*(magnitude[i]*0x1p-9+0x1p-20)) {
						t.Fatalf("%s, layout %d, promotion every %d: C[%d] = %v, want %v", r.name, l, promote, i, c[i]-2, v)
					}
				}
			}
		}
	}
}

func FuzzScaledGrouped(f *testing.F) {
	f.Add(uint8(0), uint8(0), []byte{0, 1, 127, 128, 129}, uint8(33), uint8(40))
	f.Add(uint8(1), uint8(1), []byte{14, 0, 0, 15, 1}, uint8(16), uint8(1))
	f.Add(uint8(5), uint8(2), []byte{5, 200}, uint8(47), uint8(200))
	f.Fuzz(func(t *testing.T, r, layout uint8, groupRows []byte, n, k uint8) {
		rows := make([]int, min(len(groupRows), 6))
		for e := range rows {
			rows[e] = int(groupRows[e])
		}
		q := recipes[int(r)%len(recipes)]
		for _, name := range Impls() {
			restore, _ := Use(name)
			if layout%3 == uint8(TN) {
				checkScaledGroupedTN(t, q, rows, int(n)+1, int(k)+1)
			} else {
				checkScaledGrouped(t, q, Layout(layout%3), rows, int(n)+1, int(k)+1)
			}
			restore()
		}
	})
}
