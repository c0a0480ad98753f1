package launch

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"os"
	"os/exec"
	"os/signal"
	"path/filepath"
	"runtime"
	"slices"
	"strconv"
	"strings"
	"syscall"
	"testing"
	"time"

	"moetor/comm"
)

// Ranks are copies of this binary; the role says what they do.
const (
	envRole = "MOETOR_LAUNCH_TEST_ROLE"
	envDir  = "MOETOR_LAUNCH_TEST_DIR"
)

func TestMain(m *testing.M) {
	if role := os.Getenv(envRole); role != "" {
		os.Exit(rankMain(role))
	}
	os.Exit(m.Run())
}

// contract is how long the launcher may take to return after a rank has died.
const contract = 5 * time.Second

// forever is longer than any test; a process that the launcher forgets would be found long before.
const forever = 10 * time.Minute

func rankMain(role string) int {
	dir := os.Getenv(envDir)
	if role == "launcher" {
		code, err := Run(context.Background(), testJob("hang", dir, 3))
		fmt.Println(code, err)
		return code
	}
	if role == "sleeper" {
		time.Sleep(forever)
	}
	r, err := FromEnv(os.Getenv)
	if err != nil {
		fmt.Println(err)
		return 2
	}
	interrupt := make(chan os.Signal, 1)
	switch role {
	case "interrupt", "half", "deaf":
		signal.Notify(interrupt, os.Interrupt)
	case "meeting":
		signal.Notify(interrupt, os.Interrupt, syscall.SIGTERM)
	case "stubborn":
		signal.Ignore(syscall.SIGTERM)
	}
	if role != "meeting" {
		Progress(16)
		Progress(17)
	}
	mark := func(pid int) { // tells the test that this rank is up
		name := filepath.Join(dir, fmt.Sprintf("pid-%d", pid))
		if err := os.WriteFile(name, []byte(strconv.Itoa(r.Rank)), 0o600); err != nil {
			panic(err)
		}
	}
	if role != "restart" {
		mark(os.Getpid())
	}
	switch role {
	case "ok":
		fmt.Printf("out of rank %d\n", r.Rank)
		fmt.Fprintf(os.Stderr, "err of rank %d\n", r.Rank)
		return 0
	case "env":
		fmt.Printf("%+v\n", r)
		return 0
	case "meet":
		return meet(r)
	case "hang":
		time.Sleep(forever)
	case "interrupt":
		<-interrupt
		select {
		case <-interrupt:
			return 1 // told twice
		case <-time.After(200 * time.Millisecond):
			return 3
		}
	case "half": // rank 0 was done when the interrupt came
		if r.Rank == 0 {
			return 0
		}
		<-interrupt
		return 3
	case "deaf":
		time.Sleep(forever)
	case "meeting": // ranks 0 and 2 give up, and rank 1 learns it from rank 0 before the interrupt gets to it
		<-interrupt
		if r.Rank == 1 {
			Report(errors.New("rank 0 says: rank 3 did not come"), 0)
			return 1
		}
		time.Sleep(100 * time.Millisecond)
		Report(fmt.Errorf("connect: %w", ErrInterrupted), 0)
		return 1
	case "restart":
		if slices.Contains(os.Args, "--resume") {
			return 0
		}
		if r.Rank == 1 {
			Report(errors.New("disk is full"), 5)
			return 1
		}
		time.Sleep(forever)
	}
	if r.Rank != 2 { // the others of the failing roles
		if role == "followers" {
			Report(fmt.Errorf("step: %w", &comm.PeerError{Rank: 2, Op: "send", Err: errors.New("gone")}), 18)
			return 1
		}
		time.Sleep(forever)
	}
	switch role {
	case "fail", "stubborn":
		Report(errors.New("loss is NaN"), 17)
		return 1
	case "followers":
		time.Sleep(100 * time.Millisecond)
		Report(errors.New("loss is NaN"), 17)
		return 1
	case "silent":
		fmt.Fprintln(os.Stderr, "something odd")
		return 7
	case "panic":
		panic("index out of luck")
	case "usage":
		Report(errors.New("parallel.pipeline=3 does not divide 4"), 0)
		return 2
	case "litter":
		c := exec.Command(os.Args[0])
		c.Env = append(os.Environ(), envRole+"=sleeper")
		c.Stdout, c.Stderr = os.Stdout, os.Stderr // holds the launcher's pipes open
		if err := c.Start(); err != nil {
			panic(err)
		}
		mark(c.Process.Pid)
		return 1
	}
	return 0
}

