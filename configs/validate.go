package configs

import (
	"fmt"
	"math"
	"reflect"
	"regexp"
	"slices"
	"strings"
	"time"

	"moetor/data"
	"moetor/data/chat"
	"moetor/internal/train/objective"
	"moetor/optimizer"
	"moetor/parallel/pipeline"
)

// Bounds of what a run may ask for. They lie far beyond any real run and keep every product within int64.
const (
	maxWidth  = 1 << 20 // of a layer, an expert, a latent
	maxCount  = 1 << 16 // of layers, heads, experts, ranks along an axis
	maxVocab  = 1 << 24
	maxBatch  = 1 << 20
	maxTokens = 1e16
	maxSteps  = 1e12
	maxList   = 1000
)

// Validate checks every setting and every rule between settings for a run on `ranks` ranks; 0 leaves out the rules on
// ranks. The error is an Errors with all problems, one line each. A setting that has no effect is a problem.
func Validate(r *Run, ranks int) error {
	c := newChecker(r)
	c.ranges()
	c.model()
	c.layout(ranks)
	for i := range r.Stages {
		c.stage(i)
	}
	c.stages()
	return c.problems.err()
}

// A checker collects problems. A problem whose text mentions a setting that already has one is dropped, since it would
// only be a consequence: with experts=0 no rule about sharing experts out is worth a line.
type checker struct {
	run      *Run
	known    map[string]bool // every path of the run
	bad      map[string]bool
	problems Errors
}

func newChecker(r *Run) *checker {
	c := &checker{run: r, known: map[string]bool{}, bad: map[string]bool{}}
	walk(reflect.ValueOf(r).Elem(), "", func(path string, _ reflect.Value) { c.known[path] = true })
	return c
}

// pathText finds settings in the text of a problem; a path of one word is one only where it stands first.
var pathText = regexp.MustCompile(`[a-z][a-z0-9_]*(?:\.[a-z0-9_]+)+|^[a-z]+`)

// addf adds a problem. Its text begins with the setting it is about and may mention others; its place is where the
// last of them was set, since that is what to change: a --set rather than the preset it conflicts with.
func (c *checker) addf(format string, args ...any) {
	text := fmt.Sprintf(format, args...)
	var subject string
	var at place
	for _, path := range pathText.FindAllString(text, -1) {
		if !c.known[path] {
			continue
		}
		for p := path; p != ""; p = parent(p) {
			if c.bad[p] {
				return
			}
		}
		if subject == "" {
			subject = path
		}
		if p, ok := c.run.origin[path]; ok && p.order > at.order {
			at = p
		}
	}
	for p := subject; at.order == 0 && p != ""; p = parent(p) { // a default: where what contains it was set
		at = c.run.origin[p]
	}
	c.bad[subject] = true
	c.problems = append(c.problems, at.problem(subject, "%s", text))
}

// parent is path without its last part.
func parent(path string) string { return path[:max(0, strings.LastIndexByte(path, '.'))] }

func (c *checker) addAll(errs []error) {
	for _, err := range errs {
		c.addf("%s", err)
	}
}

func (c *checker) between(path string, v, low, high int64) {
	switch {
	case v < low:
		c.addf("%s=%d must be at least %d", path, v, low)
	case v > high:
		c.addf("%s=%d must be at most %d", path, v, high)
	}
}

// number demands a finite value of at least 0, above 0 if positive.
func (c *checker) number(path string, v float64, positive bool) {
	switch {
	case math.IsNaN(v) || math.IsInf(v, 0):
		c.addf("%s=%v must be finite", path, v)
	case positive && v <= 0:
		c.addf("%s=%v must be above 0", path, v)
	case v < 0:
		c.addf("%s=%v must not be negative", path, v)
	}
}

func (c *checker) oneOf(path, v string, known []string) {
	if !slices.Contains(known, v) {
		c.addf("%s=%s is not available in this version; known: %s", path, v, strings.Join(known, ", "))
	}
}

