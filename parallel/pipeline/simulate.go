package pipeline

import (
	"fmt"
	"math"
	"strings"
)

// Cost is the duration of one action, in any unit. Backward takes Input + Weight. Send is how long a message is under way;
// the sender does not spend it (with inflight 0 both sides do).
type Cost struct{ Forward, Input, Weight, Send float64 }

// A Timing is what Simulate measured.
type Timing struct {
	Total float64   // when the last rank is done
	Idle  []float64 // per rank: Total less its compute
	// Peak is the most activations alive per rank, in micro-batches of one stage: from the start of a forward to the end of
	// its weight gradient (of the forward itself in a forward-only schedule).
	Peak []int
}

// Simulate runs s on a clock, with room for inflight messages per channel that nobody has asked for yet (0: a send waits for
// its receive), and either times it or says what is wrong: a list that does not fit the plan (rank and position, counted
// from 1), what is done twice, what is missing, or where each rank is stuck. It is the validator of schedules: one that
// it accepts with inflight 1 finishes over every transport.
func Simulate(s Schedule, c Cost, inflight int) (Timing, error) {
	if inflight < 0 {
		return Timing{}, fmt.Errorf("simulate: inflight is %d, want 0 or more", inflight)
	}
	for _, x := range []float64{c.Forward, c.Input, c.Weight, c.Send} {
		if !(x >= 0) || math.IsInf(x, 0) {
			return Timing{}, fmt.Errorf("simulate: cost %v, want finite and not negative", x)
		}
	}
	if err := s.check(); err != nil {
		return Timing{}, err
	}
	m := newMachine(s, c, inflight)
	for moved := true; moved; {
		moved = false
		for r := range m.ranks {
			for {
				ok, err := m.advance(r)
				if err != nil {
					return Timing{}, err
				}
				if !ok {
					break
				}
				moved = true
			}
		}
	}
	return m.timing()
}

// check compares the lists with the plan: every action on the rank of its stage and once, and nothing missing.
func (s Schedule) check() error {
	if err := s.Plan.Check(); err != nil {
		return err
	}
	if len(s.Lists) != s.Ranks {
		return fmt.Errorf("schedule has lists for %d ranks, its plan has %d", len(s.Lists), s.Ranks)
	}
	seen := map[Action]int{} // position, from 1
	for r, l := range s.Lists {
		for i, a := range l {
			at := func(format string, args ...any) error {
				return fmt.Errorf("rank %d, position %d: %v "+format, append([]any{r, i + 1, a}, args...)...)
			}
			switch {
			case a.Op >= numOps:
				return at("is an unknown operation")
			case a.Stage < 0 || a.Stage >= s.Stages():
				return at("names stage %d of %d", a.Stage, s.Stages())
			case a.Micro < 0 || a.Micro >= s.Micros:
				return at("names micro-batch %d of %d", a.Micro, s.Micros)
			case s.Owner[a.Stage] != r:
				return at("belongs to rank %d", s.Owner[a.Stage])
			}
			if a.Op.Comm() {
				switch peer := s.Peer(a); peer {
				case -1:
					return at("has no stage at its other end")
				case r:
					return at("would send to its own rank")
				}
			}
			if p, ok := seen[a]; ok {
				return at("is done twice, first at position %d", p)
			}
			for _, other := range doneBy(a) {
				if p, ok := seen[other]; ok {
					return at("is done twice, first as %v at position %d", other, p)
				}
			}
			seen[a] = i + 1
		}
	}
	return s.missing(seen)
}

// doneBy lists the other actions that do the work of a, or a part of it.
func doneBy(a Action) []Action {
	switch a.Op {
	case Backward:
		return []Action{{BackwardInput, a.Stage, a.Micro}, {BackwardWeight, a.Stage, a.Micro}}
	case BackwardInput, BackwardWeight:
		return []Action{{Backward, a.Stage, a.Micro}}
	}
	return nil
}

// missing names the actions that the plan asks for and the lists do not have. It stops after a few, so its work is bounded
// by the length of the lists whatever number of micro-batches the plan claims.
func (s Schedule) missing(seen map[Action]int) error {
	const show = 8
	var miss []Action
	need := func(a Action) {
		if seen[a] == 0 {
			miss = append(miss, a)
		}
	}
	backward := s.Trains()
	for m := 0; m < s.Micros && len(miss) <= show; m++ {
		for st := 0; st < s.Stages() && len(miss) <= show; st++ {
			need(Action{Forward, st, m})
			away := st+1 < s.Stages() && s.Owner[st+1] != s.Owner[st]
			if away {
				need(Action{SendAct, st, m})
				need(Action{RecvAct, st + 1, m})
			}
			if !backward {
				continue
			}
			if i, w := (Action{BackwardInput, st, m}), (Action{BackwardWeight, st, m}); seen[i]+seen[w] > 0 {
				need(i)
				need(w)
			} else {
				need(Action{Backward, st, m})
			}
			if away {
				need(Action{SendGrad, st + 1, m})
				need(Action{RecvGrad, st, m})
			}
		}
	}
	switch {
	case len(miss) == 0:
		return nil
	case len(miss) > show:
		return fmt.Errorf("missing: %s and more", join(miss[:show], ", "))
	}
	return fmt.Errorf("missing: %s", join(miss, ", "))
}

// A machine is the state of a simulation. Times of what has not happened are -1.
type machine struct {
	Schedule
	cost     Cost
	inflight int
	train    bool // the schedule has a backward
	ranks    []rankState
	chans    []channel
	acts     []float64 // [boundary][micro]: when the input of stage boundary is on its rank
	grads    []float64 // [boundary][micro]: when the gradient of that input is on the rank that needs it next
	forward  []bool    // [stage][micro]
	input    []bool    // [stage][micro]: gradient of the input done
}

