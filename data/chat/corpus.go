package chat

import (
	"context"
	"crypto/sha256"
	"encoding/binary"
	"encoding/hex"
	"errors"
	"fmt"
	"hash"
	"slices"
	"strings"
	"sync/atomic"

	"moetor/data"
)

// A Corpus is the sources of a stage. All tokens are in memory, four bytes each.
//
// Held out for validation by a share are the last examples of each source, and examples with the same prompt stay on one
// side: a pair or labelled answer goes with all others to its prompt, a conversation with all that agree up to the first
// answer. So the held-out questions are new to the model. Where prompts repeat, the ones that first appear latest are held
// out until their examples come nearest to the share. An explicit validation source may not be a training source in another
// container, and those of its examples with a prompt that is trained on are left out and counted.
type Corpus struct {
	// Train is shuffled anew each epoch; nil without training sources. A sample is a row of conversations or one sequence;
	// of pairs samples 2i and 2i+1 are the two of one, and reads begin and end between pairs.
	Train data.Source
	// Val is read in order; nil if nothing is held out.
	Val data.Source
	// Scan has the samples of Train once, in order of their IDs and without weights: for a pass over all of them.
	Scan data.Source
	// Of labelled answers, each sample of Mismatch has the prompt and ID of the sample of Train at the same place and the
	// completion to another prompt, for the estimate of KL in KTO (Ethayarajh et al., 2024, section 4.1); so with the others.
	Mismatch, ValMismatch, ScanMismatch data.Source

	Report Report
	closed *atomic.Bool
}

// Close ends the use of the sources: reading them afterwards is an error.
func (c *Corpus) Close() error {
	c.closed.Store(true)
	return nil
}

// A span is a range of the arena.
type span struct{ lo, hi int64 }

func (s span) len() int64 { return s.hi - s.lo }

// A promptKey is the hash of a prompt.
type promptKey [16]byte

func keyOf(prompt []Message) promptKey {
	h := sha256.New()
	for _, m := range prompt {
		fmt.Fprintf(h, "%d %s %d %s\n", len(m.Role), m.Role, len(m.Content), m.Content)
	}
	return promptKey(h.Sum(nil)[:16])
}

// An example is what is kept of an Example: a conversation (answers[0]), a prompt and an answer, or a prompt and two.
type example struct {
	prompt  span
	answers [2]span
	label   int8
	key     promptKey
	tokens  int64 // after truncation
	trained int64 // of these
}

// A source is one that was read.
type source struct {
	cfg      data.SourceConfig
	at       string // name of its settings
	digest   string
	examples []example
	held     []bool // of examples: to validate
	ledger   Ledger
}

// name is that of the setting that holds the source's path.
func (s *source) name() string { return setting(s.at, "path") }

// An opener makes a corpus.
type opener struct {
	cfg      OpenConfig
	form     Form
	state    []byte // of the tokenizer
	template Template
	unk      int32 // -1: the tokenizer has none
	cap      int64 // tokens of a sequence at most
	closed   *atomic.Bool

	arena []int32 // id<<1, or 1 where the token is trained: tokens of all examples
	side  map[promptKey]bool
	train []*source
	val   []*source // explicit
	notes []string
}

func newOpener(cfg OpenConfig, f Form) (*opener, error) {
	if err := cfg.check(f); err != nil {
		return nil, err
	}
	cfg.Chat = cfg.Chat.Resolved(f)
	o := &opener{cfg: cfg, form: f, unk: -1, cap: int64(cfg.Len) + 1, closed: new(atomic.Bool), side: make(map[promptKey]bool)}
	if cfg.Score { // the last token is an input too
		o.cap--
	}
	var err error
	if o.state, err = cfg.Tokenizer.Marshal(); err != nil {
		return nil, err
	}
	if o.template, err = OpenTemplate(cfg.Chat.Template); err != nil {
		if at, ok := strings.CutSuffix(setting(cfg.At, "chat.template"), "template"); ok {
			return nil, fmt.Errorf("%s%w", at, err) // it begins with the setting's own name
		}
		return nil, err
	}
	// A template may ask for tokens that the tokenizer does not have: no row is to blame for that.
	if pieces, err := o.template.Render([]Message{{User, "?"}, {Assistant, "!"}}, false); err == nil {
		if _, _, _, err := Encode(cfg.Tokenizer, pieces); err != nil {
			return nil, fmt.Errorf("%s=%s: %w", setting(cfg.At, "chat.template"), cfg.Chat.Template, err)
		}
	}
	if id, ok := cfg.Tokenizer.SpecialID("<unk>"); ok {
		o.unk = id
	}
	return o, nil
}

// An adder takes an example into its source or counts why not. An error is about this example.
type adder func(s *source, e Example) error

