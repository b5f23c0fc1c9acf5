"""A rank that is late, with another call: torchrun --nproc-per-node 2 tests/gpu_late.py --out DIR

Of a plan by the library both ranks raise Mismatch before anything runs, and the World still works. Of a fused one the
rank that was early has launched by then; both raise Mismatch, the early one at its next check, long before its kernel's
waits expire; behind that nothing is asked of the World. Prints a line a case, exits with 1 where one fails, and writes
DIR/stalled_late<N>-<RANK>.json.
"""

from __future__ import annotations

import argparse
import json
import os
import time
from pathlib import Path

os.environ["WEFT_TIMEOUT"] = "5"

import torch

import weft

LATE = 0.5  # seconds


def mismatch(world: weft.World, plan: str) -> tuple[bool, float]:
    """Whether this rank raised Mismatch, and after how many seconds."""
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
        return True, time.monotonic() - start
    return False, time.monotonic() - start


def main() -> None:
    p = argparse.ArgumentParser()
    p.add_argument("--out", type=Path, required=True)
    out = p.parse_args().out
    out.mkdir(parents=True, exist_ok=True)
    world, rows = weft.init(), []
    for plan in ("sequential", "fused"):
        raised, seconds = mismatch(world, plan)
        name, why = f"late peer, {plan}, rank {world.rank}", f"Mismatch {raised} after {seconds:.3f} s"
        rows.append(dict(check=name, outcome="passed" if raised and seconds < 3 else "failed", why=why))
        print(*rows[-1].values(), sep=": ", flush=True)
        (out / f"stalled_late{world.size}-{world.rank}.json").write_text(json.dumps(rows))
    os._exit(any(row["outcome"] == "failed" for row in rows))  # a kernel waits still


if __name__ == "__main__":
    main()
