package main

import (
	"fmt"

	. "github.com/mmcloughlin/avo/build"
	. "github.com/mmcloughlin/avo/operand"
	"github.com/mmcloughlin/avo/reg"
)

// unroll is the number of steps along k in one turn of the main loop.
const unroll = 4

// askBefore is how many turns before the end of the main loop the last row of C is asked for. One row in a turn: of all rows
// asked for at once many are dropped. Rows below the tile, which the last turns ask for, are those of the next one.
const askBefore = 8

// gemmTile writes the microkernel for a tile of rows x (vectors*lanes).
//
// The tile stays in registers over the whole of k; per step it takes `vectors` loads of B, and per row one broadcast of
// A and `vectors` multiply-adds. The broadcast is an instruction of its own: folded into the multiply-add it would be
// executed once per vector.
//
// There are two forms by how A lies in memory: with byColumns the values of one step of k stand side by side (a packed
// panel, or a transposed operand in place), without it those of one row.
func gemmTile(s isa, rows, vectors int, byColumns bool) {
	cols := vectors * s.lanes
	form, from, element := "Rows", "rows of A", "a[lda*i+p]"
	if byColumns {
		form, from, element = "Cols", "columns of A", "a[lda*p+i]"
	}
	name := fmt.Sprintf("gemm%s%dx%d%s", form, rows, cols, s.name)
	TEXT(name, NOSPLIT, "func(k int, a *float32, lda int, b *float32, ldb int, c *float32, ldc int, alpha float32, beta float32, ahead uintptr, stride int)")
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
		"",
		"Every four steps it asks for 128 bytes at ahead, and moves that by stride values.",
	)
	acc := s.regs[:rows*vectors]
	bvec := s.regs[rows*vectors : rows*vectors+vectors]
	cast := s.regs[rows*vectors+vectors : rows*vectors+vectors+2]

	b := Load(Param("b"), GP64())
	ldb := Load(Param("ldb"), GP64())
	SHLQ(Imm(2), ldb)
	ldb3 := GP64()
	LEAQ(Mem{Base: ldb, Index: ldb, Scale: 2}, ldb3)

	// Element i of column p of A, p counted from the loop's pointers.
	a := []reg.GPVirtual{Load(Param("a"), GP64()).(reg.GPVirtual)}
	lda := Load(Param("lda"), GP64()).(reg.GPVirtual)
	SHLQ(Imm(2), lda)
	var column func(p, i int) Mem
	var next func(steps int)
	if byColumns {
		lda3 := GP64()
		LEAQ(Mem{Base: lda, Index: lda, Scale: 2}, lda3)
		column = func(p, i int) Mem { return line(a[0], lda, lda3, p).Offset(4 * i) }
		next = func(steps int) { LEAQ(Mem{Base: a[0], Index: lda, Scale: uint8(steps)}, a[0]) }
	} else {
		for i := 3; i < rows; i += 3 { // three rows share a pointer
			q := GP64()
			LEAQ(Mem{Base: a[len(a)-1], Index: lda, Scale: 2}, q)
			ADDQ(lda, q)
			a = append(a, q)
		}
		column = func(p, i int) Mem { return line(a[i/3], lda, nil, i%3).Offset(4 * p) }
		next = func(steps int) {
			for _, q := range a {
				ADDQ(Imm(uint64(4*steps)), q)
			}
		}
	}

	row, rowStep := Load(Param("c"), GP64()), Load(Param("ldc"), GP64())
	SHLQ(Imm(2), rowStep)
	ahead, stride := Load(Param("ahead"), GP64()), Load(Param("stride"), GP64())
	SHLQ(Imm(2), stride)
	for _, r := range acc {
		zero(s, r)
	}

	// step multiplies column p of A with row p of B, p counted from the loop's pointers.
	step := func(p int) {
		from := line(b, ldb, ldb3, p)
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
	Load(Param("k"), turns)
	SHRQ(Imm(2), turns)
	JZ(LabelRef("tail"))
	Label("loop")
	PREFETCHT1(Mem{Base: ahead}) // into the second level: the first is full of what is in use
	PREFETCHT1(Mem{Base: ahead, Disp: 64})
	ADDQ(stride, ahead)
	CMPQ(turns, Imm(uint64(rows+askBefore)))
	JHI(LabelRef("multiply"))
	PREFETCHT0(Mem{Base: row})
	if vectors*s.bytes() > 64 {
		PREFETCHT0(Mem{Base: row, Disp: vectors*s.bytes() - 4})
	}
	ADDQ(rowStep, row)
	Label("multiply")
	for p := 0; p < unroll; p++ {
		step(p)
	}
	next(unroll)
	LEAQ(Mem{Base: b, Index: ldb, Scale: 4}, b)
	DECQ(turns)
	JNZ(LabelRef("loop"))
	Label("tail")
	k := Load(Param("k"), GP64())
	ANDQ(Imm(unroll-1), k)
	JZ(LabelRef("store"))
	Label("one")
	step(0)
	next(1)
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

// askForRows returns what asks for the next row of a tile of C, which is needed after the loop, and at the last row stays
// there. c is where the tile begins, and ldc how many bytes its rows lie apart. One row in a turn of the loop: of all rows
// asked for at once many are dropped.
func askForRows(s isa, c, ldc reg.Register, rows, vectors int) func() {
	row, last := GP64(), GP64()
	MOVQ(c, row)
	IMUL3Q(Imm(uint64(rows-1)), ldc, last)
	ADDQ(c, last)
	return func() {
		PREFETCHT0(Mem{Base: row})
		if vectors*s.bytes() > 64 {
			PREFETCHT0(Mem{Base: row, Disp: vectors*s.bytes() - 4})
		}
		ADDQ(ldc, row)
		CMPQ(row, last)
		CMOVQHI(last, row)
	}
}

// line is where row i (0 to 3) begins when rows lie ld bytes apart; ld3 is three times ld, for row 3.
func line(p, ld, ld3 reg.Register, i int) Mem {
	switch i {
	case 0:
		return Mem{Base: p}
	case 3:
		return Mem{Base: p, Index: ld3, Scale: 1}
	}
	return Mem{Base: p, Index: ld, Scale: uint8(i)}
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
