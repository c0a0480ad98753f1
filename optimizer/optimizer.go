// SKELETON (configs+optimizer author owns)
package optimizer

type Config struct {
	Kind        string  `yaml:"kind"` // adamw
	Beta1       float64 `yaml:"beta1"`
	Beta2       float64 `yaml:"beta2"`
	Eps         float64 `yaml:"eps"`
	WeightDecay float64 `yaml:"weight_decay"`
	Clip        float64 `yaml:"clip"` // global gradient norm; 0 = none
}

// Rate: linear warm-up in steps, constant, cosine, constant tails, in tokens (DeepSeek-V3 §4.2).
type Rate struct {
	Peak           float64 `yaml:"peak"`
	WarmupSteps    int64   `yaml:"warmup_steps"`
	ConstantTokens int64   `yaml:"constant_tokens"` // tokens until which Peak holds
	DecayTokens    int64   `yaml:"decay_tokens"`    // length of the cosine after that; 0 = none
	Floor          float64 `yaml:"floor"`
	Tail           []Tail  `yaml:"tail"` // further constant phases after the cosine
}
type Tail struct {
	Rate   float64 `yaml:"rate"`
	Tokens int64   `yaml:"tokens"`
}

// BatchSize: sequences per global batch.
type BatchSize struct {
	Start      int   `yaml:"start"`
	End        int   `yaml:"end"`
	RampTokens int64 `yaml:"ramp_tokens"`
	Step       int   `yaml:"step"` // the batch grows in multiples of this (0: parallel.microbatch)
}

// Slice is what the optimizer updates: rows of one param that this rank owns.
type Slice struct {
	Name        string
	Value, Grad []float32
	M, V        []float32
	Decay       bool
}
