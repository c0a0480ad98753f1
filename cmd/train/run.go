package main

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"log/slog"
	"os"
	"os/signal"
	"path/filepath"
	"runtime"
	"runtime/debug"
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
	overwrite bool
}

func (f *rankFlags) add(c *cobra.Command) {
	f.configFlags.add(c)
	fl := c.Flags()
	fl.StringVar(&f.out, "out", "", "run directory (default: run.out of the configuration)")
	fl.BoolVar(&f.resume, "resume", false, "continue from the newest complete checkpoint in the run directory")
	fl.StringVar(&f.transport, "transport", "", "shm (ranks of one host) or tcp (default: shm where it works)")
	fl.StringSliceVar(&f.stages, "stages", nil, "run only these stages")
	fl.Int64Var(&f.stopAfter, "stop-after", 0, "end with a checkpoint after this many steps of this launch, over all its stages")
	fl.Int64Var(&f.trace, "trace", 0, "record this many steps of all ranks, after warm-up, in trace.json")
	fl.StringVar(&f.profile, "profile", "", "write a Go profile of each rank: cpu, mem, block, mutex or trace")
	fl.StringVar(&f.kernel, "kernel", "auto", "kernel implementation: auto, portable, avx2 or avx512")
	fl.BoolVar(&f.overwrite, "overwrite", false, "delete the run that the run directory holds")
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
	case f.transport == "shm" && runtime.GOOS != "linux":
		return usagef("--transport shm needs Linux; use tcp")
	case f.resume && f.overwrite:
		return usagef("--resume and --overwrite exclude each other")
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
		Use: "run --config NAME|FILE", Args: cobra.NoArgs,
		Short: "Run one rank (rank and size from the launcher, OpenMPI, PMI, Slurm or torchrun-style variables)",
		Long: `Run one rank of a job that another launcher starts: mpirun, srun or torchrun tell each process its rank and their number
in the environment, or export RANK and WORLD_SIZE by hand; without any of these there is one rank. All ranks get the same
arguments and share the run directory.

On one host ranks meet in shared memory. Between hosts, or with --transport tcp, export MOETOR_SECRET, the same random
string on all, and MOETOR_RENDEZVOUS=HOST:PORT (or MASTER_ADDR and MASTER_PORT), where rank 0 listens; Slurm needs the
secret alone.`,
		RunE: func(c *cobra.Command, _ []string) error {
			if err := f.check(); err != nil {
				return err
			}
			rank, err := launch.FromEnv(f.getenv)
			if err != nil {
				return usage(err)
			}
			return runRank(c, &f, rank)
		},
	}
	f.add(c)
	return c
}

// getenv is the environment, in which --transport stands for its variable.
func (f *rankFlags) getenv(name string) string {
	if name == "MOETOR_TRANSPORT" && f.transport != "" {
		return f.transport
	}
	return os.Getenv(name)
}

// runRank is the life of one rank. Its errors go to the launcher, which shows the first one.
func runRank(c *cobra.Command, f *rankFlags, rank launch.Rank) (err error) {
	collectEarly()
	step, steps := new(atomic.Int64), int64(0)
	restore := func() {}
	log, closeLog := slog.New(slog.DiscardHandler), func() {}
	var transport comm.Transport
	defer func() { // after the report: what the others say of it then comes later
		if transport != nil {
			transport.Close()
		}
		closeLog()
	}()
	defer func() {
		if r := recover(); r != nil {
			err = fmt.Errorf("rank %d: internal error: %v", rank.Rank, r)
			panicTrace(f.out, rank.Rank, r)
		}
		var code exitCode
		if err == nil || errors.As(err, &code) {
			return
		}
		log.Error("failed", "error", err)
		if step.Load() == 0 {
			restore()
		}
		if launch.Report(err, step.Load()) { // the launcher's line is the one that the user reads
			err = codeOf(err)
		}
	}()
	foreign := rank.Source != "moetor"
	run, err := f.resolve(rank.Size)
	if err != nil && !foreign {
		return err
	}
	ctx, cancel := context.WithCancel(context.Background())
	defer cancel()
	meeting, giveUp := context.WithCancel(ctx)
	defer giveUp()
	stop := catchSignals(giveUp, cancel)
	limit := time.Minute
	if run != nil {
		limit = run.Comm.Timeout
	}
	joined, connectErr := connect(meeting, rank, limit)
	if connectErr != nil {
		if stop.Load() { // there is no step to finish
			connectErr = launch.ErrInterrupted
		}
		return cmp.Or(err, connectErr) // ranks that refuse their configuration may not have waited
	}
	transport = joined
	if foreign { // nobody has prepared the run
		if err == nil {
			restore, err = f.prepareRank(ctx, c.ErrOrStderr(), run, rank)
		}
		if err = agree(ctx, transport, err); err != nil {
			return err
		}
	}
	dir := run.Run.Out
	if err := os.MkdirAll(dir, 0o755); err != nil {
		return usage(err)
	}
	file, closeFile, err := openLog(dir, rank.Rank)
	if err != nil {
		return usage(err)
	}
	log, closeLog = file, closeFile
	if f.kernel != "auto" {
		kernel.Use(f.kernel)
	}
	defer startProfile(f.profile, dir, rank.Rank)()
	log.Info("connected", "rank", rank.Rank, "size", rank.Size, "source", rank.Source, "kernel", kernel.Active())

	d := newDisplay(c.ErrOrStderr())
	t, err := train.New(ctx, run, transport, train.Options{
		Dir: dir, Resume: f.resume, Stages: f.stages, StopAfter: f.stopAfter, TraceSteps: f.trace,
		LocalRanks: rank.LocalSize, Threads: f.threads, Stop: stop, Log: log,
		Progress: func(s int64) { step.Store(s); steps++; launch.Progress(s) },
		Show:     d.show, Note: d.note,
	})
	if err != nil {
		return err
	}
	log.Info("ready", "threads", kernel.Threads(), "cores", fmt.Sprint(launch.Cores()))
	out, err := t.Run(ctx)
	d.end()
	if err != nil {
		return err
	}
	if rank.Rank == 0 {
		f.remark(d, out, steps)
	}
	log.Info("ended", "step", out.Step, "checkpoint", out.Checkpoint, "stopped", out.Stopped)
	if foreign && rank.Rank == 0 {
		if err := announce(c.ErrOrStderr(), dir, out.Stopped, "the same command and --resume"); err != nil {
			return err
		}
	}
	if out.Stopped && stop.Load() {
		return exitCode(exitStopped)
	}
	return nil
}

