package kernel

import "sync"

// scaledProduct is one product on one thread: C = op(A)*op(B), added to C if accumulate is set.
type scaledProduct struct {
	m, n, k    int
	accumulate bool
	a, b       side
	c          []float32
	ldc        int
}

// part makes p the product that computes rows i0..i1 and columns j0..j1 of its C; j0 is the edge of a panel.
func (p *scaledProduct) part(i0, i1, j0, j1 int) {
	p.m, p.n = i1-i0, j1-j0
	p.a.line += i0
	p.b.line += j0
	p.c = p.c[i0*p.ldc+j0:]
}

// scaledSpace is the scratch of one running scaled product.
type scaledSpace struct {
	a     []float32 // a block of A: lines of scaledDepth values
	b     []float32 // panels of B: scaledDepth steps of scaledWidth values each
	strip []float32 // codes just decoded, on their way to be transposed
	tile  []float32 // a tile of C at the right edge
	rows  []float32 // scales of the lines of a
	cols  []float32 // scales of the lines of b
	fold  []float32
}

var scaledSpaces struct {
	sync.Mutex
	free []*scaledSpace
}

func borrowScaledSpace() *scaledSpace {
	scaledSpaces.Lock()
	if last := len(scaledSpaces.free) - 1; last >= 0 {
		w := scaledSpaces.free[last]
		scaledSpaces.free = scaledSpaces.free[:last]
		scaledSpaces.Unlock()
		return w
	}
	scaledSpaces.Unlock()
	return &scaledSpace{
		a:     make([]float32, stripWidth*scaledDepth),
		b:     make([]float32, scaledBlockN*scaledDepth),
		strip: make([]float32, max(maxLanes*stripWidth, scaledWidth*scaledDepth)),
		tile:  make([]float32, maxTileRows*maxTileCols),
		rows:  make([]float32, stripWidth),
		cols:  make([]float32, scaledBlockN),
		fold:  make([]float32, stripWidth),
	}
}

func (w *scaledSpace) giveBack() {
	scaledSpaces.Lock()
	scaledSpaces.free = append(scaledSpaces.free, w)
	scaledSpaces.Unlock()
}

// stripWidth is the number of lines of A that a block may have, and the leading dimension of the strip for them.
const stripWidth = 256

// scaledBlockM is the height of a block of A: whole tiles and whole pairs of vectors of codes.
func scaledBlockM(t *micro) int {
	unit := t.rows
	for unit%(2*t.lanes) != 0 {
		unit += t.rows
	}
	return stripWidth / unit * unit
}

// multiply runs a product on one thread. Every code of B is decoded once, every code of A once per scaledBlockN columns,
// or once if all rows are one block. A panel of B is decoded when the first block of A needs it: it is in the first cache
// level then, and stays there while the rows of the block pass.
func (w *scaledSpace) multiply(t *micro, p *scaledProduct) {
	if p.k == 0 && !p.accumulate {
		for i := range p.m {
			clear(p.c[i*p.ldc:][:p.n])
		}
	}
	high := scaledBlockM(t)
	if p.n <= scaledWidth && !p.a.down {
		high = 2 * t.rows // lines of A that are used once need not go through the second cache level
	}
	width, keep := p.n, p.m > high
	if keep {
		width = scaledBlockN
	}
	for j0 := 0; j0 < p.n; j0 += width {
		j1 := min(j0+width, p.n)
		for k0 := 0; k0 < p.k; k0 += scaledDepth {
			k1 := min(k0+scaledDepth, p.k)
			for i0 := 0; i0 < p.m; i0 += high {
				i1 := min(i0+high, p.m)
				w.block(t, &p.a, i0, i1-i0, k0, k1)
				for j := j0; j < j1; j += scaledWidth {
					cols, slot := min(scaledWidth, j1-j), 0
					if keep {
						slot = j - j0
					}
					panel, scales := w.b[slot*scaledDepth:][:scaledWidth*scaledDepth], w.cols[slot:][:scaledWidth]
					if i0 == 0 {
						w.panel(t, &p.b, panel, j, cols, k0, k1)
						p.b.lineScales(scales[:cols], j, k0)
						p.b.prefetch(t, j, k0, k1)
					}
					w.tiles(t, p, i0, i1, j, cols, k1-k0, panel, scales, p.accumulate || k0 > 0)
				}
			}
		}
	}
}

