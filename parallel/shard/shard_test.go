package shard

import (
	"context"
	"errors"
	"fmt"
	"math"
	"math/rand/v2"
	"slices"
	"strings"
	"sync"
	"testing"

	"moetor/comm"
	"moetor/comm/inproc"
	"moetor/internal/tensor"
)

// layout is a mesh of a small model: pipeline x data ranks, experts over expert data ranks.
type layout struct{ pipeline, data, expert int }

func (l layout) String() string { return fmt.Sprintf("%dx%d,%d", l.pipeline, l.data, l.expert) }

// rank is one rank of a run: its place, its parameters and its Sync.
type rank struct {
	p, d, e int
	params  []*tensor.Param
	sync    *Sync
}

const layers, experts = 4, 4

// newParams are the parameters that a rank holds: embedding on the first stage, its tied copy on the last, and per layer a
// matrix, a vector shorter than some groups, and the rank's experts.
func newParams(l layout, p, e int) []*tensor.Param {
	var list []*tensor.Param
	add := func(name string, expert, tied bool, shape ...int) {
		list = append(list, &tensor.Param{Name: name, Shape: shape, Expert: expert, Tied: tied})
	}
	if p == 0 {
		add("model.embed_tokens.weight", false, false, 7, 3)
	}
	for layer := p * layers / l.pipeline; layer < (p+1)*layers/l.pipeline; layer++ {
		add(fmt.Sprintf("model.layers.%d.attn.weight", layer), false, false, 5, 4)
		add(fmt.Sprintf("model.layers.%d.norm.weight", layer), false, false, 3)
		for x := e * experts / l.expert; x < (e+1)*experts/l.expert; x++ {
			add(fmt.Sprintf("model.layers.%d.mlp.experts.%d.weight", layer, x), true, false, 3, 2)
		}
	}
	if p == l.pipeline-1 {
		add("model.norm.weight", false, false, 4)
		add("model.embed_tokens.weight", false, true, 7, 3)
	}
	tensor.Allocate(list)
	for _, q := range list {
		rng := seeded(q.Name)
		for i := range q.Value {
			q.Value[i] = float32(rng.IntN(64)) / 8
		}
	}
	return list
}

// seeded is a generator that depends on the text only.
func seeded(text string) *rand.Rand {
	h := uint64(14695981039346656037)
	for _, b := range []byte(text) {
		h = (h ^ uint64(b)) * 1099511628211
	}
	return rand.New(rand.NewPCG(h, 1))
}

// run starts all ranks of a layout, with their parameters changed by edit, and calls f on each.
func run(t *testing.T, l layout, edit func(r *rank), f func(ctx context.Context, r *rank) error) {
	t.Helper()
	if err := errors.Join(start(t, l, edit, f)...); err != nil {
		t.Fatalf("%v: %v", l, err)
	}
}

func start(t *testing.T, l layout, edit func(r *rank), f func(ctx context.Context, r *rank) error) []error {
	transports := inproc.New(l.pipeline * l.data)
	errs := make([]error, len(transports))
	var wg sync.WaitGroup
	for i, tr := range transports {
		wg.Go(func() {
			defer tr.Close()
			r := &rank{p: i / l.data, d: i % l.data}
			r.e = r.d % l.expert
			r.params = newParams(l, r.p, r.e)
			if edit != nil {
				edit(r)
			}
			all, data, replica, embed, err := l.groups(tr, r)
			if err == nil {
				r.sync, err = New(t.Context(), all, data, replica, embed, r.params)
			}
			if err == nil {
				err = f(t.Context(), r)
			}
			errs[i] = err
		})
	}
	wg.Wait()
	return errs
}

