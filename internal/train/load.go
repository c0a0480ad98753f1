package train

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"

	"moetor/checkpoint"
	"moetor/configs"
	"moetor/data"
	"moetor/internal/train/objective"
	"moetor/model"
)

// A Model is a trained model in one process, as evaluation and generation use it.
type Model struct {
	Dir       string // of the checkpoint
	Run       *configs.Run
	Meta      checkpoint.Meta
	Stage     configs.Stage // in which the checkpoint was written
	Chunk     *model.Chunk
	Tokenizer data.Tokenizer
}

// OpenCheckpoint opens a checkpoint given as itself (a directory with a manifest), as a directory of checkpoints, or as
// a run directory; of several it takes the newest whose checksums hold.
func OpenCheckpoint(path string) (*checkpoint.Reader, []string, error) {
	if _, err := os.Stat(path); err != nil {
		return nil, nil, fmt.Errorf("checkpoint %s: %w", path, bare(err))
	}
	if _, err := os.Stat(filepath.Join(path, "manifest.json")); err == nil {
		r, err := checkpoint.Open(path)
		return r, nil, err
	}
	root := filepath.Join(path, "checkpoints")
	if _, err := os.Stat(root); err != nil {
		root = path
	}
	r, skipped, err := checkpoint.OpenLatest(root, "")
	if errors.Is(err, checkpoint.ErrNotFound) {
		err = fmt.Errorf("%s: no complete checkpoint in it", path)
	}
	return r, skipped, err
}

func bare(err error) error {
	var p *os.PathError
	if errors.As(err, &p) {
		return p.Err
	}
	return err
}

// LoadModel loads the model of a checkpoint, written at any mesh, to be used in a recipe, whatever it was trained in.
func LoadModel(path string, recipe model.Recipe) (*Model, error) {
	r, _, err := OpenCheckpoint(path)
	if err != nil {
		return nil, err
	}
	defer r.Close()
	m := &Model{Dir: r.Dir(), Meta: r.Meta()}
	fail := func(err error) (*Model, error) { return nil, fmt.Errorf("checkpoint %s: %w", r.Dir(), err) }
	if m.Run, err = configs.Parse([]byte(m.Meta.Config), "its configuration", nil); err != nil {
		return fail(err)
	}
	for _, st := range m.Run.Stages {
		if st.Name == m.Meta.Stage {
			m.Stage = st
			_, needs, err := objective.New(st.Objective, st.Preference)
			if err != nil {
				return fail(err)
			}
			if needs.Score {
				m.Run.Model = m.Run.Model.RewardModel()
			}
		}
	}
	if m.Tokenizer, err = data.LoadTokenizer(m.Meta.Tokenizer); err != nil {
		return fail(err)
	}
	if err := r.Check(wanted(m.Run.Model, true)); err != nil {
		return fail(err)
	}
	m.Run.Model.Recipe, m.Run.Model.Recompute = recipe, nil // which changes no bit
	if m.Chunk, err = model.New(m.Run.Model, model.Whole(m.Run.Model), m.Run.Run.Seed, nil); err != nil {
		return fail(err)
	}
	if err := loadWeights(r, m.Chunk); err != nil {
		return fail(err)
	}
	return m, nil
}

// Evaluate sums the loss of every target of src, batch sequences at a time. The result does not depend on batch: sums
// are of targets, and divided once.
func (m *Model) Evaluate(ctx context.Context, src data.Source, batch int) (loss, targets float64, err error) {
	var b batchBuffer
	for first := int64(0); first < src.Samples(); first += int64(batch) {
		if err := ctx.Err(); err != nil {
			return 0, 0, err
		}
		n := int(min(int64(batch), src.Samples()-first))
		if err := src.Read(ctx, first, n, &b.Batch); err != nil {
			return 0, 0, err
		}
		m.Chunk.Bind([]model.Micro{b.micro(nil)}, model.Settings{SameWeights: first > 0})
		if _, err := m.Chunk.Evaluate(ctx, 0, nil); err != nil {
			return 0, 0, err
		}
		s := m.Chunk.MicroSums(0)
		loss += s.Loss
		targets += s.Weight
	}
	return loss, targets, nil
}
