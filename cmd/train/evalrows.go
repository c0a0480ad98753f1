package main

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"math"
	"regexp"
	"strconv"
	"strings"

	"moetor/data"
)

// A question is one row of an evaluation file.
type question struct {
	file    string
	line    int64
	text    string
	choices []string
	right   int    // choice: index of the right one
	answer  string // exact
}

func (q question) at() string { return fmt.Sprintf("%s:%d", q.file, q.line) }

// readQuestions reads the rows of a JSONL file, or of all a glob names, in order: the first limit good ones, or all. Bad
// rows are left out and returned; more than one in a hundred are an error.
func readQuestions(ctx context.Context, path, task string, limit int) (rows []question, bad []data.BadLine, err error) {
	files, err := data.Files("--data", data.SourceConfig{Path: path})
	if err != nil {
		return nil, nil, err
	}
	parse := parseExact
	if task == taskChoice {
		parse = parseChoice
	}
	for _, f := range files {
		if limit > 0 && len(rows) == limit {
			break
		}
		content, err := f.Open()
		if err != nil {
			return nil, nil, err
		}
		err = data.ScanLines(ctx, content, func(line int64, text []byte, reason string) error {
			if limit > 0 && len(rows) == limit {
				return errEnough
			}
			q := question{file: f.Name(), line: line}
			if reason == "" {
				reason = parseRow(text, &q, parse)
			}
			if reason != "" {
				bad = append(bad, data.BadLine{File: f.Name(), Line: line, Reason: reason})
				return nil
			}
			rows = append(rows, q)
			return nil
		})
		content.Close()
		if err != nil && err != errEnough {
			return nil, nil, err
		}
	}
	switch n := len(rows) + len(bad); {
	case float64(len(bad)) > data.DefaultMaxBadShare*float64(n):
		return nil, nil, fmt.Errorf("--data %s: %d of %d rows are bad; first: %s", path, len(bad), n, bad[0])
	case n == 0:
		return nil, nil, fmt.Errorf("--data %s holds no rows", path)
	}
	return rows, bad, nil
}

// errEnough ends the reading of a file.
var errEnough = errors.New("enough rows")

// parseRow fills q from an object, or says why not. Names of fields count in any case.
func parseRow(text []byte, q *question, parse func(fields, *question) string) (reason string) {
	var object map[string]json.RawMessage
	if err := json.Unmarshal(text, &object); err != nil || object == nil {
		return "not a JSON object"
	}
	if data.LoneSurrogate(text) {
		return "has half a surrogate pair"
	}
	f := fields{}
	for name, raw := range object {
		f[strings.ToLower(name)] = raw
	}
	name, raw := f.first("question", "prompt", "query")
	if name == "" {
		return `no field "question", "prompt" or "query"`
	}
	if json.Unmarshal(raw, &q.text) != nil {
		return fmt.Sprintf("field %q is not a string", name)
	}
	if body, ok := f["body"]; ok { // SVAMP as published: the story and the question apart
		var story string
		if json.Unmarshal(body, &story) != nil {
			return `field "body" is not a string`
		}
		q.text = strings.TrimSpace(story + " " + q.text)
	}
	return parse(f, q)
}

type fields map[string]json.RawMessage

// first returns the first of the fields that is there and not null.
func (f fields) first(names ...string) (string, json.RawMessage) {
	for _, n := range names {
		if raw, ok := f[n]; ok && string(raw) != "null" {
			return n, raw
		}
	}
	return "", nil
}

// parseExact reads an answer: a number, or a text of which what follows #### is the final answer (GSM8K).
func parseExact(f fields, q *question) string {
	name, raw := f.first("answer", "target", "gold")
	if name == "" {
		return `no field "answer"`
	}
	var text string
	var number float64
	switch {
	case json.Unmarshal(raw, &text) == nil:
		if i := strings.LastIndex(text, "####"); i >= 0 {
			text = text[i+len("####"):]
		}
		q.answer = strings.TrimSpace(text)
	case json.Unmarshal(raw, &number) == nil:
		q.answer = strconv.FormatFloat(number, 'f', -1, 64)
	default:
		return fmt.Sprintf("field %q is neither a string nor a number", name)
	}
	if q.answer == "" {
		return fmt.Sprintf("field %q is empty", name)
	}
	return ""
}

