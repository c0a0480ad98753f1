package comm

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"sync"
	"time"
)

// A Group is an ordered set of ranks with its own tag. All members must call the same operations in the same order.
// Every collective sends a header (operation, sequence number, element type, lengths); a mismatch is an error on every
// member that names both sides and matches ErrMismatch, never a hang or a wrong sum. Sums run in group order 0..n-1 for
// every element, so the result does not depend on the transport and is the same, to the bit, on every member.
//
// An operation that fails makes the group useless: it tells the other members, so that they fail too instead of waiting, and
// every later operation returns the same error. A lost member is a *PeerError with the member's world rank, the operation
// and its sequence number. A Group is not safe for concurrent use; different groups are.
type Group struct {
	t     Transport
	ranks []int
	me    int // position in ranks
	tag   Tag
	id    uint64 // hash of ranks

	cur call  // the operation under way, or the last one
	err error // what made the group useless

	// ctx is what transport operations wait on. It lives as long as the group and is cancelled at most once, by the
	// failure that ends the group, so that an operation which goes well allocates no context and no timer.
	ctx      context.Context
	cancel   context.CancelCauseFunc
	mu       sync.Mutex // guards what follows against the time-out and the caller's context
	active   bool
	limit    time.Duration
	deadline time.Time
	timer    *time.Timer
	parent   context.Context
	unwatch  func() bool

	// Working memory of an operation, one entry per member; a member's own entry is unused.
	calls        []call
	nsend, nrecv []int    // elements to and from each
	out, in      [][]byte // where they lie
	rest         [][]byte // of out, not yet sent (reduce-scatter)
	outMsg       []byte   // header on its way out
	inMsg        []byte   // headers that came in
	stage        []byte   // parts of others, to be summed
	sent         chan error
}

// NewGroup makes the group of the given world ranks (the caller's among them) in that order. tag must be below TagPipeline
// and unique among the groups that share members. Nothing is sent.
func NewGroup(t Transport, ranks []int, tag Tag) (*Group, error) {
	if !littleEndian() {
		return nil, errors.New("this host is big-endian; numbers travel between ranks as little-endian")
	}
	if tag >= TagPipeline {
		return nil, fmt.Errorf("group tag %d is not below %d", tag, TagPipeline)
	}
	for i, r := range ranks {
		if err := CheckRank(r, t.Size()); err != nil {
			return nil, fmt.Errorf("group of ranks %v: %w", ranks, err)
		}
		if slices.Contains(ranks[:i], r) {
			return nil, fmt.Errorf("group of ranks %v: rank %d twice", ranks, r)
		}
	}
	me := slices.Index(ranks, t.Rank())
	if me < 0 {
		return nil, fmt.Errorf("rank %d makes a group of ranks %v without itself", t.Rank(), ranks)
	}
	n := len(ranks)
	ctx, cancel := context.WithCancelCause(context.Background())
	return &Group{
		t: t, ranks: slices.Clone(ranks), me: me, tag: tag, id: hashInts(ranks),
		ctx: ctx, cancel: cancel,
		calls: make([]call, n), nsend: make([]int, n), nrecv: make([]int, n),
		out: make([][]byte, n), in: make([][]byte, n), rest: make([][]byte, n),
		outMsg: alignedBytes(messageBytes), inMsg: alignedBytes(n * messageBytes),
		sent: make(chan error, 1),
	}, nil
}

// WithTimeout sets how long an operation of g may take (0: as long as its context allows) and returns g. An operation that
// takes longer fails with a *PeerError naming the rank it waited for, for which errors.Is(err, context.DeadlineExceeded).
func (g *Group) WithTimeout(d time.Duration) *Group {
	g.mu.Lock()
	defer g.mu.Unlock()
	g.limit = max(d, 0)
	return g
}

// Rank is the caller's position in the group.
func (g *Group) Rank() int { return g.me }

// Size is the number of members.
func (g *Group) Size() int { return len(g.ranks) }

// Ranks returns the world ranks of the members in group order. The caller must not change it.
func (g *Group) Ranks() []int { return g.ranks }

