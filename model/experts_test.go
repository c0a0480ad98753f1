package model

import (
	"context"
	"fmt"
	"slices"
	"strings"
	"sync"
	"testing"

	"moetor/internal/tensor"
)

// meeting is the plainest exchange of goroutine ranks: everyone lays its rows on the table, and takes what is its own.
type meeting struct {
	ranks, experts int
	barrier        *barrier
	rows           [][]int // by rank: rows per expert
	table          []tensor.Mat
}

type barrier struct {
	sync.Mutex
	cond              *sync.Cond
	size, here, round int
}

func newMeeting(ranks, experts int) *meeting {
	b := &barrier{size: ranks}
	b.cond = sync.NewCond(b)
	return &meeting{ranks: ranks, experts: experts, barrier: b, rows: make([][]int, ranks), table: make([]tensor.Mat, ranks)}
}

func (b *barrier) wait() {
	b.Lock()
	defer b.Unlock()
	round := b.round
	if b.here++; b.here == b.size {
		b.here = 0
		b.round++
		b.cond.Broadcast()
	}
	for round == b.round {
		b.cond.Wait()
	}
}

type meetingRoute struct {
	*meeting
	rank     int
	counts   [][]int // by rank
	received []int
}

func (m *meeting) exchange(rank int) Exchange {
	return func(_ context.Context, _ int, rows []int) (Route, error) {
		m.rows[rank] = slices.Clone(rows)
		m.barrier.wait()
		r := &meetingRoute{meeting: m, rank: rank, counts: slices.Clone(m.rows)}
		m.barrier.wait()
		for e := rank * m.experts / m.ranks; e < (rank+1)*m.experts/m.ranks; e++ {
			n := 0
			for _, c := range r.counts {
				n += c[e]
			}
			r.received = append(r.received, n)
		}
		return r, nil
	}
}

func (r *meetingRoute) Rows() []int { return r.received }

// walk calls f for every block of rows of one source rank and one expert: where it stands in the sorted rows of the
// source and in the rows received by the owner.
func (r *meetingRoute) walk(f func(source, owner, sorted, received, n int)) {
	for owner := range r.ranks {
		at := 0
		for e := owner * r.experts / r.ranks; e < (owner+1)*r.experts/r.ranks; e++ {
			for source, c := range r.counts {
				sorted := 0
				for _, n := range c[:e] {
					sorted += n
				}
				f(source, owner, sorted, at, c[e])
				at += c[e]
			}
		}
	}
}

func (r *meetingRoute) Dispatch(_ context.Context, dst, src tensor.Mat) error {
	r.table[r.rank] = src
	r.barrier.wait()
	r.walk(func(source, owner, sorted, received, n int) {
		if owner == r.rank {
			copy(dst.RowRange(received, received+n).Data, r.table[source].RowRange(sorted, sorted+n).Data)
		}
	})
	r.barrier.wait()
	return nil
}

func (r *meetingRoute) Combine(_ context.Context, dst, src tensor.Mat) error {
	r.table[r.rank] = src
	r.barrier.wait()
	r.walk(func(source, owner, sorted, received, n int) {
		if source == r.rank {
			copy(dst.RowRange(sorted, sorted+n).Data, r.table[owner].RowRange(received, received+n).Data)
		}
	})
	r.barrier.wait()
	return nil
}

// TestExpertRanks is pitfalls P08 and P09: experts spread over ranks give the losses of one rank to the bit, also when
// all tokens go to one rank's experts, when ranks hold different numbers of tokens, and when one holds none; idle experts
// have gradients of exactly 0.
//
// So do recipes whose tiles lie within a token. Then all gradients but those of experts have the bits of one rank, too; the
// tiles of an expert's weight gradient are filled from all ranks, and it differs by the rounding of the format.
func TestExpertRanks(t *testing.T) {
	for name, r := range recipes() {
		for _, collapsed := range []bool{false, true} {
			for _, size := range []int{2, 4} {
				t.Run(fmt.Sprintf("%s/collapsed=%v/ranks=%d", name, collapsed, size), func(t *testing.T) {
					compareExpertRanks(t, r, collapsed, size)
				})
			}
		}
	}
}

func compareExpertRanks(t *testing.T, r Recipe, collapsed bool, size int) {
	c := tiny()
	c.Recipe, c.MoE.Groups, c.MoE.TopGroups = r, 1, 1
	settings := Settings{MTPWeight: 0.3}
	micros := [][]Micro{{micro(c, 1, 1, 7), micro(c, 2, 2, 8)}, {micro(c, 3, 1, 3), {}}, {{}, micro(c, 4, 1, 16)}, {{}, {}}}
	prepare := func(p pipe) {
		for _, r := range p.routers() {
			if collapsed {
				copy(r.Bias, []float32{9, 8})
			}
		}
	}
	add := func(sum, g map[string][]float32) {
		for n, g := range g {
			if sum[n] == nil {
				sum[n] = make([]float32, len(g))
			}
			for i, v := range g {
				sum[n][i] += v
			}
		}
	}
	within := r.Weight == nil || !whole(r.Input) // tiles lie within a token
	// One rank does the micro-batches of all.
	want, wantGrads := make([][]Sums, 4), make([]map[string][]float32, 4)
	one := cut(t, c, 5, 0)
	prepare(one)
	grads := map[string][]float32{}
	for rank := range 4 {
		want[rank] = one.step(t, micros[rank], settings)
		wantGrads[rank] = one.grads()
		add(grads, wantGrads[rank])
	}
	got, pipes := make([][]Sums, 4), make([]pipe, 4)
	for from := 0; from < 4; from += size { // expert groups one after the other
		m := newMeeting(size, c.MoE.Experts)
		var group sync.WaitGroup
		for i := range size {
			part := Whole(c)
			part.ExpertRank, part.ExpertSize = i, size
			ch, err := New(c, part, 5, m.exchange(i))
			check(t, err)
			p := pipe{ch}
			prepare(p)
			pipes[from+i] = p
			group.Go(func() { got[from+i] = p.step(t, micros[from+i], settings) })
		}
		group.Wait()
	}
	sum := map[string][]float32{}
	for rank, p := range pipes {
		if within && !slices.EqualFunc(got[rank], want[rank], Sums.equal) {
			t.Errorf("rank %d: %v, alone %v", rank, got[rank], want[rank])
		}
		near(t, "loss", total(got[rank]).Loss, total(want[rank]).Loss, 0.05*total(want[rank]).Loss)
		for n, g := range p.grads() {
			if within && !strings.Contains(n, ".experts.") && !slices.Equal(g, wantGrads[rank][n]) {
				t.Errorf("rank %d: gradient of %s is off by %.2g", rank, n, distance(g, wantGrads[rank][n]))
			}
		}
		add(sum, p.grads())
	}
	bound := 1e-6
	if r.Weight != nil {
		bound = 0.1
	}
	for n, g := range grads {
		if d := distance(sum[n], g); d > bound && within {
			t.Errorf("gradient of %s is off by %.2g", n, d)
		}
	}
	for _, p := range pipes {
		for _, q := range p[0].Params() {
			var e, l int
			if n, _ := fmt.Sscanf(q.Name, "model.layers.%d.mlp.experts.%d.", &l, &e); n == 2 && e > 1 && collapsed && (slices.Max(q.Grad) != 0 || slices.Min(q.Grad) != 0) {
				t.Errorf("%s got no token and a gradient", q.Name)
			}
		}
	}
}
