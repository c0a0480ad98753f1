package model

import (
	"context"
	"fmt"
	"testing"

	"moetor/internal/kernel"
)

// TestMemory: the count is the peak of the arenas, to the value, and the sizes of what else is held, over architectures,
// splits, shapes of the micro-batch, objectives, recipes and what is recomputed.
func TestMemory(t *testing.T) {
	shapes := map[string]func(*Config){
		"tiny":       func(*Config) {},
		"plain":      func(c *Config) { c.Attention.QLora, c.MoE.Shared, c.MTP.Depth = 0, 0, 0 },
		"balance":    func(c *Config) { c.MoE.SeqAux = 0.01 },
		"two depths": func(c *Config) { c.MTP.Depth = 2 },
		"tied":       func(c *Config) { c.TieEmbed, c.MTP.Depth = true, 0 },
		"dense":      func(c *Config) { c.DenseLayers, c.MTP.Depth = c.Layers, 0 },
		"reward":     func(c *Config) { *c = c.RewardModel() },
	}
	for name, change := range shapes {
		for recipe, r := range recipes() {
			for _, again := range recomputes() {
				if recipe == "hopper" || recipe != "fp32" && len(again)%len(recomputable) != 0 { // none or all
					continue
				}
				c := tiny()
				change(&c)
				c.Recipe, c.Recompute = r, again
				settings := Settings{MTPWeight: 0.3}
				if c.Score {
					settings = Settings{Objective: byWeight{}}
				}
				for _, stages := range [][]int{{0}, {0, 1, 2}} {
					for _, l := range []Load{{Seqs: 1, Len: 7}, {Seqs: 1, Len: 7, Split: true}, {Seqs: 3, Len: 16}} {
						l.Judged = c.Score
						p := cut(t, c, 5, stages...)
						kept := p.holding(t, micro(c, 1, l.Seqs, l.Len), settings, l.Split)
						for i, ch := range p {
							at := fmt.Sprintf("%s, %s, recompute %v, stage %d of %d, %d x %d", name, recipe, again, i, len(p), l.Seqs, l.Len)
							ch.compareMemory(t, at, l, kept[i])
						}
					}
				}
			}
		}
	}
}

// holding runs a micro-batch and returns how many values each chunk keeps of it between forward and backward. Nothing
// temporary may be left in between.
func (p pipe) holding(t *testing.T, m Micro, s Settings, split bool) []int {
	t.Helper()
	var kept []int
	var x []float32
	var err error
	ctx := context.Background()
	clean := func(c *Chunk) {
		t.Helper()
		if n := c.temp.InUse(); n != 0 {
			t.Errorf("%d temporary values are left", n)
		}
	}
	for _, c := range p {
		c.Bind([]Micro{m}, s)
		x, err = c.Forward(ctx, 0, x)
		check(t, err)
		clean(c)
		kept = append(kept, c.flying[0].arena.InUse())
	}
	for i := len(p) - 1; i >= 0; i-- {
		if split {
			x, err = p[i].BackwardInput(ctx, 0, x)
		} else {
			x, err = p[i].Backward(ctx, 0, x)
		}
		check(t, err)
		clean(p[i])
	}
	for _, c := range p {
		if split {
			check(t, c.BackwardWeight(ctx, 0))
		}
		clean(c)
	}
	return kept
}

