// Command _gen writes the assembly of package lowp: lowp_amd64.s and its declarations, lowp_decl_amd64.go.
// README.md says how to run it.
package main

import (
	"fmt"
	"math"
	"math/bits"

	. "github.com/mmcloughlin/avo/build"
	. "github.com/mmcloughlin/avo/operand"
	"github.com/mmcloughlin/avo/reg"
)

// isa describes a vector instruction set: its registers and what a register holds.
type isa struct {
	name  string
	lanes int // float32 values of a register
	regs  []reg.VecPhysical
}

func (s isa) wide() bool { return s.lanes == 16 }

// block is the number of values of one turn of a loop: two registers of float32, one of 16-bit words.
func (s isa) block() int { return 2 * s.lanes }

var (
	avx512 = isa{name: "AVX512", lanes: 16, regs: []reg.VecPhysical{
		reg.Z0, reg.Z1, reg.Z2, reg.Z3, reg.Z4, reg.Z5, reg.Z6, reg.Z7,
		reg.Z8, reg.Z9, reg.Z10, reg.Z11, reg.Z12, reg.Z13, reg.Z14, reg.Z15,
		reg.Z16, reg.Z17, reg.Z18, reg.Z19, reg.Z20, reg.Z21, reg.Z22, reg.Z23,
	}}
	avx2 = isa{name: "AVX2", lanes: 8, regs: []reg.VecPhysical{
		reg.Y0, reg.Y1, reg.Y2, reg.Y3, reg.Y4, reg.Y5, reg.Y6, reg.Y7,
		reg.Y8, reg.Y9, reg.Y10, reg.Y11, reg.Y12, reg.Y13, reg.Y14, reg.Y15,
	}}
)

// format is what the routines need to know of an encoding; format.go of package lowp explains the numbers.
type format struct {
	name     string
	bits     int
	mantissa int
	bias     int
	max      float32
	magic    float32
	factor   float32 // float32 value of a code over that of the float16 that decoding makes of it
}

// codeBytes is the size of the codes of a block.
func (f format) codeBytes(s isa) int { return s.block() * f.bits / 8 }

var (
	e4m3 = format{name: "E4M3", bits: 8, mantissa: 3, bias: 7, max: 448, magic: 1 << 14, factor: 256}
	e5m2 = format{name: "E5M2", bits: 8, mantissa: 2, bias: 15, max: 57344, magic: 1 << 7, factor: 1}
	e5m6 = format{name: "E5M6", bits: 12, mantissa: 6, bias: 15, max: 65024, magic: 1 << 3, factor: 1}
)

// scaling is the way in which scales apply: one for all the values of a row of the grid, or one for each column.
type scaling int

const (
	perRow scaling = iota
	perCol
)

func main() {
	ConstraintExpr("amd64,!purego")
	defineTables()
	for _, s := range []isa{avx512, avx2} {
		for _, f := range []format{e4m3, e5m2, e5m6} {
			for _, by := range []scaling{perRow, perCol} {
				decode(s, f, by)
				encode(s, f, by)
			}
		}
		decodeBF16(s)
		encodeBF16(s)
		amaxTiles(s)
		amaxCols(s)
	}
	Generate()
}

var constants = map[uint32]Mem{}

// constant is a value in the data section.
func constant(bits uint32) Mem {
	m, ok := constants[bits]
	if !ok {
		m = ConstData(fmt.Sprintf("c%08x", bits), U32(bits))
		constants[bits] = m
	}
	return m
}

// pool gives out registers.
type pool struct {
	isa
	free []reg.VecPhysical
}

func newPool(s isa) *pool { return &pool{s, s.regs} }

func (p *pool) take() reg.VecPhysical {
	r := p.free[0]
	p.free = p.free[1:]
	return r
}

// hold loads a value into all lanes of a register that nothing else uses.
func (p *pool) hold(bits uint32) reg.VecPhysical {
	r := p.take()
	if p.wide() {
		VPBROADCASTD(constant(bits), r)
	} else {
		VBROADCASTSS(constant(bits), r)
	}
	return r
}

func (p *pool) holdFloat(v float32) reg.VecPhysical { return p.hold(math.Float32bits(v)) }

