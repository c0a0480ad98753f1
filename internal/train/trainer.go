// Package train is the loop: it reads micro-batches, runs the pipeline schedule over the chunks of this rank, and
// updates the shard of the parameters that this rank owns. step.go is a step on one page; a stage is data
// (stage.go); what happens on a cadence is a list of hooks (hooks.go).
package train

import (
	"context"
	"fmt"
	"log/slog"
	"os"
	"path/filepath"
	"slices"
	"sync/atomic"
	"time"

	"moetor/comm"
	"moetor/configs"
	"moetor/data"
	"moetor/internal/kernel"
	"moetor/internal/trace"
	"moetor/model"
	"moetor/optimizer"
	"moetor/parallel"
	"moetor/parallel/expert"
	"moetor/parallel/pipeline"
	"moetor/parallel/shard"
)

// Options are what the command line adds to a run configuration.
type Options struct {
	Dir        string   // run directory
	Resume     bool     // continue from the newest complete checkpoint in Dir
	Stages     []string // names of the stages to run; nil is all
	StopAfter  int64    // end, with a checkpoint, after this many steps of this launch, over all its stages; 0 is never
	TraceSteps int64    // steps to record for trace.json, after warm-up
	LocalRanks int      // ranks that share this host; the cores are divided among them
	Threads    int      // kernel threads of this rank; 0: cores / LocalRanks

	Stop     *atomic.Bool                                        // set by a signal handler: finish the step, checkpoint, end
	Progress func(step int64)                                    // called before each step, for whoever supervises the ranks
	Show     func(r *Report, line string, total int64, due bool) // rank 0, each step of total; due: log_every says so
	Note     func(format string, args ...any)                    // rank 0: what a user should see once
	Log      *slog.Logger
}

// A RefusedError says that what the user asked for does not fit what is there, such as a checkpoint of another model:
// nothing was trained, and trying again changes nothing.
type RefusedError struct{ error }

func (e RefusedError) Unwrap() error { return e.error }

// An Outcome says how a run ended.
type Outcome struct {
	Stopped    bool   // by a signal or StopAfter, after a complete checkpoint, with steps left to do
	Checkpoint string // directory of the last checkpoint written or resumed from
	Step       int64
	Next       string // stage that a stopped run goes on with
}

// A Trainer is one rank of a run.
type Trainer struct {
	run    *configs.Run
	config string // the configuration as resolved, for checkpoints
	opts   Options
	log    *slog.Logger
	world  comm.Transport
	mesh   parallel.Mesh
	groups *parallel.GroupSet
	data   int // this rank's coordinate on the data axis
	routed int // MoE layers of the whole model, MTP modules included

	chunks  []*model.Chunk   // of this rank, in stage order
	stages  []pipeline.Stage // by stage number; nil for the stages of other ranks
	owner   []int            // stage -> pipeline coordinate
	bounds  []int            // stage s is layers [bounds[s], bounds[s+1])
	link    *link
	experts *expert.Exchange // nil without MoE layers
	sync    *shard.Sync
	adam    *optimizer.AdamW

	tokenizer data.Tokenizer

	stage   *stage
	pos     optimizer.Position
	micros  []model.Micro
	batches []batchBuffer
	plans   map[planKey][]pipeline.Action // this rank's list by number of micro-batches
	rec     *trace.Recorder
	peak    float64 // GFLOP/s of the cores in use, all ranks together
	flops   model.Flops
	last    string // directory of the last checkpoint
	before  int64  // optimizer steps of the stages before this one
	steps   int64  // that this launch has done
	metrics *metricsWriter
	traced  tracer

	scratch struct {
		sums   []float64
		counts []int64
	}
}

// New builds this rank of the run: mesh, chunks, optimizer shard. Every rank of the transport calls it at the same
// time with the same configuration; a difference is an error on all of them.
func New(ctx context.Context, run *configs.Run, world comm.Transport, o Options) (*Trainer, error) {
	if o.Log == nil {
		o.Log = slog.New(slog.DiscardHandler)
	}
	t := &Trainer{run: run, opts: o, log: o.Log, world: world, rec: &trace.Recorder{}, plans: map[planKey][]pipeline.Action{}}
	var err error
	if t.tokenizer, err = OpenTokenizer(run); err != nil {
		return nil, err
	}
	t.config = string(configs.Marshal(run))
	t.mesh, err = parallel.NewMesh(world.Size(), run.Parallel.Pipeline, run.Parallel.Expert, run.Parallel.RanksPerNode)
	if err != nil {
		return nil, err
	}
	if t.groups, err = parallel.Groups(world, t.mesh); err != nil {
		return nil, err
	}
	t.groups.WithTimeout(run.Comm.Timeout)
	if err := t.sameConfiguration(ctx); err != nil {
		return nil, err
	}
	if err := t.sameDirectory(ctx); err != nil {
		return nil, err
	}
	if err := t.build(ctx); err != nil {
		return nil, err
	}
	return t, t.measure(ctx)
}

