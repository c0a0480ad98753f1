package main

import (
	"fmt"

	. "github.com/mmcloughlin/avo/build"
	. "github.com/mmcloughlin/avo/operand"
	"github.com/mmcloughlin/avo/reg"
)

// The bytes of 12-bit codes within a group of 128 bits: spread makes words of which an even one has its code in the lower
// 12 bits and an odd one in the upper, and gather is the way back from two codes at the head of each 64 bits.
var (
	spread, spreadUpper Mem // the latter for 12 bytes that begin at the fifth
	spreadDwords        Mem
	gather, gatherUpper Mem // the latter for the second group of 128 bits: behind the first's bytes
	gatherWords         Mem
)

func defineTables() {
	spread = bytesData("spread12", 0, 1, 1, 2, 3, 4, 4, 5, 6, 7, 7, 8, 9, 10, 10, 11)
	spreadUpper = bytesData("spread12Upper", 4, 5, 5, 6, 7, 8, 8, 9, 10, 11, 11, 12, 13, 14, 14, 15)
	gather = bytesData("gather12", 0, 1, 2, 8, 9, 10, 255, 255, 255, 255, 255, 255, 255, 255, 255, 255)
	gatherUpper = bytesData("gather12Upper", 255, 255, 255, 255, 255, 255, 0, 1, 2, 8, 9, 10, 255, 255, 255, 255)
	spreadDwords = GLOBL("spreadDwords", RODATA|NOPTR)
	for i, d := range []int{0, 1, 2, 0, 3, 4, 5, 0, 6, 7, 8, 0, 9, 10, 11, 0} {
		DATA(4*i, U32(d))
	}
	gatherWords = GLOBL("gatherWords", RODATA|NOPTR)
	for i := range 32 {
		// Word i of the result: of six words in every 128 bits the first three count, in two registers.
		from := 0
		if i < 24 {
			from = i/3*8 + i%3
		}
		DATA(2*i, U16(from))
	}
}

func bytesData(name string, b ...int) Mem {
	m := GLOBL(name, RODATA|NOPTR)
	for i, v := range b {
		DATA(i, U8(v))
	}
	return m
}

// decode writes a grid of codes as float32. The way is through float16, whose exponent has the five bits of E5M2 and
// E5M6: their codes are its upper bits, and the conversion minds subnormals and specials. An E4M3 code is shifted to the
// same place under the sign, which makes it 2^-8 of its value; only its NaN must be looked after.
func decode(s isa, f format, by scaling) {
	name := "decode" + f.name
	scales, index := "step int", "scales[step*i]"
	if by == perCol {
		name += "Cols"
		scales, index = "", "scales[j]"
	}
	name += s.name
	params := "dst *float32, ld int, src *byte, stride int, scales *float32"
	if scales != "" {
		params += ", " + scales
	}
	TEXT(name, NOSPLIT, "func("+params+", blocks int, rows int)")
	Pragma("noescape")
	Doc(name+" writes the values of rows of codes:", "",
		"\tfor i := range rows {",
		fmt.Sprintf("\t\tfor j := range %d * blocks {", s.block()),
		fmt.Sprintf("\t\t\tdst[ld*i+j] = value(code j of src[stride*i:]) * %s", index),
		"\t\t}", "\t}")
	p := newPool(s)
	words := f.words(p)
	w, v, u, scale := p.take(), p.take(), p.take(), p.take()
	var factor reg.Register
	if f.factor != 1 {
		factor = p.holdFloat(f.factor)
	}
	walks := []walk{{"dst", 4 * s.block(), "ld", 4}, {"src", f.codeBytes(s), "stride", 1}}
	var row func()
	if by == perRow {
		row = rowScale(scale, factor)
	} else {
		walks = append(walks, walk{"scales", 4 * s.block(), "", 0})
	}
	grid(walks, row, func(at map[string]Mem) {
		words(at["src"], w)
		for i, x := range []reg.VecPhysical{v, u} {
			if i == 0 {
				VCVTPH2PS(half(s, w), x)
			} else {
				VCVTPH2PS(upper(s, w, x), x)
			}
			if by == perRow {
				VMULPS(scale, x, x)
			} else {
				if factor != nil {
					VMULPS(factor, x, x)
				}
				VMULPS(at["scales"].Offset(4*s.lanes*i), x, x)
			}
			VMOVUPS(x, at["dst"].Offset(4*s.lanes*i))
		}
	})
}

// words returns the code that makes float16 of a block of codes in memory.
func (f format) words(p *pool) func(from Mem, w reg.VecPhysical) {
	switch f.name {
	case "E4M3":
		fields, carry, infinity := p.hold(0xBF80BF80), p.hold(0x00800080), p.hold(0x40004000)
		t := p.take()
		return func(from Mem, w reg.VecPhysical) {
			VPMOVSXBW(from, w)
			VPSLLW(Imm(7), w, w)
			and(p.isa, fields, w, w) // the sign stands twice
			// Adding one carries into the exponent's highest bit from seven ones only, and makes a NaN of them.
			VPADDW(carry, w, t)
			orAnd(p.isa, t, infinity, w)
		}
	case "E5M2":
		return func(from Mem, w reg.VecPhysical) {
			VPMOVZXBW(from, w)
			VPSLLW(Imm(8), w, w)
		}
	}
	fields := p.hold(0xFFF0FFF0)
	table := p.take()
	if p.wide() {
		dwords, shifts := p.take(), p.hold(4) // the shifts of words: 4, 0
		VMOVDQU32(spreadDwords, dwords)
		VBROADCASTI32X4(spread, table)
		mask := GP32()
		MOVL(U32(0xFFF), mask)
		KMOVW(mask, reg.K1)
		return func(from Mem, w reg.VecPhysical) {
			VMOVDQU32_Z(from, reg.K1, w) // 48 bytes
			VPERMD(w, dwords, w)
			VPSHUFB(table, w, w)
			VPSLLVW(shifts, w, w)
			VPANDD(fields, w, w)
		}
	}
	factors := p.hold(1<<16 | 1<<4)
	VMOVDQU(spread, half(p.isa, table))
	VINSERTI128(Imm(1), spreadUpper, table, table)
	return func(from Mem, w reg.VecPhysical) {
		VMOVDQU(from, half(p.isa, w))
		VINSERTI128(Imm(1), from.Offset(8), w, w) // 24 bytes in all
		VPSHUFB(table, w, w)
		VPMULLW(factors, w, w)
		VPAND(fields, w, w)
	}
}

// decodeBF16 writes a grid of BF16 as float32.
func decodeBF16(s isa) {
	name := "decodeBF16" + s.name
	TEXT(name, NOSPLIT, "func(dst *float32, ld int, src *byte, stride int, blocks int, rows int)")
	Pragma("noescape")
	Doc(name+" writes the values of rows of codes:", "",
		"\tfor i := range rows {",
		fmt.Sprintf("\t\tfor j := range %d * blocks {", s.block()),
		"\t\t\tdst[ld*i+j] = value(code j of src[stride*i:])",
		"\t\t}", "\t}")
	p := newPool(s)
	x := []reg.VecPhysical{p.take(), p.take()}
	grid([]walk{{"dst", 4 * s.block(), "ld", 4}, {"src", 2 * s.block(), "stride", 1}}, nil, func(at map[string]Mem) {
		for i, v := range x {
			VPMOVZXWD(at["src"].Offset(2*s.lanes*i), v)
			VPSLLD(Imm(16), v, v)
			VMOVUPS(v, at["dst"].Offset(4*s.lanes*i))
		}
	})
}
