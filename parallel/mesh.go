// Package parallel lays the ranks of a run out as a mesh: world = pipeline x data, with the experts of a layer spread over
// Expert consecutive data ranks. It says who talks to whom along which axis; what they say is up to parallel/pipeline,
// parallel/expert and parallel/shard.
package parallel

import (
	"errors"
	"fmt"
)

// A Mesh maps ranks to coordinates. Rank = p*Data + d for pipeline stage rank p and data coordinate d; the expert
// coordinate of a rank is e = d mod Expert. So the ranks of one expert group are consecutive, stand in one pipeline stage
// and run one list of actions, and their exchanges meet in the same order.
type Mesh struct {
	Pipeline, Data, Expert int
	RanksPerNode           int // 0: all ranks share a node
}

// NewMesh divides world ranks. Its errors name the settings (parallel.pipeline, parallel.expert, parallel.ranks_per_node),
// one line for each that is wrong.
func NewMesh(world, pipeline, expert, ranksPerNode int) (Mesh, error) {
	var errs []error
	bad := func(format string, args ...any) { errs = append(errs, fmt.Errorf(format, args...)) }
	if world < 1 {
		bad("%d ranks, need at least 1", world)
	}
	if expert < 1 {
		bad("parallel.expert=%d is less than 1", expert)
	}
	if pipeline < 1 {
		bad("parallel.pipeline=%d is less than 1", pipeline)
	}
	if ranksPerNode < 0 {
		bad("parallel.ranks_per_node=%d is less than 0", ranksPerNode)
	}
	if len(errs) > 0 {
		return Mesh{}, errors.Join(errs...)
	}
	m := Mesh{pipeline, world / pipeline, expert, ranksPerNode}
	switch {
	case world%pipeline != 0:
		bad("parallel.pipeline=%d does not divide %s", pipeline, ranks(world))
	case m.Data%expert != 0:
		bad("parallel.expert=%d does not divide data=%d (ranks %d / pipeline %d)", expert, m.Data, world, pipeline)
	}
	if ranksPerNode > 0 && world%ranksPerNode != 0 {
		bad("parallel.ranks_per_node=%d does not divide %s", ranksPerNode, ranks(world))
	}
	if len(errs) > 0 {
		return Mesh{}, errors.Join(errs...)
	}
	return m, nil
}

func ranks(n int) string {
	if n == 1 {
		return "1 rank"
	}
	return fmt.Sprintf("%d ranks", n)
}

// CheckExperts says whether the experts of a layer spread evenly over an expert group.
func (m Mesh) CheckExperts(experts int) error {
	if experts%m.Expert != 0 {
		return fmt.Errorf("parallel.expert=%d does not divide model.moe.experts=%d", m.Expert, experts)
	}
	return nil
}

// World is the number of ranks.
func (m Mesh) World() int { return m.Pipeline * m.Data }

// Coord returns the pipeline, data and expert coordinates of a rank.
func (m Mesh) Coord(rank int) (p, d, e int) {
	p, d = rank/m.Data, rank%m.Data
	return p, d, d % m.Expert
}

// Rank is the inverse of Coord.
func (m Mesh) Rank(p, d int) int { return p*m.Data + d }

// Node is the node of a rank.
func (m Mesh) Node(rank int) int {
	if m.RanksPerNode == 0 {
		return 0
	}
	return rank / m.RanksPerNode
}

// DataRanks are the ranks of pipeline coordinate p: they hold the same dense weights.
func (m Mesh) DataRanks(p int) []int { return m.along(m.Data, func(i int) int { return m.Rank(p, i) }) }

// ExpertRanks are the ranks over which the experts of rank's layers are spread, rank among them, by expert coordinate.
func (m Mesh) ExpertRanks(rank int) []int {
	p, d, e := m.Coord(rank)
	return m.along(m.Expert, func(i int) int { return m.Rank(p, d-e+i) })
}

// ReplicaRanks are the ranks that hold the same experts as rank, itself among them.
func (m Mesh) ReplicaRanks(rank int) []int {
	p, _, e := m.Coord(rank)
	return m.along(m.Data/m.Expert, func(i int) int { return m.Rank(p, i*m.Expert+e) })
}

// PipelineRanks are the ranks that pass the micro-batches of data coordinate d on, in the order of the pipeline.
func (m Mesh) PipelineRanks(d int) []int {
	return m.along(m.Pipeline, func(i int) int { return m.Rank(i, d) })
}

// EmbedRanks are the first and the last rank of the pipeline of data coordinate d, which hold the two copies of a tied
// embedding; they are one rank without a pipeline.
func (m Mesh) EmbedRanks(d int) []int {
	if m.Pipeline == 1 {
		return []int{m.Rank(0, d)}
	}
	return []int{m.Rank(0, d), m.Rank(m.Pipeline-1, d)}
}

func (m Mesh) along(n int, at func(int) int) []int {
	out := make([]int, n)
	for i := range out {
		out[i] = at(i)
	}
	return out
}

// String prints the mesh as the documentation writes it: pipeline x data, expert.
func (m Mesh) String() string { return fmt.Sprintf("%dx%d,%d", m.Pipeline, m.Data, m.Expert) }
