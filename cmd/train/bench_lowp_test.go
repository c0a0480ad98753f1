package main

import (
	"bytes"
	"math"
	"strings"
	"testing"

	"moetor/internal/kernel"
)

func TestBenchLowp(t *testing.T) {
	var r lowpResult
	decode(t, bench(t, "lowp", "--config", smallConfig(t), "--recipe", "fp8,bf16", "--threads", "2", "--seconds", "0", "--weights", "8", "--json"), &r)
	if r.Threads != 2 || r.Kernel != kernel.Active() {
		t.Errorf("%+v", r)
	}
	positive := func(what string, x ...float64) {
		t.Helper()
		for _, v := range x {
			if !(v > 0) || math.IsInf(v, 0) {
				t.Errorf("%s: %v", what, x)
			}
		}
	}
	// A code with m bits behind the point of values from 2^e to 2^(e+1) has an error of variance (2^(e-m))²/12. Of a normal
	// distribution, erf says how many there are.
	theory := func(mantissa int) float64 {
		sum := 0.
		for e := -10.; e < 4; e++ {
			sum += math.Exp2(2*e) * (math.Erf(math.Exp2(e+1)/math.Sqrt2) - math.Erf(math.Exp2(e)/math.Sqrt2))
		}
		return math.Exp2(float64(-mantissa)) * math.Sqrt(sum/12)
	}
	mantissas := map[string]int{"e4m3": 3, "e5m6": 6, "bf16": 7}
	bits := map[string]float64{}
	for _, c := range r.Conversions {
		name := c.Format + " " + c.Tile + " " + c.Scale
		positive(name, c.Quantize.GValues, c.Quantize.GB, c.Quantize.OfCopy, c.Dequantize.GValues, c.Dequantize.GB, c.Dequantize.OfCopy)
		if bits[name] > 0 {
			t.Errorf("%s is there twice", name)
		}
		bits[name] = c.Bits
		if want := theory(mantissas[c.Format]); math.Abs(c.RelRMS/want-1) > 0.05 || math.Abs(c.SNR+20*math.Log10(c.RelRMS)) > 0.01 {
			t.Errorf("%s: a relative error of %v, in theory %v; %v dB", name, c.RelRMS, want, c.SNR)
		}
		if moved := c.Quantize.GValues * (4 + c.Bits/8); math.Abs(moved/c.Quantize.GB-1) > 0.001 {
			t.Errorf("%s: %+v GB/s of %v bits", name, c.Quantize, c.Bits)
		}
	}
	for name, want := range map[string]float64{
		"e4m3 1x128 f32": 8 + 32./128, "e4m3 128x1 f32": 8 + 32./128, "e4m3 128x128 f32": 8 + 32./(128*128), "e4m3 1x128 pow2": 8 + 32./128,
		"e4m3 allxall f32": 8 + 32./(2048*512), "e4m3 1x32 e8m0": 8 + 8./32, "e5m6 1x128 pow2": 12 + 32./128, "bf16 allxall none": 16,
	} {
		if bits[name] != want {
			t.Errorf("%s: %v bits, not %v", name, bits[name], want)
		}
	}

	count, seen := map[string]int{}, map[[3]int]bool{}
	for _, c := range append(r.Products, r.Grouped...) {
		positive(c.Recipe+" "+c.Layout, c.GFLOPS, c.FP32, c.Ratio, c.Quantized)
		mantissa := 3
		if c.Recipe == "bf16" {
			mantissa = 7
		}
		roundings := 2. // with independent errors; the input of a weight gradient is rounded twice
		if c.Layout == "TN" && c.Recipe == "fp8" {
			roundings = 3
		}
		if want := theory(mantissa) * math.Sqrt(roundings); math.Abs(c.RelRMS/want-1) > 0.2 {
			t.Errorf("%+v: relative error, in theory %v", c, want)
		}
		if c.Experts == 0 {
			count["linears"]++
			seen[[3]int{c.M, c.N, c.K}] = true
		} else {
			count["experts"]++
		}
	}
	// Of experts there are six products of the configuration and two with weights from memory.
	if n := len(r.Products); count["linears"] != n || n%6 != 0 || count["experts"] != 2*8 || len(r.Grouped) != 2*8 {
		t.Errorf("%v of %d and %d products", count, n, len(r.Grouped))
	}
	for shape, want := range map[[3]int]bool{{64, 64, 32}: true, {64, 4, 32}: true, {64, 8, 32}: false, {512, 512, 32}: false} { // not the router's, not the head's
		if seen[shape] != want {
			t.Errorf("%v: %v", shape, seen[shape])
		}
	}
	for i, want := range []codesCase{{Layout: "NT", M: 512, N: 16, K: 2048}, {Layout: "NN", M: 512, N: 2048, K: 16}} {
		if c := r.Grouped[6+i]; c.Experts != 64 || c.Layout != want.Layout || c.M != want.M || c.N != want.N || c.K != want.K {
			t.Errorf("weights from memory: %+v", c)
		}
	}

	// The configuration's own recipe is not asked for, and what belongs to it disturbs no other.
	text := string(bench(t, "lowp", "--config", smallConfig(t), "--set", "precision.recipe=fp8", "--set", "precision.watch=5",
		"--recipe", "mxfp8", "--threads", "1", "--seconds", "0", "--weights", "0"))
	if !strings.Contains(text, "with quantization") || !strings.Contains(text, "mxfp8") || strings.Contains(text, "{") {
		t.Errorf("as text:\n%s", text)
	}
	for _, c := range []struct{ args, want string }{
		{"--recipe fp4", "--recipe fp4 is none that multiplies codes; known: bf16, fp8, fp8-tensor, hopper, mxfp8\n"},
		{"--recipe fp8,fp32", "--recipe fp32 is none that multiplies codes; known: bf16, fp8, fp8-tensor, hopper, mxfp8\n"},
		{"--weights -1", "--weights -1 must be between 0 and 8192"}, {"--weights 65535", "--weights 65535 must be between 0 and 8192"},
		{"--threads -1", "--threads -1"},
	} {
		var out, errs bytes.Buffer
		code := run(append([]string{"bench", "lowp"}, strings.Fields(c.args)...), &out, &errs)
		if code != exitUsage || !strings.HasPrefix(errs.String(), "train: "+c.want) || strings.Count(errs.String(), "\n") != 1 {
			t.Errorf("bench lowp %s: exit %d: %s", c.args, code, errs.String())
		}
	}
}
