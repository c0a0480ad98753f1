package launch

import (
	"encoding/json"
	"errors"
	"os"
	"strconv"
	"sync"
	"syscall"
	"time"

	"moetor/comm"
)

// note is a line that a rank writes to its launcher. A line without an error reports a step only.
type note struct {
	Rank  int       `json:"rank"`
	Step  int64     `json:"step"`
	Error string    `json:"error,omitempty"`
	Peer  *int      `json:"peer,omitempty"` // the rank that the error is about, where it is a *comm.PeerError
	Time  time.Time `json:"time,omitzero"`

	Interrupted bool `json:"interrupted,omitempty"` // the error is ErrInterrupted
}

// reporter is the rank's end of the pipe.
type reporter struct {
	mu   sync.Mutex
	w    *os.File // nil: no launcher of ours listens
	rank int
	line []byte
}

func newReporter(getenv func(string) string) *reporter {
	r := &reporter{}
	fd, err := strconv.Atoi(getenv(envReportFD))
	if err != nil || fd < 3 {
		return r
	}
	syscall.CloseOnExec(fd)
	r.w = os.NewFile(uintptr(fd), "report")
	r.rank, _ = strconv.Atoi(getenv(envRank))
	return r
}

// A process is one rank, so it has one pipe.
var self = sync.OnceValue(func() *reporter { return newReporter(os.Getenv) })

// Progress tells the launcher that this rank has reached a step. It costs one write to a pipe.
func Progress(step int64) { self().progress(step) }

// Report tells the launcher the error that this rank ends with, and the step. Call it before closing the transport where
// possible: what others report as a consequence then comes later. It tells whether a launcher took the report, which then
// shows it, or the failure that it follows from: the rank need not say it again.
func Report(err error, step int64) bool { return self().report(err, step) }

func (r *reporter) progress(step int64) {
	r.mu.Lock()
	defer r.mu.Unlock()
	if r.w == nil {
		return
	}
	r.line = append(r.line[:0], `{"rank":`...)
	r.line = strconv.AppendInt(r.line, int64(r.rank), 10)
	r.line = append(r.line, `,"step":`...)
	r.line = strconv.AppendInt(r.line, step, 10)
	r.line = append(r.line, "}\n"...)
	r.write(r.line)
}

func (r *reporter) report(err error, step int64) bool {
	if err == nil {
		return false
	}
	n := note{Rank: r.rank, Step: step, Error: err.Error(), Time: time.Now(), Interrupted: errors.Is(err, ErrInterrupted)}
	var pe *comm.PeerError
	if errors.As(err, &pe) {
		n.Peer = &pe.Rank
	}
	line, jsonErr := json.Marshal(n)
	if jsonErr != nil {
		return false
	}
	r.mu.Lock()
	defer r.mu.Unlock()
	if r.w != nil {
		r.write(append(line, '\n'))
	}
	return r.w != nil
}

// write stops reporting when nobody reads any more; the rank goes on.
func (r *reporter) write(line []byte) {
	if _, err := r.w.Write(line); err != nil {
		r.w.Close()
		r.w = nil
	}
}
