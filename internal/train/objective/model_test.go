package objective

import (
	"encoding/binary"
	"encoding/json"
	"math"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"testing"

	"github.com/goccy/go-yaml"

	"moetor/model"
)

// TestModel: loss and gradients of every objective through a whole small model, against PyTorch. The model computes in
// float32, PyTorch in float64.
func TestModel(t *testing.T) {
	var want struct {
		Batch struct {
			Seqs, Len       int
			Tokens, Targets []int32
			Weight          []float32
			Valid           []int32
			Labels          []int8
		}
		Ref   []float64
		Cases []struct {
			Name   string
			Config torchConfig
			Loss   float64
			Grads  map[string][2]float64 // norm, and projection on cos(0.7 i + 0.1)
		}
	}
	readJSON(t, filepath.Join("testdata", "model.json"), &want)
	b := want.Batch
	seen := map[string]bool{}
	for _, c := range want.Cases {
		seen[c.Name] = true
		t.Run(c.Name, func(t *testing.T) {
			ch := smallModel(t, c.Name == Reward)
			o := c.Config.objective(t, c.Name)
			m := model.Micro{Seqs: b.Seqs, Len: b.Len, Tokens: b.Tokens, Targets: b.Targets, Weight: b.Weight, Valid: b.Valid, Labels: b.Labels,
				Pairs: c.Name != KTO, Ref: want.Ref}
			if err := checked(o, &m); err != nil {
				t.Fatal(err)
			}
			ch.Bind([]model.Micro{m}, model.Settings{Objective: o})
			ch.ZeroGrads()
			if _, err := ch.Forward(t.Context(), 0, nil); err != nil {
				t.Fatal(err)
			}
			if _, err := ch.BackwardInput(t.Context(), 0, nil); err != nil {
				t.Fatal(err)
			}
			if err := ch.BackwardWeight(t.Context(), 0); err != nil {
				t.Fatal(err)
			}
			if sums := ch.MicroSums(0); !near(sums.Loss, c.Loss, 1e-5) {
				t.Errorf("loss %v, PyTorch %v", sums.Loss, c.Loss)
			}
			grads, all := map[string][]float32{}, 0.0
			for _, p := range ch.Params() {
				if g, twice := grads[p.Name]; twice { // the head's copy of the embedding table
					for i := range g {
						g[i] += p.Grad[i]
					}
				} else {
					grads[p.Name] = slices.Clone(p.Grad)
				}
			}
			for _, g := range c.Grads {
				all += g[0] * g[0]
			}
			tolerance := 2e-5 * math.Sqrt(all)
			for name, g := range c.Grads {
				var square, projection float64
				for i, v := range grads[name] {
					square += float64(v) * float64(v)
					projection += float64(v) * math.Cos(0.7*float64(i)+0.1)
				}
				if math.Abs(math.Sqrt(square)-g[0]) > tolerance || math.Abs(projection-g[1]) > tolerance*math.Sqrt(float64(len(grads[name]))) {
					t.Errorf("gradient of %s: norm %v, projection %v; PyTorch %v", name, math.Sqrt(square), projection, g)
				}
				delete(grads, name)
			}
			if all == 0 || len(grads) > 0 {
				t.Errorf("gradients without a reference: %v of a norm %v", len(grads), math.Sqrt(all))
			}
		})
	}
	for _, name := range Names()[1:] {
		if !seen[name] {
			t.Errorf("no case of %s", name)
		}
	}
}

// smallModel is the model of model/testdata/plain_tied.json, or one with its blocks and a score head.
func smallModel(t *testing.T, reward bool) *model.Chunk {
	t.Helper()
	dir := filepath.Join("..", "..", "..", "model", "testdata")
	var g struct {
		Config json.RawMessage
		Bias   map[string][]float64
		Index  map[string]struct{ At, Len int }
	}
	readJSON(t, filepath.Join(dir, "plain_tied.json"), &g)
	blob, err := os.ReadFile(filepath.Join(dir, "plain_tied.bin"))
	if err != nil {
		t.Fatal(err)
	}
	var c model.Config
	if err := yaml.Unmarshal(g.Config, &c); err != nil {
		t.Fatal(err)
	}
	c.MoE.SeqAux = 0 // not part of an objective's loss
	if reward {
		c.TieEmbed = false
		c = c.RewardModel()
	}
	ch, err := model.New(c, model.Whole(c), 1, nil)
	if err != nil {
		t.Fatal(err)
	}
	for _, p := range ch.Params() {
		if p.Name == "score.weight" {
			for i := range p.Value {
				p.Value[i] = float32(math.Sin(float64(i) + 1))
			}
			continue
		}
		at, ok := g.Index["weight "+p.Name]
		if !ok || at.Len != len(p.Value) {
			t.Fatalf("the reference has no %s of %d numbers", p.Name, len(p.Value))
		}
		for i := range p.Value {
			p.Value[i] = math.Float32frombits(binary.LittleEndian.Uint32(blob[4*(at.At+i):]))
		}
	}
	for _, r := range ch.Routers() {
		for e, b := range g.Bias[strconv.Itoa(r.Layer)] {
			r.Bias[e] = float32(b)
		}
	}
	return ch
}
