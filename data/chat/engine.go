package chat

import (
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"strings"
	"time"

	"github.com/nikolalohinski/gonja/v2/builtins"
	"github.com/nikolalohinski/gonja/v2/config"
	"github.com/nikolalohinski/gonja/v2/exec"
	"github.com/nikolalohinski/gonja/v2/loaders"
	"github.com/nikolalohinski/gonja/v2/nodes"
	jinjaparser "github.com/nikolalohinski/gonja/v2/parser"
	"github.com/nikolalohinski/gonja/v2/tokens"
)

// tokenizerConfig is what matters here of a tokenizer_config.json, the file that Hugging Face's transformers writes.
type tokenizerConfig struct {
	Template   string
	BOS, EOS   string
	Pad, Unk   string
	Additional []string // special tokens by other names
}

// specials are the names of all special tokens.
func (c tokenizerConfig) specials() []string {
	var names []string
	for _, name := range append([]string{c.BOS, c.EOS, c.Pad, c.Unk}, c.Additional...) {
		if name != "" {
			names = append(names, name)
		}
	}
	return names
}

// tokenName reads a token: a string, or an object with the string as its content.
type tokenName string

func (t *tokenName) UnmarshalJSON(b []byte) error {
	var object struct {
		Content string `json:"content"`
	}
	if b[0] == '{' {
		err := json.Unmarshal(b, &object)
		*t = tokenName(object.Content)
		return err
	}
	var s *string
	err := json.Unmarshal(b, &s)
	if s != nil {
		*t = tokenName(*s)
	}
	return err
}

func readTokenizerConfig(path string) (cfg tokenizerConfig, err error) {
	b, err := os.ReadFile(path)
	if errors.Is(err, fs.ErrNotExist) {
		return cfg, fmt.Errorf("no such file; want %s, %s or the path of a tokenizer_config.json", BuiltinTemplate, ChatMLTemplate)
	}
	if err != nil {
		if pe, ok := errors.AsType[*fs.PathError](err); ok {
			err = pe.Err
		}
		return cfg, err
	}
	var file struct {
		Template   json.RawMessage `json:"chat_template"`
		BOS        tokenName       `json:"bos_token"`
		EOS        tokenName       `json:"eos_token"`
		Pad        tokenName       `json:"pad_token"`
		Unk        tokenName       `json:"unk_token"`
		Additional []tokenName     `json:"additional_special_tokens"`
		Added      map[string]struct {
			Content string `json:"content"`
			Special bool   `json:"special"`
		} `json:"added_tokens_decoder"`
	}
	if err := json.Unmarshal(b, &file); err != nil {
		return cfg, fmt.Errorf("not a tokenizer_config.json: %w", err)
	}
	cfg = tokenizerConfig{BOS: string(file.BOS), EOS: string(file.EOS), Pad: string(file.Pad), Unk: string(file.Unk)}
	for _, t := range file.Additional {
		cfg.Additional = append(cfg.Additional, string(t))
	}
	for _, t := range file.Added { // of any order: the names are sorted later
		if t.Special {
			cfg.Additional = append(cfg.Additional, t.Content)
		}
	}
	cfg.Template, err = templateOf(file.Template, path)
	return cfg, err
}

// templateOf returns a chat_template: a string, the one named default of a list, or, without either, the file
// chat_template.jinja beside it, where newer versions of transformers write it.
func templateOf(raw json.RawMessage, path string) (string, error) {
	if isNull(raw) {
		b, err := os.ReadFile(filepath.Join(filepath.Dir(path), "chat_template.jinja"))
		if err != nil {
			return "", errors.New("has no chat_template")
		}
		return string(b), nil
	}
	var text string
	if json.Unmarshal(raw, &text) == nil {
		return text, nil
	}
	var named []struct {
		Name     string `json:"name"`
		Template string `json:"template"`
	}
	if json.Unmarshal(raw, &named) != nil {
		return "", fmt.Errorf("chat_template is %s, want a string or a list of named templates", kindOf(raw))
	}
	var names []string
	for _, t := range named {
		if t.Name == "default" {
			return t.Template, nil
		}
		names = append(names, t.Name)
	}
	return "", fmt.Errorf("chat_template has the templates %q, none of them is named default", names)
}

// An engine executes one Jinja template as transformers does (apply_chat_template): blocks take the line break behind and the
// space before them, and raise_exception, strftime_now and generation blocks exist. No file can be included.
type engine struct {
	template *exec.Template
	tokens   map[string]any
}

