package configs

import (
	"bytes"
	"fmt"
	"math"
	"reflect"
	"strconv"
	"strings"
	"time"
	"unicode/utf8"

	"github.com/goccy/go-yaml/ast"
	"github.com/goccy/go-yaml/parser"
	"github.com/goccy/go-yaml/token"

	"moetor/optimizer"
)

var (
	durationType  = reflect.TypeFor[time.Duration]()
	piecewiseType = reflect.TypeFor[optimizer.Piecewise]()
)

// elementDefault gives new list elements their defaults.
func elementDefault(t reflect.Type) reflect.Value {
	if t == reflect.TypeFor[Stage]() {
		return reflect.ValueOf(defaultStage())
	}
	return reflect.Zero(t)
}

const (
	maxFile   = 1 << 20 // bytes of a configuration file
	maxValues = 100_000 // values of one, aliases followed, so that nested aliases cannot multiply without end
	maxMerges = 16      // nesting of merge keys and aliases
)

// A decoder fills configuration structs from a YAML tree. It walks the tree itself, rather than with the library's
// decoder, to report every problem instead of the first, and to remember where each value was set. Fields are found by
// their yaml tags, so components extend their configurations without touching this file.
type decoder struct {
	file     string
	order    int
	flat     bool // no line numbers: the text comes from a --set
	origin   map[string]place
	anchors  map[string]ast.Node
	values   int
	problems Errors
}

// parse returns the one document of text, nil if it is empty.
func (d *decoder) parse(text []byte) (body ast.Node) {
	start := place{file: d.file, line: 1, col: 1, order: d.order}
	if d.flat {
		start.line, start.col = 0, 0
	}
	if !utf8.Valid(text) { // the parser would put U+FFFD there
		at, i := start, 0
		for {
			r, n := utf8.DecodeRune(text[i:])
			if r == utf8.RuneError && n == 1 {
				break
			}
			i += n
		}
		if !d.flat {
			at.line, at.col = bytes.Count(text[:i], []byte("\n"))+1, i-bytes.LastIndexByte(text[:i], '\n')
		}
		d.problems = append(d.problems, at.problem("", "not valid UTF-8"))
		return nil
	}
	// A panic of the library on a malformed text must not reach the user; to him it is one more syntax error.
	defer func() {
		if recover() != nil {
			body = nil
			d.problems = append(d.problems, start.problem("", "not readable as YAML"))
		}
	}()
	f, err := parser.ParseBytes(text, 0, parser.AllowDuplicateMapKey())
	if err != nil {
		at, msg := start, err.Error()
		if e, ok := err.(interface {
			GetToken() *token.Token
			GetMessage() string
		}); ok {
			msg = e.GetMessage()
			if tk := e.GetToken(); tk != nil {
				at = d.at(tk)
			}
		}
		d.problems = append(d.problems, at.problem("", "not valid YAML: %s", msg))
		return nil
	}
	var docs []ast.Node
	for _, doc := range f.Docs {
		if doc.Body != nil && doc.Body.Type() != ast.CommentType && doc.Body.Type() != ast.CommentGroupType {
			docs = append(docs, doc.Body)
		}
	}
	if len(docs) == 0 {
		return nil
	}
	if len(docs) > 1 {
		d.problems = append(d.problems, d.place(docs[1]).problem("", "a configuration is one YAML document; here begins another"))
	}
	d.anchors = map[string]ast.Node{}
	ast.Walk(anchorFinder(d.anchors), docs[0])
	return docs[0]
}

type anchorFinder map[string]ast.Node

func (a anchorFinder) Visit(n ast.Node) ast.Visitor {
	if an, ok := n.(*ast.AnchorNode); ok && an.Name != nil {
		a[an.Name.GetToken().Value] = an.Value
	}
	return a
}

func (d *decoder) at(tk *token.Token) place {
	p := place{file: d.file, order: d.order}
	if !d.flat && tk != nil && tk.Position != nil {
		p.line, p.col = tk.Position.Line, tk.Position.Column
	}
	return p
}

