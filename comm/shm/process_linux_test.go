package shm

import (
	"bufio"
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"testing"
	"time"

	"moetor/comm"
	"moetor/comm/commtest"
)

// The smallest ring makes every message of the suite that is worth the name wait for room. Tests with processes use the
// usual one.
func TestConformance(t *testing.T) {
	commtest.Run(t, func(t *testing.T, n int) []comm.Transport {
		var ts []comm.Transport
		for _, tr := range attach(t, n, Options{RingBytes: minRing}) {
			ts = append(ts, tr)
		}
		return ts
	})
}

// Tests with real processes start this binary again; the role says what the copy does as a rank.
const (
	envRole  = "MOETOR_SHM_TEST_ROLE"
	envPath  = "MOETOR_SHM_TEST_PATH"
	envRank  = "MOETOR_SHM_TEST_RANK"
	envSize  = "MOETOR_SHM_TEST_SIZE"
	envBytes = "MOETOR_SHM_TEST_BYTES"
)

func TestMain(m *testing.M) {
	role := os.Getenv(envRole)
	if role == "" {
		os.Exit(m.Run())
	}
	if err := rankMain(role); err != nil {
		fmt.Println("error:", err)
		os.Exit(1)
	}
}

func rankMain(role string) error {
	rank, _ := strconv.Atoi(os.Getenv(envRank))
	size, _ := strconv.Atoi(os.Getenv(envSize))
	ctx, cancel := context.WithTimeout(context.Background(), time.Minute)
	defer cancel()
	tr, err := Attach(ctx, os.Getenv(envPath), rank, size)
	if err != nil {
		return err
	}
	fmt.Println("attached")
	switch role {
	case "work":
		if err := work(ctx, tr); err != nil {
			return err
		}
		if err := tr.Close(); err != nil {
			return err
		}
		fmt.Println("done")
	case "loop": // exchange with everyone until a rank is lost
		g, err := comm.NewGroup(tr, ranksOf(size), 1)
		if err != nil {
			return err
		}
		for x := make([]float32, 1000); ; {
			if err := comm.AllReduce(ctx, g, x, comm.Sum); err != nil {
				return lost(err)
			}
		}
	case "recv": // wait for rank 0
		return lost(tr.Recv(ctx, 0, 1, make([]byte, 1)))
	case "send": // rank 0 sends until rank 1, which stands still, is lost
		if rank == 1 {
			time.Sleep(time.Hour)
		}
		for {
			if err := tr.Send(ctx, 1, 1, make([]byte, 1<<20)); err != nil {
				return lost(err)
			}
		}
	case "echo":
		n, _ := strconv.Atoi(os.Getenv(envBytes))
		for p := make([]byte, n); ; {
			if err := tr.Recv(ctx, 0, 1, p); err != nil {
				return err
			}
			if err := tr.Send(ctx, 0, 1, p); err != nil {
				return err
			}
		}
	}
	return nil
}

func ranksOf(n int) []int {
	var r []int
	for i := range n {
		r = append(r, i)
	}
	return r
}

// lost prints which rank err says was lost, and how.
func lost(err error) error {
	var pe *comm.PeerError
	if !errors.As(err, &pe) {
		return fmt.Errorf("%v is no PeerError", err)
	}
	fmt.Println("lost", pe.Rank, errors.Is(err, ErrPeerDied), errors.Is(err, comm.ErrPeerClosed))
	return nil
}

