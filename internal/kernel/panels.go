package kernel

import (
	"runtime"
	"sync/atomic"
)

// panels is a block of op(B), columns j0..j1 and values k0..k1, as panels of the width of a tile. A panel is copied by who
// first needs it, so that it is read from the cache then; threads that share a block begin at different panels.
type panels struct {
	values         []float32      // the copied panels
	state          []atomic.Int32 // of each panel
	count          int            // of panels
	direct         bool           // rows are read in place: only a last panel that does not fill a tile is copied
	j0, j1, k0, k1 int
}

// States of a panel.
const (
	panelEmpty int32 = iota
	panelTaken       // somebody is copying it
	panelReady
)

func (b *panels) depth() int { return b.k1 - b.k0 }

// begin empties b for another block.
func (b *panels) begin(t *micro, direct bool, j0, j1, k0, k1 int) {
	b.direct, b.j0, b.j1, b.k0, b.k1 = direct, j0, j1, k0, k1
	b.count = (j1 - j0 + t.cols - 1) / t.cols
	if b.count > len(b.state) {
		b.state = make([]atomic.Int32, 2*b.count)
	}
	for i := range b.count {
		b.state[i].Store(panelEmpty)
	}
}

// inPlace reports whether panel i is read where it stands.
func (b *panels) inPlace(t *micro, i int) bool { return b.direct && b.j0+(i+1)*t.cols <= b.j1 }

// panel returns panel i and how far its rows lie apart.
func (b *panels) panel(w *workspace, t *micro, p *product, i int) ([]float32, int) {
	j := b.j0 + i*t.cols
	if b.inPlace(t, i) {
		b.state[i].Store(panelReady)
		return p.b[b.k0*p.ldb+j:], p.ldb
	}
	values := b.values
	if !b.direct {
		values = values[i*t.cols*b.depth():]
	}
	switch state := &b.state[i]; {
	case state.Load() == panelReady:
	case state.CompareAndSwap(panelEmpty, panelTaken):
		w.packB(t, p, values, b.k0, b.k1, j, min(j+t.cols, b.j1))
		state.Store(panelReady)
	default: // another thread is at it, and waits for nobody meanwhile
		for n := 1; state.Load() != panelReady; n++ {
			pause()
			if n%spinPauses == 0 {
				runtime.Gosched()
			}
		}
	}
	return values, t.cols
}
