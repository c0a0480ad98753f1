package train

import (
	"fmt"
	"strings"
	"sync"
	"testing"

	"moetor/comm"
	"moetor/comm/inproc"
	"moetor/configs"
	"moetor/optimizer"
)

// TestPredictMemory compares the prediction with what the ranks of a run hold after a step, at meshes with every kind of
// buffer: exactly, but for experts that share a layer, where routing decides.
func TestPredictMemory(t *testing.T) {
	text := strings.Replace(withVal(t, tiny), "{start: 6, end: 11, ramp_tokens: 2000, step: 1}", "{start: 16}", 1)
	for _, mesh := range []struct {
		pipeline, data, expert int
		schedule, moments      string
		recipe, recompute      string
	}{{1, 1, 1, "1f1b", "fp32", "fp32", "[]"}, {2, 1, 1, "1f1b", "fp32", "fp8", "[]"}, {4, 1, 1, "1f1b", "fp32", "fp32", "[norm, swiglu]"},
		{2, 1, 1, "gpipe", "bf16", "fp32", "[]"}, {1, 2, 1, "1f1b", "bf16", "mxfp8", "[mla_up]"},
		{2, 2, 2, "1f1b", "fp32", "fp32", "[]"}, {2, 2, 2, "1f1b", "fp32", "fp8", "[]"}} {
		at := fmt.Sprintf("%dx%d,%d %s %s %s %s", mesh.pipeline, mesh.data, mesh.expert, mesh.schedule, mesh.moments, mesh.recipe, mesh.recompute)
		world := mesh.pipeline * mesh.data
		load := func() *configs.Run {
			run, err := configs.Parse([]byte(text), "test", []string{fmt.Sprintf("parallel.pipeline=%d", mesh.pipeline),
				fmt.Sprintf("parallel.expert=%d", mesh.expert), "parallel.schedule=" + mesh.schedule, "stages.0.optimizer.moments=" + mesh.moments, "parallel.microbatch=2",
				"precision.recipe=" + mesh.recipe, "model.recompute=" + mesh.recompute})
			if err == nil {
				_, err = OpenTokenizer(run)
			}
			if err == nil {
				err = configs.Validate(run, world)
			}
			if err != nil {
				t.Fatal(err)
			}
			return run
		}
		all, err := PredictMemory(load(), world, 1)
		if err != nil {
			t.Fatal(err)
		}
		var wg sync.WaitGroup
		for _, tr := range inproc.New(world) {
			run := load()
			wg.Go(func() {
				defer tr.Close()
				trainer, err := oneStep(t, run, tr)
				if err != nil {
					t.Errorf("%s, rank %d: %v", at, tr.Rank(), err)
					return
				}
				p, _, _ := trainer.mesh.Coord(tr.Rank())
				trainer.compareMemory(t, fmt.Sprintf("%s, rank %d", at, tr.Rank()), all[p])
			})
		}
		wg.Wait()
	}
}

func oneStep(t *testing.T, run *configs.Run, tr comm.Transport) (*Trainer, error) {
	trainer, err := New(t.Context(), run, tr, Options{LocalRanks: tr.Size(), Threads: 1})
	if err != nil {
		return nil, err
	}
	defer trainer.close()
	if err := trainer.enter(t.Context(), 0, optimizer.Position{}); err != nil {
		return nil, err
	}
	_, err = trainer.step(t.Context())
	return trainer, err
}

