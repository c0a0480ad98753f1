package kernel

// Limits over all implementations, for scratch.
const (
	maxTileRows = 14
	maxTileCols = 32
	maxLanes    = 16
)

// tile is a routine for a tile of C whose rows and columns are its own, given k, A, B, C, alpha and beta. Where it
// can it also asks for memory: 128 bytes at ahead every four steps, and then stride values further on.
type tile func(k int, a *float32, lda int, b *float32, ldb int, c *float32, ldc int, alpha, beta float32, ahead uintptr, stride int)

// tiles has the routines of a form by their rows, each for micro.cols and for micro.narrow columns.
type tiles [maxTileRows + 1][2]tile

// micro describes the tile routines of an implementation.
type micro struct {
	rows, cols int // the largest tile
	narrow     int // the second width, or 0
	lanes      int // rows that packing turns into columns at once; divides cols

	// A routine of byRows for rows x cols values of C does
	//
	//	sum[i][j] = 0; for p: sum[i][j] += a[lda*i+p] * b[ldb*p+j]
	//	c[ldc*i+j] = alpha*sum[i][j] + beta*c[ldc*i+j]   (c is not read if beta is 0)
	//
	// One of byCols reads columns of A, a[lda*p+i], instead of rows. The operations on one element, and their order, are
	// the same for all of them.
	byRows, byCols *tiles

	// runScaled computes a tile of a scaled product from k <= scaledDepth steps; the strides of A and B are constants:
	//
	//	sum[i][j] = 0; for p: sum[i][j] += a[scaledDepth*i+p] * b[scaledWidth*p+j]
	//	sum[i][j] *= rowScale[i]
	//	c[ldc*i+j] = sum[i][j]*colScale[j], added to c[ldc*i+j] if accumulate is set
	runScaled func(rows, cols, k int, a, b, c *float32, ldc int, rowScale, colScale *float32, accumulate bool)

	// hopper are the routines of sums as tensor cores make them.
	hopper hopperRoutines

	// prefetch asks for cache lines from p on, at least one; nil where nothing can.
	prefetch func(p *byte, lines int)

	// transpose sets dst[lddst*p+i] = src[ldsrc*i+p] for 4*quads values of p and lanes values of i, column after column;
	// nil where plain Go does it.
	transpose func(dst *float32, lddst int, src *float32, ldsrc int, quads int)

	// copyRows copies rows of cols values (a whole number of vectors, at most micro.cols), in order; nil where plain Go
	// does it.
	copyRows func(cols int, dst *float32, lddst int, src *float32, ldsrc int, rows int)

	// peak runs independent multiply-adds on registers and returns their number of FLOPs, in well under 100 µs.
	peak func() int64
}

// fits reports whether there are tiles of this width.
func (t *micro) fits(cols int) bool { return cols == t.cols || cols == t.narrow }

// tile returns the routine of a form for tiles of rows x cols values; cols must fit.
func (t *micro) tile(form *tiles, rows, cols int) tile {
	if cols == t.cols {
		return form[rows][0]
	}
	return form[rows][1]
}
