#!/usr/bin/env bash
# Kills a random rank at a random moment, 50 times (or $1). Each time the launcher must exit non-zero within 5 s, name the
# rank, and leave no process and no shared-memory file; then --resume must go on from the last complete checkpoint. Prints one line per kill
# and ends with "50 passed, 0 failed".
set -uo pipefail
cd "$(dirname "$0")/.."
train=bin/train
count=${1:-50}
seed=${2:-$RANDOM}
RANDOM=$seed
dir=$(mktemp -d)
trap 'rm -rf "$dir"' EXIT
transports=(shm tcp)
passed=0 failed=0

# stale lists segments that no process has mapped.
stale() {
	for s in /dev/shm/moetor-*; do
		[ -e "$s" ] && ! grep -qs "$s/" /proc/[0-9]*/maps && echo "$s"
	done
}

fail() { echo "  FAILED: $*"; bad=1; }

for ((i = 1; i <= count; i++)); do
	bad=0
	transport=${transports[i % 2]}
	log=$dir/log
	resume=()
	[ -f "$dir/run/config.yaml" ] && resume=(--resume)
	$train launch -n 4 --config demo --stages pretrain --out "$dir/run" "${resume[@]}" --transport $transport \
		--set checkpoint.every=3 --set run.eval_every=0 --set stages.0.steps=100000 >"$log" 2>&1 &
	launcher=$!
	for _ in $(seq 200); do # until the ranks are there
		[ "$(pgrep -P $launcher | wc -l)" -ge 4 ] && break
		sleep 0.1
	done
	sleep $((RANDOM % 6)).$((RANDOM % 10))
	mapfile -t ranks < <(pgrep -P $launcher)
	if [ ${#ranks[@]} -eq 0 ]; then
		echo "$i: no rank came up"; tail -n 5 "$log"
		wait $launcher
		failed=$((failed + 1))
		continue
	fi
	victim=${ranks[RANDOM % ${#ranks[@]}]}
	rank=$(tr '\0' '\n' <"/proc/$victim/environ" | sed -n 's/^MOETOR_RANK=//p')
	kill -9 "$victim"
	began=$(date +%s%N)
	wait $launcher
	code=$?
	ms=$((($(date +%s%N) - began) / 1000000))
	[ $code -ne 0 ] || fail "exit code 0"
	[ $ms -le 5000 ] || fail "took $ms ms"
	grep -q "rank $rank" "$log" || { fail "rank $rank is not named"; tail -n 5 "$log"; }
	pgrep -f "$dir/run" >/dev/null && fail "a process is left"
	left=$(stale)
	[ -z "$left" ] || { sleep 0.3; left=$(stale); } # another job of this host may be making one
	[ -z "$left" ] || fail "a shared-memory file is left: $left"
	ok=none
	if ls "$dir"/run/checkpoints/*/manifest.json >/dev/null 2>&1; then
		ok=$($train inspect "$dir/run" --json 2>"$dir/inspect.err" | grep -o '"step":[0-9]*' | head -1)
		[ -n "$ok" ] || { fail "no readable checkpoint: $(cat "$dir/inspect.err")"; }
	fi
	echo "$i: $transport, rank $rank killed, exit $code after $ms ms, checkpoint $ok; $(grep -m1 "rank $rank" "$log")"
	if [ $bad = 0 ]; then passed=$((passed + 1)); else failed=$((failed + 1)); fi
done
# The run goes on after all of that.
$train launch -n 4 --out "$dir/run" --resume --stages pretrain --stop-after 3 >"$dir/log" 2>&1 || { echo "the last resume failed"; tail -n 5 "$dir/log"; failed=$((failed + 1)); }
echo "seed $seed"
echo "$passed passed, $failed failed"
[ $failed = 0 ]
