// Package configs composes the run configuration from the configurations that the components own, and loads it.
//
//	run, err := configs.Load("demo", []string{"stages.0.steps=30"})   // a preset or a file, then single settings
//	err = configs.Validate(run, ranks)                                 // every rule between settings
//
// A file or preset overrides the defaults of [Default], each of which is spelled once, there. Both calls report all
// errors at once as [Errors], each with the place it comes from. [Marshal] writes the resolved configuration, which
// loads back to an equal one.
package configs

import (
	"bytes"
	"fmt"
	"path/filepath"
	"reflect"
	"slices"
	"strings"
	"time"

	"moetor/data"
	"moetor/data/chat"
	"moetor/internal/train/objective"
	"moetor/model"
	"moetor/optimizer"
)

// Run is the whole configuration of a run.
type Run struct {
	Run        Output               `yaml:"run"`
	Model      model.Config         `yaml:"model"`
	Parallel   Parallel             `yaml:"parallel"`
	Precision  Precision            `yaml:"precision"`
	Tokenizer  data.TokenizerConfig `yaml:"tokenizer"`
	Checkpoint Checkpoint           `yaml:"checkpoint"`
	Comm       Comm                 `yaml:"comm"`
	Stages     []Stage              `yaml:"stages"`

	origin map[string]place // where each set value came from, by path, for errors
}

// Output says where a run writes and how often.
type Output struct {
	Out       string `yaml:"out"`        // run directory; default runs/NAME
	Init      string `yaml:"init"`       // checkpoint or run directory whose weights the first stage starts from; "" = random
	Seed      uint64 `yaml:"seed"`       // of weights and of the order of samples
	LogEvery  int    `yaml:"log_every"`  // steps per printed line
	EvalEvery int    `yaml:"eval_every"` // steps between validations; 0 = none. Default 50 if any stage holds text out
	Cache     string `yaml:"cache"`      // directory of tokenised texts; "" = in the user's cache directory, off = none
}

// Parallel lays the ranks out: world = Pipeline x data, and Expert divides data.
type Parallel struct {
	Pipeline     int    `yaml:"pipeline"`       // stages of the pipeline
	Expert       int    `yaml:"expert"`         // data ranks over which the experts of a layer are spread
	Schedule     string `yaml:"schedule"`       // of the pipeline: see pipeline.Names
	Microbatch   int    `yaml:"microbatch"`     // sequences of a micro-batch
	RanksPerNode int    `yaml:"ranks_per_node"` // 0: as found at start
	Split        []int  `yaml:"split"`          // layers of each pipeline stage; empty: by estimated cost
}

// Precision says how the operands of matrix products are stored.
type Precision struct {
	Recipe  string   `yaml:"recipe"`  // see RecipeNames
	Keep    []string `yaml:"keep"`    // fp8, mxfp8, hopper: operands that stay in BF16: weights, inputs, gradients, attn_out
	Promote int      `yaml:"promote"` // hopper: products after which a sum of few bits is added to one in FP32; 0 = at its end
	Watch   int      `yaml:"watch"`   // steps between reports on what rounding to codes does; 0 = none
}

// Checkpoint says how often a run saves and how many it keeps. The end of a stage is always saved.
type Checkpoint struct {
	Every int `yaml:"every"` // steps; 0 = at the end of a stage only
	Keep  int `yaml:"keep"`  // newest complete checkpoints kept
}

// Comm holds what concerns the exchange between ranks.
type Comm struct {
	Timeout time.Duration `yaml:"timeout"` // longest wait for another rank
}