// meet connects to rank 0's socket at the rendezvous and proves the secret.
func meet(r Rank) int {
	if r.Transport != "tcp" || r.Secret == "" {
		fmt.Println("not tcp with a secret:", r.Transport)
		return 1
	}
	if r.Rank > 0 {
		if r.Listener() != nil {
			fmt.Println("a listener on rank", r.Rank)
			return 1
		}
		c, err := net.Dial("tcp", r.Rendezvous)
		if err != nil {
			fmt.Println(err)
			return 1
		}
		defer c.Close()
		fmt.Fprintln(c, r.Secret)
		return 0
	}
	l := r.Listener()
	if l == nil || l.Addr().String() != r.Rendezvous {
		fmt.Println("no listener at", r.Rendezvous)
		return 1
	}
	for range r.Size - 1 {
		c, err := l.Accept()
		if err != nil {
			return 1
		}
		b, _ := io.ReadAll(c)
		if string(b) != r.Secret+"\n" {
			fmt.Printf("wrong secret %q\n", b)
			return 1
		}
	}
	return 0
}

func testJob(role, dir string, n int) Job {
	return Job{
		Command: []string{os.Args[0]},
		Env:     []string{envRole + "=" + role, envDir + "=" + dir},
		Size:    n,
		LogDir:  filepath.Join(dir, "log"),
	}
}

// job is testJob with its output, and a check that nothing is left when the test ends.
func job(t *testing.T, role string, n int) (j Job, dir string, out, errs *bytes.Buffer) {
	t.Helper()
	dir = t.TempDir()
	out, errs = &bytes.Buffer{}, &bytes.Buffer{}
	j = testJob(role, dir, n)
	j.Stdout, j.Stderr = out, errs
	j.Segment = func(size int) (string, func() error, error) {
		if size != n {
			t.Errorf("segment for %d ranks, want %d", size, n)
		}
		path := filepath.Join(dir, "segment")
		return path, func() error { return os.Remove(path) }, os.WriteFile(path, nil, 0o600)
	}
	t.Cleanup(func() {
		if left, err := os.Stat(filepath.Join(dir, "segment")); err == nil {
			t.Errorf("segment is left: %v", left)
		}
		for pid := range pids(dir) {
			for i := 0; i < 100 && running(pid); i++ { // killed, which takes a moment on a busy machine
				time.Sleep(10 * time.Millisecond)
			}
			if running(pid) {
				t.Errorf("process %d is left", pid)
				syscall.Kill(pid, syscall.SIGKILL)
			}
		}
	})
	return j, dir, out, errs
}

// pids gives the processes that have marked themselves, and their ranks.
func pids(dir string) map[int]int {
	m := map[int]int{}
	names, _ := filepath.Glob(filepath.Join(dir, "pid-*"))
	for _, name := range names {
		pid, _ := strconv.Atoi(strings.TrimPrefix(filepath.Base(name), "pid-"))
		b, _ := os.ReadFile(name)
		if rank, err := strconv.Atoi(string(b)); err == nil {
			m[pid] = rank
		}
	}
	return m
}

// running tells whether a process runs. A dead one that whoever inherited it has not waited for yet does not.
func running(pid int) bool {
	if syscall.Kill(pid, 0) != nil {
		return false
	}
	b, err := os.ReadFile(fmt.Sprintf("/proc/%d/stat", pid))
	if err != nil {
		return runtime.GOOS != "linux" // gone by now
	}
	after := b[bytes.LastIndexByte(b, ')')+1:]
	return !bytes.HasPrefix(after, []byte(" Z"))
}

// up waits until n ranks have marked themselves.
func up(t *testing.T, dir string, n int) map[int]int {
	t.Helper()
	for deadline := time.Now().Add(time.Minute); len(pids(dir)) < n; time.Sleep(5 * time.Millisecond) {
		if time.Now().After(deadline) {
			t.Fatalf("%d of %d ranks came up", len(pids(dir)), n)
		}
	}
	return pids(dir)
}

type outcome struct {
	code int
	err  error
}

func start(ctx context.Context, j Job) <-chan outcome {
	c := make(chan outcome, 1)
	go func() {
		code, err := Run(ctx, j)
		c <- outcome{code, err}
	}()
	return c
}

func TestNormalEnd(t *testing.T) {
	j, dir, out, errs := job(t, "ok", 4)
	code, err := Run(t.Context(), j)
	if code != 0 || err != nil {
		t.Fatalf("code %d, %v", code, err)
	}
	if out.String() != "out of rank 0\n" || errs.String() != "err of rank 0\n" {
		t.Errorf("terminal got %q and %q, want what rank 0 prints", out, errs)
	}
	for r := range 4 {
		b, err := os.ReadFile(filepath.Join(dir, "log", fmt.Sprintf("rank-%d.out", r)))
		if err != nil || !strings.Contains(string(b), fmt.Sprintf("out of rank %d\n", r)) ||
			!strings.Contains(string(b), fmt.Sprintf("err of rank %d\n", r)) {
			t.Errorf("rank-%d.out: %q, %v", r, b, err)
		}
	}
}

