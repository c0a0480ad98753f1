package chat

import (
	"errors"
	"fmt"
	"slices"
	"strings"
	"sync"

	"moetor/data"
)

// jinja is the chat template of a tokenizer_config.json.
//
// A conversation is rendered twice. Once with a mark in the place of each content: what stands around the marks is the
// template's own text, and only in it are special tokens looked for, so no content can write one. And once with the contents,
// which must come out between the same stretches of text: this says how the template trims them, and shows a template that
// rewrites or reads them, which is refused.
type jinja struct {
	path     string
	specials []string // names of special tokens, the longest first
	end      string   // the special token behind each answer
	prompt   string   // the generation prompt

	mu     sync.Mutex // gonja does not promise that a template may be executed twice at a time
	engine *engine
	frames map[string]frame // by roles and generation prompt
}

const maxFrames = 256 // frames kept

// A frame is a rendered conversation without its contents: texts[0], the content of turns[0], texts[1], and so on.
type frame struct {
	texts []string // one more than turns
	turns []int
}

func (t *jinja) Name() string      { return t.path }
func (t *jinja) EndOfTurn() string { return t.end }

func openJinja(path string) (Template, error) {
	cfg, err := readTokenizerConfig(path)
	if err != nil {
		return nil, fmt.Errorf("template=%s: %w", path, err)
	}
	t := &jinja{path: path, frames: make(map[string]frame)}
	if t.engine, err = newEngine(cfg); err != nil {
		return nil, fmt.Errorf("template=%s: %w", path, err)
	}
	t.specials = append(cfg.specials(), data.TokenSystem, data.TokenUser, data.TokenAssistant, data.TokenTool, data.TokenEnd, data.TokenReserved,
		"<eos>", "<pad>")
	slices.SortFunc(t.specials, func(a, b string) int {
		if len(a) != len(b) {
			return len(b) - len(a)
		}
		return strings.Compare(a, b)
	})
	t.specials = slices.Compact(t.specials)
	if err := t.probe(); err != nil {
		return nil, fmt.Errorf("template=%s: %w", path, err)
	}
	return t, nil
}

// probe finds what ends an answer and what asks for one, from conversations of the plainest kind.
func (t *jinja) probe() error {
	ask, answer := Message{User, "a question"}, Message{Assistant, "an answer"}
	f, err := t.frame([]Message{ask, answer, ask, answer}, false)
	if err != nil {
		return fmt.Errorf("cannot write a plain conversation: %w", err)
	}
	for k, turn := range f.turns {
		if turn%2 == 0 {
			continue
		}
		at, name := t.nextSpecial(f.texts[k+1])
		switch {
		case at < 0:
			return errors.New("no special token follows the assistant's turns, so a model would not learn to end one")
		case t.end != "" && t.end != name:
			return fmt.Errorf("one turn of the assistant ends with %s and another with %s; want one token", t.end, name)
		}
		t.end = name
	}
	if t.end == "" {
		return errors.New("leaves out the assistant's turns")
	}
	with, err := t.engine.render([]Message{ask}, true)
	if err != nil {
		return fmt.Errorf("cannot write a generation prompt: %w", err)
	}
	without, err := t.engine.render([]Message{ask}, false)
	if err != nil {
		return fmt.Errorf("cannot write a question alone: %w", err)
	}
	var ok bool
	if t.prompt, ok = strings.CutPrefix(with, without); !ok {
		return errors.New("add_generation_prompt changes what stands before the generation prompt")
	}
	return nil
}

func (t *jinja) Render(msgs []Message, generationPrompt bool) ([]Piece, error) {
	for i, m := range msgs {
		if roleTokens[m.Role] == "" {
			return nil, unknownRole(i, m)
		}
	}
	t.mu.Lock()
	defer t.mu.Unlock()
	f, err := t.frame(msgs, generationPrompt)
	if err != nil {
		return nil, fmt.Errorf("template %s: %w", t.path, err)
	}
	full, err := t.engine.render(msgs, generationPrompt)
	if err != nil {
		return nil, fmt.Errorf("template %s: %w", t.path, err)
	}
	a := aligner{frame: f, msgs: msgs, full: full, dead: make(map[[2]int]bool), contents: make([]string, len(f.turns))}
	if !a.from(0, 0) {
		return nil, fmt.Errorf("template %s: rewrites the text of turn %d or writes other things for it, so its own text cannot be told from that of the turn",
			t.path, f.turns[min(a.deepest, len(f.turns)-1)]+1)
	}
	return t.pieces(f, a.contents, msgs, generationPrompt), nil
}

// frame renders msgs with marks for contents and takes the text apart at them.
func (t *jinja) frame(msgs []Message, generationPrompt bool) (frame, error) {
	var key strings.Builder
	for _, m := range msgs {
		key.WriteByte(m.Role[0])
	}
	if generationPrompt {
		key.WriteByte('+')
	}
	if f, ok := t.frames[key.String()]; ok {
		return f, nil
	}
	marked := make([]Message, len(msgs))
	for i, m := range msgs {
		marked[i] = Message{m.Role, mark(i)}
	}
	text, err := t.engine.render(marked, generationPrompt)
	if err != nil {
		return frame{}, err
	}
	f, err := cut(text, msgs)
	if err != nil {
		return frame{}, err
	}
	if len(t.frames) >= maxFrames {
		clear(t.frames)
	}
	t.frames[key.String()] = f
	return f, nil
}

// Marks are of private-use characters, which a template does not write of its own; newEngine makes sure of it.
const markBegin, markEnd = "\ue000moetor:", "\ue001"

