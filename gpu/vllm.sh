#!/usr/bin/env bash
# Installs vLLM 0.26 (torch 2.11) on a GPU machine without a network, in parts of 40 MiB, and runs weft's plugin in it:
#   gpu/vllm.sh pack              with a network: pack vLLM, flashinfer and the other packages that the GPU machine lacks into
#                                 .venv-vllm-parts/{0,1,..}/
#   gpu/vllm.sh carry N [last]    on the GPU machine, once for each part, call by call: keep part N, and unpack all parts into $AT after
#                                 the last
#   gpu/vllm.sh missing           on it: print the modules that vLLM still lacks
#   gpu/vllm.sh serve WORDS       on it: run bench.measure.vllm_serving WORDS
#   gpu/vllm.sh run 1             on it: run one rank, on which the plugin has nothing to serve
#   gpu/vllm.sh run N             on it: compare the answers of N ranks that share the GPU, without and with the plugin
#   gpu/vllm.sh invariant N       on it: compare the bits of answers in vLLM's batch-invariant mode on N GPUs, without and with the plugin
# pack compiles flashinfer's all-reduce if there is nvcc; else the GPU machine must have nvcc. FlashAttention 2's library is not packed, because
# FlashAttention 3 serves Hopper.
set -eu
cd "$(dirname "$0")/.."
parts=.venv-vllm-parts
at=${AT:-/dev/shm/weft-vllm}
out=${OUT:-gpu/out}
export PYTHONPATH=$at:$PWD/src:$PWD PYTHONUNBUFFERED=1 OMP_NUM_THREADS=1
# "trtllm" is flashinfer's fused all-reduce without NVLink multicast; vLLM would try "mnnvl" first.
export VLLM_USE_FLASHINFER_SAMPLER=0 VLLM_FLASHINFER_ALLREDUCE_BACKEND=trtllm NCCL_NVLS_ENABLE=0 TORCH_SYMM_MEM_DISABLE_MULTICAST=1 NVSHMEM_DISABLE_NVLS=1

# The requirements of vLLM and flashinfer that the GPU machine lacks; it has torch, Triton, Transformers, numpy and nvcc. These are not packed,
# because they are big and models in bf16 do not use them: cutlass-dsl, cutile, cudnn-frontend, tilelang, quack, humming, tokenspeed and the decoders of video.
lacks=(vllm==0.26.0
  annotated-types==0.8.0 anthropic==2.14.0 apache-tvm-ffi==0.1.10 astor==0.8.1 blake3==1.0.11 cachetools==8.0.2 cbor2==6.3.0 cffi==2.1.1
  compressed-tensors==0.17.0 cryptography==50.0.2 depyf==0.20.0 dill==0.4.1 dnspython==2.9.2 docstring-parser==0.18.0
  email-validator==2.4.0 fastapi-cli==0.0.34 fastapi==0.136.3 fastsafetensors==0.5.0 flashinfer-python==0.6.14
  googleapis-common-protos==1.76.0 httpcore2==2.16.2 httptools==0.9.0 httpx2==2.16.2 ijson==3.6.0 interegular==0.3.3 jiter==0.19.0
  jmespath==1.1.0 jsonschema-specifications==2025.9.1 jsonschema==4.26.0 lark==1.2.2 llguidance==1.7.6 lm-format-enforcer==0.11.3
  loguru==0.7.3 mcp-types==2.3.0 mcp==2.3.0 mistral-common==1.13.1 model-hosting-container-standards==0.1.16 msgspec==0.22.0
  nvtx==0.2.15 openai-harmony==0.0.8 openai==3.57.0 opentelemetry-api==1.45.2 opentelemetry-exporter-http-transport==0.66b2
  opentelemetry-exporter-otlp-common==0.66b2 opentelemetry-exporter-otlp-proto-common==1.45.2
  opentelemetry-exporter-otlp-proto-grpc==1.45.2 opentelemetry-exporter-otlp-proto-http==1.45.2 opentelemetry-exporter-otlp==1.45.2
  opentelemetry-proto==1.45.2 opentelemetry-sdk==1.45.2 opentelemetry-semantic-conventions-ai==0.5.1
  opentelemetry-semantic-conventions==0.66b2 outlines-core==0.2.14 partial-json-parser==0.2.1.1.post7
  prometheus-fastapi-instrumentator==8.1.0 pybase64==1.5.1 pycountry==26.2.16 pycparser==3.12 pydantic-core==2.50.5
  pydantic-extra-types==2.11.1 pydantic-settings==2.16.3 pydantic==2.14.4 pyelftools==0.33 pyjwt==2.15.1 python-dotenv==1.2.4
  python-json-logger==4.2.0 python-multipart==0.0.34 pyzmq==27.3.0 referencing==0.37.0 rich-toolkit==0.20.6 rpds-py==2026.9.1
  setproctitle==1.3.8 sniffio==1.3.1 sse-starlette==3.7.0 starlette==1.10.0 supervisor==4.3.0 truststore==0.10.5
  typing-inspection==0.4.5 uvicorn==0.54.0 watchfiles==1.3.0 websockets==17.4 xgrammar==0.2.7
)

