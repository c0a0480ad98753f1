package main

import (
	"cmp"
	"errors"
	"fmt"
	"math"
	"math/rand/v2"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/spf13/cobra"

	"moetor/configs"
	"moetor/internal/kernel"
	"moetor/internal/lowp"
	"moetor/model"
)

// lowpResult is what bench lowp prints.
type lowpResult struct {
	Threads     int              `json:"threads"`
	Kernel      string           `json:"kernel"`
	Conversions []conversionCase `json:"conversions"`
	Products    []codesCase      `json:"products"`
	Grouped     []codesCase      `json:"grouped"`
}

// conversionCase is one way to store a matrix.
type conversionCase struct {
	Format     string         `json:"format"`
	Tile       string         `json:"tile"` // rows x columns with one scale; all is the matrix
	Scale      string         `json:"scale"`
	Bits       float64        `json:"bits"`    // of a value, its share of the scales included
	RelRMS     float64        `json:"rel_rms"` // of the errors, to that of the values
	SNR        float64        `json:"snr_db"`
	Quantize   conversionRate `json:"quantize"`
	Dequantize conversionRate `json:"dequantize"`
}

type conversionRate struct {
	GValues float64 `json:"gvalues_s"`
	GB      float64 `json:"gb_s"`    // read and written
	OfCopy  float64 `json:"of_copy"` // share of the rate of a copy loop that reads and writes as many bytes
}

// codesCase compares a product of codes, C [m, n] with a sum over k, with that of the same matrices in FP32. A ratio above 1
// is in favour of codes.
type codesCase struct {
	Recipe    string  `json:"recipe"`
	Layout    string  `json:"layout"`
	Experts   int     `json:"experts,omitempty"` // grouped; then m (TN: k) counts the rows of all of them
	M         int     `json:"m"`
	N         int     `json:"n"`
	K         int     `json:"k"`
	GFLOPS    float64 `json:"gflops"`
	FP32      float64 `json:"fp32_gflops"`
	Ratio     float64 `json:"ratio"`
	Quantized float64 `json:"ratio_quantized"` // with what a step converts for the product in every micro-batch
	RelRMS    float64 `json:"rel_rms"`         // of the differences between the two, to that of FP32's
}

type lowpBench struct {
	benchFlags
	recipes []string
	weights int // MiB
}

func benchLowpCommand() *cobra.Command {
	var b lowpBench
	c := &cobra.Command{
		Use: "lowp", Short: "Conversions to few bits, and products of codes against FP32", Args: cobra.NoArgs,
		Long: `Three tables. Conversions: every storage that a recipe knows (1x128 for activations, 128x1 for gradients of weights, 128x128
for weights, ...) on 2048 x 512 values of a normal distribution: bits of a value, scales included; the error; rates, and their
share of a copy loop's that moves as many bytes. Products: the shapes of a step of the configuration (without --config: of
bench-s and bench-fine) that recipes multiply from codes, weights packed, against FP32. Grouped: the same of its experts, in
uneven groups, and of 64 experts with 8 rows each whose weights come from memory. What is compared takes turns; a ratio is
the median of the rounds'. The one with quantization adds what a step converts for the product in each micro-batch: for NT
its input, for NN the gradient both ways, for TN the kept input to tiles along the rows. A step does part of it inside the
norm or SwiGLU before, or once for several products. The sums of hopper are emulated: expect minutes.`,
		RunE: func(c *cobra.Command, _ []string) error { return b.run(c) },
	}
	b.add(c)
	fl := c.Flags()
	fl.Float64Var(&b.seconds, "seconds", 0.2, "time for each case")
	fl.StringSliceVar(&b.recipes, "recipe", []string{"fp8"}, "recipes of the products: "+strings.Join(codeRecipes(), ", "))
	fl.IntVar(&b.weights, "weights", 704, fmt.Sprintf("MiB in FP32 of weights that come from memory, up to %d (704: a layer of DeepSeek-V2-Lite; 0: none)", maxWeights))
	return c
}

// maxWeights bounds --weights: no cache is as large, and more, with its codes beside it, would only fill the memory.
const maxWeights = 8 << 10

// codeRecipes are the recipes that multiply codes.
func codeRecipes() []string {
	return slices.DeleteFunc(configs.RecipeNames(), func(name string) bool {
		return configs.Precision{Recipe: name}.ModelRecipe().Weight == nil
	})
}

