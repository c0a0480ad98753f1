package moetor

import (
	"os"
	"path/filepath"
	"regexp"
	"strings"
	"testing"
)

// TestFaults: every test that docs/faults.md names exists in that package, each line names one, and each number that a
// test's comment cites has its line.
func TestFaults(t *testing.T) {
	doc, err := os.ReadFile("docs/faults.md")
	if err != nil {
		t.Fatal(err)
	}
	sources := map[string]string{} // the tests of a directory
	err = filepath.WalkDir(".", func(path string, d os.DirEntry, err error) error {
		if err != nil || !strings.HasSuffix(path, "_test.go") || d.IsDir() {
			return err
		}
		text, err := os.ReadFile(path)
		sources[filepath.ToSlash(filepath.Dir(path))] += string(text)
		return err
	})
	if err != nil {
		t.Fatal(err)
	}
	named := regexp.MustCompile("`([a-z0-9/]+): (Test[A-Za-z0-9]+)`")
	lines := map[string]bool{}
	for line := range strings.Lines(string(doc)) {
		number := regexp.MustCompile(`^\| (P\d\d) \|`).FindStringSubmatch(line)
		if number == nil {
			continue
		}
		lines[number[1]] = true
		tests := named.FindAllStringSubmatch(line, -1)
		if len(tests) == 0 {
			t.Errorf("%s names no test", number[1])
		}
		for _, m := range tests {
			if !strings.Contains(sources[m[1]], "\nfunc "+m[2]+"(t *testing.T)") {
				t.Errorf("%s: package %s has no %s", number[1], m[1], m[2])
			}
		}
	}
	if len(lines) < 20 {
		t.Errorf("only %d lines were read", len(lines))
	}
	for dir, text := range sources {
		for _, m := range regexp.MustCompile(`//.*\b(P[0-4]\d)\b`).FindAllStringSubmatch(text, -1) {
			if !lines[m[1]] {
				t.Errorf("a test in %s cites %s, which has no line", dir, m[1])
			}
		}
	}
}
