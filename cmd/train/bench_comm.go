package main

import (
	"bytes"
	"context"
	"encoding/json"
	"fmt"
	"os"
	"runtime"
	"strconv"
	"sync"
	"time"

	"github.com/spf13/cobra"

	"moetor/comm"
	"moetor/comm/inproc"
	"moetor/comm/launch"
)

// commCase is one operation over a transport: bytes are those of a message, or of each rank's buffer in a collective.
type commCase struct {
	Op    string  `json:"op"` // ping-pong (half a round trip), all-reduce, all-to-all
	Bytes int     `json:"bytes"`
	US    float64 `json:"us"`
	GBS   float64 `json:"gb_s"` // bytes over time
}

type transportResult struct {
	Transport string     `json:"transport"`
	Cases     []commCase `json:"cases"`
}

type commResult struct {
	Ranks      int               `json:"ranks"`
	Cores      int               `json:"cores"`
	Transports []transportResult `json:"transports"`
}

type commBench struct {
	ranks      int
	transports []string
	repeat     float64
	worker     bool
	asJSON     bool
}

func benchCommCommand() *cobra.Command {
	var b commBench
	c := &cobra.Command{
		Use: "comm", Short: "Latency and bandwidth between ranks", Args: cobra.NoArgs,
		Long: `Measure every transport between ranks of this host: a ping-pong of rank 0 and 1 (half a round trip), an all-reduce of
1 MiB, and all-to-alls of 1 and 16 MiB a rank. Ranks of shm and tcp are processes, those of inproc goroutines. A rate is a
rank's bytes over the time.`,
		RunE: func(c *cobra.Command, _ []string) error {
			if b.worker {
				return b.rank(c)
			}
			return b.run(c)
		},
	}
	fl := c.Flags()
	fl.IntVarP(&b.ranks, "ranks", "n", 2, "ranks")
	fl.StringSliceVar(&b.transports, "transport", nil, "shm, tcp, inproc (default: all that work here)")
	fl.Float64Var(&b.repeat, "repeat", 1, "factor of the number of repetitions")
	fl.BoolVar(&b.asJSON, "json", false, "print JSON")
	fl.BoolVar(&b.worker, "worker", false, "be one of the ranks")
	fl.MarkHidden("worker")
	return c
}

func (b *commBench) run(c *cobra.Command) error {
	if b.ranks < 2 || b.ranks > 256 {
		return usagef("-n %d must be between 2 and 256", b.ranks)
	}
	if !(b.repeat > 0) || b.repeat > 1000 {
		return usagef("--repeat %v must be above 0 and at most 1000", b.repeat)
	}
	if len(b.transports) == 0 {
		b.transports = []string{"shm", "tcp", "inproc"}
		if runtime.GOOS != "linux" {
			b.transports = b.transports[1:]
		}
	}
	r := commResult{Ranks: b.ranks, Cores: runtime.GOMAXPROCS(0)}
	for _, name := range b.transports {
		var cases []commCase
		var err error
		switch {
		case name == "inproc":
			cases, err = b.goroutines()
		case name == "tcp" || name == "shm" && runtime.GOOS == "linux":
			cases, err = b.processes(c, name)
		default:
			return usagef("--transport %s cannot run here; known: shm (Linux), tcp, inproc", name)
		}
		if err != nil {
			return fmt.Errorf("%s: %w", name, err)
		}
		r.Transports = append(r.Transports, transportResult{name, cases})
	}
	if b.asJSON {
		return printJSON(c, r)
	}
	fmt.Fprintf(c.OutOrStdout(), "%d ranks on %d cores\n", r.Ranks, r.Cores)
	var rows [][]string
	for _, t := range r.Transports {
		for _, k := range t.Cases {
			rows = append(rows, []string{t.Transport, k.Op, strconv.Itoa(k.Bytes), digits(k.US), digits(k.GBS)})
		}
	}
	return table(c.OutOrStdout(), []string{"transport", "operation", "bytes", "µs", "GB/s"}, rows)
}

// processes starts this program as so many ranks; rank 0 prints the cases.
func (b *commBench) processes(c *cobra.Command, transport string) (cases []commCase, err error) {
	self, err := os.Executable()
	if err != nil {
		return nil, err
	}
	var out bytes.Buffer
	_, err = launch.Run(context.Background(), launch.Job{
		Command: []string{self, "bench", "comm", "--worker", "--repeat", strconv.FormatFloat(b.repeat, 'g', -1, 64)},
		Size:    b.ranks, Transport: transport, Segment: makeSegment, Stdout: &out, Stderr: c.ErrOrStderr(),
	})
	if err != nil {
		return nil, err
	}
	if err := json.Unmarshal(out.Bytes(), &cases); err != nil {
		return nil, fmt.Errorf("what rank 0 printed: %w", err)
	}
	return cases, nil
}

