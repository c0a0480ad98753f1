package main

import (
	"context"
	"fmt"
	"io"
	"math"
	"regexp"
	"slices"
	"strings"

	"github.com/spf13/cobra"

	"moetor/data"
	"moetor/data/chat"
	"moetor/internal/train"
	"moetor/model"
)

// Tasks of train eval.
const (
	taskPerplexity = "perplexity"
	taskChoice     = "choice"
	taskExact      = "exact"
)

// taskFlags are the flags of train eval that belong to the tasks on rows of questions.
type taskFlags struct {
	task, template, format, pattern string
	chat                            bool
	maxTokens, limit, show          int
}

// questionMark stands for a row's question in --format.
const questionMark = "{question}"

func (f *taskFlags) add(c *cobra.Command) {
	fl := c.Flags()
	fl.StringVar(&f.task, "task", taskPerplexity, "perplexity of a text; choice among given answers by log-probability; exact match of a generated answer")
	fl.BoolVar(&f.chat, "chat", false, "choice, exact: ask through the chat template")
	fl.StringVar(&f.template, "template", "builtin", "with --chat: builtin, chatml or the path of a tokenizer_config.json")
	fl.StringVar(&f.format, "format", questionMark, `choice, exact: the prompt, such as "Q: {question}\nA:"; \n is a line break`)
	fl.StringVar(&f.pattern, "pattern", "", "exact: regular expression of the answer in the generated text; its last match counts, or the first group of it (default: the last number, or the whole text where the answer is no number)")
	fl.IntVar(&f.maxTokens, "max-tokens", 256, "exact: most tokens of an answer")
	fl.IntVar(&f.limit, "limit", 0, "choice, exact: only the first rows; 0 is all")
	fl.IntVar(&f.show, "show", 0, "choice, exact: print the first answers")
}

// check refuses what is wrong before a model is loaded, and flags that have no effect on the task.
func (f *taskFlags) check(c *cobra.Command) error {
	use := map[string][]string{ // flag: tasks that it works with
		"recipe": {taskPerplexity}, "keep": {taskPerplexity}, "promote": {taskPerplexity}, "gradients": {taskPerplexity},
		"field": {taskPerplexity}, "batch": {taskPerplexity, taskChoice}, "chat": {taskChoice, taskExact}, "template": {taskChoice, taskExact},
		"format": {taskChoice, taskExact}, "pattern": {taskExact}, "max-tokens": {taskExact}, "limit": {taskChoice, taskExact}, "show": {taskChoice, taskExact},
	}
	tasks := []string{taskPerplexity, taskChoice, taskExact}
	if !slices.Contains(tasks, f.task) {
		return usagef("--task %s is unknown; known: %s", f.task, strings.Join(tasks, ", "))
	}
	var idle string
	for name, tasks := range use {
		if c.Flags().Changed(name) && !slices.Contains(tasks, f.task) && (idle == "" || name < idle) {
			idle = name
		}
	}
	switch {
	case idle != "":
		return usagef("--%s has no effect with --task %s", idle, f.task)
	case c.Flags().Changed("template") && !f.chat:
		return usagef("--template %s has no effect without --chat", f.template)
	case !strings.Contains(f.format, questionMark):
		return usagef("--format %q has no %s in it", f.format, questionMark)
	case f.maxTokens < 1:
		return usagef("--max-tokens %d must be at least 1", f.maxTokens)
	case f.limit < 0:
		return usagef("--limit %d must not be negative", f.limit)
	case f.show < 0:
		return usagef("--show %d must not be negative", f.show)
	}
	if _, err := regexp.Compile(f.pattern); err != nil {
		return usagef("--pattern %q: %w", f.pattern, err)
	}
	return nil
}

// A taskResult is what eval prints of a task on rows.
type taskResult struct {
	Task         string       `json:"task"`
	Accuracy     float64      `json:"accuracy"`
	CI95         [2]float64   `json:"ci95"`                    // Wilson score interval of the accuracy
	AccuracyNorm *float64     `json:"accuracy_norm,omitempty"` // choice: by log-probability per token
	CI95Norm     *[2]float64  `json:"ci95_norm,omitempty"`
	Rows         int          `json:"rows"`
	BadRows      int          `json:"bad_rows"`             // left out
	Truncated    int          `json:"truncated"`            // rows whose prompt lost its beginning to the model's context
	Unfinished   *int         `json:"unfinished,omitempty"` // exact: answers cut off by --max-tokens or the context
	NoAnswer     *int         `json:"no_answer,omitempty"`  // exact: texts in which the pattern matches nothing
	Samples      []taskSample `json:"samples,omitempty"`
}

