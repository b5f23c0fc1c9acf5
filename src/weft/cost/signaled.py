"""The model of signaled plans. The GEMM's tiles run in waves on the SMs that the collective does not use. The transfer
of group i starts at the group's signal or a gap after the end of transfer i - 1, whichever is later (the accumulate
rule). The transfer is slower until the GEMM ends. If copy engines transfer the groups, the model simulates queues, as
for decomposed plans."""

from __future__ import annotations

import functools
import itertools
from abc import abstractmethod
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import TypeVar

import numpy as np

from ..plans import Signaled, partition
from .model import ITEM, Conditions, Cost, GemmCall, Occupancy, Parts
from .queues import Step, Work

# The time, in us, that each signaled group adds to a GEMM (docs/measurements.md, groups of one wave against tiles in
# order).
SIGNAL_COST = 0.7
UNITS = 48  # if a GEMM has more waves than this, its groups consist of multiples of several waves
BEST_PARTITIONS = 3
MOST_DEFAULT_GROUPS = 4  # `partition` makes at most this number of groups if a plan names none
SINGLE = (1,) * 16  # waves of each group if copy engines transfer the groups; the last group has the remaining waves
FIRST_GROUPS = (1, 2, 3, 4, 6, 8, 12, 16)  # candidate sizes of the first group, in waves or in such multiples
Numbers = TypeVar("Numbers", float, np.ndarray)  # a number, or an array with a number for each candidate


@dataclass(frozen=True)
class Signaling:
    """Parameters of the signaled calls of one op. `signal` is the time, in us, from the last tile of a group to the
    start of the group's collective. `gap` is the time, in us, from the end of one collective to the start of the next,
    in which the ranks wait for each other. `gemm` and `transfer` are the slow-downs of waves and of transfers while
    both run, beyond the measured slow-downs."""

    signal: float = 6.0
    gap: float = 3.0
    gemm: float = 1.0
    transfer: float = 1.0


@dataclass(frozen=True)
class Moving:
    """Parameters of all-to-alls whose groups copy engines transfer. `gap` is the time, in us, by which a barrier takes
    longer in a call than alone. `copy` is the ratio of a copy's time in a call to its time alone."""

    gap: float = 6.0
    copy: float = 1.0


