// SKELETON (pipeline author owns; see style.md §2.4 and §2.6 and design.md §5)
package pipeline

import "context"

// Stage and Link are all that execution needs from its caller. model.Chunk is a Stage.
type Stage interface {
	Forward(ctx context.Context, micro int, in []float32) (out []float32, err error)
	BackwardInput(ctx context.Context, micro int, dout []float32) (din []float32, err error)
	BackwardWeight(ctx context.Context, micro int) error
}

// Link moves activations and gradients between stages; Recv returns a buffer that stays valid until the action that
// consumes it (Forward / BackwardInput of that stage and micro) has returned.
type Link interface {
	Send(ctx context.Context, a Action, p []float32) error
	Recv(ctx context.Context, a Action) ([]float32, error)
}

type Op uint8

type Action struct {
	Op           Op
	Stage, Micro int
}
