package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"runtime"
	"strconv"
	"text/tabwriter"

	"github.com/spf13/cobra"

	"moetor/checkpoint"
	"moetor/configs"
	"moetor/internal/train"
	"moetor/model"
)

func inspectCommand() *cobra.Command {
	var (
		f       configFlags
		asJSON  bool
		tensors bool
		memory  bool
		ranks   int
	)
	c := &cobra.Command{
		Use: "inspect [DIR]", Args: cobra.MaximumNArgs(1),
		Short: "List and verify a checkpoint, or count the parameters of a configuration",
		Long: `With a checkpoint or a run directory: print what it holds, and check every file against its checksum and the
manifest. With --config: count parameters and FLOPs of the model without building it; with --memory besides, predict
the resident memory of a rank, by what it is for, at every coordinate of the pipeline.`,
		RunE: func(c *cobra.Command, args []string) error {
			switch {
			case len(args) == 1 && f.name != "":
				return usagef("inspect %s and --config %s: give one of the two", args[0], f.name)
			case len(args) == 1:
				return inspectCheckpoint(c, args[0], asJSON, tensors)
			case memory && f.name == "":
				return usagef("--memory needs --config")
			case memory:
				return inspectMemory(c, &f, ranks, asJSON)
			case f.name != "":
				return inspectConfig(c, &f, asJSON)
			}
			return usagef("inspect needs a checkpoint directory or --config")
		},
	}
	f.add(c)
	c.Flags().BoolVar(&tensors, "tensors", false, "list every tensor")
	c.Flags().BoolVar(&memory, "memory", false, "predict the memory of a rank, by kind")
	c.Flags().IntVarP(&ranks, "ranks", "n", 1, "ranks of the run, on one host, for --memory")
	c.Flags().BoolVar(&asJSON, "json", false, "print JSON")
	return c
}

func inspectCheckpoint(c *cobra.Command, dir string, asJSON, tensors bool) error {
	r, skipped, err := train.OpenCheckpoint(dir)
	for _, why := range skipped {
		fmt.Fprintln(c.ErrOrStderr(), "passed over:", why)
	}
	if err != nil {
		return usage(err)
	}
	defer r.Close()
	summary, err := checkpoint.Inspect(context.Background(), r.Dir())
	if err != nil {
		return err
	}
	broken := damage(summary)
	if asJSON {
		if err := printJSON(c, summary); err != nil {
			return err
		}
		return broken
	}
	m := r.Meta()
	out := c.OutOrStdout()
	fmt.Fprintf(out, "%s\nstage %s, step %d, %d tokens, %d samples, seed %d\n", r.Dir(), m.Stage, m.Step, m.Tokens, m.Samples, m.Seed)
	fmt.Fprintf(out, "%d parameters, %d active; written by %s on %d ranks (pipeline %d, data %d, expert %d)\n",
		m.Params, m.ActiveParams, m.Engine, m.Mesh.World, m.Mesh.Pipeline, m.Mesh.Data, m.Mesh.Expert)
	w := tabwriter.NewWriter(out, 0, 0, 2, ' ', 0)
	for _, f := range r.Files() {
		fmt.Fprintf(w, "%s\t%d bytes\t%d slices\tsha256 %.16s…\n", f.Name, f.Size, len(f.Slices), f.SHA256)
	}
	if err := w.Flush(); err != nil {
		return err
	}
	if tensors {
		printTensors(out, r)
	}
	if broken != nil {
		return broken
	}
	fmt.Fprintln(out, "verified: every checksum and every dataset is as the manifest says")
	return nil
}

// damage is the first thing wrong with a checkpoint's files, or nil.
func damage(s checkpoint.Summary) error {
	for _, f := range s.Files {
		if !f.OK {
			return errors.New(f.Error)
		}
	}
	return nil
}

func printTensors(out io.Writer, r *checkpoint.Reader) {
	w := tabwriter.NewWriter(out, 0, 0, 2, ' ', 0)
	for _, t := range r.Tensors() {
		fmt.Fprintf(w, "%s\t%s\t%v\n", t.Kind, t.Name, t.Shape)
	}
	w.Flush()
}

