package kernel

import (
	"fmt"
	"math"
	"unsafe"

	"moetor/internal/lowp"
)

// Hopper computes scaled products as tensor cores of that generation do, whose sums of FP8 products keep about 14 bits
// (DeepSeek-V3 report, section 3.5.2). It is several times slower than [ScaledGemm], and there for study.
//
// 32 products at a time, and the sum so far, are cut to multiples of 2^-13 of the power of two below the largest of them,
// towards zero, and then added. After every Promote values of k, a multiple of 32, the sum is multiplied by the scales of
// its row and column, added to C in FP32, and begins anew; with Promote 0 that happens once, at the end. Where tiles end
// between two promotions no scales could be multiplied in afterwards, and values of codes are multiplied by them before.
type Hopper struct {
	Promote int
}

// ScaledGemm is [ScaledGemm] on such sums.
func (h Hopper) ScaledGemm(l Layout, a, b *lowp.Matrix, beta float32, c []float32, ldc int) {
	g := scaledGemm("Hopper.ScaledGemm", l, a, b, beta, c, ldc)
	h.run("Hopper.ScaledGemm", g)
}

// ScaledGemmPacked is [ScaledGemmPacked] on such sums.
func (h Hopper) ScaledGemmPacked(a *lowp.Matrix, w *PackedWeight, beta float32, c []float32, ldc int) {
	g := scaledGemmPacked("Hopper.ScaledGemmPacked", a, w, beta, c, ldc)
	h.run("Hopper.ScaledGemmPacked", g)
}

// ScaledGroupedGemm is [ScaledGroupedGemm] on such sums.
func (h Hopper) ScaledGroupedGemm(rows []int, a *lowp.Matrix, w []*PackedWeight, beta float32, c []float32) {
	g := scaledGrouped("Hopper.ScaledGroupedGemm", rows, a, w, beta, c)
	h.run("Hopper.ScaledGroupedGemm", g)
}

// ScaledGroupedGemmTN is [ScaledGroupedGemmTN] on such sums.
func (h Hopper) ScaledGroupedGemmTN(rows []int, a, b *lowp.Matrix, c [][]float32) {
	g := scaledGroupedTN("Hopper.ScaledGroupedGemmTN", rows, a, b, c)
	h.run("Hopper.ScaledGroupedGemmTN", g)
}

func (h Hopper) run(routine string, g scaledGroups) {
	if h.Promote < 0 || h.Promote%hopperGroup != 0 {
		panic(fmt.Sprintf("kernel.%s: promotion every %d values is not a multiple of %d", routine, h.Promote, hopperGroup))
	}
	g.hopper, g.emulate = h, true
	g.run(routine)
}

const (
	hopperGroup = 32 // products added at once
	hopperBits  = 14
	hopperRows  = 4 // of a tile of sums
)

// hopperRoutines work on tiles of at most hopperRows rows and scaledWidth columns; a row of sums is scaledWidth values.
type hopperRoutines struct {
	// add adds 0 < k <= hopperGroup products to each sum: those of a row of A, scaledDepth values apart, with a column of B,
	// whose steps are scaledWidth values apart. Rows of A are hopperGroup values long, those from k on count for nothing.
	// Sums past the last column may change.
	add func(rows, cols, k int, a, b, sums *float32)

	// promote adds sums with their scales to C, and clears them.
	promote func(rows, cols int, sums, c *float32, ldc int, rowScale, colScale *float32)
}

