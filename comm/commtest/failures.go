package commtest

import (
	"context"
	"errors"
	"fmt"
	"strings"
	"testing"
	"time"

	"moetor/comm"
)

// world makes the group of all ranks with a time-out that only a hang reaches.
func world(tr comm.Transport) (*comm.Group, error) {
	ranks := make([]int, tr.Size())
	for i := range ranks {
		ranks[i] = i
	}
	g, err := comm.NewGroup(tr, ranks, 1)
	if err != nil {
		return nil, err
	}
	return g.WithTimeout(guard / 2), nil
}

// testMismatch has ranks call collectives that do not fit (P36): all fail, and the error lists what each called.
func testMismatch(t *testing.T, connect Connect) {
	const n = 4
	sum32 := func(ctx context.Context, g *comm.Group, n int) error {
		return comm.AllReduce(ctx, g, make([]float32, n), comm.Sum)
	}
	type op func(ctx context.Context, g *comm.Group) error
	usual := func(ctx context.Context, g *comm.Group) error { return sum32(ctx, g, 3000) }
	for _, c := range []struct {
		name string
		odd  map[int]op
		base op
		want []string // in everyone's error
	}{
		{"twice the size", map[int]op{0: func(ctx context.Context, g *comm.Group) error { return sum32(ctx, g, 6000) }}, usual,
			[]string{"rank 0: all-reduce #2 of 6000 float32 (sum)", "ranks 1,2,3: all-reduce #2 of 3000 float32 (sum)"}},
		{"short against long", map[int]op{2: func(ctx context.Context, g *comm.Group) error { return sum32(ctx, g, 3) }}, usual,
			[]string{"rank 2: all-reduce #2 of 3 float32 (sum)", "ranks 0,1,3: all-reduce #2 of 3000 float32 (sum)"}},
		{"another type", map[int]op{1: func(ctx context.Context, g *comm.Group) error {
			return comm.AllReduce(ctx, g, make([]int32, 3000), comm.Sum)
		}}, usual,
			[]string{"rank 1: all-reduce #2 of 3000 int32 (sum)", "ranks 0,2,3: all-reduce #2 of 3000 float32 (sum)"}},
		{"another operation", map[int]op{3: func(ctx context.Context, g *comm.Group) error {
			return comm.Broadcast(ctx, g, make([]float32, 3000), 1)
		}}, usual,
			[]string{"rank 3: broadcast #2 of 3000 float32 from rank 1", "ranks 0,1,2: all-reduce #2 of 3000 float32 (sum)"}},
		{"three at once", map[int]op{
			0: func(ctx context.Context, g *comm.Group) error { return sum32(ctx, g, 6000) },
			1: func(ctx context.Context, g *comm.Group) error {
				return comm.AllReduce(ctx, g, make([]float64, 3000), comm.Sum)
			},
			3: func(ctx context.Context, g *comm.Group) error { return g.Barrier(ctx) },
		}, usual,
			[]string{"rank 0: all-reduce #2 of 6000 float32", "rank 1: all-reduce #2 of 3000 float64",
				"rank 2: all-reduce #2 of 3000 float32", "rank 3: barrier #2"}},
		{"another reduction", map[int]op{0: func(ctx context.Context, g *comm.Group) error {
			return comm.AllReduce(ctx, g, make([]float32, 3000), comm.Max)
		}}, usual,
			[]string{"rank 0: all-reduce #2 of 3000 float32 (max)", "ranks 1,2,3: all-reduce #2 of 3000 float32 (sum)"}},
		{"one call too many", map[int]op{2: func(ctx context.Context, g *comm.Group) error {
			if err := g.Barrier(ctx); err != nil {
				return err
			}
			return g.Barrier(ctx)
		}}, usual,
			[]string{"rank 2: barrier #2", "ranks 0,1,3: all-reduce #2 of 3000 float32 (sum)"}},
		{"another root", map[int]op{2: func(ctx context.Context, g *comm.Group) error {
			return comm.Broadcast(ctx, g, make([]float32, 3000), 2)
		}}, func(ctx context.Context, g *comm.Group) error {
			return comm.Broadcast(ctx, g, make([]float32, 3000), 1)
		},
			[]string{"rank 2: broadcast #2 of 3000 float32 from rank 2", "ranks 0,1,3: broadcast #2 of 3000 float32 from rank 1"}},
		{"another split", map[int]op{1: func(ctx context.Context, g *comm.Group) error {
			return comm.AllGather(ctx, g, make([]float32, 4000), make([]float32, 1000), []int{999, 1000, 1000, 1001})
		}}, func(ctx context.Context, g *comm.Group) error {
			return comm.AllGather(ctx, g, make([]float32, 4000), make([]float32, 1000), []int{1000, 1000, 1000, 1000})
		}, []string{"rank 1: all-gather #2 of 4000 float32 (split ", "ranks 0,2,3: all-gather #2 of 4000 float32 (split "}},
	} {
		t.Run(c.name, func(t *testing.T) {
			ts := connect(t, n)
			defer closeAll(t, ts)
			errs := each(t, ts, func(ctx context.Context, tr comm.Transport) error {
				g, err := world(tr)
				if err != nil {
					return err
				}
				if err := g.Barrier(ctx); err != nil { // the first goes well
					return fmt.Errorf("before the mismatch: %w", err)
				}
				do := c.base
				if f := c.odd[tr.Rank()]; f != nil {
					do = f
				}
				first := do(ctx, g)
				if again := g.Barrier(ctx); again == nil || again != first {
					return fmt.Errorf("after %v, the group says %v, want the same error", first, again)
				}
				return first
			})
			checkMismatch(t, errs, c.want)
		})
	}
}

