#!/usr/bin/env bash
# Random calls of every op on 2 GPUs, then on 4 where there are so many, counted and compared (tests/gpu_fuzz.py): FUZZ_SECONDS of
# each (default 60, the compiling of some hundred kernels included), or until FUZZ_CALLS are made. What is said of a wrong call
# repeats it: torchrun .. tests/gpu_fuzz.py --seed S --only ROUND --kind KIND. Results go to ${OUT:-gpu/out}/fuzz<N>.json, which
# tests/gpu_record.py adds to the totals; SEED names the seed, which is else the time.
set -u
cd "$(dirname "$0")/.."
out=${OUT:-gpu/out}
seconds=${FUZZ_SECONDS:-60}
mkdir -p "$out"
rm -f "$out"/fuzz*.json # of another tree
export PYTHONPATH=$PWD/src:$PWD/tests PYTHONUNBUFFERED=1 OMP_NUM_THREADS=1 WEFT_TIMEOUT=${WEFT_TIMEOUT:-10}
export NCCL_NVLS_ENABLE=0 TORCH_SYMM_MEM_DISABLE_MULTICAST=1 NVSHMEM_DISABLE_NVLS=1
gpus=$(nvidia-smi -L | wc -l)
failed=0

[ "$seconds" -gt 0 ] || exit 0
for n in ${FUZZ_GPUS:-2 4}; do
  [ "$gpus" -ge "$n" ] || continue
  timeout $((seconds + 60)) torchrun --master-port $((29700 + n)) --nproc-per-node "$n" tests/gpu_fuzz.py --out "$out" \
    --seconds "$seconds" --calls "${FUZZ_CALLS:-1000000}" ${SEED:+--seed $SEED} > "$out/fuzz$n.log" 2>&1 || failed=1
  grep -h "^fuzz on\|^WRONG\|^ended by\|Error" "$out/fuzz$n.log" | head -8
done
exit $failed
