"""Model of signaled plans. The GEMM's tiles run in waves on the SMs that the collective leaves. The transfer of group i
starts at the later of the group's signal and a gap after the end of transfer i - 1 (the accumulate rule), and is slowed
until the GEMM ends. Plans whose groups copy engines move are modelled with queues, as decomposed ones."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeVar

import numpy as np

from ...op import collective
from ...plans import Signaled, partition
from ..parts import ITEM, Occupancy, PartTimes
from ..queues import Step, Work, side_by_side
from .decomposed import Chunking, barrier_us, copy_us

# us that each signaled group adds to a GEMM (docs/measurements.md, groups of one wave against tiles in order).
SIGNAL_COST = 0.7
LARGE_COPY = 256 << 20  # bytes of a copy whose start-up time is negligible
Numbers = TypeVar("Numbers", float, np.ndarray)  # a number, or an array with one for each candidate


@dataclass(frozen=True)
class Signaling:
    """Parameters of the signaled calls of one op. signal: us from the last tile of a group to the start of its
    collective. gap: us from the end of one collective to the start of the next, for which the ranks wait for each
    other. gemm, transfer: slow-down of waves and of transfers while both run, beyond the measured one."""

    signal: float = 6.0
    gap: float = 3.0
    gemm: float = 1.0
    transfer: float = 1.0


@dataclass(frozen=True)
class Moving:
    """Parameters of all-reduces and all-to-alls whose groups copy engines move. gap: us that a barrier takes beyond its
    own time. copy: time of a copy over its time alone. gemm: time of a GEMM over its time alone, while another kernel
    sums rows that it reads from peers."""

    gap: float = 6.0
    copy: float = 1.0
    gemm: float = 1.3


@dataclass(frozen=True)
class SignaledParts:
    """The numbers that the accumulate rule works with.

    tiles, waves, programs: of the GEMM. unit: every group but the last has a multiple of so many tiles. alone,
    concurrent: us of a wave alone and while the collective runs. signal, gap: as in Signaling. tile_bytes: bytes of a
    tile. curve: us of the collective by bytes. slow: its slow-down under the GEMM.
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
        """Return, for each group, how many tiles are done, and may be transferred, when its waves are done."""
        waves = itertools.accumulate(partition(groups, self.waves))
        done = [min(self.tiles, w * self.programs) for w in waves]
        return [d if d == self.tiles else d // self.unit * self.unit for d in done]

    def transfer(self, tiles: int) -> float:
        """Return the us of transferring `tiles` tiles alone."""
        return self.curve(tiles * self.tile_bytes)

    def gemm(self, first_waves: Numbers) -> Numbers:
        """Return the us of all waves; no transfer slows the waves of the first group."""
        return first_waves * self.alone + (self.waves - first_waves) * self.concurrent

    def moved(self, begin: Numbers, us: Numbers, gemm: Numbers) -> Numbers:
        """Return the end of a transfer that takes `us` alone and is slowed from `begin` to the end of the GEMM."""
        return begin + us + np.minimum(us * (self.slow - 1), np.maximum(gemm - begin, 0) * (1 - 1 / self.slow))


def in_place(op: str, n: int) -> bool:
    """Return whether a signaled plan leaves rows of N elements in ordinary order, without a further copy."""
    return collective(op) == "all_to_all" or (collective(op) == "all_reduce" and n % 8 == 0)


def parts(
    p: PartTimes, op: str, plan: Signaled, m: int, n: int, k: int, fit: Signaling, received: int | None = None
) -> SignaledParts:
    """Return what the accumulate rule works with. The GEMM has the SMs that the collective leaves."""
    if not 0 < plan.ctas < p.sms:
        raise ValueError(f"{plan.ctas} CTAs leave none of {p.sms} SMs, or are none")
    collective_name, programs = collective(op), p.sms - plan.ctas
    owners = p.world if collective(op) == "reduce_scatter" else 1
    columns = -(-n // plan.tile.block_n)
    tiles = owners * -(-m // owners // plan.tile.block_m) * columns
    waves, unit = -(-tiles // programs), owners
    if in_place(op, n):  # a group has whole rows of tiles
        unit = max(1, min(plan.tile.group_m, programs // columns)) * columns
    alone = p.tiles(Occupancy(plan.tile), programs, tiles, m, n, k) / waves
    slowdown = p.slowdown(collective_name, plan.ctas)
    tile_bytes = plan.tile.block_m * plan.tile.block_n * ITEM * max(1.0, (received or 0) / m)
    curve = functools.partial(p.latency, collective_name, ctas=plan.ctas)
    p.latency(collective_name, 1, plan.ctas)  # raises NotMeasured now, not at the first transfer
    return SignaledParts(
        tiles,
        waves,
        programs,
        unit,
        alone,
        alone * max(slowdown.gemm * fit.gemm, 1.0),
        fit.signal,
        fit.gap,
        tile_bytes,
        curve,
        max(slowdown.transfer * fit.transfer, 1.0),
    )


def steps(
    p: PartTimes, op: str, plan: Signaled, m: int, n: int, k: int, fit: Signaling, received: int | None = None
) -> list[Step]:
    part = parts(p, op, plan, m, n, k, fit, received)
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
            ran.append(Step("comm", collective(op), begin, transferred))
        done = end
    if in_place(op, n):
        return ran
    out = max(m, received or 0) * n * ITEM // (p.world if collective(op) == "reduce_scatter" else 1)
    return [*ran, Step("gemm", "put in order", transferred, transferred + p.optional("local", out))]


def steps_by_copies(
    p: PartTimes,
    op: str,
    plan: Signaled,
    m: int,
    n: int,
    k: int,
    chunking: Chunking,
    moving: Moving,
    received: int | None = None,
) -> list[Step]:
    """Return the steps of a signaled plan whose groups copy engines move.

    reduce-scatter   a group is pushed when its waves are done, this rank's rows after all others; one sum at the
                     end
    all-reduce       when every rank has computed a group, programs on SMs sum it from all ranks; when all sums are
                     there, copy engines pull them
    all-to-all       when every rank has computed a group, copy engines pull it
    """
    collective_name = collective(op)
    tiles, programs = -(-m // plan.tile.block_m) * -(-n // plan.tile.block_n), p.sms - plan.ctas
    waves, share = -(-tiles // programs), (p.world - 1) / p.world
    wave_us, nbytes = (
        p.tiles(Occupancy(plan.tile), programs, tiles, m, n, k) / waves,
        m * n * ITEM * max(1.0, (received or 0) / m),
    )
    scattered = collective_name == "reduce_scatter"
    fit = Moving() if scattered else moving
    barrier = barrier_us(p, chunking) if scattered else p.latency("barrier") + fit.gap
    works, done_before = [], 0.0
    if collective_name != "all_reduce":
        works.append(Work("comm" if scattered else "gemm", "enter", barrier))
    for i, g in enumerate(partition(plan.groups, waves)):
        gemm = Work("gemm", f"group {i}", g * wave_us + SIGNAL_COST)
        works.append(gemm)
        done = min(1.0, done_before + g / waves)
        part = min(done, share) - min(done_before, share) if scattered else (done - done_before) * share
        done_before = done
        if part <= 0:
            continue
        if scattered:
            works.append(Work("comm", "copy", copy_us(p, chunking, part * nbytes), gemm))
            continue
        barrier_end = Work("meet", "barrier", barrier, gemm)
        works.append(barrier_end)
        if collective_name == "all_reduce":
            rate = p.latency("copy", LARGE_COPY) / LARGE_COPY  # us a byte; loads have no start-up time
            sum_work = Work("comm 2", "sum", part * nbytes * rate, barrier_end)
            barrier_end = Work("meet 2", "barrier", barrier, sum_work)
            works += [sum_work, barrier_end]
        works.append(Work("comm 3", "copy", p.latency("copy", part * nbytes) * fit.copy, barrier_end))
    if scattered:
        barrier_after_pushes = Work("comm", "barrier", barrier)
        works += [barrier_after_pushes, Work("gemm", "sum", p.optional("sum", nbytes / p.world), barrier_after_pushes)]
    return side_by_side(works, p.slowdown("copy", 0), fit.gemm)
