package kernel

import "sync"

// workspace is the packing scratch of one running product.
//
// A block of A is stored as it lies in A, with other distances of its rows. A block of B is stored as panels of micro.cols
// columns, row after row: b[panel][p][j]. A panel that the matrix does not fill keeps its size; its surplus columns are zero.
type workspace struct {
	a        []float32
	panels   panels
	ahead    ahead
	edgeTile []float32 // a tile of C at the right edge
	edge     []float32 // rows that do not fill a vector, copied next to zero rows for the transposing copy
}

var workspaces struct {
	sync.Mutex
	free []*workspace
}

func borrowWorkspace() *workspace {
	workspaces.Lock()
	if last := len(workspaces.free) - 1; last >= 0 {
		w := workspaces.free[last]
		workspaces.free = workspaces.free[:last]
		workspaces.Unlock()
		return w
	}
	workspaces.Unlock()
	return &workspace{
		a:        make([]float32, maxBlockA),
		panels:   panels{values: make([]float32, blockB)},
		edgeTile: make([]float32, maxTileRows*maxTileCols),
		edge:     make([]float32, maxLanes*blockK),
	}
}

func (w *workspace) giveBack() {
	workspaces.Lock()
	workspaces.free = append(workspaces.free, w)
	workspaces.Unlock()
}

// rowGap is what rows of A are copied apart beyond their length, in values: a cache line, so that they do not lie in the same sets
// of the first level again.
const rowGap = 16

// maxBlockA is the most values of the copy of a block of A, which may have half as many rows again as fit blockA.
const maxBlockA = blockA*3/2 + rowGap*blockDepth

// packA copies rows i0..i1 of op(A), columns k0..k1, as they lie, and returns how far the rows of the copy lie apart.
func (w *workspace) packA(p *product, k0, k1, i0, i1 int) ([]float32, int) {
	if p.layout == TN {
		k0, k1, i0, i1 = i0, i1, k0, k1
	}
	ld := k1 - k0 + rowGap
	for i := i0; i < i1; i++ {
		copy(w.a[(i-i0)*ld:], p.a[i*p.lda+k0:i*p.lda+k1])
	}
	return w.a, ld
}

// packB copies columns j0..j1 of op(B), rows k0..k1, into panels.
func (w *workspace) packB(t *micro, p *product, dst []float32, k0, k1, j0, j1 int) {
	if p.layout == NT {
		w.packTransposed(t, dst, p.b[j0*p.ldb+k0:], p.ldb, j1-j0, p.n-j0, k1-k0)
	} else {
		packColumns(t, dst, p.b[k0*p.ldb+j0:], p.ldb, j1-j0, k1-k0)
	}
}

// packColumns copies cols columns of depth rows of src into panels of a B block.
func packColumns(t *micro, dst, src []float32, ld, cols, depth int) {
	clearSurplus(t, dst, cols, depth)
	for j := 0; j < cols; j += t.cols {
		copyPanel(t, dst[j*depth:], src[j:], ld, min(t.cols, cols-j), depth)
	}
}

// packTransposed copies rows rows of src, depth values each, into the columns of panels of a B block. have is the number
// of rows the source really has, at least rows.
func (w *workspace) packTransposed(t *micro, dst, src []float32, ld, rows, have, depth int) {
	clearSurplus(t, dst, rows, depth)
	for from := 0; from < depth; from += blockK {
		part := min(blockK, depth-from)
		for j := 0; j < rows; j += t.lanes { // a panel is a whole number of lanes wide
			panel := dst[j/t.cols*t.cols*depth+from*t.cols+j%t.cols:]
			w.transposePanel(t, panel, t.cols, src[j*ld+from:], ld, min(t.lanes, rows-j), have-j, part)
		}
	}
}

// clearSurplus clears the last panel of a B block if its columns do not fill it.
func clearSurplus(t *micro, dst []float32, cols, depth int) {
	if last := cols % t.cols; last > 0 {
		clear(dst[(cols-last)*depth:][:t.cols*depth])
	}
}

// copyPanel sets dst[t.cols*p+i] = src[ld*p+i] for depth values of p and count values of i.
func copyPanel(t *micro, dst, src []float32, ld, count, depth int) {
	if count == t.cols && t.copyRows != nil {
		t.copyRows(count, &dst[0], count, &src[0], ld, depth)
		return
	}
	for p := range depth {
		copy(dst[t.cols*p:t.cols*p+count], src[ld*p:])
	}
}

// transposePanel sets dst[width*p+i] = src[ld*i+p] for depth values of p and count values of i. With a vector routine
// it may also write other values into the rest of a vector, which is in the panel. have is the
// number of rows the source really has, at least count.
func (w *workspace) transposePanel(t *micro, dst []float32, width int, src []float32, ld, count, have, depth int) {
	done := 0
	if t.transpose != nil && depth >= 4 {
		from, ldFrom := src, ld
		if have < t.lanes {
			for i := range count {
				copy(w.edge[i*blockK:], src[i*ld:i*ld+depth])
			}
			clear(w.edge[count*blockK:])
			from, ldFrom = w.edge, blockK
		}
		t.transpose(&dst[0], width, &from[0], ldFrom, depth/4)
		done = depth &^ 3
	}
	for p := done; p < depth; p++ {
		column := dst[width*p : width*p+count]
		for i := range column {
			column[i] = src[ld*i+p]
		}
	}
}
