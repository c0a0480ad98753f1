package train

import (
	"context"
	"fmt"

	"moetor/comm"
	"moetor/configs"
	"moetor/data"
	"moetor/internal/tensor"
	"moetor/internal/trace"
	"moetor/internal/train/objective"
	"moetor/model"
	"moetor/optimizer"
	"moetor/parallel/pipeline"
)

// A stage is data: where samples come from, what loss they feed, how long it lasts, at which rates. Nothing here or in
// Trainer is named after one.
type stage struct {
	index int
	cfg   configs.Stage
	plan  *optimizer.Schedule
	steps int64 // of the whole stage
	hooks []hook

	corpus     *Corpus
	train, val data.Source // val is nil without validation

	objective model.Objective // nil: cross-entropy by weight
	needs     objective.Needs
	metrics   []string   // names of what the objective adds up
	reference *reference // nil where the objective needs none
	resumedAt int64      // step that this launch found the stage at
}

func (s *stage) close() {
	if s.corpus != nil {
		s.corpus.Close()
	}
}

// settings are those of a pass with an MTP weight.
func (s *stage) settings(mtpWeight float64) model.Settings {
	return model.Settings{MTPWeight: mtpWeight, Objective: s.objective, SeqAux: s.cfg.Router.SeqAux}
}

// setKL tells an objective that asks for it the divergence of the model from the reference.
func (s *stage) setKL(z float64) {
	if o, ok := s.objective.(interface{ SetKL(float64) }); ok {
		o.SetKL(z)
	}
}

// enter makes stage i the current one, at the given position, with fresh moments. A stage that asks for another head
// gets it; the weights that both have go on.
func (t *Trainer) enter(ctx context.Context, i int, at optimizer.Position) error {
	if t.stage != nil {
		t.before += t.pos.Step
		t.stage.close()
	}
	cfg := t.run.Stages[i]
	s := &stage{index: i, cfg: cfg, resumedAt: at.Step}
	var err error
	if s.objective, s.needs, err = objective.New(cfg.Objective, cfg.Preference); err != nil {
		return err
	}
	if s.objective != nil {
		s.metrics = s.objective.Metrics()
	}
	if s.corpus, err = OpenCorpus(ctx, t.run, i, t.tokenizer); err != nil {
		return err
	}
	if t.root() {
		for _, l := range append(s.corpus.Lines, s.corpus.Notes...) {
			t.log.Info(l, "stage", cfg.Name)
		}
	}
	s.train, s.val = s.corpus.Train, s.corpus.Val
	if s.plan, err = t.run.Schedule(i, s.train.Samples()); err != nil {
		return err
	}
	s.steps = s.plan.End().Step
	s.hooks = t.hooks()
	t.stage, t.pos = s, at
	if s.needs.Score != t.run.Model.Score {
		if err := t.rehead(ctx, s.needs.Score); err != nil {
			return err
		}
	}
	t.adam, err = optimizer.NewAdamW(cfg.Optimizer, t.slices())
	return err
}

// rehead rebuilds the chunks with the other kind of head and copies the weights that both models have.
func (t *Trainer) rehead(ctx context.Context, score bool) error {
	old := map[string]*tensor.Param{}
	biases := map[int][]float32{}
	for _, c := range t.chunks {
		for _, p := range c.Params() {
			if !p.Tied {
				old[p.Name] = p
			}
		}
		for _, r := range c.Routers() {
			biases[r.Layer] = r.Bias
		}
	}
	if !score {
		return fmt.Errorf("stage %s: a reward model has no head for words to go on with", t.stage.cfg.Name)
	}
	t.run.Model = t.run.Model.RewardModel()
	if err := t.build(ctx); err != nil {
		return err
	}
	for _, c := range t.chunks {
		for _, p := range c.Params() {
			if o := old[p.Name]; o != nil {
				copy(p.Value, o.Value)
			}
		}
		for _, r := range c.Routers() {
			copy(r.Bias, biases[r.Layer])
		}
	}
	return nil
}

