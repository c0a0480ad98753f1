package kernel

import "math"

// Constants of the exponential: x = n*ln2 + r with |r| <= ln2/2, exp(x) = 2^n * exp(r). ln2 is split in two so that
// n*ln2High is exact for every n that occurs (the split and the idea: Cody and Waite, Software Manual for the Elementary
// Functions, 1980, chapter 6). The polynomial is the minimax fit of (exp(r)-1-r)/r^2 on [-ln2/2, ln2/2] for the relative
// error of exp(r), 2^-28.2, by the Remez algorithm.
const (
	log2E   = 1.44269504088896341
	ln2High = 0.693359375
	ln2Low  = -2.12194440e-4
	expP0   = 1.3814613e-3
	expP1   = 8.3687101e-3
	expP2   = 4.1668389e-2
	expP3   = 1.6666521e-1
	expP4   = 4.9999994e-1

	// Adding and subtracting 1.5*2^23 rounds a float32 of small magnitude to an integer, to nearest even; the integer
	// stands in the low bits of the sum.
	roundShift     = 12582912
	roundShiftBits = 0x4B400000

	expOverflow  = 89   // exp is +Inf from here (true limit 88.7228)
	expUnderflow = -104 // exp is 0 from here (true limit -103.9721)
)

// expf returns e^x with an error of about 1 unit in the last place (0.96 is the largest a sweep finds; 0.98 in the
// vector routines) over the whole range, subnormal results included. expf(+Inf) = +Inf, expf(-Inf) = 0, expf(NaN) = NaN.
func expf(x float32) float32 {
	if x > expOverflow {
		return float32(math.Inf(1))
	}
	if x < expUnderflow {
		return 0
	}
	shifted := x*log2E + roundShift
	n := int32(math.Float32bits(shifted)) - roundShiftBits
	fn := shifted - roundShift
	r := x - fn*ln2High
	r -= fn * ln2Low
	p := float32(expP0)
	p = p*r + expP1
	p = p*r + expP2
	p = p*r + expP3
	p = p*r + expP4
	y := p*(r*r) + r + 1
	// 2^n in two factors: n = 128 overflows an exponent field though the product need not, and a subnormal result is
	// rounded once, by the second product. For NaN n is meaningless, and y is NaN whatever it is multiplied with.
	half := n >> 1
	y *= math.Float32frombits(uint32(half+127) << 23)
	return y * math.Float32frombits(uint32(n-half+127)<<23)
}

// sigmoid returns 1/(1+exp(-x)).
func sigmoid(x float32) float32 { return 1 / (1 + expf(-x)) }
