package chat

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"maps"
	"slices"
	"strings"

	"moetor/data"
)

// rowFields are the members of rows that have a meaning; Parquet columns of other names are not read.
var rowFields = []string{"messages", "conversations", "prompt", "completion", "chosen", "rejected", "label", "reward",
	"instruction", "input", "output", "system", "history"}

// allShapes is the order in which Detect tries them: a row of preferences often has its conversation in "messages" too, and
// a row of messages its first turn in "prompt".
var allShapes = []Shape{PreferenceExplicit, PreferenceImplicit, Messages, ShareGPT, Unpaired, PromptCompletion, Alpaca}

// needs are the members that make a shape; Unpaired also needs one of label and reward.
var needs = map[Shape][]string{
	Messages:           {"messages"},
	PromptCompletion:   {"prompt", "completion"},
	ShareGPT:           {"conversations"},
	Alpaca:             {"instruction", "output"},
	PreferenceExplicit: {"prompt", "chosen", "rejected"},
	PreferenceImplicit: {"chosen", "rejected"},
	Unpaired:           {"prompt", "completion"},
}

// Detect returns the shape of a row by the names of its members, those that are null left out.
func Detect(fields map[string]json.RawMessage) (Shape, bool) { return detect(fields, allShapes) }

func detect(fields map[string]json.RawMessage, want []Shape) (Shape, bool) {
	has := func(name string) bool { raw, ok := fields[name]; return ok && !isNull(raw) }
	for _, s := range allShapes {
		if slices.Contains(want, s) && !slices.ContainsFunc(needs[s], func(name string) bool { return !has(name) }) &&
			(s != Unpaired || has("label") || has("reward")) {
			return s, true
		}
	}
	return 0, false
}

func isNull(raw json.RawMessage) bool { return len(raw) == 0 || string(raw) == "null" }

// roleNames are the names that files use for the four roles.
var roleNames = map[string]string{
	System: System, User: User, Assistant: Assistant, Tool: Tool,
	"developer": System,
	"human":     User, "prompter": User,
	"gpt": Assistant, "model": Assistant, "bot": Assistant, "chatgpt": Assistant,
	"function": Tool, "observation": Tool, "ipython": Tool,
}

// A parser turns rows into examples. What is allowed and still worth knowing it counts.
type parser struct {
	alias    map[string]int64 // turns by a role's other name
	repeated int64            // conversations with two turns of one role in a row
	openEnd  int64            // conversations whose last turn is not the assistant's
	noPrompt int64            // rows whose prompt is an empty list: the assistant begins
	empty    int64            // turns without text that are no answer
}

func (p *parser) notes() []string {
	var notes []string
	for _, name := range slices.Sorted(maps.Keys(p.alias)) {
		notes = append(notes, fmt.Sprintf("role %q is read as %s (%d turns)", name, roleNames[name], p.alias[name]))
	}
	for _, n := range []struct {
		count int64
		what  string
	}{
		{p.repeated, "rows have two turns of one role in a row"},
		{p.openEnd, "conversations do not end with an answer of the assistant"},
		{p.noPrompt, "rows have a prompt without turns, so that the assistant begins"},
		{p.empty, "turns other than answers are empty"},
	} {
		if n.count > 0 {
			notes = append(notes, fmt.Sprintf("%d %s", n.count, n.what))
		}
	}
	return notes
}

// parse returns the example in fields, a row of shape s, or why the row is bad.
func (p *parser) parse(fields map[string]json.RawMessage, s Shape) (e Example, err error) {
	q := &parser{alias: make(map[string]int64)} // counts only if the row is good
	prompt := func() ([]Message, error) { return q.messages(fields, "prompt", User) }
	switch s {
	case Messages:
		e.Messages, err = q.messages(fields, "messages", "")
	case ShareGPT:
		e.Messages, err = q.messages(fields, "conversations", "")
		if err == nil {
			e.Messages, err = q.withSystem(fields, e.Messages)
		}
	case Alpaca:
		e.Messages, err = q.alpaca(fields)
	case PromptCompletion, Unpaired:
		if e.Prompt, err = prompt(); err == nil {
			e.Completion, err = q.messages(fields, "completion", Assistant)
		}
		if err == nil && s == Unpaired {
			e.Label, err = labelOf(fields)
		}
	case PreferenceExplicit:
		if e.Prompt, err = prompt(); err == nil {
			e.Chosen, e.Rejected, err = q.answers(fields, Assistant)
		}
		if err == nil {
			err = e.dropPrompt()
		}
	case PreferenceImplicit:
		if e.Chosen, e.Rejected, err = q.answers(fields, ""); err == nil {
			e.splitPrompt()
		}
	default:
		err = fmt.Errorf("%v", s)
	}
	if err == nil {
		err = q.check(&e, s)
	}
	if err != nil {
		return Example{}, err
	}
	for name, n := range q.alias {
		p.alias[name] += n
	}
	p.repeated += q.repeated
	p.openEnd += q.openEnd
	p.noPrompt += q.noPrompt
	p.empty += q.empty
	return e, nil
}

