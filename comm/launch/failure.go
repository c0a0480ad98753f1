package launch

import (
	"fmt"
	"syscall"
	"time"
)

// A Failure is why a job failed: the rank whose failure came first, or the best guess at it.
type Failure struct {
	Rank   int
	Step   int64          // last step that the rank told of; 0: none
	Err    string         // the error that it reported; empty: none
	Crash  string         // first line of the Go runtime's message when it panicked; empty: it did not
	Code   int            // exit code, -1 after a signal or when it had to be killed
	Signal syscall.Signal // that ended it; 0: none
}

// Error says which rank failed, how and when.
func (f *Failure) Error() string {
	at := " before its first step"
	if f.Step > 0 {
		at = fmt.Sprintf(" at step %d", f.Step)
	}
	switch {
	case f.Err == "" && f.Crash != "":
		return fmt.Sprintf("rank %d crashed%s: %s", f.Rank, at, f.Crash)
	case f.Err != "" && f.Code == 2 && f.Crash == "":
		return fmt.Sprintf("rank %d: %s", f.Rank, f.Err) // wrong configuration: the step does not matter
	case f.Err != "":
		return fmt.Sprintf("rank %d failed%s: %s", f.Rank, at, f.Err)
	case f.Signal != 0:
		return fmt.Sprintf("rank %d was killed (signal %d, %v)%s", f.Rank, int(f.Signal), f.Signal, at)
	}
	return fmt.Sprintf("rank %d exited with code %d%s without reporting an error", f.Rank, f.Code, at)
}

// state is what the launcher knows of a rank.
type state struct {
	rank   int
	step   int64
	report *note     // the first error that it reported
	failed time.Time // when that, or a death without it, became known; zero: neither
	exited bool
	code   int // -1: by a signal
	signal syscall.Signal
}

// follows tells whether the rank failed because of another.
func (s *state) follows() bool { return s.report != nil && s.report.Peer != nil }

// interrupted tells whether the rank ended of an interrupt: it said so, or it was not ready to take it. Others then may have
// failed for want of it.
func (s *state) interrupted() bool {
	return s.signal == syscall.SIGINT || s.report != nil && s.report.Interrupted
}

// ok tells whether the rank ended as it should: done, or stopped after a checkpoint.
func (s *state) ok() bool { return s.exited && (s.code == 0 || s.code == 3) && s.signal == 0 }

func (s *state) failure() *Failure {
	f := &Failure{Rank: s.rank, Step: s.step, Code: s.code, Signal: s.signal}
	if s.report != nil {
		f.Err, f.Step = s.report.Error, max(s.step, s.report.Step)
	}
	return f
}

// cause picks the failure to show: the first of those nearest to the root. Ranks that failed after the launcher began to end
// them, zero times, do not count. nil: nobody failed. first is the rank of ranks[0].
func cause(ranks []*state, first int) *state {
	var best *state
	near := 0
	for _, s := range ranks {
		if s.failed.IsZero() {
			continue
		}
		if n := nearness(s, ranks, first); best == nil || n > near || n == near && s.failed.Before(best.failed) {
			best, near = s, n
		}
	}
	return best
}

// nearness orders failures: one that is no consequence of another, then one that names a rank which never said a word (it
// hangs, and is the cause itself), then one that names a rank of another host, then one that names a rank which follows a
// further one.
func nearness(s *state, ranks []*state, first int) int {
	if !s.follows() {
		return 3
	}
	i := *s.report.Peer - first
	switch {
	case i < 0 || i >= len(ranks):
		return 1
	case ranks[i].report == nil && ranks[i].failed.IsZero():
		return 2
	}
	return 0
}

// waitsFor returns the rank among these whose news may still explain what is known so far, or nil: every failure is of
// a rank that follows another one, and that one runs on without a word.
func waitsFor(ranks []*state, first int) *state {
	c := cause(ranks, first)
	if c == nil || !c.follows() {
		return nil
	}
	for _, s := range ranks {
		if !s.follows() {
			continue
		}
		i := *s.report.Peer - first
		if i >= 0 && i < len(ranks) && !ranks[i].exited && ranks[i].report == nil {
			return ranks[i]
		}
	}
	return nil
}