// sameDirectory refuses ranks that do not see the run directory of rank 0: their checkpoints would be in pieces, which
// would show only at the first save.
func (t *Trainer) sameDirectory(ctx context.Context) error {
	path := filepath.Join(t.opts.Dir, ".ranks")
	var token []byte
	var err error
	if t.root() {
		token = fmt.Appendf(nil, "%d %d", os.Getpid(), time.Now().UnixNano())
		err = os.WriteFile(path, token, 0o644)
	}
	all, gatherErr := comm.GatherBytes(ctx, t.groups.World, token)
	if gatherErr != nil {
		return gatherErr
	}
	if !t.root() {
		if seen, readErr := os.ReadFile(path); readErr != nil || string(seen) != string(all[0]) {
			err = fmt.Errorf("rank %d does not see the run directory of rank 0 at %s: all hosts must share it", t.world.Rank(), t.opts.Dir)
		}
	}
	err = t.together(ctx, err)
	if t.root() {
		os.Remove(path)
	}
	if err != nil {
		return RefusedError{err}
	}
	return nil
}

// sameConfiguration refuses a world whose ranks were started with different configurations.
func (t *Trainer) sameConfiguration(ctx context.Context) error {
	all, err := comm.GatherBytes(ctx, t.groups.World, []byte(t.config))
	if err != nil {
		return err
	}
	for r, other := range all {
		if d := firstDifference(string(all[0]), string(other)); d != "" {
			return fmt.Errorf("rank %d runs another configuration than rank 0: %s", r, d)
		}
	}
	return nil
}

// build makes the chunks of this rank and its share of the optimizer.
func (t *Trainer) build(ctx context.Context) error {
	c := &t.run.Model
	p, d, e := t.mesh.Coord(t.world.Rank())
	t.data = d
	t.routed = max(0, c.Layers-c.DenseLayers) + c.MTP.Depth
	var err error
	if t.bounds == nil { // a new head leaves every layer where it is
		if t.bounds, err = bounds(t.run); err != nil {
			return err
		}
	}
	stages := len(t.bounds) - 1
	t.owner = make([]int, stages)
	for s := range stages {
		t.owner[s] = s % t.mesh.Pipeline
	}
	if t.routed > 0 {
		if t.experts, err = expert.New(t.groups.Expert, c.MoE.Experts); err != nil {
			return err
		}
	}
	t.stages, t.chunks = make([]pipeline.Stage, stages), nil
	for s := range stages {
		if t.owner[s] != p {
			continue
		}
		part := model.Part{First: t.bounds[s], Last: t.bounds[s+1], Embed: s == 0, Head: s == stages-1, ExpertRank: e, ExpertSize: t.mesh.Expert}
		chunk, err := model.New(*c, part, t.run.Run.Seed, t.exchange)
		if err != nil {
			return fmt.Errorf("stage %d: %w", s, err)
		}
		t.chunks = append(t.chunks, chunk)
		t.stages[s] = chunk
	}
	t.link = &link{transport: t.world, mesh: t.mesh, data: d, plan: pipeline.Plan{Owner: t.owner, Ranks: t.mesh.Pipeline}, dim: c.Dim, timeout: t.run.Comm.Timeout, rec: t.rec,
		buffers: map[bufferKey]*[2][]float32{}, turn: map[bufferKey]int{}}
	t.sync, err = shard.New(ctx, t.groups.World, t.groups.Data, t.groups.Replica, t.groups.Embed, t.params())
	return err
}

// measure sets the kernel threads of this rank and measures the FMA peak of the cores in use, by all ranks at once.
func (t *Trainer) measure(ctx context.Context) error {
	threads := t.opts.Threads
	if threads == 0 {
		threads = max(1, cores()/max(1, t.opts.LocalRanks))
	}
	kernel.SetThreads(threads)
	t.flops = model.FLOPs(t.run.Model, t.run.Model.Context)
	if err := t.groups.World.Barrier(ctx); err != nil {
		return err
	}
	peak := []float64{kernel.PeakGFLOPS(threads, 50)}
	if err := comm.AllReduce(ctx, t.groups.World, peak, comm.Sum); err != nil {
		return err
	}
	t.peak = peak[0]
	return nil
}

