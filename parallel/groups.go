package parallel

import (
	"fmt"
	"time"

	"moetor/comm"
)

// Tags of the groups of a mesh. Groups along one axis share a tag: they share no members.
const (
	tagWorld comm.Tag = 1 + iota
	tagData
	tagExpert
	tagReplica
	tagPipeline
	tagEmbed
)

// A GroupSet holds the groups that one rank is a member of.
type GroupSet struct {
	World    *comm.Group // all ranks
	Data     *comm.Group // DataRanks of its pipeline coordinate
	Expert   *comm.Group // its ExpertRanks
	Replica  *comm.Group // its ReplicaRanks
	Pipeline *comm.Group // PipelineRanks of its data coordinate
	Embed    *comm.Group // EmbedRanks of its data coordinate; nil without a pipeline and on ranks between first and last
}

// Groups makes the groups of t's rank in mesh m.
func Groups(t comm.Transport, m Mesh) (*GroupSet, error) {
	if t.Size() != m.World() {
		return nil, fmt.Errorf("mesh %v has %d ranks, the transport connects %d", m, m.World(), t.Size())
	}
	rank := t.Rank()
	p, d, _ := m.Coord(rank)
	s := &GroupSet{}
	for _, g := range []struct {
		to    **comm.Group
		name  string
		ranks []int
		tag   comm.Tag
	}{
		{&s.World, "world", m.along(m.World(), func(i int) int { return i }), tagWorld},
		{&s.Data, "data", m.DataRanks(p), tagData},
		{&s.Expert, "expert", m.ExpertRanks(rank), tagExpert},
		{&s.Replica, "replica", m.ReplicaRanks(rank), tagReplica},
		{&s.Pipeline, "pipeline", m.PipelineRanks(d), tagPipeline},
		{&s.Embed, "embed", m.EmbedRanks(d), tagEmbed},
	} {
		if g.tag == tagEmbed && (m.Pipeline == 1 || p > 0 && p < m.Pipeline-1) {
			continue
		}
		var err error
		if *g.to, err = comm.NewGroup(t, g.ranks, g.tag); err != nil {
			return nil, fmt.Errorf("%s group: %w", g.name, err)
		}
	}
	return s, nil
}

// WithTimeout sets the time-out of every group and returns s.
func (s *GroupSet) WithTimeout(d time.Duration) *GroupSet {
	for _, g := range []*comm.Group{s.World, s.Data, s.Expert, s.Replica, s.Pipeline, s.Embed} {
		if g != nil {
			g.WithTimeout(d)
		}
	}
	return s
}
