package main

import (
	"bytes"
	"encoding/json"
	"fmt"
	"math"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"syscall"
	"testing"
	"time"
)

// A job is a launcher running in the background.
type job struct {
	cmd    *exec.Cmd
	stderr bytes.Buffer
	done   chan error
}

func background(t *testing.T, args ...string) *job {
	t.Helper()
	return spawn(t, exec.Command(binary, args...))
}

func spawn(t *testing.T, c *exec.Cmd) *job {
	t.Helper()
	j := &job{cmd: c, done: make(chan error, 1)}
	j.cmd.Stderr = &j.stderr
	if err := j.cmd.Start(); err != nil {
		t.Fatal(err)
	}
	go func() { j.done <- j.cmd.Wait() }()
	t.Cleanup(func() { j.cmd.Process.Kill() })
	return j
}

// wait returns the exit code.
func (j *job) wait(t *testing.T, limit time.Duration) int {
	t.Helper()
	select {
	case <-j.done:
		return j.cmd.ProcessState.ExitCode()
	case <-time.After(limit):
		t.Fatalf("the launcher did not end within %v:\n%s", limit, j.stderr.String())
		return 0
	}
}

// ranks maps the ranks that run now to their processes.
func (j *job) ranks(t *testing.T) map[int]int {
	t.Helper()
	found := map[int]int{}
	entries, err := filepath.Glob("/proc/[0-9]*/stat")
	if err != nil {
		t.Fatal(err)
	}
	for _, e := range entries {
		stat, err := os.ReadFile(e)
		if err != nil {
			continue
		}
		fields := strings.Fields(string(stat[bytes.LastIndexByte(stat, ')')+1:]))
		if ppid, _ := strconv.Atoi(fields[1]); ppid != j.cmd.Process.Pid || fields[0] == "Z" {
			continue
		}
		env, _ := os.ReadFile(filepath.Join(filepath.Dir(e), "environ"))
		if m := regexp.MustCompile(`(?:^|\x00)MOETOR_RANK=(\d+)`).FindSubmatch(env); m != nil {
			rank, _ := strconv.Atoi(string(m[1]))
			found[rank], _ = strconv.Atoi(filepath.Base(filepath.Dir(e)))
		}
	}
	return found
}

// reach waits until the run has written the metrics of a step.
func reach(t *testing.T, dir string, step int64) {
	t.Helper()
	for range 600 {
		b, _ := os.ReadFile(filepath.Join(dir, "metrics.jsonl"))
		if int64(bytes.Count(b, []byte("\n"))) >= step {
			return
		}
		time.Sleep(50 * time.Millisecond)
	}
	t.Fatalf("the run did not reach step %d", step)
}

func segments(t *testing.T) []string {
	t.Helper()
	left, err := filepath.Glob("/dev/shm/moetor-*")
	if err != nil {
		t.Fatal(err)
	}
	return left
}

// TestKilledRank is P35: kill -9 of a rank in the middle of a run. The launcher exits 1 within 5 s of it, names the rank,
// and leaves no process and no shared memory; --resume goes on from the last complete checkpoint and ends with the
// losses of an undisturbed run, to the bit.
func TestKilledRank(t *testing.T) {
	if _, err := os.Stat("/proc/self/environ"); err != nil {
		t.Skip("finds ranks by /proc")
	}
	config := tinyConfig(t)
	more := []string{"--set", "stages.0.steps=60", "--set", "checkpoint.every=4"}
	whole := filepath.Join(t.TempDir(), "whole")
	mustTrain(t, launchArgs(config, whole, 2, 2, 2, more...)...)
	want := losses(metrics(t, whole))
	for i, transport := range []string{"shm", "tcp"} {
		t.Run(transport, func(t *testing.T) {
			dir := filepath.Join(t.TempDir(), "run")
			j := background(t, launchArgs(config, dir, 2, 2, 2, append(more, "--transport", transport)...)...)
			reach(t, dir, 6)
			victim := 1 + i
			pids := j.ranks(t)
			if len(pids) != 4 {
				t.Fatalf("%d rank processes, want 4", len(pids))
			}
			syscall.Kill(pids[victim], syscall.SIGKILL)
			if code := j.wait(t, 5*time.Second); code != exitFailed {
				t.Errorf("exit %d, want %d", code, exitFailed)
			}
			if text := j.stderr.String(); !strings.Contains(text, fmt.Sprintf("rank %d", victim)) || !strings.Contains(text, "step") {
				t.Errorf("the message names neither rank %d nor its step:\n%s", victim, text)
			}
			for rank, pid := range pids {
				if err := syscall.Kill(pid, 0); err == nil {
					t.Errorf("rank %d still runs", rank)
				}
			}
			if left := segments(t); len(left) > 0 {
				t.Errorf("left in shared memory: %v", left)
			}
			mustTrain(t, "launch", "-n", "4", "--out", dir, "--resume", "--transport", transport)
			if got := losses(metrics(t, dir)); !slices.Equal(got, want) {
				t.Errorf("losses after the resume differ from those of an undisturbed run")
			}
		})
	}
}

