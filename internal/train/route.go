package train

import (
	"context"

	"moetor/internal/tensor"
	"moetor/internal/trace"
	"moetor/model"
	"moetor/parallel/expert"
)

// timedRoute books the moves of a route as dispatch and combine.
type timedRoute struct {
	*expert.Route
	rec *trace.Recorder
}

var _ model.Route = timedRoute{}

func (r timedRoute) Dispatch(ctx context.Context, dst, src tensor.Mat) error {
	r.rec.Begin(trace.Dispatch, "")
	defer r.rec.End()
	return r.Route.Dispatch(ctx, dst, src)
}

func (r timedRoute) Combine(ctx context.Context, dst, src tensor.Mat) error {
	r.rec.Begin(trace.Combine, "")
	defer r.rec.End()
	return r.Route.Combine(ctx, dst, src)
}

// exchange is the model's door to the other expert ranks.
func (t *Trainer) exchange(ctx context.Context, _ int, rowsPerExpert []int) (model.Route, error) {
	t.rec.Begin(trace.Dispatch, "route")
	defer t.rec.End()
	r, err := t.experts.Route(ctx, rowsPerExpert)
	if err != nil {
		return nil, err
	}
	return timedRoute{r, t.rec}, nil
}