// answers returns chosen and rejected.
func (p *parser) answers(fields map[string]json.RawMessage, role string) (chosen, rejected []Message, err error) {
	if chosen, err = p.messages(fields, "chosen", role); err == nil {
		rejected, err = p.messages(fields, "rejected", role)
	}
	return chosen, rejected, err
}

// messages returns the turns in a member: a list of messages, one message, or, where role is given, a string.
func (p *parser) messages(fields map[string]json.RawMessage, name, role string) ([]Message, error) {
	raw := fields[name]
	if isNull(raw) {
		return nil, fmt.Errorf("no field %q", name)
	}
	var list []json.RawMessage
	switch raw[0] {
	case '"':
		if role == "" {
			return nil, fmt.Errorf("field %q is a string, want a list of messages", name)
		}
		text, err := stringOf(raw)
		return []Message{{role, text}}, err
	case '{':
		list = []json.RawMessage{raw}
	case '[':
		if err := json.Unmarshal(raw, &list); err != nil {
			return nil, err
		}
	default:
		return nil, fmt.Errorf("field %q is %s, want messages", name, kindOf(raw))
	}
	msgs := make([]Message, len(list))
	for i, item := range list {
		m, err := p.message(item)
		if err != nil {
			return nil, fmt.Errorf("%s: turn %d %w", name, i+1, err)
		}
		msgs[i] = m
	}
	return msgs, nil
}

// message returns one turn: role and content, or from and value.
func (p *parser) message(raw json.RawMessage) (m Message, err error) {
	var fields map[string]json.RawMessage
	if raw[0] != '{' || json.Unmarshal(raw, &fields) != nil {
		return m, fmt.Errorf("is %s, want a message", kindOf(raw))
	}
	roleKey, textKey := "role", "content"
	if _, ok := fields[roleKey]; !ok {
		if _, ok := fields["from"]; ok {
			roleKey, textKey = "from", "value"
		}
	}
	name, text := fields[roleKey], fields[textKey]
	switch {
	case isNull(name):
		return m, fmt.Errorf("has no %s", roleKey)
	case name[0] != '"':
		return m, fmt.Errorf("has %s as its %s, want a string", kindOf(name), roleKey)
	case hasMembers(fields["tool_calls"]):
		return m, errors.New("has tool_calls, which are not supported; write the call as text")
	case isNull(text):
		return m, fmt.Errorf("has no %s", textKey)
	case text[0] != '"':
		return m, fmt.Errorf("has %s as its %s, want a string", kindOf(text), textKey)
	}
	role, err := stringOf(name)
	if err != nil {
		return m, err
	}
	var ok bool
	if m.Role, ok = roleNames[role]; !ok {
		return m, fmt.Errorf("has the unknown role %.40q, want %s, %s, %s or %s", role, System, User, Assistant, Tool)
	}
	if m.Role != role {
		p.alias[role]++
	}
	m.Content, err = stringOf(text)
	return m, err
}

// withSystem puts the row's system text, which some ShareGPT and Alpaca files have, before the turns.
func (p *parser) withSystem(fields map[string]json.RawMessage, msgs []Message) ([]Message, error) {
	raw := fields["system"]
	if isNull(raw) {
		return msgs, nil
	}
	if raw[0] != '"' {
		return nil, fmt.Errorf("field %q is %s, want a string", "system", kindOf(raw))
	}
	text, err := stringOf(raw)
	if err != nil || text == "" {
		return msgs, err
	}
	return slices.Insert(msgs, 0, Message{System, text}), nil
}

// alpaca joins instruction and input as the template of Stanford Alpaca orders them, without its preamble: a chat template
// says who speaks.
func (p *parser) alpaca(fields map[string]json.RawMessage) ([]Message, error) {
	text := make(map[string]string)
	for _, name := range []string{"instruction", "input", "output"} {
		raw := fields[name]
		if isNull(raw) && name == "input" {
			continue
		}
		if raw[0] != '"' {
			return nil, fmt.Errorf("field %q is %s, want a string", name, kindOf(raw))
		}
		var err error
		if text[name], err = stringOf(raw); err != nil {
			return nil, err
		}
	}
	ask := text["instruction"]
	if text["input"] != "" {
		ask += "\n\n" + text["input"]
	}
	var history [][2]string
	if raw := fields["history"]; !isNull(raw) {
		if err := json.Unmarshal(raw, &history); err != nil {
			return nil, errors.New(`field "history" is not a list of pairs of strings`)
		}
	}
	var msgs []Message
	for _, turn := range history {
		msgs = append(msgs, Message{User, turn[0]}, Message{Assistant, turn[1]})
	}
	return p.withSystem(fields, append(msgs, Message{User, ask}, Message{Assistant, text["output"]}))
}

// labelOf reads a truth value or a reward, which is desirable above a half.
func labelOf(fields map[string]json.RawMessage) (bool, error) {
	name := "label"
	if isNull(fields[name]) {
		name = "reward"
	}
	raw := fields[name]
	switch string(raw) {
	case "true":
		return true, nil
	case "false":
		return false, nil
	}
	var v float64
	if json.Unmarshal(raw, &v) != nil {
		return false, fmt.Errorf("field %q is %s, want true, false or a number", name, kindOf(raw))
	}
	return v > 0.5, nil
}

