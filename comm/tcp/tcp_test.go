package tcp

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"strings"
	"sync"
	"testing"
	"time"

	"moetor/comm"
	"moetor/comm/commtest"
)

var testSecret = []byte("known to this test alone")

// connectAll connects n ranks over loopback. change may alter the configuration of each.
func connectAll(tb testing.TB, n int, change func(*Config)) ([]comm.Transport, []error) {
	tb.Helper()
	ln, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		tb.Fatal(err)
	}
	ts, errs := make([]comm.Transport, n), make([]error, n)
	var wg sync.WaitGroup
	for r := range n {
		cfg := Config{Rank: r, Size: n, Rendezvous: ln.Addr().String(), Secret: testSecret}
		if r == 0 {
			cfg.Listener = ln
		}
		if change != nil {
			change(&cfg)
		}
		wg.Go(func() { ts[r], errs[r] = Connect(tb.Context(), cfg) })
	}
	wg.Wait()
	return ts, errs
}

func connect(tb testing.TB, n int) []comm.Transport {
	tb.Helper()
	ts, errs := connectAll(tb, n, nil)
	if err := errors.Join(errs...); err != nil {
		tb.Fatal(err)
	}
	return ts
}

func TestTransport(t *testing.T) {
	commtest.Run(t, func(t *testing.T, n int) []comm.Transport { return connect(t, n) })
}

func BenchmarkTransport(b *testing.B) {
	commtest.Bench(b, func(b *testing.B, n int) []comm.Transport { return connect(b, n) })
}

// checkErrors wants a part of the message for each rank; an empty one means any error or none.
func checkErrors(t *testing.T, ts []comm.Transport, errs []error, want ...string) {
	t.Helper()
	for r, w := range want {
		if ts[r] != nil {
			ts[r].Close()
		}
		if w != "" && (errs[r] == nil || !strings.Contains(errs[r].Error(), w)) {
			t.Errorf("rank %d: %v, want %q", r, errs[r], w)
		}
	}
}

func TestConnectRefuses(t *testing.T) {
	for _, c := range []struct {
		cfg  Config
		want string
	}{
		{Config{Size: 0, Secret: testSecret}, "0 ranks"},
		{Config{Rank: 2, Size: 2, Secret: testSecret, Rendezvous: "x:1"}, "rank 2 of 2"},
		{Config{Rank: 1, Size: 2, Rendezvous: "x:1"}, "no secret"},
		{Config{Rank: 1, Size: 2, Secret: testSecret}, "no rendezvous address"},
		{Config{Size: 2, Secret: testSecret}, "no rendezvous address"},
		{Config{Size: 2, Secret: testSecret, Rendezvous: "127.0.0.1"}, "missing port"},
		{Config{Size: 2, Secret: testSecret, Rendezvous: "127.0.0.1:1", BindAddr: "eth0"}, `"eth0" is no IP address`},
		{Config{Size: 2, Secret: testSecret, Rendezvous: "x:1", MaxMessage: -1}, "-1 bytes"},
		{Config{Size: 2, Secret: testSecret, Rendezvous: "x:1", Timeout: -1}, "time-out"},
	} {
		tr, err := Connect(t.Context(), c.cfg)
		if err == nil {
			tr.Close()
		}
		if err == nil || !strings.Contains(err.Error(), c.want) || strings.Contains(err.Error(), "\n") {
			t.Errorf("%+v: %v, want one line with %q", c.cfg, err, c.want)
		}
	}
}

func TestNobodyAnswers(t *testing.T) {
	ln, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	addr := ln.Addr().String()
	ln.Close() // refused from now on
	_, err = Connect(t.Context(), Config{Rank: 1, Size: 2, Rendezvous: addr, Secret: testSecret, Timeout: 150 * time.Millisecond})
	if want := fmt.Sprintf("tcp: rendezvous %s: no answer within 150ms", addr); err == nil || !strings.HasPrefix(err.Error(), want) {
		t.Errorf("%v, want %q", err, want)
	}
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	if _, err = Connect(ctx, Config{Rank: 1, Size: 2, Rendezvous: addr, Secret: testSecret}); !errors.Is(err, context.Canceled) {
		t.Errorf("%v, want context.Canceled", err)
	}
}

