package main

import (
	. "github.com/mmcloughlin/avo/build"
	. "github.com/mmcloughlin/avo/operand"
	"github.com/mmcloughlin/avo/reg"
)

// rowLoop writes a loop over rows of the matrices mats, the parameter in lds apart, and within a row over whole vectors. begin
// and end get the pointers to the values of the row, which advance by one value per row; body the vector's places.
func rowLoop(s isa, mats, lds, values []string, begin func(values []Mem), body func(at []Mem), end func(values []Mem)) {
	base, at := make([]reg.Register, len(mats)), make([]Mem, len(mats))
	for i, m := range mats {
		base[i] = Load(Param(m), GP64())
		at[i] = Mem{Base: GP64()}
	}
	value := make([]Mem, len(values))
	for i, v := range values {
		value[i] = Mem{Base: Load(Param(v), GP64())}
	}
	ld := map[string]reg.Register{}
	for _, name := range lds {
		if ld[name] == nil {
			ld[name] = Load(Param(name), GP64())
			SHLQ(Imm(2), ld[name])
		}
	}
	rows, left := Load(Param("rows"), GP64()), GP64()
	TESTQ(rows, rows)
	JZ(LabelRef("done"))
	Label("row")
	for i := range mats {
		MOVQ(base[i], at[i].Base)
	}
	begin(value)
	MOVQ(param("vectors"), left)
	Label("loop")
	body(at)
	for _, m := range at {
		ADDQ(Imm(uint64(s.bytes())), m.Base)
	}
	DECQ(left)
	JNZ(LabelRef("loop"))
	end(value)
	for i := range mats {
		ADDQ(ld[lds[i]], base[i])
	}
	for _, v := range value {
		ADDQ(Imm(4), v.Base)
	}
	DECQ(rows)
	JNZ(LabelRef("row"))
	Label("done")
	VZEROUPPER()
	RET()
}

func rowText(name, params string, doc ...string) {
	TEXT(name, NOSPLIT, "func("+params+", rows int, vectors int)")
	Pragma("noescape")
	Doc(append([]string{name + " works on rows of at least one vector:", ""}, doc...)...)
}

// halves combines the lanes of x, the upper half with the lower until one is left, which stands in lane 0.
func halves(s isa, x, tmp reg.VecPhysical, combine func(a, b, dst Op)) {
	if s.lanes == 16 {
		VEXTRACTF64X4(Imm(1), x, tmp.AsY())
		combine(tmp.AsY(), x.AsY(), x.AsY())
		VEXTRACTF32X4(Imm(1), x.AsY(), tmp.AsX())
	} else {
		VEXTRACTF128(Imm(1), x.AsY(), tmp.AsX())
	}
	combine(tmp.AsX(), x.AsX(), x.AsX())
	VPERMILPS(Imm(0x4E), x.AsX(), tmp.AsX())
	combine(tmp.AsX(), x.AsX(), x.AsX())
	VPERMILPS(Imm(0xB1), x.AsX(), tmp.AsX())
	combine(tmp.AsX(), x.AsX(), x.AsX())
}

// maxRows writes the largest value of each row.
func maxRows(s isa) {
	rowText("maxRows"+s.name, "tops *float32, src *float32, ld int",
		"\tfor r := range rows {",
		"\t\tfor i := range lanes * vectors {",
		"\t\t\ttops[r] = max(tops[r], src[ld*r+i]) // NaN is passed over",
		"\t\t}",
		"\t}")
	top, x := s.regs[0], s.regs[1]
	rowLoop(s, []string{"src"}, []string{"ld"}, []string{"tops"},
		func(v []Mem) { VBROADCASTSS(v[0], top) },
		func(at []Mem) {
			VMOVUPS(at[0], x)
			VMAXPS(top, x, top) // keeps top when x is NaN
		},
		func(v []Mem) {
			halves(s, top, x, func(a, b, dst Op) { VMAXPS(a, b, dst) })
			VMOVSS(top.AsX(), v[0])
		})
}

// expRows writes the exponential of rows, and their sums.
func expRows(s isa) {
	rowText("expRows"+s.name, "sums *float32, x *float32, shift *float32, ld int",
		"\tfor r := range rows {",
		"\t\tvar sum [lanes]float32",
		"\t\tfor i := range lanes * vectors {",
		"\t\t\tx[ld*r+i] = exp(x[ld*r+i] - shift[r]) // the difference must be less than 88, or NaN",
		"\t\t\tsum[i%lanes] += x[ld*r+i]",
		"\t\t}",
		"\t\tsums[r] = the upper half of sum added to the lower until one is left",
		"\t}")
	e := newExpRegs(s)
	x, sum, shift := e.take(), e.take(), e.take()
	rowLoop(s, []string{"x"}, []string{"ld"}, []string{"sums", "shift"},
		func(v []Mem) {
			VBROADCASTSS(v[1], shift)
			zero(s, sum)
		},
		func(at []Mem) {
			VMOVUPS(at[0], x)
			VSUBPS(shift, x, x)
			e.expBelow(x)
			VMOVUPS(x, at[0])
			VADDPS(x, sum, sum)
		},
		func(v []Mem) {
			halves(s, sum, x, func(a, b, dst Op) { VADDPS(a, b, dst) })
			VMOVSS(sum.AsX(), v[0])
		})
}

// gradRows writes the probabilities of rows again, and the backward of their softmax.
func gradRows(s isa) {
	rowText("gradRows"+s.name, "p *float32, ds *float32, lse *float32, d *float32, ld int",
		"\tfor r := range rows {",
		"\t\tfor i := range lanes * vectors {",
		"\t\t\tp[ld*r+i] = exp(p[ld*r+i] - lse[r]) // the difference must be less than 88, or NaN",
		"\t\t\tds[ld*r+i] = p[ld*r+i] * (ds[ld*r+i] - d[r])",
		"\t\t}",
		"\t}")
	e := newExpRegs(s)
	x, ds, lse, d := e.take(), e.take(), e.take(), e.take()
	rowLoop(s, []string{"p", "ds"}, []string{"ld", "ld"}, []string{"lse", "d"},
		func(v []Mem) {
			VBROADCASTSS(v[0], lse)
			VBROADCASTSS(v[1], d)
		},
		func(at []Mem) {
			VMOVUPS(at[0], x)
			VSUBPS(lse, x, x)
			e.expBelow(x)
			VMOVUPS(x, at[0])
			VMOVUPS(at[1], ds)
			VSUBPS(d, ds, ds)
			VMULPS(x, ds, ds)
			VMOVUPS(ds, at[1])
		},
		func([]Mem) {})
}

// scaleRows writes rows multiplied by a factor each.
func scaleRows(s isa) {
	rowText("scaleRows"+s.name, "dst *float32, lddst int, src *float32, ldsrc int, factors *float32",
		"\tfor r := range rows {",
		"\t\tfor i := range lanes * vectors {",
		"\t\t\tdst[lddst*r+i] = factors[r] * src[ldsrc*r+i]",
		"\t\t}",
		"\t}")
	x, factor := s.regs[0], s.regs[1]
	rowLoop(s, []string{"dst", "src"}, []string{"lddst", "ldsrc"}, []string{"factors"},
		func(v []Mem) { VBROADCASTSS(v[0], factor) },
		func(at []Mem) {
			VMULPS(at[1], factor, x)
			VMOVUPS(x, at[0])
		},
		func([]Mem) {})
}
