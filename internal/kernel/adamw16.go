package kernel

import "math"

// AdamWBF16 is AdamW with moments m and v in BF16, 2 bytes each, as DeepSeek-V3 keeps them (technical report, §3.3.3). A
// moment is widened, updated in float32, used for the weight as such, and stored rounded (see ToBF16). The results are the
// same bits under every implementation.
//
// A moment that a factor beta shrinks by less than half a unit of its last place stays where it is: beta should be at most
// 1 - 2^-8 (see MaxBetaBF16).
func AdamWBF16(a AdamWArgs, w, g []float32, m, v []uint16) {
	checkLen("AdamWBF16", "g", len(g), len(w))
	checkLen("AdamWBF16", "m", len(m), len(w))
	checkLen("AdamWBF16", "v", len(v), len(w))
	u := a.update()
	u.runBF16(w, g, m, v)
}

// MaxBetaBF16 is the largest beta with which a moment in BF16 decays from every value: x*(1-beta) must be more than half a
// unit of the last of 8 bits.
const MaxBetaBF16 = 1 - 1.0/256

func (u *adamWUpdate) runBF16(w, g []float32, m, v []uint16) {
	n := len(w)
	g, m, v = g[:n], m[:n], v[:n]
	if l := active.Load().vectors; l != scalar {
		for len(w) >= int(l) {
			n := min(len(w), vectorChunk) / int(l)
			adamWBF16Vectors(l, &u.gradScale, &w[0], &g[0], &m[0], &v[0], n)
			n *= int(l)
			w, g, m, v = w[n:], g[n:], m[n:], v[n:]
		}
	}
	for i, wi := range w { // the conversions forbid fusing
		gi := g[i] * u.gradScale
		mi := float32(u.beta1*fromBF16(m[i])) + float32(u.rest1*gi)
		vi := float32(u.beta2*fromBF16(v[i])) + float32(u.rest2*float32(gi*gi))
		m[i], v[i] = toBF16(mi), toBF16(vi)
		update := float32(mi*u.correct1) / (sqrt32(vi*u.correct2) + u.eps)
		w[i] = wi - float32(u.lr*(update+float32(u.decay*wi)))
	}
}

// ToBF16 sets dst to the upper halves of src's values, rounded to nearest even: what is beyond the largest BF16 becomes
// infinite, and NaN stays NaN, with its sign and the upper bits of its payload.
func ToBF16(dst []uint16, src []float32) {
	checkLen("ToBF16", "dst", len(dst), len(src))
	for i, x := range src {
		dst[i] = toBF16(x)
	}
}

// FromBF16 sets dst to the values of src, which float32 holds exactly.
func FromBF16(dst []float32, src []uint16) {
	checkLen("FromBF16", "dst", len(dst), len(src))
	for i, b := range src {
		dst[i] = fromBF16(b)
	}
}

func toBF16(x float32) uint16 {
	b := math.Float32bits(x)
	if x != x {
		return uint16(b>>16) | 0x40 // quiet: the payload may lie in the lower half
	}
	return uint16((b + 0x7FFF + b>>16&1) >> 16)
}

func fromBF16(b uint16) float32 { return math.Float32frombits(uint32(b) << 16) }
