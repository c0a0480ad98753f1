package chat

import (
	"fmt"
	"slices"
	"strings"

	"moetor/data"
)

// Encode returns the tokens of pieces, and for each whether it is trained on and the turn that it belongs to.
//
// Each piece is encoded on its own, so no token has a part in two pieces: what is trained begins exactly where the answer
// begins, whatever the tokenizer would merge across the join, and generation, which begins behind the prompt's last token,
// meets the tokens that it was trained on. A special piece is the one token of that name, and text never is, since no
// tokenizer encodes text to a special token. Nothing is added before or behind, so a beginning-of-sequence token stands there
// once if the template writes one.
//
// A template whose special tokens the tokenizer does not have is refused, with their names.
func Encode(tok data.Tokenizer, pieces []Piece) (ids []int32, trained []bool, turn []int32, err error) {
	var missing []string
	for _, p := range pieces {
		var part []int32
		switch id, ok := tok.SpecialID(p.Special); {
		case p.Special == "":
			part = tok.Encode(p.Text)
		case ok:
			part = []int32{id}
		case !slices.Contains(missing, p.Special):
			missing = append(missing, p.Special)
		}
		ids = append(ids, part...)
		for range part {
			trained = append(trained, p.Trained)
			turn = append(turn, int32(p.Turn))
		}
	}
	if len(missing) > 0 {
		return nil, nil, nil, fmt.Errorf("the template writes special tokens that the tokenizer (kind %s) does not have: %s; it has %s",
			tok.Kind(), strings.Join(missing, " "), strings.Join(specials(tok), " "))
	}
	return ids, trained, turn, nil
}

// specials are the names of the tokenizer's special tokens, which stand after all others.
func specials(tok data.Tokenizer) []string {
	var names []string
	for id := int32(tok.Size()) - 1; id >= 0 && tok.Special(id) != ""; id-- {
		names = append(names, tok.Special(id))
	}
	slices.Reverse(names)
	return names
}
