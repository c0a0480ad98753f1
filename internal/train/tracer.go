package train

import (
	"bytes"
	"context"
	"encoding/gob"
	"fmt"
	"os"
	"path/filepath"
	"time"

	"moetor/comm"
	"moetor/internal/trace"
	"moetor/parallel/pipeline"
)

// TraceWarmup is how many steps pass before events are recorded: the first steps grow arenas and caches.
const TraceWarmup = 2

// clockTag is the stream of the clock probes; no group and no pipeline boundary uses it.
const clockTag = comm.TagPipeline - 1

// A tracer records the events of some steps of a launch on every rank and writes them as one Chrome trace.
type tracer struct{ written bool }

// begin says before a step whether it is one to record.
func (tr *tracer) begin(t *Trainer) {
	t.rec.Record(t.opts.TraceSteps > 0 && t.steps >= TraceWarmup && !tr.written)
}

// end writes the trace once the last step to record is over. All ranks call it.
func (tr *tracer) end(ctx context.Context, t *Trainer) error {
	if t.steps-TraceWarmup < t.opts.TraceSteps {
		return nil
	}
	return tr.finish(ctx, t)
}

// finish writes what has been recorded, which is less than was asked for where the launch ends before. All ranks call it.
func (tr *tracer) finish(ctx context.Context, t *Trainer) error {
	steps := min(t.opts.TraceSteps, t.steps-TraceWarmup)
	if steps <= 0 || tr.written {
		return nil
	}
	tr.written = true
	t.rec.Record(false)
	offset, err := t.clockOffset(ctx)
	if err != nil {
		return fmt.Errorf("trace: %w", err)
	}
	p, d, _ := t.mesh.Coord(t.world.Rank())
	mine := trace.Track{Rank: t.world.Rank(), Name: fmt.Sprintf("rank %d (pipeline %d, data %d)", t.world.Rank(), p, d), Offset: offset, Events: t.rec.Events()}
	var blob bytes.Buffer
	if err := gob.NewEncoder(&blob).Encode(mine); err != nil {
		return fmt.Errorf("trace: %w", err)
	}
	all, err := comm.GatherBytes(ctx, t.groups.World, blob.Bytes())
	if err != nil || !t.root() {
		return err
	}
	tracks := make([]trace.Track, len(all))
	for r, b := range all {
		if err := gob.NewDecoder(bytes.NewReader(b)).Decode(&tracks[r]); err != nil {
			return fmt.Errorf("trace of rank %d: %w", r, err)
		}
	}
	path := filepath.Join(t.opts.Dir, "trace.json")
	f, err := os.Create(path)
	if err != nil {
		return fmt.Errorf("trace: %w", err)
	}
	if err := trace.WriteChrome(f, tracks); err != nil {
		f.Close()
		return fmt.Errorf("trace %s: %w", path, err)
	}
	t.note("trace of %d steps: %s (open it in Perfetto)", steps, path)
	return f.Close()
}

// clockOffset measures what must be added to this rank's clock to get rank 0's.
func (t *Trainer) clockOffset(ctx context.Context) (int64, error) {
	const rounds = 8
	now := func() int64 { return time.Now().UnixNano() }
	buf := make([]int64, 1)
	if t.root() {
		for r := 1; r < t.world.Size(); r++ {
			for range rounds {
				if err := comm.RecvSlice(ctx, t.world, r, clockTag, buf); err != nil {
					return 0, err
				}
				buf[0] = now()
				if err := comm.SendSlice(ctx, t.world, r, clockTag, buf); err != nil {
					return 0, err
				}
			}
		}
		return 0, nil
	}
	var probes []trace.Probe
	for range rounds {
		p := trace.Probe{Sent: now()}
		if err := comm.SendSlice(ctx, t.world, 0, clockTag, buf); err != nil {
			return 0, err
		}
		if err := comm.RecvSlice(ctx, t.world, 0, clockTag, buf); err != nil {
			return 0, err
		}
		p.There, p.Back = buf[0], now()
		probes = append(probes, p)
	}
	return trace.Offset(probes), nil
}

// observe books each action of the schedule.
func (t *Trainer) observe(a pipeline.Action, begin bool) {
	if !begin {
		t.rec.End()
		return
	}
	label := ""
	if t.rec.Recording() {
		label = a.String()
	}
	t.rec.Begin(kindOf(a.Op), label)
}
