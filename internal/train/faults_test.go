package train

import (
	"context"
	"errors"
	"fmt"
	"math"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"moetor/comm/inproc"
	"moetor/configs"
	"moetor/model"
)

// The tests of this file are faults seen in other engines; the numbers are those of the list in docs/faults.md.

// TestCutIndependence is P01 and P32: loss, balance loss and gradient norm do not depend on how the global batch is cut
// into micro-batches and over ranks.
func TestCutIndependence(t *testing.T) {
	text := small(t)
	sets := []string{"stages.0.steps=3", "stages.0.batch.start=8", "stages.0.batch.end=8", "stages.0.batch.ramp_tokens=0",
		"stages.0.batch.step=0", "model.moe.seq_aux=0.1", "run.eval_every=3"}
	base, _ := runRanks(t, text, testRun{pipeline: 1, data: 1, expert: 1, sets: append(sets, "parallel.microbatch=8")})
	if base[0].AuxLoss < 0.25 {
		t.Fatalf("balance loss %v: alpha 0.1 over 4 MoE layers must be near 0.4 or above", base[0].AuxLoss)
	}
	for _, m := range []struct {
		testRun
		micro int
	}{
		{testRun{pipeline: 1, data: 1, expert: 1}, 1}, {testRun{pipeline: 1, data: 1, expert: 1}, 2}, {testRun{pipeline: 1, data: 1, expert: 1}, 3},
		{testRun{pipeline: 2, data: 1, expert: 1}, 4}, {testRun{pipeline: 4, data: 1, expert: 1}, 2}, {testRun{pipeline: 1, data: 2, expert: 1}, 2},
		{testRun{pipeline: 1, data: 2, expert: 2}, 4}, {testRun{pipeline: 2, data: 2, expert: 2}, 1},
	} {
		m.sets = append(slices.Clone(sets), fmt.Sprintf("parallel.microbatch=%d", m.micro))
		got, _ := runRanks(t, text, m.testRun)
		for name, pair := range map[string][2]float64{"loss": {got[0].Loss, base[0].Loss}, "aux": {got[0].AuxLoss, base[0].AuxLoss},
			"norm": {got[0].GradNorm, base[0].GradNorm}, "val": {*got[2].ValLoss, *base[2].ValLoss}} {
			if relative(pair[0], pair[1]) > 1e-6 && (name != "val" || relative(pair[0], pair[1]) > 1e-5) {
				t.Errorf("%dx%d,%d micro-batch %d: %s %v, whole %v", m.pipeline, m.data, m.expert, m.micro, name, pair[0], pair[1])
			}
		}
	}
}

// TestFewerMicroBatchesThanStages is P11: 4 stages with 1, 2 and 3 micro-batches train as one stage does.
func TestFewerMicroBatchesThanStages(t *testing.T) {
	text := small(t)
	for n := 1; n <= 3; n++ {
		sets := []string{"stages.0.steps=3", fmt.Sprintf("stages.0.batch.start=%d", n), fmt.Sprintf("stages.0.batch.end=%d", n),
			"stages.0.batch.ramp_tokens=0", "stages.0.batch.step=0"}
		want, _ := runRanks(t, text, testRun{pipeline: 1, data: 1, expert: 1, sets: sets})
		got, _ := runRanks(t, text, testRun{pipeline: 4, data: 1, expert: 1, sets: sets})
		sameLosses(t, got, want, 0)
	}
}

// TestUnevenStages is P12: a stage without any layer, MoE layers on some stages only, padded tails of samples, a batch
// that leaves ranks without a micro-batch.
func TestUnevenStages(t *testing.T) {
	text := small(t)
	sets := []string{"stages.0.steps=3", "model.dense_layers=2", "stages.0.pack.isolate=true"}
	for _, d := range []int{1, 3} {
		want, _ := runRanks(t, text, testRun{pipeline: 1, data: d, expert: 1, sets: sets})
		got, _ := runRanks(t, text, testRun{pipeline: 4, data: d, expert: 1, sets: append(slices.Clone(sets), "parallel.split=[1,0,1,2]")})
		sameLosses(t, got, want, 0)
	}
}

// TestTiedEmbeddings is P13: with a tied embedding and a sharded optimizer, 5 steps at 2x2 equal one rank, and both
// copies of the table stay equal to the bit.
func TestTiedEmbeddings(t *testing.T) {
	text := small(t)
	for _, mtp := range []string{"model.mtp.depth=0", "model.mtp.depth=1"} {
		sets := []string{"stages.0.steps=5", "model.tie_embeddings=true", mtp}
		if mtp == "model.mtp.depth=0" {
			sets = append(sets, "stages.0.mtp_weight=0")
		}
		one, _ := runRanks(t, text, testRun{pipeline: 1, data: 1, expert: 1, sets: sets})
		two, _ := runRanks(t, text, testRun{pipeline: 2, data: 1, expert: 1, sets: sets})
		sameLosses(t, two, one, 0)
		wide, _ := runRanks(t, text, testRun{pipeline: 1, data: 2, expert: 1, sets: sets})
		four, _ := runRanks(t, text, testRun{pipeline: 2, data: 2, expert: 1, sets: sets})
		sameLosses(t, four, wide, 0)
		sameLosses(t, four, one, 1e-5)
	}
}

