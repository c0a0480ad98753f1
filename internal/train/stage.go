package train

import (
	"context"
	"fmt"

	"moetor/configs"
	"moetor/data"
	"moetor/internal/tensor"
	"moetor/internal/trace"
	"moetor/model"
	"moetor/optimizer"
	"moetor/parallel/pipeline"
)

// A stage is data: where samples come from, how long it lasts, at which rates. Nothing here or in Trainer is named
// after one.
type stage struct {
	index int
	cfg   configs.Stage
	plan  *optimizer.Schedule
	train data.Source
	val   data.Source // nil without validation
	files *data.Corpus
	steps int64 // of the whole stage
	hooks []hook
}

func (s *stage) close() {
	if s.files != nil {
		s.files.Close()
	}
}

// enter makes stage i the current one, at the given position, with fresh moments.
func (t *Trainer) enter(ctx context.Context, i int, at optimizer.Position) error {
	if t.stage != nil {
		t.stage.close()
	}
	cfg := t.run.Stages[i]
	opened, err := OpenCorpus(ctx, t.run, i, t.tokenizer)
	if err != nil {
		return err
	}
	s := &stage{index: i, cfg: cfg, train: opened.Train, val: opened.Val, files: opened}
	if s.plan, err = t.run.Schedule(i, opened.Train.Samples()); err != nil {
		return err
	}
	s.steps = s.plan.End().Step
	s.hooks = t.hooks()
	t.stage, t.pos = s, at
	t.adam, err = optimizer.NewAdamW(cfg.Optimizer, t.slices())
	return err
}

// A batchBuffer is the reused memory of one micro-batch.
type batchBuffer struct{ data.Batch }

// micro views the batch as the model sees it.
func (b *batchBuffer) micro() model.Micro {
	return model.Micro{Seqs: b.Seqs, Len: b.Len, Tokens: b.Tokens, Targets: b.Targets, Weight: b.Weight, Starts: b.Starts, Valid: b.Valid}
}

// read reads this rank's micro-batches of the coming step.
func (t *Trainer) read(ctx context.Context, v optimizer.Values) error {
	t.rec.Begin(trace.Data, "read")
	defer t.rec.End()
	if err := t.readSamples(ctx, t.stage.train, t.pos.Samples, v.Batch); err != nil {
		return err
	}
	return t.plan(planKey{len(t.micros), false})
}

// readSamples fills t.micros with this data rank's share of samples [first, first+n). The global batch is cut into
// micro-batches of parallel.microbatch samples; micro-batch g goes to data rank g mod D. Where the last round does not
// reach every data rank, the others get an empty micro-batch: all ranks run the same schedule, whatever n is.
func (t *Trainer) readSamples(ctx context.Context, src data.Source, first int64, n int) error {
	size, ranks := t.run.Parallel.Microbatch, t.mesh.Data
	perRank := (n + size*ranks - 1) / (size * ranks)
	for len(t.batches) < perRank {
		t.batches = append(t.batches, batchBuffer{})
	}
	t.micros = t.micros[:0]
	for m := range perRank {
		from := (m*ranks + t.data) * size
		count := min(max(n-from, 0), size)
		if err := src.Read(ctx, first+int64(from), count, &t.batches[m].Batch); err != nil {
			return fmt.Errorf("read samples %d to %d: %w", first+int64(from), first+int64(from+count), err)
		}
		t.micros = append(t.micros, t.batches[m].micro())
	}
	t.link.micros = t.micros
	return nil
}

// begin empties gradients, sums and counts.
func (t *Trainer) begin(v optimizer.Values) {
	t.bind(model.Settings{MTPWeight: v.MTPWeight})
	for _, c := range t.chunks {
		c.ZeroGrads()
	}
}

// bind gives the chunks the micro-batches that were read.
func (t *Trainer) bind(s model.Settings) {
	if t.experts != nil {
		t.experts.Reset()
	}
	for _, c := range t.chunks {
		c.Bind(t.micros, s)
	}
}

type planKey struct {
	micros  int
	forward bool // evaluation
}

// actions is this rank's list for the present number of micro-batches.
func (t *Trainer) actions() []pipeline.Action { return t.plans[planKey{len(t.micros), false}] }

// plan makes, checks by simulation and keeps the schedule for a number of micro-batches.
func (t *Trainer) plan(k planKey) error {
	if _, ok := t.plans[k]; ok {
		return nil
	}
	s, err := pipeline.Generate(t.run.Parallel.Schedule, pipeline.Plan{Owner: t.owner, Ranks: t.mesh.Pipeline, Micros: k.micros})
	if err != nil {
		return err
	}
	if k.forward {
		s = pipeline.ForwardOnly(s)
	}
	if s, err = pipeline.Prepare(s); err != nil {
		return fmt.Errorf("schedule %s with %d micro-batches: %w", t.run.Parallel.Schedule, k.micros, err)
	}
	p, _, _ := t.mesh.Coord(t.world.Rank())
	t.plans[k] = s.Lists[p]
	return nil
}

// params are all parameters of this rank, in stage order.
func (t *Trainer) params() []*tensor.Param {
	var ps []*tensor.Param
	for _, c := range t.chunks {
		ps = append(ps, c.Params()...)
	}
	return ps
}

// slices are the rows that this rank's optimizer owns.
func (t *Trainer) slices() []optimizer.Slice {
	var out []optimizer.Slice
	for _, s := range t.sync.Slices() {
		out = append(out, optimizer.Slice{Name: s.Param.Name, Value: s.Value, Grad: s.Grad, Decay: s.Param.Decay})
	}
	return out
}

// reduce sums gradients over their replicas, multiplies them by scale and returns their global norm.
func (t *Trainer) reduce(ctx context.Context, scale float64) (float64, error) {
	t.rec.Begin(trace.Reduce, "gradients")
	defer t.rec.End()
	norm, err := t.sync.Reduce(ctx, scale)
	if err != nil {
		return 0, fmt.Errorf("reduce gradients: %w", err)
	}
	return norm, nil
}

// update applies one optimizer step to the rows that this rank owns.
func (t *Trainer) update(lr, clip float64) {
	t.rec.Begin(trace.Optimizer, "adamw")
	defer t.rec.End()
	t.adam.Step(lr, clip, t.pos.Step+1)
}

// publish gathers the new weights.
func (t *Trainer) publish(ctx context.Context) error {
	t.rec.Begin(trace.Reduce, "publish")
	defer t.rec.End()
	if err := t.sync.Publish(ctx); err != nil {
		return fmt.Errorf("publish weights: %w", err)
	}
	return nil
}
