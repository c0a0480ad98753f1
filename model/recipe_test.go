package model

import (
	"cmp"
	"fmt"
	"math"
	"math/rand/v2"
	"slices"
	"strings"
	"testing"

	"moetor/internal/kernel"
	"moetor/internal/lowp"
	"moetor/internal/tensor"
)

func quant(f lowp.Format, k lowp.ScaleKind, tileRows, tileCols int) *lowp.Quant {
	return &lowp.Quant{Format: f, Scale: k, TileRows: tileRows, TileCols: tileCols}
}

// recipes are those of package configs.
func recipes() map[string]Recipe {
	b := quant(lowp.BF16, lowp.ScaleNone, 0, 0)
	token, channel := quant(lowp.E4M3, lowp.ScaleF32, 1, 128), quant(lowp.E4M3, lowp.ScaleF32, 128, 1)
	fp8 := Recipe{
		Weight: quant(lowp.E4M3, lowp.ScaleF32, 128, 128), Input: token, InputT: channel, Grad: token, GradT: channel,
		AttnOut: quant(lowp.E5M6, lowp.ScalePow2, 1, 128), AttnOutT: quant(lowp.E5M6, lowp.ScalePow2, 128, 1),
		SwiGLU: token, Dispatch: quant(lowp.E4M3, lowp.ScalePow2, 1, 128), Combine: b, Core: b, Promote: 128,
	}
	tensor, mx, hopper := fp8, fp8, fp8
	all := quant(lowp.E4M3, lowp.ScaleF32, 0, 0)
	tensor.Weight, tensor.Input, tensor.InputT, tensor.Grad, tensor.GradT, tensor.SwiGLU = all, all, all, all, all, all
	row, column := quant(lowp.E4M3, lowp.ScaleE8M0, 1, 32), quant(lowp.E4M3, lowp.ScaleE8M0, 32, 1)
	mx.Weight, mx.WeightT, mx.Input, mx.InputT, mx.Grad, mx.GradT, mx.SwiGLU, mx.Dispatch = row, column, row, column, row, column, row, row
	mx.AttnOut, mx.AttnOutT = quant(lowp.E5M6, lowp.ScaleE8M0, 1, 32), quant(lowp.E5M6, lowp.ScaleE8M0, 32, 1)
	hopper.Hopper = true
	return map[string]Recipe{
		"fp32": {},
		"bf16": {Weight: b, Input: b, InputT: b, Grad: b, GradT: b, AttnOut: b, AttnOutT: b, SwiGLU: b, Dispatch: b, Combine: b, Core: b},
		"fp8":  fp8, "fp8-tensor": tensor, "mxfp8": mx, "hopper": hopper,
	}
}

// recomputes are all choices of what to recompute.
func recomputes() (list [][]string) {
	for set := range 1 << len(recomputable) {
		var names []string
		for i, name := range recomputable {
			if set>>i&1 != 0 {
				names = append(names, name)
			}
		}
		list = append(list, names)
	}
	return list
}

// middle is a model of a width that tiles do not divide, or of one that they do. All tokens go to all experts, so that
// rounding cannot change a choice.
func middle(dim int) Config {
	c := tiny()
	c.Vocab, c.Dim, c.Context = 64, dim, 96
	c.MoE.TopK, c.MoE.TopGroups = 8, 4
	if dim%128 != 0 {
		c.DenseInter, c.MoE.Inter, c.InitStd = 168, 56, 0.015
		c.Attention = Attention{Kind: "mla", Heads: 3, QLora: 40, KVLora: 36, Nope: 20, Rope: 12, V: 20, RopeTheta: 10000}
	} else {
		c.DenseInter, c.MoE.Inter, c.InitStd = 256, 128, 0.008
		c.Attention = Attention{Kind: "mla", Heads: 4, QLora: 128, KVLora: 128, Nope: 32, Rope: 32, V: 64, RopeTheta: 10000}
	}
	return c
}