// parseChoice reads choices, as a list or as ARC's {"text": [...], "label": [...]}, and which is right: an index from 0, the
// label or text of one, or a letter.
func parseChoice(f fields, q *question) string {
	raw, ok := f["choices"]
	if !ok {
		return `no field "choices"`
	}
	var labelled struct{ Text, Label []string }
	if json.Unmarshal(raw, &q.choices) != nil {
		if json.Unmarshal(raw, &labelled) != nil || labelled.Text == nil {
			return `field "choices" is not a list of strings`
		}
		if q.choices = labelled.Text; labelled.Label != nil && len(labelled.Label) != len(q.choices) {
			return fmt.Sprintf(`field "choices" has %d texts and %d labels`, len(q.choices), len(labelled.Label))
		}
	}
	if len(q.choices) < 2 {
		return fmt.Sprintf(`field "choices" has %d, want at least 2`, len(q.choices))
	}
	for i, c := range q.choices {
		if c == "" {
			return fmt.Sprintf("choice %d is empty", i)
		}
	}
	name, raw := f.first("answer", "answerkey", "gold", "label")
	if name == "" {
		return `no field "answer"`
	}
	var index int
	var text string
	switch {
	case json.Unmarshal(raw, &index) == nil:
		if index < 0 || index >= len(q.choices) {
			return fmt.Sprintf("field %q is %d, and there are %d choices, counted from 0", name, index, len(q.choices))
		}
		q.right = index
		return ""
	case json.Unmarshal(raw, &text) != nil:
		return fmt.Sprintf("field %q is neither an index nor a string", name)
	}
	for _, names := range [][]string{labelled.Label, q.choices} {
		for i, c := range names {
			if c == text {
				q.right = i
				return ""
			}
		}
	}
	if len(text) == 1 && labelled.Label == nil {
		if i := int(strings.ToUpper(text)[0]) - 'A'; i >= 0 && i < len(q.choices) {
			q.right = i
			return ""
		}
	}
	return fmt.Sprintf("field %q is %q, which is no choice and no letter of one", name, text)
}

// A matcher finds answers in generated texts.
type matcher struct{ pattern *regexp.Regexp }

// A number may have a sign (one that does not stand right after a digit), commas between thousands and a fraction.
const number = `(?:(?:\d{1,3}(?:,\d{3})+|\d+)(?:\.\d+)?|\.\d+)`

var (
	aNumber   = regexp.MustCompile(`(?:^|[^0-9])(-?` + number + `)`)
	allNumber = regexp.MustCompile(`^[-+]?` + number + `$`)
)

// newMatcher takes a valid pattern; "" looks for the last number.
func newMatcher(pattern string) matcher {
	if pattern == "" {
		return matcher{}
	}
	return matcher{regexp.MustCompile(pattern)}
}

// expected is the answer to be found: what the pattern finds in the given one, or the given one.
func (m matcher) expected(answer string) string {
	if m.pattern != nil {
		if s, ok := lastMatch(m.pattern, answer); ok {
			return s
		}
	}
	return answer
}

// find returns the answer in a text. Without a pattern that is the last number where one is expected, else all of it.
func (m matcher) find(text, expected string) (string, bool) {
	if m.pattern != nil {
		return lastMatch(m.pattern, text)
	}
	if _, ok := numeric(expected); ok {
		return lastMatch(aNumber, strings.ReplaceAll(text, "\u2212", "-")) // the minus sign of typesetters
	}
	text = strings.TrimSpace(text)
	return text, text != ""
}

// lastMatch is the last match of a pattern, or its first group if it has groups.
func lastMatch(p *regexp.Regexp, text string) (string, bool) {
	all := p.FindAllStringSubmatch(text, -1)
	if len(all) == 0 {
		return "", false
	}
	return strings.TrimSpace(all[len(all)-1][min(1, p.NumSubexp())]), true
}

// equalAnswers compares as numbers where both are: 1,000 is 1000.0, and $5. is 5.
func equalAnswers(a, b string) bool {
	x, isNumber := numeric(a)
	if y, ok := numeric(b); ok && isNumber {
		return x == y
	}
	return strings.TrimSpace(a) == strings.TrimSpace(b)
}

// numeric is the number that s is, a currency sign before it and a percent sign or full stop after it aside.
func numeric(s string) (float64, bool) {
	s = strings.TrimRight(strings.TrimLeft(strings.TrimSpace(s), "$€£ "), "%. ")
	if !allNumber.MatchString(s) {
		return 0, false
	}
	v, err := strconv.ParseFloat(strings.ReplaceAll(s, ",", ""), 64)
	return v, err == nil && !math.IsInf(v, 0)
}