// Run runs the stages that are still to do, in order, each from the weights the one before it left.
func (t *Trainer) Run(ctx context.Context) (Outcome, error) {
	defer t.close()
	first := 0
	if t.opts.Resume {
		var err error
		if first, err = t.resume(ctx); err != nil {
			return Outcome{}, err
		}
	}
	if err := t.openMetrics(); err != nil {
		return Outcome{}, err
	}
	if err := t.openWatch(); err != nil {
		return Outcome{}, err
	}
	if t.stage == nil && t.run.Run.Init != "" {
		if err := t.together(ctx, t.initial(t.run.Run.Init)); err != nil {
			return Outcome{}, RefusedError{fmt.Errorf("run.init: %w", err)}
		}
	}
	next := ""
	for i := first; i < len(t.run.Stages); i++ {
		here := t.stage != nil && t.stage.index == i
		if !t.selected(t.run.Stages[i].Name) {
			if here && !t.stage.plan.Done(t.pos) {
				return Outcome{}, fmt.Errorf("stage %s is at step %d of %d: end it before another stage follows", t.stage.cfg.Name, t.pos.Step, t.stage.steps)
			}
			continue
		}
		if !here {
			if err := t.enter(ctx, i, optimizer.Position{}); err != nil {
				return Outcome{}, err
			}
			if err := t.refer(ctx, ""); err != nil {
				return Outcome{}, fmt.Errorf("stage %s: %w", t.stage.cfg.Name, err)
			}
		}
		stop, err := t.runStage(ctx)
		if err != nil {
			return Outcome{Checkpoint: t.last, Step: t.pos.Step}, err
		}
		if stop {
			next = t.next()
			break
		}
	}
	return Outcome{Stopped: next != "", Checkpoint: t.last, Step: t.pos.Step, Next: next}, t.traced.finish(ctx, t)
}

// next is the stage that has the next step of this launch, "" if all are done.
func (t *Trainer) next() string {
	if !t.stage.plan.Done(t.pos) {
		return t.stage.cfg.Name
	}
	for _, s := range t.run.Stages[t.stage.index+1:] {
		if t.selected(s.Name) {
			return s.Name
		}
	}
	return ""
}

func (t *Trainer) close() {
	if t.metrics != nil {
		t.metrics.Close()
	}
	if t.stage != nil {
		t.stage.close()
	}
}

func (t *Trainer) selected(name string) bool {
	return len(t.opts.Stages) == 0 || slices.Contains(t.opts.Stages, name)
}

// runStage steps until the stage is done or somebody asks to stop, or both; it ends with a complete checkpoint.
func (t *Trainer) runStage(ctx context.Context) (stop bool, err error) {
	for !stop && !t.stage.plan.Done(t.pos) {
		if t.opts.Progress != nil {
			t.opts.Progress(t.pos.Step + 1)
		}
		t.rec.StartStep(t.pos.Step + 1)
		t.traced.begin(t)
		r, err := t.step(ctx)
		if err != nil {
			return false, fmt.Errorf("%s step %d: %w", t.stage.cfg.Name, t.pos.Step+1, err)
		}
		r.timed(t, t.rec.EndStep())
		t.steps++
		if err := t.traced.end(ctx, t); err != nil {
			return false, err
		}
		r.stop = r.stop || (t.opts.StopAfter > 0 && t.steps >= t.opts.StopAfter)
		done := t.stage.plan.Done(t.pos)
		for _, h := range t.stage.hooks {
			if h.due(t.pos.Step, r.stop || done) {
				if err := h.Do(ctx, &r); err != nil {
					return false, err
				}
			}
		}
		stop = r.stop
	}
	return stop, nil
}

// checkpoints is where the checkpoints of this run lie.
func (t *Trainer) checkpoints() string { return filepath.Join(t.opts.Dir, "checkpoints") }

func (t *Trainer) stopRequested() bool { return t.opts.Stop != nil && t.opts.Stop.Load() }

// root reports whether this rank writes the files of the run.
func (t *Trainer) root() bool { return t.world.Rank() == 0 }

// bounds are the layers of the pipeline stages: by hand, or so that the most expensive stage is as cheap as can be.
func bounds(run *configs.Run) ([]int, error) {
	if split := run.Parallel.Split; len(split) > 0 {
		b := []int{0}
		for _, n := range split {
			b = append(b, b[len(b)-1]+n)
		}
		return b, nil
	}
	return pipeline.Split(model.LayerCosts(run.Model), run.Parallel.Pipeline)
}
