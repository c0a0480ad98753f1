package main

import (
	"fmt"
	"io"
	"os"
	"path/filepath"
	"runtime/debug"
	"time"

	"github.com/pkg/profile"

	"moetor/internal/train"
)

// A display shows the run to a person: one live line on a terminal, a line per interval elsewhere.
type display struct {
	w     io.Writer
	live  bool // the line now on the screen is to be overwritten
	tty   bool
	began time.Time
	first int64 // step that the clock started at
}

// ttyVar tells rank 0 that the launcher's stderr, where its lines end up, is a terminal.
const ttyVar = "MOETOR_TTY"

func newDisplay(w io.Writer) *display { return &display{w: w, tty: os.Getenv(ttyVar) == "1"} }

func (d *display) show(r *train.Report, line string, total int64, due bool) {
	if d.began.IsZero() {
		d.began, d.first = time.Now(), r.Step
	}
	if d.tty {
		left := ""
		if done := r.Step - d.first; done > 0 {
			per := time.Since(d.began) / time.Duration(done)
			left = fmt.Sprintf("  %s left", (per * time.Duration(total-r.Step)).Round(time.Second))
		}
		fmt.Fprintf(d.w, "\r\x1b[K%s%s", line, left)
		d.live = true
		if r.ValLoss != nil { // figures worth keeping stay on the screen
			d.end()
		}
		return
	}
	if due {
		fmt.Fprintln(d.w, line)
	}
}

func (d *display) note(format string, args ...any) {
	d.end()
	fmt.Fprintf(d.w, format+"\n", args...)
}

// end leaves the live line.
func (d *display) end() {
	if d.live {
		fmt.Fprintln(d.w)
		d.live = false
	}
}

// isTerminal reports whether f is one.
func isTerminal(w io.Writer) bool {
	f, ok := w.(*os.File)
	if !ok {
		return false
	}
	st, err := f.Stat()
	return err == nil && st.Mode()&os.ModeCharDevice != 0 && os.Getenv("TERM") != "dumb"
}

var profiles = map[string]func(*profile.Profile){
	"cpu": profile.CPUProfile, "mem": profile.MemProfile, "block": profile.BlockProfile,
	"mutex": profile.MutexProfile, "trace": profile.TraceProfile,
}

func checkProfile(kind string) error {
	if kind != "" && profiles[kind] == nil {
		return usagef("--profile %s is unknown; known: cpu, mem, block, mutex, trace", kind)
	}
	return nil
}

// startProfile writes a Go profile of this rank into DIR/profile-rank-K; the function returned ends it.
func startProfile(kind, dir string, rank int) func() {
	if kind == "" {
		return func() {}
	}
	p := profile.Start(profiles[kind], profile.ProfilePath(filepath.Join(dir, fmt.Sprintf("profile-rank-%d", rank))), profile.NoShutdownHook, profile.Quiet)
	return p.Stop
}

// panicTrace keeps the stack of an internal error in the run directory, so that the user gets one line and a report
// gets the rest.
func panicTrace(dir string, rank int, r any) {
	text := fmt.Sprintf("%v\n\n%s", r, debug.Stack())
	if dir == "" || os.WriteFile(filepath.Join(dir, fmt.Sprintf("rank-%d.panic", rank)), []byte(text), 0o644) != nil {
		fmt.Fprint(os.Stderr, text)
	}
}
