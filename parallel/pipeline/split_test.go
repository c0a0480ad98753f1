package pipeline

import (
	"math"
	"math/rand/v2"
	"reflect"
	"strings"
	"testing"
)

func TestSplit(t *testing.T) {
	for _, c := range []struct {
		costs  []float64
		stages int
		want   []int
	}{
		{[]float64{1, 1, 1, 1}, 1, []int{0, 4}},
		{[]float64{1, 1, 1, 1}, 2, []int{0, 2, 4}},
		{[]float64{1, 1, 1, 1}, 4, []int{0, 1, 2, 3, 4}},
		{[]float64{1, 1, 1, 1}, 3, []int{0, 1, 2, 4}}, // of three equal cuts, the one that relieves the early stages
		{[]float64{5, 1, 1, 1}, 2, []int{0, 1, 4}},
		{[]float64{1, 1, 1, 5}, 2, []int{0, 3, 4}},
		{[]float64{9, 1, 1, 1, 1, 1, 1}, 3, []int{0, 1, 4, 7}}, // the largest stage is fixed; the others are balanced too
		{[]float64{0, 0, 0}, 2, []int{0, 1, 3}},
		{[]float64{1, 2}, 4, []int{0, 1, 2, 2, 2}}, // fewer layers than stages
		{nil, 2, []int{0, 0, 0}},
	} {
		got, err := Split(c.costs, c.stages)
		if err != nil || !reflect.DeepEqual(got, c.want) {
			t.Errorf("Split(%v, %d) = %v, %v, want %v", c.costs, c.stages, got, err, c.want)
		}
	}
}

// TestSplitExhaustive compares with all cuts, tried one by one.
func TestSplitExhaustive(t *testing.T) {
	rng := rand.New(rand.NewPCG(3, 4))
	for range 300 {
		costs := make([]float64, 1+rng.IntN(9))
		for i := range costs {
			costs[i] = float64(rng.IntN(7)) // small integers: many ties, exact sums
		}
		stages := 1 + rng.IntN(len(costs))
		best := []float64{math.Inf(1), 0}
		var walk func(from, left int, worst, squares float64)
		walk = func(from, left int, worst, squares float64) {
			if left == 0 {
				if from == len(costs) && (worst < best[0] || worst == best[0] && squares < best[1]) {
					best = []float64{worst, squares}
				}
				return
			}
			c := 0.0
			for to := from + 1; to <= len(costs); to++ {
				c += costs[to-1]
				walk(to, left-1, math.Max(worst, c), squares+c*c)
			}
		}
		walk(0, stages, 0, 0)
		bounds, err := Split(costs, stages)
		if err != nil {
			t.Fatal(err)
		}
		got := []float64{0, 0}
		if bounds[0] != 0 || bounds[stages] != len(costs) {
			t.Fatalf("%v in %d: bounds %v", costs, stages, bounds)
		}
		for s := range stages {
			if bounds[s+1] <= bounds[s] {
				t.Fatalf("%v in %d: empty stage in %v", costs, stages, bounds)
			}
			c := 0.0
			for _, x := range costs[bounds[s]:bounds[s+1]] {
				c += x
			}
			got[0], got[1] = math.Max(got[0], c), got[1]+c*c
		}
		if !reflect.DeepEqual(got, best) {
			t.Errorf("%v in %d: %v has largest, squares %v, best is %v", costs, stages, bounds, got, best)
		}
	}
}

func TestSplitRefuses(t *testing.T) {
	for _, c := range []struct {
		costs  []float64
		stages int
		want   string
	}{
		{[]float64{1}, 0, "0 stages"},
		{[]float64{1, -1}, 1, "cost of layer 1 is -1"},
		{[]float64{math.NaN()}, 1, "cost of layer 0 is NaN"},
		{[]float64{math.Inf(1)}, 1, "cost of layer 0 is +Inf"},
	} {
		if _, err := Split(c.costs, c.stages); err == nil || !strings.Contains(err.Error(), c.want) {
			t.Errorf("Split(%v, %d): got %v, want %q", c.costs, c.stages, err, c.want)
		}
	}
}
