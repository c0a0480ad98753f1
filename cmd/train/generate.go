package main

import (
	"fmt"
	"io"
	"time"

	"github.com/spf13/cobra"

	"moetor/data"
	"moetor/data/chat"
	"moetor/internal/train"
	"moetor/model"
)

// generateFlags are the flags of train generate.
type generateFlags struct {
	checkpoint, prompt string
	template, system   string
	tokens, threads    int
	samples            int
	chat, asJSON       bool
	sampling           model.Sampling
}

func generateCommand() *cobra.Command {
	var f generateFlags
	c := &cobra.Command{
		Use: "generate --checkpoint DIR --prompt TEXT", Args: cobra.NoArgs,
		Short: "Continue a prompt with a trained model, or chat with it",
		Long: `Continue a prompt token by token, with a cache of MLA's compressed latents. Generation ends at the end-of-text
token or after --tokens. Where a text outgrows the model's context, the later half of what was seen is read again and the text goes on.

With --chat the prompt is a turn of the user, written in the template that the model was tuned with, and the answer ends with its
turn. Without --prompt it is a conversation: a line of the input is a turn. --samples N draws N continuations in one batch.`,
		RunE: func(c *cobra.Command, _ []string) error { return f.generate(c) },
	}
	fl := c.Flags()
	fl.StringVar(&f.checkpoint, "checkpoint", "", "checkpoint, or run directory (its newest checkpoint)")
	fl.StringVar(&f.prompt, "prompt", "", "text to continue, or the user's turn")
	fl.IntVar(&f.tokens, "tokens", 256, "most tokens to generate")
	fl.IntVar(&f.samples, "samples", 1, "continuations to draw, each within the model's context")
	fl.Float64Var(&f.sampling.Temperature, "temperature", 1, "0 takes the most likely token")
	fl.IntVar(&f.sampling.TopK, "top-k", 0, "choose among the k most likely tokens; 0 is all")
	fl.Float64Var(&f.sampling.TopP, "top-p", 1, "choose among the most likely tokens that have this share of the probability")
	fl.Uint64Var(&f.sampling.Seed, "seed", 1234, "equal seeds give equal texts")
	fl.BoolVar(&f.chat, "chat", false, "answer as the assistant of a conversation")
	fl.StringVar(&f.template, "template", "", "with --chat: builtin, chatml, or a tokenizer_config.json (default: as tuned)")
	fl.StringVar(&f.system, "system", "", "with --chat: system message")
	fl.IntVar(&f.threads, "threads", 0, "kernel threads (default all cores)")
	fl.BoolVar(&f.asJSON, "json", false, "print JSON")
	return c
}

func (f *generateFlags) generate(c *cobra.Command) error {
	switch {
	case f.tokens < 1:
		return usagef("--tokens %d must be at least 1", f.tokens)
	case f.samples < 1:
		return usagef("--samples %d must be at least 1", f.samples)
	case !f.chat && f.template != "":
		return usagef("--template %s has no effect without --chat", f.template)
	case !f.chat && f.system != "":
		return usagef("--system has no effect without --chat")
	}
	sampler, err := model.NewSampler(f.sampling)
	if err != nil {
		return usagef("--%w", err)
	}
	m, err := loadModel(f.checkpoint, f.threads, model.Recipe{})
	if err != nil {
		return err
	}
	if m.Run.Model.Score {
		return usagef("--checkpoint %s is a reward model: it scores answers and cannot write them", m.Dir)
	}
	out := c.OutOrStdout()
	if f.asJSON {
		out = io.Discard
	}
	var all []generation
	switch {
	case f.chat:
		t, err := newTalker(m, f.template, f.sampling, f.tokens)
		if err != nil {
			return err
		}
		if f.prompt == "" {
			if f.asJSON || f.samples > 1 {
				return usagef("--chat without --prompt is a conversation; --json and --samples need a --prompt")
			}
			return t.converse(c.InOrStdin(), out, c.ErrOrStderr(), f.system)
		}
		messages := []chat.Message{{Role: chat.User, Content: f.prompt}}
		if f.system != "" {
			messages = append([]chat.Message{{Role: chat.System, Content: f.system}}, messages...)
		}
		if all, err = t.answer(out, messages, f.samples); err != nil {
			return err
		}
	case f.samples > 1:
		if all, err = sampleBatch(out, m, f.sampling, promptTokens(m, f.prompt), f.tokens, f.samples); err != nil {
			return err
		}
	default:
		fmt.Fprint(out, f.prompt)
		g, err := continueText(out, m, sampler, f.prompt, f.tokens)
		if err != nil {
			return err
		}
		all = []generation{g}
	}
	for i := range all {
		all[i].Prompt = f.prompt
		if len(all) > 1 {
			fmt.Fprintf(out, "--- %d\n%s", i+1, all[i].Text)
		}
		if len(all) > 1 || i == 0 {
			fmt.Fprintln(out)
		}
	}
	switch {
	case !f.asJSON:
		return nil
	case len(all) == 1:
		return printJSON(c, all[0])
	}
	return printJSON(c, all)
}

// A generation is what generate --json prints.
type generation struct {
	Prompt string  `json:"prompt"`
	Text   string  `json:"text"`
	Tokens int     `json:"tokens"`
	TokS   float64 `json:"tok_s"`
	Reason string  `json:"reason"` // "end" at the end-of-text token, "length"
}

// promptTokens are the last tokens of a prompt that leave room for one more in the context. A text without a prompt begins
// where another ended.
func promptTokens(m *train.Model, prompt string) []int32 {
	ids := m.Tokenizer.Encode(prompt)
	if len(ids) == 0 {
		ids = []int32{m.Tokenizer.EOS()}
	}
	return ids[max(0, len(ids)-(m.Run.Model.Context-1)):]
}

// continueText writes the continuation of prompt to w as it comes.
func continueText(w io.Writer, m *train.Model, sampler *model.Sampler, prompt string, tokens int) (generation, error) {
	g := generation{Prompt: prompt, Reason: "length"}
	context := m.Run.Model.Context
	seen := promptTokens(m, prompt)
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
