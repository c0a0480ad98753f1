//go:build cgo

package checkpoint

import (
	"bufio"
	"bytes"
	"errors"
	"fmt"
	"io"
	"math/rand/v2"
	"os"
	"os/exec"
	"os/signal"
	"path/filepath"
	"regexp"
	"strconv"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"
)

// The tests of this file run the test binary again as a child that writes checkpoints and dies, or runs out of space.
func TestMain(m *testing.M) {
	switch os.Getenv("CHECKPOINT_TEST_CHILD") {
	case "script":
		childScript()
	case "loop":
		childLoop()
	case "limit":
		childLimit()
	default:
		os.Exit(m.Run())
	}
}

func child(mode, root string, env ...string) *exec.Cmd {
	cmd := exec.Command(os.Args[0])
	cmd.Env = append(os.Environ(), "CHECKPOINT_TEST_CHILD="+mode, "CHECKPOINT_TEST_ROOT="+root)
	cmd.Env = append(cmd.Env, env...)
	return cmd
}

func fatal(err error) {
	if err != nil {
		fmt.Fprintln(os.Stderr, err)
		os.Exit(1)
	}
}

func die() {
	syscall.Kill(os.Getpid(), syscall.SIGKILL)
	select {}
}

// scratch is a directory in memory where there is one: after a kill -9 it holds the same as a disk, without the waits.
func scratch(t *testing.T) string {
	dir, err := os.MkdirTemp("/dev/shm", "checkpoint-test-")
	if err != nil {
		return t.TempDir()
	}
	t.Cleanup(func() { os.RemoveAll(dir) })
	return dir
}

// long asks for more rounds of killing than a run of all tests has time for: MOETOR_LONG_TESTS=1.
var long = os.Getenv("MOETOR_LONG_TESTS") != ""

// tiny is a model of few writes, since a child dies at each of them. No reader looks at a file before its manifest is
// there, so that one write to a file stands for all.
func tiny() []Info {
	ts := []Info{{"w", Weight, []int{3, 2}}, {"w", ExpAvg, []int{3, 2}}, {"w", ExpAvgSq, []int{3, 2}}}
	if !long {
		return ts[:1]
	}
	return ts
}

// script is a run with keep=1 that saves step 2 a second time with other content, as a run does that resumed from step 1.
var script = []struct{ step, content int64 }{{1, 1}, {2, 2}, {2, 20}}

// childScript runs the script and dies before the file system step whose number is given.
func childScript() {
	root := os.Getenv("CHECKPOINT_TEST_ROOT")
	fuse, _ := strconv.Atoi(os.Getenv("CHECKPOINT_TEST_STEP"))
	n := 0
	trap = func(op, path string) {
		if n++; n == fuse {
			die()
		}
	}
	for i, s := range script {
		fatal(save(root, "pretrain", s.step, tiny(), 2, s.content))
		fmt.Println(i)
		fatal(Prune(root, "pretrain", 1))
	}
	fmt.Println("steps", n)
}

// TestKillAtEveryStep: whatever write, fsync, rename or removal a run dies at, a reader finds the last committed
// checkpoint or the one that was being committed, whole; and a new run can go on from there. (P22)
func TestKillAtEveryStep(t *testing.T) {
	out, err := child("script", scratch(t)).Output()
	if err != nil {
		t.Fatal(err)
	}
	m := regexp.MustCompile(`steps (\d+)`).FindSubmatch(out)
	if m == nil {
		t.Fatalf("child printed %q", out)
	}
	total, _ := strconv.Atoi(string(m[1]))
	if total < 45 {
		t.Fatalf("only %d steps trapped", total)
	}
	var wg sync.WaitGroup
	fuses := make(chan int)
	for range 4 {
		wg.Go(func() {
			for fuse := range fuses {
				if err := killedAt(fuse, scratch(t)); err != nil {
					t.Errorf("killed at step %d of %d: %v", fuse, total, err)
				}
			}
		})
	}
	for fuse := 1; fuse <= total; fuse++ {
		fuses <- fuse
	}
	close(fuses)
	wg.Wait()
}

