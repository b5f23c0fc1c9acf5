"""The best plan for a shape, without running any: candidates of every kind, their predicted times, and the fastest.

Candidates:
    decomposed    every division of the shards that the op can run
    fused         the variants of which the profile has calls; those by a copy engine only for even shards
    one shot, two shots    up to the measured number of bytes
    two-level     over several nodes, in up to four pieces
    signaled      partitions of the GEMM's waves into groups, for every measured number of CTAs. By the accumulate rule
                  the end of transfer i depends on earlier ones only through the end of transfer i - 1, so dynamic
                  programming over the waves finds the best partition for each size of the first group (FlashOverlap
                  prunes and tries). Moved by copies: the default groups, and groups of one wave

An overlapped plan is chosen only if it is predicted faster than sequential by more than `gain`.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import pairwise

import numpy as np

from ..op import REGISTRY, collective
from ..plans import (
    Decomposed,
    FusedGatherByCopies,
    Plan,
    Sequential,
    Signaled,
    TwoLevel,
    TwoShotLowLatency,
    TwoShotPull,
    settings,
)
from .parts import ITEM, NotMeasured
from .predict import Predictor
from .table import GAIN

EAGER_GAIN = 1.05
SLOW_HOST = 2.0
UNITS = 48  # a GEMM of more waves is divided at multiples of several waves
BEST_PARTITIONS = 3
PIECES = 2
SINGLE = (1,) * 16  # waves of each group, of signaled plans moved by copies; the last group takes the rest
FIRST_GROUPS = (1, 2, 3, 4, 6, 8, 12, 16)  # sizes of the first group, in waves or in such multiples


@dataclass(frozen=True)
class Option:
    """A plan and its predicted time."""

    plan: Plan
    us: float


@dataclass(frozen=True)
class Decision:
    """The plan chosen for one op and shape, and the candidates. M, N, K are those of the GEMM on one rank, but M counts
    the rows of all ranks.

    plan: the one that "auto" runs. why: in words, what the decision rests on. options: all candidates by predicted
    time, the fastest first; empty if nothing was predicted. `print` shows the best one of every kind.
    """

    op: str
    m: int
    n: int
    k: int
    world: int
    mode: str
    plan: Plan
    why: str
    options: tuple[Option, ...] = ()

    @property
    def us(self) -> float | None:
        """Return the predicted time of the plan in us, or None."""
        return next((o.us for o in self.options if o.plan == self.plan), None)

    @property
    def sequential(self) -> float | None:
        return next((o.us for o in self.options if isinstance(o.plan, Sequential)), None)

    def __str__(self) -> str:
        how = {"graph": "in a CUDA graph", "eager": "eager"}[self.mode]
        lines = [f"{self.op}, M {self.m}, N {self.n}, K {self.k}, {self.world} GPUs, {how}: {brief(self.plan)}"]
        lines.append(f"  {self.why}")
        shown = set()
        for o in self.options:
            best = o.plan.kind not in shown
            if not best and o.plan != self.plan:
                continue
            shown.add(o.plan.kind)
            ratio = f"{self.sequential / o.us:6.2f}x" if self.sequential else ""
            lines.append(f"  {'>' if o.plan == self.plan else ' '} {o.us:9.1f} us {ratio}  {brief(o.plan)}")
        left = len(self.options) - (len(lines) - 2)
        return "\n".join([*lines, f"    ({left} more candidates in .options)"] if left > 0 else lines)


def gain(mode: str) -> float:
    """Return how many times as fast as sequential a plan must be predicted to be. Eager calls need EAGER_GAIN: those
    predicted to win by less lost as often as they won (2 H200, 2026-11), since hosts differ from call to call."""
    return GAIN if mode == "graph" else EAGER_GAIN


def host_overhead_factor(plan: Plan, mode: str) -> float:
    """Return how many times as slow as in the profile the host is assumed to be when an eager plan must be predicted to
    win. The profile has the shortest call, and hosts are often slower: 53 us there, 61 to 147 us in two runs of
    (sequential calls of the smallest sizes, 2 H200, 2026-11, median 100). That delays plans of few
    launches as much as sequential; a plan on several streams launches three times as much, and must win even then."""
    return SLOW_HOST if mode == "eager" and isinstance(plan, Decomposed | Signaled) else 1.0


VARIANT_WORDS: dict[type[Plan], str] = {
    FusedGatherByCopies: "by copies",
    TwoShotPull: "pulled",
    TwoShotLowLatency: "low latency",
}


def brief(plan: Plan) -> str:
    """Return a plan as its kind, a word for its variant, and the fields that differ from the defaults of its class."""
    defaults = settings(type(plan)())
    settings_text = [VARIANT_WORDS[type(plan)]] if type(plan) in VARIANT_WORDS else []
    settings_text += [f"{name}={value}" for name, value in settings(plan).items() if value != defaults[name]]
    return f"{plan.kind} ({', '.join(settings_text)})" if settings_text else plan.kind


@functools.cache
def divisions(size: int) -> tuple[tuple[int, ...], ...]:
    """Return the groups of shards that a decomposed plan can have on `size` ranks: each a power of two that divides the
    number of shards before it. For another number of ranks than a power of two there are only single shards, and above
    16 ranks equal groups and doubling ones."""
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


def groupings(
    p: Predictor, op: str, plan: Signaled, m: int, n: int, k: int, received: int | None = None
) -> list[tuple[int, ...]]:
    """Return one group of all waves, and the BEST_PARTITIONS partitions predicted fastest among the best ones for each
    size of the first group."""
    part = p.signaled_parts(op, plan, m, n, k, received)
    step = -(-part.waves // UNITS)
    ends = [*range(step, part.waves, step), part.waves]  # waves at which a group may end
    if len(ends) == 1:
        return [(part.waves,)]
    bounds = np.array([0, *ends])
    firsts = np.array([f for f in FIRST_GROUPS if f < len(ends)])
    # transfers[i, j]: us of transferring waves bounds[i] .. bounds[j] alone; the last wave may have fewer tiles
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


def candidates(
    p: Predictor,
    op: str,
    m: int,
    n: int,
    k: int,
    even: bool = True,
    received: int | None = None,
    movable: bool | None = None,
    limits: bool = True,
) -> list[Plan]:
    """Return the plans worth predicting.

    even: all ranks have the same number of rows; without it nothing is decomposed. movable: copies can move the groups
    of a signaled plan (`Op.movable`); None: as M says. limits: a communicator can be limited to a number of CTAs;
    without it a signaled plan would take other SMs than predicted.
    """
    collective_name = collective(op)
    plans: list[Plan] = [Sequential()]
    if p.world == 1:
        return plans
    if even and collective_name != "all_to_all":
        plans += [Decomposed(groups) for groups in divisions(p.world)]
        if collective_name == "reduce_scatter" and m // p.world % PIECES == 0:
            plans.append(Decomposed((1,) * p.world, PIECES))
    if p.over_nodes is not None and collective_name != "all_to_all":
        plans += [TwoLevel(count) for count in (1, 2, 4)]
    if k % 8 == 0 and n % 8 == 0:
        if collective_name == "all_reduce" or m >= p.world:  # the other collectives need rows on every rank
            plans += p.low_latency_times(collective_name, m * (k if collective_name == "all_gather" else n) * ITEM)
        plans += [plan for plan in p.variants(op) if even or not isinstance(plan, FusedGatherByCopies)]
    if k % 8 == 0 and collective_name != "all_gather" and (n % 8 == 0 or collective_name != "all_to_all"):
        for ctas in sorted(c for w, c in p.curves if w == collective_name and c) if limits else ():
            plan = Signaled(ctas=ctas)
            plans += [replace(plan, groups=groups) for groups in groupings(p, op, plan, m, n, k, received)]
        for ctas in p.copying(op):
            plan = Signaled(ctas=ctas, copies=True)
            waves = -(-(-(-m // plan.tile.block_m) * -(-n // plan.tile.block_n)) // (p.sms - ctas))
            if collective_name == "all_to_all" or (
                n % 8 == 0 and (REGISTRY[op].movable(plan, m, p.world) if movable is None else movable)
            ):
                plans += [plan, *([replace(plan, groups=SINGLE[:waves])] if waves > 4 else [])]
    return plans


def near(m: int, world: int) -> int:
    """Return the next M, upwards, of a grid of 16 steps an octave, for which the plan of `m` is chosen. It rounds up
    because fewer rows may take a wave less, and a plan for that wave less would leave the last tiles to a wave of their
    own."""
    step = 1 << max(m.bit_length() - 5, 0)
    rounded = -(-m // step) * step
    return rounded if m % world else -(-rounded // world) * world


class Planner:
    """Choose plans with one profile's predictor, and remember them."""

    def __init__(self, predictor: Predictor) -> None:
        self.predictor = predictor
        self.decide = functools.lru_cache(maxsize=16384)(self._decide)
        self.sum = functools.lru_cache(maxsize=16384)(self._sum)
        self.nearest = functools.lru_cache(maxsize=16384)(self._nearest)
        predictor.fit()  # so that no decision waits for the fit

    def _decide(
        self,
        op: str,
        m: int,
        n: int,
        k: int,
        mode: str = "graph",
        even: bool = True,
        received: int | None = None,
        movable: bool | None = None,
        limits: bool = True,
    ) -> Decision:
        """Return the fastest of the candidates that are predicted faster than sequential by more than `gain`, on a host
        of their `host_overhead_factor`; else sequential. Raises NotMeasured if the profile lacks even the sequential
        time."""
        p, options = self.predictor, []
        for plan in candidates(p, op, m, n, k, even, received, movable, limits):
            try:
                options.append(Option(plan, p.time(op, plan, m, n, k, mode, received)))
            except NotMeasured:
                if isinstance(plan, Sequential):
                    raise
        options.sort(key=lambda o: o.us)
        sequential = next(o.us for o in options if isinstance(o.plan, Sequential))
        wins = (o.plan for o in options if self._wins(op, o.plan, m, n, k, mode, sequential, received))
        best = next(wins, Sequential())
        why = f"predicted from the profile of {p.machine.name} ({p.profile.source}, {p.profile.created[:10]})"
        return Decision(op, m, n, k, p.world, mode, best, why, tuple(options))

    def _wins(
        self, op: str, plan: Plan, m: int, n: int, k: int, mode: str, sequential: float, received: int | None = None
    ) -> bool:
        """Return whether a plan is predicted faster than sequential, which takes `sequential` us, by more than `gain`.
        Raises NotMeasured."""
        us = self.predictor.time(op, plan, m, n, k, mode, received, host_overhead_factor(plan, mode))
        return sequential > gain(mode) * us

    def _sum(self, nbytes: int, passes: float = 0.0) -> Plan:
        """Return the fastest plan of an all-reduce of so many bytes alone: the library's, or a low-latency one. passes:
        bytes that the kernels after the library's read and write, over `nbytes`; a low-latency plan includes their
        work. Raises NotMeasured."""
        p = self.predictor
        library = p.latency("all_reduce", nbytes) + p.optional("local", passes * nbytes)
        times = p.low_latency_times("all_reduce", nbytes)
        best = min(times, key=lambda plan: times[plan], default=Sequential())
        return best if best in times and library > GAIN * times[best] else Sequential()

    def _nearest(self, op: str, m: int, n: int, k: int, mode: str, limits: bool = True) -> Plan:
        """Return the plan that "auto" runs: that of `near(m)`, so that serving, where M changes with every batch,
        searches a few hundred times and not once for every M; sequential if that plan is not predicted faster at M
        itself. It is the same on every rank, whatever the rank chose before. Raises NotMeasured."""
        p, planned_m = self.predictor, near(m, self.predictor.world)
        movable = REGISTRY[op].movable(Signaled(copies=True), m, p.world)
        plan = self.decide(op, planned_m, n, k, mode, m % p.world == 0, movable=movable, limits=limits).plan
        if planned_m == m or isinstance(plan, Sequential):
            return plan
        sequential = p.time(op, Sequential(), m, n, k, mode)
        return plan if self._wins(op, plan, m, n, k, mode, sequential) else Sequential()