// begin opens operation c: it gives it a number and ties the group's context to ctx and the time-out.
func (g *Group) begin(ctx context.Context, c call) error {
	if g.err != nil {
		return g.err
	}
	g.mu.Lock()
	if g.active {
		g.mu.Unlock()
		return fmt.Errorf("%v called while %v #%d of the same group runs; a group serves one goroutine", c.op, g.cur.op, g.cur.seq)
	}
	c.seq, c.group = g.cur.seq+1, g.id
	g.cur = c
	g.active = true
	if g.limit > 0 {
		g.deadline = time.Now().Add(g.limit)
		if g.timer == nil {
			g.timer = time.AfterFunc(g.limit, g.timedOut)
		} else {
			g.timer.Reset(g.limit)
		}
	}
	watch := g.parent != ctx
	g.parent = ctx
	g.mu.Unlock()
	if watch { // usually all operations share one context, and watch it once
		if g.unwatch != nil {
			g.unwatch()
		}
		g.unwatch = context.AfterFunc(ctx, g.parentDone)
	}
	clear(g.nsend)
	clear(g.nrecv)
	clear(g.out)
	clear(g.in)
	clear(g.rest)
	return nil
}

// timedOut and parentDone run on goroutines of their own; they may come late, when their operation is long over.
func (g *Group) timedOut() {
	g.mu.Lock()
	defer g.mu.Unlock()
	if g.active && g.limit > 0 && !time.Now().Before(g.deadline) {
		g.cancel(&timeoutError{g.limit})
	}
}

func (g *Group) parentDone() {
	g.mu.Lock()
	defer g.mu.Unlock()
	if g.active && g.parent.Err() != nil {
		g.cancel(ctxError(g.parent))
	}
}

// end closes the operation. An error ends the group.
func (g *Group) end(err error) error {
	g.mu.Lock()
	g.active = false
	if g.timer != nil {
		g.timer.Stop()
	}
	g.mu.Unlock()
	// Callers keep their slices; the group must not.
	clear(g.out)
	clear(g.in)
	clear(g.rest)
	if err == nil {
		return nil
	}
	g.err = err
	g.cancel(err)
	if g.unwatch != nil {
		g.unwatch()
	}
	g.stage, g.parent = nil, nil
	if !errors.Is(err, ErrMismatch) { // a mismatch, every member has found by itself
		g.notify(err)
	}
	return err
}

// sendOrder and recvOrder give the other members for step 1, 2, ...: sends go to me+1, me+2, ... and receives come from me-1,
// me-2, ... so that in each step every member sends to one and receives from one, and no order of arrivals can lock up.
func (g *Group) sendOrder(step int) int { return (g.me + step) % len(g.ranks) }
func (g *Group) recvOrder(step int) int { return (g.me - step + len(g.ranks)) % len(g.ranks) }

// handshake exchanges headers, with the data of out that fits in them, and checks that all members mean the same. It sends
// each member one message and so never waits for one that is itself waiting.
func (g *Group) handshake() error {
	if err := g.parent.Err(); err != nil {
		return g.explain(g.me, ctxError(g.parent))
	}
	c, n := &g.cur, len(g.ranks)
	for step := 1; step < n; step++ {
		j := g.sendOrder(step)
		c.send, c.recv = uint64(g.nsend[j]), uint64(g.nrecv[j])
		c.encode(g.outMsg)
		if b := g.nsend[j] * c.size; b <= inlineBytes {
			copy(g.outMsg[headerBytes:], g.out[j])
		}
		if err := g.t.Send(g.ctx, g.ranks[j], g.tag, g.outMsg); err != nil {
			return g.explain(j, err)
		}
	}
	g.calls[g.me] = *c
	same := true
	for step := 1; step < n; step++ {
		j := g.recvOrder(step)
		msg := g.inMsg[j*messageBytes:][:messageBytes]
		err := g.recv(j, msg)
		if err == nil {
			if err = g.calls[j].decode(msg); err != nil {
				err = g.explain(j, err)
			}
		}
		if err != nil {
			if !same { // the mismatch explains why the rest is missing
				return fmt.Errorf("%w (rank %d is silent: %w)", g.mismatch(g.present(step)), g.ranks[j], err)
			}
			return err
		}
		same = same && c.agrees(&g.calls[j])
	}
	if !same {
		return g.mismatch(g.present(n))
	}
	if err := g.checkPairs(); err != nil {
		return err
	}
	if c.op == opGatherBytes {
		return nil // the caller makes room first
	}
	for j := range g.in {
		if b := g.nrecv[j] * c.size; j != g.me && b <= inlineBytes {
			copy(g.in[j], g.inMsg[j*messageBytes+headerBytes:][:b])
		}
	}
	return nil
}

