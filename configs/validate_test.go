package configs

import (
	"fmt"
	"strings"
	"testing"
)

// TestWrong: each wrong configuration gives exactly one line, whole here. In text, which replaces the demo preset, § marks
// the place that the error must name, after "c.yaml:"; without text the preset is taken and changed by sets.
func TestWrong(t *testing.T) {
	stage := func(s string) string { return "stages: [{name: a, steps: 9, data: [{path: x}], " + s + "}]\n" }
	for _, c := range []struct {
		text string
		sets string // separated by spaces
		want string // after the place
	}{
		// ranks and layout
		{"", "parallel.pipeline=3", "--set: parallel.pipeline=3 does not divide the 4 ranks"},
		{"", "parallel.expert=4", "--set: parallel.expert=4 does not divide the 2 data ranks (4 ranks / parallel.pipeline=2)"},
		{"", "parallel.pipeline=1 parallel.expert=4 model.moe.experts=6 model.moe.top_k=2", "--set: parallel.expert=4 does not divide model.moe.experts=6"},
		{"parallel: {expert: §6}\nmodel: {moe: {experts: 64}}\n", "", "c.yaml: parallel.expert=6 does not divide model.moe.experts=64"},
		{"", "parallel.pipeline=0", "--set: parallel.pipeline=0 must be at least 1"},
		{"parallel: {pipeline: §4}\nmodel: {layers: 2}\n", "", "c.yaml: parallel.pipeline=4 exceeds model.layers=2: stages without a layer must be given by parallel.split"},
		{"", "parallel.split=[1,2,1]", "--set: parallel.split has 3 stages but parallel.pipeline=2"},
		{"", "parallel.split=[1,2]", "--set: parallel.split has 3 layers in all but model.layers=4"},
		{"", "parallel.split=[5,-1]", "--set: parallel.split.1=-1 must be at least 0"},
		{"", "parallel.schedule=dualpipe", "--set: parallel.schedule=dualpipe is not available in this version; known: 1f1b, gpipe"},
		{"", "parallel.ranks_per_node=2", "--set: parallel.ranks_per_node=2 is not available in this version; leave it 0"},
		{"", "parallel.microbatch=9", "--set: parallel.microbatch=9 exceeds stages.0.batch.start=8"},
		{"model: {layers: 2, dense_layers: 2}\nparallel: {expert: §2}\n", "", "c.yaml: parallel.expert=2 has no effect: with model.dense_layers=2 of model.layers=2 there are no experts"},
		// model
		{"model: {dim: §0}\n", "", "c.yaml: model.dim=0 must be at least 1"},
		{"model: {dim: §99999999}\n", "", "c.yaml: model.dim=99999999 must be at most 1048576"},
		{"model:\n  attention: {rope: §15}\n", "", "c.yaml: model.attention.rope=15 must be even: positions rotate pairs"},
		{"model: {attention: {kind: §mha}}\n", "", "c.yaml: model.attention.kind=\"mha\" is unknown; known: mla"},
		{"model: {context: §1}\n", "", "c.yaml: model.context=1 must be at least 2"},
		{"model: {dense_layers: §9}\n", "", "c.yaml: model.dense_layers=9 must be between 0 and model.layers=4"},
		{"model: {vocab: §100}\n", "", "c.yaml: model.vocab=100 is smaller than the tokenizer's vocabulary of 264"},
		{"precision: {recipe: fp8, §keep: [weight]}\n", "", "c.yaml: precision.keep names \"weight\"; known: attn_out, gradients, inputs, weights"},
		{"precision: {recipe: fp8, §keep: [inputs, inputs]}\n", "", "c.yaml: precision.keep names \"inputs\" twice"},
		{"precision: {recipe: fp8-tensor, §keep: [weights]}\n", "", "c.yaml: precision.keep=weights has no effect with recipe fp8-tensor: only with fp8, mxfp8, hopper"},
		{"model: {§recompute: [norms]}\n", "", "c.yaml: model.recompute names \"norms\"; known: norm, mla_up, swiglu"},
		{"model: {§recompute: [norm, norm]}\n", "", "c.yaml: model.recompute names \"norm\" twice"},
		{"model: {init_std: §.nan}\n", "", "c.yaml: model.init_std must be finite: .nan"},
		{"model: {norm_eps: §0}\n", "", "c.yaml: model.norm_eps=0 must be above 0"},
		{"model: {moe: {experts: 6, groups: §4, top_groups: 2}}\n", "", "c.yaml: model.moe.groups=4 does not divide model.moe.experts=6"},
		{"model: {moe: {groups: 2, top_groups: §3}}\n", "", "c.yaml: model.moe.top_groups=3 exceeds model.moe.groups=2"},
		{"model: {moe: {groups: §2, top_groups: 2}}\n", "", "c.yaml: model.moe.groups=2 has no effect with model.moe.top_groups=2: no group is ever left out"},
		{"model: {moe: {groups: §8, top_groups: 2}}\n", "", "c.yaml: model.moe.groups=8 leaves 1 of model.moe.experts=8 to a group: the score of a group is the sum of its two best"},
		{"model: {moe: {top_k: 5, groups: 2, top_groups: §1}}\n", "", "c.yaml: model.moe.top_groups=1 keeps 4 experts, fewer than model.moe.top_k=5"},
		{"model: {moe: {top_k: §9}}\n", "", "c.yaml: model.moe.top_k=9 exceeds model.moe.experts=8"},
		{"model: {moe: {top_k: §1}}\n", "", "c.yaml: model.moe.top_k=1 with model.moe.normalize=true makes every routed weight constant, so the router learns nothing; set normalize to false"},
		{"model: {moe: {score: §tanh}}\n", "", "c.yaml: model.moe.score=\"tanh\" is unknown; known: sigmoid, softmax"},
		{"model: {moe: {seq_aux: §-1}}\n", "", "c.yaml: model.moe.seq_aux=-1 must not be negative"},
		{"model: {mtp: {depth: §1}}\n" + stage("mtp_weight: 0"), "", "c.yaml: model.mtp.depth=1 has no effect: stages.0.mtp_weight=0, and no other stage sets one"},
		// the rest of the run
		{"precision: {recipe: §fp9}\n", "", "c.yaml: precision.recipe=fp9 is not available in this version; known: bf16, fp32, fp8, fp8-tensor, hopper, mxfp8"},
		{"precision: {recipe: fp8, promote: §256}\n", "", "c.yaml: precision.promote=256 has no effect with precision.recipe=fp8: only hopper has sums of few bits"},
		{"precision: {recipe: hopper, promote: §100}\n", "", "c.yaml: precision.promote=100 must be a multiple of 32, the products of one step of the tensor cores"},
		{"precision: {watch: §5}\n", "", "c.yaml: precision.watch=5 has no effect with precision.recipe=fp32, where nothing is rounded: set precision.watch=0, or a recipe that rounds"},
		{"precision: {recipe: fp8, watch: 5}\n", "precision.recipe=fp32", "--set: precision.watch=5 has no effect with precision.recipe=fp32, where nothing is rounded: set precision.watch=0, or a recipe that rounds"},
		{"tokenizer: {kind: §bpe}\n", "", "c.yaml: tokenizer.kind=bpe: want byte or char"},
		{"tokenizer: {file: §a.txt}\n", "", "c.yaml: tokenizer.file=a.txt: has no effect with tokenizer.kind=byte"},
		{"checkpoint: {keep: §0}\n", "", "c.yaml: checkpoint.keep=0 must be at least 1"},
		{"comm: {timeout: §0s}\n", "", "c.yaml: comm.timeout=0s must be at least 1ms"},
		{"comm: {timeout: §60}\n", "", "c.yaml: comm.timeout needs a duration such as 60s, got the number 60"},
		{"comm: {timeout: §soon}\n", "", "c.yaml: comm.timeout needs a duration such as 60s, got the text \"soon\""},
		{"run: {seed: §-1}\n", "", "c.yaml: run.seed is out of range: -1"},
		{"run: {eval_every: §5}\n" + stage(""), "", "c.yaml: run.eval_every=5 has no effect: no stage has val.share or val.data"},
		// stages
		{"§stages: []\n", "", "c.yaml: stages is empty: a run needs at least one"},
		{"stages: [§{name: a, data: [{path: x}]}]\n", "", "c.yaml: stages.0.steps is missing: give one of steps, tokens, epochs"},
		{"stages: [{name: a, steps: §9, data: [{path: x}], tokens: 100}]\n", "", "c.yaml: stages.0.steps=9 and stages.0.tokens=100: give one of them and set the others to 0"},
		{"", "stages.0.epochs=2", "--set: stages.0.steps=200 and stages.0.epochs=2: give one of them and set the others to 0"},
		{"stages: [§{name: a, steps: 9}]\n", "", "c.yaml: stages.0.data is empty: name at least one source, such as {path: embedded:shakespeare}"},
		{"stages: [§{steps: 9, data: [{path: x}]}]\n", "", "c.yaml: stages.0.name is missing: a stage needs a name"},
		{"stages: [{name: §A/b, steps: 9, data: [{path: x}]}]\n", "", "c.yaml: stages.0.name=\"A/b\" must be up to 32 of a-z, 0-9, - and _, beginning with a letter"},
		{"stages: [{name: a, steps: 9, data: [{path: x}]}, {name: §a, steps: 9, data: [{path: x}]}]\n", "", "c.yaml: stages.1.name=a is also the name of stages.0"},
		{"", "stages.0.objective=ppo", "--set: stages.0.objective=ppo is not available in this version; known: lm, dpo, cdpo, robust, ipo, hinge, kto, simpo, orpo, reward"},
		{"", "stages.0.preference.beta=0.1", "--set: stages.0.preference.beta=0.1 has no effect with objective lm"},
		{"", "stages.0.data.0.path=embedded:bible", "--set: stages.0.data.0.path=embedded:bible: no such embedded text; there is embedded:gsm8k-solutions, embedded:shakespeare, embedded:tldr"},
		{"", "stages.0.data.0.weight=-1", "--set: stages.0.data.0.weight=-1: a weight is a number above 0"},
		{"", "stages.0.val.share=1", "--set: stages.0.val.share=1: a share lies between 0 and 1"},
		{stage("batch: {start: §32, end: 16}"), "", "c.yaml: stages.0.batch.start=32 exceeds stages.0.batch.end=16: a batch only grows"},
		{stage("batch: {start: 16, end: §32}"), "", "c.yaml: stages.0.batch.end=32 is never reached from stages.0.batch.start=16 with stages.0.batch.ramp_tokens=0"},
		{stage("batch: {start: 16, ramp_tokens: §10}"), "", "c.yaml: stages.0.batch.ramp_tokens=10 has no effect: stages.0.batch.end=16 is also the start"},
		{stage("batch: {start: 16, step: §2}"), "", "c.yaml: stages.0.batch.step=2 has no effect: stages.0.batch.end=16 is also the start"},
		{stage("batch: {start: 16, end: 18, ramp_tokens: 10, step: §3}"), "", "c.yaml: stages.0.batch.step=3 exceeds the whole growth from stages.0.batch.start=16 to stages.0.batch.end=18"},
		{stage("rate: {peak: §0}"), "", "c.yaml: stages.0.rate.peak=0 must be above 0"},
		{stage("rate: {peak: §.inf}"), "", "c.yaml: stages.0.rate.peak must be finite: .inf"},
		{stage("rate: {peak: 1e-4, decay_tokens: 5, floor: §1e-3}"), "", "c.yaml: stages.0.rate.floor=0.001 exceeds stages.0.rate.peak=0.0001"},
		{stage("rate: {floor: §1e-4}"), "", "c.yaml: stages.0.rate.floor=0.0001 has no effect with stages.0.rate.decay_tokens=0"},
		{stage("rate: {constant_tokens: §7}"), "", "c.yaml: stages.0.rate.constant_tokens=7 has no effect: neither stages.0.rate.decay_tokens nor rate.tail follows"},
		{stage("rate: {tail: [{rate: 1, tokens: §0}]}"), "", "c.yaml: stages.0.rate.tail.0.tokens=0 must be at least 1"},
		{stage("optimizer: {kind: §muon}"), "", "c.yaml: stages.0.optimizer.kind=muon is not available in this version; known: adamw"},
		{stage("optimizer: {beta2: §1}"), "", "c.yaml: stages.0.optimizer.beta2=1 must be at least 0 and below 1"},
		{stage("optimizer: {moments: §fp8}"), "", "c.yaml: stages.0.optimizer.moments=fp8 is not available in this version; known: fp32, bf16"},
		{stage("optimizer: {moments: bf16, beta2: §0.999}"), "", "c.yaml: stages.0.optimizer.beta2=0.999 must be at most 0.99609375 with stages.0.optimizer.moments=bf16: a slower decay is lost in rounding"},
		{stage("optimizer: {clip: §-1}"), "", "c.yaml: stages.0.optimizer.clip=-1 must not be negative"},
		{stage("mtp_weight: §0.3"), "", "c.yaml: stages.0.mtp_weight has no effect with model.mtp.depth=0"},
		{"model: {moe: {score: softmax}}\n" + stage("router: {bias_speed: §0.1}"), "", "c.yaml: stages.0.router.bias_speed has no effect with model.moe.score=softmax: only the sigmoid gate has a selection bias"},
		{stage("router: {bias_speed: §-0.1}"), "", "c.yaml: stages.0.router.bias_speed=-0.1 must not be negative"},
		{stage("router: {bias_speed: [{until_tokens: 9, value: 1}, {until_tokens: §8, value: 1}, {value: 0}]}"), "", "c.yaml: stages.0.router.bias_speed.1.until_tokens=8 must be above 9, where its phase begins"},
		{stage("router: {bias_speed: [{until_tokens: §9, value: 1}]}"), "", "c.yaml: stages.0.router.bias_speed.0.until_tokens=9: the last phase lasts to the end of the stage; leave until_tokens out"},
		{stage("router: {§bias_speed: []}"), "", "c.yaml: stages.0.router.bias_speed has no phases"},
		{"", "stages.0.steps=900000000000 model.context=1048576", "--set: stages.0.steps=900000000000 is more than 1e+16 tokens with batch.end=12 and model.context=1048576"},
		// form
		{"", "parallel.pipelin=2", `--set: unknown key "parallel.pipelin"; did you mean parallel.pipeline?`},
		{"", "steps=2", `--set: unknown key "steps"; did you mean stages.0.steps?`},
		{"", "stages.3.steps=2", "--set: stages.3 does not exist: stages has 3 elements, counted from 0"},
		{"", "stages.x.steps=2", "--set: stages is a list: select an element by number, as in stages.0"},
		{"", "run.seed.x=2", `--set: run.seed is a single value and has no "x"`},
		{"", "run.seed", `--set: "run.seed": write it as path=value, such as stages.0.steps=30`},
		{"", "run.seed=", "--set: run.seed has no value"},
		{"", "run.seed=ten", `--set: run.seed needs an integer of at least 0, got the text "ten"`},
		{"", "run.out=a\xff", `--set: run.out is not valid UTF-8: "a\xff"`},
		{"run:\n  {out: \"a§\xff\"}\n", "", "c.yaml: not valid UTF-8"},
		{"", "model.dim=4\xff", "--set: model.dim: not valid UTF-8"},
		{"", "comm.timeout=1", `--set: comm.timeout needs a duration such as 60s, got the text "1"`},
		{"", "model.dim=1e-1", `--set: model.dim needs an integer, got the text "1e-1"`},
		{"", "model.moe={expert:4}", `--set: unknown key "model.moe.expert"; did you mean model.moe.experts?`},
		{"", "parallel.split=[1", "--set: parallel.split: not valid YAML: sequence end token ']' not found"},
		{"", "model.tie_embeddings=1", "--set: model.tie_embeddings needs true or false, got the number 1"},
		{"§\n# nothing\n", "", "c.yaml: the configuration is empty; write {} for all defaults"},
		{"model: §{dim: 1\n", "", "c.yaml: not valid YAML: could not find flow mapping end token '}'"},
		{"model:\n§\tdim: 1\n", "", "c.yaml: not valid YAML: found character '\t' that cannot start any token"},
		{"§- 1\n", "", "c.yaml: a configuration is a mapping of run, model, parallel, …; got a list"},
		{"run: {seed: 1}\n---\n§run: {seed: 2}\n", "", "c.yaml: a configuration is one YAML document; here begins another"},
		{"model:\n  dim: 1\n  §dim: 2\n", "", "c.yaml: model.dim is set twice, first on line 2"},
		{"model: {§dim: }\n", "", "c.yaml: model.dim has no value"},
		{"model: {dim: §\"4\"}\n", "", `c.yaml: model.dim needs an integer, got the text "4"`},
		{"model: {layers: §99999999999999999999}\n", "", "c.yaml: model.layers is too large: 99999999999999999999"},
		{"run: {out: §4}\n", "", "c.yaml: run.out needs a text, got the number 4"},
		{"model: §*m\n", "", "c.yaml: model: alias *m has no anchor &m"},
		{"model: §!!map {dim: 4}\n", "", "c.yaml: model: YAML tags are not supported"},
		{"§stages: {name: a}\n", "", "c.yaml: stages needs a list, got a mapping"},
		{"stages: [§5]\n", "", "c.yaml: stages.0 needs a mapping with the keys name, objective, data, val, pack, chat, steps, tokens, epochs, batch, rate, optimizer, router, mtp_weight, preference, got the number 5"},
		{stage("mtp_weight: §high"), "", `c.yaml: stages.0.mtp_weight needs a number or a list of {until_tokens, value}, got the text "high"`},
		{"§modle: {}\n", "", `c.yaml: unknown key "modle"; did you mean model?`},
		{"§optimizer: {}\n", "", `c.yaml: unknown key "optimizer"; known here: run, model, parallel, precision, tokenizer, checkpoint, comm, stages`},
	} {
		text, want := c.text, c.want
		if before, after, ok := strings.Cut(text, "§"); ok {
			text = before + after
			line := strings.Count(before, "\n") + 1
			want = strings.Replace(want, "c.yaml:", fmt.Sprintf("c.yaml:%d:%d:", line, len(before)-strings.LastIndex(before, "\n")), 1)
		}
		r, err := Load("demo", strings.Fields(c.sets))
		if text != "" {
			r, err = Parse([]byte(text), "c.yaml", strings.Fields(c.sets))
		}
		if err == nil {
			err = Validate(r, 4)
		}
		if err == nil {
			t.Errorf("%q %s: accepted, want %s", text, c.sets, want)
		} else if err.Error() != want {
			t.Errorf("%q %s:\n got %s\nwant %s", text, c.sets, err, want)
		}
	}
}

