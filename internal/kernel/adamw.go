package kernel

import "math"

// AdamWArgs are the scalars of one AdamW update.
type AdamWArgs struct {
	LR, Beta1, Beta2, Eps float32
	Decay                 float32 // 0 for parameters that do not decay
	GradScale             float32 // the clip factor; multiplies the gradient
	Step                  int     // 1-based, for the bias corrections
}

// AdamW updates w, m and v in place from the gradient g, decay decoupled (Loshchilov and Hutter, Decoupled Weight Decay
// Regularization, 2019, algorithm 2):
//
//	g  = g*GradScale
//	m  = Beta1*m + (1-Beta1)*g
//	v  = Beta2*v + (1-Beta2)*g^2
//	w -= LR * (m/(1-Beta1^Step) / (sqrt(v/(1-Beta2^Step)) + Eps) + Decay*w)
//
// It works on the caller's thread: who has many tensors shares them out.
func AdamW(a AdamWArgs, w, g, m, v []float32) {
	checkLen("AdamW", "g", len(g), len(w))
	checkLen("AdamW", "m", len(m), len(w))
	checkLen("AdamW", "v", len(v), len(w))
	u := a.update()
	u.run(w, g, m, v)
}

// adamWUpdate are the scalars of an update, in the order of the vector routines.
type adamWUpdate struct {
	gradScale, beta1, rest1, beta2, rest2, correct1, correct2, eps, lr, decay float32
}

func (a AdamWArgs) update() adamWUpdate {
	// The corrections are taken in float64: 1-Beta2^Step of a first step loses half its digits in float32.
	return adamWUpdate{a.GradScale, a.Beta1, 1 - a.Beta1, a.Beta2, 1 - a.Beta2,
		float32(1 / (1 - math.Pow(float64(a.Beta1), float64(a.Step)))),
		float32(1 / (1 - math.Pow(float64(a.Beta2), float64(a.Step)))), a.Eps, a.LR, a.Decay}
}

func (u *adamWUpdate) run(w, g, m, v []float32) {
	n := len(w)
	g, m, v = g[:n], m[:n], v[:n]
	if l := active.Load().vectors; l != scalar {
		for len(w) >= int(l) {
			n := min(len(w), vectorChunk) / int(l)
			adamWVectors(l, &u.gradScale, &w[0], &g[0], &m[0], &v[0], n)
			n *= int(l)
			w, g, m, v = w[n:], g[n:], m[n:], v[n:]
		}
		if len(w) > 0 {
			var e rowEnds
			copy(e[0][:], w)
			copy(e[1][:], g)
			copy(e[2][:], m)
			copy(e[3][:], v)
			adamWVectors(l, &u.gradScale, &e[0][0], &e[1][0], &e[2][0], &e[3][0], 1)
			copy(w, e[0][:])
			copy(m, e[2][:])
			copy(v, e[3][:])
		}
		return
	}
	for i, wi := range w {
		gi := g[i] * u.gradScale
		mi := u.beta1*m[i] + u.rest1*gi
		vi := u.beta2*v[i] + u.rest2*(gi*gi)
		m[i], v[i] = mi, vi
		update := mi * u.correct1 / (sqrt32(vi*u.correct2) + u.eps)
		w[i] = wi - u.lr*(update+u.decay*wi)
	}
}

// sqrt32 compiles to one single-precision instruction: the rounding of a double root to single is exact.
func sqrt32(x float32) float32 { return float32(math.Sqrt(float64(x))) }
