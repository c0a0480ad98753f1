package model

import (
	"math"
	"slices"

	"moetor/internal/kernel"
	"moetor/internal/tensor"
)

// Router is the gate of one MoE layer (DeepSeek-V3 §2.1.2, equations 12 to 16), in FP32.
type Router struct {
	Layer int
	// Counts are the real tokens sent to each expert by this rank in this step, padding excluded. Bind zeroes them;
	// Forward counts, Evaluate does not.
	Counts []int64
	// Bias is e_score_correction_bias. It steers the selection only; no gradient reaches it. nil with a softmax gate,
	// which has none.
	Bias []float32

	moe  MoE
	gate linear

	// Loops on all threads, with their operands.
	call            gateCall
	choices, slopes *rowLoop
	sequence        func(i int)
	scratch         []gateScratch
	losses          []float64 // Seqs: balance loss
}

type gateCall struct {
	pass        *pass
	act         *gatePass
	dz, dWeight tensor.Mat
}

// gateScratch is what a thread needs for one token.
type gateScratch struct {
	biased, groupScore []float32 // E, groups
	groups, plain      []int32   // groups kept; K
}

// gatePass is what the gate decided for one micro-batch.
//
//	score  [R, E]     affinities s
//	chosen [N, K]     experts of each real token, best first
//	weight [N, K]     their weights g
//	rows   [E]        how many of the real tokens each expert gets
//	slope  [Seqs, E]  derivative of the balance loss by each normalised affinity of a token of the sequence
type gatePass struct {
	score, weight, slope tensor.Mat
	real                 []int32
	chosen               []int32
	rows                 []int
}

func newRouter(c Config, layer int, gate *tensor.Param) *Router {
	m := c.MoE
	r := &Router{Layer: layer, Counts: make([]int64, m.Experts), moe: m, gate: linearOf(gate)}
	if m.Score == Sigmoid {
		r.Bias = make([]float32, m.Experts)
	}
	r.choices, r.slopes, r.sequence = loopOf(r.chooseRows), loopOf(r.slopeRows), func(i int) { r.losses[i] = r.balanceSequence(i) }
	return r
}

// forward scores all rows of x, chooses the experts of the real ones, and adds the balance loss to the pass.
func (r *Router) forward(p *pass, act *gatePass, x tensor.Mat, real []int32) {
	m := r.moe
	act.real = real
	act.score = p.arena.Mat(x.Rows, m.Experts)
	r.gate.forward(act.score, operand{mat: x}, 0)
	if x.Rows > 0 {
		if m.Score == Sigmoid {
			kernel.Sigmoid(act.score.Data, act.score.Data)
		} else {
			kernel.Softmax(act.score.Data, act.score.Data, m.Experts)
		}
	}
	act.weight = p.arena.Mat(len(real), m.TopK)
	act.chosen = grow(act.chosen, len(real)*m.TopK)
	r.call = gateCall{pass: p, act: act}
	for len(r.scratch) < max(ranges(len(real)), p.micro.Seqs) {
		r.scratch = append(r.scratch, gateScratch{make([]float32, m.Experts), make([]float32, m.Groups), make([]int32, m.TopGroups), make([]int32, m.TopK)})
	}
	r.choices.run(len(real))
	act.rows = grow(act.rows, m.Experts)
	clear(act.rows)
	for _, e := range act.chosen {
		act.rows[e]++
	}
	if p.keep {
		for e, n := range act.rows {
			r.Counts[e] += int64(n)
		}
	}
	r.balance(p, act)
}

func (r *Router) chooseRows(from, to int) {
	act, k, t := r.call.act, r.moe.TopK, &r.scratch[from/loopRows]
	for n := from; n < to; n++ {
		s, chosen := act.score.Row(int(act.real[n])), act.chosen[n*k:(n+1)*k]
		r.choose(t, chosen, s)
		r.weigh(act.weight.Row(n), chosen, s)
	}
}

