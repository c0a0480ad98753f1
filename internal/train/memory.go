package train

import (
	"cmp"
	"fmt"
	"math/bits"

	"moetor/configs"
	"moetor/internal/kernel"
	"moetor/internal/train/objective"
	"moetor/model"
	"moetor/parallel"
	"moetor/parallel/pipeline"
)

// What a rank needs beside what can be counted, in bytes, as measured on linux/amd64 (docs/perf.md says how).
const (
	runtimeBytes   = 32 << 20 // the program's own pages, the Go runtime, HDF5
	scratchBytes   = 2 << 20  // packing buffers, per kernel thread
	codesBytes     = 1 << 19  // as much again for products from codes: decoded blocks
	tallRows       = 128      // rows of the largest tiles, which a kernel thread makes as floats before it has their scales
	pieceBytes     = 1 << 20  // of a part of another rank, waiting to be summed
	ringBytes      = 1 << 20  // of the shm transport, from one rank to one other
	allRingsBytes  = 60 << 20 // of all pairs
	leastRingBytes = 16 << 10
	batchRowBytes  = 12 // token, target and weight
)

// RankMemory predicts the resident memory of a rank. All ranks at one coordinate of the pipeline hold the same but for
// the row by which shares of the optimizer may differ.
type RankMemory struct {
	Pipeline int         `json:"pipeline"` // coordinate
	Layers   [2]int      `json:"layers"`   // first, and one after the last
	Stage    string      `json:"stage"`    // of training: the one that needs most
	InFlight int         `json:"in_flight"`
	Bytes    MemoryKinds `json:"bytes"`
	Total    int64       `json:"total"`
}

// MemoryKinds is the memory of a rank by what it is for, in bytes:
//
//	weights        4 per parameter of this coordinate, a tied copy of the embedding included
//	packed         codes and scales of the weights of Linears in both orders of products, where the recipe has any, and of one
//	               weight on its way to be packed, per thread
//	gradients      as many
//	moments        8, or 4 in BF16, per parameter whose rows this rank owns: dense ones / data ranks, experts / their replicas
//	activations    the arena of one micro-batch (see model.MemoryOf) and its index tables, times the micro-batches that the
//	               simulator of the schedule finds alive at once; and once what is temporary
//	logits         those of one chunk of rows, on the last coordinate, and what the head holds per row
//	scratch        of the kernels, per thread: packed blocks, and what attention packs of the longest sequence; with codes also
//	               decoded blocks, and 128 rows of an FFN's gate, up and hidden
//	communication  copies of gradients on the way to their owners (all parameters, and the own rows) where there are replicas, and pieces of the
//	               others' waiting to be summed;
//	               two buffers per neighbour in the pipeline; rows on their way between expert ranks; rings of the shm transport
//	data           the micro-batches of a step. Tokenised text is mapped from a file: its pages are the system's to take back
//	runtime        the program and the Go runtime, a constant as measured
//
// Expert ranks are taken to receive as many rows as they send, which is what balanced routing gives.
type MemoryKinds struct {
	Weights       int64 `json:"weights"`
	Packed        int64 `json:"packed"`
	Gradients     int64 `json:"gradients"`
	Moments       int64 `json:"moments"`
	Activations   int64 `json:"activations"`
	Logits        int64 `json:"logits"`
	Scratch       int64 `json:"scratch"`
	Communication int64 `json:"communication"`
	Data          int64 `json:"data"`
	Runtime       int64 `json:"runtime"`
}

// Named is one kind of memory.
type Named struct {
	Name  string
	Bytes int64
}

// Kinds lists the kinds in the order in which they are explained.
func (k MemoryKinds) Kinds() []Named {
	return []Named{{"weights", k.Weights}, {"packed", k.Packed}, {"gradients", k.Gradients}, {"moments", k.Moments}, {"activations", k.Activations}, {"logits", k.Logits},
		{"scratch", k.Scratch}, {"communication", k.Communication}, {"data", k.Data}, {"runtime", k.Runtime}}
}

// Total is the sum of all kinds.
func (k MemoryKinds) Total() (n int64) {
	for _, kind := range k.Kinds() {
		n += kind.Bytes
	}
	return n
}

// PredictMemory predicts the memory of the ranks of a run, by coordinate of the pipeline, from the configuration alone: no
// weight is made. The vocabulary must be known (OpenTokenizer). threads are those of a rank's kernels.
func PredictMemory(run *configs.Run, ranks, threads int) ([]RankMemory, error) {
	mesh, err := parallel.NewMesh(ranks, run.Parallel.Pipeline, run.Parallel.Expert, run.Parallel.RanksPerNode)
	if err != nil {
		return nil, err
	}
	cut, err := bounds(run)
	if err != nil {
		return nil, err
	}
	most := make([]RankMemory, mesh.Pipeline)
	for i := range run.Stages {
		load, c, err := stageLoad(run, i)
		if err != nil {
			return nil, err
		}
		micros := largestBatch(&run.Stages[i], run.Parallel.Microbatch*mesh.Data)
		alive, err := inFlight(run.Parallel.Schedule, mesh.Pipeline, micros)
		if err != nil {
			return nil, err
		}
		for p := range most {
			part := model.Part{First: cut[p], Last: cut[p+1], Embed: p == 0, Head: p == mesh.Pipeline-1, ExpertSize: mesh.Expert}
			r := RankMemory{Pipeline: p, Layers: [2]int{cut[p], cut[p+1]}, Stage: run.Stages[i].Name, InFlight: alive[p]}
			r.Bytes = rankBytes(c, part, load, mesh, micros, alive[p], threads, run.Stages[i].Optimizer.MomentBytes())
			if r.Total = r.Bytes.Total(); r.Total > most[p].Total {
				most[p] = r
			}
		}
	}
	return most, nil
}

