package model

import (
	"fmt"
	"testing"
)

// TestMemory: the count is the peak of the arenas, to the value, and the sizes of what else is held, over architectures,
// splits, shapes of the micro-batch and objectives.
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
		c := tiny()
		change(&c)
		settings := Settings{MTPWeight: 0.3}
		if c.Score {
			settings = Settings{Objective: byWeight{}}
		}
		for _, stages := range [][]int{{0}, {0, 1, 2}} {
			for _, l := range []Load{{Seqs: 1, Len: 7}, {Seqs: 3, Len: 16}} {
				l.Judged = c.Score
				p := cut(t, c, 5, stages...)
				p.step(t, []Micro{micro(c, 1, l.Seqs, l.Len)}, settings)
				for i, ch := range p {
					at := fmt.Sprintf("%s, stage %d of %d, %d x %d", name, i, len(p), l.Seqs, l.Len)
					ch.compareMemory(t, at, MemoryOf(c, ch.Part(), l))
				}
			}
		}
	}
}

func (c *Chunk) compareMemory(t *testing.T, at string, got Memory) {
	t.Helper()
	pass := c.free[0]
	same := func(what string, got int64, want int) {
		t.Helper()
		if got != int64(want) {
			t.Errorf("%s: %s are %d values, counted %d", at, what, want, got)
		}
	}
	same("weights", got.Dense+got.Expert+got.Tied, len(c.values))
	same("activations", got.Pass, int(c.ArenaPeaks()[0]))
	if len(c.blocks) > 0 {
		r := c.blocks[0].attention.rope
		same("tables", got.Tables, len(r.cos)+len(r.sin))
	}
	index := len(pass.position) + len(pass.end) + len(pass.real)
	for _, r := range pass.depthReal {
		index += len(r)
	}
	blocks := pass.blocks
	if c.head != nil {
		same("logits", got.Logits, len(c.head.logits))
		for i := range pass.head.mtp {
			blocks = append(blocks[:len(blocks):len(blocks)], pass.head.mtp[i].block)
		}
		same("head's rows", got.Head, 2*len(pass.position)+len(c.head.slope)+len(c.head.shifted)+len(c.head.weights))
	}
	for _, b := range blocks {
		index += len(b.moe.chosen) + len(b.moe.place) + 2*len(b.moe.rows) + 2*len(b.moe.fill)
	}
	same("index", got.Index, index)
}

// TestMemoryPadding: padding takes no more than real tokens do.
func TestMemoryPadding(t *testing.T) {
	c := tiny()
	p := cut(t, c, 5, 0)
	m := micro(c, 1, 2, 16)
	m.Valid = []int32{5, 16}
	for i := 5; i < 16; i++ {
		m.Weight[i] = 0
	}
	p.step(t, []Micro{m}, Settings{MTPWeight: 0.3})
	most := MemoryOf(c, Whole(c), Load{Seqs: 2, Len: 16}).Pass
	if got := p[0].ArenaPeaks()[0]; got > most || got < most/2 {
		t.Errorf("%d values in use with padding, counted %d at most", got, most)
	}
}
