"""A rank is late and makes a different call: torchrun --nproc-per-node 2 -m tests.gpu.gpu_late

With a plan that uses cuBLAS and NCCL, both ranks raise Mismatch before any work runs, and the World still works. With a
fused plan, the early rank has already launched. Both ranks raise Mismatch. The early rank raises it at its next check,
long before its kernel's waits expire, and every later use of the World raises an error. The program prints a line for
each case, and exits with 1 if one fails.
"""

from __future__ import annotations

import os
import time

os.environ["WEFT_TIMEOUT"] = "5"

import torch

import weft

LATE = 0.5  # seconds


def usable(world: weft.World) -> bool:
    try:
        world.exchange(None)
    except weft.Mismatch:
        return False
    return True


def mismatch(world: weft.World, plan: str) -> tuple[bool, float]:
    """Return whether this rank raised Mismatch and its World ended in the right state, and the time in seconds until
    then."""
    x, w = (torch.randn(128, 256, device=world.device, dtype=torch.bfloat16) for _ in range(2))
    weft.all_gather_matmul(x, w, world=world, plan=plan)
    world.synchronize()
    world.exchange(None)
    if world.rank:
        time.sleep(LATE)
    start = time.monotonic()
    try:
        weft.all_gather_matmul(x[: 64 + 8 * world.rank], w, world=world, plan=plan)
        world.synchronize()
    except weft.Mismatch:
        return usable(world) == (plan == "sequential"), time.monotonic() - start
    return False, time.monotonic() - start


def main() -> None:
    world, failed = weft.init(), False
    for plan in ("sequential", "fused"):
        raised, seconds = mismatch(world, plan)
        ok = raised and seconds < 3
        failed |= not ok
        outcome = f"late peer, {plan}, rank {world.rank}: {'ok' if ok else 'FAILED'}"
        print(f"{outcome}: Mismatch {raised} after {seconds:.3f} s", flush=True)
    os._exit(failed)  # a kernel is still waiting


if __name__ == "__main__":
    main()