// choose selects the experts of one token: the top k by biased score among the experts of the best groups. A group is
// worth the sum of its two best biased scores with a sigmoid gate (DeepSeek-V3), its best with a softmax gate
// (DeepSeek-V2). Experts of other groups count as minus infinity, and equal scores go to the lower index.
func (r *Router) choose(t *gateScratch, chosen []int32, s []float32) {
	m := r.moe
	copy(t.biased, s)
	for e, b := range r.Bias {
		t.biased[e] += b
	}
	if m.TopGroups < m.Groups {
		size := m.Experts / m.Groups
		for g := range t.groupScore {
			best, second := float32(math.Inf(-1)), float32(math.Inf(-1))
			for _, v := range t.biased[g*size : (g+1)*size] {
				if v > best {
					best, second = v, best
				} else if v > second {
					second = v
				}
			}
			t.groupScore[g] = best
			if m.Score == Sigmoid && size > 1 {
				t.groupScore[g] += second
			}
		}
		topK(t.groups, t.groupScore)
		for g := range t.groupScore {
			if slices.Contains(t.groups, int32(g)) {
				continue
			}
			for e := g * size; e < (g+1)*size; e++ {
				t.biased[e] = float32(math.Inf(-1))
			}
		}
	}
	topK(chosen, t.biased)
}

// weigh sets the weights of the chosen experts from their unbiased scores: g = scale * s / sum of the chosen s, or
// scale * s without normalisation.
func (r *Router) weigh(weight []float32, chosen []int32, s []float32) {
	sum := float32(1)
	if r.moe.Normalize {
		sum = 1e-20
		for _, e := range chosen {
			sum += s[e]
		}
	}
	for j, e := range chosen {
		weight[j] = float32(r.moe.Scale) * s[e] / sum
	}
}

// balance adds the sequence-wise balance loss (DeepSeek-V3 §2.1.2, equations 17 to 20) of every sequence to the pass:
//
//	alpha Σ_i f_i P_i,  f_i = E/(K T) #{t : i among the top K of token t},  P_i = 1/T Σ_t s'_it,  s' = s / Σ_j s_j
//
// over the T real tokens of the sequence, times the sum of its target weights (or Micro.SeqWeight): divided by the weight
// of the global batch, the terms are the mean over its sequences, however it is cut into micro-batches. The top K of f is of the plain
// scores, without bias or groups. f has no gradient; s' gets the slope kept in act.
func (r *Router) balance(p *pass, act *gatePass) {
	if r.moe.SeqAux == 0 {
		return
	}
	act.slope = p.arena.Mat(p.micro.Seqs, r.moe.Experts)
	r.losses = grow(r.losses, p.micro.Seqs)
	kernel.Parallel(p.micro.Seqs, r.sequence)
	for _, loss := range r.losses {
		p.sums.Aux += grid(loss)
	}
}

// balanceSequence returns the balance loss of one sequence and sets its slope.
func (r *Router) balanceSequence(seq int) (loss float64) {
	m, p, act := r.moe, r.call.pass, r.call.act
	from, _ := slices.BinarySearch(act.real, int32(seq*p.micro.Len))
	to, _ := slices.BinarySearch(act.real, int32((seq+1)*p.micro.Len))
	tokens, slope, plain := act.real[from:to], act.slope.Row(seq), r.scratch[seq].plain
	clear(slope)
	if len(tokens) == 0 || p.seqWeight[seq] == 0 {
		return 0
	}
	for _, row := range tokens {
		topK(plain, act.score.Row(int(row)))
		for _, e := range plain {
			slope[e]++ // the count, for now
		}
	}
	n := len(tokens)
	for e, count := range slope {
		f := float64(m.Experts) / float64(m.TopK*n) * float64(count)
		slope[e] = float32(p.seqWeight[seq] * m.SeqAux * f / float64(n))
	}
	for _, row := range tokens {
		s := act.score.Row(int(row))
		total := sum(s)
		for e, v := range s {
			loss += float64(slope[e]) * float64(v/total)
		}
	}
	return loss
}

// grid rounds a term of the balance loss to a multiple of 2^-32. Sums of such numbers below 2^20 are exact in float64,
// so the loss has the same bits whichever way layers are spread over pipeline stages.
func grid(x float64) float64 { return math.RoundToEven(x*(1<<32)) / (1 << 32) }

func sum(s []float32) (total float32) {
	for _, v := range s {
		total += v
	}
	return total
}

