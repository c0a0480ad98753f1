// Package tcp is the transport between hosts: a connection between every two ranks, messages in checksummed frames, and a
// shared secret that both ends prove before anything else is read.
package tcp

import (
	"bufio"
	"context"
	"errors"
	"fmt"
	"hash/crc32"
	"net"
	"sync"
	"sync/atomic"
	"time"

	"moetor/comm"
)

// Config says how a rank finds the others. Rank, Size, Secret and, unless there is one rank only, Rendezvous or Listener
// must be set.
type Config struct {
	Rank, Size int
	// Rendezvous is the host:port where rank 0 listens. The other ranks listen on the address from which they reach it.
	Rendezvous string
	// Listener, for rank 0, is used instead of listening on Rendezvous. Connect closes it.
	Listener net.Listener
	// BindAddr is the IP address of the network interface to use; empty: the one that leads to rank 0.
	BindAddr string
	// Secret is known to all ranks of the run and to nobody else.
	Secret []byte
	// Timeout is how long Connect waits for all ranks; 0 means 30 s.
	Timeout time.Duration
	// PeerTimeout is how long a host may leave what is sent to it, or a keep-alive probe, without an acknowledgement before
	// its ranks count as lost; 0 means until the operating system gives up, which takes a quarter of an hour with data under
	// way. It is kept to the second. It says nothing about a rank whose host answers.
	PeerTimeout time.Duration
	// MaxMessage is the longest message in bytes; 0 means 1 GiB.
	MaxMessage int
}

const (
	defaultTimeout = 30 * time.Second
	defaultMessage = 1 << 30

	// grace is how long an operation that was cancelled in the middle of a message may still take to write the rest. A
	// frame that is cut off costs the connection, and peers that listen take the rest at once.
	grace = 500 * time.Millisecond
	// linger is how long Close waits for peers to take what was sent.
	linger = 2 * time.Second

	readBuffer = 64 << 10
)

// keepAlive finds hosts that are gone without a word within about 15 s, or in the peer time-out.
var keepAlive = net.KeepAliveConfig{Enable: true, Idle: 5 * time.Second, Interval: 2 * time.Second, Count: 5}

// probes is keepAlive with probes close enough together for a peer time-out.
func probes(limit time.Duration) net.KeepAliveConfig {
	k := keepAlive
	if limit > 0 {
		k.Idle = min(k.Idle, max(time.Second, limit/3))
		k.Interval = min(k.Interval, max(time.Second, limit/6))
	}
	return k
}

func (c *Config) check() error {
	switch {
	case c.Size < 1:
		return fmt.Errorf("tcp: %d ranks", c.Size)
	case c.Rank < 0 || c.Rank >= c.Size:
		return fmt.Errorf("tcp: rank %d of %d ranks", c.Rank, c.Size)
	case len(c.Secret) == 0:
		return errors.New("tcp: no secret given")
	case c.MaxMessage < 0:
		return fmt.Errorf("tcp: limit of %d bytes for a message", c.MaxMessage)
	case c.PeerTimeout < 0:
		return fmt.Errorf("tcp: peer time-out of %v", c.PeerTimeout)
	case c.Timeout < 0:
		return fmt.Errorf("tcp: time-out of %v", c.Timeout)
	case c.BindAddr != "" && net.ParseIP(c.BindAddr) == nil:
		return fmt.Errorf("tcp: bind address %q is no IP address", c.BindAddr)
	case c.Rendezvous == "" && c.Size > 1 && (c.Rank > 0 || c.Listener == nil):
		return errors.New("tcp: no rendezvous address given")
	case c.Rank > 0 && c.Listener != nil:
		return fmt.Errorf("tcp: rank %d has a listener; only rank 0 listens at the rendezvous", c.Rank)
	}
	if c.Timeout == 0 {
		c.Timeout = defaultTimeout
	}
	if c.MaxMessage == 0 {
		c.MaxMessage = defaultMessage
	}
	return nil
}

// when says how ctx, made by Connect, ended.
func (c *Config) when(ctx context.Context) string {
	if errors.Is(ctx.Err(), context.DeadlineExceeded) {
		return fmt.Sprintf("within %v", c.Timeout)
	}
	return "when it was stopped"
}

