package shm

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"testing"
	"time"

	"moetor/comm"
)

// attach makes a segment and attaches all ranks from this process, each with a mapping of its own.
func attach(t testing.TB, n int, o Options) []*transport {
	t.Helper()
	path := filepath.Join(t.TempDir(), "segment")
	if err := Create(path, n, o); err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
	defer cancel()
	ranks := make([]*transport, n)
	errs := make([]error, n)
	var wg sync.WaitGroup
	for r := range n {
		wg.Go(func() {
			tr, err := Attach(ctx, path, r, n)
			if err == nil {
				ranks[r] = tr.(*transport)
			}
			errs[r] = err
		})
	}
	wg.Wait()
	if err := errors.Join(errs...); err != nil {
		t.Fatal(err)
	}
	if _, err := os.Lstat(path); !errors.Is(err, os.ErrNotExist) {
		t.Errorf("segment still exists after all ranks attached: %v", err)
	}
	t.Cleanup(func() {
		for _, tr := range ranks {
			if err := tr.Close(); err != nil {
				t.Error(err)
			}
		}
	})
	return ranks
}

func pattern(n int, seed uint64) []byte {
	b := make([]byte, n)
	rng := rand.New(rand.NewPCG(seed, 7))
	for i := range b {
		b[i] = byte(rng.Uint32())
	}
	return b
}

// Messages many times the ring cross in both directions before anyone asks for them.
func TestLargeMessagesCross(t *testing.T) {
	ranks := attach(t, 2, Options{RingBytes: minRing})
	sizes := []int{0, 1, 15, 16, 17, 4096, minRing / 4, minRing, minRing + 1, 50*minRing + 3, 0, 5}
	var wg sync.WaitGroup
	for r, tr := range ranks {
		wg.Go(func() {
			other := 1 - r
			for i, n := range sizes {
				if err := tr.Send(t.Context(), other, comm.Tag(i%3), pattern(n, uint64(100*r+i))); err != nil {
					t.Error(err)
				}
			}
			for tag := range 3 { // by tag, not in the order of sending
				for i := tag; i < len(sizes); i += 3 {
					got := make([]byte, sizes[i])
					if err := tr.Recv(t.Context(), other, comm.Tag(tag), got); err != nil {
						t.Error(err)
					}
					if !bytes.Equal(got, pattern(sizes[i], uint64(100*other+i))) {
						t.Errorf("rank %d: message %d of %d bytes differs", r, i, sizes[i])
					}
				}
			}
		})
	}
	wg.Wait()
}

// A send that is cancelled halfway voids its message and nothing else.
func TestCancelledSendLeavesStreamUsable(t *testing.T) {
	ranks := attach(t, 2, Options{RingBytes: minRing})
	from0 := ranks[1].peers[0]
	got := make([]byte, 100)
	received := make(chan error, 1)
	for _, posted := range []bool{false, true} {
		if posted { // the void message has the length that the receiver waits for
			got = make([]byte, 1<<20)
			go func() { received <- ranks[1].Recv(t.Context(), 0, 1, got) }()
			for waiting := false; !waiting; time.Sleep(time.Millisecond) {
				from0.mu.Lock()
				waiting = len(from0.inbox.queue(1).waiters) == 1
				from0.mu.Unlock()
			}
		}
		from0.mu.Lock() // the receiver does not get to run
		ctx, cancel := context.WithCancel(t.Context())
		sent := make(chan error, 1)
		go func() { sent <- ranks[0].Send(ctx, 1, 1, make([]byte, 1<<20)) }()
		for !ranks[0].peers[1].waiting.Load() {
			time.Sleep(time.Millisecond)
		}
		cancel()
		if err := <-sent; !errors.Is(err, context.Canceled) {
			t.Fatalf("cancelled send: %v", err)
		}
		from0.mu.Unlock()
		want := pattern(len(got), 3)
		if err := ranks[0].Send(t.Context(), 1, 1, want); err != nil {
			t.Fatal(err)
		}
		if !posted { // the void message has another length
			go func() { received <- ranks[1].Recv(t.Context(), 0, 1, got) }()
		}
		if err := <-received; err != nil {
			t.Fatal(err)
		}
		if !bytes.Equal(got, want) {
			t.Error("message after a cancelled one differs")
		}
	}
}

