package main

import (
	"fmt"
	"math"

	. "github.com/mmcloughlin/avo/build"
	. "github.com/mmcloughlin/avo/operand"
	"github.com/mmcloughlin/avo/reg"
)

// encode writes a grid of float32 as codes.
//
// A magnitude that is normal in the format is rounded as an integer: half a unit of the last place that stays, less one,
// plus the bit of that place, which makes ties even; the shift then drops the rest, and the difference of the exponents'
// biases has gone into the same sum. A subnormal one is rounded by adding a float whose last place is worth the smallest
// subnormal. Both are computed, and a comparison chooses.
func encode(s isa, f format, by scaling) {
	name := "encode" + f.name
	scales, index := "step int", "scales[step*i]"
	if by == perCol {
		name += "Cols"
		scales, index = "", "scales[j]"
	}
	name += s.name
	params := "dst *byte, stride int, src *float32, ld int, scales *float32"
	if scales != "" {
		params += ", " + scales
	}
	TEXT(name, NOSPLIT, "func("+params+", blocks int, rows int)")
	Pragma("noescape")
	Doc(name+" writes rows of values, which must be finite, as codes:", "",
		"\tfor i := range rows {",
		fmt.Sprintf("\t\tfor j := range %d * blocks {", s.block()),
		fmt.Sprintf("\t\t\tcode j of dst[stride*i:] = saturating code of src[ld*i+j] / %s", index),
		"\t\t}", "\t}")
	p := newPool(s)
	shift := 23 - f.mantissa
	magnitude := p.hold(1<<31 - 1)
	signs := p.hold(1 << (f.bits - 1))
	one := p.hold(1)
	most := p.holdFloat(f.max)
	round := p.hold(1<<(shift-1) - 1 - uint32(127-f.bias)<<23)
	normal := p.hold(uint32(127-f.bias+1) << 23)
	magic := p.holdFloat(f.magic)
	if math.Float32bits(f.magic)>>23 != uint32(127+23-(f.bias-1)-f.mantissa) {
		panic(f.name + ": magic is not worth the smallest subnormal")
	}
	codes := []reg.VecPhysical{p.take(), p.take()}
	store := f.store(p)
	y, a := p.take(), p.take()
	walks := []walk{{"dst", f.codeBytes(s), "stride", 1}, {"src", 4 * s.block(), "ld", 4}}
	var row func()
	var scale reg.Register
	if by == perRow {
		scale = p.take()
		row = rowScale(scale, nil)
	} else {
		walks = append(walks, walk{"scales", 4 * s.block(), "", 0})
	}
	grid(walks, row, func(at map[string]Mem) {
		for i, c := range codes {
			VMOVUPS(at["src"].Offset(4*s.lanes*i), y)
			if by == perRow {
				VDIVPS(scale, y, y)
			} else {
				VDIVPS(at["scales"].Offset(4*s.lanes*i), y, y)
			}
			and(s, magnitude, y, a)
			VMINPS(most, a, a)
			VPSRLD(Imm(uint64(shift)), a, c)
			and(s, one, c, c)
			VPADDD(round, c, c)
			VPADDD(a, c, c)
			VPSRLD(Imm(uint64(shift)), c, c)
			if s.wide() {
				VCMPPS(Imm(17), normal, a, reg.K2) // less than
				VADDPS(magic, a, a)
				VPSUBD(magic, a, reg.K2, c)
			} else {
				t := p.free[0]
				VCMPPS(Imm(17), normal, a, t)
				VADDPS(magic, a, a)
				VPSUBD(magic, a, a)
				VBLENDVPS(t, a, c, c)
			}
			VPSRLD(Imm(uint64(32-f.bits)), y, y)
			orAnd(s, y, signs, c)
		}
		store(codes[0], codes[1], at["dst"])
	})
}

