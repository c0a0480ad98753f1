package tcp

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net"
	"net/netip"
	"slices"
	"strings"
	"sync"
	"time"

	"moetor/comm"
)

// The ranks of a run find one another through rank 0. Every other rank dials it, says where it listens itself, and waits;
// when all are there, rank 0 sends everyone the table of addresses. Then each rank dials all ranks below its own but 0, and
// the connection to rank 0 stays in use. A connection is thus always dialled by its higher rank.

// arrival is a connection whose dialer has proved itself and said who it is.
type arrival struct {
	conn net.Conn
	introduction
}

// An acceptor takes connections from a listener and checks them side by side, so that a stranger who connects and says
// nothing holds up nobody.
type acceptor struct {
	ln       net.Listener
	arrivals chan arrival
	cancel   context.CancelFunc
	wg       sync.WaitGroup

	mu       sync.Mutex
	rejected string // the last connection that failed its proof, for error messages
}

// maxUnproved is how many connections may be busy with their proof at once.
const maxUnproved = 256

func accept(ctx context.Context, ln net.Listener, secret []byte) *acceptor {
	ctx, cancel := context.WithCancel(ctx)
	a := &acceptor{ln: ln, arrivals: make(chan arrival), cancel: cancel}
	slots := make(chan struct{}, maxUnproved)
	a.wg.Go(func() {
		for {
			conn, err := ln.Accept()
			if err != nil {
				if ctx.Err() != nil || errors.Is(err, net.ErrClosed) {
					return
				}
				select { // out of descriptors, or a connection that was gone at once
				case <-time.After(10 * time.Millisecond):
				case <-ctx.Done():
				}
				continue
			}
			select {
			case slots <- struct{}{}:
			case <-ctx.Done():
				conn.Close()
				return
			}
			a.wg.Go(func() {
				defer func() { <-slots }()
				a.check(ctx, conn, secret)
			})
		}
	})
	return a
}

func (a *acceptor) check(ctx context.Context, conn net.Conn, secret []byte) {
	release := hurry(ctx, conn, proofTime)
	err := proveListener(conn, secret)
	var who introduction
	if err == nil {
		who, err = readIntroduction(conn)
	}
	release()
	if err == nil {
		select {
		case a.arrivals <- arrival{conn, who}:
			return
		case <-ctx.Done():
		}
	} else if ctx.Err() == nil {
		a.mu.Lock()
		a.rejected = fmt.Sprintf("; a connection from %v was turned away: %v", conn.RemoteAddr(), err)
		a.mu.Unlock()
	}
	conn.Close()
}

// stop ends the acceptor and closes its listener.
func (a *acceptor) stop() {
	a.cancel()
	a.ln.Close()
	a.wg.Wait()
}

func (a *acceptor) hint() string {
	a.mu.Lock()
	defer a.mu.Unlock()
	return a.rejected
}

// gather is rank 0's side: it fills conns, by rank, and sends everyone the table.
func gather(ctx context.Context, cfg *Config, ln net.Listener, conns []net.Conn) (err error) {
	a := accept(ctx, ln, cfg.Secret)
	defer a.stop()
	table := make([]string, cfg.Size)
	defer func() {
		if err == nil {
			return
		}
		for _, c := range conns {
			if c != nil { // everyone who waits learns why nothing comes
				_ = c.SetDeadline(time.Now().Add(time.Second))
				_ = writeReply(c, err, nil)
			}
		}
	}()
	for missing := cfg.Size - 1; missing > 0; missing-- {
		var got arrival
		select {
		case got = <-a.arrivals:
		case <-ctx.Done():
			var who []string
			for r := 1; r < cfg.Size; r++ {
				if conns[r] == nil {
					who = append(who, fmt.Sprint(r))
				}
			}
			return fmt.Errorf("rendezvous %v: rank %s did not come %s%s", ln.Addr(), strings.Join(who, ", "), cfg.when(ctx), a.hint())
		}
		switch {
		case got.size != cfg.Size:
			err = fmt.Errorf("rank %d at %v expects %d ranks, rank 0 expects %d", got.rank, got.conn.RemoteAddr(), got.size, cfg.Size)
		case got.rank < 1 || got.rank >= cfg.Size:
			err = fmt.Errorf("%v calls itself rank %d of %d", got.conn.RemoteAddr(), got.rank, cfg.Size)
		case conns[got.rank] != nil:
			err = fmt.Errorf("rank %d comes twice, from %v and from %v", got.rank, conns[got.rank].RemoteAddr(), got.conn.RemoteAddr())
		}
		if err != nil {
			_ = got.conn.SetDeadline(time.Now().Add(time.Second))
			_ = writeReply(got.conn, err, nil)
			got.conn.Close()
			return err
		}
		conns[got.rank], table[got.rank] = got.conn, got.addr
	}
	if err := checkTable(table); err != nil {
		return err
	}
	body, err := json.Marshal(table)
	if err != nil {
		return err
	}
	for r := 1; r < cfg.Size; r++ {
		release := hurry(ctx, conns[r], 0)
		err := writeReply(conns[r], nil, body)
		release()
		if err != nil {
			return &comm.PeerError{Rank: r, Op: "rendezvous", Err: err}
		}
	}
	return nil
}