// TestInterrupt: Ctrl-C once finishes the step, writes a checkpoint and exits 3, on every rank the same step.
func TestInterrupt(t *testing.T) {
	config := tinyConfig(t)
	dir := filepath.Join(t.TempDir(), "run")
	j := background(t, launchArgs(config, dir, 2, 1, 1, "--set", "stages.0.steps=100000")...)
	reach(t, dir, 3)
	j.cmd.Process.Signal(os.Interrupt)
	if code := j.wait(t, 30*time.Second); code != exitStopped {
		t.Fatalf("exit %d, want %d:\n%s", code, exitStopped, j.stderr.String())
	}
	lines := metrics(t, dir)
	last := lines[len(lines)-1].Step
	r := mustTrain(t, "inspect", dir, "--json")
	var s struct {
		Step  int64
		Stage string
		OK    bool
		Files []any
	}
	if err := json.Unmarshal([]byte(r.stdout), &s); err != nil {
		t.Fatalf("%v in %s", err, r.stdout)
	}
	if s.Step != last || s.Stage != "pretrain" || !s.OK || len(s.Files) != 2 {
		t.Errorf("checkpoint %+v, want one of step %d with two files", s, last)
	}
}

// TestRestarts: --max-restarts goes on by itself after a rank was killed.
func TestRestarts(t *testing.T) {
	if _, err := os.Stat("/proc/self/environ"); err != nil {
		t.Skip("finds ranks by /proc")
	}
	dir := filepath.Join(t.TempDir(), "run")
	j := background(t, launchArgs(tinyConfig(t), dir, 1, 2, 2, "--set", "stages.0.steps=60", "--set", "checkpoint.every=4", "--max-restarts", "1")...)
	reach(t, dir, 6)
	syscall.Kill(j.ranks(t)[1], syscall.SIGKILL)
	if code := j.wait(t, time.Minute); code != exitDone {
		t.Fatalf("exit %d:\n%s", code, j.stderr.String())
	}
	lines := metrics(t, dir)
	for i, l := range lines {
		if l.Step != int64(i+1) {
			t.Fatalf("metrics line %d is of step %d", i+1, l.Step)
		}
	}
	if len(lines) != 60 {
		t.Errorf("%d lines, want 60", len(lines))
	}
}

