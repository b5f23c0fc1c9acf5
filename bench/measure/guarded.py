"""What guarded loads cost, and what they prevent: torchrun --nproc-per-node 1 -m bench.measure.guarded --out DIR

Times a GEMM that waits in its K loop, with guarded loads and without, beside the form that waits outside the pipelined loop; all waits are
over when the loads come, so that only instructions are compared. Then counts wrong sums of a kernel whose parts come late, with the
guard and without. Appends one row to DIR/guarded.jsonl: us by form, and wrong calls by form. Less than a minute on one GPU.
"""

from __future__ import annotations

import argparse
import datetime
import json
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist

import weft
from bench.common.resume import keep
from bench.common.timing import RIGHT, error_of, time_interleaved
from bench.measure.run import commit
from tests.emulated.cases_guarded_loads import FORMS, PRODUCTS, product, product_launch
from tests.gpu.gpu_guarded import CALLS, wrong_sums

TILE, STEPS, WARPS = (128, 256, 64), 8, 8


def times(world: weft.World, size: int, rounds: int) -> dict[str, float]:
    a, b = (torch.randn(size, size, device=world.device, dtype=torch.bfloat16) for _ in range(2))
    expected, launches = a @ b.t(), dict[str, Callable[[], object]](library=lambda: a @ b.t())
    for guard in (False, True):
        kernel = weft.jit(guard_loads=guard)(product)
        for form in PRODUCTS:
            launch, out = product_launch(world, form, kernel, a, b, STEPS, TILE, world.sm_count, WARPS)
            launch()
            name = f"{form}, {'guarded' if guard else 'alone'}"
            if error_of(out, expected) < RIGHT:
                launches[name] = launch
            else:
                print("wrong:", name, flush=True)
    return time_interleaved(launches, mode="graph", calls=5, rounds=rounds)


def main() -> None:
    p = argparse.ArgumentParser()
    p.add_argument("--out", required=True, type=Path)
    p.add_argument("--size", type=int, default=8192, help="M, N and K")
    p.add_argument("--rounds", type=int, default=9)
    a = p.parse_args()
    a.out.mkdir(parents=True, exist_ok=True)
    world = weft.init()
    torch.manual_seed(0)
    us = times(world, a.size, a.rounds)
    wrong = {
        f"{form}, {'guarded' if guard else 'alone'}": int(wrong_sums(world, form, guard))
        for form in FORMS
        for guard in (False, True)
    }
    row = dict(
        world=world.size, gpu=torch.cuda.get_device_name(0), commit=commit(), M=a.size, N=a.size, K=a.size, tile=TILE,
        date=datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"), calls=CALLS, wrong=wrong,
        us={name: round(t, 1) for name, t in us.items()},
    )  # fmt: skip
    keep(world, a.out / "guarded.jsonl", [row])
    if world.rank == 0:
        print(json.dumps(row, indent=1), flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