// Connect connects this rank with all others and returns when every connection stands. It waits for ranks that are not up
// yet, for Config.Timeout or until ctx ends, and then says who is missing.
func Connect(ctx context.Context, cfg Config) (comm.Transport, error) {
	if cfg.Listener != nil {
		defer cfg.Listener.Close()
	}
	if err := cfg.check(); err != nil {
		return nil, err
	}
	if d, ok := ctx.Deadline(); ok {
		if left := time.Until(d).Round(10 * time.Millisecond); left < cfg.Timeout {
			cfg.Timeout = max(left, 0)
		}
	}
	ctx, cancel := context.WithTimeout(ctx, cfg.Timeout)
	defer cancel()

	conns := make([]net.Conn, cfg.Size)
	var err error
	switch {
	case cfg.Size == 1:
	case cfg.Rank > 0:
		err = join(ctx, &cfg, conns)
	default:
		ln := cfg.Listener
		if ln == nil {
			if ln, err = listen(ctx, &cfg); err != nil {
				break
			}
		}
		err = gather(ctx, &cfg, ln, conns)
	}
	if err != nil {
		for _, c := range conns {
			if c != nil {
				c.Close()
			}
		}
		return nil, fmt.Errorf("tcp: %w", err)
	}
	return newTransport(&cfg, conns), nil
}

func listen(ctx context.Context, cfg *Config) (net.Listener, error) {
	host, port, err := net.SplitHostPort(cfg.Rendezvous)
	if err != nil {
		return nil, fmt.Errorf("rendezvous %q: %w", cfg.Rendezvous, err)
	}
	if cfg.BindAddr != "" {
		host = cfg.BindAddr
	}
	lc := net.ListenConfig{KeepAliveConfig: keepAlive}
	ln, err := lc.Listen(ctx, "tcp", net.JoinHostPort(host, port))
	if err != nil {
		return nil, fmt.Errorf("rendezvous %s: %w", cfg.Rendezvous, err)
	}
	return ln, nil
}

type transport struct {
	rank   int
	peers  []*peer // by rank; the own entry has a mailbox and no connection
	limit  int
	closed atomic.Bool
	first  atomic.Int64 // one more than the rank that was lost first, or waited for in vain; 0: none
	once   sync.Once
	wg     sync.WaitGroup
}

func newTransport(cfg *Config, conns []net.Conn) *transport {
	t := &transport{rank: cfg.Rank, peers: make([]*peer, cfg.Size), limit: cfg.MaxMessage}
	for r, conn := range conns {
		p := &peer{t: t, rank: r, lostRank: r, conn: conn, box: comm.NewMailbox(r), write: make(chan struct{}, 1), gone: make(chan struct{})}
		t.peers[r] = p
		if conn == nil {
			continue
		}
		if c, ok := conn.(*net.TCPConn); ok {
			_ = c.SetNoDelay(true)
			_ = c.SetKeepAliveConfig(probes(cfg.PeerTimeout))
			limitSilence(c, cfg.PeerTimeout)
		}
		t.wg.Go(func() { p.receive(uint64(cfg.MaxMessage)) })
	}
	return t
}

func (t *transport) Rank() int { return t.rank }
func (t *transport) Size() int { return len(t.peers) }

func (t *transport) Send(ctx context.Context, to int, tag comm.Tag, b []byte) error {
	if err := comm.CheckRank(to, len(t.peers)); err != nil {
		return err
	}
	if err := ctx.Err(); err != nil {
		return err
	}
	if len(b) > t.limit {
		return fmt.Errorf("message to rank %d with tag %d has %d bytes, the limit is %d", to, tag, len(b), t.limit)
	}
	if t.closed.Load() {
		return comm.ErrClosed
	}
	p := t.peers[to]
	if to == t.rank {
		p.box.Put(tag, b)
		return nil
	}
	err := p.send(ctx, tag, b)
	if err != nil && t.closed.Load() {
		return comm.ErrClosed
	}
	return err
}

func (t *transport) Recv(ctx context.Context, from int, tag comm.Tag, b []byte) error {
	if err := comm.CheckRank(from, len(t.peers)); err != nil {
		return err
	}
	if t.closed.Load() {
		return comm.ErrClosed
	}
	err := t.peers[from].box.Recv(ctx, tag, b)
	if err != nil && from != t.rank && errors.Is(context.Cause(ctx), context.DeadlineExceeded) {
		// Its host answers, but it does not: who waits for this rank, which may now give up, learns for whom it has waited.
		t.first.CompareAndSwap(0, int64(from)+1)
	}
	return err
}

// Close ends all operations of this rank, lets peers take what has been sent, for up to two seconds, and closes the
// connections.
func (t *transport) Close() error {
	t.once.Do(func() {
		t.closed.Store(true)
		for _, p := range t.peers {
			p.box.Fail(comm.ErrClosed)
			if p.conn != nil {
				t.wg.Go(p.leave)
			}
		}
	})
	t.wg.Wait()
	return nil
}

