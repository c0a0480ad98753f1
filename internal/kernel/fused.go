package kernel

import (
	"fmt"
	"slices"

	"moetor/internal/lowp"
)

// Storage is where a matrix goes that a producer makes row by row: any of the three, nil for those not wanted. Rows are
// quantised as soon as they are made, from the first or second cache level.
//
// Flat has tiles one row high, as products take them that contract columns; Tall has tiles of several rows (128x1), for
// the weight gradient, which contracts the rows. A matrix without scales may be either. One scale for the whole matrix
// needs the whole matrix first: quantise it from floats.
type Storage struct {
	Floats     []float32 // without gaps between rows
	Flat, Tall *lowp.Matrix
}

// tallRows is the largest height of tiles.
const tallRows = 128

// RMSNormQuantize is [RMSNorm] into storage; rstd has a value per row.
func RMSNormQuantize(dst Storage, src, gain, rstd []float32, cols int, eps float32) {
	rows := checkRows("RMSNormQuantize", len(src), cols)
	checkLen("RMSNormQuantize", "gain", len(gain), cols)
	checkLen("RMSNormQuantize", "rstd", len(rstd), rows)
	q := fused{kind: makeRMSNorm, made: 1, rows: rows, cols: cols, a: src, b: gain, rstd: rstd, eps: eps}
	q.out[0] = dst
	q.run("RMSNormQuantize")
}

// SwiGLUQuantize is [SwiGLU] into storage, of rows of cols values; gateCodes and upCodes keep its inputs, for a backward
// that makes its output again, and may be nil.
func SwiGLUQuantize(dst Storage, gate, up []float32, gateCodes, upCodes *lowp.Matrix, cols int) {
	rows := checkRows("SwiGLUQuantize", len(gate), cols)
	checkLen("SwiGLUQuantize", "up", len(up), len(gate))
	q := fused{kind: makeSwiGLU, made: 1, rows: rows, cols: cols, a: gate, b: up}
	q.out = [3]Storage{dst, {Floats: gate, Flat: gateCodes}, {Floats: up, Flat: upCodes}}
	q.run("SwiGLUQuantize")
}

// SwiGLUGradQuantize is [SwiGLUGrad] into storage, from inputs that were kept as codes. It also makes the output of the
// forward again, into h; an empty h is not made.
func SwiGLUGradQuantize(dgate, dup, h Storage, dy []float32, gate, up *lowp.Matrix) {
	const routine = "SwiGLUGradQuantize"
	rows, cols := gate.Rows, gate.Cols
	if up.Rows != rows || up.Cols != cols {
		panic(fmt.Sprintf("kernel.%s: gate is %dx%d, up %dx%d", routine, rows, cols, up.Rows, up.Cols))
	}
	checkLen(routine, "dy", len(dy), rows*cols)
	q := fused{kind: makeSwiGLUGrad, made: 2, rows: rows, cols: cols, a: dy, gate: gate, up: up}
	q.out = [3]Storage{dgate, dup, h}
	if h.Floats != nil || h.Flat != nil || h.Tall != nil {
		q.made = 3
	}
	q.run(routine)
}

// Quantize fills Flat and Tall from Floats, rows of cols values.
func (s Storage) Quantize(cols int) {
	q := fused{rows: checkRows("Storage.Quantize", len(s.Floats), cols), cols: cols}
	q.out[0] = s
	q.run("Storage.Quantize")
}

// Producers. What they make comes first among the matrices of a call; the floats of the others are given.
const (
	makeNothing = iota
	makeRMSNorm
	makeSwiGLU
	makeSwiGLUGrad
)

// fused is one call of a producer: up to three matrices of one shape, made and quantised in pieces of some rows.
type fused struct {
	kind, made int
	rows, cols int
	out        [3]Storage
	tall       *lowp.Matrix // its strips of tiles are the pieces; nil: chunk rows each
	chunk      int

	a, b, rstd []float32
	eps        float32
	gate, up   *lowp.Matrix
}

// fusedValues is the size of a piece without tall tiles: it stays in the first cache level from making to quantising.
const fusedValues = 4096

// fusedJob is the producer that the workers are at, written by who holds the pool.
var fusedJob fused

