// Package shard reduces gradients over the ranks that hold the same weights and shards the optimizer's work among them:
// ZeRO stage 1 (Rajbhandari et al. 2020, arXiv 1910.02054, §5.1).
//
// Every parameter is split by rows over its replicas: member i of n owns rows [R*i/n, R*(i+1)/n) of each of its R rows.
// Replicas of a dense parameter are the data ranks of its pipeline stage, those of an expert the ranks with the same expert
// coordinate. A step is
//
//	norm, err := s.Reduce(ctx, 1/weight) // sums of gradients, for the owned rows; the global norm
//	...                                  // update Value from Grad of every slice in s.Slices()
//	err = s.Publish(ctx)                 // the new rows to all replicas
//
// Splitting single parameters, not the block of all of them, makes slices and sums independent of how layers are spread over
// a pipeline: its bits are those of the unsplit model.
package shard

import (
	"context"
	"fmt"
	"math"

	"moetor/comm"
	"moetor/internal/kernel"
	"moetor/internal/tensor"
)

// A Slice is a range of rows of a parameter that this rank owns: it updates them, holds their optimizer state and writes
// them to checkpoints. Value and Grad are views into the parameter.
type Slice struct {
	Param       *tensor.Param
	Row0, Row1  int
	Value, Grad []float32
}

// A Sync is one rank's side of the reduction. All ranks of the run make one together and call its methods in step.
type Sync struct {
	world, embed  *comm.Group
	dense, expert set
	slices        []Slice

	tied   tiedRole
	first  *tensor.Param // the embedding, on the rank that owns it
	copied *tensor.Param // its tied copy, on the rank that has it
	arrive []float32     // where the gradient of the copy arrives, if from another rank

	mine   []float64 // sum of squares per slice of this rank
	sums   []float64 // of all ranks, by rank and then in the order of their slices
	counts []int     // slices per rank
	order  []owned   // all slices of the model in canonical order
}

// owned is a slice of some rank: sum is its index in Sync.sums.
type owned struct {
	name       string
	row0, row1 int
	rank, sum  int
}

// tiedRole is what this rank has to do for a tied embedding.
type tiedRole uint8

const (
	tiedNone  tiedRole = iota
	tiedLocal          // holds the embedding and the copy
	tiedFirst          // holds the embedding, the last stage has the copy
	tiedLast           // holds the copy
)

// Positions in the embed group.
const (
	embedFirst = 0
	embedLast  = 1
)

// New agrees with all ranks on who owns what. world are all ranks, data the replicas of this rank's dense parameters, replica
// those of its experts, embed the first and last rank of its pipeline (nil if it has one stage or stands between them).
// params are the rank's parameters, the tied copy of the embedding among them. Replicas must have equal parameters, and
// every parameter of the model must be owned exactly once: otherwise all ranks get the same error, by name.
func New(ctx context.Context, world, data, replica, embed *comm.Group, params []*tensor.Param) (*Sync, error) {
	s := &Sync{world: world, embed: embed}
	names := map[string]*tensor.Param{}
	var dense, experts []*tensor.Param
	var problem string
	for _, p := range params {
		switch {
		case len(p.Shape) == 0 || p.Len() != len(p.Value) || p.Len() != len(p.Grad):
			problem = fmt.Sprintf("%v has %d values and %d gradients", p, len(p.Value), len(p.Grad))
		case p.Tied && s.copied != nil:
			problem = fmt.Sprintf("%v is a second tied copy, next to %v", p, s.copied)
		case p.Tied:
			s.copied = p
		case names[p.Name] != nil:
			problem = fmt.Sprintf("%v is there twice", p)
		case p.Expert:
			names[p.Name] = p
			experts = append(experts, p)
		default:
			names[p.Name] = p
			dense = append(dense, p)
		}
	}
	if problem == "" {
		s.dense, s.expert = newSet(data, dense), newSet(replica, experts)
		s.slices = ownedSlices(params, data, replica)
	}
	all, err := s.introduce(ctx, problem, data, replica)
	if err != nil {
		return nil, err
	}
	s.tieUp(names, all)
	s.mine = make([]float64, len(s.slices))
	s.sums = make([]float64, len(s.order))
	return s, nil
}

// ownedSlices lists the rank's slices in the order of params.
func ownedSlices(params []*tensor.Param, data, replica *comm.Group) []Slice {
	var out []Slice
	for _, p := range params {
		if p.Tied {
			continue
		}
		g := data
		if p.Expert {
			g = replica
		}
		lo, hi := rowsOf(p, g.Rank(), g.Size())
		if lo == hi {
			continue
		}
		a, b := lo*p.RowLen(), hi*p.RowLen()
		out = append(out, Slice{Param: p, Row0: lo, Row1: hi, Value: p.Value[a:b:b], Grad: p.Grad[a:b:b]})
	}
	return out
}

// rowsOf is the range of rows that member i of n owns.
func rowsOf(p *tensor.Param, i, n int) (lo, hi int) { return p.Rows() * i / n, p.Rows() * (i + 1) / n }

// Slices lists the rows that this rank owns, in the order of the parameters; a parameter with fewer rows than replicas has
// none on some ranks, a tied copy has none anywhere. The caller must not change it.
func (s *Sync) Slices() []Slice { return s.slices }

