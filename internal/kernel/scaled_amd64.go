//go:build !purego

package kernel

// scaledTile is a routine for a tile of a scaled product, whose rows and columns are its own.
type scaledTile func(k int, a, b, c *float32, ldc int, rowScale, colScale *float32, accumulate bool)

// The routines by their rows, each for micro.cols and for micro.narrow columns.

var scaledTilesAVX512 = [...][2]scaledTile{
	1:  {scaled1x32AVX512, scaled1x16AVX512},
	2:  {scaled2x32AVX512, scaled2x16AVX512},
	3:  {scaled3x32AVX512, scaled3x16AVX512},
	4:  {scaled4x32AVX512, scaled4x16AVX512},
	5:  {scaled5x32AVX512, scaled5x16AVX512},
	6:  {scaled6x32AVX512, scaled6x16AVX512},
	7:  {scaled7x32AVX512, scaled7x16AVX512},
	8:  {scaled8x32AVX512, scaled8x16AVX512},
	9:  {scaled9x32AVX512, scaled9x16AVX512},
	10: {scaled10x32AVX512, scaled10x16AVX512},
	11: {scaled11x32AVX512, scaled11x16AVX512},
	12: {scaled12x32AVX512, scaled12x16AVX512},
	13: {scaled13x32AVX512, scaled13x16AVX512},
	14: {scaled14x32AVX512, scaled14x16AVX512},
}

var scaledTilesAVX2 = [...][2]scaledTile{
	1: {scaled1x16AVX2, scaled1x8AVX2},
	2: {scaled2x16AVX2, scaled2x8AVX2},
	3: {scaled3x16AVX2, scaled3x8AVX2},
	4: {scaled4x16AVX2, scaled4x8AVX2},
	5: {scaled5x16AVX2, scaled5x8AVX2},
	6: {scaled6x16AVX2, scaled6x8AVX2},
}

// runScaledAVX512 is micro.runScaled.
func runScaledAVX512(rows, cols, k int, a, b, c *float32, ldc int, rowScale, colScale *float32, accumulate bool) {
	narrow := 0
	if cols != 32 {
		narrow = 1
	}
	scaledTilesAVX512[rows][narrow](k, a, b, c, ldc, rowScale, colScale, accumulate)
}

// runScaledAVX2 is micro.runScaled.
func runScaledAVX2(rows, cols, k int, a, b, c *float32, ldc int, rowScale, colScale *float32, accumulate bool) {
	narrow := 0
	if cols != 16 {
		narrow = 1
	}
	scaledTilesAVX2[rows][narrow](k, a, b, c, ldc, rowScale, colScale, accumulate)
}