// lineScales are the scales that the tile routine applies.
func (s *side) lineScales(dst []float32, line, p int) {
	if !s.fold {
		s.scales(dst, line, p)
		return
	}
	for i := range dst {
		dst[i] = 1
	}
}

// tiles multiplies the block of A, rows i0..i1, with a panel of B that begins at column j.
func (w *scaledSpace) tiles(t *micro, p *scaledProduct, i0, i1, j, cols, depth int, panel, scales []float32, accumulate bool) {
	for from := 0; from < cols; from += t.cols {
		n := min(t.cols, cols-from)
		width, edge, count := n, !t.fits(n), t.tilesOf(i1-i0)
		for tile := range count {
			i, end := i0+tile*(i1-i0)/count, i0+(tile+1)*(i1-i0)/count
			rows, at := end-i, i*p.ldc+j+from
			c, ldc := p.c[at:], p.ldc
			if edge { // a tile at the right edge is computed whole, by the same routine, on a copy
				if accumulate {
					for r := range rows {
						copy(w.tile[r*t.cols:], c[r*ldc:r*ldc+n])
					}
				}
				c, ldc, width = w.tile, t.cols, t.cols
			}
			t.runScaled(rows, width, depth, &w.a[(i-i0)*scaledDepth], &panel[from], &c[0], ldc, &w.rows[i-i0], &scales[from], accumulate)
			if edge {
				for r := range rows {
					copy(p.c[at+r*p.ldc:][:n], w.tile[r*t.cols:])
				}
			}
		}
	}
}

// block decodes n lines of A from line on, values k0..k1, and their scales.
func (w *scaledSpace) block(t *micro, s *side, line, n, k0, k1 int) {
	s.lineScales(w.rows[:n], line, k0)
	if !s.down {
		s.decodeLines(w.a, line, n, k0, k1, w.fold)
		return
	}
	// Whole vectors are decoded faster than single codes, also of lines that belong to another block.
	wide := max(n, min((n+scaledWidth-1)/scaledWidth*scaledWidth, s.m.Cols-s.line-line))
	for p := k0; p < k1; p += t.lanes {
		end := min(p+t.lanes, k1)
		s.decodeSteps(w.strip, stripWidth, line, wide, p, end, w.fold)
		transposeStrip(t, w.a[p-k0:], scaledDepth, w.strip, stripWidth, end-p, n)
	}
}

// panel decodes up to scaledWidth lines of B from line on, values k0..k1, as steps of scaledWidth values.
func (w *scaledSpace) panel(t *micro, s *side, dst []float32, line, n, k0, k1 int) {
	if n < scaledWidth {
		clear(dst)
	}
	if s.down || s.panels != nil {
		s.decodeSteps(dst, scaledWidth, line, n, k0, k1, w.fold)
		return
	}
	s.decodeLines(w.strip, line, n, k0, k1, w.fold)
	clear(w.strip[n*scaledDepth : scaledWidth*scaledDepth])
	for i := 0; i < n; i += t.lanes {
		transposeStrip(t, dst[i:], scaledWidth, w.strip[i*scaledDepth:], scaledDepth, t.lanes, k1-k0)
	}
}

// transposeStrip sets dst[lddst*p+i] = src[ldsrc*i+p] for cols values of p and rows values of i, at most t.lanes. With a
// vector routine it also writes other values where i is less than t.lanes and p less than cols rounded up to four.
func transposeStrip(t *micro, dst []float32, lddst int, src []float32, ldsrc, rows, cols int) {
	if t.transpose != nil {
		t.transpose(&dst[0], lddst, &src[0], ldsrc, (cols+3)/4)
		return
	}
	for p := range cols {
		for i := range rows {
			dst[lddst*p+i] = src[ldsrc*i+p]
		}
	}
}