// divergence is the mean log-ratio of model and reference over the mismatched answers of samples [first, first+n), which
// objectives such as KTO compare with; 0 where the objective asks for none. It is measured over the global batch, so it does
// not depend on the mesh.
func (t *Trainer) divergence(ctx context.Context, mismatch data.Source, first, n int64) (float64, error) {
	if !t.stage.needs.KL || mismatch == nil || n == 0 {
		return 0, nil
	}
	t.rec.Begin(trace.Forward, "divergence")
	defer t.rec.End()
	table := t.stage.reference.of(t.stage.corpus, mismatch)
	per, round := make([]float64, n), int64(0)
	err := t.forward(ctx, mismatch, first, n, model.Settings{}, func() error {
		size := t.run.Parallel.Microbatch
		for m := range t.micros {
			from := round + int64((m*t.mesh.Data+t.data)*size)
			for _, c := range t.chunks {
				for i, v := range c.LogProbs(m) {
					per[from+int64(i)] = v - table[sequence(&t.batches[m].Batch, i)]
				}
			}
		}
		round += int64(len(t.micros) * t.mesh.Data * size)
		return nil
	})
	if err != nil {
		return 0, err
	}
	if err := comm.AllReduce(ctx, t.groups.World, per, comm.Sum); err != nil {
		return 0, err
	}
	var sum float64
	for _, v := range per {
		sum += v
	}
	return sum / float64(n), nil
}

// A batchBuffer is the reused memory of one micro-batch.
type batchBuffer struct {
	data.Batch
	ref, share []float64
}

// micro views the batch as the model sees it. table holds the reference's log-probabilities, if the stage has any.
func (b *batchBuffer) micro(table []float64) model.Micro {
	m := model.Micro{Seqs: b.Seqs, Len: b.Len, Tokens: b.Tokens, Targets: b.Targets, Weight: b.Weight, Starts: b.Starts, Valid: b.Valid,
		IDs: b.IDs, Labels: b.Labels, Pairs: b.Pairs}
	if b.Labels == nil {
		return m
	}
	// Of judged answers a sequence counts once, or half as one of a pair, in the balance loss too, as in the loss.
	share := resize(&b.share, b.Seqs)
	for i := range share {
		share[i] = 1
		if b.Pairs {
			share[i] = 0.5
		}
	}
	m.SeqWeight = share
	if table != nil {
		m.Ref = resize(&b.ref, b.Seqs)
		for i := range m.Ref {
			m.Ref[i] = table[sequence(&b.Batch, i)]
		}
	}
	return m
}

// read reads this rank's micro-batches of the coming step.
func (t *Trainer) read(ctx context.Context, v optimizer.Values) error {
	z, err := t.divergence(ctx, t.stage.corpus.Mismatch, t.pos.Samples, int64(v.Batch))
	if err != nil {
		return fmt.Errorf("divergence: %w", err)
	}
	t.stage.setKL(z)
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
	table := t.stage.reference.of(t.stage.corpus, src)
	t.micros = t.micros[:0]
	for m := range perRank {
		from := (m*ranks + t.data) * size
		count := min(max(n-from, 0), size)
		if err := src.Read(ctx, first+int64(from), count, &t.batches[m].Batch); err != nil {
			return fmt.Errorf("read samples %d to %d: %w", first+int64(from), first+int64(from+count), err)
		}
		t.micros = append(t.micros, t.batches[m].micro(table))
	}
	t.link.micros = t.micros
	return nil
}

// begin empties gradients, sums and counts.
func (t *Trainer) begin(v optimizer.Values) {
	t.watching()
	t.bind(t.stage.settings(v.MTPWeight))
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

// slices are the rows that this rank's optimizer owns. What the stage does not train is not decayed either.
func (t *Trainer) slices() []optimizer.Slice {
	var out []optimizer.Slice
	untrained := t.untrained()
	for _, s := range t.sync.Slices() {
		decay := s.Param.Decay && !untrained[s.Param.Name]
		out = append(out, optimizer.Slice{Name: s.Param.Name, Value: s.Value, Grad: s.Grad, Decay: decay})
	}
	return out
}

// untrained names the parameters that the stage does not train: those of MTP modules where mtp_weight is 0 throughout, as
// with every objective but lm. Weight decay alone would take them away, a little with every step.
func (t *Trainer) untrained() map[string]bool {
	names := map[string]bool{}
	if !t.stage.cfg.MTPWeight.Zero() {
		return names
	}
	for _, info := range model.Tensors(t.run.Model) {
		if l := info.Layer - t.run.Model.Layers; l >= 0 && l < t.run.Model.MTP.Depth {
			names[info.Name] = true
		}
	}
	return names
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