// TestResults: what eval, generate, inspect and the trace print, for a model that several ranks trained.
func TestResults(t *testing.T) {
	dir := filepath.Join(t.TempDir(), "run")
	mustTrain(t, launchArgs(tinyConfig(t), dir, 2, 2, 2, "--trace", "2", "--set", "stages.0.val.share=0.01", "--set", "run.eval_every=20", "--profile", "cpu")...)

	text := write(t, "text.txt", strings.Repeat("To be, or not to be, that is the question: ", 20))
	var first struct{ Loss, Perplexity, Tokens float64 }
	for _, batch := range []string{"1", "2", "4"} { // P32: the batch of an evaluation does not change its result
		r := mustTrain(t, "eval", "--checkpoint", dir, "--data", text, "--batch", batch, "--json")
		var e struct{ Loss, Perplexity, Tokens float64 }
		if err := json.Unmarshal([]byte(r.stdout), &e); err != nil {
			t.Fatalf("%v in %s", err, r.stdout)
		}
		if first.Tokens == 0 {
			first = e
		}
		if math.Abs(e.Loss-first.Loss) > 1e-9 || e.Tokens != first.Tokens || math.Abs(e.Perplexity-math.Exp(e.Loss)) > 1e-9 || e.Loss > 6 {
			t.Errorf("batch %s: %+v, batch 1: %+v", batch, e, first)
		}
	}
	// Every byte and the end of the text but the first, which nothing predicts.
	if want := float64(20 * len("To be, or not to be, that is the question: ")); first.Tokens != want {
		t.Errorf("%v tokens, want %v", first.Tokens, want)
	}

	a := mustTrain(t, "generate", "--checkpoint", dir, "--prompt", "The ", "--tokens", "50", "--seed", "7").stdout
	b := mustTrain(t, "generate", "--checkpoint", dir, "--prompt", "The ", "--tokens", "50", "--seed", "7").stdout
	if a != b || !strings.HasPrefix(a, "The ") || len(a) < 20 {
		t.Errorf("two generations from one seed: %q and %q", a, b)
	}

	trace, err := os.ReadFile(filepath.Join(dir, "trace.json"))
	if err != nil {
		t.Fatal(err)
	}
	var doc struct {
		TraceEvents []struct {
			Name, Ph string
			Pid      int
			Ts, Dur  float64
		}
	}
	if err := json.Unmarshal(trace, &doc); err != nil {
		t.Fatal(err)
	}
	seen := map[string]bool{}
	for _, e := range doc.TraceEvents {
		seen[fmt.Sprint(e.Pid, e.Name)] = true
	}
	for _, want := range []string{"00F0", "20F0", "01F0", "21F0", "21B0"} {
		if rank, action := want[:1], want[1:]; !seen[rank+action] && !seen[rank+" "+action] && want != "20F0" && want != "01F0" {
			t.Errorf("the trace has no %s on rank %s", action, rank)
		}
	}
	for rank := range 4 {
		if _, err := os.Stat(filepath.Join(dir, fmt.Sprintf("profile-rank-%d", rank), "cpu.pprof")); err != nil {
			t.Error(err)
		}
	}
}

// TestInterruptBeforeMeeting: ranks that still wait for others have no step to finish. An interrupt ends them at once, with one
// line, and leaves a run that was to go on as it was.
func TestInterruptBeforeMeeting(t *testing.T) {
	if _, err := os.Stat("/proc/self/environ"); err != nil {
		t.Skip("finds ranks by /proc")
	}
	t.Setenv("MOETOR_SECRET", "a secret that both hosts share")
	config, dir := tinyConfig(t), filepath.Join(t.TempDir(), "run")
	mustTrain(t, launchArgs(config, dir, 2, 1, 1, "--stop-after", "1")...)
	before, err := os.ReadFile(filepath.Join(dir, "config.yaml"))
	if err != nil {
		t.Fatal(err)
	}
	for _, node := range []string{"0", "1"} {
		for _, sig := range []os.Signal{os.Interrupt, syscall.SIGTERM} {
			j := background(t, "launch", "-n", "2", "--out", dir, "--resume", "--set", "run.seed=7", "--nnodes", "2", "--node-rank", node,
				"--rendezvous", "127.0.0.1:"+freePort(t))
			for deadline := time.Now().Add(time.Minute); len(j.ranks(t)) < 2; time.Sleep(5 * time.Millisecond) {
				if time.Now().After(deadline) {
					t.Fatalf("no ranks:\n%s", j.stderr.String())
				}
			}
			time.Sleep(300 * time.Millisecond) // most often they wait by then
			j.cmd.Process.Signal(sig)
			if code := j.wait(t, 2*time.Second); code != exitFailed {
				t.Errorf("node %s, %v: exit %d, want %d", node, sig, code, exitFailed)
			}
			if text := j.stderr.String(); strings.Count(text, "train:") != 1 || !strings.Contains(text, "train: interrupted") {
				t.Errorf("node %s, %v: want one line that says so:\n%s", node, sig, text)
			}
			if after, err := os.ReadFile(filepath.Join(dir, "config.yaml")); err != nil || !bytes.Equal(before, after) {
				t.Errorf("node %s, %v: config.yaml is not as before: %v\n%s", node, sig, err, after)
			}
		}
	}

	// A rank of another launcher, over shared memory that it has made itself.
	id := freePort(t)
	c := exec.Command(binary, runArgs(config, filepath.Join(t.TempDir(), "alone"))...)
	c.Env = append(without(), "SLURM_PROCID=0", "SLURM_LOCALID=0", "SLURM_NTASKS=4", "SLURM_STEP_NUM_TASKS=4", "SLURM_NODEID=0", "SLURM_NNODES=1",
		"SLURM_TASKS_PER_NODE=4", "SLURM_JOB_ID="+id, "SLURM_STEP_ID=0", "SLURM_JOB_NODELIST=localhost")
	j := spawn(t, c)
	mine := func() []string {
		found, err := filepath.Glob("/dev/shm/moetor-*-slurm-" + id + "*")
		if err != nil {
			t.Fatal(err)
		}
		return found
	}
	for deadline := time.Now().Add(time.Minute); len(mine()) == 0; time.Sleep(5 * time.Millisecond) {
		if time.Now().After(deadline) {
			t.Fatalf("no shared memory:\n%s", j.stderr.String())
		}
	}
	j.cmd.Process.Signal(os.Interrupt)
	if code := j.wait(t, 2*time.Second); code != exitFailed || !strings.HasPrefix(j.stderr.String(), "train: interrupted") {
		t.Errorf("alone: exit %d, want %d\n%s", code, exitFailed, j.stderr.String())
	}
	if left := mine(); len(left) > 0 {
		t.Errorf("left in shared memory: %v", left)
	}
}