// TestLateRoot starts rank 0 after the others have begun to knock.
func TestLateRoot(t *testing.T) {
	ln, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	addr := ln.Addr().String()
	ln.Close()
	ts, errs := make([]comm.Transport, 3), make([]error, 3)
	var wg sync.WaitGroup
	for r := range ts {
		wg.Go(func() {
			if r == 0 {
				time.Sleep(50 * time.Millisecond)
			}
			ts[r], errs[r] = Connect(t.Context(), Config{Rank: r, Size: 3, Rendezvous: addr, Secret: testSecret})
		})
	}
	wg.Wait()
	for r := range ts {
		if errs[r] != nil {
			t.Fatal(errs[r])
		}
		defer ts[r].Close()
	}
}

func TestMissingRank(t *testing.T) {
	ts, errs := connectAll(t, 4, func(c *Config) {
		c.Timeout = 5 * time.Second
		switch c.Rank {
		case 0:
			c.Timeout = time.Second // rank 0 gives up first and says so to those who wait
		case 1, 3:
			c.Rendezvous, c.Timeout = "127.0.0.1:1", 100*time.Millisecond // elsewhere
		}
	})
	checkErrors(t, ts, errs, "rank 1, 3 did not come within 1s", "no answer within 100ms", "rank 0 says: rendezvous", "")
}

func TestSecret(t *testing.T) {
	ts, errs := connectAll(t, 3, func(c *Config) {
		c.Timeout = time.Second
		if c.Rank == 2 {
			c.Secret = []byte("of another run")
		}
	})
	checkErrors(t, ts, errs, "was turned away: secret differs", "", "secret differs")
	if errs[1] == nil {
		t.Error("rank 1 connected without rank 2")
	}
}

// TestStranger lets all sorts of connections come to rank 0 before the right one does.
func TestStranger(t *testing.T) {
	ln, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	for _, text := range []string{"", "GET / HTTP/1.1\r\n\r\n", strings.Repeat("x", 1<<16), greeting, greeting + strings.Repeat("n", nonceBytes+proofBytes)} {
		c, err := net.Dial("tcp", ln.Addr().String())
		if err != nil {
			t.Fatal(err)
		}
		defer c.Close() // stays open and silent until the end
		if _, err := io.WriteString(c, text); err != nil {
			t.Fatal(err)
		}
	}
	var a, b comm.Transport
	var errA, errB error
	var wg sync.WaitGroup
	wg.Go(func() { a, errA = Connect(t.Context(), Config{Rank: 0, Size: 2, Listener: ln, Secret: testSecret}) })
	wg.Go(func() {
		b, errB = Connect(t.Context(), Config{Rank: 1, Size: 2, Rendezvous: ln.Addr().String(), Secret: testSecret})
	})
	wg.Wait()
	if err := errors.Join(errA, errB); err != nil {
		t.Fatal(err)
	}
	a.Close()
	b.Close()
}

// TestImpostor has a listener that does not hold the secret, or is no rank at all.
func TestImpostor(t *testing.T) {
	for _, c := range []struct {
		name, answer, want string
	}{
		{"accepts everyone", greeting + strings.Repeat("n", nonceBytes) + "\x01" + strings.Repeat("m", proofBytes), "secret differs"},
		{"web server", "HTTP/1.1 400 Bad Request\r\nConnection: close\r\n\r\n", "something other than a moetor rank"},
		{"newer", "MOETOR\x00\x02" + strings.Repeat("n", nonceBytes), "protocol version 2 there, 1 here"},
	} {
		ln, err := net.Listen("tcp", "127.0.0.1:0")
		if err != nil {
			t.Fatal(err)
		}
		var wg sync.WaitGroup
		wg.Go(func() {
			for {
				conn, err := ln.Accept()
				if err != nil {
					return
				}
				_, _ = io.WriteString(conn, c.answer)
				_, _ = io.CopyN(io.Discard, conn, int64(helloBytes+proofBytes))
				conn.Close()
			}
		})
		_, err = Connect(t.Context(), Config{Rank: 1, Size: 2, Rendezvous: ln.Addr().String(), Secret: testSecret, Timeout: time.Minute})
		if err == nil || !strings.Contains(err.Error(), c.want) {
			t.Errorf("%s: %v, want %q", c.name, err, c.want)
		}
		ln.Close()
		wg.Wait()
	}
}

