package main

import (
	"bytes"
	"encoding/json"
	"fmt"
	"io/fs"
	"math"
	"os"
	"path/filepath"
	"runtime"
	"slices"
	"strings"
	"testing"

	"moetor/comm/shm"
	"moetor/internal/kernel"
	"moetor/internal/train"
	"moetor/model"
)

// small is a model for the benches of a test.
const small = `
model:
  vocab: 512
  dim: 32
  layers: 3
  dense_layers: 1
  dense_inter: 64
  context: 32
  attention: {heads: 2, q_lora: 16, kv_lora: 16, nope: 8, rope: 4, v: 8}
  moe: {experts: 8, top_k: 2, shared: 1, inter: 16}
  mtp: {depth: 1}
parallel: {microbatch: 2, pipeline: 2}
run: {cache: off}
checkpoint: {every: 0}
stages: [{name: pretrain, objective: lm, data: [{path: "embedded:shakespeare"}], steps: 4, batch: {start: 4}, rate: {peak: 1.0e-3, warmup_steps: 0}}]
`

func smallConfig(t *testing.T) string {
	t.Helper()
	path := filepath.Join(t.TempDir(), "small.yaml")
	if err := os.WriteFile(path, []byte(small), 0o644); err != nil {
		t.Fatal(err)
	}
	return path
}

// bench runs train bench in this process and returns its standard output.
func bench(t *testing.T, args ...string) []byte {
	t.Helper()
	threads := kernel.Threads()
	defer kernel.SetThreads(threads)
	var out, errs bytes.Buffer
	if code := run(append([]string{"bench"}, args...), &out, &errs); code != exitDone {
		t.Fatalf("bench %v: exit %d: %s", args, code, errs.String())
	}
	return out.Bytes()
}

// decode reads JSON that must have just the fields of v.
func decode(t *testing.T, text []byte, v any) {
	t.Helper()
	d := json.NewDecoder(bytes.NewReader(text))
	d.DisallowUnknownFields()
	if err := d.Decode(v); err != nil || d.More() {
		t.Fatalf("%v: stdout must be one JSON object of the documented fields: %s", err, text)
	}
}

func (r rated) plausible(t *testing.T, what string) {
	t.Helper()
	if !(r.GFLOPS > 0) || !(r.OfPeak > 0) || r.OfPeak > 1.2 {
		t.Errorf("%s: %v GFLOP/s, %v of the peak", what, r.GFLOPS, r.OfPeak)
	}
}

func TestBenchGemm(t *testing.T) {
	var r kernelResult[gemmCase]
	decode(t, bench(t, "gemm", "--config", smallConfig(t), "--threads", "2", "--seconds", "0", "--cubes", "40", "--json"), &r)
	if r.Threads != 2 || r.Kernel != kernel.Active() || !(r.Peak > 0) {
		t.Errorf("%+v", r)
	}
	seen := map[string]bool{}
	for _, c := range r.Cases {
		name := fmt.Sprintf("%s %dx%dx%d", c.Layout, c.M, c.N, c.K)
		c.plausible(t, name)
		if seen[name] {
			t.Errorf("%s is there twice", name)
		}
		seen[name] = true
	}
	for _, name := range []string{"NN 40x40x40", "NT 64x64x32", "NN 64x32x64", "TN 64x32x64", "NT 512x512x32", "NT 64x4x32", "NT 64x8x32"} {
		if !seen[name] {
			t.Errorf("%s is missing of %v", name, r.Cases)
		}
	}
	text := string(bench(t, "gemm", "--config", smallConfig(t), "--threads", "1", "--seconds", "0", "--cubes", "16"))
	if !strings.Contains(text, "FMA peak") || !strings.Contains(text, "of peak") || strings.Contains(text, "{") {
		t.Errorf("as text:\n%s", text)
	}
}

// TestStepShapes: the shapes of a step have the FLOPs that the model counts, forward and backward.
func TestStepShapes(t *testing.T) {
	for _, name := range []string{smallConfig(t), "demo", "bench-s", "bench-fine"} {
		f := configFlags{name: name}
		run, err := f.loadModel(0)
		if err != nil {
			t.Fatal(err)
		}
		c := run.Model
		rows := run.Parallel.Microbatch * c.Context
		flops := map[kernel.Layout]float64{}
		for _, s := range stepShapes(run) {
			n := s.flops() / float64(rows)
			if slices.Contains([]int{s.m, s.k}, logitRows(c)) && slices.Contains([]int{s.m, s.n, s.k}, c.VocabSize) { // one chunk of the head's
				n = s.flops() / float64(logitRows(c)) * float64(1+c.MTP.Depth)
			}
			flops[s.layout] += n
		}
		routed := float64(c.Layers - c.DenseLayers + c.MTP.Depth)
		want := model.FLOPs(c, c.Context)
		rest := want.Forward - want.Attention - routed*6*float64(c.Dim*c.MoE.Inter*c.MoE.TopK)
		for layout, n := range flops {
			if math.Abs(n-rest) > 1e-9*rest {
				t.Errorf("%s, %s: %v FLOPs a token, the model counts %v", name, layoutNames[layout], n, rest)
			}
		}
	}
}

