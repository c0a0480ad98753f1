package pipeline

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"reflect"
	"slices"
	"strings"
	"sync"
	"testing"
)

// affine is a stage of arithmetic that can be checked: out = w*in + b per element, micro-batches of their own lengths.
// The first stage makes its input from the micro-batch, the last one has loss = sum(out), which it does not hand on.
type affine struct {
	first, last bool
	w           float32
	sizes       []int
	in          map[int][]float32
	dout        map[int][]float32
	gradW       float32
	loss        []float32
	order       []string
}

func (s *affine) input(micro int) []float32 {
	x := make([]float32, s.sizes[micro])
	for i := range x {
		x[i] = float32(micro+1) + float32(i)/8
	}
	return x
}

func (s *affine) Forward(_ context.Context, micro int, in []float32) ([]float32, error) {
	s.order = append(s.order, fmt.Sprintf("F%d", micro))
	if s.first {
		if in != nil {
			return nil, errors.New("the first stage was given an input")
		}
		in = s.input(micro)
	}
	if len(in) != s.sizes[micro] {
		return nil, fmt.Errorf("input of %d, want %d", len(in), s.sizes[micro])
	}
	s.in[micro] = in
	out := make([]float32, len(in))
	for i, x := range in {
		out[i] = s.w*x + 1
	}
	if s.last {
		for _, x := range out {
			s.loss[micro] += x
		}
		return nil, nil
	}
	return out, nil
}

func (s *affine) BackwardInput(_ context.Context, micro int, dout []float32) ([]float32, error) {
	s.order = append(s.order, fmt.Sprintf("I%d", micro))
	if s.last {
		if dout != nil {
			return nil, errors.New("the last stage was given a gradient")
		}
		dout = make([]float32, s.sizes[micro])
		for i := range dout {
			dout[i] = 1
		}
	}
	if len(dout) != s.sizes[micro] {
		return nil, fmt.Errorf("gradient of %d, want %d", len(dout), s.sizes[micro])
	}
	s.dout[micro] = dout
	din := make([]float32, len(dout))
	for i, g := range dout {
		din[i] = s.w * g
	}
	if s.first {
		return nil, nil
	}
	return din, nil
}

func (s *affine) BackwardWeight(_ context.Context, micro int) error {
	s.order = append(s.order, fmt.Sprintf("W%d", micro))
	for i, g := range s.dout[micro] {
		s.gradW += g * s.in[micro][i]
	}
	return nil
}

// wires connects ranks with one slot per channel, like the least transport that the contract allows.
type wires struct {
	mu    sync.Mutex
	chans map[int]chan []float32
}

func (w *wires) channel(a Action) chan []float32 {
	w.mu.Lock()
	defer w.mu.Unlock()
	if w.chans[a.Channel()] == nil {
		w.chans[a.Channel()] = make(chan []float32, 1)
	}
	return w.chans[a.Channel()]
}

func (w *wires) Send(ctx context.Context, a Action, p []float32) error {
	select {
	case w.channel(a) <- slices.Clone(p):
		return nil
	case <-ctx.Done():
		return context.Cause(ctx)
	}
}

func (w *wires) Recv(ctx context.Context, a Action) ([]float32, error) {
	select {
	case p := <-w.channel(a):
		return p, nil
	case <-ctx.Done():
		return nil, context.Cause(ctx)
	}
}

// execute runs all ranks of s and returns the stages.
func execute(t *testing.T, s Schedule, sizes []int) []*affine {
	t.Helper()
	n := s.Stages()
	all := make([]*affine, n)
	for i := range all {
		all[i] = &affine{first: i == 0, last: i == n-1, w: float32(i%3) + 0.5, sizes: sizes, in: map[int][]float32{},
			dout: map[int][]float32{}, loss: make([]float32, len(sizes))}
	}
	w := &wires{chans: map[int]chan []float32{}}
	errs := make([]error, s.Ranks)
	ctx, cancel := context.WithCancelCause(t.Context())
	defer cancel(nil)
	var wg sync.WaitGroup
	for r := range s.Ranks {
		stages := make([]Stage, n)
		for i := range all {
			if s.Owner[i] == r {
				stages[i] = all[i]
			}
		}
		wg.Go(func() {
			if errs[r] = Run(ctx, s.Lists[r], stages, w, nil); errs[r] != nil {
				cancel(errs[r])
			}
		})
	}
	wg.Wait()
	if err := errors.Join(errs...); err != nil {
		t.Fatal(err)
	}
	return all
}