type rankState struct {
	pos, live, peak int
	clock, busy     float64
}

// A channel is one ordered stream of messages.
type channel struct {
	sent     []message
	received []float64 // when each was taken
}

type message struct {
	micro   int
	arrival float64
}

func newMachine(s Schedule, c Cost, inflight int) *machine {
	never := func(n int) []float64 {
		t := make([]float64, n)
		for i := range t {
			t[i] = -1
		}
		return t
	}
	n := s.Stages() * s.Micros
	return &machine{
		Schedule: s, cost: c, inflight: inflight, train: s.Trains(),
		ranks: make([]rankState, s.Ranks), chans: make([]channel, 2*s.Stages()),
		acts: never(n + s.Micros), grads: never(n + s.Micros),
		forward: make([]bool, n), input: make([]bool, n),
	}
}

// next is the action rank r stands at; ok is false when its list is done.
func (m *machine) next(r int) (a Action, ok bool) {
	if p := m.ranks[r].pos; p < len(m.Lists[r]) {
		return m.Lists[r][p], true
	}
	return Action{}, false
}

// advance does the next action of rank r if what it waits for has happened. The times depend only on the lists, not on the
// order in which ranks are advanced.
func (m *machine) advance(r int) (ok bool, err error) {
	a, ok := m.next(r)
	if !ok {
		return false, nil
	}
	k := &m.ranks[r]
	here := a.Stage*m.Micros + a.Micro // this stage, and the boundary before it
	beyond := here + m.Micros          // the boundary after it
	switch a.Op {
	case Forward:
		if a.Stage > 0 && m.acts[here] < 0 {
			return false, nil
		}
		k.live++
		k.peak = max(k.peak, k.live)
		if !m.train {
			k.live--
		}
		m.forward[here] = true
		m.acts[beyond] = k.work(m.cost.Forward)
	case Backward, BackwardInput:
		if !m.forward[here] || a.Stage < m.Stages()-1 && m.grads[beyond] < 0 {
			return false, nil
		}
		m.input[here] = true
		d := m.cost.Input
		if a.Op == Backward {
			d += m.cost.Weight
			k.live--
		}
		m.grads[here] = k.work(d)
	case BackwardWeight:
		if !m.input[here] {
			return false, nil
		}
		k.live--
		k.work(m.cost.Weight)
	case SendAct, SendGrad:
		made := m.acts[beyond]
		if a.Op == SendGrad {
			made = m.grads[here]
		}
		if made < 0 {
			return false, nil
		}
		if ok, err := m.send(r, a); !ok || err != nil {
			return false, err
		}
	case RecvAct, RecvGrad:
		t, ok, err := m.receive(r, a)
		if !ok || err != nil {
			return false, err
		}
		if a.Op == RecvAct {
			m.acts[here] = t
		} else {
			m.grads[beyond] = t
		}
	}
	k.pos++
	return true, nil
}

// work spends d of compute and returns the time after it.
func (k *rankState) work(d float64) float64 {
	k.clock += d
	k.busy += d
	return k.clock
}

// send puts a message into its channel if there is room. Without room for any (inflight 0) it waits until the peer stands
// at a receive from this channel.
func (m *machine) send(r int, a Action) (ok bool, err error) {
	k, c := &m.ranks[r], &m.chans[a.Channel()]
	if m.inflight == 0 {
		peer := m.Peer(a)
		b, ok := m.next(peer)
		if !ok || b != a.counterpart() {
			if ok && b.Channel() == a.Channel() {
				return false, m.crossed(peer, b, a)
			}
			return false, nil
		}
		k.clock = math.Max(k.clock, m.ranks[peer].clock)
	} else if n := len(c.sent) - m.inflight; n >= 0 {
		if n >= len(c.received) {
			return false, nil
		}
		k.clock = math.Max(k.clock, c.received[n])
	}
	c.sent = append(c.sent, message{a.Micro, k.clock + m.cost.Send})
	if m.inflight == 0 {
		k.clock += m.cost.Send
	}
	return true, nil
}

// receive takes the oldest message of its channel. Messages of a channel keep their order, so another one is an error.
func (m *machine) receive(r int, a Action) (t float64, ok bool, err error) {
	k, c := &m.ranks[r], &m.chans[a.Channel()]
	n := len(c.received)
	if n == len(c.sent) {
		return 0, false, nil
	}
	if got := c.sent[n]; got.micro != a.Micro {
		want := a.counterpart()
		want.Micro = got.micro
		return 0, false, m.crossed(r, a, want)
	}
	k.clock = math.Max(k.clock, c.sent[n].arrival)
	c.received = append(c.received, k.clock)
	return k.clock, true, nil
}

func (m *machine) crossed(rank int, recv, sent Action) error {
	return fmt.Errorf("rank %d, position %d: %v meets the message of %v: both sides must keep one order",
		rank, m.ranks[rank].pos+1, recv, sent)
}

// timing sums up, or says where each unfinished rank waits.
func (m *machine) timing() (Timing, error) {
	var stuck []string
	t := Timing{Idle: make([]float64, len(m.ranks)), Peak: make([]int, len(m.ranks))}
	for r, k := range m.ranks {
		if a, ok := m.next(r); ok {
			stuck = append(stuck, fmt.Sprintf("rank %d waits at %v", r, a))
		}
		t.Total = math.Max(t.Total, k.clock)
		t.Peak[r] = k.peak
	}
	if len(stuck) > 0 {
		return Timing{}, fmt.Errorf("schedule is stuck: %s", strings.Join(stuck, ", "))
	}
	for r, k := range m.ranks {
		t.Idle[r] = t.Total - k.busy
	}
	return t, nil
}
