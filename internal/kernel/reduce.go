package kernel

// Reductions add in float64 and in an order fixed by the index alone: summand i goes to running sum i%32, and the 32 sums
// are added in halves. A product of two float32 is exact in float64, so plain Go and both vector routines give the same
// bits, fused or not.
const sumLanes = 32

// sumChunk is where SumSquares begins a new sum, so that threads can share it and the result does not depend on them.
const sumChunk = loopChunk

type laneSums [sumLanes]float64

// total adds the running sums in halves.
func (s *laneSums) total() float64 {
	for half := sumLanes / 2; half > 0; half /= 2 {
		for i := range half {
			s[i] += s[i+half]
		}
	}
	return s[0]
}

// SumSquares returns the sum of squares of x in float64. Chunks of 16,384 values are summed apart and added in order.
func SumSquares(x []float32) float64 {
	if shareLoop(len(x)) {
		q := &loop{part: sumSquaresPart, n: len(x), chunk: sumChunk, a: x}
		q.sums = partials((q.n + q.chunk - 1) / q.chunk)
		workers.runLoop(q)
		var sum float64
		for _, s := range q.sums {
			sum += s
		}
		workers.release()
		return sum
	}
	var sum float64
	for from := 0; from < len(x); from += sumChunk {
		sum += sumSquares(x[from:min(from+sumChunk, len(x))])
	}
	return sum
}

func sumSquaresPart(q *loop, from, to int) { q.sums[from/q.chunk] = sumSquares(q.a[from:to]) }

func sumSquares(x []float32) float64 {
	var s laneSums
	if l := active.Load().vectors; l != scalar {
		for len(x) >= sumLanes {
			n := min(len(x), vectorChunk) / sumLanes
			sumSquaresVectors(l, &s[0], &x[0], n)
			x = x[n*sumLanes:]
		}
	}
	for i, v := range x {
		s[i%sumLanes] += float64(v) * float64(v)
	}
	return s.total()
}

// dot returns the inner product of x and y.
func dot(x, y []float32) float64 {
	var s laneSums
	y = y[:len(x)]
	if l := active.Load().vectors; l != scalar {
		for len(x) >= sumLanes {
			n := min(len(x), vectorChunk) / sumLanes
			dotVectors(l, &s[0], &x[0], &y[0], n)
			x, y = x[n*sumLanes:], y[n*sumLanes:]
		}
	}
	for i, v := range x {
		s[i%sumLanes] += float64(v) * float64(y[i])
	}
	return s.total()
}

// dotWeighted returns the inner product of x and y*gain.
func dotWeighted(x, y, gain []float32) float64 {
	var s laneSums
	y, gain = y[:len(x)], gain[:len(x)]
	if l := active.Load().vectors; l != scalar {
		for len(x) >= sumLanes {
			n := min(len(x), vectorChunk) / sumLanes
			dotWeightedVectors(l, &s[0], &x[0], &y[0], &gain[0], n)
			n *= sumLanes
			x, y, gain = x[n:], y[n:], gain[n:]
		}
	}
	for i, v := range x {
		s[i%sumLanes] += float64(v) * float64(y[i]*gain[i])
	}
	return s.total()
}

var partialSums []float64

// partials returns n values of scratch for a reduction; the pool must be taken.
func partials(n int) []float64 {
	if cap(partialSums) < n {
		partialSums = make([]float64, n, 2*n)
	}
	return partialSums[:n]
}
