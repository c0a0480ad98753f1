package train

import (
	"cmp"
	"context"
	"encoding/binary"
	"encoding/json"
	"errors"
	"fmt"
	"hash/fnv"
	"io/fs"
	"math"
	"os"
	"path/filepath"
	"slices"
	"strings"

	"moetor/checkpoint"
	"moetor/comm"
	"moetor/data"
	"moetor/internal/trace"
	"moetor/model"
)

// A reference holds the log-probabilities that the model had, at the start of a stage, of the answers of that stage's
// examples: what preference objectives compare with (Rafailov et al., 2023, §4). One forward-only pass computes them,
// so no second model is ever held. They are kept in the run directory under a key of model and data, so that a resumed
// run compares with the same numbers, to the bit.
type reference struct {
	Key     string // of the stage's first weights and of its data
	Samples int64  // that it covers from the start of the stage on; 0 is all of an epoch

	Train, Val, Mismatch, ValMismatch []float64 // by sequence
}

// of is the table of a source, nil where there is none.
func (r *reference) of(c *Corpus, src data.Source) []float64 {
	if r == nil {
		return nil
	}
	switch src {
	case c.Train:
		return r.Train
	case c.Val:
		return r.Val
	case c.Mismatch:
		return r.Mismatch
	case c.ValMismatch:
		return r.ValMismatch
	}
	return nil
}

// sequence is the place of a batch's sequence in the table of its source.
func sequence(b *data.Batch, i int) int64 {
	if !b.Pairs {
		return b.IDs[i]
	}
	return 2*b.IDs[i] + int64(i%2)
}

// referencePath is where the numbers of a stage are kept.
func (t *Trainer) referencePath() string {
	return filepath.Join(t.opts.Dir, "reference-"+t.stage.cfg.Name+".bin")
}

// refer makes or finds the reference of the current stage. firstWeights says that the chunks hold the weights of the
// stage's start now; else, after a resume, key names them.
func (t *Trainer) refer(ctx context.Context, key string) error {
	s := t.stage
	if !s.needs.Reference {
		return nil
	}
	if key == "" {
		weights, err := t.weightsHash(ctx)
		if err != nil {
			return err
		}
		key = weights + "-" + s.train.Fingerprint() + t.recipeMark()
	} else if mark := t.recipeMark(); !strings.HasSuffix(key, mark) || mark == "" && strings.Contains(key, recipeSign) {
		t.note("precision.recipe=%s: the reference of stage %s was computed in another one, and the run goes on comparing with it",
			cmp.Or(strings.TrimPrefix(mark, recipeSign), "fp32"), s.cfg.Name)
	}
	var found []byte
	if t.root() {
		if b, err := readReference(t.referencePath(), key, t.referenceSamples()); err == nil {
			found = b
		} else if !errors.Is(err, fs.ErrNotExist) {
			t.note("%v; computing the reference again", err)
		}
	}
	all, err := comm.GatherBytes(ctx, t.groups.World, found)
	if err != nil {
		return fmt.Errorf("reference: %w", err)
	}
	if b := all[0]; len(b) > 0 {
		s.reference, err = decodeReference(b)
		return err
	}
	if s.resumedAt > 0 {
		return t.referAgain(ctx, key)
	}
	return t.computeReference(ctx, key)
}

const recipeSign = "+recipe="

// recipeMark ends the key of a reference: the same weights give other log-probabilities in another recipe.
func (t *Trainer) recipeMark() string {
	p := t.run.Precision
	mark := recipeSign + p.Recipe
	switch p.Recipe {
	case "fp32":
		return ""
	case "hopper":
		mark = fmt.Sprintf("%s-%d", mark, p.Promote)
	}
	for _, operand := range slices.Sorted(slices.Values(p.Keep)) {
		mark += "-" + operand
	}
	return mark
}

// referenceSamples is how many samples of the stage the reference needs, 0 for all: a stage that ends within its first epoch
// needs only those it will see.
func (t *Trainer) referenceSamples() int64 {
	if n := t.stage.plan.End().Samples; n < t.stage.corpus.Scan.Samples() {
		return n
	}
	return 0
}

// computeReference runs the model, as it is now, forward over the examples of the stage.
func (t *Trainer) computeReference(ctx context.Context, key string) error {
	s := t.stage
	c := s.corpus
	train, mismatch, n := c.Scan, c.ScanMismatch, c.Scan.Samples()
	if few := t.referenceSamples(); few > 0 {
		train, mismatch, n = c.Train, c.Mismatch, few
	}
	t.note("%s: log-probabilities of the reference, one forward pass over %d sequences", s.cfg.Name, n)
	r := &reference{Key: key, Samples: t.referenceSamples()}
	for _, x := range []struct {
		src  data.Source
		n    int64 // samples to read
		size int64 // sequences of the source
		dst  *[]float64
	}{{train, n, c.Scan.Samples(), &r.Train}, {mismatch, n, c.Scan.Samples(), &r.Mismatch}, {c.Val, -1, 0, &r.Val}, {c.ValMismatch, -1, 0, &r.ValMismatch}} {
		if x.src == nil {
			continue
		}
		if x.n < 0 {
			x.n, x.size = x.src.Samples(), x.src.Samples()
		}
		var err error
		if *x.dst, err = t.logProbs(ctx, x.src, x.n, x.size); err != nil {
			return fmt.Errorf("reference: %w", err)
		}
	}
	s.reference = r
	if !t.root() {
		return nil
	}
	return writeReference(t.referencePath(), r)
}

