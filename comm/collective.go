package comm

import (
	"context"
	"fmt"
)

// Reduction says how AllReduce combines elements.
type Reduction uint8

const (
	// Sum adds in group order: ((x0 + x1) + x2) + ...
	Sum Reduction = iota
	// Max takes the largest; a NaN from any member gives NaN.
	Max
)

func (r Reduction) String() string {
	switch r {
	case Sum:
		return "sum"
	case Max:
		return "max"
	}
	return fmt.Sprintf("reduction %d", uint8(r))
}

const (
	// wholeBytes per member: vectors up to this are sent whole to every member, which saves a round of messages.
	wholeBytes = 1024
	// chunkBytes is the share of one member in a round of a long reduction. It bounds the memory for the parts of others
	// and keeps them in cache until they are summed. Both are far above inlineBytes, as payloads must be.
	chunkBytes = 512 << 10
	// maxGatherBytes bounds what GatherBytes takes from one member, so that a broken header cannot ask for all memory.
	maxGatherBytes = 1 << 30
)

func newCall[T Number](op opcode, count int) call {
	return call{op: op, elem: elemOf[T](), size: sizeOf[T](), count: uint64(count)}
}

// Barrier returns when every member has called it.
func (g *Group) Barrier(ctx context.Context) error {
	if err := g.begin(ctx, call{op: opBarrier, size: 1}); err != nil {
		return err
	}
	return g.end(g.handshake())
}

// AllReduce combines x over the group in place. x has the same length on every member. The bits of the result are the
// same on every member and for every transport: each element is combined in group order by one loop.
func AllReduce[T Number](ctx context.Context, g *Group, x []T, op Reduction) error {
	c := newCall[T](opAllReduce, len(x))
	c.red = op
	if err := g.begin(ctx, c); err != nil {
		return err
	}
	return g.end(allReduce(g, x, op))
}

func allReduce[T Number](g *Group, x []T, op Reduction) error {
	if op != Sum && op != Max {
		return g.badArgument("no such reduction: %d", op)
	}
	n, size := len(g.ranks), sizeOf[T]()
	if n == 1 {
		return g.handshake()
	}
	if len(x)*size <= n*wholeBytes {
		for j := range n {
			if j != g.me {
				g.nsend[j], g.nrecv[j] = len(x), len(x)
				g.out[j], g.in[j] = bytesOf(x), g.slot(j, len(x)*size)
			}
		}
		if err := g.handshake(); err != nil {
			return err
		}
		if err := g.payload(inlineBytes); err != nil {
			return err
		}
		reduceParts(g, x, x, op)
		return nil
	}
	if err := g.handshake(); err != nil {
		return err
	}
	// Each member owns a slice of the chunk: it gets that slice from all others, combines it, and gives the result to all.
	for b := range chunks(len(x), n*chunkBytes/size) {
		chunk := x[b.lo:b.hi]
		part := func(j int) []T { return chunk[len(chunk)*j/n : len(chunk)*(j+1)/n] }
		mine := part(g.me)
		for j := range n {
			if j != g.me {
				g.out[j], g.in[j] = bytesOf(part(j)), g.slot(j, len(mine)*size)
			}
		}
		if err := g.payload(0); err != nil {
			return err
		}
		reduceParts(g, mine, mine, op)
		for j := range n {
			if j != g.me {
				g.out[j], g.in[j] = bytesOf(mine), bytesOf(part(j))
			}
		}
		if err := g.payload(0); err != nil {
			return err
		}
	}
	return nil
}

// ReduceScatter: src is the concatenation of one part per member with counts[i] elements; dst (len counts[g.Rank()])
// receives the sum of everyone's part for this member, added in group order. counts is the same on every member and may
// hold zeros. dst may be the caller's own part of src, and must not overlap src in any other way.
func ReduceScatter[T Number](ctx context.Context, g *Group, dst, src []T, counts []int) error {
	c := newCall[T](opReduceScatter, len(src))
	c.layout = hashInts(counts)
	if err := g.begin(ctx, c); err != nil {
		return err
	}
	return g.end(reduceScatter(g, dst, src, counts))
}

