package main

import (
	"bytes"
	"encoding/json"
	"errors"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
	"time"
)

// What a user does to a run that no configuration foresees.

// TestOneRunPerDirectory: a second launcher is refused while the first trains, whatever it wants of the directory.
func TestOneRunPerDirectory(t *testing.T) {
	config, dir := tinyConfig(t), filepath.Join(t.TempDir(), "run")
	j := background(t, launchArgs(config, dir, 2, 1, 1, "--set", "stages.0.steps=100000")...)
	reach(t, dir, 1)
	for _, more := range [][]string{{}, {"--overwrite"}, {"--resume"}} {
		r := start(t, launchArgs(config, dir, 1, 1, 1, more...)...)
		if r.code != exitUsage || strings.Count(r.stderr, "\n") != 1 || !strings.Contains(r.stderr, dir) {
			t.Errorf("%v: exit %d, want %d and one line that names %s:\n%s", more, r.code, exitUsage, dir, r.stderr)
		}
	}
	j.cmd.Process.Signal(syscall.SIGTERM)
	if code := j.wait(t, 30*time.Second); code != exitStopped {
		t.Errorf("first launcher: exit %d, want %d:\n%s", code, exitStopped, j.stderr.String())
	}
	mustTrain(t, "launch", "-n", "2", "--out", dir, "--resume", "--stop-after", "1") // the lock went with its holder
}

// TestHangup: a terminal that goes away ends the run as Ctrl-C does, with a checkpoint.
func TestHangup(t *testing.T) {
	dir := filepath.Join(t.TempDir(), "run")
	j := background(t, launchArgs(tinyConfig(t), dir, 2, 1, 1, "--set", "stages.0.steps=100000")...)
	reach(t, dir, 1)
	j.cmd.Process.Signal(syscall.SIGHUP)
	if code := j.wait(t, 30*time.Second); code != exitStopped {
		t.Errorf("exit %d, want %d:\n%s", code, exitStopped, j.stderr.String())
	}
	mustTrain(t, "inspect", dir)
}

// TestClosedOutput: a reader that goes away (2>&1 | head -1) does not end the run.
func TestClosedOutput(t *testing.T) {
	dir := filepath.Join(t.TempDir(), "run")
	c := exec.Command(binary, launchArgs(tinyConfig(t), dir, 2, 1, 1)...)
	r, w, err := os.Pipe()
	if err != nil {
		t.Fatal(err)
	}
	c.Stdout, c.Stderr = w, w
	if err := c.Start(); err != nil {
		t.Fatal(err)
	}
	w.Close()
	if _, err := io.ReadFull(r, make([]byte, 1)); err != nil {
		t.Fatal(err)
	}
	r.Close()
	if err := c.Wait(); err != nil {
		t.Errorf("%v, want exit 0", err)
	}
	if n := len(metrics(t, dir)); n != 20 {
		t.Errorf("%d steps, want 20", n)
	}
}

// TestRefusedResume: the user reads why in one line, once, and config.yaml stays that of the run.
func TestRefusedResume(t *testing.T) {
	dir := filepath.Join(t.TempDir(), "run")
	mustTrain(t, launchArgs(tinyConfig(t), dir, 2, 1, 1, "--stop-after", "2")...)
	before, err := os.ReadFile(filepath.Join(dir, "config.yaml"))
	if err != nil {
		t.Fatal(err)
	}
	r := start(t, "launch", "-n", "2", "--out", dir, "--resume", "--set", "run.seed=7")
	if r.code == exitDone || strings.Count(r.stderr, "run.seed=7") != 1 {
		t.Errorf("exit %d; want a failure and run.seed=7 in one line:\n%s", r.code, r.stderr)
	}
	if log, err := os.ReadFile(filepath.Join(dir, "rank-0.log")); err != nil || !bytes.Contains(log, []byte("run.seed=7")) {
		t.Errorf("the log of rank 0 does not say why: %v\n%s", err, log)
	}
	if after, err := os.ReadFile(filepath.Join(dir, "config.yaml")); err != nil || !bytes.Equal(before, after) {
		t.Errorf("config.yaml is not as before the refused resume: %v\n%s", err, after)
	}
	mustTrain(t, "launch", "-n", "2", "--out", dir, "--resume", "--stop-after", "2")
}

