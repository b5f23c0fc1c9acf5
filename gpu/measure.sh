#!/usr/bin/env bash
# All that is measured of a machine with several GPUs, in one call of about ten minutes; gpu/run.sh has the checks. Results go to
# ${OUT:-gpu/out}, each part's log beside them. Then, where git is, for machine <gpu>-x<N>:
#   profile/*.json           src/weft/plan/profiles/ (this copies it there itself, so that "auto" and the predictions use it)
#   predictions/*.jsonl      bench/results/<machine>/predictions/
#   results/sweep.jsonl      bench/results/<machine>/tuning/, then python bench/table.py <gpu>
#   results/*.jsonl          bench/results/<machine>/
#   decoder/decoder.jsonl    bench/results/<machine>/; decoder/decoder-table.json: src/weft/plan/tables/decoder/
#   signaled/*.jsonl         bench/results/<machine>/signaled/
# and the pages again: weft bench --report; bench/tried.py, predict.py, signaled_page.py, simulate.py.
# Environment: PARTS, some of the names below, in their order; SECONDS_OF, how long each may take beside starting (ops and decoder twice that).
set -u
cd "$(dirname "$0")/.."
out=${OUT:-gpu/out}
parts=${PARTS:-profile predictions ops norm decoder signaled}
limit=${SECONDS_OF:-60}
mkdir -p "$out"
export PYTHONPATH=$PWD/src:$PWD/bench PYTHONUNBUFFERED=1 OMP_NUM_THREADS=1 WEFT_TIMEOUT=${WEFT_TIMEOUT:-10}
export NCCL_NVLS_ENABLE=0 TORCH_SYMM_MEM_DISABLE_MULTICAST=1 NVSHMEM_DISABLE_NVLS=1
gpus=$(nvidia-smi -L | wc -l)
machine=$(python3 -c 'import torch; print(torch.cuda.get_device_name(0).lower().replace(" ", "-"))')-x$gpus
profile=$out/profile/$machine.json
failed=0

ranks() { # name, seconds, then what torchrun starts on every GPU
  local name=$1 seconds=$2 started=$SECONDS; shift 2
  timeout $((seconds + 60)) torchrun --nproc-per-node "$gpus" "$@" --seconds "$seconds" > "$out/$name.log" 2>&1
  local rc=$?
  echo "$name: exit $rc after $((SECONDS - started)) s"
  [ $rc -eq 0 ] || { failed=1; tail -3 "$out/$name.log"; }
}

for part in $parts; do
  case $part in
    profile)
      mkdir -p "$out/profile"
      ranks profile "$limit" -m weft.tune --out "$profile"
      [ -f "$profile" ] && cp "$profile" src/weft/plan/profiles/ ;;
    predictions) ranks predictions "$limit" bench/predict.py --measure "$out/predictions" \
      --profile "src/weft/plan/profiles/$machine.json" ;;
    ops) ranks ops $((2 * limit)) bench/run.py --tune --out "$out/results" ;;
    norm) ranks norm "$limit" bench/norm.py --modes graph --out "$out/results" ;;
    decoder) ranks decoder $((2 * limit)) bench/decoder.py --tune --profile 0 --sms 132 --norms auto decomposed \
      --out "$out/decoder" ;;
    signaled) ranks signaled "$limit" bench/signaled.py --parts ops gemm --modes graph --out "$out/signaled" ;;
    *) echo "no part $part"; failed=1 ;;
  esac
done
exit $failed
