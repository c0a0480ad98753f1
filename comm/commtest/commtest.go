// Package commtest says in tests what a comm.Transport must do, and breaks transports on purpose.
package commtest

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"runtime"
	"strings"
	"sync"
	"testing"
	"time"

	"moetor/comm"
)

// guard ends a test that hangs. It is no measure of speed.
const guard = 120 * time.Second

// Connect makes n transports that are connected to one another, in rank order.
type Connect func(t *testing.T, n int) []comm.Transport

// Run checks a transport against the contract of comm.Transport, and the collectives of comm.Group over it.
func Run(t *testing.T, connect func(t *testing.T, n int) []comm.Transport) {
	for _, c := range []struct {
		name string
		f    func(t *testing.T, connect Connect)
	}{
		{"Ranks", testRanks},
		{"Order", testOrder},
		{"Tags", testTags},
		{"Accepts", testAccepts},
		{"BothDirections", testBothDirections},
		{"Self", testSelf},
		{"Length", testLength},
		{"CancelRecv", testCancelRecv},
		{"CancelSend", testCancelSend},
		{"PeerCloses", testPeerCloses},
		{"Close", testClose},
		{"Collectives", testCollectives},
		{"LongCollectives", testLongCollectives},
		{"MaxNaN", testMaxNaN},
		{"Mismatch", testMismatch},
		{"CountMismatch", testCountMismatch},
		{"BadArguments", testBadArguments},
		{"Timeout", testTimeout},
		{"CancelCollective", testCancelCollective},
		{"Faults", testFaults},
	} {
		t.Run(c.name, func(t *testing.T) {
			before := runtime.NumGoroutine()
			t.Cleanup(func() { checkGoroutines(t, before) }) // runs after connect's own
			c.f(t, func(t *testing.T, n int) []comm.Transport {
				t.Helper()
				ts := connect(t, n)
				if len(ts) != n {
					t.Fatalf("connect made %d transports, want %d", len(ts), n)
				}
				return ts
			})
		})
	}
}

func closeAll(t *testing.T, ts []comm.Transport) {
	t.Helper()
	for _, tr := range ts {
		if err := tr.Close(); err != nil {
			t.Errorf("rank %d: Close: %v", tr.Rank(), err)
		}
	}
}

// checkGoroutines waits until no more goroutines run than before; those that are ending get time to.
func checkGoroutines(t *testing.T, before int) {
	t.Helper()
	for deadline := time.Now().Add(guard / 8); ; time.Sleep(5 * time.Millisecond) {
		n := runtime.NumGoroutine()
		if n <= before {
			return
		}
		if time.Now().After(deadline) {
			buf := make([]byte, 1<<16)
			t.Errorf("%d goroutines run, %d before the test:\n%s", n, before, buf[:runtime.Stack(buf, true)])
			return
		}
	}
}

// each runs f for every transport at once and returns what each returned.
func each(t *testing.T, ts []comm.Transport, f func(ctx context.Context, tr comm.Transport) error) []error {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), guard)
	defer cancel()
	errs := make([]error, len(ts))
	var wg sync.WaitGroup
	for i, tr := range ts {
		wg.Go(func() { errs[i] = f(ctx, tr) })
	}
	wg.Wait()
	if ctx.Err() != nil {
		t.Fatalf("hung for %v; per rank: %v", guard, errs)
	}
	return errs
}

// must is each for what has to go well.
func must(t *testing.T, ts []comm.Transport, f func(ctx context.Context, tr comm.Transport) error) {
	t.Helper()
	for i, err := range each(t, ts, f) {
		if err != nil {
			t.Errorf("rank %d: %v", i, err)
		}
	}
	if t.Failed() {
		t.FailNow()
	}
}

// message is the content that the seq'th message between two ranks with one tag must have.
func message(from, to int, tag comm.Tag, seq, n int) []byte {
	p := make([]byte, n)
	x := uint64(from)<<48 ^ uint64(to)<<40 ^ uint64(tag)<<16 ^ uint64(seq)
	for i := range p {
		x = x*6364136223846793005 + 1442695040888963407
		p[i] = byte(x >> 56)
	}
	return p
}

func receive(ctx context.Context, tr comm.Transport, from int, tag comm.Tag, seq, n int) error {
	got := make([]byte, n)
	if err := tr.Recv(ctx, from, tag, got); err != nil {
		return fmt.Errorf("message %d with tag %d from rank %d: %w", seq, tag, from, err)
	}
	if !bytes.Equal(got, message(from, tr.Rank(), tag, seq, n)) {
		return fmt.Errorf("message %d with tag %d from rank %d: other content than was sent", seq, tag, from)
	}
	return nil
}

