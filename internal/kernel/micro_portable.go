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
		rows:      portableRows,
		cols:      portableCols,
		lanes:     portableCols,
		byRows:    portableTiles(func(lda int) (rowStep, step int) { return lda, 1 }),
		byCols:    portableTiles(func(lda int) (rowStep, step int) { return 1, lda }),
		runScaled: runScaledPortable,
		hopper:    hopperRoutines{addHopperPortable, promoteHopperPortable},
		peak:      peakPortable,
	},
}

// portableTiles makes routines of the body below; steps says how far elements of A lie apart.
func portableTiles(steps func(lda int) (rowStep, step int)) *tiles {
	list := new(tiles)
	for rows := 1; rows <= portableRows; rows++ {
		list[rows][0] = func(k int, a *float32, lda int, b *float32, ldb int, c *float32, ldc int, alpha, beta float32, ahead uintptr, stride int) {
			rowStep, step := steps(lda)
			tilePortable(rows, k, a, rowStep, step, b, ldb, c, ldc, alpha, beta)
		}
	}
	return list
}

// tilePortable is a tile in plain Go: element (i,p) of A is a[rowStep*i+step*p].
func tilePortable(rows, k int, a *float32, rowStep, step int, b *float32, ldb int, c *float32, ldc int, alpha, beta float32) {
	var sum [portableRows][portableCols]float32
	// Two rows at a time: eight sums, four values of B and two of A are in use at once.
	for i := 0; i < rows; i += 2 {
		a0 := (*float32)(unsafe.Add(unsafe.Pointer(a), 4*i*rowStep))
		a1 := a0 // the last row of an odd number is computed twice
		if i+1 < rows {
			a1 = (*float32)(unsafe.Add(unsafe.Pointer(a0), 4*rowStep))
		}
		portablePair(&sum[i], &sum[i+1], k, a0, a1, step, (*[portableCols]float32)(unsafe.Pointer(b)), ldb)
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

// portablePair computes two rows of a tile. Pointers step through the operands because bounds checks would cost as much
// as the arithmetic; the last step is left out so that none ever points past its matrix.
func portablePair(r0, r1 *[portableCols]float32, k int, a0, a1 *float32, step int, b *[portableCols]float32, ldb int) {
	var s00, s01, s02, s03, s10, s11, s12, s13 float32
	for {
		x0, x1 := *a0, *a1
		b0, b1, b2, b3 := b[0], b[1], b[2], b[3]
		s00 += x0 * b0
		s01 += x0 * b1
		s02 += x0 * b2
		s03 += x0 * b3
		s10 += x1 * b0
		s11 += x1 * b1
		s12 += x1 * b2
		s13 += x1 * b3
		if k--; k == 0 {
			break
		}
		a0, a1 = (*float32)(unsafe.Add(unsafe.Pointer(a0), 4*step)), (*float32)(unsafe.Add(unsafe.Pointer(a1), 4*step))
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
