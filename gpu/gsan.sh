#!/usr/bin/env bash
# Runs weft's operators under GSan, Triton's race detector, on a machine with two GPUs and an older Triton:
#   gpu/gsan.sh pack WHEEL     with a network: pack Triton 3.9's wheel for the GPU machine's Python into .venv-gsan/, about 50 MB
#   gpu/gsan.sh unpack         on the GPU machine: unpack it into $AT
#   gpu/gsan.sh run [NAME ..]  on it: run the cases of tests/gpu/gpu_gsan.py, each within SECONDS_OF (90), and print GSan's reports
# The assembler for sm_90 in the wheel is ptxas-blackwell, of CUDA 13.4. If the driver refuses its code, set TRITON_PTXAS_BLACKWELL_PATH to
# the machine's own ptxas.
set -euo pipefail
cd "$(dirname "$0")/.."
at=${AT:-/dev/shm/weft-gsan}
export PYTHONPATH=$PWD/src:$PWD:$at PYTHONUNBUFFERED=1 OMP_NUM_THREADS=1 NCCL_NVLS_ENABLE=0
export WEFT_STOCK_TRITON=1 DISABLE_PTXAS_OPT=1 WEFT_TIMEOUT=${WEFT_TIMEOUT:-10} TRITON_CACHE_DIR=${TRITON_CACHE_DIR:-/dev/shm/weft-gsan-cache}

pack() { # without debug information, the profiler, plugins and the tools of other GPUs
  local there
  there=$(mktemp -d)
  trap 'rm -rf "$there"' RETURN
  python3 -m zipfile -e "$1" "$there"
  (cd "$there/triton" && rm -rf FileCheck _C/libproton.so include instrumentation plugins backends/amd/{include,lib} \
    backends/nvidia/lib/cupti* backends/nvidia/bin/{cuobjdump,nvdisasm,ptxas})
  strip "$there"/triton/backends/nvidia/bin/* && strip --strip-unneeded "$there/triton/_C/libtriton.so"
  chmod +x "$there"/triton/backends/nvidia/bin/*
  mkdir -p .venv-gsan
  tar c -C "$there" triton | xz -9 -T0 > .venv-gsan/triton.tar.xz
  du -m .venv-gsan/triton.tar.xz
}

unpack() {
  rm -rf "$at" && mkdir -p "$at"
  xz -dc .venv-gsan/triton.tar.xz | tar x -C "$at"
  python3 -c 'import triton; print("triton", triton.__version__, triton.__file__)'
}

run() { # all cases at once, because compiling an instrumented kernel takes most of the time
  local logs
  logs=$(mktemp -d)
  [ $# -gt 0 ] || set -- barrier one_shot two_shot all_gather_matmul matmul_reduce_scatter
  for name in "$@"; do
    { timeout -k 5 "${SECONDS_OF:-90}" torchrun --standalone --nproc-per-node 2 -m tests.gpu.gpu_gsan "$name" || echo "$name: ended with $?"; } \
      > "$logs/$name" 2>&1 &
  done
  wait
  for name in "$@"; do tail -25 "$logs/$name"; done
}

command=$1
shift
"$command" "$@"