func work(ctx context.Context, tr comm.Transport) error {
	rank, size := tr.Rank(), tr.Size()
	for i := range 200 { // ping-pong in pairs
		want := pattern(1+17*i, uint64(i))
		got := make([]byte, len(want))
		if rank%2 == 0 {
			if err := tr.Send(ctx, rank+1, 3, want); err != nil {
				return err
			}
			if err := tr.Recv(ctx, rank+1, 3, got); err != nil {
				return err
			}
		} else {
			if err := tr.Recv(ctx, rank-1, 3, got); err != nil {
				return err
			}
			if err := tr.Send(ctx, rank-1, 3, got); err != nil {
				return err
			}
		}
		if !bytes.Equal(got, want) {
			return fmt.Errorf("ping-pong %d differs", i)
		}
	}
	g, err := comm.NewGroup(tr, ranksOf(size), 1)
	if err != nil {
		return err
	}
	x := make([]float32, 1_500_001) // several times the ring
	for i := range x {
		x[i] = float32(i % 1000 * (rank + 1))
	}
	if err := comm.AllReduce(ctx, g, x, comm.Sum); err != nil {
		return err
	}
	for i, v := range x {
		if want := float32(i % 1000 * size * (size + 1) / 2); v != want {
			return fmt.Errorf("all-reduce: element %d is %v, want %v", i, v, want)
		}
	}
	return nil
}

// rankProcess is a rank in a process of its own.
type rankProcess struct {
	*exec.Cmd
	out *bufio.Reader
}

func startRanks(t testing.TB, role, path string, ranks []int, size int) []rankProcess {
	t.Helper()
	var ps []rankProcess
	for _, r := range ranks {
		c := exec.Command(os.Args[0])
		c.Env = append(os.Environ(), envRole+"="+role, envPath+"="+path,
			envRank+"="+strconv.Itoa(r), envSize+"="+strconv.Itoa(size))
		c.Stderr = os.Stderr
		out, err := c.StdoutPipe()
		if err != nil {
			t.Fatal(err)
		}
		if err := c.Start(); err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() {
			c.Process.Kill()
			c.Wait()
		})
		ps = append(ps, rankProcess{c, bufio.NewReader(out)})
	}
	return ps
}

// line reads a line of the process's output, or fails the test.
func (p rankProcess) line(t testing.TB) string {
	t.Helper()
	s, err := p.out.ReadString('\n')
	if err != nil {
		t.Fatalf("process ended without its line: %q, %v", s, err)
	}
	return strings.TrimSpace(s)
}

func segmentFor(t testing.TB, size int) string {
	t.Helper()
	path := filepath.Join(Dir(), fmt.Sprintf("moetor-test-%d-%s", os.Getpid(), strings.ReplaceAll(t.Name(), "/", "-")))
	if err := Create(path, size, Options{}); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { Remove(path) })
	return path
}

func TestProcesses(t *testing.T) {
	path := segmentFor(t, 4)
	ps := startRanks(t, "work", path, ranksOf(4), 4)
	for r, p := range ps {
		out, _ := io.ReadAll(p.out)
		if err := p.Wait(); err != nil || string(out) != "attached\ndone\n" {
			t.Errorf("rank %d: %v, %q", r, err, out)
		}
	}
	gone(t, path)
}

func gone(t *testing.T, path string) {
	t.Helper()
	if _, err := os.Lstat(path); !errors.Is(err, os.ErrNotExist) {
		t.Errorf("%s is still there (%v)", path, err)
	}
}

// P35, the transport's part: every rank that waits for a killed one learns which rank it was.
func TestKilledRank(t *testing.T) {
	for _, c := range []struct {
		role         string
		size, victim int
	}{
		{"loop", 4, 2},
		{"recv", 3, 0}, // all wait in Recv (rank 0 for itself)
		{"send", 2, 1}, // rank 0 waits in Send, for room
	} {
		t.Run(c.role, func(t *testing.T) {
			path := segmentFor(t, c.size)
			ps := startRanks(t, c.role, path, ranksOf(c.size), c.size)
			for _, p := range ps {
				if got := p.line(t); got != "attached" {
					t.Fatal(got)
				}
			}
			time.Sleep(50 * time.Millisecond) // into the exchange
			ps[c.victim].Process.Kill()       // and stays a zombie until the end of the test
			for r, p := range ps {
				if r == c.victim {
					continue
				}
				got := p.line(t)
				want := fmt.Sprintf("lost %d true false", c.victim)
				// In a collective a rank may hear first from one that left because of the victim.
				followed := c.role == "loop" && strings.HasPrefix(got, "lost ")
				if got != want && !followed {
					t.Errorf("rank %d says %q, want %q", r, got, want)
				}
			}
			gone(t, path)
		})
	}
}