func (l layout) groups(t comm.Transport, r *rank) (all, data, replica, embed *comm.Group, err error) {
	var world, dense, same []int
	for i := range l.pipeline * l.data {
		world = append(world, i)
		if i/l.data == r.p {
			dense = append(dense, i)
			if i%l.data%l.expert == r.e {
				same = append(same, i)
			}
		}
	}
	group := func(ranks []int, tag comm.Tag) *comm.Group {
		g, e := comm.NewGroup(t, ranks, tag)
		err = errors.Join(err, e)
		return g
	}
	all, data, replica = group(world, 1), group(dense, 2), group(same, 3)
	if l.pipeline > 1 && (r.p == 0 || r.p == l.pipeline-1) {
		embed = group([]int{r.d, (l.pipeline-1)*l.data + r.d}, 4)
	}
	return all, data, replica, embed, err
}

// setGrads gives every parameter the gradient that data coordinate d contributes at a step; an expert's comes from all
// ranks of its expert group at once, so it depends on the number of the group. unit is what the numbers are multiples of.
func setGrads(l layout, r *rank, step int, unit float32) {
	for _, p := range r.params {
		n := r.d
		if p.Expert {
			n = r.d / l.expert
		}
		rng := seeded(fmt.Sprint(p.Name, p.Tied, n, step))
		for i := range p.Grad {
			p.Grad[i] = unit * float32(rng.IntN(2001)-1000)
		}
	}
}

// wantGrad is the sum over replicas of p's gradient, tied copy included, in rank order, times scale.
func wantGrad(l layout, name string, size int, expert bool, step int, unit float32, scale float64) []float32 {
	n := l.data
	if expert {
		n /= l.expert
	}
	sum := make([]float32, size)
	for d := range n {
		rng, tied := seeded(fmt.Sprint(name, false, d, step)), seeded(fmt.Sprint(name, true, d, step))
		for i := range sum {
			g := unit * float32(rng.IntN(2001)-1000)
			if name == "model.embed_tokens.weight" {
				g += unit * float32(tied.IntN(2001)-1000)
			}
			if d == 0 {
				sum[i] = g
			} else {
				sum[i] += g
			}
		}
	}
	for i := range sum {
		sum[i] *= float32(scale)
	}
	return sum
}

var layouts = []layout{{1, 1, 1}, {2, 1, 1}, {4, 1, 1}, {1, 2, 1}, {1, 2, 2}, {2, 2, 2}, {1, 4, 2}, {2, 4, 4}, {2, 4, 2}, {3, 3, 1}, {1, 8, 2}}

// TestReduce: on every layout the owned rows hold the sums in rank order, to the bit; slices cover the model once; the norm
// is that of the sums, each parameter counted once.
func TestReduce(t *testing.T) {
	const unit, scale = float32(0.1), 1.0 / 3
	for _, l := range layouts {
		var mu sync.Mutex
		covered := map[string][]int{} // name -> times each row is owned
		norms := map[float64]bool{}
		run(t, l, nil, func(ctx context.Context, r *rank) error {
			setGrads(l, r, 0, unit)
			norm, err := r.sync.Reduce(ctx, scale)
			if err != nil {
				return err
			}
			mu.Lock()
			defer mu.Unlock()
			norms[norm] = true
			for _, s := range r.sync.Slices() {
				p := s.Param
				if p.Tied {
					return fmt.Errorf("owns rows of the tied copy")
				}
				if covered[p.Name] == nil {
					covered[p.Name] = make([]int, p.Rows())
				}
				for i := s.Row0; i < s.Row1; i++ {
					covered[p.Name][i]++
				}
				want := wantGrad(l, p.Name, p.Len(), p.Expert, 0, unit, scale)[s.Row0*p.RowLen() : s.Row1*p.RowLen()]
				if !slices.Equal(s.Grad, want) || &s.Grad[0] != &p.Grad[s.Row0*p.RowLen()] || &s.Value[0] != &p.Value[s.Row0*p.RowLen()] {
					return fmt.Errorf("%s rows %d-%d: %v, want %v", p.Name, s.Row0, s.Row1, s.Grad, want)
				}
			}
			return nil
		})
		one := newParams(layout{1, 1, 1}, 0, 0)
		square := 0.0
		for _, p := range one {
			if p.Tied {
				continue
			}
			if len(covered[p.Name]) != p.Rows() || slices.Max(covered[p.Name]) != 1 || slices.Min(covered[p.Name]) != 1 {
				t.Errorf("%v: rows of %s are owned %v times", l, p.Name, covered[p.Name])
			}
			for _, g := range wantGrad(l, p.Name, p.Len(), p.Expert, 0, unit, scale) {
				square += float64(g) * float64(g)
			}
		}
		if len(covered) != len(one)-1 {
			t.Errorf("%v: %d parameters are owned, the model has %d", l, len(covered), len(one)-1)
		}
		if len(norms) != 1 {
			t.Errorf("%v: ranks disagree on the norm: %v", l, norms)
		}
		for n := range norms {
			if math.Abs(n-math.Sqrt(square)) > 1e-12*n {
				t.Errorf("%v: norm %v, want %v", l, n, math.Sqrt(square))
			}
		}
	}
}