// ranges checks each setting on its own.
func (c *checker) ranges() {
	r := c.run
	for _, v := range []struct {
		path      string
		v         int
		low, high int64
	}{
		{"run.log_every", r.Run.LogEvery, 1, maxSteps},
		{"run.eval_every", r.Run.EvalEvery, 0, maxSteps},
		{"checkpoint.every", r.Checkpoint.Every, 0, maxSteps},
		{"checkpoint.keep", r.Checkpoint.Keep, 1, maxSteps},
		{"parallel.pipeline", r.Parallel.Pipeline, 1, maxCount},
		{"parallel.expert", r.Parallel.Expert, 1, maxCount},
		{"parallel.microbatch", r.Parallel.Microbatch, 1, maxBatch},
		{"model.vocab", r.Model.VocabSize, 0, maxVocab},
		{"model.dim", r.Model.Dim, 1, maxWidth},
		{"model.layers", r.Model.Layers, 1, maxCount},
		{"model.dense_inter", r.Model.DenseInter, 0, maxWidth},
		{"model.context", r.Model.Context, 2, maxBatch},
		{"model.attention.heads", r.Model.Attention.Heads, 1, maxCount},
		{"model.attention.q_lora", r.Model.Attention.QLora, 0, maxWidth},
		{"model.attention.kv_lora", r.Model.Attention.KVLora, 1, maxWidth},
		{"model.attention.nope", r.Model.Attention.Nope, 1, maxWidth},
		{"model.attention.rope", r.Model.Attention.Rope, 2, maxWidth},
		{"model.attention.v", r.Model.Attention.V, 1, maxWidth},
		{"model.moe.experts", r.Model.MoE.Experts, 1, maxCount},
		{"model.moe.top_k", r.Model.MoE.TopK, 1, maxCount},
		{"model.moe.shared", r.Model.MoE.Shared, 0, maxCount},
		{"model.moe.inter", r.Model.MoE.Inter, 1, maxWidth},
		{"model.moe.groups", r.Model.MoE.Groups, 1, maxCount},
		{"model.moe.top_groups", r.Model.MoE.TopGroups, 1, maxCount},
		{"model.mtp.depth", r.Model.MTP.Depth, 0, maxCount},
	} {
		c.between(v.path, int64(v.v), v.low, v.high)
	}
	c.number("model.init_std", r.Model.InitStd, true)
	c.number("model.norm_eps", r.Model.NormEps, true)
	c.number("model.attention.rope_theta", r.Model.Attention.RopeTheta, true)
	c.number("model.moe.scale", r.Model.MoE.Scale, true)
	c.number("model.moe.seq_aux", r.Model.MoE.SeqAux, false)
	if r.Comm.Timeout < time.Millisecond {
		c.addf("comm.timeout=%s must be at least 1ms", duration(r.Comm.Timeout))
	}
	c.oneOf("precision.recipe", r.Precision.Recipe, RecipeNames())
	c.between("precision.promote", int64(r.Precision.Promote), 0, maxWidth)
	c.between("precision.watch", int64(r.Precision.Watch), 0, maxSteps)
	for _, problem := range r.Precision.Problems("precision.") {
		c.addf("%s", problem)
	}
	if p := r.Precision; p.Watch != 0 && p.Recipe == "fp32" {
		c.addf("precision.watch=%d has no effect with precision.recipe=fp32, where nothing is rounded: set precision.watch=0, or a recipe that rounds", p.Watch)
	}
	c.oneOf("parallel.schedule", r.Parallel.Schedule, pipeline.Names())
	if n := r.Parallel.RanksPerNode; n != 0 {
		c.addf("parallel.ranks_per_node=%d is not available in this version; leave it 0", n)
	}
	c.addAll(r.Tokenizer.Validate("tokenizer"))
	if len(r.Stages) == 0 {
		c.addf("stages is empty: a run needs at least one")
	}
	for i := range r.Stages {
		c.stageRanges(i, &r.Stages[i])
	}
}

var stageName = regexp.MustCompile(`^[a-z][a-z0-9_-]{0,31}$`)

