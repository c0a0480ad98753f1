package main

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"path/filepath"
	"slices"

	"moetor/checkpoint"
	"moetor/comm"
	"moetor/comm/launch"
	"moetor/configs"
	"moetor/internal/train"
)

// What comes before the first step and after the last one, once for all ranks: train launch does it for those that it starts,
// and under another launcher the ranks do it themselves.

// preflight opens the data before any rank trains, so that a wrong file is one line at once, and the ranks find the tokens
// in the cache. It says on w what is in the data.
func preflight(w io.Writer, run *configs.Run, stages []string) error {
	tok, err := train.OpenTokenizer(run)
	if err != nil {
		return usage(err)
	}
	for i, st := range run.Stages {
		if len(stages) > 0 && !slices.Contains(stages, st.Name) {
			continue
		}
		corpus, err := train.OpenCorpus(context.Background(), run, i, tok)
		if err != nil {
			return usage(err)
		}
		for _, l := range append(corpus.Lines, corpus.Notes...) {
			fmt.Fprintln(w, l)
		}
		if err := corpus.Close(); err != nil {
			return err
		}
	}
	return nil
}

// checkDir refuses to write over a run, and a directory that cannot be made.
func (f *rankFlags) checkDir(dir string) error {
	held, _ := fs.Glob(os.DirFS(dir), "checkpoints/*/manifest.json") // dir itself is no pattern
	if len(held) > 0 && !f.resume && !f.overwrite {
		return usagef("%s holds a run (%d checkpoints): --resume goes on with it, --overwrite deletes it, --out DIR starts elsewhere", dir, len(held))
	}
	if err := os.MkdirAll(dir, 0o755); err != nil {
		return usagef("--out %w", err)
	}
	return nil
}

// prepareDir empties the run directory of an older run where that was asked for, and of the logs of ranks [first, end), and
// writes config.yaml. restore undoes the latter where a resume was refused: the next one then reads what the run was made with.
func (f *rankFlags) prepareDir(dir string, run *configs.Run, first, end int) (restore func(), err error) {
	if f.overwrite {
		for _, name := range []string{"checkpoints", "metrics.jsonl", "trace.json"} {
			if err := os.RemoveAll(filepath.Join(dir, name)); err != nil {
				return func() {}, usage(err)
			}
		}
		for _, pattern := range []string{"reference-*.bin", "precision-rank-*.jsonl"} {
			old, _ := filepath.Glob(filepath.Join(dir, pattern))
			for _, name := range old {
				os.Remove(name)
			}
		}
	}
	if !f.resume {
		for r := first; r < end; r++ {
			old, _ := filepath.Glob(filepath.Join(dir, fmt.Sprintf("rank-%d.*", r)))
			for _, name := range old {
				os.Remove(name)
			}
		}
	}
	path := filepath.Join(dir, "config.yaml")
	tmp := fmt.Sprintf("%s.rank-%d", path, first)
	write := func(text []byte) error {
		err := os.WriteFile(tmp, text, 0o644)
		if err == nil {
			err = os.Rename(tmp, path)
		}
		if err != nil {
			os.Remove(tmp)
		}
		return usage(err)
	}
	before, readErr := os.ReadFile(path)
	restore = func() {
		if f.resume && readErr == nil {
			write(before)
		}
	}
	return restore, write(configs.Marshal(run))
}

// prepareRank does a rank's part of this under another launcher: rank 0 prepares the run directory, and the first rank of
// each host opens the data there.
func (f *rankFlags) prepareRank(ctx context.Context, w io.Writer, run *configs.Run, rank launch.Rank) (restore func(), err error) {
	restore = func() {}
	if rank.Rank == 0 {
		if err := f.checkDir(run.Run.Out); err != nil {
			return restore, err
		}
		if _, err := lockDir(run.Run.Out); err != nil { // until the process ends
			return restore, err
		}
	} else {
		w = io.Discard
	}
	if rank.LocalRank == 0 {
		if err := preflight(w, run, f.stages); err != nil {
			return restore, err
		}
	}
	if rank.Rank == 0 {
		return f.prepareDir(run.Run.Out, run, 0, rank.Size)
	}
	return restore, nil
}

// tagAgree is the tag of the group that agrees on the start; the groups of a run count theirs from 0.
const tagAgree = comm.TagPipeline - 1

// agree ends the ranks together where one cannot start: rank 0 returns the error of the lowest of them, to be the one line
// that the user reads, and the others an exit code alone. Waiting may take as long as a corpus takes to be tokenised, so it
// has no time-out.
func agree(ctx context.Context, t comm.Transport, problem error) error {
	ranks := make([]int, t.Size())
	for i := range ranks {
		ranks[i] = i
	}
	g, err := comm.NewGroup(t, ranks, tagAgree)
	if err != nil {
		return err
	}
	var mine []byte
	if problem != nil {
		mine = append([]byte{exitFailed}, problem.Error()...)
		if u := (usageError{}); errors.As(problem, &u) {
			mine[0] = exitUsage
		}
	}
	all, err := comm.GatherBytes(ctx, g, mine)
	if err != nil {
		return cmp.Or(problem, err)
	}
	for r, said := range all {
		if len(said) == 0 {
			continue
		}
		code := exitCode(said[0])
		if t.Rank() > 0 {
			return code
		}
		if r > 0 {
			problem = fmt.Errorf("rank %d: %s", r, said[1:])
			if code == exitUsage {
				problem = usage(problem)
			}
		}
		return problem
	}
	return nil
}

// newest is the newest complete checkpoint of the run directory.
func newest(dir string) (m checkpoint.Meta, path string, err error) {
	r, _, err := train.OpenCheckpoint(dir)
	if err != nil {
		return m, "", err
	}
	return r.Meta(), r.Dir(), r.Close()
}

// announce says where the result is and what to do with it. again is how a stopped run goes on.
func announce(w io.Writer, dir string, stopped bool, again string) error {
	m, path, err := newest(dir)
	if err != nil {
		return err
	}
	fmt.Fprintf(w, "checkpoint: %s (%s step %d, %d tokens)\n", path, m.Stage, m.Step, m.Tokens)
	if stopped {
		fmt.Fprintf(w, "stopped; go on with: %s\n", again)
		return nil
	}
	self := filepath.Base(os.Args[0])
	fmt.Fprintf(w, "next: %s generate --checkpoint %s --prompt TEXT | %s inspect %s | %s eval --checkpoint %s --data FILE\n", self, dir, self, dir, self, dir)
	return nil
}
