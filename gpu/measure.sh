#!/usr/bin/env bash
# Measures a machine with several GPUs in calls that end by themselves within MINUTES (9.5). The script writes its results to
# ${OUT:-gpu/out}; a call with the same folder continues where the last one ended, prints the remaining steps, and exits with 0 once no
# step remains. First every step runs once for its seconds, then interrupted steps continue, and last the failed steps run again. In the
# repository, the results of machine <gpu>-x<N> then belong here:
#   profile/*.json              src/weft/planner/profiles/ (where it is while this runs, for "auto")
#   predictions/*.jsonl         bench/results/<machine>/predictions/
#   tuning/sweep.jsonl          bench/results/<machine>/tuning/<run>.jsonl, then python -m bench.pages.table <gpu>
#   decoder/decoder.jsonl       bench/results/<machine>/
#   decoder/decoder-table.json  its rows of src/weft/planner/tables/<gpu>.json
#   signaled/*.jsonl            bench/results/<machine>/signaled/<run>.jsonl
#   results/*.jsonl             bench/results/<machine>/
# and make pages writes the pages again.
# Environment: PARTS, some of the functions' names below, in their order (vllm needs gpu/vllm.sh's packages, and is left out otherwise);
# MINUTES; RANKS, the number of GPUs (all).
set -u
cd "$(dirname "$0")/.."
out=${OUT:-gpu/out}
parts=${PARTS:-ops norm eager decoder signaled profile moe attention columns transformers fp8}
end=$(awk "BEGIN { print int(60 * ${MINUTES:-9.5}) }")
mkdir -p "$out/state" "$out/results" "$out/profile" "$out/tuning"
export PYTHONPATH=$PWD/src:$PWD PYTHONUNBUFFERED=1 OMP_NUM_THREADS=1 WEFT_TIMEOUT=${WEFT_TIMEOUT:-10}
export NCCL_NVLS_ENABLE=0 TORCH_SYMM_MEM_DISABLE_MULTICAST=1 NVSHMEM_DISABLE_NVLS=1
ranks=${RANKS:-$(nvidia-smi -L | wc -l)}
gpu=$(python3 -c 'import torch; print(torch.cuda.get_device_name(0).lower().replace(" ", "-"))')
sms=$(python3 -c 'import torch; print(torch.cuda.get_device_properties(0).multi_processor_count)')
machine=$gpu-x$ranks
made=$out/profile/$machine.json shipped=src/weft/planner/profiles/$machine.json
started=60 # the most seconds that a program runs after its --seconds are over
left=0

step() { # name, seconds, then a command with an option --seconds: run it if this is its turn
  local name=$1 seconds=$2 began=$SECONDS room=$((end - SECONDS - started)) state rc; shift 2
  local kept=$out/state/$name log=$out/$name.log
  state=$(cat "$kept" 2>/dev/null || echo new)
  if [ "$turn" = report ] && [ "$state" != done ]; then echo "left: $name ($state)"; left=1; fi
  [ "$state" = "$turn" ] && [ $room -ge 30 ] || return 0
  [ "$seconds" -le $room ] || seconds=$room
  [ -z "${again:-}" ] || rm -rf "$again"
  timeout -k 5 $((seconds + started)) "$@" --seconds "$seconds" > "$log.now" 2>&1
  rc=$?
  if [ $rc -ne 0 ]; then state=failed; elif grep -Eq ' left: | are over$' "$log.now"; then state=cut; else state=done; fi
  echo $state > "$kept"
  echo "$name: $state, exit $rc after $((SECONDS - began)) s"
  [ $rc -eq 0 ] || tail -3 "$log.now"
  cat "$log.now" >> "$log" && rm "$log.now"
}

spmd() { # name, seconds, then a module and its options: run it on all ranks
  local name=$1 seconds=$2; shift 2
  step "$name" "$seconds" torchrun --nproc-per-node "$ranks" -m "$@"
}

whole() { # the same for a program whose result is of one run: it begins anew
  again=$out/$1 spmd "$@"
}

use_profile() { # a profile that is not complete serves only if none is shipped
  [ -f "$made" ] || return 0
  if [ ! -f "$shipped" ] || grep -qs done "$out/state/profile"; then cp "$made" "$shipped"; fi
}

