package main

import (
	"cmp"
	"fmt"
	"io"
	"math"
	"runtime"
	"slices"
	"strconv"
	"text/tabwriter"
	"time"

	"github.com/spf13/cobra"

	"moetor/configs"
	"moetor/internal/kernel"
)

func benchCommand() *cobra.Command {
	c := &cobra.Command{
		Use: "bench", Short: "Measure kernels, whole steps and transports against the limits of this machine",
		Long: `Measure what this machine gives. Figures are medians of repeated runs. Kernels are compared with the rate of a
multiply-add loop on registers (the FMA peak), measured in turn with them in the same process, on as many threads: on a
shared machine both rise and fall together. docs/perf.md has figures and what they mean.`,
	}
	c.AddCommand(benchGemmCommand(), benchGroupedCommand(), benchAttentionCommand(), benchLowpCommand(), benchStepCommand(), benchCommCommand())
	return c
}

// benchFlags are those of every kernel benchmark.
type benchFlags struct {
	configFlags
	threads int
	kernel  string
	seconds float64
	asJSON  bool
}

func (f *benchFlags) add(c *cobra.Command) {
	f.configFlags.add(c)
	fl := c.Flags()
	fl.IntVar(&f.threads, "threads", 0, "kernel threads (default: all cores)")
	fl.StringVar(&f.kernel, "kernel", "auto", "kernel implementation: auto, portable, avx2 or avx512")
	fl.BoolVar(&f.asJSON, "json", false, "print JSON")
}

// start checks the flags and sets kernel and threads.
func (f *benchFlags) start() error {
	switch {
	case f.threads < 0:
		return usagef("--threads %d must not be negative", f.threads)
	case !(f.seconds >= 0) || f.seconds > 3600:
		return usagef("--seconds %v must be between 0 and 3600", f.seconds)
	}
	if err := checkKernel(f.kernel); err != nil {
		return err
	}
	if f.kernel != "auto" {
		kernel.Use(f.kernel)
	}
	f.threads = cmp.Or(f.threads, runtime.GOMAXPROCS(0))
	kernel.SetThreads(f.threads)
	return nil
}

// configurations are those that a kernel benchmark takes its shapes from: the one named, or the two made for speed.
func (f *benchFlags) configurations() ([]*configs.Run, error) {
	names := []string{f.name}
	if f.name == "" {
		names = []string{"bench-s", "bench-fine"}
	}
	var runs []*configs.Run
	for _, name := range names {
		one := configFlags{name, f.sets}
		run, err := one.loadModel(0)
		if err != nil {
			return nil, err
		}
		runs = append(runs, run)
	}
	return runs, nil
}

// rated is a speed and its share of the peak.
type rated struct {
	GFLOPS float64 `json:"gflops"`
	OfPeak float64 `json:"of_peak"`
}

// A meter times work in turn with the peak.
type meter struct {
	threads int
	peaks   []float64 // of all work, GFLOP/s
}

const (
	peakMS      = 5                    // of a look: five windows, of which kernel.PeakGFLOPS takes the best
	windows     = 5                    // of a sample, likewise
	windowTime  = 1 * time.Millisecond // least time of a window: the clock and a wake-up are nothing beside it
	leastRounds = 3
)

// measure runs work, of the given number of floating-point operations, for about so many seconds in all: a look at the peak,
// a sample, again, and a last look. A sample is the best of five windows, as a look is: on a shared machine a window in which
// somebody else runs says nothing of either. The rate is the median sample's; the share is the median of each sample's of the
// better look of the two around it.
func (m *meter) measure(flops float64, seconds float64, work func()) rated {
	work() // warm
	begin := time.Now()
	work()
	calls := max(1, int(windowTime/max(time.Since(begin), time.Nanosecond)))
	var rates, shares []float64
	before := m.look()
	for end := time.Now().Add(time.Duration(seconds * float64(time.Second))); len(rates) < leastRounds || time.Now().Before(end); {
		best := 0.0
		for range windows {
			begin := time.Now()
			for range calls {
				work()
			}
			best = max(best, flops*float64(calls)/time.Since(begin).Seconds()/1e9)
		}
		after := m.look()
		rates, shares = append(rates, best), append(shares, best/max(before, after))
		before = after
	}
	return rated{GFLOPS: round(median(rates)), OfPeak: round(median(shares))}
}

// look measures the peak once.
func (m *meter) look() float64 {
	peak := kernel.PeakGFLOPS(m.threads, peakMS)
	m.peaks = append(m.peaks, peak)
	return peak
}

// peak is the median of all looks.
func (m *meter) peak() float64 { return round(median(m.peaks)) }

// median of a list, the mean of the middle two of an even number. It is 0 for none.
func median(x []float64) float64 {
	if len(x) == 0 {
		return 0
	}
	s := slices.Sorted(slices.Values(x))
	return (s[(len(s)-1)/2] + s[len(s)/2]) / 2
}

// round keeps four digits: more are noise.
func round(x float64) float64 {
	if x == 0 || math.IsNaN(x) || math.IsInf(x, 0) {
		return x
	}
	scale := math.Pow(10, 4-math.Ceil(math.Log10(math.Abs(x))))
	return math.Round(x*scale) / scale
}

// table prints aligned columns: numbers to the right.
func table(w io.Writer, head []string, rows [][]string) error {
	t := tabwriter.NewWriter(w, 0, 0, 2, ' ', tabwriter.AlignRight)
	for _, r := range append([][]string{head}, rows...) {
		for _, cell := range r {
			fmt.Fprintf(t, "%s\t", cell)
		}
		fmt.Fprintln(t)
	}
	return t.Flush()
}

func digits(x float64) string { return strconv.FormatFloat(x, 'g', 4, 64) }

// fill sets x to numbers without a pattern, of the size that activations have.
func fill(x []float32) []float32 {
	s := uint32(12345)
	for i := range x {
		s = s*1664525 + 1013904223
		x[i] = float32(int32(s)) / (1 << 31)
	}
	return x
}

// random returns n such numbers.
func random(n int) []float32 { return fill(make([]float32, n)) }
