#!/usr/bin/env python3
"""Compares the losses of runs by scripts/accuracy/run.sh with those in bf16: tables in Markdown, and a plot.

    scripts/accuracy/table.py OUT [PLOT.svg]

A run's training losses are smoothed by an exponential moving average with coefficient 0.9, as in the DeepSeek-V3 report
(appendix B.1). The relative error is (recipe - bf16) / bf16, of the same seed and step, after the first 100 steps.
"""
import glob, json, os, re, sys

FIRST = 100


def losses(path):
    train, val = [], []
    for line in open(path + "/metrics.jsonl"):
        o = json.loads(line)
        train.append(o["loss"])
        if o.get("val_loss") is not None:
            val.append((o["step"], o["val_loss"]))
    return train, val


def smooth(x):
    out, s = [], x[0]
    for v in x:
        s = 0.9 * s + 0.1 * v
        out.append(s)
    return out


def relative(a, base):
    return [100 * (x - b) / b for x, b in zip(a, base)][FIRST:]


def main(out, plot):
    runs = {}
    for path in sorted(glob.glob(out + "/*/metrics.jsonl")):
        model, recipe, seed = re.fullmatch(r"(\w+)-([\w-]+)-(\d+)", os.path.basename(os.path.dirname(path))).groups()
        runs.setdefault(model, {}).setdefault(recipe, {})[int(seed)] = losses(os.path.dirname(path))
    curves = {}
    for model, recipes in runs.items():
        base = recipes["bf16"]
        print(f"\n{model}\n\n| recipe | seeds | mean error | largest error, mean over seeds | largest error, single seeds | validation loss, last | error |")
        print("| --- | --- | --- | --- | --- | --- | --- |")
        for recipe in sorted(recipes, key=lambda r: (r != "bf16", r)):
            seeds = sorted(s for s in recipes[recipe] if s in base)
            rel = [relative(smooth(recipes[recipe][s][0]), smooth(base[s][0])) for s in seeds]
            n = min(map(len, rel))
            # the smoothed loss averaged over seeds, against that of bf16 averaged over the same seeds
            mine = [sum(v) / len(seeds) for v in zip(*(smooth(recipes[recipe][s][0]) for s in seeds))]
            theirs = [sum(v) / len(seeds) for v in zip(*(smooth(base[s][0]) for s in seeds))]
            mean = relative(mine, theirs)[:n]
            val = [recipes[recipe][s][1][-1][1] for s in seeds]
            valBase = [base[s][1][-1][1] for s in seeds]
            print(f"| {recipe} | {', '.join(map(str, seeds))} | {sum(mean) / n:+.3f} % | {max(map(abs, mean)):.3f} % | "
                  f"{', '.join('%.3f' % max(map(abs, r[:n])) for r in rel)} % | {sum(val) / len(val):.4f} | "
                  f"{100 * (sum(val) / sum(valBase) - 1):+.3f} % |")
            if recipe != "bf16":
                curves.setdefault(model, {})[recipe] = mean
        against_both(model, recipes)
    if plot:
        draw(curves, plot)


def against_both(model, recipes):
    """Mean and standard error over seeds of the relative error against the mean of bf16 and bf16-reordered of the same seed."""
    both = [recipes.get("bf16", {}), recipes.get("bf16-reordered", {})]
    rows = []
    for recipe in sorted(recipes):
        seeds = sorted(s for s in recipes[recipe] if all(s in b for b in both))
        if recipe.startswith("bf16") or len(seeds) < 2:
            continue
        errors = []
        for s in seeds:
            train, val = recipes[recipe][s]
            base = [sum(v) / 2 for v in zip(*(smooth(b[s][0]) for b in both))]
            rel = relative(smooth(train), base)
            errors.append((sum(rel) / len(rel), 100 * (val[-1][1] / (sum(b[s][1][-1][1] for b in both) / 2) - 1)))
        cells = []
        for v in zip(*errors):
            mean = sum(v) / len(v)
            cells.append(f"{mean:+.2f} ± {(sum((x - mean) ** 2 for x in v) / (len(v) - 1) / len(v)) ** 0.5:.2f} %")
        rows.append(f"| {recipe} | {len(seeds)} | {' | '.join(cells)} |")
    if rows:
        print(f"\n{model}, against the mean of both runs in bf16\n\n| recipe | seeds | training loss, mean | validation loss, last |\n"
              "| --- | --- | --- | --- |")
        print("\n".join(rows))


def draw(curves, path):
    """One panel a model: relative error of the mean over seeds against the step, and the published bound of 0.25 %."""
    width, height, left, gap = 760, 210, 60, 50
    colours = {"fp8": "#c33", "fp32": "#36c", "fp8-tensor": "#d90", "bf16-reordered": "#999", "no-promotion": "#393", "hopper": "#939"}
    parts, top = [], 30
    for model, recipes in curves.items():
        n = max(map(len, recipes.values()))
        span = max(0.5, max(abs(v) for c in recipes.values() for v in c))
        y = lambda v: top + height / 2 - v / span * height / 2
        x = lambda i: left + i / n * (width - left - 20)
        parts.append(f'<text x="{left}" y="{top - 8}">{model}: smoothed loss against bf16, %</text>')
        for v in (-0.25, 0, 0.25):
            dash = "" if v == 0 else ' stroke-dasharray="4 3"'
            parts.append(f'<line x1="{left}" x2="{width - 20}" y1="{y(v):.1f}" y2="{y(v):.1f}" stroke="#999"{dash}/>'
                         f'<text x="{left - 6}" y="{y(v) + 4:.1f}" text-anchor="end">{v:g}</text>')
        for k, (recipe, c) in enumerate(sorted(recipes.items())):
            line = " ".join(f"{x(i):.1f},{y(v):.1f}" for i, v in enumerate(c) if i % max(1, n // 700) == 0)
            colour = colours.get(recipe, "#000")
            parts.append(f'<polyline points="{line}" fill="none" stroke="{colour}"/>'
                         f'<text x="{left + 230 + 100 * k}" y="{top - 8}" fill="{colour}">{recipe}</text>')
        parts.append(f'<text x="{left}" y="{top + height + 14}">step {FIRST}</text>'
                     f'<text x="{width - 20}" y="{top + height + 14}" text-anchor="end">step {FIRST + n}</text>')
        top += height + gap
    with open(path, "w") as f:
        f.write(f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{top}" font-family="sans-serif" font-size="11">'
                f'<rect width="100%" height="100%" fill="white"/>{"".join(parts)}</svg>\n')


if __name__ == "__main__":
    if len(sys.argv) not in (2, 3):
        sys.exit(__doc__)
    main(sys.argv[1], sys.argv[2] if len(sys.argv) == 3 else None)
