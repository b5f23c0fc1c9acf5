"""Model of decomposed plans: chunk GEMMs and chunk transfers on queues, each transfer after its GEMM, or the reverse.
GEMMs on two streams share the SMs."""

from __future__ import annotations

import itertools
from dataclasses import dataclass

from ...op import collective
from ...plans import Decomposed
from ..parts import ITEM, PartTimes
from ..queues import Step, Work, side_by_side


@dataclass(frozen=True)
class Chunking:
    """Parameters of decomposed calls that no probe measures. gap: us that ranks wait for each other at every barrier
    and collective. copy: time of a copy in a call over its time in a chain of copies alone."""

    gap: float = 6.0
    copy: float = 1.0


def barrier_us(p: PartTimes, fit: Chunking) -> float:
    """Return the us of a barrier, including the wait for the last rank."""
    return p.latency("barrier") + fit.gap


def copy_us(p: PartTimes, fit: Chunking, nbytes: float) -> float:
    """Return the us of one of a call's copies from or to a peer."""
    return p.latency("copy", nbytes) * fit.copy


def steps(p: PartTimes, op: str, plan: Decomposed, m: int, n: int, k: int, fit: Chunking) -> list[Step]:
    if collective(op) == "all_gather":
        return _gather_chunks(p, plan, m, n, k, fit)
    return (_push_chunks if collective(op) == "reduce_scatter" else _reduce_chunks)(p, plan, m, n, k, fit)


def _gather_chunks(p: PartTimes, plan: Decomposed, m: int, n: int, k: int, fit: Chunking) -> list[Step]:
    rows, size = m // p.world, m // p.world * k * ITEM
    local, barrier = p.optional("local", size), barrier_us(p, fit)
    copy = copy_us(p, fit, size)
    groups = plan.groups or (1,) * p.world
    staging = Work("gemm", "enter", local)
    works, arrived = [staging, Work("comm", "barrier", barrier, staging)], staging
    if groups[0] > 1:  # then this rank's rows are copied into place during the barrier
        works.append(Work("gemm", "own rows", local))
    for i, g in enumerate(groups):
        if g > (i == 0):
            arrived = Work("comm", "copy", copy * (g - (i == 0)))
            works.append(arrived)
        works.append(Work("gemm 2" if i % 2 else "gemm", f"gemm {i}", p.gemm(g * rows, n, k), arrived))
    return side_by_side([*works, Work("comm", "leave", barrier)], p.slowdown("copy", 0))


def _push_chunks(p: PartTimes, plan: Decomposed, m: int, n: int, k: int, fit: Chunking) -> list[Step]:
    groups, rows = plan.groups or (1,) * p.world, m // p.world
    barrier = barrier_us(p, fit)
    piece_count = plan.pieces if rows % plan.pieces == 0 and set(groups) == {1} else 1
    rows //= piece_count
    size = rows * n * ITEM
    copy, sum_us = copy_us(p, fit, size), p.optional("sum", size)
    works, lanes = [Work("comm", "enter", barrier)], itertools.cycle(("gemm", "gemm 2"))
    for _ in range(piece_count):
        for i, g in enumerate(reversed(groups)):
            chunk = Work(next(lanes), f"gemm {i}", p.gemm(g * rows, n, k))
            is_own = i == len(groups) - 1
            works += [chunk, Work("comm", "copy", copy * (g - is_own), chunk)]
        barrier_after_pushes = Work("comm", "barrier", barrier)
        works += [barrier_after_pushes, Work("sum", "sum", sum_us, barrier_after_pushes)]
    return side_by_side(works, p.slowdown("copy", 0))


def _reduce_chunks(p: PartTimes, plan: Decomposed, m: int, n: int, k: int, fit: Chunking) -> list[Step]:
    rows = m // p.world
    works: list[Work] = []
    for i, g in enumerate(plan.groups or (1,) * p.world):
        chunk = Work("gemm", f"gemm {i}", p.gemm(g * rows, n, k))
        moved = fit.gap + p.latency("all_reduce", g * rows * n * ITEM)
        works += [chunk, Work("comm", "all_reduce", moved, chunk)]
    return side_by_side(works, p.slowdown("all_reduce", 0))