// place is where n begins; a block mapping begins at its first key.
func (d *decoder) place(n ast.Node) place {
	switch n := n.(type) {
	case nil:
		return d.at(nil)
	case *ast.MappingNode:
		if !n.IsFlowStyle && len(n.Values) > 0 {
			return d.at(n.Values[0].Key.GetToken())
		}
		return d.at(n.Start)
	case *ast.MappingValueNode:
		return d.at(n.Key.GetToken())
	}
	return d.at(n.GetToken())
}

func (d *decoder) fail(at place, path, format string, args ...any) {
	d.problems = append(d.problems, at.problem(path, format, args...))
}

// follow replaces anchors and aliases by what they stand for. nil: a problem was reported.
func (d *decoder) follow(n ast.Node, path string) ast.Node {
	at := d.place(n)
	for range maxMerges {
		switch a := n.(type) {
		case *ast.AnchorNode:
			n = a.Value
		case *ast.AliasNode:
			name := a.Value.GetToken().Value
			to, ok := d.anchors[name]
			if !ok {
				d.fail(at, path, "%s: alias *%s has no anchor &%s", path, name, name)
				return nil
			}
			n = to
		case *ast.TagNode:
			d.fail(at, path, "%s: YAML tags are not supported", path)
			return nil
		default:
			return n
		}
	}
	d.fail(at, path, "%s: aliases refer to each other", path)
	return nil
}

// value sets v from n. at is where the setting stands, which is where its key does.
func (d *decoder) value(n ast.Node, v reflect.Value, path string, at place) {
	if d.values++; d.values >= maxValues {
		if d.values == maxValues {
			d.fail(at, path, "more than %d values", maxValues)
		}
		return
	}
	if n = d.follow(n, path); n == nil {
		return
	}
	if _, scalar := n.(ast.ScalarNode); scalar && n.Type() != ast.NullType {
		at = d.place(n)
	}
	switch {
	case n.Type() == ast.NullType:
		d.fail(at, path, "%s has no value", path)
	case v.Type() == piecewiseType:
		if _, list := n.(*ast.SequenceNode); list {
			d.list(n, v, path, at)
			break
		}
		var number float64
		if d.scalar(n, reflect.ValueOf(&number).Elem(), path, at, "a number or a list of {until_tokens, value}") {
			v.Set(reflect.ValueOf(optimizer.Constant(number)))
		}
	case v.Kind() == reflect.Struct:
		d.mapping(n, v, path, at)
	case v.Kind() == reflect.Slice:
		d.list(n, v, path, at)
	case v.Kind() == reflect.Pointer: // a number for which 0 differs from absent
		el := reflect.New(v.Type().Elem())
		if d.scalar(n, el.Elem(), path, at, "") {
			v.Set(el)
		}
	default:
		d.scalar(n, v, path, at, "")
	}
	if _, ok := d.origin[path]; !ok || v.Kind() != reflect.Struct {
		d.origin[path] = at
	}
}

func (d *decoder) list(n ast.Node, v reflect.Value, path string, at place) {
	seq, ok := n.(*ast.SequenceNode)
	if !ok {
		d.fail(at, path, "%s needs a list, got %s", path, describe(n))
		return
	}
	for p := range d.origin { // the list replaces what an earlier source set
		if strings.HasPrefix(p, path+".") {
			delete(d.origin, p)
		}
	}
	out := reflect.MakeSlice(v.Type(), 0, min(len(seq.Values), maxValues))
	for i, e := range seq.Values {
		if d.values >= maxValues {
			break
		}
		el := reflect.New(v.Type().Elem()).Elem()
		el.Set(elementDefault(el.Type()))
		d.value(e, el, fmt.Sprintf("%s.%d", path, i), d.place(e))
		out = reflect.Append(out, el)
	}
	if out.Len() == 0 && v.Type() != piecewiseType { // nil, as where nothing is set; a Piecewise without phases is a problem
		out = reflect.Zero(v.Type())
	}
	v.Set(out)
}

// pair is a key with its value.
type pair struct {
	name string
	at   place
	node ast.Node
}

