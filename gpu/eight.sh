#!/usr/bin/env bash
# Checks and measures a machine with eight GPUs, or with fewer, in calls that end by themselves within MINUTES (9.5). Each call continues
# where the last one ended: with checks with a rank on every GPU, the measurements of gpu/measure.sh, random calls, and vLLM's mixes if
# gpu/vllm.sh has unpacked vLLM. The script writes its results to ${OUT:-gpu/out}: python -m tests.gpu.gpu_record reads checks/*.json, and
# gpu/measure.sh names the places of the other files. It prints the remaining steps, and exits with 0 once no step remains.
# Environment: PARTS, some of checks measure fuzz vllm, in this order; MINUTES; RANKS, the number of GPUs (all).
set -u
cd "$(dirname "$0")/.."
out=${OUT:-gpu/out}
parts=${PARTS:-checks measure fuzz vllm}
ranks=${RANKS:-$(nvidia-smi -L | wc -l)}
end=$(awk "BEGIN { print int(60 * ${MINUTES:-9.5}) }")
left=0
mkdir -p "$out/checks"

minutes() { awk "BEGIN { print ($end - $SECONDS) / 60 }"; }

checked() { # a part's name, then gpu/run.sh's parts: run them, with the results of earlier calls in the record
  local name=$1 log=$out/checks/$1.log found; shift
  [ ! -f "$out/checks/$name.done" ] || return 0
  for found in "$out"/checks/*.json; do
    [ ! -f "$found" ] || python3 -m tests.gpu.gpu_record "$found" > /dev/null
  done
  OUT=$out/checks/$name PARTS="$*" RANKS=$ranks MINUTES=$(minutes) FUZZ_SECONDS=$((end - SECONDS - 150)) \
    timeout -k 5 $((end - SECONDS + 20)) bash gpu/run.sh > "$log" 2>&1
  mv "$out/checks/$name/results.json" "$out/checks/$name-$(date +%s).json" && tail -20 "$log"
  if grep -q 'nothing is left' "$log"; then touch "$out/checks/$name.done"; else left=1; fi
}

for part in $parts; do
  if [ $((end - SECONDS)) -lt 240 ]; then echo "left: $part"; left=1; continue; fi
  case $part in
    checks) checked checks checks peers users ;;
    fuzz) checked fuzz fuzz ;;
    measure) OUT=$out MINUTES=$(minutes) RANKS=$ranks bash gpu/measure.sh || left=1 ;;
    vllm) OUT=$out MINUTES=$(minutes) RANKS=$ranks PARTS=vllm bash gpu/measure.sh || left=1 ;;
    *) echo "no part $part"; left=1 ;;
  esac
done
exit $left
