#!/usr/bin/env bash
# GPU checks on 2, 4, .. GPUs, and of ranks that share one, then the benchmark and random calls, in one call on a machine with
# several GPUs and python3 with torch and triton. Results go to ${OUT:-gpu/out}: world<N>.json, those of two GPUs in folders,
# stalled*.json, loopback.xml, users.xml, fuzz<N>.json, results/<op>.jsonl, logs. Then, where git is:
#   python tests/gpu_record.py $OUT; cp $OUT/results/*.jsonl bench/results/<machine>/
# Environment: TUNE=1 also times all candidate plans (for bench/table.py); CHECK_SECONDS, BENCH_SECONDS, FUZZ_SECONDS bound the parts.
set -u
cd "$(dirname "$0")/.."
out=${OUT:-gpu/out}
mkdir -p "$out"
rm -f "$out"/world*.json "$out"/*/world2.json "$out"/stalled*.json "$out"/*.xml # of another tree
export PYTHONPATH=$PWD/src:$PWD/tests:$PWD/bench PYTHONUNBUFFERED=1 OMP_NUM_THREADS=1 WEFT_TIMEOUT=${WEFT_TIMEOUT:-10}
export NCCL_NVLS_ENABLE=0 TORCH_SYMM_MEM_DISABLE_MULTICAST=1 NVSHMEM_DISABLE_NVLS=1
gpus=$(nvidia-smi -L | wc -l)
checks=${CHECK_SECONDS:-480} # about 400 of one world take 420, one after another
bench=${BENCH_SECONDS:-300}
failed=0

python3 - > "$out/machine.json" <<'PY'
import json, torch, triton
print(json.dumps({"machine": f"{torch.cuda.device_count()} x {torch.cuda.get_device_name(0)}", "versions": {
    "torch": torch.__version__, "triton": triton.__version__, "cuda": torch.version.cuda,
    "nccl": ".".join(map(str, torch.cuda.nccl.version()))}}))
PY

check() { # world, first GPU, more arguments
  local n=$1 first=$2 port=$((29500 + $1 + $2 + 20 * ${lane:-0})); shift 2
  CUDA_VISIBLE_DEVICES=$(seq -s, "$first" $((first + n - 1))) timeout $((checks + 40)) torchrun --master-port $port \
    --nproc-per-node "$n" tests/gpu_main.py --out "$out" --seconds "$checks" "$@"
}

peers_that_stay_away() { # GPUs: a peer that stalls, one that is killed, one that is late, and ranks as threads of one GPU
  local failed=0 first=${1%%,*}
  for op in all_gather_matmul one_shot moe_exchange awaiting; do
    WEFT_TIMEOUT=3 checks=60 check 2 "$first" --stalled-peer $op >> "$out/stalled.log" 2>&1 || failed=1
  done
  CUDA_VISIBLE_DEVICES=$1 timeout 100 python3 tests/gpu_killed.py --out "$out" > "$out/killed.log" 2>&1 || failed=1
  CUDA_VISIBLE_DEVICES=$1 timeout 100 torchrun --master-port 29499 --nproc-per-node 2 tests/gpu_late.py --out "$out" \
    > "$out/late.log" 2>&1 || failed=1
  CUDA_VISIBLE_DEVICES=$1 timeout 200 torchrun --master-port 29498 --nproc-per-node 2 tests/gpu_disagree.py --out "$out" \
    > "$out/disagree.log" 2>&1 || failed=1
  CUDA_VISIBLE_DEVICES=$first timeout 280 python3 -m pytest -q -p no:cacheprovider --junitxml "$out/loopback.xml" \
    -m gpu -k "not on_gpus" tests/test_gpu.py tests/test_signaled.py > "$out/loopback.log" 2>&1 || failed=1
  return $failed
}

part() { # name, first GPU, more arguments: some checks of two, with a folder and a log of their own
  local log="$out/world2-$1.log" out="$out/$1" first=$2; shift 2
  check 2 "$first" "$@" > "$log" 2>&1
}

pair() { # first GPU: all checks of two, and what users write. Beside each other, since the most of it is compiling
  local failed=0 pid pids=()
  lane=1 part ops "$1" --without moe decoder hf styles async_tp attention gradients parts & pids+=($!)
  lane=2 part experts "$1" --only moe --without decoder hf gradients parts & pids+=($!)
  lane=3 part gradients "$1" --only gradients parts --without attention decoder hf & pids+=($!)
  lane=4 part decoders "$1" --only decoder & pids+=($!)
  lane=5 part models "$1" --only hf styles async_tp attention --without decoder & pids+=($!)
  CUDA_VISIBLE_DEVICES=$1,$(($1 + 1)) timeout 150 python3 -m pytest -q -p no:cacheprovider --junitxml "$out/users.xml" \
    -m gpu -k "on_gpus and not 4 and not 8" tests/test_gpu.py tests/test_autograd.py > "$out/users.log" 2>&1 || failed=1
  for pid in "${pids[@]}"; do wait "$pid" || failed=1; done
  return $failed
}

if [ "$gpus" -ge 8 ]; then
  check 8 0 > "$out/world8.log" 2>&1 || failed=1
  grep -h "FAILED\|Error" "$out/world8.log" | head -5
fi
if [ "$bench" -gt 0 ]; then
  timeout $((bench + 60)) torchrun --nproc-per-node "$gpus" bench/run.py --out "$out/results" --seconds "$bench" \
    ${TUNE:+--tune} ${SHAPES:+--shapes $SHAPES} > "$out/bench.log" 2>&1 || failed=1
fi
if [ "$gpus" -ge 4 ]; then # what needs two GPUs beside it, on others, and with 8 GPUs also what needs four
  of=0 away=2,3 four=
  check 4 0 > "$out/world4.log" 2>&1 & four=$!
  if [ "$gpus" -ge 8 ]; then of=4 away=6,7; else wait $four || failed=1; four=; fi
  pair $of & two=$!
  peers_that_stay_away $away || failed=1
  wait $two || failed=1
  [ -n "$four" ] && { wait $four || failed=1; }
elif [ "$gpus" -ge 2 ]; then
  pair 0 & two=$!
  peers_that_stay_away 0,1 || failed=1
  wait $two || failed=1
fi
bash gpu/fuzz.sh || failed=1
for log in "$out"/world*.log "$out"/stalled.log "$out"/killed.log "$out"/late.log "$out"/disagree.log "$out"/loopback.log "$out"/users.log; do
  [ -f "$log" ] && echo "== $log" && grep -h " ok\|FAILED\|: ok\|Error\|passed\|failed" "$log" | tail -4
done
exit $failed