// TestNonFinite is P18: an infinite weight in expert 3 of layer 2 on one rank. Every rank refuses the step, the message
// has step, rank, layer, tensor and micro-batch, and the checkpoint of the step before is what remains.
func TestNonFinite(t *testing.T) {
	text := small(t)
	const pipelineRanks, dataRanks = 2, 2
	world := pipelineRanks * dataRanks
	dir := t.TempDir()
	errs := make(chan error, world)
	weights := make([][]float32, world)
	for rank, tr := range inproc.New(world) {
		run, err := configs.Parse([]byte(text), "test", []string{"parallel.pipeline=2", "parallel.expert=2", "parallel.split=[2,2]", "stages.0.steps=8", "checkpoint.every=3"})
		if err != nil {
			t.Fatal(err)
		}
		go func() {
			defer tr.Close()
			var trainer *Trainer
			o := Options{Dir: dir, LocalRanks: world, Threads: 1}
			o.Progress = func(step int64) {
				if step != 4 {
					return
				}
				for _, c := range trainer.chunks {
					for _, p := range c.Params() {
						if p.Name == "model.layers.2.mlp.experts.3.up_proj.weight" && p.Value != nil {
							p.Value[5] = float32(math.Inf(1))
						} else {
							weights[rank] = append(weights[rank], p.Value...)
						}
					}
				}
			}
			var err error
			if trainer, err = New(context.Background(), run, tr, o); err == nil {
				_, err = trainer.Run(context.Background())
			}
			if trainer != nil { // no weight but the injected one has changed
				var now []float32
				for _, c := range trainer.chunks {
					for _, p := range c.Params() {
						if p.Name != "model.layers.2.mlp.experts.3.up_proj.weight" {
							now = append(now, p.Value...)
						}
					}
				}
				if !slices.Equal(now, weights[rank]) {
					err = errors.Join(err, fmt.Errorf("rank %d: weights changed in the refused step", rank))
				}
			}
			errs <- err
		}()
	}
	for range world {
		err := <-errs
		var d *DivergedError
		if !errors.As(err, &d) || d.Step != 4 {
			t.Fatalf("error %v, want a refusal of step 4", err)
		}
		// Expert 3 of 8 is on the first expert rank, and layer 2 on the second stage: world rank 2.
		for _, want := range []string{"step 4", "rank 2", "model.layers.2.mlp.experts.3", "micro-batch 0"} {
			if !strings.Contains(err.Error(), want) {
				t.Errorf("%q does not say %q", err, want)
			}
		}
		if strings.Contains(err.Error(), "changed") {
			t.Error(err)
		}
	}
	if _, err := os.Stat(filepath.Join(dir, "checkpoints", "pretrain-00000003", "manifest.json")); err != nil {
		t.Error(err)
	}
}

// TestBiasUpdate is P03: after one step the bias of every MoE layer, the MTP module's included, has moved by the bias speed
// against the load of its expert, and the counts are tokens times top-k.
func TestBiasUpdate(t *testing.T) {
	run, err := configs.Parse([]byte(small(t)), "test", []string{"stages.0.steps=1", "stages.0.val.data=[]", "run.eval_every=0", "stages.0.router.bias_speed=0.25"})
	if err != nil {
		t.Fatal(err)
	}
	trainer, err := New(t.Context(), run, inproc.New(1)[0], Options{Dir: t.TempDir(), LocalRanks: 1, Threads: 1})
	if err != nil {
		t.Fatal(err)
	}
	if _, err := trainer.Run(t.Context()); err != nil {
		t.Fatal(err)
	}
	routers := trainer.chunks[0].Routers()
	if len(routers) != 4 {
		t.Fatalf("%d routers, want 3 layers and the MTP module", len(routers))
	}
	for _, r := range routers {
		var total int64
		for _, n := range r.Counts {
			total += n
		}
		tokens := int64(6 * 32)
		if r.Layer == 4 { // the MTP module routes the positions that have a token ahead
			tokens = 6 * 31
		}
		if total != 2*tokens {
			t.Errorf("layer %d: %d assignments, want %d", r.Layer, total, 2*tokens)
		}
		for e, n := range r.Counts {
			want := float32(0)
			if 8*n < total {
				want = 0.25
			} else if 8*n > total {
				want = -0.25
			}
			if r.Bias[e] != want {
				t.Errorf("layer %d expert %d with %d of %d: bias %v, want %v", r.Layer, e, n, total, r.Bias[e], want)
			}
		}
	}
}

// TestAllTokensToOneExpert is P08: with four expert ranks and every token on the two experts of the first, training equals
// one rank. That idle experts get gradients of exactly 0 is model's TestExpertRanks.
func TestAllTokensToOneExpert(t *testing.T) {
	text := small(t)
	// Groups keep experts 0 and 1 (and 2, 3) only when biased far up: a bias that no update undoes in 3 steps.
	sets := []string{"stages.0.steps=3", "stages.0.router.bias_speed=0", "stages.0.optimizer.weight_decay=0", "model.moe.seq_aux=0"}
	favour := func(c *model.Chunk) {
		for _, r := range c.Routers() {
			for e := range r.Bias {
				r.Bias[e] = -10
			}
			r.Bias[0], r.Bias[1] = 10, 10
		}
	}
	one := runPrepared(t, text, testRun{pipeline: 1, data: 1, expert: 1, sets: sets}, favour)
	four := runPrepared(t, text, testRun{pipeline: 1, data: 4, expert: 4, sets: sets}, favour)
	sameLosses(t, four, one, 1e-5)
	if dead := four[0].MoE[0].Dead; dead != 6 {
		t.Errorf("%d experts without a token, want 6", dead)
	}
}