// A peer is another rank and the connection to it.
type peer struct {
	t    *transport
	rank int
	conn net.Conn
	box  *comm.Mailbox // what it sent

	write chan struct{} // holds a token while a frame is written; guards head, vec and seq
	head  [headerBytes]byte
	vec   [2][]byte
	bufs  net.Buffers
	seq   uint32

	once sync.Once
	gone chan struct{} // closed when the connection is lost
	err  error         // why; set before gone is closed
	// lostRank is the rank to name then: this one, or the one whose loss made this one close.
	lostRank int

	// The context of the send under way. It is watched once as long as it stays the same, as it does in a training run.
	mu      sync.Mutex
	ctx     context.Context
	unwatch func() bool
	writing bool
	hurried bool // the connection has a write deadline
}

// fail ends the connection because of err. A peer that closed because it had lost another rank is a consequence of that
// loss, and the rank that operations name is the other one: this rank may have no dealings with it.
func (p *peer) fail(err error) {
	p.once.Do(func() {
		p.err = err
		var bye *farewell
		if errors.As(err, &bye) {
			p.err = comm.ErrPeerClosed
			if r := bye.lost; r >= 0 && r < len(p.t.peers) && r != p.t.rank && r != p.rank {
				p.lostRank, p.err = r, fmt.Errorf("rank %d lost it and closed", p.rank)
			}
		}
		if !p.t.closed.Load() {
			p.t.first.CompareAndSwap(0, int64(p.lostRank)+1)
		}
		close(p.gone)
		p.box.Fail(&comm.PeerError{Rank: p.lostRank, Op: "receive", Err: p.err})
		p.conn.Close()
	})
}

func (p *peer) lost() error { return &comm.PeerError{Rank: p.lostRank, Op: "send", Err: p.err} }

// receive moves messages from the connection to the mailbox until it ends. So a peer that sends never waits long for this
// rank, whatever this rank is doing.
func (p *peer) receive(limit uint64) {
	f := newReader(bufio.NewReaderSize(p.conn, readBuffer), p.rank, p.box, limit, p.conn.SetReadDeadline)
	for {
		if err := f.next(); err != nil {
			p.fail(err)
			return
		}
	}
}

// send writes one frame. Frames of other goroutines to the same peer come before or after it.
func (p *peer) send(ctx context.Context, tag comm.Tag, b []byte) error {
	h := header{tag: tag, length: uint64(len(b)), sum: crc32.Checksum(b, castagnoli)}
	select {
	case <-p.gone:
		return p.lost()
	default:
	}
	select {
	case p.write <- struct{}{}:
	case <-p.gone:
		return p.lost()
	case <-ctx.Done():
		return ctx.Err()
	}
	defer func() { <-p.write }()
	h.seq = p.seq
	h.encode(&p.head)
	p.vec = [2][]byte{p.head[:], b}
	p.bufs = p.vec[:]
	if len(b) == 0 {
		p.bufs = p.vec[:1]
	}
	p.begin(ctx)
	n, err := p.bufs.WriteTo(p.conn)
	p.end()
	p.vec = [2][]byte{}
	if err == nil {
		p.seq++
		return nil
	}
	select {
	case <-p.gone: // the reader knows the reason better
		return p.lost()
	default:
	}
	if cerr := ctx.Err(); cerr != nil {
		if n > 0 {
			p.fail(fmt.Errorf("a message of %d bytes was cancelled after %d, when rank %d took no more", len(b), max(n-headerBytes, 0), p.rank))
		}
		return cerr
	}
	p.fail(closedBy(err))
	return p.lost()
}

// begin and end enclose a write that the end of ctx must stop.
func (p *peer) begin(ctx context.Context) {
	p.mu.Lock()
	p.writing = true
	watch := p.ctx != ctx
	p.ctx = ctx
	p.mu.Unlock()
	if watch {
		if p.unwatch != nil {
			p.unwatch()
		}
		p.unwatch = context.AfterFunc(ctx, p.stopWrite)
	}
}

func (p *peer) stopWrite() {
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.writing && p.ctx.Err() != nil {
		_ = p.conn.SetWriteDeadline(time.Now().Add(grace))
		p.hurried = true
	}
}

func (p *peer) end() {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.writing = false
	if p.hurried {
		_ = p.conn.SetWriteDeadline(time.Time{})
		p.hurried = false
	}
}

// leave ends the connection in good order: a write under way may end, the peer learns that no more comes, and why, and closes its
// side, and only then this side goes. Closing at once could take away what the peer has not read yet.
func (p *peer) leave() {
	select {
	case p.write <- struct{}{}:
		_ = p.conn.SetWriteDeadline(time.Now().Add(grace))
		_, _ = p.conn.Write(farewellFrame(p.seq, int(p.t.first.Load())-1))
		if c, ok := p.conn.(*net.TCPConn); ok {
			_ = c.CloseWrite()
		}
		if p.unwatch != nil {
			p.unwatch()
		}
		<-p.write
	case <-time.After(grace):
	case <-p.gone:
	}
	select {
	case <-p.gone:
	case <-time.After(linger):
		p.fail(comm.ErrClosed)
	}
}
