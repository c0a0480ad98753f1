package shm

import (
	"context"
	"fmt"
	"sync"
	"sync/atomic"

	"moetor/comm"
)

// peer is what a rank keeps about another one, or about itself.
type peer struct {
	t    *transport
	rank int
	slot *slot

	// Sending. The holder of turn may put into the ring; a channel because waiting for it must be cancellable.
	turn     chan struct{}
	out      producer
	broken   bool          // the last message was cut off, its abort is still to be put
	waiting  atomic.Bool   // a sender wants room
	roomy    chan struct{} // tells it to look again
	roomSpin spinner

	// Receiving.
	mu    sync.Mutex
	in    consumer
	inbox inbox
	spin  spinner

	gone   chan struct{} // closed when the peer closed or died
	reason error         // why; set before gone is closed, under mu

	watcher watcher
}

func newPeer(t *transport, rank int) *peer {
	p := &peer{
		t: t, rank: rank, slot: t.seg.slot(rank),
		turn:  make(chan struct{}, 1),
		roomy: make(chan struct{}, 1),
		gone:  make(chan struct{}),
		inbox: inbox{from: rank},
	}
	if rank != t.rank {
		p.out.ringControl, p.out.data = t.seg.pair(t.rank, rank)
		p.in.ringControl, p.in.data = t.seg.pair(rank, t.rank)
	}
	return p
}

func (p *peer) goneErr() error {
	p.mu.Lock()
	defer p.mu.Unlock()
	return p.reason
}

// lost is the error of an operation with a peer that is gone.
func (p *peer) lost(op string) error { return &comm.PeerError{Rank: p.rank, Op: op, Err: p.goneErr()} }

func (p *peer) send(ctx context.Context, tag comm.Tag, b []byte) error {
	if p.rank == p.t.rank {
		p.mu.Lock()
		defer p.mu.Unlock()
		if err := p.inbox.accept(fragment{tag: tag, kind: kindFirst, total: uint64(len(b)), n: len(b)}, b, nil); err != nil {
			return fmt.Errorf("shm: send to self: %w", err)
		}
		return nil
	}
	select {
	case p.turn <- struct{}{}:
	default:
		select {
		case p.turn <- struct{}{}:
		case <-ctx.Done():
			return ctx.Err()
		case <-p.t.closing:
			return comm.ErrClosed
		case <-p.gone:
			return p.lost("send")
		}
	}
	defer func() { <-p.turn }()
	select {
	case <-p.gone:
		return p.lost("send")
	default:
	}
	if p.slot.state.Load() == slotClosed { // news that progress may not have had yet
		p.poll()
		return p.lost("send")
	}
	if p.broken {
		if err := p.wantRoom(ctx, 0); err != nil {
			return err
		}
		p.out.put(tag, kindAbort, 0, nil)
		p.broken = false
	}
	kind := uint32(kindFirst)
	for rest := b; ; kind = kindMore {
		n := min(len(rest), p.out.maxPayload())
		if err := p.wantRoom(ctx, n); err != nil {
			p.broken = kind != kindFirst
			return err
		}
		p.out.put(tag, kind, len(b), rest[:n])
		p.t.ring(p.rank)
		if rest = rest[n:]; len(rest) == 0 {
			return nil
		}
	}
}

// wantRoom waits until a fragment of n bytes fits.
func (p *peer) wantRoom(ctx context.Context, n int) error {
	if p.out.room(n) || p.roomSpin.wait(p.t.maxSpin, func() bool { return p.out.room(n) }) {
		return nil
	}
	for !p.out.room(n) {
		p.waiting.Store(true)
		p.out.waiting.Store(1)
		if p.out.room(n) { // freed before the consumer could see that someone waits
			break
		}
		select {
		case <-p.roomy:
		case <-ctx.Done():
			return ctx.Err()
		case <-p.t.closing:
			return comm.ErrClosed
		case <-p.gone:
			return p.lost("send")
		}
	}
	return nil
}

