package train

import (
	"context"
	"fmt"

	"moetor/optimizer"
)

// Bench does optimizer steps of the first stage and nothing else: no validation, no metrics, no checkpoint. each gets the
// report of every step and ends the bench with an error. The trainer is of no further use.
func (t *Trainer) Bench(ctx context.Context, steps int, each func(*Report) error) error {
	defer t.close()
	if err := t.enter(ctx, 0, optimizer.Position{}); err != nil {
		return err
	}
	if err := t.refer(ctx, ""); err != nil {
		return fmt.Errorf("stage %s: %w", t.stage.cfg.Name, err)
	}
	for range steps {
		t.rec.StartStep(t.pos.Step + 1)
		r, err := t.step(ctx)
		if err != nil {
			return fmt.Errorf("%s step %d: %w", t.stage.cfg.Name, t.pos.Step+1, err)
		}
		r.timed(t, t.rec.EndStep())
		if err := each(&r); err != nil {
			return err
		}
	}
	return nil
}
