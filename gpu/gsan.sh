#!/usr/bin/env bash
# Runs weft's operators under GSan, Triton's race detector, on a machine with two GPUs and an older Triton (not run yet):
#   gpu/gsan.sh pack WHEEL             with a network: pack Triton 3.9's wheel for the GPU machine's Python into .gsan/{0,1,..}/
#   gpu/gsan.sh carry N [M ..] [last]  on the GPU machine, call by call: keep the parts, and unpack all of them after the last
#   gpu/gsan.sh run [NAME ..]          on it: run the cases of tests/gpu/gpu_gsan.py, each within SECONDS_OF (540), and print GSan's reports
set -euo pipefail
cd "$(dirname "$0")/.."
at=${AT:-/dev/shm/weft-gsan}
export PYTHONPATH=$PWD/src:$PWD:$at PYTHONUNBUFFERED=1 OMP_NUM_THREADS=1 NCCL_NVLS_ENABLE=0
export WEFT_STOCK_TRITON=1 WEFT_TIMEOUT=${WEFT_TIMEOUT:-60} TRITON_CACHE_DIR=${TRITON_CACHE_DIR:-/dev/shm/weft-gsan-cache}

pack() {
  rm -rf .gsan && mkdir -p .gsan
  split -b 52000000 -d -a 1 "$1" .gsan/part
  for each in .gsan/part?; do mkdir ".gsan/${each#.gsan/part}" && mv "$each" ".gsan/${each#.gsan/part}/p"; done
}

carry() {
  for part in "$@"; do
    if [ "$part" = last ]; then
      cat "$at".part? > "$at.whl"
      rm -rf "$at" && python3 -m zipfile -e "$at.whl" "$at" && chmod +x "$at"/triton/backends/nvidia/bin/*
      rm "$at.whl" "$at".part?
      python3 -c 'import triton; print("triton", triton.__version__, triton.__file__)'
    else
      mv ".gsan/$part/p" "$at.part$part"
    fi
  done
}

run() {
  [ $# -gt 0 ] || set -- barrier one_shot two_shot all_gather_matmul matmul_reduce_scatter
  for name in "$@"; do
    timeout -k 5 "${SECONDS_OF:-540}" torchrun --standalone --nproc-per-node 2 -m tests.gpu.gpu_gsan "$name" 2>&1 | tail -25 || echo "$name: ended with $?"
  done
}

command=$1
shift
"$command" "$@"
