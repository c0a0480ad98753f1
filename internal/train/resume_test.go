package train

import (
	"bytes"
	"encoding/json"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"testing"

	"moetor/checkpoint"
	"moetor/comm/inproc"
	"moetor/configs"
)

// small is an epoch short enough that 40 steps cross its end, with ramp and decay going on over the cut at step 20.
func small(t *testing.T) string {
	return withVal(t, tiny)
}

// epochSets make the corpus so small that 40 steps visit it more than once.
func epochSets(t *testing.T) []string {
	return []string{"stages.0.steps=40", "stages.0.val.data=[]", "run.eval_every=0",
		"stages.0.data=[{path: " + writeVal(t, filepath.Join(t.TempDir(), "train.txt")) + "}]"}
}

// TestResume: 40 steps in one go equal 20, a new launch, and 20 more, to the bit at the same mesh (P16, P24, P34); at
// other meshes within 1e-5, weights and moments as read being the same bits (P20, P21).
func TestResume(t *testing.T) {
	text, sets := small(t), epochSets(t)
	whole, _ := runRanks(t, text, testRun{pipeline: 2, data: 2, expert: 2, sets: sets})
	dir := t.TempDir()
	head, out := runRanks(t, text, testRun{pipeline: 2, data: 2, expert: 2, sets: sets, opts: Options{Dir: dir, StopAfter: 20}})
	if !out.Stopped || out.Step != 20 {
		t.Fatalf("outcome %+v, want stopped at step 20", out)
	}
	sameLosses(t, head, whole[:20], 0)
	for _, m := range []testRun{{pipeline: 2, data: 2, expert: 2}, {pipeline: 1, data: 1, expert: 1}, {pipeline: 4, data: 1, expert: 1},
		{pipeline: 1, data: 4, expert: 4}, {pipeline: 1, data: 3, expert: 1}} {
		t.Run(fmt.Sprintf("%dx%d,%d", m.pipeline, m.data, m.expert), func(t *testing.T) {
			m.sets, m.opts = sets, Options{Dir: copyDir(t, dir), Resume: true}
			rest, _ := runRanks(t, text, m)
			tolerance := 1e-5
			if m.pipeline == 2 && m.data == 2 {
				tolerance = 0
			}
			sameLosses(t, rest, whole[20:], tolerance)
			if steps := metricSteps(t, m.opts.Dir); !slices.Equal(steps, upTo(40)) {
				t.Errorf("metrics.jsonl has steps %v, want 1 to 40 once each", steps)
			}
		})
	}
	// What a mesh reads and writes again without a step in between must be the same bits.
	t.Run("rewritten", func(t *testing.T) {
		again := copyDir(t, dir)
		rewrite(t, text, testRun{pipeline: 1, data: 4, expert: 2, sets: sets, opts: Options{Dir: again}})
		a, b := readAll(t, dir), readAll(t, again)
		if len(a) == 0 || len(a) != len(b) {
			t.Fatalf("%d and %d tensors", len(a), len(b))
		}
		for name, v := range a {
			if !slices.Equal(v, b[name]) {
				t.Errorf("%s differs", name)
			}
		}
	})
}

// rewrite resumes a run and saves it again, in place of the checkpoint that it has read, without a step.
func rewrite(t *testing.T, text string, r testRun) {
	t.Helper()
	world := r.pipeline * r.data
	sets := append([]string{fmt.Sprintf("parallel.pipeline=%d", r.pipeline), fmt.Sprintf("parallel.expert=%d", r.expert)}, r.sets...)
	var wg sync.WaitGroup
	for _, tr := range inproc.New(world) {
		wg.Go(func() {
			defer tr.Close()
			run, err := configs.Parse([]byte(text), "test", sets)
			if err != nil {
				t.Error(err)
				return
			}
			trainer, err := New(t.Context(), run, tr, Options{Dir: r.opts.Dir, LocalRanks: world, Threads: 1})
			if err != nil {
				t.Error(err)
				return
			}
			defer trainer.close()
			if _, err := trainer.resume(t.Context()); err != nil {
				t.Error(err)
			} else if err := trainer.save(t.Context(), nil); err != nil {
				t.Error(err)
			}
		})
	}
	wg.Wait()
	c, _, err := OpenCheckpoint(r.opts.Dir)
	if err != nil {
		t.Fatal(err)
	}
	defer c.Close()
	if m := c.Meta().Mesh; m.World != world || m.Pipeline != r.pipeline {
		t.Fatalf("the checkpoint is of mesh %+v: the ranks that read it have not written it again", m)
	}
}

