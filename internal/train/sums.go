package train

import (
	"context"
	"fmt"
	"math"

	"moetor/comm"
	"moetor/internal/trace"
	"moetor/model"
)

// Sums are the numbers of one global batch that all ranks agree on.
type Sums struct {
	model.Sums
	Tokens float64   // real ones, padding not
	Counts [][]int64 // per MoE layer of the whole model (MTP modules last), tokens sent to each expert
	Stop   bool      // some rank was asked to stop
}

// add adds the numbers of another batch.
func (s *Sums) add(o Sums) {
	s.Loss += o.Loss
	s.Weight += o.Weight
	s.MTP += o.MTP
	s.Aux += o.Aux
	s.Tokens += o.Tokens
	if s.Metrics == nil {
		s.Metrics = make([]float64, len(o.Metrics))
	}
	for i, v := range o.Metrics {
		s.Metrics[i] += v
	}
}

// sumsPerMicro is how many numbers a micro-batch contributes before what its objective adds up.
const sumsPerMicro = 5

// agree adds up the loss terms and expert counts of the step over all ranks.
func (t *Trainer) agree(ctx context.Context) (Sums, error) {
	t.rec.Begin(trace.Reduce, "agree")
	defer t.rec.End()
	s, err := t.lossSums(ctx)
	if err != nil {
		return Sums{}, fmt.Errorf("agree on the loss: %w", err)
	}
	if s.Weight == 0 {
		return s, fmt.Errorf("the global batch has no target token (all weights are 0)")
	}
	// Every rank counts the tokens of its own micro-batches in its own layers; the others hold 0.
	experts := t.run.Model.MoE.Experts
	counts := resize(&t.scratch.counts, t.routed*experts)
	clear(counts)
	for _, c := range t.chunks {
		for _, r := range c.Routers() {
			copy(counts[t.routerIndex(r)*experts:][:experts], r.Counts)
		}
	}
	if err := comm.AllReduce(ctx, t.groups.World, counts, comm.Sum); err != nil {
		return Sums{}, fmt.Errorf("agree on expert counts: %w", err)
	}
	for l := range t.routed {
		s.Counts = append(s.Counts, counts[l*experts:][:experts])
	}
	return s, nil
}

// lossSums adds up the loss terms of t.micros over all ranks.
//
// The losses of a micro-batch are known to one rank of its pipeline, the head's, and the others hold 0; its balance
// losses are spread over the stages, as numbers whose sums are exact (see model.Router). The micro-batches are then
// added in their global order, so the result has the same bits at every mesh.
func (t *Trainer) lossSums(ctx context.Context) (Sums, error) {
	ranks := t.mesh.Data
	width := sumsPerMicro + len(t.stage.metrics)
	global := len(t.micros) * ranks
	f := resize(&t.scratch.sums, global*width+1)
	clear(f)
	for m := range t.micros {
		row := f[(m*ranks+t.data)*width:][:width]
		for _, c := range t.chunks {
			s := c.MicroSums(m)
			row[0] += s.Loss
			row[1] += s.Weight
			row[2] += s.MTP
			row[3] += s.Aux
			if c.Part().Head {
				row[4] = realTokens(&t.micros[m])
			}
			copy(row[sumsPerMicro:], s.Metrics)
		}
	}
	if t.stopRequested() {
		f[len(f)-1] = 1
	}
	if err := comm.AllReduce(ctx, t.groups.World, f, comm.Sum); err != nil {
		return Sums{}, err
	}
	s := Sums{Stop: f[len(f)-1] > 0}
	for g := range global {
		row := f[g*width:][:width]
		s.add(Sums{Sums: model.Sums{Loss: row[0], Weight: row[1], MTP: row[2], Aux: row[3], Metrics: row[sumsPerMicro:]}, Tokens: row[4]})
	}
	return s, nil
}

// realTokens counts the tokens of a micro-batch that are not padding.
func realTokens(m *model.Micro) float64 {
	if m.Valid == nil {
		return float64(m.Rows())
	}
	n := 0
	for _, v := range m.Valid {
		n += int(v)
	}
	return float64(n)
}

// routerIndex is the place of a router among the MoE layers of the whole model.
func (t *Trainer) routerIndex(r *model.Router) int { return r.Layer - t.run.Model.DenseLayers }

// updateBiases moves every router bias of this rank by the load of the whole global batch.
func (t *Trainer) updateBiases(counts [][]int64, speed float64) {
	if speed == 0 {
		return
	}
	for _, c := range t.chunks {
		for _, r := range c.Routers() {
			r.UpdateBias(counts[t.routerIndex(r)], float32(speed))
		}
	}
}

func finite(x float64) bool { return !math.IsNaN(x) && !math.IsInf(x, 0) }

// resize returns a slice of n elements, reusing *buf's memory where it is large enough.
func resize[T any](buf *[]T, n int) []T {
	if cap(*buf) < n {
		*buf = make([]T, n)
	}
	*buf = (*buf)[:n]
	return *buf
}
