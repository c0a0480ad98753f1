// Command _gen writes the assembly of package kernel: micro_amd64.s and its declarations, micro_decl_amd64.go; with
// -scaled scaled_amd64.s and scaled_decl_amd64.go; with -hopper hopper_amd64.s and hopper_decl_amd64.go.
// README.md says how to run it.
package main

import (
	"flag"

	. "github.com/mmcloughlin/avo/build"
	"github.com/mmcloughlin/avo/reg"
)

// isa describes a vector instruction set: its registers and what a register holds.
type isa struct {
	name  string
	lanes int // float32 values of a register
	regs  []reg.VecPhysical
}

func (s isa) bytes() int { return 4 * s.lanes }

var (
	avx512 = isa{name: "AVX512", lanes: 16, regs: []reg.VecPhysical{
		reg.Z0, reg.Z1, reg.Z2, reg.Z3, reg.Z4, reg.Z5, reg.Z6, reg.Z7,
		reg.Z8, reg.Z9, reg.Z10, reg.Z11, reg.Z12, reg.Z13, reg.Z14, reg.Z15,
		reg.Z16, reg.Z17, reg.Z18, reg.Z19, reg.Z20, reg.Z21, reg.Z22, reg.Z23,
		reg.Z24, reg.Z25, reg.Z26, reg.Z27, reg.Z28, reg.Z29, reg.Z30, reg.Z31,
	}}
	avx2 = isa{name: "AVX2", lanes: 8, regs: []reg.VecPhysical{
		reg.Y0, reg.Y1, reg.Y2, reg.Y3, reg.Y4, reg.Y5, reg.Y6, reg.Y7,
		reg.Y8, reg.Y9, reg.Y10, reg.Y11, reg.Y12, reg.Y13, reg.Y14, reg.Y15,
	}}
)

func main() {
	scaledTiles := flag.Bool("scaled", false, "write the tile routines of scaled products instead of all others")
	hopperSums := flag.Bool("hopper", false, "write the routines of emulated sums instead of all others")
	flag.Parse()
	ConstraintExpr("amd64,!purego")
	if *hopperSums {
		defineHopper()
		for _, rows := range []int{4, 1} {
			hopperAdd(avx512, rows, 2)
			hopperAdd(avx2, rows, 1)
		}
		hopperPromote(avx512)
		hopperPromote(avx2)
		Generate()
		return
	}
	if *scaledTiles {
		for _, vectors := range []int{2, 1} {
			for rows := 14; rows > 0; rows-- {
				scaledTile(avx512, rows, vectors)
			}
			for rows := 6; rows > 0; rows-- {
				scaledTile(avx2, rows, vectors)
			}
		}
		prefetch()
		Generate()
		return
	}
	defineConstants()
	defineBF16()
	pauseLoop()
	for _, t := range []struct {
		isa
		rows int // the height of a whole tile; there is a routine for every lower one
	}{{avx512, 14}, {avx2, 6}} {
		for _, vectors := range []int{2, 1} {
			for rows := t.rows; rows > 0; rows-- {
				gemmTile(t.isa, rows, vectors, true)
				gemmTile(t.isa, rows, vectors, false)
			}
		}
		transpose(t.isa)
		copyRows(t.isa, 1)
		copyRows(t.isa, 2)
		fmaPeak(t.isa)
		expRow(t.isa)
		maxRow(t.isa)
		maxRows(t.isa)
		expRows(t.isa)
		gradRows(t.isa)
		scaleRows(t.isa)
		swiGLU(t.isa)
		swiGLUGrad(t.isa)
		adamW(t.isa)
		adamWBF16(t.isa)
		add(t.isa)
		axpy(t.isa)
		scaled(t.isa)
		finite(t.isa)
		rmsNorm(t.isa)
		rmsNormGrad(t.isa)
		sums(t.isa)
	}
	Generate()
}
