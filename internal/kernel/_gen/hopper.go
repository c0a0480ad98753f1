package main

import (
	"fmt"
	"math"

	. "github.com/mmcloughlin/avo/build"
	. "github.com/mmcloughlin/avo/operand"
	"github.com/mmcloughlin/avo/reg"
)

// hopperGroup is the number of products that an emulated tensor core adds at once, hopperBits what it keeps of them.
const (
	hopperGroup = 32
	hopperBits  = 14
)

// Exponents, as the bits of a float32 have them.
const (
	// The unit of a group whose largest summand has exponent e is 2^(e-127-(hopperBits-1)); from lowestTop on it and its
	// inverse are normal numbers, 0xFF is no number.
	lowestTop = hopperBits << 23
	noNumber  = 0xFF << 23
	// bits(1/unit) is unitInverse less the exponent of the largest, bits(unit) is reciprocal-bits(1/unit).
	unitInverse = (2*127 + hopperBits - 1) << 23
	reciprocal  = 2 * 127 << 23
)

var hopperData = map[string]Mem{}

// defineHopper writes the constants of the routines below.
func defineHopper() {
	for _, c := range []struct {
		name  string
		value uint32
	}{
		{"magnitude", math.MaxInt32},
		{"ones", math.MaxUint32},
		{"lowestTop", lowestTop},
		{"noNumber", noNumber},
		{"unitInverse", unitInverse},
		{"reciprocal", reciprocal},
	} {
		hopperData[c.name] = ConstData(c.name, U32(c.value))
	}
}

func hopperConstant(name string, r reg.VecPhysical) reg.VecPhysical {
	VBROADCASTSS(hopperData[name], r)
	return r
}

// and writes dst = x & y.
func and(s isa, x, y, dst Op) {
	if s.lanes == 16 {
		VPANDD(x, y, dst)
	} else {
		VANDPS(x, y, dst)
	}
}

// hopperAdd writes the routine for a tile of rows x (vectors*lanes) sums. It passes over the products twice: once for the
// largest, whose exponent decides the unit of each lane, and once to cut and add them. Divided by the unit, summands are
// below 2^hopperBits, so a conversion to int32 cuts them and the sum of integers is exact.
//
// The first pass multiplies magnitudes, which saves taking that of every product; those of A wait on the stack.
func hopperAdd(s isa, rows, vectors int) {
	cols := vectors * s.lanes
	name := fmt.Sprintf("hopper%dx%d%s", rows, cols, s.name)
	TEXT(name, NOSPLIT, "func(k int, a *float32, b *float32, sums *float32) bool")
	Pragma("noescape")
	Doc(
		fmt.Sprintf("%s adds products of a group, 0 < k <= %d, to a tile of %d x %d sums:", name, hopperGroup, rows, cols),
		"",
		fmt.Sprintf("\tfor i := range %d {", rows),
		fmt.Sprintf("\t\tfor j := range %d {", cols),
		fmt.Sprintf("\t\t\tsums[%d*i+j] = hopperAdd(sums[%d*i+j], a[%d*i:][:k], b[j:])", scaledWidth, scaledWidth, scaledDepth),
		"\t\t}",
		"\t}",
		"",
		"It returns false, and leaves the sums as they are, if one has a summand that is not finite, or none from",
		fmt.Sprintf("2^%d on except zeros. Rows of A must have %d values, of which those from k on count for nothing.",
			lowestTop>>23-127, hopperGroup),
	)
	n := rows * vectors
	regs := s.regs
	take := func(n int) (list []reg.VecPhysical) {
		list, regs = regs[:n], regs[n:]
		return list
	}
	scale, total, bvec, cast, tmp, constants := take(n), take(n), take(vectors), take(2), take(2), take(3)
	top := scale // until it is known

	k := Load(Param("k"), GP64())
	a := Load(Param("a"), GP64())
	b := Load(Param("b"), GP64())
	sums := Load(Param("sums"), GP64())
	sum := func(i, v int) Mem { return Mem{Base: sums, Disp: 4*scaledWidth*i + v*s.bytes()} }

	Comment("Magnitudes of A.")
	magnitudes := AllocLocal(4 * hopperGroup * rows)
	mask := hopperConstant("magnitude", constants[0])
	for i := range rows {
		for at := 0; at < 4*hopperGroup; at += s.bytes() {
			and(s, Mem{Base: a, Disp: 4*scaledDepth*i + at}, mask, tmp[0])
			VMOVUPS(tmp[0], magnitudes.Offset(4*hopperGroup*i+at))
		}
	}

	// pass writes a loop over the steps. It gets the values of A at base, rows pitch values apart.
	pass := func(label string, base Mem, pitch int, loadB func(from Mem, v int), step func(i, v int, x reg.VecPhysical)) {
		p, q, left := GP64(), GP64(), GP64()
		LEAQ(base, p)
		MOVQ(b, q)
		MOVQ(k, left)
		Label(label)
		for v := range bvec {
			loadB(Mem{Base: q, Disp: v * s.bytes()}, v)
		}
		for i := range rows {
			x := cast[i%len(cast)]
			VBROADCASTSS(Mem{Base: p, Disp: 4 * pitch * i}, x)
			for v := range bvec {
				step(i, v, x)
			}
		}
		ADDQ(Imm(4), p)
		ADDQ(U32(4*scaledWidth), q)
		DECQ(left)
		JNZ(LabelRef(label))
	}

	Comment("The largest summand.")
	for i := range rows {
		for v := range vectors {
			and(s, sum(i, v), mask, top[i*vectors+v])
		}
	}
	pass("largest", magnitudes, hopperGroup,
		func(from Mem, v int) { and(s, from, mask, bvec[v]) },
		func(i, v int, x reg.VecPhysical) {
			t := tmp[(i*vectors+v)%len(tmp)]
			VMULPS(bvec[v], x, t)
			VPMAXUD(t, top[i*vectors+v], top[i*vectors+v])
		})

	Comment("The largest and the least of these, with zero counted as large, and 1/unit.")
	highest, lowest, t := bvec[0], cast[0], tmp[0]
	ones, least := hopperConstant("ones", tmp[1]), hopperConstant("lowestTop", cast[1])
	exponent, inverse := hopperConstant("noNumber", constants[1]), hopperConstant("unitInverse", constants[2])
	for i, r := range top {
		if i == 0 {
			and(s, r, mask, highest) // 0*Inf has a sign
			VPADDD(ones, highest, lowest)
		} else {
			and(s, r, mask, t)
			VPMAXUD(t, highest, highest)
			VPADDD(ones, t, t)
			VPMINUD(t, lowest, lowest)
		}
		VPMAXUD(least, r, r)
		and(s, r, exponent, r)
		VPSUBD(r, inverse, r)
	}
	VPADDD(ones, least, t) // a zero less one is above all
	if s.lanes == 16 {
		const notBelow, below = 5, 1
		numbers, normal := K(), K()
		VPCMPUD(Imm(below), exponent, highest, numbers)
		VPCMPUD(Imm(notBelow), t, lowest, normal)
		KANDW(numbers, normal, normal)
		KORTESTW(normal, normal)
		JCC(LabelRef("special")) // carry: all lanes
	} else {
		VPMAXUD(lowest, t, t)
		VPCMPEQD(lowest, t, t)
		VPCMPGTD(highest, exponent, highest)
		VPAND(highest, t, t)
		lanes := GP32()
		VMOVMSKPS(t, lanes)
		CMPL(lanes, Imm(1<<s.lanes-1))
		JNE(LabelRef("special"))
	}

	Comment("Summands in units, cut.")
	for i := range rows {
		for v := range vectors {
			at := i*vectors + v
			VMULPS(sum(i, v), scale[at], total[at])
			VCVTTPS2DQ(total[at], total[at])
		}
	}
	pass("add", Mem{Base: a}, scaledDepth,
		func(from Mem, v int) { VMOVUPS(from, bvec[v]) },
		func(i, v int, x reg.VecPhysical) {
			at := i*vectors + v
			t := tmp[at%len(tmp)]
			VMULPS(bvec[v], x, t)
			VMULPS(scale[at], t, t)
			VCVTTPS2DQ(t, t)
			VPADDD(t, total[at], total[at])
		})
	one := hopperConstant("reciprocal", constants[0])
	for i := range rows {
		for v := range vectors {
			at := i*vectors + v
			VCVTDQ2PS(total[at], total[at])
			VPSUBD(scale[at], one, scale[at])
			VMULPS(scale[at], total[at], total[at])
			VMOVUPS(total[at], sum(i, v))
		}
	}
	ok := GP8()
	MOVB(Imm(1), ok)
	Store(ok, ReturnIndex(0))
	VZEROUPPER()
	RET()
	Label("special")
	no := GP8()
	MOVB(Imm(0), no)
	Store(no, ReturnIndex(0))
	VZEROUPPER()
	RET()
}

