package train

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"slices"
	"strings"

	"moetor/checkpoint"
	"moetor/comm"
	"moetor/configs"
	"moetor/model"
	"moetor/optimizer"
)

// Version is written into checkpoints as the engine that made them.
const Version = "moetor 0.1.0"

// save writes a checkpoint of the state after the last step. All ranks take part; an error on any of them is an error
// on all, and leaves earlier checkpoints as they were.
func (t *Trainer) save(ctx context.Context, _ *Report) error {
	dir := checkpoint.Dir(t.checkpoints(), t.stage.cfg.Name, t.pos.Step)
	var err error
	if t.root() {
		err = checkpoint.Begin(dir)
	}
	if err := t.together(ctx, err); err != nil {
		return fmt.Errorf("checkpoint %s: %w", dir, err)
	}
	var meta *checkpoint.Meta
	if t.root() {
		if meta, err = t.meta(); err != nil {
			return err
		}
	}
	file, err := checkpoint.WriteRank(dir, t.world.Rank(), t.saved(), meta)
	if err = t.together(ctx, err); err == nil {
		var blob []byte
		if blob, err = json.Marshal(file); err != nil {
			return err
		}
		var all [][]byte
		if all, err = comm.GatherBytes(ctx, t.groups.World, blob); err != nil {
			return fmt.Errorf("checkpoint %s: %w", dir, err)
		}
		if t.root() {
			err = commit(dir, *meta, all)
		}
		err = t.together(ctx, err)
	}
	if err != nil {
		if t.root() {
			err = errors.Join(err, checkpoint.Discard(dir))
		}
		return fmt.Errorf("checkpoint %s: %w", dir, err)
	}
	t.last = dir
	if t.root() {
		return checkpoint.Prune(t.checkpoints(), t.stage.cfg.Name, t.run.Checkpoint.Keep)
	}
	return nil
}

func commit(dir string, meta checkpoint.Meta, blobs [][]byte) error {
	files := make([]checkpoint.File, len(blobs))
	for i, b := range blobs {
		if err := json.Unmarshal(b, &files[i]); err != nil {
			return fmt.Errorf("file of rank %d: %w", i, err)
		}
	}
	return checkpoint.Commit(dir, &meta, files)
}

// together makes an error of any rank the error of all; the first rank's message wins.
func (t *Trainer) together(ctx context.Context, err error) error {
	var mine []byte
	if err != nil {
		mine = []byte(err.Error())
	}
	all, gerr := comm.GatherBytes(ctx, t.groups.World, mine)
	if gerr != nil {
		return errors.Join(err, gerr)
	}
	if err != nil {
		return err
	}
	for r, msg := range all {
		if len(msg) > 0 {
			return fmt.Errorf("rank %d: %s", r, msg)
		}
	}
	return nil
}

// meta is the state of the run beside its tensors.
func (t *Trainer) meta() (*checkpoint.Meta, error) {
	tok, err := t.tokenizer.Marshal()
	if err != nil {
		return nil, err
	}
	n := model.Count(t.run.Model)
	key := ""
	if t.stage.reference != nil {
		key = t.stage.reference.Key
	}
	reference, err := json.Marshal(key)
	if err != nil {
		return nil, err
	}
	return &checkpoint.Meta{
		Engine: Version, Stage: t.stage.cfg.Name, Step: t.pos.Step, GlobalStep: t.before + t.pos.Step,
		Tokens: t.pos.Tokens, Samples: t.pos.Samples, Seed: t.run.Run.Seed,
		RNG:  rngState(t.run.Run.Seed, t.pos),
		Data: t.stage.train.Fingerprint(), Tokenizer: tok, Config: t.config,
		Params: n.Total, ActiveParams: n.Active,
		Mesh:  checkpoint.Mesh{World: t.world.Size(), Pipeline: t.mesh.Pipeline, Data: t.mesh.Data, Expert: t.mesh.Expert},
		Extra: map[string]json.RawMessage{"reference": reference},
	}, nil
}