func fusedPart(i int) { fusedJob.piece(i) }

func (q *fused) run(routine string) {
	for i := range q.out {
		q.check(routine, &q.out[i])
	}
	if q.rows == 0 || q.cols == 0 {
		return
	}
	q.chunk = max(1, fusedValues/q.cols)
	pieces := (q.rows + q.chunk - 1) / q.chunk
	if q.tall != nil {
		pieces = q.tall.Strips()
	}
	if shareLoop(q.rows * q.cols) {
		fusedJob = *q
		workers.run(pieces, fusedPart)
		fusedJob = fused{} // hold on to nobody's matrices
		workers.release()
		return
	}
	for i := range pieces {
		q.piece(i)
	}
}

func (q *fused) check(routine string, s *Storage) {
	if s.Floats != nil {
		checkLen(routine, "Floats", len(s.Floats), q.rows*q.cols)
	}
	for _, m := range [2]*lowp.Matrix{s.Flat, s.Tall} {
		if m == nil {
			continue
		}
		if m.Rows != q.rows || m.Cols != q.cols {
			panic(fmt.Sprintf("kernel.%s: %d rows of %d values into a matrix of %dx%d", routine, q.rows, q.cols, m.Rows, m.Cols))
		}
		checkScaled(routine, "destination", m, false, 0)
		if m.Scale == lowp.ScaleNone {
			continue
		}
		if m == s.Flat && m.TileRows != 1 || m.TileRows < 1 || m.TileRows > tallRows {
			panic(fmt.Sprintf("kernel.%s: no storage for rows: %v", routine, m.Quant))
		}
	}
	if m := s.Tall; m != nil && m.Scale != lowp.ScaleNone {
		if t := q.tall; t != nil && (t.TileRows != m.TileRows || !slices.Equal(t.Groups, m.Groups)) {
			panic(fmt.Sprintf("kernel.%s: tiles of %v in groups %v and of %v in groups %v", routine, t.Quant, t.Groups, m.Quant, m.Groups))
		}
		q.tall = m
	}
}

// piece makes the rows of a piece and quantises them.
func (q *fused) piece(i int) {
	first, rows := i*q.chunk, min(q.chunk, q.rows-i*q.chunk)
	if q.tall != nil {
		first, rows = q.tall.Strip(i)
	}
	s := borrowScratch(q.made * rows * q.cols)
	var x [3][]float32
	for o := range x {
		if f := q.out[o].Floats; f != nil {
			x[o] = f[first*q.cols : (first+rows)*q.cols]
		} else if o < q.made {
			x[o] = s.f[o*rows*q.cols : (o+1)*rows*q.cols]
		}
	}
	from, to := first*q.cols, (first+rows)*q.cols
	switch q.kind {
	case makeRMSNorm:
		rmsNorm(x[0], q.a[from:to], q.b, q.rstd[first:first+rows], q.cols, q.eps)
	case makeSwiGLU:
		swiGLU(x[0], q.a[from:to], q.b[from:to])
	case makeSwiGLUGrad:
		q.swiGLUGrad(&x, first, rows)
	}
	for o := range x {
		if m := q.out[o].Flat; m != nil {
			quantizeStrip(m, first, first, rows, x[o], q.cols)
		}
		if m := q.out[o].Tall; m != nil {
			quantizeStrip(m, i, first, rows, x[o], q.cols)
		}
	}
	s.giveBack()
}

// swiGLUGrad makes rows from those of codes, a few at a time.
func (q *fused) swiGLUGrad(x *[3][]float32, first, rows int) {
	some := max(1, fusedValues/q.cols)
	s := borrowScratch(2 * some * q.cols)
	for r := 0; r < rows; r += some {
		n := min(some, rows-r)
		from, to := r*q.cols, (r+n)*q.cols
		gate, up := s.f[:n*q.cols], s.f[n*q.cols:2*n*q.cols]
		lowp.DequantizePart(gate, q.cols, q.gate, first+r, n, 0, q.cols)
		lowp.DequantizePart(up, q.cols, q.up, first+r, n, 0, q.cols)
		swiGLUGrad(x[0][from:to], x[1][from:to], q.a[first*q.cols:][from:to], gate, up)
		if q.made == 3 {
			swiGLU(x[2][from:to], gate, up)
		}
	}
	s.giveBack()
}

