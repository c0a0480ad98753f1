package main

import (
	. "github.com/mmcloughlin/avo/build"
	. "github.com/mmcloughlin/avo/operand"
	"github.com/mmcloughlin/avo/reg"
)

// sumLanes is the number of running sums of a reduction, the same for both instruction sets: sums of one kind come out
// with the same bits on both, and in plain Go.
const sumLanes = 32

// add writes dst += src.
func add(s isa) {
	vectorText("add"+s.name, "dst *float32, src *float32",
		"\tfor i := range lanes * vectors {",
		"\t\tdst[i] += src[i]",
		"\t}")
	x := s.regs[0]
	vectorLoop(s, []string{"dst", "src"}, func(at []Mem) {
		VMOVUPS(at[0], x)
		VADDPS(at[1], x, x)
		VMOVUPS(x, at[0])
	})
	VZEROUPPER()
	RET()
}

// axpy writes dst += a*src. Product and sum are rounded each, as in plain Go.
func axpy(s isa) {
	vectorText("axpy"+s.name, "dst *float32, a float32, src *float32",
		"\tfor i := range lanes * vectors {",
		"\t\tdst[i] += a * src[i]",
		"\t}")
	x, a := s.regs[0], s.regs[1]
	VBROADCASTSS(param("a"), a)
	vectorLoop(s, []string{"dst", "src"}, func(at []Mem) {
		VMULPS(at[1], a, x)
		VADDPS(at[0], x, x)
		VMOVUPS(x, at[0])
	})
	VZEROUPPER()
	RET()
}

// scaled writes dst = a*src.
func scaled(s isa) {
	vectorText("scaled"+s.name, "dst *float32, a float32, src *float32",
		"\tfor i := range lanes * vectors {",
		"\t\tdst[i] = a * src[i]",
		"\t}")
	x, a := s.regs[0], s.regs[1]
	VBROADCASTSS(param("a"), a)
	vectorLoop(s, []string{"dst", "src"}, func(at []Mem) {
		VMULPS(at[1], a, x)
		VMOVUPS(x, at[0])
	})
	VZEROUPPER()
	RET()
}

// finite writes the search for numbers that are not finite.
func finite(s isa) {
	vectorText("finite"+s.name, "sums *float32, src *float32",
		"\tfor i := range lanes * vectors {",
		"\t\tsums[i%lanes] += src[i] - src[i] // 0, or NaN once and for all",
		"\t}")
	x, sum := s.regs[0], s.regs[1]
	sums := Mem{Base: Load(Param("sums"), GP64())}
	VMOVUPS(sums, sum)
	vectorLoop(s, []string{"src"}, func(at []Mem) {
		VMOVUPS(at[0], x)
		VSUBPS(x, x, x)
		VADDPS(x, sum, sum)
	})
	VMOVUPS(sum, sums)
	VZEROUPPER()
	RET()
}

// rmsNorm writes the second half of the norm of a row.
func rmsNorm(s isa) {
	vectorText("rmsNorm"+s.name, "dst *float32, src *float32, gain *float32, rstd float32",
		"\tfor i := range lanes * vectors {",
		"\t\tdst[i] = src[i] * rstd * gain[i]",
		"\t}")
	x, rstd := s.regs[0], s.regs[1]
	VBROADCASTSS(param("rstd"), rstd)
	vectorLoop(s, []string{"dst", "src", "gain"}, func(at []Mem) {
		VMULPS(at[1], rstd, x)
		VMULPS(at[2], x, x)
		VMOVUPS(x, at[0])
	})
	VZEROUPPER()
	RET()
}

