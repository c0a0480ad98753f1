package train

import (
	"context"
	"fmt"
	"math"
	"regexp"
	"strings"

	"moetor/data"
	"moetor/model"
)

// A GradientError says how far gradients in a recipe are from those in FP32, of the same weights and batches, for one kind
// of parameter.
type GradientError struct {
	Kind string `json:"kind"` // a parameter's name with its layer and expert left out
	// Error is the root mean square over batches of |g - f|, relative to that of |f|; f is the gradient in FP32.
	Error float64 `json:"error"`
	// Mean is |G - F| / |F| of the sums over all batches: what does not average out.
	Mean float64 `json:"mean"`
	// Scale is the length of G along F, relative to F: below 1, gradients are too small.
	Scale float64 `json:"scale"`
	// Sampling is how far F is from the gradient of all text, estimated from how batches differ, relative to |F|.
	Sampling float64 `json:"sampling"`
}

// parameterKind leaves layer and expert numbers out of a parameter's name.
func parameterKind(name string) string {
	return strings.TrimPrefix(numbers.ReplaceAllString(name, "."), "model.")
}

var numbers = regexp.MustCompile(`(\.layers)?\.\d+\.`)

// settings are those of a step of the stage, with the loss of a language model.
func (m *Model) settings(same bool) model.Settings {
	return model.Settings{MTPWeight: m.Stage.MTPWeight.At(m.Meta.Tokens), SeqAux: m.Stage.Router.SeqAux, SameWeights: same}
}

// CompareGradients compares gradients of the model with those of its checkpoint in FP32, over batches (at least 2) batches of
// batch sequences from the beginning of src. The loss is that of the checkpoint's stage where it trains a language model: MTP
// modules have the weight that they had there. The last entry, named "all", is of all parameters; kinds that no gradient reaches
// are left out. An error if src has too few sequences.
func (m *Model) CompareGradients(ctx context.Context, src data.Source, batch, batches int) ([]GradientError, error) {
	if int64(batches) > src.Samples()/int64(batch) {
		return nil, fmt.Errorf("the text has %d sequences, not enough for %d batches of %d", src.Samples(), batches, batch)
	}
	full, err := LoadModel(m.Dir, model.Recipe{})
	if err != nil {
		return nil, err
	}
	pair := [2]*Model{full, m}
	var values [2][]float32 // gradients of the batch
	var sums [2][]float64   // of all batches
	for i := range pair {
		_, values[i] = pair[i].Chunk.Blocks()
		sums[i] = make([]float64, len(values[i]))
	}
	type squares struct{ f, diff, sumF, sumDiff, along float64 }
	var kinds []string
	of := map[string]*squares{}
	params := full.Chunk.Params()
	kindOfParam := make([]*squares, len(params))
	for i, p := range params {
		kind := parameterKind(p.Name)
		if of[kind] == nil {
			of[kind] = &squares{}
			kinds = append(kinds, kind)
		}
		kindOfParam[i] = of[kind]
	}
	var b batchBuffer
	for n := range batches {
		if err := src.Read(ctx, int64(n)*int64(batch), batch, &b.Batch); err != nil {
			return nil, err
		}
		for i := range pair {
			if err := pair[i].gradient(ctx, b.micro(nil), n > 0); err != nil {
				return nil, err
			}
		}
		at := 0
		for i, p := range params {
			s := kindOfParam[i]
			for j := at; j < at+p.Len(); j++ {
				f, g := float64(values[0][j]), float64(values[1][j])
				sums[0][j] += f
				sums[1][j] += g
				s.f += f * f
				s.diff += (g - f) * (g - f)
			}
			at += p.Len()
		}
	}
	at := 0
	for i, p := range params {
		s := kindOfParam[i]
		for j := at; j < at+p.Len(); j++ {
			f, g := sums[0][j], sums[1][j]
			s.sumF += f * f
			s.sumDiff += (g - f) * (g - f)
			s.along += f * g
		}
		at += p.Len()
	}
	all := squares{}
	for _, kind := range kinds {
		s := of[kind]
		all.f, all.diff, all.sumF, all.sumDiff, all.along = all.f+s.f, all.diff+s.diff, all.sumF+s.sumF, all.sumDiff+s.sumDiff, all.along+s.along
	}
	of["all"] = &all
	var out []GradientError
	for _, kind := range append(kinds, "all") {
		s, n := of[kind], float64(batches)
		if s.f == 0 {
			continue // no gradient reaches it
		}
		// The sum of n batches has n times the variance of one, which is estimated from their distances from the mean.
		variance := max(s.f-s.sumF/n, 0) / (n - 1) * n
		out = append(out, GradientError{Kind: kind, Error: math.Sqrt(s.diff / s.f), Mean: math.Sqrt(s.sumDiff / s.sumF), Scale: s.along / s.sumF,
			Sampling: math.Sqrt(variance / s.sumF)})
	}
	return out, nil
}

// gradient makes the gradient of one micro-batch.
func (m *Model) gradient(ctx context.Context, micro model.Micro, same bool) error {
	c := m.Chunk
	c.Bind([]model.Micro{micro}, m.settings(same))
	c.ZeroGrads()
	if _, err := c.Forward(ctx, 0, nil); err != nil {
		return err
	}
	if _, err := c.Backward(ctx, 0, nil); err != nil {
		return err
	}
	if bad := c.NonFinite(); bad != nil {
		return bad
	}
	return nil
}