func (c *Chunk) compareMemory(t *testing.T, at string, l Load, kept int) {
	t.Helper()
	pass := c.free[0]
	same := func(what string, got int64, want int) {
		t.Helper()
		if got != int64(want) {
			t.Errorf("%s: %s are %d values, counted %d", at, what, want, got)
		}
	}
	blocks := map[int]*blockPass{}
	for i, b := range c.blocks {
		blocks[b.layer] = &pass.blocks[i]
	}
	if c.head != nil {
		for i := range pass.head.mtp {
			blocks[c.config.Layers+i] = &pass.head.mtp[i].block
		}
	}
	got := memoryOf(c.config, c.part, l, func(layer int) []int { return blocks[layer].moe.route.Rows() })
	same("weights", got.Dense+got.Expert+got.Tied, len(c.values))
	same("activations", got.Pass, int(c.ArenaPeaks()[0]))
	same("cached activations", got.Kept, kept)
	same("temporary values", got.Temp, int(c.TempPeak()))
	if len(c.blocks) > 0 {
		r := c.blocks[0].attention.rope
		same("tables", got.Tables, len(r.cos)+len(r.sin))
	}
	index := len(pass.all) + len(pass.position) + len(pass.end) + len(pass.real)
	for _, r := range pass.depthReal {
		index += len(r)
	}
	if c.head != nil {
		same("logits", got.Logits, len(c.head.logits))
		same("head's rows", got.Head, 2*len(pass.position)+len(c.head.slope)+len(c.head.shifted)+len(c.head.weights))
	}
	for _, b := range blocks {
		index += len(b.moe.chosen) + len(b.moe.place) + 2*len(b.moe.rows) + 2*len(b.moe.fill)
	}
	same("index", got.Index, index)

	// Scales are in allocations of the sizes that the runtime has.
	if packed := c.PackedBytes(); packed < got.Packed || packed > got.Packed+got.Packed/50+int64(32*len(c.plan.weights)) {
		t.Errorf("%s: packed weights are %d bytes, counted %d", at, packed, got.Packed)
	}
	largest := int64(0)
	for _, m := range c.packer.free {
		largest = max(largest, int64(cap(m.Codes)+max(4*cap(m.Scales), cap(m.Exponents))))
	}
	if n := len(c.packer.free); largest < got.Room || largest > 2*got.Room || n > kernel.Threads() {
		t.Errorf("%s: there are %d places to pack, one with %d bytes, counted %d", at, n, largest, got.Room)
	}

	if c.part.ExpertSize > 1 {
		return
	}
	// Without knowing the experts' rows.
	most := MemoryOf(c.config, c.part, l)
	if d := most.Pass - got.Pass; most.Kept != got.Kept || d < 0 || d > got.Pass/10 || most.Temp < got.Temp {
		t.Errorf("%s: predicted %+v, held %+v", at, most, got)
	}
}

// TestMemoryExperts: rows that come from other ranks take what the count says.
func TestMemoryExperts(t *testing.T) {
	for name, r := range recipes() {
		for _, again := range [][]string{nil, recomputable} {
			c := tiny()
			c.Recipe, c.Recompute = r, again
			l := Load{Seqs: 2, Len: 16}
			m := newMeeting(2, c.MoE.Experts)
			done := make(chan func(), 2)
			for rank := range 2 {
				part := Whole(c)
				part.ExpertRank, part.ExpertSize = rank, 2
				ch, err := New(c, part, 5, m.exchange(rank))
				check(t, err)
				go func() {
					kept := pipe{ch}.holding(t, micro(c, uint64(rank), l.Seqs, l.Len), Settings{MTPWeight: 0.3}, false)
					done <- func() { ch.compareMemory(t, fmt.Sprintf("%s, recompute %v, rank %d", name, again, rank), l, kept[0]) }
				}()
			}
			for _, f := range []func(){<-done, <-done} {
				f()
			}
		}
	}
}

// TestMemoryPadding: padding takes no more than real tokens do.
func TestMemoryPadding(t *testing.T) {
	for _, name := range []string{"fp32", "fp8"} {
		c := tiny()
		c.Recipe = recipes()[name]
		p := cut(t, c, 5, 0)
		m := micro(c, 1, 2, 16)
		m.Valid = []int32{5, 16}
		for i := 5; i < 16; i++ {
			m.Weight[i] = 0
		}
		p.step(t, []Micro{m}, Settings{MTPWeight: 0.3})
		most := MemoryOf(c, Whole(c), Load{Seqs: 2, Len: 16, Split: true})
		if got := p[0].ArenaPeaks()[0]; got > most.Pass || got < most.Pass/2 {
			t.Errorf("%s: %d values in use with padding, counted %d at most", name, got, most.Pass)
		}
		if got := p[0].TempPeak(); got > most.Temp || got < most.Temp/2 {
			t.Errorf("%s: %d temporary values with padding, counted %d at most", name, got, most.Temp)
		}
	}
}
