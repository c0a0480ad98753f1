package commtest

import (
	"context"
	"math/rand/v2"
	"sync/atomic"
	"time"

	"moetor/comm"
)

// Faults says how Faulty breaks a transport. Operations are the calls of Send and Recv, counted from 1 in the order in
// which they begin; 0 means never.
type Faults struct {
	MaxDelay time.Duration // each operation begins later by a random time below it
	Seed     uint64        // of the delays
	// DropAt: this operation and all later ones are lost: a Send reports success though nothing is sent, as when a host
	// dies with the data in its buffers, and the transport closes.
	DropAt int64
	// CloseAt: the transport closes before this operation.
	CloseAt int64
}

type faulty struct {
	comm.Transport
	f     Faults
	count atomic.Int64
}

// Faulty wraps a transport so that it fails at a set operation: the same one in every run in which the rank's operations
// come in the same order.
func Faulty(t comm.Transport, f Faults) comm.Transport {
	return &faulty{Transport: t, f: f}
}

// enter does what is due before the next operation and says whether the operation is to be dropped.
func (t *faulty) enter(ctx context.Context) (drop bool) {
	n := t.count.Add(1)
	if t.f.MaxDelay > 0 {
		rng := rand.New(rand.NewPCG(t.f.Seed, uint64(n)))
		select {
		case <-time.After(time.Duration(rng.Int64N(int64(t.f.MaxDelay)))):
		case <-ctx.Done():
		}
	}
	if drop = t.f.DropAt > 0 && n >= t.f.DropAt; drop || t.f.CloseAt > 0 && n >= t.f.CloseAt {
		_ = t.Transport.Close()
	}
	return drop
}

func (t *faulty) Send(ctx context.Context, to int, tag comm.Tag, p []byte) error {
	if t.enter(ctx) {
		return nil
	}
	return t.Transport.Send(ctx, to, tag, p)
}

func (t *faulty) Recv(ctx context.Context, from int, tag comm.Tag, p []byte) error {
	t.enter(ctx)
	return t.Transport.Recv(ctx, from, tag, p)
}
