package model

import "moetor/internal/lowp"

// A Recipe says how the operands of products, what a pass keeps for its backward, and rows on their way between ranks are
// stored. What is nil stays as it is made, in FP32; so the zero Recipe is FP32 everywhere. The embedding, the head, norms,
// the router's gate, scores and probabilities of attention, weights as the optimizer has them and their gradients are
// always FP32 (DeepSeek-V3 §3.3.1, §3.3.3).
//
// Y = X Wᵀ contracts the channels of X, dX = dY W those of dY, and dW = dYᵀ X the tokens of both, so each operand of a Linear
// is stored with tiles along what is contracted.
type Recipe struct {
	Weight *lowp.Quant // of a Linear or an expert; the same codes serve Y and dX
	// WeightT are codes of their own for dX, where tiles are not square.
	WeightT *lowp.Quant
	Input   *lowp.Quant // X, also as kept for the backward
	InputT  *lowp.Quant // X for dW, made from what was kept of Input
	Grad    *lowp.Quant // dY for dX
	GradT   *lowp.Quant // dY for dW
	// AttnOut is X of the attention's output projection, which the attention's backward reads too; AttnOutT it for dW.
	AttnOut, AttnOutT *lowp.Quant
	SwiGLU            *lowp.Quant // gate and up as kept for the backward, which makes their product again
	// Dispatch are the rows that go to experts: tokens in the forward, gradients before the down projections in the backward.
	// The experts multiply from these codes.
	Dispatch *lowp.Quant
	Combine  *lowp.Quant // what comes back of them, in both directions
	Core     *lowp.Quant // queries, keys and values as kept for the backward

	// Hopper sums products from codes as tensor cores of that generation do, in 14 bits (DeepSeek-V3 §3.5.2); the sums are
	// added up in FP32 every Promote values of what is contracted (0: at the end). Without it all is FP32, cut every 128.
	Hopper  bool
	Promote int
}
