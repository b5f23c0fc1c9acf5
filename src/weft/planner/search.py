"""The best plan for a shape, without running any: candidates of every kind, their predicted times, the fastest.

Candidates:
    decomposed    every division of the shards that the op can run; whether a chunk fills its last wave is in its GEMM's
                  time
    fused         the variants of which the profile has calls; a copy engine serves even shards alone
    one shot, two shots    where not more bytes move than were measured
    two-level     over several nodes, in up to four pieces
    signaled      partitions of the GEMM's waves into groups, for every number of CTAs that was measured. By the
                  accumulate rule the end of transfer i depends on what came before only through the end of transfer i -
                  1, so for each size of the first group the best partition is found by going through the waves once
                  (FlashOverlap prunes and tries). Moved by copies: the default groups, and a wave a group

An overlapped plan is taken only where it is predicted faster than the sequential one by more than `gain`.
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
from .parts import ITEM, Lacks
from .predict import Predictor
from .table import GAIN

EAGER_GAIN = 1.05
SLOW_HOST = 2.0
UNITS = 48  # a GEMM of more waves is divided in steps of several
KEPT = 3
PIECES = 2
SINGLE = (1,) * 16  # waves a group, of signaled plans moved by copies: the last has what is left
FIRST = (1, 2, 3, 4, 6, 8, 12, 16)  # waves, or such steps, in the first group


@dataclass(frozen=True)
class Option:
    """A plan and its predicted time."""

    plan: Plan
    us: float


@dataclass(frozen=True)
class Decision:
    """What was decided for one op and shape, and among what. M, N, K are those of the GEMM on one rank, M that of all
    ranks.

    plan: the one that "auto" takes. why: in words, what the decision rests on. options: all candidates by predicted
    time, the fastest first; empty where nothing was predicted. `print` shows the best of every kind.
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
        """Predicted time of the plan."""
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
    """How many times as fast as the sequential plan one has to be predicted. Of eager calls (bench/measure/host.py,
    "auto" on 2 GPUs) those predicted to win by less than EAGER_GAIN lost as often as they won: hosts differ from call
    to call."""
    return GAIN if mode == "graph" else EAGER_GAIN


def slowness(plan: Plan, mode: str) -> float:
    """Return how many times as slow as in the profile the host is assumed to be when an eager plan has to be predicted
    to win. A host is often slower than in the shortest call, from which the profile is made (bench/measure/host.py,
    sequential calls of the smallest sizes on 2 GPUs: 53 us there; in two runs 61 to 147 us, 100 in the median). That
    delays plans of few launches no more than the sequential one; a plan of several streams launches three times as
    much, and has to hide that even then."""
    return SLOW_HOST if mode == "eager" and isinstance(plan, Decomposed | Signaled) else 1.0


OTHERWISE: dict[type[Plan], str] = {
    FusedGatherByCopies: "by copies",
    TwoShotPull: "pulled",
    TwoShotLowLatency: "low latency",
}


def brief(plan: Plan) -> str:
    """A plan by its kind, what its class does otherwise, and what differs from the defaults of its class."""
    usual = settings(type(plan)())
    said = [OTHERWISE[type(plan)]] if type(plan) in OTHERWISE else []
    said += [f"{name}={value}" for name, value in settings(plan).items() if value != usual[name]]
    return f"{plan.kind} ({', '.join(said)})" if said else plan.kind


