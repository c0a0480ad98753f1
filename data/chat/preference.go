package chat

import (
	"context"
	"errors"
	"fmt"
	"slices"

	"moetor/data"
)

// lenStep is what the length of a batch of sequences is a multiple of, where the context allows: batches then have few
// different lengths.
const lenStep = 16

// OpenPreference reads pairs of answers. A sample is one sequence, prompt and answer: sample 2i is the chosen and sample 2i+1
// the rejected one of a pair, and a batch is as long as its longest sequence, rounded up to a multiple of 16 but not above
// cfg.Len. Weights are 1 on the answer's turns of the assistant, the token that ends them included. Both sequences of a pair
// have the same prompt to the token, whatever was truncated. Errors name the setting, or the file and row.
func OpenPreference(ctx context.Context, cfg OpenConfig) (*Corpus, error) {
	return openAnswers(ctx, cfg, Preference, []Shape{PreferenceExplicit, PreferenceImplicit})
}

// OpenUnpaired reads answers of which each is desirable or not; of pairs, each answer for itself. A sample is one sequence as
// OpenPreference makes them.
func OpenUnpaired(ctx context.Context, cfg OpenConfig) (*Corpus, error) {
	return openAnswers(ctx, cfg, SingleLabel, []Shape{Unpaired, PreferenceExplicit, PreferenceImplicit})
}

func openAnswers(ctx context.Context, cfg OpenConfig, f Form, shapes []Shape) (*Corpus, error) {
	o, err := newOpener(cfg, f)
	if err != nil {
		return nil, err
	}
	add := o.pair
	if f == SingleLabel {
		add = o.single
	}
	if err := o.read(ctx, shapes, add); err != nil {
		return nil, err
	}
	c := o.corpus()
	if parts, weights := o.parts(); parts != nil {
		all := slices.Concat(parts...)
		counts := make([]int64, len(parts))
		for i, p := range parts {
			counts[i] = int64(len(p))
		}
		train := data.NewOrder(counts, weights, true, cfg.Seed)
		scan := data.NewOrder([]int64{int64(len(all))}, nil, false, 0)
		c.Train = o.sequences(o.answers(all), train, true, cfg.Seed, weights)
		c.Scan = o.sequences(o.answers(all), scan, false, 0, nil)
		if f == SingleLabel && !cfg.Score {
			other, err := o.mismatched(all, setting(cfg.At, "data"))
			if err != nil {
				return nil, err
			}
			c.Mismatch = o.sequences(other, train, true, cfg.Seed, weights)
			c.ScanMismatch = o.sequences(other, scan, false, 0, nil)
		}
	}
	if held := o.heldOut(); len(held) > 0 {
		order := data.NewOrder([]int64{int64(len(held))}, nil, false, 0)
		c.Val = o.sequences(o.answers(held), order, false, 0, nil)
		if f == SingleLabel && !cfg.Score {
			other, err := o.mismatched(held, setting(cfg.At, "val"))
			if err != nil {
				return nil, err
			}
			c.ValMismatch = o.sequences(other, order, false, 0, nil)
		}
	}
	return c, nil
}

// An answered is a prompt and an answer in tokens: the answer from its first trained token to its last.
type answered struct {
	prompt  []int32
	answer  []int32
	trained []bool // of answer
}

func (a answered) len() int64 { return int64(len(a.prompt) + len(a.answer)) }

// answered encodes a prompt and a completion.
func (o *opener) answered(s *source, prompt, completion []Message) (answered, error) {
	ids, trained, turn, err := o.encode(s, append(append(make([]Message, 0, len(prompt)+len(completion)), prompt...), completion...))
	if err != nil {
		return answered{}, err
	}
	from, to := -1, -1
	for i := range ids {
		if trained[i] && int(turn[i]) >= len(prompt) {
			if from < 0 {
				from = i
			}
			to = i + 1
		}
	}
	switch {
	case from < 0:
		return answered{}, errors.New("the template makes no token of the answer")
	case from == 0:
		return answered{}, errors.New("the template puts no token before the answer: a prompt is missing")
	}
	return answered{ids[:from], ids[from:to], trained[from:to]}, nil
}

