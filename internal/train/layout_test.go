package train

import (
	"context"
	"fmt"
	"math"
	"path/filepath"
	"sync"
	"testing"

	"moetor/comm/inproc"
	"moetor/configs"
	"moetor/model"
)

// tiny is a model with every mechanism: MLA with query LoRA, a dense and MoE layers, groups, a shared expert, selection
// bias, balance loss, MTP, a ramp of the batch that is not a multiple of every mesh, clipping.
const tiny = `
model:
  dim: 32
  layers: 4
  dense_layers: 1
  dense_inter: 64
  init_std: 0.02
  context: 32
  attention: {heads: 2, q_lora: 16, kv_lora: 16, nope: 8, rope: 4, v: 8}
  moe: {experts: 8, top_k: 2, shared: 1, inter: 16, groups: 4, top_groups: 2, scale: 1.5, seq_aux: 0.001}
  mtp: {depth: 1}
parallel: {microbatch: 1}
run: {eval_every: 10, cache: off}
checkpoint: {every: 0, keep: 5}
stages:
  - name: pretrain
    objective: lm
    data: [{path: "embedded:shakespeare"}]
    val: {data: [{path: VALFILE}]}
    steps: 20
    batch: {start: 6, end: 11, ramp_tokens: 2000, step: 1}
    rate: {peak: 3.0e-3, warmup_steps: 4, constant_tokens: 2000, decay_tokens: 3000, floor: 3.0e-4}
`

// A run is what a test asks of train.
type testRun struct {
	pipeline, data, expert int
	sets                   []string
	opts                   Options
	prepare                func(*model.Chunk) // changes the chunks before the first step
}

// runRanks runs the configuration on goroutine ranks and returns the reports of rank 0.
func runRanks(t *testing.T, text string, r testRun) ([]Report, Outcome) {
	t.Helper()
	reports, out, err := tryRanks(t, text, r)
	if err != nil {
		t.Fatalf("%dx%d,%d: %v", r.pipeline, r.data, r.expert, err)
	}
	return reports, out
}

func tryRanks(t *testing.T, text string, r testRun) ([]Report, Outcome, error) {
	t.Helper()
	world := r.pipeline * r.data
	sets := append([]string{fmt.Sprintf("parallel.pipeline=%d", r.pipeline), fmt.Sprintf("parallel.expert=%d", r.expert)}, r.sets...)
	if r.opts.Dir == "" {
		r.opts.Dir = t.TempDir()
	}
	ctx, cancel := context.WithCancel(t.Context())
	defer cancel()
	var reports []Report
	var wg sync.WaitGroup
	outcomes, errs := make([]Outcome, world), make([]error, world)
	for rank, tr := range inproc.New(world) {
		run, err := configs.Parse([]byte(text), "test", sets)
		if err != nil {
			t.Fatal(err)
		}
		if err := configs.Validate(run, world); err != nil {
			t.Fatal(err)
		}
		o := r.opts
		o.LocalRanks, o.Threads = world, 1
		if rank == 0 {
			show := o.Show
			o.Show = func(rep *Report, line string, total int64, due bool) {
				reports = append(reports, *rep)
				if show != nil {
					show(rep, line, total, due)
				}
			}
		}
		wg.Add(1)
		go func() {
			defer wg.Done()
			defer tr.Close()
			trainer, err := New(ctx, run, tr, o)
			if err == nil {
				if r.prepare != nil {
					for _, c := range trainer.chunks {
						r.prepare(c)
					}
				}
				outcomes[rank], err = trainer.Run(ctx)
			}
			errs[rank] = err
		}()
	}
	wg.Wait()
	for _, err := range errs {
		if err != nil {
			return reports, outcomes[0], err
		}
	}
	return reports, outcomes[0], nil
}

// withVal puts a small validation text in place of VALFILE.
func withVal(t *testing.T, text string) string {
	t.Helper()
	return replaceVal(text, writeVal(t, filepath.Join(t.TempDir(), "val.txt")))
}