// fine is fp8 with two bits more of mantissa, and one, everywhere in place of E4M3.
func fine() Recipe {
	r := recipes()["fp8"]
	token, channel := quant(lowp.E5M6, lowp.ScaleF32, 1, 128), quant(lowp.E5M6, lowp.ScaleF32, 128, 1)
	r.Weight, r.Input, r.InputT, r.Grad, r.GradT = quant(lowp.E5M6, lowp.ScaleF32, 128, 128), token, channel, token, channel
	r.SwiGLU, r.Dispatch = token, quant(lowp.E5M6, lowp.ScalePow2, 1, 128)
	return r
}

// TestRecipeAccuracy: loss and gradients are those of FP32 but for rounding, and nearer with more bits. A distance below 0.14
// is a cosine above 0.99. With larger weights, which amplify the rounding of layers below, and where it makes tokens choose
// other experts, they are further apart.
func TestRecipeAccuracy(t *testing.T) {
	settings := Settings{MTPWeight: 0.3}
	bounds := map[string]float64{"fp32": 0, "bf16": 0.014, "fine": 0.03, "fp8": 0.14, "fp8-tensor": 0.17, "mxfp8": 0.16, "hopper": 0.14}
	all := recipes()
	all["fine"] = fine()
	for _, dim := range []int{96, 256} {
		c := middle(dim)
		micros := []Micro{micro(c, 1, 2, 80), micro(c, 2, 1, 77)}
		plain := cut(t, c, 5, 0)
		want := total(plain.step(t, micros, settings))
		grads := plain.grads()
		for name, r := range all {
			if name == "hopper" && dim > 96 {
				continue // slow
			}
			bound := bounds[name]
			c.Recipe = r
			p := cut(t, c, 5, 0)
			sums := p.step(t, micros, settings)
			got := total(sums)
			near(t, name+": loss", got.Loss/want.Loss, 1, bound/100)
			near(t, name+": MTP loss", got.MTP/want.MTP, 1, bound/100)
			worst := 0.0
			for n, g := range p.grads() {
				d := distance(g, grads[n])
				worst = max(worst, d)
				if !(d <= bound) {
					t.Errorf("%s, width %d: gradient of %s is off by %.3g", name, dim, n, d)
				}
			}
			t.Logf("%s, width %d: loss off by %.1e, gradients by at most %.3f", name, dim, got.Loss/want.Loss-1, worst)
			if eval := p.evaluate(t, micros, settings); !slices.EqualFunc(eval, sums, Sums.equal) {
				t.Errorf("%s, width %d: Evaluate sums %v, training %v", name, dim, eval, sums)
			}
		}
	}
}

