package train

import (
	"context"
	"fmt"

	"moetor/configs"
	"moetor/data"
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

// OpenCorpus opens the sources of stage i. The first process to do so tokenises them; the others find the tokens in
// the cache.
func OpenCorpus(ctx context.Context, run *configs.Run, i int, tok data.Tokenizer) (*data.Corpus, error) {
	s := &run.Stages[i]
	return data.Open(ctx, data.OpenConfig{Sources: s.Data, Val: s.Val, Pack: s.Pack, Tokenizer: tok, Len: run.Model.Context,
		Seed: run.Run.Seed, Cache: run.Run.Cache, At: fmt.Sprintf("stages.%d", i)})
}
