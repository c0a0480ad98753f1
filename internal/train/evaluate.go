package train

import (
	"context"

	"moetor/data"
	"moetor/model"
	"moetor/parallel/pipeline"
)

// evalMicros is how many micro-batches a rank evaluates between two agreements; it bounds memory, not the result.
const evalMicros = 8

// evaluator runs a chunk forward only.
type evaluator struct{ *model.Chunk }

func (e evaluator) Forward(ctx context.Context, micro int, in []float32) ([]float32, error) {
	return e.Chunk.Evaluate(ctx, micro, in)
}

// forward runs samples [first, first+n) of src through the whole mesh, forward only, and calls each after every round of
// micro-batches, which are then t.micros. All ranks do the same rounds.
func (t *Trainer) forward(ctx context.Context, src data.Source, first, n int64, s model.Settings, each func() error) error {
	stages := make([]pipeline.Stage, len(t.stages))
	for i, st := range t.stages {
		if c, ok := st.(*model.Chunk); ok {
			stages[i] = evaluator{c}
		}
	}
	round := int64(evalMicros * t.run.Parallel.Microbatch * t.mesh.Data)
	for at := first; at < first+n; at += round {
		if err := t.readSamples(ctx, src, at, int(min(round, first+n-at))); err != nil {
			return err
		}
		key := planKey{len(t.micros), true}
		if err := t.plan(key); err != nil {
			return err
		}
		s.SameWeights = at > first
		t.bind(s)
		if err := pipeline.Run(ctx, t.plans[key], stages, t.link, nil); err != nil {
			return err
		}
		if err := each(); err != nil {
			return err
		}
	}
	return nil
}

// evaluate sums the loss over every sample of src once, in order, over the whole mesh. Sums are divided by nothing here,
// so the result does not depend on how the samples are cut into batches.
func (t *Trainer) evaluate(ctx context.Context, src data.Source) (Sums, error) {
	var total Sums
	kl, err := t.divergence(ctx, t.stage.corpus.ValMismatch, 0, src.Samples())
	if err != nil {
		return total, err
	}
	t.stage.setKL(kl)
	err = t.forward(ctx, src, 0, src.Samples(), t.stage.settings(0), func() error {
		s, err := t.lossSums(ctx)
		if err != nil {
			return err
		}
		total.add(s)
		total.Stop = total.Stop || s.Stop
		return nil
	})
	return total, err
}
