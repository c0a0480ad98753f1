package shard

import (
	"cmp"
	"context"
	"encoding/json"
	"fmt"
	"math"

	"moetor/comm"
	"moetor/internal/kernel"
	"moetor/internal/tensor"
)

// NonFinite returns, after a Reduce whose norm is not finite, the first parameter in canonical order whose reduced gradient
// has a NaN or Inf, and the world rank that owns the slice: the same on every rank, without talking. name is empty if all
// gradients were finite.
func (s *Sync) NonFinite() (name string, rank int) {
	for _, o := range s.order {
		if notFinite(s.sums[o.sum]) {
			return o.name, o.rank
		}
	}
	return "", 0
}

// An Origin is where gradients stopped being finite: the parameter, and the lowest world rank that contributed the NaN or Inf.
type Origin struct {
	Name string `json:",omitempty"`
	Rank int
}

// Origin finds, after a Reduce whose norm is not finite and before Publish, the rank that the NaN or Inf came from, which need
// not be the one that owns the slice: all ranks call it together, look at what each had accumulated before the reduction, and
// get the same answer. The parameter is the first by name on any rank. If every contribution was finite and only their
// sum was not, it is what NonFinite returns.
func (s *Sync) Origin(ctx context.Context) (Origin, error) {
	mine := Origin{Rank: s.world.Ranks()[s.world.Rank()], Name: s.firstBad()}
	blob, err := json.Marshal(mine)
	if err != nil {
		return Origin{}, fmt.Errorf("origin of a gradient that is not finite: %w", err)
	}
	blobs, err := comm.GatherBytes(ctx, s.world, blob)
	if err != nil {
		return Origin{}, fmt.Errorf("origin of a gradient that is not finite: %w", err)
	}
	var best Origin
	for i, b := range blobs {
		var o Origin
		if err := json.Unmarshal(b, &o); err != nil {
			return Origin{}, fmt.Errorf("origin of a gradient that is not finite: rank %d: %w", s.world.Ranks()[i], err)
		}
		if o.Name != "" && (best.Name == "" || cmp.Or(cmp.Compare(o.Name, best.Name), cmp.Compare(o.Rank, best.Rank)) < 0) {
			best = o
		}
	}
	if best.Name == "" {
		best.Name, best.Rank = s.NonFinite()
	}
	return best, nil
}

// firstBad is the first parameter by name to which this rank contributed a NaN or Inf.
func (s *Sync) firstBad() string {
	first := ""
	see := func(p *tensor.Param, x []float32) {
		if (first == "" || p.Name < first) && notFinite(kernel.SumSquares(x)) {
			first = p.Name
		}
	}
	for _, c := range []*set{&s.dense, &s.expert} {
		if c.full == nil { // no other replica: Grad is this rank's own, scaled
			for _, p := range c.params {
				see(p, s.contribution(p, p.Grad))
			}
			continue
		}
		at := 0
		for i := range c.counts {
			for _, p := range c.params {
				n := len(c.rows(p, p.Grad, i))
				see(p, s.contribution(p, c.full[at:at+n]))
				at += n
			}
		}
	}
	if s.copied != nil {
		see(s.copied, s.copied.Grad)
	}
	return first
}

// contribution is x, unless it is the embedding's gradient and a NaN or Inf came with that of the tied copy from another rank.
func (s *Sync) contribution(p *tensor.Param, x []float32) []float32 {
	if p == s.first && s.tied == tiedFirst && notFinite(kernel.SumSquares(s.arrive)) {
		return nil
	}
	return x
}

// notFinite: the squares of finite float32 numbers cannot overflow a float64 sum.
func notFinite(x float64) bool { return math.IsNaN(x) || math.IsInf(x, 0) }