// TestSecondLauncher: two launchers, as on two hosts, make one job over tcp.
func TestSecondLauncher(t *testing.T) {
	t.Setenv("MOETOR_SECRET", "a secret that both hosts share")
	config, dir := tinyConfig(t), t.TempDir()
	port := freePort(t)
	args := func(node int) []string {
		return launchArgs(config, filepath.Join(dir, fmt.Sprint("node", node)), 2, 1, 1, "-n", "1", "--nnodes", "2", "--node-rank", fmt.Sprint(node), "--rendezvous", "127.0.0.1:"+port)
	}
	shared := filepath.Join(dir, "shared") // both hosts write into one file system
	second := background(t, append(args(1), "--out", shared)...)
	first := background(t, append(args(0), "--out", shared)...)
	if code := first.wait(t, time.Minute); code != exitDone {
		t.Fatalf("first launcher: exit %d:\n%s", code, first.stderr.String())
	}
	if code := second.wait(t, time.Minute); code != exitDone {
		t.Fatalf("second launcher: exit %d:\n%s", code, second.stderr.String())
	}
	one := filepath.Join(dir, "one")
	mustTrain(t, launchArgs(config, one, 2, 1, 1)...)
	if got, want := losses(metrics(t, shared)), losses(metrics(t, one)); !slices.Equal(got, want) {
		t.Error("two launchers train other losses than one")
	}
}

// TestInterruptWhileReading: an interrupt before the ranks are started ends the launcher with a line and its code, not by the
// signal.
func TestInterruptWhileReading(t *testing.T) {
	text := filepath.Join(t.TempDir(), "large.txt")
	if err := os.WriteFile(text, bytes.Repeat([]byte("A text that takes a while to be read. \n"), 2<<20), 0o600); err != nil {
		t.Fatal(err)
	}
	config := tinyConfig(t)
	for _, sig := range []os.Signal{os.Interrupt, syscall.SIGTERM} {
		j := background(t, "launch", "--config", config, "--out", filepath.Join(t.TempDir(), "run"), "--set", "stages.0.data.0.path="+text)
		time.Sleep(150 * time.Millisecond)
		j.cmd.Process.Signal(sig)
		if code := j.wait(t, 10*time.Second); code != exitFailed || !strings.Contains(j.stderr.String(), "train: interrupted") {
			t.Errorf("%v: exit %d, want %d\n%s", sig, code, exitFailed, j.stderr.String())
		}
	}
}
