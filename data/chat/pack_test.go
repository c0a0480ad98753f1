package chat

import (
	"math/rand/v2"
	"reflect"
	"slices"
	"testing"

	"moetor/data"
)

// rowsOf lists the items of each row.
func rowsOf(p packing) [][]int32 {
	var out [][]int32
	for r := range p.rows() {
		out = append(out, slices.Clone(p.row(int64(r))))
	}
	return out
}

func TestPackSmall(t *testing.T) {
	lengths := []int32{3, 1, 2, 3, 1}
	for how, want := range map[string][][]int32{
		PackSequential: {{0}, {1, 2}, {3}, {4}},
		PackNone:       {{0}, {1}, {2}, {3}, {4}},
	} {
		p := pack(how, lengths, 3, 0)
		if got := rowsOf(p); !reflect.DeepEqual(got, want) {
			t.Errorf("%s: %v, want %v", how, got, want)
		}
	}
	// First-fit decreasing: both threes fill a row, then 2+1, then the other 1.
	p := pack(PackFFD, lengths, 3, 5)
	var sums []int32
	for _, row := range rowsOf(p) {
		sum := int32(0)
		for _, i := range row {
			sum += lengths[i]
		}
		sums = append(sums, sum)
	}
	if !slices.Equal(sums, []int32{3, 3, 3, 1}) {
		t.Errorf("ffd: rows of %v", sums)
	}
	for _, how := range []string{PackFFD, PackSequential, PackNone} {
		if p := pack(how, nil, 3, 0); p.rows() != 0 {
			t.Errorf("%s: %d rows of nothing", how, p.rows())
		}
		if p := pack(how, []int32{3}, 3, 0); !reflect.DeepEqual(rowsOf(p), [][]int32{{0}}) {
			t.Errorf("%s: %v of one item", how, rowsOf(p))
		}
	}
}

// firstFit is packFFD's specification, given the order of items.
func firstFit(order, lengths []int32, room int32) [][]int32 {
	var rows [][]int32
	var free []int32
next:
	for _, i := range order {
		for r := range rows {
			if free[r] >= lengths[i] {
				rows[r] = append(rows[r], i)
				free[r] -= lengths[i]
				continue next
			}
		}
		rows = append(rows, []int32{i})
		free = append(free, room-lengths[i])
	}
	return rows
}

func TestPackAgainstFirstFit(t *testing.T) {
	rng := rand.New(rand.NewPCG(3, 4))
	for range 300 {
		room := 1 + rng.Int32N(40)
		lengths := make([]int32, 1+rng.IntN(60))
		for i := range lengths {
			lengths[i] = 1 + rng.Int32N(room)
		}
		seed := rng.Uint64()
		order := make([]int32, len(lengths))
		for i := range order {
			order[i] = int32(data.Permuted(int64(i), int64(len(order)), seed))
		}
		slices.SortStableFunc(order, func(a, b int32) int { return int(lengths[b] - lengths[a]) })
		want := firstFit(order, lengths, room)
		if got := rowsOf(pack(PackFFD, lengths, room, seed)); !reflect.DeepEqual(got, want) {
			t.Fatalf("lengths %v room %d seed %d: %v, want %v", lengths, room, seed, got, want)
		}
		sequential := pack(PackSequential, lengths, room, seed)
		at := int32(0)
		for _, row := range rowsOf(sequential) {
			sum := int32(0)
			for _, i := range row {
				if i != at {
					t.Fatalf("sequential: item %d follows %d", i, at-1)
				}
				at++
				sum += lengths[i]
			}
			if sum > room || int(at) < len(lengths) && sum+lengths[at] <= room {
				t.Fatalf("sequential: a row of %d of %d before an item of %d", sum, room, lengths[at])
			}
		}
		if int(at) != len(lengths) {
			t.Fatalf("sequential: %d of %d items", at, len(lengths))
		}
	}
}

// pitfalls P26: nothing is lost at any room, and a room of 2^n+1 is filled as well as one of 2^n.
func TestPackFillsOddRooms(t *testing.T) {
	rng := rand.New(rand.NewPCG(5, 6))
	lengths := make([]int32, 3000)
	sum := int64(0)
	for i := range lengths {
		lengths[i] = 1 + rng.Int32N(4000)
		sum += int64(lengths[i])
	}
	for _, room := range []int32{4095, 4096, 4097, 8191, 8192, 8193} {
		p := pack(PackFFD, lengths, room, 1)
		seen := make([]int, len(lengths))
		for _, row := range rowsOf(p) {
			used := int32(0)
			for _, i := range row {
				seen[i]++
				used += lengths[i]
			}
			if used > room {
				t.Fatalf("room %d: a row of %d", room, used)
			}
		}
		if slices.ContainsFunc(seen, func(n int) bool { return n != 1 }) {
			t.Fatalf("room %d: not every item is in one row", room)
		}
		if fill := float64(sum) / float64(int64(p.rows())*int64(room)); fill < 0.97 {
			t.Errorf("room %d: %d rows filled to %.3f", room, p.rows(), fill)
		}
	}
	same := make([]int32, 100) // two of 4096+1 fill a row of 8192+2
	for i := range same {
		same[i] = 4097
	}
	if p := pack(PackFFD, same, 8194, 1); p.rows() != 50 {
		t.Errorf("%d rows of pairs", p.rows())
	}
}

func TestPackIsSeeded(t *testing.T) {
	lengths := slices.Repeat([]int32{2, 3, 4, 5}, 50)
	a, b, c := pack(PackFFD, lengths, 10, 1), pack(PackFFD, lengths, 10, 1), pack(PackFFD, lengths, 10, 2)
	if !reflect.DeepEqual(a, b) {
		t.Error("one seed packs in two ways")
	}
	if reflect.DeepEqual(a.items, c.items) {
		t.Error("two seeds pack alike")
	}
}