// rngState is the whole state of the engine's randomness: it is counter-based, so the seed and the counters are it.
func rngState(seed uint64, p optimizer.Position) []byte {
	b, err := json.Marshal(struct {
		Kind    string `json:"kind"`
		Seed    uint64 `json:"seed"`
		Samples int64  `json:"samples"`
	}{"counter", seed, p.Samples})
	if err != nil {
		panic(err) // a struct of numbers always marshals
	}
	return b
}

// saved are the slices that this rank writes: the rows it owns with their moments, and the router biases of its layers
// (by the first data rank of the stage, since all have the same).
func (t *Trainer) saved() []checkpoint.Slice {
	var out []checkpoint.Slice
	moments := t.adam.Slices()
	for i, s := range t.sync.Slices() {
		base, m := checkpoint.Slice{Name: s.Param.Name, Shape: s.Param.Shape, Row0: s.Row0, Rows: s.Row1 - s.Row0}, &moments[i]
		for _, x := range []struct {
			kind checkpoint.Kind
			data []float32
			bf16 []uint16
		}{{checkpoint.Weight, s.Value, nil}, {checkpoint.ExpAvg, m.M, m.M16}, {checkpoint.ExpAvgSq, m.V, m.V16}} {
			c := base
			c.Kind, c.Data, c.BF16 = x.kind, x.data, x.bf16
			out = append(out, c)
		}
	}
	if t.data == 0 {
		for _, c := range t.chunks {
			for _, r := range c.Routers() {
				if r.Bias != nil {
					out = append(out, checkpoint.Slice{Name: r.BiasName(), Kind: checkpoint.Weight, Shape: []int{len(r.Bias)}, Rows: len(r.Bias), Data: r.Bias})
				}
			}
		}
	}
	return out
}

// wanted lists the tensors of a checkpoint of this model.
func wanted(c model.Config, moments bool) []checkpoint.Want {
	var out []checkpoint.Want
	for _, info := range model.Tensors(c) {
		out = append(out, checkpoint.Want{Name: info.Name, Kind: checkpoint.Weight, Shape: info.Shape})
		if moments && !info.Buffer {
			out = append(out, checkpoint.Want{Name: info.Name, Kind: checkpoint.ExpAvg, Shape: info.Shape},
				checkpoint.Want{Name: info.Name, Kind: checkpoint.ExpAvgSq, Shape: info.Shape})
		}
	}
	return out
}

// resume continues from the newest complete checkpoint and returns the number of its stage. Without any checkpoint the
// run starts from the beginning.
func (t *Trainer) resume(ctx context.Context) (int, error) {
	var found string
	var err error
	if t.root() {
		found, err = t.newest()
	}
	if err := t.together(ctx, err); err != nil {
		return 0, RefusedError{fmt.Errorf("resume %s: %w", t.opts.Dir, err)}
	}
	all, err := comm.GatherBytes(ctx, t.groups.World, []byte(found))
	if err != nil {
		return 0, err
	}
	dir := string(all[0])
	if dir == "" {
		t.note("no checkpoint in %s yet: starting from the beginning", t.checkpoints())
		return 0, nil
	}
	i, key, err := t.restore(ctx, dir)
	if err := t.together(ctx, err); err != nil {
		return 0, RefusedError{fmt.Errorf("resume from %s: %w", dir, err)}
	}
	t.last = dir
	if !t.stage.plan.Done(t.pos) {
		if err := t.refer(ctx, key); err != nil {
			return 0, fmt.Errorf("resume from %s: %w", dir, err)
		}
	}
	t.note("resumed from %s: %s step %d, %d tokens", dir, t.stage.cfg.Name, t.pos.Step, t.pos.Tokens)
	return i, nil
}

