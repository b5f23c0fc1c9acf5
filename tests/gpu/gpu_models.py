"""Run only the decoder's GPU checks: torchrun --nproc-per-node N -m tests.gpu.gpu_models [TEXT]

With TEXT, only checks whose names contain it run. A check that fails is reported, and the other checks continue.
"""

from __future__ import annotations

import sys
import time
import traceback

import torch.distributed as dist

import weft
from tests.emulated import cases_models


def main() -> None:
    world, failed = weft.init(), 0
    for name, bound, check in cases_models.gpu_cases(world):
        if len(sys.argv) > 1 and sys.argv[1] not in name:
            continue
        start = time.time()
        try:
            error = check()
        except Exception:
            error = float("inf")
            traceback.print_exc()
        worst = max(world.exchange(error))
        failed += worst > bound
        if world.rank == 0:
            print(
                f"{name}: {worst:.2e} {'ok' if worst <= bound else 'FAILED'} ({time.time() - start:.1f} s)", flush=True
            )
    dist.destroy_process_group()
    sys.exit(1 if failed else 0)


if __name__ == "__main__":
    main()
