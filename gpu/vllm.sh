#!/usr/bin/env bash
# The plugin in vLLM 0.26 (torch 2.11) on a GPU machine that cannot install it, in parts small enough to carry, each at most 64 MiB:
#   gpu/vllm.sh pack VLLM_WHEEL   where there is a network: .venv-vllm-parts/{0,1,..}/, of the wheel what it needs there, and
#                                 the dependencies that the GPU machine lacks (LACKS, as pip takes them; `missing` there says)
#   gpu/vllm.sh carry N [last]    on the GPU machine, once a part, one call after the other: keeps part N, and unpacks all
#                                 parts into $AT behind the last
#   gpu/vllm.sh missing           there: which modules vLLM still lacks
#   gpu/vllm.sh run 1             there: one rank, on which the plugin has nothing to serve
#   gpu/vllm.sh run N             there: N ranks that share the GPU, without and with the plugin, whose answers are compared
# FlashAttention 2's library is left out; FlashAttention 3 serves Hopper.
set -eu
cd "$(dirname "$0")/.."
parts=.venv-vllm-parts
at=${AT:-/dev/shm/weft-vllm}
out=${OUT:-gpu/out}
export PYTHONPATH=$at:$PWD/src:$PWD PYTHONUNBUFFERED=1 OMP_NUM_THREADS=1
export VLLM_USE_FLASHINFER_SAMPLER=0 NCCL_NVLS_ENABLE=0 TORCH_SYMM_MEM_DISABLE_MULTICAST=1 NVSHMEM_DISABLE_NVLS=1

pack() {
  local wheel=$1 there
  there=$(mktemp -d)
  trap 'rm -rf "$there"' RETURN
  rm -rf "$parts" && mkdir -p "$parts"
  python3 -m zipfile -e "$wheel" "$there"
  rm -rf "$there"/vllm/third_party/deep_gemm "$there"/vllm/vllm-rs*
  find "$there" \( -name '_vllm_fa2_C*' -o -name '_flashmla*' -o -name '_qutlass*' -o -name '_deep_gemm*' \) -delete
  if [ -n "${LACKS:-}" ]; then
    local platforms=(any manylinux1_x86_64 manylinux2010_x86_64 manylinux2014_x86_64) minor
    for minor in 5 12 17 24 26 27 28 31 34 35 39; do platforms+=("manylinux_2_${minor}_x86_64"); done
    python3 -m pip -qq download --no-deps --only-binary :all: --python-version 3.12 "${platforms[@]/#/--platform=}" \
      -d "$there/wheels" $LACKS
    for each in "$there"/wheels/*.whl; do python3 -m zipfile -e "$each" "$there"; done
    rm -r "$there/wheels"
  fi
  (cd "$there" && tar c .) | xz -6 -T0 | split -b 50M -d -a 1 - "$parts/part"
  for each in "$parts"/part?; do mkdir "$parts/${each#"$parts/part"}" && mv "$each" "$parts/${each#"$parts/part"}/part"; done
  du -sm "$parts"/*
}

carry() { # keeps part N; the last one, with a word behind its number, also unpacks them all
  mkdir -p "$at"
  mv "$parts/$1/part" "$at.part$1"
  if [ "${2:-}" ]; then
    cat "$at".part? | xz -dc | tar x -C "$at"
    entry_points
    du -sm "$at"
  fi
}

entry_points() { # weft's, as an installed weft has them: vLLM finds its plugins so
  python3 - "$at" <<'PY'
import sys, tomllib
from pathlib import Path

project = tomllib.loads(Path("pyproject.toml").read_text())["project"]
there = Path(sys.argv[1]) / f"weft-{project['version']}.dist-info"
there.mkdir(exist_ok=True)
(there / "METADATA").write_text(f"Metadata-Version: 2.1\nName: weft\nVersion: {project['version']}\n")
groups = project["entry-points"].items()
(there / "entry_points.txt").write_text(
    "".join(f"[{group}]\n" + "".join(f"{k} = {v}\n" for k, v in entries.items()) for group, entries in groups)
)
PY
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
  if [ "$1" = 1 ]; then
    timeout 280 python3 -m tests.gpu.gpu_vllm --ranks 1 --out "$out/vllm1.json" > "$out/vllm1.log" 2>&1 || failed=1
    tail -12 "$out/vllm1.log"
    return $failed
  fi
  for kind in ${KINDS:-Llama Qwen3 Qwen3Moe}; do for plugin in 0 1; do
    log=$out/vllm$1-$kind-$plugin.log
    WEFT_VLLM=$plugin timeout 290 torchrun --master-port "${PORT:-29591}" --no-python --nproc-per-node "$1" bash -c \
      "NCCL_HOSTID=rank\$RANK NCCL_NET=Socket NCCL_SOCKET_IFNAME=lo TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES=1 NCCL_MULTI_RANK_GPU_ENABLE=1 WEFT_SHARE_GPU=1 LOCAL_RANK=0 \
      python3 -m tests.gpu.gpu_vllm --ranks $1 --kind $kind ${FORMS:+--forms $FORMS} --out '$out/vllm$1-$kind.json' --rows '$out/vllm.jsonl'" > "$log" 2>&1 || failed=1
    grep -E "^ended|'same'|Error|weft" "$log" | tail -20
  done; done
  return $failed
}

"$@"