func send(ctx context.Context, tr comm.Transport, to int, tag comm.Tag, seq, n int) error {
	p := message(tr.Rank(), to, tag, seq, n)
	if err := tr.Send(ctx, to, tag, p); err != nil {
		return fmt.Errorf("message %d with tag %d to rank %d: %w", seq, tag, to, err)
	}
	for i := range p { // Send is over: the buffer is ours, and the message must not change any more
		p[i] ^= 0xff
	}
	return nil
}

func testRanks(t *testing.T, connect Connect) {
	ts := connect(t, 3)
	defer closeAll(t, ts)
	for i, tr := range ts {
		if tr.Rank() != i || tr.Size() != 3 {
			t.Errorf("transport %d says rank %d of %d", i, tr.Rank(), tr.Size())
		}
		for _, bad := range []int{-1, 3} {
			if err := tr.Send(t.Context(), bad, 1, nil); err == nil {
				t.Errorf("Send to rank %d of 3 succeeded", bad)
			}
			if err := tr.Recv(t.Context(), bad, 1, nil); err == nil {
				t.Errorf("Recv from rank %d of 3 succeeded", bad)
			}
		}
	}
	one := connect(t, 1)
	defer closeAll(t, one)
	must(t, one, func(ctx context.Context, tr comm.Transport) error {
		return errors.Join(send(ctx, tr, 0, 7, 0, 100), receive(ctx, tr, 0, 7, 0, 100))
	})
}

// testOrder sends messages of all sizes between all pairs at once, those larger than any ring buffer among them.
func testOrder(t *testing.T, connect Connect) {
	const n = 3
	sizes := []int{0, 1, 2, 7, 8, 63, 64, 65, 0, 400, 416, 512, 4095, 4096, 4097, 65536, 3<<20 + 7, 1, 1 << 20, 0, 3}
	ts := connect(t, n)
	defer closeAll(t, ts)
	must(t, ts, func(ctx context.Context, tr comm.Transport) error {
		var wg sync.WaitGroup
		errs := make([]error, 2*n)
		for peer := range n {
			tag := comm.Tag(10 + peer)
			wg.Go(func() {
				for seq, size := range sizes {
					if errs[peer] = send(ctx, tr, peer, tag, seq, size); errs[peer] != nil {
						return
					}
				}
			})
			wg.Go(func() {
				for seq, size := range sizes {
					if errs[n+peer] = receive(ctx, tr, peer, comm.Tag(10+tr.Rank()), seq, size); errs[n+peer] != nil {
						return
					}
				}
			})
		}
		wg.Wait()
		return errors.Join(errs...)
	})
}

// testTags receives in another order than messages were sent, which works across tags and only there.
func testTags(t *testing.T, connect Connect) {
	ts := connect(t, 2)
	defer closeAll(t, ts)
	tags := []comm.Tag{0, 1, 2, 255, 256, comm.TagPipeline, comm.TagPipeline + 1, 1 << 31, 1<<32 - 1}
	const each = 4 // per tag, more than the contract asks to buffer: so they are sent while the other side receives
	must(t, ts, func(ctx context.Context, tr comm.Transport) error {
		if tr.Rank() == 0 {
			var wg sync.WaitGroup
			errs := make([]error, len(tags))
			for i, tag := range tags {
				wg.Go(func() {
					for seq := range each {
						errs[i] = errors.Join(errs[i], send(ctx, tr, 1, tag, seq, 100+i+seq))
					}
				})
			}
			wg.Wait()
			return errors.Join(errs...)
		}
		for i := len(tags) - 1; i >= 0; i-- {
			for seq := range each {
				if err := receive(ctx, tr, 0, tags[i], seq, 100+i+seq); err != nil {
					return err
				}
			}
		}
		return nil
	})
}

// testAccepts sends one message per peer and tag before anyone receives, as pipeline schedules do; some are long.
func testAccepts(t *testing.T, connect Connect) {
	const n, tags = 3, 64
	size := func(tag int) int {
		if tag%32 == 5 {
			return 3 << 20
		}
		return 40 * tag
	}
	ts := connect(t, n)
	defer closeAll(t, ts)
	must(t, ts, func(ctx context.Context, tr comm.Transport) error {
		for peer := range n {
			for tag := range tags {
				if err := send(ctx, tr, peer, comm.TagPipeline+comm.Tag(tag), 0, size(tag)); err != nil {
					return err
				}
			}
		}
		return nil
	})
	must(t, ts, func(ctx context.Context, tr comm.Transport) error {
		for tag := tags - 1; tag >= 0; tag-- {
			for peer := range n {
				if err := receive(ctx, tr, peer, comm.TagPipeline+comm.Tag(tag), 0, size(tag)); err != nil {
					return err
				}
			}
		}
		return nil
	})
}

