package pipeline

import (
	"context"
	"fmt"
)

// A Stage is a part of the model. Micro-batches are numbered from 0 within a step; several are in flight at once.
//
// Forward takes the output of the stage before (nil on the first stage) and returns its own (nil on the last), which
// stays valid until BackwardInput of that micro-batch; in a forward-only list until its send, or the Forward of the next
// stage on this rank, has returned. BackwardInput takes the gradient of that output (nil on the last stage) and returns
// the gradient of its input (nil on the first), which stays valid, over BackwardWeight too, until its send, or the
// BackwardInput of the stage before on this rank, has returned. An empty micro-batch has empty buffers and takes part
// like any other.
type Stage interface {
	Forward(ctx context.Context, micro int, in []float32) (out []float32, err error)
	BackwardInput(ctx context.Context, micro int, dout []float32) (din []float32, err error)
	BackwardWeight(ctx context.Context, micro int) error
}

// A whole is a Stage that does both halves of a backward in one call, if nothing else is to happen between them: the
// action B. It returns what BackwardInput does.
type whole interface {
	Backward(ctx context.Context, micro int, dout []float32) (din []float32, err error)
}

// A Link moves activations and gradients between stages on different ranks; the actions it gets are sends and receives
// only (see Plan.Peer and Action.Channel). Recv returns a buffer that stays valid until the action that consumes it
// (Forward or BackwardInput of that stage and micro-batch) has returned. Send returns when p may be reused, and accepts
// one message per channel that nobody has asked for yet: without that room 1F1B locks up.
type Link interface {
	Send(ctx context.Context, a Action, p []float32) error
	Recv(ctx context.Context, a Action) ([]float32, error)
}

// Observe is called right before (begin) and right after each action of a list, also after one that failed.
type Observe func(a Action, begin bool)

// Run executes one rank's list, which is one that Simulate accepted. stages is indexed by stage number and holds nil for the
// stages of other ranks. link may be nil if the list neither sends nor receives; observe may be nil. The first error ends
// the run and is returned with the action's text before it. A cancelled ctx ends the run before the next action with
// ctx's cause.
func Run(ctx context.Context, list []Action, stages []Stage, link Link, observe Observe) error {
	h, err := newHandover(list, len(stages))
	if err != nil {
		return err
	}
	for _, a := range list {
		if ctx.Err() != nil {
			return fmt.Errorf("%v: %w", a, context.Cause(ctx))
		}
		if observe != nil {
			observe(a, true)
		}
		err := h.do(ctx, a, stages[a.Stage], link)
		if observe != nil {
			observe(a, false)
		}
		if err != nil {
			return fmt.Errorf("%v: %w", a, err)
		}
	}
	return nil
}

// A handover holds the buffers between actions: what crosses boundary b, which lies before stage b, of a micro-batch.
// It does not matter whether a neighbour or the network filled it.
type handover struct {
	last   int // number of the last stage
	micros int
	acts   []slot
	grads  []slot
}

type slot struct {
	p    []float32
	full bool // an empty micro-batch may hand over nil
}

func newHandover(list []Action, stages int) (*handover, error) {
	micros := 0
	for i, a := range list {
		if a.Stage < 0 || a.Stage >= stages || a.Micro < 0 || a.Op >= numOps {
			return nil, fmt.Errorf("pipeline: position %d: %v does not fit %d stages", i+1, a, stages)
		}
		micros = max(micros, a.Micro+1)
	}
	n := (stages + 1) * micros
	slots := make([]slot, 2*n)
	return &handover{last: stages - 1, micros: micros, acts: slots[:n], grads: slots[n:]}, nil
}

// do executes one action. Boundaries 0 and last+1 are the ends of the model: nothing crosses them.
func (h *handover) do(ctx context.Context, a Action, stage Stage, link Link) error {
	if a.Op.Comm() {
		if link == nil {
			return fmt.Errorf("no link to send or receive over")
		}
	} else if stage == nil {
		return fmt.Errorf("stage %d is not on this rank", a.Stage)
	}
	switch a.Op {
	case Forward:
		in, err := h.take(h.acts, a.Stage, a.Micro)
		if err != nil {
			return err
		}
		out, err := stage.Forward(ctx, a.Micro, in)
		if err != nil {
			return err
		}
		h.put(h.acts, a.Stage+1, a.Micro, out)
	case Backward, BackwardInput:
		dout, err := h.take(h.grads, a.Stage+1, a.Micro)
		if err != nil {
			return err
		}
		backward := stage.BackwardInput
		w, both := stage.(whole)
		if both && a.Op == Backward {
			backward = w.Backward
		}
		din, err := backward(ctx, a.Micro, dout)
		if err != nil {
			return err
		}
		h.put(h.grads, a.Stage, a.Micro, din)
		if a.Op == Backward && !both {
			return stage.BackwardWeight(ctx, a.Micro)
		}
	case BackwardWeight:
		return stage.BackwardWeight(ctx, a.Micro)
	case SendAct:
		p, err := h.take(h.acts, a.Stage+1, a.Micro)
		if err != nil {
			return err
		}
		return link.Send(ctx, a, p)
	case RecvAct:
		p, err := link.Recv(ctx, a)
		if err != nil {
			return err
		}
		h.put(h.acts, a.Stage, a.Micro, p)
	case SendGrad:
		p, err := h.take(h.grads, a.Stage, a.Micro)
		if err != nil {
			return err
		}
		return link.Send(ctx, a, p)
	case RecvGrad:
		p, err := link.Recv(ctx, a)
		if err != nil {
			return err
		}
		h.put(h.grads, a.Stage+1, a.Micro, p)
	}
	return nil
}

func (h *handover) put(side []slot, boundary, micro int, p []float32) {
	side[boundary*h.micros+micro] = slot{p, true}
}

// take empties the slot: every buffer is consumed once.
func (h *handover) take(side []slot, boundary, micro int) ([]float32, error) {
	if boundary == 0 || boundary == h.last+1 {
		return nil, nil
	}
	s := &side[boundary*h.micros+micro]
	if !s.full {
		return nil, fmt.Errorf("its data was neither computed nor received before")
	}
	p := s.p
	*s = slot{}
	return p, nil
}
