package configs

import (
	"cmp"
	"fmt"
	"slices"
	"strings"
)

// A Problem is one thing wrong with a configuration. Its Error is one line.
type Problem struct {
	File      string // path, "preset NAME" or "--set"; empty for a default value
	Line, Col int    // 1-based; 0 for --set and defaults
	Path      string // of the setting, such as stages.0.batch.start; empty for a syntax error
	Text      string // what is wrong, naming the setting and its value

	order int // later sources sort behind earlier ones
}

func (p Problem) Error() string {
	switch {
	case p.File == "":
		return p.Text
	case p.Line == 0:
		return p.File + ": " + p.Text
	}
	return fmt.Sprintf("%s:%d:%d: %s", p.File, p.Line, p.Col, p.Text)
}

// Errors are all problems of a configuration, in the order of their places.
type Errors []Problem

// Error is one line for each problem.
func (e Errors) Error() string {
	lines := make([]string, len(e))
	for i, p := range e {
		lines[i] = p.Error()
	}
	return strings.Join(lines, "\n")
}

// err sorts the problems and returns them as an error, nil if there are none.
func (e Errors) err() error {
	if len(e) == 0 {
		return nil
	}
	slices.SortStableFunc(e, func(a, b Problem) int {
		return cmp.Or(cmp.Compare(a.order, b.order), cmp.Compare(a.Line, b.Line), cmp.Compare(a.Col, b.Col))
	})
	return e
}

// place is where a value was set. Higher orders override lower ones.
type place struct {
	file      string
	line, col int
	order     int
}

func (p place) problem(path, format string, args ...any) Problem {
	return Problem{File: p.file, Line: p.line, Col: p.col, Path: path, Text: oneLine(fmt.Sprintf(format, args...)), order: p.order}
}

// oneLine keeps an error on one line whatever a value contains.
func oneLine(s string) string { return strings.NewReplacer("\n", `\n`, "\r", `\r`).Replace(s) }

// quote shortens and quotes text from a user.
func quote(s string) string {
	if r := []rune(s); len(r) > 60 {
		s = string(r[:60]) + "…"
	}
	return fmt.Sprintf("%q", s)
}

// nearest returns the known name with the fewest edits from name, the first of equals, and the number of edits.
func nearest(name string, known []string) (best string, edits int) {
	for i, k := range known {
		if d := distance(name, k); i == 0 || d < edits {
			best, edits = k, d
		}
	}
	return best, edits
}

// distance is the Levenshtein distance in bytes.
func distance(a, b string) int {
	row := make([]int, len(b)+1)
	for j := range row {
		row[j] = j
	}
	for i := range len(a) {
		diag := row[0]
		row[0] = i + 1
		for j := range len(b) {
			d := diag
			if a[i] != b[j] {
				d = 1 + min(diag, row[j], row[j+1])
			}
			diag, row[j+1] = row[j+1], d
		}
	}
	return row[len(b)]
}

// suggest is the second half of an unknown-name error: the nearest known name, or all of them when none is near.
func suggest(prefix, name string, known []string) string {
	if len(name) > 64 { // the distance is quadratic, and such a name is near to nothing
		name = name[:64]
	}
	best, edits := nearest(name, known)
	if len(known) > 0 && edits <= max(2, len(best)/3) {
		return "did you mean " + prefix + best + "?"
	}
	return "known here: " + strings.Join(known, ", ")
}
