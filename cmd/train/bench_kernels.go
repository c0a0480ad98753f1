package main

import (
	"fmt"
	"slices"
	"strconv"
	"strings"

	"github.com/spf13/cobra"

	"moetor/configs"
	"moetor/internal/kernel"
	"moetor/model"
)

var layoutNames = map[kernel.Layout]string{kernel.NN: "NN", kernel.NT: "NT", kernel.TN: "TN"}

// A shape is a dense product of a step: C [m, n] with a sum over k.
type shape struct {
	layout  kernel.Layout
	m, n, k int
	beta    float32
}

func (s shape) flops() float64 { return 2 * float64(s.m) * float64(s.n) * float64(s.k) }

// cube is the product that libraries are compared by.
func cube(n int) shape { return shape{layout: kernel.NN, m: n, n: n, k: n} }

// stepShapes are the dense products of one micro-batch, each as often as it is done: of every weight matrix the forward
// (NT), the gradient of its input (NN) and its own (TN). Products of experts are grouped, those of attention inside its
// kernel. Of a logits chunk of the head only one is listed.
func stepShapes(run *configs.Run) []shape {
	c := run.Model
	rows := run.Parallel.Microbatch * c.Context
	var list []shape
	add := func(rows, out, in int) {
		list = append(list, shape{kernel.NT, rows, out, in, 0}, shape{kernel.NN, rows, in, out, 0}, shape{kernel.TN, out, in, rows, 1})
	}
	for _, t := range model.Tensors(c) {
		if len(t.Shape) < 2 || t.Expert >= 0 {
			continue
		}
		out, in := t.Shape[0], t.Shape[1]
		switch {
		case t.Layer < 0: // looked up
		case strings.HasSuffix(t.Name, "kv_a_proj_with_mqa.weight"): // latent and shared key apart
			add(rows, c.Attention.KVLora, in)
			add(rows, c.Attention.Rope, in)
		case strings.HasSuffix(t.Name, "eh_proj.weight"): // the two halves of its columns
			add(rows, out, in/2)
			add(rows, out, in/2)
		case t.Name == "lm_head.weight":
			add(logitRows(c), out, in)
		default:
			add(rows, out, in)
		}
	}
	if c.TieEmbed {
		add(logitRows(c), c.VocabSize, c.Dim)
	}
	return list
}

// logitRows is how many rows the head projects at a time.
func logitRows(c model.Config) int {
	return int(model.MemoryOf(c, model.Whole(c), model.Load{Seqs: 1, Len: 1}).Logits) / c.VocabSize
}

type gemmCase struct {
	Layout string `json:"layout"`
	M      int    `json:"m"`
	N      int    `json:"n"`
	K      int    `json:"k"`
	rated
}

type kernelResult[C any] struct {
	Peak    float64 `json:"peak_gflops"`
	Threads int     `json:"threads"`
	Kernel  string  `json:"kernel"`
	Cases   []C     `json:"cases"`
}

func benchGemmCommand() *cobra.Command {
	var f benchFlags
	var cubes []int
	c := &cobra.Command{
		Use: "gemm", Short: "Dense products of a step, and of large cubes", Args: cobra.NoArgs,
		Long: `Rates of dense matrix products in GFLOP/s and as a share of the FMA peak: cubes, and every shape that a training step of
the configuration has (without --config: those of bench-s and bench-fine), in the layouts in which the step uses it. NT is a
forward, NN the gradient of an input, TN that of a weight, which is added to what is there.`,
		RunE: func(c *cobra.Command, _ []string) error {
			runs, err := f.configurations()
			if err != nil {
				return err
			}
			for _, n := range cubes {
				if n < 1 || n > 1<<14 {
					return usagef("--cubes %d must be between 1 and %d", n, 1<<14)
				}
			}
			if err := f.start(); err != nil {
				return err
			}
			var shapes []shape
			for _, n := range cubes {
				shapes = append(shapes, cube(n))
			}
			for _, run := range runs {
				for _, s := range stepShapes(run) {
					if !slices.Contains(shapes, s) {
						shapes = append(shapes, s)
					}
				}
			}
			return f.gemm(c, shapes)
		},
	}
	f.add(c)
	c.Flags().Float64Var(&f.seconds, "seconds", 0.3, "time for each shape")
	c.Flags().IntSliceVar(&cubes, "cubes", []int{1024, 2048}, "sizes of cubes")
	return c
}

