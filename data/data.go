// SKELETON (data author owns)
package data

import "context"

// A Batch is Seqs rows of Len tokens.
type Batch struct {
	Seqs, Len       int
	Tokens, Targets []int32   // Seqs*Len; Targets[i] is the next token
	Weight          []float32 // share of each target in the loss
	Starts          []int32   // attention segment bounds as flat row numbers, ascending, Starts[0]==0
}

// A Source yields the same global sequence of samples whatever the number of ranks. Its position is one global sample
// index; the seed and everything else is in its construction.
type Source interface {
	// Read fills b with samples [first, first+n) of the endless global sequence (epoch after epoch). n may be 0.
	Read(ctx context.Context, first int64, n int, b *Batch) error
	Samples() int64      // samples of one epoch
	Fingerprint() string // of data, tokenizer, packing and seed: a resume with another is refused
}

// Tokenizer: byte and character kinds here.
type Tokenizer interface {
	Kind() string
	Size() int // vocabulary, special tokens included
	Encode(text string) []int32
	Decode(ids []int32) string
	EOS() int32
	Marshal() ([]byte, error) // stored in checkpoints; data.LoadTokenizer restores
}

type TokenizerConfig struct {
	Kind string `yaml:"kind"` // byte | char
	File string `yaml:"file"` // char: text whose characters are the vocabulary ("" = the stage's first source)
}

type SourceConfig struct {
	Path   string  `yaml:"path"` // file, glob, or embedded:NAME; .txt or .jsonl, plain, .gz or .zst
	Weight float64 `yaml:"weight"`
	Field  string  `yaml:"field"` // JSONL: the text's field; default "text"
}