// Stage is one stage of training. Exactly one of Steps, Tokens and Epochs is set. All schedules count from its start.
type Stage struct {
	Name      string              `yaml:"name"`
	Objective string              `yaml:"objective"` // see objective.Names; lm: cross-entropy of the trained tokens
	Data      []data.SourceConfig `yaml:"data"`
	Val       data.ValConfig      `yaml:"val"`
	Pack      data.PackConfig     `yaml:"pack"`  // of documents
	Chat      chat.Config         `yaml:"chat"`  // of conversations and preferences
	Steps     int64               `yaml:"steps"` // 0: not given; likewise tokens and epochs
	Tokens    int64               `yaml:"tokens"`
	Epochs    int64               `yaml:"epochs"`
	Batch     optimizer.BatchSize `yaml:"batch"`
	Rate      optimizer.Rate      `yaml:"rate"`
	Optimizer optimizer.Config    `yaml:"optimizer"`
	Router    Router              `yaml:"router"`
	MTPWeight optimizer.Piecewise `yaml:"mtp_weight"` // lambda; default 0.3 if model.mtp.depth > 0 and objective is lm, else 0
	// Preference holds the settings of the preference objectives; the default of each is the objective's.
	Preference objective.Config `yaml:"preference"`
}

// Router says how a stage balances experts.
type Router struct {
	BiasSpeed optimizer.Piecewise `yaml:"bias_speed"` // gamma; default 0.001 with a sigmoid gate and objective lm, else 0: frozen
	SeqAux    *float64            `yaml:"seq_aux"`    // alpha of the balance loss in this stage; default model.moe.seq_aux
}

// Default returns the configuration that an empty mapping stands for. Every default value is written here and in
// defaultStage and nowhere else, except those that follow from other settings, which resolve fills.
func Default() *Run {
	st := defaultStage()
	st.Name = "pretrain"
	st.Data = []data.SourceConfig{{Path: "embedded:shakespeare"}}
	st.Val.Share = 0.05
	st.Steps = 200
	r := &Run{
		Run: Output{Seed: 1234, LogEvery: 1, EvalEvery: 50},
		Model: model.Config{
			Dim: 128, Layers: 4, DenseLayers: 1, DenseInter: 384, InitStd: 0.006, NormEps: 1e-6, Context: 256,
			Attention: model.Attention{Kind: "mla", Heads: 4, QLora: 64, KVLora: 32, Nope: 32, Rope: 16, V: 32, RopeTheta: 10000},
			MoE: model.MoE{Experts: 8, TopK: 2, Shared: 1, Inter: 96, Groups: 1, TopGroups: 1, Score: "sigmoid",
				Normalize: true, Scale: 1, SeqAux: 0.0001},
		},
		Parallel:   Parallel{Pipeline: 1, Expert: 1, Schedule: "1f1b", Microbatch: 2},
		Precision:  Precision{Recipe: "fp32", Promote: DefaultPromote},
		Tokenizer:  data.TokenizerConfig{Kind: "byte"},
		Checkpoint: Checkpoint{Every: 100, Keep: 2},
		Comm:       Comm{Timeout: time.Minute},
		Stages:     []Stage{st},
	}
	return r
}

func defaultStage() Stage {
	return Stage{
		Objective: "lm",
		Batch:     optimizer.BatchSize{Start: 16},
		Rate:      optimizer.Rate{Peak: 3e-3, WarmupSteps: 20},
		Optimizer: optimizer.Config{Kind: "adamw", Moments: optimizer.FP32, Beta1: 0.9, Beta2: 0.95, Eps: 1e-8, WeightDecay: 0.1, Clip: 1},
	}
}

