package configs

import (
	"fmt"
	"maps"
	"slices"
	"strings"

	"moetor/internal/lowp"
	"moetor/model"
)

// recipes are the values of precision.recipe.
var recipes = map[string]func() model.Recipe{
	"fp32":       func() model.Recipe { return model.Recipe{} },
	"bf16":       bf16,
	"fp8":        fp8,
	"fp8-tensor": fp8Tensor,
	"mxfp8":      mxfp8,
	"hopper":     hopper,
}

// RecipeNames lists them.
func RecipeNames() []string { return slices.Sorted(maps.Keys(recipes)) }

// DefaultPromote is precision.promote where nothing else is set (DeepSeek-V3 §3.3.2).
const DefaultPromote = 128

// ModelRecipe is what the recipe's name stands for; FP32 for one that is not known, which validation refuses.
func (p Precision) ModelRecipe() model.Recipe {
	made, ok := recipes[p.Recipe]
	if !ok {
		return model.Recipe{}
	}
	r := made()
	if r.Hopper {
		r.Promote = p.Promote
	}
	for _, operand := range p.Keep {
		if keep := keepable[operand]; keep != nil {
			keep(&r, quant(lowp.BF16, lowp.ScaleNone, 0, 0))
		}
	}
	return r
}

// keepable are the values of precision.keep: operands that may stay in BF16, to see which of them costs what.
var keepable = map[string]func(r *model.Recipe, b *lowp.Quant){
	"weights":   func(r *model.Recipe, b *lowp.Quant) { r.Weight, r.WeightT = b, nil },
	"inputs":    func(r *model.Recipe, b *lowp.Quant) { r.Input, r.InputT, r.SwiGLU, r.Dispatch = b, b, b, b },
	"gradients": func(r *model.Recipe, b *lowp.Quant) { r.Grad, r.GradT = b, b },
	"attn_out":  func(r *model.Recipe, b *lowp.Quant) { r.AttnOut, r.AttnOutT = b, b },
}

// keepers are the recipes whose operands can be stored one by one: not those without codes, nor that of whole matrices.
var keepers = []string{"fp8", "mxfp8", "hopper"}

// Problems says what is wrong with Keep and with Promote. Each message begins with prefix and the name of the setting.
func (p Precision) Problems(prefix string) (out []string) {
	addf := func(format string, args ...any) { out = append(out, prefix+fmt.Sprintf(format, args...)) }
	if p.Promote != DefaultPromote && p.Recipe != "hopper" {
		addf("promote=%d has no effect with %srecipe=%s: only hopper has sums of few bits", p.Promote, prefix, p.Recipe)
	} else if p.Promote%32 != 0 {
		addf("promote=%d must be a multiple of 32, the products of one step of the tensor cores", p.Promote)
	}
	for i, name := range p.Keep {
		if keepable[name] == nil {
			addf("keep names %q; known: %s", name, strings.Join(slices.Sorted(maps.Keys(keepable)), ", "))
			return out
		} else if slices.Contains(p.Keep[:i], name) {
			addf("keep names %q twice", name)
			return out
		}
	}
	if len(p.Keep) > 0 && !slices.Contains(keepers, p.Recipe) {
		addf("keep=%s has no effect with recipe %s: only with %s", strings.Join(p.Keep, ","), p.Recipe, strings.Join(keepers, ", "))
	}
	return out
}

func quant(f lowp.Format, k lowp.ScaleKind, tileRows, tileCols int) *lowp.Quant {
	return &lowp.Quant{Format: f, Scale: k, TileRows: tileRows, TileCols: tileCols}
}

// bf16 rounds operands to BF16 and sums in FP32.
func bf16() model.Recipe {
	b := quant(lowp.BF16, lowp.ScaleNone, 0, 0)
	return model.Recipe{Weight: b, Input: b, InputT: b, Grad: b, GradT: b, AttnOut: b, AttnOutT: b, SwiGLU: b, Dispatch: b, Combine: b, Core: b}
}

// fp8 is what DeepSeek-V3 trained with (§3.3): E4M3 everywhere, tiles of 1x128 and blocks of 128x128, powers of two as scales
// where its report says so.
func fp8() model.Recipe {
	b := quant(lowp.BF16, lowp.ScaleNone, 0, 0)
	token := quant(lowp.E4M3, lowp.ScaleF32, 1, 128)
	channel := quant(lowp.E4M3, lowp.ScaleF32, 128, 1)
	return model.Recipe{
		Weight: quant(lowp.E4M3, lowp.ScaleF32, 128, 128),
		Input:  token, InputT: channel,
		Grad: token, GradT: channel,
		AttnOut: quant(lowp.E5M6, lowp.ScalePow2, 1, 128), AttnOutT: quant(lowp.E5M6, lowp.ScalePow2, 128, 1),
		SwiGLU:   token,
		Dispatch: quant(lowp.E4M3, lowp.ScalePow2, 1, 128),
		Combine:  b, Core: b,
		Promote: 128,
	}
}

// fp8Tensor has one scale for a whole operand, taken from its present values. It is there as a contrast: an outlier takes the
// resolution from all.
func fp8Tensor() model.Recipe {
	r := fp8()
	all := quant(lowp.E4M3, lowp.ScaleF32, 0, 0)
	r.Weight, r.Input, r.InputT, r.Grad, r.GradT, r.SwiGLU = all, all, all, all, all, all
	return r
}

// mxfp8 is the OCP microscaling format: 32 values along what is contracted share a power of two.
func mxfp8() model.Recipe {
	r := fp8()
	token, channel := quant(lowp.E4M3, lowp.ScaleE8M0, 1, 32), quant(lowp.E4M3, lowp.ScaleE8M0, 32, 1)
	r.Weight, r.WeightT = token, channel
	r.Input, r.InputT, r.Grad, r.GradT, r.SwiGLU, r.Dispatch = token, channel, token, channel, token, token
	r.AttnOut, r.AttnOutT = quant(lowp.E5M6, lowp.ScaleE8M0, 1, 32), quant(lowp.E5M6, lowp.ScaleE8M0, 32, 1)
	return r
}

// hopper is fp8 with sums as the tensor cores of the H800 make them.
func hopper() model.Recipe {
	r := fp8()
	r.Hopper = true
	return r
}
