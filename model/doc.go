// Package model is the language model: DeepSeek-V3's architecture with hand-written backward passes, written as if there
// were one device. Read it in this order: config.go and params.go (what there is), chunk.go (how a step drives it),
// block.go, attention.go, ffn.go, router.go, experts.go, head.go, mtp.go, objective.go (the mathematics), generate.go and
// samples.go (decoding). With 3,000 lines it is longer than a package of this module should be: it is the whole model, and
// each file is one part of it with its backward; none has a use, or could be tested against the reference, without the rest.
//
// A [Chunk] is a range of layers. Its caller
//
//   - binds the micro-batches of a step with Bind, and zeroes gradients with ZeroGrads;
//   - calls Forward, BackwardInput and BackwardWeight for every micro-batch, each in ascending order of micro-batches if
//     gradients shall have the same bits under every schedule; one chunk is used by one goroutine at a time;
//   - reads MicroSums, Routers and NonFinite when the step's passes are done.
//
// Gradients are those of the sum
//
//	Loss + MTPWeight*MTP + Aux
//
// over all micro-batches, to be divided once by the weight of the whole global batch. Loss is cross-entropy weighted by
// target, or whatever an [Objective] makes of the targets' log-probabilities (preference tuning) or of scores (a reward
// model, see [Config.RewardModel]); the model knows no objective by name.
//
// Every gradient buffer is written by one kind of pass only: matrices inside blocks by BackwardWeight, everything else
// (norm gains, embedding, head) by BackwardInput. So a schedule may interleave the two as it likes.
//
// Shapes in comments: R rows of a micro-batch (sequences times length), d model width, V vocabulary, H heads,
// E experts, K experts a token, N real tokens, M rows that arrived at this rank's experts.
package model