// store returns the code that packs two registers of codes into memory, and spoils them.
func (f format) store(p *pool) func(x, y reg.VecPhysical, to Mem) {
	if f.bits == 8 && p.wide() {
		return func(x, y reg.VecPhysical, to Mem) {
			VPMOVDB(x, x.(reg.Vec).AsX())
			VPMOVDB(y, y.(reg.Vec).AsX())
			VMOVDQU32(x.(reg.Vec).AsX(), to)
			VMOVDQU32(y.(reg.Vec).AsX(), to.Offset(16))
		}
	}
	if f.bits == 8 {
		return func(x, y reg.VecPhysical, to Mem) {
			VPACKUSDW(y, x, x)
			VPERMQ(Imm(0xD8), x, x)
			VEXTRACTI128(Imm(1), x, y.(reg.Vec).AsX())
			VPACKUSWB(y.(reg.Vec).AsX(), x.(reg.Vec).AsX(), x.(reg.Vec).AsX())
			VMOVDQU(x.(reg.Vec).AsX(), to)
		}
	}
	// 12 bits: two neighbours become 24 bits at the head of their 64.
	t, table := p.take(), p.take()
	join := func(c reg.VecPhysical) {
		VPSRLQ(Imm(20), c, t)
		if p.wide() {
			VPORQ(t, c, c)
		} else {
			VPOR(t, c, c)
		}
		VPSHUFB(table, c, c)
	}
	if p.wide() {
		words := p.take()
		VBROADCASTI32X4(gather, table)
		VMOVDQU32(gatherWords, words)
		mask := GP32()
		MOVL(U32(0xFFF), mask)
		KMOVW(mask, reg.K1)
		return func(x, y reg.VecPhysical, to Mem) {
			join(x)
			join(y)
			VPERMT2W(y, words, x)
			VMOVDQU32(x, reg.K1, to) // 48 bytes
		}
	}
	VMOVDQU(gather, table.(reg.Vec).AsX())
	VINSERTI128(Imm(1), gatherUpper, table, table)
	return func(x, y reg.VecPhysical, to Mem) {
		lowX, lowY, lowT := x.(reg.Vec).AsX(), y.(reg.Vec).AsX(), t.(reg.Vec).AsX()
		for _, c := range []reg.VecPhysical{x, y} {
			join(c)
			VEXTRACTI128(Imm(1), c, lowT)
			VPOR(lowT, c.(reg.Vec).AsX(), c.(reg.Vec).AsX()) // 12 bytes
		}
		VPSLLDQ(Imm(12), lowY, lowT)
		VPOR(lowT, lowX, lowX)
		VMOVDQU(lowX, to)
		VPSRLDQ(Imm(4), lowY, lowY)
		VMOVQ(lowY, to.Offset(16))
	}
}

// encodeBF16 writes float32 as BF16, any value.
func encodeBF16(s isa) {
	name := "encodeBF16" + s.name
	TEXT(name, NOSPLIT, "func(dst *byte, stride int, src *float32, ld int, blocks int, rows int)")
	Pragma("noescape")
	Doc(name+" writes rows of values as codes:", "",
		"\tfor i := range rows {",
		fmt.Sprintf("\t\tfor j := range %d * blocks {", s.block()),
		"\t\t\tcode j of dst[stride*i:] = code of src[ld*i+j], not saturating",
		"\t\t}", "\t}")
	p := newPool(s)
	codes := []reg.VecPhysical{p.take(), p.take()}
	x, t := p.take(), p.take()
	one, round, quiet := p.hold(1), p.hold(0x7FFF), p.hold(0x40)
	grid([]walk{{"dst", 2 * s.block(), "stride", 1}, {"src", 4 * s.block(), "ld", 4}}, nil, func(at map[string]Mem) {
		for i, c := range codes {
			VMOVUPS(at["src"].Offset(4*s.lanes*i), x)
			VPSRLD(Imm(16), x, t)
			and(s, one, t, c)
			VPADDD(round, c, c)
			VPADDD(x, c, c)
			VPSRLD(Imm(16), c, c)
			if s.wide() {
				VCMPPS(Imm(3), x, x, reg.K1) // NaN
				VPORD(quiet, t, reg.K1, c)
			} else {
				VCMPPS(Imm(3), x, x, x)
				VPOR(quiet, t, t)
				VBLENDVPS(x, t, c, c)
			}
		}
		if s.wide() {
			for i, c := range codes {
				VPMOVDW(c, half(s, c))
				VMOVDQU32(half(s, c), at["dst"].Offset(32*i))
			}
			return
		}
		VPACKUSDW(codes[1], codes[0], codes[0])
		VPERMQ(Imm(0xD8), codes[0], codes[0])
		VMOVDQU(codes[0], at["dst"])
	})
}

