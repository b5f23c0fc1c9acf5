#!/usr/bin/env bash
# The plugin in vLLM 0.26 (torch 2.11) on a GPU machine that cannot install it, in parts small enough to carry, each at most 64 MiB:
#   gpu/vllm.sh pack VLLM_WHEEL   where there is a network: .venv-vllm-parts/{1,2,3}/, of the wheel what it needs there, and the
#                                 wheels of its dependencies that the GPU machine lacks (LACKS, which `missing` there says)
#   gpu/vllm.sh carry N           on the GPU machine, once a part, one call after the other: unpacks part N into $AT
#   gpu/vllm.sh missing           there: which modules vLLM still lacks
#   gpu/vllm.sh run               there: one rank with and without the plugin, then two that share the GPU
# FlashAttention 2's library is left out; FlashAttention 3 serves Hopper.
set -eu
cd "$(dirname "$0")/.."
parts=.venv-vllm-parts
at=${AT:-/dev/shm/weft-vllm}
out=${OUT:-gpu/out}
export PYTHONPATH=$at:$PWD/src:$PWD/tests:$PWD/tests/engines PYTHONUNBUFFERED=1 OMP_NUM_THREADS=1
export NCCL_NVLS_ENABLE=0 TORCH_SYMM_MEM_DISABLE_MULTICAST=1 NVSHMEM_DISABLE_NVLS=1

pack() {
  local wheel=$1 there
  there=$(mktemp -d)
  trap 'rm -rf "$there"' RETURN
  rm -rf "$parts" && mkdir -p "$parts"/{1,2,3}
  python3 -m zipfile -e "$wheel" "$there"
  (cd "$there" && tar c vllm/_C_stable_libtorch.abi3.so) | xz -6 -T0 > "$parts/1/vllm.tar.xz"
  (cd "$there" && tar c vllm/_moe_C_stable_libtorch.abi3.so) | xz -6 -T0 > "$parts/2/vllm.tar.xz"
  (cd "$there" && find vllm vllm-*.dist-info -type f ! -path 'vllm/third_party/deep_gemm/*' ! -name '_C_stable*' ! -name '_moe_C*' \
    ! -name '_vllm_fa2_C*' ! -path '*/fused_moe/configs/*' ! -name 'vllm-rs*' ! -name '_flashmla*' ! -name '_qutlass*' \
    ! -name '_deep_gemm*' ! -name '*.pyc' -print0 | tar c --null -T -) | xz -6 -T0 > "$parts/3/vllm.tar.xz"
  if [ -n "${LACKS:-}" ]; then
    python3 -m pip -qq download --no-deps --only-binary :all: --python-version 3.12 --platform manylinux_2_28_x86_64 \
      --platform manylinux2014_x86_64 --platform any -d "$parts/3" $LACKS
  fi
  du -sm "$parts"/*
}

carry() {
  mkdir -p "$at"
  xz -dc "$parts/$1/vllm.tar.xz" | tar x -C "$at"
  for wheel in "$parts/$1"/*.whl; do
    [ -e "$wheel" ] && python3 -m zipfile -e "$wheel" "$at"
  done
  du -sm "$at"
}

missing() { # names, one a line, as far as an import of the engine says them; what is named is stood in for to find the next
  python3 - <<'PY'
import importlib, sys, types
from unittest import mock

lacks = []
for _ in range(200):
    try:
        for name in ("vllm", "vllm.entrypoints.llm", "vllm.v1.worker.gpu_worker", "vllm.model_executor.models.llama"):
            importlib.import_module(name)
        break
    except ModuleNotFoundError as error:
        top = str(error.name).split(".")[0]
        if top == "vllm":
            raise
        lacks.append(top)
        sys.modules[str(error.name)] = mock.MagicMock(__path__=[], __spec__=None)
print("\n".join(dict.fromkeys(lacks)) or "nothing")
PY
}

run() {
  mkdir -p "$out"
  local failed=0
  timeout 280 python3 tests/gpu_vllm.py --ranks 1 --out "$out/vllm1.json" > "$out/vllm1.log" 2>&1 || failed=1
  tail -3 "$out/vllm1.log"
  for off in 1 0; do # without the plugin, then with it, which compares
    WEFT_VLLM=$((1 - off)) timeout 280 torchrun --master-port 29591 --no-python --nproc-per-node 2 bash -c \
      "NCCL_HOSTID=rank\$RANK NCCL_NET=Socket NCCL_SOCKET_IFNAME=lo TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES=1 LOCAL_RANK=0 \
      python3 tests/gpu_vllm.py --ranks 2 --out '$out/vllm2.json'" > "$out/vllm2-$off.log" 2>&1 || failed=1
    tail -4 "$out/vllm2-$off.log"
  done
  return $failed
}

"$@"