// quantizeStrip quantises rows of m, the first of which begins a strip of tiles.
func quantizeStrip(m *lowp.Matrix, strip, first, rows int, x []float32, ld int) {
	part := *m
	part.Rows, part.Groups, part.Codes = rows, nil, m.Codes[first*m.Stride:]
	at := strip * m.TilesAcross()
	switch m.Scale {
	case lowp.ScaleNone:
	case lowp.ScaleE8M0:
		part.Exponents = m.Exponents[at:]
	default:
		part.Scales = m.Scales[at:]
	}
	lowp.Quantize(&part, x, ld)
}

// Requantize is [lowp.Requantize] on all threads.
func Requantize(dst, src *lowp.Matrix) {
	n := dst.Strips()
	if n > 1 && shareLoop(dst.Rows*dst.Cols) {
		fusedJob = fused{tall: dst, gate: src}
		workers.run(n, requantizePart)
		fusedJob = fused{}
		workers.release()
		return
	}
	lowp.Requantize(dst, src)
}

func requantizePart(i int) { lowp.RequantizeStrip(fusedJob.tall, i, fusedJob.gate) }

// ScatterQuantized quantises every token once and writes codes and scales into its slots, as [Slots.Scatter]: the cast
// into the send buffer of a dispatch. dst has as many columns as the tokens, and tiles one row high.
func (s Slots) ScatterQuantized(dst *lowp.Matrix, x []float32, ld int) {
	const routine = "Slots.ScatterQuantized"
	tokens := Slots{Rows: s.Rows, Cols: s.Cols}
	tokens.check(routine, nil, x, ld)
	checkScaled(routine, "dst", dst, false, 0)
	if s.K < 0 || len(s.Places) != len(s.Rows)*s.K {
		panic(fmt.Sprintf("kernel.%s: %d places for %d rows with %d slots", routine, len(s.Places), len(s.Rows), s.K))
	}
	if dst.Cols != s.Cols || dst.Scale != lowp.ScaleNone && dst.TileRows != 1 {
		panic(fmt.Sprintf("kernel.%s: tokens of %d values into %d columns of %v", routine, s.Cols, dst.Cols, dst.Quant))
	}
	for _, at := range s.Places {
		if uint(at) >= uint(dst.Rows) {
			panic(fmt.Sprintf("kernel.%s: place %d of %d rows", routine, at, dst.Rows))
		}
	}
	if shareLoop(len(s.Places) * s.Cols) {
		scatterJob.Slots, scatterJob.dst, scatterJob.x, scatterJob.ld = s, dst, x, ld
		chunk := rowChunk(s.K * s.Cols)
		scatterJob.chunk = chunk
		workers.run((len(s.Rows)+chunk-1)/chunk, scatterQuantizedPart)
		workers.release()
		return
	}
	s.scatterQuantized(dst, x, ld, 0, len(s.Rows))
}

var scatterJob struct {
	Slots
	dst       *lowp.Matrix
	x         []float32
	ld, chunk int
}

func scatterQuantizedPart(i int) {
	j := &scatterJob
	j.scatterQuantized(j.dst, j.x, j.ld, i*j.chunk, min((i+1)*j.chunk, len(j.Rows)))
}

func (s *Slots) scatterQuantized(dst *lowp.Matrix, x []float32, ld, from, to int) {
	across := dst.TilesAcross()
	for n := from; n < to; n++ {
		places := s.Places[n*s.K : (n+1)*s.K]
		for i, at := range places {
			if i == 0 {
				quantizeStrip(dst, int(at), int(at), 1, s.token(x, ld, n), s.Cols)
				continue
			}
			first, at := int(places[0]), int(at)
			copy(dst.Row(at), dst.Row(first))
			switch dst.Scale {
			case lowp.ScaleNone:
			case lowp.ScaleE8M0:
				copy(dst.Exponents[at*across:(at+1)*across], dst.Exponents[first*across:])
			default:
				copy(dst.Scales[at*across:(at+1)*across], dst.Scales[first*across:])
			}
		}
	}
}