func reduceScatter[T Number](g *Group, dst, src []T, counts []int) error {
	if err := g.checkCounts("src", len(src), "counts", counts); err != nil {
		return err
	}
	if len(dst) != counts[g.me] {
		return g.badArgument("len(dst) = %d, counts[%d] = %d", len(dst), g.me, counts[g.me])
	}
	n, size := len(g.ranks), sizeOf[T]()
	slot := min(len(dst)*size, 2*chunkBytes)
	rounds, at := 0, 0
	var own []T
	for j, count := range counts {
		part := src[at : at+count]
		at += count
		if count*size > inlineBytes {
			rounds = max(rounds, chunkCount(count*size, chunkBytes))
		}
		if j == g.me {
			own = part
			continue
		}
		g.nsend[j], g.nrecv[j] = count, len(dst)
		g.out[j], g.in[j] = bytesOf(part), g.slot(j, slot)
	}
	if err := g.handshake(); err != nil {
		return err
	}
	if len(dst)*size <= inlineBytes {
		reduceParts(g, dst, own, Sum)
	}
	for j, count := range counts {
		if g.rest[j] = g.out[j]; count*size <= inlineBytes {
			g.rest[j] = nil
		}
	}
	left := len(dst) * size // of this member's part, not yet received
	if left <= inlineBytes {
		left = 0
	}
	for range rounds {
		here := chunkLen(left, chunkBytes)
		for j := range n {
			if j != g.me {
				out := chunkLen(len(g.rest[j]), chunkBytes)
				g.out[j], g.rest[j] = g.rest[j][:out], g.rest[j][out:]
				g.in[j] = g.slot(j, slot)[:here]
			}
		}
		if err := g.payload(0); err != nil {
			return err
		}
		if here > 0 {
			lo := len(dst) - left/size
			hi := lo + here/size
			reduceParts(g, dst[lo:hi], own[lo:hi], Sum)
			left -= here
		}
	}
	return nil
}

// AllGather: dst is the concatenation of everyone's src; counts[i] elements from member i, zero allowed. counts is the same
// on every member. src may be the caller's own part of dst, and must not overlap dst in any other way.
func AllGather[T Number](ctx context.Context, g *Group, dst, src []T, counts []int) error {
	c := newCall[T](opAllGather, len(dst))
	c.layout = hashInts(counts)
	if err := g.begin(ctx, c); err != nil {
		return err
	}
	return g.end(allGather(g, dst, src, counts))
}

func allGather[T Number](g *Group, dst, src []T, counts []int) error {
	if err := g.checkCounts("dst", len(dst), "counts", counts); err != nil {
		return err
	}
	if len(src) != counts[g.me] {
		return g.badArgument("len(src) = %d, counts[%d] = %d", len(src), g.me, counts[g.me])
	}
	at := 0
	for j, count := range counts {
		part := dst[at : at+count]
		at += count
		if j == g.me {
			copy(part, src)
			continue
		}
		g.nsend[j], g.nrecv[j] = len(src), count
		g.out[j], g.in[j] = bytesOf(src), bytesOf(part)
	}
	if err := g.handshake(); err != nil {
		return err
	}
	return g.payload(inlineBytes)
}

// AllToAll: send[i] elements of src go to member i (src is their concatenation), recv[i] elements arrive from member i and
// stand in dst in group order. Zeros are allowed; send[j] on member i must be recv[i] on member j. dst and src must not
// overlap.
func AllToAll[T Number](ctx context.Context, g *Group, dst, src []T, recv, send []int) error {
	c := newCall[T](opAllToAll, len(src))
	for j := range min(len(send), len(recv)) {
		c.layout += pairWeight(g.me, j) * uint64(send[j])
		c.expect += pairWeight(j, g.me) * uint64(recv[j])
	}
	if err := g.begin(ctx, c); err != nil {
		return err
	}
	return g.end(allToAll(g, dst, src, recv, send))
}

func pairWeight(from, to int) uint64 { return mix(uint64(from)<<32|uint64(to)) | 1 }

func allToAll[T Number](g *Group, dst, src []T, recv, send []int) error {
	if err := g.checkCounts("src", len(src), "send", send); err != nil {
		return err
	}
	if err := g.checkCounts("dst", len(dst), "recv", recv); err != nil {
		return err
	}
	if send[g.me] != recv[g.me] {
		return g.badArgument("send[%d] = %d, but recv[%d] = %d, to itself", g.me, send[g.me], g.me, recv[g.me])
	}
	from, to := 0, 0
	for j := range g.ranks {
		out, in := src[from:from+send[j]], dst[to:to+recv[j]]
		from, to = from+send[j], to+recv[j]
		if j == g.me {
			copy(in, out)
			continue
		}
		g.nsend[j], g.nrecv[j] = send[j], recv[j]
		g.out[j], g.in[j] = bytesOf(out), bytesOf(in)
	}
	if err := g.handshake(); err != nil {
		return err
	}
	return g.payload(inlineBytes)
}

// Broadcast copies root's x (root is a position in the group) to all. x has the same length on every member.
func Broadcast[T Number](ctx context.Context, g *Group, x []T, root int) error {
	c := newCall[T](opBroadcast, len(x))
	c.root = uint64(root)
	if err := g.begin(ctx, c); err != nil {
		return err
	}
	return g.end(broadcast(g, x, root))
}

