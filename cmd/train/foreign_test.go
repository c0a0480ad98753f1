package main

import (
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"moetor/configs"
)

// without is the environment without what a launcher around this test may have set.
func without() (env []string) {
	for _, v := range os.Environ() {
		name, _, _ := strings.Cut(v, "=")
		if name != "RANK" && name != "WORLD_SIZE" && !strings.HasPrefix(name, "MOETOR_") && !strings.HasPrefix(name, "MASTER_") &&
			!strings.HasPrefix(name, "OMPI_") && !strings.HasPrefix(name, "PM") && !strings.HasPrefix(name, "SLURM_") {
			env = append(env, v)
		}
	}
	return env
}

// byHand starts size ranks as a shell loop would, each with the variables that vars gives it.
func byHand(t *testing.T, size int, vars func(rank int) []string, args ...string) (js []*job) {
	t.Helper()
	for r := range size {
		c := exec.Command(binary, args...)
		c.Env = append(without(), vars(r)...)
		js = append(js, spawn(t, c))
	}
	return js
}

// torchrun are the variables of torchrun on one host, with tcp.
func torchrun(size int, port string) func(int) []string {
	return func(r int) []string {
		return []string{fmt.Sprint("RANK=", r), fmt.Sprint("WORLD_SIZE=", size), fmt.Sprint("LOCAL_RANK=", r), fmt.Sprint("LOCAL_WORLD_SIZE=", size),
			"MASTER_ADDR=127.0.0.1", "MASTER_PORT=" + port, "MOETOR_SECRET=known to the ranks"}
	}
}

func runArgs(config, dir string, more ...string) []string {
	return append([]string{"run", "--config", config, "--out", dir, "--set", "parallel.pipeline=2", "--set", "parallel.expert=2"}, more...)
}

// sameRun wants that a run under another launcher left what train launch leaves: metrics with the same losses, the
// configuration as resolved, a log of each rank, a checkpoint that verifies.
func sameRun(t *testing.T, dir, launched string) {
	t.Helper()
	if got, want := losses(metrics(t, dir)), losses(metrics(t, launched)); !slices.Equal(got, want) {
		t.Errorf("losses differ from those of train launch:\n%v\n%v", got, want)
	}
	resolved := func(dir string) string { // as written, but for the directory
		run, err := configs.Load(filepath.Join(dir, "config.yaml"), nil)
		if err != nil {
			t.Fatal(err)
		}
		if run.Run.Out != dir {
			t.Errorf("config.yaml in %s has run.out=%s", dir, run.Run.Out)
		}
		run.Run.Out = ""
		return string(configs.Marshal(run))
	}
	if got, want := resolved(dir), resolved(launched); got != want {
		t.Errorf("config.yaml is\n%s\nthat of train launch\n%s", got, want)
	}
	for r := range 4 {
		if _, err := os.Stat(filepath.Join(dir, fmt.Sprintf("rank-%d.log", r))); err != nil {
			t.Error(err)
		}
	}
	mustTrain(t, "inspect", dir)
}

// TestOtherLaunchers: train run under the variables of other launchers trains what train launch trains.
func TestOtherLaunchers(t *testing.T) {
	config := tinyConfig(t)
	launched := filepath.Join(t.TempDir(), "launched")
	mustTrain(t, launchArgs(config, launched, 2, 2, 2)...)
	port, id := freePort(t), freePort(t)
	for name, c := range map[string]struct {
		vars func(rank int) []string
		more []string
	}{
		"torchrun": {torchrun(4, port), []string{"--transport", "tcp"}},
		"slurm": {func(r int) []string {
			return []string{fmt.Sprint("SLURM_PROCID=", r), fmt.Sprint("SLURM_LOCALID=", r), "SLURM_NTASKS=4", "SLURM_STEP_NUM_TASKS=4", "SLURM_NODEID=0",
				"SLURM_NNODES=1", "SLURM_TASKS_PER_NODE=4", "SLURM_JOB_ID=" + id, "SLURM_STEP_ID=0", "SLURM_JOB_NODELIST=localhost"}
		}, nil},
	} {
		t.Run(name, func(t *testing.T) {
			dir := filepath.Join(t.TempDir(), "run")
			js := byHand(t, 4, c.vars, runArgs(config, dir, c.more...)...)
			for r, j := range js {
				if code := j.wait(t, time.Minute); code != exitDone {
					t.Fatalf("rank %d: exit %d:\n%s", r, code, j.stderr.String())
				}
				if text := j.stderr.String(); (r == 0) != strings.Contains(text, "checkpoint: "+dir) || r > 0 && text != "" {
					t.Errorf("rank %d says\n%s", r, text)
				}
			}
			sameRun(t, dir, launched)
		})
	}
	if left, err := filepath.Glob("/dev/shm/moetor-*-slurm-" + id + "*"); err != nil || len(left) > 0 {
		t.Errorf("left in shared memory: %v (%v)", left, err)
	}
}