func (t *Trainer) compareMemory(test *testing.T, at string, want RankMemory) {
	near := func(what string, predicted, held int64, tolerance float64) {
		if d := float64(predicted - held); d > tolerance*float64(held) || -d > tolerance*float64(held) {
			test.Errorf("%s: %s are %d bytes, predicted %d", at, what, held, predicted)
		}
	}
	var weights, packed, arenas, moments, messages, batches int64
	for _, c := range t.chunks {
		values, _ := c.Blocks()
		weights += 4 * int64(len(values))
		packed += c.PackedBytes()
		arenas += 4 * c.TempPeak()
		peaks := c.ArenaPeaks()
		if len(peaks) != want.InFlight {
			test.Errorf("%s: %d micro-batches were in flight, predicted %d", at, len(peaks), want.InFlight)
		}
		for _, n := range peaks {
			arenas += 4 * n
		}
	}
	near("weights", want.Bytes.Weights, weights, 0)
	near("packed weights", want.Bytes.Packed, packed, 0.05) // one of them as codes, and allocations of sizes that the runtime has
	near("gradients", want.Bytes.Gradients, weights, 0)
	for _, s := range t.adam.Slices() {
		moments += 4*int64(len(s.M)+len(s.V)) + 2*int64(len(s.M16)+len(s.V16))
	}
	near("moments", want.Bytes.Moments, moments, 0.001) // rows that do not spread evenly
	tables := 0.05                                      // the index tables of so small a model
	if t.mesh.Expert > 1 {
		tables = 0.3
	}
	near("activations", want.Bytes.Activations, arenas, tables)
	for _, pair := range t.link.buffers {
		messages += 4 * int64(len(pair[0])+len(pair[1]))
	}
	if t.mesh.Pipeline > 1 && t.mesh.Data == 1 { // nothing else but the rings, and the gradient of a tied copy
		rest := 2 * int64(t.world.Size()-1) * RingBytes(t.world.Size())
		if t.stages[0] != nil {
			rest += 4 * int64(t.run.Model.VocabSize*t.run.Model.Dim)
		}
		near("messages", want.Bytes.Communication-rest, messages, 0)
	}
	for i := range t.batches {
		b := &t.batches[i].Batch
		batches += 4 * int64(len(b.Tokens)+len(b.Targets)+len(b.Weight))
	}
	near("batches", want.Bytes.Data, batches, 0)
}

// TestPredictMemoryStages: the stage that needs most counts, pairs are two sequences, and a wrong mesh is an error.
func TestPredictMemoryStages(t *testing.T) {
	load := func(sets ...string) *configs.Run {
		run, err := configs.Parse([]byte(withVal(t, tiny)), "test", sets)
		if err == nil {
			_, err = OpenTokenizer(run)
		}
		if err != nil {
			t.Fatal(err)
		}
		return run
	}
	one, err := PredictMemory(load(), 1, 1)
	if err != nil {
		t.Fatal(err)
	}
	if sum := one[0].Bytes.Total(); sum != one[0].Total || one[0].Stage != "pretrain" {
		t.Errorf("total %d of %d, stage %s", one[0].Total, sum, one[0].Stage)
	}
	run := load("model.mtp.depth=0")
	plain, err := PredictMemory(run, 1, 1)
	if err != nil {
		t.Fatal(err)
	}
	pairs := run.Stages[0]
	pairs.Name, pairs.Objective, pairs.Preference.Beta = "pairs", "dpo", 0.1
	run.Stages = append(run.Stages, pairs)
	both, err := PredictMemory(run, 1, 1)
	if err != nil {
		t.Fatal(err)
	}
	if a, b := plain[0].Bytes.Activations, both[0].Bytes.Activations; both[0].Stage != "pairs" || b < 19*a/10 || b > 2*a {
		t.Errorf("activations %d of stage %s: want that of pairs, twice %d", b, both[0].Stage, a)
	}
	if _, err := PredictMemory(load("parallel.pipeline=3"), 4, 1); err == nil || !strings.Contains(err.Error(), "parallel.pipeline=3") {
		t.Errorf("a mesh that does not fit: %v", err)
	}
}

// TestBench: steps are those of a run, and nothing is written.
func TestBench(t *testing.T) {
	text := withVal(t, tiny)
	want, _ := runRanks(t, text, testRun{pipeline: 1, data: 1, expert: 1, sets: []string{"stages.0.steps=3"}})
	run, err := configs.Parse([]byte(text), "test", []string{"stages.0.steps=3"})
	if err != nil {
		t.Fatal(err)
	}
	tr := inproc.New(1)[0]
	defer tr.Close()
	trainer, err := New(t.Context(), run, tr, Options{LocalRanks: 1, Threads: 1})
	if err != nil {
		t.Fatal(err)
	}
	var got []Report
	if err := trainer.Bench(t.Context(), 3, func(r *Report) error { got = append(got, *r); return nil }); err != nil {
		t.Fatal(err)
	}
	for i, r := range got {
		if r.Loss != want[i].Loss || r.GradNorm != want[i].GradNorm {
			t.Errorf("step %d: loss %v, norm %v, of a run %v, %v", i+1, r.Loss, r.GradNorm, want[i].Loss, want[i].GradNorm)
		}
		sum := 0.0
		for _, ms := range r.Time {
			sum += ms
		}
		if d := sum - r.StepMS; d > 0.02*r.StepMS || d < -0.02*r.StepMS {
			t.Errorf("step %d: times add up to %v of %v ms", i+1, sum, r.StepMS)
		}
	}
	if len(got) != 3 {
		t.Errorf("%d reports of 3 steps", len(got))
	}
}