// read reads all sources and decides which examples are held out.
func (o *opener) read(ctx context.Context, want []Shape, add adder) error {
	for i, cfg := range o.cfg.Sources {
		s, err := o.load(ctx, cfg, setting(o.cfg.At, fmt.Sprintf("data.%d", i)), want, add)
		if err != nil {
			return err
		}
		keys := make([]promptKey, len(s.examples))
		for j, e := range s.examples {
			keys[j] = e.key
		}
		s.held = holdOut(keys, o.cfg.Val.Share, o.side)
		o.train = append(o.train, s)
	}
	for i, cfg := range o.cfg.Val.Data {
		s, err := o.load(ctx, cfg, setting(o.cfg.At, fmt.Sprintf("val.data.%d", i)), want, add)
		if err != nil {
			return err
		}
		for _, t := range o.train {
			if t.digest == s.digest {
				return fmt.Errorf("%s=%s: has the examples of %s=%s; training and validation may not overlap",
					s.name(), s.cfg.Path, t.name(), t.cfg.Path)
			}
		}
		s.examples = slices.DeleteFunc(s.examples, func(e example) bool {
			_, trained := o.side[e.key]
			if trained {
				s.ledger.Leaked.add(e.tokens)
			}
			return trained
		})
		s.held = slices.Repeat([]bool{true}, len(s.examples))
		o.val = append(o.val, s)
	}
	for _, s := range o.sources() {
		for i, e := range s.examples {
			if s.held[i] {
				s.ledger.Val.add(e.tokens)
			} else {
				s.ledger.Train.add(e.tokens)
			}
			s.ledger.Trained += e.trained
			s.ledger.Masked += e.tokens - e.trained
		}
	}
	for _, s := range o.train {
		if s.ledger.Train.Examples == 0 {
			return fmt.Errorf("%s=%s: no example is left to train on: %s", s.name(), s.cfg.Path, s.ledger)
		}
	}
	for _, s := range o.val {
		if s.ledger.Val.Examples == 0 {
			return fmt.Errorf("%s=%s: no example is left to validate: %s", s.name(), s.cfg.Path, s.ledger)
		}
	}
	if o.cfg.Val.Share > 0 && len(o.pick(o.train, true)) == 0 {
		return fmt.Errorf("%s=%v: holds out none of the %d examples", setting(o.cfg.At, "val.share"), o.cfg.Val.Share,
			len(o.pick(o.train, false)))
	}
	return nil
}

func (o *opener) sources() []*source { return slices.Concat(o.train, o.val) }

// load reads one source and refuses one with too many bad rows or without examples.
func (o *opener) load(ctx context.Context, cfg data.SourceConfig, at string, want []Shape, add adder) (*source, error) {
	s := &source{cfg: cfg, at: at}
	l := &s.ledger
	l.Path = cfg.Path
	r, err := ReadShapes(ctx, cfg, at, want, func(e Example) error {
		if err := add(s, e); err != nil {
			return BadRow{strings.Join(strings.Fields(err.Error()), " ")} // a template may write lines
		}
		return nil
	})
	if err != nil {
		return nil, err
	}
	s.digest = r.Digest
	l.Shape, l.Files, l.Rows, l.BadRows, l.Bad = r.Shape, r.Files, r.Rows, r.Bad, r.BadRows
	for _, n := range r.Notes {
		o.notes = append(o.notes, cfg.Path+": "+n)
	}
	if l.Read.Examples == 0 {
		return nil, fmt.Errorf("%s=%s: holds no example", s.name(), cfg.Path)
	}
	return s, nil
}

// encode renders and encodes messages.
func (o *opener) encode(s *source, msgs []Message) (ids []int32, trained []bool, turn []int32, err error) {
	pieces, err := o.template.Render(msgs, false)
	if err != nil {
		return nil, nil, nil, err
	}
	ids, trained, turn, err = Encode(o.cfg.Tokenizer, pieces)
	for _, id := range ids {
		if id == o.unk {
			s.ledger.Unknown++
		}
	}
	return ids, trained, turn, err
}

// store appends tokens to the arena.
func (o *opener) store(ids []int32, trained []bool) span {
	if cap(o.arena)-len(o.arena) < len(ids) { // doubled: append alone grows by a quarter, and copies five times as much
		o.arena = slices.Grow(o.arena, max(len(ids), len(o.arena)))
	}
	lo := int64(len(o.arena))
	for i, id := range ids {
		x := id << 1
		if trained[i] {
			x |= 1
		}
		o.arena = append(o.arena, x)
	}
	return span{lo, int64(len(o.arena))}
}

// trained counts the trained tokens of a span.
func (o *opener) trained(s span) int64 {
	n := int64(0)
	for _, x := range o.arena[s.lo:s.hi] {
		n += int64(x & 1)
	}
	return n
}

// holdOut says which examples, given by the keys of their prompts, are held out: a share of them, whole groups of one key,
// those that first appear last. side has the keys decided before, true for held out, and gets these.
func holdOut(keys []promptKey, share float64, side map[promptKey]bool) []bool {
	size := make(map[promptKey]int)
	var groups []promptKey // by first appearance
	for _, k := range keys {
		if size[k]++; size[k] == 1 {
			groups = append(groups, k)
		}
	}
	want, held := share*float64(len(keys)), 0
	for _, k := range groups {
		if side[k] {
			held += size[k]
		}
	}
	for _, k := range slices.Backward(groups) {
		if _, decided := side[k]; decided {
			continue
		}
		// Nearer to the share with the group than without it.
		side[k] = float64(held)+float64(size[k])/2 <= want && share > 0
		if side[k] {
			held += size[k]
		}
	}
	out := make([]bool, len(keys))
	for i, k := range keys {
		out[i] = side[k]
	}
	return out
}

