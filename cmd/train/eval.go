package main

import (
	"context"
	"fmt"
	"io"
	"math"
	"os"
	"runtime"
	"slices"
	"strings"

	"github.com/spf13/cobra"

	"moetor/configs"
	"moetor/data"
	"moetor/internal/kernel"
	"moetor/internal/train"
	"moetor/model"
)

func evalCommand() *cobra.Command {
	var (
		checkpoint, file, field string
		precision               = configs.Precision{Promote: configs.DefaultPromote}
		batch, threads          int
		gradients               int
		asJSON                  bool
		task                    taskFlags
	)
	c := &cobra.Command{
		Use: "eval --checkpoint DIR --data FILE", Args: cobra.NoArgs,
		Short: "Measure a checkpoint: perplexity of a text, or accuracy on questions",
		Long: `Measure a checkpoint.

  --task perplexity   loss and perplexity of a text
  --task choice       JSON lines with a question (or prompt, query), choices, and answer: an index from 0, a letter, or the
                      text of one. Each choice is scored by its log-probability after the question; accuracy is given by the
                      sum and by the mean per token
  --task exact        JSON lines with a question and an answer: a number, or a text of which what follows #### counts
                      (GSM8K). An answer is generated, always the most likely token, and what --pattern finds in it is
                      compared, as numbers where both are

Accuracies come with their 95 % Wilson interval. Files may be compressed by gzip or zstd.`,
		RunE: func(c *cobra.Command, _ []string) error {
			if err := task.check(c); err != nil {
				return err
			}
			recipe := precision.Recipe
			if !slices.Contains(configs.RecipeNames(), recipe) {
				return usagef("--recipe %s is unknown; known: %s", recipe, strings.Join(configs.RecipeNames(), ", "))
			}
			if problems := precision.Problems("--"); len(problems) > 0 {
				return usagef("%s", strings.Join(problems, "; "))
			}
			switch {
			case precision.Promote < 0:
				return usagef("--promote %d must not be negative", precision.Promote)
			case gradients < 0 || gradients == 1:
				return usagef("--gradients %d must be 0 or at least 2 batches", gradients)
			case gradients > 0 && recipe == "fp32":
				return usagef("--gradients %d compares with FP32: name another --recipe than fp32", gradients)
			}
			m, err := loadModel(checkpoint, threads, precision.ModelRecipe())
			if err != nil {
				return err
			}
			if m.Run.Model.Score {
				return usagef("--checkpoint %s is of a reward model, which predicts no text", m.Dir)
			}
			if file == "" {
				return usagef("--data is missing: name a text or JSONL file, a glob, or embedded:NAME")
			}
			if batch < 1 {
				return usagef("--batch %d must be at least 1", batch)
			}
			if task.task != taskPerplexity {
				r, err := task.run(context.Background(), c.ErrOrStderr(), m, file, batch)
				switch {
				case err != nil:
					return err
				case asJSON:
					return printJSON(c, r)
				}
				r.print(c.OutOrStdout())
				return nil
			}
			corpus, err := data.Open(context.Background(), data.OpenConfig{
				Val:       data.ValConfig{Data: []data.SourceConfig{{Path: file, Field: field}}},
				Pack:      data.PackConfig{Isolate: m.Stage.Pack.Isolate}, // documents as the model knows them
				Tokenizer: m.Tokenizer, Len: m.Run.Model.Context, Cache: data.CacheOff, At: "--data"})
			if err != nil {
				return usage(err)
			}
			defer corpus.Close()
			var errors []train.GradientError
			if gradients > 0 {
				if errors, err = m.CompareGradients(context.Background(), corpus.Val, batch, gradients); err != nil {
					return usagef("--gradients %d --batch %d: --data %s: %w", gradients, batch, file, err)
				}
			}
			loss, targets, err := m.Evaluate(context.Background(), corpus.Val, batch)
			if err != nil {
				return err
			}
			if targets == 0 {
				return usagef("--data %s holds no token to predict", file)
			}
			mean := loss / targets
			if asJSON {
				return printJSON(c, struct {
					Loss       float64               `json:"loss"`
					Perplexity float64               `json:"perplexity"`
					Tokens     int64                 `json:"tokens"`
					Gradients  []train.GradientError `json:"gradients,omitempty"`
				}{mean, math.Exp(mean), int64(targets), errors})
			}
			fmt.Fprintf(c.OutOrStdout(), "loss %.6f  perplexity %.4f  over %d tokens\n", mean, math.Exp(mean), int64(targets))
			printGradients(c.OutOrStdout(), errors)
			return nil
		},
	}
	c.Flags().StringVar(&checkpoint, "checkpoint", "", "checkpoint, or run directory (its newest checkpoint)")
	c.Flags().StringVar(&file, "data", "", "text or JSONL file, glob, or embedded:NAME")
	c.Flags().StringVar(&field, "field", "", "JSONL: the key of the text (default text)")
	c.Flags().IntVar(&batch, "batch", 4, "sequences at once; changes no result but those of fp8-tensor, and of --gradients, whose batches they are")
	c.Flags().StringVar(&precision.Recipe, "recipe", "fp32", "perplexity: compute in this recipe ("+strings.Join(configs.RecipeNames(), ", ")+"), as a run does")
	c.Flags().StringSliceVar(&precision.Keep, "keep", nil, "perplexity: with --recipe, operands that stay in BF16 (precision.keep)")
	c.Flags().IntVar(&precision.Promote, "promote", configs.DefaultPromote, "perplexity: with --recipe hopper, precision.promote")
	c.Flags().IntVar(&gradients, "gradients", 0, "perplexity: with --recipe, also compare the gradients of so many batches with those in FP32")
	c.Flags().IntVar(&threads, "threads", 0, "kernel threads (default all cores)")
	c.Flags().BoolVar(&asJSON, "json", false, "print JSON")
	task.add(c)
	return c
}

// printGradients prints a table, or nothing for no entries.
func printGradients(w io.Writer, errors []train.GradientError) {
	if len(errors) == 0 {
		return
	}
	fmt.Fprintf(w, "\n%-40s %9s %9s %9s %9s\n", "gradients, against FP32", "error", "of mean", "length", "sampling")
	for _, e := range errors {
		fmt.Fprintf(w, "%-40s %8.2f%% %8.2f%% %9.4f %8.1f%%\n", e.Kind, 100*e.Error, 100*e.Mean, e.Scale, 100*e.Sampling)
	}
}

// loadModel loads a checkpoint for use in this process, in a recipe.
func loadModel(path string, threads int, recipe model.Recipe) (*train.Model, error) {
	if path == "" {
		return nil, usagef("--checkpoint is missing: name a checkpoint or a run directory")
	}
	if threads < 0 {
		return nil, usagef("--threads %d must not be negative", threads)
	}
	if threads == 0 {
		threads = runtime.GOMAXPROCS(0)
	}
	kernel.SetThreads(threads)
	m, err := train.LoadModel(path, recipe)
	if os.IsNotExist(err) {
		return nil, usage(err)
	}
	return m, usage(err)
}