func (p *peer) recv(ctx context.Context, tag comm.Tag, b []byte) error {
	w := waiters.Get().(*waiter)
	w.buf, w.msg, w.over, w.err = b, nil, false, nil
	p.mu.Lock()
	p.inbox.ask(tag, w)
	p.drain() // the caller's own look saves it a switch to progress
	if !w.over && p.reason != nil {
		p.inbox.end(p.reason)
	}
	over := w.over
	p.mu.Unlock()
	if !over && p.rank != p.t.rank {
		p.spin.wait(p.t.maxSpin, func() bool {
			if len(w.done) > 0 {
				return true
			}
			if !p.in.empty() && p.mu.TryLock() {
				p.drain()
				p.mu.Unlock()
			}
			return len(w.done) > 0
		})
	}
	var err error
	select {
	case <-w.done:
	default:
		select {
		case <-w.done:
		case <-ctx.Done():
			err = p.forget(tag, w, ctx.Err())
		case <-p.t.closing:
			err = p.forget(tag, w, comm.ErrClosed)
		}
	}
	if err == nil && w.err != nil {
		err = w.err
		if p.isReason(err) {
			err = &comm.PeerError{Rank: p.rank, Op: "receive", Err: err}
		}
	}
	w.buf, w.msg, w.err = nil, nil, nil
	waiters.Put(w)
	return err
}

// forget gives a wait up for cause, unless it is over by now.
func (p *peer) forget(tag comm.Tag, w *waiter, cause error) error {
	p.mu.Lock()
	defer p.mu.Unlock()
	if w.over {
		<-w.done
		return nil
	}
	p.inbox.forget(tag, w)
	return cause
}

func (p *peer) isReason(err error) bool {
	p.mu.Lock()
	defer p.mu.Unlock()
	return p.reason != nil && err == p.reason
}

// poll is progress's look at one peer. It tells whether there was something to do.
func (p *peer) poll() bool {
	did := false
	if p.waiting.Load() && p.waiting.CompareAndSwap(true, false) {
		did = true
		select {
		case p.roomy <- struct{}{}:
		default:
		}
	}
	select {
	case <-p.gone:
		return did
	default:
	}
	closed := p.slot.state.Load() == slotClosed // before the look at the ring: what was sent before closing is in it
	if !closed && p.in.empty() {
		return did
	}
	p.mu.Lock()
	defer p.mu.Unlock()
	p.drain()
	if closed {
		p.end(errPeerClosed)
	}
	return true
}

// drain empties the incoming ring into the inbox. The caller holds mu.
func (p *peer) drain() {
	if p.rank == p.t.rank || p.reason != nil {
		return
	}
	for {
		f, a, b, ok, err := p.in.next()
		if err == nil && ok {
			err = p.inbox.accept(f, a, b)
		}
		if err != nil {
			p.end(fmt.Errorf("shared memory from this rank: %w", err))
			return
		}
		if !ok {
			break
		}
		if p.in.advance(f) {
			p.tellRoom()
		}
	}
	p.tellRoom()
}

// tellRoom wakes the producer if it waits for room.
func (p *peer) tellRoom() {
	if p.in.waiting.Load() == 1 && p.in.waiting.CompareAndSwap(1, 0) {
		p.t.ring(p.rank)
	}
}

// end marks the peer as gone and fails everyone who waits for it. The caller holds mu.
func (p *peer) end(reason error) {
	if p.reason != nil {
		return
	}
	p.reason = reason
	p.inbox.end(reason)
	close(p.gone)
}

// died is told by the watcher.
func (p *peer) died() {
	closed := p.slot.state.Load() == slotClosed
	pid := p.slot.pid.Load()
	p.mu.Lock()
	defer p.mu.Unlock()
	p.drain()
	if closed {
		p.end(errPeerClosed)
		return
	}
	p.end(fmt.Errorf("%w (pid %d)", ErrPeerDied, pid))
}