// collectEarly keeps a rank from growing over a long run: a step leaves some KB to the collector, which by default waits
// until they are as much as all that is alive. Hardly anything alive has pointers, so that collecting costs next to nothing.
// GOGC of the environment overrides it.
func collectEarly() {
	if os.Getenv("GOGC") == "" {
		debug.SetGCPercent(10)
	}
}

// remark says what a user may have expected of a launch that did as many steps, and did not get.
func (f *rankFlags) remark(d *display, out train.Outcome, steps int64) {
	if steps == 0 {
		d.note("nothing left to do: the run is complete at step %d; more steps are stages.N.steps, tokens or epochs", out.Step)
	}
	switch warm := int64(train.TraceWarmup); {
	case f.trace > 0 && steps <= warm:
		d.note("no trace.json: --trace %d records after %d steps of warm-up, and this launch ended after %d", f.trace, warm, steps)
	case f.trace > 0 && f.trace > steps-warm:
		d.note("--trace %d: this launch ended after %d steps, %d of them warm-up", f.trace, steps, warm)
	}
	if out.Stopped && f.stopAfter > 0 && steps >= f.stopAfter {
		d.note("stopped by --stop-after %d; --resume goes on with stage %s", f.stopAfter, out.Next)
	}
}

// connect joins the other ranks over the transport that the launcher, the flag or the layout asks for.
func connect(ctx context.Context, rank launch.Rank, timeout time.Duration) (comm.Transport, error) {
	if rank.Transport == "inproc" {
		return inproc.New(1)[0], nil
	}
	if timeout > 0 {
		var cancel context.CancelFunc
		ctx, cancel = context.WithTimeout(ctx, timeout)
		defer cancel()
	}
	switch rank.Transport {
	case "shm":
		if rank.CreateShm {
			if err := shm.Create(rank.ShmPath, rank.Size, shm.Options{}); err != nil {
				return nil, err
			}
		}
		t, err := shm.Attach(ctx, rank.ShmPath, rank.Rank, rank.Size)
		if err != nil && rank.CreateShm { // no launcher clears up after it
			err = errors.Join(err, shm.Remove(rank.ShmPath))
		}
		return t, err
	default:
		return tcp.Connect(ctx, tcp.Config{Rank: rank.Rank, Size: rank.Size, Rendezvous: rank.Rendezvous, Secret: []byte(rank.Secret),
			Listener: rank.Listener(), Timeout: timeout, PeerTimeout: timeout})
	}
}

// catchSignals makes the first interrupt a request to finish the step, write a checkpoint and stop, and to give up what comes
// before all steps; the second ends at once.
func catchSignals(giveUp, cancel context.CancelFunc) *atomic.Bool {
	stop := new(atomic.Bool)
	ch := make(chan os.Signal, 2)
	signal.Notify(ch, os.Interrupt, syscall.SIGTERM)
	go func() {
		for range ch {
			if stop.Swap(true) {
				cancel()
			}
			giveUp()
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