func (c *checker) stageRanges(i int, s *Stage) {
	at := func(name string) string { return fmt.Sprintf("stages.%d.%s", i, name) }
	switch {
	case s.Name == "":
		c.addf("%s is missing: a stage needs a name", at("name"))
	case !stageName.MatchString(s.Name):
		// Checkpoint directories carry the name.
		c.addf("%s=%s must be up to 32 of a-z, 0-9, - and _, beginning with a letter", at("name"), quote(s.Name))
	}
	c.oneOf(at("objective"), s.Objective, objective.Names())
	if slices.Contains(objective.Names(), s.Objective) {
		c.addAll(objective.Validate(at("preference"), s.Objective, s.Preference))
		c.addAll(s.Chat.Validate(at("chat"), form(s.Objective)))
	}
	if a := s.Router.SeqAux; a != nil {
		c.number(at("router.seq_aux"), *a, false)
	}
	c.oneOf(at("optimizer.kind"), s.Optimizer.Kind, optimizer.Kinds())
	c.oneOf(at("optimizer.moments"), s.Optimizer.Moments, optimizer.MomentTypes())

	c.between(at("steps"), s.Steps, 0, maxSteps)
	c.between(at("tokens"), s.Tokens, 0, maxTokens)
	c.between(at("epochs"), s.Epochs, 0, maxSteps)
	c.between(at("batch.start"), int64(s.Batch.Start), 1, maxBatch)
	c.between(at("batch.end"), int64(s.Batch.End), 0, maxBatch)
	c.between(at("batch.step"), int64(s.Batch.Step), 0, maxBatch)
	c.between(at("batch.ramp_tokens"), s.Batch.RampTokens, 0, maxTokens)

	c.number(at("rate.peak"), s.Rate.Peak, true)
	c.number(at("rate.floor"), s.Rate.Floor, false)
	c.between(at("rate.warmup_steps"), s.Rate.WarmupSteps, 0, maxSteps)
	c.between(at("rate.constant_tokens"), s.Rate.ConstantTokens, 0, maxTokens)
	c.between(at("rate.decay_tokens"), s.Rate.DecayTokens, 0, maxTokens)
	if n := len(s.Rate.Tail); n > maxList {
		c.addf("%s has %d phases, at most %d", at("rate.tail"), n, maxList)
	}
	for j, t := range s.Rate.Tail {
		p := fmt.Sprintf("rate.tail.%d.", j)
		c.number(at(p+"rate"), t.Rate, false)
		c.between(at(p+"tokens"), t.Tokens, 1, maxTokens)
	}

	o := s.Optimizer
	c.beta(at("optimizer.beta1"), o.Beta1, at("optimizer.moments"), o.Moments)
	c.beta(at("optimizer.beta2"), o.Beta2, at("optimizer.moments"), o.Moments)
	c.number(at("optimizer.eps"), o.Eps, true)
	c.number(at("optimizer.weight_decay"), o.WeightDecay, false)
	c.number(at("optimizer.clip"), o.Clip, false)

	c.piecewise(at("router.bias_speed"), s.Router.BiasSpeed)
	c.piecewise(at("mtp_weight"), s.MTPWeight)

	if len(s.Data) == 0 {
		c.addf("%s is empty: name at least one source, such as {path: embedded:shakespeare}", at("data"))
	}
	c.addAll(data.ValidateSources(at("data"), s.Data))
	c.addAll(s.Val.Validate(at("val")))
}

// beta checks the decay of a moment, which is kept in the type that the setting at path moments names.
func (c *checker) beta(path string, v float64, moments, kept string) {
	switch {
	case !(v >= 0 && v < 1):
		c.addf("%s=%v must be at least 0 and below 1", path, v)
	case kept == optimizer.BF16 && v > optimizer.MaxBetaBF16:
		c.addf("%s=%v must be at most %v with %s=bf16: a slower decay is lost in rounding", path, v, optimizer.MaxBetaBF16, moments)
	}
}

func (c *checker) piecewise(path string, p optimizer.Piecewise) {
	if p != nil && len(p) == 0 {
		c.addf("%s has no phases", path)
	}
	if len(p) > maxList {
		c.addf("%s has %d phases, at most %d", path, len(p), maxList)
		return
	}
	var before int64
	for i, ph := range p {
		at := path
		if len(p) > 1 || ph.UntilTokens != 0 {
			at = fmt.Sprintf("%s.%d.value", path, i)
		}
		c.number(at, ph.Value, false)
		at = fmt.Sprintf("%s.%d.until_tokens", path, i)
		switch last := i == len(p)-1; {
		case last && ph.UntilTokens != 0:
			c.addf("%s=%d: the last phase lasts to the end of the stage; leave until_tokens out", at, ph.UntilTokens)
		case !last && ph.UntilTokens <= before:
			c.addf("%s=%d must be above %d, where its phase begins", at, ph.UntilTokens, before)
		case !last:
			c.between(at, ph.UntilTokens, 1, maxTokens)
		}
		before = ph.UntilTokens
	}
}

