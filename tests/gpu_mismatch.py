"""Ranks that differ in a number of rows, under N, K and plan that they have agreed on before: the Mismatch comes on every rank, while
the GPUs may wait for each other in vain. Each plan in processes of its own, which end with that.

    python tests/gpu_mismatch.py [N]                      every plan, or the first N
    torchrun --nproc-per-node 2 tests/gpu_mismatch.py --plan KIND OP
"""

from __future__ import annotations

import faulthandler
import os
import subprocess
import sys
import time

CASES = [
    ("sequential", "all_gather_matmul"), ("fused", "all_gather_matmul"), ("one_shot", "all_gather_matmul"),
    ("decomposed", "all_gather_matmul"), ("fused", "matmul_reduce_scatter"), ("signaled", "matmul_reduce_scatter"),
    ("two_shot", "matmul_all_reduce"),
]  # fmt: skip


def rank(plan: str, op: str) -> None:
    import torch

    import weft

    faulthandler.dump_traceback_later(12, exit=True)  # where it hangs, if it does
    world = weft.init()
    w = torch.randn(512, 512, device=world.device, dtype=torch.bfloat16)

    def call(m: int) -> None:
        getattr(weft, op)(torch.randn(m, 512, device=world.device, dtype=torch.bfloat16), w, world=world, plan=plan)

    with torch.no_grad():
        for m in (256, 512):
            call(m)
        world.synchronize()
        begin = time.monotonic()
        try:
            call(192 + 128 * world.rank)  # new to every rank
            world.synchronize()
        except weft.Mismatch as e:
            print(f"MISMATCH rank {world.rank} after {time.monotonic() - begin:.2f} s: {e}", flush=True)
    os._exit(0)  # the GPU may still wait


def main() -> int:
    failed = 0
    for plan, op in CASES[: int(sys.argv[1]) if len(sys.argv) > 1 else None]:
        run = [
            sys.executable,
            "-m",
            "torch.distributed.run",
            "--standalone",
            "--nproc-per-node=2",
            __file__,
            "--plan",
            plan,
            op,
        ]
        done = subprocess.run(
            ["timeout", "40", *run], capture_output=True, text=True, env=dict(os.environ, WEFT_TIMEOUT="5")
        )
        right = done.stdout.count("MISMATCH") == 2 and "rows=" in done.stdout
        failed += not right
        print(f"{op} {plan}: {'ok' if right else 'FAILED'} {done.stdout.strip()[:300]}", flush=True)
        if not right:
            print(
                "\n".join(line for line in done.stderr.splitlines() if "Error" in line or "File" in line)[-1500:],
                flush=True,
            )
    return failed


if __name__ == "__main__":
    if "--plan" in sys.argv:
        rank(*sys.argv[-2:])
    else:
        sys.exit(main())
