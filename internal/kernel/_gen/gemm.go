package main

import (
	"fmt"

	. "github.com/mmcloughlin/avo/build"
	. "github.com/mmcloughlin/avo/operand"
	"github.com/mmcloughlin/avo/reg"
)

// unroll is the number of steps along k in one turn of the main loop.
const unroll = 4

// gemmTile writes the microkernel for a tile of rows x (vectors*lanes), for A panels of panelRows rows.
//
// The tile stays in registers over the whole of k; per step it takes `vectors` loads of B, and per row one broadcast of
// A and `vectors` multiply-adds. The broadcast is an instruction of its own: folded into the multiply-add it would be
// executed once per vector.
//
// With panelRows 0 the rows of A are read where they are, a leading dimension apart.
func gemmTile(s isa, rows, vectors, panelRows int) {
	cols := vectors * s.lanes
	name := fmt.Sprintf("gemm%dx%d%s", rows, cols, s.name)
	params, from := "k int, a *float32", fmt.Sprintf("a panel of A (%d values per step of k)", panelRows)
	element := fmt.Sprintf("a[%d*p+i]", panelRows)
	if panelRows == 0 {
		name = fmt.Sprintf("gemmRows%dx%d%s", rows, cols, s.name)
		params, from, element = "k int, a *float32, lda int", "rows of A", "a[lda*i+p]"
	}
	TEXT(name, NOSPLIT, "func("+params+", b *float32, ldb int, c *float32, ldc int, alpha float32, beta float32)")
	Pragma("noescape")
	Doc(
		fmt.Sprintf("%s computes a tile of %d x %d values from %s and rows of B:", name, rows, cols, from),
		"",
		fmt.Sprintf("\tfor i := range %d {", rows),
		fmt.Sprintf("\t\tfor j := range %d {", cols),
		"\t\t\tvar sum float32",
		"\t\t\tfor p := range k {",
		fmt.Sprintf("\t\t\t\tsum = fma(%s, b[ldb*p+j], sum)", element),
		"\t\t\t}",
		"\t\t\tif beta == 0 {",
		"\t\t\t\tc[ldc*i+j] = alpha * sum",
		"\t\t\t} else {",
		"\t\t\t\tc[ldc*i+j] = fma(alpha, sum, beta*c[ldc*i+j])",
		"\t\t\t}",
		"\t\t}",
		"\t}",
	)
	acc := s.regs[:rows*vectors]
	bvec := s.regs[rows*vectors : rows*vectors+vectors]
	cast := s.regs[rows*vectors+vectors : rows*vectors+vectors+2]

	k := Load(Param("k"), GP64())
	b := Load(Param("b"), GP64())
	ldb := Load(Param("ldb"), GP64())
	SHLQ(Imm(2), ldb)
	ldb3 := GP64()
	LEAQ(Mem{Base: ldb, Index: ldb, Scale: 2}, ldb3)

	// Element i of column p of A, p counted from the loop's pointers. Three rows share a pointer.
	a := []reg.GPVirtual{Load(Param("a"), GP64()).(reg.GPVirtual)}
	column := func(p, i int) Mem { return Mem{Base: a[0], Disp: 4 * (panelRows*p + i)} }
	step4, step1 := 4*unroll*panelRows, 4*panelRows
	if panelRows == 0 {
		lda := Load(Param("lda"), GP64()).(reg.GPVirtual)
		SHLQ(Imm(2), lda)
		for i := 3; i < rows; i += 3 {
			next := GP64()
			LEAQ(Mem{Base: a[len(a)-1], Index: lda, Scale: 2}, next)
			ADDQ(lda, next)
			a = append(a, next)
		}
		column = func(p, i int) Mem {
			at := Mem{Base: a[i/3], Disp: 4 * p}
			if i%3 > 0 {
				at.Index, at.Scale = lda, uint8(i%3)
			}
			return at
		}
		step4, step1 = 4*unroll, 4
	}

	Comment("Ask for the tile of C now, it is needed after the loop.")
	row := Load(Param("c"), GP64())
	ldcEarly := Load(Param("ldc"), GP64())
	SHLQ(Imm(2), ldcEarly)
	for i := 0; i < rows; i++ {
		PREFETCHT0(Mem{Base: row})
		if vectors*s.bytes() > 64 {
			PREFETCHT0(Mem{Base: row, Disp: vectors*s.bytes() - 4})
		}
		if i < rows-1 {
			ADDQ(ldcEarly, row)
		}
	}
	for _, r := range acc {
		zero(s, r)
	}

	// step multiplies column p of the A panel with row p of B, p counted from the loop's pointers.
	step := func(p int) {
		from := Mem{Base: b}
		switch p {
		case 1:
			from = Mem{Base: b, Index: ldb, Scale: 1}
		case 2:
			from = Mem{Base: b, Index: ldb, Scale: 2}
		case 3:
			from = Mem{Base: b, Index: ldb3, Scale: 1}
		}
		for v := range bvec {
			VMOVUPS(from.Offset(v*s.bytes()), bvec[v])
		}
		for i := 0; i < rows; i++ {
			VBROADCASTSS(column(p, i), cast[i%2])
			for v := range bvec {
				VFMADD231PS(cast[i%2], bvec[v], acc[i*vectors+v])
			}
		}
	}
	turns := GP64()
	MOVQ(k, turns)
	SHRQ(Imm(2), turns)
	JZ(LabelRef("tail"))
	Label("loop")
	for p := 0; p < unroll; p++ {
		step(p)
	}
	for _, p := range a {
		ADDQ(Imm(uint64(step4)), p)
	}
	LEAQ(Mem{Base: b, Index: ldb, Scale: 4}, b)
	DECQ(turns)
	JNZ(LabelRef("loop"))
	Label("tail")
	ANDQ(Imm(unroll-1), k)
	JZ(LabelRef("store"))
	Label("one")
	step(0)
	for _, p := range a {
		ADDQ(Imm(uint64(step1)), p)
	}
	ADDQ(ldb, b)
	DECQ(k)
	JNZ(LabelRef("one"))

	Label("store")
	c := Load(Param("c"), GP64())
	ldc := Load(Param("ldc"), GP64())
	SHLQ(Imm(2), ldc)
	alpha, beta := cast[0], cast[1]
	VBROADCASTSS(param("alpha"), alpha)
	betaBits := GP32()
	MOVL(param("beta"), betaBits)
	ADDL(betaBits, betaBits) // drops the sign: -0 is a zero too
	JZ(LabelRef("overwrite"))
	VBROADCASTSS(param("beta"), beta)
	for i := 0; i < rows; i++ {
		for v := range bvec {
			at := Mem{Base: c, Disp: v * s.bytes()}
			VMULPS(at, beta, bvec[v])
			VFMADD231PS(acc[i*vectors+v], alpha, bvec[v])
			VMOVUPS(bvec[v], at)
		}
		if i < rows-1 {
			ADDQ(ldc, c)
		}
	}
	VZEROUPPER()
	RET()
	Label("overwrite")
	for i := 0; i < rows; i++ {
		for v := range bvec {
			VMULPS(acc[i*vectors+v], alpha, acc[i*vectors+v])
			VMOVUPS(acc[i*vectors+v], Mem{Base: c, Disp: v * s.bytes()})
		}
		if i < rows-1 {
			ADDQ(ldc, c)
		}
	}
	VZEROUPPER()
	RET()
}

// param is a parameter as a memory operand.
func param(name string) Mem {
	c, err := Param(name).Resolve()
	if err != nil {
		panic(err)
	}
	return c.Addr
}

// zero clears a register; AVX512F has the integer form only, VXORPS of 512 bits asks for more.
func zero(s isa, r reg.VecPhysical) {
	if s.lanes == 16 {
		VPXORD(r, r, r)
	} else {
		VXORPS(r, r, r)
	}
}
