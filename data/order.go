package data

import (
	"math"
	"math/bits"
	"slices"
)

// shuffled returns the number that stands at place i of a permutation of 0..n-1 chosen by k, 0 <= i < n: constant time and
// no memory, so any rank may ask for any place. It is a balanced Feistel network over the next even number of bits, walked
// until it lands below n (Black and Rogaway, Ciphers with Arbitrary Finite Domains, 2002, section 4).
func shuffled(i, n int64, k uint64) int64 {
	const rounds = 8
	half := max(bits.Len64(uint64(n-1))+1, 8) / 2 // at least 256 places: a network of 2 bits reaches few permutations
	mask := uint64(1)<<half - 1
	for x := uint64(i); ; {
		l, r := x>>half, x&mask
		for round := range uint64(rounds) {
			l, r = r, l^(mix(r+mix(k+round))&mask)
		}
		if x = l<<half | r; x < uint64(n) {
			return int64(x)
		}
	}
}

// mix is the finaliser of SplitMix64 (Steele, Lea and Flood, 2014) after one step of its counter.
func mix(x uint64) uint64 {
	x += 0x9e3779b97f4a7c15
	x = (x ^ x>>30) * 0xbf58476d1ce4e5b9
	x = (x ^ x>>27) * 0x94d049bb133111eb
	return x ^ x>>31
}

// orderKey chooses the permutation of an epoch.
func orderKey(seed, source uint64, epoch int64) uint64 {
	return mix(mix(mix(seed)+source) + uint64(epoch))
}

const (
	// cycleLen is after how many samples the interleaving of weighted sources repeats. Weights in ten-thousandths, thirds
	// and quarters come out exactly, others within 1/60000.
	cycleLen   = 60000
	maxSources = 1000
)

// A cycle interleaves sources by weight: place g of the global sequence belongs to source who[g%cycleLen].
type cycle struct {
	who   []uint16
	rank  []uint16 // how many places before this one in the cycle have the same source
	count []int64  // places of each source per cycle, at least 1
}

// newCycle gives each place to the source that is furthest behind its share, the first of equals.
func newCycle(weights []float64) cycle {
	c := cycle{make([]uint16, cycleLen), make([]uint16, cycleLen), apportion(weights)}
	given := make([]int64, len(weights))
	for g := range c.who {
		best, behind := 0, int64(math.MinInt64)
		for s, n := range c.count {
			if d := n*int64(g+1) - given[s]*cycleLen; d > behind {
				best, behind = s, d
			}
		}
		c.who[g], c.rank[g] = uint16(best), uint16(given[best])
		given[best]++
	}
	return c
}

// apportion splits cycleLen by weight with the largest-remainder method; every source gets one at least.
func apportion(weights []float64) []int64 {
	largest := slices.Max(weights) // dividing by it first keeps huge weights finite
	sum := 0.0
	for _, w := range weights {
		sum += w / largest
	}
	count := make([]int64, len(weights))
	rest := make([]float64, len(weights))
	left := int64(cycleLen)
	for s, w := range weights {
		exact := w / largest / sum * cycleLen
		count[s] = int64(exact)
		rest[s] = exact - float64(count[s])
		if count[s] == 0 {
			count[s], rest[s] = 1, 0
		}
		left -= count[s]
	}
	for ; left > 0; left-- {
		s := 0
		for i := range rest {
			if rest[i] > rest[s] {
				s = i
			}
		}
		count[s]++
		rest[s]--
	}
	for ; left < 0; left++ { // the sources raised to one
		s := 0
		for i := range count {
			if count[i] > count[s] {
				s = i
			}
		}
		count[s]--
	}
	return count
}

// at returns the source at place g of the global sequence and how many places it had before.
func (c *cycle) at(g int64) (source int, before int64) {
	i := g % cycleLen
	source = int(c.who[i])
	return source, g/cycleLen*c.count[source] + int64(c.rank[i])
}
