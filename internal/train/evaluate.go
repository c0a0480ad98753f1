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

// evaluate sums the loss over every sample of src once, in order, over the whole mesh. Sums of per-target losses are
// divided by nothing here, so the result does not depend on how the samples are cut into batches.
func (t *Trainer) evaluate(ctx context.Context, src data.Source) (Sums, error) {
	stages := make([]pipeline.Stage, len(t.stages))
	for s, st := range t.stages {
		if c, ok := st.(*model.Chunk); ok {
			stages[s] = evaluator{c}
		}
	}
	var total Sums
	round := int64(evalMicros * t.run.Parallel.Microbatch * t.mesh.Data)
	for first := int64(0); first < src.Samples(); first += round {
		if err := t.readSamples(ctx, src, first, int(min(round, src.Samples()-first))); err != nil {
			return total, err
		}
		key := planKey{len(t.micros), true}
		if err := t.plan(key); err != nil {
			return total, err
		}
		t.bind(model.Settings{})
		if err := pipeline.Run(ctx, t.plans[key], stages, t.link, nil); err != nil {
			return total, err
		}
		s, err := t.lossSums(ctx)
		if err != nil {
			return total, err
		}
		total.Loss += s.Loss
		total.Weight += s.Weight
		total.Stop = total.Stop || s.Stop
	}
	return total, nil
}