// hopperPromote writes the routine that adds sums to C, a panel wide.
func hopperPromote(s isa) {
	name := "hopperPromote" + s.name
	TEXT(name, NOSPLIT, "func(rows int, sums *float32, c *float32, ldc int, rowScale *float32, colScale *float32)")
	Pragma("noescape")
	Doc(
		fmt.Sprintf("%s adds sums with their scales to C, and clears them; rows is positive:", name),
		"",
		"\tfor i := range rows {",
		fmt.Sprintf("\t\tfor j := range %d {", scaledWidth),
		fmt.Sprintf("\t\t\tc[ldc*i+j] += float32(float32(sums[%d*i+j]*rowScale[i]) * colScale[j])", scaledWidth),
		fmt.Sprintf("\t\t\tsums[%d*i+j] = 0", scaledWidth),
		"\t\t}",
		"\t}",
	)
	vectors := scaledWidth / s.lanes
	cols, cast, nought, t := s.regs[:vectors], s.regs[vectors], s.regs[vectors+1], s.regs[vectors+2:][:2]
	rows := Load(Param("rows"), GP64())
	sums := Mem{Base: Load(Param("sums"), GP64())}
	c := Mem{Base: Load(Param("c"), GP64())}
	ldc := Load(Param("ldc"), GP64())
	SHLQ(Imm(2), ldc)
	rowScale := Mem{Base: Load(Param("rowScale"), GP64())}
	colScale := Mem{Base: Load(Param("colScale"), GP64())}
	for v, r := range cols {
		VMOVUPS(colScale.Offset(v*s.bytes()), r)
	}
	zero(s, nought)
	Label("row")
	VBROADCASTSS(rowScale, cast)
	for v, r := range cols {
		x, at := t[v%len(t)], v*s.bytes()
		VMULPS(sums.Offset(at), cast, x)
		VMULPS(r, x, x)
		VADDPS(c.Offset(at), x, x)
		VMOVUPS(x, c.Offset(at))
		VMOVUPS(nought, sums.Offset(at))
	}
	ADDQ(Imm(4), rowScale.Base)
	ADDQ(U32(4*scaledWidth), sums.Base)
	ADDQ(ldc, c.Base)
	DECQ(rows)
	JNZ(LabelRef("row"))
	VZEROUPPER()
	RET()
}