func checkMismatch(t *testing.T, errs []error, want []string) {
	t.Helper()
	for r, err := range errs {
		if !errors.Is(err, comm.ErrMismatch) {
			t.Errorf("rank %d: %v, want comm.ErrMismatch", r, err)
			continue
		}
		for _, w := range want {
			if !strings.Contains(err.Error(), w) {
				t.Errorf("rank %d: %q does not say %q", r, err, w)
			}
		}
	}
}

// testCountMismatch has one pair disagree on what one sends the other; members that have no part in it fail too.
func testCountMismatch(t *testing.T, connect Connect) {
	const n = 4
	for _, size := range []int{3, 1000} {
		ts := connect(t, n)
		errs := each(t, ts, func(ctx context.Context, tr comm.Transport) error {
			g, err := world(tr)
			if err != nil {
				return err
			}
			send, recv := []int{size, size, size, size}, []int{size, size, size, size}
			if tr.Rank() == 3 {
				recv[1]++
			}
			return comm.AllToAll(ctx, g, make([]float32, total(recv)), make([]float32, total(send)), recv, send)
		})
		checkMismatch(t, errs, []string{
			fmt.Sprintf("all-to-all #1: rank 1 sends %d float32 to rank 3, which expects %d", size, size+1)})
		closeAll(t, ts)
	}
}

// testBadArguments: a call that makes no sense on one rank alone fails there at once, and on the others with its reason.
func testBadArguments(t *testing.T, connect Connect) {
	const n = 3
	ok := []int{100, 100, 100}
	for _, c := range []struct {
		name string
		bad  func(ctx context.Context, g *comm.Group) error
		want string
	}{
		{"sum of counts", func(ctx context.Context, g *comm.Group) error {
			return comm.AllGather(ctx, g, make([]float32, 299), make([]float32, 100), ok)
		}, "len(dst) = 299, counts adds up to 300"},
		{"own count", func(ctx context.Context, g *comm.Group) error {
			return comm.AllGather(ctx, g, make([]float32, 300), make([]float32, 99), ok)
		}, "len(src) = 99, counts[1] = 100"},
		{"number of counts", func(ctx context.Context, g *comm.Group) error {
			return comm.ReduceScatter(ctx, g, make([]float32, 100), make([]float32, 200), ok[:2])
		}, "len(counts) = 2 in a group of 3"},
		{"negative count", func(ctx context.Context, g *comm.Group) error {
			return comm.ReduceScatter(ctx, g, make([]float32, 100), make([]float32, 199), []int{100, 100, -1})
		}, "counts[2] = -1"},
		{"to itself", func(ctx context.Context, g *comm.Group) error {
			return comm.AllToAll(ctx, g, make([]float32, 300), make([]float32, 300), ok, []int{99, 101, 100})
		}, "send[1] = 101, but recv[1] = 100"},
		{"root", func(ctx context.Context, g *comm.Group) error {
			return comm.Broadcast(ctx, g, make([]float32, 300), 3)
		}, "no root 3 in a group of 3"},
	} {
		t.Run(c.name, func(t *testing.T) {
			ts := connect(t, n)
			defer closeAll(t, ts)
			errs := each(t, ts, func(ctx context.Context, tr comm.Transport) error {
				g, err := world(tr)
				if err != nil {
					return err
				}
				if tr.Rank() == 1 {
					return c.bad(ctx, g)
				}
				return comm.AllReduce(ctx, g, make([]float32, 9000), comm.Sum)
			})
			for r, err := range errs {
				if err == nil || !strings.Contains(err.Error(), c.want) || !strings.Contains(err.Error(), "rank 1") {
					t.Errorf("rank %d: %v, want rank 1 and %q", r, err, c.want)
				}
				var pe *comm.PeerError
				if r != 1 && (!errors.As(err, &pe) || pe.Rank != 1) {
					t.Errorf("rank %d: %v, want a *comm.PeerError of rank 1", r, err)
				}
			}
		})
	}
}