// TestNothingSilent: a launch that does less than was asked for says so.
func TestNothingSilent(t *testing.T) {
	dir := filepath.Join(t.TempDir(), "run")
	r := mustTrain(t, launchArgs(tinyConfig(t), dir, 2, 1, 1, "--set", "stages.0.steps=4", "--trace", "3")...)
	if !strings.Contains(r.stderr, "trace of 2 steps") || !strings.Contains(r.stderr, "--trace 3") || strings.Contains(r.stderr, "nothing left") {
		t.Errorf("nothing about a trace of 3 steps after 2 of warm-up in a run of 4:\n%s", r.stderr)
	}
	if r = mustTrain(t, "launch", "-n", "2", "--out", dir, "--resume"); !strings.Contains(r.stderr, "nothing left to do") {
		t.Errorf("nothing about a run that is complete:\n%s", r.stderr)
	}
	again := []string{"launch", "-n", "2", "--out", dir, "--resume", "--set", "stages.0.steps=7", "--stop-after"}
	if r = mustTrain(t, append(again, "2")...); !strings.Contains(r.stderr, "stopped by --stop-after 2; --resume goes on with stage pretrain") {
		t.Errorf("nothing about a run that was stopped:\n%s", r.stderr)
	}
	if r = mustTrain(t, append(again, "1", "--trace", "1")...); strings.Contains(r.stderr, "stopped by") || !strings.Contains(r.stderr, "no trace.json") {
		t.Errorf("a run that is complete was not stopped, and has no step to trace:\n%s", r.stderr)
	}
}

// TestHungRank: of ranks that wait for each other and all for one that hangs, the message names that one.
func TestHungRank(t *testing.T) {
	if _, err := os.Stat("/proc/self/environ"); err != nil {
		t.Skip("finds ranks by /proc")
	}
	dir := filepath.Join(t.TempDir(), "run")
	j := background(t, launchArgs(tinyConfig(t), dir, 2, 2, 2, "--set", "stages.0.steps=100000", "--set", "comm.timeout=2s")...)
	reach(t, dir, 2)
	syscall.Kill(j.ranks(t)[3], syscall.SIGSTOP)
	if code := j.wait(t, 30*time.Second); code != exitFailed {
		t.Errorf("exit %d, want %d", code, exitFailed)
	}
	if text := j.stderr.String(); !strings.Contains(text, "rank 3 gave no answer") || strings.Count(text, "train:") != 1 {
		t.Errorf("want one line that names rank 3:\n%s", text)
	}
}

// TestSweep: of segments only those go that are old and whose launcher is gone.
func TestSweep(t *testing.T) {
	dir := t.TempDir()
	old := time.Now().Add(-time.Hour)
	add := func(name string, at time.Time) string {
		path := filepath.Join(dir, name)
		if err := errors.Join(os.Mkdir(path, 0o700), os.WriteFile(filepath.Join(path, "segment"), nil, 0o600), os.Chtimes(path, at, at)); err != nil {
			t.Fatal(err)
		}
		return path
	}
	gone := []string{add("moetor-0123456789abcdef", old), add(".moetor-new-12", old)}
	held := add("moetor-00000000000000aa", old)
	kept := []string{held, add("moetor-00000000000000bb", time.Now()), add("moetor-0-torchrun-29500", old), add("others", old)}
	unlock, err := flockDir(held)
	if err != nil {
		t.Fatal(err)
	}
	defer unlock()
	sweepSegments(dir)
	for _, path := range gone {
		if _, err := os.Stat(path); err == nil {
			t.Errorf("%s is still there", path)
		}
	}
	for _, path := range kept {
		if _, err := os.Stat(path); err != nil {
			t.Error(err)
		}
	}
}

// TestTerminalVariable: a variable that is left in the user's environment draws no live line into a pipe.
func TestTerminalVariable(t *testing.T) {
	t.Setenv(ttyVar, "1")
	r := mustTrain(t, launchArgs(tinyConfig(t), filepath.Join(t.TempDir(), "run"), 1, 1, 1, "--set", "stages.0.steps=2")...)
	if strings.ContainsAny(r.stderr, "\r\x1b") {
		t.Errorf("control characters in a pipe: %q", r.stderr)
	}
}

// TestPatternInPath: a run directory whose name reads as a glob is protected like any other.
func TestPatternInPath(t *testing.T) {
	config, dir := tinyConfig(t), filepath.Join(t.TempDir(), "run[1]*")
	mustTrain(t, launchArgs(config, dir, 1, 1, 1, "--stop-after", "1")...)
	if r := start(t, launchArgs(config, dir, 1, 1, 1)...); r.code != exitUsage || !strings.Contains(r.stderr, "--overwrite") {
		t.Errorf("exit %d, want %d: the run there would be lost\n%s", r.code, exitUsage, r.stderr)
	}
}

// TestShowJSON: --json means JSON alone on stdout.
func TestShowJSON(t *testing.T) {
	var v struct{ Model struct{ Layers int } }
	r := mustTrain(t, "config", "show", "demo", "--json", "--set", "model.layers=5")
	if err := json.Unmarshal([]byte(r.stdout), &v); err != nil || v.Model.Layers != 5 {
		t.Errorf("%v, %+v in %s", err, v, r.stdout)
	}
}
