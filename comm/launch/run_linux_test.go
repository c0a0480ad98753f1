package launch

import (
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"syscall"
	"testing"
	"time"
)

// A launcher that is killed takes its ranks along.
func TestKilledLauncher(t *testing.T) {
	dir := t.TempDir()
	c := exec.Command(os.Args[0])
	c.Env = append(os.Environ(), envRole+"=launcher", envDir+"="+dir)
	if err := c.Start(); err != nil {
		t.Fatal(err)
	}
	ranks := up(t, dir, 3)
	c.Process.Kill()
	c.Wait()
	deadline := time.Now().Add(time.Minute)
	for pid, rank := range ranks {
		for running(pid) {
			if time.Now().After(deadline) {
				t.Errorf("rank %d (process %d) outlives its launcher", rank, pid)
				syscall.Kill(pid, syscall.SIGKILL)
				break
			}
			time.Sleep(5 * time.Millisecond)
		}
	}
}

// allowed gives, for every thread of a process, the processors that it may use, as the system writes them.
func allowed(t *testing.T, pid int) (lists []string) {
	t.Helper()
	names, _ := filepath.Glob(fmt.Sprintf("/proc/%d/task/*/status", pid))
	for _, name := range names {
		b, err := os.ReadFile(name)
		if err != nil {
			continue // a thread that has ended
		}
		_, after, _ := strings.Cut(string(b), "Cpus_allowed_list:")
		list, _, _ := strings.Cut(after, "\n")
		lists = append(lists, strings.TrimSpace(list))
	}
	if len(lists) == 0 {
		t.Fatalf("process %d has no threads", pid)
	}
	return lists
}

// Every thread of a rank is on the cores of that rank; the launcher's own threads stay where they were.
func TestCoresPerRank(t *testing.T) {
	cores := Cores()
	if len(cores) < 2 {
		t.Skip("one core for two ranks")
	}
	mine := allowed(t, os.Getpid())[0]
	for _, bind := range []int{1, 0} {
		j, dir, _, _ := job(t, "interrupt", 2)
		j.CoresPerRank = bind
		done := start(t.Context(), j)
		for pid, rank := range up(t, dir, 2) {
			want := mine
			if bind > 0 {
				want = strconv.Itoa(cores[rank])
			}
			for _, got := range allowed(t, pid) {
				if got != want {
					t.Errorf("CoresPerRank %d: a thread of rank %d may use cores %s, want %s", bind, rank, got, want)
				}
			}
			syscall.Kill(pid, syscall.SIGKILL)
		}
		for _, got := range allowed(t, os.Getpid()) {
			if got != mine {
				t.Errorf("CoresPerRank %d: a thread of the launcher may use cores %s, want %s", bind, got, mine)
			}
		}
		<-done
	}
	j, _, _, _ := job(t, "ok", 2)
	j.CoresPerRank = len(cores)
	if code, err := Run(t.Context(), j); code != 2 || err == nil || !strings.Contains(err.Error(), "2 ranks with") {
		t.Errorf("more cores than there are: code %d, %v", code, err)
	}
}
