package train

import (
	"context"
	"fmt"
	"os"
	"path/filepath"
)

// A hook is work on a cadence: after every Every-th step, and after the last step of a launch if AtEnd.
type hook struct {
	Every int64
	AtEnd bool
	Do    func(ctx context.Context, r *Report) error
}

func (h hook) due(step int64, last bool) bool {
	return (h.Every > 0 && step%h.Every == 0) || (last && h.AtEnd)
}

// hooks are the cadences of every stage, in the order they run: validation first, so that its figure stands in the
// metrics line of its step.
func (t *Trainer) hooks() []hook {
	return []hook{
		{Every: int64(t.run.Precision.Watch), Do: t.reportWatched},
		{Every: int64(t.run.Run.EvalEvery), AtEnd: true, Do: t.validate},
		{Every: 1, Do: t.logStep},
		{Every: int64(t.run.Checkpoint.Every), AtEnd: true, Do: t.save},
	}
}

// validate measures the loss on the held-out split.
func (t *Trainer) validate(ctx context.Context, r *Report) error {
	if t.stage.val == nil {
		return nil
	}
	s, err := t.evaluate(ctx, t.stage.val)
	if err != nil {
		return fmt.Errorf("validation: %w", err)
	}
	loss := s.Loss / s.Weight
	r.ValLoss = &loss
	for name, v := range t.stage.named(s, "val_") {
		r.Sums[name] = v
	}
	r.stop = r.stop || s.Stop
	return nil
}

// logStep writes the metrics line and shows the step.
func (t *Trainer) logStep(_ context.Context, r *Report) error {
	if !t.root() {
		return nil
	}
	if err := t.metrics.write(r); err != nil {
		return err
	}
	if t.opts.Show != nil {
		total := t.stage.steps
		due := r.ValLoss != nil || r.Step == total || r.Step%int64(max(1, t.run.Run.LogEvery)) == 0
		t.opts.Show(r, r.line(total), total, due)
	}
	return nil
}

// A metricsWriter appends lines to metrics.jsonl.
type metricsWriter struct{ f *os.File }

// openMetrics opens metrics.jsonl. On a resume the lines of steps after the checkpoint, which will be done again, are
// dropped, so the file holds every step once.
func (t *Trainer) openMetrics() error {
	if !t.root() {
		return nil
	}
	path := filepath.Join(t.opts.Dir, "metrics.jsonl")
	if t.opts.Resume {
		if err := trimMetrics(path, t.position()); err != nil {
			return err
		}
	} else if err := os.Remove(path); err != nil && !os.IsNotExist(err) {
		return err
	}
	f, err := os.OpenFile(path, os.O_APPEND|os.O_CREATE|os.O_WRONLY, 0o644)
	if err != nil {
		return fmt.Errorf("metrics: %w", err)
	}
	t.metrics = &metricsWriter{f}
	return nil
}

func (w *metricsWriter) write(r *Report) error {
	line, err := r.json()
	if err != nil {
		return fmt.Errorf("metrics of step %d: %w", r.Step, err)
	}
	_, err = w.f.Write(append(line, '\n'))
	return err
}

func (w *metricsWriter) Close() error { return w.f.Close() }