// dropPrompt makes answers of chosen and rejected where both are the whole conversation and repeat the prompt, as some
// files have it that give the prompt as well.
func (e *Example) dropPrompt() error {
	if len(e.Chosen) == 0 || len(e.Rejected) == 0 || e.Chosen[0].Role == Assistant || e.Rejected[0].Role == Assistant {
		return nil // answers, or for check to say what is wrong
	}
	for _, answer := range [][]Message{e.Chosen, e.Rejected} {
		at := 0 // a prompt that is a string stands after a system message
		if len(answer) > 0 && answer[0].Role == System && len(e.Prompt) > 0 && e.Prompt[0].Role != System {
			at = 1
		}
		if len(answer) < at+len(e.Prompt) || !slices.Equal(answer[at:at+len(e.Prompt)], e.Prompt) {
			return errors.New("chosen and rejected are whole conversations that do not begin with the prompt")
		}
	}
	e.splitPrompt()
	return nil
}

// splitPrompt makes the turns with which chosen and rejected both begin the prompt.
func (e *Example) splitPrompt() {
	n := 0
	for n < len(e.Chosen) && n < len(e.Rejected) && e.Chosen[n] == e.Rejected[n] {
		n++
	}
	e.Prompt, e.Chosen, e.Rejected = e.Chosen[:n:n], e.Chosen[n:], e.Rejected[n:]
}

// check refuses examples that nothing can be learned from or that no template can write.
func (p *parser) check(e *Example, s Shape) error {
	if e.Messages != nil || s == Messages || s == ShareGPT {
		if !slices.ContainsFunc(e.Messages, func(m Message) bool { return m.Role == Assistant }) {
			return errors.New("no turn of the assistant")
		}
		if e.Messages[len(e.Messages)-1].Role != Assistant {
			p.openEnd++
		}
		return p.checkTurns(e.Messages)
	}
	if len(e.Prompt) == 0 {
		if s == PreferenceImplicit {
			return errors.New("chosen and rejected do not begin with the same turn")
		}
		p.noPrompt++
	}
	before := p.repeated
	for _, a := range []struct {
		name  string
		turns []Message
		have  bool
	}{{"completion", e.Completion, s == PromptCompletion || s == Unpaired}, {"chosen", e.Chosen, s == PreferenceExplicit || s == PreferenceImplicit},
		{"rejected", e.Rejected, s == PreferenceExplicit || s == PreferenceImplicit}} {
		if !a.have {
			continue
		}
		if len(a.turns) == 0 {
			return fmt.Errorf("%s has no answer", a.name)
		}
		for _, m := range []Message{a.turns[0], a.turns[len(a.turns)-1]} {
			if m.Role != Assistant {
				return fmt.Errorf("%s begins or ends with a turn of the role %s, an answer is the assistant's", a.name, m.Role)
			}
		}
		if err := p.checkTurns(slices.Concat(e.Prompt, a.turns)); err != nil {
			return fmt.Errorf("%s: %w", a.name, err)
		}
	}
	p.repeated = min(p.repeated, before+1) // a row counts once
	if e.Chosen != nil && slices.Equal(e.Chosen, e.Rejected) {
		return errors.New("chosen and rejected are the same")
	}
	return nil
}

// checkTurns refuses empty answers, and a system message elsewhere than first.
func (p *parser) checkTurns(msgs []Message) error {
	repeated := false
	for i, m := range msgs {
		repeated = repeated || i > 0 && msgs[i-1].Role == m.Role
		switch blank := strings.TrimSpace(m.Content) == ""; {
		case m.Role == System && i > 0:
			return fmt.Errorf("turn %d is a system message, which must be the first and only one", i+1)
		case m.Role == Assistant && blank:
			return fmt.Errorf("turn %d is an empty answer", i+1)
		case blank:
			p.empty++
		}
	}
	if repeated {
		p.repeated++
	}
	return nil
}

// stringOf decodes a JSON string; a reader sees half of a surrogate pair as damage, as package data does.
func stringOf(raw json.RawMessage) (s string, err error) {
	if data.LoneSurrogate(raw) {
		return "", errors.New("has half a surrogate pair")
	}
	err = json.Unmarshal(raw, &s)
	return s, err
}

// kindOf names the kind of a JSON value in a sentence.
func kindOf(raw json.RawMessage) string {
	switch {
	case isNull(raw):
		return "null"
	case raw[0] == '"':
		return "a string"
	case raw[0] == '{':
		return "an object"
	case raw[0] == '[':
		return "a list"
	case raw[0] == 't' || raw[0] == 'f':
		return "a truth value"
	}
	return "a number"
}

// hasMembers says whether raw is a list or object that is not empty.
func hasMembers(raw json.RawMessage) bool {
	raw = bytes.TrimSpace(raw)
	return !isNull(raw) && string(raw) != "[]" && string(raw) != "{}"
}
