package launch

import (
	"os"
	"os/exec"
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