// loadModel loads a configuration for a number of ranks, 0 for any, with the vocabulary known.
func (f *configFlags) loadModel(ranks int) (*configs.Run, error) {
	run, err := configs.Load(f.name, f.sets)
	if err != nil {
		return nil, usage(err)
	}
	if run.Model.VocabSize == 0 {
		if _, err := train.OpenTokenizer(run); err != nil {
			return nil, usage(err)
		}
	}
	return run, usage(configs.Validate(run, ranks))
}

func inspectConfig(c *cobra.Command, f *configFlags, asJSON bool) error {
	run, err := f.loadModel(0)
	if err != nil {
		return err
	}
	n := model.Count(run.Model)
	flops := model.FLOPs(run.Model, run.Model.Context)
	if asJSON {
		return printJSON(c, map[string]any{"params": n.Total, "active_params": n.Active, "active_params_without_embedding": n.ActiveNoEmbed,
			"mtp_params": n.MTP, "vocab": run.Model.VocabSize, "context": run.Model.Context,
			"flops_per_token_forward": flops.Forward, "flops_per_token_training": flops.Training})
	}
	w := tabwriter.NewWriter(c.OutOrStdout(), 0, 0, 2, ' ', tabwriter.AlignRight)
	fmt.Fprintf(w, "parameters\t%d\t\n", n.Total)
	fmt.Fprintf(w, "active per token\t%d\t\n", n.Active)
	fmt.Fprintf(w, "active without the embedding table\t%d\t\n", n.ActiveNoEmbed)
	fmt.Fprintf(w, "in MTP modules, besides\t%d\t\n", n.MTP)
	fmt.Fprintf(w, "forward FLOPs per token at context %d\t%.4g\t\n", run.Model.Context, flops.Forward)
	fmt.Fprintf(w, "training FLOPs per token\t%.4g\t\n", flops.Training)
	return w.Flush()
}

func inspectMemory(c *cobra.Command, f *configFlags, ranks int, asJSON bool) error {
	if ranks < 1 {
		return usagef("-n %d must be at least 1", ranks)
	}
	run, err := f.loadModel(ranks)
	if err != nil {
		return err
	}
	threads := max(1, runtime.GOMAXPROCS(0)/ranks)
	all, err := train.PredictMemory(run, ranks, threads)
	if err != nil {
		return usage(err)
	}
	if asJSON {
		return printJSON(c, map[string]any{"ranks": ranks, "threads": threads, "coordinates": all})
	}
	w := tabwriter.NewWriter(c.OutOrStdout(), 0, 0, 2, ' ', tabwriter.AlignRight)
	row := func(name string, of func(r *train.RankMemory) string) {
		fmt.Fprintf(w, "%s\t", name)
		for i := range all {
			fmt.Fprintf(w, "%s\t", of(&all[i]))
		}
		fmt.Fprintln(w)
	}
	row("MiB of a rank at pipeline coordinate", func(r *train.RankMemory) string { return strconv.Itoa(r.Pipeline) })
	row("layers", func(r *train.RankMemory) string { return fmt.Sprintf("%d-%d", r.Layers[0], r.Layers[1]-1) })
	row("stage that needs most", func(r *train.RankMemory) string { return r.Stage })
	row("micro-batches in flight", func(r *train.RankMemory) string { return strconv.Itoa(r.InFlight) })
	for _, k := range all[0].Bytes.Kinds() {
		row(k.Name, func(r *train.RankMemory) string {
			for _, o := range r.Bytes.Kinds() {
				if o.Name == k.Name {
					return mib(o.Bytes)
				}
			}
			return ""
		})
	}
	row("total", func(r *train.RankMemory) string { return mib(r.Total) })
	return w.Flush()
}

func mib(bytes int64) string { return strconv.FormatFloat(float64(bytes)/(1<<20), 'f', 1, 64) }
