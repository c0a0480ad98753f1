package kernel

import (
	"fmt"

	"moetor/internal/lowp"
)

// PackedWeight is a weight's codes in the order in which a product takes them, so that they stream from memory once, as
// bytes: for each cut of scaledDepth values of k, panels of scaledWidth columns of op(B); for each panel its steps along
// k. A panel is decoded when the product comes to it. Columns that a matrix does not have are zero.
//
// The zero PackedWeight is ready for Pack.
type PackedWeight struct {
	layout Layout
	n, k   int
	tiles  lowp.Matrix // shape and scales of the packed matrix, without codes
	panels []byte
}

// Pack takes over a weight for products of a layout: NT for op(B) = w^T (forward), NN for op(B) = w (gradient of the
// input). Memory is kept for the next time. The codes stay what they are, except that a NaN may become another.
func (p *PackedWeight) Pack(l Layout, w *lowp.Matrix) {
	if l != NT && l != NN {
		panic(fmt.Sprintf("kernel.PackedWeight.Pack: layout %d", l))
	}
	p.layout, p.n, p.k = l, w.Rows, w.Cols
	if l == NN {
		p.n, p.k = w.Cols, w.Rows
	}
	checkScaled("PackedWeight.Pack", "w", w, l == NN, p.k)
	scales, exponents := p.tiles.Scales, p.tiles.Exponents
	p.tiles = *w
	p.tiles.Codes = nil
	p.tiles.Scales = append(scales[:0], w.Scales...)
	p.tiles.Exponents = append(exponents[:0], w.Exponents...)
	across := (p.n + scaledWidth - 1) / scaledWidth
	if need := p.k * across * w.Format.RowBytes(scaledWidth); cap(p.panels) < need {
		p.panels = make([]byte, need)
	} else {
		p.panels = p.panels[:need]
	}
	from, to, t, space := newSide(w, l == NN, p.k), p.side(), active.Load().micro, borrowScaledSpace()
	from.fold = false // the codes alone
	for k0 := 0; k0 < p.k; k0 += scaledDepth {
		k1 := min(k0+scaledDepth, p.k)
		for j := 0; j < p.n; j += scaledWidth {
			codes := to.panel(j, k0, k1)
			if l == NN { // steps of a panel are parts of rows
				copyRowParts(codes, w.Format.RowBytes(scaledWidth), w, j, k0, k1)
				continue
			}
			panel := space.b[:(k1-k0)*scaledWidth]
			space.panel(t, &from, panel, j, min(scaledWidth, p.n-j), k0, k1)
			lowp.EncodeRow(w.Format, codes, panel, false)
		}
	}
	space.giveBack()
}

// copyRowParts copies the codes of up to scaledWidth columns from j on, of rows k0..k1, to lines of width bytes. Code 0 is zero.
func copyRowParts(dst []byte, width int, w *lowp.Matrix, j, k0, k1 int) {
	n := w.Format.RowBytes(min(scaledWidth, w.Cols-j))
	at := k0*w.Stride + w.Format.RowBytes(j)
	for range k1 - k0 {
		copy(dst[:n], w.Codes[at:])
		clear(dst[n:width])
		dst = dst[width:]
		at += w.Stride
	}
}

// Bytes is the memory that the packed weight holds.
func (p *PackedWeight) Bytes() int {
	return cap(p.panels) + 4*cap(p.tiles.Scales) + cap(p.tiles.Exponents)
}

func (p *PackedWeight) side() side {
	s := newSide(&p.tiles, p.layout == NN, p.k)
	s.panels = p.panels
	return s
}

// prefetch asks for the codes behind a panel, which are the next to be decoded, while the panel is multiplied: memory's own
// guesses end at every page, and a panel is about one.
func (s *side) prefetch(t *micro, line, k0, k1 int) {
	if s.panels == nil || t.prefetch == nil {
		return
	}
	at, size := s.panelAt(line, k0, k1)
	at += size
	if size = min(size, len(s.panels)-at); size > 0 {
		t.prefetch(&s.panels[at], (size+63)/64)
	}
}

// panel returns the codes of values k0..k1 of the panel that begins at a line.
func (s *side) panel(line, k0, k1 int) []byte {
	at, size := s.panelAt(line, k0, k1)
	return s.panels[at:][:size]
}

func (s *side) panelAt(line, k0, k1 int) (at, size int) {
	width := s.m.Format.RowBytes(scaledWidth)
	lines := s.m.Rows
	if s.down {
		lines = s.m.Cols
	}
	across := (lines + scaledWidth - 1) / scaledWidth
	return (k0*across + (k1-k0)*((s.line+line)/scaledWidth)) * width, (k1 - k0) * width
}