// train runs steps of gradient descent on a layout. Gradients depend on the weights, so that copies which drift apart go on
// drifting. It returns the weights by name, and the norms.
func train(t *testing.T, l layout, steps int, unit float32) (map[string][]float32, []float64) {
	t.Helper()
	var mu sync.Mutex
	weights, norms := map[string][]float32{}, make([]float64, steps)
	run(t, l, nil, func(ctx context.Context, r *rank) error {
		for step := range steps {
			setGrads(l, r, step, unit)
			for _, p := range r.params {
				for i, v := range p.Value {
					p.Grad[i] += v
				}
			}
			norm, err := r.sync.Reduce(ctx, 0.25)
			if err != nil {
				return err
			}
			for _, s := range r.sync.Slices() {
				for i, g := range s.Grad {
					s.Value[i] -= g
				}
			}
			if err := r.sync.Publish(ctx); err != nil {
				return err
			}
			mu.Lock()
			norms[step] = norm
			mu.Unlock()
		}
		mu.Lock()
		defer mu.Unlock()
		for _, p := range r.params {
			if w, ok := weights[p.Name]; !ok {
				weights[p.Name] = slices.Clone(p.Value)
			} else if !slices.Equal(w, p.Value) {
				return fmt.Errorf("replicas of %v (tied %v) differ: %v and %v", p, p.Tied, p.Value, w)
			}
		}
		return nil
	})
	return weights, norms
}

// TestTied is P13 and the contract of the pipeline axis: after 5 steps all replicas and both copies of the embedding are
// equal to the bit, and weights and norms are those of the unsplit pipeline, to the bit.
func TestTied(t *testing.T) {
	for _, c := range []struct{ control, split layout }{
		{layout{1, 1, 1}, layout{2, 1, 1}}, {layout{1, 1, 1}, layout{4, 1, 1}}, {layout{1, 2, 2}, layout{2, 2, 2}},
		{layout{1, 4, 2}, layout{2, 4, 2}}, {layout{1, 3, 1}, layout{3, 3, 1}}, {layout{1, 2, 1}, layout{4, 2, 1}},
	} {
		want, wantNorms := train(t, c.control, 5, 0.1)
		got, norms := train(t, c.split, 5, 0.1)
		compare(t, c.split, got, want)
		if !slices.Equal(norms, wantNorms) {
			t.Errorf("%v: norms %v, of %v %v", c.split, norms, c.control, wantNorms)
		}
	}
}

func compare(t *testing.T, l layout, got, want map[string][]float32) {
	t.Helper()
	if len(got) != len(want) {
		t.Errorf("%v: %d parameters, want %d", l, len(got), len(want))
	}
	for name, w := range want {
		if !slices.Equal(got[name], w) {
			t.Errorf("%v: %s is %v, want %v", l, name, got[name], w)
		}
	}
}