// newest is the directory of the newest complete checkpoint of the latest stage that has one, "" if there is none.
func (t *Trainer) newest() (string, error) {
	for _, s := range slices.Backward(t.run.Stages) {
		r, skipped, err := checkpoint.OpenLatest(t.checkpoints(), s.Name)
		for _, why := range skipped {
			t.note("passed over an incomplete checkpoint: %s", why)
		}
		if errors.Is(err, checkpoint.ErrNotFound) {
			continue
		}
		if err != nil {
			return "", err
		}
		return r.Dir(), r.Close()
	}
	// Where nothing was ever finished the run begins. What was finished and cannot be read must not be written over.
	held, _ := fs.Glob(os.DirFS(t.checkpoints()), "*/manifest.json")
	held = slices.DeleteFunc(held, func(path string) bool {
		return !slices.ContainsFunc(t.run.Stages, func(s configs.Stage) bool { return strings.HasPrefix(path, s.Name+"-") })
	})
	if len(held) > 0 {
		return "", fmt.Errorf("none of the %d checkpoints there is whole (train inspect DIR says why); --overwrite starts anew", len(held))
	}
	return "", nil
}

// restore loads weights, biases, moments and position from a checkpoint written at any mesh. It returns the number of the
// stage and the key of its reference.
func (t *Trainer) restore(ctx context.Context, dir string) (stage int, key string, err error) {
	r, err := checkpoint.Open(dir)
	if err != nil {
		return 0, "", err
	}
	defer r.Close()
	m := r.Meta()
	i := slices.IndexFunc(t.run.Stages, func(s configs.Stage) bool { return s.Name == m.Stage })
	if i < 0 {
		return 0, "", fmt.Errorf("its stage %q is not in the configuration", m.Stage)
	}
	if m.Seed != t.run.Run.Seed {
		return 0, "", fmt.Errorf("run.seed=%d, but the checkpoint was made with %d", t.run.Run.Seed, m.Seed)
	}
	if err := t.enter(ctx, i, optimizer.Position{Step: m.Step, Tokens: m.Tokens, Samples: m.Samples}); err != nil {
		return 0, "", err
	}
	if err := r.Check(wanted(t.run.Model, true)); err != nil {
		return 0, "", err
	}
	if got := t.stage.train.Fingerprint(); got != m.Data {
		return 0, "", fmt.Errorf("the data, the tokenizer or how samples are cut changed since the checkpoint (fingerprint %s, checkpoint %s)", got, m.Data)
	}
	if text, ok := m.Extra["reference"]; ok {
		if err := json.Unmarshal(text, &key); err != nil {
			return 0, "", fmt.Errorf("state %q: %w", "reference", err)
		}
	}
	t.before = m.GlobalStep - m.Step
	for _, c := range t.chunks {
		if err := loadWeights(r, c); err != nil {
			return 0, "", err
		}
	}
	return i, key, t.loadMoments(r)
}

// loadMoments fills the moments of the rows that this rank owns. The checkpoint's may be of the other type.
func (t *Trainer) loadMoments(r *checkpoint.Reader) error {
	moments := t.adam.Slices()
	for i, s := range t.sync.Slices() {
		m := &moments[i]
		for _, x := range []struct {
			kind checkpoint.Kind
			fp32 []float32
			bf16 []uint16
		}{{checkpoint.ExpAvg, m.M, m.M16}, {checkpoint.ExpAvgSq, m.V, m.V16}} {
			var err error
			if x.bf16 != nil {
				err = r.ReadBF16(s.Param.Name, x.kind, s.Row0, s.Row1-s.Row0, x.bf16)
			} else {
				err = r.Read(s.Param.Name, x.kind, s.Row0, s.Row1-s.Row0, x.fp32)
			}
			if err != nil {
				return err
			}
		}
	}
	return nil
}

