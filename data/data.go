// Package data reads text into samples for training: documents of files, tokens of documents, samples of tokens.
//
// The sequence of samples is one global sequence, whatever the number of ranks. It follows from the configuration, the
// tokens and the seed alone, and any sample of it can be read by its index. So a position is one number, and a run that is
// resumed on another mesh neither repeats nor loses a sample.
package data

import "context"

// A Batch is Seqs rows of Len tokens. Row r is the elements [r*Len, (r+1)*Len) of Tokens, Targets and Weight. Real tokens
// come first in a row, padding (the tokenizer's pad id, weight 0) after them.
type Batch struct {
	Seqs, Len       int
	Tokens, Targets []int32   // Seqs*Len; Targets[i] is the token after Tokens[i] in the text
	Weight          []float32 // Seqs*Len: share of each target in the loss
	Starts          []int32   // attention segment bounds as flat row numbers, ascending, Starts[0]==0; each row begins one
	Valid           []int32   // Seqs: real tokens of each row; the others must count nowhere, in no routing statistic either

	IDs    []int64 // Seqs: number of each sequence's example in an epoch of its source, both of a pair the pair's; nil for documents
	Labels []int8  // Seqs: +1 chosen or desirable, -1 rejected or undesirable; nil without preferences
	Pairs  bool    // sequences 2i and 2i+1 are the chosen and the rejected answer of one pair
}

// reset makes b hold seqs rows of n tokens of any content, in the memory it has if that is enough.
func (b *Batch) reset(seqs, n int) {
	b.Seqs, b.Len = seqs, n
	b.Tokens = sized(b.Tokens, seqs*n)
	b.Targets = sized(b.Targets, seqs*n)
	b.Weight = sized(b.Weight, seqs*n)
	b.Valid = sized(b.Valid, seqs)
	b.Starts = b.Starts[:0]
	b.IDs, b.Labels, b.Pairs = nil, nil, false
}

func sized[T any](s []T, n int) []T {
	if cap(s) < n {
		return make([]T, n)
	}
	return s[:n]
}

// A Source yields the same global sequence of samples whatever the number of ranks. Its position is one global sample
// index; the seed and everything else is in its construction. It may be read from several goroutines.
type Source interface {
	// Read fills b with samples [first, first+n) of the endless global sequence (epoch after epoch). n may be 0. It costs
	// O(n) at any first, and allocates nothing once b has been as large.
	Read(ctx context.Context, first int64, n int, b *Batch) error
	Samples() int64      // samples of one epoch
	Fingerprint() string // of data, tokenizer, packing and seed: a resume with another is refused
}
