package shm

import (
	"fmt"
	"math/bits"
	"slices"
	"sync"

	"moetor/comm"
)

// inbox matches what arrives from one rank with what is asked of it. The owner's mutex guards it.
type inbox struct {
	from   int // world rank of the sender
	queues map[comm.Tag]*queue
	cur    *message // of which fragments are still to come
}

// queue holds one tag's messages in the order of arrival and the receivers that wait for one. A message that arrives in a
// receiver's buffer is in neither list, nor is that receiver. Both lists are in use only while the first message is not
// whole and has not the length that the first receiver expects.
type queue struct {
	messages []*message
	waiters  []*waiter
}

type message struct {
	tag    comm.Tag
	total  int
	n      int     // bytes that have come
	buf    []byte  // where they go: a pooled buffer, or the receiver's
	waiter *waiter // whose buf it is
}

// waiter is a Recv that waits.
type waiter struct {
	buf  []byte
	msg  *message // that arrives into buf, or nil
	over bool
	err  error
	done chan struct{} // receives once when over
}

func (w *waiter) finish(err error) {
	w.over, w.err, w.msg = true, err, nil
	w.done <- struct{}{}
}

var waiters = sync.Pool{New: func() any { return &waiter{done: make(chan struct{}, 1)} }}

func (in *inbox) queue(tag comm.Tag) *queue {
	q := in.queues[tag]
	if q == nil {
		if in.queues == nil {
			in.queues = make(map[comm.Tag]*queue)
		}
		q = &queue{}
		in.queues[tag] = q
	}
	return q
}

// accept takes one fragment, its payload in two parts.
func (in *inbox) accept(f fragment, a, b []byte) error {
	switch f.kind {
	case kindFirst:
		if in.cur != nil {
			return fmt.Errorf("stream is damaged: a message begins inside another")
		}
		if f.total > 1<<48 {
			return fmt.Errorf("stream is damaged: message of %d bytes", f.total)
		}
		in.cur = &message{tag: f.tag, total: int(f.total)}
		in.offer(in.cur)
	case kindAbort:
		if m := in.cur; m != nil {
			in.cur = nil
			in.withdraw(m)
		}
		return nil
	}
	m := in.cur
	if m == nil || m.tag != f.tag || m.n+f.n > m.total {
		return fmt.Errorf("stream is damaged: fragment with tag %d and %d bytes is out of place", f.tag, f.n)
	}
	n := copy(m.buf[m.n:], a)
	copy(m.buf[m.n+n:], b)
	m.n += f.n
	if m.n == m.total {
		in.cur = nil
		if m.waiter != nil {
			m.waiter.finish(nil)
		} else {
			in.match(in.queue(m.tag))
		}
	}
	return nil
}

// offer lets a message arrive in the buffer of the first receiver that waits for its tag, or else queues it. A message
// counts as one only when it is whole, for it may still be withdrawn: until then a receiver of another length waits on.
func (in *inbox) offer(m *message) {
	q := in.queue(m.tag)
	if len(q.waiters) > 0 && len(q.waiters[0].buf) == m.total {
		w := q.waiters[0]
		q.waiters = slices.Delete(q.waiters, 0, 1)
		in.claim(m, w)
		return
	}
	if m.buf == nil {
		m.buf = getBuffer(m.total)
	}
	q.messages = append(q.messages, m)
}

// claim joins a message, in part or whole, with a receiver of its length.
func (in *inbox) claim(m *message, w *waiter) {
	if m.buf != nil {
		copy(w.buf, m.buf[:m.n])
		putBuffer(m.buf)
	}
	m.buf, m.waiter, w.msg = w.buf, w, m
	if in.cur != m {
		w.finish(nil)
	}
}

// match serves the receivers of a queue as far as whole messages go.
func (in *inbox) match(q *queue) {
	for len(q.messages) > 0 && len(q.waiters) > 0 && in.cur != q.messages[0] {
		m, w := q.messages[0], q.waiters[0]
		q.waiters = slices.Delete(q.waiters, 0, 1)
		if len(w.buf) != m.total {
			w.finish(&comm.LengthError{From: in.from, Tag: m.tag, Want: len(w.buf), Got: m.total})
			continue // the message stays for a receiver that expects it
		}
		q.messages = slices.Delete(q.messages, 0, 1)
		in.claim(m, w)
	}
}

// withdraw undoes the arrival of a message that will not come whole.
func (in *inbox) withdraw(m *message) {
	q := in.queue(m.tag)
	if m.waiter != nil {
		m.waiter.msg = nil
		q.waiters = slices.Insert(q.waiters, 0, m.waiter) // it waited longest
	} else {
		if i := slices.Index(q.messages, m); i >= 0 {
			q.messages = slices.Delete(q.messages, i, i+1)
		}
		putBuffer(m.buf)
	}
}

// ask joins a receiver with the oldest message of a tag, or lets it wait.
func (in *inbox) ask(tag comm.Tag, w *waiter) {
	q := in.queue(tag)
	if len(q.waiters) == 0 && len(q.messages) > 0 && len(q.messages[0].buf) == len(w.buf) {
		m := q.messages[0]
		q.messages = slices.Delete(q.messages, 0, 1)
		in.claim(m, w)
		return
	}
	q.waiters = append(q.waiters, w)
	in.match(q)
}

// forget ends a receiver's wait before its message has come whole. Nothing is lost: what came is kept for the next Recv.
func (in *inbox) forget(tag comm.Tag, w *waiter) {
	q := in.queue(tag)
	if m := w.msg; m != nil {
		m.buf = getBuffer(m.total)
		copy(m.buf, w.buf[:m.n])
		m.waiter, w.msg = nil, nil
		in.offer(m)
		return
	}
	if i := slices.Index(q.waiters, w); i >= 0 {
		q.waiters = slices.Delete(q.waiters, i, i+1)
	}
}

// end fails everyone who waits. Messages that came whole stay.
func (in *inbox) end(err error) {
	if m := in.cur; m != nil {
		in.cur = nil
		in.withdraw(m)
	}
	for _, q := range in.queues {
		for _, w := range q.waiters {
			w.finish(err)
		}
		q.waiters = nil
	}
}

// Buffers for messages that nobody has asked for yet, by power of two.
var buffers [bits.UintSize]sync.Pool

func getBuffer(n int) []byte {
	if n == 0 {
		return []byte{}
	}
	class := bits.Len(uint(n - 1))
	if p, _ := buffers[class].Get().(*[]byte); p != nil {
		return (*p)[:n]
	}
	return make([]byte, n, 1<<class)
}

func putBuffer(b []byte) {
	if cap(b) == 0 {
		return
	}
	buffers[bits.Len(uint(cap(b)-1))].Put(&b)
}