// TestTiedSingleRank compares PP2 x DP2 with one rank that accumulates the gradients of both data ranks itself. The numbers
// are multiples of a power of two that five steps do not exhaust, so sums are exact in any order.
func TestTiedSingleRank(t *testing.T) {
	const unit = 1.0 / 64
	l := layout{2, 2, 2}
	got, _ := train(t, l, 5, unit)

	one := newParams(layout{1, 1, 1}, 0, 0)
	byName := map[string][]float32{}
	for _, p := range one {
		byName[p.Name] = p.Value // the copy last; it starts equal and only its value is used
	}
	for step := range 5 {
		next := map[string][]float32{}
		for _, p := range one {
			if p.Tied {
				continue
			}
			w := byName[p.Name]
			replicas := float32(l.data)
			if p.Expert {
				replicas /= float32(l.expert)
			}
			if p.Name == "model.embed_tokens.weight" {
				replicas *= 2
			}
			next[p.Name] = make([]float32, len(w))
			for i, g := range wantGrad(l, p.Name, len(w), p.Expert, step, unit, 1) {
				next[p.Name][i] = w[i] - 0.25*(g+replicas*w[i])
			}
		}
		byName = next
	}
	compare(t, l, got, byName)
}

// TestExpertOwnership is P21: 60 experts over an expert group of 2, expert e filled with e. Rank 1 of a group holds 30..59,
// and after a Publish each still has its own number everywhere.
func TestExpertOwnership(t *testing.T) {
	const total = 60
	l := layout{1, 4, 2}
	var mu sync.Mutex
	owned := map[string]int{}
	run(t, l, func(r *rank) {
		r.params = nil
		for x := r.e * total / l.expert; x < (r.e+1)*total/l.expert; x++ {
			r.params = append(r.params, &tensor.Param{Name: fmt.Sprintf("model.layers.0.mlp.experts.%d.up_proj.weight", x), Shape: []int{3, 2}, Expert: true})
		}
		tensor.Allocate(r.params)
	}, func(ctx context.Context, r *rank) error {
		for _, s := range r.sync.Slices() { // only the owner writes
			var e int
			if _, err := fmt.Sscanf(s.Param.Name, "model.layers.0.mlp.experts.%d.", &e); err != nil {
				return err
			}
			for i := range s.Value {
				s.Value[i] = float32(e)
			}
			mu.Lock()
			owned[s.Param.Name] += s.Row1 - s.Row0
			mu.Unlock()
		}
		if err := r.sync.Publish(ctx); err != nil {
			return err
		}
		if len(r.params) != total/2 {
			return fmt.Errorf("%d experts", len(r.params))
		}
		for i, p := range r.params {
			want := float32(30*r.e + i)
			if slices.Min(p.Value) != want || slices.Max(p.Value) != want {
				return fmt.Errorf("rank with expert coordinate %d: %s is %v, want %v", r.e, p.Name, p.Value, want)
			}
		}
		return nil
	})
	if len(owned) != total {
		t.Errorf("%d distinct experts are owned, want %d", len(owned), total)
	}
	for name, rows := range owned {
		if rows != 3 {
			t.Errorf("%s: %d rows are owned, want 3", name, rows)
		}
	}
}

