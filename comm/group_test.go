package comm_test

import (
	"context"
	"errors"
	"fmt"
	"runtime"
	"strings"
	"sync"
	"testing"
	"time"

	"moetor/comm"
	"moetor/comm/inproc"
)

func TestNewGroupRefuses(t *testing.T) {
	tr := inproc.New(4)[1]
	for _, c := range []struct {
		ranks []int
		tag   comm.Tag
		want  string
	}{
		{[]int{0, 1}, comm.TagPipeline, "group tag 65536"},
		{[]int{0, 2}, 1, "without itself"},
		{nil, 1, "without itself"},
		{[]int{0, 1, 1}, 1, "rank 1 twice"},
		{[]int{1, 4}, 1, "no rank 4 among 4"},
		{[]int{1, -1}, 1, "no rank -1 among 4"},
	} {
		if _, err := comm.NewGroup(tr, c.ranks, c.tag); err == nil || !strings.Contains(err.Error(), c.want) {
			t.Errorf("NewGroup(%v, %d): %v, want %q", c.ranks, c.tag, err, c.want)
		}
	}
	g, err := comm.NewGroup(tr, []int{3, 1}, 5)
	if err != nil || g.Rank() != 1 || g.Size() != 2 || fmt.Sprint(g.Ranks()) != "[3 1]" {
		t.Errorf("group of 3 and 1 as seen by 1: %v, %v", g, err)
	}
}

// oneSlot gives a transport just as much room as the contract asks for: a Send waits until the message before it, to the
// same peer with the same tag, has been received.
type oneSlot struct {
	comm.Transport
	slots *slots
}

type slots struct {
	mu sync.Mutex
	m  map[slotKey]chan struct{}
}

type slotKey struct {
	from, to int
	tag      comm.Tag
}

func (s *slots) get(from, to int, tag comm.Tag) chan struct{} {
	s.mu.Lock()
	defer s.mu.Unlock()
	k := slotKey{from, to, tag}
	if s.m[k] == nil {
		s.m[k] = make(chan struct{}, 1)
	}
	return s.m[k]
}

func (t *oneSlot) Send(ctx context.Context, to int, tag comm.Tag, p []byte) error {
	select {
	case t.slots.get(t.Rank(), to, tag) <- struct{}{}:
		return t.Transport.Send(ctx, to, tag, p)
	case <-ctx.Done():
		return ctx.Err()
	}
}

func (t *oneSlot) Recv(ctx context.Context, from int, tag comm.Tag, p []byte) error {
	err := t.Transport.Recv(ctx, from, tag, p)
	if err == nil {
		<-t.slots.get(from, t.Rank(), tag)
	}
	return err
}

// TestOneSlot runs collectives of all kinds in a row, without a pause, over a transport with the least room allowed.
func TestOneSlot(t *testing.T) {
	for _, n := range []int{2, 3, 4, 7} {
		s := &slots{m: map[slotKey]chan struct{}{}}
		ctx, cancel := context.WithTimeout(t.Context(), 2*time.Minute)
		var wg sync.WaitGroup
		for _, tr := range inproc.New(n) {
			wg.Go(func() {
				ranks := make([]int, n)
				even := make([]int, n)
				for i := range ranks {
					ranks[i], even[i] = i, 200
				}
				g, err := comm.NewGroup(&oneSlot{tr, s}, ranks, 1)
				if err != nil {
					t.Error(err)
					return
				}
				all, part := make([]float32, 200*n), make([]float32, 200)
				big := make([]float32, 700_001)
				for round := range 60 {
					err := errors.Join(
						comm.AllToAll(ctx, g, all, make([]float32, 200*n), even, even),
						comm.Broadcast(ctx, g, all, round%n),
						comm.ReduceScatter(ctx, g, part, all, even),
						comm.AllGather(ctx, g, all, part, even),
						comm.AllReduce(ctx, g, part[:round], comm.Sum),
						comm.AllReduce(ctx, g, part, comm.Sum),
						comm.AllReduce(ctx, g, all, comm.Max),
					)
					if round%20 == 0 {
						err = errors.Join(err, comm.AllReduce(ctx, g, big, comm.Sum), g.Barrier(ctx))
					}
					if err != nil {
						t.Errorf("%d ranks, rank %d: %v", n, tr.Rank(), err)
						return
					}
				}
			})
		}
		wg.Wait()
		cancel()
	}
}

