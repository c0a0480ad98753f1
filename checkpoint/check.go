package checkpoint

import (
	"cmp"
	"context"
	"fmt"
	"slices"
	"strings"
)

// Check refuses the checkpoint unless it has exactly the wanted tensors in the wanted shapes, and names every missing,
// extra and misshapen one (the first ten of each, and a count). Kinds that want does not mention at all are not looked
// at, so that one may load the weights alone. A tied embedding is wanted, and stored, once.
func (r *Reader) Check(want []Want) error {
	missing, extra, misshapen := r.compare(want)
	var parts []string
	list := func(what string, p problemsOf) {
		if p.n > 0 {
			parts = append(parts, fmt.Sprintf("%d %s: %s", p.n, what, p.String()))
		}
	}
	list("missing", namesOf(missing))
	list("extra", namesOf(extra))
	list("of another shape", misshapen)
	if parts == nil {
		return nil
	}
	return fmt.Errorf("checkpoint %s does not fit this model: %s", r.dir, strings.Join(parts, "; "))
}

// A Partial says what a partial load leaves out.
type Partial struct {
	Initial []Info // wanted, not in the checkpoint: left at their initial values
	Unused  []Info // in the checkpoint, not wanted
}

// CheckPartial allows what [Reader.Check] refuses, missing and extra tensors, and lists them. Tensors of another shape
// are refused all the same, and so is a checkpoint that has none of the wanted tensors.
func (r *Reader) CheckPartial(want []Want) (Partial, error) {
	missing, extra, misshapen := r.compare(want)
	if misshapen.n > 0 {
		return Partial{}, fmt.Errorf("checkpoint %s does not fit this model: %d of another shape: %s", r.dir, misshapen.n, misshapen.String())
	}
	if len(missing) == len(want) {
		return Partial{}, fmt.Errorf("checkpoint %s has none of the %d tensors of this model", r.dir, len(want))
	}
	return Partial{missing, extra}, nil
}

// A problemsOf is a list for one line and the true number of its entries.
type problemsOf struct {
	problems
	n int
}

func (p *problemsOf) addf(format string, args ...any) {
	p.n++
	p.problems.addf(format, args...)
}

func namesOf(list []Info) (p problemsOf) {
	for _, t := range list {
		p.addf("%s %s", t.Kind, t.Name)
	}
	return p
}

func (r *Reader) compare(want []Want) (missing, extra []Info, misshapen problemsOf) {
	want = slices.Clone(want)
	slices.SortFunc(want, func(a, b Want) int { return cmp.Or(cmp.Compare(a.Name, b.Name), cmp.Compare(a.Kind, b.Kind)) })
	wanted := map[tensorKey]bool{}
	var kinds [numKinds]bool
	for _, w := range want {
		wanted[tensorKey{w.Name, w.Kind}] = true
		if w.Kind < numKinds {
			kinds[w.Kind] = true
		}
		t := r.find(w.Name, w.Kind)
		switch {
		case t == nil:
			missing = append(missing, w)
		case !slices.Equal(t.Shape, w.Shape):
			misshapen.addf("%s %s is %v in the checkpoint, %v in the model", w.Kind, w.Name, t.Shape, w.Shape)
		}
	}
	for _, t := range r.tensors {
		if kinds[t.Kind] && !wanted[tensorKey{t.Name, t.Kind}] {
			extra = append(extra, t.Info)
		}
	}
	return missing, extra, misshapen
}

// A FileStatus is one file of a [Summary].
type FileStatus struct {
	Name  string `json:"name"`
	Size  int64  `json:"size"` // bytes
	OK    bool   `json:"ok"`
	Error string `json:"error,omitempty"`
}

// A Summary is what `train inspect DIR --json` prints of a checkpoint.
type Summary struct {
	Step         int64        `json:"step"`
	Stage        string       `json:"stage"`
	Tokens       int64        `json:"tokens"`
	Params       int64        `json:"params"`
	ActiveParams int64        `json:"active_params"`
	Files        []FileStatus `json:"files"`
	OK           bool         `json:"ok"` // every file is
}

// Inspect opens and verifies a checkpoint. Damage found inside the files is told in the summary; a directory that is
// no complete checkpoint is an error.
func Inspect(ctx context.Context, dir string) (Summary, error) {
	r, err := Open(dir)
	if err != nil {
		return Summary{}, err
	}
	defer r.Close()
	if err := supported(); err != nil { // says nothing about the files
		return Summary{}, fmt.Errorf("checkpoint %s: %w", dir, err)
	}
	m := &r.m.Meta
	s := Summary{Step: m.Step, Stage: m.Stage, Tokens: m.Tokens, Params: m.Params, ActiveParams: m.ActiveParams, OK: true}
	for i, f := range r.m.Files {
		st := FileStatus{Name: f.Name, Size: f.Size, OK: true}
		if err := r.VerifyFile(ctx, i); err != nil {
			if ctx.Err() != nil {
				return Summary{}, context.Cause(ctx)
			}
			st.OK, s.OK, st.Error = false, false, err.Error()
		}
		s.Files = append(s.Files, st)
	}
	return s, nil
}