// testTimeout has one member stay away.
func testTimeout(t *testing.T, connect Connect) {
	const n, away = 3, 1
	ts := connect(t, n)
	defer closeAll(t, ts)
	errs := each(t, ts, func(ctx context.Context, tr comm.Transport) error {
		g, err := world(tr)
		if err != nil {
			return err
		}
		if err := g.WithTimeout(0).Barrier(ctx); err != nil {
			return err
		}
		if tr.Rank() == away {
			return nil
		}
		g.WithTimeout(100 * time.Millisecond)
		return comm.AllReduce(ctx, g, make([]float32, 10), comm.Sum)
	})
	for r, err := range errs {
		if r == away {
			if err != nil {
				t.Errorf("rank %d: %v", r, err)
			}
			continue
		}
		var pe *comm.PeerError
		if !errors.As(err, &pe) || pe.Rank != away || pe.Op != "all-reduce" || pe.Seq != 2 {
			t.Errorf("rank %d: %v, want a *comm.PeerError of rank %d in all-reduce #2", r, err, away)
			continue
		}
		if msg := err.Error(); !strings.Contains(msg, "rank 1 gave no answer to all-reduce #2 within 100ms") {
			t.Errorf("rank %d: unclear error %q", r, msg)
		}
	}
}

// testCancelCollective cancels one member: it stops, and the others learn why, those that come later too.
func testCancelCollective(t *testing.T, connect Connect) {
	const n = 3
	ts := connect(t, n)
	defer closeAll(t, ts)
	why := errors.New("the user has seen enough")
	left := make(chan struct{})
	errs := each(t, ts, func(ctx context.Context, tr comm.Transport) error {
		g, err := world(tr)
		if err != nil {
			return err
		}
		if err := g.Barrier(ctx); err != nil {
			return err
		}
		switch tr.Rank() {
		case 0:
			defer close(left)
			mine, cancel := context.WithCancelCause(ctx)
			defer time.AfterFunc(10*time.Millisecond, func() { cancel(why) }).Stop()
			return g.Barrier(mine)
		case 2:
			<-left
		}
		// Rank 0 has entered its second barrier before it left, so that one may end well; the third cannot.
		if err := g.Barrier(ctx); err != nil {
			return err
		}
		return g.Barrier(ctx)
	})
	if err := errs[0]; !errors.Is(err, context.Canceled) || !errors.Is(err, why) {
		t.Errorf("rank 0: %v, want context.Canceled and the cause", err)
	}
	for r := 1; r < n; r++ {
		var pe *comm.PeerError
		if err := errs[r]; !errors.As(err, &pe) || pe.Rank != 0 || !strings.Contains(err.Error(), why.Error()) {
			t.Errorf("rank %d: %v, want a *comm.PeerError of rank 0 with its reason", r, err)
		}
	}
}

// testFaults ends one rank at each operation of a short run in turn, closing or losing data first; all others fail in time
// and name it.
func testFaults(t *testing.T, connect Connect) {
	const n, bad = 4, 1
	for at := int64(1); at <= 43; at += 3 {
		ts := connect(t, n)
		f := Faults{MaxDelay: 200 * time.Microsecond, Seed: uint64(at), CloseAt: at}
		if at%2 == 0 {
			f.CloseAt, f.DropAt = 0, at
		}
		ts[bad] = Faulty(ts[bad], f)
		errs := each(t, ts, func(ctx context.Context, tr comm.Transport) error {
			g, err := world(tr)
			if err != nil {
				return err
			}
			for {
				x := make([]float32, 4000)
				if err := comm.AllReduce(ctx, g, x, comm.Sum); err != nil {
					return err
				}
				counts := []int{200, 200, 200, 200}
				if err := comm.AllToAll(ctx, g, make([]float32, 800), make([]float32, 800), counts, counts); err != nil {
					return err
				}
				if err := g.Barrier(ctx); err != nil {
					return err
				}
			}
		})
		for r, err := range errs {
			var pe *comm.PeerError
			if r == bad {
				if !errors.Is(err, comm.ErrClosed) {
					t.Errorf("fault at %d: rank %d itself: %v, want comm.ErrClosed", at, r, err)
				}
			} else if !errors.As(err, &pe) || pe.Rank != bad || pe.Seq == 0 {
				t.Errorf("fault at %d: rank %d: %v, want a *comm.PeerError of rank %d with its operation", at, r, err, bad)
			}
		}
		closeAll(t, ts)
	}
}
