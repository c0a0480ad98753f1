package configs

import (
	"fmt"
	"math"
	"slices"
	"strings"
	"text/tabwriter"

	"moetor/optimizer"
)

// A Row holds the values of one step, as the run will use them.
type Row struct {
	Stage     string   `json:"stage"`
	Step      int64    `json:"step"`    // number of the step, from 1
	Tokens    int64    `json:"tokens"`  // consumed before it
	Samples   int64    `json:"samples"` // consumed before it
	Batch     int      `json:"batch"`   // sequences of the global batch
	Micros    int      `json:"micros"`  // micro-batches of the data rank with the most; 0 if ranks are not known
	Rate      float64  `json:"lr"`      // learning rate
	BiasSpeed float64  `json:"bias_speed"`
	MTPWeight float64  `json:"mtp_weight"`
	Changes   []string `json:"changes"` // what begins with this step
}

// Total says how long a stage is.
type Total struct {
	Stage string `json:"stage"`
	optimizer.Position
}

// Table is the schedule of a run: for each stage its first and last step, every step at which a phase begins, and evenly
// spaced ones between.
type Table struct {
	Rows   []Row   `json:"rows"`
	Totals []Total `json:"totals"`
}

const (
	evenRows     = 10 // evenly spaced rows of a stage
	maxBatchRows = 16 // batch sizes of a ramp up to which each gets a row
)

// ScheduleTable computes the schedule of a validated run on `ranks` ranks (0: not known). epochSamples gives the samples
// of one epoch of a stage; it is called only for stages whose length is in epochs and may be nil if there are none.
func ScheduleTable(r *Run, ranks int, epochSamples func(stage int) (int64, error)) (Table, error) {
	var t Table
	for i := range r.Stages {
		var samples int64
		if r.Stages[i].Epochs > 0 {
			if epochSamples == nil {
				return Table{}, fmt.Errorf("stages.%d.epochs=%d: the schedule needs the number of samples of an epoch", i, r.Stages[i].Epochs)
			}
			var err error
			if samples, err = epochSamples(i); err != nil {
				return Table{}, err
			}
		}
		s, err := r.Schedule(i, samples)
		if err != nil {
			return Table{}, err
		}
		name := r.Stages[i].Name
		end := s.End()
		for _, m := range marks(s, end) {
			v := s.At(m.at)
			t.Rows = append(t.Rows, Row{
				Stage: name, Step: m.at.Step + 1, Tokens: m.at.Tokens, Samples: m.at.Samples,
				Batch: v.Batch, Micros: micros(v.Batch, r.Parallel, ranks),
				Rate: v.Rate, BiasSpeed: v.BiasSpeed, MTPWeight: v.MTPWeight, Changes: m.changes,
			})
		}
		t.Totals = append(t.Totals, Total{name, end})
	}
	return t, nil
}

// micros is how many micro-batches the busiest data rank has in a batch, dealt out evenly.
func micros(batch int, p Parallel, ranks int) int {
	if ranks <= 0 {
		return 0
	}
	up := func(a, b int) int { return (a + b - 1) / b }
	return up(up(batch, p.Microbatch), max(1, ranks/p.Pipeline))
}

type mark struct {
	at      optimizer.Position
	changes []string
}

// marks lists the steps of a stage that get a row.
func marks(s *optimizer.Schedule, end optimizer.Position) []mark {
	var out []mark
	add := func(p optimizer.Position, change string) {
		if s.Done(p) {
			return // the stage ends before
		}
		i, found := slices.BinarySearchFunc(out, p.Step, func(m mark, step int64) int { return int(m.at.Step - step) })
		if !found {
			out = slices.Insert(out, i, mark{at: p})
		}
		if change != "" {
			out[i].changes = append(out[i].changes, change)
		}
	}
	atStep := func(n int64) optimizer.Position { return s.Seek(optimizer.Position{}, n, math.MaxInt64) }
	atTokens := func(n int64) optimizer.Position { return s.Seek(optimizer.Position{}, math.MaxInt64, n) }

	add(optimizer.Position{}, "start")
	if n := s.Rate.WarmupSteps; n > 0 {
		add(atStep(n-1), "full rate")
	}
	decayed := s.Rate.DecayTokens == 0
	for i, tokens := range s.Rate.Changes() {
		switch {
		case i == 0 && !decayed:
			add(atTokens(tokens), "rate decays")
		case i == 1 && !decayed:
			add(atTokens(tokens), "rate constant")
		default:
			add(atTokens(tokens), "rate tail")
		}
	}
	if b := s.Batch; b.End > b.Start {
		if (b.End-b.Start)/max(1, b.Step) <= maxBatchRows {
			for p := s.Seek(optimizer.Position{}, math.MaxInt64, s.Batch.Next(0)); !s.Done(p) && p.Tokens < b.RampTokens; {
				add(p, "batch grows")
				p = s.Seek(p, math.MaxInt64, s.Batch.Next(p.Tokens))
			}
		}
		add(atTokens(b.RampTokens), "full batch")
	}
	for _, tokens := range s.BiasSpeed.Changes() {
		add(atTokens(tokens), "bias speed")
	}
	for _, tokens := range s.MTPWeight.Changes() {
		add(atTokens(tokens), "MTP weight")
	}
	for k := int64(1); k < evenRows; k++ {
		add(atStep(end.Step/evenRows*k+end.Step%evenRows*k/evenRows), "")
	}
	add(atStep(end.Step-1), "")
	return out
}

// String prints the table for a terminal.
func (t Table) String() string {
	var b strings.Builder
	w := tabwriter.NewWriter(&b, 0, 0, 2, ' ', tabwriter.AlignRight)
	fmt.Fprintln(w, "stage\tstep\ttokens\tsamples\tbatch\tmicros\tlr\tbias speed\tMTP weight\t")
	for _, r := range t.Rows {
		micros := "?"
		if r.Micros > 0 {
			micros = fmt.Sprint(r.Micros)
		}
		fmt.Fprintf(w, "%s\t%d\t%d\t%d\t%d\t%s\t%.4g\t%.4g\t%.4g\t  %s\n", r.Stage, r.Step, r.Tokens, r.Samples, r.Batch, micros,
			r.Rate, r.BiasSpeed, r.MTPWeight, strings.Join(r.Changes, ", "))
	}
	w.Flush()
	for _, s := range t.Totals {
		fmt.Fprintf(&b, "%s: %d steps, %d samples, %d tokens\n", s.Stage, s.Step, s.Samples, s.Tokens)
	}
	return b.String()
}
