package expert

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"reflect"
	"slices"
	"strings"
	"sync"
	"testing"

	"moetor/comm"
	"moetor/comm/inproc"
	"moetor/internal/tensor"
)

// onRanks runs f on every rank of a group of n.
func onRanks(t *testing.T, n int, f func(ctx context.Context, g *comm.Group) error) {
	t.Helper()
	transports := inproc.New(n)
	ranks := make([]int, n)
	for i := range ranks {
		ranks[i] = i
	}
	errs := make([]error, n)
	var wg sync.WaitGroup
	for r, tr := range transports {
		wg.Go(func() {
			defer tr.Close()
			g, err := comm.NewGroup(tr, ranks, 1)
			if err == nil {
				err = f(t.Context(), g)
			}
			if err != nil {
				errs[r] = fmt.Errorf("rank %d: %w", r, err)
			}
		})
	}
	wg.Wait()
	if err := errors.Join(errs...); err != nil {
		t.Fatal(err)
	}
}

// counts makes the row counts of all ranks: many zeros, sometimes a rank without rows, sometimes one expert for all (P08).
func counts(rng *rand.Rand, ranks, experts int) [][]int {
	all := make([][]int, ranks)
	kind := rng.IntN(4)
	for r := range all {
		all[r] = make([]int, experts)
		for e := range all[r] {
			switch {
			case kind == 0 && r == ranks-1: // a rank without rows
			case kind == 1 && e > 0: // all rows to expert 0
			case rng.IntN(3) > 0:
				all[r][e] = rng.IntN(5)
			}
		}
	}
	return all
}

func sum(x []int) int {
	s := 0
	for _, v := range x {
		s += v
	}
	return s
}

// label marks row i of rank r for expert e in a way that float32 holds exactly.
func label(r, e, i int) float32 { return float32(r*10000 + e*100 + i) }

// TestOrder: rows arrive sorted by expert, then source, then the source's order, on the rank that owns the expert; Combine
// brings each back to its place. The expected order is written out from the counts of all ranks.
func TestOrder(t *testing.T) {
	rng := rand.New(rand.NewPCG(7, 8))
	for _, c := range []struct{ ranks, experts int }{{1, 3}, {2, 2}, {2, 5}, {3, 8}, {4, 4}, {4, 6}, {4, 16}} {
		for range 12 {
			all := counts(rng, c.ranks, c.experts)
			const cols = 3
			onRanks(t, c.ranks, func(ctx context.Context, g *comm.Group) error {
				me := g.Rank()
				x, err := New(g, c.experts)
				if err != nil {
					return err
				}
				route, err := x.Route(ctx, all[me])
				if err != nil {
					return err
				}
				first, last := x.Local()
				if first != me*c.experts/c.ranks || last != (me+1)*c.experts/c.ranks {
					return fmt.Errorf("owns [%d, %d)", first, last)
				}
				var want []float32
				wantRows := make([]int, last-first)
				for e := first; e < last; e++ {
					for r := range c.ranks {
						for i := range all[r][e] {
							want = append(want, label(r, e, i))
						}
						wantRows[e-first] += all[r][e]
					}
				}
				if !reflect.DeepEqual(route.Rows(), wantRows) {
					return fmt.Errorf("rows %v, want %v", route.Rows(), wantRows)
				}
				src := tensor.NewMat(sum(all[me]), cols)
				row := 0
				for e, n := range all[me] {
					for i := range n {
						for col := range cols {
							src.Row(row)[col] = label(me, e, i) + float32(col)/4
						}
						row++
					}
				}
				dst := tensor.NewMat(len(want), cols)
				if err := route.Dispatch(ctx, dst, src); err != nil {
					return err
				}
				for i, w := range want {
					if got := dst.Row(i); got[0] != w || got[1] != w+0.25 || got[2] != w+0.5 {
						return fmt.Errorf("row %d is %v, want %v and quarters more", i, got, w)
					}
				}
				back := tensor.NewMat(src.Rows, cols)
				if err := route.Combine(ctx, back, dst); err != nil {
					return err
				}
				if !slices.Equal(back.Data, src.Data) {
					return fmt.Errorf("combine of dispatch gives %v, want %v", back.Data, src.Data)
				}
				return nil
			})
		}
	}
}

// TestAdjoint: <Dispatch x, y> = <x, Combine y> over all ranks, exactly, since the entries are small integers. Several
// routes are alive at once and used in another order than made, as by a pipeline.
func TestAdjoint(t *testing.T) {
	rng := rand.New(rand.NewPCG(9, 10))
	for _, c := range []struct{ ranks, experts int }{{1, 4}, {2, 3}, {3, 7}, {4, 8}} {
		const live, steps = 3, 4
		plans := make([][][]int, steps*live)
		for i := range plans {
			plans[i] = counts(rng, c.ranks, c.experts)
		}
		var mu sync.Mutex
		left, right := make([]int64, len(plans)), make([]int64, len(plans))
		onRanks(t, c.ranks, func(ctx context.Context, g *comm.Group) error {
			me, cols := g.Rank(), 5
			x, err := New(g, c.experts)
			if err != nil {
				return err
			}
			rng := rand.New(rand.NewPCG(11, uint64(me)))
			random := func(rows int) tensor.Mat {
				m := tensor.NewMat(rows, cols)
				for i := range m.Data {
					m.Data[i] = float32(rng.IntN(17) - 8)
				}
				return m
			}
			for step := range steps {
				x.Reset()
				var routes []*Route
				for i := range live {
					r, err := x.Route(ctx, plans[step*live+i][me])
					if err != nil {
						return err
					}
					routes = append(routes, r)
				}
				for i := live - 1; i >= 0; i-- {
					r, plan := routes[i], step*live+i
					n := sum(plans[plan][me])
					in, out := random(n), random(sum(r.Rows()))
					sentIn, sentOut := tensor.NewMat(n, cols), tensor.NewMat(out.Rows, cols)
					if err := r.Dispatch(ctx, sentOut, in); err != nil {
						return err
					}
					if err := r.Combine(ctx, sentIn, out); err != nil {
						return err
					}
					mu.Lock()
					left[plan] += dot(sentOut, out)
					right[plan] += dot(in, sentIn)
					mu.Unlock()
				}
			}
			return nil
		})
		if !reflect.DeepEqual(left, right) || slices.Max(left) == 0 {
			t.Errorf("%d ranks, %d experts: %v and %v", c.ranks, c.experts, left, right)
		}
	}
}

