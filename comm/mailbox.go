package comm

import (
	"context"
	"errors"
	"sync"
)

// A Mailbox keeps the messages of one sender to one receiver until they are asked for, a queue per tag without limit: the
// receiving half of a transport. Its methods may be called from several goroutines.
type Mailbox struct {
	from   int
	mu     sync.Mutex
	queues map[Tag]*queue
	err    error // what ended the stream
}

type queue struct {
	tag   Tag
	msgs  [][]byte   // arrived, not asked for
	wait  []*Receive // asked for, not arrived; msgs and wait are never both in use
	spare [][]byte   // buffers of messages that have been received
	idle  []*Receive
}

var errReleased = errors.New("receive abandoned")

// spareBuffers is how many buffers a queue keeps for later messages.
const spareBuffers = 4

// A Receive is a waiting Recv that an incoming message has claimed, see Mailbox.Claim.
type Receive struct {
	q         *queue
	p         []byte
	done      chan error
	interrupt func()
	canceled  bool
}

// NewMailbox makes the mailbox for messages from world rank from.
func NewMailbox(from int) *Mailbox { return &Mailbox{from: from, queues: map[Tag]*queue{}} }

func (m *Mailbox) queue(tag Tag) *queue {
	q := m.queues[tag]
	if q == nil {
		q = &queue{tag: tag}
		m.queues[tag] = q
	}
	return q
}

// Buffer returns room for a message of n bytes with that tag, to be filled and handed back through Deliver: the buffer of an
// earlier message if one is large enough, else nil.
func (m *Mailbox) Buffer(tag Tag, n int) []byte {
	m.mu.Lock()
	defer m.mu.Unlock()
	return m.queue(tag).takeSpare(n)
}

// takeSpare returns the smallest spare buffer that is large enough, or nil.
func (q *queue) takeSpare(n int) []byte {
	best := -1
	for i, b := range q.spare {
		if cap(b) >= n && (best < 0 || cap(b) < cap(q.spare[best])) {
			best = i
		}
	}
	if best < 0 {
		return nil
	}
	b, last := q.spare[best], len(q.spare)-1
	q.spare[best], q.spare[last] = q.spare[last], nil
	q.spare = q.spare[:last]
	return b[:n]
}

func (q *queue) keepSpare(b []byte) {
	if cap(b) == 0 {
		return
	}
	if len(q.spare) < spareBuffers {
		q.spare = append(q.spare, b)
		return
	}
	for i, s := range q.spare {
		if cap(s) < cap(b) {
			q.spare[i] = b
			return
		}
	}
}

// Put delivers a copy of p, straight into the buffer of a waiting Recv if there is one.
func (m *Mailbox) Put(tag Tag, p []byte) {
	if r := m.Claim(tag, len(p), nil); r != nil {
		copy(r.p, p)
		m.Complete(r, nil)
		return
	}
	b := m.Buffer(tag, len(p))
	if b == nil {
		b = make([]byte, len(p))
	}
	copy(b, p)
	m.Deliver(tag, b)
}

// Deliver hands over a message that the mailbox owns from then on.
func (m *Mailbox) Deliver(tag Tag, msg []byte) {
	m.mu.Lock()
	defer m.mu.Unlock()
	q := m.queue(tag)
	q.msgs = append(q.msgs, msg)
	for len(q.msgs) > 0 && len(q.wait) > 0 {
		r := q.wait[0]
		q.unwait(0)
		r.done <- q.take(m.from, r.p)
	}
}

// take moves the first message to p.
func (q *queue) take(from int, p []byte) error {
	msg := q.msgs[0]
	if len(msg) != len(p) {
		return &LengthError{from, q.tag, len(p), len(msg)}
	}
	copy(p, msg)
	n := copy(q.msgs, q.msgs[1:])
	q.msgs[n] = nil
	q.msgs = q.msgs[:n]
	q.keepSpare(msg)
	return nil
}

func (q *queue) unwait(i int) {
	n := i + copy(q.wait[i:], q.wait[i+1:])
	q.wait[n] = nil
	q.wait = q.wait[:n]
}

// Claim finds a Recv that waits for the next message with that tag and is n bytes long. The caller fills Bytes and then
// calls Complete. If filling can take long, interrupt must end it when the receiver's context is cancelled: it is called at
// most once, before Complete, and from then on Canceled reports true. Claim returns nil if nobody waits.
func (m *Mailbox) Claim(tag Tag, n int, interrupt func()) *Receive {
	m.mu.Lock()
	defer m.mu.Unlock()
	q := m.queue(tag)
	if len(q.wait) == 0 || len(q.wait[0].p) != n {
		return nil
	}
	r := q.wait[0]
	q.unwait(0)
	r.interrupt = interrupt
	return r
}

// Bytes is the receiver's buffer.
func (r *Receive) Bytes() []byte { return r.p }

// Canceled says whether the receiver has stopped waiting for r.
func (m *Mailbox) Canceled(r *Receive) bool {
	m.mu.Lock()
	defer m.mu.Unlock()
	return r.canceled
}

// Complete ends the claimed Recv with err.
func (m *Mailbox) Complete(r *Receive, err error) {
	m.mu.Lock()
	defer m.mu.Unlock()
	r.interrupt = nil
	r.done <- err
}

// Release lets the claimed Recv go without the message, after Canceled; its buffer must not be touched any more. The
// message may be delivered later and then serves the next Recv.
func (m *Mailbox) Release(r *Receive) { m.Complete(r, errReleased) }

// Fail ends the stream: Recv returns the messages that have arrived and then err. Only the first call counts.
func (m *Mailbox) Fail(err error) {
	m.mu.Lock()
	defer m.mu.Unlock()
	if m.err != nil {
		return
	}
	m.err = err
	for _, q := range m.queues {
		for _, r := range q.wait {
			r.done <- err
		}
		clear(q.wait)
		q.wait = q.wait[:0]
	}
}

// Recv waits for the next message with that tag and copies it to p; see Transport.
func (m *Mailbox) Recv(ctx context.Context, tag Tag, p []byte) error {
	if err := ctx.Err(); err != nil {
		return err
	}
	m.mu.Lock()
	q := m.queue(tag)
	if len(q.msgs) > 0 {
		defer m.mu.Unlock()
		return q.take(m.from, p)
	}
	if m.err != nil {
		defer m.mu.Unlock()
		return m.err
	}
	var r *Receive
	if n := len(q.idle); n > 0 {
		r, q.idle = q.idle[n-1], q.idle[:n-1]
	} else {
		r = &Receive{q: q, done: make(chan error, 1)}
	}
	r.p = p
	q.wait = append(q.wait, r)
	m.mu.Unlock()

	var err error
	select {
	case err = <-r.done:
	case <-ctx.Done():
		err = m.abandon(ctx, r)
	}
	m.mu.Lock()
	r.p, r.canceled = nil, false
	q.idle = append(q.idle, r)
	m.mu.Unlock()
	return err
}

// abandon takes r back after its context was cancelled. A message that is arriving in its buffer must get out of it first.
func (m *Mailbox) abandon(ctx context.Context, r *Receive) error {
	m.mu.Lock()
	for i, w := range r.q.wait {
		if w == r {
			r.q.unwait(i)
			m.mu.Unlock()
			return ctx.Err()
		}
	}
	r.canceled = true
	if r.interrupt != nil {
		r.interrupt()
		r.interrupt = nil
	}
	m.mu.Unlock()
	if err := <-r.done; err != errReleased {
		return err // nil: it arrived after all
	}
	return ctx.Err()
}
