"""Try candidate plans of every op on every shape, check them, time them beside cuBLAS + NCCL, write one JSON a line.

torchrun --nproc-per-node N bench/sweep.py --out FILE [--ops ...] [--shapes ...] [--modes graph eager]
What it writes is what `weft/plan/table` is made from.
"""

from __future__ import annotations

import argparse
import json
import time
import traceback
from dataclasses import replace
from typing import Any

import shapes
import torch
import torch.distributed as dist
from timing import time_interleaved

import weft
from weft.plan import Decomposed, Fused, Plan, Sequential

BF = torch.bfloat16
F = Fused()
TWO = Fused(block_n=128, warps=4, per_sm=2, pull_stages=6, pullers=8)


def candidates(op: str, world: int) -> list[Plan]:
    """Decomposed plans by groups, and fused ones by pullers: 4 beside 128 programs, a power of two; more where links bind."""
    groups: list[tuple[int, ...]] = {2: [(1, 1)], 4: [(1, 1, 2), (1,) * 4], 8: [(1, 1, 2, 2, 2), (1,) * 8]}[world]
    out: list[Plan] = [Decomposed(g) for g in groups] if op != "matmul_all_reduce" else []
    if op == "all_gather_matmul":
        out += [F, replace(F, pullers=8, split=8), replace(F, pullers=12, split=4), replace(F, pullers=8)]
        out += [replace(TWO, pullers=p, split=s) for p, s in ((8, 1), (8, 8), (16, 8), (24, 8))]
    elif op == "matmul_reduce_scatter":
        out += [replace(F, pullers=p, stages=4) for p in (4, 12)] + [replace(TWO, pullers=p) for p in (8, 16, 24)]
    else:
        out += [replace(F, pullers=28, lag=6)] + [replace(TWO, pullers=p, lag=12) for p in (16, 32, 56, 80)]
    return out


def brief(plan: str) -> str:
    """A plan by what differs from the default of its kind."""
    fields = json.loads(plan)
    default = json.loads(weft.plan.KINDS[fields["kind"]]().to_json())
    return " ".join([fields["kind"], *(f"{k}={v}" for k, v in fields.items() if v != default[k])])


def inputs(op: str, world: weft.World, m: int, n: int, k: int) -> tuple[torch.Tensor, torch.Tensor]:
    torch.manual_seed(world.rank)
    rows = m // world.size if op == "all_gather_matmul" else m
    return torch.randn(rows, k, device="cuda", dtype=BF), torch.randn(n, k, device="cuda", dtype=BF) * 0.02


def main() -> None:
    p = argparse.ArgumentParser()
    p.add_argument("--out", required=True)
    p.add_argument("--ops", nargs="*", default=["all_gather_matmul", "matmul_reduce_scatter", "matmul_all_reduce"])
    p.add_argument("--shapes", nargs="*", default=[s.name for s in shapes.ALL])
    p.add_argument("--modes", nargs="*", default=["graph", "eager"])
    p.add_argument("--rounds", type=int, default=5)
    a = p.parse_args()
    world = weft.init()
    start = time.time()
    for op in a.ops:
        fn = getattr(weft, op)
        for shape in [s for s in shapes.ALL if s.name in a.shapes]:
            m, n, k = shape.column(world.size) if op == "all_gather_matmul" else shape.row(world.size)
            x, w = inputs(op, world, m, n, k)
            want = fn(x, w, world=world, plan="sequential")
            todo: dict[str, Any] = {}
            for plan in [Sequential(), *candidates(op, world.size)]:
                try:
                    err = 0.0
                    for _ in range(3):
                        got = fn(x, w, world=world, plan=plan)
                        err = max(err, ((got.float() - want.float()).norm() / want.float().norm()).item())
                    world.synchronize()
                except weft.WeftError:
                    raise
                except Exception as e:
                    err = float("inf")
                    if world.rank == 0:
                        traceback.print_exc()
                        print(repr(e)[:300], flush=True)
                bad = max(world.exchange(err if err == err else float("inf")))
                if bad > 1.5e-2:  # bf16 rounding of an 8-rank NCCL sum is about 5e-3
                    if world.rank == 0:
                        print("WRONG", op, shape.name, plan, bad, flush=True)
                    continue
                todo[plan.to_json()] = lambda plan=plan: fn(x, w, world=world, plan=plan)
            full = torch.empty(m, k, device="cuda", dtype=BF) if op == "all_gather_matmul" else x
            c = torch.empty(m, n, device="cuda", dtype=BF)
            if op == "all_gather_matmul":
                full.normal_()
            todo["gemm"] = lambda full=full, c=c, w=w: torch.mm(full, w.t(), out=c)
            for mode in a.modes:
                if mode == "eager":  # some hundred microseconds of launches
                    todo = {q: f for q, f in todo.items() if "decomposed" not in q}
                times = time_interleaved(todo, mode=mode, calls=5 if m * n > 1 << 27 else 10, rounds=a.rounds)
                if world.rank == 0:
                    seq = times[Sequential().to_json()]
                    row = dict(op=op, name=shape.name, M=m, N=n, K=k, world=world.size, mode=mode, times=times)
                    with open(a.out, "a") as f:
                        f.write(json.dumps(row) + "\n")
                    best = sorted((t, q) for q, t in times.items() if q != "gemm")
                    print(f"{time.time() - start:5.0f}s {op} {shape.name} x{world.size} {mode}: gemm {times['gemm']:.0f} seq {seq:.0f}", flush=True)
                    for t, q in best[:3]:
                        print(f"     {t:8.1f} {seq / t:.2f}x {brief(q)}", flush=True)
            del todo, x, w, want, full, c
            torch.cuda.empty_cache()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