// pairs lists the entries of a mapping; those of merge keys follow unless an own key overrides them.
func (d *decoder) pairs(n ast.Node, path string, depth int) []pair {
	var own []*ast.MappingValueNode
	switch m := n.(type) {
	case *ast.MappingNode:
		own = m.Values
	case *ast.MappingValueNode:
		own = []*ast.MappingValueNode{m}
	}
	var out, merged []pair
	for _, kv := range own {
		at := d.at(kv.Key.GetToken())
		if kv.Key.IsMergeKey() {
			if depth == maxMerges {
				d.fail(at, path, "merge keys are nested too deeply")
				continue
			}
			from := []ast.Node{kv.Value}
			if seq, ok := kv.Value.(*ast.SequenceNode); ok {
				from = seq.Values
			}
			for _, f := range from {
				switch f = d.follow(f, join(path, "<<")); f.(type) {
				case nil:
				case *ast.MappingNode, *ast.MappingValueNode:
					merged = append(merged, d.pairs(f, path, depth+1)...)
				default:
					d.fail(at, path, "<< merges mappings, got %s", describe(f))
				}
			}
			continue
		}
		key := ast.Node(kv.Key)
		if mk, ok := key.(*ast.MappingKeyNode); ok {
			key = mk.Value
		}
		if _, ok := key.(ast.ScalarNode); !ok {
			d.fail(at, path, "a key must be a name, got %s", describe(key))
			continue
		}
		out = append(out, pair{key.GetToken().Value, at, kv.Value})
	}
	has := make(map[string]bool, len(out))
	for _, p := range out {
		has[p.name] = true
	}
	for _, p := range merged {
		if !has[p.name] {
			has[p.name] = true
			out = append(out, p)
		}
	}
	return out
}

func (d *decoder) mapping(n ast.Node, v reflect.Value, path string, at place) {
	switch n.(type) {
	case *ast.MappingNode, *ast.MappingValueNode:
	default:
		if path == "" {
			d.fail(at, path, "a configuration is a mapping of run, model, parallel, …; got %s", describe(n))
		} else {
			d.fail(at, path, "%s needs a mapping with the keys %s, got %s", path, strings.Join(keys(v.Type()), ", "), describe(n))
		}
		return
	}
	seen := map[string]place{}
	for _, p := range d.pairs(n, path, 0) {
		full := join(path, p.name)
		f, ok := field(v, p.name)
		if !ok {
			d.fail(p.at, full, "unknown key %s; %s", quote(full), suggest(dotted(path), p.name, keys(v.Type())))
			continue
		}
		if first, dup := seen[p.name]; dup {
			d.fail(p.at, full, "%s is set twice, first on line %d", full, first.line)
			continue
		}
		seen[p.name] = p.at
		d.value(p.node, f, full, p.at)
	}
}

// scalar sets a number, truth value, text or duration. want overrides how the type is named in an error.
func (d *decoder) scalar(n ast.Node, v reflect.Value, path string, at place, want string) bool {
	sn, ok := n.(ast.ScalarNode)
	if !ok {
		d.fail(at, path, "%s needs %s, got %s", path, orType(want, v.Type()), describe(n))
		return false
	}
	text, plain := sn.GetToken().Value, true
	switch n := n.(type) {
	case *ast.LiteralNode:
		text, plain = n.Value.Value, false
	case *ast.StringNode:
		tt := n.GetToken().Type
		text, plain = n.Value, tt != token.SingleQuoteType && tt != token.DoubleQuoteType
	}
	isText := v.Kind() == reflect.String || v.Type() == durationType
	if isText && plain && n.Type() != ast.StringType || !isText && !plain {
		d.fail(at, path, "%s needs %s, got %s", path, orType(want, v.Type()), describe(n))
		return false
	}
	if problem := setScalar(v, text); problem != "" {
		if problem == wrongType {
			problem = "needs " + orType(want, v.Type()) + ", got " + describe(n)
		}
		d.fail(at, path, "%s %s", path, problem)
		return false
	}
	return true
}

const wrongType = "wrong type"