// A taskSample is one answer as --show prints it.
type taskSample struct {
	Row      int64  `json:"row"` // line of the file
	Prompt   string `json:"prompt"`
	Text     string `json:"text"`   // generated, or the choice taken
	Answer   string `json:"answer"` // found in the text
	Expected string `json:"expected"`
	Correct  bool   `json:"correct"`
}

// A tasker works on the rows of one task.
type tasker struct {
	*taskFlags
	m        *train.Model
	template chat.Template // nil: plain text
	batch    int
	result   taskResult
}

// run does the task over the rows of path, and says on log which rows it left out.
func (f *taskFlags) run(ctx context.Context, log io.Writer, m *train.Model, path string, batch int) (taskResult, error) {
	t := &tasker{taskFlags: f, m: m, batch: batch, result: taskResult{Task: f.task}}
	if m.Chunk.Config().Score {
		return t.result, usagef("--task %s: checkpoint %s is a reward model, which has no probabilities of tokens", f.task, m.Dir)
	}
	if f.chat {
		var err error
		if t.template, err = chat.OpenTemplate(f.template); err != nil {
			return t.result, usagef("--template %s: %w", f.template, err)
		}
	}
	rows, bad, err := readQuestions(ctx, path, f.task, f.limit)
	if err != nil {
		return t.result, usage(err)
	}
	for _, b := range bad {
		fmt.Fprintln(log, "bad row:", b)
	}
	t.result.Rows, t.result.BadRows = len(rows), len(bad)
	if f.task == taskChoice {
		err = t.choose(ctx, rows)
	} else {
		err = t.answer(rows)
	}
	return t.result, err
}

// prompt is the text of a row's question in its format.
func (t *tasker) prompt(q question) string {
	return strings.ReplaceAll(strings.ReplaceAll(t.format, `\n`, "\n"), questionMark, q.text)
}

// settle turns the number of right rows into an accuracy with its interval.
func (t *tasker) settle(right int) (float64, [2]float64) {
	return float64(right) / float64(t.result.Rows), wilson(right, t.result.Rows)
}

// wilson is the 95 % score interval of a share of k in n (Wilson 1927). Unlike p ± 1.96 standard errors it stays within
// [0, 1] and says something at k = 0 and k = n.
func wilson(k, n int) [2]float64 {
	const z = 1.959963984540054
	p, N := float64(k)/float64(n), float64(n)
	middle := (p + z*z/(2*N)) / (1 + z*z/N)
	half := z / (1 + z*z/N) * math.Sqrt(p*(1-p)/N+z*z/(4*N*N))
	return [2]float64{max(0, middle-half), min(1, middle+half)}
}

// A candidate is one answer of a row as the model is to score it.
type candidate struct {
	ids  []int32
	mask []bool // tokens of the answer
	n    int    // how many
}

// candidate encodes a prompt with an answer. Through a template the token that ends the turn belongs to the answer, as in
// training: without it "1" would never score below "10". Plain answers are joined by a space where there is none, and end
// with their last token.
func (t *tasker) candidate(prompt, answer string) (c candidate, err error) {
	tok := t.m.Tokenizer
	if t.template != nil {
		pieces, err := t.template.Render([]chat.Message{{Role: chat.User, Content: prompt}, {Role: chat.Assistant, Content: answer}}, false)
		if err != nil {
			return c, err
		}
		if c.ids, c.mask, _, err = chat.Encode(tok, pieces); err != nil {
			return c, err
		}
		last := len(c.ids)
		for last > 0 && !c.mask[last-1] {
			last-- // what a template writes after the turn
		}
		c.ids, c.mask = c.ids[:last], c.mask[:last]
	} else {
		c.ids = plainPrompt(tok, prompt)
		if prompt != "" && !strings.HasSuffix(prompt, " ") && !strings.HasSuffix(prompt, "\n") && !strings.HasPrefix(answer, " ") {
			answer = " " + answer
		}
		c.mask = make([]bool, len(c.ids))
		for _, id := range tok.Encode(answer) {
			c.ids, c.mask = append(c.ids, id), append(c.mask, true)
		}
	}
	for _, on := range c.mask {
		if on {
			c.n++
		}
	}
	return c, nil
}

