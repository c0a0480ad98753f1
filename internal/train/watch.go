package train

import (
	"context"
	"encoding/json"
	"fmt"
	"math"
	"os"
	"path/filepath"
)

// watched is a line of the report on low precision (precision.watch): what rounding did to one operand of this rank in one
// step.
type watched struct {
	Stage     string   `json:"stage"`
	Step      int64    `json:"step"`
	Layer     int      `json:"layer"` // -1: a weight
	Operand   string   `json:"operand"`
	Amax      float32  `json:"amax"`
	Saturated float64  `json:"saturated"` // share of the values
	Flushed   float64  `json:"flushed"`   // to zero, likewise
	SNR       *float64 `json:"snr_db"`    // null where nothing was lost, or there was nothing
	Values    int      `json:"values"`
}

// watching makes the chunks measure the coming step if it is one to report on.
func (t *Trainer) watching() {
	every := int64(t.run.Precision.Watch)
	if every == 0 {
		return
	}
	for _, c := range t.chunks {
		c.Watch((t.pos.Step+1)%every == 0)
	}
}

func (t *Trainer) watchPath() string {
	return filepath.Join(t.opts.Dir, fmt.Sprintf("precision-rank-%d.jsonl", t.world.Rank()))
}

// openWatch drops from the report what a resumed run will do again, or all of it.
func (t *Trainer) openWatch() error {
	path := t.watchPath()
	if _, err := os.Stat(path); err != nil {
		return nil // there is none
	}
	if t.opts.Resume {
		return trimMetrics(path, t.position())
	}
	if err := os.Remove(path); err != nil {
		return fmt.Errorf("precision.watch: %w", err)
	}
	return nil
}

// reportWatched appends what was measured to the rank's file.
func (t *Trainer) reportWatched(_ context.Context, r *Report) error {
	f, err := os.OpenFile(t.watchPath(), os.O_APPEND|os.O_CREATE|os.O_WRONLY, 0o644)
	if err != nil {
		return fmt.Errorf("precision.watch: %w", err)
	}
	enc := json.NewEncoder(f)
	for _, c := range t.chunks {
		for _, w := range c.Watched() {
			line := watched{Stage: t.stage.cfg.Name, Step: r.Step, Layer: w.Layer, Operand: w.Operand, Amax: w.Amax, Values: w.Values}
			if w.Values > 0 {
				line.Saturated, line.Flushed = float64(w.Saturated)/float64(w.Values), float64(w.Flushed)/float64(w.Values)
			}
			if snr := w.SNR(); !math.IsInf(snr, 0) && !math.IsNaN(snr) {
				line.SNR = &snr
			}
			if err := enc.Encode(line); err != nil {
				f.Close()
				return fmt.Errorf("precision.watch: %w", err)
			}
		}
		c.Watch(false) // validation is not measured
	}
	return f.Close()
}
