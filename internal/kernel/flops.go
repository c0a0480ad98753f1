package kernel

import (
	"runtime"
	"sync"
	"sync/atomic"
	"time"
)

var flops atomic.Int64

// Flops returns the floating-point operations (2mnk) of all products since the process started, grouped products and
// attention included. It is the counter that computed model FLOPs are checked against.
func Flops() int64 { return flops.Load() }

func countFlops(m, n, k int) { flops.Add(2 * int64(m) * int64(n) * int64(k)) }

// countPairs counts attention: depth multiply-adds for each pair of a query and a key that is not masked.
func countPairs(T, depth int) { flops.Add(int64(T) * int64(T+1) * int64(depth)) }

// peakWindows is how many times PeakGFLOPS looks. On a shared machine the best window is nearest to the processor.
const peakWindows = 5

// PeakGFLOPS measures what the active implementation's multiply-add loop reaches on registers alone, on so many threads
// at once, for about ms milliseconds: the best of five windows, in 1e9 floating-point operations per second over all
// threads.
func PeakGFLOPS(threads, ms int) float64 {
	threads = max(threads, 1)
	window := max(time.Duration(ms)*time.Millisecond/peakWindows, time.Millisecond)
	peak := active.Load().micro.peak
	var best float64
	for range peakWindows {
		var wg sync.WaitGroup
		var total atomic.Int64
		begin := time.Now()
		for range threads {
			wg.Go(func() {
				runtime.LockOSThread()
				defer runtime.UnlockOSThread()
				var done int64
				for time.Since(begin) < window {
					done += peak()
				}
				total.Add(done)
			})
		}
		wg.Wait()
		best = max(best, float64(total.Load())/time.Since(begin).Seconds()/1e9)
	}
	return best
}
