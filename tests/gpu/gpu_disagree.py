"""Ranks make different calls, each of which every rank has made before: torchrun --nproc-per-node 2 -m
tests.gpu.gpu_disagree --out DIR

Each plan whose kernels compare calls runs in a separate World. All ranks make calls of 64 and of 72 rows. Then the
first rank makes a call of 64 rows and the other ranks a call of 72 rows, eagerly and as replays of two graphs. Every
rank raises Mismatch, long before a wait expires. Plans that use cuBLAS and NCCL are checked in the same way with
`check=True`. In a fused plan whose channels belong to one call, waits expire, and the Timeout first names each rank's
current call. The program prints a line for each case, exits with 1 if one fails, and writes
DIR/stalled_disagree<N>-<RANK>.json.
"""

from __future__ import annotations

import argparse
import json
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

os.environ["WEFT_TIMEOUT"] = "4"

import torch

import weft
from weft import Mismatch, Timeout, World, moe

ROWS = 64, 72
Call = Callable[[], object]


def calls(world: World, op: str, plan: str) -> list[Call]:
    """Return one call for each number of rows."""
    g = torch.Generator(world.device).manual_seed(0)

    def draw(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, device=world.device, generator=g).bfloat16()

    weight, experts = draw(256, 256), 8
    w13, w2 = moe.pack(draw(experts // world.size, 512, 256), world=world), draw(experts // world.size, 256, 256)

    def call_of(rows: int) -> Call:
        x, q = draw(rows, 256), draw(rows, 8, 64)
        if op == "all_gather_matmul":
            return lambda: weft.all_gather_matmul(x, weight, world=world, plan=plan)
        if op == "matmul_reduce_scatter":
            whole = draw(rows * world.size, 256)
            return lambda: weft.matmul_reduce_scatter(whole, weight, world=world, plan=plan)
        if op == "all_reduce":
            return lambda: weft.all_reduce(x, world=world, plan=plan)
        if op == "gathered_attention":
            return lambda: weft.gathered_attention(q, q, q, world=world, plan=plan)
        ids = torch.arange(rows, device=world.device, dtype=torch.int32)[:, None] % experts
        ones, rows_by_rank = torch.ones(rows, 1, device=world.device), [rows] * world.size
        return lambda: moe.moe(x, ids, ones, w13, w2, rows=rows_by_rank, world=world, plan=plan)

    return [call_of(rows) for rows in ROWS]


def captured(call: Call) -> Call:
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        call()
    return graph.replay


def disagree(op: str, plan: str, graphs: bool, check: bool) -> tuple[str, float]:
    """Return the error that this rank raised, and the seconds until then."""
    world = weft.init(check=check)
    pair: list[Any] = calls(world, op, plan)
    for _ in range(3):
        for call in pair:
            call()
    world.synchronize()
    if graphs:
        pair = [captured(call) for call in pair]
        for call in pair:
            call()
        world.synchronize()
    world.exchange("known")
    start = time.monotonic()
    try:
        pair[min(world.rank, 1)]()
        world.synchronize()
    except (Mismatch, Timeout) as e:
        return f"{type(e).__name__}: {str(e).splitlines()[0]}", time.monotonic() - start
    return "nothing", time.monotonic() - start


COMPARED = {
    "all_gather_matmul": ("decomposed", "one_shot"),
    "matmul_reduce_scatter": ("decomposed", "one_shot"),
    "all_reduce": ("decomposed", "one_shot"),
    "gathered_attention": ("segmented", "head_parallel"),
    "moe": ("dispatched", "fused", "low_latency"),
}
CASES = [(op, plan, graphs, False) for op, plans in COMPARED.items() for plan in plans for graphs in (False, True)]
CASES += [("all_gather_matmul", "sequential", False, True), ("all_gather_matmul", "fused", False, False)]


def main() -> None:
    p = argparse.ArgumentParser()
    p.add_argument("--out", type=Path, required=True)
    out = p.parse_args().out
    out.mkdir(parents=True, exist_ok=True)
    rows, rank, size = [], int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    for op, plan, graphs, check in CASES:
        message, seconds = disagree(op, plan, graphs, check)
        late = (op, plan) == ("all_gather_matmul", "fused")
        good = "ranks disagree on this call" in message and (late or (message.startswith("Mismatch") and seconds < 3))
        name = f"disagree: {op} {plan}{', replayed' if graphs else ''}{', check=True' if check else ''}, rank {rank}"
        rows.append(dict(check=name, outcome="passed" if good else "failed", why=f"{message} after {seconds:.3f} s"))
        print(*rows[-1].values(), sep=": ", flush=True)
        (out / f"stalled_disagree{size}-{rank}.json").write_text(json.dumps(rows))
    os._exit(any(row["outcome"] == "failed" for row in rows))


if __name__ == "__main__":
    main()
