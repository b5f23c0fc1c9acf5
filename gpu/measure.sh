#!/usr/bin/env bash
# Measures a machine with several GPUs, in one call of about ten minutes: its profile, how well that predicts, tuned plans of ops,
# norms and decoder, signaled plans. The checks are gpu/run.sh's. Results go to ${OUT:-gpu/out}, which should be fresh: every
# part appends. Then, where git is, for machine <gpu>-x<N>:
#   profile/*.json              src/weft/planner/profiles/ (this puts a whole one there itself, for "auto" and the predictions)
#   predictions/*.jsonl         bench/results/<machine>/predictions/
#   tuning/sweep.jsonl          bench/results/<machine>/tuning/<run>.jsonl, then python -m bench.pages.table <gpu>
#   results/*.jsonl             bench/results/<machine>/
#   decoder/decoder.jsonl       bench/results/<machine>/
#   decoder/decoder-table.json  its entry into src/weft/planner/tables/decoder/<gpu>.json
#   signaled/*.jsonl            bench/results/<machine>/signaled/<run>.jsonl
# and the pages again: make pages.
# Environment: PARTS, some of the names below, in their order; SECONDS_OF, how long each may take beside starting (ops and
# decoder twice that).
set -u
cd "$(dirname "$0")/.."
out=${OUT:-gpu/out}
parts=${PARTS:-profile predictions ops norm decoder signaled}
limit=${SECONDS_OF:-60}
mkdir -p "$out"
export PYTHONPATH=$PWD/src:$PWD PYTHONUNBUFFERED=1 OMP_NUM_THREADS=1 WEFT_TIMEOUT=${WEFT_TIMEOUT:-10}
export NCCL_NVLS_ENABLE=0 TORCH_SYMM_MEM_DISABLE_MULTICAST=1 NVSHMEM_DISABLE_NVLS=1
gpus=$(nvidia-smi -L | wc -l)
gpu=$(python3 -c 'import torch; print(torch.cuda.get_device_name(0).lower().replace(" ", "-"))')
sms=$(python3 -c 'import torch; print(torch.cuda.get_device_properties(0).multi_processor_count)')
machine=$gpu-x$gpus
profile=$out/profile/$machine.json kept=src/weft/planner/profiles/$machine.json
failed=0

ranks() { # name, seconds, then what torchrun starts on every GPU
  local name=$1 seconds=$2 started=$SECONDS; shift 2
  timeout $((seconds + 60)) torchrun --nproc-per-node "$gpus" "$@" --seconds "$seconds" > "$out/$name.log" 2>&1
  local rc=$?
  echo "$name: exit $rc after $((SECONDS - started)) s"
  [ $rc -eq 0 ] || { failed=1; tail -3 "$out/$name.log"; }
  return $rc
}

for part in $parts; do
  case $part in
    profile)
      mkdir -p "$out/profile"
      ranks profile "$limit" -m weft.planner.tune --out "$profile" && tail -1 "$out/profile.log" || continue
      if grep -Eq ': ([0-9]+) of \1 measurements' "$out/profile.log" || [ ! -f "$kept" ]; then cp "$profile" "$kept"; fi ;;
    predictions) ranks predictions "$limit" -m bench.measure.predictions --out "$out/predictions" --profile "$kept" ;;
    ops) ranks ops $((2 * limit)) -m bench.measure.run --tune --out "$out/results" ;;
    norm) ranks norm "$limit" -m bench.measure.norm --modes graph --out "$out/results" ;;
    decoder) ranks decoder $((2 * limit)) -m bench.measure.decoder --tune --profile 0 --sms "$sms" --norms auto decomposed \
      --out "$out/decoder" ;;
    signaled) # each with the whole time
      ranks signaled-gemm "$limit" -m bench.measure.signaled --parts gemm --modes graph --out "$out/signaled"
      ranks signaled-ops "$limit" -m bench.measure.signaled --parts ops --modes graph --out "$out/signaled" ;;
    *) echo "no part $part"; failed=1 ;;
  esac
done
if [ -f "$out/results/sweep.jsonl" ]; then # of tuning: no results of the benchmark's form
  mkdir -p "$out/tuning"
  cat "$out/results/sweep.jsonl" >> "$out/tuning/sweep.jsonl" && rm "$out/results/sweep.jsonl"
fi
exit $failed
