package main

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"os"
	"os/signal"
	"path/filepath"
	"sync/atomic"
	"syscall"
	"time"

	"github.com/spf13/cobra"

	"moetor/comm"
	"moetor/comm/inproc"
	"moetor/comm/launch"
	"moetor/comm/shm"
	"moetor/comm/tcp"
	"moetor/configs"
	"moetor/internal/kernel"
	"moetor/internal/train"
)

// rankFlags are the flags of a run that every rank needs; launch hands them on.
type rankFlags struct {
	configFlags
	out       string
	resume    bool
	transport string
	stages    []string
	stopAfter int64
	trace     int64
	profile   string
	kernel    string
	threads   int
}

func (f *rankFlags) add(c *cobra.Command) {
	f.configFlags.add(c)
	fl := c.Flags()
	fl.StringVar(&f.out, "out", "", "run directory (default: run.out of the configuration)")
	fl.BoolVar(&f.resume, "resume", false, "continue from the newest complete checkpoint in the run directory")
	fl.StringVar(&f.transport, "transport", "", "shm (ranks of one host) or tcp (default: shm where it works)")
	fl.StringSliceVar(&f.stages, "stages", nil, "run only these stages")
	fl.Int64Var(&f.stopAfter, "stop-after", 0, "end with a checkpoint after this many steps of this launch")
	fl.Int64Var(&f.trace, "trace", 0, "record this many steps of all ranks, after warm-up, in trace.json")
	fl.StringVar(&f.profile, "profile", "", "write a Go profile of each rank: cpu, mem, block, mutex or trace")
	fl.StringVar(&f.kernel, "kernel", "auto", "kernel implementation: auto, portable, avx2 or avx512")
	fl.IntVar(&f.threads, "threads", 0, "kernel threads of a rank (default: cores / local ranks)")
}

// check refuses wrong flags before anything starts.
func (f *rankFlags) check() error {
	switch {
	case f.stopAfter < 0:
		return usagef("--stop-after %d must not be negative", f.stopAfter)
	case f.trace < 0:
		return usagef("--trace %d must not be negative", f.trace)
	case f.threads < 0:
		return usagef("--threads %d must not be negative", f.threads)
	case f.transport != "" && f.transport != "shm" && f.transport != "tcp":
		return usagef("--transport %s is unknown; known: shm, tcp", f.transport)
	}
	if err := checkProfile(f.profile); err != nil {
		return err
	}
	return checkKernel(f.kernel)
}

// resolve loads the configuration: with --resume and no --config, the one that the run directory holds.
func (f *rankFlags) resolve(ranks int) (*configs.Run, error) {
	if f.name == "" && f.resume && f.out != "" {
		f.name = filepath.Join(f.out, "config.yaml")
		if _, err := os.Stat(f.name); err != nil {
			return nil, usagef("--resume: %s holds no run (no config.yaml); name one with --out or a configuration with --config", f.out)
		}
	}
	if f.name == "" {
		return nil, usagef("--config is missing: name a preset (train config list) or a YAML file")
	}
	run, err := f.load(ranks)
	if err != nil {
		return nil, err
	}
	if f.out != "" {
		run.Run.Out = f.out
	}
	for _, s := range f.stages {
		if err := knownStage(run, s); err != nil {
			return nil, err
		}
	}
	return run, nil
}

func knownStage(run *configs.Run, name string) error {
	var known []string
	for _, s := range run.Stages {
		if s.Name == name {
			return nil
		}
		known = append(known, s.Name)
	}
	return usagef("--stages %s: no such stage; the configuration has %v", name, known)
}

func checkKernel(name string) error {
	if name == "auto" {
		return nil
	}
	if restore, ok := kernel.Use(name); ok {
		restore()
		return nil
	}
	return usagef("--kernel %s cannot run here; this CPU and build have auto, %v", name, kernel.Impls())
}

func runCommand() *cobra.Command {
	var f rankFlags
	c := &cobra.Command{
		Use: "run", Args: cobra.NoArgs,
		Short: "Run one rank (rank and size from the launcher, OpenMPI, PMI, Slurm or torchrun-style variables)",
		RunE: func(c *cobra.Command, _ []string) error {
			if err := f.check(); err != nil {
				return err
			}
			rank, err := launch.FromEnv(os.Getenv)
			if err != nil {
				return usage(err)
			}
			return runRank(c, &f, rank)
		},
	}
	f.add(c)
	return c
}