// TestRun: every schedule and placement gives the losses and gradients of all stages on one rank, to the bit, with fewer
// micro-batches than stages, micro-batches of different lengths and empty ones.
func TestRun(t *testing.T) {
	rng := rand.New(rand.NewPCG(5, 6))
	for _, owner := range [][]int{{0, 1}, {0, 1, 2, 3}, {0, 0, 1, 1}, {0, 1, 1, 0}, {0, 1, 0, 1}, {0, 0, 0, 0}} {
		for m := 1; m <= 9; m++ {
			sizes := make([]int, m)
			for i := range sizes {
				sizes[i] = rng.IntN(5)
			}
			plan := Plan{Owner: owner, Ranks: slices.Max(owner) + 1, Micros: m}
			control := execute(t, WithComm(GPipe(Plan{Owner: make([]int, len(owner)), Ranks: 1, Micros: m})), sizes)
			for _, name := range Names() {
				s, err := Generate(name, plan)
				if err != nil {
					continue // 1f1b does not take every placement; TestPlacements says which
				}
				for _, s := range []Schedule{s, split(s)} {
					if s, err = Prepare(s); err != nil {
						t.Fatal(err)
					}
					for i, got := range execute(t, s, sizes) {
						if got.gradW != control[i].gradW || !reflect.DeepEqual(got.loss, control[i].loss) {
							t.Errorf("%s owner %v m=%d stage %d: grad %v loss %v, want %v %v", name, owner, m, i,
								got.gradW, got.loss, control[i].gradW, control[i].loss)
						}
					}
				}
				eval, err := Prepare(ForwardOnly(s))
				if err != nil {
					t.Fatal(err)
				}
				got := execute(t, eval, sizes)
				if last := len(owner) - 1; !reflect.DeepEqual(got[last].loss, control[last].loss) {
					t.Errorf("%s owner %v m=%d forward only: loss %v, want %v", name, owner, m, got[last].loss, control[last].loss)
				}
			}
		}
	}
}

// split replaces each backward by its halves, the weight half right after the input half.
func split(s Schedule) Schedule {
	out := Schedule{Plan: s.Plan}
	for _, l := range s.Lists {
		var list []Action
		for _, a := range l {
			if a.Op == Backward {
				list = append(list, Action{BackwardInput, a.Stage, a.Micro}, Action{BackwardWeight, a.Stage, a.Micro})
			} else {
				list = append(list, a)
			}
		}
		out.Lists = append(out.Lists, list)
	}
	return out
}

// failing fails at one call.
type failing struct {
	Stage
	at string
}

var errBroken = errors.New("broken")

func (f failing) Forward(ctx context.Context, micro int, in []float32) ([]float32, error) {
	if f.at == "F" && micro == 1 {
		return nil, errBroken
	}
	return f.Stage.Forward(ctx, micro, in)
}

func (f failing) BackwardInput(ctx context.Context, micro int, d []float32) ([]float32, error) {
	if f.at == "I" && micro == 1 {
		return nil, errBroken
	}
	return f.Stage.BackwardInput(ctx, micro, d)
}

func (f failing) BackwardWeight(ctx context.Context, micro int) error {
	if f.at == "W" && micro == 1 {
		return errBroken
	}
	return f.Stage.BackwardWeight(ctx, micro)
}