func (b *lowpBench) run(c *cobra.Command) error {
	known := codeRecipes()
	if len(b.recipes) == 0 {
		return usagef("--recipe names none; known: %s", strings.Join(known, ", "))
	}
	for _, name := range b.recipes {
		if !slices.Contains(known, name) {
			return usagef("--recipe %s is none that multiplies codes; known: %s", name, strings.Join(known, ", "))
		}
	}
	if b.weights < 0 || b.weights > maxWeights {
		return usagef("--weights %d must be between 0 and %d", b.weights, maxWeights)
	}
	runs, err := b.configurations()
	if err != nil {
		return err
	}
	recipes := map[string]model.Recipe{}
	for _, name := range configs.RecipeNames() {
		p := runs[0].Precision // its promote counts where the recipe has one
		p.Recipe = name
		recipes[name] = p.ModelRecipe()
	}
	if err := b.start(); err != nil {
		return err
	}
	r := lowpResult{Threads: b.threads, Kernel: kernel.Active(), Conversions: b.conversions(recipes)}
	linears, experts := b.shapes(runs)
	for _, name := range b.recipes {
		for _, s := range linears {
			r.Products = append(r.Products, b.product(name, recipes[name], s, true))
		}
		for _, s := range experts {
			r.Grouped = append(r.Grouped, b.product(name, recipes[name], s, false))
		}
	}
	if b.asJSON {
		return printJSON(c, r)
	}
	return r.print(c)
}

// inTurn times works in rounds for about so many seconds in all: the median seconds of a call, and how many times as fast as
// the first work each is, the median of the rounds'. The works of a round take turns, window by window, and the best window of
// each counts, as in meter.measure: so the load of the minute meets all alike. Works that take long have fewer windows.
func inTurn(seconds float64, works ...func()) (each, speedup []float64) {
	calls, times, ratios := make([]int, len(works)), make([][]float64, len(works)), make([][]float64, len(works))
	for i, work := range works {
		work() // warm
		begin := time.Now()
		work()
		calls[i] = max(1, int(windowTime/max(time.Since(begin), 1)))
	}
	for end := time.Now().Add(time.Duration(seconds * float64(time.Second))); len(times[0]) < leastRounds || time.Now().Before(end); {
		best, start := slices.Repeat([]float64{math.Inf(1)}, len(works)), time.Now()
		for w := 0; w == 0 || w < windows && time.Since(start) < time.Second; w++ {
			for i, work := range works {
				begin := time.Now()
				for range calls[i] {
					work()
				}
				best[i] = min(best[i], time.Since(begin).Seconds()/float64(calls[i]))
			}
		}
		for i, s := range best {
			times[i], ratios[i] = append(times[i], s), append(ratios[i], best[0]/s)
		}
	}
	for i := range works {
		each, speedup = append(each, median(times[i])), append(speedup, round(median(ratios[i])))
	}
	return each, speedup
}

// normal returns values of a normal distribution, of the size of what comes out of a norm.
func normal(r *rand.Rand, n int) []float32 {
	x := make([]float32, n)
	for i := range x {
		x[i] = float32(r.NormFloat64())
	}
	return x
}

// quantize stores rows of x, as a step does: on all threads, but for a matrix with one scale.
func quantize(x []float32, cols int, to ...*lowp.Matrix) {
	s := kernel.Storage{Floats: x}
	for _, m := range to {
		if m.Scale != lowp.ScaleNone && m.TileRows == 0 {
			lowp.Quantize(m, x, cols)
		} else if m.TileRows > 1 {
			s.Tall = m
		} else {
			s.Flat = m
		}
	}
	if s.Flat != nil || s.Tall != nil {
		s.Quantize(cols)
	}
}

