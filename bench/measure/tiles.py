"""Plans in the usual tiles and in those of 64 rows: torchrun --nproc-per-node N -m bench.measure.tiles --out DIR [--seconds S]

On shapes of few waves of 128 x 256 tiles, each op's plans beside cuBLAS + NCCL, in one interleaved run a shape, CUDA graphs. Appends a
row for each op and shape to DIR/tiles.jsonl: us by method, and for each plan which tiles `weft.ops.tiles.with_shape_tiles` chooses. A plan is
timed only where its result is right on every rank.
"""

from __future__ import annotations

import argparse
import datetime
import time
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

import weft
from bench.common import peers
from bench.common.resume import keep, unfinished
from bench.common.timing import RIGHT, error_of, time_interleaved
from bench.measure.run import commit
from weft.lang.mapping import balanced_rows
from weft.ops.tiles import with_shape_tiles
from weft.plans import FusedAllReduce, FusedGather, FusedGatherByCopies, FusedReduceScatter, Plan, Signaled

BF = torch.bfloat16
SHAPES = [
    (2048, 2752, 4096), (1536, 4096, 3584), (4096, 4352, 4096), (8192, 2752, 4096), (1024, 5504, 4096), (5120, 5120, 3456),
    (2048, 4096, 2752),
]  # fmt: skip
FEW = [96], 256 * 80  # rows of a rank, and columns, for which tiles of 64 rows suit


def plans(op: str) -> dict[str, Plan]:
    if op == "all_gather_matmul":
        return {"pulled": FusedGather(), "copied": FusedGatherByCopies()}
    pulled = FusedReduceScatter() if op == "matmul_reduce_scatter" else FusedAllReduce()
    return {"pulled": pulled, "signaled": Signaled(ctas=4, copies=True)}


def measure(op: str, mnk: tuple[int, int, int], world: weft.World, rounds: int) -> dict[str, Any]:
    (m, n, k), gathers = mnk, op == "all_gather_matmul"
    x = torch.randn(m // world.size if gathers else m, k, device="cuda", dtype=BF)
    w = torch.randn(n, k, device="cuda", dtype=BF) * 0.02
    fn, sms = getattr(weft, op), world.sm_count
    run = lambda plan: fn(x, w, world=world, plan=plan)  # noqa: E731
    expected, fns, chosen = run("sequential"), {"sequential": peers.cublas_nccl(op, x, w, world.size)}, {}
    for name, plan in plans(op).items():
        half = with_shape_tiles(plan, FEW[0] * world.size, FEW[1], sms)
        chosen[name] = "half" if with_shape_tiles(plan, balanced_rows(m, world.size), n, sms) != plan else "usual"
        for tiles, tile_plan in (("usual", plan), ("half", half)):
            error = max(error_of(run(tile_plan), expected) for _ in range(2))
            if max(world.exchange(error)) < RIGHT:
                fns[f"{name} {tiles}"] = partial(run, tile_plan)
            elif world.rank == 0:
                print("wrong:", op, mnk, name, tiles, error, flush=True)
    times = time_interleaved(fns, mode="graph", calls=5, rounds=rounds)
    return dict(op=op, M=m, N=n, K=k, chosen=chosen, us={name: round(us, 2) for name, us in times.items()})


def main() -> None:
    p = argparse.ArgumentParser()
    p.add_argument("--out", required=True, type=Path)
    p.add_argument("--seconds", type=float, default=1e9, help="start nothing further after this many")
    p.add_argument("--rounds", type=int, default=7)
    p.add_argument("--ops", nargs="*", default=["all_gather_matmul", "matmul_reduce_scatter", "matmul_all_reduce"])
    a = p.parse_args()
    a.out.mkdir(parents=True, exist_ok=True)
    world, start = weft.init(), time.time()
    torch.manual_seed(world.rank)
    fixed = dict(world=world.size, gpu=torch.cuda.get_device_name(0), commit=commit(),
                 date=datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"))  # fmt: skip
    cases = {f"tiles {op} {mnk}": (op, mnk) for op in a.ops for mnk in SHAPES}
    for op, mnk in unfinished(world, a.out, cases, a.seconds):
        row = measure(op, mnk, world, a.rounds)
        keep(world, a.out / "tiles.jsonl", [row | fixed])
        if world.rank == 0:
            figures = " | ".join(f"{name} {us:.0f}" for name, us in row["us"].items())
            print(f"{time.time() - start:4.0f}s {op} {mnk} {figures} | {row['chosen']}", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
