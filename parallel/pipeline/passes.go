package pipeline

// Prepare is the way from a compute schedule, generated or read from a file, to lists that Run may execute. It is the
// one place that states the order of the passes: WithComm, then the check by Simulate with room for a single message per
// channel, which is what a transport promises. For evaluation, pass ForwardOnly(s).
func Prepare(s Schedule) (Schedule, error) {
	s = WithComm(s)
	if _, err := Simulate(s, Cost{Forward: 1, Input: 1, Weight: 1}, 1); err != nil {
		return Schedule{}, err
	}
	return s, nil
}

// WithComm inserts the sends and receives that the compute implies: a receive right before the action that needs the
// data, a send right after the action that makes it. Between stages of one rank there are none. A schedule that already
// holds a send or receive is taken to place all of them itself and is returned as it is.
func WithComm(s Schedule) Schedule {
	if s.hasComm() {
		return s
	}
	away := func(a Action) bool {
		peer := s.Peer(a)
		return peer >= 0 && a.Stage >= 0 && a.Stage < len(s.Owner) && peer != s.Owner[a.Stage]
	}
	out := Schedule{Plan: s.Plan, Lists: make([][]Action, len(s.Lists))}
	for r, l := range s.Lists {
		list := make([]Action, 0, 3*len(l))
		for _, a := range l {
			var before, after Action
			switch a.Op {
			case Forward:
				before, after = Action{RecvAct, a.Stage, a.Micro}, Action{SendAct, a.Stage, a.Micro}
			case Backward, BackwardInput:
				before, after = Action{RecvGrad, a.Stage, a.Micro}, Action{SendGrad, a.Stage, a.Micro}
			default:
				list = append(list, a)
				continue
			}
			if away(before) {
				list = append(list, before)
			}
			list = append(list, a)
			if away(after) {
				list = append(list, after)
			}
		}
		out.Lists[r] = list
	}
	return out
}

// ForwardOnly keeps the forwards alone, for evaluation and for reference passes. The result holds no sends or receives;
// WithComm inserts them.
func ForwardOnly(s Schedule) Schedule {
	return s.filter(func(o Op) bool { return o == Forward })
}
