package kernel

import "fmt"

// Add sets dst += src.
func Add(dst, src []float32) {
	checkLen("Add", "dst", len(dst), len(src))
	dst = dst[:len(src)]
	for i, v := range src {
		dst[i] += v
	}
}

// Axpy sets dst += a*src.
func Axpy(dst []float32, a float32, src []float32) {
	checkLen("Axpy", "dst", len(dst), len(src))
	dst = dst[:len(src)]
	for i, v := range src {
		dst[i] += a * v
	}
}

// Scale sets x *= a.
func Scale(x []float32, a float32) {
	for i := range x {
		x[i] *= a
	}
}

// SumSquares returns the sum of squares of x, in float64 and in index order.
func SumSquares(x []float32) float64 {
	var sum float64
	for _, v := range x {
		sum += float64(v) * float64(v)
	}
	return sum
}

// dot returns the sum of products of x and y, in float64 and in index order.
func dot(x, y []float32) float64 {
	var sum float64
	y = y[:len(x)]
	for i, v := range x {
		sum += float64(v) * float64(y[i])
	}
	return sum
}

// checkLen panics unless a slice holds at least need values.
func checkLen(routine, name string, have, need int) {
	if have < need {
		panic(fmt.Sprintf("kernel.%s: %s has %d values, needs %d", routine, name, have, need))
	}
}

// checkRows panics unless total is a whole number of rows, and returns that number.
func checkRows(routine string, total, cols int) int {
	if cols <= 0 || total%cols != 0 {
		panic(fmt.Sprintf("kernel.%s: %d values are not rows of %d", routine, total, cols))
	}
	return total / cols
}

// checkTarget panics unless target is an index into a row.
func checkTarget(routine string, target, n int) {
	if target < 0 || target >= n {
		panic(fmt.Sprintf("kernel.%s: target %d is not in a row of %d logits", routine, target, n))
	}
}
