"""The plans that are tried on every shape, and a check of the result of each plan."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch

import weft
from bench.common.program import is_right
from weft.cost.model import SHOTS
from weft.cost.signaled import SINGLE
from weft.integrations import quack
from weft.op import REGISTRY
from weft.planner.probes.calls import most_low_latency_bytes
from weft.plans import Decomposed, FlagGated, Plan, Sequential, Signaled


def candidates(op: str, world: int, nbytes: int) -> list[Plan]:
    """Return the plans to time: decomposed plans with different groups, the op's variants, signaled plans whose groups
    copy engines move, and low-latency plans if the op gathers or sums only few `nbytes`."""
    groups: list[tuple[int, ...]] = {2: [(1, 1)], 4: [(1, 1, 2), (1,) * 4], 8: [(1, 1, 2, 2, 2), (1,) * 8]}[world]
    out: list[Plan] = [Decomposed(g) for g in groups] if op != "matmul_all_reduce" else []
    if op == "all_gather_matmul":
        out += [FlagGated(*form) for form in quack.FORMS] if quack.lacks() is None else []
    elif op == "matmul_reduce_scatter":
        out += [Decomposed((1,) * world, pieces=2)]
        out += [Signaled(ctas=4, copies=True), Signaled(ctas=4, copies=True, groups=SINGLE)]
    out += REGISTRY[op].variants
    return out + [plan for plan in SHOTS if nbytes <= most_low_latency_bytes(op, plan, world)]


def working(op: str, world: weft.World, x: torch.Tensor, w: torch.Tensor) -> dict[str, Any]:
    """Return the candidates whose result is correct on every rank, keyed by their JSON."""
    fn = getattr(weft, op)
    expected = fn(x, w, world=world, plan="sequential")
    todo: dict[str, Any] = {}
    moved = x.numel() * world.size if op == "all_gather_matmul" else x.shape[0] * w.shape[0]
    for plan in [Sequential(), *candidates(op, world.size, moved * x.element_size())]:
        call = partial(fn, x, w, world=world, plan=plan)
        if is_right(world, f"{op} {plan}", call, expected):
            todo[plan.to_json()] = call
    return todo
