package kernel

import (
	"fmt"
	"math"

	"moetor/internal/lowp"
)

// Hopper computes scaled products as tensor cores of that generation do, whose sums of FP8 products keep about 14 bits
// (DeepSeek-V3 report, section 3.5.2). It is slow, and there for study.
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
)

// emulate is multiply on the sums of a Hopper.
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
	running := borrowScratch(stripWidth * scaledWidth)
	t := portable.micro
	for i0 := 0; i0 < p.m; i0 += stripWidth {
		i1 := min(i0+stripWidth, p.m)
		for j := 0; j < p.n; j += scaledWidth {
			cols := min(scaledWidth, p.n-j)
			sums, panel, scales := running.f[:(i1-i0)*scaledWidth], w.b[:scaledWidth*scaledDepth], w.cols[:cols]
			clear(sums)
			for k0 := 0; k0 < p.k; k0 += scaledDepth {
				k1 := min(k0+scaledDepth, p.k)
				w.block(t, &p.a, i0, i1-i0, k0, k1)
				w.panel(t, &p.b, panel, j, cols, k0, k1)
				p.b.lineScales(scales, j, k0)
				for q0 := k0; q0 < k1; q0 += hopperGroup {
					q1 := min(q0+hopperGroup, k1)
					promote := q1 == p.k || q1%every == 0
					for i := range i1 - i0 {
						line := w.a[i*scaledDepth+q0-k0 : i*scaledDepth+q1-k0]
						row := p.c[(i0+i)*p.ldc+j:][:cols]
						for c := range row {
							sum := hopperAdd(sums[i*scaledWidth+c], line, panel[(q0-k0)*scaledWidth+c:])
							if promote {
								row[c] += float32(float32(sum*w.rows[i]) * scales[c])
								sum = 0
							}
							sums[i*scaledWidth+c] = sum
						}
					}
				}
			}
		}
	}
	running.giveBack()
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