// present lists the members, in group order, whose headers are known before receive step end.
func (g *Group) present(end int) []int {
	at := []int{g.me}
	for step := 1; step < end; step++ {
		at = append(at, g.recvOrder(step))
	}
	slices.Sort(at)
	return at
}

func (g *Group) mismatch(at []int) error {
	calls, ranks := make([]call, len(at)), make([]int, len(at))
	for i, j := range at {
		calls[i], ranks[i] = g.calls[j], g.ranks[j]
	}
	return fmt.Errorf("%w: %s", ErrMismatch, describeAll(calls, ranks, g.ranks))
}

// checkPairs compares what each member sends with what its receiver awaits.
func (g *Group) checkPairs() error {
	c := &g.cur
	if c.op == opGatherBytes {
		return nil
	}
	found := ""
	var sent, awaited uint64
	for j := range g.calls {
		d := &g.calls[j]
		sent, awaited = sent+d.layout, awaited+d.expect
		if j == g.me || found != "" {
			continue
		}
		if d.send != uint64(g.nrecv[j]) {
			found = fmt.Sprintf("%v #%d: rank %d sends %d %v to rank %d, which expects %d",
				c.op, c.seq, g.ranks[j], d.send, c.elem, g.ranks[g.me], g.nrecv[j])
		} else if d.recv != uint64(g.nsend[j]) {
			found = fmt.Sprintf("%v #%d: rank %d sends %d %v to rank %d, which expects %d",
				c.op, c.seq, g.ranks[g.me], g.nsend[j], c.elem, g.ranks[j], d.recv)
		}
	}
	if found == "" && (c.op != opAllToAll || sent == awaited) {
		return nil
	}
	// The totals disagree on every member alike, so all of them come here and tell one another what they found.
	g.tell(g.ctx, g.ranks[g.me], found)
	texts := make([]string, len(g.ranks))
	texts[g.me] = found
	note := make([]byte, noteBytes)
	for step := 1; step < len(g.ranks); step++ {
		j := g.recvOrder(step)
		if g.t.Recv(g.ctx, g.ranks[j], g.tag, note) == nil {
			if _, text, ok := decodeNote(note); ok {
				texts[j] = text
			}
		}
	}
	texts = slices.DeleteFunc(texts, func(s string) bool { return s == "" })
	slices.Sort(texts)
	texts = slices.Compact(texts)
	if len(texts) == 0 {
		texts = []string{fmt.Sprintf("%v #%d: counts of the members do not fit together", c.op, c.seq)}
	}
	err := fmt.Errorf("%w: %s", ErrMismatch, texts[0])
	for _, t := range texts[1:] {
		err = fmt.Errorf("%w; %s", err, t)
	}
	return err
}

// payload sends out to, and receives in from, every member where they are longer than floor bytes. Sends and receives run
// side by side, so it needs no buffering by the transport.
func (g *Group) payload(floor int) error {
	sends := false
	for j := range g.out {
		sends = sends || j != g.me && len(g.out[j]) > floor
	}
	if sends {
		go g.sendAll(floor)
	}
	var err error
	for step := 1; step < len(g.ranks) && err == nil; step++ {
		if j := g.recvOrder(step); len(g.in[j]) > floor {
			err = g.recv(j, g.in[j])
		}
	}
	if err != nil {
		g.cancel(err) // ends the sends
	}
	if sends {
		// A send that failed cancels the receives with its own error, which explain then returns from either side.
		if serr := <-g.sent; err == nil {
			err = serr
		}
	}
	return err
}

func (g *Group) sendAll(floor int) {
	for step := 1; step < len(g.ranks); step++ {
		j := g.sendOrder(step)
		if len(g.out[j]) <= floor {
			continue
		}
		if err := g.t.Send(g.ctx, g.ranks[j], g.tag, g.out[j]); err != nil {
			err = g.explain(j, err)
			g.cancel(err)
			g.sent <- err
			return
		}
	}
	g.sent <- nil
}