// testBothDirections keeps both directions of all pairs busy, with tags whose readers run at their own pace (P12).
func testBothDirections(t *testing.T, connect Connect) {
	const n, count = 3, 40
	ts := connect(t, n)
	defer closeAll(t, ts)
	must(t, ts, func(ctx context.Context, tr comm.Transport) error {
		var wg sync.WaitGroup
		var mu sync.Mutex
		var all error
		for peer := range n {
			for tag := comm.Tag(1); tag <= 2; tag++ {
				if peer == tr.Rank() {
					continue
				}
				rng := func(from, to int) *rand.Rand { // sizes both sides know
					return rand.New(rand.NewPCG(uint64(from*n+to), uint64(tag)))
				}
				wg.Go(func() {
					r := rng(tr.Rank(), peer)
					for seq := range count {
						if err := send(ctx, tr, peer, tag, seq, r.IntN(100_000)); err != nil {
							mu.Lock()
							all = errors.Join(all, err)
							mu.Unlock()
							return
						}
					}
				})
				wg.Go(func() {
					r := rng(peer, tr.Rank())
					for seq := range count {
						if err := receive(ctx, tr, peer, tag, seq, r.IntN(100_000)); err != nil {
							mu.Lock()
							all = errors.Join(all, err)
							mu.Unlock()
							return
						}
					}
				})
			}
		}
		wg.Wait()
		return all
	})
}

func testSelf(t *testing.T, connect Connect) {
	ts := connect(t, 2)
	defer closeAll(t, ts)
	must(t, ts, func(ctx context.Context, tr comm.Transport) error {
		for _, size := range []int{0, 1, 1000, 2 << 20} {
			if err := send(ctx, tr, tr.Rank(), 3, size, size); err != nil {
				return err
			}
			if err := receive(ctx, tr, tr.Rank(), 3, size, size); err != nil {
				return err
			}
		}
		return nil
	})
}

// testLength receives with a wrong length: the error names both, and the message is still there.
func testLength(t *testing.T, connect Connect) {
	ts := connect(t, 2)
	defer closeAll(t, ts)
	for _, waits := range []bool{false, true} { // the receiver comes after, or before the message
		for _, size := range []int{5, 2 << 20} {
			for _, want := range []int{0, 4, 6, 3 << 20} {
				must(t, ts, func(ctx context.Context, tr comm.Transport) error {
					if tr.Rank() == 0 {
						if waits {
							if err := receive(ctx, tr, 1, 2, 0, 0); err != nil { // the other is about to receive
								return err
							}
							time.Sleep(2 * time.Millisecond)
						}
						return errors.Join(send(ctx, tr, 1, 1, 0, size), send(ctx, tr, 1, 3, 0, 1))
					}
					var err error
					if waits {
						err = send(ctx, tr, 0, 2, 0, 0)
					} else {
						err = receive(ctx, tr, 0, 3, 0, 1)
					}
					if err != nil {
						return err
					}
					err = tr.Recv(ctx, 0, 1, make([]byte, want))
					var le *comm.LengthError
					if !errors.As(err, &le) || le.From != 0 || le.Tag != 1 || le.Want != want || le.Got != size {
						return fmt.Errorf("Recv of %d bytes when %d came: %v, want a *comm.LengthError with both", want, size, err)
					}
					for _, n := range []int{want, size} {
						if !strings.Contains(err.Error(), fmt.Sprint(n)) {
							return fmt.Errorf("error %q does not name %d", err, n)
						}
					}
					if waits {
						err = receive(ctx, tr, 0, 3, 0, 1)
					} else {
						err = nil
					}
					return errors.Join(err, receive(ctx, tr, 0, 1, 0, size))
				})
			}
		}
	}
}

func testCancelRecv(t *testing.T, connect Connect) {
	ts := connect(t, 2)
	defer closeAll(t, ts)
	must(t, ts[:1], func(ctx context.Context, tr comm.Transport) error {
		for seq := range 20 {
			for _, from := range []int{0, 1} {
				short, cancel := context.WithCancel(ctx)
				done := make(chan error)
				go func() { done <- tr.Recv(short, from, 5, make([]byte, 8)) }()
				time.Sleep(time.Duration(seq%4) * 500 * time.Microsecond) // also before it waits
				cancel()
				if err := <-done; !errors.Is(err, context.Canceled) {
					return fmt.Errorf("Recv after cancel: %v", err)
				}
				// The stream is as good as before.
				if err := send(ctx, ts[from], 0, 5, seq, 8); err != nil {
					return err
				}
				if err := receive(ctx, tr, from, 5, seq, 8); err != nil {
					return err
				}
			}
		}
		return nil
	})
}