// A receive that is cancelled while its message arrives leaves the message for the next receive.
func TestCancelledRecvLosesNothing(t *testing.T) {
	ranks := attach(t, 2, Options{RingBytes: minRing})
	from0 := ranks[1].peers[0]
	want := pattern(1<<20, 4)
	ctx, cancel := context.WithCancel(t.Context())
	first, second := make([]byte, len(want)), make([]byte, len(want))
	received := make(chan error, 1)
	go func() { received <- ranks[1].Recv(ctx, 0, 1, first) }()
	for arriving := false; !arriving; {
		// Send part of the message by hand: the sender stops in the middle.
		from0.mu.Lock()
		arriving = len(from0.inbox.queue(1).waiters) == 1
		from0.mu.Unlock()
	}
	out := &ranks[0].peers[1].out
	part := out.maxPayload()
	out.put(1, kindFirst, len(want), want[:part])
	ranks[0].ring(1)
	for arriving := false; !arriving; {
		from0.mu.Lock()
		arriving = from0.inbox.cur != nil && from0.inbox.cur.n == part
		from0.mu.Unlock()
	}
	cancel()
	if err := <-received; !errors.Is(err, context.Canceled) {
		t.Fatalf("cancelled receive: %v", err)
	}
	clear(first) // no longer the transport's to write
	go func() { received <- ranks[1].Recv(t.Context(), 0, 1, second) }()
	for rest := want[part:]; len(rest) > 0; {
		n := min(part, len(rest))
		for !out.room(n) {
			time.Sleep(time.Millisecond)
		}
		out.put(1, kindMore, len(want), rest[:n])
		ranks[0].ring(1)
		rest = rest[n:]
	}
	if err := <-received; err != nil {
		t.Fatal(err)
	}
	if !bytes.Equal(second, want) {
		t.Error("message differs")
	}
	if !bytes.Equal(first, make([]byte, len(first))) {
		t.Error("the buffer of a cancelled receive was written to")
	}
}

// What was sent before Close arrives; then the loss is reported, and as a close.
func TestClosedPeer(t *testing.T) {
	ranks := attach(t, 3, Options{})
	if err := ranks[1].Send(t.Context(), 0, 5, []byte("last")); err != nil {
		t.Fatal(err)
	}
	waiting := make(chan error, 1)
	go func() { waiting <- ranks[2].Recv(t.Context(), 1, 5, make([]byte, 4)) }()
	ranks[1].Close()
	got := make([]byte, 4)
	if err := ranks[0].Recv(t.Context(), 1, 5, got); err != nil || string(got) != "last" {
		t.Errorf("message sent before close: %q, %v", got, err)
	}
	for what, err := range map[string]error{
		"waiting receive": <-waiting,
		"receive":         ranks[0].Recv(t.Context(), 1, 5, got),
		"send":            ranks[0].Send(t.Context(), 1, 5, got),
	} {
		var pe *comm.PeerError
		if !errors.As(err, &pe) || pe.Rank != 1 || !errors.Is(err, comm.ErrPeerClosed) || errors.Is(err, ErrPeerDied) {
			t.Errorf("%s: %v, want a PeerError of rank 1 that closed", what, err)
		}
	}
	if err := ranks[0].Send(t.Context(), 2, 5, nil); err != nil {
		t.Errorf("ranks that stay: %v", err)
	}
}

