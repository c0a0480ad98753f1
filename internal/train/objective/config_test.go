package objective

import (
	"fmt"
	"math"
	"strings"
	"testing"
)

func TestNames(t *testing.T) {
	if got := strings.Join(Names(), " "); got != "lm dpo cdpo robust ipo hinge kto simpo orpo reward" {
		t.Error(got)
	}
	for _, name := range Names() {
		if errs := Validate("stages.1.preference", name, Default(name)); len(errs) > 0 {
			t.Errorf("defaults of %s: %v", name, errs)
		}
		o, needs, err := New(name, Default(name))
		if err != nil || (o == nil) != (name == LM) {
			t.Errorf("%s: %v, %v", name, o, err)
		}
		if o == nil {
			if needs != (Needs{}) {
				t.Errorf("lm needs %+v", needs)
			}
			continue
		}
		if needs.Pairs == needs.Unpaired {
			t.Errorf("%s needs %+v: want pairs or single answers", name, needs)
		}
		if _, ok := o.(KLSetter); ok != needs.KL {
			t.Errorf("%s: a KLSetter %t, needs.KL %t", name, ok, needs.KL)
		}
	}
	for name, want := range map[string]string{
		DPO:    "{Reference:true Pairs:true Unpaired:false KL:false Score:false}",
		KTO:    "{Reference:true Pairs:false Unpaired:true KL:true Score:false}",
		SimPO:  "{Reference:false Pairs:true Unpaired:false KL:false Score:false}",
		ORPO:   "{Reference:false Pairs:true Unpaired:false KL:false Score:false}",
		Reward: "{Reference:false Pairs:true Unpaired:false KL:false Score:true}",
	} {
		if _, needs, _ := New(name, Default(name)); fmt.Sprintf("%+v", needs) != want {
			t.Errorf("%s needs %+v", name, needs)
		}
	}
	if got := fmt.Sprint(Reads(IPO)); got != "[beta average sft]" {
		t.Error(got)
	}
}

// TestValidate: each wrong or useless setting is one line that begins with its name and value.
func TestValidate(t *testing.T) {
	with := func(name string, f func(*Config)) Config {
		c := Default(name)
		f(&c)
		return c
	}
	for _, c := range []struct {
		name string
		c    Config
		want string // lines, joined by |; "" is none
	}{
		{DPO, Config{}, "p.beta=0: the preference loss would not move; give a positive number"},
		{DPO, Config{Beta: -1}, "p.beta=-1 must not be negative"},
		{DPO, Config{Beta: math.NaN()}, "p.beta=NaN must be finite"},
		{DPO, Config{Beta: math.Inf(1)}, "p.beta=+Inf must be finite"},
		{DPO, Config{Beta: 0.1, Smoothing: 0.1}, "p.smoothing=0.1 has no effect with objective dpo; use cdpo or robust"},
		{DPO, Config{Beta: 0.1, Gamma: math.NaN()}, "p.gamma=NaN has no effect with objective dpo"},
		{DPO, Config{Beta: 0.1, Average: true}, "p.average=true has no effect with objective dpo; it is a choice of ipo (simpo and orpo always average)"},
		{DPO, Config{Beta: 0.1, SFT: -0.5}, "p.sft=-0.5 must not be negative"},
		{CDPO, Config{Beta: 0.1}, "p.smoothing=0: no pair is taken for mislabelled, which is objective dpo; use that"},
		{Robust, Config{Beta: 0.1, Smoothing: 0.5}, "p.smoothing=0.5 must be below 0.5: from there on the labels say nothing, or the opposite"},
		{SimPO, with(SimPO, func(c *Config) { c.Gamma = 0 }), ""},
		{SimPO, with(SimPO, func(c *Config) { c.Gamma = -1 }), "p.gamma=-1 must not be negative"},
		{ORPO, Config{Beta: 0.1}, "p.beta=0.1 has no effect with objective orpo; its weight is lambda|p.lambda=0: rejected answers would have no part in the loss; give a positive number, or use objective lm"},
		{KTO, Config{Beta: 0.1}, "p.desirable=0: desirable answers would teach nothing; give a positive number|p.undesirable=0: undesirable answers would teach nothing; give a positive number"},
		{Reward, Config{SFT: 1}, "p.sft=1 has no effect with objective reward: a model with a score head has no log-probabilities"},
		{LM, Config{Beta: 0.1, SFT: 1}, "p.beta=0.1 has no effect with objective lm|p.sft=1 has no effect with objective lm"},
		{"dop", Config{}, `p: objective "dop" is unknown; known: lm, dpo, cdpo, robust, ipo, hinge, kto, simpo, orpo, reward`},
	} {
		var lines []string
		for _, err := range Validate("p", c.name, c.c) {
			lines = append(lines, err.Error())
		}
		if got := strings.Join(lines, "|"); got != c.want {
			t.Errorf("%s %+v:\n%s, want\n%s", c.name, c.c, got, c.want)
		}
		if o, _, err := New(c.name, c.c); (err == nil) != (c.want == "") || err != nil && o != nil {
			t.Errorf("New(%s, %+v) = %v, %v", c.name, c.c, o, err)
		}
	}
}
