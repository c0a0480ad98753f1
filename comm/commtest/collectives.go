package commtest

import (
	"context"
	"errors"
	"fmt"
	"math"
	"math/rand/v2"
	"slices"
	"testing"

	"moetor/comm"
)

// input is what a rank feeds to an operation; everyone can compute everyone's.
func input[T comm.Number](rank, n int, salt uint64) []T {
	rng := rand.New(rand.NewPCG(uint64(rank), salt))
	x := make([]T, n)
	for i := range x {
		// Sums of these depend on the order when T is a float, and fit when it is an integer.
		x[i] = T((rng.Float64() - 0.25) * float64(int64(1)<<rng.IntN(24)))
		if sizeof[T]() == 1 {
			x[i] = T(rng.IntN(30))
		}
	}
	return x
}

func sizeof[T comm.Number]() int {
	switch any(T(0)).(type) {
	case float64, int64:
		return 8
	case uint8:
		return 1
	}
	return 4
}

// same compares bits, so that -0 is not 0 and a NaN is itself.
func same[T comm.Number](got, want []T) error {
	if len(got) != len(want) {
		return fmt.Errorf("%d elements, want %d", len(got), len(want))
	}
	for i := range got {
		if bits(got[i]) != bits(want[i]) {
			return fmt.Errorf("element %d of %d is %v, want %v", i, len(got), got[i], want[i])
		}
	}
	return nil
}

func bits[T comm.Number](x T) uint64 {
	switch v := any(x).(type) {
	case float32:
		return uint64(math.Float32bits(v))
	case float64:
		return math.Float64bits(v)
	}
	return uint64(int64(x))
}

// sum adds columns in group order.
func sum[T comm.Number](parts [][]T) []T {
	out := slices.Clone(parts[0])
	for i := range out {
		for _, p := range parts[1:] {
			out[i] = out[i] + p[i]
		}
	}
	return out
}

// cut splits x by counts.
func cut[T any](x []T, counts []int) [][]T {
	var parts [][]T
	for _, c := range counts {
		parts = append(parts, x[:c])
		x = x[c:]
	}
	return parts
}

func total(counts []int) (n int) {
	for _, c := range counts {
		n += c
	}
	return n
}

// testCollectives compares every collective with the obvious loop for groups of 1 to 8 ranks, subgroups in an order of
// their own among them, over all types and over lengths around every internal limit.
func testCollectives(t *testing.T, connect Connect) {
	for n := 1; n <= 8; n++ {
		ts := connect(t, n)
		must(t, ts, func(ctx context.Context, tr comm.Transport) error {
			all := make([]int, n)
			var odd, even []int // and a group that some ranks are not in
			for r := range n {
				all[r] = (r*3 + 1) % n
				if n%3 == 0 {
					all[r] = n - 1 - r
				}
				if r%2 == 1 {
					odd = append([]int{r}, odd...)
				} else {
					even = append(even, r)
				}
			}
			half := even
			if tr.Rank()%2 == 1 {
				half = odd
			}
			whole, err := comm.NewGroup(tr, all, 1)
			if err != nil {
				return err
			}
			part, err := comm.NewGroup(tr, half, comm.TagPipeline-1)
			if err != nil {
				return err
			}
			for i, length := range []int{0, 1, 105, 1000, 5001} {
				salt := uint64(i)
				err := errors.Join(
					allCollectives[float32](ctx, whole, length, salt),
					allCollectives[uint8](ctx, part, length, salt), // groups take turns
					allCollectives[float64](ctx, whole, length/2, salt),
					allCollectives[int32](ctx, part, length, salt),
					allCollectives[int64](ctx, whole, length/3, salt))
				if err != nil {
					return err
				}
			}
			return nil
		})
		closeAll(t, ts)
	}
}

// testLongCollectives uses vectors of several chunks.
func testLongCollectives(t *testing.T, connect Connect) {
	ts := connect(t, 3)
	defer closeAll(t, ts)
	must(t, ts, func(ctx context.Context, tr comm.Transport) error {
		g, err := comm.NewGroup(tr, []int{2, 0, 1}, 1)
		if err != nil {
			return err
		}
		return allCollectives[float32](ctx, g, 800_003, 1)
	})
}

