package data

import (
	"fmt"
	"math"
	"slices"
	"strings"
)

// DefaultMaxBadShare is SourceConfig.MaxBadShare where it is left out: one line in a hundred.
const DefaultMaxBadShare = 0.01

// A SourceConfig names documents and how often they are read.
type SourceConfig struct {
	// Path is a file, a glob (its matches are read in sorted order, as one source) or embedded:NAME. Compression (gzip,
	// zstd) is recognised by content. Names ending in .jsonl, .ndjson or .json, with or without .gz or .zst, hold one JSON
	// object per line and each is a document; any other file is one document of plain text.
	Path string `yaml:"path"`
	// Weight is this source's part of all samples, relative to the other weights of the list. With no weight in the whole
	// list the sources are read as if they were one: every sample of each once per epoch.
	Weight float64 `yaml:"weight"`
	// Field of the JSON object that holds the text; "text" if left out.
	Field string `yaml:"field"`
	// Format overrides the file name: text or jsonl.
	Format string `yaml:"format"`
	// MaxBadShare is the largest share of bad lines (no JSON, field missing or not a string, broken UTF-8 or escapes) that
	// is skipped and reported; above it the source is refused. DefaultMaxBadShare if left out; 0 allows none.
	MaxBadShare *float64 `yaml:"max_bad_share"`
}

func (c SourceConfig) field() string {
	if c.Field == "" {
		return "text"
	}
	return c.Field
}

func (c SourceConfig) maxBadShare() float64 {
	if c.MaxBadShare == nil {
		return DefaultMaxBadShare
	}
	return *c.MaxBadShare
}

// Resolved returns c with its defaults spelled out, the weight aside (0 has a meaning for a whole list).
func (c SourceConfig) Resolved() SourceConfig {
	share := c.maxBadShare()
	c.Field, c.MaxBadShare = c.field(), &share
	return c
}

// Validate returns what is wrong with c without looking at files. Errors begin with the setting's name under at, such as
// "stages.0.data.1".
func (c SourceConfig) Validate(at string) []error {
	var errs []error
	if err := checkPath(key(at, "path"), c.Path); err != nil {
		errs = append(errs, err)
	}
	if !(c.Weight >= 0) || math.IsInf(c.Weight, 0) {
		errs = append(errs, fmt.Errorf("%s=%v: a weight is a number above 0", key(at, "weight"), c.Weight))
	}
	if c.Format != "" && c.Format != formatText && c.Format != formatJSONL {
		errs = append(errs, fmt.Errorf("%s=%s: want %s or %s", key(at, "format"), c.Format, formatText, formatJSONL))
	}
	if s := c.maxBadShare(); !(s >= 0 && s <= 1) {
		errs = append(errs, fmt.Errorf("%s=%v: a share lies between 0 and 1", key(at, "max_bad_share"), s))
	}
	return errs
}

// ValidateSources is Validate for every source of a list, whose name is at, and for their weights together.
func ValidateSources(at string, list []SourceConfig) []error {
	var errs []error
	set, unset := -1, -1
	for i, c := range list {
		errs = append(errs, c.Validate(key(at, fmt.Sprint(i)))...)
		if c.Weight == 0 && unset < 0 {
			unset = i
		} else if c.Weight != 0 && set < 0 {
			set = i
		}
	}
	if set >= 0 && unset >= 0 {
		errs = append(errs, fmt.Errorf("%s=0 but %s=%v: give all sources a weight above 0, or none; to switch a source off leave it out",
			key(at, fmt.Sprintf("%d.weight", unset)), key(at, fmt.Sprintf("%d.weight", set)), list[set].Weight))
	}
	if len(list) > maxSources {
		errs = append(errs, fmt.Errorf("%s: %d sources, at most %d; use globs", at, len(list), maxSources))
	}
	return errs
}

// A ValConfig says what is held out for validation: a share of the training sources or sources of its own. Neither: none.
type ValConfig struct {
	// Share of the tokens at the end of every source. The cut moves to the nearest document bound where that changes the
	// held-out amount by half at most, and else (one long text) lies inside a document.
	Share float64 `yaml:"share"`
	// Data is an explicit list; weights have no meaning here. A file that is also trained on is refused.
	Data []SourceConfig `yaml:"data"`
}

// Validate returns what is wrong with c without looking at files.
func (c ValConfig) Validate(at string) []error {
	var errs []error
	if !(c.Share >= 0 && c.Share < 1) {
		errs = append(errs, fmt.Errorf("%s=%v: a share lies between 0 and 1", key(at, "share"), c.Share))
	}
	if c.Share != 0 && len(c.Data) > 0 {
		errs = append(errs, fmt.Errorf("%s=%v and %s: set one of the two", key(at, "share"), c.Share, key(at, "data")))
	}
	for i, s := range c.Data {
		here := key(at, fmt.Sprintf("data.%d", i))
		errs = append(errs, s.Validate(here)...)
		if s.Weight != 0 {
			errs = append(errs, fmt.Errorf("%s.weight=%v: has no effect, validation reads every sample once", here, s.Weight))
		}
	}
	return errs
}

// A PackConfig says how documents become samples of one length.
type PackConfig struct {
	// Isolate keeps documents apart: attention and positions start anew with each document and no target lies in another
	// document. False is DeepSeek-V3's pretraining: documents run on, separated by the end-of-document token.
	Isolate bool `yaml:"isolate"`
	// DropTail leaves out a training source's last sample when it is not full. False pads it, so that no token is lost.
	DropTail bool `yaml:"drop_tail"`
}

// A TokenizerConfig chooses a tokenizer.
type TokenizerConfig struct {
	Kind string `yaml:"kind"` // byte | char
	File string `yaml:"file"` // char: source path whose characters are the vocabulary ("" = the stage's first source)
}

// Validate returns what is wrong with c without looking at files.
func (c TokenizerConfig) Validate(at string) []error {
	if !slices.Contains(TokenizerKinds(), c.Kind) {
		return []error{fmt.Errorf("%s=%s: want %s", key(at, "kind"), c.Kind, strings.Join(TokenizerKinds(), " or "))}
	}
	if c.Kind != KindChar && c.File != "" {
		return []error{fmt.Errorf("%s=%s: has no effect with %s=%s", key(at, "file"), c.File, key(at, "kind"), c.Kind)}
	}
	if c.File != "" {
		if err := checkPath(key(at, "file"), c.File); err != nil {
			return []error{err}
		}
	}
	return nil
}

// checkPath refuses a path, the setting called name, that cannot be a source on any machine.
func checkPath(name, path string) error {
	text, embedded := strings.CutPrefix(path, embeddedPrefix)
	switch {
	case path == "":
		return fmt.Errorf("%s: names no file", name)
	case embedded && embeddedFiles[text] == "":
		return fmt.Errorf("%s=%s: no such embedded text; there is %s", name, path, embeddedNames())
	case strings.Contains(path, "**"):
		return fmt.Errorf("%s=%s: ** is not supported; one * per folder level, or several sources", name, path)
	}
	return nil
}

// key joins the names of nested settings. A flag of the command line ("--data") has no parts.
func key(at, name string) string {
	switch {
	case at == "":
		return name
	case strings.HasPrefix(at, "--"):
		return at
	}
	return at + "." + name
}