func (f *benchFlags) gemm(c *cobra.Command, shapes []shape) error {
	m := meter{threads: f.threads}
	r := kernelResult[gemmCase]{Threads: f.threads, Kernel: kernel.Active()}
	for _, s := range shapes {
		r.Cases = append(r.Cases, gemmCase{layoutNames[s.layout], s.m, s.n, s.k, m.measure(s.flops(), f.seconds, s.product())})
	}
	r.Peak = m.peak()
	if f.asJSON {
		return printJSON(c, r)
	}
	r.say(c)
	var rows [][]string
	for _, k := range r.Cases {
		rows = append(rows, []string{k.Layout, strconv.Itoa(k.M), strconv.Itoa(k.N), strconv.Itoa(k.K), digits(k.GFLOPS), digits(k.OfPeak)})
	}
	return table(c.OutOrStdout(), []string{"layout", "m", "n", "k", "GFLOP/s", "of peak"}, rows)
}

func (r *kernelResult[C]) say(c *cobra.Command) {
	fmt.Fprintf(c.OutOrStdout(), "%s, %d threads, FMA peak %s GFLOP/s\n", r.Kernel, r.Threads, digits(r.Peak))
}

// product makes the operands and returns the call.
func (s shape) product() func() {
	a, b, c := random(s.m*s.k), random(s.k*s.n), random(s.m*s.n)
	lda, ldb := s.k, s.n
	if s.layout == kernel.TN {
		lda = s.m
	}
	if s.layout == kernel.NT {
		ldb = s.k
	}
	return func() { kernel.Gemm(s.layout, s.m, s.n, s.k, 1e-3, a, lda, b, ldb, s.beta, c, s.n) }
}

// A groupedShape is a product of all experts in one call: every row meets the matrix of its expert.
type groupedShape struct {
	layout kernel.Layout
	rows   []int
	n, k   int // with TN: columns of the two operands, whose rows are summed over
}

func (s groupedShape) total() (n int) {
	for _, r := range s.rows {
		n += r
	}
	return n
}

// expertShapes are the grouped products of a MoE layer whose experts of width inter get so many rows in all, unevenly:
// forward of gate and up, and of down; gradient of down's input and of gate's and up's; gradients of the weights.
func expertShapes(experts, rows, dim, inter int) []groupedShape {
	r := uneven(experts, rows)
	return []groupedShape{
		{kernel.NT, r, inter, dim}, {kernel.NT, r, dim, inter},
		{kernel.NN, r, inter, dim}, {kernel.NN, r, dim, inter},
		{kernel.TN, r, inter, dim}, {kernel.TN, r, dim, inter},
	}
}

// uneven spreads rows over experts as a router does that is not quite balanced: the busiest expert gets about three times
// the mean and the laziest none, in no order.
func uneven(experts, rows int) []int {
	list, sum := make([]int, experts), 0
	weight := func(e int) int { // a permutation of squares: mean 1/3 of the largest
		x := (e*37 + 11) % experts
		return x * x
	}
	for e := range list {
		sum += weight(e)
	}
	left := rows
	for e := range list {
		list[e] = rows * weight(e) / max(sum, 1)
		left -= list[e]
	}
	for e := 0; left > 0; e = (e + 1) % experts {
		if weight(e) > 0 || sum == 0 {
			list[e]++
			left--
		}
	}
	return list
}

type groupedCase struct {
	Layout  string `json:"layout"`
	Experts int    `json:"experts"`
	Rows    int    `json:"rows"`    // of all experts
	Largest int    `json:"largest"` // of one
	N       int    `json:"n"`
	K       int    `json:"k"`
	rated
}

