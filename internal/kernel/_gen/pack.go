package main

import (
	"fmt"

	. "github.com/mmcloughlin/avo/build"
	. "github.com/mmcloughlin/avo/operand"
	"github.com/mmcloughlin/avo/reg"
)

// transpose writes the packing routine: it turns rows into columns, `lanes` rows at once and four columns per turn.
//
// Row 4*l+i of the source belongs into lane group l (128 bits) of the result. A register is put together from the four
// values of rows i, 4+i, 8+i, ... ; two rounds of unpacking within the groups then give four finished columns.
func transpose(s isa) {
	name := "transpose" + s.name
	TEXT(name, NOSPLIT, "func(dst *float32, lddst int, src *float32, ldsrc int, quads int)")
	Pragma("noescape")
	Doc(
		fmt.Sprintf("%s copies %d rows of 4*quads values into columns:", name, s.lanes),
		"",
		"\tfor p := range 4 * quads {",
		fmt.Sprintf("\t\tfor i := range %d {", s.lanes),
		"\t\t\tdst[lddst*p+i] = src[ldsrc*i+p]",
		"\t\t}",
		"\t}",
		"",
		fmt.Sprintf("Columns are written whole and in order of p, so lddst may be less than %d when the caller means the", s.lanes),
		"surplus of one column to be overwritten by the next.",
	)
	groups := s.lanes / 4
	dst := Load(Param("dst"), GP64())
	lddst := Load(Param("lddst"), GP64())
	src := Load(Param("src"), GP64())
	ldsrc := Load(Param("ldsrc"), GP64())
	quads := Load(Param("quads"), GP64())
	TESTQ(quads, quads)
	JZ(LabelRef("done"))
	SHLQ(Imm(2), lddst)
	SHLQ(Imm(2), ldsrc)
	lddst3, ldsrc3 := GP64(), GP64()
	LEAQ(Mem{Base: lddst, Index: lddst, Scale: 2}, lddst3)
	LEAQ(Mem{Base: ldsrc, Index: ldsrc, Scale: 2}, ldsrc3)
	base := []reg.GPVirtual{GP64()}
	MOVQ(src, base[0])
	for g := 1; g < groups; g++ {
		base = append(base, GP64())
		LEAQ(Mem{Base: base[g-1], Index: ldsrc, Scale: 4}, base[g])
	}
	line := func(p reg.Register, ld, ld3 reg.Register, i int) Mem {
		switch i {
		case 0:
			return Mem{Base: p}
		case 3:
			return Mem{Base: p, Index: ld3, Scale: 1}
		}
		return Mem{Base: p, Index: ld, Scale: uint8(i)}
	}
	Label("loop")
	t, u, out := s.regs[0:4], s.regs[4:8], s.regs[8:12]
	for i := range t {
		VMOVUPS(line(base[0], ldsrc, ldsrc3, i), t[i].(reg.Vec).AsX())
		for g := 1; g < groups; g++ {
			if s.lanes == 16 {
				VINSERTF32X4(Imm(uint64(g)), line(base[g], ldsrc, ldsrc3, i), t[i], t[i])
			} else {
				VINSERTF128(Imm(uint64(g)), line(base[g], ldsrc, ldsrc3, i), t[i], t[i])
			}
		}
	}
	VUNPCKLPS(t[1], t[0], u[0])
	VUNPCKHPS(t[1], t[0], u[1])
	VUNPCKLPS(t[3], t[2], u[2])
	VUNPCKHPS(t[3], t[2], u[3])
	VUNPCKLPD(u[2], u[0], out[0])
	VUNPCKHPD(u[2], u[0], out[1])
	VUNPCKLPD(u[3], u[1], out[2])
	VUNPCKHPD(u[3], u[1], out[3])
	for i := range out {
		VMOVUPS(out[i], line(dst, lddst, lddst3, i))
	}
	for _, p := range base {
		ADDQ(Imm(16), p)
	}
	LEAQ(Mem{Base: dst, Index: lddst, Scale: 4}, dst)
	DECQ(quads)
	JNZ(LabelRef("loop"))
	Label("done")
	VZEROUPPER()
	RET()
}

// copyRows writes the packing routine for operands whose rows are already the columns of a panel.
func copyRows(s isa, vectors int) {
	cols := vectors * s.lanes
	name := fmt.Sprintf("copy%d%s", cols, s.name)
	TEXT(name, NOSPLIT, "func(dst *float32, lddst int, src *float32, ldsrc int, rows int)")
	Pragma("noescape")
	Doc(
		fmt.Sprintf("%s copies rows of %d values, in order:", name, cols),
		"",
		"\tfor p := range rows {",
		fmt.Sprintf("\t\tcopy(dst[lddst*p:][:%d], src[ldsrc*p:][:%d])", cols, cols),
		"\t}",
		"",
		fmt.Sprintf("lddst may be less than %d when the caller means the surplus of one row to be overwritten by the next.", cols),
	)
	dst := Load(Param("dst"), GP64())
	lddst := Load(Param("lddst"), GP64())
	src := Load(Param("src"), GP64())
	ldsrc := Load(Param("ldsrc"), GP64())
	rows := Load(Param("rows"), GP64())
	SHLQ(Imm(2), lddst)
	SHLQ(Imm(2), ldsrc)
	TESTQ(rows, rows)
	JZ(LabelRef("done"))
	Label("loop")
	for v := range vectors {
		VMOVUPS(Mem{Base: src, Disp: v * s.bytes()}, s.regs[v])
	}
	for v := range vectors {
		VMOVUPS(s.regs[v], Mem{Base: dst, Disp: v * s.bytes()})
	}
	ADDQ(ldsrc, src)
	ADDQ(lddst, dst)
	DECQ(rows)
	JNZ(LabelRef("loop"))
	Label("done")
	VZEROUPPER()
	RET()
}
