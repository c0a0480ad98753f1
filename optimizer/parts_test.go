package optimizer

import (
	"math"
	"testing"

	"moetor/internal/kernel"
)

// TestAdamWParts: values that parts cut, gather or leave alone are each updated once, on any threads, to the bit as one by one.
func TestAdamWParts(t *testing.T) {
	defer kernel.SetThreads(1)
	for _, moments := range MomentTypes() {
		cfg := Config{Kind: "adamw", Moments: moments, Beta1: 0.9, Beta2: 0.95, Eps: 1e-8, WeightDecay: 0.1}
		var cut, whole []Slice
		for i, n := range []int{3, partValues, 2*partValues + 17, 1, 0, partValues - 5, 40} {
			for _, list := range []*[]Slice{&cut, &whole} {
				s := Slice{Value: make([]float32, n), Grad: make([]float32, n), Decay: i%2 == 0}
				for j := range n {
					s.Value[j], s.Grad[j] = float32(math.Sin(float64(i+j))), float32(math.Cos(float64(3*i+j)))
				}
				*list = append(*list, s)
			}
		}
		a, err := NewAdamW(cfg, cut)
		if err != nil {
			t.Fatal(err)
		}
		kernel.SetThreads(3)
		for step := int64(1); step <= 3; step++ {
			a.Step(0.01, 0.5, step)
		}
		for i := range whole { // one slice each, all in one call of the kernel
			s, got := &whole[i], a.Slices()[i]
			n := len(s.Value)
			m, v, m16, v16 := make([]float32, n), make([]float32, n), make([]uint16, n), make([]uint16, n)
			for step := 1; step <= 3; step++ {
				args := kernel.AdamWArgs{LR: 0.01, Beta1: 0.9, Beta2: 0.95, Eps: 1e-8, GradScale: 0.5, Step: step}
				if s.Decay {
					args.Decay = 0.1
				}
				if moments == BF16 {
					kernel.AdamWBF16(args, s.Value, s.Grad, m16, v16)
				} else {
					kernel.AdamW(args, s.Value, s.Grad, m, v)
				}
			}
			for j, want := range s.Value {
				if got.Value[j] != want {
					t.Fatalf("%s: value %d of slice %d is %v, want %v", moments, j, i, got.Value[j], want)
				}
			}
		}
	}
}
