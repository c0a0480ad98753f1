package pipeline

import (
	"fmt"
	"strings"
)

// generators in the order in which Names lists them.
var generators = []struct {
	name string
	make func(Plan) Schedule
	// inOrder: the order of the list is only right if each rank owns one contiguous block of stages, in rank order.
	inOrder bool
}{
	{"1f1b", OneFOneB, true},
	{"gpipe", GPipe, false},
}

// Names lists the schedules that Generate knows.
func Names() []string {
	names := make([]string, len(generators))
	for i, g := range generators {
		names[i] = g.name
	}
	return names
}

// Generate makes the named schedule, compute only (see [Prepare]). It refuses an unknown name, a plan that Check
// refuses, and a placement that the schedule is not made for.
func Generate(name string, p Plan) (Schedule, error) {
	for _, g := range generators {
		if g.name != name {
			continue
		}
		if err := p.Check(); err != nil {
			return Schedule{}, err
		}
		if g.inOrder && !p.inOrder() {
			return Schedule{}, fmt.Errorf("schedule %s needs the stages in rank order, owner is %v", name, p.Owner)
		}
		return g.make(p), nil
	}
	return Schedule{}, fmt.Errorf("unknown schedule %q, known are: %s", name, strings.Join(Names(), ", "))
}

// GPipe does all forwards, then all backwards, micro-batches in order (Huang et al. 2019, arXiv 1811.06965). It keeps
// every micro-batch alive: peak activations are p.Micros. Any placement works, since all ranks follow one common order.
func GPipe(p Plan) Schedule {
	return perRank(p, func(r int, e *emitter) {
		for m := range p.Micros {
			e.forward(m)
		}
		for m := range p.Micros {
			e.backward(m)
		}
	})
}

// OneFOneB is the synchronous 1F1B of PipeDream-Flush (Narayanan et al. 2021, arXiv 2104.04473, §2.2): rank r of p does
// w = min(p-r-1, micros) forwards, then alternates one forward and one backward, then drains the backwards. Peak
// activations on rank r are min(p-r, micros). Fewer micro-batches than ranks are fine. Ranks own contiguous stages in order.
func OneFOneB(p Plan) Schedule {
	return perRank(p, func(r int, e *emitter) {
		w := min(p.Ranks-r-1, p.Micros)
		for m := range w {
			e.forward(m)
		}
		for i := range p.Micros - w {
			e.forward(w + i)
			e.backward(i)
		}
		for m := p.Micros - w; m < p.Micros; m++ {
			e.backward(m)
		}
	})
}

// emitter appends the actions of one rank: a forward goes up through all its stages, a backward down.
type emitter struct {
	own  []int
	list []Action
}

func (e *emitter) forward(micro int) {
	for _, s := range e.own {
		e.list = append(e.list, Action{Forward, s, micro})
	}
}

func (e *emitter) backward(micro int) {
	for i := len(e.own) - 1; i >= 0; i-- {
		e.list = append(e.list, Action{Backward, e.own[i], micro})
	}
}

func perRank(p Plan, emit func(rank int, e *emitter)) Schedule {
	s := Schedule{Plan: p, Lists: make([][]Action, max(p.Ranks, 0))}
	for r := range s.Lists {
		e := emitter{own: p.stagesOf(r)}
		emit(r, &e)
		s.Lists[r] = e.list
	}
	return s
}