func dot(a, b tensor.Mat) int64 {
	s := int64(0)
	for i, v := range a.Data {
		s += int64(v) * int64(b.Data[i])
	}
	return s
}

// TestIdentityRoute: one rank copies rows, strided ones too, and talks to nobody.
func TestIdentityRoute(t *testing.T) {
	onRanks(t, 1, func(ctx context.Context, g *comm.Group) error {
		x, err := New(g, 2)
		if err != nil {
			return err
		}
		r, err := x.Route(ctx, []int{1, 2})
		if err != nil {
			return err
		}
		wide := tensor.MatOf(3, 4, []float32{1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12})
		dst := tensor.NewMat(3, 2)
		if err := r.Dispatch(ctx, dst, wide.ColRange(1, 3)); err != nil {
			return err
		}
		if want := []float32{2, 3, 6, 7, 10, 11}; !slices.Equal(dst.Data, want) {
			return fmt.Errorf("got %v, want %v", dst.Data, want)
		}
		if x.Sent() != (Traffic{}) {
			return fmt.Errorf("sent %+v to nobody", x.Sent())
		}
		return nil
	})
}

// TestSent: rows that leave the rank are counted, those that stay are not.
func TestSent(t *testing.T) {
	onRanks(t, 2, func(ctx context.Context, g *comm.Group) error {
		x, err := New(g, 2)
		if err != nil {
			return err
		}
		mine := [][]int{{5, 2}, {3, 7}}[g.Rank()] // rank 0 sends 2 and gets 3
		r, err := x.Route(ctx, mine)
		if err != nil {
			return err
		}
		src, dst := tensor.NewMat(sum(mine), 6), tensor.NewMat(sum(r.Rows()), 6)
		if err := r.Dispatch(ctx, dst, src); err != nil {
			return err
		}
		if err := r.Combine(ctx, src, dst); err != nil {
			return err
		}
		if want := (Traffic{Rows: 5, Bytes: 5 * 6 * 4}); x.Sent() != want {
			return fmt.Errorf("sent %+v, want %+v", x.Sent(), want)
		}
		return nil
	})
}

// TestWarm: after Reset, routes of the same number and size allocate nothing of their own.
func TestWarm(t *testing.T) {
	onRanks(t, 1, func(ctx context.Context, g *comm.Group) error {
		x, err := New(g, 4)
		if err != nil {
			return err
		}
		rows := []int{3, 0, 2, 1}
		a, b := tensor.NewMat(6, 8), tensor.NewMat(6, 8)
		step := func() {
			x.Reset()
			for range 3 {
				r, err := x.Route(ctx, rows)
				if err != nil {
					panic(err)
				}
				if err := errors.Join(r.Dispatch(ctx, b, a), r.Combine(ctx, a, b)); err != nil {
					panic(err)
				}
			}
		}
		step()
		if n := testing.AllocsPerRun(20, step); n != 0 {
			return fmt.Errorf("%v allocations in a warm step", n)
		}
		return nil
	})
}

func TestRefuses(t *testing.T) {
	onRanks(t, 1, func(ctx context.Context, g *comm.Group) error {
		x, err := New(g, 3)
		if err != nil {
			return err
		}
		r, err := x.Route(ctx, []int{1, 0, 1})
		if err != nil {
			return err
		}
		for _, c := range []struct {
			err  error
			want string
		}{
			{second(x.Route(ctx, []int{1, 2})), "expert exchange: row counts for 2 experts, the model has 3"},
			{second(x.Route(ctx, []int{1, 2, -3})), "expert exchange: -3 rows for expert 2"},
			{r.Dispatch(ctx, tensor.NewMat(2, 4), tensor.NewMat(3, 4)), "expert exchange: dispatch of 3 rows, the route has 2"},
			{r.Dispatch(ctx, tensor.NewMat(1, 4), tensor.NewMat(2, 4)), "expert exchange: dispatch into 1 rows, the route gives 2"},
			{r.Combine(ctx, tensor.NewMat(2, 4), tensor.NewMat(2, 5)), "expert exchange: combine of 5 columns into 4"},
		} {
			if c.err == nil || c.err.Error() != c.want {
				return fmt.Errorf("got %v, want %s", c.err, c.want)
			}
		}
		return nil
	})
	onRanks(t, 3, func(ctx context.Context, g *comm.Group) error {
		_, err := New(g, 2)
		if err == nil || !strings.Contains(err.Error(), "model.moe.experts=2 are fewer than the 3 ranks") {
			return fmt.Errorf("got %v", err)
		}
		x, err := New(g, 3)
		if err != nil {
			return err
		}
		r, err := x.Route(ctx, []int{1, 1, 1})
		if err != nil {
			return err
		}
		wide := tensor.NewMat(3, 8)
		if err := r.Dispatch(ctx, tensor.NewMat(3, 4), wide.ColRange(0, 4)); err == nil || !strings.Contains(err.Error(), "strides 8 and 4") {
			return fmt.Errorf("got %v", err)
		}
		return nil
	})
}

func second[T any](_ T, err error) error { return err }
