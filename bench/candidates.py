"""The plans that are tried on every shape, and whether each gives the right result."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import torch

import weft
from weft.plan import Decomposed, Fused, Plan, Sequential

F = Fused()
TWO = Fused(block_n=128, warps=4, per_sm=2, pull_stages=6, pullers=8)
BESIDE = Fused(beside=True, pullers=128, pull_rows=128, pull_stages=4)


def candidates(op: str, world: int) -> list[Plan]:
    """Decomposed plans by groups, and fused ones by pullers: 4 beside 128 programs, a power of two; more where links bind."""
    groups: list[tuple[int, ...]] = {2: [(1, 1)], 4: [(1, 1, 2), (1,) * 4], 8: [(1, 1, 2, 2, 2), (1,) * 8]}[world]
    out: list[Plan] = [Decomposed(g) for g in groups] if op != "matmul_all_reduce" else []
    if op == "all_gather_matmul":
        out += [F, replace(F, pullers=12, split=4), TWO, replace(F, interleave=True), replace(TWO, interleave=True)]
        out += [replace(BESIDE, pullers=p, interleave=True) for p in (64, 128)]
    elif op == "matmul_reduce_scatter":
        out += [replace(F, pullers=12, stages=4), replace(TWO, pullers=16), replace(TWO, pullers=24)]
        out += [replace(BESIDE, pullers=64, pull_rows=64, batch=1)]
    else:
        out += [replace(TWO, pullers=p, lag=12) for p in (32, 56)]
        out += [replace(BESIDE, pullers=64, pull_rows=32, pull_stages=7, lag=6)]
    return out


def brief(plan: str) -> str:
    """A plan by what differs from the default of its kind."""
    fields = json.loads(plan)
    default = json.loads(weft.plan.KINDS[fields["kind"]]().to_json())
    return " ".join([fields["kind"], *(f"{k}={v}" for k, v in fields.items() if v != default[k])])


def working(op: str, world: weft.World, x: torch.Tensor, w: torch.Tensor, skip: str) -> dict[str, Any]:
    """The candidates that give the right result on every rank, by their JSON, without those whose JSON has `skip`."""
    fn = getattr(weft, op)
    want = fn(x, w, world=world, plan="sequential").float()
    todo: dict[str, Any] = {}
    for plan in [Sequential(), *candidates(op, world.size)]:
        if skip and skip in plan.to_json():
            continue
        err, said = 0.0, ""
        try:
            for _ in range(2):
                err = max(err, ((fn(x, w, world=world, plan=plan).float() - want).norm() / want.norm()).item())
            world.synchronize()
        except weft.Unsupported as e:
            err, said = float("inf"), str(e)
        bad = max(world.exchange(err if err == err else float("inf")))
        if bad < 1.5e-2:  # bf16 rounding of an 8-rank NCCL sum is about 5e-3
            todo[plan.to_json()] = lambda plan=plan: fn(x, w, world=world, plan=plan)
        elif world.rank == 0:
            print("left out:", op, plan, bad, said, flush=True)
    return todo
