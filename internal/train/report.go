package train

import (
	"encoding/json"
	"fmt"
	"math"
	"strings"
)

// A Report is what one step did; rank 0 writes it as a line of metrics.jsonl.
type Report struct {
	Stage    string  `json:"stage"`
	Step     int64   `json:"step"`   // optimizer steps of the stage, this one included
	Tokens   int64   `json:"tokens"` // of the stage, this step's included: sequences times the context, as schedules count
	Loss     float64 `json:"loss"`   // mean cross-entropy of the main head over the target tokens, in nats
	MTPLoss  float64 `json:"mtp_loss,omitempty"`
	AuxLoss  float64 `json:"aux_loss,omitempty"` // sequence-wise balance loss, alpha included, summed over layers
	LR       float64 `json:"lr"`
	Batch    int     `json:"batch"`     // sequences of the global batch
	GradNorm float64 `json:"grad_norm"` // before clipping
	TokS     float64 `json:"tok_s"`     // real tokens, padding not
	StepMS   float64 `json:"step_ms"`
	MFU      float64 `json:"mfu"`
	Skipped  int     `json:"skipped"` // always 0: a step with a number that is not finite ends the run; readers expect the key

	ValLoss *float64 `json:"val_loss,omitempty"`

	// Sums are what the objective adds up, by name, as means: reward_margin, reward_accuracy, …; of validation with val_
	// before the name. They stand in the line beside the others.
	Sums map[string]float64 `json:"-"`

	Time  map[string]float64 `json:"time"` // ms on rank 0
	MoE   []RouterLoad       `json:"moe,omitempty"`
	MemMB float64            `json:"mem_mb"` // resident memory of rank 0

	stop bool
	real float64 // tokens of this step that are not padding
}

// RouterLoad describes how evenly one MoE layer used its experts in this step, over the whole global batch.
type RouterLoad struct {
	Layer   int     `json:"layer"`
	MaxVio  float64 `json:"max_vio"` // max load / mean load - 1 (auxiliary-loss-free balancing, arXiv 2408.15664, §4)
	Dead    int     `json:"dead"`    // experts without a single token
	Entropy float64 `json:"entropy"` // of the experts' shares, in nats: ln(experts) is even
}

// finite reports whether the loss and the gradient norm are numbers.
func (r *Report) finite() bool {
	return finite(r.Loss) && finite(r.GradNorm) && finite(r.MTPLoss) && finite(r.AuxLoss)
}

// line is the report as a line of text for a terminal or a log.
func (r *Report) line(total int64) string {
	var b strings.Builder
	fmt.Fprintf(&b, "%s step %d/%d  loss %.4f", r.Stage, r.Step, total, r.Loss)
	if r.ValLoss != nil {
		fmt.Fprintf(&b, "  val %.4f", *r.ValLoss)
	}
	for _, name := range []string{"reward_accuracy", "reward_margin", "val_reward_accuracy"} {
		if v, ok := r.Sums[name]; ok {
			fmt.Fprintf(&b, "  %s %.3f", strings.ReplaceAll(name, "reward_", ""), v)
		}
	}
	fmt.Fprintf(&b, "  lr %.2e  batch %d  norm %.3f  %.0f tok/s  mfu %.1f%%", r.LR, r.Batch, r.GradNorm, r.TokS, 100*r.MFU)
	return b.String()
}

func (r *Report) json() ([]byte, error) {
	c := *r
	// JSON has no NaN: a refused step is written with null-like markers rather than losing the line.
	for _, p := range []*float64{&c.Loss, &c.GradNorm, &c.MTPLoss, &c.AuxLoss, &c.TokS, &c.MFU} {
		if math.IsNaN(*p) || math.IsInf(*p, 0) {
			*p = -1
		}
	}
	line, err := json.Marshal(&c)
	if err != nil || len(c.Sums) == 0 {
		return line, err
	}
	more, err := json.Marshal(c.Sums)
	if err != nil {
		return nil, err
	}
	return append(append(line[:len(line)-1], ','), more[1:]...), nil
}
