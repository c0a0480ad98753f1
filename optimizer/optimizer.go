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
	"strings"

	"moetor/internal/kernel"
	"moetor/internal/tensor"
)

// Config holds the constants of the optimizer.
type Config struct {
	Kind        string  `yaml:"kind"`    // adamw
	Moments     string  `yaml:"moments"` // what they are kept in: fp32 or bf16
	Beta1       float64 `yaml:"beta1"`
	Beta2       float64 `yaml:"beta2"`
	Eps         float64 `yaml:"eps"`
	WeightDecay float64 `yaml:"weight_decay"` // on matrices only
	Clip        float64 `yaml:"clip"`         // largest global gradient norm; 0 = no clipping
}

// Kinds lists the values Config.Kind may have.
func Kinds() []string { return []string{"adamw"} }

// Values that Config.Moments may have. bf16 halves their memory; DeepSeek-V3 was trained with it (technical report, §3.3.3).
const (
	FP32 = "fp32"
	BF16 = "bf16"
)

// MomentTypes lists the values Config.Moments may have.
func MomentTypes() []string { return []string{FP32, BF16} }

// MomentBytes is the memory of both moments of one value.
func (c Config) MomentBytes() int {
	if c.Moments == BF16 {
		return 4
	}
	return 8
}

// MaxBetaBF16 is the largest beta that moments in bf16 follow: with a larger one they would not decay.
const MaxBetaBF16 = kernel.MaxBetaBF16

// Slice is what the optimizer updates: consecutive rows of one param that this rank owns. Values, gradients and moments
// have one length.
type Slice struct {
	Name        string // of the param, for checkpoints and errors
	Value, Grad []float32
	M, V        []float32 // first and second moment, owned by the optimizer; nil: NewAdamW allocates zeros
	M16, V16    []uint16  // the same as BF16, where Config.Moments says so; M and V are nil then
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
	parts  [][]Slice // the same values, cut and gathered into parts of equal work

	args    kernel.AdamWArgs // of the step under way
	runPart func(i int)
}

// partValues is the number of values of a part, tens of microseconds of work for one thread.
const partValues = 1 << 15

// NewAdamW takes over the slices and gives those without moments zeroed ones, of the type that cfg names. It fails if a
// slice's parts differ in length, if it has moments of the other type, or if the kind is not adamw.
func NewAdamW(cfg Config, slices []Slice) (*AdamW, error) {
	if cfg.Kind != "adamw" {
		return nil, fmt.Errorf("optimizer.kind=%s is not available in this version; known: adamw", cfg.Kind)
	}
	a := &AdamW{cfg: cfg, slices: make([]Slice, len(slices))}
	for i, s := range slices {
		n := len(s.Value)
		switch cfg.Moments {
		case FP32:
			s.M, s.V = orZeros(s.M, n), orZeros(s.V, n)
		case BF16:
			s.M16, s.V16 = orZeros(s.M16, n), orZeros(s.V16, n)
		default:
			return nil, fmt.Errorf("optimizer.moments=%s is not available in this version; known: %s", cfg.Moments, strings.Join(MomentTypes(), ", "))
		}
		first, second := len(s.M)+len(s.M16), len(s.V)+len(s.V16) // of both types: one must be absent
		if len(s.Grad) != n || first != n || second != n {
			return nil, fmt.Errorf("optimizer: %s: %d values but %d gradients, %d first and %d second moments",
				s.Name, n, len(s.Grad), first, second)
		}
		a.slices[i] = s
	}
	a.cut()
	a.runPart = func(i int) {
		for j := range a.parts[i] {
			a.update(&a.parts[i][j])
		}
	}
	return a, nil
}

// cut fills parts, so that many small slices keep all threads as busy as a large one.
func (a *AdamW) cut() {
	room := 0
	for _, s := range a.slices {
		for len(s.Value) > 0 {
			if room == 0 {
				a.parts, room = append(a.parts, nil), partValues
			}
			n := min(len(s.Value), room)
			piece := s
			piece.Value, s.Value = split(s.Value, n)
			piece.Grad, s.Grad = split(s.Grad, n)
			piece.M, s.M = split(s.M, n)
			piece.V, s.V = split(s.V, n)
			piece.M16, s.M16 = split(s.M16, n)
			piece.V16, s.V16 = split(s.V16, n)
			last := &a.parts[len(a.parts)-1]
			*last = append(*last, piece)
			room -= n
		}
	}
}

// split cuts x after n values, unless it is nil.
func split[T float32 | uint16](x []T, n int) (head, rest []T) {
	if x == nil {
		return nil, nil
	}
	return x[:n], x[n:]
}

func orZeros[T float32 | uint16](x []T, n int) []T {
	if x == nil {
		return make([]T, n)
	}
	return x
}

// Slices returns what the optimizer updates, moments included, in the order given to NewAdamW. Writing into the moments
// restores them.
func (a *AdamW) Slices() []Slice { return a.slices }

// Step applies update number step, which is 1 for the first of a stage (Position.Step+1), with learning rate lr.
// Gradients are multiplied by gradScale, the clip factor, as they are read; they are not changed.
func (a *AdamW) Step(lr, gradScale float64, step int64) {
	a.args = kernel.AdamWArgs{
		LR: float32(lr), Beta1: float32(a.cfg.Beta1), Beta2: float32(a.cfg.Beta2), Eps: float32(a.cfg.Eps),
		GradScale: float32(gradScale), Step: int(step),
	}
	kernel.Parallel(len(a.parts), a.runPart)
}

func (a *AdamW) update(s *Slice) {
	args := a.args
	if s.Decay {
		args.Decay = float32(a.cfg.WeightDecay)
	}
	if a.cfg.Moments == BF16 {
		kernel.AdamWBF16(args, s.Value, s.Grad, s.M16, s.V16)
	} else {
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