pack() {
  local there platforms=(any manylinux1_x86_64 manylinux2010_x86_64 manylinux2014_x86_64) minor each
  there=$(mktemp -d)
  trap 'rm -rf "$there"' RETURN
  rm -rf "$parts" && mkdir -p "$parts"
  for minor in 5 12 17 24 26 27 28 31 34 35 39; do platforms+=("manylinux_2_${minor}_x86_64"); done
  python3 -m pip -qq download --no-deps --only-binary :all: --python-version 3.12 "${platforms[@]/#/--platform=}" \
    -d "$there/wheels" "${lacks[@]}"
  for each in "$there"/wheels/*.whl; do python3 -m zipfile -e "$each" "$there"; done
  rm -r "$there/wheels"
  rm -rf "$there"/vllm/third_party/deep_gemm "$there"/vllm/vllm-rs*
  find "$there" \( -name '_vllm_fa2_C*' -o -name '_flashmla*' -o -name '_qutlass*' -o -name '_deep_gemm*' \) -delete
  if command -v nvcc > /dev/null; then compile_all_reduce "$there"; fi
  (cd "$there" && tar c .) | xz -6 -T0 | split -b 40M -d -a 1 - "$parts/part"
  for each in "$parts"/part?; do mkdir "$parts/${each#"$parts/part"}" && mv "$each" "$parts/${each#"$parts/part"}/part"; done
  du -sm "$parts"/*
}

compile_all_reduce() { # compile flashinfer's all-reduce with its own options, which takes the first engine on a new machine 210 s
  local data=$1/flashinfer/data built name part
  local options=(-gencode=arch=compute_90a,code=sm_90a -O3 -std=c++17 -use_fast_math --expt-relaxed-constexpr
    -static-global-template-stub=false -Xfatbin=-compress-all -DNDEBUG -D_GLIBCXX_USE_CXX11_ABI=1 -Xcompiler -fPIC -w "-I$1/tvm_ffi/include")
  for name in FP8_E8M0 FP4_E2M1 F16 BF16 FP8_E4M3 FP8_E5M2; do options+=("-DFLASHINFER_ENABLE_$name"); done
  for part in cccl/{cub,libcudacxx/include,thrust} include csrc cutlass/include cutlass/tools/util/include spdlog/include; do
    options+=("-I$data/$part")
  done
  built=$(mktemp -d)
  for name in trtllm_allreduce{,_fusion} trtllm_moe_allreduce_fusion; do
    nvcc "${options[@]}" -c "$data/csrc/$name.cu" -o "$built/$name.o"
  done
  # A stand-in for the driver's library, which a machine without a GPU lacks.
  gcc -shared -Wl,-soname,libcuda.so.1 -o "$built/libcuda.so" -x c /dev/null
  mkdir -p "$data/aot/trtllm_comm"
  nvcc -shared -cudart shared -Xlinker --no-as-needed -o "$data/aot/trtllm_comm/trtllm_comm.so" "$built"/*.o "-L$built" -lcuda
  rm -r "$built"
}

carry() { # keep part N and, with a word after its number, unpack all parts
  mkdir -p "$at"
  mv "$parts/$1/part" "$at.part$1"
  if [ "${2:-}" ]; then
    cat "$at".part? | xz -dc | tar xi -C "$at" # parts may hold several archives
    entry_points
    du -sm "$at"
  fi
}

entry_points() { # write weft's entry points, by which vLLM finds its plugins
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

missing() { # print a name a line: each module that an import of the engine lacks is replaced by a stand-in to find the next
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

serve() {
  python3 -m bench.measure.vllm_serving --out "$out" "$@"
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

invariant() { # weft's engine starts last, because it times passes
  mkdir -p "$out"
  local failed=0 stock
  same_bits "$1" stock & stock=$!
  same_bits "$1" vllm || failed=1
  wait "$stock" || failed=1
  same_bits "$1" weft || failed=1
  return $failed
}

same_bits() { # N MODE, as tests.gpu.gpu_vllm_invariant has it
  local log=$out/vllm_invariant-$1-$2.log port=${PORT:-29591} failed=0
  [ "$2" = stock ] && port=$((port + 1))
  timeout 270 torchrun --master-port "$port" --nproc-per-node "$1" -m tests.gpu.gpu_vllm_invariant "$2" --out "$out" ${FUSE:+--fuse} > "$log" 2>&1 || failed=1
  grep '^invariant' "$log" || tail -20 "$log"
  return $failed
}

"$@"