func TestRefusals(t *testing.T) {
	dir := t.TempDir()
	short := func() context.Context {
		ctx, cancel := context.WithTimeout(t.Context(), 50*time.Millisecond)
		t.Cleanup(cancel)
		return ctx
	}
	make := func(name string, n int) string {
		path := filepath.Join(dir, name)
		if err := Create(path, n, Options{RingBytes: minRing}); err != nil {
			t.Fatal(err)
		}
		return path
	}
	taken := make("taken", 2)
	one, err := Attach(short(), make("one", 1), 0, 1)
	if err != nil {
		t.Fatal(err)
	}
	defer one.Close()

	damaged := make("damaged", 2)
	if err := os.Truncate(filepath.Join(damaged, segmentFile), int64(segmentBytes(2, minRing)-1)); err != nil {
		t.Fatal(err)
	}
	foreign := filepath.Join(dir, "foreign")
	os.Mkdir(foreign, 0o700)
	os.WriteFile(filepath.Join(foreign, segmentFile), bytes.Repeat([]byte("x"), 8192), 0o600)
	keep := filepath.Join(dir, "keep")
	os.Mkdir(keep, 0o700)
	os.WriteFile(filepath.Join(keep, "thesis.tex"), nil, 0o600)

	attach := func(ctx context.Context, path string, rank, size int) error {
		tr, err := Attach(ctx, path, rank, size)
		if err == nil {
			tr.Close()
		}
		return err
	}
	for _, c := range []struct {
		name string
		err  error
		want []string
	}{
		{"exists", Create(taken, 2, Options{}), []string{taken, "exists"}},
		{"no ranks", Create(filepath.Join(dir, "none"), 0, Options{}), []string{"0 ranks"}},
		{"too many", Create(filepath.Join(dir, "many"), MaxRanks+1, Options{}), []string{"1025"}},
		{"ring", Create(filepath.Join(dir, "ring"), 2, Options{RingBytes: 100_000}), []string{"100000", "power of two"}},
		{"no path", Create("", 2, Options{}), []string{"path"}},
		{"no room", Create(filepath.Join(Dir(), "moetor-test-no-room"), 64, Options{RingBytes: maxRing}), []string{"no room", "64 ranks"}},
		{"absent", attach(short(), filepath.Join(dir, "absent"), 0, 2), []string{"absent", "does not exist"}},
		{"missing", attach(short(), make("missing", 4), 1, 4), []string{"ranks 0, 2, 3 of 4", "missing"}},
		{"other size", attach(short(), make("other", 2), 0, 3), []string{"for 2 ranks", "one of 3"}},
		{"no such rank", attach(short(), make("rank", 2), 2, 2), []string{"rank 2 of 2"}},
		{"damaged", attach(short(), damaged, 0, 2), []string{"damaged"}},
		{"foreign", attach(short(), foreign, 0, 2), []string{"no segment"}},
		{"remove", Remove(keep), []string{"thesis.tex", "not removed"}},
		{"send", one.Send(t.Context(), 1, 0, nil), []string{"rank 1"}},
		{"recv", one.Recv(t.Context(), -1, 0, nil), []string{"rank -1"}},
	} {
		if c.err == nil {
			t.Errorf("%s: no error", c.name)
			continue
		}
		for _, w := range c.want {
			if !strings.Contains(c.err.Error(), w) {
				t.Errorf("%s: %q does not say %q", c.name, c.err, w)
			}
		}
	}
	if left, _ := filepath.Glob(filepath.Join(Dir(), "moetor-test-no-room*")); len(left) > 0 {
		t.Errorf("left behind: %v", left)
	}
	if left, _ := filepath.Glob(filepath.Join(dir, ".moetor-new-*")); len(left) > 0 {
		t.Errorf("left behind: %v", left)
	}

	// Two processes with one rank: the second is refused while the first still waits for the other rank.
	ctx, cancel := context.WithCancel(t.Context())
	first := start(func() error { return attach(ctx, taken, 0, 2) })
	seg, err := openSegment(taken, 2)
	if err != nil {
		t.Fatal(err)
	}
	for seg.slot(0).state.Load() != slotAttached {
		time.Sleep(time.Millisecond)
	}
	seg.close()
	want := fmt.Sprintf("rank 0 is taken by process %d", os.Getpid())
	if err := attach(short(), taken, 0, 2); err == nil || !strings.Contains(err.Error(), want) {
		t.Errorf("second rank 0: %v, want %q", err, want)
	}
	cancel()
	if err := <-first; !errors.Is(err, context.Canceled) || !strings.Contains(err.Error(), "rank 1 of 2 did not attach") {
		t.Errorf("first rank 0: %v", err)
	}
	if err := Remove(taken); err != nil {
		t.Error(err)
	}
	if err := Remove(taken); err != nil {
		t.Errorf("removing twice: %v", err)
	}
}

func start(f func() error) <-chan error {
	c := make(chan error, 1)
	go func() { c <- f() }()
	return c
}

func TestRingSizes(t *testing.T) {
	for _, c := range []struct{ size, want int }{{1, 1 << 20}, {2, 1 << 20}, {8, 1 << 20}, {9, 1 << 19}, {16, 1 << 18}, {64, 1 << 14}} {
		if got, _, err := (Options{}).ring(c.size); err != nil || got != c.want {
			t.Errorf("%d ranks: ring of %d bytes, %v; want %d", c.size, got, err, c.want)
		}
	}
}

