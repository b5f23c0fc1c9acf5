"""Signaled plans: waves of tiles on the SMs that the collective leaves; the transfer of group i starts at the later of
the group's signal and a gap after the end of transfer i - 1 (the accumulate rule), and is slowed by the GEMM for as
long as that runs. Plans whose groups copy engines move are modelled as decomposed ones."""

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
from .decomposed import Chunking, copied, met

# us that a GEMM takes longer for each group that it tells of (docs/measurements.md: a wave a group beside in order)
TOLD = 0.7
FULL = 256 << 20  # bytes of a copy whose start does not count
Numbers = TypeVar("Numbers", float, np.ndarray)  # one, or one for each of several groups


@dataclass(frozen=True)
class Signaling:
    """What signaled calls of one op cost beside their parts: us from the last tile of a group to the start of its
    collective, and from the end of one collective to the start of the next, for which the ranks wait for each other;
    and how many times as long waves and transfers take side by side, beyond what was measured of them alone."""

    signal: float = 6.0
    gap: float = 3.0
    gemm: float = 1.0
    other: float = 1.0


@dataclass(frozen=True)
class Moving:
    """What all-reduces and all-to-alls cost beside their parts whose groups copy engines move: us of a barrier beyond
    its own; how many times as long as alone a copy takes, and a GEMM while another kernel sums what it reads from the
    peers."""

    gap: float = 6.0
    copy: float = 1.0
    gemm: float = 1.3