// resolve fills the defaults that follow from other settings. name is that of the preset or file.
func (r *Run) resolve(name string) {
	if r.Run.Out == "" {
		base := filepath.Base(name)
		r.Run.Out = "runs/" + strings.TrimSuffix(base, filepath.Ext(base))
	}
	r.Model.Recipe = r.Precision.ModelRecipe()
	held := false
	for i := range r.Stages {
		s := &r.Stages[i]
		held = held || s.holdsOut()
		for _, list := range [][]data.SourceConfig{s.Data, s.Val.Data} {
			for j := range list {
				list[j] = list[j].Resolved()
			}
		}
		if s.Batch.End == 0 {
			s.Batch.End = s.Batch.Start
		}
		if s.Batch.Step == 0 && s.Batch.End > s.Batch.Start {
			s.Batch.Step = min(r.Parallel.Microbatch, s.Batch.End-s.Batch.Start)
		}
		if s.Router.BiasSpeed == nil {
			s.Router.BiasSpeed = optimizer.Constant(0)
			if r.Model.MoE.Score == "sigmoid" && r.hasMoE() && !judged(s.Objective) {
				s.Router.BiasSpeed = optimizer.Constant(0.001)
			}
		}
		r.preferenceDefaults(i, s)
		if s.Router.SeqAux == nil && r.Model.MoE.SeqAux >= 0 { // a wrong one is told under its own name
			alpha := r.Model.MoE.SeqAux
			s.Router.SeqAux = &alpha
		}
		if s.MTPWeight == nil {
			s.MTPWeight = optimizer.Constant(0)
			if r.Model.MTP.Depth > 0 && !judged(s.Objective) {
				s.MTPWeight = optimizer.Constant(0.3)
			}
		}
	}
	if _, set := r.origin["run.eval_every"]; !set && !held {
		r.Run.EvalEvery = 0
	}
}

// judged reports whether an objective learns from judged answers, which is all but lm.
func judged(name string) bool {
	return name != objective.LM && slices.Contains(objective.Names(), name)
}

// preferenceDefaults fills what nobody set with the objective's defaults. A 0 that somebody wrote stays, to be refused.
func (r *Run) preferenceDefaults(i int, s *Stage) {
	v, d := reflect.ValueOf(&s.Preference).Elem(), reflect.ValueOf(objective.Default(s.Objective))
	for f := range v.NumField() {
		name := v.Type().Field(f).Tag.Get("yaml")
		if _, set := r.origin[fmt.Sprintf("stages.%d.preference.%s", i, name)]; !set {
			v.Field(f).Set(d.Field(f))
		}
	}
}

// hasMoE reports whether any block routes to experts; the block of an MTP module does.
func (r *Run) hasMoE() bool { return r.Model.Layers > r.Model.DenseLayers || r.Model.MTP.Depth > 0 }

// holdsOut reports whether the stage has anything to validate on.
func (s *Stage) holdsOut() bool { return s.Val.Share > 0 || len(s.Val.Data) > 0 }

// ModelFor returns the model's configuration with the vocabulary filled in: model.vocab, which may be larger than the
// tokenizer's size but not smaller, or that size if model.vocab is 0.
func (r *Run) ModelFor(tokenizerSize int) (model.Config, error) {
	m := r.Model
	m.Vocab = m.VocabSize
	if m.Vocab == 0 {
		m.Vocab = tokenizerSize
	}
	if m.Vocab < tokenizerSize {
		return m, fmt.Errorf("model.vocab=%d is smaller than the %d tokens of tokenizer.kind=%s", m.Vocab, tokenizerSize, r.Tokenizer.Kind)
	}
	return m, nil
}

// Equal reports whether both runs have the same settings, wherever they came from.
func (r *Run) Equal(o *Run) bool { return bytes.Equal(Marshal(r), Marshal(o)) }

// Schedule returns the schedule of stage i. epochSamples is the number of samples of one epoch, needed (and read) only
// for a stage whose length is in epochs.
func (r *Run) Schedule(i int, epochSamples int64) (*optimizer.Schedule, error) {
	st := &r.Stages[i]
	l := optimizer.Length{Steps: st.Steps, Tokens: st.Tokens}
	if st.Epochs > 0 {
		if epochSamples <= 0 {
			return nil, fmt.Errorf("stages.%d.epochs=%d: one epoch has %d samples", i, st.Epochs, epochSamples)
		}
		if st.Epochs > maxTokens/int64(r.Model.Context)/epochSamples {
			return nil, fmt.Errorf("stages.%d.epochs=%d of %d samples are more than %g tokens", i, st.Epochs, epochSamples, float64(maxTokens))
		}
		l.Samples = st.Epochs * epochSamples
	}
	return &optimizer.Schedule{
		Length: l, Context: r.Model.Context, Batch: st.Batch, Rate: st.Rate,
		BiasSpeed: st.Router.BiasSpeed, MTPWeight: st.MTPWeight,
	}, nil
}
