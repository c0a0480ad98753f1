package kernel

import "unsafe"

// runScaledPortable is micro.runScaled in plain Go.
func runScaledPortable(rows, _, k int, a, b, c *float32, ldc int, rowScale, colScale *float32, accumulate bool) {
	scales := unsafe.Slice(rowScale, rows)
	cols := (*[portableCols]float32)(unsafe.Pointer(colScale))
	line := func(i int) []float32 {
		return unsafe.Slice((*float32)(unsafe.Add(unsafe.Pointer(a), 4*i*scaledDepth)), k)
	}
	var sums [portableRows][portableCols]float32
	for i := 0; i < rows; i += 2 {
		// Two rows at a time, as in portablePair; an odd last row is computed twice.
		scaledPair(&sums[i], &sums[i+1], line(i), line(min(i+1, rows-1)), (*[portableCols]float32)(unsafe.Pointer(b)))
	}
	for i, r := range scales {
		row := (*[portableCols]float32)(unsafe.Add(unsafe.Pointer(c), 4*i*ldc))
		for j, s := range &sums[i] {
			// The conversions forbid fusing.
			s = float32(float32(s*r) * cols[j])
			if accumulate {
				s += row[j]
			}
			row[j] = s
		}
	}
}

// scaledPair computes two rows of a tile. A pointer steps through the panel, as in portablePair.
func scaledPair(r0, r1 *[portableCols]float32, a0, a1 []float32, b *[portableCols]float32) {
	var s00, s01, s02, s03, s10, s11, s12, s13 float32
	a1 = a1[:len(a0)]
	last := len(a0) - 1
	for p, v := range a0 {
		w := a1[p]
		b0, b1, b2, b3 := b[0], b[1], b[2], b[3]
		s00 += v * b0
		s01 += v * b1
		s02 += v * b2
		s03 += v * b3
		s10 += w * b0
		s11 += w * b1
		s12 += w * b2
		s13 += w * b3
		if p < last {
			b = (*[portableCols]float32)(unsafe.Add(unsafe.Pointer(b), 4*scaledWidth))
		}
	}
	*r0, *r1 = [portableCols]float32{s00, s01, s02, s03}, [portableCols]float32{s10, s11, s12, s13}
}
