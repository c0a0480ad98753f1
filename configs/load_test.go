package configs

import (
	"errors"
	"os"
	"path/filepath"
	"reflect"
	"regexp"
	"slices"
	"strings"
	"testing"
	"time"

	"moetor/optimizer"
)

func TestPresets(t *testing.T) {
	var found []string
	for _, p := range List() {
		found = append(found, p.Name)
		if p.About == "" || strings.HasPrefix(p.About, "run:") {
			t.Errorf("%s says nothing about itself: %q", p.Name, p.About)
		}
		ranks := map[string]int{"demo": 4, "deepseek-v3": 2048}[p.Name]
		r, err := Load(p.Name, nil)
		if err != nil {
			t.Errorf("%s: %v", p.Name, err)
			continue
		}
		if err := Validate(r, max(1, ranks)); err != nil {
			t.Errorf("%s: %v", p.Name, err)
		}
		if want := "runs/" + p.Name; r.Run.Out != want {
			t.Errorf("%s writes to %s, want %s", p.Name, r.Run.Out, want)
		}
	}
	if want := []string{"assistant", "bench-fine", "bench-s", "deepseek-v3", "demo", "shakespeare-char"}; !slices.Equal(found, want) {
		t.Errorf("presets %v, want %v", found, want)
	}
}

// scalar are the paths within a schedule that was written as one number.
var scalar = regexp.MustCompile(`^stages\.\d+\.(mtp_weight|router\.bias_speed)\.0`)

// TestRoundTrip: the resolved configuration loads back to an equal one, and every setting stands in it.
func TestRoundTrip(t *testing.T) {
	sets := []string{
		`run.out=runs/a "strange": name # with\ttab, ü and 日本`, "comm.timeout=1500ms", "parallel.split=[3, 1]", "run.seed=18446744073709551615",
		"stages.0.mtp_weight=[{until_tokens: 10, value: 1e-7}, {value: 0.1}]", "stages.0.rate.tail=[{rate: 1e-5, tokens: 7}]",
		"stages.0.data=[{path: a.jsonl, weight: 2, field: 'yes'}, {path: 'b: c', weight: 0.5, max_bad_share: 0}]",
	}
	for _, p := range List() {
		for _, extra := range [][]string{nil, sets} {
			r, err := Load(p.Name, extra)
			if err != nil {
				t.Fatal(err)
			}
			text := Marshal(r)
			back, err := Parse(text, "config.yaml", nil)
			if err != nil {
				t.Fatalf("%s: %v\n%s", p.Name, err, text)
			}
			walk(reflect.ValueOf(r).Elem(), "", func(path string, _ reflect.Value) {
				if _, ok := back.origin[path]; !ok && !scalar.MatchString(path) {
					t.Errorf("%s: %s is not written", p.Name, path)
				}
			})
			r.origin, back.origin = nil, nil
			if !reflect.DeepEqual(r, back) {
				t.Errorf("%s does not load back\nbefore %+v\nafter  %+v\n%s", p.Name, r, back, text)
			}
			if !r.Equal(back) {
				t.Errorf("%s: Equal says no", p.Name)
			}
			for i, line := range strings.Split(string(text), "\n") {
				if len(line) > 400 {
					t.Errorf("%s: line %d has %d bytes", p.Name, i+1, len(line))
				}
			}
		}
	}
	a, _ := Load("demo", nil)
	b, _ := Load("demo", []string{"run.seed=1"})
	if a.Equal(b) {
		t.Error("different seeds are equal")
	}
}

// TestSchemaTypes: every setting of every component has a type that the loader can read and Marshal can write.
func TestSchemaTypes(t *testing.T) {
	var check func(typ reflect.Type, path string)
	check = func(typ reflect.Type, path string) {
		switch typ.Kind() {
		case reflect.Struct:
			for i := range typ.NumField() {
				if f := typ.Field(i); f.IsExported() {
					if f.Tag.Get("yaml") == "" {
						t.Errorf("%s.%s has no yaml name", path, f.Name)
					} else if k := key(f); k != "" {
						check(f.Type, join(path, k))
					}
				}
			}
		case reflect.Slice, reflect.Pointer:
			check(typ.Elem(), path+".0")
		case reflect.String, reflect.Bool, reflect.Int, reflect.Int64, reflect.Uint64, reflect.Float64:
		default:
			t.Errorf("%s has type %s", path, typ)
		}
	}
	check(reflect.TypeFor[Run](), "")
}

