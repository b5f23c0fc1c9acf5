#!/usr/bin/env bash
# Runs the GPU checks that have not passed with this version of weft, with 2, 4 and 8 ranks, on a machine with python3, torch and triton, in
# one call that ends by itself within MINUTES (9.5). Ranks share GPUs if there are fewer. The script writes results.json and log.txt to
# ${OUT:-gpu/out}. In the repository, this command adds them to the record, so that the next call runs only the remaining checks:
#   python -m tests.gpu.gpu_record $OUT/results.json
# Environment: PARTS, some of checks peers users fuzz (tests/gpu/gpu_run.py describes them; all of these); RANKS; ONLY, words in the names
# of checks; FUZZ_SECONDS, the seconds of random calls for each number of ranks (60), or FUZZ_CALLS, their number; SEED, their seed (the time).
set -u
cd "$(dirname "$0")/.."
out=${OUT:-gpu/out}
mkdir -p "$out"
export PYTHONPATH=$PWD/src:$PWD PYTHONUNBUFFERED=1 OMP_NUM_THREADS=1
export NCCL_NVLS_ENABLE=0 TORCH_SYMM_MEM_DISABLE_MULTICAST=1 NVSHMEM_DISABLE_NVLS=1

# shellcheck disable=SC2086
exec python3 -m tests.gpu.gpu_run --out "$out" --parts ${PARTS:-checks peers users fuzz} --minutes "${MINUTES:-9.5}" ${RANKS:+--ranks $RANKS} \
  ${ONLY:+--only $ONLY} --fuzz-seconds "${FUZZ_SECONDS:-60}" --fuzz-calls "${FUZZ_CALLS:-1000000}" ${SEED:+--seed $SEED}