// model checks the architecture and what only the whole run knows about it.
func (c *checker) model() {
	m := c.run.Model
	if m.VocabSize == 0 {
		m.Vocab = 1 // that of characters is known when the text has been read; any size is fine
	}
	if c.run.Tokenizer.Kind == data.KindByte {
		if tok, err := data.NewTokenizer(c.run.Tokenizer, nil); err == nil {
			m.Vocab = tok.Size()
		}
	}
	c.addAll(m.Validate())
	if g := m.MoE; g.Groups > 1 {
		if g.Score == "sigmoid" && g.Experts/g.Groups < 2 {
			c.addf("model.moe.groups=%d leaves %d of model.moe.experts=%d to a group: the score of a group is the sum of its two best",
				g.Groups, g.Experts/g.Groups, g.Experts)
		}
		if g.TopGroups == g.Groups {
			c.addf("model.moe.groups=%d has no effect with model.moe.top_groups=%d: no group is ever left out", g.Groups, g.TopGroups)
		}
	}
}

// layout checks how the model is laid over ranks.
func (c *checker) layout(ranks int) {
	p, m := c.run.Parallel, c.run.Model
	if p.Pipeline < 1 || p.Expert < 1 {
		return // reported
	}
	if !c.run.hasMoE() && p.Expert > 1 {
		c.addf("parallel.expert=%d has no effect: with model.dense_layers=%d of model.layers=%d there are no experts",
			p.Expert, m.DenseLayers, m.Layers)
	}
	if m.MoE.Experts%p.Expert != 0 {
		c.addf("parallel.expert=%d does not divide model.moe.experts=%d", p.Expert, m.MoE.Experts)
	}
	if len(p.Split) == 0 {
		if p.Pipeline > m.Layers {
			c.addf("parallel.pipeline=%d exceeds model.layers=%d: stages without a layer must be given by parallel.split", p.Pipeline, m.Layers)
		}
	} else {
		sum := 0
		for i, n := range p.Split {
			c.between(fmt.Sprintf("parallel.split.%d", i), int64(n), 0, maxCount)
			sum += n
		}
		if len(p.Split) != p.Pipeline {
			c.addf("parallel.split has %d stages but parallel.pipeline=%d", len(p.Split), p.Pipeline)
		} else if sum != m.Layers {
			c.addf("parallel.split has %d layers in all but model.layers=%d", sum, m.Layers)
		}
	}
	if ranks <= 0 {
		return
	}
	if ranks%p.Pipeline != 0 {
		c.addf("parallel.pipeline=%d does not divide the %d ranks", p.Pipeline, ranks)
	} else if per := ranks / p.Pipeline; per%p.Expert != 0 {
		c.addf("parallel.expert=%d does not divide the %d data ranks (%d ranks / parallel.pipeline=%d)", p.Expert, per, ranks, p.Pipeline)
	}
}

// stage checks the rules within stage i and between it and the model.
func (c *checker) stage(i int) {
	r, s := c.run, &c.run.Stages[i]
	at := func(name string) string { return fmt.Sprintf("stages.%d.%s", i, name) }
	for j := range i {
		if r.Stages[j].Name == s.Name {
			c.addf("%s=%s is also the name of stages.%d", at("name"), s.Name, j)
			break
		}
	}
	c.length(i, s)

	b := s.Batch
	switch {
	case b.End < b.Start:
		c.addf("%s=%d exceeds %s=%d: a batch only grows", at("batch.start"), b.Start, at("batch.end"), b.End)
	case b.End > b.Start && b.RampTokens == 0:
		c.addf("%s=%d is never reached from %s=%d with %s=0", at("batch.end"), b.End, at("batch.start"), b.Start, at("batch.ramp_tokens"))
	case b.End == b.Start && b.RampTokens != 0:
		c.addf("%s=%d has no effect: %s=%d is also the start", at("batch.ramp_tokens"), b.RampTokens, at("batch.end"), b.End)
	case b.End == b.Start && b.Step != 0:
		c.addf("%s=%d has no effect: %s=%d is also the start", at("batch.step"), b.Step, at("batch.end"), b.End)
	case b.Step > b.End-b.Start:
		c.addf("%s=%d exceeds the whole growth from %s=%d to %s=%d", at("batch.step"), b.Step, at("batch.start"), b.Start, at("batch.end"), b.End)
	}
	if r.Parallel.Microbatch > b.Start {
		c.addf("parallel.microbatch=%d exceeds %s=%d", r.Parallel.Microbatch, at("batch.start"), b.Start)
	}

	q := s.Rate
	switch {
	case q.Floor > q.Peak:
		c.addf("%s=%v exceeds %s=%v", at("rate.floor"), q.Floor, at("rate.peak"), q.Peak)
	case q.Floor != 0 && q.DecayTokens == 0:
		c.addf("%s=%v has no effect with %s=0", at("rate.floor"), q.Floor, at("rate.decay_tokens"))
	case q.ConstantTokens != 0 && q.DecayTokens == 0 && len(q.Tail) == 0:
		c.addf("%s=%d has no effect: neither %s nor rate.tail follows", at("rate.constant_tokens"), q.ConstantTokens, at("rate.decay_tokens"))
	}
	if !s.Router.BiasSpeed.Zero() {
		switch {
		case !r.hasMoE():
			c.addf("%s has no effect: with model.dense_layers=%d of model.layers=%d there is no router", at("router.bias_speed"), r.Model.DenseLayers, r.Model.Layers)
		case r.Model.MoE.Score != "sigmoid":
			c.addf("%s has no effect with model.moe.score=%s: only the sigmoid gate has a selection bias", at("router.bias_speed"), r.Model.MoE.Score)
		}
	}
	c.judged(i, s)
	if !s.MTPWeight.Zero() && r.Model.MTP.Depth == 0 {
		c.addf("%s has no effect with model.mtp.depth=0", at("mtp_weight"))
	}
}

