package main

import (
	"context"
	"crypto/rand"
	"encoding/hex"
	"fmt"
	"os"
	"path/filepath"
	"runtime"
	"strconv"
	"strings"

	"github.com/spf13/cobra"

	"moetor/comm/launch"
	"moetor/comm/shm"
	"moetor/configs"
	"moetor/internal/train"
)

type launchFlags struct {
	rankFlags
	ranks       int
	nodes, node int
	rendezvous  string
	maxRestarts int
	overwrite   bool
	asJSON      bool
}

func launchCommand() *cobra.Command {
	var f launchFlags
	c := &cobra.Command{
		Use: "launch -n RANKS --config NAME|FILE", Args: cobra.NoArgs,
		Short: "Start rank processes on this host and train",
		Long: `Start the ranks of a run as processes of this host, collect their logs, and end all of them when one fails. Ctrl-C
once: the ranks finish the step, write a checkpoint, and the exit code is 3; twice: end at once.

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
	fl.BoolVar(&f.overwrite, "overwrite", false, "delete the run that the run directory holds")
	fl.BoolVar(&f.asJSON, "json", false, "print JSON at the end")
	return c
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
	case f.maxRestarts < 0:
		return usagef("--max-restarts %d must not be negative", f.maxRestarts)
	case f.resume && f.overwrite:
		return usagef("--resume and --overwrite exclude each other")
	case f.transport == "shm" && runtime.GOOS != "linux":
		return usagef("--transport shm needs Linux; use tcp")
	}
	return f.check()
}

func (f *launchFlags) launch(c *cobra.Command) error {
	if err := f.checkLaunch(); err != nil {
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
	if err := f.preflight(run); err != nil {
		return err
	}
	if err := f.prepareDir(dir, run); err != nil {
		return err
	}
	self, err := os.Executable()
	if err != nil {
		return err
	}
	job := launch.Job{
		Command: append([]string{self, "run"}, f.rankArgs(dir)...), Size: f.ranks, Node: f.node, Nodes: f.nodes,
		Transport: f.transport, Rendezvous: f.rendezvous, Secret: os.Getenv("MOETOR_SECRET"), Segment: makeSegment,
		LogDir: dir, Stdout: c.OutOrStdout(), Stderr: c.ErrOrStderr(), Restarts: f.maxRestarts,
	}
	if f.asJSON {
		job.Stdout = c.ErrOrStderr()
	}
	if !f.resume {
		job.RestartArgs = []string{"--resume"}
	}
	if isTerminal(c.ErrOrStderr()) {
		job.Env = append(job.Env, ttyVar+"=1")
	}
	code, err := launch.Run(context.Background(), job)
	if err != nil {
		if code == exitUsage {
			return usage(err)
		}
		return fmt.Errorf("%w (logs: %s)", err, filepath.Join(dir, "rank-*.log"))
	}
	return f.conclude(c, dir, code)
}

// preflight opens the data before any rank starts, so that a wrong file is one line at once, and the ranks find the
// tokens in the cache.
func (f *launchFlags) preflight(run *configs.Run) error {
	tok, err := train.OpenTokenizer(run)
	if err != nil {
		return usage(err)
	}
	for i := range run.Stages {
		corpus, err := train.OpenCorpus(context.Background(), run, i, tok)
		if err != nil {
			return usage(err)
		}
		for _, s := range corpus.Report.Sources {
			fmt.Fprintln(os.Stderr, s)
			for _, b := range s.Bad {
				fmt.Fprintln(os.Stderr, "  bad line:", b)
			}
		}
		for _, n := range corpus.Report.Notes {
			fmt.Fprintln(os.Stderr, n)
		}
		if err := corpus.Close(); err != nil {
			return err
		}
	}
	return nil
}

// checkDir refuses to write over a run, and a directory that cannot be made.
func (f *launchFlags) checkDir(dir string) error {
	held, _ := filepath.Glob(filepath.Join(dir, "checkpoints", "*", "manifest.json"))
	if len(held) > 0 && !f.resume && !f.overwrite {
		return usagef("%s holds a run (%d checkpoints): --resume goes on with it, --overwrite deletes it, --out DIR starts elsewhere", dir, len(held))
	}
	if err := os.MkdirAll(dir, 0o755); err != nil {
		return usagef("--out %w", err)
	}
	return nil
}

// prepareDir empties the run directory of an older run where that was asked for, and writes config.yaml.
func (f *launchFlags) prepareDir(dir string, run *configs.Run) error {
	if f.overwrite {
		for _, name := range []string{"checkpoints", "metrics.jsonl", "trace.json"} {
			if err := os.RemoveAll(filepath.Join(dir, name)); err != nil {
				return usage(err)
			}
		}
	}
	if !f.resume {
		for r := f.node * f.ranks; r < (f.node+1)*f.ranks; r++ { // logs of this host's ranks only: hosts may share dir
			old, _ := filepath.Glob(filepath.Join(dir, fmt.Sprintf("rank-%d.*", r)))
			for _, name := range old {
				os.Remove(name)
			}
		}
	}
	path := filepath.Join(dir, "config.yaml")
	tmp := fmt.Sprintf("%s.node-%d", path, f.node)
	if err := os.WriteFile(tmp, configs.Marshal(run), 0o644); err != nil {
		return usage(err)
	}
	return usage(os.Rename(tmp, path))
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

// makeSegment makes the shared memory of a job on this host.
func makeSegment(size int) (string, func() error, error) {
	var b [8]byte
	rand.Read(b[:])
	path := filepath.Join(shm.Dir(), "moetor-"+hex.EncodeToString(b[:]))
	if err := shm.Create(path, size, shm.Options{}); err != nil {
		return "", nil, err
	}
	return path, func() error { return shm.Remove(path) }, nil
}

// conclude says where the result is and what to do with it.
func (f *launchFlags) conclude(c *cobra.Command, dir string, code int) error {
	if f.node == 0 {
		r, _, err := train.OpenCheckpoint(dir)
		if err != nil {
			return err
		}
		m := r.Meta()
		path := r.Dir()
		if err := r.Close(); err != nil {
			return err
		}
		if f.asJSON {
			if err := printJSON(c, map[string]any{"out": dir, "checkpoint": path, "stage": m.Stage, "step": m.Step, "tokens": m.Tokens, "stopped": code == exitStopped}); err != nil {
				return err
			}
		} else {
			w := c.ErrOrStderr()
			fmt.Fprintf(w, "checkpoint: %s (%s step %d, %d tokens)\n", path, m.Stage, m.Step, m.Tokens)
			self := filepath.Base(os.Args[0])
			if code == exitStopped {
				fmt.Fprintf(w, "stopped; go on with: %s launch -n %d --out %s --resume\n", self, f.ranks, dir)
			} else {
				fmt.Fprintf(w, "next: %s generate --checkpoint %s --prompt TEXT | %s inspect %s | %s eval --checkpoint %s --data FILE\n", self, dir, self, dir, self, dir)
			}
		}
	}
	if code != exitDone {
		return exitCode(code)
	}
	return nil
}
