package data

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"strings"
)

// CacheOff is the OpenConfig.Cache that keeps tokens in memory.
const CacheOff = "off"

// An OpenConfig says what Open reads.
type OpenConfig struct {
	Sources   []SourceConfig // trained on; may be empty where Val.Data is not
	Val       ValConfig
	Pack      PackConfig
	Tokenizer Tokenizer
	Len       int    // tokens per sample
	Seed      uint64 // of the training order
	Cache     string // directory of tokenised sources; "" = moetor/tokens in the user's cache directory; CacheOff = none
	At        string // for errors: name of the settings around data and val ("stages.0"), or the flag that gave the only source ("--data")
}

// A Corpus is the two sources of a stage.
type Corpus struct {
	// Train is shuffled anew each epoch; nil without training sources. Of weighted sources an epoch, as Samples counts it,
	// is as many samples as all sources have together, while each source runs through epochs of its own.
	Train Source
	// Val is read in order, and an epoch is the whole held-out text with each target once; nil if nothing is held out.
	Val    Source
	Report Report
	open   *openStores
}

// Close frees the mapped memory. Reading the sources afterwards is an error.
func (c *Corpus) Close() error { return c.open.close() }

// A Report says what Open found.
type Report struct {
	Sources []SourceReport // training sources, then explicit validation sources
	Notes   []string       // what the user should know and what is no error, such as an unwritable cache
}

// A SourceReport counts one source. TrainTargets + ValTargets + Dropped + FirstTokens = Tokens.
type SourceReport struct {
	Path         string
	Files        int
	Documents    int64 // with at least one token
	Empty        int64 // documents without text, left out
	Bytes        int64 // of text
	Tokens       int64 // an end-of-document token per document included
	Unknown      int64 // characters outside a char vocabulary, encoded as <unk>
	Lines        int64 // of JSONL, blank ones aside
	BadLines     int64
	Bad          []BadLine // the first few
	TrainSamples int64
	ValSamples   int64
	TrainTargets int64 // targets of one epoch
	ValTargets   int64
	Dropped      int64   // targets in no sample, by PackConfig.DropTail
	FirstTokens  int64   // tokens with none before them, which are no target: one per split, or isolated, per document
	Share        float64 // of all training samples
	Cached       bool    // the tokens were found in the cache
}

// A BadLine is a line of a JSONL file that is no document.
type BadLine struct {
	File   string
	Line   int64 // from 1, in the text once decompressed
	Reason string
}

func (b BadLine) String() string { return fmt.Sprintf("%s:%d: %s", b.File, b.Line, b.Reason) }

// String is one line for a log.
func (r SourceReport) String() string {
	var s strings.Builder
	fmt.Fprintf(&s, "%s: %d documents, %d tokens, %d samples to train on, %d to validate", r.Path, r.Documents, r.Tokens, r.TrainSamples, r.ValSamples)
	if r.Unknown > 0 {
		fmt.Fprintf(&s, ", %d unknown characters", r.Unknown)
	}
	if r.Dropped > 0 {
		fmt.Fprintf(&s, ", %d tokens dropped", r.Dropped)
	}
	if r.BadLines > 0 {
		fmt.Fprintf(&s, ", %d of %d lines bad (first: %s)", r.BadLines, r.Lines, r.Bad[0])
	}
	return s.String()
}

// loaded is a source with its tokens.
type loaded struct {
	src    SourceConfig
	at     string // name of its settings
	files  []input
	sums   [][32]byte
	store  *store
	report SourceReport
}

// name is that of the setting that holds the source's path.
func (s *loaded) name() string { return key(s.at, "path") }

// Open tokenises the sources, or finds their tokens in the cache, splits off validation and packs both. Errors name the
// setting or the file.
func Open(ctx context.Context, cfg OpenConfig) (_ *Corpus, err error) {
	if err := cfg.check(); err != nil {
		return nil, err
	}
	state, err := cfg.Tokenizer.Marshal()
	if err != nil {
		return nil, err
	}
	c := &Corpus{open: new(openStores)}
	defer func() {
		if err != nil {
			c.Close()
		}
	}()
	dir, note := cacheDir(cfg.Cache)
	c.note(note)
	l := &loader{tok: cfg.Tokenizer, state: state, dir: dir}

	var train, val []*loaded
	for i, src := range cfg.Sources {
		s, err := c.load(ctx, l, src, key(cfg.At, fmt.Sprintf("data.%d", i)))
		if err != nil {
			return nil, err
		}
		train = append(train, s)
	}
	for i, src := range cfg.Val.Data {
		s, err := c.load(ctx, l, src, key(cfg.At, fmt.Sprintf("val.data.%d", i)))
		if err != nil {
			return nil, err
		}
		if err := disjoint(s, train); err != nil {
			return nil, err
		}
		val = append(val, s)
	}

	var trainParts, valParts []part
	var weights []float64
	for _, s := range train {
		at := s.store.tokens
		if cfg.Val.Share > 0 {
			at = cut(s.store, cfg.Val.Share)
			p, err := s.part(at, s.store.tokens, cfg, true)
			if err != nil {
				return nil, err
			}
			valParts = append(valParts, p)
		}
		p, err := s.part(0, at, cfg, false)
		if err != nil {
			return nil, err
		}
		trainParts = append(trainParts, p)
		if s.src.Weight > 0 {
			weights = append(weights, s.src.Weight)
		}
	}
	for _, s := range val {
		p, err := s.part(0, s.store.tokens, cfg, true)
		if err != nil {
			return nil, err
		}
		valParts = append(valParts, p)
	}
	if len(trainParts) > 0 {
		seq := newSequence(c.open, trainParts, weights, true, cfg.Seed, state)
		for i, s := range train {
			s.report.Share = seq.share(i)
		}
		c.Train = seq
	}
	if len(valParts) > 0 {
		c.Val = newSequence(c.open, valParts, nil, false, 0, state)
	}
	for _, s := range append(train, val...) {
		c.Report.Sources = append(c.Report.Sources, s.report)
	}
	return c, nil
}

