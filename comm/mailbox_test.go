package comm

import (
	"context"
	"errors"
	"testing"
	"time"
)

// waitFor returns the Recv that waits for n bytes with that tag, once it does.
func waitFor(m *Mailbox, tag Tag, n int, interrupt func()) *Receive {
	for {
		if r := m.Claim(tag, n, interrupt); r != nil {
			return r
		}
		time.Sleep(100 * time.Microsecond)
	}
}

func TestMailboxClaim(t *testing.T) {
	m := NewMailbox(3)
	p := make([]byte, 2)
	done := make(chan error)
	go func() { done <- m.Recv(t.Context(), 1, p) }()
	r := waitFor(m, 1, 2, nil)
	if m.Claim(1, 2, nil) != nil {
		t.Error("claimed twice")
	}
	copy(r.Bytes(), "ab")
	m.Complete(r, nil)
	if err := <-done; err != nil || string(p) != "ab" {
		t.Errorf("%q, %v", p, err)
	}
}

// TestMailboxRelease cancels a receiver whose message is arriving: the interrupt runs once, the buffer comes back, and the
// message goes to the next receiver.
func TestMailboxRelease(t *testing.T) {
	m := NewMailbox(3)
	ctx, cancel := context.WithCancel(t.Context())
	done := make(chan error)
	go func() { done <- m.Recv(ctx, 1, make([]byte, 2)) }()
	interrupted := make(chan struct{})
	r := waitFor(m, 1, 2, func() { close(interrupted) })
	if m.Canceled(r) {
		t.Error("cancelled before its context")
	}
	cancel()
	<-interrupted
	if !m.Canceled(r) {
		t.Error("not cancelled after the interrupt")
	}
	m.Release(r)
	if err := <-done; !errors.Is(err, context.Canceled) {
		t.Errorf("abandoned Recv: %v", err)
	}
	m.Deliver(1, []byte("ab"))
	p := make([]byte, 2)
	if err := m.Recv(t.Context(), 1, p); err != nil || string(p) != "ab" {
		t.Errorf("%q, %v", p, err)
	}
}

func TestMailboxFail(t *testing.T) {
	m := NewMailbox(3)
	why, other := errors.New("why"), errors.New("other")
	m.Put(1, []byte("ab"))
	done := make(chan error)
	go func() { done <- m.Recv(t.Context(), 2, nil) }()
	time.Sleep(time.Millisecond) // likely it waits by then; the outcome is the same if not
	m.Fail(why)
	m.Fail(other)
	if err := <-done; err != why {
		t.Errorf("waiting Recv: %v", err)
	}
	if err := m.Recv(t.Context(), 1, make([]byte, 2)); err != nil {
		t.Errorf("message that came before: %v", err)
	}
	if err := m.Recv(t.Context(), 1, make([]byte, 2)); err != why {
		t.Errorf("after it: %v", err)
	}
}

// TestMailboxReuse receives warm messages without new memory.
func TestMailboxReuse(t *testing.T) {
	m := NewMailbox(0)
	p := make([]byte, 1000)
	got := testing.AllocsPerRun(100, func() {
		m.Put(1, p)
		m.Put(1, p[:10])
		if err := errors.Join(m.Recv(t.Context(), 1, p), m.Recv(t.Context(), 1, p[:10])); err != nil {
			t.Error(err)
		}
	})
	if got > 0 {
		t.Errorf("%v allocations per pair of messages", got)
	}
}
