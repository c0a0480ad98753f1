package train

import (
	"encoding/json"
	"fmt"
	"math"
	"math/rand/v2"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
)

// chain is the tiny model through pretraining, instruction tuning and a preference stage.
const chain = tiny + `
  - name: instruct
    data: [{path: CHATFILE}]
    val: {share: 0.2}
    steps: 6
    batch: {start: 4}
    rate: {peak: 1.0e-3, warmup_steps: 2}
  - name: prefer
    objective: dpo
    data: [{path: PAIRFILE}]
    val: {share: 0.2}
    steps: 6
    batch: {start: 6, end: 8, ramp_tokens: 300, step: 2}
    rate: {peak: 1.0e-3, warmup_steps: 1}
`

// chainText writes small instruction and preference files and returns the configuration.
func chainText(t *testing.T) string {
	t.Helper()
	dir := t.TempDir()
	rng := rand.New(rand.NewPCG(1, 2))
	var chats, pairs, judged strings.Builder
	for i := range 40 {
		q := fmt.Sprintf("%d+%d?", i%7, i%5)
		right, wrong := fmt.Sprint(i%7+i%5), strings.Repeat("x", 1+rng.IntN(5))
		write := func(b *strings.Builder, v any) {
			line, err := json.Marshal(v)
			if err != nil {
				t.Fatal(err)
			}
			b.Write(append(line, '\n'))
		}
		write(&chats, map[string]any{"messages": []map[string]string{{"role": "user", "content": q}, {"role": "assistant", "content": right}}})
		write(&pairs, map[string]any{"prompt": fmt.Sprint(i, q), "chosen": right, "rejected": wrong})
		write(&judged, map[string]any{"prompt": fmt.Sprint(i, q), "completion": []string{right, wrong}[i%2], "label": i%2 == 0})
	}
	text := withVal(t, chain)
	for name, content := range map[string]string{"CHATFILE": chats.String(), "PAIRFILE": pairs.String(), "JUDGED": judged.String()} {
		path := filepath.Join(dir, name+".jsonl")
		if err := os.WriteFile(path, []byte(content), 0o644); err != nil {
			t.Fatal(err)
		}
		text = strings.ReplaceAll(text, name, path)
	}
	return text
}

func judgedFile(text string) string {
	i := strings.Index(text, "PAIRFILE.jsonl")
	start := strings.LastIndex(text[:i], "{path: ") + len("{path: ")
	return strings.Replace(text[start:i+len("PAIRFILE.jsonl")], "PAIRFILE", "JUDGED", 1)
}

func ofStage(all []Report, name string) (out []Report) {
	for _, r := range all {
		if r.Stage == name {
			out = append(out, r)
		}
	}
	return out
}

var chainSets = []string{"stages.0.steps=4", "parallel.microbatch=2", "run.eval_every=3"}

// TestPreferenceChain: the same chain of stages at several meshes. Losses are as TestLayouts promises in every stage; the
// first preference step is exactly ln 2 with a margin of exactly 0 at every mesh, since policy and reference are the
// same weights (P31).
func TestPreferenceChain(t *testing.T) {
	text := chainText(t)
	base, _ := runRanks(t, text, testRun{pipeline: 1, data: 1, expert: 1, sets: chainSets})
	if len(base) != 16 {
		t.Fatalf("%d steps, want 4+6+6", len(base))
	}
	wide, _ := runRanks(t, text, testRun{pipeline: 1, data: 2, expert: 2, sets: chainSets})
	for _, m := range []testRun{{pipeline: 1, data: 1, expert: 1}, {pipeline: 4, data: 1, expert: 1}, {pipeline: 2, data: 2, expert: 2}, {pipeline: 1, data: 2, expert: 2}} {
		m.sets = chainSets
		got, _ := runRanks(t, text, m)
		exact := base
		if m.data == 2 {
			exact = wide
		}
		for _, stage := range []string{"pretrain", "instruct", "prefer"} {
			sameLosses(t, ofStage(got, stage), ofStage(exact, stage), 0)
			sameLosses(t, ofStage(got, stage), ofStage(base, stage), 1e-4)
		}
		first := ofStage(got, "prefer")[0]
		if first.Loss != math.Ln2 || first.Sums["reward_margin"] != 0 || first.Sums["reward_accuracy"] != 0 {
			t.Errorf("%dx%d,%d: first preference loss %.17g, margin %v, want exactly ln 2 and 0", m.pipeline, m.data, m.expert, first.Loss, first.Sums["reward_margin"])
		}
	}
	last := ofStage(base, "prefer")[5]
	if last.Sums["reward_margin"] <= 0 || last.ValLoss == nil || last.Sums["val_reward_accuracy"] == 0 {
		t.Errorf("after 6 steps: %+v, want a positive margin and validation of it", last)
	}
}

