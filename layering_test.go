package moetor

import (
	"bytes"
	"encoding/json"
	"errors"
	"io"
	"os/exec"
	"slices"
	"strings"
	"testing"
)

// policy says who may import whom; it is a decision, not a description: do not edit it to make a build pass.
// "a, b < c, d" : c and d may import a and b, and whatever those may import. "everything" is all other packages.
// "a !< b"      : b must not reach a over any number of imports, b's sub-packages included.
const policy = `
NONE < internal/lowp < internal/kernel < internal/tensor;
NONE < comm, data, parallel/pipeline, internal/trace;
data < data/chat;
comm < comm/inproc, comm/shm, comm/tcp, comm/commtest, comm/launch, parallel;
internal/lowp, internal/kernel, internal/tensor < model, optimizer, checkpoint;
comm, internal/tensor < parallel/expert, parallel/shard;
internal/kernel < parallel/expert, parallel/shard;
model < internal/train/objective;
model, optimizer, data/chat, parallel/pipeline, internal/train/objective < configs;
configs, checkpoint, parallel, parallel/expert, parallel/shard, internal/trace < internal/train;
everything < cmd/train;

comm !< model;
model !< parallel/pipeline;
comm/shm, comm/tcp !< internal/train;
`

const module = "moetor/"

func TestLayering(t *testing.T) {
	may, never := parsePolicy(t)
	imports := listImports(t)
	for pkg, deps := range imports {
		allowed, known := may[pkg]
		if !known {
			t.Errorf("%s is not in the policy", pkg)
			continue
		}
		for _, d := range deps {
			if !allowed["everything"] && !allowed[d] {
				t.Errorf("%s imports %s; the policy does not let it", pkg, d)
			}
		}
	}
	for pkg := range may {
		if _, ok := imports[pkg]; !ok && pkg != "everything" && pkg != "NONE" {
			t.Errorf("the policy names %s, which does not exist", pkg)
		}
	}
	for _, n := range never {
		for pkg := range imports {
			if (pkg == n[1] || strings.HasPrefix(pkg, n[1]+"/")) && reaches(imports, pkg, n[0]) {
				t.Errorf("%s reaches %s; the policy forbids it", pkg, n[0])
			}
		}
	}
}

// parsePolicy returns, for each package, the closed set of packages it may import, and the forbidden pairs.
func parsePolicy(t *testing.T) (may map[string]map[string]bool, never [][2]string) {
	direct := map[string][]string{}
	for _, rule := range strings.Split(policy, ";") {
		rule = strings.TrimSpace(rule)
		if rule == "" {
			continue
		}
		if left, right, ok := strings.Cut(rule, "!<"); ok {
			for _, a := range fields(left) {
				for _, b := range fields(right) {
					never = append(never, [2]string{a, b})
				}
			}
			continue
		}
		terms := strings.Split(rule, "<")
		if len(terms) < 2 {
			t.Fatalf("policy rule %q has no <", rule)
		}
		for i := 1; i < len(terms); i++ {
			for _, b := range fields(terms[i]) {
				direct[b] = append(direct[b], fields(terms[i-1])...)
			}
		}
	}
	may = map[string]map[string]bool{}
	var closure func(p string) map[string]bool
	closure = func(p string) map[string]bool {
		if s, ok := may[p]; ok {
			return s
		}
		s := map[string]bool{}
		may[p] = s
		for _, d := range direct[p] {
			s[d] = true
			for x := range closure(d) {
				s[x] = true
			}
		}
		return s
	}
	for p := range direct {
		closure(p)
	}
	return may, never
}

func fields(s string) []string {
	return strings.FieldsFunc(s, func(r rune) bool { return r == ',' || r == ' ' || r == '\n' })
}

// listImports maps each of our packages (tests apart) to those of our packages that it imports.
func listImports(t *testing.T) map[string][]string {
	cmd := exec.Command("go", "list", "-json=ImportPath,Imports", "./...")
	out, err := cmd.Output()
	if err != nil {
		t.Fatalf("go list: %v", err)
	}
	imports := map[string][]string{}
	for dec := json.NewDecoder(bytes.NewReader(out)); ; {
		var p struct {
			ImportPath string
			Imports    []string
		}
		if err := dec.Decode(&p); errors.Is(err, io.EOF) {
			break
		} else if err != nil {
			t.Fatal(err)
		}
		if !strings.HasPrefix(p.ImportPath, module) {
			continue // the root package, which has no code
		}
		own := []string{}
		for _, i := range p.Imports {
			if strings.HasPrefix(i, module) {
				own = append(own, strings.TrimPrefix(i, module))
			}
		}
		imports[strings.TrimPrefix(p.ImportPath, module)] = own
	}
	if len(imports) == 0 {
		t.Fatal("go list found no package of ours")
	}
	return imports
}

func reaches(imports map[string][]string, from, to string) bool {
	seen, queue := map[string]bool{}, []string{from}
	for len(queue) > 0 {
		p := queue[0]
		queue = queue[1:]
		if seen[p] {
			continue
		}
		seen[p] = true
		if slices.Contains(imports[p], to) {
			return true
		}
		queue = append(queue, imports[p]...)
	}
	return false
}