func mark(turn int) string { return fmt.Sprintf("%s%d%s", markBegin, turn, markEnd) }

// cut takes a rendered text apart at its marks. Each content must be there, and an answer once.
func cut(text string, msgs []Message) (f frame, err error) {
	seen := make([]bool, len(msgs))
	for {
		before, rest, ok := strings.Cut(text, markBegin)
		f.texts = append(f.texts, before)
		if !ok {
			break
		}
		number, rest, ok := strings.Cut(rest, markEnd)
		turn := -1
		if ok {
			if n, err := fmt.Sscanf(number, "%d", &turn); n != 1 || err != nil || mark(turn) != markBegin+number+markEnd {
				turn = -1
			}
		}
		if turn < 0 || turn >= len(msgs) {
			return frame{}, errors.New("rewrites contents or takes them apart")
		}
		if seen[turn] && msgs[turn].Role == Assistant {
			return frame{}, fmt.Errorf("writes turn %d of the assistant twice", turn+1)
		}
		seen[turn] = true
		f.turns = append(f.turns, turn)
		text = rest
	}
	if slices.ContainsFunc(f.texts, func(s string) bool { return strings.Contains(s, markBegin[:3]) || strings.Contains(s, markEnd) }) {
		return frame{}, errors.New("rewrites contents or takes them apart")
	}
	if i := slices.Index(seen, false); i >= 0 {
		return frame{}, fmt.Errorf("leaves out turn %d, of the role %s", i+1, msgs[i].Role)
	}
	return f, nil
}

// An aligner finds how the contents stand between the texts of a frame in the full rendering.
type aligner struct {
	frame
	msgs     []Message
	full     string
	contents []string        // found
	dead     map[[2]int]bool // places (text, position) from where no way leads to the end
	deepest  int             // the last content reached
}

// from says whether text k and all that follows it are full[at:].
func (a *aligner) from(k, at int) bool {
	if a.dead[[2]int{k, at}] {
		return false
	}
	rest, ok := strings.CutPrefix(a.full[at:], a.texts[k])
	if ok && k == len(a.turns) {
		return rest == ""
	}
	if ok {
		a.deepest = max(a.deepest, k)
		for _, content := range trimmed(a.msgs[a.turns[k]].Content) {
			if strings.HasPrefix(rest, content) && a.from(k+1, len(a.full)-len(rest)+len(content)) {
				a.contents[k] = content
				return true
			}
		}
	}
	a.dead[[2]int{k, at}] = true
	return false
}

// trimmed are the ways in which templates write a content: as it is, or without space or line breaks on a side or both.
func trimmed(s string) []string {
	const space = " \t\n\r\v\f"
	ways := []string{s}
	for _, cut := range []string{
		strings.TrimLeft(s, "\n"), strings.TrimRight(s, "\n"), strings.Trim(s, "\n"),
		strings.TrimLeft(s, space), strings.TrimRight(s, space), strings.Trim(s, space), strings.TrimSpace(s),
	} {
		if !slices.Contains(ways, cut) {
			ways = append(ways, cut)
		}
	}
	return ways
}

// pieces puts texts and contents in order. What stands between two contents belongs to the first up to the token that ends a
// turn, if that is the first special token there, and to the second from then on. Of a turn of the assistant is trained what
// follows the generation prompt, up to the end token: the content, and what the template writes on its own around it, which
// the model will have to write.
func (t *jinja) pieces(f frame, contents []string, msgs []Message, generationPrompt bool) []Piece {
	var out []Piece
	for k, text := range f.texts {
		next := Piece{Role: Assistant, Turn: len(msgs)} // of the turn that follows
		switch {
		case k < len(f.turns):
			next = Piece{Role: msgs[f.turns[k]].Role, Turn: f.turns[k]}
		case !generationPrompt && len(msgs) > 0:
			next = Piece{Role: msgs[len(msgs)-1].Role, Turn: len(msgs) - 1}
		}
		if k > 0 {
			if at, name := t.nextSpecial(text); name == t.end {
				last := f.turns[k-1]
				tail := Piece{Role: msgs[last].Role, Turn: last, Trained: msgs[last].Role == Assistant}
				out = t.split(out, text[:at+len(name)], tail)
				text = text[at+len(name):]
			}
		}
		if k == len(f.turns) {
			return t.split(out, text, next)
		}
		answer := next.Role == Assistant
		if at := strings.LastIndex(text, t.prompt); answer && t.prompt != "" && at >= 0 {
			out = t.split(out, text[:at+len(t.prompt)], next)
			text = text[at+len(t.prompt):]
			next.Trained = true
		}
		out = t.split(out, text, next)
		next.Text, next.Trained = contents[k], answer
		out = appendText(out, next)
	}
	return out
}

// split appends a template's text as pieces like p, its special tokens each as one.
func (t *jinja) split(pieces []Piece, text string, p Piece) []Piece {
	for {
		at, name := t.nextSpecial(text)
		if at < 0 {
			p.Text = text
			return appendText(pieces, p)
		}
		plain, special := p, p
		plain.Text, special.Special = text[:at], name
		pieces = append(appendText(pieces, plain), special)
		text = text[at+len(name):]
	}
}

// nextSpecial finds the first special token in text, the longest of those that begin there; -1 if there is none.
func (t *jinja) nextSpecial(text string) (at int, name string) {
	at = -1
	for _, s := range t.specials {
		if i := strings.Index(text, s); i >= 0 && (at < 0 || i < at) {
			at, name = i, s
		}
	}
	return at, name
}
