//go:build linux

package main

import (
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"syscall"
	"testing"
	"time"
)

// hosts are two network namespaces with a cable between them: what two machines are to TCP.
type hosts struct {
	names [2]string
	addr  string // of the first
}

func twoHosts(t *testing.T) hosts {
	t.Helper()
	if os.Getuid() != 0 {
		t.Skip("network namespaces need root")
	}
	if _, err := exec.LookPath("ip"); err != nil {
		t.Skip("network namespaces need ip (iproute2)")
	}
	h := hosts{addr: "10.213.7.1"}
	for i := range h.names {
		h.names[i] = fmt.Sprintf("moetor-%d-%d", os.Getpid(), i)
		if out, err := exec.Command("ip", "netns", "add", h.names[i]).CombinedOutput(); err != nil {
			if strings.Contains(string(out), "not permitted") || strings.Contains(string(out), "denied") {
				t.Skipf("root may not make network namespaces here: %s", out)
			}
			t.Fatalf("ip netns add: %v: %s", err, out)
		}
		t.Cleanup(func() { exec.Command("ip", "netns", "del", h.names[i]).Run() })
	}
	ip(t, "link", "add", "cable", "netns", h.names[0], "type", "veth", "peer", "name", "cable", "netns", h.names[1])
	for i, n := range h.names {
		ip(t, "-n", n, "addr", "add", fmt.Sprintf("10.213.7.%d/24", i+1), "dev", "cable")
		ip(t, "-n", n, "link", "set", "lo", "up")
		ip(t, "-n", n, "link", "set", "cable", "up")
	}
	return h
}

func ip(t *testing.T, args ...string) {
	t.Helper()
	if out, err := exec.Command("ip", args...).CombinedOutput(); err != nil {
		t.Fatalf("ip %s: %v: %s", strings.Join(args, " "), err, out)
	}
}

// launch starts the launchers of one job of 2x2,2 ranks, two on each host, with a run directory that the hosts share.
func (h hosts) launch(t *testing.T, config, dir string, port int, more ...string) (js [2]*job) {
	t.Helper()
	for i, n := range h.names {
		args := launchArgs(config, dir, 2, 2, 2, "-n", "2", "--nnodes", "2", "--node-rank", fmt.Sprint(i), "--rendezvous", fmt.Sprintf("%s:%d", h.addr, port))
		js[i] = spawn(t, exec.Command("ip", slices.Concat([]string{"netns", "exec", n, binary}, args, more)...))
	}
	return js
}

// TestTwoHosts runs one job from launchers on two hosts.
func TestTwoHosts(t *testing.T) {
	h := twoHosts(t)
	t.Setenv("MOETOR_SECRET", "a secret that both hosts share")
	config := tinyConfig(t)

	t.Run("losses", func(t *testing.T) { // are those of one host, to the bit
		one, two := filepath.Join(t.TempDir(), "one"), filepath.Join(t.TempDir(), "two")
		mustTrain(t, launchArgs(config, one, 2, 2, 2)...)
		for i, j := range h.launch(t, config, two, 29501) {
			if code := j.wait(t, time.Minute); code != exitDone {
				t.Fatalf("launcher %d: exit %d:\n%s", i, code, j.stderr.String())
			}
		}
		if got, want := losses(metrics(t, two)), losses(metrics(t, one)); !slices.Equal(got, want) {
			t.Errorf("losses on two hosts differ from those on one:\n%v\n%v", got, want)
		}
		mustTrain(t, "inspect", two)
	})

	t.Run("killed rank", func(t *testing.T) { // both launchers end within 5 s and name it
		dir := filepath.Join(t.TempDir(), "run")
		js := h.launch(t, config, dir, 29502, "--set", "stages.0.steps=100000")
		reach(t, dir, 5)
		syscall.Kill(js[1].ranks(t)[3], syscall.SIGKILL)
		for i, j := range js {
			if code := j.wait(t, 5*time.Second); code != exitFailed {
				t.Errorf("launcher %d: exit %d, want %d", i, code, exitFailed)
			}
			if text := lastLine(j); !strings.Contains(text, "rank 3") || !strings.Contains(text, "step") {
				t.Errorf("launcher %d names neither rank 3 nor its step: %s", i, text)
			}
		}
	})

	t.Run("cut cable", func(t *testing.T) { // each side says which rank of the other it lost
		dir := filepath.Join(t.TempDir(), "run")
		js := h.launch(t, config, dir, 29503, "--set", "stages.0.steps=100000", "--set", "comm.timeout=4s")
		reach(t, dir, 5)
		ip(t, "-n", h.names[1], "link", "set", "cable", "down")
		for i, want := range []string{`rank [23] (lost|gave no answer)`, `rank [01] (lost|gave no answer)`} {
			if code := js[i].wait(t, 30*time.Second); code != exitFailed {
				t.Errorf("launcher %d: exit %d, want %d", i, code, exitFailed)
			}
			if text := lastLine(js[i]); !regexp.MustCompile(want).MatchString(text) {
				t.Errorf("launcher %d names no rank of the other host: %s", i, text)
			}
		}
	})
}

func lastLine(j *job) string {
	lines := strings.Split(strings.TrimSpace(j.stderr.String()), "\n")
	return lines[len(lines)-1]
}
