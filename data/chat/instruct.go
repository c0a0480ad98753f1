package chat

import (
	"context"

	"moetor/data"
)

// OpenInstruct reads conversations, splits off validation and packs both. A sample is one row of cfg.Len positions with the
// conversations that share it, and its ID is the number of the row. Errors name the setting, or the file and row.
func OpenInstruct(ctx context.Context, cfg OpenConfig) (*Corpus, error) {
	o, err := newOpener(cfg, Instruct)
	if err != nil {
		return nil, err
	}
	if err := o.read(ctx, []Shape{Messages, PromptCompletion, ShareGPT, Alpaca}, o.conversation); err != nil {
		return nil, err
	}
	c := o.corpus()
	if parts, weights := o.parts(); parts != nil {
		rows := o.rows(parts, cfg.Seed)
		c.Train = rows.source(o, weights, true, cfg.Seed)
		c.Scan = rows.source(o, nil, false, 0)
		c.Report.TrainRows, c.Report.TrainFill = rows.fill()
	}
	if held := o.heldOut(); len(held) > 0 {
		rows := o.rows([][]example{held}, 0)
		c.Val = rows.source(o, nil, false, 0)
		c.Report.ValRows, c.Report.ValFill = rows.fill()
	}
	return c, nil
}

// conversation is the adder of conversations.
func (o *opener) conversation(s *source, e Example) error {
	msgs := e.Messages
	if len(msgs) == 0 {
		msgs = append(append(make([]Message, 0, len(e.Prompt)+len(e.Completion)), e.Prompt...), e.Completion...)
	}
	ids, trained, turn, err := o.encode(s, msgs)
	if err != nil {
		return err
	}
	n := int64(len(ids))
	s.ledger.Read.add(n)
	trainOn(o.cfg.Chat.TrainOn, trained, turn)
	if targets(trained) == 0 {
		s.ledger.Untrained.add(n)
		return nil
	}
	if n > o.cap {
		switch o.cfg.Chat.Truncate {
		case TruncateDrop:
			s.ledger.Long.add(n)
			return nil
		case TruncateHead:
			ids, trained = ids[n-o.cap:], trained[n-o.cap:]
		default:
			ids, trained = ids[:o.cap], trained[:o.cap]
		}
		if targets(trained) == 0 {
			s.ledger.Untrained.add(n)
			return nil
		}
		s.ledger.Truncated.add(n - o.cap)
	}
	s.examples = append(s.examples, example{answers: [2]span{o.store(ids, trained)}, key: keyOf(opening(msgs)),
		tokens: int64(len(ids)), trained: int64(targets(trained))})
	return nil
}

// opening returns the messages before the first answer to a user, all of them if there is none. A greeting of the assistant
// before the first user turn is part of it.
func opening(msgs []Message) []Message {
	asked := false
	for i, m := range msgs {
		switch {
		case m.Role == User:
			asked = true
		case m.Role == Assistant && asked:
			return msgs[:i]
		}
	}
	return msgs
}

// trainOn changes which tokens are trained from all turns of the assistant to what how, a value of Config.TrainOn, says.
func trainOn(how string, trained []bool, turn []int32) {
	switch how {
	case TrainAll:
		for i := range trained {
			trained[i] = true
		}
	case TrainLast:
		last := int32(-1)
		for i, t := range trained {
			if t {
				last = max(last, turn[i])
			}
		}
		for i := range trained {
			trained[i] = trained[i] && turn[i] == last
		}
	}
}

// targets counts the tokens that are trained. The first token is the target of none.
func targets(trained []bool) int {
	n := 0
	for i, t := range trained {
		if i > 0 && t {
			n++
		}
	}
	return n
}

// rows are conversations by row.
type rows struct {
	packing
	spans []span  // of all parts
	parts []int64 // rows of each part
	room  int
	used  int64 // positions that are not padding
}

// rows packs the conversations of each part for itself, so that a row belongs to one part.
func (o *opener) rows(parts [][]example, seed uint64) *rows {
	r := &rows{room: o.cfg.Len}
	for _, examples := range parts {
		lengths := make([]int32, len(examples))
		base := int32(len(r.spans))
		for i, e := range examples {
			lengths[i] = int32(e.tokens - 1)
			r.used += e.tokens - 1
			r.spans = append(r.spans, e.answers[0])
		}
		p := pack(o.cfg.Chat.Pack, lengths, int32(o.cfg.Len), seed)
		for _, item := range p.items {
			r.items = append(r.items, base+item)
		}
		for _, end := range p.ends {
			r.ends = append(r.ends, base+end)
		}
		r.parts = append(r.parts, int64(p.rows()))
	}
	return r
}

func (r *rows) fill() (rows int64, share float64) {
	rows = int64(r.packing.rows())
	return rows, float64(r.used) / float64(rows*int64(r.room))
}

// A rowSource is the Source of rows.
type rowSource struct {
	view
	*rows
}

func (r *rows) source(o *opener, weights []float64, shuffle bool, seed uint64) *rowSource {
	v := o.view(data.NewOrder(r.parts, weights, shuffle, seed), shuffle, seed, weights, func(d *digest) {
		d.printf("rows %d %d\n", r.parts, r.ends)
		for _, item := range r.items {
			d.span(r.spans[item])
		}
	})
	return &rowSource{v, r}
}

func (s *rowSource) Samples() int64 { return s.order.Samples() }

func (s *rowSource) Read(ctx context.Context, first int64, n int, b *data.Batch) error {
	if err := s.begin(ctx, first, n); err != nil {
		return err
	}
	b.Reset(n, s.len, false)
	for r := range n {
		_, k := s.order.At(first + int64(r))
		b.IDs[r] = k
		used := 0
		for _, item := range s.row(k) {
			at := r*s.len + used
			b.Starts = append(b.Starts, int32(at))
			used += s.put(b, at, span{}, s.spans[item], false)
		}
		s.padRow(b, r, used)
	}
	return nil
}
