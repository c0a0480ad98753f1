package parallel

import (
	"context"
	"fmt"
	"reflect"
	"slices"
	"sync"
	"testing"

	"moetor/comm"
	"moetor/comm/inproc"
)

func TestNewMesh(t *testing.T) {
	for _, c := range []struct {
		world, pipeline, expert, node int
		want                          string // error, or the mesh
	}{
		{1, 1, 1, 0, "1x1,1"},
		{4, 2, 2, 2, "2x2,2"},
		{8, 2, 4, 0, "2x4,4"},
		{4, 3, 1, 0, "parallel.pipeline=3 does not divide 4 ranks"},
		{1, 2, 1, 0, "parallel.pipeline=2 does not divide 1 rank"},
		{8, 2, 3, 0, "parallel.expert=3 does not divide data=4 (ranks 8 / pipeline 2)"},
		{4, 1, 8, 0, "parallel.expert=8 does not divide data=4 (ranks 4 / pipeline 1)"},
		{4, 2, 2, 3, "parallel.ranks_per_node=3 does not divide 4 ranks"},
		{4, 3, 2, 3, "parallel.pipeline=3 does not divide 4 ranks\nparallel.ranks_per_node=3 does not divide 4 ranks"},
		{0, 1, 1, 0, "0 ranks, need at least 1"},
		{4, 0, -1, -2, "parallel.expert=-1 is less than 1\nparallel.pipeline=0 is less than 1\nparallel.ranks_per_node=-2 is less than 0"},
	} {
		m, err := NewMesh(c.world, c.pipeline, c.expert, c.node)
		got := m.String()
		if err != nil {
			got = err.Error()
		}
		if got != c.want {
			t.Errorf("NewMesh(%d, %d, %d, %d): got %s, want %s", c.world, c.pipeline, c.expert, c.node, got, c.want)
		}
	}
	m, _ := NewMesh(6, 1, 6, 0)
	if err := m.CheckExperts(64); err == nil || err.Error() != "parallel.expert=6 does not divide model.moe.experts=64" {
		t.Error(err)
	}
	if err := m.CheckExperts(12); err != nil {
		t.Error(err)
	}
}

// TestMeshByHand writes one mesh out: 2 stages x 4 data ranks, experts over 2, nodes of 2.
func TestMeshByHand(t *testing.T) {
	m, err := NewMesh(8, 2, 2, 2)
	if err != nil {
		t.Fatal(err)
	}
	for _, c := range []struct {
		name      string
		got, want any
	}{
		{"DataRanks(1)", m.DataRanks(1), []int{4, 5, 6, 7}},
		{"ExpertRanks(3)", m.ExpertRanks(3), []int{2, 3}},
		{"ExpertRanks(4)", m.ExpertRanks(4), []int{4, 5}},
		{"ReplicaRanks(3)", m.ReplicaRanks(3), []int{1, 3}},
		{"ReplicaRanks(6)", m.ReplicaRanks(6), []int{4, 6}},
		{"PipelineRanks(3)", m.PipelineRanks(3), []int{3, 7}},
		{"EmbedRanks(1)", m.EmbedRanks(1), []int{1, 5}},
		{"Node(5)", m.Node(5), 2},
		{"Rank(1,2)", m.Rank(1, 2), 6},
	} {
		if !reflect.DeepEqual(c.got, c.want) {
			t.Errorf("%s = %v, want %v", c.name, c.got, c.want)
		}
	}
	if p, d, e := m.Coord(7); p != 1 || d != 3 || e != 1 {
		t.Errorf("Coord(7) = %d, %d, %d", p, d, e)
	}
	if got := (Mesh{4, 1, 1, 0}).EmbedRanks(0); !reflect.DeepEqual(got, []int{0, 3}) {
		t.Errorf("EmbedRanks of 4x1: %v", got)
	}
}