profile() {
  spmd profile 90 weft.planner.tune --out "$made"
  use_profile
  spmd predictions 60 bench.measure.predictions --out "$out/predictions" --profile "$made"
}

ops() { spmd ops 240 bench.measure.run --tune --out "$out/results"; }

eager() { spmd eager 90 bench.measure.eager --out "$out/results"; }

norm() { spmd norm 60 bench.measure.norm --modes graph --out "$out/results"; }

decoder() {
  whole decoder 240 bench.measure.decoder --tune --profile 0 --sms "$sms" --norms auto decomposed --out "$out/decoder"
}

signaled() {
  spmd signaled-gemm 60 bench.measure.signaled --parts gemm --modes graph --out "$out/signaled"
  spmd signaled-ops 90 bench.measure.signaled --parts ops --modes graph --out "$out/signaled"
}

moe() { # with vLLM's experts and quack's if gpu/vllm.sh and gpu/quack.sh have unpacked them
  local quack=${AT_QUACK:-/dev/shm/weft-quack/site-packages} vllm=${AT_VLLM:-/dev/shm/weft-vllm}
  local -x PYTHONPATH=$PYTHONPATH:$quack:$quack/nvidia_cutlass_dsl/dsl_packages:$vllm VLLM_LOGGING_LEVEL=ERROR
  local -x QUACK_CACHE_DIR=${QUACK_CACHE_DIR:-/dev/shm/weft-quack-cache}
  spmd moe 120 bench.measure.moe --tokens 8192 512 --eager --out "$out/results"
  spmd moe-flashmoe 120 bench.measure.moe --models FlashMoE-ungated-E{8,16,32,64,128} --tokens 4096 8192 16384 --eager --out "$out/results"
  spmd moe-flashinfer 60 bench.measure.moe --models FlashInfer-EP4 --tokens 64 2048 --out "$out/results"
  spmd moe-one-launch 60 bench.measure.moe --one-launch --out "$out/results"
  spmd moe-stamps 60 bench.measure.moe --stamps --models Qwen3-30B FlashMoE --tokens 8192 512 --out "$out/results"
  spmd moe-stragglers 60 bench.measure.moe_stragglers --out "$out/results"
  spmd moe-timeline 60 bench.measure.moe_timeline --out "$out/results"
}

attention() { spmd attention 120 bench.measure.attention --shapes {32x32,64x8}-{16384,32768,65536,131072}-{none,zigzag} --out "$out/results"; }

columns() { spmd columns 60 bench.measure.moe_tensor --tokens 8192 --out "$out/results"; }

transformers() {
  spmd transformers 120 bench.measure.hf --tokens 512 2048 8192 --batches 1 16 --out "$out/results"
  spmd transformers-moe 90 bench.measure.hf_moe --models Qwen3-30B --tokens 8192 --batches 1 --out "$out/results"
}

fp8() { spmd fp8 120 bench.measure.fp8_ranks --recipes row block --modes graph --out "$out/results"; }

vllm() { # an engine takes 100 s to start
  local model
  for model in Llama-70B Llama-8B Qwen3-30B-A3B; do
    [ "$turn" != report ] && [ $((end - SECONDS)) -lt 300 ] || OUT=$out/results step "vllm-$model" 500 bash gpu/vllm.sh serve --models "$model"
  done
}

rm -f "$out/profile/shipped"
if [ -f "$shipped" ]; then cp "$shipped" "$out/profile/shipped"; fi
# The checks' record depends on the content of src, so the shipped profile is restored.
trap 'if [ -f "$out/profile/shipped" ]; then mv "$out/profile/shipped" "$shipped"; else rm -f "$shipped"; fi' EXIT
use_profile
for turn in new cut failed report; do
  for part in $parts; do
    if declare -F "$part" > /dev/null; then $part; else echo "no part $part"; left=1; fi
  done
done
if [ -f "$out/results/sweep.jsonl" ]; then # of tuning: no results of the benchmark's form
  cat "$out/results/sweep.jsonl" >> "$out/tuning/sweep.jsonl" && rm "$out/results/sweep.jsonl"
fi
exit $left
