// Package inproc is the transport between ranks that are goroutines of one process: for tests, and for a run that needs no
// processes of its own.
package inproc

import (
	"context"
	"sync"
	"sync/atomic"

	"moetor/comm"
)

type hub struct{ ranks []*rank }

type rank struct {
	hub    *hub
	rank   int
	boxes  []*comm.Mailbox // by sender
	closed atomic.Bool
	once   sync.Once
}

// New returns the transports of n connected ranks, in rank order. Messages that nobody has asked for are kept without limit,
// so Send never waits.
func New(n int) []comm.Transport {
	h := &hub{ranks: make([]*rank, n)}
	all := make([]comm.Transport, n)
	for i := range n {
		r := &rank{hub: h, rank: i, boxes: make([]*comm.Mailbox, n)}
		for from := range r.boxes {
			r.boxes[from] = comm.NewMailbox(from)
		}
		h.ranks[i], all[i] = r, r
	}
	return all
}

func (r *rank) Rank() int { return r.rank }
func (r *rank) Size() int { return len(r.hub.ranks) }

func (r *rank) Send(ctx context.Context, to int, tag comm.Tag, p []byte) error {
	if err := comm.CheckRank(to, r.Size()); err != nil {
		return err
	}
	if err := ctx.Err(); err != nil {
		return err
	}
	if r.closed.Load() {
		return comm.ErrClosed
	}
	peer := r.hub.ranks[to]
	if peer.closed.Load() {
		return &comm.PeerError{Rank: to, Op: "send", Err: comm.ErrPeerClosed}
	}
	peer.boxes[r.rank].Put(tag, p)
	return nil
}

func (r *rank) Recv(ctx context.Context, from int, tag comm.Tag, p []byte) error {
	if err := comm.CheckRank(from, r.Size()); err != nil {
		return err
	}
	if r.closed.Load() {
		return comm.ErrClosed
	}
	return r.boxes[from].Recv(ctx, tag, p)
}

// Close ends the rank: its own operations fail with comm.ErrClosed, those of its peers with a *comm.PeerError once they have
// received what it sent before.
func (r *rank) Close() error {
	r.once.Do(func() {
		r.closed.Store(true)
		for _, box := range r.boxes {
			box.Fail(comm.ErrClosed)
		}
		for to, peer := range r.hub.ranks {
			if to != r.rank {
				peer.boxes[r.rank].Fail(&comm.PeerError{Rank: r.rank, Op: "receive", Err: comm.ErrPeerClosed})
			}
		}
	})
	return nil
}
