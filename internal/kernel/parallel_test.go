package kernel

import (
	"fmt"
	"slices"
	"sync"
	"sync/atomic"
	"testing"
	"time"
)

func TestParallelCallsEachOnce(t *testing.T) {
	for _, threads := range []int{1, 2, 4} {
		withThreads(t, threads)
		if Threads() != threads {
			t.Errorf("Threads() = %d, want %d", Threads(), threads)
		}
		for _, n := range []int{0, 1, 2, 3, 100} {
			calls := make([]atomic.Int32, n)
			Parallel(n, func(i int) { calls[i].Add(1) })
			for i := range calls {
				if c := calls[i].Load(); c != 1 {
					t.Errorf("%d threads: f(%d) called %d times", threads, i, c)
				}
			}
		}
	}
}

// A thread that is held up keeps no other waiting: the parts of its queue are done by those that have nothing left.
func TestParallelHelps(t *testing.T) {
	withThreads(t, 2)
	for first := range 2 { // whose queue it is: the caller's or the worker's
		released := make(chan struct{})
		Parallel(4, func(i int) {
			switch i {
			case 2 * first:
				select {
				case <-released:
				case <-time.After(10 * time.Second):
					t.Errorf("part %d is not done while part %d lasts", 2*first+1, i)
				}
			case 2*first + 1:
				close(released)
			}
		})
	}
}

// Queues of a grouped product are neighbouring groups of about equal work, and cover all parts.
func TestGroupQueues(t *testing.T) {
	for _, rows := range [][]int{{5}, {100, 0, 3, 1000, 7, 7, 7}, {64, 64, 64, 64}, {0, 0}, {1, 1, 1000}} {
		for _, threads := range []int{2, 3, 8} {
			var g groupParts
			total := 0
			for _, r := range rows {
				total += r
			}
			g.cut(len(rows), 14, 32, total*64*16, maxParts*threads, threads, func(e int) (m, n, k, r int) { return rows[e], 64, 16, rows[e] })
			if len(g.ends) != threads || g.ends[threads-1] != len(g.parts) || !slices.IsSorted(g.ends) {
				t.Fatalf("%v on %d threads: queues of %d parts end at %v", rows, threads, len(g.parts), g.ends)
			}
			done, from, largest := 0, 0, 0
			for _, part := range g.parts {
				largest = max(largest, part.work)
				done += part.work
			}
			if done != total*64*16 {
				t.Errorf("%v: parts do %d of %d", rows, done, total*64*16)
			}
			for i, end := range g.ends {
				sum := 0
				for _, part := range g.parts[from:end] {
					sum += part.work
				}
				if off := sum - done/threads; off > largest || -off > largest {
					t.Errorf("%v: queue %d of %d does %d of %d, parts are up to %d", rows, i, threads, sum, done, largest)
				}
				from = end
			}
		}
	}
}

// One product is cut into as many parts as asked for, also where they do not come out even: one more, and a thread has two.
func TestGroupParts(t *testing.T) {
	for _, pieces := range []int{2, 3, 4} {
		var g groupParts
		const m, n, k = 2049, 65, 129
		g.cut(1, 14, 32, m*n*k, pieces, pieces, func(int) (int, int, int, int) { return m, n, k, 0 })
		if len(g.parts) != pieces {
			t.Errorf("%d parts, want %d", len(g.parts), pieces)
		}
	}
}

// Nested calls and calls from many goroutines at once end, and compute what one thread computes.
func TestParallelNested(t *testing.T) {
	const m, n, k = 100, 120, 130
	a, b := randomMat(1, m*k), randomMat(2, k*n)
	want := make([]float32, m*n)
	Gemm(NN, m, n, k, 1, a, k, b, n, 0, want, n)
	withThreads(t, 3)
	var wg sync.WaitGroup
	for g := range 4 {
		wg.Go(func() {
			results := make([][]float32, 6)
			Parallel(len(results), func(i int) {
				results[i] = make([]float32, m*n)
				Parallel(2, func(half int) {
					Gemm(NN, m/2, n, k, 1, a[half*m/2*k:], k, b, n, 0, results[i][half*m/2*n:], n)
				})
			})
			for i, got := range results {
				for at := range got {
					if got[at] != want[at] {
						t.Errorf("goroutine %d, result %d, value %d: %v, want %v", g, i, at, got[at], want[at])
						return
					}
				}
			}
		})
	}
	wg.Wait()
}

func TestShareCoversAll(t *testing.T) {
	for _, n := range []int{0, 1, 13, 14, 15, 100, 1000} {
		for parts := 1; parts < 9; parts++ {
			next := 0
			for i := range parts {
				from, to := share(i, parts, n, 14)
				if from != next || to < from || (to%14 != 0 && to != n) {
					t.Errorf("share(%d, %d, %d, 14) = %d, %d after %d", i, parts, n, from, to, next)
				}
				next = to
			}
			if next != n {
				t.Errorf("%d parts of %d end at %d", parts, n, next)
			}
		}
	}
}

func TestGridUsesThreads(t *testing.T) {
	mk := active.Load().micro
	for _, s := range []struct{ m, n, threads int }{{2048, 1024, 4}, {1, 4096, 4}, {4096, 8, 4}, {64, 64, 3}, {8, 8, 16}} {
		r, c := grid(mk.rows, mk.cols, s.m, s.n, s.threads)
		if r < 1 || c < 1 || r*c > s.threads {
			t.Errorf("grid of %v = %d x %d", s, r, c)
		}
		if name := fmt.Sprint(s); s.m == 1 && r != 1 || s.n == 8 && s.m > 1000 && c != 1 {
			t.Errorf("grid of %s = %d x %d cuts a side of one tile", name, r, c)
		}
	}
}