// TestNonFinite is the reduction's part of P18: every rank sees the same norm, name and rank.
func TestNonFinite(t *testing.T) {
	for _, c := range []struct {
		name   string
		p, d   int
		tied   bool
		value  float32
		owner  int // of the first row
		origin int
		l      layout
	}{
		{"model.layers.1.mlp.experts.3.weight", 0, 1, false, float32(math.Inf(1)), 1, 1, layout{2, 2, 2}},
		{"model.layers.1.mlp.experts.3.weight", 0, 3, false, float32(math.Inf(-1)), 1, 3, layout{2, 4, 2}},
		{"model.layers.3.attn.weight", 1, 3, false, float32(math.NaN()), 4, 7, layout{2, 4, 2}},
		{"model.embed_tokens.weight", 1, 1, true, float32(math.NaN()), 0, 3, layout{2, 2, 1}},
		{"model.embed_tokens.weight", 0, 1, true, float32(math.NaN()), 0, 1, layout{1, 2, 1}},
		{"model.layers.0.norm.weight", 0, 0, false, float32(math.Inf(1)), 0, 0, layout{1, 1, 1}},
	} {
		run(t, c.l, nil, func(ctx context.Context, r *rank) error {
			setGrads(c.l, r, 0, 1)
			norm, err := r.sync.Reduce(ctx, 1)
			if err != nil {
				return err
			}
			if name, _ := r.sync.NonFinite(); name != "" || math.IsNaN(norm) {
				return fmt.Errorf("norm %v, and %s is not finite", norm, name)
			}
			setGrads(c.l, r, 1, 1)
			for _, p := range r.params {
				if r.p == c.p && r.d == c.d && p.Name == c.name && p.Tied == c.tied {
					p.Grad[0] = c.value
				}
			}
			if norm, err = r.sync.Reduce(ctx, 0.5); err != nil {
				return err
			}
			if !math.IsNaN(norm) && !math.IsInf(norm, 0) {
				return fmt.Errorf("norm %v", norm)
			}
			if name, owner := r.sync.NonFinite(); name != c.name || owner != c.owner {
				return fmt.Errorf("not finite: %s of rank %d, want %s of rank %d", name, owner, c.name, c.owner)
			}
			o, err := r.sync.Origin(ctx)
			if err != nil {
				return err
			}
			if want := (Origin{c.name, c.origin}); o != want {
				return fmt.Errorf("origin %+v, want %+v", o, want)
			}
			return nil
		})
	}
	// Every contribution is finite, their sum is not: the owner is named.
	l := layout{1, 2, 1}
	run(t, l, nil, func(ctx context.Context, r *rank) error {
		for _, p := range r.params {
			clear(p.Grad)
			if p.Name == "model.layers.2.attn.weight" {
				p.Grad[p.Len()-1] = math.MaxFloat32
			}
		}
		if _, err := r.sync.Reduce(ctx, 1); err != nil {
			return err
		}
		if o, err := r.sync.Origin(ctx); err != nil || o != (Origin{"model.layers.2.attn.weight", 1}) {
			return fmt.Errorf("origin %+v, %v", o, err)
		}
		return nil
	})
}

// TestTraffic counts by hand: 1x2, one matrix of 5x4 whose rows are split 2 and 3.
func TestTraffic(t *testing.T) {
	one := func(r *rank) {
		r.params = []*tensor.Param{{Name: "a", Shape: []int{5, 4}}}
		tensor.Allocate(r.params)
	}
	run(t, layout{1, 2, 1}, one, func(_ context.Context, r *rank) error {
		want := [][2]int64{{48, 32}, {32, 48}}[r.d]
		if reduce, publish := r.sync.Traffic(); reduce != want[0] || publish != want[1] {
			return fmt.Errorf("rank %d: traffic %d, %d, want %v", r.d, reduce, publish, want)
		}
		return nil
	})
	run(t, layout{2, 1, 1}, nil, func(_ context.Context, r *rank) error {
		want := [][2]int64{{0, 84}, {84, 0}}[r.p]
		if reduce, publish := r.sync.Traffic(); reduce != want[0] || publish != want[1] {
			return fmt.Errorf("stage %d: traffic %d, %d, want %v", r.p, reduce, publish, want)
		}
		return nil
	})
}

// TestWarm: a step allocates nothing of its own.
func TestWarm(t *testing.T) {
	run(t, layout{1, 1, 1}, nil, func(ctx context.Context, r *rank) error {
		if n := testing.AllocsPerRun(20, func() {
			if _, err := r.sync.Reduce(ctx, 1); err != nil {
				panic(err)
			}
			if err := r.sync.Publish(ctx); err != nil {
				panic(err)
			}
		}); n != 0 {
			return fmt.Errorf("%v allocations in a warm step", n)
		}
		return nil
	})
}