// TestWarmCollectives counts the memory that operations take when their buffers stand: nothing but what starts the
// goroutine that sends payloads.
func TestWarmCollectives(t *testing.T) {
	const n, rounds = 4, 200
	ts := inproc.New(n)
	counts := []int{500, 500, 500, 500}
	for _, c := range []struct {
		name string
		most float64 // allocations per operation and rank
		op   func(ctx context.Context, g *comm.Group, x, y []float32) error
	}{
		{"barrier", 0.1, func(ctx context.Context, g *comm.Group, x, y []float32) error { return g.Barrier(ctx) }},
		{"short all-reduce", 0.1, func(ctx context.Context, g *comm.Group, x, y []float32) error {
			return comm.AllReduce(ctx, g, x[:16], comm.Max)
		}},
		{"long all-reduce", 3.1, func(ctx context.Context, g *comm.Group, x, y []float32) error {
			return comm.AllReduce(ctx, g, x, comm.Sum)
		}},
		{"all-to-all", 1.6, func(ctx context.Context, g *comm.Group, x, y []float32) error {
			return comm.AllToAll(ctx, g, y, x, counts, counts)
		}},
	} {
		var wg sync.WaitGroup
		warm, start := make(chan struct{}, n), make(chan struct{})
		ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
		for _, tr := range ts {
			g, err := comm.NewGroup(tr, []int{0, 1, 2, 3}, 1)
			if err != nil {
				t.Fatal(err)
			}
			g.WithTimeout(time.Minute)
			wg.Go(func() {
				x, y := make([]float32, 2000), make([]float32, 2000)
				run := func(k int) {
					for range k {
						if err := c.op(ctx, g, x, y); err != nil {
							t.Errorf("%s: %v", c.name, err)
							return
						}
					}
				}
				run(rounds)
				warm <- struct{}{}
				<-start
				run(rounds)
			})
		}
		for range ts {
			<-warm
		}
		var before, after runtime.MemStats
		runtime.ReadMemStats(&before)
		close(start)
		wg.Wait()
		runtime.ReadMemStats(&after)
		cancel()
		got := float64(after.Mallocs-before.Mallocs) / (n * rounds)
		if got > c.most {
			t.Errorf("%s: %.2f allocations per operation, want at most %.1f", c.name, got, c.most)
		}
	}
}

// TestContexts uses a group under several contexts: one that ended after its operation does no harm to later ones.
func TestContexts(t *testing.T) {
	ts := inproc.New(2)
	var wg sync.WaitGroup
	for _, tr := range ts {
		wg.Go(func() {
			g, err := comm.NewGroup(tr, []int{0, 1}, 1)
			if err != nil {
				t.Error(err)
				return
			}
			g.WithTimeout(time.Minute)
			for range 50 {
				ctx, cancel := context.WithCancel(t.Context())
				err := g.Barrier(ctx)
				cancel()
				if err != nil {
					t.Error(err)
					return
				}
			}
			ctx, cancel := context.WithCancel(t.Context())
			cancel()
			first := g.Barrier(ctx)
			if !errors.Is(first, context.Canceled) {
				t.Errorf("barrier under an ended context: %v", first)
			}
			if again := g.Barrier(t.Context()); again != first {
				t.Errorf("barrier after a failed one: %v, want %v", again, first)
			}
		})
	}
	wg.Wait()
}

// TestConcurrentUse is refused rather than mixed up.
func TestConcurrentUse(t *testing.T) {
	ts := inproc.New(2)
	g, err := comm.NewGroup(ts[0], []int{0, 1}, 1)
	if err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithCancel(t.Context())
	done := make(chan error)
	go func() { done <- g.Barrier(ctx) }()
	// The header of the first operation shows that it runs.
	if err := ts[1].Recv(t.Context(), 0, 1, make([]byte, 512)); err != nil {
		t.Fatal(err)
	}
	if err := comm.AllReduce(t.Context(), g, []int32{1}, comm.Sum); err == nil || !strings.Contains(err.Error(), "all-reduce called while barrier #1") {
		t.Errorf("second operation at once: %v", err)
	}
	cancel()
	if err := <-done; !errors.Is(err, context.Canceled) {
		t.Errorf("barrier: %v", err)
	}
}

// TestForeignMessage puts something that is not a header where one is due.
func TestForeignMessage(t *testing.T) {
	for _, c := range []struct {
		size int
		want string
	}{{512, "not the header of a collective"}, {7, "has 7 bytes, the receiver expects 512"}, {400, "has 400 bytes"}} {
		ts := inproc.New(2)
		if err := ts[1].Send(t.Context(), 0, 1, make([]byte, c.size)); err != nil {
			t.Fatal(err)
		}
		g, err := comm.NewGroup(ts[0], []int{0, 1}, 1)
		if err != nil {
			t.Fatal(err)
		}
		err = g.Barrier(t.Context())
		if err == nil || !strings.Contains(err.Error(), c.want) || !strings.Contains(err.Error(), "rank 1") {
			t.Errorf("%d bytes: %v, want %q and the rank", c.size, err, c.want)
		}
	}
}

func TestSlices(t *testing.T) {
	tr := inproc.New(1)[0]
	want := []float64{1, 2, 3}
	got := make([]float64, 3)
	if err := comm.SendSlice(t.Context(), tr, 0, comm.TagPipeline, want); err != nil {
		t.Fatal(err)
	}
	if err := comm.RecvSlice(t.Context(), tr, 0, comm.TagPipeline, got[:2]); err == nil {
		t.Error("three elements went into two")
	}
	if err := comm.RecvSlice(t.Context(), tr, 0, comm.TagPipeline, got); err != nil || got[2] != 3 {
		t.Errorf("%v, %v", got, err)
	}
}
