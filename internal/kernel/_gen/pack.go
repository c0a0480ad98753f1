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
	if s.lanes == 16 {
		transposeLines(s, base, ldsrc, ldsrc3, dst, lddst, lddst3, quads)
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

// transposeLines writes the main loop of transpose for 16 rows: 16 columns per turn, every cache line of the source read
// once and whole. Rows a power of two apart share the sets of the first cache level, where their lines would not survive
// until the next four columns.
//
// Eight columns at once: a register is put together from half a line of row i and half a line of row i+4, so that two
// rounds of unpacking within groups of 128 bits and one of shuffling whole groups are enough.
func transposeLines(s isa, base []reg.GPVirtual, ldsrc, ldsrc3, dst, lddst, lddst3, quads reg.Register) {
	turns := GP64()
	MOVQ(quads, turns)
	SHRQ(Imm(2), turns)
	JZ(LabelRef("rest"))
	x, y := s.regs[:8], s.regs[8:16]
	Label("lines")
	for half := range 2 {
		for i, r := range x { // rows 0 to 3 with 4 to 7, then rows 8 to 11 with 12 to 15
			g := i / 4 * 2
			VMOVUPS(line(base[g], ldsrc, ldsrc3, i%4).Offset(32*half), r.(reg.Vec).AsY())
			VINSERTF64X4(Imm(1), line(base[g+1], ldsrc, ldsrc3, i%4).Offset(32*half), r, r)
		}
		for g := 0; g < 8; g += 4 {
			VUNPCKLPS(x[g+1], x[g], y[g])
			VUNPCKHPS(x[g+1], x[g], y[g+1])
			VUNPCKLPS(x[g+3], x[g+2], y[g+2])
			VUNPCKHPS(x[g+3], x[g+2], y[g+3])
			VUNPCKLPD(y[g+2], y[g], x[g])
			VUNPCKHPD(y[g+2], y[g], x[g+1])
			VUNPCKLPD(y[g+3], y[g+1], x[g+2])
			VUNPCKHPD(y[g+3], y[g+1], x[g+3])
		}
		const even, odd = 0x88, 0xDD // groups of both registers
		for c := range 4 {
			VSHUFF32X4(Imm(even), x[4+c], x[c], y[c])
			VSHUFF32X4(Imm(odd), x[4+c], x[c], y[4+c])
		}
		for i, r := range y {
			VMOVUPS(r, line(dst, lddst, lddst3, i%4))
			if i%4 == 3 {
				LEAQ(Mem{Base: dst, Index: lddst, Scale: 4}, dst)
			}
		}
	}
	for _, p := range base {
		ADDQ(Imm(64), p)
	}
	DECQ(turns)
	JNZ(LabelRef("lines"))
	Label("rest")
	ANDQ(Imm(3), quads)
	JZ(LabelRef("done"))
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
