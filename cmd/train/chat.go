package main

import (
	"bufio"
	"fmt"
	"io"
	"strings"
	"time"

	"moetor/data"
	"moetor/data/chat"
	"moetor/internal/train"
	"moetor/model"
)

// A talker answers conversations with a model, in the template it was tuned with.
type talker struct {
	m        *train.Model
	template chat.Template
	sampling model.Sampling
	tokens   int // most of one answer
}

// newTalker opens the template: the one named, else that of the checkpoint's stage or of the last one before it that has
// one, else the built-in.
func newTalker(m *train.Model, name string, s model.Sampling, tokens int) (*talker, error) {
	if name == "" {
		for _, st := range m.Run.Stages {
			if st.Chat.Template != "" {
				name = st.Chat.Template
			}
			if st.Name == m.Meta.Stage {
				break
			}
		}
	}
	if name == "" {
		name = "builtin"
	}
	t, err := chat.OpenTemplate(name)
	if err != nil {
		return nil, usage(err)
	}
	return &talker{m: m, template: t, sampling: s, tokens: tokens}, nil
}

// prompt renders a conversation up to where the answer begins. Of one that leaves no room in the context the oldest
// turns are left out, a system message not.
func (t *talker) prompt(messages []chat.Message) ([]int32, error) {
	room := t.m.Run.Model.Context - min(t.tokens, t.m.Run.Model.Context/2)
	for {
		pieces, err := t.template.Render(messages, true)
		if err != nil {
			return nil, usage(err)
		}
		ids, _, _, err := chat.Encode(t.m.Tokenizer, pieces)
		if err != nil {
			return nil, usage(err)
		}
		oldest := 0
		if len(messages) > 0 && messages[0].Role == chat.System {
			oldest = 1
		}
		switch {
		case len(ids) <= room:
			return ids, nil
		case len(messages)-oldest > 1:
			messages = append(messages[:oldest:oldest], messages[oldest+1:]...)
		default:
			return nil, usagef("a message of %d tokens leaves no room for an answer in model.context=%d", len(ids), t.m.Run.Model.Context)
		}
	}
}

// answer samples n answers to a conversation in one batch. Each ends at the end of its turn, or of the text. A single one
// is written to w as it comes.
func (t *talker) answer(w io.Writer, messages []chat.Message, n int) ([]generation, error) {
	ids, err := t.prompt(messages)
	if err != nil {
		return nil, err
	}
	return sampleBatch(w, t.m, t.sampling, ids, t.tokens, n)
}

// sampleBatch continues a prompt n times in one batch, sample i with seed Seed+i, until a special token, or the given number
// of tokens, or the end of the context.
func sampleBatch(w io.Writer, m *train.Model, s model.Sampling, prompt []int32, tokens, n int) ([]generation, error) {
	d, err := model.NewBatchDecoder(n, m.Chunk)
	if err != nil {
		return nil, err
	}
	began := time.Now()
	first, err := d.Prefill(prompt)
	if err != nil {
		return nil, err
	}
	out := make([]generation, n)
	samplers, streams := make([]*model.Sampler, n), make([]*data.StreamDecoder, n)
	logits, next := make([][]float32, n), make([]int32, n)
	for i := range n {
		own := s
		own.Seed += uint64(i)
		if samplers[i], err = model.NewSampler(own); err != nil {
			return nil, usagef("--%w", err)
		}
		streams[i] = data.NewStreamDecoder(m.Tokenizer)
		logits[i] = first
		out[i].Reason = "length"
	}
	say := func(i int, text string) error {
		out[i].Text += text
		if n > 1 {
			return nil
		}
		_, err := io.WriteString(w, text)
		return err
	}
	for live := n; live > 0; {
		live = 0
		for i := range n {
			if logits[i] == nil {
				next[i] = -1
				continue
			}
			id := samplers[i].Next(logits[i])
			if m.Tokenizer.Special(id) != "" {
				out[i].Reason, next[i] = "end", -1
				continue
			}
			out[i].Tokens++
			if err := say(i, streams[i].Add(id)); err != nil {
				return nil, err
			}
			next[i] = id
			if out[i].Tokens == tokens || len(prompt)+out[i].Tokens > m.Run.Model.Context-1 {
				next[i] = -1
				continue
			}
			live++
		}
		if live > 0 {
			if logits, err = d.Step(next); err != nil {
				return nil, err
			}
		}
	}
	for i := range n {
		out[i].TokS = float64(out[i].Tokens) / time.Since(began).Seconds()
		if err := say(i, streams[i].Flush()); err != nil {
			return nil, err
		}
	}
	return out, nil
}

// converse reads turns of the user from in, a line each, and answers them until the input ends. /new forgets the
// conversation.
func (t *talker) converse(in io.Reader, out, prompts io.Writer, system string) error {
	start := func() []chat.Message {
		if system == "" {
			return nil
		}
		return []chat.Message{{Role: chat.System, Content: system}}
	}
	fmt.Fprintln(prompts, "A line is a turn; /new starts again; an end of input (Ctrl-D) ends.")
	messages := start()
	lines := bufio.NewScanner(in)
	lines.Buffer(nil, 16<<20)
	for fmt.Fprint(prompts, "> "); lines.Scan(); fmt.Fprint(prompts, "> ") {
		line := strings.TrimSpace(lines.Text())
		switch line {
		case "":
			continue
		case "/new":
			messages = start()
			continue
		}
		messages = append(messages, chat.Message{Role: chat.User, Content: line})
		g, err := t.answer(out, messages, 1)
		if err != nil {
			return err
		}
		fmt.Fprintln(out)
		messages = append(messages, chat.Message{Role: chat.Assistant, Content: g[0].Text})
		t.sampling.Seed++
	}
	fmt.Fprintln(prompts)
	return lines.Err()
}