// TestResumeInEveryStage: a chain that is cut in each stage goes on to the bit, with the reference of the stage's start.
func TestResumeInEveryStage(t *testing.T) {
	text := chainText(t)
	mesh := testRun{pipeline: 2, data: 1, expert: 1, sets: chainSets}
	whole, _ := runRanks(t, text, mesh)
	dir := t.TempDir()
	var got []Report
	for range 8 { // 2 steps a launch: cuts within and at the ends of stages
		m := mesh
		m.opts = Options{Dir: dir, Resume: len(got) > 0, StopAfter: 2}
		part, out := runRanks(t, text, m)
		got = append(got, part...)
		if !out.Stopped {
			break
		}
	}
	for _, stage := range []string{"pretrain", "instruct", "prefer"} {
		sameLosses(t, ofStage(got, stage), ofStage(whole, stage), 0)
	}
	// A lost reference is computed again from the stage's first weights.
	m := mesh
	m.opts = Options{Dir: t.TempDir()}
	m.sets = append(slices.Clone(chainSets), "stages.2.steps=3")
	runRanks(t, text, m)
	if err := os.Remove(filepath.Join(m.opts.Dir, "reference-prefer.bin")); err != nil {
		t.Fatal(err)
	}
	m.sets, m.opts.Resume = chainSets, true
	rest, _ := runRanks(t, text, m)
	sameLosses(t, rest, ofStage(whole, "prefer")[3:], 0)
}

// TestObjectives: every objective trains through the whole loop, at one rank and at four with the same losses, and its
// first value is what the formula gives for equal policy and reference where that is a constant.
func TestObjectives(t *testing.T) {
	text := chainText(t)
	for name, first := range map[string]float64{"dpo": math.Ln2, "cdpo": math.Ln2, "robust": math.Ln2, "ipo": 25, "hinge": 1, "kto": 0.5, "simpo": 0, "orpo": 0, "reward": 0} {
		t.Run(name, func(t *testing.T) {
			sets := append(slices.Clone(chainSets), "stages.0.steps=1", "stages.1.steps=1", "stages.2.objective="+name)
			if name == "kto" {
				sets = append(sets, "stages.2.data=[{path: "+judgedFile(text)+"}]")
			}
			one, _ := runRanks(t, text, testRun{pipeline: 1, data: 1, expert: 1, sets: sets})
			got := ofStage(one, "prefer")
			if first != 0 && math.Abs(got[0].Loss-first) > 1e-12 {
				t.Errorf("first loss %v, want %v", got[0].Loss, first)
			}
			if len(got) != 6 || !got[5].finite() || got[5].GradNorm == 0 {
				t.Errorf("%d steps, last %+v", len(got), got[len(got)-1])
			}
			four, _ := runRanks(t, text, testRun{pipeline: 2, data: 2, expert: 2, sets: sets})
			sameLosses(t, ofStage(four, "prefer"), got, 1e-4)
		})
	}
}