// checkTable finds ranks that listen where others cannot reach them, as on a host whose own name means 127.0.1.1.
func checkTable(table []string) error {
	loop, far := 0, 0
	for r := 1; r < len(table); r++ {
		at, err := netip.ParseAddrPort(table[r])
		switch {
		case err != nil:
			return fmt.Errorf("rank %d listens at %q, which is no address", r, table[r])
		case at.Addr().Unmap().IsLoopback():
			loop = r
		default:
			far = r
		}
	}
	if loop > 0 && far > 0 {
		return fmt.Errorf("rank %d listens at %s, where rank %d at %s cannot reach it; give a rendezvous address that all hosts can use",
			loop, table[loop], far, table[far])
	}
	return nil
}

// join is the side of all other ranks: it fills conns, by rank.
func join(ctx context.Context, cfg *Config, conns []net.Conn) error {
	where := "rendezvous " + cfg.Rendezvous
	conn, err := dial(ctx, cfg, cfg.Rendezvous, where)
	if err != nil {
		return err
	}
	conns[0] = conn
	local := conn.LocalAddr().(*net.TCPAddr)
	ln, err := net.Listen("tcp", net.JoinHostPort(addrHost(local), "0"))
	if err != nil {
		return fmt.Errorf("listen for other ranks: %w", err)
	}
	a := accept(ctx, ln, cfg.Secret)
	defer a.stop()

	release := hurry(ctx, conn, 0)
	defer release()
	if err := (introduction{cfg.Rank, cfg.Size, ln.Addr().String()}).write(conn); err != nil {
		return fmt.Errorf("%s: %w", where, err)
	}
	body, err := readReply(conn)
	var no refusal
	switch {
	case errors.As(err, &no):
		return fmt.Errorf("%s: rank 0 says: %w", where, err)
	case ctx.Err() != nil:
		return fmt.Errorf("%s: rank 0 answers, but not all ranks were there %s", where, cfg.when(ctx))
	case err == io.EOF:
		return fmt.Errorf("%s: %w", where, &comm.PeerError{Rank: 0, Op: "rendezvous", Err: comm.ErrPeerClosed})
	case err != nil:
		return fmt.Errorf("%s: %w", where, &comm.PeerError{Rank: 0, Op: "rendezvous", Err: err})
	}
	var table []string
	if err := json.Unmarshal(body, &table); err != nil || len(table) != cfg.Size {
		return fmt.Errorf("%s: rank 0 sends no table of %d addresses", where, cfg.Size)
	}
	return meet(ctx, cfg, a, table, conns)
}

