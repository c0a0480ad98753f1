package main

import (
	"bytes"
	"context"
	"encoding/json"
	"fmt"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"
)

// binary is the built command; the tests here start real processes of it.
var binary string

func TestMain(m *testing.M) {
	dir, err := os.MkdirTemp("", "moetor-e2e")
	if err != nil {
		panic(err)
	}
	binary = filepath.Join(dir, "train")
	if out, err := exec.Command("go", "build", "-o", binary, ".").CombinedOutput(); err != nil {
		fmt.Fprintf(os.Stderr, "build: %v\n%s", err, out)
		os.Exit(1)
	}
	code := m.Run()
	os.RemoveAll(dir)
	os.Exit(code)
}

// A result is what one command did.
type result struct {
	code           int
	stdout, stderr string
	took           time.Duration
}

// start runs the command and waits for it, a minute at most.
func start(t *testing.T, args ...string) result {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
	defer cancel()
	var out, errs bytes.Buffer
	c := exec.CommandContext(ctx, binary, args...)
	c.Stdout, c.Stderr = &out, &errs
	c.WaitDelay = time.Second
	began := time.Now()
	err := c.Run()
	r := result{stdout: out.String(), stderr: errs.String(), took: time.Since(began), code: c.ProcessState.ExitCode()}
	if ctx.Err() != nil {
		t.Fatalf("train %s did not end in a minute: %v\n%s", strings.Join(args, " "), err, r.stderr)
	}
	return r
}

func mustTrain(t *testing.T, args ...string) result {
	t.Helper()
	r := start(t, args...)
	if r.code != 0 {
		t.Fatalf("train %s: exit %d\n%s%s", strings.Join(args, " "), r.code, r.stdout, r.stderr)
	}
	return r
}

// tinyConfig writes a small configuration with every mechanism and returns its path.
func tinyConfig(t *testing.T) string {
	t.Helper()
	path := filepath.Join(t.TempDir(), "tiny.yaml")
	text := `
run: {eval_every: 0}
model:
  dim: 32
  layers: 4
  dense_layers: 1
  dense_inter: 64
  init_std: 0.02
  context: 32
  attention: {heads: 2, q_lora: 16, kv_lora: 16, nope: 8, rope: 4, v: 8}
  moe: {experts: 8, top_k: 2, shared: 1, inter: 16, groups: 4, top_groups: 2, scale: 1.5, seq_aux: 0.001}
  mtp: {depth: 1}
parallel: {microbatch: 1}
checkpoint: {every: 0, keep: 3}
stages:
  - name: pretrain
    objective: lm
    data: [{path: "embedded:shakespeare"}]
    steps: 20
    batch: {start: 6, end: 11, ramp_tokens: 2000, step: 1}
    rate: {peak: 3.0e-3, warmup_steps: 4, constant_tokens: 2000, decay_tokens: 3000, floor: 3.0e-4}
`
	if err := os.WriteFile(path, []byte(text), 0o644); err != nil {
		t.Fatal(err)
	}
	return path
}

type metricsLine struct {
	Step    int64
	Loss    float64
	MTPLoss float64 `json:"mtp_loss"`
	Norm    float64 `json:"grad_norm"`
	StepMS  float64 `json:"step_ms"`
	Time    map[string]float64
	MFU     float64
}

func metrics(t *testing.T, dir string) (lines []metricsLine) {
	t.Helper()
	b, err := os.ReadFile(filepath.Join(dir, "metrics.jsonl"))
	if err != nil {
		t.Fatal(err)
	}
	for line := range bytes.Lines(b) {
		var l metricsLine
		if err := json.Unmarshal(line, &l); err != nil {
			t.Fatalf("%v in %s", err, line)
		}
		lines = append(lines, l)
	}
	return lines
}

// losses are the numbers of a run that must not depend on the transport or the pipeline split.
func losses(lines []metricsLine) (out []float64) {
	for _, l := range lines {
		out = append(out, l.Loss, l.MTPLoss, l.Norm)
	}
	return out
}

// launchArgs starts a run of the tiny configuration on p x d ranks.
func launchArgs(config, dir string, p, d, e int, more ...string) []string {
	return append([]string{"launch", "-n", fmt.Sprint(p * d), "--config", config, "--out", dir, "--set", fmt.Sprintf("parallel.pipeline=%d", p),
		"--set", fmt.Sprintf("parallel.expert=%d", e)}, more...)
}

// TestTransports: the same 20 steps with real processes over shm and tcp and, along the pipeline axis, unsplit give the
// same bits.
func TestTransports(t *testing.T) {
	config := tinyConfig(t)
	reference := map[string][]float64{}
	for _, m := range []struct{ p, d, e int }{{1, 1, 1}, {2, 1, 1}, {4, 1, 1}, {1, 2, 2}, {2, 2, 2}, {1, 4, 2}, {2, 4, 4}} {
		for _, transport := range []string{"shm", "tcp"} {
			t.Run(fmt.Sprintf("%dx%d,%d-%s", m.p, m.d, m.e, transport), func(t *testing.T) {
				dir := filepath.Join(t.TempDir(), "run")
				mustTrain(t, launchArgs(config, dir, m.p, m.d, m.e, "--transport", transport)...)
				lines := metrics(t, dir)
				if len(lines) != 20 {
					t.Fatalf("%d metrics lines, want 20", len(lines))
				}
				key := fmt.Sprintf("%d,%d", m.d, m.e)
				got := losses(lines)
				if want, ok := reference[key]; !ok {
					reference[key] = got
				} else if !slices.Equal(got, want) {
					t.Errorf("losses differ from those of another transport or pipeline split:\n%v\n%v", got, want)
				}
				if first := reference["1,1"]; got[0] != first[0] {
					t.Errorf("first loss %v, on one rank %v", got[0], first[0])
				}
				for _, l := range lines {
					var sum float64
					for _, ms := range l.Time {
						sum += ms
					}
					if sum < 0.98*l.StepMS || sum > 1.02*l.StepMS {
						t.Errorf("step %d: times add up to %v of %v ms", l.Step, sum, l.StepMS)
					}
					if !(l.MFU > 0 && l.MFU <= 1) {
						t.Errorf("step %d: mfu %v is not between 0 and 1", l.Step, l.MFU)
					}
				}
			})
		}
	}
}

func freePort(t *testing.T) string {
	t.Helper()
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	defer l.Close()
	_, port, err := net.SplitHostPort(l.Addr().String())
	if err != nil {
		t.Fatal(err)
	}
	return port
}