// Nothing is left when every process is killed after all have attached, the one that created the segment included.
func TestNothingLeftAfterKillingAll(t *testing.T) {
	path := segmentFor(t, 3)
	ps := startRanks(t, "loop", path, ranksOf(3), 3)
	for _, p := range ps {
		p.line(t)
	}
	for _, p := range ps {
		p.Process.Kill()
	}
	for _, p := range ps {
		p.Wait()
	}
	gone(t, path)
}

// A process that ends before all have attached is named to those who wait.
func TestDeathBeforeAllAttached(t *testing.T) {
	path := segmentFor(t, 3)
	waiting := start(func() error {
		_, err := Attach(t.Context(), path, 1, 3)
		return err
	})
	p := startRanks(t, "recv", path, []int{0}, 3)[0]
	seg, err := openSegment(path, 3)
	if err != nil {
		t.Fatal(err)
	}
	defer seg.close()
	for seg.slot(0).state.Load() != slotAttached {
		time.Sleep(time.Millisecond)
	}
	p.Process.Kill()
	err = <-waiting
	var pe *comm.PeerError
	if !errors.As(err, &pe) || pe.Rank != 0 || !errors.Is(err, ErrPeerDied) {
		t.Errorf("attach: %v, want a PeerError of rank 0 that died", err)
	}
}

// Without pidfd the watch reads /proc; a zombie and a process of another start time count as dead.
func TestAliveWithoutPidfd(t *testing.T) {
	pid := os.Getpid()
	began, err := startTime(pid)
	if err != nil {
		t.Fatal(err)
	}
	if !alive(pid, began) {
		t.Error("this process counts as dead")
	}
	if alive(pid, began+1) {
		t.Error("another process with the pid counts as the one that was watched")
	}
	c := exec.Command(os.Args[0], "-test.run=^$")
	if err := c.Start(); err != nil {
		t.Fatal(err)
	}
	child := c.Process.Pid
	start, err := startTime(child)
	if err != nil {
		t.Fatal(err)
	}
	c.Process.Kill()
	for alive(child, start) { // ends although nobody has waited for the child yet
		time.Sleep(time.Millisecond)
	}
	c.Wait()
	if alive(child, start) {
		t.Error("a process that is gone counts as alive")
	}
}

func TestNamesOfEntries(t *testing.T) {
	path := filepath.Join(t.TempDir(), "s")
	if err := Create(path, 2, Options{}); err != nil {
		t.Fatal(err)
	}
	var names []string
	entries, _ := os.ReadDir(path)
	for _, e := range entries {
		names = append(names, e.Name())
		if fi, _ := e.Info(); fi.Mode().Perm() != 0o600 {
			t.Errorf("%s has mode %v", e.Name(), fi.Mode())
		}
	}
	if want := []string{"bell-0", "bell-1", "segment"}; !slices.Equal(names, want) {
		t.Errorf("segment holds %v, want %v", names, want)
	}
	if fi, _ := os.Stat(path); fi.Mode().Perm() != 0o700 {
		t.Errorf("segment has mode %v", fi.Mode())
	}
}

// BenchmarkProcesses times messages to another process and back.
func BenchmarkProcesses(b *testing.B) {
	for _, n := range []int{8, 64 << 10, 1 << 20} {
		b.Run(fmt.Sprintf("bytes=%d", n), func(b *testing.B) {
			b.Setenv(envBytes, strconv.Itoa(n))
			path := segmentFor(b, 2)
			startRanks(b, "echo", path, []int{1}, 2)
			tr, err := Attach(b.Context(), path, 0, 2)
			if err != nil {
				b.Fatal(err)
			}
			defer tr.Close()
			p := make([]byte, n)
			b.SetBytes(int64(2 * n))
			for b.Loop() {
				if err := tr.Send(b.Context(), 1, 1, p); err != nil {
					b.Fatal(err)
				}
				if err := tr.Recv(b.Context(), 1, 1, p); err != nil {
					b.Fatal(err)
				}
			}
		})
	}
}
