// Package comm moves data between the ranks of a run. A Transport sends and receives messages between two ranks; a Group
// adds collectives, written once over any Transport with a fixed order of sums. The transports stand in comm/inproc
// (goroutines), comm/shm (processes of one host) and comm/tcp (hosts); comm/commtest says what a transport must do.
//
// Numbers travel as they lie in memory, so all hosts of a run must be little-endian (every platform moetor builds for is);
// NewGroup refuses a host that is not.
package comm

import (
	"context"
	"errors"
	"fmt"
	"time"
)

// Tag separates message streams between two ranks. Tags below TagPipeline belong to groups, one per group.
type Tag uint32

// TagPipeline is the first tag for point-to-point messages of the pipeline.
const TagPipeline Tag = 1 << 16

// A Transport moves bytes between ranks. All methods may be called from several goroutines at once.
//
// Messages between two ranks with one tag keep their order; messages with different tags never wait for one another. Send
// returns when p may be reused, and accepts at least one message per peer and tag that nobody has asked for yet, however
// long it is: with unbuffered sends most pipeline schedules lock up. Recv fills p, whose length must be the message's: if
// it is not, Recv returns a *LengthError and the message stays at the head of its stream. Sending to oneself works.
//
// Cancelling ctx unblocks both, and they then return its error. An operation that needs a peer which closed its transport
// or died returns a *PeerError naming it, as soon as the loss is known; messages that arrived before the loss can still be
// received. Close frees everything the transport holds, ends its own waiting operations and makes later ones fail with an
// error for which errors.Is(err, ErrClosed) holds.
type Transport interface {
	Rank() int
	Size() int
	Send(ctx context.Context, to int, tag Tag, p []byte) error
	Recv(ctx context.Context, from int, tag Tag, p []byte) error
	Close() error
}

// ErrClosed is what an operation on a transport returns after its Close.
var ErrClosed = errors.New("transport closed")

// ErrPeerClosed is the cause within a *PeerError when a peer's connection ended without a more exact reason.
var ErrPeerClosed = errors.New("connection closed")

// ErrMismatch marks errors of collectives that members of a group called with different operations, types or lengths.
var ErrMismatch = errors.New("ranks call different collectives")

// A PeerError says which rank an operation failed with. Rank is a world rank. Op names the operation ("send", "receive" or
// a collective), Seq counts the collectives of a group from 1 and is 0 outside a group.
type PeerError struct {
	Rank int
	Op   string
	Seq  uint64
	Err  error
}

func (e *PeerError) Error() string {
	op := e.Op
	if e.Seq > 0 {
		op = fmt.Sprintf("%s #%d", e.Op, e.Seq)
	}
	var late *timeoutError
	var told *noteError
	switch {
	case errors.As(e.Err, &told):
		return fmt.Sprintf("%s stopped, rank %d reports: %s", op, told.from, told.text)
	case errors.As(e.Err, &late):
		return fmt.Sprintf("rank %d gave no answer to %s within %v", e.Rank, op, late.limit)
	}
	return fmt.Sprintf("rank %d lost during %s: %v", e.Rank, op, e.Err)
}

// Unwrap returns the cause.
func (e *PeerError) Unwrap() error { return e.Err }

// A LengthError says that the next message of a stream has another length than the buffer handed to Recv.
type LengthError struct {
	From      int // world rank of the sender
	Tag       Tag
	Want, Got int // bytes: of the buffer, of the message
}

func (e *LengthError) Error() string {
	return fmt.Sprintf("message from rank %d with tag %d has %d bytes, the receiver expects %d", e.From, e.Tag, e.Got, e.Want)
}

// CheckRank says whether rank is one of size ranks; transports use it on the arguments of Send and Recv.
func CheckRank(rank, size int) error {
	if rank < 0 || rank >= size {
		return fmt.Errorf("no rank %d among %d ranks", rank, size)
	}
	return nil
}

// NoAnswer is the error of an operation that waited longer than limit for a rank.
func NoAnswer(rank int, op string, limit time.Duration) *PeerError {
	return &PeerError{Rank: rank, Op: op, Err: &timeoutError{limit}}
}

// timeoutError is the cause of a PeerError when a member did not answer in the group's time.
type timeoutError struct{ limit time.Duration }

func (e *timeoutError) Error() string        { return fmt.Sprintf("no answer within %v", e.limit) }
func (e *timeoutError) Timeout() bool        { return true }
func (e *timeoutError) Is(target error) bool { return target == context.DeadlineExceeded }

// noteError is the cause of a PeerError when another member said why it gave up.
type noteError struct {
	from int
	text string
}

func (e *noteError) Error() string { return fmt.Sprintf("rank %d reports: %s", e.from, e.text) }
