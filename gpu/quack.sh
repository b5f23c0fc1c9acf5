#!/usr/bin/env bash
# Installs quack on a GPU machine without a network, in parts that are small enough to carry, and measures with it on one GPU:
#   gpu/quack.sh pack WHEELS           with a network: pack a folder of quack's wheel and its requirements into .quack/{0,1,..}/
#   gpu/quack.sh carry N [M ..] [last] on the GPU machine, call by call: keep the parts, and unpack all of them after the last
#   gpu/quack.sh check                 on it: compile the forms of quack's grouped GEMMs and check them, within 100 s
#   gpu/quack.sh moe [WORDS]           on it: run bench.measure.moe_one_gpu within SECONDS_OF (270), with vLLM if gpu/vllm.sh has
#                                      unpacked it; WORDS replace the arguments MOE. The rows belong in
#                                      bench/results/<gpu>-x1/moe_one_gpu.jsonl
set -eu
cd "$(dirname "$0")/.."
parts=.quack
at=${AT:-/dev/shm/weft-quack/site-packages} # quack treats a library as unchanging only in a folder of this name
vllm=${AT_VLLM:-/dev/shm/weft-vllm}
out=${OUT:-gpu/out}
limit=${SECONDS_OF:-270}
MOE="--tokens 8192 512 2048 64 --zipf 0 1 --compile 8192 512"
export PYTHONPATH=$PWD/src:$PWD:$at:$at/nvidia_cutlass_dsl/dsl_packages:$vllm PYTHONUNBUFFERED=1 OMP_NUM_THREADS=1
export QUACK_CACHE_DIR=${QUACK_CACHE_DIR:-/dev/shm/weft-quack-cache} WEFT_TIMEOUT=${WEFT_TIMEOUT:-10}
export VLLM_USE_FLASHINFER_SAMPLER=0 VLLM_LOGGING_LEVEL=ERROR NCCL_NVLS_ENABLE=0 TORCH_SYMM_MEM_DISABLE_MULTICAST=1

pack() {
  rm -rf "$parts" && mkdir -p "$parts"
  tar c -C "$1" . | split -b 52000000 -d -a 1 - "$parts/part"
  for each in "$parts"/part?; do mkdir "$parts/${each#"$parts/part"}" && mv "$each" "$parts/${each#"$parts/part"}/p"; done
  du -sm "$parts"/*
}

carry() {
  for part in "$@"; do
    if [ "$part" = last ]; then
      rm -rf "$at" && mkdir -p "$at" "$at.wheels"
      cat "$at".part? | tar x -C "$at.wheels"
      for wheel in "$at.wheels"/*.whl; do python3 -m zipfile -e "$wheel" "$at"; done
      rm -r "$at.wheels" "$at".part?
      du -sm "$at"
      python3 -c 'import quack.gemm_interface; from importlib.metadata import version; print("quack", version("quack-kernels"))'
    else
      mkdir -p "$(dirname "$at")"
      mv "$parts/$part/p" "$at.part$part"
    fi
  done
}

check() {
  timeout 110 python3 -c 'from bench.common.quack_moe import FORMS, usable; print(len(usable(100)), "forms of", len(FORMS))'
}

moe() { # if a method has lost the GPU, start again without it
  mkdir -p "$out"
  local left
  for _ in 1 2 3; do
    left=$((limit - SECONDS))
    [ $left -gt 60 ] || break
    timeout -k 5 "$left" torchrun --standalone --nproc-per-node 1 -m bench.measure.moe_one_gpu --out "$out" \
      --seconds $((left - 45)) "$@" 2> "$out/moe_one_gpu.err" && return 0
    tail -3 "$out/moe_one_gpu.err"
  done
  [ -s "$out/moe_one_gpu.jsonl" ]
}

command=$1
shift
# shellcheck disable=SC2086
if [ "$command" = moe ] && [ $# -eq 0 ]; then moe $MOE; else "$command" "$@"; fi
