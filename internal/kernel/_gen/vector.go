package main

import (
	"math"

	. "github.com/mmcloughlin/avo/build"
	. "github.com/mmcloughlin/avo/operand"
	"github.com/mmcloughlin/avo/reg"
)

// Constants of the exponential; exp.go of package kernel says where they come from.
var expConstants = []struct {
	name  string
	value uint32
}{
	{"log2E", math.Float32bits(1.44269504088896341)},
	{"ln2High", math.Float32bits(0.693359375)},
	{"ln2Low", math.Float32bits(-2.12194440e-4)},
	{"expP0", math.Float32bits(1.3814613e-3)},
	{"expP1", math.Float32bits(8.3687101e-3)},
	{"expP2", math.Float32bits(4.1668389e-2)},
	{"expP3", math.Float32bits(1.6666521e-1)},
	{"expP4", math.Float32bits(4.9999994e-1)},
	{"one", math.Float32bits(1)},
	{"expHighest", math.Float32bits(89)},
	{"expLowest", math.Float32bits(-104)},
	{"exponentBias", 127},
}

var constantData = map[string]Mem{}

// defineConstants writes the constants into the data section.
func defineConstants() {
	for _, c := range expConstants {
		constantData[c.name] = ConstData(c.name, U32(c.value))
	}
}

// expRegs gives out registers for a loop with an exponential in it: with 32 registers every constant keeps one over the
// loop, with 16 a constant is loaded where it is used.
type expRegs struct {
	isa
	held map[string]reg.VecPhysical
	temp []reg.VecPhysical // 5 for the exponential itself
	free []reg.VecPhysical
}

func newExpRegs(s isa) *expRegs {
	e := &expRegs{isa: s, held: map[string]reg.VecPhysical{}, temp: s.regs[:5], free: s.regs[5:]}
	if s.lanes == 16 {
		for _, c := range expConstants {
			e.held[c.name] = e.take()
			VBROADCASTSS(constantData[c.name], e.held[c.name])
		}
	}
	return e
}

func (e *expRegs) take() reg.VecPhysical {
	r := e.free[0]
	e.free = e.free[1:]
	return r
}

// constant returns a register that holds the constant, tmp at worst.
func (e *expRegs) constant(name string, tmp reg.VecPhysical) reg.VecPhysical {
	if r, ok := e.held[name]; ok {
		return r
	}
	VBROADCASTSS(constantData[name], tmp)
	return tmp
}

// exp replaces x by e^x.
func (e *expRegs) exp(x reg.VecPhysical) {
	k := e.temp[2]
	// The bound stands first, so that min and max return a NaN of x.
	VMINPS(x, e.constant("expHighest", k), x)
	e.expBelow(x)
}

// expBelow is exp for x that does not overflow.
func (e *expRegs) expBelow(x reg.VecPhysical) {
	n, p, k, a := e.temp[0], e.temp[1], e.temp[2], e.temp[3]
	VMAXPS(x, e.constant("expLowest", k), x)
	VMULPS(x, e.constant("log2E", k), n)
	if e.lanes == 16 {
		VRNDSCALEPS(Imm(0), n, n)
	} else {
		VROUNDPS(Imm(0), n, n)
	}
	VFNMADD231PS(n, e.constant("ln2High", k), x)
	VFNMADD231PS(n, e.constant("ln2Low", k), x)
	VMOVAPS(e.constant("expP0", k), p)
	for _, c := range []string{"expP1", "expP2", "expP3", "expP4"} {
		VFMADD213PS(e.constant(c, k), x, p)
	}
	VMULPS(x, x, a)
	VFMADD213PS(x, a, p)
	VADDPS(e.constant("one", k), p, p)
	if e.lanes == 16 {
		VSCALEFPS(n, p, x)
		return
	}
	half := e.temp[4]
	VCVTPS2DQ(n, n)
	VPSRAD(Imm(1), n, half)
	VPSUBD(half, n, n)
	bias := e.constant("exponentBias", k)
	VPADDD(bias, half, half)
	VPADDD(bias, n, n)
	VPSLLD(Imm(23), half, half)
	VPSLLD(Imm(23), n, n)
	VMULPS(half, p, p)
	VMULPS(n, p, x)
}

