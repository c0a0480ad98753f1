package train

import (
	"context"
	"errors"
	"fmt"
	"time"

	"moetor/comm"
	"moetor/internal/trace"
	"moetor/model"
	"moetor/parallel"
	"moetor/parallel/pipeline"
)

// link moves activations and their gradients between the stages of one pipeline. Both ends read the same
// micro-batches, so the size of every message is known on both sides.
type link struct {
	transport comm.Transport
	mesh      parallel.Mesh
	data      int // data coordinate of this rank
	plan      pipeline.Plan
	dim       int
	timeout   time.Duration // longest wait for another stage; 0 is no limit
	micros    []model.Micro
	rec       *trace.Recorder
	// buffers[stage side] are two alternating receive buffers for each stage and direction: the executor consumes a
	// message before it asks for the next but one of the same kind.
	buffers map[bufferKey]*[2][]float32
	turn    map[bufferKey]int
}

type bufferKey struct {
	op    pipeline.Op
	stage int
}

func (l *link) Send(ctx context.Context, a pipeline.Action, p []float32) error {
	to, tag := l.peer(a)
	ctx, cancel := l.limit(ctx)
	defer cancel()
	if err := comm.SendSlice(ctx, l.transport, to, tag, p); err != nil {
		return l.failed(ctx, to, "send", err)
	}
	return nil
}

// limit ends a wait after the time-out.
func (l *link) limit(ctx context.Context) (context.Context, context.CancelFunc) {
	if l.timeout <= 0 {
		return ctx, func() {}
	}
	return context.WithTimeout(ctx, l.timeout)
}

// failed says whom a message was for or from, and that it was waited for too long, if so.
func (l *link) failed(ctx context.Context, rank int, op string, err error) error {
	var lost *comm.PeerError
	if errors.Is(ctx.Err(), context.DeadlineExceeded) && !errors.As(err, &lost) {
		return comm.NoAnswer(rank, op, l.timeout)
	}
	return fmt.Errorf("%s, rank %d: %w", op, rank, err)
}

func (l *link) Recv(ctx context.Context, a pipeline.Action) ([]float32, error) {
	from, tag := l.peer(a)
	m := l.micros[a.Micro]
	key := bufferKey{a.Op, a.Stage}
	pair := l.buffers[key]
	if pair == nil {
		pair = new([2][]float32)
		l.buffers[key] = pair
	}
	l.turn[key] ^= 1
	p := resize(&pair[l.turn[key]], m.Seqs*m.Len*l.dim)
	ctx, cancel := l.limit(ctx)
	defer cancel()
	if err := comm.RecvSlice(ctx, l.transport, from, tag, p); err != nil {
		return nil, l.failed(ctx, from, "receive", err)
	}
	return p, nil
}

// peer is the other rank of a communication action and the tag of the stream it belongs to.
func (l *link) peer(a pipeline.Action) (rank int, tag comm.Tag) {
	return l.mesh.Rank(l.plan.Peer(a), l.data), comm.TagPipeline + comm.Tag(a.Channel())
}

// kindOf is where the time of an action is booked.
func kindOf(op pipeline.Op) trace.Kind {
	switch op {
	case pipeline.Forward:
		return trace.Forward
	case pipeline.Backward, pipeline.BackwardInput, pipeline.BackwardWeight:
		return trace.Backward
	default:
		return trace.Idle // waiting for, or handing over to, another stage
	}
}
