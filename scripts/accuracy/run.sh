#!/bin/sh
# Trains the models on which recipes of low precision are compared (docs/precision.md): three hours of one core.
#   scripts/accuracy/run.sh EBOOKS.jsonl OUT [JOBS]     then scripts/accuracy/table.py OUT
# A run that is complete in OUT is not repeated.
set -eu
text=$1 out=$2 jobs=${3:-2}
train=${TRAIN:-bin/train}
here=$(dirname "$0")
mkdir -p "$out"
{
	for seed in 1 2 3; do
		for recipe in bf16 bf16-reordered fp8; do echo "ebooks $recipe $seed 1000"; done
	done
	for seed in 1 2 3 4 5 6; do
		for recipe in bf16 bf16-reordered fp8 keep-weights keep-inputs keep-gradients; do echo "shakespeare $recipe $seed 2000"; done
	done
	for recipe in fp8-tensor no-promotion; do echo "shakespeare $recipe 1 2000"; done
} | xargs -P "$jobs" -L 1 sh -c '
	case $4 in
	ebooks) config="$1/ebooks.yaml" extra="--set stages.0.data.0.path=$2" ;;
	shakespeare) config=shakespeare-char extra= ;;
	esac
	recipe=$5
	case $4-$5 in # the same sums in another order: what two runs part by though nothing else differs
	ebooks-bf16-reordered) recipe=bf16 extra="$extra --set parallel.microbatch=16" ;;
	shakespeare-bf16-reordered) recipe=bf16 extra="$extra --set parallel.microbatch=6" ;;
	*-keep-*) recipe=fp8 extra="$extra --set precision.keep=[${5#keep-}]" ;;
	*-no-promotion) recipe=hopper extra="$extra --set precision.promote=0" ;;
	esac
	dir="$3/$4-$5-$6"
	[ "$(wc -l 2>/dev/null <"$dir/metrics.jsonl")" = "$7" ] && exit 0
	rm -rf "$dir"
	"$0" launch -n 1 --threads 1 --bind none --config "$config" --out "$dir" --set precision.recipe="$recipe" --set run.seed="$6" \
		--set checkpoint.every=0 $extra >"$dir.log" 2>&1 || { echo "$dir failed" >&2; exit 255; }
	rm -rf "$dir/checkpoints"
	echo "$dir done"
' "$train" "$here" "$text" "$out"