// half is the lower half of a register.
func half(s isa, r reg.VecPhysical) reg.Register {
	if s.wide() {
		return r.(reg.Vec).AsY()
	}
	return r.(reg.Vec).AsX()
}

// upper copies the upper half of a register.
func upper(s isa, from, to reg.VecPhysical) reg.Register {
	if s.wide() {
		VEXTRACTI64X4(Imm(1), from, half(s, to))
	} else {
		VEXTRACTI128(Imm(1), from, half(s, to))
	}
	return half(s, to)
}

func and(s isa, x Op, y, dst reg.Register) {
	if s.wide() {
		VPANDD(x, y, dst)
	} else {
		VPAND(x, y, dst)
	}
}

// orAnd sets dst |= x & y; x is lost.
func orAnd(s isa, x, y, dst reg.Register) {
	if s.wide() {
		VPTERNLOGD(Imm(0xF8), y, x, dst)
	} else {
		VPAND(y, x, x)
		VPOR(x, dst, dst)
	}
}

// param is the stack slot of a parameter.
func param(name string) Mem {
	b, err := Param(name).Resolve()
	if err != nil {
		panic(err)
	}
	return b.Addr
}

// walk says how a pointer, a parameter, goes through a grid: by so many bytes a block within a row, and from row to row by
// its pitch, a parameter in units of so many bytes, or back to where it was ("").
type walk struct {
	pointer   string
	bytes     int
	pitch     string
	pitchUnit int
}

// rowsAhead is how many rows before it reads them a grid asks for those of its source; a power of two. Rows are often short
// and far apart, where a processor guesses wrong.
const rowsAhead = 16

// grid writes the loops over rows and, within a row, blocks, and the end of the routine.
func grid(walks []walk, row func(), block func(at map[string]Mem)) {
	rows := Load(Param("rows"), GP64())
	blocks := Load(Param("blocks"), GP64())
	left, wide := GP64(), 0
	starts, at, pitches := map[string]reg.Register{}, map[string]Mem{}, map[string]reg.Register{}
	for _, w := range walks {
		starts[w.pointer] = Load(Param(w.pointer), GP64())
		at[w.pointer] = Mem{Base: GP64()}
		if w.pointer == "src" {
			wide = w.bytes
		}
		if w.pitch != "" {
			pitches[w.pointer] = Load(Param(w.pitch), GP64())
			if w.pitchUnit == 4 {
				SHLQ(Imm(2), pitches[w.pointer])
			}
		}
	}
	far := GP64()
	MOVQ(pitches["src"], far)
	SHLQ(Imm(uint64(bits.TrailingZeros(rowsAhead))), far)
	TESTQ(rows, rows)
	JZ(LabelRef("done"))
	TESTQ(blocks, blocks)
	JZ(LabelRef("done"))
	Label("row")
	if row != nil {
		row()
	}
	for _, w := range walks {
		MOVQ(starts[w.pointer], at[w.pointer].Base)
	}
	MOVQ(blocks, left)
	Label("block")
	for line := 0; line < wide; line += 64 {
		PREFETCHT0(Mem{Base: at["src"].Base, Index: far, Scale: 1, Disp: line})
	}
	block(at)
	for _, w := range walks {
		ADDQ(Imm(uint64(w.bytes)), at[w.pointer].Base)
	}
	DECQ(left)
	JNZ(LabelRef("block"))
	for _, w := range walks {
		if w.pitch != "" {
			ADDQ(pitches[w.pointer], starts[w.pointer])
		}
	}
	DECQ(rows)
	JNZ(LabelRef("row"))
	Label("done")
	VZEROUPPER()
	RET()
}

// rowScale returns the code that loads the scale of a row, and goes on to the next.
func rowScale(to, factor reg.Register) func() {
	scales := Load(Param("scales"), GP64())
	step := Load(Param("step"), GP64())
	SHLQ(Imm(2), step)
	return func() {
		VBROADCASTSS(Mem{Base: scales}, to)
		if factor != nil {
			VMULPS(factor, to, to)
		}
		ADDQ(step, scales)
	}
}
