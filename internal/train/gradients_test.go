package train

import (
	"math"
	"path/filepath"
	"strings"
	"testing"

	"moetor/configs"
	"moetor/data"
	"moetor/model"
)

// TestCompareGradients: nothing but zeros for FP32 itself; and for one kind of parameter in fp8 what its definition says.
func TestCompareGradients(t *testing.T) {
	dir, corpus := gradientRun(t)
	load := func(r model.Recipe) *Model {
		m, err := LoadModel(dir, r)
		if err != nil {
			t.Fatal(err)
		}
		return m
	}
	same, err := load(model.Recipe{}).CompareGradients(t.Context(), corpus, 2, 3)
	if err != nil {
		t.Fatal(err)
	}
	for _, e := range same {
		if e.Error != 0 || e.Mean != 0 || e.Scale != 1 || e.Sampling <= 0 {
			t.Errorf("FP32 against itself: %+v", e)
		}
	}
	if _, err := load(model.Recipe{}).CompareGradients(t.Context(), corpus, 2, math.MaxInt/2+1); err == nil || !strings.Contains(err.Error(), "sequences") {
		t.Errorf("more batches than there are numbers: %v", err)
	}
	if w := load(model.Recipe{}).settings(false).MTPWeight; w != 0.3 {
		t.Errorf("MTP modules have weight %v, in their stage 0.3", w)
	}

	const batch, batches = 2, 3
	recipe := configs.Precision{Recipe: "fp8", Promote: configs.DefaultPromote}.ModelRecipe()
	var grads [2][batches][]float64 // of the head's weight
	for i, r := range [2]model.Recipe{{}, recipe} {
		m := load(r)
		for n := range batches {
			var b batchBuffer
			if err := corpus.Read(t.Context(), int64(n*batch), batch, &b.Batch); err != nil {
				t.Fatal(err)
			}
			if err := m.gradient(t.Context(), b.micro(nil), false); err != nil {
				t.Fatal(err)
			}
			for _, p := range m.Chunk.Params() {
				if p.Name == "lm_head.weight" {
					for _, g := range p.Grad {
						grads[i][n] = append(grads[i][n], float64(g))
					}
				}
			}
		}
	}
	norm := func(v []float64) (sum float64) {
		for _, x := range v {
			sum += x * x
		}
		return math.Sqrt(sum)
	}
	values := func(n int, of func(n, j int) float64) []float64 {
		out := make([]float64, len(grads[0][0]))
		for j := range out {
			out[j] = of(n, j)
		}
		return out
	}
	mean := func(i, j int) (sum float64) {
		for n := range batches {
			sum += grads[i][n][j] / batches
		}
		return sum
	}
	var diff, size, variance float64
	for n := range batches {
		diff += math.Pow(norm(values(n, func(n, j int) float64 { return grads[1][n][j] - grads[0][n][j] })), 2)
		size += math.Pow(norm(grads[0][n]), 2)
		variance += math.Pow(norm(values(n, func(n, j int) float64 { return grads[0][n][j] - mean(0, j) })), 2) / (batches - 1) / batches
	}
	full := values(0, func(_, j int) float64 { return mean(0, j) })
	along := 0.0
	for j, f := range full {
		along += f * mean(1, j)
	}
	want := GradientError{Kind: "lm_head.weight", Error: math.Sqrt(diff / size),
		Mean:  norm(values(0, func(_, j int) float64 { return mean(1, j) - mean(0, j) })) / norm(full),
		Scale: along / math.Pow(norm(full), 2), Sampling: math.Sqrt(variance) / norm(full)}
	got, err := load(recipe).CompareGradients(t.Context(), corpus, batch, batches)
	if err != nil {
		t.Fatal(err)
	}
	for _, e := range got {
		if e.Kind == want.Kind {
			near := func(a, b float64) bool { return math.Abs(a-b) < 1e-9*math.Abs(b) }
			if !near(e.Error, want.Error) || !near(e.Mean, want.Mean) || !near(e.Scale, want.Scale) || !near(e.Sampling, want.Sampling) {
				t.Errorf("%+v, want %+v", e, want)
			}
			return
		}
	}
	t.Errorf("no %s in %+v", want.Kind, got)
}

// gradientRun trains the tiny model for some steps and opens a text.
func gradientRun(t *testing.T) (dir string, text data.Source) {
	dir = t.TempDir()
	runRanks(t, small(t), testRun{pipeline: 1, data: 1, expert: 1, sets: []string{"stages.0.val.data=[]", "run.eval_every=0"},
		opts: Options{Dir: dir, StopAfter: 5}})
	m, err := LoadModel(dir, model.Recipe{})
	if err != nil {
		t.Fatal(err)
	}
	c, err := data.Open(t.Context(), data.OpenConfig{Val: data.ValConfig{Data: []data.SourceConfig{{Path: writeVal(t, filepath.Join(t.TempDir(), "text.txt"))}}},
		Tokenizer: m.Tokenizer, Len: m.Run.Model.Context, Cache: data.CacheOff, At: "--data"})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { c.Close() })
	return dir, c.Val
}
