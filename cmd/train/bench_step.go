package main

import (
	"bufio"
	"bytes"
	"cmp"
	"context"
	"encoding/json"
	"fmt"
	"maps"
	"math"
	"os/exec"
	"runtime"
	"slices"

	"github.com/spf13/cobra"

	"moetor/comm/inproc"
	"moetor/configs"
	"moetor/internal/kernel"
	"moetor/internal/train"
	"moetor/model"
)

// stepResult is what bench step prints. Times are of the median step, so that time adds up to step_ms.
type stepResult struct {
	Config  string             `json:"config"`
	Threads int                `json:"threads"`
	Kernel  string             `json:"kernel"`
	Tokens  float64            `json:"tokens"` // of a step, padding not
	TokS    float64            `json:"tok_s"`
	StepMS  float64            `json:"step_ms"`
	MFU     float64            `json:"mfu"`         // median over the steps, each against the peak before and after it
	Peak    float64            `json:"peak_gflops"` // median of all looks
	Steps   int                `json:"steps"`
	MemMB   float64            `json:"mem_mb"`
	Time    map[string]float64 `json:"time"`
	Peer    *peerResult        `json:"peer,omitempty"`
}

// peerResult compares with another engine, run in turn with this one.
type peerResult struct {
	Command string      `json:"command"`
	TokS    float64     `json:"tok_s"` // median
	Rounds  []peerRound `json:"rounds"`
	Ratio   float64     `json:"ratio"` // median of the rounds' ratios
}

type peerRound struct {
	TokS  float64 `json:"tok_s"`
	Peer  float64 `json:"peer_tok_s"`
	Ratio float64 `json:"ratio"`
}

type stepBench struct {
	benchFlags
	steps, warmup, rounds int
	peer                  string
}

func benchStepCommand() *cobra.Command {
	var b stepBench
	c := &cobra.Command{
		Use: "step", Short: "Whole optimizer steps of one rank", Args: cobra.NoArgs,
		Long: `Do optimizer steps of the first stage of a configuration (default bench-s) on one rank in this process, and print the
median step: tokens a second, what its time went to, and the share of the FMA peak measured before and after each step.
Nothing is validated or saved.

With --peer COMMAND, rounds of steps alternate with a run of another engine's command, whose last line of JSON with a tok_s
counts. The ratio is the median of the rounds': what else the machine does then hits both alike.`,
		RunE: func(c *cobra.Command, _ []string) error {
			if err := b.check(); err != nil {
				return err
			}
			r, err := b.run(c)
			if err != nil {
				return err
			}
			return b.print(c, r)
		},
	}
	b.add(c)
	fl := c.Flags()
	fl.IntVar(&b.steps, "steps", 7, "measured steps of a round")
	fl.IntVar(&b.warmup, "warmup", 2, "steps before")
	fl.StringVar(&b.peer, "peer", "", "shell command that measures another engine and prints a JSON line with tok_s")
	fl.IntVar(&b.rounds, "rounds", 2, "rounds with --peer")
	return c
}

func (b *stepBench) check() error {
	for _, v := range []struct {
		name    string
		n, from int
	}{{"steps", b.steps, 1}, {"warmup", b.warmup, 0}, {"rounds", b.rounds, 1}} {
		if v.n < v.from || v.n > 1e6 {
			return usagef("--%s %d must be between %d and 1000000", v.name, v.n, v.from)
		}
	}
	b.name = cmp.Or(b.name, "bench-s")
	b.sets = append([]string{"parallel.pipeline=1", "parallel.expert=1", "parallel.split=[]"}, b.sets...)
	if b.peer == "" {
		b.rounds = 1
	}
	return nil
}

// run does the steps, and between the rounds the peer's.
func (b *stepBench) run(c *cobra.Command) (r stepResult, err error) {
	run, err := b.load(1)
	if err != nil {
		return r, err
	}
	first := &run.Stages[0]
	first.Steps, first.Tokens, first.Epochs = int64(b.warmup+b.rounds*b.steps), 0, 0
	if err := b.start(); err != nil {
		return r, err
	}
	ctx := context.Background()
	transport := inproc.New(1)[0]
	defer transport.Close()
	t, err := train.New(ctx, run, transport, train.Options{LocalRanks: 1, Threads: b.threads})
	if err != nil {
		return r, err
	}
	m := measuredSteps{run: run, threads: b.threads}
	m.look()
	done := 0
	err = t.Bench(ctx, b.warmup+b.rounds*b.steps, func(s *train.Report) error {
		if done++; done <= b.warmup {
			runtime.GC() // what the start left behind is nobody's step
			m.peaks = m.peaks[:0]
			m.look()
			return nil
		}
		m.add(s)
		if b.peer == "" || (done-b.warmup)%b.steps > 0 {
			return nil
		}
		tokS, err := peerTokS(ctx, c, b.peer)
		if err != nil {
			return err
		}
		m.round(b.steps, tokS)
		m.look() // time has passed
		return nil
	})
	if err != nil {
		return r, err
	}
	r = m.result()
	r.Config, r.Threads, r.Kernel = b.name, b.threads, kernel.Active()
	if b.peer != "" {
		r.Peer = m.compare(b.peer)
	}
	return r, nil
}