// recv receives p from member j, or the note that took its place.
func (g *Group) recv(j int, p []byte) error {
	err := g.t.Recv(g.ctx, g.ranks[j], g.tag, p)
	if err == nil {
		return nil
	}
	if le := (*LengthError)(nil); errors.As(err, &le) && le.Got == noteBytes {
		note := make([]byte, noteBytes)
		if g.t.Recv(g.ctx, g.ranks[j], g.tag, note) == nil {
			if culprit, text, ok := decodeNote(note); ok {
				return &PeerError{culprit, g.cur.op.String(), g.cur.seq, &noteError{g.ranks[j], text}}
			}
		}
	}
	return g.explain(j, err)
}

// explain turns an error of the transport, met while dealing with member j, into that of the operation.
func (g *Group) explain(j int, err error) error {
	op, seq := g.cur.op.String(), g.cur.seq
	if g.ctx.Err() != nil && (errors.Is(err, context.Canceled) || errors.Is(err, context.DeadlineExceeded)) {
		err = context.Cause(g.ctx)
	}
	var done *opError
	var late *timeoutError
	var pe *PeerError
	switch {
	case errors.As(err, &done), errors.As(err, &pe) && pe.Seq > 0: // explained already, in the other direction
		return err
	case pe != nil:
		return &PeerError{pe.Rank, op, seq, pe.Err}
	case errors.As(err, &late):
		return &PeerError{g.ranks[j], op, seq, err}
	case j == g.me: // before it waited for anyone
		return &opError{fmt.Sprintf("%s #%d stopped", op, seq), err}
	case errors.Is(err, context.Canceled), errors.Is(err, context.DeadlineExceeded):
		return &opError{fmt.Sprintf("%s #%d stopped while it waited for rank %d", op, seq, g.ranks[j]), err}
	}
	return &opError{fmt.Sprintf("%s #%d with rank %d", op, seq, g.ranks[j]), err}
}

// opError is an error of the transport within a collective that is not the loss of a member.
type opError struct {
	what string
	err  error
}

func (e *opError) Error() string { return e.what + ": " + e.err.Error() }
func (e *opError) Unwrap() error { return e.err }

// ctxError is why ctx ended, recognisable as context.Canceled or context.DeadlineExceeded whatever its cause.
func ctxError(ctx context.Context) error {
	err, cause := ctx.Err(), context.Cause(ctx)
	if err == nil || errors.Is(cause, err) {
		return cause
	}
	return fmt.Errorf("%w: %w", err, cause)
}

// badArgument is the error of an operation whose arguments do not fit together on this member alone.
func (g *Group) badArgument(format string, args ...any) error {
	return fmt.Errorf("%v #%d on rank %d: %s", g.cur.op, g.cur.seq, g.ranks[g.me], fmt.Sprintf(format, args...))
}

// notify tells the other members that this one has given up because of err, for up to a second.
func (g *Group) notify(err error) {
	culprit, text := g.ranks[g.me], err.Error()
	if pe := (*PeerError)(nil); errors.As(err, &pe) {
		culprit = pe.Rank
		if told := (*noteError)(nil); errors.As(pe.Err, &told) {
			text = told.text // pass on the first report, not a report of it
		}
	}
	ctx, cancel := context.WithTimeout(context.Background(), time.Second)
	defer cancel()
	g.tell(ctx, culprit, text)
}

// tell sends a note to all other members at once, so that one that does not listen holds up none of the others.
func (g *Group) tell(ctx context.Context, culprit int, text string) {
	note := make([]byte, noteBytes)
	encodeNote(note, culprit, text)
	var wg sync.WaitGroup
	for step := 1; step < len(g.ranks); step++ {
		to := g.ranks[g.sendOrder(step)]
		wg.Go(func() {
			// Whoever cannot be told notices by itself that this rank or the culprit is gone.
			_ = g.t.Send(ctx, to, g.tag, note)
		})
	}
	wg.Wait()
}

// slot is room for size bytes from member j, aligned for every element type; all slots of an operation have one size.
func (g *Group) slot(j, size int) []byte {
	pitch := (size + 63) &^ 63
	if need := pitch * len(g.ranks); len(g.stage) < need {
		g.stage = alignedBytes(need)
	}
	return g.stage[j*pitch:][:size]
}
