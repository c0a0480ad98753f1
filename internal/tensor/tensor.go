// Package tensor holds the three value types that the model, the optimizer and the checkpoints share:
// [Mat], a row-major view; [Param], a named weight with its gradient; [Arena], the memory of one micro-batch.
package tensor

import "fmt"

// A Mat is a row-major float32 matrix view. Row r is Data[r*Stride : r*Stride+Cols].
type Mat struct {
	Rows, Cols, Stride int
	Data               []float32
}

// NewMat allocates a zeroed contiguous matrix.
func NewMat(rows, cols int) Mat {
	return Mat{Rows: rows, Cols: cols, Stride: cols, Data: make([]float32, rows*cols)}
}

// MatOf views data as a contiguous rows x cols matrix. It panics if data is too short: that is a programming error.
func MatOf(rows, cols int, data []float32) Mat {
	return Mat{Rows: rows, Cols: cols, Stride: cols, Data: data[:rows*cols]}
}

// Row returns row r.
func (m Mat) Row(r int) []float32 { return m.Data[r*m.Stride : r*m.Stride+m.Cols] }

// RowRange views rows [from, to).
func (m Mat) RowRange(from, to int) Mat {
	v := Mat{Rows: to - from, Cols: m.Cols, Stride: m.Stride}
	if v.Rows > 0 {
		v.Data = m.Data[from*m.Stride : (to-1)*m.Stride+m.Cols]
	}
	return v
}

// ColRange views columns [from, to); it shares memory with m and keeps m's stride.
func (m Mat) ColRange(from, to int) Mat {
	v := Mat{Rows: m.Rows, Cols: to - from, Stride: m.Stride}
	if m.Rows > 0 {
		v.Data = m.Data[from : (m.Rows-1)*m.Stride+to]
	}
	return v
}

// Contiguous reports whether the rows follow each other without gaps.
func (m Mat) Contiguous() bool { return m.Stride == m.Cols || m.Rows <= 1 }

// A Param is a named view into the model's one block of weights and its twin of gradients.
// Name is the Hugging Face deepseek_v3 name; matrices are [out, in].
type Param struct {
	Name        string
	Shape       []int     // global shape; a Param is never split inside the model
	Value, Grad []float32 // len = product of Shape
	Expert      bool      // routed expert: reduced over its replicas, not over all data ranks
	Decay       bool      // weight decay applies (matrices only)
	// Tied marks the copy of model.embed_tokens.weight that the last pipeline stage keeps for the MTP
	// modules and a tied head. It carries the same Name as the first stage's Param and the same values;
	// their gradients are added before the reduction over data ranks, so the copies stay equal to the bit.
	Tied bool
}

// Rows is the first dimension; a shard of a Param is a range of rows.
func (p *Param) Rows() int { return p.Shape[0] }

// RowLen is the number of elements of a row.
func (p *Param) RowLen() int {
	n := 1
	for _, d := range p.Shape[1:] {
		n *= d
	}
	return n
}

// Len is the number of elements.
func (p *Param) Len() int { return p.Rows() * p.RowLen() }

// Mat views the value as a matrix (a vector is one row).
func (p *Param) Mat() Mat { return p.view(p.Value) }

// GradMat views the gradient as a matrix.
func (p *Param) GradMat() Mat { return p.view(p.Grad) }

func (p *Param) view(d []float32) Mat {
	if len(p.Shape) == 1 {
		return MatOf(1, p.Shape[0], d)
	}
	return MatOf(p.Rows(), p.RowLen(), d)
}

func (p *Param) String() string { return fmt.Sprintf("%s%v", p.Name, p.Shape) }

// Allocate gives every param its place in one block of values and one of gradients and returns both blocks.
func Allocate(params []*Param) (values, grads []float32) {
	n := 0
	for _, p := range params {
		n += p.Len()
	}
	values, grads = make([]float32, n), make([]float32, n)
	at := 0
	for _, p := range params {
		p.Value, p.Grad = values[at:at+p.Len():at+p.Len()], grads[at:at+p.Len():at+p.Len()]
		at += p.Len()
	}
	return values, grads
}