// stageLoad is the micro-batch of stage i, and the model that meets it.
func stageLoad(run *configs.Run, i int) (model.Load, model.Config, error) {
	s, c := &run.Stages[i], run.Model
	judge, needs, err := objective.New(s.Objective, s.Preference)
	if err != nil {
		return model.Load{}, c, err
	}
	load := model.Load{Seqs: run.Parallel.Microbatch, Len: c.Context, Judged: judge != nil}
	if needs.Pairs {
		load.Seqs *= 2
	}
	if needs.Score {
		c = c.RewardModel()
	}
	if s.Router.SeqAux != nil {
		c.MoE.SeqAux = *s.Router.SeqAux
	}
	return load, c, nil
}

// largestBatch is how many micro-batches of each data rank the largest global batch of a stage makes; round is what all
// data ranks take at a time.
func largestBatch(s *configs.Stage, round int) int {
	return max(1, (max(s.Batch.Start, s.Batch.End)+round-1)/round)
}

// inFlight is how many micro-batches are alive at once at each coordinate of the pipeline.
func inFlight(schedule string, stages, micros int) ([]int, error) {
	s, err := pipeline.Generate(schedule, pipeline.Straight(stages, micros))
	if err == nil {
		s, err = pipeline.Prepare(s)
	}
	if err != nil {
		return nil, fmt.Errorf("parallel.schedule=%s with %d micro-batches: %w", schedule, micros, err)
	}
	t, err := pipeline.Simulate(s, pipeline.Cost{Forward: 1, Input: 1, Weight: 1}, 1)
	return t.Peak, err
}

// rankBytes adds up one rank.
func rankBytes(c model.Config, part model.Part, load model.Load, mesh parallel.Mesh, micros, alive, threads, momentBytes int) MemoryKinds {
	m := model.MemoryOf(c, part, load)
	rows, d := int64(load.Seqs*load.Len), int64(c.Dim)
	data, replicas := int64(mesh.Data), int64(mesh.Data/mesh.Expert)
	params := m.Dense + m.Expert + m.Tied
	owned := share(m.Dense, data) + share(m.Expert, replicas)
	k := MemoryKinds{
		Weights:     4 * params,
		Packed:      m.Packed + int64(threads)*m.Room,
		Gradients:   4 * params,
		Moments:     int64(momentBytes) * owned,
		Activations: 4*(m.Pass+m.Index)*int64(alive) + 4*m.Temp,
		Logits:      4 * (m.Logits + m.Head),
		Scratch:     int64(threads) * (scratchBytes + kernel.AttentionScratch(c.Context, c.Attention.Nope+c.Attention.Rope, c.Attention.V) + codesScratch(c, m)),
		Data:        batchRowBytes * rows * int64(micros),
		Runtime:     runtimeBytes + 4*m.Tables,
	}
	if data > 1 {
		k.Communication += 4*(m.Dense+share(m.Dense, data)) + data*min(pieceBytes, 4*share(m.Dense, data))
	}
	if replicas > 1 {
		k.Communication += 4*(m.Expert+share(m.Expert, replicas)) + replicas*min(pieceBytes, 4*share(m.Expert, replicas))
	}
	if !part.Embed {
		k.Communication += 2 * 4 * rows * d
	}
	if !part.Head {
		k.Communication += 2 * 4 * rows * d
	}
	if part.Embed && !part.Head && (c.TieEmbed || c.MTP.Depth > 0) && !c.Score { // the gradient of the last stage's copy
		k.Communication += 4 * int64(cmp.Or(c.Vocab, c.VocabSize)) * d
	}
	if mesh.Expert > 1 {
		k.Communication += 4 * rows * int64(c.MoE.TopK) * m.Wire * 5 / 4 // grown with a quarter to spare
	}
	if n := mesh.World(); n > 1 {
		k.Communication += 2 * int64(n-1) * RingBytes(n)
	}
	return k
}

// codesScratch is what a kernel thread needs for products from codes and for making codes. Buffers are of sizes that are powers
// of two.
func codesScratch(c model.Config, m model.Memory) int64 {
	if m.Packed == 0 {
		return 0
	}
	values := 3 * tallRows * max(c.DenseInter, c.MoE.Inter*max(c.MoE.Shared, 1))
	return codesBytes + 4<<bits.Len(uint(values-1))
}

// share is the larger part of n values spread over owners.
func share(n, owners int64) int64 { return (n + owners - 1) / owners }

// RingBytes is the size of the memory in which the shm transport passes messages from one of n ranks to one other.
func RingBytes(n int) int64 {
	r := int64(ringBytes)
	for r > leastRingBytes && int64(n)*int64(n-1)*r > allRingsBytes {
		r /= 2
	}
	return r
}
