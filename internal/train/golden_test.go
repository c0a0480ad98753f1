package train

import (
	"context"
	"flag"
	"fmt"
	"os"
	"path/filepath"
	"runtime"
	"slices"
	"strings"
	"sync"
	"testing"

	"moetor/comm"
	"moetor/comm/inproc"
	"moetor/configs"
	"moetor/internal/kernel"
	"moetor/optimizer"
)

var update = flag.Bool("update", false, "rewrite testdata/golden with what this tree computes")

// A goldenRun is the beginning of a preset at the mesh it is made for.
type goldenRun struct {
	preset                 string
	pipeline, data, expert int
	steps                  int
	long                   bool // only with MOETOR_GOLDEN=all
}

var goldenRuns = []goldenRun{
	{"demo", 2, 2, 2, 50, false},
	{"shakespeare-char", 1, 1, 1, 50, false},
	{"bench-s", 1, 1, 1, 3, true},
	{"bench-fine", 1, 1, 1, 3, true},
}

// TestGolden compares the losses and gradient norms of the presets' first steps, all digits, with those in testdata/golden:
// whatever changes a number of a run shows here. Each kernel implementation has its own numbers, as the order of its sums
// differs. A change that is meant to change numbers rewrites the files (make golden-update), and its commit says why.
func TestGolden(t *testing.T) {
	if runtime.GOARCH != "amd64" {
		t.Skip("the numbers hold for amd64: compilers of other architectures fuse multiplications and additions of the Go code")
	}
	for _, g := range goldenRuns {
		for _, impl := range kernel.Impls() {
			t.Run(g.preset+"-"+impl, func(t *testing.T) {
				switch {
				case g.long && !everything():
					t.Skip("takes long; run it with MOETOR_GOLDEN=all (make golden)")
				case g.long && impl == "portable":
					t.Skip("takes many minutes, and the portable kernels are compared on the smaller presets")
				}
				g.check(t, impl)
			})
		}
	}
}

func (g goldenRun) check(t *testing.T, impl string) {
	restore, ok := kernel.Use(impl)
	if !ok {
		t.Fatalf("no kernel implementation %s", impl)
	}
	defer restore()
	if impl == "portable" {
		g.steps = min(g.steps, 3) // many times slower
	}
	text := fmt.Sprintf("# The first %d steps of preset %s at pipeline %d x data %d, expert %d, with the %s kernels on amd64.\n"+
		"# Made by: make golden-update\n# step loss mtp_loss aux_loss grad_norm\n", g.steps, g.preset, g.pipeline, g.data, g.expert, impl)
	if impl != kernel.Impls()[0] && !everything() {
		g.steps = min(g.steps, 10) // of the kernels that a run here would not use
	}
	for _, r := range g.run(t) {
		text += fmt.Sprintf("%d %.17g %.17g %.17g %.17g\n", r.Step, r.Loss, r.MTPLoss, r.AuxLoss, r.GradNorm)
	}
	path := filepath.Join("testdata", "golden", g.preset+"-"+impl+".txt")
	if *update {
		if err := os.MkdirAll(filepath.Dir(path), 0o755); err != nil {
			t.Fatal(err)
		}
		if err := os.WriteFile(path, []byte(text), 0o644); err != nil {
			t.Fatal(err)
		}
		return
	}
	file, err := os.ReadFile(path)
	if err != nil {
		t.Fatal(err)
	}
	want := slices.Collect(strings.Lines(string(file)))
	for i, got := range slices.Collect(strings.Lines(text)) {
		if i >= len(want) {
			t.Fatalf("%s ends before %s", path, got)
		}
		if got != want[i] {
			t.Fatalf("%s:%d differs:\ngot  %swant %s", path, i+1, got, want[i])
		}
	}
}

// everything tells whether to run all there is, however long it takes.
func everything() bool { return *update || os.Getenv("MOETOR_GOLDEN") == "all" }

// run steps through the beginning of the preset's first stage and returns the reports of rank 0. It does not go to the end
// of a run, where a validation over all held-out text and a checkpoint would take longer than the steps.
func (g goldenRun) run(t *testing.T) []Report {
	t.Helper()
	ctx, cancel := context.WithCancel(t.Context())
	defer cancel()
	ranks := g.pipeline * g.data
	rank := func(tr comm.Transport) (reports []Report, err error) {
		run, err := configs.Load(g.preset, []string{"run.cache=off", fmt.Sprintf("parallel.pipeline=%d", g.pipeline), fmt.Sprintf("parallel.expert=%d", g.expert)})
		if err == nil {
			err = configs.Validate(run, ranks)
		}
		if err != nil {
			return nil, err
		}
		trainer, err := New(ctx, run, tr, Options{LocalRanks: ranks, Threads: 1})
		if err != nil {
			return nil, err
		}
		defer trainer.close()
		if err := trainer.enter(ctx, 0, optimizer.Position{}); err != nil {
			return nil, err
		}
		for range g.steps {
			r, err := trainer.step(ctx)
			if err != nil {
				return nil, err
			}
			reports = append(reports, r)
		}
		return reports, nil
	}
	all, errs := make([][]Report, ranks), make([]error, ranks)
	var wg sync.WaitGroup
	for i, tr := range inproc.New(ranks) {
		wg.Go(func() {
			defer tr.Close() // so that a rank that fails ends the others
			all[i], errs[i] = rank(tr)
		})
	}
	wg.Wait()
	for i, err := range errs {
		if err != nil {
			t.Errorf("rank %d: %v", i, err)
		}
	}
	if t.Failed() {
		t.FailNow()
	}
	return all[0]
}

// TestGoldenImplementations: the kernel implementations give the losses of the presets in FP32 within 1e-5. (In codes, as in
// the demo, a difference in the last bit of a value can move its code, so runs part sooner.)
func TestGoldenImplementations(t *testing.T) {
	for _, preset := range []string{"shakespeare-char", "bench-s", "bench-fine"} {
		want := goldenLosses(t, preset, "avx512")
		for _, impl := range []string{"avx2", "portable"} {
			got := goldenLosses(t, preset, impl)
			if len(got) < 3 && !(impl == "portable" && len(got) == 0) { // see TestGolden for what is not run
				t.Errorf("%s has %d steps with %s", preset, len(got), impl)
			}
			for i, loss := range got {
				if relative(loss, want[i]) > 1e-5 {
					t.Errorf("%s, step %d: loss %v with %s, %v with avx512", preset, i+1, loss, impl, want[i])
				}
			}
		}
	}
}

// goldenLosses are the losses in a file; none if there is no such file.
func goldenLosses(t *testing.T, preset, impl string) (losses []float64) {
	t.Helper()
	file, err := os.ReadFile(filepath.Join("testdata", "golden", preset+"-"+impl+".txt"))
	if err != nil {
		if os.IsNotExist(err) {
			return nil
		}
		t.Fatal(err)
	}
	for line := range strings.Lines(string(file)) {
		var step int
		var loss float64
		if n, _ := fmt.Sscan(line, &step, &loss); n == 2 {
			losses = append(losses, loss)
		}
	}
	return losses
}
