package model

import (
	"cmp"
	"fmt"
	"slices"

	"moetor/internal/lowp"
	"moetor/internal/tensor"
)

// A header is a matrix of codes in an arena of a pass.
type header struct {
	lowp.Matrix
	layer     int
	name      string
	temporary bool
}

// Watched says what rounding did to an operand in one step: of a layer, over all micro-batches (both tilings, where there are
// two), or a weight by its whole name, whose Layer is -1.
type Watched struct {
	Layer   int
	Operand string
	lowp.Stats
}

// watching collects the statistics of a step.
type watching struct{ of map[place]*Watched }

type place struct {
	layer int
	name  string
}

func (w *watching) add(layer int, name string, s lowp.Stats) {
	at := place{layer, name}
	if w.of[at] == nil {
		w.of[at] = &Watched{Layer: layer, Operand: name}
	}
	w.of[at].Add(s)
}

func (p *pass) measure(name string, m *lowp.Matrix, x tensor.Mat) {
	p.watching.add(p.layer, name, lowp.Measure(m, x.Data, x.Stride))
}

// Watch makes the coming steps measure what rounding does to their operands, from the next Bind on, or no longer. It costs
// several times the step, and changes no bit of it.
func (c *Chunk) Watch(on bool) {
	c.watching = nil
	if on && c.plan.low() {
		c.watching = &watching{of: map[place]*Watched{}}
	}
	c.packer.watching = c.watching
}

// Watched returns what was measured since Watch, by layer and name, and forgets it.
func (c *Chunk) Watched() []Watched {
	if c.watching == nil {
		return nil
	}
	list := make([]Watched, 0, len(c.watching.of))
	for _, w := range c.watching.of {
		list = append(list, *w)
	}
	clear(c.watching.of)
	slices.SortFunc(list, func(a, b Watched) int {
		return cmp.Or(cmp.Compare(a.Layer, b.Layer), cmp.Compare(a.Operand, b.Operand))
	})
	return list
}

// badCode finds the first operand among those that a pass keeps of a layer that has a value which is not finite.
func (p *pass) badCode(layer int) string {
	for _, h := range p.headers[:p.headersUsed] {
		if h.layer != layer || h.temporary || h.Rows == 0 || h.Cols == 0 {
			continue
		}
		if at, found := h.FirstNonFinite(); found {
			return fmt.Sprintf("%s, %v", h.name, at)
		}
	}
	return ""
}
