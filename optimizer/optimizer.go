// Package optimizer updates the weights a rank owns and says, for every step of a stage, with which numbers.
//
// [AdamW] holds the two moments of the [Slice] values that this rank owns and updates them. [Schedule] is the pure part:
// from a [Position] (completed steps, consumed tokens and samples) it gives the [Values] of the coming step: global
// batch, learning rate, speed of the router bias, weight of the MTP loss. Since Values depend on the Position alone,
// a run that continues from a saved Position continues exactly, at any number of ranks.
//
// The caller reduces gradients and measures their global norm; [ClipFactor] turns the norm into a factor.
package optimizer

import (
	"fmt"

	"moetor/internal/kernel"
	"moetor/internal/tensor"
)

// Config holds the constants of the optimizer.
type Config struct {
	Kind        string  `yaml:"kind"` // adamw
	Beta1       float64 `yaml:"beta1"`
	Beta2       float64 `yaml:"beta2"`
	Eps         float64 `yaml:"eps"`
	WeightDecay float64 `yaml:"weight_decay"` // on matrices only
	Clip        float64 `yaml:"clip"`         // largest global gradient norm; 0 = no clipping
}

// Kinds lists the values Config.Kind may have.
func Kinds() []string { return []string{"adamw"} }

// Slice is what the optimizer updates: consecutive rows of one param that this rank owns. All four slices have one length.
type Slice struct {
	Name        string // of the param, for checkpoints and errors
	Value, Grad []float32
	M, V        []float32 // first and second moment, owned by the optimizer; nil: NewAdamW allocates zeros
	Decay       bool      // weight decay applies
}

// Rows is the slice of rows [from, to) of p, sharing p's memory, without moments.
func Rows(p *tensor.Param, from, to int) Slice {
	lo, hi := from*p.RowLen(), to*p.RowLen()
	return Slice{Name: p.Name, Value: p.Value[lo:hi:hi], Grad: p.Grad[lo:hi:hi], Decay: p.Decay}
}

// AdamW is Adam with decoupled weight decay (Loshchilov and Hutter, arXiv 1711.05101):
//
//	m = b1*m + (1-b1)*g,  v = b2*v + (1-b2)*g^2
//	w = w - lr*( m/(1-b1^t) / (sqrt(v/(1-b2^t)) + eps) + decay*w )
type AdamW struct {
	cfg    Config
	slices []Slice
}

// NewAdamW takes over the slices and gives those without moments zeroed ones. It fails if a slice's parts differ in length
// or the kind is not adamw.
func NewAdamW(cfg Config, slices []Slice) (*AdamW, error) {
	if cfg.Kind != "adamw" {
		return nil, fmt.Errorf("optimizer.kind=%s is not available in this version; known: adamw", cfg.Kind)
	}
	a := &AdamW{cfg: cfg, slices: make([]Slice, len(slices))}
	for i, s := range slices {
		n := len(s.Value)
		if s.M == nil {
			s.M = make([]float32, n)
		}
		if s.V == nil {
			s.V = make([]float32, n)
		}
		if len(s.Grad) != n || len(s.M) != n || len(s.V) != n {
			return nil, fmt.Errorf("optimizer: %s: %d values but %d gradients, %d first and %d second moments",
				s.Name, n, len(s.Grad), len(s.M), len(s.V))
		}
		a.slices[i] = s
	}
	return a, nil
}

// Slices returns what the optimizer updates, moments included, in the order given to NewAdamW. Writing into the moments
// restores them.
func (a *AdamW) Slices() []Slice { return a.slices }

// Step applies update number step, which is 1 for the first of a stage (Position.Step+1), with learning rate lr.
// Gradients are multiplied by gradScale, the clip factor, as they are read; they are not changed.
func (a *AdamW) Step(lr, gradScale float64, step int64) {
	args := kernel.AdamWArgs{
		LR: float32(lr), Beta1: float32(a.cfg.Beta1), Beta2: float32(a.cfg.Beta2), Eps: float32(a.cfg.Eps),
		GradScale: float32(gradScale), Step: int(step),
	}
	for i := range a.slices {
		s := &a.slices[i]
		args.Decay = 0
		if s.Decay {
			args.Decay = float32(a.cfg.WeightDecay)
		}
		kernel.AdamW(args, s.Value, s.Grad, s.M, s.V)
	}
}

// ClipFactor is what gradients of global norm `norm` are multiplied by to respect clip: min(1, clip/(norm+1e-6)), the
// definition of torch.nn.utils.clip_grad_norm_, so a norm of exactly clip is scaled by a hair less than 1. clip 0: 1.
func ClipFactor(norm, clip float64) float64 {
	if clip <= 0 {
		return 1
	}
	return min(1, clip/(norm+1e-6))
}
