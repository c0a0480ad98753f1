package configs

import (
	"bufio"
	"bytes"
	"embed"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"reflect"
	"slices"
	"strconv"
	"strings"
)

//go:embed presets/*.yaml
var presets embed.FS

// Preset is an embedded configuration.
type Preset struct {
	Name  string `json:"name"`
	About string `json:"about"` // one line: the first comment of its file
}

// List returns the embedded presets, sorted by name.
func List() []Preset {
	entries, err := presets.ReadDir("presets")
	if err != nil {
		panic(err) // embedded: it is there
	}
	var out []Preset
	for _, e := range entries {
		text, err := presets.ReadFile("presets/" + e.Name())
		if err != nil {
			panic(err)
		}
		first, _ := bufio.NewReader(bytes.NewReader(text)).ReadString('\n')
		out = append(out, Preset{strings.TrimSuffix(e.Name(), ".yaml"), strings.TrimSpace(strings.TrimLeft(first, "# "))})
	}
	return out
}

// Load returns the defaults, overridden by the named preset or, if there is none, the named file, and then by the settings
// of sets, each as path=value. Problems with keys and types come back as Errors, all at once; rules on
// readable values are Validate's.
func Load(nameOrFile string, sets []string) (*Run, error) {
	text, label, err := read(nameOrFile)
	if err != nil {
		return nil, err
	}
	return parse(text, label, nameOrFile, sets)
}

// Parse is Load for the text of a configuration, such as the one stored in a checkpoint. label names it in errors.
func Parse(text []byte, label string, sets []string) (*Run, error) {
	return parse(text, label, label, sets)
}

func parse(text []byte, label, name string, sets []string) (*Run, error) {
	r := Default()
	r.origin = map[string]place{}
	d := &decoder{file: label, order: 1, origin: r.origin}
	body := d.parse(text)
	switch {
	case body != nil:
		d.value(body, reflect.ValueOf(r).Elem(), "", d.place(body))
	case len(d.problems) == 0:
		d.fail(place{file: label, line: 1, col: 1, order: 1}, "", "the configuration is empty; write {} for all defaults")
	}
	problems := d.problems
	for i, s := range sets {
		problems = append(problems, set(r, s, i+2)...)
	}
	if len(problems) > 0 {
		// What is readable is checked too, for all errors at once, but nothing that depends on an unreadable setting.
		c := newChecker(r)
		for _, p := range problems {
			c.bad[p.Path] = true
		}
		c.ranges()
		return nil, append(problems, c.problems...).err()
	}
	r.resolve(name)
	return r, nil
}

func read(nameOrFile string) (text []byte, label string, err error) {
	if nameOrFile == "" {
		return nil, "", errors.New("no configuration named: give a preset (" + strings.Join(names(), ", ") + ") or a file")
	}
	if text, err := presets.ReadFile("presets/" + nameOrFile + ".yaml"); err == nil {
		return text, "preset " + nameOrFile, nil
	}
	f, err := os.Open(nameOrFile)
	if errors.Is(err, fs.ErrNotExist) {
		return nil, "", fmt.Errorf("--config %s: no such preset or file; %s", nameOrFile, suggest("", nameOrFile, names()))
	}
	if err != nil {
		return nil, "", fmt.Errorf("--config %s: %w", nameOrFile, bare(err))
	}
	defer f.Close()
	text, err = io.ReadAll(io.LimitReader(f, maxFile+1))
	if err != nil {
		return nil, "", fmt.Errorf("--config %s: %w", nameOrFile, bare(err))
	}
	if len(text) > maxFile {
		return nil, "", fmt.Errorf("--config %s: larger than %d bytes, so not a configuration", nameOrFile, maxFile)
	}
	return text, nameOrFile, nil
}

// bare takes the operation and path off a file error, since the caller's message has both.
func bare(err error) error {
	if pe, ok := errors.AsType[*fs.PathError](err); ok {
		return pe.Err
	}
	return err
}

func names() []string {
	var out []string
	for _, p := range List() {
		out = append(out, p.Name)
	}
	return out
}

// set applies one path=value to r.
func set(r *Run, assignment string, order int) Errors {
	at := place{file: "--set", order: order}
	path, text, ok := strings.Cut(assignment, "=")
	path = strings.TrimSpace(path)
	if !ok || path == "" {
		return Errors{at.problem("", "%s: write it as path=value, such as stages.0.steps=30", quote(assignment))}
	}
	v, p := find(reflect.ValueOf(r).Elem(), path, at)
	if p != nil {
		return Errors{*p}
	}
	d := &decoder{file: "--set", order: order, flat: true, origin: r.origin}
	if v.Kind() == reflect.String || v.Type() == durationType {
		// Text needs no quotes here: the shell took those of the user.
		if problem := setScalar(v, text); problem == wrongType {
			return Errors{at.problem(path, "%s needs %s, got the text %s", path, orType("", v.Type()), quote(text))}
		} else if problem != "" {
			return Errors{at.problem(path, "%s %s", path, problem)}
		}
		d.origin[path] = at
		return nil
	}
	switch body := d.parse([]byte(text)); {
	case body != nil:
		d.value(body, v, path, at)
	case len(d.problems) == 0:
		d.fail(at, path, "%s has no value", path)
	}
	for i := range d.problems {
		if d.problems[i].Path == "" {
			d.problems[i].Path, d.problems[i].Text = path, path+": "+d.problems[i].Text
		}
	}
	return d.problems
}

// find walks a dotted path, in which a number selects the element of a list.
func find(v reflect.Value, path string, at place) (reflect.Value, *Problem) {
	fail := func(format string, args ...any) (reflect.Value, *Problem) {
		p := at.problem(path, format, args...)
		return reflect.Value{}, &p
	}
	done := ""
	for _, name := range strings.Split(path, ".") {
		switch {
		case v.Kind() == reflect.Struct:
			f, ok := field(v, name)
			if !ok {
				known := keys(v.Type())
				if done == "" && !slices.Contains(known, name) {
					// A path without its front part is the usual slip: look for the name everywhere.
					if full := everywhere(v, path); full != "" {
						return fail("unknown key %s; did you mean %s?", quote(path), full)
					}
				}
				return fail("unknown key %s; %s", quote(path), suggest(dotted(done), name, known))
			}
			v = f
		case v.Kind() == reflect.Slice:
			i, err := strconv.Atoi(name)
			if err != nil {
				return fail("%s is a list: select an element by number, as in %s.0", done, done)
			}
			if i < 0 || i >= v.Len() {
				return fail("%s.%d does not exist: %s has %d elements, counted from 0", done, i, done, v.Len())
			}
			v = v.Index(i)
		default:
			return fail("%s is a single value and has no %s", done, quote(name))
		}
		done = join(done, name)
	}
	return v, nil
}

// everywhere returns the first full path under v that ends in .tail, or "".
func everywhere(v reflect.Value, tail string) string {
	found := ""
	walk(v, "", func(path string, _ reflect.Value) {
		if found == "" && strings.HasSuffix(path, "."+tail) {
			found = path
		}
	})
	return found
}

// walk calls f for every setting under v, mappings and lists included, in order.
func walk(v reflect.Value, path string, f func(path string, v reflect.Value)) {
	if path != "" {
		f(path, v)
	}
	switch {
	case v.Kind() == reflect.Struct:
		for i := range v.NumField() {
			if k := key(v.Type().Field(i)); k != "" {
				walk(v.Field(i), join(path, k), f)
			}
		}
	case v.Kind() == reflect.Slice:
		for i := range v.Len() {
			walk(v.Index(i), fmt.Sprintf("%s.%d", path, i), f)
		}
	}
}
