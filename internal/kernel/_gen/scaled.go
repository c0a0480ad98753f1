package main

import (
	"fmt"

	. "github.com/mmcloughlin/avo/build"
	. "github.com/mmcloughlin/avo/operand"
)

// The strides of a scaled tile's operands are constants, so that every address of the inner loop is a displacement: a
// row of A is as long as the partial sums of a scaled product are deep, a row of B as wide as its panels.
const (
	scaledDepth = 128
	scaledWidth = 32
)

// scaledTile writes the microkernel of scaled products for a tile of rows x (vectors*lanes): the sums stay in registers as
// in gemmTile, and are scaled by row and by column when they are stored.
func scaledTile(s isa, rows, vectors int) {
	cols := vectors * s.lanes
	name := fmt.Sprintf("scaled%dx%d%s", rows, cols, s.name)
	TEXT(name, NOSPLIT, "func(k int, a *float32, b *float32, c *float32, ldc int, rowScale *float32, colScale *float32, accumulate bool)")
	Pragma("noescape")
	Doc(
		fmt.Sprintf("%s computes a tile of %d x %d values from rows of A and of B:", name, rows, cols),
		"",
		fmt.Sprintf("\tfor i := range %d {", rows),
		fmt.Sprintf("\t\tfor j := range %d {", cols),
		"\t\t\tvar sum float32",
		"\t\t\tfor p := range k {",
		fmt.Sprintf("\t\t\t\tsum = fma(a[%d*i+p], b[%d*p+j], sum)", scaledDepth, scaledWidth),
		"\t\t\t}",
		"\t\t\tsum *= rowScale[i]",
		"\t\t\tif accumulate {",
		"\t\t\t\tc[ldc*i+j] = fma(sum, colScale[j], c[ldc*i+j])",
		"\t\t\t} else {",
		"\t\t\t\tc[ldc*i+j] = sum * colScale[j]",
		"\t\t\t}",
		"\t\t}",
		"\t}",
	)
	acc := s.regs[:rows*vectors]
	bvec := s.regs[rows*vectors : rows*vectors+vectors]
	cast := s.regs[rows*vectors+vectors : rows*vectors+vectors+2]

	k := Load(Param("k"), GP64())
	a := Load(Param("a"), GP64())
	b := Load(Param("b"), GP64())
	c := Load(Param("c"), GP64())
	ldc := Load(Param("ldc"), GP64())
	SHLQ(Imm(2), ldc)

	ask := askForRows(s, c, ldc, rows, vectors)
	for _, r := range acc {
		zero(s, r)
	}
	step := func(p int) {
		for v := range bvec {
			VMOVUPS(Mem{Base: b, Disp: 4*scaledWidth*p + v*s.bytes()}, bvec[v])
		}
		for i := range rows {
			VBROADCASTSS(Mem{Base: a, Disp: 4 * (scaledDepth*i + p)}, cast[i%2])
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
	ask()
	for p := range unroll {
		step(p)
	}
	ADDQ(Imm(4*unroll), a)
	ADDQ(U32(4*scaledWidth*unroll), b)
	DECQ(turns)
	JNZ(LabelRef("loop"))
	Label("tail")
	ANDQ(Imm(unroll-1), k)
	JZ(LabelRef("store"))
	Label("one")
	step(0)
	ADDQ(Imm(4), a)
	ADDQ(U32(4*scaledWidth), b)
	DECQ(k)
	JNZ(LabelRef("one"))

	Label("store")
	rowScale := Mem{Base: Load(Param("rowScale"), GP64())}
	colScale := Mem{Base: Load(Param("colScale"), GP64())}
	for v := range bvec {
		VMOVUPS(colScale.Offset(v*s.bytes()), bvec[v])
	}
	accumulate := Load(Param("accumulate"), GP8())
	TESTB(accumulate, accumulate)
	JZ(LabelRef("overwrite"))
	for _, add := range []bool{true, false} {
		if !add {
			Label("overwrite")
		}
		for i := range rows {
			VBROADCASTSS(rowScale.Offset(4*i), cast[i%2])
			for v := range bvec {
				sum, at := acc[i*vectors+v], Mem{Base: c, Disp: v * s.bytes()}
				VMULPS(cast[i%2], sum, sum)
				if add {
					VFMADD213PS(at, bvec[v], sum)
				} else {
					VMULPS(bvec[v], sum, sum)
				}
				VMOVUPS(sum, at)
			}
			if i < rows-1 {
				ADDQ(ldc, c)
			}
		}
		VZEROUPPER()
		RET()
	}
}

// prefetch writes a loop that asks for memory before it is needed.
func prefetch() {
	TEXT("prefetchLines", NOSPLIT, "func(p *byte, lines int)")
	Pragma("noescape")
	Doc("prefetchLines asks for cache lines of 64 bytes, of which there is at least one.")
	p := Mem{Base: Load(Param("p"), GP64())}
	lines := Load(Param("lines"), GP64())
	Label("loop")
	PREFETCHT0(p)
	ADDQ(Imm(64), p.Base)
	DECQ(lines)
	JNZ(LabelRef("loop"))
	RET()
}