func broadcast[T Number](g *Group, x []T, root int) error {
	if root < 0 || root >= len(g.ranks) {
		return g.badArgument("no root %d in a group of %d", root, len(g.ranks))
	}
	for j := range g.ranks {
		switch {
		case g.me == root && j != root:
			g.nsend[j], g.out[j] = len(x), bytesOf(x)
		case g.me != root && j == root:
			g.nrecv[j], g.in[j] = len(x), bytesOf(x)
		}
	}
	if err := g.handshake(); err != nil {
		return err
	}
	return g.payload(inlineBytes)
}

// GatherBytes returns every member's blob on every member, in group order (lengths are exchanged first): for set-up, errors
// and checkpoints. A blob has at most 1 GiB.
func GatherBytes(ctx context.Context, g *Group, mine []byte) ([][]byte, error) {
	if err := g.begin(ctx, call{op: opGatherBytes, elem: elemUint8, size: 1, count: uint64(len(mine))}); err != nil {
		return nil, err
	}
	all, err := gatherBytes(g, mine)
	return all, g.end(err)
}

func gatherBytes(g *Group, mine []byte) ([][]byte, error) {
	if len(mine) > maxGatherBytes {
		return nil, g.badArgument("%d bytes, at most %d are allowed", len(mine), maxGatherBytes)
	}
	for j := range g.ranks {
		if j != g.me {
			g.nsend[j], g.out[j] = len(mine), mine
		}
	}
	if err := g.handshake(); err != nil {
		return nil, err
	}
	all := make([][]byte, len(g.ranks))
	all[g.me] = append([]byte{}, mine...)
	for j := range g.ranks {
		if j == g.me {
			continue
		}
		n := g.calls[j].send
		if n > maxGatherBytes {
			return nil, g.badArgument("rank %d announces %d bytes, at most %d are allowed", g.ranks[j], n, maxGatherBytes)
		}
		all[j] = make([]byte, n)
		if n <= inlineBytes {
			copy(all[j], g.inMsg[j*messageBytes+headerBytes:])
		}
		g.in[j] = all[j]
	}
	if err := g.payload(inlineBytes); err != nil {
		return nil, err
	}
	return all, nil
}

// checkCounts says whether counts has one entry per member and adds up to the length of slice.
func (g *Group) checkCounts(slice string, length int, name string, counts []int) error {
	if len(counts) != len(g.ranks) {
		return g.badArgument("len(%s) = %d in a group of %d", name, len(counts), len(g.ranks))
	}
	sum := 0
	for i, c := range counts {
		if c < 0 {
			return g.badArgument("%s[%d] = %d", name, i, c)
		}
		sum += c
	}
	if sum != length {
		return g.badArgument("len(%s) = %d, %s adds up to %d", slice, length, name, sum)
	}
	return nil
}

// reduceParts sets dst to the parts of all members combined in group order. own is this member's part (dst itself, or apart
// from it); the others' parts lie in g.in, which it uses as scratch.
func reduceParts[T Number](g *Group, dst, own []T, op Reduction) {
	part := func(j int) []T {
		if j == g.me {
			return own
		}
		return viewOf[T](g.in[j])
	}
	acc := dst
	if g.me == 0 {
		copy(dst, own)
	} else {
		acc = part(0) // dst may be own, which has its turn later
	}
	const block = 4096 // elements: the accumulator stays in the first-level cache
	for lo := 0; lo < len(acc); lo += block {
		hi := min(lo+block, len(acc))
		for j := 1; j < len(g.ranks); j++ {
			combine(acc[lo:hi], part(j)[lo:hi], op)
		}
	}
	if g.me != 0 {
		copy(dst, acc)
	}
}

// combine sets acc to acc op x.
func combine[T Number](acc, x []T, op Reduction) {
	x = x[:len(acc)]
	if op == Sum {
		for i, v := range x {
			acc[i] += v
		}
		return
	}
	for i, v := range x {
		if v > acc[i] || v != v {
			acc[i] = v
		}
	}
}

type span struct{ lo, hi int }

// chunks cuts n into pieces of size, the last one up to twice as long, so that none is short.
func chunks(n, size int) func(yield func(span) bool) {
	return func(yield func(span) bool) {
		for lo := 0; lo < n; {
			hi := lo + chunkLen(n-lo, size)
			if !yield(span{lo, hi}) {
				return
			}
			lo = hi
		}
	}
}

// chunkLen is the length of the next piece when left remains.
func chunkLen(left, size int) int {
	if left < 2*size {
		return left
	}
	return size
}

// chunkCount is the number of pieces of n > 0.
func chunkCount(n, size int) int { return max(1, n/size) }