@functools.cache
def divisions(size: int) -> tuple[tuple[int, ...], ...]:
    """The groups of shards that a decomposed plan can have in a world of `size`: each a power of two that divides the
    shards before it. Other worlds, and those with too many to try, get single shards, equal groups and doubling
    ones."""
    if size & (size - 1):
        return ((1,) * size,)
    if size > 16:
        equal = [(g,) * (size // g) for g in (1, 2, 4, 8)]
        doubling = [(g, *(g << i for i in range((size // g).bit_length() - 1))) for g in (1, 2, 4)]
        return tuple(equal + doubling)

    def from_(at: int) -> Iterator[tuple[int, ...]]:
        if at == size:
            yield ()
        for g in (1 << i for i in range(size.bit_length())):
            if at % g == 0 and at + g <= size:
                yield from ((g, *rest) for rest in from_(at + g))

    return tuple(d for d in from_(0) if len(d) > 1)


def groupings(
    p: Predictor, op: str, plan: Signaled, m: int, n: int, k: int, received: int | None = None
) -> list[tuple[int, ...]]:
    """One group of all waves, and the KEPT fastest partitions by predicted time among the best ones for each size of
    the first group."""
    part = p.signaled_parts(op, plan, m, n, k, received)
    step = -(-part.waves // UNITS)
    ends = [*range(step, part.waves, step), part.waves]  # a group ends at one of these
    if len(ends) == 1:
        return [(part.waves,)]
    bounds = np.array([0, *ends])
    firsts = np.array([f for f in FIRST if f < len(ends)])
    # took[i, j]: the transfer of waves bounds[i] .. bounds[j] alone; the last one may be of fewer tiles
    lengths = sorted({int(b - a) for i, a in enumerate(bounds) for b in bounds[i + 1 : -1]})
    by_length = np.zeros(part.waves + 1)
    by_length[lengths] = [part.transfer(g * part.programs) for g in lengths]
    count = len(bounds)
    took = by_length[np.maximum(bounds[None, :] - bounds[:, None], 0)]
    took[:-1, -1] = [part.transfer(part.tiles - a * part.programs) for a in bounds[:-1].tolist()]
    signal = (
        part.signal + bounds[firsts][:, None] * part.alone + (bounds[None, :] - bounds[firsts][:, None]) * part.beside
    )
    gemm = part.gemm(bounds[firsts])
    done = np.full((len(firsts), count), np.inf)
    came = np.zeros((len(firsts), count), int)
    rows = np.arange(len(firsts))
    done[rows, firsts] = part.moved(signal[rows, firsts], took[0, firsts], gemm)
    for j in range(2, count):
        begin = np.maximum(signal[:, j, None], done[:, :j] + part.gap)
        ways = part.moved(begin, took[None, :j, j], gemm[:, None])
        i = ways.argmin(1)
        better = ways[rows, i] < done[:, j]
        done[better, j], came[better, j] = ways[rows, i][better], i[better]
    found: list[tuple[int, ...]] = [(part.waves,)]
    for f in done[:, -1].argsort()[:KEPT]:
        path, j = [count - 1], count - 1
        while came[f, j]:
            j = int(came[f, j])
            path.append(j)
        cuts = [0, *(int(bounds[j]) for j in reversed(path))]
        found.append(tuple(b - a for a, b in pairwise(cuts)))
    return list(dict.fromkeys(found))


def candidates(
    p: Predictor,
    op: str,
    m: int,
    n: int,
    k: int,
    even: bool = True,
    received: int | None = None,
    whole: bool | None = None,
    limits: bool = True,
) -> list[Plan]:
    """Plans worth predicting. even: whether all ranks have as many rows, without which nothing is decomposed. whole:
    whether copies can move the groups of a signaled plan (`Op.movable`); None: as M says. limits: whether a
    communicator can be held to a number of CTAs, without which a signaled plan takes other SMs than was predicted."""
    what = collective(op)
    out: list[Plan] = [Sequential()]
    if p.world == 1:
        return out
    if even and what != "all_to_all":
        out += [Decomposed(groups) for groups in divisions(p.world)]
        if what == "reduce_scatter" and m // p.world % PIECES == 0:
            out.append(Decomposed((1,) * p.world, PIECES))
    if p.over_nodes is not None and what != "all_to_all":
        out += [TwoLevel(pieces) for pieces in (1, 2, 4)]
    if k % 8 == 0 and n % 8 == 0:
        if what == "all_reduce" or m >= p.world:  # the others need rows of every rank
            out += p.posted(what, m * (k if what == "all_gather" else n) * ITEM)
        out += [plan for plan in p.variants(op) if even or not isinstance(plan, FusedGatherByCopies)]
    if k % 8 == 0 and what != "all_gather" and (n % 8 == 0 or what != "all_to_all"):
        for ctas in sorted(c for w, c in p.curves if w == what and c) if limits else ():
            plan = Signaled(ctas=ctas)
            out += [replace(plan, groups=groups) for groups in groupings(p, op, plan, m, n, k, received)]
        for ctas in p.copying(op):
            plan = Signaled(ctas=ctas, copies=True)
            waves = -(-(-(-m // plan.tile.block_m) * -(-n // plan.tile.block_n)) // (p.sms - ctas))
            if what == "all_to_all" or (
                n % 8 == 0 and (REGISTRY[op].movable(plan, m, p.world) if whole is None else whole)
            ):
                out += [plan, *([replace(plan, groups=SINGLE[:waves])] if waves > 4 else [])]
    return out


def near(m: int, world: int) -> int:
    """The next M of a grid of 16 steps an octave, which is decided for in place of `m`. Upwards: fewer rows may take a
    wave less, and a plan made for that wave less leaves the last tiles to a wave of their own."""
    step = 1 << max(m.bit_length() - 5, 0)
    at = -(-m // step) * step
    return at if m % world else -(-at // world) * world


class Planner:
    """Decides from one profile's predictor, and remembers."""

    def __init__(self, predictor: Predictor) -> None:
        self.predictor = predictor
        self.decide = functools.lru_cache(maxsize=16384)(self._decide)
        self.sum = functools.lru_cache(maxsize=16384)(self._sum)
        self.nearest = functools.lru_cache(maxsize=16384)(self._nearest)
        predictor.fit()  # so that no decision waits for it

    def _decide(
        self,
        op: str,
        m: int,
        n: int,
        k: int,
        mode: str = "graph",
        even: bool = True,
        received: int | None = None,
        whole: bool | None = None,
        limits: bool = True,
    ) -> Decision:
        """The fastest candidate of those predicted faster than the sequential one by more than `gain`, on a host of
        their `slowness`, or sequential. Raises Lacks where the profile cannot even tell the sequential time."""
        p, options = self.predictor, []
        for plan in candidates(p, op, m, n, k, even, received, whole, limits):
            try:
                options.append(Option(plan, p.time(op, plan, m, n, k, mode, received)))
            except Lacks:
                if isinstance(plan, Sequential):
                    raise
        options.sort(key=lambda o: o.us)
        sequential = next(o.us for o in options if isinstance(o.plan, Sequential))
        wins = (o.plan for o in options if self._wins(op, o.plan, m, n, k, mode, sequential, received))
        best = next(wins, Sequential())
        why = f"predicted from the profile of {p.machine.name} ({p.profile.source}, {p.profile.made[:10]})"
        return Decision(op, m, n, k, p.world, mode, best, why, tuple(options))

    def _wins(
        self, op: str, plan: Plan, m: int, n: int, k: int, mode: str, sequential: float, received: int | None = None
    ) -> bool:
        """Whether a plan is predicted faster than the sequential one by more than `gain`. sequential: us of that one.
        Raises Lacks."""
        us = self.predictor.time(op, plan, m, n, k, mode, received, slowness(plan, mode))
        return sequential > gain(mode) * us

    def _sum(self, nbytes: int, passed: float = 0.0) -> Plan:
        """The fastest all-reduce of so many bytes alone: the library's, or by low-latency rows. passed: how many times
        its bytes the kernels behind the library's read and write, in which low-latency rows are already summed. Raises
        Lacks."""
        p = self.predictor
        library = p.latency("all_reduce", nbytes) + p.optional("local", passed * nbytes)
        times = p.posted("all_reduce", nbytes)
        best = min(times, key=lambda plan: times[plan], default=Sequential())
        return best if best in times and library > GAIN * times[best] else Sequential()

    def _nearest(self, op: str, m: int, n: int, k: int, mode: str, limits: bool = True) -> Plan:
        """What "auto" runs: the plan for `near(m)`, so that serving, where M changes with every batch, searches a few
        hundred times and not once for every M; sequential where that plan is not predicted faster at M itself. The same
        on every rank, whatever it decided before. Raises Lacks."""
        p, at = self.predictor, near(m, self.predictor.world)
        whole = REGISTRY[op].movable(Signaled(copies=True), m, p.world)
        plan = self.decide(op, at, n, k, mode, m % p.world == 0, whole=whole, limits=limits).plan
        if at == m or isinstance(plan, Sequential):
            return plan
        sequential = p.time(op, Sequential(), m, n, k, mode)
        return plan if self._wins(op, plan, m, n, k, mode, sequential) else Sequential()