func TestBenchGrouped(t *testing.T) {
	var r kernelResult[groupedCase]
	decode(t, bench(t, "grouped", "--config", smallConfig(t), "--threads", "1", "--seconds", "0", "--json"), &r)
	var own int
	for _, c := range r.Cases {
		c.plausible(t, fmt.Sprintf("%+v", c))
		if c.Experts == 8 && c.Rows == 64*2 {
			own++
		}
	}
	if len(r.Cases) != 12 || own != 6 || r.Cases[0].Rows != 2048 || r.Cases[0].Experts != 64 {
		t.Errorf("%+v", r.Cases)
	}
	for _, experts := range []int{1, 2, 8, 64} {
		rows := uneven(experts, 2048)
		sum, most := 0, slices.Max(rows)
		for _, n := range rows {
			sum += n
		}
		if sum != 2048 || slices.Min(rows) < 0 || experts >= 8 && (most < 2*2048/experts || slices.Min(rows) > 0) {
			t.Errorf("%d experts: %v", experts, rows)
		}
	}
}

func TestBenchAttention(t *testing.T) {
	var r kernelResult[attentionCase]
	decode(t, bench(t, "attention", "--config", smallConfig(t), "--lengths", "16,70", "--threads", "2", "--seconds", "0", "--json"), &r)
	for i, c := range r.Cases {
		c.plausible(t, fmt.Sprintf("%+v", c))
		if want := []string{"forward", "backward"}[i%2]; c.Pass != want || c.Heads != 2 || c.QK != 12 || c.V != 8 || c.T != []int{16, 70}[i/2] {
			t.Errorf("%+v", c)
		}
	}
	if len(r.Cases) != 4 || r.Cases[0].Tokens != 64 || r.Cases[2].Tokens != 70 {
		t.Errorf("%+v", r.Cases)
	}
}

func TestBenchStep(t *testing.T) {
	out := t.TempDir()
	peer := filepath.Join(out, "peer.sh")
	if err := os.WriteFile(peer, []byte("echo some words; echo '{\"tok_s\": 1}'; echo '{\"tok_s\": 12.5, \"more\": [1]}'; echo '{\"loss\": 1}'\n"), 0o644); err != nil {
		t.Fatal(err)
	}
	t.Chdir(out)
	var r stepResult
	decode(t, bench(t, "step", "--config", smallConfig(t), "--threads", "1", "--steps", "2", "--warmup", "1", "--peer", "sh "+peer, "--rounds", "3", "--json"), &r)
	if r.Tokens != 4*32 || r.Threads != 1 || r.Steps != 6 || !(r.MFU > 0) || r.MFU > 1.2 || !(r.MemMB > 0) || !(r.Peak > 0) {
		t.Errorf("%+v", r)
	}
	if d := r.TokS*r.StepMS/1000 - r.Tokens; math.Abs(d) > 0.01*r.Tokens {
		t.Errorf("%v tokens/s and %v ms are not %v tokens", r.TokS, r.StepMS, r.Tokens)
	}
	sum := 0.0
	for _, ms := range r.Time {
		sum += ms
	}
	if math.Abs(sum-r.StepMS) > 0.02*r.StepMS {
		t.Errorf("times %v add up to %v of %v ms", r.Time, sum, r.StepMS)
	}
	if p := r.Peer; p == nil || p.TokS != 12.5 || len(p.Rounds) != 3 || math.Abs(p.Ratio-p.Rounds[0].TokS/12.5) > p.Ratio {
		t.Errorf("peer %+v", p)
	} else {
		var ratios []float64
		for _, k := range p.Rounds {
			if math.Abs(k.Ratio*k.Peer-k.TokS) > 0.001*k.TokS {
				t.Errorf("round %+v", k)
			}
			ratios = append(ratios, k.Ratio)
		}
		if slices.Sort(ratios); p.Ratio != ratios[1] {
			t.Errorf("ratio %v, median of %v", p.Ratio, ratios)
		}
	}
	if files, _ := fs.Glob(os.DirFS(out), "*"); len(files) != 1 {
		t.Errorf("left behind: %v", files)
	}
}