func TestRanksDoNotFit(t *testing.T) {
	ts, errs := connectAll(t, 3, func(c *Config) {
		c.Timeout = 3 * time.Second
		if c.Rank == 2 {
			c.Size = 4
		}
	})
	checkErrors(t, ts, errs, "expects 4 ranks, rank 0 expects 3", "", "expects 4 ranks, rank 0 expects 3")
	ts, errs = connectAll(t, 4, func(c *Config) {
		c.Timeout = 3 * time.Second
		if c.Rank == 2 {
			c.Rank = 1
		}
	})
	checkErrors(t, ts, errs, "rank 1 comes twice, from 127.0.0.1:")
}

func TestCheckTable(t *testing.T) {
	for _, ok := range [][]string{{""}, {"", "127.0.0.1:5", "127.0.0.1:6"}, {"", "10.0.0.1:5", "[fe80::1%eth0]:6"}, {"", "[::1]:5"}} {
		if err := checkTable(ok); err != nil {
			t.Errorf("%q: %v", ok, err)
		}
	}
	for _, bad := range [][]string{{"", "host:5"}, {"", "127.0.1.1:5", "10.0.0.1:6"}, {"", "10.0.0.1:6", "[::1]:5"}} {
		if err := checkTable(bad); err == nil {
			t.Errorf("%q passed", bad)
		}
	}
}

// TestLostThroughAnother: rank 1 dies, rank 2 meets that and closes, and rank 0, which waits for rank 2 alone, names rank 1.
func TestLostThroughAnother(t *testing.T) {
	ts := connect(t, 3)
	for _, tr := range ts {
		defer tr.Close()
	}
	for _, p := range ts[1].(*transport).peers {
		if p.conn != nil {
			p.conn.Close() // as the kernel does for a process that is killed
		}
	}
	b := make([]byte, 1)
	var pe *comm.PeerError
	if err := ts[2].Recv(t.Context(), 1, 5, b); !errors.As(err, &pe) || pe.Rank != 1 {
		t.Fatalf("rank 2: %v, want the loss of rank 1", err)
	}
	if err := ts[2].Close(); err != nil {
		t.Fatal(err)
	}
	err := ts[0].Recv(t.Context(), 2, 5, b)
	if !errors.As(err, &pe) || pe.Rank != 1 || !strings.Contains(err.Error(), "rank 2 lost it") {
		t.Errorf("rank 0 receives: %v, want the loss of rank 1, which rank 2 met", err)
	}
	if err := ts[0].Send(t.Context(), 2, 5, b); !errors.As(err, &pe) || pe.Rank != 1 {
		t.Errorf("rank 0 sends: %v, want the loss of rank 1", err)
	}
}