// plainPrompt is a prompt without a template. An empty one is the end of another text.
func plainPrompt(tok data.Tokenizer, prompt string) []int32 {
	if ids := tok.Encode(prompt); len(ids) > 0 {
		return ids
	}
	return []int32{tok.EOS()}
}

// choose scores every choice of every row by its log-probability after the prompt, batch of them at a time, which changes no
// score. The choice of the highest wins, of equal ones the first.
func (t *tasker) choose(ctx context.Context, rows []question) error {
	longest := t.m.Run.Model.Context
	type place struct{ row, choice int }
	var (
		pending []candidate
		places  []place
		scores  = make([][]float64, len(rows))
		lengths = make([][]int, len(rows))
	)
	flush := func() error {
		sums, err := t.score(ctx, pending)
		if err != nil {
			return err
		}
		for i, p := range places {
			scores[p.row][p.choice] = sums[i]
		}
		pending, places = pending[:0], places[:0]
		return nil
	}
	for r, q := range rows {
		prompt, cut := t.prompt(q), false
		scores[r], lengths[r] = make([]float64, len(q.choices)), make([]int, len(q.choices))
		for i, choice := range q.choices {
			c, err := t.candidate(prompt, choice)
			switch {
			case err != nil:
				return fmt.Errorf("%s: %w", q.at(), err)
			case c.n == 0:
				return usagef("%s: choice %d has no token", q.at(), i)
			case c.n > longest:
				return usagef("%s: choice %d has %d tokens, more than model.context=%d", q.at(), i, c.n, longest)
			}
			if over := len(c.ids) - 1 - longest; over > 0 { // the last token is only predicted
				c.ids, c.mask, cut = c.ids[over:], c.mask[over:], true
			}
			lengths[r][i] = c.n
			pending, places = append(pending, c), append(places, place{r, i})
			if len(pending) == t.batch {
				if err := flush(); err != nil {
					return err
				}
			}
		}
		if cut {
			t.result.Truncated++
		}
	}
	if err := flush(); err != nil {
		return err
	}
	right, rightNorm := 0, 0
	for r, q := range rows {
		best, bestNorm := 0, 0
		for i, s := range scores[r] {
			if s > scores[r][best] {
				best = i
			}
			if s/float64(lengths[r][i]) > scores[r][bestNorm]/float64(lengths[r][bestNorm]) {
				bestNorm = i
			}
		}
		correct := q.choices[best] == q.choices[q.right] // a file may list a choice twice
		if correct {
			right++
		}
		if q.choices[bestNorm] == q.choices[q.right] {
			rightNorm++
		}
		if r < t.show {
			t.result.Samples = append(t.result.Samples, taskSample{q.line, t.prompt(q), q.choices[best], q.choices[best], q.choices[q.right], correct})
		}
	}
	t.result.Accuracy, t.result.CI95 = t.settle(right)
	norm, interval := t.settle(rightNorm)
	t.result.AccuracyNorm, t.result.CI95Norm = &norm, &interval
	return nil
}

// score returns the log-probability of each candidate's answer.
func (t *tasker) score(ctx context.Context, list []candidate) ([]float64, error) {
	if len(list) == 0 {
		return nil, nil
	}
	m := model.Micro{Seqs: len(list)}
	for _, c := range list {
		m.Len = max(m.Len, len(c.ids)-1)
	}
	for _, c := range list {
		n := len(c.ids) - 1
		m.Valid = append(m.Valid, int32(n))
		for i := range m.Len {
			if i >= n {
				m.Tokens, m.Targets, m.Weight = append(m.Tokens, t.m.Tokenizer.Pad()), append(m.Targets, t.m.Tokenizer.Pad()), append(m.Weight, 0)
				continue
			}
			var w float32
			if c.mask[i+1] {
				w = 1
			}
			m.Tokens, m.Targets, m.Weight = append(m.Tokens, c.ids[i]), append(m.Targets, c.ids[i+1]), append(m.Weight, w)
		}
	}
	t.m.Chunk.Bind([]model.Micro{m}, model.Settings{})
	if _, err := t.m.Chunk.Evaluate(ctx, 0, nil); err != nil {
		return nil, err
	}
	if n := t.m.Chunk.NonFinite(); n != nil {
		return nil, n
	}
	return t.m.Chunk.LogProbs(0), nil
}