// Memory that another process has scribbled over is a lost peer, not a panic or a wrong message.
func TestDamagedRing(t *testing.T) {
	ranks := attach(t, 2, Options{RingBytes: minRing})
	out := &ranks[0].peers[1].out
	out.put(1, kindMore, 5, []byte("hello")) // continues nothing
	err := ranks[1].Recv(t.Context(), 0, 1, make([]byte, 5))
	var pe *comm.PeerError
	if !errors.As(err, &pe) || pe.Rank != 0 || !strings.Contains(err.Error(), "damaged") {
		t.Errorf("got %v", err)
	}
}

func FuzzRing(f *testing.F) {
	whole := attachRing()
	whole.put(7, kindFirst, 5, []byte("hello"))
	f.Add(uint64(0), whole.head.Load(), whole.data[:64])
	f.Add(uint64(minRing-16), uint64(minRing+32), []byte{1, 0, 0, 0, 9, 0, 0, 64, 9})
	f.Fuzz(func(t *testing.T, tail, head uint64, data []byte) {
		p := attachRing()
		tail &^= fragmentHeader - 1
		head &^= fragmentHeader - 1
		copy(p.data[tail%minRing:], data)
		p.tail.Store(tail)
		p.head.Store(head)
		c := consumer{p.ringControl, p.data}
		var in inbox
		for range minRing / fragmentHeader {
			f, a, b, ok, err := c.next()
			if err != nil || !ok {
				return
			}
			if len(a)+len(b) != f.n {
				t.Fatalf("payload of %d+%d bytes in a fragment of %d", len(a), len(b), f.n)
			}
			f.total %= 1 << 20
			if in.accept(f, a, b) != nil {
				return
			}
			c.advance(f)
		}
	})
}

func attachRing() producer {
	return producer{ringControl: &ringControl{}, data: make([]byte, minRing)}
}

// The ring against a plain queue, fragments of all lengths, wrapping many times.
func TestRingIsAQueue(t *testing.T) {
	rng := rand.New(rand.NewPCG(1, 2))
	p := attachRing()
	c := consumer{p.ringControl, p.data}
	var model [][]byte
	wraps := 0
	for i := range 20_000 {
		if n := rng.IntN(p.maxPayload() + 1); rng.IntN(2) == 0 && p.room(n) {
			b := pattern(n, uint64(i))
			p.put(comm.Tag(i), kindFirst, n, b)
			model = append(model, b)
			continue
		}
		f, a, b, ok, err := c.next()
		if err != nil || ok != (len(model) > 0) {
			t.Fatalf("next: %v, %v with %d in the model", ok, err, len(model))
		}
		if !ok {
			continue
		}
		if len(b) > 0 {
			wraps++
		}
		if !bytes.Equal(append(bytes.Clone(a), b...), model[0]) || int(f.total) != len(model[0]) {
			t.Fatalf("fragment %d differs", i)
		}
		model = model[1:]
		c.advance(f)
	}
	if wraps < 10 {
		t.Errorf("payloads wrapped %d times only: the test misses its point", wraps)
	}
}

func BenchmarkEcho(b *testing.B) {
	for _, c := range []struct{ bytes, ring int }{{8, 0}, {64 << 10, 0}, {1 << 20, 64 << 10}, {1 << 20, 256 << 10}, {1 << 20, 1 << 20}, {1 << 20, 0}} {
		b.Run(fmt.Sprintf("bytes=%d/ring=%d", c.bytes, c.ring), func(b *testing.B) {
			ranks := attach(b, 2, Options{RingBytes: c.ring})
			p, q := make([]byte, c.bytes), make([]byte, c.bytes)
			b.SetBytes(int64(2 * c.bytes))
			done := start(func() error {
				for {
					if err := ranks[1].Recv(context.Background(), 0, 1, q); err != nil {
						return err
					}
					if err := ranks[1].Send(context.Background(), 0, 1, q); err != nil {
						return err
					}
				}
			})
			for b.Loop() {
				if err := ranks[0].Send(context.Background(), 1, 1, p); err != nil {
					b.Fatal(err)
				}
				if err := ranks[0].Recv(context.Background(), 1, 1, p); err != nil {
					b.Fatal(err)
				}
			}
			ranks[0].Close()
			<-done
		})
	}
}