// conversions measures each storage once that the recipes have for an operand.
func (b *lowpBench) conversions(recipes map[string]model.Recipe) (cases []conversionCase) {
	const rows, cols, values, piece = 2048, 512, 2048 * 512, 64 << 10
	x, y, from, to := normal(rand.New(rand.NewPCG(1, 2)), values), make([]float32, values), make([]byte, 4*values), make([]byte, 4*values)
	done := map[lowp.Quant]bool{}
	for _, name := range configs.RecipeNames() {
		r := recipes[name]
		for _, q := range []*lowp.Quant{r.Weight, r.WeightT, r.Input, r.InputT, r.Grad, r.GradT, r.AttnOut, r.AttnOutT, r.SwiGLU, r.Dispatch, r.Combine, r.Core} {
			if q == nil || done[*q] {
				continue
			}
			done[*q] = true
			m := lowp.New(*q, rows, cols, nil)
			stored := len(m.Codes) + 4*len(m.Scales) + len(m.Exponents)
			moved := 4*values + stored
			copies := func() {
				kernel.Parallel((moved/2+piece-1)/piece, func(i int) { copy(to[i*piece:min(moved/2, (i+1)*piece)], from[i*piece:]) })
			}
			each, speedup := inTurn(b.seconds, copies, func() { quantize(x, cols, m) }, func() { kernel.Dequantize(y, m) })
			rate := func(i int) conversionRate {
				return conversionRate{round(values / each[i] / 1e9), round(float64(moved) / each[i] / 1e9), speedup[i]}
			}
			words, s := strings.Fields(q.String()), lowp.Measure(m, x, cols) // format, tile, scale
			cases = append(cases, conversionCase{words[0], words[1], words[2], 8 * float64(stored) / values,
				round(math.Sqrt(s.Noise / s.Signal)), round(s.SNR()), rate(1), rate(2)})
		}
	}
	return cases
}

// shapes are the different products of stepShapes that recipes have a say in, all but the head's and the routers', each as
// one group; and those of experts.
func (b *lowpBench) shapes(runs []*configs.Run) (linears, experts []groupedShape) {
	var done []shape
	for _, run := range runs {
		c, rows, list := run.Model, run.Parallel.Microbatch*run.Model.Context, stepShapes(run)
		drop := func(times, rows, out, in int) {
			for i := range 3 * times {
				at := slices.Index(list, []shape{{kernel.NT, rows, out, in, 0}, {kernel.NN, rows, in, out, 0}, {kernel.TN, out, in, rows, 1}}[i%3])
				list = slices.Delete(list, at, at+1)
			}
		}
		routed := c.Layers - c.DenseLayers + c.MTP.Depth
		drop(1, logitRows(c), c.VocabSize, c.Dim)
		drop(routed, rows, c.MoE.Experts, c.Dim)
		for _, s := range list {
			if slices.Contains(done, s) {
				continue
			}
			g := groupedShape{s.layout, []int{s.m}, s.n, s.k}
			if s.layout == kernel.TN {
				g = groupedShape{s.layout, []int{s.k}, s.m, s.n}
			}
			done, linears = append(done, s), append(linears, g)
		}
		if routed > 0 {
			experts = append(experts, expertShapes(c.MoE.Experts, rows*c.MoE.TopK, c.Dim, c.MoE.Inter)...)
		}
	}
	if b.weights > 0 {
		const count, rows, dim = 64, 8, 2048
		each, inter := slices.Repeat([]int{rows}, count), max(1, b.weights<<20/(4*count*dim))
		experts = append(experts, groupedShape{kernel.NT, each, inter, dim}, groupedShape{kernel.NN, each, dim, inter})
	}
	return linears, experts
}

