// SKELETON: contract; the comm author replaces bodies and splits files.
package comm

import (
	"context"
	"errors"
	"fmt"
)

// Tag separates message streams between two ranks. Tags below TagUser belong to groups.
type Tag uint32

// TagPipeline is the first tag for point-to-point messages of the pipeline.
const TagPipeline Tag = 1 << 16

// A Transport moves bytes between ranks. Messages between two ranks with one tag keep their order. Send returns when p
// may be reused and accepts at least one message per peer and tag that nobody has asked for yet. Recv fills p, whose
// length must be the message's (a mismatch is an error naming both lengths, on the receiver). Cancelling ctx unblocks both.
// Sending to oneself works. A lost peer is a *PeerError on every operation that waits for it.
type Transport interface {
	Rank() int
	Size() int
	Send(ctx context.Context, to int, tag Tag, p []byte) error
	Recv(ctx context.Context, from int, tag Tag, p []byte) error
	Close() error
}

// A PeerError says which rank an operation failed with.
type PeerError struct {
	Rank int
	Op   string
	Seq  uint64
	Err  error
}

func (e *PeerError) Error() string {
	return fmt.Sprintf("rank %d: %s #%d: %v", e.Rank, e.Op, e.Seq, e.Err)
}
func (e *PeerError) Unwrap() error { return e.Err }

type Reduction uint8

const (
	Sum Reduction = iota
	Max
)

type Number interface {
	~float32 | ~float64 | ~int32 | ~int64 | ~uint8
}

// A Group is an ordered set of ranks with its own tag. All members must call the same operations in the same order.
// Every collective sends a header (operation, sequence number, element type, length); a mismatch is an error on every
// member within the time-out that names both sides. Sums run in rank order 0..n-1 for every element, so the result does
// not depend on the transport. A Group is not safe for concurrent use.
type Group struct {
	t     Transport
	ranks []int
	tag   Tag
}

// NewGroup makes the group of the given world ranks (the caller's among them) in that order. tag < TagPipeline, and unique
// among the groups that share members.
func NewGroup(t Transport, ranks []int, tag Tag) (*Group, error) {
	return &Group{t, ranks, tag}, nil
}
func (g *Group) Rank() int    { return 0 } // position in the group
func (g *Group) Size() int    { return len(g.ranks) }
func (g *Group) Ranks() []int { return g.ranks } // world ranks

func (g *Group) Barrier(ctx context.Context) error { return errors.ErrUnsupported }

// AllReduce combines x over the group in place.
func AllReduce[T Number](ctx context.Context, g *Group, x []T, op Reduction) error {
	return errors.ErrUnsupported
}

// ReduceScatter: src is the concatenation of one part per member with counts[i] elements; dst (len counts[g.Rank()])
// receives the sum of everyone's part for this member, added in rank order.
func ReduceScatter[T Number](ctx context.Context, g *Group, dst, src []T, counts []int) error {
	return errors.ErrUnsupported
}

// AllGather: dst is the concatenation of everyone's src; counts[i] elements from member i.
func AllGather[T Number](ctx context.Context, g *Group, dst, src []T, counts []int) error {
	return errors.ErrUnsupported
}

// AllToAll: send[i] elements of src go to member i (src is their concatenation), recv[i] elements arrive from member i.
func AllToAll[T Number](ctx context.Context, g *Group, dst, src []T, recv, send []int) error {
	return errors.ErrUnsupported
}

// Broadcast copies root's x (position in the group) to all.
func Broadcast[T Number](ctx context.Context, g *Group, x []T, root int) error {
	return errors.ErrUnsupported
}

// GatherBytes returns every member's blob on every member (lengths are exchanged first): for set-up, errors, checkpoints.
func GatherBytes(ctx context.Context, g *Group, mine []byte) ([][]byte, error) {
	return nil, errors.ErrUnsupported
}

// SendSlice and RecvSlice move a numeric slice point to point without copying it into a byte buffer first.
func SendSlice[T Number](ctx context.Context, t Transport, to int, tag Tag, x []T) error {
	return errors.ErrUnsupported
}
func RecvSlice[T Number](ctx context.Context, t Transport, from int, tag Tag, x []T) error {
	return errors.ErrUnsupported
}