// initial loads the weights, and nothing else, of another run's checkpoint.
func (t *Trainer) initial(path string) error {
	r, _, err := OpenCheckpoint(path)
	if err != nil {
		return err
	}
	defer r.Close()
	tok, err := t.tokenizer.Marshal()
	if err != nil {
		return err
	}
	m := r.Meta()
	if !bytes.Equal(tok, m.Tokenizer) {
		return fmt.Errorf("%s has another tokenizer than tokenizer.kind=%s of this run", r.Dir(), t.run.Tokenizer.Kind)
	}
	if err := r.Check(wanted(t.run.Model, false)); err != nil {
		return fmt.Errorf("%s: %w", r.Dir(), err)
	}
	for _, c := range t.chunks {
		if err := loadWeights(r, c); err != nil {
			return fmt.Errorf("%s: %w", r.Dir(), err)
		}
	}
	t.note("weights of %s (%s step %d)", r.Dir(), m.Stage, m.Step)
	return nil
}

// loadWeights fills a chunk's parameters and router biases.
func loadWeights(r *checkpoint.Reader, c *model.Chunk) error {
	for _, p := range c.Params() {
		if err := r.Read(p.Name, checkpoint.Weight, 0, p.Rows(), p.Value); err != nil {
			return err
		}
	}
	for _, g := range c.Routers() {
		if g.Bias != nil {
			if err := r.Read(g.BiasName(), checkpoint.Weight, 0, len(g.Bias), g.Bias); err != nil {
				return err
			}
		}
	}
	return nil
}

// position tells which metrics lines lie before the current position.
func (t *Trainer) position() func(stage string, step int64) bool {
	order := map[string]int{}
	for i, s := range t.run.Stages {
		order[s.Name] = i
	}
	at, step := 0, int64(0)
	if t.stage != nil {
		at, step = t.stage.index, t.pos.Step
	}
	return func(stage string, s int64) bool {
		i, ok := order[stage]
		return ok && (i < at || i == at && s <= step)
	}
}

func (t *Trainer) note(format string, args ...any) {
	t.log.Info(fmt.Sprintf(format, args...))
	if t.root() && t.opts.Note != nil {
		t.opts.Note(format, args...)
	}
}

// diverged names where the first number that is not finite came from. Every rank calls it, since all see the same sums.
func (t *Trainer) diverged(ctx context.Context, r Report) error {
	var first *origin
	var mine *origin
	for _, c := range t.chunks {
		if e := c.NonFinite(); e != nil && (mine == nil || e.Before(&mine.NonFiniteError)) {
			mine = &origin{Rank: t.world.Rank(), NonFiniteError: *e}
		}
	}
	blob, err := json.Marshal(mine)
	if err != nil {
		return err
	}
	all, err := comm.GatherBytes(ctx, t.groups.World, blob)
	if err != nil {
		return err
	}
	for rank, b := range all {
		var o *origin
		if err := json.Unmarshal(b, &o); err != nil {
			return fmt.Errorf("rank %d: %w", rank, err)
		}
		if o != nil && (first == nil || o.Before(&first.NonFiniteError)) {
			first = o
		}
	}
	where := ""
	if first != nil {
		where = fmt.Sprintf("rank %d: %v", first.Rank, &first.NonFiniteError)
	} else if name, rank := t.sync.NonFinite(); name != "" {
		where = fmt.Sprintf("rank %d: the gradient of %s, summed over ranks", rank, name)
	}
	return &DivergedError{Step: r.Step, Loss: r.Loss, Norm: r.GradNorm, Origin: where}
}

// origin is where a rank first saw a number that is not finite.
type origin struct {
	Rank int
	model.NonFiniteError
}

// A DivergedError says that a step was refused on every rank, before any weight changed.
type DivergedError struct {
	Step       int64
	Loss, Norm float64
	Origin     string
}

func (e *DivergedError) Error() string {
	return fmt.Sprintf("step %d refused, weights are those of step %d: loss %v, gradient norm %v; first seen at %s", e.Step, e.Step-1, e.Loss, e.Norm, e.Origin)
}
