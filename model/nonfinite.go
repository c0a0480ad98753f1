package model

import (
	"fmt"

	"moetor/internal/kernel"
	"moetor/internal/tensor"
)

// A NonFiniteError says where the first number that is not finite came up. Passes do not stop at one, since the other
// ranks count on this rank's part of every exchange: the caller asks Chunk.NonFinite when a step's passes are done, finds
// with Before the earliest of all ranks, and refuses the step together with them.
type NonFiniteError struct {
	Backward bool // in a gradient
	Micro    int
	Layer    int    // -1: embedding; number of layers and MTP modules: head
	Tensor   string // module whose output it is, or gradient of whose input, as in the parameters' names; or objective
	Expert   int    // global number of the routed expert, or -1
	Place    Place
	Operand  string `json:",omitempty"` // of the layer's operands in codes the first that has one, and where; "" if none
}

// A Place orders the watched tensors of one layer as a forward pass meets them.
type Place int

const (
	placeAttention Place = iota
	placeExpert
	placeBlock
	placeHead
	placeScore
	placeObjective
)

func (e *NonFiniteError) Error() string {
	what := "output of"
	if e.Backward {
		what = "gradient at"
	}
	if e.Operand != "" {
		return fmt.Sprintf("a number that is not finite in the %s %s, micro-batch %d (operand %s)", what, e.Tensor, e.Micro, e.Operand)
	}
	return fmt.Sprintf("a number that is not finite in the %s %s, micro-batch %d", what, e.Tensor, e.Micro)
}

// Before reports whether e stands earlier than o in a step in which all ranks do micro-batches in order: forward before
// backward, then by micro-batch, then in the order of the pass.
func (e *NonFiniteError) Before(o *NonFiniteError) bool {
	switch {
	case e.Backward != o.Backward:
		return o.Backward
	case e.Micro != o.Micro:
		return e.Micro < o.Micro
	case e.Layer != o.Layer:
		return (e.Layer < o.Layer) != e.Backward
	case e.Place != o.Place:
		return (e.Place < o.Place) != e.Backward
	}
	return e.Expert < o.Expert
}

// watch notes the first number of m that is not finite.
func (p *pass) watch(m tensor.Mat, backward bool, layer int, at Place, expert int) {
	if !kernel.Finite(m.Data) {
		p.report(backward, layer, at, expert)
	}
}

// report notes a number that is not finite.
func (p *pass) report(backward bool, layer int, at Place, expert int) {
	e := &NonFiniteError{Backward: backward, Micro: p.index, Layer: layer, Expert: expert, Place: at}
	switch at {
	case placeAttention:
		e.Tensor = layerName(layer) + "self_attn"
	case placeExpert:
		e.Tensor = fmt.Sprintf("%smlp.experts.%d", layerName(layer), expert)
	case placeBlock:
		e.Tensor = layerName(layer)[:len(layerName(layer))-1]
		if layer < 0 {
			e.Tensor = "model.embed_tokens"
		}
	case placeHead:
		e.Tensor = "lm_head"
	case placeScore:
		e.Tensor = "score"
	case placeObjective:
		e.Tensor = "objective"
	}
	if p.nonFinite == nil || e.Before(p.nonFinite) {
		e.Operand = p.badCode(layer)
		p.nonFinite = e
	}
}