// TestLayouts is the promise of the design: 20 steps at seven meshes. First-step losses are equal to the bit at all of
// them; along the pipeline axis all losses are; otherwise within 1e-5 relative.
func TestLayouts(t *testing.T) {
	text := withVal(t, tiny)
	type key struct{ data, expert int }
	base, _ := runRanks(t, text, testRun{pipeline: 1, data: 1, expert: 1})
	if len(base) != 20 {
		t.Fatalf("%d reports, want 20", len(base))
	}
	if first := base[0].Loss; math.Abs(first-math.Log(264)) > 0.1 {
		t.Errorf("first loss %v, want about ln 264 = %.4f", first, math.Log(264))
	}
	if last := base[19].Loss; last > base[0].Loss-1 {
		t.Errorf("loss went from %v to %v in 20 steps: it does not learn", base[0].Loss, last)
	}
	unsplit := map[key][]Report{{1, 1}: base}
	for _, m := range []testRun{
		{pipeline: 2, data: 1, expert: 1}, {pipeline: 4, data: 1, expert: 1},
		{pipeline: 1, data: 2, expert: 2}, {pipeline: 2, data: 2, expert: 2},
		{pipeline: 1, data: 4, expert: 2}, {pipeline: 1, data: 4, expert: 4}, {pipeline: 2, data: 4, expert: 4},
		{pipeline: 2, data: 1, expert: 1, sets: []string{"parallel.schedule=gpipe"}},
	} {
		t.Run(fmt.Sprintf("%dx%d,%d%v", m.pipeline, m.data, m.expert, m.sets), func(t *testing.T) {
			got, _ := runRanks(t, text, m)
			k := key{m.data, m.expert}
			if m.pipeline == 1 {
				unsplit[k] = got
			}
			sameLosses(t, got, unsplit[k], 0)
			sameLosses(t, got, base, 1e-5)
			if got[0].Loss != base[0].Loss || got[0].MTPLoss != base[0].MTPLoss || got[0].AuxLoss != base[0].AuxLoss {
				t.Errorf("first losses %v %v %v, on one rank %v %v %v: must be the same bits",
					got[0].Loss, got[0].MTPLoss, got[0].AuxLoss, base[0].Loss, base[0].MTPLoss, base[0].AuxLoss)
			}
			if *got[9].ValLoss == 0 || relative(*got[9].ValLoss, *base[9].ValLoss) > 1e-5 {
				t.Errorf("validation loss %v, on one rank %v", *got[9].ValLoss, *base[9].ValLoss)
			}
			for l := range got[3].MoE {
				if m.data == 1 && got[3].MoE[l] != base[3].MoE[l] {
					t.Errorf("load of layer %d: %+v, on one rank %+v", l, got[3].MoE[l], base[3].MoE[l])
				}
			}
		})
	}
}

// sameLosses compares step by step; tolerance 0 means to the bit, gradient norms included.
func sameLosses(t *testing.T, got, want []Report, tolerance float64) {
	t.Helper()
	if len(got) != len(want) {
		t.Fatalf("%d steps, want %d", len(got), len(want))
	}
	for i := range got {
		g, w := got[i], want[i]
		if g.Step != w.Step || g.Batch != w.Batch || g.Tokens != w.Tokens || g.LR != w.LR {
			t.Fatalf("step %d: batch %d, %d tokens, lr %v; want step %d: %d, %d, %v", g.Step, g.Batch, g.Tokens, g.LR, w.Step, w.Batch, w.Tokens, w.LR)
		}
		for name, pair := range map[string][2]float64{"loss": {g.Loss, w.Loss}, "mtp loss": {g.MTPLoss, w.MTPLoss}, "aux loss": {g.AuxLoss, w.AuxLoss}, "norm": {g.GradNorm, w.GradNorm}} {
			bad := relative(pair[0], pair[1]) > tolerance
			if tolerance > 0 && name != "loss" {
				bad = relative(pair[0], pair[1]) > 100*tolerance
			}
			if bad {
				t.Errorf("step %d: %s %v, want %v (within %v)", g.Step, name, pair[0], pair[1], tolerance)
			}
		}
		if t.Failed() {
			return
		}
	}
}

func relative(a, b float64) float64 {
	if a == b {
		return 0
	}
	return math.Abs(a-b) / math.Max(math.Abs(a), math.Abs(b))
}

func runPrepared(t *testing.T, text string, r testRun, prepare func(*model.Chunk)) []Report {
	t.Helper()
	r.prepare = prepare
	reports, _ := runRanks(t, text, r)
	return reports
}
