// Package pipeline holds pipeline schedules as data.
//
// A [Schedule] is, per rank, a list of [Action]s. A generator ([GPipe], [OneFOneB]) is a pure function of a [Plan] and
// emits compute only; a pass ([WithComm], [ForwardOnly]) is a pure function of a schedule; [Simulate] times a schedule or
// says why it cannot finish; [Run] executes one rank's list. No schedule has an executor of its own, so a schedule that
// was written by hand and read with [Parse] runs like a generated one. [Prepare] states the order of the passes.
//
// A stage is a contiguous part of the model; stage 0 holds the embedding, the last stage the loss. Several stages may
// stand on one rank (Plan.Owner): between them nothing is sent, the executor hands the buffers over.
package pipeline

import (
	"fmt"
	"strconv"
	"strings"
)

// An Op is what an Action does.
type Op uint8

const (
	Forward        Op = iota // F: the stage's forward of one micro-batch
	Backward                 // B: both halves of the backward, BackwardInput then BackwardWeight
	BackwardInput            // I: the half that the stage before waits for
	BackwardWeight           // W: the half that nobody waits for
	SendAct                  // SA: this stage sends its output to the next stage
	RecvAct                  // RA: this stage receives its input from the stage before
	SendGrad                 // SG: this stage sends the gradient of its input to the stage before
	RecvGrad                 // RG: this stage receives the gradient of its output from the next stage
	numOps
)

var opCode = [numOps]string{"F", "B", "I", "W", "SA", "RA", "SG", "RG"}

func (o Op) String() string {
	if o < numOps {
		return opCode[o]
	}
	return "Op(" + strconv.Itoa(int(o)) + ")"
}

// Comm reports whether o is a send or a receive.
func (o Op) Comm() bool { return o >= SendAct && o < numOps }

// backward reports whether o belongs to the backward pass, its messages included.
func (o Op) backward() bool {
	switch o {
	case Backward, BackwardInput, BackwardWeight, SendGrad, RecvGrad:
		return true
	}
	return false
}

// An Action is one step of a rank's list. It prints as stage, operation, micro-batch: 2F0, 1SG3. Stage is always the
// stage that stands on the rank that executes the action, so a message has two names: 0SA3 on the rank of stage 0 is
// 1RA3 on the rank of stage 1, and 1SG3 is answered by 0RG3.
type Action struct {
	Op           Op
	Stage, Micro int
}

func (a Action) String() string {
	return strconv.Itoa(a.Stage) + a.Op.String() + strconv.Itoa(a.Micro)
}

// Channel numbers the stream that a send or receive belongs to: the activations or the gradients of one stage boundary.
// Both sides of a message give the same number, and a stream keeps its order. It is below twice the number of stages and
// -1 for compute; a Link uses it as its tag.
func (a Action) Channel() int {
	switch a.Op {
	case SendAct:
		return 2 * a.Stage
	case RecvAct:
		return 2 * (a.Stage - 1)
	case SendGrad:
		return 2*(a.Stage-1) + 1
	case RecvGrad:
		return 2*a.Stage + 1
	}
	return -1
}

// peerStage is the stage at the other end of a send or receive.
func (a Action) peerStage() int {
	switch a.Op {
	case SendAct, RecvGrad:
		return a.Stage + 1
	case RecvAct, SendGrad:
		return a.Stage - 1
	}
	return -1
}

// counterpart is the name of the same message on the other rank.
func (a Action) counterpart() Action {
	b := Action{Stage: a.peerStage(), Micro: a.Micro}
	switch a.Op {
	case SendAct:
		b.Op = RecvAct
	case RecvAct:
		b.Op = SendAct
	case SendGrad:
		b.Op = RecvGrad
	case RecvGrad:
		b.Op = SendGrad
	}
	return b
}

// A Plan places stages on the ranks of one pipeline. Interleaving and V shapes are other values of Owner.
type Plan struct {
	Owner  []int // stage -> rank
	Ranks  int
	Micros int
}

// Straight is the plan with one stage per rank, in order.
func Straight(ranks, micros int) Plan {
	p := Plan{Owner: make([]int, max(ranks, 0)), Ranks: ranks, Micros: micros}
	for i := range p.Owner {
		p.Owner[i] = i
	}
	return p
}

// Stages is the number of stages.
func (p Plan) Stages() int { return len(p.Owner) }

// Peer is the rank (of this pipeline) at the other end of a send or receive, -1 if there is none.
func (p Plan) Peer(a Action) int {
	if s := a.peerStage(); s >= 0 && s < len(p.Owner) {
		return p.Owner[s]
	}
	return -1
}

// Check refuses a plan that places a stage on no rank, or leaves a rank without a stage.
func (p Plan) Check() error {
	switch {
	case p.Ranks < 1:
		return fmt.Errorf("pipeline plan: %d ranks, need at least 1", p.Ranks)
	case p.Micros < 1:
		return fmt.Errorf("pipeline plan: %d micro-batches, need at least 1", p.Micros)
	}
	has := make(map[int]bool, len(p.Owner))
	for s, r := range p.Owner {
		if r < 0 || r >= p.Ranks {
			return fmt.Errorf("pipeline plan: stage %d is on rank %d, but there are %d ranks", s, r, p.Ranks)
		}
		has[r] = true
	}
	if len(has) < p.Ranks {
		for r := range p.Ranks {
			if !has[r] {
				return fmt.Errorf("pipeline plan: rank %d of %d owns no stage", r, p.Ranks)
			}
		}
	}
	return nil
}

// inOrder reports whether the ranks own contiguous blocks of stages in rank order.
func (p Plan) inOrder() bool {
	for s := 1; s < len(p.Owner); s++ {
		if p.Owner[s] < p.Owner[s-1] {
			return false
		}
	}
	return true
}

// stagesOf lists the stages of a rank, ascending.
func (p Plan) stagesOf(rank int) []int {
	var own []int
	for s, r := range p.Owner {
		if r == rank {
			own = append(own, s)
		}
	}
	return own
}

// A Schedule is a plan and one list of actions per rank.
type Schedule struct {
	Plan
	Lists [][]Action
}

// hasComm reports whether any list holds a send or receive.
func (s Schedule) hasComm() bool { return s.any(Op.Comm) }

// Trains reports whether any list holds a backward action. Without one the schedule is forward only, which Simulate accepts
// too: a caller that trains asks.
func (s Schedule) Trains() bool { return s.any(Op.backward) }

func (s Schedule) any(is func(Op) bool) bool {
	for _, l := range s.Lists {
		for _, a := range l {
			if is(a.Op) {
				return true
			}
		}
	}
	return false
}

// filter returns the schedule with the actions whose operation is kept.
func (s Schedule) filter(keep func(Op) bool) Schedule {
	out := Schedule{Plan: s.Plan, Lists: make([][]Action, len(s.Lists))}
	for r, l := range s.Lists {
		for _, a := range l {
			if keep(a.Op) {
				out.Lists[r] = append(out.Lists[r], a)
			}
		}
	}
	return out
}

func join[T fmt.Stringer](xs []T, sep string) string {
	parts := make([]string, len(xs))
	for i, x := range xs {
		parts[i] = x.String()
	}
	return strings.Join(parts, sep)
}