// testCancelSend sends more than any buffer holds to a rank that does not receive. A transport may take it all; if it
// waits, cancelling must end that.
func testCancelSend(t *testing.T, connect Connect) {
	ts := connect(t, 2)
	defer closeAll(t, ts)
	must(t, ts[:1], func(ctx context.Context, tr comm.Transport) error {
		short, cancel := context.WithCancel(ctx)
		done := make(chan error)
		go func() {
			p := make([]byte, 1<<20)
			var err error
			for i := 0; i < 48 && err == nil; i++ {
				err = tr.Send(short, 1, 5, p)
			}
			done <- err
		}()
		time.Sleep(20 * time.Millisecond)
		cancel()
		if err := <-done; err != nil && !errors.Is(err, context.Canceled) {
			return fmt.Errorf("Send after cancel: %v", err)
		}
		if err := tr.Send(short, 1, 6, []byte{1}); !errors.Is(err, context.Canceled) {
			return fmt.Errorf("Send with a cancelled context: %v", err)
		}
		return nil
	})
}

// testPeerCloses closes one rank: what it sent before arrives, everyone waiting for it learns that it is gone, and the
// others go on.
func testPeerCloses(t *testing.T, connect Connect) {
	const n, gone = 4, 2
	ts := connect(t, n)
	defer closeAll(t, ts)
	isLost := func(err error) error {
		var pe *comm.PeerError
		if !errors.As(err, &pe) || pe.Rank != gone || pe.Err == nil {
			return fmt.Errorf("got %v, want a *comm.PeerError of rank %d", err, gone)
		}
		return nil
	}
	must(t, ts, func(ctx context.Context, tr comm.Transport) error {
		if tr.Rank() == gone {
			for peer := range n {
				if peer != gone {
					if err := receive(ctx, tr, peer, 9, 0, 1); err != nil { // all are about to wait
						return err
					}
				}
			}
			for peer := range n {
				if peer != gone {
					if err := send(ctx, tr, peer, 7, 0, 300_000); err != nil {
						return err
					}
				}
			}
			return tr.Close()
		}
		var wg sync.WaitGroup
		lost := make([]error, 2)
		for i := range lost {
			wg.Go(func() { lost[i] = isLost(tr.Recv(ctx, gone, comm.Tag(20+i), make([]byte, 4))) })
		}
		err := send(ctx, tr, gone, 9, 0, 1)
		wg.Wait()
		err = errors.Join(append(lost, err)...)
		err = errors.Join(err, receive(ctx, tr, gone, 7, 0, 300_000))
		err = errors.Join(err, isLost(tr.Recv(ctx, gone, 7, make([]byte, 4))))
		var serr error
		for serr == nil { // a send may be on its way before the loss is known
			serr = tr.Send(ctx, gone, 8, make([]byte, 1000))
		}
		err = errors.Join(err, isLost(serr))
		for peer := range n {
			if peer != gone {
				err = errors.Join(err, send(ctx, tr, peer, 6, 0, 5000))
			}
		}
		for peer := range n {
			if peer != gone {
				err = errors.Join(err, receive(ctx, tr, peer, 6, 0, 5000))
			}
		}
		return err
	})
}

func testClose(t *testing.T, connect Connect) {
	ts := connect(t, 2)
	must(t, ts[:1], func(ctx context.Context, tr comm.Transport) error {
		var wg sync.WaitGroup
		errs := make([]error, 2)
		for from := range errs {
			wg.Go(func() { errs[from] = tr.Recv(ctx, from, 1, make([]byte, 1)) })
		}
		time.Sleep(2 * time.Millisecond)
		if err := tr.Close(); err != nil {
			return err
		}
		wg.Wait()
		errs = append(errs, tr.Send(ctx, 0, 1, nil), tr.Send(ctx, 1, 1, nil), tr.Recv(ctx, 0, 1, nil), tr.Recv(ctx, 1, 1, nil))
		for i, err := range errs {
			if !errors.Is(err, comm.ErrClosed) {
				return fmt.Errorf("operation %d on a closed transport: %v, want comm.ErrClosed", i, err)
			}
		}
		return tr.Close() // again is fine
	})
	closeAll(t, ts)
}