// TestLinearProducts: the three products of a Linear are those of matrices stored by hand, to the bit; its weight is a part of
// a matrix, and all are added to what is there.
func TestLinearProducts(t *testing.T) {
	const rows, out, in = 200, 70, 130
	for name, r := range recipes() {
		if r.Weight == nil {
			continue
		}
		rng := rand.New(rand.NewPCG(1, 2))
		fill := func(m tensor.Mat) tensor.Mat {
			for i := range m.Rows {
				for j := range m.Cols {
					m.Row(i)[j] = float32(rng.NormFloat64())
				}
			}
			return m
		}
		param := &tensor.Param{Name: "w", Shape: []int{out, in + 20}}
		tensor.Allocate([]*tensor.Param{param})
		pl := newPlan(Config{Recipe: r})
		l := pl.pack(linearOf(param).inputs(10, 10+in))
		fill(l.w)
		fill(l.g)
		newPacker(pl).run()
		x, dy := fill(tensor.NewMat(rows, in)), fill(tensor.NewMat(rows, out))
		y, dx := fill(tensor.NewMat(rows, out)), fill(tensor.NewMat(rows, in))
		clone := func(m tensor.Mat) tensor.Mat { m.Data = slices.Clone(m.Data); return m }
		wantY, wantDX, wantG := clone(y), clone(dx), clone(l.g)

		stored := func(q *lowp.Quant, m tensor.Mat) *lowp.Matrix {
			s := lowp.New(*q, m.Rows, m.Cols, nil)
			lowp.Quantize(s, m.Data, m.Stride)
			return s
		}
		product := func(l kernel.Layout, a, b *lowp.Matrix, c tensor.Mat) {
			if r.Hopper {
				kernel.Hopper{Promote: r.Promote}.ScaledGemm(l, a, b, 1, c.Data, c.Stride)
				return
			}
			kernel.ScaledGemm(l, a, b, 1, c.Data, c.Stride)
		}
		product(kernel.NT, stored(r.Input, x), stored(r.Weight, l.w), wantY)
		product(kernel.NN, stored(r.Grad, dy), stored(cmp.Or(r.WeightT, r.Weight), l.w), wantDX)
		xt := lowp.New(*r.InputT, rows, in, nil)
		lowp.Requantize(xt, stored(r.Input, x))
		product(kernel.TN, stored(r.GradT, dy), xt, wantG)

		p := &pass{arena: tensor.NewArena(0), temp: tensor.NewArena(0)}
		xo := p.operand(p.arena, "x", x, r.Input, r.InputT)
		l.forward(y, xo, 1)
		l.backward(p, dx, pl.gradient(p, "dy", dy), xo, 1)
		p.settle(0)
		for _, m := range []struct {
			what      string
			got, want tensor.Mat
		}{{"y", y, wantY}, {"dx", dx, wantDX}, {"dw", l.g, wantG}} {
			for i := range m.want.Rows {
				if !slices.Equal(m.got.Row(i), m.want.Row(i)) {
					t.Errorf("%s: row %d of %s has other bits", name, i, m.what)
					break
				}
			}
		}
	}
}

// A layerRun is one MoE layer by itself: a token whose row has its largest value in column e goes to expert e.
type layerRun struct {
	y, dx tensor.Mat
	grads map[string][]float32
}

func runLayer(t *testing.T, r Recipe, x, dy tensor.Mat) layerRun {
	t.Helper()
	c := tiny()
	c.Recipe, c.Layers, c.DenseLayers, c.MTP.Depth, c.Context, c.Dim = r, 1, 0, 0, 600, x.Cols
	c.MoE = MoE{Experts: 5, TopK: 1, Inter: 72, Groups: 1, TopGroups: 1, Score: Sigmoid, Scale: 1}
	ch, err := New(c, Whole(c), 5, nil)
	check(t, err)
	m := ch.blocks[0].moe
	gate := m.router.gate.w
	clear(gate.Data)
	for e := range 5 {
		gate.Row(e)[e] = 1
	}
	micro := micro(c, 1, 1, x.Rows)
	ch.Bind([]Micro{micro}, Settings{})
	p, err := ch.take(0, nil, true)
	check(t, err)
	run := layerRun{y: tensor.NewMat(x.Rows, x.Cols), dx: tensor.NewMat(x.Rows, x.Cols), grads: map[string][]float32{}}
	act := &moePass{}
	xo := p.operand(p.arena, "x", x, r.Input, r.InputT)
	check(t, m.forward(t.Context(), p, act, run.y, xo, x, p.real))
	check(t, m.backward(t.Context(), p, act, run.dx, dy, xo, x))
	p.settle(0)
	for _, q := range ch.Params() {
		run.grads[q.Name] = q.Grad
	}
	return run
}

