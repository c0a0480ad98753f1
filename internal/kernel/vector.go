package kernel

import "fmt"

// Add sets dst += src.
func Add(dst, src []float32) {
	checkLen("Add", "dst", len(dst), len(src))
	if shareLoop(len(src)) {
		finishLoop(&loop{part: addPart, n: len(src), chunk: loopChunk, a: dst, b: src})
		return
	}
	add(dst, src)
}

func addPart(q *loop, from, to int) { add(q.a[from:to], q.b[from:to]) }

func add(dst, src []float32) {
	dst = dst[:len(src)]
	if l := active.Load().vectors; l != scalar {
		for len(src) >= int(l) {
			n := min(len(src), vectorChunk) / int(l)
			addVectors(l, &dst[0], &src[0], n)
			n *= int(l)
			dst, src = dst[n:], src[n:]
		}
	}
	for i, v := range src {
		dst[i] += v
	}
}

// Axpy sets dst += a*src, product and sum rounded each.
func Axpy(dst []float32, a float32, src []float32) {
	checkLen("Axpy", "dst", len(dst), len(src))
	if shareLoop(len(src)) {
		finishLoop(&loop{part: axpyPart, n: len(src), chunk: loopChunk, a: dst, x: a, b: src})
		return
	}
	axpy(dst, a, src)
}

func axpyPart(q *loop, from, to int) { axpy(q.a[from:to], q.x, q.b[from:to]) }

func axpy(dst []float32, a float32, src []float32) {
	dst = dst[:len(src)]
	if l := active.Load().vectors; l != scalar {
		for len(src) >= int(l) {
			n := min(len(src), vectorChunk) / int(l)
			axpyVectors(l, &dst[0], a, &src[0], n)
			n *= int(l)
			dst, src = dst[n:], src[n:]
		}
	}
	for i, v := range src {
		dst[i] += float32(a * v) // the conversion forbids fusing
	}
}

// Scale sets x *= a.
func Scale(x []float32, a float32) {
	if shareLoop(len(x)) {
		finishLoop(&loop{part: scalePart, n: len(x), chunk: loopChunk, a: x, x: a})
		return
	}
	scaled(x, a, x)
}

func scalePart(q *loop, from, to int) { scaled(q.a[from:to], q.x, q.a[from:to]) }

// scaled sets dst = a*src; dst may be src.
func scaled(dst []float32, a float32, src []float32) {
	dst = dst[:len(src)]
	if l := active.Load().vectors; l != scalar {
		for len(src) >= int(l) {
			n := min(len(src), vectorChunk) / int(l)
			scaledVectors(l, &dst[0], a, &src[0], n)
			n *= int(l)
			dst, src = dst[n:], src[n:]
		}
	}
	for i, v := range src {
		dst[i] = a * v
	}
}

// Zero sets x to zeros.
func Zero(x []float32) {
	if shareLoop(len(x)) {
		finishLoop(&loop{part: zeroPart, n: len(x), chunk: loopChunk, a: x})
		return
	}
	clear(x)
}

func zeroPart(q *loop, from, to int) { clear(q.a[from:to]) }

// Copy sets dst to src. They must not overlap in part.
func Copy(dst, src []float32) {
	checkLen("Copy", "dst", len(dst), len(src))
	if shareLoop(len(src)) {
		finishLoop(&loop{part: copyPart, n: len(src), chunk: loopChunk, a: dst, b: src})
		return
	}
	copy(dst, src)
}

func copyPart(q *loop, from, to int) { copy(q.a[from:to], q.b[from:to]) }

// Finite reports whether no value is NaN or infinite.
func Finite(x []float32) bool {
	if shareLoop(len(x)) {
		q := &loop{part: finitePart, n: len(x), chunk: loopChunk, a: x}
		q.sums = partials((q.n + q.chunk - 1) / q.chunk)
		workers.runLoop(q)
		sum := 0.0
		for _, s := range q.sums {
			sum += s
		}
		workers.release()
		return sum == 0
	}
	return finite(x)
}

func finitePart(q *loop, from, to int) {
	q.sums[from/q.chunk] = 1
	if finite(q.a[from:to]) {
		q.sums[from/q.chunk] = 0
	}
}

func finite(x []float32) bool {
	var sum float32 // of v-v: 0, or NaN once and for all
	if l := active.Load().vectors; l != scalar {
		var sums [lanes16]float32
		for len(x) >= int(l) {
			n := min(len(x), vectorChunk) / int(l)
			finiteVectors(l, &sums[0], &x[0], n)
			x = x[n*int(l):]
		}
		for _, s := range sums {
			sum += s
		}
	}
	for _, v := range x {
		sum += v - v
	}
	return sum == 0
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
