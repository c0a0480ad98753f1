package train

import (
	"encoding/json"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync/atomic"
	"testing"

	"moetor/checkpoint"
)

// TestStopAfterOverStages: StopAfter counts the steps of a launch over its stages. A stop at the last step of a stage is one
// too, with the checkpoint of that step, and the next launch goes on with the next stage.
func TestStopAfterOverStages(t *testing.T) {
	text, dir := chainText(t), t.TempDir()
	mesh := testRun{pipeline: 2, data: 1, expert: 1, sets: chainSets}
	whole, _ := runRanks(t, text, mesh) // 4, 6 and 6 steps
	launch := func(stopAfter int64, stages ...string) ([]Report, Outcome) {
		m := mesh
		m.opts = Options{Dir: dir, Resume: true, StopAfter: stopAfter, Stages: stages}
		return runRanks(t, text, m)
	}
	var all []Report
	for _, c := range []struct {
		stopAfter int64
		want      Outcome
	}{
		{4, Outcome{Stopped: true, Step: 4, Next: "instruct", Checkpoint: "pretrain-00000004"}},
		{8, Outcome{Stopped: true, Step: 2, Next: "prefer", Checkpoint: "prefer-00000002"}},
		{4, Outcome{Step: 6, Checkpoint: "prefer-00000006"}}, // all that was left: done, not stopped
	} {
		reports, out := launch(c.stopAfter)
		all = append(all, reports...)
		c.want.Checkpoint = filepath.Join(dir, "checkpoints", c.want.Checkpoint)
		if int64(len(reports)) != c.stopAfter || out != c.want {
			t.Fatalf("StopAfter %d: %d steps, %+v, want %+v", c.stopAfter, len(reports), out, c.want)
		}
		r, err := checkpoint.Open(out.Checkpoint)
		if err != nil {
			t.Fatal(err)
		}
		r.Close()
	}
	for _, stage := range []string{"pretrain", "instruct", "prefer"} {
		sameLosses(t, ofStage(all, stage), ofStage(whole, stage), 0)
	}
	// The last stage that a launch is asked for ends it: nothing is left to stop.
	dir = t.TempDir()
	if _, out := launch(4, "pretrain"); out.Stopped || out.Step != 4 {
		t.Errorf("with the one stage done: %+v", out)
	}
}

// TestStopAtTheEndOfAStage: a signal before the last step of a stage ends the launch after it, and not after one more.
func TestStopAtTheEndOfAStage(t *testing.T) {
	var stop atomic.Bool
	m := testRun{pipeline: 1, data: 1, expert: 1, sets: chainSets, opts: Options{Dir: t.TempDir(), Stop: &stop}}
	m.opts.Progress = func(step int64) {
		if step == 4 {
			stop.Store(true)
		}
	}
	reports, out := runRanks(t, chainText(t), m)
	if len(reports) != 4 || !out.Stopped || out.Step != 4 || out.Next != "instruct" {
		t.Errorf("%d steps, %+v, want a stop after the 4 of pretrain", len(reports), out)
	}
}

// TestTraceOverStages: a trace has the steps of a launch after its warm-up, over stages too, and as many of them as there
// are where the launch ends before.
func TestTraceOverStages(t *testing.T) {
	text := chainText(t)
	for _, c := range []struct {
		steps, trace int64
		want         []int64 // steps of their stages
	}{
		{6, 3, []int64{3, 4, 1}}, {6, 100, []int64{3, 4, 1, 2}}, {2, 3, nil},
	} {
		dir := t.TempDir()
		runRanks(t, text, testRun{pipeline: 2, data: 1, expert: 1, sets: chainSets, opts: Options{Dir: dir, StopAfter: c.steps, TraceSteps: c.trace}})
		var trace struct {
			TraceEvents []struct {
				Cat  string
				PID  int
				Args struct{ Step int64 }
			}
		}
		b, err := os.ReadFile(filepath.Join(dir, "trace.json"))
		if c.want == nil {
			if err == nil {
				t.Errorf("a trace of %d steps, all of them warm-up", c.steps)
			}
			continue
		}
		if err == nil {
			err = json.Unmarshal(b, &trace)
		}
		if err != nil {
			t.Errorf("trace of %d steps in %d: %v", c.trace, c.steps, err)
			continue
		}
		for rank := range 2 {
			var got []int64
			for _, e := range trace.TraceEvents {
				if e.PID == rank && e.Cat == "optimizer" {
					got = append(got, e.Args.Step)
				}
			}
			if !slices.Equal(got, c.want) {
				t.Errorf("trace of %d steps in %d: rank %d has steps %v, want %v", c.trace, c.steps, rank, got, c.want)
			}
		}
	}
}

