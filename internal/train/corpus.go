package train

import (
	"context"
	"errors"
	"fmt"

	"moetor/configs"
	"moetor/data"
	"moetor/data/chat"
	"moetor/internal/train/objective"
)

// OpenTokenizer makes the tokenizer of a run and gives the model its vocabulary, where the configuration leaves that to
// the tokenizer. Stages share one tokenizer: the first stage's sources decide a vocabulary of characters.
func OpenTokenizer(run *configs.Run) (data.Tokenizer, error) {
	tok, err := data.NewTokenizer(run.Tokenizer, run.Stages[0].Data)
	if err != nil {
		return nil, err
	}
	switch v := run.Model.VocabSize; {
	case v == 0:
		run.Model.VocabSize = tok.Size()
	case v < tok.Size():
		return nil, fmt.Errorf("model.vocab=%d is smaller than the %d tokens of tokenizer.kind=%s", v, tok.Size(), tok.Kind())
	}
	return tok, nil
}

// A Corpus is the opened data of a stage.
type Corpus struct {
	Train, Val data.Source // Val may be nil
	// Scan has the samples of an epoch of Train once, by ID. Mismatch, ValMismatch and ScanMismatch have, at the same places,
	// the prompts with answers to others. All nil where the objective compares with nothing.
	Scan, Mismatch, ValMismatch, ScanMismatch data.Source
	Lines                                     []string // what was found, a line per source
	Notes                                     []string // what the user should know
	close                                     func() error
}

// Close frees what the sources map.
func (c *Corpus) Close() error { return c.close() }

// OpenCorpus opens the sources of stage i: documents, conversations, pairs or single judged answers, as the objective
// asks and as the files are. The first process to do so tokenises documents; the others find them in the cache.
func OpenCorpus(ctx context.Context, run *configs.Run, i int, tok data.Tokenizer) (*Corpus, error) {
	s := &run.Stages[i]
	at := fmt.Sprintf("stages.%d", i)
	_, needs, err := objective.New(s.Objective, s.Preference)
	if err != nil {
		return nil, err
	}
	cfg := chat.OpenConfig{Sources: s.Data, Val: s.Val, Chat: s.Chat, Tokenizer: tok, Len: run.Model.Context, Seed: run.Run.Seed, At: at, Score: needs.Score}
	open := chat.OpenPreference
	switch {
	case needs.Unpaired:
		open = chat.OpenUnpaired
	case !needs.Pairs:
		talk, err := chat.Sniff(ctx, s.Data, at)
		if err != nil {
			return nil, err
		}
		if !talk {
			return openDocuments(ctx, run, i, tok, at)
		}
		open = chat.OpenInstruct
	}
	c, err := open(ctx, cfg)
	if err != nil {
		return nil, err
	}
	out := &Corpus{Train: c.Train, Val: c.Val, Scan: c.Scan, Mismatch: c.Mismatch, ValMismatch: c.ValMismatch, ScanMismatch: c.ScanMismatch, Notes: c.Report.Notes, close: c.Close}
	for _, l := range c.Report.Sources {
		out.Lines = append(out.Lines, l.String())
	}
	if out.Train == nil {
		return nil, errors.Join(fmt.Errorf("%s.data holds no example to train on", at), c.Close())
	}
	return out, nil
}

func openDocuments(ctx context.Context, run *configs.Run, i int, tok data.Tokenizer, at string) (*Corpus, error) {
	s := &run.Stages[i]
	c, err := data.Open(ctx, data.OpenConfig{Sources: s.Data, Val: s.Val, Pack: s.Pack, Tokenizer: tok, Len: run.Model.Context,
		Seed: run.Run.Seed, Cache: run.Run.Cache, At: at})
	if err != nil {
		return nil, err
	}
	out := &Corpus{Train: c.Train, Val: c.Val, Notes: c.Report.Notes, close: c.Close}
	for _, r := range c.Report.Sources {
		out.Lines = append(out.Lines, r.String())
		for _, b := range r.Bad {
			out.Lines = append(out.Lines, "  bad line: "+b.String())
		}
	}
	return out, nil
}
