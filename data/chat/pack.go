package chat

import (
	"math/bits"
	"slices"

	"moetor/data"
)

// A packing assigns items to rows.
type packing struct {
	items []int32 // row after row, in order
	ends  []int32 // end of each row in items
}

func (p *packing) rows() int { return len(p.ends) }

// row returns the items of row r.
func (p *packing) row(r int64) []int32 {
	if r == 0 {
		return p.items[:p.ends[0]]
	}
	return p.items[p.ends[r-1]:p.ends[r]]
}

// pack assigns items of these lengths, each 1 to room, to rows that hold room. how is a value of Config.Pack.
func pack(how string, lengths []int32, room int32, seed uint64) packing {
	switch how {
	case PackSequential:
		return packSequential(lengths, room)
	case PackNone:
		p := packing{items: make([]int32, len(lengths)), ends: make([]int32, len(lengths))}
		for i := range lengths {
			p.items[i], p.ends[i] = int32(i), int32(i+1)
		}
		return p
	}
	return packFFD(lengths, room, seed)
}

func packSequential(lengths []int32, room int32) packing {
	p := packing{items: make([]int32, len(lengths))}
	used := int32(0)
	for i, n := range lengths {
		if i > 0 && n > room-used {
			p.ends = append(p.ends, int32(i))
			used = 0
		}
		p.items[i] = int32(i)
		used += n
	}
	if len(lengths) > 0 {
		p.ends = append(p.ends, int32(len(lengths)))
	}
	return p
}

// packFFD puts each item, the longest first, into the first row with room for it. It needs at most 11/9 of the fewest rows
// possible, and one (Dósa, 2007). Items of one length come in an order that seed chooses, so that neighbours in a file do not
// always share a row.
func packFFD(lengths []int32, room int32, seed uint64) packing {
	n := len(lengths)
	if n == 0 {
		return packing{}
	}
	order := make([]int32, n)
	for i := range order {
		order[i] = int32(data.Permuted(int64(i), int64(n), seed))
	}
	slices.SortStableFunc(order, func(a, b int32) int { return int(lengths[b]) - int(lengths[a]) })

	// free is a heap-shaped tree: leaf width+r is the room left in row r, an inner node the largest below it.
	width := 1 << bits.Len(uint(n-1))
	free := make([]int32, 2*width)
	for i := range free {
		free[i] = room
	}
	rowOf := make([]int32, n) // by place in order
	counts := make([]int32, 0, n)
	for k, item := range order {
		node := 1
		for node < width {
			if node *= 2; free[node] < lengths[item] {
				node++
			}
		}
		r := node - width
		if r == len(counts) {
			counts = append(counts, 0)
		}
		rowOf[k] = int32(r)
		counts[r]++
		free[node] -= lengths[item]
		for node /= 2; node > 0; node /= 2 {
			free[node] = max(free[2*node], free[2*node+1])
		}
	}

	p := packing{items: make([]int32, n), ends: counts}
	next := make([]int32, len(counts))
	sum := int32(0)
	for r, c := range counts {
		next[r] = sum
		sum += c
		p.ends[r] = sum
	}
	for k, item := range order {
		r := rowOf[k]
		p.items[next[r]] = item
		next[r]++
	}
	return p
}