// P35: whatever way rank 2 fails, the launcher names it and its step, ends the others within five seconds, and leaves nothing.
func TestFailures(t *testing.T) {
	for _, c := range []struct {
		role string
		code int
		want string   // the whole error
		errs []string // in what is shown
	}{
		{"fail", 1, "rank 2 failed at step 17: loss is NaN", nil},
		{"followers", 1, "rank 2 failed at step 17: loss is NaN", nil},
		{"stubborn", 1, "rank 2 failed at step 17: loss is NaN", nil},
		{"silent", 1, "rank 2 exited with code 7 at step 17 without reporting an error", []string{"[rank 2] something odd"}},
		{"panic", 1, "rank 2 crashed at step 17: panic: index out of luck",
			[]string{"[rank 2] panic: index out of luck", "[rank 2] goroutine 1 [running]:"}},
		{"usage", 2, "rank 2: parallel.pipeline=3 does not divide 4", nil},
		{"litter", 1, "rank 2 exited with code 1 at step 17 without reporting an error", nil},
	} {
		t.Run(c.role, func(t *testing.T) {
			t.Parallel()
			j, dir, _, errs := job(t, c.role, 4)
			if c.role == "stubborn" {
				j.Grace = 300 * time.Millisecond
			}
			begin := time.Now()
			code, err := Run(t.Context(), j)
			var f *Failure
			if code != c.code || !errors.As(err, &f) || f.Rank != 2 || err.Error() != c.want {
				t.Errorf("code %d, %v; want %d, %s", code, err, c.code, c.want)
			}
			// From the first process on, which is before the death.
			if took := time.Since(begin); took > contract+10*time.Second {
				t.Errorf("returned after %v", took)
			}
			for _, w := range c.errs {
				if !strings.Contains(errs.String(), w) {
					t.Errorf("shown is %q, want %q in it", errs, w)
				}
			}
			if c.role == "litter" && len(pids(dir)) < 2 {
				t.Error("rank 2 left no process: the test misses its point")
			}
		})
	}
}

func TestKilledRank(t *testing.T) {
	for _, transport := range []string{"shm", "tcp"} {
		t.Run(transport, func(t *testing.T) {
			j, dir, _, _ := job(t, "hang", 4)
			j.Transport = transport
			done := start(t.Context(), j)
			for pid, rank := range up(t, dir, 4) {
				if rank == 2 {
					syscall.Kill(pid, syscall.SIGKILL)
				}
			}
			killed := time.Now()
			o := <-done
			if took := time.Since(killed); took > contract {
				t.Errorf("returned %v after the death, the contract says %v", took, contract)
			}
			if want := "rank 2 was killed (signal 9, killed) at step 17"; o.code != 1 || o.err == nil || o.err.Error() != want {
				t.Errorf("code %d, %v; want 1, %s", o.code, o.err, want)
			}
		})
	}
}

func TestInterrupts(t *testing.T) {
	for _, c := range []struct {
		role string
		n    int // interrupts
		code int
		err  error
	}{
		{"interrupt", 1, 3, nil},
		{"half", 1, 3, nil},
		{"deaf", 2, 1, ErrInterrupted},
		{"meeting", 1, 1, ErrUnbegun},
	} {
		t.Run(c.role, func(t *testing.T) {
			j, dir, _, _ := job(t, c.role, 3)
			done := start(t.Context(), j)
			up(t, dir, 3)
			for range c.n {
				syscall.Kill(os.Getpid(), syscall.SIGINT)
				time.Sleep(100 * time.Millisecond) // signals of one kind merge while they are pending
			}
			if o := <-done; o.code != c.code || o.err != c.err {
				t.Errorf("code %d, %v; want %d, %v", o.code, o.err, c.code, c.err)
			}
		})
	}
}

func TestCancelledContext(t *testing.T) {
	j, dir, _, _ := job(t, "hang", 2)
	ctx, cancel := context.WithCancel(t.Context())
	done := start(ctx, j)
	up(t, dir, 2)
	cancel()
	if o := <-done; o.code != 1 || !errors.Is(o.err, context.Canceled) {
		t.Errorf("code %d, %v", o.code, o.err)
	}
}