// referAgain computes a lost reference from the checkpoint that the stage started with, and restores the weights.
func (t *Trainer) referAgain(ctx context.Context, key string) error {
	if t.stage.index == 0 {
		return fmt.Errorf("%s is missing, and the stage has no earlier one to compute it from: start the stage again", t.referencePath())
	}
	before := t.run.Stages[t.stage.index-1].Name
	var dir string
	if t.root() {
		if r, _, err := checkpoint.OpenLatest(t.checkpoints(), before); err == nil {
			dir = r.Dir()
			r.Close()
		}
	}
	all, err := comm.GatherBytes(ctx, t.groups.World, []byte(dir))
	if err != nil {
		return err
	}
	if dir = string(all[0]); dir == "" {
		return fmt.Errorf("%s is missing, and so is the checkpoint of stage %s to compute it from", t.referencePath(), before)
	}
	if err := t.together(ctx, t.loadFrom(dir)); err != nil {
		return err
	}
	weights, err := t.weightsHash(ctx)
	if err != nil {
		return err
	}
	if got := weights + "-" + t.stage.train.Fingerprint(); got != key {
		return fmt.Errorf("%s is missing, and checkpoint %s is not what the stage started from", t.referencePath(), dir)
	}
	if err := t.computeReference(ctx, key); err != nil {
		return err
	}
	return t.together(ctx, t.loadFrom(t.last))
}

// loadFrom puts the weights of a checkpoint into the chunks.
func (t *Trainer) loadFrom(dir string) error {
	r, err := checkpoint.Open(dir)
	if err != nil {
		return err
	}
	defer r.Close()
	for _, c := range t.chunks {
		if err := loadWeights(r, c); err != nil {
			return err
		}
	}
	return nil
}

// logProbs is the log-probability of the answer of each of the first n samples of src, over the whole mesh, by sequence.
func (t *Trainer) logProbs(ctx context.Context, src data.Source, n, sequences int64) ([]float64, error) {
	out := make([]float64, sequences)
	err := t.forward(ctx, src, 0, n, model.Settings{}, func() error {
		for m := range t.micros {
			for _, c := range t.chunks {
				for i, v := range c.LogProbs(m) {
					out[sequence(&t.batches[m].Batch, i)] = v
				}
			}
		}
		return nil
	})
	if err != nil {
		return nil, err
	}
	// Each sequence is known to the head of one pipeline and is 0 elsewhere.
	return out, comm.AllReduce(ctx, t.groups.World, out, comm.Sum)
}

// weightsHash is a hash of all weights that does not depend on the mesh: a sum of hashes of rows.
func (t *Trainer) weightsHash(ctx context.Context) (string, error) {
	t.rec.Begin(trace.Other, "hash")
	defer t.rec.End()
	var sum uint64
	for _, s := range t.sync.Slices() {
		n := s.Param.RowLen()
		for row := s.Row0; row < s.Row1; row++ {
			h := fnv.New64a()
			fmt.Fprintf(h, "%s %d ", s.Param.Name, row)
			var b [4]byte
			for _, v := range s.Value[(row-s.Row0)*n:][:n] {
				binary.LittleEndian.PutUint32(b[:], math.Float32bits(v))
				h.Write(b[:])
			}
			sum += h.Sum64()
		}
	}
	total := []int64{int64(sum)}
	if err := comm.AllReduce(ctx, t.groups.World, total, comm.Sum); err != nil {
		return "", fmt.Errorf("hash of the weights: %w", err)
	}
	return fmt.Sprintf("%016x", uint64(total[0])), nil
}

// writeReference writes the file whole or not at all.
func writeReference(path string, r *reference) error {
	b, err := json.Marshal(r) // float64 survive JSON to the bit
	if err != nil {
		return fmt.Errorf("reference: %w", err)
	}
	tmp := path + ".tmp"
	if err := os.WriteFile(tmp, b, 0o644); err != nil {
		return fmt.Errorf("reference: %w", err)
	}
	return os.Rename(tmp, path)
}

// readReference returns the file's bytes if they are of key and cover that many samples (0: all).
func readReference(path, key string, samples int64) ([]byte, error) {
	b, err := os.ReadFile(path)
	if err != nil {
		return nil, err
	}
	r, err := decodeReference(b)
	if err != nil {
		return nil, fmt.Errorf("%s: %w", path, err)
	}
	if r.Key != key {
		return nil, fmt.Errorf("%s is of another model or other data", path)
	}
	if r.Samples != 0 && (samples == 0 || samples > r.Samples) {
		return nil, fmt.Errorf("%s covers %d samples, and the stage has become longer", path, r.Samples)
	}
	return b, nil
}

func decodeReference(b []byte) (*reference, error) {
	r := new(reference)
	if err := json.Unmarshal(b, r); err != nil {
		return nil, fmt.Errorf("reference: %w", err)
	}
	return r, nil
}
