package trace

import (
	"bufio"
	"encoding/json"
	"fmt"
	"io"
	"math"
	"slices"
)

// A Track is the events of one rank. Offset is what must be added to its clock to get the clock of rank 0, in
// nanoseconds (see [Offset]).
type Track struct {
	Rank   int
	Name   string // for example "rank 2, stage 1"
	Offset int64
	Events []Event
}

type chromeEvent struct {
	Name  string         `json:"name"`
	Cat   string         `json:"cat,omitempty"`
	Phase string         `json:"ph"`
	TS    float64        `json:"ts"` // microseconds
	Dur   float64        `json:"dur,omitempty"`
	PID   int            `json:"pid"`
	TID   int            `json:"tid"`
	Args  map[string]any `json:"args,omitempty"`
}

// WriteChrome writes the tracks in the Chrome trace event format (JSON object form), which Perfetto and
// chrome://tracing open. Time 0 is the first event of any rank.
func WriteChrome(w io.Writer, tracks []Track) error {
	origin := int64(math.MaxInt64)
	for _, t := range tracks {
		for _, e := range t.Events {
			origin = min(origin, e.Start+t.Offset)
		}
	}
	var all []chromeEvent
	for _, t := range tracks {
		all = append(all, chromeEvent{Name: "process_name", Phase: "M", PID: t.Rank, Args: map[string]any{"name": t.Name}})
		for _, e := range t.Events {
			name := e.Label
			if name == "" {
				name = e.Kind.String()
			}
			all = append(all, chromeEvent{Name: name, Cat: e.Kind.String(), Phase: "X",
				TS: float64(e.Start+t.Offset-origin) / 1e3, Dur: float64(e.End-e.Start) / 1e3, PID: t.Rank,
				Args: map[string]any{"step": e.Step}})
		}
	}
	slices.SortStableFunc(all, func(a, b chromeEvent) int {
		switch {
		case a.TS < b.TS:
			return -1
		case a.TS > b.TS:
			return 1
		}
		return a.PID - b.PID
	})
	b := bufio.NewWriter(w)
	fmt.Fprint(b, `{"displayTimeUnit":"ms","traceEvents":[`)
	for i, e := range all {
		line, err := json.Marshal(e)
		if err != nil {
			return fmt.Errorf("trace event %q: %w", e.Name, err)
		}
		if i > 0 {
			b.WriteByte(',')
		}
		b.WriteByte('\n')
		b.Write(line)
	}
	fmt.Fprint(b, "\n]}\n")
	return b.Flush()
}

// A Probe is one exchange of clocks: sent and back are read on the asking clock, there on the clock asked.
type Probe struct{ Sent, There, Back int64 }

// Offset estimates what must be added to the asking clock to get the other one, from the probe with the shortest
// round trip, assuming that both ways take equally long (as NTP does).
func Offset(probes []Probe) int64 {
	best, offset := int64(math.MaxInt64), int64(0)
	for _, p := range probes {
		if rtt := p.Back - p.Sent; rtt < best {
			best, offset = rtt, p.There-(p.Sent+rtt/2)
		}
	}
	return offset
}
