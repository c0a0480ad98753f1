package model

import (
	"fmt"
	"math"
	"slices"
)

// Sampling says how to choose the next token from its logits.
type Sampling struct {
	Temperature float64 // 0: the most likely token
	TopK        int     // only the k most likely; 0: all
	TopP        float64 // only the fewest most likely that have this share of the probability together; 0 or 1: all
	Seed        uint64
}

// A Sampler chooses tokens. Equal seeds and logits give equal tokens.
type Sampler struct {
	Sampling
	drawn uint64
	order []int32
	probs []float64
}

// NewSampler refuses settings out of range by name.
func NewSampler(s Sampling) (*Sampler, error) {
	switch {
	case !(s.Temperature >= 0) || math.IsInf(s.Temperature, 1):
		return nil, fmt.Errorf("temperature=%v must be 0 or a positive number", s.Temperature)
	case s.TopK < 0:
		return nil, fmt.Errorf("top-k=%d must not be negative", s.TopK)
	case !(s.TopP >= 0 && s.TopP <= 1):
		return nil, fmt.Errorf("top-p=%v must be between 0 and 1", s.TopP)
	}
	return &Sampler{Sampling: s}, nil
}

// Next chooses a token. Tokens of equal logit stand in order of their number.
func (s *Sampler) Next(logits []float32) int32 {
	best := int32(0)
	for i, v := range logits {
		if greater(v, logits[best]) {
			best = int32(i)
		}
	}
	if s.Temperature == 0 || s.TopK == 1 {
		return best
	}
	s.order, s.probs = grow(s.order, len(logits)), grow(s.probs, len(logits))
	for i := range s.order {
		s.order[i] = int32(i)
	}
	slices.SortFunc(s.order, func(a, b int32) int {
		switch {
		case greater(logits[a], logits[b]):
			return -1
		case greater(logits[b], logits[a]):
			return 1
		}
		return int(a - b)
	})
	keep := len(logits)
	if s.TopK > 0 {
		keep = min(keep, s.TopK)
	}
	var sum float64
	for i, t := range s.order[:keep] {
		s.probs[i] = math.Exp(float64(logits[t]-logits[best]) / s.Temperature)
		sum += s.probs[i]
	}
	if s.TopP > 0 && s.TopP < 1 {
		var share float64
		for i, p := range s.probs[:keep] {
			if share += p; share >= s.TopP*sum {
				keep, sum = i+1, share
				break
			}
		}
	}
	s.drawn++
	u := float64(mix(mix(s.Seed)+s.drawn)>>11) / (1 << 53) * sum
	for i, p := range s.probs[:keep] {
		if u -= p; u < 0 {
			return s.order[i]
		}
	}
	return s.order[keep-1]
}