func killedAt(fuse int, root string) error {
	out, err := child("script", root, fmt.Sprint("CHECKPOINT_TEST_STEP=", fuse)).Output()
	if err == nil {
		return errors.New("the child outlived it")
	}
	committed := bytes.Count(out, []byte("\n"))
	r, _, err := OpenLatest(root, "pretrain")
	if committed == 0 && errors.Is(err, ErrNotFound) {
		return nil
	}
	if err != nil {
		return fmt.Errorf("after %d commits: %w", committed, err)
	}
	defer r.Close()
	found := false
	for i := max(committed-1, 0); i <= min(committed, len(script)-1); i++ {
		if r.Meta().Step == script[i].step && holds(r, tiny(), script[i].content) == nil {
			found = true
		}
	}
	if !found {
		return fmt.Errorf("after %d commits: found %s, with other content than was saved", committed, r.Dir())
	}
	// Life goes on: the next save and prune leave exactly one directory.
	if err := save(root, "pretrain", 4, tiny(), 2, 4); err != nil {
		return err
	}
	if err := Prune(root, "pretrain", 1); err != nil {
		return err
	}
	if left, _ := os.ReadDir(root); len(left) != 1 || left[0].Name() != Name("pretrain", 4) {
		return fmt.Errorf("the next save left %v", left)
	}
	return nil
}

// childLoop saves checkpoints for ever and reports each commit.
func childLoop() {
	root := os.Getenv("CHECKPOINT_TEST_ROOT")
	first, _ := strconv.ParseInt(os.Getenv("CHECKPOINT_TEST_STEP"), 10, 64)
	for step := first; ; step++ {
		fatal(save(root, "pretrain", step, tiny(), 3, step))
		fmt.Println(step)
		fatal(Prune(root, "pretrain", 2))
	}
}

func TestKillAtRandomMoments(t *testing.T) {
	root := scratch(t)
	rng := rand.New(rand.NewPCG(7, 7))
	last := int64(0)
	rounds := 10
	if long {
		rounds = 50
	}
	for range rounds {
		cmd := child("loop", root, fmt.Sprint("CHECKPOINT_TEST_STEP=", last+1))
		var stderr bytes.Buffer
		cmd.Stderr = &stderr
		out, err := cmd.StdoutPipe()
		if err != nil {
			t.Fatal(err)
		}
		if err := cmd.Start(); err != nil {
			t.Fatal(err)
		}
		lines := bufio.NewScanner(out)
		for n := rng.IntN(3); n >= 0 && lines.Scan(); n-- {
			last, _ = strconv.ParseInt(lines.Text(), 10, 64)
		}
		time.Sleep(time.Duration(rng.IntN(20_000)) * time.Microsecond)
		cmd.Process.Kill()
		for lines.Scan() {
			last, _ = strconv.ParseInt(lines.Text(), 10, 64)
		}
		cmd.Wait()
		if stderr.Len() > 0 {
			t.Fatalf("child: %s", &stderr)
		}
		r, _, err := OpenLatest(root, "pretrain")
		if err != nil {
			t.Fatalf("after step %d: %v", last, err)
		}
		step := r.Meta().Step
		if step != last && step != last+1 {
			t.Errorf("after step %d: found step %d", last, step)
		}
		if err := holds(r, tiny(), step); err != nil {
			t.Errorf("after step %d: %v", last, err)
		}
		r.Close()
		last = step
	}
}