func TestRestart(t *testing.T) {
	j, dir, _, errs := job(t, "restart", 2)
	j.Restarts, j.RestartArgs = 2, []string{"--resume"}
	code, err := Run(t.Context(), j)
	if code != 0 || err != nil {
		t.Errorf("code %d, %v", code, err)
	}
	if want := "launch: rank 1 failed at step 17: disk is full; starting again (1 of 2)\n"; errs.String() != want {
		t.Errorf("said %q, want %q", errs, want)
	}
	if b, _ := os.ReadFile(filepath.Join(dir, "log", "rank-1.out")); !strings.Contains(string(b), "--- start 2 ---") {
		t.Errorf("log does not part the starts: %q", b)
	}
	j.RestartArgs = nil // fails each time
	if code, err := Run(t.Context(), j); code != 1 || err == nil || strings.Count(errs.String(), "starting again") != 3 {
		t.Errorf("code %d, %v after %q", code, err, errs)
	}
}

func TestRendezvousOfOneHost(t *testing.T) {
	j, _, out, _ := job(t, "meet", 4)
	j.Transport = "tcp"
	if code, err := Run(t.Context(), j); code != 0 || err != nil {
		t.Errorf("code %d, %v: %s", code, err, out)
	}
}

func TestNodes(t *testing.T) {
	t.Setenv("MOETOR_RANK", "77") // of a launcher around this one
	t.Setenv("MOETOR_SHM_PATH", "/elsewhere")
	for node := range 2 {
		j, dir, _, _ := job(t, "env", 2)
		j.Node, j.Nodes, j.Rendezvous, j.Secret = node, 2, "head:4711", "s3cret"
		if code, err := Run(t.Context(), j); code != 0 || err != nil {
			t.Errorf("code %d, %v", code, err)
		}
		for local := range 2 {
			rank := 2*node + local
			b, _ := os.ReadFile(filepath.Join(dir, "log", fmt.Sprintf("rank-%d.out", rank)))
			want := fmt.Sprintf("%+v\n", Rank{Rank: rank, Size: 4, LocalRank: local, LocalSize: 2, Node: node, Nodes: 2,
				Rendezvous: "head:4711", Secret: "s3cret", Transport: "tcp", Source: "moetor"})
			if string(b) != want {
				t.Errorf("rank %d is %swant %s", rank, b, want)
			}
		}
	}
}

func TestRefusals(t *testing.T) {
	ok := Job{Command: []string{os.Args[0]}, Size: 2}
	for want, change := range map[string]func(j *Job){
		"no command":                 func(j *Job) { j.Command = nil },
		"0 ranks":                    func(j *Job) { j.Size = 0 },
		"node 2 of 2":                func(j *Job) { j.Node, j.Nodes = 2, 2 },
		"ranks 3 to 4 do not fit":    func(j *Job) { j.FirstRank, j.WorldSize = 3, 4 },
		"transport ib is unknown":    func(j *Job) { j.Transport = "ib" },
		"not of 2 nodes":             func(j *Job) { j.Transport, j.Nodes = "shm", 2 },
		"makes the segment":          func(j *Job) { j.Transport = "shm" },
		"need a rendezvous":          func(j *Job) { j.Nodes = 2 },
		"need a secret":              func(j *Job) { j.Nodes, j.Rendezvous = 2, "a:1" },
		"rendezvous head: want HOST": func(j *Job) { j.Rendezvous = "head" },
		"-1 restarts":                func(j *Job) { j.Restarts = -1 },
		"not a directory":            func(j *Job) { j.LogDir = "run_test.go" },
	} {
		j := ok
		change(&j)
		code, err := Run(t.Context(), j)
		if code != 2 || err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("code %d, %v; want 2, %q", code, err, want)
		}
	}
	j := ok
	j.Command = []string{filepath.Join(t.TempDir(), "absent")}
	if code, err := Run(t.Context(), j); code != 1 || err == nil || !strings.Contains(err.Error(), "start rank 0") {
		t.Errorf("code %d, %v", code, err)
	}
}

func TestTail(t *testing.T) {
	var o output
	w := stream{o: &o, errors: true}
	for i := range 100 {
		fmt.Fprintf(w, "line %d\nha", i)
		io.WriteString(w, "lf\n")
	}
	io.WriteString(w, "the end")
	var b bytes.Buffer
	o.show(&b, 3)
	lines := strings.Split(strings.TrimSpace(b.String()), "\n")
	if len(lines) != tailLines+1 || lines[0] != "[rank 3] line 90" || lines[tailLines] != "[rank 3] the end" {
		t.Errorf("tail is %q", lines)
	}
	io.WriteString(w, "\npanic: first\npanic: second\n"+strings.Repeat("frame\n", 100))
	if o.crash() != "panic: first" || len(o.tail.lines) != tailLines {
		t.Errorf("crash %q, %d lines", o.crash(), len(o.tail.lines))
	}
}
