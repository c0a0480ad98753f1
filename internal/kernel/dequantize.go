package kernel

import "moetor/internal/lowp"

// Dequantize is [lowp.Dequantize] into a matrix without gaps between rows, on all threads.
func Dequantize(dst []float32, src *lowp.Matrix) {
	checkLen("Dequantize", "dst", len(dst), src.Rows*src.Cols)
	if src.Rows == 0 || src.Cols == 0 {
		return
	}
	if !shareLoop(src.Rows * src.Cols) {
		lowp.Dequantize(dst, src.Cols, src)
		return
	}
	dequantizeJob.dst, dequantizeJob.src, dequantizeJob.chunk = dst, src, rowChunk(src.Cols)
	workers.run((src.Rows+dequantizeJob.chunk-1)/dequantizeJob.chunk, dequantizePart)
	dequantizeJob.dst, dequantizeJob.src = nil, nil // hold on to nobody's matrices
	workers.release()
}

// dequantizeJob is written by who holds the pool.
var dequantizeJob struct {
	dst   []float32
	src   *lowp.Matrix
	chunk int
}

func dequantizePart(i int) {
	j := &dequantizeJob
	from := i * j.chunk
	rows := min(j.chunk, j.src.Rows-from)
	lowp.DequantizePart(j.dst[from*j.src.Cols:], j.src.Cols, j.src, from, rows, 0, j.src.Cols)
}