// emulate is multiply on the sums of a Hopper. A block of A is decoded once per scaledBlockN columns, a panel of B once per
// block of A.
func (w *scaledSpace) emulate(p *scaledProduct, h Hopper) {
	if !p.accumulate {
		for i := range p.m {
			clear(p.c[i*p.ldc:][:p.n])
		}
	}
	every := h.Promote
	if every == 0 {
		every = math.MaxInt
	}
	// Scales multiply sums if they hold from promotion to promotion, else values.
	after := func(s *side) bool { return s.tile == math.MaxInt || s.tile >= p.k || s.tile%every == 0 }
	if !after(&p.a) || !after(&p.b) {
		p.a.fold, p.b.fold = true, true
	}
	t := active.Load().micro
	panel, scales := w.b[:scaledWidth*scaledDepth], w.cols[:scaledWidth]
	running := borrowScratch(min(p.m, stripWidth) * (min(p.n, scaledBlockN) + scaledWidth - 1))
	for j0 := 0; j0 < p.n; j0 += scaledBlockN {
		j1 := min(j0+scaledBlockN, p.n)
		for i0 := 0; i0 < p.m; i0 += stripWidth {
			high := min(stripWidth, p.m-i0)
			clear(running.f[:high*(j1-j0+scaledWidth-1)])
			for k0 := 0; k0 < p.k; k0 += scaledDepth {
				k1 := min(k0+scaledDepth, p.k)
				w.block(t, &p.a, i0, high, k0, k1)
				for j := j0; j < j1; j += scaledWidth {
					cols := min(scaledWidth, j1-j)
					w.panel(t, &p.b, panel, j, cols, k0, k1)
					p.b.lineScales(scales[:cols], j, k0)
					for i := 0; i < high; i += hopperRows {
						rows, sums := min(hopperRows, high-i), &running.f[(j-j0)*high+i*scaledWidth]
						for q := k0; q < k1; q += hopperGroup {
							end := min(q+hopperGroup, k1)
							t.hopper.add(rows, cols, end-q, &w.a[i*scaledDepth+q-k0], &panel[(q-k0)*scaledWidth], sums)
							if end == p.k || end%every == 0 {
								t.hopper.promote(rows, cols, sums, &p.c[(i0+i)*p.ldc+j], p.ldc, &w.rows[i], &scales[0])
							}
						}
					}
				}
			}
		}
	}
	running.giveBack()
}

func addHopperPortable(rows, cols, k int, a, b, sums *float32) {
	panel := unsafe.Slice(b, (k-1)*scaledWidth+cols)
	for i := range rows {
		line := unsafe.Slice((*float32)(unsafe.Add(unsafe.Pointer(a), 4*i*scaledDepth)), k)
		row := unsafe.Slice((*float32)(unsafe.Add(unsafe.Pointer(sums), 4*i*scaledWidth)), cols)
		for j := range row {
			row[j] = hopperAdd(row[j], line, panel[j:])
		}
	}
}

func promoteHopperPortable(rows, cols int, sums, c *float32, ldc int, rowScale, colScale *float32) {
	scales := unsafe.Slice(colScale, cols)
	for i, r := range unsafe.Slice(rowScale, rows) {
		row := unsafe.Slice((*float32)(unsafe.Add(unsafe.Pointer(c), 4*i*ldc)), cols)
		from := unsafe.Slice((*float32)(unsafe.Add(unsafe.Pointer(sums), 4*i*scaledWidth)), cols)
		for j, s := range from {
			// The conversions forbid fusing.
			row[j] += float32(float32(s*r) * scales[j])
			from[j] = 0
		}
	}
}

// hopperAdd adds to sum the products of a line of A with values scaledWidth apart.
func hopperAdd(sum float32, a, b []float32) float32 {
	var products [hopperGroup]float32
	top := math.Float32bits(sum) &^ (1 << 31)
	for p, v := range a {
		products[p] = v * b[p*scaledWidth]
		top = max(top, math.Float32bits(products[p])&^(1<<31))
	}
	exponent := int(top >> 23)
	if exponent == 0xFF { // NaN and infinity
		for _, v := range products[:len(a)] {
			sum += v
		}
		return sum
	}
	// Multiplied by 1/unit, the largest has hopperBits bits before the point.
	unit := math.Ldexp(1, max(exponent, 1)-127-(hopperBits-1))
	inverse := 1 / unit
	total := int64(float64(sum) * inverse)
	for _, v := range products[:len(a)] {
		total += int64(float64(v) * inverse)
	}
	return float32(float64(total) * unit)
}
