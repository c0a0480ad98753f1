package main

import (
	"fmt"

	. "github.com/mmcloughlin/avo/build"
	. "github.com/mmcloughlin/avo/operand"
)

// fmaPeak writes the loop that measures what the processor's multiply-add units can do: chains of multiply-adds that
// touch no memory, more of them than latency times units.
func fmaPeak(s isa) {
	name := "fmaPeak" + s.name
	chains := 24 * len(s.regs) / 32
	TEXT(name, NOSPLIT, "func(turns int)")
	Doc(fmt.Sprintf("%s runs turns*%d independent multiply-adds of %d lanes on registers.", name, chains, s.lanes))
	turns := Load(Param("turns"), GP64())
	acc, x, y := s.regs[:chains], s.regs[chains], s.regs[chains+1]
	for _, r := range s.regs[:chains+2] {
		zero(s, r)
	}
	Label("loop")
	for _, r := range acc {
		VFMADD231PS(x, y, r)
	}
	DECQ(turns)
	JNZ(LabelRef("loop"))
	VZEROUPPER()
	RET()
}
