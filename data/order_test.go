package data

import (
	"math"
	"testing"
)

func TestShuffledIsAPermutation(t *testing.T) {
	for n := int64(1); n <= 300; n++ {
		for k := range uint64(3) {
			seen := make([]bool, n)
			for i := range n {
				j := shuffled(i, n, k)
				if j < 0 || j >= n || seen[j] {
					t.Fatalf("n %d key %d: place %d has %d, out of range or for the second time", n, k, i, j)
				}
				seen[j] = true
			}
		}
	}
	// Large n, by a sample: within range, no two alike.
	for _, n := range []int64{1 << 20, 1<<33 + 1, math.MaxInt64} {
		seen := map[int64]bool{}
		for i := range int64(20000) {
			j := shuffled(n-1-i, n, 5)
			if j < 0 || j >= n || seen[j] {
				t.Fatalf("n %d: place %d has %d", n, n-1-i, j)
			}
			seen[j] = true
		}
	}
}

// Each of the n! orders of few samples must come up as often as any other, and in long orders each sample anywhere.
// The bound is five standard deviations of a binomial count.
func TestShuffledIsUniform(t *testing.T) {
	const trials = 9600
	for n, orders := range map[int64]int{2: 2, 3: 6, 4: 24} {
		count := map[[4]int64]int{}
		for e := range int64(trials) {
			var o [4]int64
			for i := range n {
				o[i] = shuffled(i, n, orderKey(1, 0, e))
			}
			count[o]++
		}
		p := 1 / float64(orders)
		for o, c := range count {
			if d := math.Abs(float64(c) - trials*p); d > 5*math.Sqrt(trials*p*(1-p)) {
				t.Errorf("n %d: order %v %d times in %d", n, o, c, trials)
			}
		}
		if len(count) != orders {
			t.Errorf("n %d: %d of %d orders", n, len(count), orders)
		}
	}
	const n = 50
	var at [n][n]int
	for e := range int64(trials) {
		for i := range int64(n) {
			at[i][shuffled(i, n, orderKey(2, 0, e))]++
		}
	}
	for i := range at {
		for j, c := range at[i] {
			if d := math.Abs(float64(c) - trials/n); d > 5*math.Sqrt(trials/n*(1-1.0/n)) {
				t.Errorf("sample %d at place %d %d times in %d", j, i, c, trials)
			}
		}
	}
}

func TestCycle(t *testing.T) {
	for _, c := range []struct {
		weights []float64
		want    []int64 // per 60000
	}{
		{[]float64{1, 1}, []int64{30000, 30000}},
		{[]float64{3, 1}, []int64{45000, 15000}},
		{[]float64{1, 2}, []int64{20000, 40000}},
		{[]float64{0.7, 0.2, 0.1}, []int64{42000, 12000, 6000}},
		{[]float64{1, 1, 1, 1, 1, 1, 1}, []int64{8572, 8572, 8572, 8571, 8571, 8571, 8571}},
		{[]float64{1e-9, 1, 1e-9}, []int64{1, 59998, 1}},
		{[]float64{1e308, 1e308, 1e308}, []int64{20000, 20000, 20000}},
	} {
		y := newCycle(c.weights)
		got := make([]int64, len(c.weights))
		for g := range int64(2 * cycleLen) {
			s, before := y.at(g)
			if before != got[s] {
				t.Fatalf("%v: place %d is visit %d of source %d, want %d", c.weights, g, before, s, got[s])
			}
			got[s]++
			for i, n := range got { // no source is ever ahead or behind by much
				if d := float64(n) - float64(g+1)*float64(c.want[i])/cycleLen; math.Abs(d) >= float64(len(got)) {
					t.Fatalf("%v: after %d places source %d is off by %v", c.weights, g+1, i, d)
				}
			}
		}
		for i := range got {
			if got[i] != 2*c.want[i] {
				t.Errorf("%v: source %d has %d places in two cycles, want %d", c.weights, i, got[i], 2*c.want[i])
			}
		}
	}
}
