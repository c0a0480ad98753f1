// Package trace says where the time of a step went.
//
// A [Recorder] belongs to one rank and one goroutine. Spans nest: time inside an inner span is taken out of the outer
// one, so the times of all kinds add up to the wall time of the step exactly, with nothing counted twice. While
// recording is on, every span is also kept as an event; [WriteChrome] lays the events of all ranks on one clock.
package trace

import (
	"time"
)

// A Kind is what a span is booked under; its names are the keys of the "time" object of a metrics line.
type Kind uint8

const (
	Other Kind = iota // inside a step but in no span
	Data
	Forward
	Backward
	Dispatch
	Combine
	Reduce
	Optimizer
	Idle // waiting for another pipeline stage
	numKinds
)

var kindNames = [numKinds]string{"other", "data", "forward", "backward", "dispatch", "combine", "reduce", "optimizer", "idle"}

func (k Kind) String() string { return kindNames[k] }

// Kinds lists all kinds in the order they are printed.
func Kinds() []Kind {
	return []Kind{Data, Forward, Backward, Dispatch, Combine, Reduce, Optimizer, Idle, Other}
}

// An Event is one finished span, in nanoseconds since the Unix epoch on this rank's clock.
type Event struct {
	Kind       Kind
	Label      string // what exactly, for example the action 2F0
	Start, End int64
	Step       int64
}

type frame struct {
	kind     Kind
	label    string
	start    time.Time
	children time.Duration
}

// A Recorder books spans. The zero value is ready; a nil *Recorder records nothing.
type Recorder struct {
	stack     []frame
	totals    [numKinds]time.Duration
	events    []Event
	recording bool
	step      int64
	begun     time.Time
}

// StartStep forgets the times of the last step and starts the clock of the next.
func (r *Recorder) StartStep(step int64) {
	if r == nil {
		return
	}
	r.totals = [numKinds]time.Duration{}
	r.stack = r.stack[:0]
	r.step = step
	r.begun = time.Now()
}

// Record switches the keeping of events on or off.
func (r *Recorder) Record(on bool) {
	if r != nil {
		r.recording = on
	}
}

// Recording reports whether events are kept, so that a caller can spare itself the making of labels.
func (r *Recorder) Recording() bool { return r != nil && r.recording }

// Begin opens a span. Every Begin has its End, in reverse order.
func (r *Recorder) Begin(k Kind, label string) {
	if r == nil {
		return
	}
	r.stack = append(r.stack, frame{kind: k, label: label, start: time.Now()})
}

// End closes the innermost span.
func (r *Recorder) End() {
	if r == nil || len(r.stack) == 0 {
		return
	}
	f := r.stack[len(r.stack)-1]
	r.stack = r.stack[:len(r.stack)-1]
	now := time.Now()
	d := now.Sub(f.start)
	r.totals[f.kind] += d - f.children
	if n := len(r.stack); n > 0 {
		r.stack[n-1].children += d
	}
	if r.recording {
		end := now.UnixNano()
		r.events = append(r.events, Event{Kind: f.kind, Label: f.label, Start: end - d.Nanoseconds(), End: end, Step: r.step})
	}
}

// A Breakdown is the time of one step by kind; Total is its wall time and equals the sum of all kinds.
type Breakdown struct {
	Total time.Duration
	By    [numKinds]time.Duration
}

// EndStep closes the step. What no span covered is booked as Other.
func (r *Recorder) EndStep() Breakdown {
	if r == nil {
		return Breakdown{}
	}
	b := Breakdown{Total: time.Since(r.begun), By: r.totals}
	var sum time.Duration
	for _, d := range b.By {
		sum += d
	}
	b.By[Other] += b.Total - sum
	return b
}

// Milliseconds gives the breakdown under the names of the metrics line.
func (b Breakdown) Milliseconds() map[string]float64 {
	m := make(map[string]float64, numKinds)
	for _, k := range Kinds() {
		m[k.String()] = float64(b.By[k].Microseconds()) / 1000
	}
	return m
}

// Events returns what was recorded.
func (r *Recorder) Events() []Event {
	if r == nil {
		return nil
	}
	return r.events
}