func (cfg *OpenConfig) check() error {
	errs := ValidateSources(key(cfg.At, "data"), cfg.Sources)
	errs = append(errs, cfg.Val.Validate(key(cfg.At, "val"))...)
	switch {
	case len(cfg.Sources) == 0 && len(cfg.Val.Data) == 0:
		errs = append(errs, fmt.Errorf("%s: names no source", key(cfg.At, "data")))
	case cfg.Tokenizer == nil:
		errs = append(errs, errors.New("data: no tokenizer"))
	case cfg.Len < 1:
		errs = append(errs, fmt.Errorf("data: samples of %d tokens", cfg.Len))
	}
	return errors.Join(errs...)
}

func (c *Corpus) note(s string) {
	if s != "" {
		c.Report.Notes = append(c.Report.Notes, s)
	}
}

// load reads one source and refuses one with too many bad lines or without tokens.
func (c *Corpus) load(ctx context.Context, l *loader, src SourceConfig, at string) (*loaded, error) {
	files, err := resolve(key(at, "path"), src)
	if err != nil {
		return nil, err
	}
	s := &loaded{src: src, at: at, files: files, sums: make([][32]byte, len(files))}
	for i, f := range files {
		if err := ctx.Err(); err != nil {
			return nil, context.Cause(ctx)
		}
		if s.sums[i], err = f.hash(); err != nil {
			return nil, err
		}
	}
	st, cached, note, err := l.load(ctx, src, files, s.sums)
	if err != nil {
		return nil, err
	}
	c.note(note)
	c.open.stores = append(c.open.stores, st)
	s.store = st
	s.report = SourceReport{Path: src.Path, Files: len(files), Documents: st.Documents, Empty: st.Empty, Bytes: st.Bytes,
		Tokens: st.tokens, Unknown: st.Unknown, Lines: st.Lines, BadLines: st.BadLines, Cached: cached}
	for _, b := range st.Bad {
		s.report.Bad = append(s.report.Bad, BadLine{files[b.File].name, b.Line, b.Reason})
	}
	if limit := src.maxBadShare(); float64(st.BadLines) > limit*float64(st.Lines) {
		return nil, fmt.Errorf("%s=%s: %d of %d lines are bad, above max_bad_share=%v; first: %s",
			s.name(), src.Path, st.BadLines, st.Lines, limit, s.report.Bad[0])
	}
	if st.tokens == 0 {
		return nil, fmt.Errorf("%s=%s: holds no text", s.name(), src.Path)
	}
	return s, nil
}

// disjoint refuses a validation source that shares a file or all its tokens with a training source.
func disjoint(val *loaded, train []*loaded) error {
	for _, t := range train {
		if bytes.Equal(t.store.Digest, val.store.Digest) {
			return fmt.Errorf("%s=%s: is the text of %s=%s; training and validation may not overlap",
				val.name(), val.src.Path, t.name(), t.src.Path)
		}
		for i, a := range t.sums {
			for j, b := range val.sums {
				if a == b {
					return fmt.Errorf("%s=%s: %s has the content of %s, which %s=%s trains on; training and validation may not overlap",
						val.name(), val.src.Path, val.files[j].name, t.files[i].name, t.name(), t.src.Path)
				}
			}
		}
	}
	return nil
}

// part packs tokens [lo, hi) and counts them in the report. Validation never drops a tail: each target counts once.
func (s *loaded) part(lo, hi int64, cfg OpenConfig, val bool) (part, error) {
	pack := cfg.Pack
	pack.DropTail = pack.DropTail && !val
	var p part
	samples := int64(0)
	if lo < hi {
		p = newPart(s.store, lo, hi, cfg.Len, pack, cfg.Tokenizer.Pad())
		samples = p.samples()
	}
	if samples == 0 {
		use, why := "training", ""
		if val {
			use = "validation"
		}
		if cfg.Val.Share > 0 {
			why = fmt.Sprintf(" after %s=%v", key(cfg.At, "val.share"), cfg.Val.Share)
		}
		return p, fmt.Errorf("%s=%s: has %d tokens, %d of them for %s%s: too few for one sample of %d",
			s.name(), s.src.Path, s.store.tokens, hi-lo, use, why, cfg.Len)
	}
	r := &s.report
	used := p.pairs() - p.dropped()
	if val {
		r.ValSamples, r.ValTargets = samples, used
	} else {
		r.TrainSamples, r.TrainTargets = samples, used
	}
	r.Dropped += p.dropped()
	r.FirstTokens += hi - lo - p.pairs()
	return p, nil
}

// share is part i's share of all samples.
func (s *sequence) share(i int) float64 {
	if s.weighted {
		return float64(s.cycle.count[i]) / cycleLen
	}
	return float64(s.parts[i].samples()) / float64(s.Samples())
}
