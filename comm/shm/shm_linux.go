package shm

import (
	"context"
	"fmt"
	"os"
	"runtime"
	"sync"
	"sync/atomic"

	"moetor/comm"

	"golang.org/x/sys/unix"
)

// transport is one rank's end of a segment.
type transport struct {
	rank, size int
	seg        *segment
	slot       *slot
	claimed    bool
	peers      []*peer // by rank; this rank among them
	bells      []int   // by rank: file descriptor of its bell
	bell       *os.File
	maxSpin    int32 // most looks before a sleep

	background sync.WaitGroup // progress and watches
	closing    chan struct{}
	mu         sync.RWMutex // guards closed, and that no operation begins after it
	closed     bool
	ops        sync.WaitGroup // running Send and Recv: the mapping stays until they are out
}

func (t *transport) Rank() int { return t.rank }
func (t *transport) Size() int { return t.size }

// enter begins an operation with a peer.
func (t *transport) enter(rank int, what string) (*peer, error) {
	if err := comm.CheckRank(rank, t.size); err != nil {
		return nil, fmt.Errorf("shm: %s: %w", what, err)
	}
	t.mu.RLock()
	defer t.mu.RUnlock()
	if t.closed {
		return nil, fmt.Errorf("shm: %s: %w", what, comm.ErrClosed)
	}
	t.ops.Add(1)
	return t.peers[rank], nil
}

// Send copies p towards a rank and returns when p may be reused. It waits while the ring to that rank is full.
func (t *transport) Send(ctx context.Context, to int, tag comm.Tag, p []byte) error {
	peer, err := t.enter(to, "send")
	if err != nil {
		return err
	}
	defer t.ops.Done()
	if err := ctx.Err(); err != nil {
		return err
	}
	return peer.send(ctx, tag, p)
}

// Recv fills p with the next message of a tag from a rank. A Recv that is cancelled takes no message.
func (t *transport) Recv(ctx context.Context, from int, tag comm.Tag, p []byte) error {
	peer, err := t.enter(from, "receive")
	if err != nil {
		return err
	}
	defer t.ops.Done()
	if err := ctx.Err(); err != nil {
		return err
	}
	return peer.recv(ctx, tag, p)
}

// Close ends this rank's part: operations in progress return comm.ErrClosed, and the other ranks' fail with
// comm.ErrPeerClosed once they have received what was sent before.
func (t *transport) Close() error {
	t.mu.Lock()
	if t.closed {
		t.mu.Unlock()
		return nil
	}
	t.closed = true
	t.mu.Unlock()
	close(t.closing)
	t.ops.Wait()
	if t.claimed {
		t.slot.state.Store(slotClosed)
		for r := range t.size {
			if r != t.rank {
				t.ring(r)
			}
		}
	}
	if t.bell != nil {
		t.bell.Close() // ends progress
	}
	for _, p := range t.peers {
		if p != nil {
			p.unwatch()
		}
	}
	t.background.Wait()
	for _, fd := range t.bells {
		if fd >= 0 {
			unix.Close(fd)
		}
	}
	return t.seg.close()
}

var bellByte = []byte{1}

// ring wakes a rank if it sleeps.
func (t *transport) ring(rank int) {
	s := t.seg.slot(rank)
	if s.sleeping.Load() == 0 || !s.sleeping.CompareAndSwap(1, 0) {
		return
	}
	for {
		// A full pipe wakes as well, and nothing else can fail that would matter to a rank that lives.
		if _, err := unix.Write(t.bells[rank], bellByte); err != unix.EINTR {
			return
		}
	}
}

// progress empties incoming rings, hands on news of room, and notices peers that close. It sleeps when there is nothing
// to do.
//
// No wake-up is lost: progress sets sleeping and then looks at everything once more; whoever has news writes it first and
// then looks at sleeping. The operations are sequentially consistent, so one of the two sees the other.
func (t *transport) progress() {
	var (
		bytes [64]byte
		spin  spinner
	)
	for {
		if t.scan() {
			continue
		}
		if spin.wait(t.maxSpin, t.scan) {
			continue
		}
		t.slot.sleeping.Store(1)
		if t.scan() {
			t.slot.sleeping.Store(0)
			continue
		}
		if _, err := t.bell.Read(bytes[:]); err != nil {
			return // closed
		}
		t.slot.sleeping.Store(0)
	}
}

// scan does what there is to do and tells whether there was anything.
func (t *transport) scan() bool {
	did := false
	for r, p := range t.peers {
		if r != t.rank && p.poll() {
			did = true
		}
	}
	return did
}

// spinner bounds how often a wait looks before it sleeps. It looks longer while looking helps, and hardly when it does not.
type spinner struct{ budget atomic.Int32 }

func (s *spinner) wait(most int32, look func() bool) bool {
	if most == 0 {
		return false
	}
	budget := max(1, min(most, s.budget.Load()))
	for range budget {
		runtime.Gosched()
		if look() {
			s.budget.Store(min(most, 2*budget))
			return true
		}
	}
	s.budget.Store(max(1, budget/2))
	return false
}