// amaxTiles writes the largest magnitudes of rows.
func amaxTiles(s isa) {
	name := "amaxTiles" + s.name
	TEXT(name, NOSPLIT, "func(amax *uint32, step int, src *float32, ld int, blocks int, rows int)")
	Pragma("noescape")
	Doc(name+" raises amax to the largest magnitude of a row, as bits without the sign:", "",
		"\tfor i := range rows {",
		fmt.Sprintf("\t\tfor j := range %d * blocks {", s.block()),
		"\t\t\tamax[step*i] = max(amax[step*i], bits(abs(src[ld*i+j])))",
		"\t\t}", "\t}")
	p := newPool(s)
	magnitude := p.hold(1<<31 - 1)
	top := []reg.VecPhysical{p.take(), p.take()}
	x := []reg.VecPhysical{p.take(), p.take()}
	amax := Mem{Base: Load(Param("amax"), GP64())}
	src := Load(Param("src"), GP64())
	ld := Load(Param("ld"), GP64())
	blocks := Load(Param("blocks"), GP64())
	rows := Load(Param("rows"), GP64())
	step := Load(Param("step"), GP64())
	at, left := GP64(), GP64()
	SHLQ(Imm(2), ld)
	SHLQ(Imm(2), step)
	TESTQ(rows, rows)
	JZ(LabelRef("done"))
	TESTQ(blocks, blocks)
	JZ(LabelRef("done"))
	Label("row")
	for _, t := range top {
		VXORPS(t, t, t)
	}
	MOVQ(src, at)
	MOVQ(blocks, left)
	Label("block")
	for i := range x {
		and(s, Mem{Base: at}.Offset(4*s.lanes*i), magnitude, x[i])
		VPMAXUD(x[i], top[i], top[i])
	}
	ADDQ(Imm(uint64(4*s.block())), at)
	DECQ(left)
	JNZ(LabelRef("block"))
	VPMAXUD(top[1], top[0], top[0])
	if s.wide() {
		VEXTRACTI64X4(Imm(1), top[0], top[1].(reg.Vec).AsY())
		VPMAXUD(top[1].(reg.Vec).AsY(), top[0].(reg.Vec).AsY(), top[0].(reg.Vec).AsY())
	}
	a, b := top[0].(reg.Vec).AsX(), top[1].(reg.Vec).AsX()
	VEXTRACTI128(Imm(1), top[0].(reg.Vec).AsY(), b)
	VPMAXUD(b, a, a)
	VPSHUFD(Imm(0x4E), a, b)
	VPMAXUD(b, a, a)
	VPSHUFD(Imm(0xB1), a, b)
	VPMAXUD(b, a, a)
	VMOVD(amax, b)
	VPMAXUD(b, a, a)
	VMOVD(a, amax)
	ADDQ(step, amax.Base)
	ADDQ(ld, src)
	DECQ(rows)
	JNZ(LabelRef("row"))
	Label("done")
	VZEROUPPER()
	RET()
}

// amaxCols writes the largest magnitudes of columns.
func amaxCols(s isa) {
	name := "amaxCols" + s.name
	TEXT(name, NOSPLIT, "func(amax *uint32, src *float32, ld int, blocks int, rows int)")
	Pragma("noescape")
	Doc(name+" raises amax to the largest magnitude of a column, as bits without the sign:", "",
		"\tfor i := range rows {",
		fmt.Sprintf("\t\tfor j := range %d * blocks {", s.block()),
		"\t\t\tamax[j] = max(amax[j], bits(abs(src[ld*i+j])))",
		"\t\t}", "\t}")
	p := newPool(s)
	magnitude := p.hold(1<<31 - 1)
	x := []reg.VecPhysical{p.take(), p.take()}
	grid([]walk{{"amax", 4 * s.block(), "", 0}, {"src", 4 * s.block(), "ld", 4}}, nil, func(at map[string]Mem) {
		for i, v := range x {
			and(s, at["src"].Offset(4*s.lanes*i), magnitude, v)
			VPMAXUD(at["amax"].Offset(4*s.lanes*i), v, v)
			storeInts(s, v, at["amax"].Offset(4*s.lanes*i))
		}
	})
}

// storeInts stores a register.
func storeInts(s isa, r reg.VecPhysical, to Mem) {
	if s.wide() {
		VMOVDQU32(r, to)
	} else {
		VMOVDQU(r, to)
	}
}
