package shard

import (
	"cmp"
	"context"
	"encoding/json"
	"fmt"
	"reflect"
	"slices"
	"strings"

	"moetor/comm"
	"moetor/internal/tensor"
)

// introduction is what a rank tells all others about itself in New.
type introduction struct {
	Rank          int      // world rank
	Problem       string   // why it cannot take part
	Data, Replica []int    // world ranks of its groups
	Dense, Expert []string // its parameters, as "name[shape]", in order
	Slices        []sliceID
	Embed         []int  // world ranks of its embed group, if it has one
	Tied          string // its tied copy, as "name[shape]"
}

type sliceID struct {
	Name             string
	Row0, Row1, Rows int
}

// introduce exchanges introductions and checks them. Every rank checks all of them, so that all find the same fault.
func (s *Sync) introduce(ctx context.Context, problem string, data, replica *comm.Group) ([]introduction, error) {
	mine := introduction{
		Rank: s.world.Ranks()[s.world.Rank()], Problem: problem, Data: data.Ranks(), Replica: replica.Ranks(),
		Dense: describe(s.dense.params), Expert: describe(s.expert.params),
	}
	if s.copied != nil {
		mine.Tied = s.copied.String()
	}
	if s.embed != nil {
		mine.Embed = s.embed.Ranks()
	}
	for _, sl := range s.slices {
		mine.Slices = append(mine.Slices, sliceID{sl.Param.Name, sl.Row0, sl.Row1, sl.Param.Rows()})
	}
	blob, err := json.Marshal(mine)
	if err != nil {
		return nil, fmt.Errorf("gradient shards: %w", err)
	}
	blobs, err := comm.GatherBytes(ctx, s.world, blob)
	if err != nil {
		return nil, fmt.Errorf("gradient shards: %w", err)
	}
	all := make([]introduction, len(blobs))
	for i, b := range blobs {
		if err := json.Unmarshal(b, &all[i]); err != nil {
			return nil, fmt.Errorf("gradient shards: rank %d: %w", s.world.Ranks()[i], err)
		}
		if p := all[i].Problem; p != "" {
			return nil, fmt.Errorf("gradient shards: rank %d: %s", all[i].Rank, p)
		}
	}
	if err := checkReplicas(all); err != nil {
		return nil, err
	}
	if err := checkTied(all); err != nil {
		return nil, err
	}
	if err := s.canonical(all); err != nil {
		return nil, err
	}
	return all, nil
}

func describe(params []*tensor.Param) []string {
	out := make([]string, len(params))
	for i, p := range params {
		out[i] = p.String()
	}
	return out
}

// checkReplicas says whether the members of each group agree on its members and on the parameters that they share.
func checkReplicas(all []introduction) error {
	byRank := map[int]*introduction{}
	for i := range all {
		byRank[all[i].Rank] = &all[i]
	}
	for _, a := range all {
		for _, k := range []struct {
			what  string
			ranks []int
			of    func(*introduction) ([]int, []string)
		}{
			{"data", a.Data, func(i *introduction) ([]int, []string) { return i.Data, i.Dense }},
			{"expert replica", a.Replica, func(i *introduction) ([]int, []string) { return i.Replica, i.Expert }},
		} {
			_, mine := k.of(&a)
			for _, r := range k.ranks {
				b := byRank[r]
				if b == nil {
					return fmt.Errorf("gradient shards: rank %d of the %s group %v is not in the world", r, k.what, k.ranks)
				}
				ranks, theirs := k.of(b)
				if !reflect.DeepEqual(ranks, k.ranks) {
					return fmt.Errorf("gradient shards: rank %d has the %s group %v, rank %d has %v", a.Rank, k.what, k.ranks, r, ranks)
				}
				if i := firstDifference(mine, theirs); i >= 0 {
					return fmt.Errorf("gradient shards: ranks %d and %d are of one %s group, but parameter %d is %s on one and %s on the other",
						a.Rank, r, k.what, i, at(mine, i), at(theirs, i))
				}
			}
		}
	}
	return nil
}

// checkTied says whether every tied copy has its embedding on the same rank or at the other end of its pipeline.
func checkTied(all []introduction) error {
	for _, a := range all {
		if a.Tied == "" || a.local() {
			continue
		}
		if len(a.Embed) != 2 || a.Embed[embedLast] != a.Rank {
			return fmt.Errorf("gradient shards: rank %d has a tied copy of %s, but is not the last of a pipeline", a.Rank, a.Tied)
		}
		for _, b := range all {
			if b.Rank == a.Embed[embedFirst] && !(slices.Contains(b.Dense, a.Tied) && slices.Equal(a.Embed, b.Embed)) {
				return fmt.Errorf("gradient shards: rank %d has a tied copy of %s, which rank %d does not have", a.Rank, a.Tied, b.Rank)
			}
		}
	}
	return nil
}

// local reports whether a rank with a tied copy owns the embedding too.
func (i *introduction) local() bool { return slices.Contains(i.Dense, i.Tied) }

func firstDifference(a, b []string) int {
	for i := range max(len(a), len(b)) {
		if i >= len(a) || i >= len(b) || a[i] != b[i] {
			return i
		}
	}
	return -1
}

func at(list []string, i int) string {
	if i < len(list) {
		return list[i]
	}
	return "missing"
}

// canonical sorts the slices of all ranks by name and row and checks that no row of a parameter is there twice.
func (s *Sync) canonical(all []introduction) error {
	rows := map[string]int{}
	s.counts = make([]int, len(all))
	for i, a := range all {
		s.counts[i] = len(a.Slices)
		for _, id := range a.Slices {
			if r, ok := rows[id.Name]; ok && r != id.Rows {
				return fmt.Errorf("gradient shards: %s has %d rows on one rank and %d on rank %d", id.Name, r, id.Rows, a.Rank)
			}
			rows[id.Name] = id.Rows
			s.order = append(s.order, owned{id.Name, id.Row0, id.Row1, a.Rank, len(s.order)})
		}
	}
	slices.SortFunc(s.order, func(a, b owned) int {
		return cmp.Or(strings.Compare(a.name, b.name), cmp.Compare(a.row0, b.row0), cmp.Compare(a.rank, b.rank))
	})
	// The members of one group cover a parameter by construction; two groups that hold the same one cover it twice.
	for i, o := range s.order {
		if i == 0 {
			continue
		}
		if prev := s.order[i-1]; prev.name == o.name && o.row0 < prev.row1 {
			return fmt.Errorf("gradient shards: row %d of %s is owned by rank %d and by rank %d", o.row0, o.name, prev.rank, o.rank)
		}
	}
	return nil
}

// tieUp finds out what this rank does for the tied embedding. The copy's name and shape are known to all ranks by now.
func (s *Sync) tieUp(names map[string]*tensor.Param, all []introduction) {
	if s.copied != nil {
		if p := names[s.copied.Name]; p != nil {
			s.tied, s.first = tiedLocal, p
		} else {
			s.tied = tiedLast
		}
		return
	}
	if s.embed == nil || s.embed.Rank() != embedFirst {
		return
	}
	last := s.embed.Ranks()[embedLast]
	for _, a := range all {
		if a.Rank != last || a.Tied == "" || a.local() {
			continue
		}
		for _, p := range names {
			if p.String() == a.Tied {
				s.tied, s.first, s.arrive = tiedFirst, p, make([]float32, p.Len())
			}
		}
	}
}