// fit returns how many tokens of a prompt and of answers of which the longest has longest tokens are kept: the prompt loses
// its beginning first, but for the token that the answer's first is predicted from, and then the answers lose their ends. So
// a token of each answer is kept always: cap is at least 2.
func (o *opener) fit(prompt, longest int64) (keepPrompt, keepAnswer int64) {
	keepPrompt = min(prompt, max(o.cap-longest, 1))
	return keepPrompt, o.cap - keepPrompt
}

// pair is the adder of pairs.
func (o *opener) pair(s *source, e Example) error {
	chosen, err := o.answered(s, e.Prompt, e.Chosen)
	if err != nil {
		return err
	}
	rejected, err := o.answered(s, e.Prompt, e.Rejected)
	if err != nil {
		return err
	}
	if !slices.Equal(chosen.prompt, rejected.prompt) {
		return errors.New("the template writes the prompt differently before the two answers")
	}
	o.add(s, e.Prompt, 0, chosen, rejected)
	return nil
}

// single is the adder of labelled answers, and of pairs as two of them.
func (o *opener) single(s *source, e Example) error {
	type labelled struct {
		completion []Message
		label      int8
	}
	list := []labelled{{e.Completion, -1}}
	switch {
	case e.Chosen != nil:
		list = []labelled{{e.Chosen, 1}, {e.Rejected, -1}}
	case e.Label:
		list[0].label = 1
	}
	done := make([]answered, len(list))
	for i, l := range list { // all or none
		var err error
		if done[i], err = o.answered(s, e.Prompt, l.completion); err != nil {
			return err
		}
	}
	for i, l := range list {
		o.add(s, e.Prompt, l.label, done[i])
	}
	return nil
}

// add takes an example with one answer or two to its prompt into s, or counts why not.
func (o *opener) add(s *source, prompt []Message, label int8, answers ...answered) {
	all, longest := int64(0), int64(0)
	for _, a := range answers {
		all += a.len()
		longest = max(longest, int64(len(a.answer)))
	}
	s.ledger.Read.add(all)
	if o.cfg.Chat.Truncate == TruncateDrop && int64(len(answers[0].prompt))+longest > o.cap {
		s.ledger.Long.add(all)
		return
	}
	keepPrompt, keepAnswer := o.fit(int64(len(answers[0].prompt)), longest)
	for i := range answers {
		a := &answers[i]
		n := min(int64(len(a.answer)), keepAnswer)
		a.answer, a.trained = a.answer[:n], a.trained[:n]
	}
	if len(answers) == 2 && slices.Equal(answers[0].answer, answers[1].answer) {
		s.ledger.Equal.add(all)
		return
	}
	// The whole prompt is stored: beside another answer a different part of it fits.
	first := answers[0]
	e := example{label: label, key: keyOf(prompt), prompt: o.store(first.prompt, make([]bool, len(first.prompt)))}
	for i, a := range answers {
		e.answers[i] = o.store(a.answer, a.trained)
		e.tokens += keepPrompt + e.answers[i].len()
		e.trained += o.trained(e.answers[i])
	}
	if o.cfg.Score { // one token of each sequence has a weight
		e.trained = int64(len(answers))
	}
	if e.tokens < all {
		s.ledger.Truncated.add(all - e.tokens)
	}
	s.examples = append(s.examples, e)
}

// A sequence is a prompt and an answer that fit the context.
type sequence struct {
	prompt, answer span
	label          int8
}

func (s sequence) tokens() int64 { return s.prompt.len() + s.answer.len() }

// cut makes e's prompt and an answer of tokens a sequence beside one of longest tokens.
func (o *opener) cut(prompt, answer span, longest int64, label int8) sequence {
	keepPrompt, keepAnswer := o.fit(prompt.len(), longest)
	prompt.lo = prompt.hi - keepPrompt
	answer.hi = min(answer.hi, answer.lo+keepAnswer)
	return sequence{prompt, answer, label}
}