func allCollectives[T comm.Number](ctx context.Context, g *comm.Group, length int, salt uint64) error {
	n, me := g.Size(), g.Rank()
	name := func(op string, err error) error {
		if err != nil {
			return fmt.Errorf("group %v: %s of %d %T: %w", g.Ranks(), op, length, T(0), err)
		}
		return nil
	}
	vectors := func(length int, salt uint64) [][]T {
		parts := make([][]T, n)
		for j := range parts {
			parts[j] = input[T](j, length, salt)
		}
		return parts
	}

	// All-reduce.
	parts := vectors(length, salt)
	x := slices.Clone(parts[me])
	if err := comm.AllReduce(ctx, g, x, comm.Sum); err != nil {
		return name("sum", err)
	}
	if err := same(x, sum(parts)); err != nil {
		return name("sum", err)
	}
	x = slices.Clone(parts[me])
	if err := comm.AllReduce(ctx, g, x, comm.Max); err != nil {
		return name("max", err)
	}
	want := slices.Clone(parts[0])
	for i := range want {
		for _, p := range parts {
			want[i] = max(want[i], p[i])
		}
	}
	if err := same(x, want); err != nil {
		return name("max", err)
	}

	// Uneven counts: shared ones for reduce-scatter and all-gather, one of them zero.
	rng := rand.New(rand.NewPCG(salt, 99))
	counts := make([]int, n)
	for range n - 1 {
		counts[rng.IntN(n)] += length / n
	}
	counts[rng.IntN(n)] += length - total(counts)
	if rest := length - total(counts); rest != 0 {
		return fmt.Errorf("test is wrong: %d left", rest)
	}
	whole := sum(parts)
	dst := make([]T, counts[me])
	if err := comm.ReduceScatter(ctx, g, dst, slices.Clone(parts[me]), counts); err != nil {
		return name("reduce-scatter", err)
	}
	if err := same(dst, cut(whole, counts)[me]); err != nil {
		return name("reduce-scatter", err)
	}
	src := slices.Clone(parts[me])
	own := cut(src, counts)[me]
	if err := comm.ReduceScatter(ctx, g, own, src, counts); err != nil { // in place
		return name("reduce-scatter in place", err)
	}
	if err := same(own, dst); err != nil {
		return name("reduce-scatter in place", err)
	}
	gathered := make([]T, length)
	if err := comm.AllGather(ctx, g, gathered, dst, counts); err != nil {
		return name("all-gather", err)
	}
	if err := same(gathered, whole); err != nil {
		return name("all-gather", err)
	}
	clear(gathered)
	own = cut(gathered, counts)[me]
	copy(own, dst)
	if err := comm.AllGather(ctx, g, gathered, own, counts); err != nil { // in place
		return name("all-gather in place", err)
	}
	if err := same(gathered, whole); err != nil {
		return name("all-gather in place", err)
	}

	// All-to-all: a matrix of counts with zeros; every third time all go to one member.
	m := make([][]int, n)
	for i := range m {
		m[i] = make([]int, n)
		for j := range m[i] {
			switch {
			case salt%3 == 0 && j != n-1:
			case rng.IntN(3) > 0:
				m[i][j] = rng.IntN(2*length/n + 1)
			}
		}
	}
	recv := make([]int, n)
	var wanted []T
	for j := range n {
		recv[j] = m[j][me]
		wanted = append(wanted, cut(input[T](j, total(m[j]), salt+1), m[j])[me]...)
	}
	got := make([]T, total(recv))
	if err := comm.AllToAll(ctx, g, got, input[T](me, total(m[me]), salt+1), recv, m[me]); err != nil {
		return name("all-to-all", err)
	}
	if err := same(got, wanted); err != nil {
		return name("all-to-all", err)
	}

	// Broadcast from everyone, and what is not numbers.
	for root := range n {
		x := slices.Clone(parts[me])
		if err := comm.Broadcast(ctx, g, x, root); err != nil {
			return name("broadcast", err)
		}
		if err := same(x, parts[root]); err != nil {
			return name("broadcast", err)
		}
	}
	blob := func(j int) []byte { return input[uint8](j, length*(j%3), salt+2) }
	blobs, err := comm.GatherBytes(ctx, g, blob(me))
	if err != nil {
		return name("gather", err)
	}
	if len(blobs) != n {
		return name("gather", fmt.Errorf("%d blobs from %d members", len(blobs), n))
	}
	for j := range blobs {
		if err := same(blobs[j], blob(j)); err != nil {
			return name("gather", err)
		}
	}
	return name("barrier", g.Barrier(ctx))
}

// testMaxNaN checks that a NaN of any member reaches all, in short and long vectors.
func testMaxNaN(t *testing.T, connect Connect) {
	const n = 3
	ts := connect(t, n)
	defer closeAll(t, ts)
	must(t, ts, func(ctx context.Context, tr comm.Transport) error {
		g, err := comm.NewGroup(tr, []int{0, 1, 2}, 1)
		if err != nil {
			return err
		}
		for _, length := range []int{n, 5000} {
			x := make([]float32, length)
			for i := range x {
				x[i] = float32(-tr.Rank() - 1)
			}
			x[tr.Rank()] = float32(math.NaN())
			if err := comm.AllReduce(ctx, g, x, comm.Max); err != nil {
				return err
			}
			for i, v := range x {
				if i < n && v == v || i >= n && v != -1 {
					return fmt.Errorf("max of %d: element %d is %v", length, i, v)
				}
			}
		}
		return nil
	})
}