// rank is one of those processes.
func (b *commBench) rank(c *cobra.Command) (err error) {
	defer func() {
		if err != nil && launch.Report(err, 0) {
			err = exitCode(exitFailed)
		}
	}()
	rank, err := launch.FromEnv(os.Getenv)
	if err != nil {
		return err
	}
	ctx := context.Background()
	t, err := connect(ctx, rank, time.Minute)
	if err != nil {
		return err
	}
	defer t.Close()
	cases, err := b.measure(ctx, t)
	if err != nil || t.Rank() > 0 {
		return err
	}
	return printJSON(c, cases)
}

func (b *commBench) goroutines() (cases []commCase, err error) {
	ctx, cancel := context.WithCancelCause(context.Background())
	defer cancel(nil)
	var wg sync.WaitGroup
	for _, t := range inproc.New(b.ranks) {
		wg.Go(func() {
			defer t.Close()
			got, err := b.measure(ctx, t)
			if err != nil {
				cancel(err)
			} else if t.Rank() == 0 {
				cases = got
			}
		})
	}
	wg.Wait()
	return cases, context.Cause(ctx)
}

// Tags of the bench: its group's, and that of the ping-pong.
const (
	benchTag    comm.Tag = 1
	pingPongTag          = comm.TagPipeline
)

// commRuns is over how many runs, of several repetitions each, a median is taken.
const commRuns = 7

// measure does all cases on one rank; the figures are rank 0's.
func (b *commBench) measure(ctx context.Context, t comm.Transport) ([]commCase, error) {
	ranks := make([]int, t.Size())
	for i := range ranks {
		ranks[i] = i
	}
	g, err := comm.NewGroup(t, ranks, benchTag)
	if err != nil {
		return nil, err
	}
	var cases []commCase
	for _, k := range []struct {
		op         string
		bytes      int
		repeat     int
		operations float64 // that one call counts for
		make       func(bytes int) func() error
	}{
		{"ping-pong", 8, 1000, 2, func(n int) func() error { return pingPong(ctx, t, n) }},
		{"ping-pong", 64 << 10, 200, 2, func(n int) func() error { return pingPong(ctx, t, n) }},
		{"ping-pong", 1 << 20, 30, 2, func(n int) func() error { return pingPong(ctx, t, n) }},
		{"ping-pong", 16 << 20, 3, 2, func(n int) func() error { return pingPong(ctx, t, n) }},
		{"all-reduce", 1 << 20, 20, 1, func(n int) func() error {
			x := make([]float32, n/4)
			return func() error { return comm.AllReduce(ctx, g, x, comm.Sum) }
		}},
		{"all-to-all", 1 << 20, 20, 1, func(n int) func() error { return allToAll(ctx, g, n) }},
		{"all-to-all", 16 << 20, 3, 1, func(n int) func() error { return allToAll(ctx, g, n) }},
	} {
		call, times := k.make(k.bytes), []float64(nil)
		repeat := max(1, int(float64(k.repeat)*b.repeat))
		for run := range commRuns + 1 { // the first warms up
			if err := g.Barrier(ctx); err != nil {
				return nil, err
			}
			begin := time.Now()
			for range repeat {
				if err := call(); err != nil {
					return nil, err
				}
			}
			if run > 0 {
				times = append(times, time.Since(begin).Seconds()/float64(repeat)/k.operations)
			}
		}
		s := median(times)
		cases = append(cases, commCase{k.op, k.bytes, round(s * 1e6), round(float64(k.bytes) / s / 1e9)})
	}
	return cases, g.Barrier(ctx) // nobody closes before all are done
}

func pingPong(ctx context.Context, t comm.Transport, n int) func() error {
	p := make([]byte, n)
	switch t.Rank() {
	case 0:
		return func() error {
			if err := t.Send(ctx, 1, pingPongTag, p); err != nil {
				return err
			}
			return t.Recv(ctx, 1, pingPongTag, p)
		}
	case 1:
		return func() error {
			if err := t.Recv(ctx, 0, pingPongTag, p); err != nil {
				return err
			}
			return t.Send(ctx, 0, pingPongTag, p)
		}
	}
	return func() error { return nil }
}

// allToAll spreads a rank's n bytes evenly.
func allToAll(ctx context.Context, g *comm.Group, n int) func() error {
	counts, total := make([]int, g.Size()), 0
	for i := range counts {
		counts[i] = n / 4 / g.Size()
		total += counts[i]
	}
	x, y := random(total), make([]float32, total)
	return func() error { return comm.AllToAll(ctx, g, y, x, counts, counts) }
}