// TestUntrained: what a stage does not train it leaves alone, weight decay included: the MTP modules of a stage that learns
// from preferences, or whose mtp_weight is 0.
func TestUntrained(t *testing.T) {
	text := chainText(t)
	for name, sets := range map[string][]string{
		"prefer":   nil,
		"instruct": {"stages.1.mtp_weight=0", "model.moe.seq_aux=0"},
	} {
		dir := t.TempDir()
		runRanks(t, text, testRun{pipeline: 1, data: 2, expert: 2, sets: append(slices.Clone(chainSets), sets...), opts: Options{Dir: dir}})
		before, after := "pretrain-00000004", "instruct-00000006"
		if name == "prefer" {
			before, after = after, "prefer-00000006"
		}
		then, now := readAll(t, filepath.Join(dir, "checkpoints", before)), readAll(t, filepath.Join(dir, "checkpoints", after))
		mtp, others := 0, 0
		for tensor, v := range then {
			if !strings.HasPrefix(tensor, "weight ") || strings.Contains(tensor, "e_score_correction_bias") { // moved by counts
				continue
			}
			same := slices.Equal(v, now[tensor])
			if strings.HasPrefix(tensor, "weight model.layers.4.") {
				if mtp++; !same {
					t.Errorf("%s: %s, of the MTP module, has changed", name, tensor)
				}
			} else if others++; same {
				t.Errorf("%s: %s has not changed", name, tensor)
			}
		}
		if mtp < 20 || others < 50 {
			t.Errorf("%s: %d tensors of the MTP module and %d others", name, mtp, others)
		}
	}
}

// TestOldState: a checkpoint from when the engine kept a count of skipped steps, which was always 0, goes on as any other;
// one of today has no such count. Its metrics do.
func TestOldState(t *testing.T) {
	text, dir := small(t), t.TempDir()
	m := testRun{pipeline: 1, data: 1, expert: 1, sets: append(epochSets(t), "stages.0.steps=4")}
	whole, _ := runRanks(t, text, m)
	m.opts = Options{Dir: dir, StopAfter: 2}
	_, out := runRanks(t, text, m)
	line, err := os.ReadFile(filepath.Join(dir, "metrics.jsonl"))
	if err != nil || !strings.Contains(string(line), `"skipped":0,`) {
		t.Errorf("%v, metrics %s", err, line)
	}
	withExtra(t, out.Checkpoint, "skipped", json.RawMessage("0"))
	m.opts = Options{Dir: dir, Resume: true}
	rest, _ := runRanks(t, text, m)
	sameLosses(t, rest, whole[2:], 0)
}

// withExtra writes a checkpoint of one rank again, with one more entry of state, which it must not have.
func withExtra(t *testing.T, dir, key string, value json.RawMessage) {
	t.Helper()
	r, err := checkpoint.Open(dir)
	if err != nil {
		t.Fatal(err)
	}
	defer r.Close()
	meta, parts := r.Meta(), []checkpoint.Slice(nil)
	if had, ok := meta.Extra[key]; ok {
		t.Fatalf("%s has %s %s", dir, key, had)
	}
	meta.Extra[key] = value
	tensors := readAll(t, dir)
	for _, info := range r.Tensors() {
		parts = append(parts, checkpoint.Slice{Name: info.Name, Kind: info.Kind, Shape: info.Shape, Rows: info.Shape[0], Data: tensors[info.String()]})
	}
	if err := checkpoint.Begin(dir); err != nil {
		t.Fatal(err)
	}
	file, err := checkpoint.WriteRank(dir, 0, parts, &meta)
	if err == nil {
		err = checkpoint.Commit(dir, &meta, []checkpoint.File{file})
	}
	if err != nil {
		t.Fatal(err)
	}
	again, err := checkpoint.Open(dir)
	if err != nil {
		t.Fatal(err)
	}
	defer again.Close()
	if got := again.Meta().Extra[key]; string(got) != string(value) {
		t.Fatalf("the checkpoint has %s=%s", key, got)
	}
}
