#!/bin/sh
# Trains the models on which recipes of low precision are compared (docs/precision.md): two hours of one core.
#   scripts/accuracy/run.sh EBOOKS.jsonl OUT [JOBS]     then scripts/accuracy/table.py OUT
set -eu
text=$1 out=$2 jobs=${3:-2}
train=${TRAIN:-bin/train}
here=$(dirname "$0")
mkdir -p "$out"
{
	for seed in 1 2 3; do
		for recipe in bf16 fp8; do echo "ebooks $recipe $seed 1000"; done
	done
	for seed in 1 2 3; do
		for recipe in bf16 fp8 fp32 fp8-tensor; do echo "shakespeare $recipe $seed 2000"; done
	done
	for recipe in fp32 fp8-tensor mxfp8; do echo "ebooks $recipe 1 1000"; done
} | xargs -P "$jobs" -L 1 sh -c '
	case $4 in
	ebooks) config="$1/ebooks.yaml" extra="--set stages.0.data.0.path=$2" ;;
	shakespeare) config=shakespeare-char extra= ;;
	esac
	dir="$3/$4-$5-$6"
	[ "$(wc -l 2>/dev/null <"$dir/metrics.jsonl")" = "$7" ] && exit 0
	rm -rf "$dir"
	"$0" launch -n 1 --threads 1 --bind none --config "$config" --out "$dir" --set precision.recipe="$5" --set run.seed="$6" \
		--set checkpoint.every=0 $extra >"$dir.log" 2>&1 || { echo "$dir failed" >&2; exit 255; }
	rm -rf "$dir/checkpoints"
	echo "$dir done"
' "$train" "$here" "$text" "$out"
