package kernel

import "math"

// Softmax sets each row of cols values of dst to the softmax of the row of src. dst may be src. A row with NaN, or
// with an infinite largest value, becomes NaN.
func Softmax(dst, src []float32, cols int) {
	checkRows("Softmax", len(src), cols)
	checkLen("Softmax", "dst", len(dst), len(src))
	for at := 0; at < len(src); at += cols {
		x, y := src[at:at+cols], dst[at:at+cols]
		sum := expShifted(y, x, maxOf(x))
		scaled(y, float32(1/sum), y)
	}
}

// CrossEntropy handles one row of logits: it returns -log softmax(logits)[target] in float64 and overwrites logits
// with the gradient weight*(softmax(logits) - onehot(target)).
func CrossEntropy(logits []float32, target int, weight float32) float64 {
	checkTarget("CrossEntropy", target, len(logits))
	top, atTarget := maxOf(logits), logits[target]
	sum := expShifted(logits, logits, top)
	scaled(logits, float32(float64(weight)/sum), logits)
	logits[target] -= weight
	return math.Log(sum) + float64(top) - float64(atTarget)
}

// CrossEntropyRows is CrossEntropy over rows of cols logits: loss[r] is that of row r, whose gradient has the weight
// weight[r]*scale. A row of weight 0 has loss 0 and a gradient of zeros, whatever its logits and its target.
func CrossEntropyRows(loss []float64, logits []float32, cols int, targets []int32, weight []float32, scale float64) {
	rows := checkRows("CrossEntropyRows", len(logits), cols)
	checkLen("CrossEntropyRows", "loss", len(loss), rows)
	checkLen("CrossEntropyRows", "targets", len(targets), rows)
	checkLen("CrossEntropyRows", "weight", len(weight), rows)
	for r, w := range weight[:rows] {
		if w != 0 {
			checkTarget("CrossEntropyRows", int(targets[r]), cols)
		}
	}
	q := loop{part: crossEntropyPart, n: rows, chunk: rowChunk(cols), a: logits, cols: cols, sums: loss, targets: targets, b: weight, scale: scale}
	if shareLoop(len(logits)) {
		finishLoop(&q)
		return
	}
	crossEntropyPart(&q, 0, rows)
}

func crossEntropyPart(q *loop, from, to int) {
	for r := from; r < to; r++ {
		row := q.a[r*q.cols : (r+1)*q.cols]
		w := q.b[r]
		if w == 0 {
			q.sums[r] = 0
			clear(row)
			continue
		}
		q.sums[r] = CrossEntropy(row, int(q.targets[r]), float32(float64(w)*q.scale))
	}
}

// CrossEntropyLoss is CrossEntropy without the gradient; logits are only read.
func CrossEntropyLoss(logits []float32, target int) float64 {
	checkTarget("CrossEntropyLoss", target, len(logits))
	top := maxOf(logits)
	var tile [256]float32
	var sum float64
	for at := 0; at < len(logits); at += len(tile) {
		x := logits[at:min(at+len(tile), len(logits))]
		sum += expShifted(tile[:len(x)], x, top)
	}
	return math.Log(sum) + float64(top) - float64(logits[target])
}

// vectorChunk is what a vector routine gets at once: some microseconds of work, since assembly cannot be preempted.
const vectorChunk = 4096

// maxOf returns the largest value of x, -Inf of none. NaN is passed over: it shows in the sum of exponentials.
func maxOf(x []float32) float32 {
	top := float32(math.Inf(-1))
	if l := active.Load().vectors; l != scalar {
		var tops [lanes16]float32
		for i := range tops {
			tops[i] = top
		}
		for len(x) >= int(l) {
			n := min(len(x), vectorChunk) / int(l)
			maxVectors(l, &tops[0], &x[0], n)
			x = x[n*int(l):]
		}
		for _, v := range tops {
			top = max(top, v)
		}
	}
	for _, v := range x {
		if v > top {
			top = v
		}
	}
	return top
}

// expShifted sets dst = exp(src-shift) and returns the sum of dst. The summands are taken in an order fixed by their
// index, so trailing zeros do not change the sum by a bit.
func expShifted(dst, src []float32, shift float32) float64 {
	dst = dst[:len(src)]
	var sum float64
	l := active.Load().vectors
	if l == scalar {
		for i, v := range src {
			e := expf(v - shift)
			dst[i] = e
			sum += float64(e)
		}
		return sum
	}
	for len(src) > 0 {
		var sums [lanes16]float32
		n := min(len(src), vectorChunk)
		whole := n / int(l) * int(l)
		if whole > 0 {
			expVectors(l, &dst[0], &src[0], 1, shift, &sums[0], whole/int(l))
		}
		if whole < n {
			var end [lanes16]float32 // the end of the row, and values whose exponential is 0
			for i := range end {
				end[i] = float32(math.Inf(-1))
			}
			copy(end[:], src[whole:n])
			expVectors(l, &end[0], &end[0], 1, shift, &sums[0], 1)
			copy(dst[whole:n], end[:])
		}
		for _, s := range sums {
			sum += float64(s)
		}
		dst, src = dst[n:], src[n:]
	}
	return sum
}

// maxRows raises tops[r] to the largest of width values of row r of x, NaN passed over. Like expRows and gradRows it
// works on whole vectors, so rows must have room for them.
func maxRows(tops, x []float32, ld, width int) {
	if l := active.Load().vectors; l != scalar {
		maxRowsVectors(l, &tops[0], &x[0], ld, len(tops), (width+int(l)-1)/int(l))
		return
	}
	for r := range tops {
		for _, v := range x[r*ld : r*ld+width] {
			if v > tops[r] {
				tops[r] = v
			}
		}
	}
}

// expRows sets row r of x, width values, to exp(x-shift[r]) and sums[r] to its sum. x must be less than shift[r]+88, or
// NaN.
func expRows(sums, x, shift []float32, ld, width int) {
	if l := active.Load().vectors; l != scalar {
		expRowsVectors(l, &sums[0], &x[0], &shift[0], ld, len(sums), (width+int(l)-1)/int(l))
		return
	}
	for r := range sums {
		sums[r] = float32(expShifted(x[r*ld:r*ld+width], x[r*ld:r*ld+width], shift[r]))
	}
}

// gradRows sets row r of p, width values, to exp(p-lse[r]) and then that of ds to p*(ds-d[r]). p must be less than
// lse[r]+88, or NaN.
func gradRows(p, ds, lse, d []float32, ld, width int) {
	if l := active.Load().vectors; l != scalar {
		gradRowsVectors(l, &p[0], &ds[0], &lse[0], &d[0], ld, len(lse), (width+int(l)-1)/int(l))
		return
	}
	for r := range lse {
		row := p[r*ld : r*ld+width]
		expShifted(row, row, lse[r])
		for i, v := range row {
			ds[r*ld+i] = v * (ds[r*ld+i] - d[r])
		}
	}
}

// timesRows sets row r of dst, cols values, to factors[r] times that of src; dst may be src.
func timesRows(dst []float32, lddst int, src []float32, ldsrc int, factors []float32, cols int) {
	done := 0
	if l := active.Load().vectors; l != scalar && cols >= int(l) {
		done = cols / int(l) * int(l)
		scaleRowsVectors(l, &dst[0], lddst, &src[0], ldsrc, &factors[0], len(factors), done/int(l))
	}
	for r, f := range factors {
		for j := done; j < cols; j++ {
			dst[r*lddst+j] = f * src[r*ldsrc+j]
		}
	}
}