// TestNewRefuses: a wrong set of parameters is the same error on every rank.
func TestNewRefuses(t *testing.T) {
	find := func(r *rank, name string) *tensor.Param {
		for _, p := range r.params {
			if p.Name == name {
				return p
			}
		}
		return nil
	}
	remove := func(r *rank, name string, tied bool) {
		r.params = slices.DeleteFunc(r.params, func(p *tensor.Param) bool { return p.Name == name && p.Tied == tied })
	}
	const attn, embed = "model.layers.0.attn.weight", "model.embed_tokens.weight"
	for _, c := range []struct {
		name string
		l    layout
		edit func(r *rank)
		want string
	}{
		{"missing on one replica", layout{1, 2, 1}, func(r *rank) {
			if r.d == 1 {
				remove(r, attn, false)
			}
		}, "gradient shards: ranks 0 and 1 are of one data group, but parameter 1 is model.layers.0.attn.weight[5 4] on one and model.layers.0.norm.weight[3] on the other"},
		{"other experts on one replica", layout{1, 4, 2}, func(r *rank) {
			if r.d == 3 {
				remove(r, "model.layers.3.mlp.experts.3.weight", false)
			}
		}, "gradient shards: ranks 1 and 3 are of one expert replica group, but parameter 7 is model.layers.3.mlp.experts.3.weight[3 2] on one and missing on the other"},
		{"shape", layout{1, 2, 1}, func(r *rank) {
			if r.d == 0 {
				p := find(r, attn)
				p.Shape = []int{4, 5}
			}
		}, "but parameter 1 is model.layers.0.attn.weight[4 5] on one and model.layers.0.attn.weight[5 4] on the other"},
		{"layer on both stages", layout{2, 1, 1}, func(r *rank) {
			if r.p == 1 {
				r.params = append(r.params, find(&rank{params: newParams(layout{2, 1, 1}, 0, 0)}, attn))
			}
		}, "gradient shards: row 0 of model.layers.0.attn.weight is owned by rank 0 and by rank 1"},
		{"twice", layout{1, 2, 1}, func(r *rank) {
			if r.d == 1 {
				r.params = append(r.params, find(r, attn))
			}
		}, "gradient shards: rank 1: model.layers.0.attn.weight[5 4] is there twice"},
		{"every rank takes the first experts", layout{1, 2, 2}, func(r *rank) { r.params = newParams(layout{1, 2, 2}, 0, 0) },
			"gradient shards: row 0 of model.layers.0.mlp.experts.0.weight is owned by rank 0 and by rank 1"},
		{"one name, two shapes", layout{2, 1, 1}, func(r *rank) {
			if r.p == 1 {
				find(r, "model.norm.weight").Name = attn
			}
		}, "gradient shards: model.layers.0.attn.weight has 5 rows on one rank and 4 on rank 1"},
		{"no embedding", layout{2, 2, 1}, func(r *rank) { remove(r, embed, false) },
			"gradient shards: rank 2 has a tied copy of model.embed_tokens.weight[7 3], which rank 0 does not have"},
		{"copy in the middle", layout{3, 1, 1}, func(r *rank) {
			if r.p == 1 {
				p := &tensor.Param{Name: embed, Shape: []int{7, 3}, Tied: true}
				tensor.Allocate([]*tensor.Param{p})
				r.params = append(r.params, p)
			}
		}, "gradient shards: rank 1 has a tied copy of model.embed_tokens.weight[7 3], but is not the last of a pipeline"},
		{"two copies", layout{1, 1, 1}, func(r *rank) {
			r.params = append(r.params, r.params[len(r.params)-1])
		}, "gradient shards: rank 0: model.embed_tokens.weight[7 3] is a second tied copy, next to model.embed_tokens.weight[7 3]"},
		{"not allocated", layout{1, 2, 1}, func(r *rank) {
			if r.d == 0 {
				find(r, attn).Grad = nil
			}
		}, "gradient shards: rank 0: model.layers.0.attn.weight[5 4] has 20 values and 0 gradients"},
	} {
		t.Run(c.name, func(t *testing.T) {
			errs := start(t, c.l, c.edit, func(context.Context, *rank) error { return errors.New("accepted") })
			for i, err := range errs {
				if err == nil || !strings.Contains(err.Error(), c.want) || err.Error() != errs[0].Error() {
					t.Errorf("rank %d: got %v\nwant %s", i, err, c.want)
				}
			}
		})
	}
}
