package lowp

import (
	"fmt"
	"math"
)

// Format is an encoding of a number in 8, 12 or 16 bits. The zero Format is E4M3.
type Format uint8

const (
	E4M3 Format = iota // 1+4+3 bits, bias 7: no infinities, one NaN of each sign, up to 448 (OCP FP8, E4M3FN)
	E5M2               // 1+5+2 bits, bias 15, IEEE-like specials, up to 57344 (OCP FP8)
	E5M6               // 1+5+6 bits, bias 15, IEEE-like specials, up to 65024; two codes in three bytes
	BF16               // the upper half of a float32
)

// layout is what a format is made of. Bits are those of float32 unless the comment says code.
type layout struct {
	name       string
	bits       int
	mantissa   int    // explicit bits
	rebias     uint32 // code: what the rounded and shifted exponent of float32 is too large by, in place
	minNormal  uint32 // smallest normal magnitude
	magic      float32
	max        float32
	maxCode    uint32 // code of max
	infCode    uint32 // code of an overflow that is not saturated, and of infinity; for E4M3 its NaN
	nanCode    uint32
	hasInf     bool
	subnormals bool // in a range where float32 is normal
}

// magic + x, for a subnormal x, has the code of x in its last bits, rounded by the addition: the unit in the last place
// of magic is the smallest subnormal.
var layouts = [...]layout{
	E4M3: {name: "e4m3", bits: 8, mantissa: 3, rebias: (127 - 7) << 3, minNormal: (127 - 6) << 23, magic: 1 << 14,
		max: 448, maxCode: 0x7E, infCode: 0x7F, nanCode: 0x7F, subnormals: true},
	E5M2: {name: "e5m2", bits: 8, mantissa: 2, rebias: (127 - 15) << 2, minNormal: (127 - 14) << 23, magic: 1 << 7,
		max: 57344, maxCode: 0x7B, infCode: 0x7C, nanCode: 0x7E, hasInf: true, subnormals: true},
	E5M6: {name: "e5m6", bits: 12, mantissa: 6, rebias: (127 - 15) << 6, minNormal: (127 - 14) << 23, magic: 1 << 3,
		max: 65024, maxCode: 0x7BF, infCode: 0x7C0, nanCode: 0x7E0, hasInf: true, subnormals: true},
	BF16: {name: "bf16", bits: 16, mantissa: 7,
		max: 0x1.FEp127, maxCode: 0x7F7F, infCode: 0x7F80, nanCode: 0x7FC0, hasInf: true},
}

func (f Format) String() string {
	if int(f) < len(layouts) {
		return layouts[f].name
	}
	return fmt.Sprintf("format(%d)", uint8(f))
}

// Bits is the size of a code.
func (f Format) Bits() int { return layouts[f].bits }

// Max is the largest finite value.
func (f Format) Max() float32 { return layouts[f].max }

// RowBytes is the size of a row of n codes. A row starts on a byte; an odd number of 12-bit codes leaves the upper half
// of the last byte zero.
func (f Format) RowBytes(n int) int { return (n*layouts[f].bits + 7) / 8 }

const (
	signBit  = 1 << 31
	infBits  = 0x7F800000 // of float32
	quietBit = 1 << 22
)

// Encode rounds x to the nearest value of the format, ties to the even code, through subnormals down to zero; -0 and the
// sign of a NaN are kept. What is too large after rounding becomes the largest finite value if saturate is set, else
// infinity, which for E4M3 is NaN.
func (f Format) Encode(x float32, saturate bool) uint16 {
	l := &layouts[f]
	b := math.Float32bits(x)
	sign := b >> 31 << (l.bits - 1)
	b &^= signBit
	if b > infBits {
		if f == BF16 {
			return uint16(sign | b>>16 | l.nanCode&0x40) // the payload is kept as far as it fits
		}
		return uint16(sign | l.nanCode)
	}
	var code uint32
	if l.subnormals && b < l.minNormal {
		code = math.Float32bits(math.Float32frombits(b)+l.magic) - math.Float32bits(l.magic)
	} else {
		shift := 23 - l.mantissa
		code = (b+(1<<(shift-1)-1)+b>>shift&1)>>shift - l.rebias
	}
	if code > l.maxCode {
		code = l.infCode
		if saturate {
			code = l.maxCode
		}
	}
	return uint16(sign | code)
}

// encodeInTile is Encode for a value that was divided by the scale of its tile: a finite one saturates (BF16, which has
// the range of float32, rounds to infinity as usual), an infinite one does not: a matrix must not hide that a
// computation broke.
func (f Format) encodeInTile(x float32) uint16 {
	return f.Encode(x, f != BF16 && math.Float32bits(x)&^signBit != infBits)
}

// Decode returns the value of a code, exactly; bits above the code are ignored.
func (f Format) Decode(code uint16) float32 {
	switch f {
	case E4M3:
		return e4m3Values[uint8(code)]
	case E5M2:
		return e5m2Values[uint8(code)]
	case E5M6:
		return e5m6Values[code&0xFFF]
	}
	return math.Float32frombits(uint32(code) << 16)
}

// The values of all codes.
var (
	e4m3Values [1 << 8]float32
	e5m2Values [1 << 8]float32
	e5m6Values [1 << 12]float32
)

func init() {
	for f, values := range map[Format][]float32{E4M3: e4m3Values[:], E5M2: e5m2Values[:], E5M6: e5m6Values[:]} {
		for code := range values {
			values[code] = f.value(uint32(code))
		}
	}
}

// value is Decode by the definition of the format.
func (f Format) value(code uint32) float32 {
	l := &layouts[f]
	sign := code >> (l.bits - 1) << 31
	code &= 1<<(l.bits-1) - 1
	fraction := code & (1<<l.mantissa - 1)
	switch exponent := int(code >> l.mantissa); {
	case code > l.maxCode && (!l.hasInf || fraction != 0): // NaN
		return math.Float32frombits(sign | infBits | quietBit | fraction<<(23-l.mantissa))
	case code > l.maxCode:
		return math.Float32frombits(sign | infBits)
	case exponent == 0:
		smallest := math.Float32frombits(l.minNormal - uint32(l.mantissa)<<23)
		return math.Float32frombits(sign | math.Float32bits(float32(fraction)*smallest))
	}
	return math.Float32frombits(sign | (code+l.rebias)<<(23-l.mantissa))
}
