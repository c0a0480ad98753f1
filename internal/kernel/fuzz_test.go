package kernel

import (
	"math/rand/v2"
	"testing"
)

// FuzzGemm compares every implementation with the specification on shapes, strides and scalars of the fuzzer's choice.
func FuzzGemm(f *testing.F) {
	f.Add(uint64(1), uint8(0), uint16(14), uint16(32), uint16(256), uint8(0), uint8(0), uint8(0), uint8(0))
	f.Add(uint64(2), uint8(1), uint16(29), uint16(17), uint16(259), uint8(3), uint8(1), uint8(2), uint8(3))
	f.Add(uint64(3), uint8(2), uint16(1), uint16(48), uint16(5), uint8(1), uint8(7), uint8(0), uint8(9))
	f.Add(uint64(4), uint8(1), uint16(260), uint16(3), uint16(0), uint8(2), uint8(0), uint8(0), uint8(1))
	f.Fuzz(func(t *testing.T, seed uint64, layout uint8, m, n, k uint16, scalar, padA, padB, padC uint8) {
		s := scalars[int(scalar)%len(scalars)]
		g := newGemmCase(rand.New(rand.NewPCG(seed, 0)), Layout(layout%3), int(m%300), int(n%200), int(k%600), s[0], s[1],
			int(padA), int(padB), int(padC))
		for _, name := range Impls() {
			restore, _ := Use(name)
			g.verify(t)
			restore()
		}
	})
}

// FuzzGrouped checks that groups are the separate products, to the bit.
func FuzzGrouped(f *testing.F) {
	f.Add(uint64(1), uint8(0), []byte{0, 1, 3, 250}, uint8(33), uint8(40))
	f.Add(uint64(2), uint8(1), []byte{14, 0, 0, 15, 1}, uint8(16), uint8(1))
	f.Add(uint64(3), uint8(2), []byte{5, 200}, uint8(47), uint8(30))
	f.Fuzz(func(t *testing.T, seed uint64, layout uint8, groupRows []byte, n, k uint8) {
		rows := make([]int, min(len(groupRows), 12))
		for e := range rows {
			rows[e] = int(groupRows[e])
		}
		checkGrouped(t, seed, Layout(layout%3), rows, int(n)+1, int(k)+1)
	})
}
