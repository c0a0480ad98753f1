package main

import (
	"cmp"
	"context"
	"crypto/rand"
	"encoding/hex"
	"errors"
	"fmt"
	"io"
	"os"
	"os/signal"
	"path/filepath"
	"runtime"
	"strconv"
	"strings"
	"sync"
	"syscall"
	"time"

	"github.com/spf13/cobra"

	"moetor/comm/launch"
	"moetor/comm/shm"
)

type launchFlags struct {
	rankFlags
	ranks       int
	nodes, node int
	rendezvous  string
	maxRestarts int
	bind        string
	asJSON      bool
}

func launchCommand() *cobra.Command {
	var f launchFlags
	c := &cobra.Command{
		Use: "launch -n RANKS --config NAME|FILE", Args: cobra.NoArgs,
		Short: "Start rank processes on this host and train",
		Long: `Start the ranks of a run as processes of this host, collect their logs, and end all of them when one fails. Ctrl-C
once: the ranks finish the step, write a checkpoint, and the exit code is 3; twice, or before the ranks have met: end at once.

With --nnodes N every host runs one launcher with its --node-rank, the same --rendezvous HOST:PORT (where rank 0 listens)
and the same secret in MOETOR_SECRET.`,
		RunE: func(c *cobra.Command, _ []string) error { return f.launch(c) },
	}
	f.rankFlags.add(c)
	fl := c.Flags()
	fl.IntVarP(&f.ranks, "ranks", "n", 1, "ranks on this host")
	fl.IntVar(&f.nodes, "nnodes", 1, "hosts of the run, one launcher each")
	fl.IntVar(&f.node, "node-rank", 0, "this host among them, from 0")
	fl.StringVar(&f.rendezvous, "rendezvous", "", "HOST:PORT at which the ranks meet; needed with --nnodes")
	fl.IntVar(&f.maxRestarts, "max-restarts", 0, "start again from the last checkpoint after a failure, this often")
	fl.StringVar(&f.bind, "bind", "auto", "cores of a rank's own: auto (where ranks take all cores), cores (always) or none")
	fl.BoolVar(&f.asJSON, "json", false, "print JSON at the end")
	return c
}

// coresPerRank is to how many of the launcher's cores each rank is bound, a core for each of its threads, or 0. By itself the
// launcher binds ranks that share all cores evenly: where a user leaves some to others (--threads), a second launcher would
// choose the same first ones. cores is 0 where the launcher cannot tell.
func coresPerRank(bind string, ranks, threads, cores int) (int, error) {
	share := cores / ranks
	threads = cmp.Or(threads, share)
	fits := threads > 0 && ranks*threads <= cores
	switch {
	case bind == "cores" && !fits:
		return 0, usagef("--bind cores: %d ranks with %d threads each, and %d cores to bind them to", ranks, max(1, threads), cores)
	case bind == "cores", bind == "auto" && fits && threads == share && ranks > 1:
		return threads, nil
	}
	return 0, nil
}

// ownCores is the number of cores that this process may use. One with a quota of processor time has none of its own: all
// containers of a host would choose the same.
func ownCores() int {
	if n := len(launch.Cores()); runtime.GOMAXPROCS(0) == n {
		return n
	}
	return 0
}

func (f *launchFlags) checkLaunch() error {
	switch {
	case f.ranks < 1:
		return usagef("-n %d must be at least 1", f.ranks)
	case f.ranks > 4096:
		return usagef("-n %d is more ranks than one host can serve (4096)", f.ranks)
	case f.nodes < 1:
		return usagef("--nnodes %d must be at least 1", f.nodes)
	case f.node < 0 || f.node >= f.nodes:
		return usagef("--node-rank %d is outside --nnodes %d", f.node, f.nodes)
	case f.nodes > 1 && f.rendezvous == "":
		return usagef("--nnodes %d needs --rendezvous HOST:PORT, the same on every host", f.nodes)
	case f.nodes > 1 && f.transport == "shm":
		return usagef("--transport shm connects the ranks of one host, not --nnodes %d; use tcp", f.nodes)
	case f.nodes > 1 && os.Getenv("MOETOR_SECRET") == "":
		return usagef("--nnodes %d needs a secret that all hosts share: export MOETOR_SECRET", f.nodes)
	case f.bind != "auto" && f.bind != "cores" && f.bind != "none":
		return usagef("--bind %s is unknown; known: auto, cores, none", f.bind)
	case f.maxRestarts < 0:
		return usagef("--max-restarts %d must not be negative", f.maxRestarts)
	}
	return f.check()
}