// backward adds to dx, given the gradient dweight [N, K] of the weights: through weights, normalisation and scores, never
// through the bias or the selection.
func (r *Router) backward(p *pass, act *gatePass, dx, dweight, x tensor.Mat) {
	dz := zeroMat(p.arena, x.Rows, r.moe.Experts)
	r.call = gateCall{p, act, dz, dweight}
	r.slopes.run(len(act.real))
	r.gate.backward(p, dx, gradient{mat: dz}, operand{mat: x}, 1)
}

// slopeRows sets the gradient of what the gate's scores are made of.
func (r *Router) slopeRows(from, to int) {
	m, p, act := r.moe, r.call.pass, r.call.act
	for n := from; n < to; n++ {
		row := int(act.real[n])
		s, ds := act.score.Row(row), r.call.dz.Row(row)
		chosen, weight, dw := act.chosen[n*m.TopK:(n+1)*m.TopK], act.weight.Row(n), r.call.dWeight.Row(n)
		scale := float32(m.Scale)
		if m.Normalize { // g_j = scale s_j/S:  ds_j = (scale dg_j - Σ_i dg_i g_i) / S
			sum, mean := float32(1e-20), float32(0)
			for j, e := range chosen {
				sum += s[e]
				mean += dw[j] * weight[j]
			}
			for j, e := range chosen {
				ds[e] = (scale*dw[j] - mean) / sum
			}
		} else {
			for j, e := range chosen {
				ds[e] = scale * dw[j]
			}
		}
		if m.SeqAux != 0 { // s'_i = s_i/S:  ds_i += (a_i - Σ_j a_j s'_j) / S
			slope, total, mean := act.slope.Row(row/p.micro.Len), sum(s), float32(0)
			for e, v := range s {
				mean += slope[e] * (v / total)
			}
			for e := range ds {
				ds[e] += (slope[e] - mean) / total
			}
		}
		if m.Score == Sigmoid {
			for e, v := range s {
				ds[e] *= v * (1 - v)
			}
			continue
		}
		var mean float32
		for e, v := range s {
			mean += ds[e] * v
		}
		for e, v := range s {
			ds[e] = v * (ds[e] - mean)
		}
	}
}

// topK writes the indices of the len(dst) largest scores, largest first, equal ones in order of index. A NaN is taken for
// smaller than anything, so that dst is valid whatever the scores are.
func topK(dst []int32, score []float32) {
	n := 0
	for i, v := range score {
		if n == len(dst) {
			if !greater(v, score[dst[n-1]]) {
				continue
			}
			n--
		}
		j := n
		for ; j > 0 && greater(v, score[dst[j-1]]); j-- {
			dst[j] = dst[j-1]
		}
		dst[j] = int32(i)
		n++
	}
}

func greater(a, b float32) bool { return a > b || b != b && a == a }

// BiasName is the name of the selection bias among the model's tensors.
func (r *Router) BiasName() string { return layerName(r.Layer) + "mlp.gate.e_score_correction_bias" }

// UpdateBias moves the selection bias after a step (DeepSeek-V3 §2.1.2; Wang et al., 2024, algorithm 1): up by speed for
// an expert that got fewer tokens than the mean of the whole global batch, down for one that got more. The comparison is
// between integers, so no count is too large for its sign. counts are the global counts of this layer.
func (r *Router) UpdateBias(counts []int64, speed float32) {
	var total int64
	for _, c := range counts {
		total += c
	}
	for e := range r.Bias {
		switch own := int64(len(counts)) * counts[e]; {
		case own < total:
			r.Bias[e] += speed
		case own > total:
			r.Bias[e] -= speed
		}
	}
}

// Balance says how evenly tokens were spread: maxVio = max/mean - 1 (Wang et al., 2024), the number of experts without
// any, and the entropy of their shares in nats. All are zero when there was no token.
func Balance(counts []int64) (maxVio float64, dead int, entropy float64) {
	var total, most int64
	for _, c := range counts {
		total += c
		most = max(most, c)
	}
	if total == 0 {
		return 0, 0, 0
	}
	for _, c := range counts {
		if c == 0 {
			dead++
			continue
		}
		share := float64(c) / float64(total)
		entropy -= share * math.Log(share)
	}
	return float64(most)*float64(len(counts))/float64(total) - 1, dead, entropy
}