// runRank is the life of one rank. Its errors go to the launcher, which shows the first one.
func runRank(c *cobra.Command, f *rankFlags, rank launch.Rank) (err error) {
	step := new(atomic.Int64)
	defer func() {
		if r := recover(); r != nil {
			err = fmt.Errorf("rank %d: internal error: %v", rank.Rank, r)
			panicTrace(f.out, rank.Rank, r)
		}
		var code exitCode
		if err != nil && !errors.As(err, &code) {
			launch.Report(err, step.Load())
		}
	}()
	run, err := f.resolve(rank.Size)
	if err != nil {
		return err
	}
	dir := run.Run.Out
	if err := os.MkdirAll(dir, 0o755); err != nil {
		return usage(err)
	}
	log, closeLog, err := openLog(dir, rank.Rank)
	if err != nil {
		return usage(err)
	}
	defer closeLog()
	if f.kernel != "auto" {
		kernel.Use(f.kernel)
	}
	defer startProfile(f.profile, dir, rank.Rank)()

	ctx, cancel := context.WithCancel(context.Background())
	defer cancel()
	stop := catchSignals(cancel)
	transport, err := connect(ctx, f.transport, rank, run.Comm.Timeout)
	if err != nil {
		return err
	}
	defer transport.Close()
	log.Info("connected", "rank", rank.Rank, "size", rank.Size, "source", rank.Source, "kernel", kernel.Active())

	d := newDisplay(c.ErrOrStderr())
	t, err := train.New(ctx, run, transport, train.Options{
		Dir: dir, Resume: f.resume, Stages: f.stages, StopAfter: f.stopAfter, TraceSteps: f.trace,
		LocalRanks: rank.LocalSize, Threads: f.threads, Stop: stop, Log: log,
		Progress: func(s int64) { step.Store(s); launch.Progress(s) },
		Show:     d.show, Note: d.note,
	})
	if err != nil {
		return err
	}
	out, err := t.Run(ctx)
	d.end()
	if err != nil {
		log.Error("failed", "error", err)
		return err
	}
	log.Info("ended", "step", out.Step, "checkpoint", out.Checkpoint, "stopped", out.Stopped)
	if out.Stopped && stop.Load() {
		return exitCode(exitStopped)
	}
	return nil
}

// connect joins the other ranks over the transport that the launcher, the flag or the layout asks for.
func connect(ctx context.Context, name string, rank launch.Rank, timeout time.Duration) (comm.Transport, error) {
	if rank.Size == 1 && rank.ShmPath == "" {
		return inproc.New(1)[0], nil
	}
	if timeout > 0 {
		var cancel context.CancelFunc
		ctx, cancel = context.WithTimeout(ctx, timeout)
		defer cancel()
	}
	if name == "" {
		name = rank.Transport
	}
	switch name {
	case "shm":
		if rank.ShmPath == "" {
			return nil, usagef("--transport shm needs the segment that train launch makes; under another launcher use --transport tcp")
		}
		if rank.CreateShm {
			if err := shm.Create(rank.ShmPath, rank.Size, shm.Options{}); err != nil {
				return nil, err
			}
		}
		return shm.Attach(ctx, rank.ShmPath, rank.Rank, rank.Size)
	default:
		return tcp.Connect(ctx, tcp.Config{Rank: rank.Rank, Size: rank.Size, Rendezvous: rank.Rendezvous, Secret: []byte(rank.Secret), Listener: rank.Listener()})
	}
}

// catchSignals makes the first interrupt a request to finish the step, write a checkpoint and stop; the second ends at
// once.
func catchSignals(cancel context.CancelFunc) *atomic.Bool {
	stop := new(atomic.Bool)
	ch := make(chan os.Signal, 2)
	signal.Notify(ch, os.Interrupt, syscall.SIGTERM)
	go func() {
		for range ch {
			if stop.Swap(true) {
				cancel()
			}
		}
	}()
	return stop
}

// openLog opens rank-K.log in the run directory.
func openLog(dir string, rank int) (*slog.Logger, func(), error) {
	f, err := os.OpenFile(filepath.Join(dir, fmt.Sprintf("rank-%d.log", rank)), os.O_APPEND|os.O_CREATE|os.O_WRONLY, 0o644)
	if err != nil {
		return nil, nil, err
	}
	return slog.New(slog.NewTextHandler(f, nil)), func() { f.Close() }, nil
}