func (f *launchFlags) launch(c *cobra.Command) error {
	if err := f.checkLaunch(); err != nil {
		return err
	}
	bound, err := coresPerRank(f.bind, f.ranks, f.threads, ownCores())
	if err != nil {
		return err
	}
	run, err := f.resolve(f.ranks * f.nodes)
	if err != nil {
		return err
	}
	dir := run.Run.Out
	if err := f.checkDir(dir); err != nil {
		return err
	}
	if f.node == 0 { // hosts may share dir
		unlock, err := lockDir(dir)
		if err != nil {
			return err
		}
		defer unlock()
	}
	// A reader of the output that goes away (| head) must not end a run of hours.
	signal.Notify(make(chan os.Signal, 1), syscall.SIGPIPE)
	begun := endOnSignal(c.ErrOrStderr())
	defer begun()
	if err := preflight(os.Stderr, run, f.stages); err != nil {
		return err
	}
	restore, err := f.prepareDir(dir, run, f.node*f.ranks, (f.node+1)*f.ranks)
	if err != nil {
		return err
	}
	self, err := os.Executable()
	if err != nil {
		return err
	}
	if bound > 0 {
		f.threads = bound // a rank does not see the cores of the others
	}
	job := launch.Job{
		Command: append([]string{self, "run"}, f.rankArgs(dir)...), Size: f.ranks, Node: f.node, Nodes: f.nodes, CoresPerRank: bound,
		Transport: f.transport, Rendezvous: f.rendezvous, Secret: os.Getenv("MOETOR_SECRET"), Segment: makeSegment,
		LogDir: dir, Stdout: c.OutOrStdout(), Stderr: c.ErrOrStderr(), Restarts: f.maxRestarts,
	}
	if f.asJSON {
		job.Stdout = c.ErrOrStderr()
	}
	if !f.resume {
		job.RestartArgs = []string{"--resume"}
	}
	tty := "0" // said in any case: a variable of the user's own has no say
	if isTerminal(c.ErrOrStderr()) {
		tty = "1"
	}
	job.Env = append(job.Env, ttyVar+"="+tty)
	begun() // from here on signals are for the ranks
	code, err := launch.Run(context.Background(), job)
	if err != nil {
		var failed *launch.Failure
		if errors.Is(err, launch.ErrUnbegun) || errors.As(err, &failed) && failed.Step == 0 {
			restore()
		}
		if code == exitUsage {
			return usage(err)
		}
		return fmt.Errorf("%w (logs: %s)", err, filepath.Join(dir, "rank-*.log"))
	}
	return f.conclude(c, dir, code)
}

// endOnSignal ends the launcher when it is interrupted while it still reads the data; what it returns ends that.
func endOnSignal(w io.Writer) (stop func()) {
	ch, done := make(chan os.Signal, 1), make(chan struct{})
	signal.Notify(ch, os.Interrupt, syscall.SIGTERM)
	go func() {
		select {
		case <-ch:
			fmt.Fprintln(w, "train: interrupted before the ranks were started")
			os.Exit(exitFailed)
		case <-done:
		}
	}()
	return sync.OnceFunc(func() { signal.Stop(ch); close(done) })
}

// rankArgs are the arguments of every rank: the resolved configuration and the flags that are not part of it.
func (f *launchFlags) rankArgs(dir string) []string {
	args := []string{"--config", filepath.Join(dir, "config.yaml"), "--out", dir, "--kernel", f.kernel, "--threads", strconv.Itoa(f.threads)}
	if f.resume {
		args = append(args, "--resume")
	}
	if len(f.stages) > 0 {
		args = append(args, "--stages", strings.Join(f.stages, ","))
	}
	if f.stopAfter > 0 {
		args = append(args, "--stop-after", strconv.FormatInt(f.stopAfter, 10))
	}
	if f.trace > 0 {
		args = append(args, "--trace", strconv.FormatInt(f.trace, 10))
	}
	if f.profile != "" {
		args = append(args, "--profile", f.profile)
	}
	return args
}

// makeSegment makes the shared memory of a job on this host. It lies in the file system only until all ranks have opened it.
// Of a launcher that was killed before that it stays, so a later one removes it: the lock tells that nobody waits for it.
func makeSegment(size int) (string, func() error, error) {
	sweepSegments(shm.Dir())
	var b [8]byte
	rand.Read(b[:])
	path := filepath.Join(shm.Dir(), "moetor-"+hex.EncodeToString(b[:]))
	if err := shm.Create(path, size, shm.Options{}); err != nil {
		return "", nil, err
	}
	unlock, err := flockDir(path)
	if err != nil {
		shm.Remove(path)
		return "", nil, err
	}
	return path, func() error { unlock(); return shm.Remove(path) }, nil
}

// sweepSegments removes segments under dir whose launcher is gone. One younger than a minute may be about to be locked.
func sweepSegments(dir string) {
	found, _ := filepath.Glob(filepath.Join(dir, "moetor-"+strings.Repeat("[0-9a-f]", 16)))
	half, _ := filepath.Glob(filepath.Join(dir, ".moetor-new-*")) // of one killed while it made a segment
	for _, path := range append(found, half...) {
		st, err := os.Stat(path)
		if err != nil || !st.IsDir() || time.Since(st.ModTime()) < time.Minute {
			continue
		}
		if unlock, err := flockDir(path); err == nil {
			os.RemoveAll(path)
			unlock()
		}
	}
}

// conclude says where the result is and what to do with it.
func (f *launchFlags) conclude(c *cobra.Command, dir string, code int) error {
	stopped := code == exitStopped
	switch {
	case f.node > 0:
	case f.asJSON:
		m, path, err := newest(dir)
		if err != nil {
			return err
		}
		if err := printJSON(c, map[string]any{"out": dir, "checkpoint": path, "stage": m.Stage, "step": m.Step, "tokens": m.Tokens, "stopped": stopped}); err != nil {
			return err
		}
	default:
		again := fmt.Sprintf("%s launch -n %d --out %s --resume", filepath.Base(os.Args[0]), f.ranks, dir)
		if err := announce(c.ErrOrStderr(), dir, stopped, again); err != nil {
			return err
		}
	}
	if code != exitDone {
		return exitCode(code)
	}
	return nil
}