// TestMpirun is the same under the mpirun of an installed OpenMPI.
func TestMpirun(t *testing.T) {
	mpirun, err := exec.LookPath("mpirun")
	if err != nil {
		t.Skip("mpirun is not installed")
	}
	if out, err := exec.Command(mpirun, "--version").Output(); err != nil || !strings.Contains(string(out), "Open MPI") {
		t.Skip("mpirun is not OpenMPI's")
	}
	config := tinyConfig(t)
	launched := filepath.Join(t.TempDir(), "launched")
	mustTrain(t, launchArgs(config, launched, 2, 2, 2)...)
	for _, transport := range []string{"", "tcp"} {
		t.Run("transport "+transport, func(t *testing.T) {
			dir := filepath.Join(t.TempDir(), "run")
			c := exec.Command(mpirun, append([]string{"--allow-run-as-root", "--oversubscribe", "-n", "4", binary}, runArgs(config, dir)...)...)
			c.Env = without()
			if transport != "" {
				c.Args = append(c.Args, "--transport", transport)
				c.Env = append(c.Env, "MOETOR_SECRET=known to the ranks", "MOETOR_RENDEZVOUS=127.0.0.1:"+freePort(t))
			}
			j := spawn(t, c)
			if code := j.wait(t, time.Minute); code != exitDone {
				t.Fatalf("exit %d:\n%s", code, j.stderr.String())
			}
			sameRun(t, dir, launched)
		})
	}
}

// TestRunAlone: without variables of any launcher there is one rank, and it prepares its run itself.
func TestRunAlone(t *testing.T) {
	config := tinyConfig(t)
	launched, dir := filepath.Join(t.TempDir(), "launched"), filepath.Join(t.TempDir(), "run")
	mustTrain(t, "launch", "--config", config, "--out", launched, "--set", "stages.0.steps=3")
	alone := func(more ...string) (int, string) {
		c := exec.Command(binary, append([]string{"run", "--config", config, "--out", dir, "--set", "stages.0.steps=3"}, more...)...)
		c.Env = without()
		j := spawn(t, c)
		return j.wait(t, time.Minute), j.stderr.String()
	}
	if code, text := alone(); code != exitDone {
		t.Fatalf("exit %d:\n%s", code, text)
	}
	want := losses(metrics(t, launched))
	if got := losses(metrics(t, dir)); !slices.Equal(got, want) {
		t.Errorf("losses %v, those of train launch %v", got, want)
	}
	if code, text := alone(); code != exitUsage || strings.Count(text, "\n") != 1 || !strings.Contains(text, "--overwrite") {
		t.Errorf("again into the same directory: exit %d:\n%s", code, text)
	}
	if code, text := alone("--overwrite"); code != exitDone || len(metrics(t, dir)) != 3 {
		t.Errorf("overwrite: exit %d, %d steps:\n%s", code, len(metrics(t, dir)), text)
	}
	if code, text := alone("--resume", "--set", "stages.0.steps=5"); code != exitDone || len(metrics(t, dir)) != 5 {
		t.Errorf("resume: exit %d, %d steps:\n%s", code, len(metrics(t, dir)), text)
	}
}

// TestOtherLauncherRefusals: what train launch refuses, ranks under another launcher refuse together: all exit with 2, and
// rank 0 alone says why, in one line.
func TestOtherLauncherRefusals(t *testing.T) {
	config := tinyConfig(t)
	held := filepath.Join(t.TempDir(), "held")
	mustTrain(t, "launch", "--config", config, "--out", held, "--set", "stages.0.steps=1")
	for name, c := range map[string]struct {
		out  string
		more func(rank int) []string
		want []string
	}{
		"a run is there": {held, nil, []string{held, "--resume", "--overwrite"}},
		"no such file":   {"", func(int) []string { return []string{"--set", "stages.0.data=[{path: /nonexistent/x.txt}]"} }, []string{"stages.0.data.0.path", "/nonexistent/x.txt"}},
		"setting":        {"", func(int) []string { return []string{"--set", "parallel.expert=4"} }, []string{"parallel.expert=4"}},
		"setting of one rank": {"", func(r int) []string {
			if r == 1 {
				return []string{"--set", "model.dims=3"}
			}
			return nil
		}, []string{"rank 1: ", "model.dims"}},
	} {
		t.Run(name, func(t *testing.T) {
			out := c.out
			if out == "" {
				out = filepath.Join(t.TempDir(), "run")
			}
			vars, js := torchrun(2, freePort(t)), []*job{}
			for r := range 2 {
				args := []string{"run", "--config", config, "--out", out, "--transport", "tcp"}
				if c.more != nil {
					args = append(args, c.more(r)...)
				}
				e := exec.Command(binary, args...)
				e.Env = append(without(), vars(r)...)
				js = append(js, spawn(t, e))
			}
			for r, j := range js {
				if code := j.wait(t, time.Minute); code != exitUsage {
					t.Errorf("rank %d: exit %d, want %d", r, code, exitUsage)
				}
			}
			text := js[0].stderr.String()
			if strings.Count(text, "train: ") != 1 || js[1].stderr.Len() > 0 {
				t.Errorf("want one line, of rank 0:\n%s%s", text, js[1].stderr.String())
			}
			for _, w := range c.want {
				if !strings.Contains(text, w) {
					t.Errorf("%q does not name %q", text, w)
				}
			}
		})
	}
	for name, env := range map[string][]string{
		"WORLD_SIZE":        {"WORLD_SIZE=2"},
		"MOETOR_SECRET":     {"RANK=0", "WORLD_SIZE=2", "MASTER_ADDR=127.0.0.1"},
		"MOETOR_RENDEZVOUS": {"RANK=0", "WORLD_SIZE=2"},
	} {
		c := exec.Command(binary, "run", "--config", config, "--out", filepath.Join(t.TempDir(), "run"), "--transport", "tcp")
		c.Env = append(without(), env...)
		j := spawn(t, c)
		if code, text := j.wait(t, time.Minute), j.stderr.String(); code != exitUsage || strings.Count(text, "\n") != 1 || !strings.Contains(text, name) {
			t.Errorf("%v: exit %d, want %d and one line that names %s:\n%s", env, code, exitUsage, name, text)
		}
	}
}
