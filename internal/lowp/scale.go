package lowp

import (
	"fmt"
	"math"
)

// ScaleKind says how the scale of a tile is chosen and stored. A scale s multiplies: value = s * code.
type ScaleKind uint8

const (
	ScaleNone ScaleKind = iota // no scales
	ScaleF32                   // s = max(amax, 1e-4)/max as float32 (DeepSeek-V3's kernel.py)
	ScalePow2                  // that s, raised to a power of two unless it is one; stored as float32 (DeepGEMM)
	ScaleE8M0                  // a power of two as an exponent byte: amax/max raised, without the 1e-4 (MX as in TransformerEngine)
)

func (k ScaleKind) String() string {
	switch k {
	case ScaleNone:
		return "none"
	case ScaleF32:
		return "f32"
	case ScalePow2:
		return "pow2"
	case ScaleE8M0:
		return "e8m0"
	}
	return fmt.Sprintf("scale(%d)", uint8(k))
}

// minAmax is 1e-4, as bits; it keeps the scale of a tile of zeros, or nearly so, away from zero.
const minAmax = 0x38D1B717

// Scale returns the scale of a tile of the format whose largest magnitude is amax: NaN if the tile has one, else
// infinity if it has one. Such a tile is lost, but must not look sound: with ScaleF32 and ScalePow2 its scale is 1, and
// its NaN and infinities stay what they are; with ScaleE8M0 the scale itself is NaN, or 2^127.
func (k ScaleKind) Scale(f Format, amax float32) float32 {
	var s [1]float32
	k.scales(s[:], f, []uint32{math.Float32bits(amax)})
	return s[0]
}

// scales is Scale for many magnitudes, given as bits.
func (k ScaleKind) scales(dst []float32, f Format, amax []uint32) {
	dst = dst[:len(amax)]
	up, down := raise(f)
	most := f.Max()
	for i, a := range amax {
		s := float32(1)
		switch {
		case k == ScaleF32 && a < infBits:
			s = math.Float32frombits(max(a, minAmax)) / most
		case k == ScalePow2 && a < infBits:
			s = math.Float32frombits(((max(a, minAmax)+up)>>23 - down) << 23)
		case k == ScaleE8M0 && a < infBits:
			s = DecodeE8M0(byte(max((a+up)>>23, down) - down))
		case k == ScaleE8M0 && a == infBits:
			s = 0x1p127
		case k == ScaleE8M0:
			s = DecodeE8M0(0xFF)
		}
		dst[i] = s
	}
}

// raise returns two numbers with which (bits(amax)+up)>>23 - down is the exponent, biased, of the smallest power of two
// that is not below amax/max: the sum carries into the exponent if the mantissa of amax is larger than that of max.
func raise(f Format) (up, down uint32) {
	const mantissa = 1<<23 - 1
	b := math.Float32bits(f.Max())
	return mantissa - b&mantissa, b>>23 - 127
}

// EncodeE8M0 returns the exponent byte of the smallest power of two that is not below s: 0 (2^-127) for zero and all that
// is smaller, 254 (2^127) for all that is larger, infinity included, 255 for NaN. The sign of s is ignored.
func EncodeE8M0(s float32) byte {
	b := math.Float32bits(s) &^ signBit
	if b > infBits {
		return 0xFF
	}
	if b <= 1<<22 { // 2^-127
		return 0
	}
	return byte(min((b+1<<23-1)>>23, 0xFE))
}

// DecodeE8M0 returns 2^(code-127), or NaN for 255.
func DecodeE8M0(code byte) float32 {
	switch code {
	case 0:
		return 0x1p-127
	case 0xFF:
		return float32(math.NaN())
	}
	return math.Float32frombits(uint32(code) << 23)
}