// meet connects a rank with all others but rank 0.
func meet(ctx context.Context, cfg *Config, a *acceptor, table []string, conns []net.Conn) error {
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	var wg sync.WaitGroup
	errs := make([]error, cfg.Rank)
	for r := 1; r < cfg.Rank; r++ {
		wg.Go(func() {
			if conns[r], errs[r] = meetOne(ctx, cfg, r, table[r]); errs[r] != nil {
				cancel()
			}
		})
	}
	var err, ended error
	for missing := cfg.Size - 1 - cfg.Rank; missing > 0 && err == nil && ended == nil; missing-- {
		select {
		case got := <-a.arrivals:
			if got.rank <= cfg.Rank || got.rank >= cfg.Size || conns[got.rank] != nil || got.size != cfg.Size {
				err = fmt.Errorf("rank %d of %d at %v connects to rank %d of %d, which does not expect it",
					got.rank, got.size, got.conn.RemoteAddr(), cfg.Rank, cfg.Size)
				_ = got.conn.SetDeadline(time.Now().Add(time.Second))
				_ = writeReply(got.conn, err, nil)
				got.conn.Close()
				break
			}
			conns[got.rank] = got.conn
			release := hurry(ctx, got.conn, 0)
			if werr := writeReply(got.conn, nil, nil); werr != nil {
				err = &comm.PeerError{Rank: got.rank, Op: "connect", Err: werr}
			}
			release()
		case <-ctx.Done():
			at := slices.Index(conns[cfg.Rank+1:], nil) + cfg.Rank + 1
			ended = fmt.Errorf("rank %d did not connect to rank %d %s%s", at, cfg.Rank, cfg.when(ctx), a.hint())
		}
	}
	if err != nil {
		cancel()
	}
	wg.Wait()
	if err != nil {
		return err
	}
	for _, derr := range errs { // the cause, if a failed dial ended everything else
		if derr != nil && !errors.Is(derr, context.Canceled) {
			return derr
		}
	}
	return errors.Join(append(errs, ended)...)
}

func meetOne(ctx context.Context, cfg *Config, r int, addr string) (net.Conn, error) {
	conn, err := dial(ctx, cfg, addr, fmt.Sprintf("rank %d at %s", r, addr))
	if err != nil {
		return nil, err
	}
	release := hurry(ctx, conn, 0)
	defer release()
	err = introduction{rank: cfg.Rank, size: cfg.Size}.write(conn)
	if err == nil {
		_, err = readReply(conn)
	}
	if err != nil {
		conn.Close()
		return nil, &comm.PeerError{Rank: r, Op: "connect", Err: err}
	}
	return conn, nil
}

// dial connects to addr and proves this rank there. It tries again until ctx ends, as the other rank may not be up yet, but
// not when what answers cannot become right.
func dial(ctx context.Context, cfg *Config, addr, where string) (net.Conn, error) {
	d := net.Dialer{KeepAliveConfig: keepAlive}
	if cfg.BindAddr != "" {
		d.LocalAddr = &net.TCPAddr{IP: net.ParseIP(cfg.BindAddr)}
	}
	var last error
	for pause := 10 * time.Millisecond; ; pause = min(2*pause, 500*time.Millisecond) {
		conn, err := d.DialContext(ctx, "tcp", addr)
		if err == nil {
			release := hurry(ctx, conn, proofTime)
			err = proveDialer(conn, cfg.Secret)
			release()
			if err == nil {
				return conn, nil
			}
			conn.Close()
			if errors.Is(err, errSecret) || errors.Is(err, errForeign) || errors.Is(err, errVersion) {
				return nil, fmt.Errorf("%s: %w", where, err)
			}
		}
		if dns := (*net.DNSError)(nil); errors.As(err, &dns) && dns.IsNotFound {
			return nil, fmt.Errorf("%s: no such host", where)
		}
		if ctx.Err() == nil {
			last = err
		}
		select {
		case <-time.After(pause):
			continue
		case <-ctx.Done():
		}
		if errors.Is(ctx.Err(), context.Canceled) {
			return nil, fmt.Errorf("%s: %w", where, ctx.Err())
		}
		if last == nil {
			return nil, fmt.Errorf("%s: no answer %s", where, cfg.when(ctx))
		}
		return nil, fmt.Errorf("%s: no answer %s (%w)", where, cfg.when(ctx), last)
	}
}

// addrHost is the host part of an address, with its zone.
func addrHost(a *net.TCPAddr) string {
	return a.AddrPort().Addr().Unmap().String()
}
