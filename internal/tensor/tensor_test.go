package tensor

import (
	"slices"
	"testing"
)

// numbered is a rows x cols view with the given stride; element (r, c) is 100 r + c, what lies between rows is -1.
func numbered(rows, cols, stride int) Mat {
	m := Mat{Rows: rows, Cols: cols, Stride: stride, Data: make([]float32, (rows-1)*stride+cols)}
	for i := range m.Data {
		m.Data[i] = -1
		if r, c := i/stride, i%stride; c < cols {
			m.Data[i] = float32(100*r + c)
		}
	}
	return m
}

func rowsOf(m Mat) (all [][]float32) {
	for r := range m.Rows {
		all = append(all, m.Row(r))
	}
	return all
}

func panics(f func()) (yes bool) {
	defer func() { yes = recover() != nil }()
	f()
	return false
}

func TestMatViews(t *testing.T) {
	for _, stride := range []int{5, 7} { // without and with a gap between rows
		m := numbered(4, 5, stride)
		for _, c := range []struct {
			what string
			got  Mat
			want [][]float32
		}{
			{"all", m, [][]float32{{0, 1, 2, 3, 4}, {100, 101, 102, 103, 104}, {200, 201, 202, 203, 204}, {300, 301, 302, 303, 304}}},
			{"rows 1..3", m.RowRange(1, 3), [][]float32{{100, 101, 102, 103, 104}, {200, 201, 202, 203, 204}}},
			{"last row", m.RowRange(3, 4), [][]float32{{300, 301, 302, 303, 304}}},
			{"no row", m.RowRange(2, 2), nil},
			{"no row at the end", m.RowRange(4, 4), nil},
			{"columns 1..3", m.ColRange(1, 3), [][]float32{{1, 2}, {101, 102}, {201, 202}, {301, 302}}},
			{"last column", m.ColRange(4, 5), [][]float32{{4}, {104}, {204}, {304}}},
			{"no column", m.ColRange(5, 5), [][]float32{{}, {}, {}, {}}},
			{"columns of rows", m.RowRange(1, 3).ColRange(2, 4), [][]float32{{102, 103}, {202, 203}}},
			{"rows of columns", m.ColRange(2, 4).RowRange(1, 3), [][]float32{{102, 103}, {202, 203}}},
			{"columns of no row", m.RowRange(1, 1).ColRange(2, 4), nil},
		} {
			if got := rowsOf(c.got); !slices.EqualFunc(got, c.want, slices.Equal[[]float32]) {
				t.Errorf("stride %d, %s: %v, want %v", stride, c.what, got, c.want)
			}
			if c.got.Stride != stride {
				t.Errorf("stride %d, %s: stride became %d", stride, c.what, c.got.Stride)
			}
			// A view ends with its last element: kernels check lengths against it.
			if n := (c.got.Rows-1)*stride + c.got.Cols; c.got.Rows > 0 && len(c.got.Data) != n {
				t.Errorf("stride %d, %s: %d elements, want %d", stride, c.what, len(c.got.Data), n)
			}
		}
		m.RowRange(1, 3).ColRange(2, 4).Row(1)[1] = 7 // shares memory
		if m.Row(2)[3] != 7 {
			t.Errorf("stride %d: a write through a view is lost", stride)
		}
		if !panics(func() { m.RowRange(3, 5) }) || !panics(func() { m.RowRange(3, 4).Row(1) }) {
			t.Errorf("stride %d: a row behind the last was given out", stride)
		}
	}
}

func TestContiguous(t *testing.T) {
	for _, c := range []struct {
		rows, cols, stride int
		want               bool
	}{{3, 4, 4, true}, {3, 4, 5, false}, {1, 4, 5, true}, {0, 4, 5, true}, {2, 0, 1, false}} {
		if got := (Mat{Rows: c.rows, Cols: c.cols, Stride: c.stride}).Contiguous(); got != c.want {
			t.Errorf("%dx%d, stride %d: %v", c.rows, c.cols, c.stride, got)
		}
	}
}

func TestMatOf(t *testing.T) {
	data := []float32{1, 2, 3, 4, 5, 6, 7}
	m := MatOf(2, 3, data)
	if got := rowsOf(m); !slices.EqualFunc(got, [][]float32{{1, 2, 3}, {4, 5, 6}}, slices.Equal[[]float32]) || len(m.Data) != 6 {
		t.Errorf("%v", m)
	}
	m.Data[0] = 9
	if data[0] != 9 {
		t.Error("MatOf copies")
	}
	if !panics(func() { MatOf(2, 3, make([]float32, 5)) }) {
		t.Error("5 values were taken for a 2x3 matrix")
	}
	if n := NewMat(2, 3); n.Rows != 2 || n.Cols != 3 || n.Stride != 3 || !slices.Equal(n.Data, make([]float32, 6)) {
		t.Errorf("NewMat: %v", n)
	}
}

func TestAllocate(t *testing.T) {
	params := []*Param{
		{Name: "a", Shape: []int{2, 3}},
		{Name: "norm", Shape: []int{4}},
		{Name: "cube", Shape: []int{2, 1, 5}},
	}
	values, grads := Allocate(params)
	if len(values) != 20 || len(grads) != 20 {
		t.Fatalf("%d values, %d gradients, want 20", len(values), len(grads))
	}
	for i := range values {
		values[i], grads[i] = float32(i), float32(-i)
	}
	for i, want := range []struct {
		rows, rowLen, from, to int
		mat                    [2]int // a vector is one row; dims after the first are one
	}{{2, 3, 0, 6, [2]int{2, 3}}, {4, 1, 6, 10, [2]int{1, 4}}, {2, 5, 10, 20, [2]int{2, 5}}} {
		p := params[i]
		if p.Rows() != want.rows || p.RowLen() != want.rowLen || p.Len() != want.to-want.from {
			t.Errorf("%v: %d rows of %d, %d elements", p, p.Rows(), p.RowLen(), p.Len())
		}
		if !slices.Equal(p.Value, values[want.from:want.to]) || !slices.Equal(p.Grad, grads[want.from:want.to]) {
			t.Errorf("%v: holds %v and %v", p, p.Value, p.Grad)
		}
		// Growing one parameter's slice must not reach into the next.
		if cap(p.Value) != len(p.Value) || cap(p.Grad) != len(p.Grad) {
			t.Errorf("%v: room behind its end", p)
		}
		m, g := p.Mat(), p.GradMat()
		if m.Rows != want.mat[0] || m.Cols != want.mat[1] || !m.Contiguous() || g.Rows != m.Rows || g.Cols != m.Cols {
			t.Errorf("%v: views are %dx%d and %dx%d, want %v", p, m.Rows, m.Cols, g.Rows, g.Cols, want.mat)
		}
		m.Data[0], g.Data[0] = 77, 78
		if values[want.from] != 77 || grads[want.from] != 78 {
			t.Errorf("%v: its views are copies", p)
		}
	}
	if s := params[0].String(); s != "a[2 3]" {
		t.Errorf("printed as %q", s)
	}
	if v, g := Allocate(nil); len(v) != 0 || len(g) != 0 {
		t.Errorf("of nothing: %d and %d", len(v), len(g))
	}
}