// TestExpertRows: experts with no row, one, and about as many as a tile has. Each is what it is alone: its tiles begin at its
// own first row. One scale for a whole matrix is of all experts.
func TestExpertRows(t *testing.T) {
	const d = 96
	counts := []int{0, 1, 127, 128, 129}
	rng := rand.New(rand.NewPCG(3, 4))
	var expert []int
	for e, n := range counts {
		expert = append(expert, slices.Repeat([]int{e}, n)...)
	}
	rng.Shuffle(len(expert), func(i, j int) { expert[i], expert[j] = expert[j], expert[i] })
	x, dy := tensor.NewMat(len(expert), d), tensor.NewMat(len(expert), d)
	for i := range x.Data {
		x.Data[i], dy.Data[i] = float32(rng.NormFloat64()), float32(rng.NormFloat64())
	}
	for i, e := range expert {
		x.Row(i)[e] = 5
	}
	plain := runLayer(t, Recipe{}, x, dy)
	for name, r := range recipes() {
		bound := 0.14
		switch name {
		case "fp32":
			bound = 0
		case "bf16":
			bound = 0.02
		}
		all := runLayer(t, r, x, dy)
		compare := func(what string, got, want []float32) {
			t.Helper()
			if d := distance(got, want); !(d <= bound) {
				t.Errorf("%s: %s is off by %.3g", name, what, d)
			}
		}
		compare("y", all.y.Data, plain.y.Data)
		compare("dx", all.dx.Data, plain.dx.Data)
		for n, g := range all.grads {
			compare(n, g, plain.grads[n])
		}
		for e, n := range counts {
			if name == "fp8-tensor" && n > 0 {
				continue
			}
			ax, ady := tensor.NewMat(n, d), tensor.NewMat(n, d)
			at := 0
			var rows []int
			for i := range expert {
				if expert[i] == e {
					copy(ax.Row(at), x.Row(i))
					copy(ady.Row(at), dy.Row(i))
					rows = append(rows, i)
					at++
				}
			}
			alone := runLayer(t, r, ax, ady)
			for at, i := range rows {
				if !slices.Equal(alone.y.Row(at), all.y.Row(i)) || !slices.Equal(alone.dx.Row(at), all.dx.Row(i)) {
					t.Errorf("%s: row %d of expert %d of %d rows has other bits alone", name, at, e, n)
					break
				}
			}
			for param, g := range all.grads {
				if !strings.Contains(param, fmt.Sprintf(".experts.%d.", e)) {
					continue
				}
				if !slices.Equal(alone.grads[param], g) {
					t.Errorf("%s: gradient of %s, %d rows, has other bits alone", name, param, n)
				}
				if nothing := slices.Max(g) == 0 && slices.Min(g) == 0; nothing != (n == 0) {
					t.Errorf("%s: gradient of %s with %d rows: zero is %v", name, param, n, nothing)
				}
			}
		}
	}
}

// TestRecipePadding, with tiles within a token: padding and other samples in a row change nothing that the forward says, to
// the bit; gradients differ by rounding, since the tiles of weight gradients are filled with other tokens.
func TestRecipePadding(t *testing.T) {
	settings := Settings{MTPWeight: 0.3}
	for name, r := range recipes() {
		if name == "fp8-tensor" {
			continue // all share the scale
		}
		c := tiny()
		c.Recipe, c.MoE.SeqAux = r, 0
		bound := 0.14
		switch name {
		case "fp32":
			bound = 1e-6
		case "bf16":
			bound = 0.01
		}
		short := micro(c, 1, 2, 9)
		long := Micro{Seqs: 2, Len: 32, Valid: []int32{9, 9}}
		packed := Micro{Seqs: 1, Len: 18, Starts: []int32{0, 9}, Tokens: short.Tokens, Targets: short.Targets, Weight: short.Weight}
		for s := range 2 {
			pad := make([]int32, 23)
			long.Tokens = append(append(long.Tokens, short.Tokens[s*9:(s+1)*9]...), pad...)
			long.Targets = append(append(long.Targets, short.Targets[s*9:(s+1)*9]...), pad...)
			long.Weight = append(append(long.Weight, short.Weight[s*9:(s+1)*9]...), make([]float32, 23)...)
		}
		p := cut(t, c, 5, 0)
		want := total(p.step(t, []Micro{short.slice(0, 1), short.slice(1, 2)}, settings))
		grads := p.grads()
		for what, m := range map[string]Micro{"together": short, "padded": long, "packed": packed} {
			got := total(p.step(t, []Micro{m}, settings))
			near(t, name+", "+what+": loss", got.Loss, want.Loss, 1e-12*want.Loss)
			near(t, name+", "+what+": MTP loss", got.MTP, want.MTP, 1e-12*want.MTP)
			for n, g := range p.grads() {
				if d := distance(g, grads[n]); d > bound {
					t.Errorf("%s, %s: gradient of %s is off by %.2g", name, what, n, d)
				}
			}
		}
		if v := c.vocab(); !slices.Equal(p.logits(t, packed)[:9*v], p.logits(t, short.slice(0, 1))) {
			t.Errorf("%s: a packed sample has other logits alone", name)
		}
	}
}