// answer generates an answer to every row, always the most likely token, and compares what the pattern finds in it.
func (t *tasker) answer(rows []question) error {
	d, err := model.NewDecoder(t.m.Chunk)
	if err != nil {
		return err
	}
	greedy, err := model.NewSampler(model.Sampling{})
	if err != nil {
		return err
	}
	match := newMatcher(t.pattern)
	right, unfinished, none := 0, 0, 0
	for r, q := range rows {
		prompt := t.prompt(q)
		ids, err := t.promptIDs(prompt)
		if err != nil {
			return fmt.Errorf("%s: %w", q.at(), err)
		}
		// An answer has at least half the context, or all it may need.
		if room := t.m.Run.Model.Context - min(t.maxTokens, t.m.Run.Model.Context/2); len(ids) > room {
			ids = ids[len(ids)-room:]
			t.result.Truncated++
		}
		text, ended, err := t.generate(d, greedy, ids)
		if err != nil {
			return fmt.Errorf("%s: %w", q.at(), err)
		}
		if !ended {
			unfinished++
		}
		expected := match.expected(q.answer)
		got, found := match.find(text, expected)
		if !found {
			none++
		}
		correct := found && equalAnswers(got, expected)
		if correct {
			right++
		}
		if r < t.show {
			t.result.Samples = append(t.result.Samples, taskSample{q.line, prompt, text, got, expected, correct})
		}
	}
	t.result.Accuracy, t.result.CI95 = t.settle(right)
	t.result.Unfinished, t.result.NoAnswer = &unfinished, &none
	return nil
}

// promptIDs encodes a prompt and what stands before an answer.
func (t *tasker) promptIDs(prompt string) ([]int32, error) {
	if t.template == nil {
		return plainPrompt(t.m.Tokenizer, prompt), nil
	}
	pieces, err := t.template.Render([]chat.Message{{Role: chat.User, Content: prompt}}, true)
	if err != nil {
		return nil, err
	}
	ids, _, _, err := chat.Encode(t.m.Tokenizer, pieces)
	return ids, err
}

// generate continues ids until a special token (the end of a text or of a turn, the start of another), which is not part of
// the text, or until the tokens or the context are used up.
func (t *tasker) generate(d *model.Decoder, s *model.Sampler, ids []int32) (text string, ended bool, err error) {
	tok := t.m.Tokenizer
	d.Reset()
	logits, err := d.Prefill(ids)
	if err != nil {
		return "", false, err
	}
	var out []int32
	for {
		next := s.Next(logits)
		if tok.Special(next) != "" && tok.Decode([]int32{next}) == "" { // an unknown character is text
			return tok.Decode(out), true, nil
		}
		if out = append(out, next); len(out) == t.maxTokens || d.Len() == t.m.Run.Model.Context {
			return tok.Decode(out), false, nil
		}
		if logits, err = d.Step(next); err != nil {
			return "", false, err
		}
	}
}

// print writes a result for people.
func (r taskResult) print(w io.Writer) {
	for _, s := range r.Samples {
		mark := "wrong"
		if s.Correct {
			mark = "right"
		}
		fmt.Fprintf(w, "row %d: %s\n  -> %s\n  %s: %q, expected %q\n", s.Row, s.Prompt, s.Text, mark, s.Answer, s.Expected)
	}
	fmt.Fprintf(w, "accuracy %.4f  95 %% interval %.4f to %.4f  over %d rows\n", r.Accuracy, r.CI95[0], r.CI95[1], r.Rows)
	if r.AccuracyNorm != nil {
		fmt.Fprintf(w, "accuracy by log-probability per token %.4f  95 %% interval %.4f to %.4f\n", *r.AccuracyNorm, r.CI95Norm[0], r.CI95Norm[1])
	}
	if r.NoAnswer != nil {
		fmt.Fprintf(w, "no answer found in %d, cut off %d\n", *r.NoAnswer, *r.Unfinished)
	}
	if r.Truncated > 0 {
		fmt.Fprintf(w, "prompts longer than the context, their beginning cut: %d\n", r.Truncated)
	}
	if r.BadRows > 0 {
		fmt.Fprintf(w, "bad rows left out: %d\n", r.BadRows)
	}
}
