package checkpoint

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strconv"
	"strings"
)

// An Entry is one directory of checkpoints found by [List].
type Entry struct {
	Dir        string
	Stage      string
	Step       int64
	GlobalStep int64 // 0 unless complete
	Err        error // why it is not a complete checkpoint; nil if it is one (checksums are not read)

	suffix string // "", ".partial" or ".old"
}

var dirName = regexp.MustCompile(`^(.+)-(\d{8,})(` + regexp.QuoteMeta(partialSuffix) + `|` + regexp.QuoteMeta(oldSuffix) + `)?$`)

// parseName takes a directory name apart; it accepts only what Name and the suffixes can give.
func parseName(base string) (stage string, step int64, suffix string, ok bool) {
	m := dirName.FindStringSubmatch(base)
	if m == nil {
		return "", 0, "", false
	}
	step, err := strconv.ParseInt(m[2], 10, 64)
	if err != nil || Name(m[1], step)+m[3] != base || !stageName.MatchString(m[1]) {
		return "", 0, "", false
	}
	return m[1], step, m[3], true
}

// List finds the checkpoints directly under root, complete or not, sorted by stage name and step. Other files and
// directories are passed over.
func List(root string) ([]Entry, error) {
	dirs, err := os.ReadDir(root)
	if err != nil {
		return nil, fmt.Errorf("list checkpoints: %w", err)
	}
	var list []Entry
	for _, d := range dirs {
		stage, step, suffix, ok := parseName(d.Name())
		if !ok || !d.IsDir() {
			continue
		}
		list = append(list, inspectEntry(Entry{Dir: filepath.Join(root, d.Name()), Stage: stage, Step: step, suffix: suffix}))
	}
	slices.SortFunc(list, func(a, b Entry) int {
		return cmp.Or(cmp.Compare(a.Stage, b.Stage), cmp.Compare(a.Step, b.Step), cmp.Compare(a.suffix, b.suffix))
	})
	return list, nil
}

func inspectEntry(e Entry) Entry {
	switch e.suffix {
	case partialSuffix:
		e.Err = fmt.Errorf("checkpoint %s: its writing or deletion was interrupted, or is under way", e.Dir)
		return e
	case oldSuffix:
		if name := strings.TrimSuffix(e.Dir, oldSuffix); complete(name) == nil {
			e.Err = fmt.Errorf("checkpoint %s: superseded by %s", e.Dir, filepath.Base(name))
			return e
		}
	}
	r, err := Open(e.Dir)
	if err != nil {
		e.Err = err
		return e
	}
	defer r.Close()
	if m := &r.m.Meta; m.Stage != e.Stage || m.Step != e.Step {
		e.Err = fmt.Errorf("checkpoint %s: holds stage %s step %d, not what its name says", e.Dir, m.Stage, m.Step)
	} else {
		e.GlobalStep = m.GlobalStep
	}
	return e
}

// OpenLatest opens the newest checkpoint of a stage under root that is complete and whose checksums hold, and falls
// back to earlier ones. skipped tells of each newer directory why it was passed over. With stage "" it takes the
// newest of all stages, by the global step. If there is none, the error wraps [ErrNotFound].
func OpenLatest(root, stage string) (r *Reader, skipped []string, err error) {
	list, err := List(root)
	if errors.Is(err, fs.ErrNotExist) {
		list, err = nil, nil
	}
	if err != nil {
		return nil, nil, err
	}
	if stage != "" {
		list = slices.DeleteFunc(list, func(e Entry) bool { return e.Stage != stage })
	} else {
		slices.SortStableFunc(list, func(a, b Entry) int {
			return cmp.Or(cmp.Compare(a.GlobalStep, b.GlobalStep), cmp.Compare(a.Step, b.Step))
		})
	}
	for i := len(list) - 1; i >= 0; i-- {
		e := list[i]
		if e.Err != nil {
			skipped = append(skipped, e.Err.Error())
			continue
		}
		r, err := Open(e.Dir)
		if err == nil {
			if err = r.verifySums(context.Background()); err == nil {
				return r, skipped, nil
			}
			err = fmt.Errorf("checkpoint %s: %w", e.Dir, err)
			r.Close()
		}
		skipped = append(skipped, err.Error())
	}
	of := ""
	if stage != "" {
		of = " of stage " + stage
	}
	err = fmt.Errorf("%w%s in %s", ErrNotFound, of, root)
	if len(skipped) > 0 {
		err = fmt.Errorf("%w: %s", err, strings.Join(skipped, "; "))
	}
	return nil, skipped, err
}

// Prune deletes the checkpoints of a stage under root that are older than the newest keep complete ones, and what
// interrupted writes and deletions of the stage left. Nothing is deleted unless the checksums of at least one of the
// kept ones hold. No checkpoint of the stage may be under way in the meantime: rank 0 calls it after [Commit].
func Prune(root, stage string, keep int) error {
	fail := func(err error) error { return fmt.Errorf("prune checkpoints of stage %s in %s: %w", stage, root, err) }
	if keep < 1 {
		return fail(fmt.Errorf("keep=%d, want at least 1", keep))
	}
	list, err := List(root)
	if err != nil {
		return fail(err)
	}
	for _, e := range list {
		switch {
		case e.Stage != stage:
		case e.suffix == partialSuffix:
			err = removeDir(e.Dir)
		case e.suffix == oldSuffix:
			err = restore(strings.TrimSuffix(e.Dir, oldSuffix))
		}
		if err != nil {
			return fail(err)
		}
	}
	if list, err = List(root); err != nil { // again: a restored one counts
		return fail(err)
	}
	var done []Entry
	for _, e := range list {
		if e.Stage == stage && e.Err == nil {
			done = append(done, e)
		}
	}
	if len(done) <= keep {
		return nil
	}
	kept, old := done[len(done)-keep:], done[:len(done)-keep]
	if err := oneSound(kept); err != nil {
		return fail(err)
	}
	for _, e := range old {
		// One rename takes it away from readers; a deletion that is cut short leaves a partial directory for the next one.
		gone := e.Dir + partialSuffix
		if err := rename(e.Dir, gone); err != nil {
			return fail(err)
		}
		if err := syncPath(root); err != nil {
			return fail(err)
		}
		if err := removeDir(gone); err != nil {
			return fail(err)
		}
	}
	return nil
}

// oneSound looks from the newest for a checkpoint whose checksums hold.
func oneSound(list []Entry) error {
	var bad problems
	for _, e := range slices.Backward(list) {
		r, err := Open(e.Dir)
		if err == nil {
			err = r.verifySums(context.Background())
			r.Close()
		}
		if err == nil {
			return nil
		}
		bad.addf("%s: %v", filepath.Base(e.Dir), err)
	}
	return fmt.Errorf("older ones stay, as none of the %d to keep is sound: %v", len(list), &bad)
}
