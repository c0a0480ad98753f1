package tensor

import (
	"math/rand/v2"
	"testing"
)

// A grant is what an arena has handed out, filled with a number of its own.
type grant struct {
	data []float32
	mark float32
}

func (g grant) whole() bool {
	for _, v := range g.data {
		if v != g.mark {
			return false
		}
	}
	return true
}

// TestArenaNeverSharesMemory: grants of random sizes, nested marks and releases, over the growth of many blocks. What is
// in use keeps its content, whoever comes later; after a release the arena stands where it stood at the mark.
func TestArenaNeverSharesMemory(t *testing.T) {
	rng := rand.New(rand.NewPCG(3, 1))
	for _, first := range []int{0, 1, 100, minBlock} {
		a := NewArena(first)
		if a.Cap() != first || a.InUse() != 0 {
			t.Fatalf("new: %d held, %d in use, want %d and 0", a.Cap(), a.InUse(), first)
		}
		type level struct {
			mark  Mark
			live  int
			inUse int
		}
		var live []grant
		var levels []level
		next, peak := float32(0), 0
		for i := range 3000 {
			switch r := rng.IntN(10); {
			case r < 6:
				n := rng.IntN(200)
				if rng.IntN(20) == 0 {
					n = rng.IntN(3 * minBlock)
				}
				before := a.InUse()
				g := grant{a.Floats(n), next}
				next++
				if len(g.data) != n || cap(g.data) != n {
					t.Fatalf("asked for %d: length %d, capacity %d", n, len(g.data), cap(g.data))
				}
				// Blocks are filled in units of 16 floats; a grant that opens a new block leaves a gap at the end of the last.
				if used := a.InUse() - before; used != (n+15)/16*16 {
					t.Fatalf("%d floats used %d", n, used)
				}
				for j := range g.data {
					g.data[j] = g.mark
				}
				live = append(live, g)
			case r < 8:
				levels = append(levels, level{a.Mark(), len(live), a.InUse()})
			case len(levels) > 0:
				l := levels[len(levels)-1]
				if levels = levels[:len(levels)-1]; rng.IntN(20) == 0 {
					l, levels = level{}, nil
					a.Reset()
				} else {
					a.Release(l.mark)
				}
				live = live[:l.live]
				if a.InUse() != l.inUse {
					t.Fatalf("%d in use after a release to %d", a.InUse(), l.inUse)
				}
			}
			peak = max(peak, a.InUse())
			if a.InUse() > a.Cap() || a.Peak() != peak {
				t.Fatalf("%d in use of %d, peak %d, want %d", a.InUse(), a.Cap(), a.Peak(), peak)
			}
			if i%50 == 0 {
				for k, g := range live {
					if !g.whole() {
						t.Fatalf("start %d, step %d: grant %d of %d was overwritten", first, i, k, len(live))
					}
				}
			}
		}
	}
}

// TestArenaAlignment: every grant begins a multiple of 16 floats, one cache line, behind the first of its block.
func TestArenaAlignment(t *testing.T) {
	a := NewArena(1000)
	buf, at := a.blocks[0].buf, 0
	for _, n := range []int{1, 16, 17, 0, 31, 5} {
		s := a.Floats(n)
		if n > 0 && &s[0] != &buf[at] {
			t.Errorf("%d floats do not begin at %d", n, at)
		}
		at += (n + 15) / 16 * 16
	}
	m := a.Mat(3, 5)
	if m.Rows != 3 || m.Cols != 5 || m.Stride != 5 || len(m.Data) != 15 || &m.Data[0] != &buf[at] {
		t.Errorf("matrix %dx%d, stride %d, %d elements", m.Rows, m.Cols, m.Stride, len(m.Data))
	}
}

// TestArenaGrows by whole blocks, and what was handed out before stays where it was.
func TestArenaGrows(t *testing.T) {
	a := NewArena(64)
	first := a.Floats(60)
	first[59] = 5
	a.Floats(1) // 64 are full
	if a.Cap() != 64+minBlock {
		t.Errorf("holds %d, want %d: no block is smaller than %d", a.Cap(), 64+minBlock, minBlock)
	}
	a.Floats(10 * minBlock)
	if want := 64 + 11*minBlock; a.Cap() != want {
		t.Errorf("holds %d, want %d: a large request has a block of its own size", a.Cap(), want)
	}
	a.Floats(1)
	if want := 64 + 11*minBlock; a.Cap() != want+want/2 {
		t.Errorf("holds %d, want %d: it grows by half of what it has, so that the number of blocks stays small", a.Cap(), want+want/2)
	}
	if first[59] != 5 {
		t.Error("growth moved or cleared what was in use")
	}
	peak := a.InUse()
	a.Reset()
	if a.InUse() != 0 || a.Peak() != peak || peak != 64+16+10*minBlock+16 {
		t.Errorf("after a reset: %d in use, peak %d, want 0 and %d", a.InUse(), a.Peak(), 64+16+10*minBlock+16)
	}
	if again := a.Floats(1); &again[0] != &first[0] {
		t.Error("after a reset the first block is not used first")
	}
}

func TestArenaMarkOfEmpty(t *testing.T) {
	a := NewArena(0)
	m := a.Mark() // before there is any block
	a.Floats(10)
	a.Floats(2 * minBlock)
	a.Release(m)
	if a.InUse() != 0 {
		t.Errorf("%d in use after a release to the start", a.InUse())
	}
	NewArena(0).Reset() // must not fail
}

// TestWarmArenaAllocatesNothing: after one micro-batch no smaller one, and no other order of it, needs memory.
func TestWarmArenaAllocatesNothing(t *testing.T) {
	a := NewArena(100)
	microBatch := func(scale int) {
		a.Floats(30 * scale)
		m := a.Mark()
		a.Mat(scale, 4000)
		a.Floats(20_000 * scale)
		a.Release(m)
		a.Mat(3*scale, 4000)
		a.Reset()
	}
	microBatch(10)
	held := a.Cap()
	for _, scale := range []int{10, 7, 1, 0} {
		if n := testing.AllocsPerRun(20, func() { microBatch(scale) }); n != 0 {
			t.Errorf("scale %d: %v allocations", scale, n)
		}
	}
	if a.Cap() != held {
		t.Errorf("holds %d, held %d", a.Cap(), held)
	}
}