// setScalar parses text into v and returns what is wrong with it.
func setScalar(v reflect.Value, text string) string {
	if v.Type() == durationType {
		t, err := time.ParseDuration(text)
		if err != nil {
			return wrongType
		}
		v.SetInt(int64(t))
		return ""
	}
	number := strings.ReplaceAll(text, "_", "")
	switch v.Kind() {
	case reflect.String:
		if !utf8.ValidString(text) {
			return "is not valid UTF-8: " + strconv.QuoteToASCII(text)
		}
		v.SetString(text)
	case reflect.Bool:
		switch text {
		case "true", "True", "TRUE":
			v.SetBool(true)
		case "false", "False", "FALSE":
			v.SetBool(false)
		default:
			return wrongType
		}
	case reflect.Int, reflect.Int64:
		i, ok := parseInt(number)
		switch {
		case !ok && allDigits(number), ok && v.OverflowInt(i):
			return "is too large: " + text
		case !ok:
			return wrongType
		}
		v.SetInt(i)
	case reflect.Uint64:
		u, err := strconv.ParseUint(number, 10, 64)
		switch {
		case err != nil && allDigits(number):
			return "is out of range: " + text
		case err != nil:
			return wrongType
		}
		v.SetUint(u)
	case reflect.Float64:
		f, err := strconv.ParseFloat(number, 64)
		low := strings.ToLower(strings.TrimLeft(number, "+-"))
		switch {
		case low == ".nan" || low == ".inf" || math.IsInf(f, 0) || err == nil && math.IsNaN(f):
			return "must be finite: " + text
		case err != nil || strings.ContainsAny(low, "xp"): // Go's hexadecimal floats are not YAML
			return wrongType
		}
		v.SetFloat(f)
	default:
		panic("configs: a setting of type " + v.Type().String())
	}
	return ""
}

// parseInt reads a decimal integer, also with an exponent (14.3e12) when that is a whole number float64 holds exactly.
func parseInt(s string) (int64, bool) {
	if i, err := strconv.ParseInt(s, 10, 64); err == nil {
		return i, true
	}
	if !strings.ContainsAny(s, "eE") || strings.ContainsAny(s, "xXpP") {
		return 0, false
	}
	f, err := strconv.ParseFloat(s, 64)
	if err != nil || f != math.Trunc(f) || math.Abs(f) > 1<<53 {
		return 0, false
	}
	return int64(f), true
}

func allDigits(s string) bool {
	s = strings.TrimLeft(s, "+-")
	return s != "" && strings.Trim(s, "0123456789") == ""
}

// field returns the field of struct v whose yaml name is name.
func field(v reflect.Value, name string) (reflect.Value, bool) {
	t := v.Type()
	for i := range t.NumField() {
		if k := key(t.Field(i)); k != "" && k == name {
			return v.Field(i), true
		}
	}
	return reflect.Value{}, false
}

// key is the yaml name of a field, empty if it is not a setting.
func key(f reflect.StructField) string {
	name, _, _ := strings.Cut(f.Tag.Get("yaml"), ",")
	if !f.IsExported() || name == "-" {
		return ""
	}
	return name
}

// keys lists the settings of struct type t.
func keys(t reflect.Type) []string {
	var out []string
	for i := range t.NumField() {
		if k := key(t.Field(i)); k != "" {
			out = append(out, k)
		}
	}
	return out
}

func orType(want string, t reflect.Type) string {
	switch {
	case want != "":
		return want
	case t == durationType:
		return "a duration such as 60s"
	}
	switch t.Kind() {
	case reflect.String:
		return "a text"
	case reflect.Bool:
		return "true or false"
	case reflect.Float64:
		return "a number"
	case reflect.Uint64:
		return "an integer of at least 0"
	}
	return "an integer"
}

// describe says what a node is, for an error.
func describe(n ast.Node) string {
	switch n := n.(type) {
	case *ast.MappingNode, *ast.MappingValueNode:
		return "a mapping"
	case *ast.SequenceNode:
		return "a list"
	case *ast.LiteralNode:
		return "the text " + quote(n.Value.Value)
	case *ast.StringNode:
		return "the text " + quote(n.Value)
	case *ast.BoolNode:
		return "the truth value " + n.GetToken().Value
	case *ast.IntegerNode, *ast.FloatNode, *ast.InfinityNode, *ast.NanNode:
		return "the number " + n.GetToken().Value
	case *ast.NullNode:
		return "nothing"
	}
	return "a " + strings.ToLower(n.Type().String())
}

func join(path, name string) string { return dotted(path) + name }

func dotted(path string) string {
	if path == "" {
		return ""
	}
	return path + "."
}
