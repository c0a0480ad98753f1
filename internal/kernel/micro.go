package kernel

// Limits over all implementations, for scratch.
const (
	maxTileRows = 14
	maxTileCols = 32
	maxLanes    = 16
)

// micro describes the tile routine of an implementation.
type micro struct {
	rows, cols int // the largest tile: height of an A panel, width of a B panel
	narrow     int // the second width run knows, or 0
	lanes      int // rows that packing turns into columns at once; divides cols

	// run computes a tile of rows x cols values of C (rows <= micro.rows, cols is micro.cols or narrow):
	//
	//	sum[i][j] = 0; for p: sum[i][j] += a[micro.rows*p+i] * b[ldb*p+j]
	//	c[ldc*i+j] = alpha*sum[i][j] + beta*c[ldc*i+j]   (c is not read if beta is 0)
	//
	// The operations on one element, and their order, are the same for every rows and cols.
	run func(rows, cols, k int, a, b *float32, ldb int, c *float32, ldc int, alpha, beta float32)

	// runRows is run with rows of A read in place, a[lda*i+p] instead of a[micro.rows*p+i], and the same results to the
	// bit; nil where A is always packed.
	runRows func(rows, cols, k int, a *float32, lda int, b *float32, ldb int, c *float32, ldc int, alpha, beta float32)

	// transpose sets dst[lddst*p+i] = src[ldsrc*i+p] for 4*quads values of p and lanes values of i, column after column;
	// nil where plain Go does it.
	transpose func(dst *float32, lddst int, src *float32, ldsrc int, quads int)

	// copyRows copies rows of cols values (a whole number of vectors, at most micro.cols), in order; nil where plain Go
	// does it.
	copyRows func(cols int, dst *float32, lddst int, src *float32, ldsrc int, rows int)

	// peak runs independent multiply-adds on registers and returns their number of FLOPs, in well under 100 µs.
	peak func() int64
}

// fits reports whether run takes tiles of this width.
func (t *micro) fits(cols int) bool { return cols == t.cols || cols == t.narrow }
