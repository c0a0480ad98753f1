package main

import (
	. "github.com/mmcloughlin/avo/build"
	. "github.com/mmcloughlin/avo/operand"
	"github.com/mmcloughlin/avo/reg"
)

// bf16Bits are the constants of rounding a float32 to the upper half of its bits.
var bf16Bits = []struct {
	name  string
	value uint32
}{
	{"bf16Odd", 1},             // the last bit that stays, after the shift
	{"bf16Half", 0x7FFF},       // a hair less than half of it
	{"bf16Quiet", 0x0040_0000}, // keeps a NaN one whose payload lies in the lower half
}

func defineBF16() {
	for _, c := range bf16Bits {
		constantData[c.name] = ConstData(c.name, U32(c.value))
	}
}

// adamWBF16 writes the optimizer's update with moments of 2 bytes. Unlike in adamW nothing is fused, so that every
// implementation rounds a moment to the same bits.
func adamWBF16(s isa) {
	vectorText("adamWBF16"+s.name, "scalars *float32, w *float32, grad *float32, m *uint16, v *uint16",
		"\tgradScale, beta1, rest1, beta2, rest2 := scalars[0], scalars[1], scalars[2], scalars[3], scalars[4]",
		"\tcorrect1, correct2, eps, lr, decay := scalars[5], scalars[6], scalars[7], scalars[8], scalars[9]",
		"\tfor i := range lanes * vectors {",
		"\t\tx := grad[i] * gradScale",
		"\t\tmi := beta1*FromBF16(m[i]) + rest1*x",
		"\t\tvi := beta2*FromBF16(v[i]) + rest2*(x*x)",
		"\t\tm[i], v[i] = ToBF16(mi), ToBF16(vi)",
		"\t\tw[i] -= lr * (mi*correct1/(sqrt(vi*correct2)+eps) + decay*w[i])",
		"\t}")
	held := map[string]reg.VecPhysical{}
	scalars := Load(Param("scalars"), GP64())
	for i, name := range adamWScalars {
		held[name] = s.regs[i]
		VBROADCASTSS(Mem{Base: scalars, Disp: 4 * i}, s.regs[i])
	}
	rounding := newBF16Rounding(s)
	x, m, v, w, a, b := s.regs[10], s.regs[11], s.regs[12], s.regs[13], s.regs[14], s.regs[15]
	grad := Load(Param("grad"), GP64())
	weights := Load(Param("w"), GP64())
	first := Load(Param("m"), GP64())
	second := Load(Param("v"), GP64())
	vectors := Load(Param("vectors"), GP64())
	TESTQ(vectors, vectors)
	JZ(LabelRef("done"))
	Label("loop")
	VMULPS(Mem{Base: grad}, held["gradScale"], x)
	fromBF16(first, m)
	fromBF16(second, v)
	VMULPS(held["beta1"], m, m)
	VMULPS(x, held["rest1"], a)
	VADDPS(a, m, m)
	VMULPS(x, x, x)
	VMULPS(held["beta2"], v, v)
	VMULPS(held["rest2"], x, x)
	VADDPS(x, v, v)
	rounding.round(m, a, x, w)
	rounding.round(v, b, x, w)
	if s.lanes == 16 {
		VPMOVDW(a, Mem{Base: first})
		VPMOVDW(b, Mem{Base: second})
	} else { // lane by lane m and v alternate in halves of a register: put those of m first
		VPACKUSDW(b, a, a)
		VPERMQ(Imm(0b11_01_10_00), a, a)
		VMOVDQU(a.(reg.Vec).AsX(), Mem{Base: first})
		VEXTRACTI128(Imm(1), a, Mem{Base: second})
	}
	VMULPS(held["correct2"], v, v)
	VSQRTPS(v, v)
	VADDPS(held["eps"], v, v)
	VMULPS(held["correct1"], m, m)
	VDIVPS(v, m, m)
	VMOVUPS(Mem{Base: weights}, w)
	VMULPS(held["decay"], w, x)
	VADDPS(x, m, m)
	VMULPS(held["lr"], m, m)
	VSUBPS(m, w, w)
	VMOVUPS(w, Mem{Base: weights})
	ADDQ(Imm(uint64(s.bytes())), grad)
	ADDQ(Imm(uint64(s.bytes())), weights)
	ADDQ(Imm(uint64(s.bytes()/2)), first)
	ADDQ(Imm(uint64(s.bytes()/2)), second)
	DECQ(vectors)
	JNZ(LabelRef("loop"))
	Label("done")
	VZEROUPPER()
	RET()
}

// fromBF16 loads a register of values of 2 bytes as float32.
func fromBF16(at reg.Register, dst reg.VecPhysical) {
	VPMOVZXWD(Mem{Base: at}, dst)
	VPSLLD(Imm(16), dst, dst)
}

// bf16Rounding holds the constants where there are registers to spare.
type bf16Rounding struct {
	isa
	held map[string]reg.VecPhysical
}

func newBF16Rounding(s isa) bf16Rounding {
	r := bf16Rounding{isa: s, held: map[string]reg.VecPhysical{}}
	if s.lanes == 16 {
		for i, c := range bf16Bits {
			r.held[c.name] = s.regs[16+i]
			VPBROADCASTD(constantData[c.name], s.regs[16+i])
		}
	}
	return r
}

// constant returns a register that holds the constant, tmp at worst.
func (r bf16Rounding) constant(name string, tmp reg.VecPhysical) reg.VecPhysical {
	if h, ok := r.held[name]; ok {
		return h
	}
	VPBROADCASTD(constantData[name], tmp)
	return tmp
}

// round leaves in the low half of each lane of dst the upper 16 bits of x, rounded to nearest even. t and nan are lost.
func (r bf16Rounding) round(x, dst, t, nan reg.VecPhysical) {
	VPSRLD(Imm(16), x, dst)
	if r.lanes == 16 {
		VPANDD(r.constant("bf16Odd", t), dst, dst)
	} else {
		VPAND(r.constant("bf16Odd", t), dst, dst)
	}
	VPADDD(r.constant("bf16Half", t), dst, dst)
	VPADDD(x, dst, dst)
	if r.lanes == 16 {
		VCMPPS(Imm(3), x, x, reg.K1) // not equal to itself
		VPORD(r.constant("bf16Quiet", nan), x, reg.K1, dst)
	} else {
		VPOR(r.constant("bf16Quiet", nan), x, nan)
		VCMPPS(Imm(3), x, x, t)
		VBLENDVPS(t, nan, dst, dst)
	}
	VPSRLD(Imm(16), dst, dst)
}
