#!/bin/sh
# Compares train bench gemm with OpenBLAS and oneDNN, shape by shape: rounds of ours and theirs in turn, medians over the rounds.
#   scripts/peer/gemm.sh [THREADS [ROUNDS [SECONDS]]]     needs cc, jq, and the libraries named below
set -eu
threads=${1:-1} rounds=${2:-3} seconds=${3:-0.05}
openblas=${OPENBLAS:-libopenblas.so.0} dnnl=${DNNL:-libdnnl.so.2}
here=$(dirname "$0") tmp=$(mktemp -d)
trap 'rm -rf "$tmp"' EXIT
cc -O2 "$here/sgemm.c" -o "$tmp/sgemm" -ldl
train=${TRAIN:-bin/train}
export OMP_NUM_THREADS="$threads" OMP_PROC_BIND=true OPENBLAS_NUM_THREADS="$threads"
unset OPENBLAS_CORETYPE OPENBLAS_L2_SIZE
i=0
while [ $i -lt "$rounds" ]; do
	"$train" bench gemm --threads "$threads" --seconds "$seconds" --json |
		jq -r '.cases[] | "\(.layout) \(.m) \(.n) \(.k) \(.gflops)"' >"$tmp/ours"
	cut -d' ' -f1-4 "$tmp/ours" >"$tmp/shapes"
	sed 's/^/ours /' "$tmp/ours" >>"$tmp/all"
	for lib in "$openblas" "$dnnl"; do
		"$tmp/sgemm" "$lib" "$seconds" <"$tmp/shapes" | sed "s/^/$lib /" >>"$tmp/all"
	done
	i=$((i + 1))
done
# medians per engine and shape, then one line a shape
sort -k2,5 -k1,1 -k6,6n "$tmp/all" | awk -v a="$openblas" -v b="$dnnl" '
	function flush_() { if (n) med[shape, who] = v[int((n + 1) / 2)]; n = 0 }
	{ s = $2 " " $3 " " $4 " " $5 }
	s != shape || $1 != who { flush_(); shape = s; who = $1; if (!(s in seen)) { seen[s]; order[++shapes] = s } }
	{ v[++n] = $6 }
	END {
		flush_()
		printf "%-22s %9s %9s %9s %10s\n", "layout m n k", "ours", "OpenBLAS", "oneDNN", "ours/best"
		for (i = 1; i <= shapes; i++) {
			s = order[i]; o = med[s, "ours"]; x = med[s, a]; y = med[s, b]; best = x > y ? x : y
			printf "%-22s %9.1f %9.1f %9.1f %10.2f\n", s, o, x, y, o / best
			if (o < best) slower++
		}
		printf "slower than the best of the two: %d of %d shapes\n", slower, shapes
	}'