@dataclass(frozen=True)
class SignaledParts:
    """The inputs of the accumulate rule.

    `tiles`, `waves` and `programs` are the numbers of the GEMM's tiles, waves and programs. Every group except the last
    has a multiple of `unit` tiles. `alone` and `concurrent` are the times of a wave, in us, alone and while the
    collective runs. `signal` and `gap` are as in Signaling. A tile has `tile_bytes` bytes. `curve` returns the time of
    the collective, in us, by bytes; `slow` is the slow-down of the collective during the GEMM.
    """

    tiles: int
    waves: int
    programs: int
    unit: int
    alone: float
    concurrent: float
    signal: float
    gap: float
    tile_bytes: float
    curve: Callable[[float], float]
    slow: float

    def ends(self, groups: Sequence[int]) -> list[int]:
        """Return the number of tiles that may be transferred after each group's waves have ended."""
        waves = itertools.accumulate(partition(groups, self.waves))
        done = [min(self.tiles, w * self.programs) for w in waves]
        return [d if d == self.tiles else d // self.unit * self.unit for d in done]

    def transfer(self, tiles: int) -> float:
        """Return the time, in us, of a transfer of `tiles` tiles alone."""
        return self.curve(tiles * self.tile_bytes)

    def gemm(self, first_waves: Numbers) -> Numbers:
        """Return the time of all waves in us. No transfer runs during the waves of the first group."""
        return first_waves * self.alone + (self.waves - first_waves) * self.concurrent

    def moved(self, begin: Numbers, us: Numbers, gemm: Numbers) -> Numbers:
        """Return the end of a transfer that needs `us` alone and is slower from `begin` until the GEMM ends."""
        return begin + us + np.minimum(us * (self.slow - 1), np.maximum(gemm - begin, 0) * (1 - 1 / self.slow))


class SignaledCost(Cost[Signaled, Signaling | Moving]):
    """The cost model of an op's signaled plans. The candidates are partitions of the GEMM's waves into groups, for
    every measured number of CTAs. If copy engines transfer the groups, the candidates are the default groups and groups
    of one wave."""

    def owners(self, world: int) -> int:
        """Return the number of ranks over which a group's rows are divided equally."""
        return 1

    @abstractmethod
    def in_place(self, n: int) -> bool:
        """Return whether the result's rows of N elements are in ordinary order without a further copy."""

    def by_copies(self, p: Parts, call: GemmCall, plan: Signaled, fit: Moving | None) -> list[Step]:
        """Return the steps of a plan whose groups copy engines transfer, if the op has such plans."""
        raise NotImplementedError

    def start(self, plan: Signaled) -> Signaling | Moving | None:
        return Moving() if plan.copies else Signaling()

    def operations(self, plan: Signaled, world: int) -> int:
        return 2 + (len(plan.groups) or MOST_DEFAULT_GROUPS) * (world + 2 if plan.copies else 2)

    def takes(self, call: GemmCall) -> bool:
        """Return whether the op's GEMM supports these sizes."""
        return call.k % 8 == 0

    def movable(self, call: GemmCall, conditions: Conditions) -> bool:
        """Return whether copies can move the groups."""
        return call.n % 8 == 0 and conditions.movable

    def candidates(self, p: Parts, call: GemmCall, conditions: Conditions) -> Iterator[Signaled]:
        if not self.takes(call):
            return
        for ctas in p.limited(call.collective) if conditions.limits else ():
            plan = Signaled(ctas=ctas)
            for groups in groupings(self.parts(p, call, plan, conditions.parameters(plan))):
                yield replace(plan, groups=groups)
        measured = (plan for plan in conditions.measured if isinstance(plan, Signaled) and plan.copies)
        for ctas in sorted({plan.ctas for plan in measured}):
            plan = Signaled(ctas=ctas, copies=True)
            if self.movable(call, conditions):
                yield plan
                if (waves := self._waves(p, call, plan)) > 4:
                    yield replace(plan, groups=SINGLE[:waves])

    def _waves(self, p: Parts, call: GemmCall, plan: Signaled) -> int:
        return -(-self._tiles(call, plan) // (p.sms - plan.ctas))

    def _tiles(self, call: GemmCall, plan: Signaled, owners: int = 1) -> int:
        return owners * -(-call.m // owners // plan.tile.block_m) * -(-call.n // plan.tile.block_n)

    def parts(self, p: Parts, call: GemmCall, plan: Signaled, fit: object) -> SignaledParts:
        """Return the inputs of the accumulate rule. The GEMM runs on the SMs that the collective does not use."""
        if not 0 < plan.ctas < p.sms:
            raise ValueError(f"{plan.ctas} CTAs leave none of {p.sms} SMs, or are none")
        assert isinstance(fit, Signaling)
        name, programs, owners = call.collective, p.sms - plan.ctas, self.owners(p.world)
        columns = -(-call.n // plan.tile.block_n)
        tiles = self._tiles(call, plan, owners)
        waves, unit = -(-tiles // programs), owners
        if self.in_place(call.n):  # a group consists of whole rows of tiles
            unit = max(1, min(plan.tile.group_m, programs // columns)) * columns
        alone = p.tiles(Occupancy(plan.tile), programs, tiles, call.m, call.n, call.k) / waves
        slowdown = p.slowdown(name, plan.ctas)
        p.latency(name, 1, plan.ctas)  # raises NotMeasured now rather than at the first transfer
        return SignaledParts(
            tiles,
            waves,
            programs,
            unit,
            alone=alone,
            concurrent=alone * max(slowdown.gemm * fit.gemm, 1.0),
            signal=fit.signal,
            gap=fit.gap,
            tile_bytes=plan.tile.block_m * plan.tile.block_n * ITEM * call.skew,
            curve=functools.partial(p.latency, name, ctas=plan.ctas),
            slow=max(slowdown.transfer * fit.transfer, 1.0),
        )

    def steps(self, p: Parts, call: GemmCall, plan: Signaled, fit: Signaling | Moving | None) -> list[Step]:
        if plan.copies:
            assert not isinstance(fit, Signaling)
            return self.by_copies(p, call, plan, fit)
        part = self.parts(p, call, plan, fit)
        ran: list[Step] = []
        time, transferred, done = 0.0, -part.gap, 0
        groups = partition(plan.groups, part.waves)
        gemm = part.gemm(groups[0])
        for i, (g, end) in enumerate(zip(groups, part.ends(groups), strict=True)):
            took = g * (part.concurrent if i else part.alone)
            ran.append(Step("gemm", f"group {i}", time, time + took))
            time += took
            if end > done:
                begin = max(time + part.signal, transferred + part.gap)
                transferred = float(part.moved(begin, part.transfer(end - done), gemm))
                ran.append(Step("comm", call.collective, begin, transferred))
            done = end
        if self.in_place(call.n):
            return ran
        out = call.moved(call.busiest) // self.owners(p.world)
        return [*ran, Step("gemm", "put in order", transferred, transferred + p.optional("local", out))]

    def nbytes(self, call: GemmCall) -> float:
        """Return the number of output bytes of the busiest rank."""
        return call.moved(call.m) * call.skew

    def groups_by_copies(self, p: Parts, call: GemmCall, plan: Signaled) -> Iterator[tuple[Work, float, float]]:
        """Yield each group's part of the GEMM, and the fractions of the GEMM that have ended before and after that
        part."""
        tiles, programs = self._tiles(call, plan), p.sms - plan.ctas
        waves = -(-tiles // programs)
        wave_us = p.tiles(Occupancy(plan.tile), programs, tiles, call.m, call.n, call.k) / waves
        done = 0.0
        for i, g in enumerate(partition(plan.groups, waves)):
            before, done = done, min(1.0, done + g / waves)
            yield Work("gemm", f"group {i}", g * wave_us + SIGNAL_COST), before, done


def groupings(part: SignaledParts) -> list[tuple[int, ...]]:
    """Return one group of all waves, and the BEST_PARTITIONS partitions with the fastest predictions. These are chosen
    from the best partition for each size of the first group. By the accumulate rule the end of transfer i depends on
    earlier transfers only through the end of transfer i - 1. Dynamic programming over the waves therefore finds the
    best partition for each size of the first group (FlashOverlap instead prunes the partitions and tries the remaining
    ones)."""
    step = -(-part.waves // UNITS)
    ends = [*range(step, part.waves, step), part.waves]  # the numbers of waves after which a group may end
    if len(ends) == 1:
        return [(part.waves,)]
    bounds = np.array([0, *ends])
    firsts = np.array([f for f in FIRST_GROUPS if f < len(ends)])
    # transfers[i, j] is the time, in us, of transferring waves bounds[i] .. bounds[j] alone; the last wave may have
    # fewer tiles.
    lengths = sorted({int(b - a) for i, a in enumerate(bounds) for b in bounds[i + 1 : -1]})
    by_length = np.zeros(part.waves + 1)
    by_length[lengths] = [part.transfer(g * part.programs) for g in lengths]
    count = len(bounds)
    transfers = by_length[np.maximum(bounds[None, :] - bounds[:, None], 0)]
    transfers[:-1, -1] = [part.transfer(part.tiles - a * part.programs) for a in bounds[:-1].tolist()]
    signal = (
        part.signal
        + bounds[firsts][:, None] * part.alone
        + (bounds[None, :] - bounds[firsts][:, None]) * part.concurrent
    )
    gemm = part.gemm(bounds[firsts])
    done = np.full((len(firsts), count), np.inf)
    previous = np.zeros((len(firsts), count), int)
    rows = np.arange(len(firsts))
    done[rows, firsts] = part.moved(signal[rows, firsts], transfers[0, firsts], gemm)
    for j in range(2, count):
        begin = np.maximum(signal[:, j, None], done[:, :j] + part.gap)
        ends_by_start = part.moved(begin, transfers[None, :j, j], gemm[:, None])
        i = ends_by_start.argmin(1)
        better = ends_by_start[rows, i] < done[:, j]
        done[better, j], previous[better, j] = ends_by_start[rows, i][better], i[better]
    partitions: list[tuple[int, ...]] = [(part.waves,)]
    for f in done[:, -1].argsort()[:BEST_PARTITIONS]:
        path, j = [count - 1], count - 1
        while previous[f, j]:
            j = int(previous[f, j])
            path.append(j)
        cuts = [0, *(int(bounds[j]) for j in reversed(path))]
        partitions.append(tuple(b - a for a, b in pairwise(cuts)))
    return list(dict.fromkeys(partitions))
