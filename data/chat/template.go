package chat

import (
	"fmt"

	"moetor/data"
)

// Templates known by name.
const (
	BuiltinTemplate = "builtin"
	ChatMLTemplate  = "chatml"
)

// OpenTemplate returns the template of a name, or the one in the tokenizer_config.json at that path.
//
//	builtin  <|user|>text<|end|>, with a special token for each role; the fewest tokens
//	chatml   <|im_start|>user\ntext<|im_end|>\n, as ChatML; the tokenizers here have <|reserved|> for <|im_start|> and
//	         <|end|> for <|im_end|>, and the names of the roles are text
func OpenTemplate(name string) (Template, error) {
	switch name {
	case BuiltinTemplate:
		return builtin{}, nil
	case ChatMLTemplate:
		return chatML{}, nil
	case "":
		return nil, fmt.Errorf("template: want %s, %s or the path of a tokenizer_config.json", BuiltinTemplate, ChatMLTemplate)
	}
	return openJinja(name)
}

// builtin writes a turn as the token of its role, its text and <|end|>.
type builtin struct{}

var roleTokens = map[string]string{System: data.TokenSystem, User: data.TokenUser, Assistant: data.TokenAssistant, Tool: data.TokenTool}

func (builtin) Name() string      { return BuiltinTemplate }
func (builtin) EndOfTurn() string { return data.TokenEnd }

func (builtin) Render(msgs []Message, generationPrompt bool) ([]Piece, error) {
	pieces := make([]Piece, 0, 3*len(msgs)+1)
	for i, m := range msgs {
		token, ok := roleTokens[m.Role]
		if !ok {
			return nil, unknownRole(i, m)
		}
		answer := m.Role == Assistant
		pieces = append(pieces, Piece{Special: token, Role: m.Role, Turn: i})
		pieces = appendText(pieces, Piece{Text: m.Content, Role: m.Role, Turn: i, Trained: answer})
		pieces = append(pieces, Piece{Special: data.TokenEnd, Role: m.Role, Turn: i, Trained: answer})
	}
	if generationPrompt {
		pieces = append(pieces, Piece{Special: data.TokenAssistant, Role: Assistant, Turn: len(msgs)})
	}
	return pieces, nil
}

// chatML writes a turn as <|reserved|>, its role, a line break, its text, <|end|> and a line break.
type chatML struct{}

func (chatML) Name() string      { return ChatMLTemplate }
func (chatML) EndOfTurn() string { return data.TokenEnd }

func (chatML) Render(msgs []Message, generationPrompt bool) ([]Piece, error) {
	pieces := make([]Piece, 0, 5*len(msgs)+2)
	for i, m := range msgs {
		if roleTokens[m.Role] == "" {
			return nil, unknownRole(i, m)
		}
		answer := m.Role == Assistant
		pieces = append(pieces, Piece{Special: data.TokenReserved, Role: m.Role, Turn: i}, Piece{Text: m.Role + "\n", Role: m.Role, Turn: i})
		pieces = appendText(pieces, Piece{Text: m.Content, Role: m.Role, Turn: i, Trained: answer})
		pieces = append(pieces, Piece{Special: data.TokenEnd, Role: m.Role, Turn: i, Trained: answer}, Piece{Text: "\n", Role: m.Role, Turn: i})
	}
	if generationPrompt {
		pieces = append(pieces, Piece{Special: data.TokenReserved, Role: Assistant, Turn: len(msgs)},
			Piece{Text: Assistant + "\n", Role: Assistant, Turn: len(msgs)})
	}
	return pieces, nil
}

func unknownRole(turn int, m Message) error {
	return fmt.Errorf("turn %d has the unknown role %.40q, want %s, %s, %s or %s", turn+1, m.Role, System, User, Assistant, Tool)
}

// appendText appends a piece of text unless it is empty.
func appendText(pieces []Piece, p Piece) []Piece {
	if p.Text == "" {
		return pieces
	}
	return append(pieces, p)
}