// answers are the sequences of examples, of pairs two for each.
func (o *opener) answers(examples []example) []sequence {
	var out []sequence
	for _, e := range examples {
		if o.form == Preference {
			longest := max(e.answers[0].len(), e.answers[1].len())
			out = append(out, o.cut(e.prompt, e.answers[0], longest, 1), o.cut(e.prompt, e.answers[1], longest, -1))
		} else {
			out = append(out, o.cut(e.prompt, e.answers[0], e.answers[0].len(), e.label))
		}
	}
	return out
}

// mismatched are the sequences of each example's prompt with another example's answer: that of the example a seeded number
// of places on, or the first after it with another prompt.
func (o *opener) mismatched(examples []example, at string) ([]sequence, error) {
	n := len(examples)
	// next[j] is the first place after j, around the end, whose prompt is not that of j.
	next := make([]int, n)
	for i := 2*n - 1; i >= 0; i-- {
		j, after := i%n, (i+1)%n
		if examples[j].key != examples[after].key {
			next[j] = after
		} else if i < 2*n-1 {
			next[j] = next[after]
		} else {
			next[j] = j // not known yet; the second time around it is
		}
	}
	shift := 1
	if n > 1 {
		shift += int(data.Permuted(0, int64(n-1), o.cfg.Seed))
	}
	out := make([]sequence, n)
	for i, e := range examples {
		j := (i + shift) % n
		if examples[j].key == e.key {
			j = next[j]
		}
		if examples[j].key == e.key {
			return nil, fmt.Errorf("%s: all %d examples have one prompt; the KL estimate of kto pairs prompts with answers to others", at, n)
		}
		a := examples[j].answers[0]
		out[i] = o.cut(e.prompt, a, a.len(), e.label)
	}
	return out, nil
}

// A sequenceSource is the Source of sequences.
type sequenceSource struct {
	view
	list  []sequence
	per   int // sequences of an example
	score bool
}

func (o *opener) sequences(list []sequence, order *data.Order, shuffle bool, seed uint64, weights []float64) *sequenceSource {
	s := &sequenceSource{list: list, per: 1, score: o.cfg.Score}
	if o.form == Preference {
		s.per = 2
	}
	s.view = o.view(order, shuffle, seed, weights, func(d *digest) {
		for _, q := range list {
			d.printf("%d\n", q.label)
			d.span(q.prompt)
			d.span(q.answer)
		}
	})
	return s
}

func (s *sequenceSource) Samples() int64 { return s.order.Samples() * int64(s.per) }

func (s *sequenceSource) Read(ctx context.Context, first int64, n int, b *data.Batch) error {
	if err := s.begin(ctx, first, n); err != nil {
		return err
	}
	per := int64(s.per)
	if first%per != 0 || int64(n)%per != 0 {
		return fmt.Errorf("chat: samples [%d, %d) cut a pair in two: parallel.microbatch and the batch size must be even",
			first, first+int64(n))
	}
	// The longest sequence first: it gives the batch its length.
	longest := int64(2)
	for g := first / per; g < (first+int64(n))/per; g++ {
		_, k := s.order.At(g)
		for i := range per {
			longest = max(longest, s.list[k*per+i].tokens())
		}
	}
	if !s.score {
		longest--
	}
	b.Reset(n, min(s.len, int(longest+lenStep-1)/lenStep*lenStep), true)
	b.Pairs = s.per == 2
	for r := range n {
		_, k := s.order.At((first + int64(r)) / per)
		q := s.list[k*per+int64(r)%per]
		b.IDs[r], b.Labels[r] = k, q.label
		b.Starts = append(b.Starts, int32(r*b.Len))
		s.padRow(b, r, s.put(b, r*b.Len, q.prompt, q.answer, s.score))
	}
	return nil
}