func newEngine(cfg tokenizerConfig) (e *engine, err error) {
	defer panicked(&err)
	if strings.Contains(cfg.Template, markBegin) {
		return nil, fmt.Errorf("chat_template has the text %q, which is reserved", markBegin)
	}
	opts := config.New()
	opts.TrimBlocks, opts.LeftStripBlocks = true, true
	blocks := exec.NewControlStructureSet(map[string]jinjaparser.ControlStructureParser{}).Update(builtins.ControlStructures)
	if !blocks.Exists("generation") {
		if err := blocks.Register("generation", parseGeneration); err != nil {
			return nil, err
		}
	}
	const name = "/chat_template"
	loader, err := loaders.NewMemoryLoader(map[string]string{name: cfg.Template})
	if err != nil {
		return nil, err
	}
	template, err := exec.NewTemplate(name, opts, loader, &exec.Environment{
		Context: exec.EmptyContext().Update(builtins.GlobalFunctions).Update(builtins.GlobalVariables),
		Filters: builtins.Filters, Tests: builtins.Tests, ControlStructures: blocks, Methods: builtins.Methods,
	})
	if err != nil {
		// The library's message begins with the whole template.
		return nil, fmt.Errorf("chat_template: %s", lastLine(strings.ReplaceAll(err.Error(), cfg.Template, "…")))
	}
	e = &engine{template: template, tokens: make(map[string]any)}
	for name, token := range map[string]string{"bos_token": cfg.BOS, "eos_token": cfg.EOS, "pad_token": cfg.Pad, "unk_token": cfg.Unk} {
		if token != "" {
			e.tokens[name] = token
		}
	}
	return e, nil
}

// render executes the template.
func (e *engine) render(msgs []Message, generationPrompt bool) (text string, err error) {
	defer panicked(&err)
	list := make([]any, len(msgs))
	for i, m := range msgs {
		list[i] = map[string]any{"role": m.Role, "content": m.Content}
	}
	refusal := ""
	vars := map[string]any{
		"messages":              list,
		"add_generation_prompt": generationPrompt,
		"tools":                 nil,
		"documents":             nil,
		"strftime_now":          strftime,
		"raise_exception": func(message string) (string, error) {
			refusal = message
			return "", errors.New(message)
		},
	}
	for name, token := range e.tokens {
		vars[name] = token
	}
	text, err = e.template.ExecuteToString(exec.NewContext(vars))
	if refusal != "" { // in the template's own words, without the library's account of where
		return "", fmt.Errorf("refuses the conversation: %s", refusal)
	}
	if err != nil {
		return "", fmt.Errorf("chat_template: %s", lastLine(err.Error()))
	}
	return text, nil
}

func panicked(err *error) {
	if p := recover(); p != nil {
		*err = fmt.Errorf("chat_template: %v", p)
	}
}

func lastLine(s string) string {
	s = strings.TrimSpace(s)
	return s[strings.LastIndexByte(s, '\n')+1:]
}

// templateDate is the date that templates see: a fixed one, since the tokens of a data set may not depend on the day. It is
// the one that Llama 3's templates have for renderers without a clock.
var templateDate = time.Date(2024, time.July, 26, 0, 0, 0, 0, time.UTC)

// strftime formats templateDate by the directives of C's strftime that dates need.
func strftime(format string) string {
	layouts := map[byte]string{'Y': "2006", 'y': "06", 'm': "01", 'd': "02", 'e': "_2", 'b': "Jan", 'B': "January", 'a': "Mon",
		'A': "Monday", 'H': "15", 'I': "03", 'M': "04", 'S': "05", 'p': "PM", 'j': "002", 'F': "2006-01-02", 'T': "15:04:05", 'Z': "MST"}
	var out strings.Builder
	for i := 0; i < len(format); i++ {
		if format[i] == '%' && i+1 < len(format) {
			i++
			if layout, ok := layouts[format[i]]; ok {
				out.WriteString(templateDate.Format(layout))
				continue
			}
			if format[i] != '%' {
				out.WriteByte('%')
			}
		}
		out.WriteByte(format[i])
	}
	return out.String()
}

// generation is transformers' {% generation %} … {% endgeneration %}, which surrounds what the assistant writes; the body is
// rendered as it stands.
type generation struct {
	at   *tokens.Token
	body *nodes.Wrapper
}

func (g *generation) Position() *tokens.Token { return g.at }
func (g *generation) String() string          { return "generation" }

func (g *generation) Execute(r *exec.Renderer, _ *nodes.ControlStructureBlock) error {
	return r.ExecuteWrapper(g.body)
}

func parseGeneration(p, args *jinjaparser.Parser) (nodes.ControlStructure, error) {
	g := &generation{at: p.Current()}
	if !args.End() {
		return nil, args.Error("generation takes no arguments", args.Current())
	}
	body, end, err := p.WrapUntil("endgeneration")
	if err != nil {
		return nil, err
	}
	if !end.End() {
		return nil, end.Error("endgeneration takes no arguments", end.Current())
	}
	g.body = body
	return g, nil
}