// TestDesignExample is the example of the design page: its keys keep their names and places.
func TestDesignExample(t *testing.T) {
	const text = `
run:        {out: runs/demo, seed: 1234, log_every: 1, eval_every: 50}
model:
  dim: 128
  layers: 4
  dense_layers: 1            # leading layers with a dense FFN of width dense_inter
  dense_inter: 384
  tie_embeddings: false
  init_std: 0.006
  norm_eps: 1.0e-6
  context: 256
  recompute: []
  attention: {kind: mla, heads: 4, q_lora: 64, kv_lora: 32, nope: 32, rope: 16, v: 32, rope_theta: 10000}
  moe: {experts: 8, top_k: 2, shared: 1, inter: 96, groups: 1, top_groups: 1, score: sigmoid, normalize: true, scale: 1.0,
        seq_aux: 0.0001}
  mtp: {depth: 1}
parallel:   {pipeline: 2, expert: 2, schedule: 1f1b, microbatch: 2, ranks_per_node: 0}
precision:  {recipe: fp32}
tokenizer:  {kind: byte}
checkpoint: {every: 100, keep: 2}
comm:       {timeout: 60s}
stages:
  - name: pretrain
    objective: lm
    data: [{path: embedded:shakespeare, weight: 1}]
    val:  {share: 0.05}
    steps: 200               # or tokens:, or epochs:
    batch: {start: 16, end: 32, ramp_tokens: 200000}
    rate: {peak: 3.0e-3, warmup_steps: 20, constant_tokens: 500000, decay_tokens: 300000, floor: 3.0e-4}
    optimizer: {kind: adamw, beta1: 0.9, beta2: 0.95, eps: 1.0e-8, weight_decay: 0.1, clip: 1.0}
    router: {bias_speed: 0.001}
    mtp_weight: 0.3
`
	r, err := Parse([]byte(text), "example.yaml", nil)
	if err != nil {
		t.Fatal(err)
	}
	if err := Validate(r, 4); err != nil {
		t.Fatal(err)
	}
	s := r.Stages[0]
	if r.Comm.Timeout != time.Minute || s.Data[0].Path != "embedded:shakespeare" || s.Data[0].Weight != 1 ||
		s.Batch != (optimizer.BatchSize{Start: 16, End: 32, RampTokens: 200000, Step: 2}) ||
		s.MTPWeight.At(0) != 0.3 || s.Router.BiasSpeed.At(0) != 0.001 || s.Rate.Floor != 3e-4 || r.Model.MoE.SeqAux != 1e-4 {
		t.Errorf("read as %+v", r)
	}
}

func TestDefaults(t *testing.T) {
	r, err := Parse([]byte("{}\n"), "my-run.yaml", nil)
	if err != nil {
		t.Fatal(err)
	}
	if err := Validate(r, 1); err != nil {
		t.Error(err)
	}
	if r.Run.Out != "runs/my-run" {
		t.Errorf("out is %s", r.Run.Out)
	}
	r, err = Parse([]byte("model: {mtp: {depth: 2}}\nstages: [{name: a, steps: 1, data: [{path: x}]}, {name: b, steps: 2, data: [{path: y}]}]\n"), "f", nil)
	if err != nil {
		t.Fatal(err)
	}
	b := r.Stages[1]
	if b.Optimizer.Beta2 != 0.95 || b.Batch.Start != 16 || b.Batch.End != 16 || b.MTPWeight.At(0) != 0.3 || b.Objective != "lm" {
		t.Errorf("a stage of a list does not start from the defaults: %+v", b)
	}
	if r.Run.EvalEvery != 0 {
		t.Errorf("eval_every is %d though nothing is held out", r.Run.EvalEvery)
	}
	// Derived defaults follow what they derive from.
	r, err = Parse([]byte("{}"), "test", []string{"model.mtp.depth=0", "model.moe.score=softmax"})
	if err != nil {
		t.Fatal(err)
	}
	if err := Validate(r, 4); err != nil {
		t.Error(err)
	}
}

