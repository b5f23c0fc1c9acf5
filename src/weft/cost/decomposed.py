"""The common part of the cost models of decomposed plans. The models simulate queues of chunk GEMMs and chunk
transfers. Each transfer follows its GEMM, or each GEMM follows its transfer. GEMMs on two streams share the SMs."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from dataclasses import dataclass

from ..plans import Decomposed
from .model import Conditions, Cost, GemmCall, Parts


@dataclass(frozen=True)
class Chunking:
    """Parameters of decomposed calls that no probe can measure. `gap` is the time, in us, for which ranks wait for each
    other at every barrier and collective. `copy` is the ratio of a copy's time in a call to its time in a chain that
    contains only copies."""

    gap: float = 6.0
    copy: float = 1.0


def barrier_us(p: Parts, fit: Chunking) -> float:
    """Return the time of a barrier in us, including the wait for the last rank."""
    return p.latency("barrier") + fit.gap


def copy_us(p: Parts, fit: Chunking, nbytes: float) -> float:
    """Return the time of one copy of a call in us, whether the copy is from or to a peer."""
    return p.latency("copy", nbytes) * fit.copy


class DecomposedCost(Cost[Decomposed, Chunking]):
    """The cost model of an op's decomposed plans. The candidates are all divisions of the shards into groups that the
    op can run."""

    def start(self, plan: Decomposed) -> Chunking:
        return Chunking()

    def candidates(self, p: Parts, call: GemmCall, conditions: Conditions) -> list[Decomposed]:
        return [Decomposed(groups) for groups in divisions(p.world)] if conditions.even else []


def group_count(plan: Decomposed, world: int) -> int:
    return len(plan.groups) or world


@functools.cache
def divisions(size: int) -> tuple[tuple[int, ...], ...]:
    """Return the groups of shards that a decomposed plan can have on `size` ranks. The size of a group is a power of
    two that divides the number of shards before the group. If `size` is not a power of two, all groups are single
    shards. Above 16 ranks, the groups are equal or each is twice as large as the previous one."""
    if size & (size - 1):
        return ((1,) * size,)
    if size > 16:
        equal = [(g,) * (size // g) for g in (1, 2, 4, 8)]
        doubling = [(g, *(g << i for i in range((size // g).bit_length() - 1))) for g in (1, 2, 4)]
        return tuple(equal + doubling)

    def divisions_from(done: int) -> Iterator[tuple[int, ...]]:
        if done == size:
            yield ()
        for g in (1 << i for i in range(size.bit_length())):
            if done % g == 0 and done + g <= size:
                yield from ((g, *rest) for rest in divisions_from(done + g))

    return tuple(d for d in divisions_from(0) if len(d) > 1)
