#!/usr/bin/env bash
# Runs tests/gpu/gpu_nodes.py alone: two nodes on one machine, with 2 x 2 and 2 x 4 ranks, which share GPUs if there are fewer. It checks
# results and graphs, and that a rank or node that does not join, or is killed, leads to an error. The script ends by itself within
# 10 minutes and writes logs and JSON to ${OUT:-gpu/out}; gpu/run.sh includes the same checks.
set -u
cd "$(dirname "$0")/.."
out=${OUT:-gpu/out} failed=0
mkdir -p "$out"
export PYTHONPATH=$PWD/src:$PWD PYTHONUNBUFFERED=1 OMP_NUM_THREADS=1 WEFT_SHARE_GPU=1 TORCHINDUCTOR_COMPILE_THREADS=1
export NCCL_NVLS_ENABLE=0 TORCH_SYMM_MEM_DISABLE_MULTICAST=1 NVSHMEM_DISABLE_NVLS=1

for ranks in 4 8; do
  WEFT_TIMEOUT=20 timeout -k 5 170 torchrun --standalone --nproc-per-node $ranks -m tests.gpu.gpu_nodes --seconds 130 --out "$out/nodes-$ranks.json" \
    > "$out/nodes-$ranks.log" 2>&1 || { failed=1; echo "two nodes, $ranks ranks: FAILED"; }
  grep -E "passed|failed|FAILED" "$out/nodes-$ranks.log" | tail -3
done
for kind in peer node killed; do  # at the same time: they wait, and each needs little of the GPU
  timeout -k 5 200 python3 -m tests.gpu.gpu_nodes --away $kind --ranks 4 --out "$out/nodes-away-$kind.json" > "$out/nodes-away-$kind.log" 2>&1 &
done
wait
for kind in peer node killed; do
  cat "$out/nodes-away-$kind.log"
  grep -q '"ok": true' "$out/nodes-away-$kind.json" || failed=1
done
exit $failed
