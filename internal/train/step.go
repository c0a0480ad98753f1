package train

import (
	"context"

	"moetor/optimizer"
	"moetor/parallel/pipeline"
)

// step is one optimizer step on this rank: everything a step does, on one page. Losses and gradients are sums until
// line 5, where they are divided once by the weight of the whole global batch, so accumulation, data parallelism and
// pipelines are the same arithmetic.
func (t *Trainer) step(ctx context.Context) (Report, error) {
	v := t.stage.plan.At(t.pos)
	if err := t.read(ctx, v); err != nil { // 1 the micro-batches of this data rank
		return Report{}, err
	}
	t.begin(v) // 2 gradients, sums and counts to zero

	if err := pipeline.Run(ctx, t.actions(), t.stages, t.link, t.observe); err != nil { // 3 forward and backward
		return Report{}, err
	}
	sum, err := t.agree(ctx) // 4 loss, weight and expert counts over all ranks
	if err != nil {
		return Report{}, err
	}
	norm, err := t.reduce(ctx, 1/sum.Weight) // 5 reduce, scale by the global weight, measure
	if err != nil {
		return Report{}, err
	}
	r := t.report(v, sum, norm)
	if !r.finite() { // 6 every rank sees the same numbers, so every rank refuses
		return r, t.diverged(ctx, r)
	}
	t.update(v.Rate, optimizer.ClipFactor(norm, t.stage.cfg.Optimizer.Clip)) // 7 the shard that this rank owns
	if err := t.publish(ctx); err != nil {                                   // 8 gather the new weights
		return r, err
	}
	t.updateBiases(sum.Counts, v.BiasSpeed) // 9 router biases, by the load of the batch just processed
	t.pos = t.stage.plan.Advance(t.pos)
	return r, nil
}