// vectorLoop writes a loop over whole vectors of the named pointers; body gets the pointers' memory in their order.
func vectorLoop(s isa, pointers []string, body func(at []Mem)) {
	var at []Mem
	for _, p := range pointers {
		at = append(at, Mem{Base: Load(Param(p), GP64())})
	}
	vectors := Load(Param("vectors"), GP64())
	TESTQ(vectors, vectors)
	JZ(LabelRef("done"))
	Label("loop")
	body(at)
	for _, m := range at {
		ADDQ(Imm(uint64(s.bytes())), m.Base)
	}
	DECQ(vectors)
	JNZ(LabelRef("loop"))
	Label("done")
}

func vectorText(name, params string, doc ...string) {
	TEXT(name, NOSPLIT, "func("+params+", vectors int)")
	Pragma("noescape")
	Doc(append([]string{name + " works on whole vectors:", ""}, doc...)...)
}

// expRow writes the exponential of a row and its sum.
func expRow(s isa) {
	vectorText("exp"+s.name, "dst *float32, src *float32, factor float32, shift float32, sums *float32",
		"\tfor i := range lanes * vectors {",
		"\t\tdst[i] = exp(factor*src[i] - shift)",
		"\t\tsums[i%lanes] += dst[i]",
		"\t}")
	e := newExpRegs(s)
	x, sum, factor, shift := e.take(), e.take(), e.take(), e.take()
	sums := Mem{Base: Load(Param("sums"), GP64())}
	VMOVUPS(sums, sum)
	VBROADCASTSS(param("factor"), factor)
	VBROADCASTSS(param("shift"), shift)
	vectorLoop(s, []string{"dst", "src"}, func(at []Mem) {
		VMOVUPS(at[1], x)
		VFMSUB213PS(shift, factor, x)
		e.exp(x)
		VMOVUPS(x, at[0])
		VADDPS(x, sum, sum)
	})
	VMOVUPS(sum, sums)
	VZEROUPPER()
	RET()
}

// maxRow writes the largest values of a row, lane by lane.
func maxRow(s isa) {
	vectorText("max"+s.name, "tops *float32, src *float32",
		"\tfor i := range lanes * vectors {",
		"\t\tif src[i] > tops[i%lanes] {",
		"\t\t\ttops[i%lanes] = src[i]",
		"\t\t}",
		"\t}")
	top, x := s.regs[0], s.regs[1]
	tops := Mem{Base: Load(Param("tops"), GP64())}
	VMOVUPS(tops, top)
	vectorLoop(s, []string{"src"}, func(at []Mem) {
		VMOVUPS(at[0], x)
		VMAXPS(top, x, top) // keeps top when x is NaN
	})
	VMOVUPS(top, tops)
	VZEROUPPER()
	RET()
}

// sigmoid leaves 1/(1+exp(-g)) in dst; g is kept.
func (e *expRegs) sigmoid(g, dst reg.VecPhysical) {
	VXORPS(dst, dst, dst)
	VSUBPS(g, dst, dst)
	e.exp(dst)
	one := e.constant("one", e.temp[2])
	VADDPS(one, dst, dst)
	VDIVPS(dst, one, dst)
}

// swiGLU writes the gated activation.
func swiGLU(s isa) {
	vectorText("swiGLU"+s.name, "dst *float32, gate *float32, up *float32",
		"\tfor i := range lanes * vectors {",
		"\t\tdst[i] = gate[i] * sigmoid(gate[i]) * up[i]",
		"\t}")
	e := newExpRegs(s)
	g, sig := e.take(), e.take()
	vectorLoop(s, []string{"dst", "gate", "up"}, func(at []Mem) {
		VMOVUPS(at[1], g)
		e.sigmoid(g, sig)
		VMULPS(sig, g, g)
		VMULPS(at[2], g, g)
		VMOVUPS(g, at[0])
	})
	VZEROUPPER()
	RET()
}

