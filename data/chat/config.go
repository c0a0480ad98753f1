package chat

import (
	"errors"
	"fmt"
	"slices"
	"strings"

	"moetor/data"
)

// A Form is what a corpus is made of.
type Form uint8

const (
	Instruct    Form = iota // conversations, packed into rows
	Preference              // pairs of answers
	SingleLabel             // single answers, desirable or not
)

func (f Form) String() string {
	switch f {
	case Instruct:
		return "conversations"
	case Preference:
		return "preference pairs"
	case SingleLabel:
		return "labelled answers"
	}
	return fmt.Sprintf("Form(%d)", uint8(f))
}

// Values of Config.
const (
	TrainAssistant = "assistant"
	TrainLast      = "last"
	TrainAll       = "all"

	PackFFD        = "ffd"
	PackSequential = "sequential"
	PackNone       = "none"

	TruncateHead = "head"
	TruncateTail = "tail"
	TruncateDrop = "drop"
)

// A Config says how examples become samples. A setting left out takes its default; see [Config.Resolved].
type Config struct {
	// Template writes a conversation as tokens: builtin, chatml, or the path of a tokenizer_config.json.
	Template string `yaml:"template"`
	// TrainOn says which tokens of a conversation are trained: assistant, all turns of the assistant with the token that ends
	// each; last, only the last of these turns; all, every token. Of preferences only the answers are: assistant.
	TrainOn string `yaml:"train_on"`
	// Pack says how conversations share rows: ffd, first-fit decreasing (Johnson, Near-optimal bin packing algorithms, 1973)
	// over the whole source; sequential, in their order, each into the row of the one before if it fits; none, one a row.
	// Conversations of a row do not see each other, and their positions start at 0. Preferences have a row for each answer:
	// none.
	Pack string `yaml:"pack"`
	// Truncate is for an example longer than the context. Of a conversation tail leaves out the end and head the beginning;
	// it is dropped when no trained token is left, and always with drop. Of preferences the beginning of the prompt is left
	// out (head), then the ends of the answers; or the example is dropped (drop).
	Truncate string `yaml:"truncate"`
}

// values that each setting may have, the default first.
func (f Form) values() (trainOn, pack, truncate []string) {
	if f == Instruct {
		return []string{TrainAssistant, TrainLast, TrainAll}, []string{PackFFD, PackSequential, PackNone},
			[]string{TruncateTail, TruncateHead, TruncateDrop}
	}
	return []string{TrainAssistant}, []string{PackNone}, []string{TruncateHead, TruncateDrop}
}

// Resolved returns c with its defaults spelled out.
func (c Config) Resolved(f Form) Config {
	trainOn, pack, truncate := f.values()
	set := func(s *string, to string) {
		if *s == "" {
			*s = to
		}
	}
	set(&c.Template, "builtin")
	set(&c.TrainOn, trainOn[0])
	set(&c.Pack, pack[0])
	set(&c.Truncate, truncate[0])
	return c
}

// Validate returns what is wrong with c for a corpus of this form, without looking at files. Errors begin with the setting's
// name under at, such as "stages.1.chat".
func (c Config) Validate(at string, f Form) []error {
	var errs []error
	trainOn, pack, truncate := f.values()
	for _, s := range []struct {
		name, value string
		want        []string
	}{{"train_on", c.TrainOn, trainOn}, {"pack", c.Pack, pack}, {"truncate", c.Truncate, truncate}} {
		if s.value != "" && !slices.Contains(s.want, s.value) {
			errs = append(errs, fmt.Errorf("%s=%s: of %s want %s", setting(at, s.name), s.value, f, strings.Join(s.want, " or ")))
		}
	}
	return errs
}

// setting joins the names of nested settings. A flag of the command line ("--data") has no parts.
func setting(at, name string) string {
	switch {
	case at == "":
		return name
	case strings.HasPrefix(at, "--"):
		return at
	}
	return at + "." + name
}

// An OpenConfig says what OpenInstruct, OpenPreference and OpenUnpaired read.
type OpenConfig struct {
	Sources []data.SourceConfig // trained on; may be empty where Val.Data is not
	// Val holds out a share of the examples at the end of every source, or names sources of its own. Examples with the same
	// prompt stay together: see [Corpus].
	Val       data.ValConfig
	Chat      Config
	Tokenizer data.Tokenizer
	Len       int    // the context: tokens that a sequence gives the model at most
	Seed      uint64 // of the training order, of packing ties and of mismatched answers
	At        string // for errors: name of the settings around data, val and chat ("stages.1"), or a flag
	// Score makes sequences for a reward model, which reads a score at the last token: the weights are 1 there and 0
	// elsewhere. Not of conversations.
	Score bool
}

func (cfg *OpenConfig) check(f Form) error {
	errs := data.ValidateSources(setting(cfg.At, "data"), cfg.Sources)
	errs = append(errs, cfg.Val.Validate(setting(cfg.At, "val"))...)
	errs = append(errs, cfg.Chat.Validate(setting(cfg.At, "chat"), f)...)
	switch {
	case len(cfg.Sources) == 0 && len(cfg.Val.Data) == 0:
		errs = append(errs, fmt.Errorf("%s: names no source", setting(cfg.At, "data")))
	case cfg.Tokenizer == nil:
		errs = append(errs, errors.New("chat: no tokenizer"))
	case cfg.Len < 2 || cfg.Len > 1<<30:
		errs = append(errs, fmt.Errorf("chat: a context of %d tokens, want at least 2", cfg.Len))
	case cfg.Score && f == Instruct:
		errs = append(errs, errors.New("chat: a reward model learns from preferences, not from conversations"))
	}
	return errors.Join(errs...)
}