// measuredSteps collects steps and the peak between them.
type measuredSteps struct {
	run     *configs.Run
	threads int
	peaks   []float64
	last    float64 // peak before the coming step
	steps   []train.Report
	mfu     []float64
	rounds  []peerRound
}

// look measures the peak.
func (m *measuredSteps) look() float64 {
	m.last = kernel.PeakGFLOPS(m.threads, 20)
	m.peaks = append(m.peaks, m.last)
	return m.last
}

func (m *measuredSteps) add(s *train.Report) {
	before := m.last
	peak := (before + m.look()) / 2
	m.mfu = append(m.mfu, s.TokS*model.FLOPs(m.run.Model, m.run.Model.Context).Training/(peak*1e9))
	m.steps = append(m.steps, *s)
}

// round pairs the last steps with the peer's figure.
func (m *measuredSteps) round(steps int, peer float64) {
	var tokS []float64
	for _, s := range m.steps[len(m.steps)-steps:] {
		tokS = append(tokS, s.TokS)
	}
	own := median(tokS)
	m.rounds = append(m.rounds, peerRound{TokS: round(own), Peer: round(peer), Ratio: round(own / peer)})
}

func (m *measuredSteps) result() stepResult {
	byTime := slices.SortedFunc(slices.Values(m.steps), func(a, b train.Report) int { return cmp.Compare(a.StepMS, b.StepMS) })
	s := byTime[(len(byTime)-1)/2]
	return stepResult{Tokens: math.Round(s.TokS * s.StepMS / 1000), TokS: round(s.TokS), StepMS: s.StepMS, MFU: round(median(m.mfu)),
		Peak: round(median(m.peaks)), Steps: len(m.steps), MemMB: s.MemMB, Time: s.Time}
}

func (m *measuredSteps) compare(command string) *peerResult {
	p := &peerResult{Command: command, Rounds: m.rounds}
	var tokS, ratios []float64
	for _, r := range m.rounds {
		tokS, ratios = append(tokS, r.Peer), append(ratios, r.Ratio)
	}
	p.TokS, p.Ratio = round(median(tokS)), round(median(ratios))
	return p
}

// peerTokS runs the command and reads the tok_s of the last line of its output that is a JSON object with one.
func peerTokS(ctx context.Context, c *cobra.Command, command string) (float64, error) {
	p := exec.CommandContext(ctx, "sh", "-c", command)
	p.Stderr = c.ErrOrStderr()
	out, err := p.Output()
	if err != nil {
		return 0, fmt.Errorf("--peer %q: %w", command, err)
	}
	tokS := 0.0
	for sc := bufio.NewScanner(bytes.NewReader(out)); sc.Scan(); {
		var line struct {
			TokS float64 `json:"tok_s"`
		}
		if json.Unmarshal(sc.Bytes(), &line) == nil && line.TokS > 0 {
			tokS = line.TokS
		}
	}
	if tokS == 0 {
		return 0, fmt.Errorf("--peer %q printed no line of JSON with a positive tok_s", command)
	}
	return tokS, nil
}

func (b *stepBench) print(c *cobra.Command, r stepResult) error {
	if b.asJSON {
		return printJSON(c, r)
	}
	out := c.OutOrStdout()
	fmt.Fprintf(out, "%s, %s, %d threads, %s tokens a step: %s tokens/s, %s ms a step, mfu %s of %s GFLOP/s, %s MiB resident (median of %d)\n",
		r.Config, r.Kernel, r.Threads, digits(r.Tokens), digits(r.TokS), digits(r.StepMS), digits(r.MFU), digits(r.Peak), digits(r.MemMB), r.Steps)
	var rows [][]string
	for _, name := range slices.SortedFunc(maps.Keys(r.Time), func(a, b string) int { return cmp.Compare(r.Time[b], r.Time[a]) }) {
		rows = append(rows, []string{name, digits(r.Time[name]), fmt.Sprintf("%.1f %%", 100*r.Time[name]/r.StepMS)})
	}
	if err := table(out, []string{"time", "ms", "share"}, rows); err != nil || r.Peer == nil {
		return err
	}
	rows = nil
	for _, p := range r.Peer.Rounds {
		rows = append(rows, []string{digits(p.TokS), digits(p.Peer), digits(p.Ratio)})
	}
	rows = append(rows, []string{"", "median", digits(r.Peer.Ratio)})
	return table(out, []string{"tokens/s", "peer's", "ratio"}, rows)
}
