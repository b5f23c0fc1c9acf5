"""Decomposed plans: chunk GEMMs and chunk transfers, each transfer after its GEMM (or the reverse), on queues of their
own; GEMMs on two streams share the SMs."""

from __future__ import annotations

import itertools
from dataclasses import dataclass

from ...op import collective
from ...plans import Decomposed
from ..parts import ITEM, PartTimes
from ..queues import Step, Work, side_by_side


@dataclass(frozen=True)
class Chunking:
    """What decomposed calls show of transfers and the probes of a profile do not: us that the ranks wait for each other
    at every barrier and collective, and how many times as long a copy takes in a call as in a chain of copies alone."""

    gap: float = 6.0
    copy: float = 1.0


def met(p: PartTimes, more: Chunking) -> float:
    """us of a barrier, with the wait for the last rank."""
    return p.latency("barrier") + more.gap


def copied(p: PartTimes, more: Chunking, nbytes: float) -> float:
    """us of one of a call's copies from or to a peer."""
    return p.latency("copy", nbytes) * more.copy


def steps(p: PartTimes, op: str, plan: Decomposed, m: int, n: int, k: int, more: Chunking) -> list[Step]:
    if collective(op) == "all_gather":
        return _gather_chunks(p, plan, m, n, k, more)
    return (_push_chunks if collective(op) == "reduce_scatter" else _reduce_chunks)(p, plan, m, n, k, more)


def _gather_chunks(p: PartTimes, plan: Decomposed, m: int, n: int, k: int, more: Chunking) -> list[Step]:
    rows, size = m // p.world, m // p.world * k * ITEM
    local, barrier = p.optional("local", size), met(p, more)
    copy = copied(p, more, size)
    groups = plan.groups or (1,) * p.world
    staged = Work("gemm", "enter", local)
    works, landed = [staged, Work("comm", "barrier", barrier, staged)], staged
    if groups[0] > 1:  # the own rows are put in place beside the barrier
        works.append(Work("gemm", "own rows", local))
    for i, g in enumerate(groups):
        if g > (i == 0):
            landed = Work("comm", "copy", copy * (g - (i == 0)))
            works.append(landed)
        works.append(Work("gemm 2" if i % 2 else "gemm", f"gemm {i}", p.gemm(g * rows, n, k), landed))
    return side_by_side([*works, Work("comm", "leave", barrier)], p.beside("copy", 0))


def _push_chunks(p: PartTimes, plan: Decomposed, m: int, n: int, k: int, more: Chunking) -> list[Step]:
    groups, rows = plan.groups or (1,) * p.world, m // p.world
    barrier = met(p, more)
    pieces = plan.pieces if rows % plan.pieces == 0 and set(groups) == {1} else 1
    rows //= pieces
    size = rows * n * ITEM
    copy, added = copied(p, more, size), p.optional("sum", size)
    works, lanes = [Work("comm", "enter", barrier)], itertools.cycle(("gemm", "gemm 2"))
    for _ in range(pieces):
        for i, g in enumerate(reversed(groups)):
            chunk = Work(next(lanes), f"gemm {i}", p.gemm(g * rows, n, k))
            own = i == len(groups) - 1
            works += [chunk, Work("comm", "copy", copy * (g - own), chunk)]
        pushed = Work("comm", "barrier", barrier)
        works += [pushed, Work("sum", "sum", added, pushed)]
    return side_by_side(works, p.beside("copy", 0))


def _reduce_chunks(p: PartTimes, plan: Decomposed, m: int, n: int, k: int, more: Chunking) -> list[Step]:
    rows = m // p.world
    works: list[Work] = []
    for i, g in enumerate(plan.groups or (1,) * p.world):
        chunk = Work("gemm", f"gemm {i}", p.gemm(g * rows, n, k))
        moved = more.gap + p.latency("all_reduce", g * rows * n * ITEM)
        works += [chunk, Work("comm", "all_reduce", moved, chunk)]
    return side_by_side(works, p.beside("all_reduce", 0))