// form is what the data of an objective is made of.
func form(name string) chat.Form {
	_, needs, err := objective.New(name, objective.Default(name))
	switch {
	case err != nil:
		return chat.Instruct
	case needs.Unpaired:
		return chat.SingleLabel
	case needs.Pairs:
		return chat.Preference
	}
	return chat.Instruct
}

// judged checks the rules of stages that learn from preferences.
func (c *checker) judged(i int, s *Stage) {
	r := c.run
	at := func(name string) string { return fmt.Sprintf("stages.%d.%s", i, name) }
	if !judged(s.Objective) {
		return
	}
	if !s.MTPWeight.Zero() {
		c.addf("%s has no effect with %s=%s: it is a loss of next tokens", at("mtp_weight"), at("objective"), s.Objective)
	}
	if s.Pack != (data.PackConfig{}) {
		c.addf("%s has no effect with %s=%s: it packs documents", at("pack"), at("objective"), s.Objective)
	}
	if s.Objective == objective.Reward && i+1 < len(r.Stages) {
		c.addf("%s=%s must be the last stage: a reward model has no words to go on with", at("objective"), s.Objective)
	}
	if form(s.Objective) != chat.Preference {
		return
	}
	for _, x := range []struct {
		name string
		n    int
	}{{"parallel.microbatch", r.Parallel.Microbatch}, {at("batch.start"), s.Batch.Start}, {at("batch.end"), s.Batch.End}, {at("batch.step"), s.Batch.Step}} {
		if x.n%2 != 0 {
			c.addf("%s=%d must be even with %s=%s: it counts sequences, and a pair has two", x.name, x.n, at("objective"), s.Objective)
		}
	}
}

// stages checks what is an error only if it holds for every stage.
func (c *checker) stages() {
	r := c.run
	if len(r.Stages) == 0 {
		return // reported
	}
	if r.Run.EvalEvery > 0 && !slices.ContainsFunc(r.Stages, func(s Stage) bool { return s.holdsOut() }) {
		c.addf("run.eval_every=%d has no effect: no stage has val.share or val.data", r.Run.EvalEvery)
	}
	if r.Model.MTP.Depth > 0 && !slices.ContainsFunc(r.Stages, func(s Stage) bool { return !s.MTPWeight.Zero() || s.MTPWeight == nil || judged(s.Objective) }) {
		c.addf("model.mtp.depth=%d has no effect: stages.0.mtp_weight=0, and no other stage sets one", r.Model.MTP.Depth)
	}
}

// length demands exactly one length, of a number of tokens that fits.
func (c *checker) length(i int, s *Stage) {
	var given []string
	for _, l := range []struct {
		name string
		v    int64
	}{{"steps", s.Steps}, {"tokens", s.Tokens}, {"epochs", s.Epochs}} {
		if l.v > 0 {
			given = append(given, fmt.Sprintf("stages.%d.%s=%d", i, l.name, l.v))
		}
	}
	switch len(given) {
	case 0:
		c.addf("stages.%d.steps is missing: give one of steps, tokens, epochs", i)
	case 1:
		if float64(s.Steps)*float64(s.Batch.End)*float64(c.run.Model.Context) > maxTokens {
			c.addf("stages.%d.steps=%d is more than %g tokens with batch.end=%d and model.context=%d", i, s.Steps, float64(maxTokens), s.Batch.End, c.run.Model.Context)
		}
	default:
		c.addf("%s: give one of them and set the others to 0", strings.Join(given, " and "))
	}
}