// TestMeshProperties walks all meshes of up to 16 ranks: coordinates round trip, each kind of group cuts the world into
// parts, and what a group shares is the same for its members and only for them.
func TestMeshProperties(t *testing.T) {
	for world := 1; world <= 16; world++ {
		for pp := 1; pp <= world; pp++ {
			for ep := 1; ep <= world; ep++ {
				m, err := NewMesh(world, pp, ep, 0)
				if ok := world%pp == 0 && world/pp%ep == 0; ok != (err == nil) {
					t.Fatalf("%d ranks, pipeline %d, expert %d: %v", world, pp, ep, err)
				}
				if err != nil {
					continue
				}
				for r := range world {
					p, d, e := m.Coord(r)
					if m.Rank(p, d) != r || p >= pp || d >= m.Data || e >= ep {
						t.Fatalf("%v: rank %d has coordinates %d %d %d", m, r, p, d, e)
					}
					for kind, g := range map[string][]int{"data": m.DataRanks(p), "expert": m.ExpertRanks(r), "replica": m.ReplicaRanks(r), "pipeline": m.PipelineRanks(d)} {
						if !slices.IsSorted(g) || !slices.Contains(g, r) {
							t.Fatalf("%v rank %d: %s group %v", m, r, kind, g)
						}
						for q := range world {
							qp, qd, qe := m.Coord(q)
							same := map[string]bool{"data": qp == p, "expert": qp == p && qd/ep == d/ep, "replica": qp == p && qe == e, "pipeline": qd == d}[kind]
							if same != slices.Contains(g, q) {
								t.Fatalf("%v rank %d: rank %d and %s group %v", m, r, q, kind, g)
							}
						}
					}
					if i := slices.Index(m.ExpertRanks(r), r); i != e {
						t.Fatalf("%v rank %d stands at %d of its expert group, coordinate is %d", m, r, i, e)
					}
				}
			}
		}
	}
}

// TestGroups uses all groups of a mesh, interleaved, so that a shared tag would cross.
func TestGroups(t *testing.T) {
	m, err := NewMesh(12, 3, 2, 0)
	if err != nil {
		t.Fatal(err)
	}
	transports := inproc.New(12)
	errs := make([]error, 12)
	var wg sync.WaitGroup
	for r, tr := range transports {
		wg.Go(func() {
			defer tr.Close()
			errs[r] = useGroups(t.Context(), tr, m)
		})
	}
	wg.Wait()
	for r, err := range errs {
		if err != nil {
			t.Errorf("rank %d: %v", r, err)
		}
	}
	if _, err := Groups(transports[0], Mesh{2, 2, 1, 0}); err == nil || err.Error() != "mesh 2x2,1 has 4 ranks, the transport connects 12" {
		t.Error(err)
	}
}

func useGroups(ctx context.Context, tr comm.Transport, m Mesh) error {
	s, err := Groups(tr, m)
	if err != nil {
		return err
	}
	rank := tr.Rank()
	p, d, _ := m.Coord(rank)
	groups := []struct {
		g    *comm.Group
		want []int
	}{
		{s.World, []int{0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11}}, {s.Data, m.DataRanks(p)}, {s.Expert, m.ExpertRanks(rank)},
		{s.Replica, m.ReplicaRanks(rank)}, {s.Pipeline, m.PipelineRanks(d)}, {s.Embed, m.EmbedRanks(d)},
	}
	if (s.Embed == nil) != (p == 1) {
		return fmt.Errorf("embed group of pipeline coordinate %d is %v", p, s.Embed)
	}
	for round := range 3 {
		for _, g := range groups {
			if g.g == nil {
				continue
			}
			x, want := []int64{int64(rank + round)}, int64(0)
			for _, r := range g.want {
				want += int64(r + round)
			}
			if err := comm.AllReduce(ctx, g.g, x, comm.Sum); err != nil {
				return err
			}
			if x[0] != want {
				return fmt.Errorf("sum over %v is %d, want %d", g.want, x[0], want)
			}
		}
	}
	return nil
}
