package objective

import (
	"fmt"
	"math"
	"slices"
	"strings"

	"moetor/model"
)

// Config are the settings of all losses; each reads the ones its line in the table of losses names.
type Config struct {
	Beta        float64 `yaml:"beta"`        // strength of the log-ratio (SimPO: of the mean log-probability)
	Smoothing   float64 `yaml:"smoothing"`   // cdpo, robust: share of pairs thought to be labelled the wrong way round
	Gamma       float64 `yaml:"gamma"`       // simpo: margin that the scaled difference should exceed
	Lambda      float64 `yaml:"lambda"`      // orpo: weight of the odds-ratio term beside the chosen answer's NLL
	Desirable   float64 `yaml:"desirable"`   // kto: weight of desirable answers
	Undesirable float64 `yaml:"undesirable"` // kto: weight of undesirable answers
	SFT         float64 `yaml:"sft"`         // weight of the chosen answer's mean NLL beside the loss (RPO's alpha); 0: none
	Average     bool    `yaml:"average"`     // ipo: log-ratios per token instead of per answer
}

// Needs is what a loss must be given.
type Needs struct {
	Reference bool // Micro.Ref
	Pairs     bool // Micro.Pairs: sequences 2i and 2i+1 are chosen and rejected
	Unpaired  bool // Micro.Labels of single answers
	KL        bool // KLSetter.SetKL before every step
	Score     bool // a model with a score head: y are scores
}

// Names of the objectives.
const (
	LM     = "lm"
	DPO    = "dpo"
	CDPO   = "cdpo"
	Robust = "robust"
	IPO    = "ipo"
	Hinge  = "hinge"
	KTO    = "kto"
	SimPO  = "simpo"
	ORPO   = "orpo"
	Reward = "reward"
)

// A kind is one objective: what it needs, the settings it reads (their yaml names) and their defaults.
type kind struct {
	name     string
	needs    Needs
	reads    []string
	defaults Config
	make     func(Needs, Config) model.Objective
}

// Defaults are those of the papers and of TRL where the two agree. SimPO's is the paper's ratio gamma/beta = 0.5.
var kinds = []kind{
	{name: LM, make: func(Needs, Config) model.Objective { return nil }},
	{DPO, Needs{Reference: true, Pairs: true}, []string{"beta", "sft"}, Config{Beta: 0.1}, newDPO},
	{CDPO, Needs{Reference: true, Pairs: true}, []string{"beta", "smoothing", "sft"}, Config{Beta: 0.1, Smoothing: 0.1}, newCDPO},
	{Robust, Needs{Reference: true, Pairs: true}, []string{"beta", "smoothing", "sft"}, Config{Beta: 0.1, Smoothing: 0.1}, newRobust},
	{IPO, Needs{Reference: true, Pairs: true}, []string{"beta", "average", "sft"}, Config{Beta: 0.1}, newIPO},
	{Hinge, Needs{Reference: true, Pairs: true}, []string{"beta", "sft"}, Config{Beta: 0.1}, newHinge},
	{KTO, Needs{Reference: true, Unpaired: true, KL: true}, []string{"beta", "desirable", "undesirable", "sft"},
		Config{Beta: 0.1, Desirable: 1, Undesirable: 1}, newKTO},
	{SimPO, Needs{Pairs: true}, []string{"beta", "gamma", "sft"}, Config{Beta: 2, Gamma: 1}, newSimPO},
	{ORPO, Needs{Pairs: true}, []string{"lambda", "sft"}, Config{Lambda: 0.1}, newORPO},
	{Reward, Needs{Pairs: true, Score: true}, nil, Config{}, newReward},
}

func kindOf(name string) (kind, bool) {
	i := slices.IndexFunc(kinds, func(k kind) bool { return k.name == name })
	if i < 0 {
		return kind{}, false
	}
	return kinds[i], true
}

// Names lists the objectives, "lm" first.
func Names() []string {
	names := make([]string, len(kinds))
	for i, k := range kinds {
		names[i] = k.name
	}
	return names
}

// Default are the settings of an objective that nobody set; zero for what it does not read.
func Default(name string) Config {
	k, _ := kindOf(name)
	return k.defaults
}

// Reads lists the settings that an objective reads, by their yaml names.
func Reads(name string) []string {
	k, _ := kindOf(name)
	return slices.Clone(k.reads)
}

// New makes the objective of that name. That of "lm" is nil: cross-entropy is the model's own.
func New(name string, c Config) (model.Objective, Needs, error) {
	if errs := Validate("preference", name, c); len(errs) > 0 {
		return nil, Needs{}, errs[0]
	}
	k, _ := kindOf(name)
	return k.make(k.needs, c), k.needs, nil
}

// settings that are numbers, as Validate walks them.
var settings = []struct {
	name string
	get  func(Config) float64
	none string // what 0 would mean, for settings that must not be 0
}{
	{"beta", func(c Config) float64 { return c.Beta }, "the preference loss would not move; give a positive number"},
	{"smoothing", func(c Config) float64 { return c.Smoothing }, "no pair is taken for mislabelled, which is objective dpo; use that"},
	{"gamma", func(c Config) float64 { return c.Gamma }, ""},
	{"lambda", func(c Config) float64 { return c.Lambda }, "rejected answers would have no part in the loss; give a positive number, or use objective lm"},
	{"desirable", func(c Config) float64 { return c.Desirable }, "desirable answers would teach nothing; give a positive number"},
	{"undesirable", func(c Config) float64 { return c.Undesirable }, "undesirable answers would teach nothing; give a positive number"},
	{"sft", func(c Config) float64 { return c.SFT }, ""},
}

// Validate returns what is wrong with the settings of an objective, a line each that begins with the setting's name under
// at ("stages.1.preference"). A setting that the objective does not read must be zero: it would have no effect.
func Validate(at, name string, c Config) []error {
	k, ok := kindOf(name)
	if !ok {
		return []error{fmt.Errorf("%s: objective %q is unknown; known: %s", at, name, strings.Join(Names(), ", "))}
	}
	var errs []error
	bad := func(setting string, v any, format string, args ...any) {
		errs = append(errs, fmt.Errorf("%s.%s=%v%s", at, setting, v, fmt.Sprintf(format, args...)))
	}
	for _, s := range settings {
		v := s.get(c)
		switch reads := slices.Contains(k.reads, s.name); {
		case !reads && v != 0: // NaN too
			bad(s.name, v, " has no effect with objective %s%s", name, instead(name, s.name))
		case !reads:
		case math.IsNaN(v) || math.IsInf(v, 0):
			bad(s.name, v, " must be finite")
		case v < 0:
			bad(s.name, v, " must not be negative")
		case v == 0 && s.none != "":
			bad(s.name, v, ": %s", s.none)
		case s.name == "smoothing" && v >= 0.5:
			bad(s.name, v, " must be below 0.5: from there on the labels say nothing, or the opposite")
		}
	}
	if c.Average && !slices.Contains(k.reads, "average") {
		bad("average", c.Average, " has no effect with objective %s%s", name, instead(name, "average"))
	}
	return errs
}

// instead names the objective or setting that someone who set this one may have meant.
func instead(name, setting string) string {
	switch {
	case setting == "smoothing" && name == DPO:
		return "; use cdpo or robust"
	case setting == "beta" && name == ORPO:
		return "; its weight is lambda"
	case setting == "sft" && name == Reward:
		return ": a model with a score head has no log-probabilities"
	case setting == "average":
		return "; it is a choice of ipo (simpo and orpo always average)"
	}
	return ""
}
