package kernel

import "unsafe"

// The portable tile: small, so that its sums and operands stay in the 16 registers of the smallest targets.
const (
	portableRows = 4
	portableCols = 4
)

var portable = impl{
	name: "portable",
	micro: &micro{
		rows:  portableRows,
		cols:  portableCols,
		lanes: portableCols,
		run:   runPortable,
		peak:  peakPortable,
	},
}

// runPortable is micro.run in plain Go. A tile at the lower edge is computed whole and stored in part: the surplus rows
// of a panel hold whatever was there before.
func runPortable(rows, _, k int, a, b *float32, ldb int, c *float32, ldc int, alpha, beta float32) {
	var sum [portableRows][portableCols]float32
	// Two rows at a time: eight sums, four values of B and one of A are in use at once.
	for i := 0; i < rows; i += 2 {
		portablePair(&sum[i], &sum[i+1], k, (*[2]float32)(unsafe.Add(unsafe.Pointer(a), 4*i)), (*[portableCols]float32)(unsafe.Pointer(b)), ldb)
	}
	for i := range rows {
		row := unsafe.Slice((*float32)(unsafe.Add(unsafe.Pointer(c), 4*i*ldc)), portableCols)
		for j, s := range &sum[i] {
			if beta == 0 {
				row[j] = alpha * s
			} else {
				row[j] = alpha*s + beta*row[j]
			}
		}
	}
}

// portablePair computes two rows of a tile. Pointers step through the panels because bounds checks would cost as much as
// the arithmetic; the last step is left out so that none ever points past its panel.
func portablePair(r0, r1 *[portableCols]float32, k int, a *[2]float32, b *[portableCols]float32, ldb int) {
	var s00, s01, s02, s03, s10, s11, s12, s13 float32
	for {
		a0, a1 := a[0], a[1]
		b0, b1, b2, b3 := b[0], b[1], b[2], b[3]
		s00 += a0 * b0
		s01 += a0 * b1
		s02 += a0 * b2
		s03 += a0 * b3
		s10 += a1 * b0
		s11 += a1 * b1
		s12 += a1 * b2
		s13 += a1 * b3
		if k--; k == 0 {
			break
		}
		a = (*[2]float32)(unsafe.Add(unsafe.Pointer(a), 4*portableRows))
		b = (*[portableCols]float32)(unsafe.Add(unsafe.Pointer(b), 4*ldb))
	}
	*r0, *r1 = [portableCols]float32{s00, s01, s02, s03}, [portableCols]float32{s10, s11, s12, s13}
}

// peakPortable keeps ten chains of one multiplication and one addition going.
func peakPortable() int64 {
	const turns = 2000
	var s0, s1, s2, s3, s4, s5, s6, s7, s8, s9 float32
	x, y := peakOperand, peakOperand
	for range turns {
		s0 += x * y
		s1 += x * y
		s2 += x * y
		s3 += x * y
		s4 += x * y
		s5 += x * y
		s6 += x * y
		s7 += x * y
		s8 += x * y
		s9 += x * y
	}
	if s0+s1+s2+s3+s4+s5+s6+s7+s8+s9 != 0 {
		panic("kernel: a product of zeros is not zero")
	}
	return turns * 10 * 2
}

// peakOperand is a variable so that the compiler cannot work the loop out.
var peakOperand float32
