#!/usr/bin/env bash
# The long checks, which CI does not run: 50 kills, the published character-level setting, the demo with a clock.
set -euo pipefail
cd "$(dirname "$0")/.."
out=$(mktemp -d)
trap 'rm -rf "$out"' EXIT

echo "== 50 ranks killed"
./scripts/kill50.sh 50

echo "== shakespeare-char: validation loss below 1.88 after 2000 steps"
began=$SECONDS
bin/train launch --config shakespeare-char --out "$out/char" >"$out/log" 2>&1 || { tail -n 3 "$out/log"; exit 1; }
loss=$(grep -o '"val_loss":[0-9.]*' "$out/char/metrics.jsonl" | tail -n 1 | cut -d: -f2)
echo "validation loss $loss after $((SECONDS - began)) s"
awk -v l="$loss" 'BEGIN { exit !(l < 1.88) }' || { echo "FAILED"; exit 1; }

echo "== make demo"
began=$SECONDS
make demo >"$out/demo" 2>&1 || { tail -n 5 "$out/demo"; exit 1; }
sed -n '/--- after/,$p' "$out/demo"
echo "make demo took $((SECONDS - began)) s"