// TestStopFinishesTheStep: a stop request on one rank ends all ranks after the same step, with a checkpoint of it.
func TestStopFinishesTheStep(t *testing.T) {
	text, dir := small(t), t.TempDir()
	var stop atomic.Bool
	o := Options{Dir: dir, Stop: &stop}
	o.Show = func(r *Report, _ string, _ int64, _ bool) {
		if r.Step == 5 {
			stop.Store(true)
		}
	}
	reports, out := runRanks(t, text, testRun{pipeline: 2, data: 1, expert: 1, sets: epochSets(t), opts: o})
	if !out.Stopped || out.Step < 5 || out.Step > 6 || int(out.Step) != len(reports) {
		t.Fatalf("outcome %+v after %d reports, want stopped at step 5 or 6", out, len(reports))
	}
	r, err := checkpoint.Open(out.Checkpoint)
	if err != nil {
		t.Fatal(err)
	}
	defer r.Close()
	if m := r.Meta(); m.Step != out.Step || m.Tokens != reports[len(reports)-1].Tokens {
		t.Errorf("checkpoint of step %d with %d tokens, want step %d", m.Step, m.Tokens, out.Step)
	}
}

// TestResumeRefuses what does not fit the checkpoint, in words that name both sides (P23).
func TestResumeRefuses(t *testing.T) {
	text, dir, sets := small(t), t.TempDir(), epochSets(t)
	runRanks(t, text, testRun{pipeline: 1, data: 1, expert: 1, sets: sets, opts: Options{Dir: dir, StopAfter: 1}})
	for _, c := range []struct{ set, want string }{
		{"model.dim=16", "model.embed_tokens.weight"},
		{"run.seed=99", "run.seed=99"},
		{"stages.0.name=other", `"pretrain"`},
		{"model.context=16", "fingerprint"},
	} {
		opts := Options{Dir: copyDir(t, dir), Resume: true}
		_, _, err := tryRanks(t, text, testRun{pipeline: 1, data: 1, expert: 1, sets: append(slices.Clone(sets), c.set), opts: opts})
		if c.set == "stages.0.name=other" {
			if err != nil { // another stage has no checkpoint: it starts anew
				t.Errorf("%s: %v", c.set, err)
			}
			continue
		}
		if err == nil || !bytes.Contains([]byte(err.Error()), []byte(c.want)) {
			t.Errorf("%s: error %v, want one that names %s", c.set, err, c.want)
		}
	}
}

func upTo(n int64) (steps []int64) {
	for i := int64(1); i <= n; i++ {
		steps = append(steps, i)
	}
	return steps
}

func metricSteps(t *testing.T, dir string) (steps []int64) {
	t.Helper()
	b, err := os.ReadFile(filepath.Join(dir, "metrics.jsonl"))
	if err != nil {
		t.Fatal(err)
	}
	for line := range bytes.Lines(b) {
		var r Report
		if err := json.Unmarshal(line, &r); err != nil {
			t.Fatalf("%v in %s", err, line)
		}
		steps = append(steps, r.Step)
	}
	return steps
}

func copyDir(t *testing.T, from string) string {
	t.Helper()
	to := filepath.Join(t.TempDir(), "run")
	if err := os.CopyFS(to, os.DirFS(from)); err != nil {
		t.Fatal(err)
	}
	return to
}

// readAll reads every tensor of the newest checkpoint of a run.
func readAll(t *testing.T, dir string) map[string][]float32 {
	t.Helper()
	r, skipped, err := OpenCheckpoint(dir)
	if err != nil || len(skipped) > 0 {
		t.Fatal(err, skipped)
	}
	defer r.Close()
	all := map[string][]float32{}
	for _, info := range r.Tensors() {
		n := 1
		for _, d := range info.Shape {
			n *= d
		}
		v := make([]float32, n)
		if err := r.Read(info.Name, info.Kind, 0, info.Shape[0], v); err != nil {
			t.Fatal(err)
		}
		all[info.String()] = v
	}
	return all
}

// TestResumeOfDamagedRun: checkpoints that were complete and are damaged are no reason to begin again over them.
func TestResumeOfDamagedRun(t *testing.T) {
	text, dir := small(t), t.TempDir()
	runRanks(t, text, testRun{pipeline: 1, data: 1, expert: 1, sets: epochSets(t), opts: Options{Dir: dir, StopAfter: 2}})
	files, err := filepath.Glob(filepath.Join(dir, "checkpoints", "*", "rank-0000.h5"))
	if err != nil || len(files) == 0 {
		t.Fatalf("%v, %v", files, err)
	}
	for _, f := range files {
		if err := os.WriteFile(f, []byte("damaged"), 0o644); err != nil {
			t.Fatal(err)
		}
	}
	before := metricSteps(t, dir)
	_, _, err = tryRanks(t, text, testRun{pipeline: 1, data: 1, expert: 1, sets: epochSets(t), opts: Options{Dir: dir, Resume: true}})
	if err == nil || !strings.Contains(err.Error(), "--overwrite") {
		t.Errorf("error %v, want one that says how to start anew", err)
	}
	if after := metricSteps(t, dir); !slices.Equal(before, after) {
		t.Errorf("metrics.jsonl had steps %v, now %v", before, after)
	}
}