func TestRunErrors(t *testing.T) {
	stage := func() *affine {
		return &affine{first: true, last: true, sizes: []int{1, 1}, in: map[int][]float32{}, dout: map[int][]float32{}, loss: make([]float32, 2)}
	}
	list := OneFOneB(Straight(1, 2)).Lists[0]
	for at, want := range map[string]string{"F": "0F1: broken", "I": "0B1: broken", "W": "0B1: broken"} {
		begun, ended := 0, 0
		err := Run(t.Context(), list, []Stage{failing{stage(), at}}, nil, func(a Action, begin bool) {
			if begin {
				begun++
			} else {
				ended++
			}
		})
		if err == nil || err.Error() != want || !errors.Is(err, errBroken) {
			t.Errorf("%s: got %v, want %s", at, err, want)
		}
		if begun != ended {
			t.Errorf("%s: observed %d begins and %d ends", at, begun, ended)
		}
	}

	ctx, cancel := context.WithCancelCause(t.Context())
	lost := errors.New("rank 3 is gone")
	err := Run(ctx, list, []Stage{stage()}, nil, func(a Action, begin bool) {
		if a.String() == "0F1" && begin {
			cancel(lost)
		}
	})
	if !errors.Is(err, lost) || !strings.HasPrefix(err.Error(), "0B1: ") {
		t.Errorf("cancelled in 0F1: got %v", err)
	}

	for _, c := range []struct {
		list   string
		stages []Stage
		want   string
	}{
		{"1F0", []Stage{nil, stage()}, "1F0: its data was neither computed nor received before"},
		{"0B0", []Stage{stage(), nil}, "0B0: its data was neither computed nor received before"},
		{"0F0 0SA0 0SA0", []Stage{stage(), nil}, "0SA0: its data was neither computed nor received before"},
		{"1F0", []Stage{stage(), nil}, "1F0: stage 1 is not on this rank"},
		{"3F0", []Stage{stage()}, "pipeline: position 1: 3F0 does not fit 1 stages"},
	} {
		var list []Action
		for f := range strings.FieldsSeq(c.list) {
			a, err := ParseAction(f)
			if err != nil {
				t.Fatal(err)
			}
			list = append(list, a)
		}
		w := &wires{chans: map[int]chan []float32{}}
		if err := Run(t.Context(), list, c.stages, w, nil); err == nil || err.Error() != c.want {
			t.Errorf("%s: got %v, want %s", c.list, err, c.want)
		}
	}
	if err := Run(t.Context(), []Action{{SendAct, 0, 0}}, []Stage{stage(), nil}, nil, nil); err == nil || err.Error() != "0SA0: no link to send or receive over" {
		t.Error(err)
	}
}

// TestRunOrder: the observer sees the list itself, and B is the input half and then the weight half.
func TestRunOrder(t *testing.T) {
	s := &affine{first: true, last: true, sizes: []int{1, 1}, in: map[int][]float32{}, dout: map[int][]float32{}, loss: make([]float32, 2)}
	list := GPipe(Straight(1, 2)).Lists[0]
	var seen []Action
	if err := Run(t.Context(), list, []Stage{s}, nil, func(a Action, begin bool) {
		if begin {
			seen = append(seen, a)
		}
	}); err != nil {
		t.Fatal(err)
	}
	if !reflect.DeepEqual(seen, list) {
		t.Errorf("observed %v, list is %v", seen, list)
	}
	if want := strings.Fields("F0 F1 I0 W0 I1 W1"); !reflect.DeepEqual(s.order, want) {
		t.Errorf("order %v, want %v", s.order, want)
	}
}

// TestChannel: both names of a message give one channel, and different streams different ones.
func TestChannel(t *testing.T) {
	p := Straight(4, 1)
	used := map[int]Action{}
	for s := range 3 {
		for _, a := range []Action{{SendAct, s, 7}, {SendGrad, s + 1, 7}} {
			b := a.counterpart()
			if a.Channel() != b.Channel() || b.counterpart() != a || p.Peer(a) != b.Stage || p.Peer(b) != a.Stage {
				t.Errorf("%v and %v do not meet", a, b)
			}
			if c, ok := used[a.Channel()]; ok || a.Channel() < 0 || a.Channel() >= 2*p.Stages() {
				t.Errorf("%v has channel %d, as %v", a, a.Channel(), c)
			}
			used[a.Channel()] = a
		}
	}
	if (Action{Forward, 1, 0}).Channel() != -1 || p.Peer(Action{Forward, 1, 0}) != -1 {
		t.Error("compute has a channel or a peer")
	}
}