func TestBenchComm(t *testing.T) {
	for ranks, transports := range map[int]string{2: "", 3: "inproc"} {
		p := start(t, "bench", "comm", "-n", fmt.Sprint(ranks), "--repeat", "0.01", "--json", "--transport", transports)
		if p.code != exitDone {
			t.Fatalf("exit %d: %s", p.code, p.stderr)
		}
		var r commResult
		decode(t, []byte(p.stdout), &r)
		want := []string{"shm", "tcp", "inproc"}
		if runtime.GOOS != "linux" {
			want = want[1:]
		}
		if ranks == 3 {
			want = []string{"inproc"}
		}
		var names []string
		for _, tr := range r.Transports {
			names = append(names, tr.Transport)
			if len(tr.Cases) != 7 {
				t.Errorf("%s: %+v", tr.Transport, tr.Cases)
			}
			for _, c := range tr.Cases {
				if !(c.US > 0) || math.Abs(c.US*c.GBS*1e3-float64(c.Bytes)) > 0.01*float64(c.Bytes) {
					t.Errorf("%s: %+v", tr.Transport, c)
				}
			}
		}
		if r.Ranks != ranks || !slices.Equal(names, want) {
			t.Errorf("%d ranks, transports %v", r.Ranks, names)
		}
	}
}

func TestBenchRefusals(t *testing.T) {
	for _, c := range []struct{ args, want string }{
		{"gemm --threads -1", "--threads -1"},
		{"gemm --seconds -1", "--seconds -1"},
		{"gemm --cubes 0", "--cubes 0"},
		{"gemm --kernel neon", "--kernel neon"},
		{"attention --lengths 0", "--lengths 0"},
		{"step --steps 0", "--steps 0"},
		{"step --config nothing", "nothing"},
		{"comm -n 1", "-n 1"},
		{"comm --transport mpi", "--transport mpi"},
		{"comm --repeat 0", "--repeat 0"},
		{"grep", `unknown command "grep"`},
	} {
		var out, errs bytes.Buffer
		if code := run(append([]string{"bench"}, strings.Fields(c.args)...), &out, &errs); code != exitUsage || !strings.Contains(errs.String(), c.want) {
			t.Errorf("bench %s: exit %d: %s", c.args, code, errs.String())
		}
	}
	var out, errs bytes.Buffer
	if code := run([]string{"bench", "step", "--config", smallConfig(t), "--steps", "1", "--warmup", "0", "--peer", "echo hello"}, &out, &errs); code != exitFailed || !strings.Contains(errs.String(), "tok_s") {
		t.Errorf("a peer without a figure: exit %d: %s", code, errs.String())
	}
}

func TestInspectMemory(t *testing.T) {
	inspect := func(args ...string) (int, []byte, string) {
		var out, errs bytes.Buffer
		code := run(append([]string{"inspect"}, args...), &out, &errs)
		return code, out.Bytes(), errs.String()
	}
	_, text, errs := inspect("--config", smallConfig(t), "--memory", "-n", "4", "--json")
	var r struct {
		Ranks, Threads int
		Coordinates    []train.RankMemory
	}
	decode(t, text, &r)
	if r.Ranks != 4 || len(r.Coordinates) != 2 {
		t.Fatalf("%+v %s", r, errs)
	}
	for p, m := range r.Coordinates {
		if m.Pipeline != p || m.Total != m.Bytes.Total() || m.Bytes.Weights <= 0 || m.Bytes.Activations <= 0 || m.Bytes.Communication <= 0 {
			t.Errorf("%+v", m)
		}
	}
	code, text, errs := inspect("--config", smallConfig(t), "--memory", "-n", "4")
	for _, want := range []string{"layers", "activations", "total"} {
		if code != exitDone || !strings.Contains(string(text), want) {
			t.Errorf("exit %d, no %s in:\n%s%s", code, want, text, errs)
		}
	}
	for _, args := range [][]string{{"--memory"}, {"--config", "demo", "--memory", "-n", "0"}, {"--config", smallConfig(t), "--memory", "-n", "3"}, {t.TempDir(), "--memory"}} {
		if code, _, errs := inspect(args...); code != exitUsage || errs == "" {
			t.Errorf("inspect %v: exit %d: %s", args, code, errs)
		}
	}
}

// TestRingPrediction: the rings that a prediction counts are those of the transport.
func TestRingPrediction(t *testing.T) {
	if runtime.GOOS != "linux" {
		t.Skip("the shm transport needs Linux")
	}
	for _, n := range []int{2, 8, 12} {
		dir := filepath.Join(t.TempDir(), "segment")
		if err := shm.Create(dir, n, shm.Options{}); err != nil {
			t.Fatal(err)
		}
		var segment int64
		entries, err := os.ReadDir(dir)
		if err != nil {
			t.Fatal(err)
		}
		for _, e := range entries {
			if i, err := e.Info(); err == nil && i.Mode().IsRegular() {
				segment += i.Size()
			}
		}
		rings := int64(n*(n-1)) * train.RingBytes(n)
		if heads := segment - rings; heads < 0 || heads > rings/20 {
			t.Errorf("%d ranks: a segment of %d bytes, predicted rings of %d", n, segment, rings)
		}
		if err := shm.Remove(dir); err != nil {
			t.Error(err)
		}
	}
}
