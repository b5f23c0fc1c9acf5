"""The plans that are tried on every shape, and whether each gives the right result."""

from __future__ import annotations

from typing import Any

import torch

import weft
from bench.common.timing import RIGHT, error_of
from weft.backends import library_gemm
from weft.cost.model import SHOTS
from weft.cost.signaled import SINGLE
from weft.planner.probes.calls import most_low_latency_bytes
from weft.plans import (
    TWO_AN_SM,
    TWO_AN_SM_BY_COPIES,
    Decomposed,
    FlagGated,
    FusedAllReduce,
    FusedGather,
    FusedGatherByCopies,
    FusedReduceScatter,
    Plan,
    Sequential,
    Signaled,
)


def candidates(op: str, world: int, nbytes: int) -> list[Plan]:
    """Return the plans to time: decomposed plans by groups, fused ones by who pulls, signaled ones whose groups copy engines
    move, and low-latency rows where `nbytes` that are gathered or summed are few."""
    groups: list[tuple[int, ...]] = {2: [(1, 1)], 4: [(1, 1, 2), (1,) * 4], 8: [(1, 1, 2, 2, 2), (1,) * 8]}[world]
    out: list[Plan] = [Decomposed(g) for g in groups] if op != "matmul_all_reduce" else []
    if op == "all_gather_matmul":
        out += [FlagGated(*form) for form in library_gemm.FORMS] if library_gemm.lacks() is None else []
        out += [FusedGatherByCopies(), TWO_AN_SM_BY_COPIES]
        out += [FusedGather(), FusedGather(pull_programs=12, split=4), TWO_AN_SM]
    elif op == "matmul_reduce_scatter":
        out += [Decomposed((1,) * world, pieces=2)]
        programs = ((48, 16), (64, 16), (64, 4), (64, 2))
        out += [FusedReduceScatter(pull_programs=p, forward_programs=f) for p, f in programs]
    else:
        out += [FusedAllReduce(pull_programs=p, forward_programs=f) for p, f in ((96, 16), (96, 4), (64, 4))]
    if op != "all_gather_matmul":
        out += [Signaled(ctas=4, copies=True), Signaled(ctas=4, copies=True, groups=SINGLE)]
    return out + [plan for plan in SHOTS if nbytes <= most_low_latency_bytes(op, plan, world)]


def working(op: str, world: weft.World, x: torch.Tensor, w: torch.Tensor) -> dict[str, Any]:
    """Return the candidates that give the right result on every rank, by their JSON."""
    fn = getattr(weft, op)
    expected = fn(x, w, world=world, plan="sequential")
    todo: dict[str, Any] = {}
    moved = x.numel() * world.size if op == "all_gather_matmul" else x.shape[0] * w.shape[0]
    for plan in [Sequential(), *candidates(op, world.size, moved * x.element_size())]:
        err, reason = 0.0, ""
        try:
            for _ in range(2):
                err = max(err, error_of(fn(x, w, world=world, plan=plan), expected))
            world.synchronize()
        except weft.Unsupported as e:
            err, reason = float("inf"), str(e)
        bad = max(world.exchange(err))
        if bad < RIGHT:
            todo[plan.to_json()] = lambda plan=plan: fn(x, w, world=world, plan=plan)
        elif world.rank == 0:
            print("left out:", op, plan, bad, reason, flush=True)
    return todo
