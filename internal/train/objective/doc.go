// Package objective holds the losses of the tuning stages: direct preference losses on pairs of answers (DPO and its
// relatives, IPO, hinge, SimPO, ORPO), KTO on single answers, and the Bradley-Terry loss of a reward model.
//
//	o, needs, err := objective.New("dpo", objective.Default("dpo"))  // needs.Reference: Micro.Ref must be set
//
// The loss of a micro-batch that lacks what the objective needs is NaN.
//
// A loss sees only numbers, not the model: per row y = -log p(target), or the score of a reward model. It answers with
// the derivative of the summed loss by each y. All sums run in row order in float64, so a policy that equals its
// reference gives log-ratios of exactly 0 and a first loss of exactly ln 2 per pair.
//
// What the losses are made of, per answer (the rows of one sequence with Weight != 0):
//
//	log p    sum of -y over the rows
//	length   number of the rows
//	ratio    log p - Ref, the log-ratio of policy and reference
//
// An answer without a trained row has no probability to speak of. Its pair (KTO: the answer) adds nothing, not even
// weight; sources do not produce such.
package objective