// product measures a product in FP32 and from codes. Operands are stored as a step with the recipe has them; a linear is a
// single group. Experts have equal weights, each in memory of its own.
func (b *lowpBench) product(name string, r model.Recipe, g groupedShape, linear bool) codesCase {
	random, rows, total := rand.New(rand.NewPCG(1, 2)), g.rows, g.total()
	c := codesCase{Recipe: name, Layout: layoutNames[g.layout], M: total, N: g.n, K: g.k}
	var groups []int
	if !linear {
		groups, c.Experts = rows, len(rows)
	}
	gemm, packed, grouped, groupedTN := kernel.ScaledGemm, kernel.ScaledGemmPacked, kernel.ScaledGroupedGemm, kernel.ScaledGroupedGemmTN
	if r.Hopper {
		h := kernel.Hopper{Promote: r.Promote}
		gemm, packed, grouped, groupedTN = h.ScaledGemm, h.ScaledGemmPacked, h.ScaledGroupedGemm, h.ScaledGroupedGemmTN
	}
	convert := func() {}
	var y, qy [][]float32 // results
	var float, coded func()
	if g.layout == kernel.TN {
		c.M, c.N, c.K = g.n, g.k, total
		dy, x := normal(random, total*g.n), normal(random, total*g.k)
		qdy, kept := lowp.New(*r.GradT, total, g.n, groups), lowp.New(*r.Input, total, g.k, nil)
		quantize(dy, g.n, qdy)
		quantize(x, g.k, kept)
		qx := kept
		if *r.InputT != *r.Input {
			qx = lowp.New(*r.InputT, total, g.k, groups)
			convert = func() { kernel.Requantize(qx, kept) }
		}
		for range rows {
			y, qy = append(y, make([]float32, g.n*g.k)), append(qy, make([]float32, g.n*g.k))
		}
		float, coded = func() { kernel.GroupedGemmTN(rows, g.n, g.k, dy, x, y) }, func() { groupedTN(rows, qdy, qx, qy) }
		if linear {
			float, coded = func() { kernel.Gemm(g.layout, g.n, g.k, total, 1, dy, g.n, x, g.k, 1, y[0], g.k) }, func() { gemm(g.layout, qdy, qx, 1, qy[0], g.k) }
		}
	} else {
		x, w := normal(random, total*g.k), normal(random, g.n*g.k)
		out, in, weight, to := g.n, g.k, r.Weight, []*lowp.Matrix{lowp.New(*r.Input, total, g.k, nil)}
		if g.layout == kernel.NN {
			out, in, weight, to = g.k, g.n, cmp.Or(r.WeightT, r.Weight), []*lowp.Matrix{lowp.New(*r.Grad, total, g.k, nil)}
			if *r.GradT != *r.Grad {
				to = append(to, lowp.New(*r.GradT, total, g.k, groups))
			}
		}
		convert = func() { quantize(x, g.k, to...) }
		qw := lowp.New(*weight, out, in, nil)
		quantize(w, in, qw)
		all, allCodes := make([][]float32, len(rows)), make([]*kernel.PackedWeight, len(rows))
		for e := range rows {
			all[e], allCodes[e] = slices.Clone(w), new(kernel.PackedWeight)
			allCodes[e].Pack(g.layout, qw)
		}
		y, qy = [][]float32{make([]float32, total*g.n)}, [][]float32{make([]float32, total*g.n)}
		float, coded = func() { kernel.GroupedGemm(g.layout, rows, g.n, g.k, x, all, 0, y[0]) }, func() { grouped(rows, to[0], allCodes, 0, qy[0]) }
		if linear {
			float, coded = func() { kernel.Gemm(g.layout, total, g.n, g.k, 1, x, g.k, w, in, 0, y[0], g.n) }, func() { packed(to[0], allCodes[0], 0, qy[0], g.n) }
		}
	}
	convert()
	float()
	coded()
	var signal, noise float64
	for e := range y {
		for i, v := range y[e] {
			d := float64(v) - float64(qy[e][i])
			signal, noise = signal+float64(v)*float64(v), noise+d*d
		}
	}
	each, speedup := inTurn(b.seconds, float, coded, func() { convert(); coded() })
	giga := 2 * float64(total) * float64(g.n) * float64(g.k) / 1e9
	c.FP32, c.GFLOPS, c.Ratio, c.Quantized, c.RelRMS = round(giga/each[0]), round(giga/each[1]), speedup[1], speedup[2], round(math.Sqrt(noise/signal))
	return c
}

func (r *lowpResult) print(c *cobra.Command) error {
	fmt.Fprintf(c.OutOrStdout(), "%s, %d threads\n", r.Kernel, r.Threads)
	var rows [][]string
	add := func(words []string, numbers ...float64) {
		for _, x := range numbers {
			words = append(words, strconv.FormatFloat(x, 'f', -1, 64))
		}
		rows = append(rows, words)
	}
	for _, k := range r.Conversions {
		q, d := k.Quantize, k.Dequantize
		add([]string{k.Format, k.Tile, k.Scale}, round(k.Bits), k.RelRMS, k.SNR, q.GValues, q.GB, q.OfCopy, d.GValues, d.GB, d.OfCopy)
	}
	err := table(c.OutOrStdout(), strings.Split("format,tile,scale,bits,rel. RMS,SNR dB,quantize G/s,GB/s,of copy,dequantize G/s,GB/s,of copy", ","), rows)
	for _, list := range [][]codesCase{r.Products, r.Grouped} {
		rows = nil
		for _, k := range list {
			add([]string{k.Recipe, k.Layout}, float64(k.Experts), float64(k.M), float64(k.N), float64(k.K), k.GFLOPS, k.FP32, k.Ratio, k.Quantized, k.RelRMS)
		}
		fmt.Fprintln(c.OutOrStdout())
		err = errors.Join(err, table(c.OutOrStdout(), strings.Split("recipe,layout,experts,m,n,k,GFLOP/s,FP32's,ratio,with quantization,rel. RMS", ","), rows))
	}
	return err
}
