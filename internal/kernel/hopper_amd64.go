//go:build !purego

package kernel

// addHopperAVX512 is hopperRoutines.add: a whole tile at once, or row by row. What the assembly refuses plain Go does.
func addHopperAVX512(rows, cols, k int, a, b, sums *float32) {
	if rows == hopperRows {
		if !hopper4x32AVX512(k, a, b, sums) {
			addHopperPortable(rows, cols, k, a, b, sums)
		}
		return
	}
	for i := range rows {
		a, sums := down(a, i*scaledDepth), down(sums, i*scaledWidth)
		if !hopper1x32AVX512(k, a, b, sums) {
			addHopperPortable(1, cols, k, a, b, sums)
		}
	}
}

// addHopperAVX2 is addHopperAVX512 for eight columns at a time.
func addHopperAVX2(rows, cols, k int, a, b, sums *float32) {
	for from := 0; from < cols; from += int(lanes8) {
		cols, b, sums := min(int(lanes8), cols-from), down(b, from), down(sums, from)
		if rows == hopperRows {
			if !hopper4x8AVX2(k, a, b, sums) {
				addHopperPortable(rows, cols, k, a, b, sums)
			}
			continue
		}
		for i := range rows {
			a, sums := down(a, i*scaledDepth), down(sums, i*scaledWidth)
			if !hopper1x8AVX2(k, a, b, sums) {
				addHopperPortable(1, cols, k, a, b, sums)
			}
		}
	}
}

func promoteHopperAVX512(rows, cols int, sums, c *float32, ldc int, rowScale, colScale *float32) {
	if cols < scaledWidth {
		promoteHopperPortable(rows, cols, sums, c, ldc, rowScale, colScale)
		return
	}
	hopperPromoteAVX512(rows, sums, c, ldc, rowScale, colScale)
}

func promoteHopperAVX2(rows, cols int, sums, c *float32, ldc int, rowScale, colScale *float32) {
	if cols < scaledWidth {
		promoteHopperPortable(rows, cols, sums, c, ldc, rowScale, colScale)
		return
	}
	hopperPromoteAVX2(rows, sums, c, ldc, rowScale, colScale)
}
