package main

import (
	"fmt"
	"io"
	"time"

	"github.com/spf13/cobra"

	"moetor/data"
	"moetor/internal/train"
	"moetor/model"
)

func generateCommand() *cobra.Command {
	var (
		checkpoint, prompt string
		tokens, threads    int
		s                  model.Sampling
		asJSON             bool
	)
	c := &cobra.Command{
		Use: "generate --checkpoint DIR --prompt TEXT", Args: cobra.NoArgs,
		Short: "Continue a prompt with a trained model",
		Long: `Continue a prompt token by token, with a cache of MLA's compressed latents. Generation ends at the end-of-text
token or after --tokens. Where a text outgrows the model's context, the later half of what was seen is read again and the text goes on.`,
		RunE: func(c *cobra.Command, _ []string) error {
			if tokens < 1 {
				return usagef("--tokens %d must be at least 1", tokens)
			}
			sampler, err := model.NewSampler(s)
			if err != nil {
				return usagef("--%w", err)
			}
			m, err := loadModel(checkpoint, threads)
			if err != nil {
				return err
			}
			out := c.OutOrStdout()
			if asJSON {
				out = io.Discard
			} else {
				fmt.Fprint(out, prompt)
			}
			g, err := continueText(out, m, sampler, prompt, tokens)
			if err != nil {
				return err
			}
			if asJSON {
				return printJSON(c, g)
			}
			fmt.Fprintln(out)
			return nil
		},
	}
	fl := c.Flags()
	fl.StringVar(&checkpoint, "checkpoint", "", "checkpoint, or run directory (its newest checkpoint)")
	fl.StringVar(&prompt, "prompt", "", "text to continue")
	fl.IntVar(&tokens, "tokens", 256, "most tokens to generate")
	fl.Float64Var(&s.Temperature, "temperature", 1, "0 takes the most likely token")
	fl.IntVar(&s.TopK, "top-k", 0, "choose among the k most likely tokens; 0 is all")
	fl.Float64Var(&s.TopP, "top-p", 1, "choose among the most likely tokens that have this share of the probability")
	fl.Uint64Var(&s.Seed, "seed", 1234, "equal seeds give equal texts")
	fl.IntVar(&threads, "threads", 0, "kernel threads (default all cores)")
	fl.BoolVar(&asJSON, "json", false, "print JSON")
	return c
}

// A generation is what generate --json prints.
type generation struct {
	Prompt string  `json:"prompt"`
	Text   string  `json:"text"`
	Tokens int     `json:"tokens"`
	TokS   float64 `json:"tok_s"`
	Reason string  `json:"reason"` // "end" at the end-of-text token, "length"
}

// continueText writes the continuation of prompt to w as it comes.
func continueText(w io.Writer, m *train.Model, sampler *model.Sampler, prompt string, tokens int) (generation, error) {
	g := generation{Prompt: prompt, Reason: "length"}
	seen := m.Tokenizer.Encode(prompt)
	if len(seen) == 0 {
		seen = []int32{m.Tokenizer.EOS()} // a text begins where another ended
	}
	context := m.Run.Model.Context
	if len(seen) > context-1 {
		seen = seen[len(seen)-(context-1):]
	}
	d, err := model.NewDecoder(m.Chunk)
	if err != nil {
		return g, err
	}
	began := time.Now()
	logits, err := d.Prefill(seen)
	if err != nil {
		return g, err
	}
	stream := data.NewStreamDecoder(m.Tokenizer)
	emit := func(s string) error {
		g.Text += s
		_, err := io.WriteString(w, s)
		return err
	}
	for g.Tokens < tokens {
		next := sampler.Next(logits)
		if next == m.Tokenizer.EOS() {
			g.Reason = "end"
			break
		}
		g.Tokens++
		seen = append(seen, next)
		if err := emit(stream.Add(next)); err != nil {
			return g, err
		}
		if g.Tokens == tokens {
			break
		}
		if d.Len() < context {
			logits, err = d.Step(next)
		} else {
			d.Reset()
			logits, err = d.Prefill(seen[len(seen)-max(1, context/2):])
		}
		if err != nil {
			return g, err
		}
	}
	g.TokS = float64(g.Tokens) / time.Since(began).Seconds()
	return g, emit(stream.Flush())
}
