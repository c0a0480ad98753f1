package pipeline

import (
	"fmt"
	"math"
)

// Split cuts layers with the given costs into contiguous stages so that the largest stage cost is as small as possible.
// Stage s is layers [bounds[s], bounds[s+1]); len(bounds) is stages+1. Among the cuts with that largest cost it takes the
// one with the smallest sum of squared stage costs, and among those the one that gives earlier stages fewer layers, since
// they keep more micro-batches alive. Every stage gets at least one layer; only if there are fewer layers than stages,
// stage s gets layer s and the last stages get none (the very last still has the head). Costs are in any unit, finite and
// not negative; whatever else stands on a stage (embedding, head) is added to the cost of its first or last layer.
func Split(costs []float64, stages int) (bounds []int, err error) {
	if stages < 1 {
		return nil, fmt.Errorf("pipeline split: %d stages, need at least 1", stages)
	}
	n := len(costs)
	at := make([]float64, n+1) // prefix sums
	for i, c := range costs {
		if !(c >= 0) || math.IsInf(c, 0) {
			return nil, fmt.Errorf("pipeline split: cost of layer %d is %v, want finite and not negative", i, c)
		}
		at[i+1] = at[i] + c
	}
	bounds = make([]int, stages+1)
	if n < stages {
		for s := range bounds {
			bounds[s] = min(s, n)
		}
		return bounds, nil
	}
	span := func(i, j int) float64 { return at[j] - at[i] }

	worst := cuts(n, stages, func(i, j int, rest float64) float64 { return math.Max(span(i, j), rest) })
	limit := worst[stages][0]
	squares := cuts(n, stages, func(i, j int, rest float64) float64 {
		if c := span(i, j); c <= limit {
			return c*c + rest
		}
		return math.Inf(1)
	})
	// Follow the optimum from the first stage on; the first j that reaches it gives the early stages the fewest layers.
	i := 0
	for s := stages; s >= 1; s-- {
		for j := i + 1; j <= n-(s-1); j++ {
			c := span(i, j)
			if c <= limit && c*c+squares[s-1][j] == squares[s][i] {
				bounds[stages-s+1] = j
				i = j
				break
			}
		}
	}
	return bounds, nil
}

// cuts solves best[s][i]: the smallest cost of layers i..n-1 in s stages, each with a layer, where add combines the cost
// of a first stage [i,j) with the best of the rest.
func cuts(n, stages int, add func(i, j int, rest float64) float64) [][]float64 {
	best := make([][]float64, stages+1)
	for s := range best {
		best[s] = make([]float64, n+1)
		for i := range best[s] {
			best[s][i] = math.Inf(1)
		}
	}
	best[0][n] = 0
	for s := 1; s <= stages; s++ {
		for i := 0; i <= n-s; i++ {
			for j := i + 1; j <= n-(s-1); j++ {
				if rest := best[s-1][j]; !math.IsInf(rest, 1) {
					best[s][i] = math.Min(best[s][i], add(i, j, rest))
				}
			}
		}
	}
	return best
}