// Reduce sums the gradients of all replicas, in rank order, multiplies them by scale and leaves them in Grad of the owned
// rows; the gradient of a tied copy is added to that of the embedding before. Other rows of Grad keep what the rank had
// accumulated. It returns the Euclidean norm of the whole model's scaled gradient, each parameter counted once: the same
// number on every rank, NaN or Inf if any gradient is not finite (see NonFinite and Origin).
func (s *Sync) Reduce(ctx context.Context, scale float64) (norm float64, err error) {
	if err := s.addTied(ctx); err != nil {
		return 0, err
	}
	if err := s.dense.reduce(ctx); err != nil {
		return 0, fmt.Errorf("reduce gradients: %w", err)
	}
	if err := s.expert.reduce(ctx); err != nil {
		return 0, fmt.Errorf("reduce gradients of experts: %w", err)
	}
	for i, sl := range s.slices {
		kernel.Scale(sl.Grad, float32(scale))
		s.mine[i] = kernel.SumSquares(sl.Grad)
	}
	if err := comm.AllGather(ctx, s.world, s.sums, s.mine, s.counts); err != nil {
		return 0, fmt.Errorf("gradient norm: %w", err)
	}
	// Canonical order: by name and row, whatever rank owns the slice, so that a pipeline split does not change a bit.
	total := 0.0
	for _, o := range s.order {
		total += s.sums[o.sum]
	}
	return math.Sqrt(total), nil
}

// addTied adds the gradient of the tied copy to the embedding's, in this order wherever the copy is.
func (s *Sync) addTied(ctx context.Context) error {
	switch s.tied {
	case tiedLocal:
		kernel.Add(s.first.Grad, s.copied.Grad)
	case tiedFirst:
		if err := comm.Broadcast(ctx, s.embed, s.arrive, embedLast); err != nil {
			return fmt.Errorf("gradient of the tied embedding: %w", err)
		}
		kernel.Add(s.first.Grad, s.arrive)
	case tiedLast:
		if err := comm.Broadcast(ctx, s.embed, s.copied.Grad, embedLast); err != nil {
			return fmt.Errorf("gradient of the tied embedding: %w", err)
		}
	}
	return nil
}

// Publish gives the owned rows' values to all replicas, and the embedding to its tied copy.
func (s *Sync) Publish(ctx context.Context) error {
	if err := s.dense.publish(ctx); err != nil {
		return fmt.Errorf("publish weights: %w", err)
	}
	if err := s.expert.publish(ctx); err != nil {
		return fmt.Errorf("publish weights of experts: %w", err)
	}
	var err error
	switch s.tied {
	case tiedLocal:
		copy(s.copied.Value, s.first.Value)
	case tiedFirst:
		err = comm.Broadcast(ctx, s.embed, s.first.Value, embedFirst)
	case tiedLast:
		err = comm.Broadcast(ctx, s.embed, s.copied.Value, embedFirst)
	}
	if err != nil {
		return fmt.Errorf("publish the tied embedding: %w", err)
	}
	return nil
}

// Traffic is how many bytes this rank sends to others in one Reduce and in one Publish (without sums of squares).
func (s *Sync) Traffic() (reduce, publish int64) {
	for _, c := range []*set{&s.dense, &s.expert} {
		own, n := c.counts[c.g.Rank()], 0
		for _, k := range c.counts {
			n += k
		}
		reduce += 4 * int64(n-own)
		publish += 4 * int64(own) * int64(c.g.Size()-1)
	}
	switch s.tied {
	case tiedFirst:
		publish += 4 * int64(s.first.Len())
	case tiedLast:
		reduce += 4 * int64(s.copied.Len())
	}
	return reduce, publish
}

// A set is the parameters that share a group of replicas.
type set struct {
	g      *comm.Group
	params []*tensor.Param
	counts []int     // elements that each member owns
	full   []float32 // all rows of all parameters, by owner; nil without other replicas
	own    []float32 // the reduced rows of this member
}

func newSet(g *comm.Group, params []*tensor.Param) set {
	c := set{g: g, params: params, counts: make([]int, g.Size())}
	total := 0
	for i := range c.counts {
		for _, p := range params {
			lo, hi := rowsOf(p, i, g.Size())
			c.counts[i] += (hi - lo) * p.RowLen()
		}
		total += c.counts[i]
	}
	if g.Size() > 1 {
		c.full, c.own = make([]float32, total), make([]float32, c.counts[g.Rank()])
	}
	return c
}

// reduce leaves the sums over replicas in Grad of the owned rows. full keeps this rank's own contribution until publish.
func (c *set) reduce(ctx context.Context) error {
	if c.full == nil || len(c.full) == 0 {
		return nil
	}
	at := 0
	for i := range c.counts {
		for _, p := range c.params {
			at += copy(c.full[at:], c.rows(p, p.Grad, i))
		}
	}
	if err := comm.ReduceScatter(ctx, c.g, c.own, c.full, c.counts); err != nil {
		return err
	}
	at = 0
	for _, p := range c.params {
		at += copy(c.rows(p, p.Grad, c.g.Rank()), c.own[at:])
	}
	return nil
}

// publish gathers the values of all members' rows.
func (c *set) publish(ctx context.Context) error {
	if c.full == nil || len(c.full) == 0 {
		return nil
	}
	me, at := c.g.Rank(), 0
	for _, k := range c.counts[:me] {
		at += k
	}
	mine := c.full[at : at+c.counts[me]]
	at = 0
	for _, p := range c.params {
		at += copy(mine[at:], c.rows(p, p.Value, me))
	}
	if err := comm.AllGather(ctx, c.g, c.full, mine, c.counts); err != nil {
		return err
	}
	at = 0
	for i := range c.counts {
		if i == me {
			at += c.counts[i]
			continue
		}
		for _, p := range c.params {
			at += copy(c.rows(p, p.Value, i), c.full[at:])
		}
	}
	return nil
}

// rows is the part of x, which is p's values or gradients, that member i owns.
func (c *set) rows(p *tensor.Param, x []float32, i int) []float32 {
	lo, hi := rowsOf(p, i, c.g.Size())
	return x[lo*p.RowLen() : hi*p.RowLen()]
}