// swiGLUGrad writes the backward of the gated activation.
func swiGLUGrad(s isa) {
	vectorText("swiGLUGrad"+s.name, "dgate *float32, dup *float32, dy *float32, gate *float32, up *float32",
		"\tfor i := range lanes * vectors {",
		"\t\ts := sigmoid(gate[i])",
		"\t\tdgate[i], dup[i] = dy[i]*up[i]*s*(1+gate[i]*(1-s)), dy[i]*gate[i]*s",
		"\t}")
	e := newExpRegs(s)
	g, sig, d, t := e.take(), e.take(), e.take(), e.take()
	vectorLoop(s, []string{"dgate", "dup", "dy", "gate", "up"}, func(at []Mem) {
		VMOVUPS(at[3], g)
		VMOVUPS(at[2], d)
		e.sigmoid(g, sig)
		one := e.constant("one", e.temp[2])
		VSUBPS(sig, one, t)
		VFMADD213PS(one, g, t)
		VMULPS(sig, t, t)
		VMULPS(d, t, t)
		VMULPS(at[4], t, t)
		VMULPS(g, d, d)
		VMULPS(sig, d, d)
		VMOVUPS(t, at[0])
		VMOVUPS(d, at[1])
	})
	VZEROUPPER()
	RET()
}

// adamWScalars is the order in which the routine finds its scalars.
var adamWScalars = []string{"gradScale", "beta1", "rest1", "beta2", "rest2", "correct1", "correct2", "eps", "lr", "decay"}

// adamW writes the optimizer's update.
func adamW(s isa) {
	vectorText("adamW"+s.name, "scalars *float32, w *float32, grad *float32, m *float32, v *float32",
		"\tgradScale, beta1, rest1, beta2, rest2 := scalars[0], scalars[1], scalars[2], scalars[3], scalars[4]",
		"\tcorrect1, correct2, eps, lr, decay := scalars[5], scalars[6], scalars[7], scalars[8], scalars[9]",
		"\tfor i := range lanes * vectors {",
		"\t\tx := grad[i] * gradScale",
		"\t\tm[i] = beta1*m[i] + rest1*x",
		"\t\tv[i] = beta2*v[i] + rest2*(x*x)",
		"\t\tw[i] -= lr * (m[i]*correct1/(sqrt(v[i]*correct2)+eps) + decay*w[i])",
		"\t}")
	held := map[string]reg.VecPhysical{}
	scalars := Load(Param("scalars"), GP64())
	for i, name := range adamWScalars {
		held[name] = s.regs[i]
		VBROADCASTSS(Mem{Base: scalars, Disp: 4 * i}, s.regs[i])
	}
	x, m, v, w := s.regs[10], s.regs[11], s.regs[12], s.regs[13]
	vectorLoop(s, []string{"w", "grad", "m", "v"}, func(at []Mem) {
		VMULPS(at[1], held["gradScale"], x)
		VMULPS(x, held["rest1"], m)
		VMULPS(x, x, x)
		VMULPS(x, held["rest2"], v)
		VMOVUPS(at[2], x)
		VFMADD231PS(x, held["beta1"], m)
		VMOVUPS(at[3], x)
		VFMADD231PS(x, held["beta2"], v)
		VMOVUPS(m, at[2])
		VMOVUPS(v, at[3])
		VMULPS(held["correct2"], v, v)
		VSQRTPS(v, v)
		VADDPS(held["eps"], v, v)
		VMULPS(held["correct1"], m, m)
		VDIVPS(v, m, m)
		VMOVUPS(at[0], w)
		VFMADD231PS(w, held["decay"], m)
		VFNMADD231PS(m, held["lr"], w)
		VMOVUPS(w, at[0])
	})
	VZEROUPPER()
	RET()
}