func TestSet(t *testing.T) {
	r, err := Load("demo", []string{
		"stages.0.steps=30", "parallel.pipeline=1", "run.out=runs/my run: a#b", "model.moe={experts: 4, inter: 8}", "model.tie_embeddings=true",
		"stages.0.rate.peak=1e-4", "stages.0.rate.floor=1e-5", "stages.0.data.0.path=embedded:shakespeare", "comm.timeout=90s", "stages.0.batch.ramp_tokens=1_000",
		"stages.0.mtp_weight=0.2", "parallel.split=[4]", "run.seed=7", "run.seed=8", "stages.0.data.0.max_bad_share=0",
		"stages.0.router.bias_speed=[{until_tokens: 3e3, value: 1e-3}, {value: 0}]",
	})
	if err != nil {
		t.Fatal(err)
	}
	if err := Validate(r, 2); err != nil {
		t.Fatal(err)
	}
	s := r.Stages[0]
	if s.Steps != 30 || r.Parallel.Pipeline != 1 || r.Run.Out != "runs/my run: a#b" || !r.Model.TieEmbed || s.Rate.Peak != 1e-4 ||
		s.Rate.WarmupSteps != 20 || r.Comm.Timeout != 90*time.Second || s.Batch.RampTokens != 1000 || s.MTPWeight.At(0) != 0.2 ||
		r.Run.Seed != 8 || *s.Data[0].MaxBadShare != 0 || s.Router.BiasSpeed.At(2999) != 1e-3 || s.Router.BiasSpeed.At(3000) != 0 {
		t.Errorf("read as %+v", r)
	}
	if m := r.Model.MoE; m.Experts != 4 || m.Inter != 8 || m.TopK != 2 {
		t.Errorf("a mapping must override only what it names: %+v", m)
	}
}

func TestYAMLFeatures(t *testing.T) {
	r, err := Parse([]byte(`
model: {context: 64}
stages:
  - &first
    name: one
    steps: 10
    data: &text [{path: 'embedded:shakespeare'}]
    batch: &batch {start: 4}
  - <<: *first
    name: "two"
    batch:
      <<: *batch
      end: 8
      ramp_tokens: 1_000
  - {name: three, steps: 5, data: *text, batch: *batch}
`), "anchors.yaml", nil)
	if err != nil {
		t.Fatal(err)
	}
	if err := Validate(r, 1); err != nil {
		t.Fatal(err)
	}
	if s := r.Stages[1]; s.Name != "two" || s.Steps != 10 || s.Batch.Start != 4 || s.Batch.End != 8 {
		t.Errorf("merged stage: %+v", s)
	}
	if s := r.Stages[2]; s.Batch.Start != 4 || s.Data[0].Path != "embedded:shakespeare" {
		t.Errorf("aliased stage: %+v", s)
	}
}

func TestLoadFile(t *testing.T) {
	dir := t.TempDir()
	file := filepath.Join(dir, "mine.yaml")
	if err := os.WriteFile(file, []byte("run: {seed: 3}\nmodle: {dim: 4}\n"), 0o666); err != nil {
		t.Fatal(err)
	}
	_, err := Load(file, nil)
	if want := file + `:2:1: unknown key "modle"; did you mean model?`; err == nil || err.Error() != want {
		t.Errorf("got %v, want %s", err, want)
	}
	large := filepath.Join(dir, "large.yaml")
	if err := os.WriteFile(large, make([]byte, 2<<20), 0o666); err != nil {
		t.Fatal(err)
	}
	for name, want := range map[string]string{
		"dmeo":                           "--config dmeo: no such preset or file; did you mean demo?",
		filepath.Join(dir, "xxxxx.yaml"): "no such preset or file; known here: assistant, bench-fine, bench-s, deepseek-v3, demo, shakespeare-char",
		dir:                              "is a directory",
		large:                            "larger than 1048576 bytes",
		"":                               "no configuration named",
	} {
		if _, err := Load(name, nil); err == nil || !strings.Contains(err.Error(), want) || strings.Contains(err.Error(), "\n") {
			t.Errorf("%q: got %v, want %s", name, err, want)
		}
	}
}