@dataclass(frozen=True)
class SignaledParts:
    """A signaled GEMM: its tiles and waves over `programs` programs, the tiles that a group (but the last) has a
    multiple of; us of a wave alone and beside the collective, us from the last tile of a group to its collective and
    between collectives; bytes of a tile, the collective's us by bytes and how much it is slowed."""

    tiles: int
    waves: int
    programs: int
    unit: int
    alone: float
    beside: float
    signal: float
    gap: float
    tile: float
    curve: Callable[[float], float]
    slow: float

    def ends(self, groups: Sequence[int]) -> list[int]:
        """Return, for each group, how many tiles are done, and may be moved, when its waves are."""
        waves = itertools.accumulate(partition(groups, self.waves))
        done = [min(self.tiles, w * self.programs) for w in waves]
        return [d if d == self.tiles else d // self.unit * self.unit for d in done]

    def transfer(self, tiles: int) -> float:
        """us to move `tiles` tiles alone."""
        return self.curve(tiles * self.tile)

    def gemm(self, first: Numbers) -> Numbers:
        """us of all waves, with `first` of them in the first group, which no transfer slows."""
        return first * self.alone + (self.waves - first) * self.beside

    def moved(self, begin: Numbers, us: Numbers, gemm: Numbers) -> Numbers:
        """When a transfer that takes `us` alone ends, slowed from `begin` to the end of the GEMM."""
        return begin + us + np.minimum(us * (self.slow - 1), np.maximum(gemm - begin, 0) * (1 - 1 / self.slow))


def in_place(op: str, n: int) -> bool:
    """Whether a signaled plan leaves rows of N elements in ordinary order without moving them once more."""
    return collective(op) == "all_to_all" or (collective(op) == "all_reduce" and n % 8 == 0)


def parts(
    p: PartTimes, op: str, plan: Signaled, m: int, n: int, k: int, more: Signaling, received: int | None = None
) -> SignaledParts:
    """What the accumulate rule works with. The GEMM has the SMs that the collective leaves."""
    if not 0 < plan.ctas < p.sms:
        raise ValueError(f"{plan.ctas} CTAs leave none of {p.sms} SMs, or are none")
    what, programs = collective(op), p.sms - plan.ctas
    owners = p.world if collective(op) == "reduce_scatter" else 1
    columns = -(-n // plan.tile.block_n)
    tiles = owners * -(-m // owners // plan.tile.block_m) * columns
    waves, unit = -(-tiles // programs), owners
    if in_place(op, n):  # whole rows of tiles
        unit = max(1, min(plan.tile.group_m, programs // columns)) * columns
    alone = p.tiles(Occupancy(plan.tile), programs, tiles, m, n, k) / waves
    beside = p.beside(what, plan.ctas)
    tile = plan.tile.block_m * plan.tile.block_n * ITEM * max(1.0, (received or 0) / m)
    curve = functools.partial(p.latency, what, ctas=plan.ctas)
    p.latency(what, 1, plan.ctas)  # raises Lacks
    return SignaledParts(
        tiles,
        waves,
        programs,
        unit,
        alone,
        alone * max(beside.gemm * more.gemm, 1.0),
        more.signal,
        more.gap,
        tile,
        curve,
        max(beside.other * more.other, 1.0),
    )


def steps(
    p: PartTimes, op: str, plan: Signaled, m: int, n: int, k: int, more: Signaling, received: int | None = None
) -> list[Step]:
    part = parts(p, op, plan, m, n, k, more, received)
    ran: list[Step] = []
    at, moved, done = 0.0, -part.gap, 0
    groups = partition(plan.groups, part.waves)
    gemm = part.gemm(groups[0])
    for i, (g, end) in enumerate(zip(groups, part.ends(groups), strict=True)):
        took = g * (part.beside if i else part.alone)
        ran.append(Step("gemm", f"group {i}", at, at + took))
        at += took
        if end > done:
            begin = max(at + part.signal, moved + part.gap)
            moved = float(part.moved(begin, part.transfer(end - done), gemm))
            ran.append(Step("comm", collective(op), begin, moved))
        done = end
    if in_place(op, n):
        return ran
    out = max(m, received or 0) * n * ITEM // (p.world if collective(op) == "reduce_scatter" else 1)
    return [*ran, Step("gemm", "put in order", moved, moved + p.optional("local", out))]


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
    """Reduce-scatter: a group is pushed when its waves are done, but for the own rows, the last; one sum at the
    end. All-reduce: once every rank has a group, it is summed by pulling on SMs, and once all have, copy engines
    pull the sums. All-to-all: each group is pulled, once every rank has it."""
    what = collective(op)
    tiles, programs = -(-m // plan.tile.block_m) * -(-n // plan.tile.block_n), p.sms - plan.ctas
    waves, share = -(-tiles // programs), (p.world - 1) / p.world
    wave, nbytes = (
        p.tiles(Occupancy(plan.tile), programs, tiles, m, n, k) / waves,
        m * n * ITEM * max(1.0, (received or 0) / m),
    )
    scattered = what == "reduce_scatter"
    more = Moving() if scattered else moving
    barrier = met(p, chunking) if scattered else p.latency("barrier") + more.gap
    works, before = [], 0.0
    if what != "all_reduce":
        works.append(Work("comm" if scattered else "gemm", "enter", barrier))
    for i, g in enumerate(partition(plan.groups, waves)):
        gemm = Work("gemm", f"group {i}", g * wave + TOLD)
        works.append(gemm)
        done = min(1.0, before + g / waves)
        part = min(done, share) - min(before, share) if scattered else (done - before) * share
        before = done
        if part <= 0:
            continue
        if scattered:
            works.append(Work("comm", "copy", copied(p, chunking, part * nbytes), gemm))
            continue
        there = Work("meet", "barrier", barrier, gemm)
        works.append(there)
        if what == "all_reduce":
            rate = p.latency("copy", FULL) / FULL  # us a byte: loads have no start-up cost of copies
            summed = Work("comm 2", "sum", part * nbytes * rate, there)
            there = Work("meet 2", "barrier", barrier, summed)
            works += [summed, there]
        works.append(Work("comm 3", "copy", p.latency("copy", part * nbytes) * more.copy, there))
    if scattered:
        pushed = Work("comm", "barrier", barrier)
        works += [pushed, Work("gemm", "sum", p.optional("sum", nbytes / p.world), pushed)]
    return side_by_side(works, p.beside("copy", 0), more.gemm)