// TestValidateAll: independent problems are reported together, consequences are not.
func TestValidateAll(t *testing.T) {
	r, err := Load("demo", []string{"parallel.pipeline=3", "model.attention.rope=7", "stages.0.batch.start=64", "checkpoint.keep=0"})
	if err != nil {
		t.Fatal(err)
	}
	want := "--set: parallel.pipeline=3 does not divide the 4 ranks\n" +
		"--set: model.attention.rope=7 must be even: positions rotate pairs\n" +
		"--set: stages.0.batch.start=64 exceeds stages.0.batch.end=12: a batch only grows\n" +
		"--set: checkpoint.keep=0 must be at least 1"
	if err := Validate(r, 4); err == nil || err.Error() != want {
		t.Errorf("got\n%v\nwant\n%s", err, want)
	}
	if err := Validate(r, 0); err == nil || strings.Contains(err.Error(), "ranks") {
		t.Errorf("without ranks: %v", err)
	}
}

func TestNearest(t *testing.T) {
	for _, c := range []struct {
		a, b string
		want int
	}{{"", "", 0}, {"a", "", 1}, {"", "ab", 2}, {"kitten", "sitting", 3}, {"flaw", "lawn", 2}, {"experts", "experts", 0}, {"pipelin", "pipeline", 1}} {
		if got := distance(c.a, c.b); got != c.want {
			t.Errorf("distance(%q, %q) = %d, want %d", c.a, c.b, got, c.want)
		}
	}
}