func benchGroupedCommand() *cobra.Command {
	var f benchFlags
	c := &cobra.Command{
		Use: "grouped", Short: "Products of all experts of a layer in one call", Args: cobra.NoArgs,
		Long: `Rates of grouped products: 64 experts of width 96 at dim 256 with 2048 rows in uneven groups (the busiest expert has about
three times the mean, the laziest none), and those of a micro-batch of the configuration (without --config: bench-s and
bench-fine).`,
		RunE: func(c *cobra.Command, _ []string) error {
			runs, err := f.configurations()
			if err != nil {
				return err
			}
			if err := f.start(); err != nil {
				return err
			}
			shapes := expertShapes(64, 2048, 256, 96)
			for _, run := range runs {
				m := run.Model
				if m.Layers > m.DenseLayers || m.MTP.Depth > 0 {
					shapes = append(shapes, expertShapes(m.MoE.Experts, run.Parallel.Microbatch*m.Context*m.MoE.TopK, m.Dim, m.MoE.Inter)...)
				}
			}
			return f.grouped(c, shapes)
		},
	}
	f.add(c)
	c.Flags().Float64Var(&f.seconds, "seconds", 0.5, "time for each shape")
	return c
}

func (f *benchFlags) grouped(c *cobra.Command, shapes []groupedShape) error {
	m := meter{threads: f.threads}
	r := kernelResult[groupedCase]{Threads: f.threads, Kernel: kernel.Active()}
	for _, s := range shapes {
		flops := 2 * float64(s.total()) * float64(s.n) * float64(s.k)
		r.Cases = append(r.Cases, groupedCase{layoutNames[s.layout], len(s.rows), s.total(), slices.Max(s.rows), s.n, s.k,
			m.measure(flops, f.seconds, s.product())})
	}
	r.Peak = m.peak()
	if f.asJSON {
		return printJSON(c, r)
	}
	r.say(c)
	var rows [][]string
	for _, k := range r.Cases {
		rows = append(rows, []string{k.Layout, strconv.Itoa(k.Experts), strconv.Itoa(k.Rows), strconv.Itoa(k.Largest), strconv.Itoa(k.N),
			strconv.Itoa(k.K), digits(k.GFLOPS), digits(k.OfPeak)})
	}
	return table(c.OutOrStdout(), []string{"layout", "experts", "rows", "largest", "n", "k", "GFLOP/s", "of peak"}, rows)
}

func (s groupedShape) product() func() {
	total := s.total()
	w := make([][]float32, len(s.rows))
	for e := range w {
		w[e] = random(s.n * s.k)
	}
	if s.layout == kernel.TN {
		a, b := random(total*s.n), random(total*s.k)
		return func() { kernel.GroupedGemmTN(s.rows, s.n, s.k, a, b, w) }
	}
	a, c := random(total*s.k), make([]float32, total*s.n)
	return func() { kernel.GroupedGemm(s.layout, s.rows, s.n, s.k, a, w, 0, c) }
}

type attentionCase struct {
	Pass   string `json:"pass"` // forward, backward
	T      int    `json:"t"`
	Heads  int    `json:"heads"`
	QK     int    `json:"qk"`
	V      int    `json:"v"`
	Tokens int    `json:"tokens"` // of all sequences
	rated
}