// TestNewWeights: weights are stored anew at each Bind.
func TestNewWeights(t *testing.T) {
	for name, r := range recipes() {
		c := tiny()
		c.Recipe = r
		m := []Micro{micro(c, 1, 2, 16)}
		a, b := cut(t, c, 5, 0), cut(t, c, 6, 0)
		a.step(t, m, Settings{})
		values, _ := b[0].Blocks()
		mine, _ := a[0].Blocks()
		copy(mine, values)
		if got, want := a.step(t, m, Settings{}), b.step(t, m, Settings{}); !got[0].equal(want[0]) {
			t.Errorf("%s: %v with new weights, want %v", name, got, want)
		}
		if got, want := a.evaluate(t, m, Settings{}), b.evaluate(t, m, Settings{}); !got[0].equal(want[0]) {
			t.Errorf("%s: Evaluate sums %v with new weights, want %v", name, got, want)
		}
	}
}

// TestRecipeBytes: what fp8 saves, as shares of FP32: the activations that wait for the backward, counted at the size of
// bench-s and measured at a smaller one; the weights of experts for the forward; and rows on their way to experts.
func TestRecipeBytes(t *testing.T) {
	fp8 := recipes()["fp8"]
	c := tiny()
	c.Vocab, c.Dim, c.Layers, c.DenseLayers, c.DenseInter, c.Context, c.InitStd, c.MTP.Depth = 4096, 384, 6, 1, 1024, 512, 0.02, 0
	c.Attention = Attention{Kind: "mla", Heads: 6, QLora: 192, KVLora: 128, Nope: 64, Rope: 32, V: 64, RopeTheta: 10000}
	c.MoE = MoE{Experts: 16, TopK: 4, Shared: 1, Inter: 256, Groups: 1, TopGroups: 1, Score: Sigmoid, Normalize: true, Scale: 1}
	kept := func(c Config) int64 { return MemoryOf(c, Whole(c), Load{Seqs: 4, Len: 512}).Kept }
	low := c
	low.Recipe = fp8
	t.Logf("bench-s keeps %d values of a micro-batch, %d in fp8", kept(c), kept(low))
	if share := float64(kept(low)) / float64(kept(c)); share > 0.40 || share < 0.25 {
		t.Errorf("bench-s: %.3f of the activations", share)
	}
	c.Vocab, c.Layers, c.Context, c.MoE.Experts = 64, 2, 128, 8
	var held [2]float64
	for i, r := range []Recipe{{}, fp8} {
		c.Recipe = r
		p := cut(t, c, 5, 0)
		held[i] = float64(p.holding(t, micro(c, 1, 2, 100), Settings{}, true)[0])
		for _, w := range p[0].blocks[1].moe.gate.packed {
			if share := float64(w.y.Bytes()) / float64(4*len(w.w.Data)); share > 0.27 {
				t.Errorf("an expert's weight is %.3f of its size", share)
			}
		}
		// The counts hold to a percent, which is what allocations round.
		if got, want := float64(p[0].PackedBytes()), float64(MemoryOf(c, p[0].Part(), Load{Seqs: 2, Len: 100}).Packed); math.Abs(got-want) > want/100 {
			t.Errorf("packed weights are %v bytes, counted %v", got, want)
		}
	}
	if share := held[1] / held[0]; share > 0.40 || share < 0.25 {
		t.Errorf("two layers: %.3f of the activations", share)
	}
	row := lowp.New(*fp8.Dispatch, 1, c.Dim, nil)
	if share := float64(wireWords(row)) / float64(c.Dim); share > 0.27 {
		t.Errorf("dispatch: %.3f of the bytes", share)
	}
}

