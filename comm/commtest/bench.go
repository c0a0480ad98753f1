package commtest

import (
	"context"
	"testing"

	"moetor/comm"
)

// Bench measures a transport: the round trip of a small message, and collectives of four ranks.
func Bench(b *testing.B, connect func(b *testing.B, n int) []comm.Transport) {
	b.Run("PingPong", func(b *testing.B) {
		ts := connect(b, 2)
		b.ReportAllocs()
		lockstep(b, ts, func(ctx context.Context, tr comm.Transport) func() error {
			p := make([]byte, 64)
			return func() error {
				if tr.Rank() == 0 {
					if err := tr.Send(ctx, 1, 1, p); err != nil {
						return err
					}
					return tr.Recv(ctx, 1, 1, p)
				}
				if err := tr.Recv(ctx, 0, 1, p); err != nil {
					return err
				}
				return tr.Send(ctx, 0, 1, p)
			}
		})
	})
	for _, c := range []struct {
		name  string
		bytes int
	}{{"AllReduce8B", 8}, {"AllReduce4KiB", 4 << 10}, {"AllReduce1MiB", 1 << 20}} {
		b.Run(c.name, func(b *testing.B) {
			ts := connect(b, 4)
			b.ReportAllocs()
			b.SetBytes(int64(c.bytes))
			lockstep(b, ts, func(ctx context.Context, tr comm.Transport) func() error {
				g, err := world(tr)
				x := make([]float32, c.bytes/4)
				return func() error {
					if err != nil {
						return err
					}
					return comm.AllReduce(ctx, g, x, comm.Sum)
				}
			})
		})
	}
	b.Run("AllToAll256KiB", func(b *testing.B) {
		ts := connect(b, 4)
		b.ReportAllocs()
		b.SetBytes(256 << 10)
		lockstep(b, ts, func(ctx context.Context, tr comm.Transport) func() error {
			g, err := world(tr)
			x, y := make([]float32, 64<<10), make([]float32, 64<<10)
			counts := []int{16 << 10, 16 << 10, 16 << 10, 16 << 10}
			return func() error {
				if err != nil {
					return err
				}
				return comm.AllToAll(ctx, g, y, x, counts, counts)
			}
		})
	})
}

// lockstep runs b.N steps on every rank.
func lockstep(b *testing.B, ts []comm.Transport, setup func(ctx context.Context, tr comm.Transport) func() error) {
	ctx, cancel := context.WithCancel(b.Context())
	defer cancel()
	errs := make(chan error, len(ts))
	b.ResetTimer()
	for _, tr := range ts {
		step := setup(ctx, tr)
		go func() {
			for range b.N {
				if err := step(); err != nil {
					errs <- err
					return
				}
			}
			errs <- nil
		}()
	}
	for range ts {
		if err := <-errs; err != nil {
			b.Error(err)
		}
	}
	b.StopTimer()
	for _, tr := range ts {
		if err := tr.Close(); err != nil {
			b.Error(err)
		}
	}
}
