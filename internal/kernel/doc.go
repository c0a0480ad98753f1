// Package kernel holds the numeric loops of moetor: matrix products, attention, normalisation, activations, the loss
// and the optimizer update. Everything works on float32 slices; shapes are integers, matrices are row-major with a
// leading dimension (the distance between rows, in values).
//
// # Reading order
//
// gemm.go is the heart: how a product is cut into blocks that fit the caches, and which worker does which block.
// pack.go copies operands into panels, micro.go describes the tile routine ("microkernel") that consumes two panels,
// micro_amd64.go binds the assembly written by the program in _gen, and impl.go picks one set of routines for this
// CPU. gemm_ref.go is the specification of a product as three nested loops. attention.go builds causal attention out of
// the same tiles. exp.go, softmax.go, silu.go, norm.go, adamw.go, reduce.go and vector.go are the loops over vectors: each has
// its plain Go body, which is the specification, and the hot ones a vector routine bound in vector_amd64.go. slots.go moves
// rows between tokens and experts. pool.go has the workers, parallel.go how products share them, loop.go how loops do.
// scaled.go and its sisters multiply matrices of few bits (package lowp): scaled_pack.go keeps a weight's codes in the
// order of the product, scaled_side.go decodes an operand, scaled_hopper.go sums as tensor cores do; fused.go has the
// producers that quantise what they make. *_amd64.s and *_decl_amd64.go are written by _gen and never edited.
//
// # Contracts
//
// Rows are independent. One element of a product depends on its row of op(A), its column of op(B), alpha, beta, its own
// old value and k, and on nothing else: not on m, n, the position in the matrix, the neighbours, the number of threads
// or the grouping. This holds because the sum over k is cut at multiples of a constant (kc), within a cut it runs in
// index order, and every tile routine of an implementation does the same arithmetic for an element whatever the tile's
// shape. A dropless MoE layer relies on it: a token's output does not change with the batch around it.
//
// Results are repeatable: no routine has an order of summing that depends on timing or on the number of threads. Sums in
// float64 (reduce.go) are cut at fixed places, and come out the same from every implementation. Different implementations
// (portable, avx2, avx512) may differ in the last bits of a result, because the portable body of amd64 does not fuse.
//
// Nothing is allocated once a shape has been seen: scratch comes from free lists that the collector does not empty.
//
// Callers are code, not users: a slice too short for its shape is a bug and panics with the routine's name and both
// numbers. Data never panics; NaN and Inf flow through as IEEE 754 says.
package kernel