// TestHungThroughAnother: rank 1 hangs, rank 2 waits for it in vain and closes, and rank 0, which waits for rank 2, names rank 1.
// What rank 2 gives up for another reason it says nothing of.
func TestHungThroughAnother(t *testing.T) {
	for _, c := range []struct {
		name string
		wait func(context.Context, comm.Transport) error
		want int
	}{
		{"a message", func(ctx context.Context, tr comm.Transport) error {
			ctx, cancel := context.WithTimeout(ctx, 20*time.Millisecond)
			defer cancel()
			return tr.Recv(ctx, 1, 5, make([]byte, 1))
		}, 1},
		{"a collective", func(ctx context.Context, tr comm.Transport) error {
			g, err := comm.NewGroup(tr, []int{1, 2}, 5)
			if err != nil {
				return err
			}
			return g.WithTimeout(20 * time.Millisecond).Barrier(ctx)
		}, 1},
		{"cancelled", func(ctx context.Context, tr comm.Transport) error {
			ctx, cancel := context.WithCancel(ctx)
			time.AfterFunc(20*time.Millisecond, cancel)
			return tr.Recv(ctx, 1, 5, make([]byte, 1))
		}, 2},
	} {
		t.Run(c.name, func(t *testing.T) {
			ts := connect(t, 3)
			for _, tr := range ts {
				defer tr.Close()
			}
			if err := c.wait(t.Context(), ts[2]); err == nil {
				t.Fatal("rank 1 answers")
			}
			if err := ts[2].Close(); err != nil {
				t.Fatal(err)
			}
			var pe *comm.PeerError
			if err := ts[0].Recv(t.Context(), 2, 6, make([]byte, 1)); !errors.As(err, &pe) || pe.Rank != c.want {
				t.Errorf("rank 0: %v, want the loss of rank %d", err, c.want)
			}
		})
	}
}

// TestPlainFarewell: a rank that closes with all others there is itself the one that is missed.
func TestPlainFarewell(t *testing.T) {
	ts := connect(t, 3)
	defer ts[0].Close()
	defer ts[1].Close()
	if err := ts[2].Close(); err != nil {
		t.Fatal(err)
	}
	var pe *comm.PeerError
	for r := range 2 {
		if err := ts[r].Recv(t.Context(), 2, 5, make([]byte, 1)); !errors.As(err, &pe) || pe.Rank != 2 || !errors.Is(err, comm.ErrPeerClosed) {
			t.Errorf("rank %d: %v, want rank 2 closed", r, err)
		}
	}
}

func TestMessageLimit(t *testing.T) {
	ts, errs := connectAll(t, 2, func(c *Config) {
		c.MaxMessage = 1000
		if c.Rank == 1 {
			c.MaxMessage = 2000
		}
	})
	if err := errors.Join(errs...); err != nil {
		t.Fatal(err)
	}
	defer ts[0].Close()
	defer ts[1].Close()
	ctx := t.Context()
	err := ts[0].Send(ctx, 1, 3, make([]byte, 1001))
	if err == nil || !strings.Contains(err.Error(), "has 1001 bytes, the limit is 1000") {
		t.Errorf("Send: %v", err)
	}
	if err := ts[1].Send(ctx, 0, 3, make([]byte, 1000)); err != nil {
		t.Fatal(err)
	}
	if err := ts[0].Recv(ctx, 1, 3, make([]byte, 1000)); err != nil {
		t.Fatal(err)
	}
	if err := ts[1].Send(ctx, 0, 3, make([]byte, 1500)); err != nil {
		t.Fatal(err)
	}
	err = ts[0].Recv(ctx, 1, 3, make([]byte, 1500))
	if pe := (*comm.PeerError)(nil); !errors.As(err, &pe) || pe.Rank != 1 || !strings.Contains(err.Error(), "tag 3 announces 1500 bytes, the limit is 1000") {
		t.Errorf("Recv: %v", err)
	}
}

// A meddler passes bytes between two ranks and does something to the stream from the dialer at one place.
type meddler struct {
	net.Listener
	target string
	after  int64 // bytes from the dialer that pass unharmed
	flip   bool  // invert a bit of the next byte; otherwise cut the connection
	wg     sync.WaitGroup
}

