#!/usr/bin/env bash
# The GPU checks that have not passed with this version of weft, with 2, 4 and 8 ranks, on a machine with one GPU or several and python3
# with torch and triton, in one call that ends by itself within MINUTES (9.5). Fewer GPUs than ranks are shared. Results go to
# ${OUT:-gpu/out}: results.json, log.txt. Then, where git is, so that the next call goes on with what is left:
#   python -m tests.gpu.gpu_record $OUT/results.json
# Environment: PARTS, some of checks peers users fuzz (tests/gpu/gpu_run.py says what they are; all of these); RANKS; ONLY, words of the names
# of checks; FUZZ_SECONDS of random calls for each number of ranks (60), or until FUZZ_CALLS are made, of SEED (the time).
set -u
cd "$(dirname "$0")/.."
out=${OUT:-gpu/out}
mkdir -p "$out"
export PYTHONPATH=$PWD/src:$PWD PYTHONUNBUFFERED=1 OMP_NUM_THREADS=1
export NCCL_NVLS_ENABLE=0 TORCH_SYMM_MEM_DISABLE_MULTICAST=1 NVSHMEM_DISABLE_NVLS=1

# shellcheck disable=SC2086
exec python3 -m tests.gpu.gpu_run --out "$out" --parts ${PARTS:-checks peers users fuzz} --minutes "${MINUTES:-9.5}" ${RANKS:+--ranks $RANKS} \
  ${ONLY:+--only $ONLY} --fuzz-seconds "${FUZZ_SECONDS:-60}" --fuzz-calls "${FUZZ_CALLS:-1000000}" ${SEED:+--seed $SEED}