// noSpace writes a large checkpoint that cannot fit, and checks what is left, for the process that is limited.
func noSpace(root string, cause error) error {
	big := []Info{{"model.big.weight", Weight, []int{512, 1024}}} // 2 MiB
	err := save(root, "pretrain", 2, big, 1, 2)
	if !errors.Is(err, cause) {
		return fmt.Errorf("want an error that is %q, got: %w", cause, err)
	}
	if strings.Contains(err.Error(), "\n") || !strings.Contains(err.Error(), "rank-0000.h5") {
		return fmt.Errorf("want one line that names the file, got: %w", err)
	}
	if err := Discard(Dir(root, "pretrain", 2)); err != nil {
		return err
	}
	r, skipped, err := OpenLatest(root, "pretrain")
	if err != nil || len(skipped) > 0 {
		return fmt.Errorf("afterwards: skipped %v, %w", skipped, err)
	}
	defer r.Close()
	return holds(r, smallModel(), 1)
}

// childLimit tries a save under every limit of the size of a file, so that the write fails at each of HDF5's steps:
// creating, data, metadata at close. The library must live on after each.
func childLimit() {
	root := os.Getenv("CHECKPOINT_TEST_ROOT")
	signal.Ignore(syscall.SIGXFSZ)
	fatal(save(root, "pretrain", 1, smallModel(), 1, 1))
	st, err := os.Stat(filepath.Join(Dir(root, "pretrain", 1), fileName(0)))
	fatal(err)
	limit := func(n uint64) {
		var rl syscall.Rlimit
		fatal(syscall.Getrlimit(syscall.RLIMIT_FSIZE, &rl))
		rl.Cur = n
		fatal(syscall.Setrlimit(syscall.RLIMIT_FSIZE, &rl))
	}
	for n := int64(0); n < st.Size(); n += st.Size()/60 + 1 {
		limit(uint64(n))
		err := save(root, "pretrain", 2, smallModel(), 1, 2)
		limit(^uint64(0))
		if !errors.Is(err, syscall.EFBIG) || strings.Contains(err.Error(), "\n") {
			fatal(fmt.Errorf("limit of %d bytes: want one line of EFBIG, got: %w", n, err))
		}
		r, _, err := OpenLatest(root, "pretrain")
		fatal(err)
		if r.Meta().Step != 1 {
			fatal(fmt.Errorf("limit of %d bytes: found step %d", n, r.Meta().Step))
		}
		fatal(holds(r, smallModel(), 1))
		fatal(r.Close())
	}
	// With room again, the same step can be saved.
	fatal(save(root, "pretrain", 2, smallModel(), 1, 2))
	r, _, err := OpenLatest(root, "pretrain")
	fatal(err)
	fatal(holds(r, smallModel(), 2))
	fatal(r.Close())
}

func TestNoSpaceAtAnyByte(t *testing.T) {
	cmd := child("limit", t.TempDir())
	var stderr bytes.Buffer
	cmd.Stderr = &stderr
	if err := cmd.Run(); err != nil || stderr.Len() > 0 {
		t.Fatalf("%v: %s", err, &stderr)
	}
}

func TestDiskFull(t *testing.T) {
	root := t.TempDir()
	if out, err := exec.Command("mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", root).CombinedOutput(); err != nil {
		t.Skipf("needs a small file system of its own, which only root can mount: %v: %s", err, out)
	}
	defer exec.Command("umount", root).Run()
	if err := save(root, "pretrain", 1, smallModel(), 2, 1); err != nil {
		t.Fatal(err)
	}
	if err := noSpace(root, syscall.ENOSPC); err != nil {
		t.Error(err)
	}
	// The space of the failed write is free again.
	if err := save(root, "pretrain", 3, smallModel(), 2, 3); err != nil {
		t.Error(err)
	}
	// A disk that is full to the last byte before anything is written.
	f, err := os.Create(filepath.Join(root, "filler"))
	if err != nil {
		t.Fatal(err)
	}
	io.Copy(f, zeros{})
	f.Close()
	wantError(t, save(root, "pretrain", 4, smallModel(), 1, 4), "no space left on device")
	r, _, err := OpenLatest(root, "pretrain")
	if err != nil {
		t.Fatal(err)
	}
	defer r.Close()
	if err := holds(r, smallModel(), 3); err != nil {
		t.Error(err)
	}
}

type zeros struct{}

func (zeros) Read(p []byte) (int, error) { clear(p); return len(p), nil }
