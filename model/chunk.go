// SKELETON
package model

import (
	"context"

	"moetor/internal/tensor"
)

// An Exchange fixes the route of one micro-batch from how many rows this rank has for each expert (all experts, global
// numbering). It is a function type so that wiring is a closure over parallel/expert.
type Exchange func(ctx context.Context, layer int, rowsPerExpert []int) (Route, error)

// A Route moves rows to the ranks that own their experts, and back. It only moves: gate weights are the model's.
// Each direction is the adjoint of the other: the backward of Dispatch is Combine and the reverse.
// Dispatch: src has the rows of this rank sorted by expert (sum of rowsPerExpert rows); dst has sum(Rows()) rows, sorted
// by local expert, within it by source rank, within it in the source's order. Combine is the inverse move.
type Route interface {
	Rows() []int // rows received, per local expert
	Dispatch(ctx context.Context, dst, src tensor.Mat) error
	Combine(ctx context.Context, dst, src tensor.Mat) error
}

// A Micro is what a chunk needs to know about one micro-batch. All stages of a pipeline read the same one.
// Rows = Seqs*Len; Seqs may be 0 (an empty micro-batch still takes part in every exchange).
type Micro struct {
	Seqs, Len       int
	Tokens, Targets []int32   // Rows
	Weight          []float32 // Rows: share of each target in the loss
	Starts          []int32   // first row of every attention segment, ascending, Starts[0]==0 (empty when Rows==0); positions restart there
}

// Sums of one micro-batch's loss terms, unscaled (the trainer divides by the global weight). Only the last stage fills
// Loss, MTP and Weight; every stage with MoE layers fills Aux.
type Sums struct {
	Loss   float64 // sum over targets of weight * -log p
	Weight float64 // sum of weights
	MTP    float64 // sum over depths of weight * -log p, divided by depth count; without mtp_weight
	Aux    float64 // balance loss as sum over sequences of (target weight of the sequence) * alpha*sum f P, over layers
}

// Settings of a step that follow schedules.
type Settings struct {
	MTPWeight float64 // lambda
}

// Chunk is layers First..Last-1 of the model (stage 0 also owns the embedding, the last stage final norm, head and MTP)
// with the activations of the micro-batches in flight. It implements pipeline.Stage.
type Chunk struct{}

// Part says which part of the model a chunk is, and which experts are local.
type Part struct {
	First, Last            int  // layers [First, Last)
	Embed, Head            bool // owns the embedding / the final norm + head (+ MTP)
	ExpertRank, ExpertSize int  // local experts are [ExpertRank*E/ExpertSize, (ExpertRank+1)*E/ExpertSize)
}

func New(c Config, p Part, seed uint64, x Exchange) (*Chunk, error) { panic("skeleton") }

func (c *Chunk) Params() []*tensor.Param { panic("skeleton") }

// Bind gives the chunk the micro-batches of the coming step (index = micro number) and the step's settings, and zeroes sums
// and counts. Gradients are zeroed by ZeroGrads.
func (c *Chunk) Bind(m []Micro, s Settings) {}
func (c *Chunk) ZeroGrads()                 {}

// Forward: in is Rows x Dim (nil for the embedding stage); out is valid until BackwardInput of that micro (nil from the head stage).
func (c *Chunk) Forward(ctx context.Context, micro int, in []float32) (out []float32, err error) {
	panic("skeleton")
}
func (c *Chunk) BackwardInput(ctx context.Context, micro int, dout []float32) (din []float32, err error) {
	panic("skeleton")
}
func (c *Chunk) BackwardWeight(ctx context.Context, micro int) error { panic("skeleton") }

// Evaluate is Forward without keeping activations (and without gradients in the loss).
func (c *Chunk) Evaluate(ctx context.Context, micro int, in []float32) (out []float32, err error) {
	panic("skeleton")
}

// MicroSums of a micro-batch after its Forward or Evaluate.
func (c *Chunk) MicroSums(micro int) Sums { panic("skeleton") }

// Routers lists the MoE layers of this chunk in order (MTP modules included, as layers numbered Config.Layers+k).
func (c *Chunk) Routers() []*Router { panic("skeleton") }

// Router is one MoE layer's gate.
type Router struct {
	Layer  int
	Counts []int64   // real tokens sent to each expert by this rank in this step (padding excluded); zeroed by Bind
	Bias   []float32 // e_score_correction_bias, FP32
}