func benchAttentionCommand() *cobra.Command {
	var (
		f       benchFlags
		lengths []int
	)
	c := &cobra.Command{
		Use: "attention", Short: "Causal attention, forward and backward", Args: cobra.NoArgs,
		Long: `Rates of causal attention with the heads and widths of the configuration (without --config: bench-s and bench-fine).
Operations are counted over the T(T+1)/2 pairs that are not masked: scores and weighted values in the forward; in the
backward the scores again and four gradients, as FlashAttention counts them (a step's mfu leaves the second scores out).`,
		RunE: func(c *cobra.Command, _ []string) error {
			runs, err := f.configurations()
			if err != nil {
				return err
			}
			for _, n := range lengths {
				if n < 1 || n > 1<<17 {
					return usagef("--lengths %d must be between 1 and %d", n, 1<<17)
				}
			}
			if err := f.start(); err != nil {
				return err
			}
			m := meter{threads: f.threads}
			r := kernelResult[attentionCase]{Threads: f.threads, Kernel: kernel.Active()}
			for _, run := range runs {
				for _, t := range lengths {
					h := newHeads(run.Model.Attention, t, max(1, run.Parallel.Microbatch*run.Model.Context/t))
					r.Cases = append(r.Cases, h.run(&m, f.seconds)...)
				}
			}
			r.Peak = m.peak()
			if f.asJSON {
				return printJSON(c, r)
			}
			r.say(c)
			var rows [][]string
			for _, k := range r.Cases {
				rows = append(rows, []string{k.Pass, strconv.Itoa(k.T), strconv.Itoa(k.Heads), strconv.Itoa(k.QK), strconv.Itoa(k.V),
					strconv.Itoa(k.Tokens), digits(k.GFLOPS), digits(k.OfPeak)})
			}
			return table(c.OutOrStdout(), []string{"pass", "T", "heads", "qk", "v", "tokens", "GFLOP/s", "of peak"}, rows)
		},
	}
	f.add(c)
	c.Flags().Float64Var(&f.seconds, "seconds", 1, "time for each case")
	c.Flags().IntSliceVar(&lengths, "lengths", []int{512, 4096}, "sequence lengths")
	return c
}

// heads are all heads of some sequences, which a step runs through kernel.Parallel.
type heads struct {
	t, seqs, heads, qk, v int
	one                   []kernel.Attention // by sequence and head
	dO, dQ, dK, dV        []float32
}

func newHeads(a model.Attention, t, seqs int) *heads {
	h := &heads{t: t, seqs: seqs, heads: a.Heads, qk: a.Nope + a.Rope, v: a.V}
	rows, qk, v := t*seqs, h.heads*h.qk, h.heads*h.v
	q, k, val, o, lse := random(rows*qk), random(rows*qk), random(rows*v), make([]float32, rows*v), make([]float32, rows*h.heads)
	h.dO, h.dQ, h.dK, h.dV = random(rows*v), make([]float32, rows*qk), make([]float32, rows*qk), make([]float32, rows*v)
	for s := range seqs {
		for i := range h.heads {
			h.one = append(h.one, kernel.Attention{T: t, DQ: h.qk, DV: h.v, Scale: 0.1,
				Q: q[h.at(s, i, h.qk):], K: k[h.at(s, i, h.qk):], V: val[h.at(s, i, h.v):], O: o[h.at(s, i, h.v):],
				LDQ: qk, LDK: qk, LDV: v, LDO: v, LSE: lse[(s*h.heads+i)*t:][:t]})
		}
	}
	return h
}

// at is where a head of a sequence begins, in matrices with the given columns a head.
func (h *heads) at(seq, head, cols int) int { return seq*h.t*h.heads*cols + head*cols }

func (h *heads) forward(i int) { h.one[i].Forward() }

func (h *heads) backward(i int) {
	qk, v := h.at(i/h.heads, i%h.heads, h.qk), h.at(i/h.heads, i%h.heads, h.v)
	h.one[i].Backward(h.dO[v:], h.heads*h.v, h.dQ[qk:], h.heads*h.qk, h.dK[qk:], h.heads*h.qk, h.dV[v:], h.heads*h.v)
}

func (h *heads) run(m *meter, seconds float64) []attentionCase {
	pairs := float64(len(h.one)) * float64(h.t) * float64(h.t+1) / 2
	one := func(pass string, flops float64, f func(int)) attentionCase {
		return attentionCase{pass, h.t, h.heads, h.qk, h.v, h.t * h.seqs, m.measure(flops, seconds, func() { kernel.Parallel(len(h.one), f) })}
	}
	return []attentionCase{
		one("forward", 2*pairs*float64(h.qk+h.v), h.forward),
		one("backward", 2*pairs*float64(3*h.qk+2*h.v), h.backward),
	}
}