// TestWire: codes and scales come out of rows of words as they went in, whatever bits they have.
func TestWire(t *testing.T) {
	w, rng := newWire(), rand.New(rand.NewPCG(5, 6))
	for _, q := range []*lowp.Quant{
		quant(lowp.BF16, lowp.ScaleNone, 0, 0), quant(lowp.E4M3, lowp.ScaleF32, 1, 128), quant(lowp.E4M3, lowp.ScaleE8M0, 1, 32), quant(lowp.E5M6, lowp.ScalePow2, 1, 128),
	} {
		for _, cols := range []int{1, 2, 3, 96, 131, 256} {
			for _, rows := range []int{0, 1, 70, 200} {
				src, dst := lowp.New(*q, rows, cols, nil), lowp.New(*q, rows, cols, nil)
				for _, b := range [][]byte{src.Codes, src.Exponents, asBytes(src.Scales)} {
					for i := range b {
						b[i] = byte(rng.Uint32())
					}
				}
				words := tensor.NewMat(rows, wireWords(src))
				w.pack(words, src)
				w.unpack(dst, words)
				if !slices.Equal(dst.Codes, src.Codes) || !slices.Equal(dst.Exponents, src.Exponents) || !slices.Equal(asBytes(dst.Scales), asBytes(src.Scales)) {
					t.Errorf("%v, %d x %d: other bits", q, rows, cols)
				}
			}
		}
	}
}

// TestCoreSeesOneRounding: the probabilities that the attention's backward makes again, from the queries and keys that were kept
// and the log-sum-exp of the forward, add up to 1 in every row. They do only if the forward saw the rounded ones too.
func TestCoreSeesOneRounding(t *testing.T) {
	c := middle(96)
	c.Recipe = recipes()["bf16"]
	p := cut(t, c, 5, 0)
	for _, param := range p[0].Params() { // large scores
		if strings.HasSuffix(param.Name, "q_b_proj.weight") || strings.HasSuffix(param.Name, "kv_b_proj.weight") {
			for i := range param.Value {
				param.Value[i] *= 60
			}
		}
	}
	const rows = 80
	p[0].Bind([]Micro{micro(c, 1, 1, rows)}, Settings{})
	_, err := p[0].Forward(t.Context(), 0, nil)
	check(t, err)
	pass, a := p[0].flying[0], c.Attention
	act, scale := &pass.blocks[0].attention, p[0].blocks[0].attention.scale
	q, kv := pass.load(act.keptQ), pass.load(act.keptKV)
	largest := 0.0
	for h := range a.Heads {
		for r := range rows {
			var sum float64
			for s := range r + 1 {
				query, score := q.Row(r)[h*a.qk():(h+1)*a.qk()], 0.0
				for j, v := range kv.Row(s)[h*(a.Nope+a.V):][:a.Nope] {
					score += float64(query[j]) * float64(v)
				}
				for j, v := range act.kr.Row(s) {
					score += float64(query[a.Nope+j]) * float64(v)
				}
				score *= float64(scale)
				largest = max(largest, math.Abs(score))
				sum += math.Exp(score - float64(act.lse[h*rows+r]))
			}
			if math.Abs(sum-1) > 1e-3 {
				t.Fatalf("head %d, row %d: probabilities add up to %v", h, r, sum)
			}
		}
	}
	if largest < 20 {
		t.Errorf("scores are at most %v: too small to tell", largest)
	}
}