func (m *meddler) run(t *testing.T) {
	m.wg.Go(func() {
		in, err := m.Accept()
		if err != nil {
			t.Error(err)
			return
		}
		out, err := net.Dial("tcp", m.target)
		if err != nil {
			t.Error(err)
			in.Close()
			return
		}
		m.wg.Go(func() {
			_, _ = io.Copy(in, out)
			in.Close()
		})
		_, _ = io.CopyN(out, in, m.after)
		var b [1]byte // cut only when there is something to cut: at first the dialer waits for the table
		if _, err := io.ReadFull(in, b[:]); err == nil && m.flip {
			b[0] ^= 0x10
			_, _ = out.Write(b[:])
			_, _ = io.Copy(out, in)
		}
		out.Close()
		in.Close()
	})
}

// TestMeddler damages or cuts the stream from rank 1 to rank 0 at places all over two messages. No damaged byte is ever
// handed out, and both sides learn about it.
func TestMeddler(t *testing.T) {
	const length = 100_000
	before := int64(helloBytes + proofBytes + introBytes)
	for _, flip := range []bool{true, false} {
		for _, at := range []int64{0, 3, 4, 9, 12, 17, 23, 26, 30, 32, 50_000, length + 31, length + 32, length + 40, length + 64 + 5000} {
			for _, waits := range []bool{false, true} {
				ln, err := net.Listen("tcp", "127.0.0.1:0")
				if err != nil {
					t.Fatal(err)
				}
				front, err := net.Listen("tcp", "127.0.0.1:0")
				if err != nil {
					t.Fatal(err)
				}
				m := &meddler{Listener: front, target: ln.Addr().String(), after: before + at, flip: flip}
				m.run(t)
				var ts [2]comm.Transport
				var errs [2]error
				var wg sync.WaitGroup
				wg.Go(func() { ts[0], errs[0] = Connect(t.Context(), Config{Size: 2, Listener: ln, Secret: testSecret}) })
				wg.Go(func() {
					ts[1], errs[1] = Connect(t.Context(), Config{Rank: 1, Size: 2, Rendezvous: front.Addr().String(), Secret: testSecret})
				})
				wg.Wait()
				if err := errors.Join(errs[:]...); err != nil {
					t.Fatal(err)
				}
				ctx, cancel := context.WithTimeout(t.Context(), 30*time.Second)
				sent := make([]byte, length)
				for i := range sent {
					sent[i] = byte(i * 7)
				}
				wg.Go(func() {
					if waits {
						time.Sleep(time.Millisecond)
					}
					_ = ts[1].Send(ctx, 0, 77, sent)
					_ = ts[1].Send(ctx, 0, 77, sent)
				})
				if !waits {
					wg.Wait()
				}
				place := fmt.Sprintf("flip %v at %d, waits %v", flip, at, waits)
				var bad error
				for k := 0; k < 2 && bad == nil; k++ {
					got := make([]byte, length)
					if bad = ts[0].Recv(ctx, 1, 77, got); bad == nil && string(got) != string(sent) {
						t.Errorf("%s: message %d was damaged, and nobody noticed", place, k)
					}
				}
				var pe *comm.PeerError
				if !errors.As(bad, &pe) || pe.Rank != 1 {
					t.Errorf("%s: rank 0: %v, want a *comm.PeerError of rank 1", place, bad)
				} else if flip && at > 31 && !(strings.Contains(bad.Error(), "orrupt") || strings.Contains(bad.Error(), "checksum")) {
					t.Errorf("%s: rank 0: unclear error %q", place, bad)
				} else if !flip && !errors.Is(bad, comm.ErrPeerClosed) {
					t.Errorf("%s: rank 0: %v, want comm.ErrPeerClosed", place, bad)
				}
				err = ts[1].Recv(ctx, 0, 78, make([]byte, 1))
				if pe = nil; !errors.As(err, &pe) || pe.Rank != 0 {
					t.Errorf("%s: rank 1: %v, want a *comm.PeerError of rank 0", place, err)
				}
				wg.Wait()
				cancel()
				ts[0].Close()
				ts[1].Close()
				front.Close()
				m.wg.Wait()
			}
		}
	}
}
