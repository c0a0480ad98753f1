package train

import (
	"math"
	"slices"
	"strings"
	"testing"

	"moetor/internal/kernel"
)

const bf16Moments = "stages.0.optimizer.moments=bf16"

// TestMomentsBF16: with moments in BF16 a run resumes to the bit at the same mesh and nearly so at others, as with FP32;
// a checkpoint with moments of either type goes on with the other: widened exactly, or rounded.
func TestMomentsBF16(t *testing.T) {
	text, plain := small(t), epochSets(t)
	sets := append(slices.Clone(plain), bf16Moments)
	whole, _ := runRanks(t, text, testRun{pipeline: 2, data: 2, expert: 2, sets: sets})
	head := t.TempDir()
	runRanks(t, text, testRun{pipeline: 2, data: 2, expert: 2, sets: sets, opts: Options{Dir: head, StopAfter: 20}})
	for _, m := range []testRun{{pipeline: 2, data: 2, expert: 2}, {pipeline: 1, data: 1, expert: 1}, {pipeline: 1, data: 3, expert: 1}} {
		m.sets, m.opts = sets, Options{Dir: copyDir(t, head), Resume: true}
		rest, _ := runRanks(t, text, m)
		tolerance := 1e-3 // sums over other ranks move a gradient's last bit, and that some moment's, 2^-8 of itself
		if m.pipeline == 2 {
			tolerance = 0
		}
		sameLosses(t, rest, whole[20:], tolerance)
	}
	// Without a step in between, what a run has read is what it writes.
	rewritten := func(from string, sets []string) map[string][]float32 {
		dir := copyDir(t, from)
		rewrite(t, text, testRun{pipeline: 1, data: 2, expert: 2, sets: sets, opts: Options{Dir: dir}})
		return readAll(t, dir)
	}
	first := t.TempDir()
	runRanks(t, text, testRun{pipeline: 1, data: 1, expert: 1, sets: plain, opts: Options{Dir: first, StopAfter: 20}})
	wide, narrow := readAll(t, first), rewritten(first, sets)
	rounded := 0
	for name, want := range wide {
		if strings.HasPrefix(name, "exp_avg") {
			bits := make([]uint16, len(want))
			kernel.ToBF16(bits, want)
			short := make([]float32, len(want))
			kernel.FromBF16(short, bits)
			if !slices.Equal(short, want) {
				rounded++
			}
			want = short
		}
		if !slices.Equal(narrow[name], want) {
			t.Errorf("%s differs after a resume with moments in bf16", name)
		}
	}
	if rounded == 0 {
		t.Error("no moment had to be rounded")
	}
	back := rewritten(head, plain)
	for name, want := range readAll(t, head) {
		if !slices.Equal(back[name], want) {
			t.Errorf("%s differs after a resume with moments in fp32", name)
		}
	}
}

// TestMomentsBF16Loss: over 60 steps the smoothed loss stays within 0.1 % of that with FP32 moments.
func TestMomentsBF16Loss(t *testing.T) {
	text := small(t)
	curve := func(sets ...string) (losses []float64) {
		sets = append(sets, "stages.0.steps=60", "run.eval_every=0", "stages.0.val.data=[]")
		reports, _ := runRanks(t, text, testRun{pipeline: 1, data: 1, expert: 1, sets: sets})
		smooth := reports[0].Loss
		for _, r := range reports {
			smooth = 0.9*smooth + 0.1*r.Loss
			losses = append(losses, smooth)
		}
		return losses
	}
	want, got := curve(), curve(bf16Moments)
	worst := 0.0
	for i := range want {
		worst = max(worst, math.Abs(got[i]/want[i]-1))
	}
	t.Logf("smoothed loss %v to %v; largest difference %.3g", want[0], want[len(want)-1], worst)
	if worst > 0.001 {
		t.Errorf("the loss differs by %.3g of itself", worst)
	}
	if worst == 0 {
		t.Error("moments in bf16 change nothing")
	}
	if want[len(want)-1] > 0.9*want[0] {
		t.Errorf("the loss goes from %v to %v only: no test of anything", want[0], want[len(want)-1])
	}
}