// TestAllErrors: one load reports everything, in the order of the file, command line last.
func TestAllErrors(t *testing.T) {
	_, err := Parse([]byte(`model:
  dim: many
  layers: 4
  layers: 5
  context: -1
  haeds: 3
parallel: [1]
stages:
  - name: a
    steps: 1.5
    data: [{path: x, wieght: 1}]
`), "f.yaml", []string{"run.sede=1", "checkpoint.keep=0"})
	want := []string{
		`f.yaml:2:8: model.dim needs an integer, got the text "many"`,
		`f.yaml:4:3: model.layers is set twice, first on line 3`,
		`f.yaml:5:12: model.context=-1 must be at least 2`,
		`f.yaml:6:3: unknown key "model.haeds"; known here: `,
		`f.yaml:7:1: parallel needs a mapping with the keys pipeline, expert, schedule, microbatch, ranks_per_node, split, got a list`,
		`f.yaml:10:12: stages.0.steps needs an integer, got the number 1.5`,
		`f.yaml:11:22: unknown key "stages.0.data.0.wieght"; did you mean stages.0.data.0.weight?`,
		`--set: unknown key "run.sede"; did you mean run.seed?`,
		`--set: checkpoint.keep=0 must be at least 1`,
	}
	var all Errors
	if !errors.As(err, &all) {
		t.Fatalf("got %v", err)
	}
	got := strings.Split(err.Error(), "\n")
	for i := range max(len(got), len(want)) {
		if i >= len(got) || i >= len(want) || !strings.HasPrefix(got[i], want[i]) {
			t.Fatalf("got\n%s\nwant\n%s", err, strings.Join(want, "\n"))
		}
	}
}

func FuzzParse(f *testing.F) {
	for _, p := range List() {
		r, err := Load(p.Name, nil)
		if err != nil {
			f.Fatal(err)
		}
		f.Add(string(Marshal(r)), "run.seed=1")
	}
	for _, s := range []string{"", "{}", "a: &x [*x]", "stages: &s\n  - <<: *s", "? [1]\n: 2", "model: !!int 3", "run: {out: |\n  x\n}", "stages: [{data: *q}]", "- 1", "a: 1\n---\nb: 2",
		"<<: [{run: {seed: 1}}, 3]", "model: {dim: 0x10, layers: 1e1, norm_eps: .inf}", "x: *a\ny: &a *b\nz: &b *a", "run: {out: \"\\x00\"}", "model: {<<: &m {<<: *m}}"} {
		f.Add(s, "stages.0.data.0.path="+s)
	}
	f.Add("{}", "stages.0.data.0.path=\xff\xfe{}")
	f.Fuzz(func(t *testing.T, text, set string) {
		r, err := Parse([]byte(text), "fuzz.yaml", []string{set})
		if err != nil {
			checkLines(t, err)
			return
		}
		if err := Validate(r, 4); err != nil {
			checkLines(t, err)
			return
		}
		back, err := Parse(Marshal(r), "config.yaml", nil)
		if err != nil {
			t.Fatalf("%v\n%s", err, Marshal(r))
		}
		r.origin, back.origin = nil, nil
		if !reflect.DeepEqual(r, back) {
			t.Fatalf("does not load back:\n%s\n%s", Marshal(r), Marshal(back))
		}
		if r.Stages[0].Epochs == 0 {
			if s, err := r.Schedule(0, 0); err != nil || s.Context < 2 {
				t.Fatal(err)
			}
		}
	})
}

// checkLines: an error is Errors, and each of them is one line.
func checkLines(t *testing.T, err error) {
	t.Helper()
	var all Errors
	if !errors.As(err, &all) || len(all) == 0 {
		t.Fatalf("%T: %v", err, err)
	}
	for _, p := range all {
		if p.Text == "" || strings.ContainsAny(p.Error(), "\n\r") {
			t.Fatalf("not one line: %q", p.Error())
		}
	}
}
