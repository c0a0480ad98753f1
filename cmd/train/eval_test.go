package main

import (
	"encoding/json"
	"fmt"
	"math"
	"os"
	"path/filepath"
	"strings"
	"testing"
)

// TestEvalRecipe: eval in the recipe of a run gives the validation loss that the run had, in FP32 another one.
func TestEvalRecipe(t *testing.T) {
	dir := filepath.Join(t.TempDir(), "run")
	text := write(t, "text.txt", strings.Repeat("To be, or not to be, that is the question: ", 20))
	mustTrain(t, launchArgs(tinyConfig(t), dir, 1, 1, 1, "--set", "stages.0.val.data=[{path: "+text+"}]", "--set", "run.eval_every=20",
		"--set", "precision.recipe=fp8")...)
	want := lastValidation(t, dir)
	loss := func(recipe string) float64 { return evalLoss(t, dir, text, "--recipe", recipe) }
	if got := loss("fp8"); want == 0 || math.Abs(got-want) > 1e-9 {
		t.Errorf("eval in fp8 gives %v, the run had %v", got, want)
	}
	// Codes of E4M3 move gradients by some per cent.
	out := mustTrain(t, "eval", "--checkpoint", dir, "--data", text, "--json", "--batch", "3", "--recipe", "fp8", "--gradients", "4").stdout
	var e struct {
		Gradients []struct {
			Kind                         string
			Error, Mean, Scale, Sampling float64
		}
	}
	if err := json.Unmarshal([]byte(out), &e); err != nil {
		t.Fatalf("%v in %s", err, out)
	}
	if n := len(e.Gradients); n < 10 || e.Gradients[n-1].Kind != "all" {
		t.Fatalf("gradients of %+v", e.Gradients)
	} else if all := e.Gradients[n-1]; all.Error < 0.001 || all.Error > 0.3 || all.Mean > 0.3 || math.Abs(all.Scale-1) > 0.1 {
		t.Errorf("gradients: %+v", all)
	}
	if got := loss("fp32"); math.Abs(got-want) < 1e-7 || math.Abs(got-want) > 0.05 {
		t.Errorf("eval in fp32 gives %v, in fp8 %v", got, want)
	}
}

// lastValidation is the validation loss at the end of a run.
func lastValidation(t *testing.T, dir string) float64 {
	t.Helper()
	b, err := os.ReadFile(filepath.Join(dir, "metrics.jsonl"))
	if err != nil {
		t.Fatal(err)
	}
	lines := strings.Split(strings.TrimSpace(string(b)), "\n")
	var last struct {
		Loss float64 `json:"val_loss"`
	}
	if err := json.Unmarshal([]byte(lines[len(lines)-1]), &last); err != nil {
		t.Fatal(err)
	}
	return last.Loss
}

// evalLoss is what eval gives for a run and a text.
func evalLoss(t *testing.T, dir, text string, args ...string) float64 {
	t.Helper()
	var e struct{ Loss float64 }
	out := mustTrain(t, append([]string{"eval", "--checkpoint", dir, "--data", text, "--json", "--batch", "3"}, args...)...).stdout
	if err := json.Unmarshal([]byte(out), &e); err != nil {
		t.Fatalf("%v in %s", err, out)
	}
	return e.Loss
}

// TestEvalAsTrained: eval keeps documents apart if the stage did, and sums as the run did where it is told to. Each of these
// changes the loss.
func TestEvalAsTrained(t *testing.T) {
	var rows strings.Builder
	for i := range 30 {
		fmt.Fprintf(&rows, "{\"text\": \"Document %d: to be, or not to be.\"}\n", i)
	}
	text := write(t, "docs.jsonl", rows.String())
	for name, c := range map[string]struct{ sets, args, others []string }{
		"isolated documents": {[]string{"stages.0.pack.isolate=true"}, nil, nil},
		"hopper":             {[]string{"precision.recipe=hopper", "precision.promote=0"}, []string{"--recipe", "hopper", "--promote", "0"}, []string{"--recipe", "hopper"}},
		"keep":               {[]string{"precision.recipe=fp8", "precision.keep=[inputs]"}, []string{"--recipe", "fp8", "--keep", "inputs"}, []string{"--recipe", "fp8"}},
	} {
		dir := filepath.Join(t.TempDir(), "run")
		args := launchArgs(tinyConfig(t), dir, 1, 1, 1, "--set", "stages.0.val.data=[{path: "+text+"}]", "--set", "run.eval_every=4", "--set", "stages.0.steps=4",
			"--set", "model.dim=256", "--set", "model.context=64")
		for _, set := range c.sets {
			args = append(args, "--set", set)
		}
		mustTrain(t, args...)
		want := lastValidation(t, dir)
		if got := evalLoss(t, dir, text, c.args...); want == 0 || math.Abs(got-want) > 1e-9 {
			t.Errorf("%s: eval gives %v, the run had %v", name, got, want)
		}
		if c.others != nil && math.Abs(evalLoss(t, dir, text, c.others...)-want) < 1e-9 {
			t.Errorf("%s: eval with %v gives the loss of the run, %v: the settings change nothing", name, c.others, want)
		}
	}
}

// TestEvalReward: a reward model predicts no text, and is refused for that and not for the text.
func TestEvalReward(t *testing.T) {
	dir := filepath.Join(t.TempDir(), "run")
	pairs := write(t, "pairs.jsonl", strings.Repeat(`{"prompt":"1 plus 1?","chosen":"2.","rejected":"3."}`+"\n", 8))
	mustTrain(t, launchArgs(tinyConfig(t), dir, 1, 1, 1, "--set", "stages.0.objective=reward", "--set", "stages.0.data=[{path: "+pairs+"}]",
		"--set", "parallel.microbatch=2", "--set", "stages.0.steps=1", "--set", "stages.0.batch.start=2", "--set", "stages.0.batch.end=4", "--set", "stages.0.batch.step=2")...)
	r := start(t, "eval", "--checkpoint", dir, "--data", pairs, "--recipe", "fp8", "--gradients", "2")
	if r.code != 2 || !strings.Contains(r.stderr, "reward model") {
		t.Errorf("exit %d, %q", r.code, r.stderr)
	}
}
