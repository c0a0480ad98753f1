package launch

import (
	"testing"
	"time"
)

// TestCause: which of several failures is shown. The times are those at which the launcher learned of them.
func TestCause(t *testing.T) {
	begin := time.Now()
	follows := func(rank, peer, at int) *state {
		return &state{rank: rank, report: &note{Rank: rank, Error: "x", Peer: &peer}, failed: begin.Add(time.Duration(at))}
	}
	own := func(rank, at int) *state {
		return &state{rank: rank, report: &note{Rank: rank, Error: "x"}, failed: begin.Add(time.Duration(at))}
	}
	quiet := func(rank int) *state { return &state{rank: rank} }
	for name, c := range map[string]struct {
		ranks []*state
		first int
		want  int // rank, -1: none
	}{
		"nobody":                       {[]*state{quiet(0), quiet(1)}, 0, -1},
		"own error after consequences": {[]*state{follows(0, 2, 1), follows(1, 0, 2), own(2, 3)}, 0, 2},
		"first of two own errors":      {[]*state{own(0, 2), own(1, 1)}, 0, 1},
		"a rank that hangs":            {[]*state{follows(0, 2, 2), follows(1, 3, 1), quiet(2), follows(3, 2, 3)}, 0, 0},
		"a hang, second host":          {[]*state{follows(4, 5, 1), follows(5, 6, 2), quiet(6)}, 4, 5},
		"a rank of another host":       {[]*state{follows(0, 1, 1), follows(1, 3, 2)}, 0, 1},
		"a circle":                     {[]*state{follows(0, 1, 2), follows(1, 0, 1)}, 0, 1},
	} {
		t.Run(name, func(t *testing.T) {
			got := -1
			if s := cause(c.ranks, c.first); s != nil {
				got = s.rank
			}
			if got != c.want {
				t.Errorf("rank %d, want %d", got, c.want)
			}
		})
	}
}
