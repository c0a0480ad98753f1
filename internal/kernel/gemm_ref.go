package kernel

// gemmRef is the specification of Gemm: what is computed, as three nested loops in float64. Every implementation is
// tested against it.
func gemmRef(l Layout, m, n, k int, alpha float32, a []float32, lda int, b []float32, ldb int, beta float32, c []float32, ldc int) {
	for i := range m {
		for j := range n {
			var sum float64
			for p := range k {
				switch l {
				case NN:
					sum += float64(a[i*lda+p]) * float64(b[p*ldb+j])
				case NT:
					sum += float64(a[i*lda+p]) * float64(b[j*ldb+p])
				case TN:
					sum += float64(a[p*lda+i]) * float64(b[p*ldb+j])
				}
			}
			sum *= float64(alpha)
			if beta != 0 {
				sum += float64(beta) * float64(c[i*ldc+j])
			}
			c[i*ldc+j] = float32(sum)
		}
	}
}
