// SKELETON: contract for the other packages; the kernel author replaces the bodies.
package kernel

import "math"

type Layout uint8

const (
	NN Layout = iota // C[m,n] = A[m,k]   * B[k,n]
	NT               // C[m,n] = A[m,k]   * B[n,k]^T
	TN               // C[m,n] = A[k,m]^T * B[k,n]
)

// Gemm sets C = alpha*op(A)*op(B) + beta*C for row-major matrices with leading dimensions. beta 0 never reads C.
// The value of one element of C depends only on its row of op(A), its column of op(B) and k: not on m, n,
// the position in the matrix or the number of threads.
func Gemm(l Layout, m, n, k int, alpha float32, a []float32, lda int, b []float32, ldb int, beta float32, c []float32, ldc int) {
	for i := 0; i < m; i++ {
		for j := 0; j < n; j++ {
			var s float32
			for p := 0; p < k; p++ {
				switch l {
				case NN:
					s += a[i*lda+p] * b[p*ldb+j]
				case NT:
					s += a[i*lda+p] * b[j*ldb+p]
				case TN:
					s += a[p*lda+i] * b[p*ldb+j]
				}
			}
			if beta == 0 {
				c[i*ldc+j] = alpha * s
			} else {
				c[i*ldc+j] = alpha*s + beta*c[i*ldc+j]
			}
		}
	}
}

// GroupedGemm runs one product per group over contiguous rows: rows[e] rows of A and C belong to group e and meet
// weight w[e]. NT: w[e] is [n,k]; NN: w[e] is [k,n]. C_e = A_e*op(w[e]) + beta*C_e. Rows may be 0.
func GroupedGemm(l Layout, rows []int, n, k int, a []float32, w [][]float32, beta float32, c []float32) {
	at := 0
	for e, r := range rows {
		if r > 0 {
			ldb := k
			if l == NN {
				ldb = n
			}
			Gemm(l, r, n, k, 1, a[at*k:], k, w[e], ldb, beta, c[at*n:], n)
		}
		at += r
	}
}

// GroupedGemmTN accumulates weight gradients: for every group e, c[e] (m x n) += A_e^T * B_e with A_e rows[e] x m
// and B_e rows[e] x n, both contiguous by group.
func GroupedGemmTN(rows []int, m, n int, a, b []float32, c [][]float32) {
	at := 0
	for e, r := range rows {
		if r > 0 {
			Gemm(TN, m, n, r, 1, a[at*m:], m, b[at*n:], n, 1, c[e], n)
		}
		at += r
	}
}

// RMSNorm sets dst = src * rstd * gain per row of cols, with rstd[r] = 1/sqrt(mean(src_r^2)+eps). dst may be src.
func RMSNorm(dst, src, gain, rstd []float32, cols int, eps float32) {
	for r := range rstd[:len(src)/cols] {
		x, y := src[r*cols:(r+1)*cols], dst[r*cols:(r+1)*cols]
		var s float64
		for _, v := range x {
			s += float64(v) * float64(v)
		}
		rs := float32(1 / math.Sqrt(s/float64(cols)+float64(eps)))
		rstd[r] = rs
		for i, v := range x {
			y[i] = v * rs * gain[i]
		}
	}
}

// RMSNormGrad: dx = gradient of the input (overwrites dx; dx may be dy), dgain += gradient of the gain, rows in order.
func RMSNormGrad(dx, dgain, dy, x, gain, rstd []float32, cols int) { panic("skeleton") }

// SwiGLU sets dst = gate*sigmoid(gate)*up elementwise. SwiGLUGrad sets dgate, dup; they may alias gate and up.
func SwiGLU(dst, gate, up []float32)                { panic("skeleton") }
func SwiGLUGrad(dgate, dup, dy, gate, up []float32) { panic("skeleton") }

// Sigmoid sets dst = 1/(1+exp(-src)). Softmax sets each row of cols to its softmax. dst may be src.
func Sigmoid(dst, src []float32)           { panic("skeleton") }
func Softmax(dst, src []float32, cols int) { panic("skeleton") }

// CrossEntropy handles one row of logits: returns -log softmax(logits)[target] in float64 and overwrites logits with
// weight*(softmax(logits) - onehot(target)).
func CrossEntropy(logits []float32, target int, weight float32) float64 { panic("skeleton") }

// CrossEntropyLoss is CrossEntropy without the gradient; logits are only read.
func CrossEntropyLoss(logits []float32, target int) float64 { panic("skeleton") }

// Attention is causal softmax attention of ONE head over ONE segment of T rows, never holding a T x T matrix.
// Row t of Q is Q[t*LDQ : t*LDQ+DQ]; K likewise with DQ columns; V and O have DV columns.
// LSE (len T) receives the log-sum-exp of the scaled scores of each row.
type Attention struct {
	T, DQ, DV          int
	Scale              float32
	Q, K, V, O         []float32
	LDQ, LDK, LDV, LDO int
	LSE                []float32
}

// Forward writes O and LSE.
func (a *Attention) Forward() { panic("skeleton") }

// Backward overwrites dQ, and ADDS to dK and dV (rows as in Q, K, V, own leading dimensions), given dO.
func (a *Attention) Backward(dO []float32, lddo int, dQ []float32, lddq int, dK []float32, lddk int, dV []float32, lddv int) {
	panic("skeleton")
}

// Elementwise helpers. SumSquares accumulates in float64 in index order.
func Add(dst, src []float32)                       { panic("skeleton") } // dst += src
func Axpy(dst []float32, a float32, src []float32) { panic("skeleton") } // dst += a*src
func Scale(x []float32, a float32)                 { panic("skeleton") }
func SumSquares(x []float32) float64               { panic("skeleton") }

// AdamWArgs are the scalars of one update; see optimizer.
type AdamWArgs struct {
	LR, Beta1, Beta2, Eps, Decay float32 // Decay 0 for params that do not decay
	GradScale                    float32 // clip factor, multiplies g
	Step                         int     // 1-based, for the bias corrections
}

// AdamW updates w, m, v in place from g: m=b1*m+(1-b1)g, v=b2*v+(1-b2)g^2, w -= lr*(mhat/(sqrt(vhat)+eps)+decay*w).
func AdamW(a AdamWArgs, w, g, m, v []float32) { panic("skeleton") }

// Impls names the implementations compiled in ("portable","avx2","avx512") that this CPU can run; Use forces one.
func Impls() []string                           { return []string{"portable"} }
func Use(name string) (restore func(), ok bool) { return func() {}, name == "portable" }
func Active() string                            { return "portable" }

// SetThreads sets the workers a kernel call may use (>=1).
func SetThreads(n int) {}
func Threads() int     { return 1 }

// Flops returns the FLOPs (2mnk) of all products since the process started: the counter that model FLOPs are checked against.
func Flops() int64 { return 0 }

// PeakGFLOPS measures a register-only FMA loop of the active implementation on n threads for about ms milliseconds.
func PeakGFLOPS(threads, ms int) float64 { return 1 }