// rmsNormGrad writes the second half of the backward of the norm of a row.
func rmsNormGrad(s isa) {
	vectorText("rmsNormGrad"+s.name, "dx *float32, dgain *float32, dy *float32, x *float32, gain *float32, rstd float32, mean float32",
		"\tfor i := range lanes * vectors {",
		"\t\tdgain[i] += dy[i] * (x[i] * rstd)",
		"\t\tdx[i] = rstd * (dy[i]*gain[i] - x[i]*mean)",
		"\t}")
	rstd, mean, d, v, t := s.regs[0], s.regs[1], s.regs[2], s.regs[3], s.regs[4]
	VBROADCASTSS(param("rstd"), rstd)
	VBROADCASTSS(param("mean"), mean)
	vectorLoop(s, []string{"dx", "dgain", "dy", "x", "gain"}, func(at []Mem) {
		VMOVUPS(at[2], d)
		VMOVUPS(at[3], v)
		VMULPS(v, rstd, t)
		VMULPS(d, t, t)
		VADDPS(at[1], t, t)
		VMOVUPS(t, at[1])
		VMULPS(at[4], d, d)
		VMULPS(v, mean, v)
		VSUBPS(v, d, d)
		VMULPS(d, rstd, d)
		VMOVUPS(d, at[0])
	})
	VZEROUPPER()
	RET()
}

// sums writes the reductions: sums of squares, inner products, and inner products with a third row as weights. All
// multiply in float64, where the product of two float32 is exact, so that fusing changes nothing.
func sums(s isa) {
	squares := []string{"x"}
	product := []string{"x", "y"}
	weighted := []string{"x", "y", "gain"}
	for _, c := range []struct {
		name    string
		inputs  []string
		summand string
	}{
		{"sumSquares", squares, "float64(x[i]) * float64(x[i])"},
		{"dot", product, "float64(x[i]) * float64(y[i])"},
		{"dotWeighted", weighted, "float64(x[i]) * float64(y[i]*gain[i])"},
	} {
		params := "sums *float64"
		for _, p := range c.inputs {
			params += ", " + p + " *float32"
		}
		name := c.name + s.name
		TEXT(name, NOSPLIT, "func("+params+", blocks int)")
		Pragma("noescape")
		Doc(name+" adds to 32 running sums:", "",
			"\tfor i := range 32 * blocks {",
			"\t\tsums[i%32] += "+c.summand,
			"\t}")
		wide := s.lanes / 2 // float64 values of a register
		n := sumLanes / wide
		acc := s.regs[:n]
		sums := Mem{Base: Load(Param("sums"), GP64())}
		at := map[string]Mem{}
		for _, p := range c.inputs {
			at[p] = Mem{Base: Load(Param(p), GP64())}
		}
		blocks := Load(Param("blocks"), GP64())
		for i, r := range acc {
			VMOVUPD(sums.Offset(i*s.bytes()), r)
		}
		TESTQ(blocks, blocks)
		JZ(LabelRef("done"))
		Label("loop")
		for i, r := range acc {
			x, y := s.regs[n+2*(i%2)], s.regs[n+2*(i%2)+1]
			from := i * wide * 4
			VCVTPS2PD(at["x"].Offset(from), x)
			switch len(c.inputs) {
			case 1:
				y = x
			case 2:
				VCVTPS2PD(at["y"].Offset(from), y)
			case 3:
				half := halfOf(s, y)
				VMOVUPS(at["y"].Offset(from), half)
				VMULPS(at["gain"].Offset(from), half, half)
				VCVTPS2PD(half, y)
			}
			VFMADD231PD(x, y, r)
		}
		for _, p := range c.inputs {
			ADDQ(Imm(sumLanes*4), at[p].Base)
		}
		DECQ(blocks)
		JNZ(LabelRef("loop"))
		Label("done")
		for i, r := range acc {
			VMOVUPD(r, sums.Offset(i*s.bytes()))
		}
		VZEROUPPER()
		RET()
	}
}

// halfOf is the register that holds half as many values.
func halfOf(s isa, r reg.VecPhysical) reg.Register {
	if s.lanes == 16 {
		return r.(reg.Vec).AsY()
	}
	return r.(reg.Vec).AsX()
}
