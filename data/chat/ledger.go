package chat

import (
	"fmt"
	"strings"

	"moetor/data"
)

// A Count is of examples and of tokens.
type Count struct{ Examples, Tokens int64 }

func (c *Count) add(tokens int64) { c.Examples++; c.Tokens += tokens }

// A Ledger says where the tokens of one source went. An example is a conversation, a pair or a single answer. Its tokens are
// those that the template makes of it; of preferences the prompt and an answer up to the token that ends it, and of a pair
// both, so that its prompt counts twice.
//
//	Read   = Train + Val + dropped (Long + Untrained + Equal + Leaked), in examples
//	Read   = Train + Val + Truncated + dropped, in tokens
//	Placed = Train + Val = Trained + Masked, in tokens
type Ledger struct {
	Path    string
	Shape   Shape // as found in the files
	Files   int
	Rows    int64 // of the files, blank ones aside
	BadRows int64 // no examples: malformed, or refused by the template
	Bad     []data.BadLine
	Unknown int64 // tokens outside a char vocabulary, encoded as <unk>

	Read      Count // examples and their tokens
	Train     Count // placed in samples to train on
	Val       Count // placed in samples to validate
	Trained   int64 // placed tokens that are targets with a weight
	Masked    int64 // placed tokens that are not
	Truncated Count // examples that were shortened, and the tokens cut off
	// Dropped, by reason: longer than the context; without a trained token, or without one that fits the context; two answers
	// that are equal in what fits; of an explicit validation source, with a prompt that is trained on.
	Long, Untrained, Equal, Leaked Count
}

// Placed counts the examples in samples.
func (l Ledger) Placed() Count {
	return Count{l.Train.Examples + l.Val.Examples, l.Train.Tokens + l.Val.Tokens}
}

// Dropped counts the examples in no sample.
func (l Ledger) Dropped() Count {
	var sum Count
	for _, c := range []Count{l.Long, l.Untrained, l.Equal, l.Leaked} {
		sum.Examples += c.Examples
		sum.Tokens += c.Tokens
	}
	return sum
}

// String is one line for a log.
func (l Ledger) String() string {
	var s strings.Builder
	placed := l.Placed()
	fmt.Fprintf(&s, "%s: %d examples of %s, %d to train on, %d to validate; %d tokens, %d placed (%d trained, %d masked)",
		l.Path, l.Read.Examples, l.Shape, l.Train.Examples, l.Val.Examples, l.Read.Tokens, placed.Tokens, l.Trained, l.Masked)
	if t := l.Truncated; t.Examples > 0 {
		fmt.Fprintf(&s, ", %d truncated in %d examples", t.Tokens, t.Examples)
	}
	for _, d := range []struct {
		Count
		why string
	}{{l.Long, "longer than the context"}, {l.Untrained, "nothing to train on"}, {l.Equal, "equal answers"},
		{l.Leaked, "prompt is trained on"}} {
		if d.Examples > 0 {
			fmt.Fprintf(&s, ", %d dropped in %d examples (%s)", d.Tokens, d.Examples, d.why)
		}
	}
	if l.Unknown > 0 {
		fmt.Fprintf(&s, ", %d unknown characters", l.Unknown)
	}
	if l.BadRows > 0 {
		fmt.Fprintf(&s, ", %d of %d rows bad (first: %s)", l.BadRows, l.Rows, l.Bad[0])
	}
	return s.String()
}

// A Report says what a corpus was made of.
type Report struct {
	Sources []Ledger // training sources, then explicit validation sources
	Notes   []string // what the user should know and what is no error
	// Of the packed rows of conversations: rows of the context's length, and the part of their positions that is not padding.
	TrainRows, ValRows int64
	TrainFill, ValFill float64
}
