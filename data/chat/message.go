package chat

import (
	"fmt"

	"moetor/data"
)

// Roles of messages. Files may use other names for them; see [Read].
const (
	System    = "system"
	User      = "user"
	Assistant = "assistant"
	Tool      = "tool"
)

// A Message is one turn of a conversation.
type Message struct{ Role, Content string }

// A Conversation is the turns of one dialogue.
type Conversation struct{ Messages []Message }

// An Example is one row of an instruction or preference file. Which fields are set follows from the shape of the source:
//
//	Messages, ShareGPT, Alpaca              Messages
//	PromptCompletion                        Prompt, Completion
//	Unpaired                                Prompt, Completion, Label
//	PreferenceExplicit, PreferenceImplicit  Prompt, Chosen, Rejected
//
// Completion, Chosen and Rejected begin and end with a turn of the assistant.
type Example struct {
	Prompt           []Message
	Messages         []Message
	Chosen, Rejected []Message
	Completion       []Message
	Label            bool
	File             string
	Line             int64 // from 1: line of a JSONL file once decompressed, row of a Parquet file, element of a JSON array
}

// A Shape is a way of writing examples.
type Shape uint8

const (
	Messages           Shape = iota + 1 // messages: [{role, content}]
	PromptCompletion                    // prompt, completion: strings or messages
	ShareGPT                            // conversations: [{from, value}]
	Alpaca                              // instruction, input, output
	PreferenceExplicit                  // prompt, chosen, rejected: strings or messages
	PreferenceImplicit                  // chosen, rejected: whole conversations that begin alike
	Unpaired                            // prompt, completion, and label or reward
)

var shapeNames = [...]string{"unknown shape", "messages", "prompt and completion", "ShareGPT conversations", "Alpaca instruction and output",
	"preference (prompt, chosen, rejected)", "preference (chosen, rejected)", "unpaired preference (prompt, completion, label)"}

func (s Shape) String() string {
	if int(s) < len(shapeNames) {
		return shapeNames[s]
	}
	return fmt.Sprintf("Shape(%d)", uint8(s))
}

// A ReadReport says what [Read] found in a source.
type ReadReport struct {
	Shape   Shape
	Rows    int64 // rows that are not blank, bad ones included
	Bad     int64
	BadRows []data.BadLine // the first few
	Files   int
	Digest  string   // hex SHA-256 of the shape and all good examples in order; where they are stored and how makes no difference
	Notes   []string // what is allowed and still worth knowing, such as roles read by another name
}

// A Piece is a stretch of a rendered conversation: text, or one special token. Text never encodes to a special token,
// whatever it spells.
type Piece struct {
	Text    string
	Special string // name of a special token (Text is empty), or ""
	Role    string // of the turn that the piece belongs to
	Trained bool   // content of an assistant turn, or the token that ends one
	Turn    int    // index of the turn's message; len(msgs) for a generation prompt
}

// A Template writes conversations as a model reads them. It may be used by several goroutines.
type Template interface {
	Name() string
	// Render renders msgs and, with generationPrompt, what stands before an answer of the assistant. An error is about these
	// messages: what is wrong with the template itself OpenTemplate says.
	Render(msgs []Message, generationPrompt bool) ([]Piece, error)
	EndOfTurn() string // name of the special token that ends a turn of the assistant
}