// pick returns the examples of sources that are held out, or those that are not, in order.
func (o *opener) pick(sources []*source, held bool) []example {
	var out []example
	for _, s := range sources {
		for i, e := range s.examples {
			if s.held[i] == held {
				out = append(out, e)
			}
		}
	}
	return out
}

// parts are the training examples as they are ordered: each source for itself with weights, and else all as one.
func (o *opener) parts() (parts [][]example, weights []float64) {
	if len(o.train) == 0 {
		return nil, nil
	}
	if len(o.train) == 1 || o.train[0].cfg.Weight == 0 {
		return [][]example{o.pick(o.train, false)}, nil
	}
	for i, s := range o.train {
		parts = append(parts, o.pick(o.train[i:i+1], false))
		weights = append(weights, s.cfg.Weight)
	}
	return parts, weights
}

// heldOut are the examples to validate.
func (o *opener) heldOut() []example { return o.pick(o.sources(), true) }

// corpus reports what was read.
func (o *opener) corpus() *Corpus {
	c := &Corpus{closed: o.closed, Report: Report{Notes: o.notes}}
	for _, s := range o.sources() {
		c.Report.Sources = append(c.Report.Sources, s.ledger)
	}
	return c
}

// A view is what all sources share.
type view struct {
	arena       []int32
	order       *data.Order
	len         int // context
	pad, eos    int32
	fingerprint string
	closed      *atomic.Bool
}

// view makes the view of a source; content is written to the digest, weights are those of order.
func (o *opener) view(order *data.Order, shuffle bool, seed uint64, weights []float64, content func(d *digest)) view {
	d := &digest{arena: o.arena, hash: sha256.New()}
	c := o.cfg.Chat
	d.printf("chat 1\n%s, tokenizer %d %s\nlength %d train_on %s pack %s truncate %s score %t\nshuffle %t seed %d weights %v\n",
		o.form, len(o.state), o.state, o.cfg.Len, c.TrainOn, c.Pack, c.Truncate, o.cfg.Score, shuffle, seed, weights)
	content(d)
	return view{arena: o.arena, order: order, len: o.cfg.Len, pad: o.cfg.Tokenizer.Pad(), eos: o.cfg.Tokenizer.EOS(),
		fingerprint: d.sum(), closed: o.closed}
}

func (v *view) Fingerprint() string { return v.fingerprint }

// begin checks a read.
func (v *view) begin(ctx context.Context, first int64, n int) error {
	switch {
	case ctx.Err() != nil:
		return context.Cause(ctx)
	case first < 0 || n < 0 || first > maxSample-int64(n):
		return fmt.Errorf("chat: no samples [%d, %d+%d)", first, first, n)
	case v.closed.Load():
		return errors.New("chat: read from a closed corpus")
	}
	return nil
}

const maxSample = 1 << 62

// put writes a sequence into b at position at and returns how many positions it takes: one less than it has tokens, since
// each but the first is the target of the one before, or with score, all. A target has weight 1 where it is trained and in
// answer; with score the last position alone has.
func (v *view) put(b *data.Batch, at int, prompt, answer span, score bool) int {
	n := int(prompt.len() + answer.len())
	if !score {
		n--
	}
	tokens, targets, weight := b.Tokens[at:at+n], b.Targets[at:at+n], b.Weight[at:at+n]
	k := 0
	for _, part := range [...]struct {
		span
		trained int32
	}{{prompt, 0}, {answer, 1}} {
		for _, x := range v.arena[part.lo:part.hi] {
			if k > 0 {
				targets[k-1], weight[k-1] = x>>1, float32(x&part.trained)
			}
			if k < n {
				tokens[k] = x >> 1
			}
			k++
		}
	}
	if score {
		clear(weight)
		targets[n-1], weight[n-1] = v.eos, 1
	}
	return n
}

// padRow fills row r of b after its first used positions.
func (v *view) padRow(b *data.Batch, r, used int) {
	for i := r*b.Len + used; i < (r+1)*b.Len; i++ {
		b.Tokens[i], b.Targets[i], b.Weight[i] = v.pad, v.pad, 0
	}
	b.Valid[r] = int32(used)
}

// A digest hashes what a source reads.
type digest struct {
	arena []int32
	hash  hash.Hash
	buf   []byte
}

func (d *digest) printf(format string, args ...any) { fmt.Fprintf(d.hash, format, args...) }

// span adds the tokens of a span with their masks.
func (d *digest) span(s span) {
	d.buf = binary.LittleEndian.AppendUint64(d.buf[:0], uint64(s.len()))
	for _, x := range d.arena[s.lo:s.hi] {
		d.buf = binary.LittleEndian.AppendUint32(d.buf, uint32(x))
	}
	d.hash.Write(d.buf)
}

func (d *digest) sum() string { return hex.EncodeToString(d.hash.Sum(nil)[:16]) }
