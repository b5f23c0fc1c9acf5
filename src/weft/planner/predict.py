"""How long a plan will take, computed from a profile without running it (FlashOverlap, section 4).

Each kind of plan has a short model of what runs beside what:

    sequential    GEMM + collective
    one shot, two shots    GEMM + the same by low-latency rows, in as many bytes as were measured
    decomposed    chunk GEMMs and chunk transfers, each transfer after its GEMM (or the reverse), on queues of their
                  own; GEMMs on two streams share the SMs
    signaled      waves of tiles on the SMs that the collective leaves; the transfer of group i starts at the later of
                  the group's signal and a gap after the end of transfer i - 1 (the accumulate rule), and is slowed by
                  the GEMM for as long as that runs; moved by copies, as decomposed
    fused         all-gather: a tile starts when its chunk has been pulled, and the slowest chunk decides by the waves
                  that are left behind it; the reducing ops: tiles are pulled at one rate under the GEMM and at another
                  when it is done

Parts come from the profile: library GEMMs, waves of Triton tiles, collectives and copies by size, and how much two of
them slow each other down. What cannot be measured alone is fitted to the profile's calls of the plan's kind: what ranks
lose by waiting for each other at every barrier and collective, what copies and collectives reach inside a call, and for
each fused variant a rate, a drain rate, a slow-down of the tiles and a fixed cost. At last the ratio of the profile's
own calls to the model, near the shape asked for, corrects what the model leaves out.
"""

from __future__ import annotations

import bisect
import contextlib
import functools
import itertools
import json
import math
from collections import defaultdict
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, replace
from typing import TypeVar

import numpy as np

from ..op import collective, collectives
from ..plans import Decomposed, Fused, OneShot, Plan, Sequential, Signaled, TwoShot, partition
from .profile import Beside, Gemm, Profile, ProfileError, TimedCall, Wave, identity

ITEM = 2  # bytes of an element, bfloat16 or float16
# us that a GEMM takes longer for each group that it tells of (docs/measurements.md: a wave a group beside in order)
TOLD = 0.7
HIDES = 1.5  # an eager call that takes as many times as long as the host needs hides that
FULL = 256 << 20  # bytes of a copy whose start does not count
# Tiles that the library chooses among, as tensor cores take rows and columns; which one it takes is not known.
_SHAPES = np.array([(a, b) for a in (64, 128, 192, 256) for b in range(64, 257, 16) if a * b <= 192 * 256])


Numbers = TypeVar("Numbers", float, np.ndarray)  # one, or one for each of several groups
Fit = TypeVar("Fit", "Chunking", "Moving", "Pulling", "Signaling")


class Lacks(ProfileError):
    """The profile has not measured something that this prediction needs."""


# -- numbers between measured ones -----------------------------------------------------------------------------------
class Smooth:
    """A smooth function known at scattered points: a linear fit at each place, in which near points count most. Passes
    (almost) through them, never leaves their range, and goes on level beyond the outermost points."""

    def __init__(self, points: Sequence[Sequence[float]], values: Sequence[float], slope: float = 0.05) -> None:
        """slope: how much a slope costs; large for few or noisy points."""
        self.points, self.values = np.asarray(points, float), np.asarray(values, float)
        self.ridge = np.diag([0.0] + [slope] * self.points.shape[1])
        self.first, self.last = self.points.min(0), self.points.max(0)
        self.low, self.high = float(self.values.min()), float(self.values.max())

    def __call__(self, *at: float) -> float:
        away = self.points - np.clip(at, self.first, self.last)
        weight = ((away * away).sum(1) + 0.04) ** -1.5
        a = np.column_stack([np.ones(len(away)), away])
        left = (a.T * weight) @ a + self.ridge * weight.sum()
        value = float(np.linalg.solve(left, (a.T * weight) @ self.values)[0])
        return min(max(value, self.low), self.high)


class Curve:
    """us by bytes: straight lines between measured sizes; the first one's time below them, the last line's slope above,
    where that does not fall, which would be noise."""

    def __init__(self, points: Sequence[tuple[int, float]]) -> None:
        self.sizes, self.us = zip(*sorted(points), strict=True)

    def __call__(self, nbytes: float) -> float:
        n = len(self.sizes)
        if nbytes <= self.sizes[0] or n == 1:
            return self.us[0]
        i = min(bisect.bisect_left(self.sizes, nbytes), n - 1)
        (x0, x1), (y0, y1) = self.sizes[i - 1 : i + 1], self.us[i - 1 : i + 1]
        if nbytes > x1 and y1 < y0:
            return y1
        return y0 + (nbytes - x0) * (y1 - y0) / (x1 - x0)


def filled(tiles: float | np.ndarray, programs: int, per_sm: int, soft: float) -> np.ndarray:
    """Waves that `tiles` tiles (a number or an array of them) take over `programs` programs. A last wave that leaves
    SMs idle costs less than a whole one, by the share `soft` of what is missing, because the others get its power;
    where two programs share an SM, half a wave takes half the time."""
    whole, rest = np.divmod(tiles, programs)
    last = np.ceil(rest * per_sm / programs) / per_sm
    return whole + np.where(whole > 0, (1 - soft) * last + soft * rest / programs, last)


# -- the parts -------------------------------------------------------------------------------------------------------
class Gemms:
    """Library GEMMs of any size, from some. The library picks one of many tile shapes: the model takes the one with the
    cheapest whole number of waves, or the memory traffic where that is longer, and the measured ratio to it is
    smooth."""

    def __init__(self, rows: Sequence[Gemm], sms: int) -> None:
        if len(rows) < 4:
            raise Lacks(f"{len(rows)} GEMMs measured, at least 4 are needed")
        self.sms, self.known = sms, {(g.m, g.n, g.k): g.us for g in rows}
        self.per_k = float(np.median([g.us / self._waves(g.m, g.n, g.k) for g in rows]))
        self.per_byte = min(g.us / self._bytes(g.m, g.n, g.k) for g in rows)
        at = [(math.log2(g.m), math.log2(g.n), math.log2(g.k)) for g in rows]
        self.ratio = Smooth(at, [math.log(g.us / self._model(g.m, g.n, g.k)) for g in rows])
        self._cache: dict[tuple[int, int, int], float] = {}

    def _waves(self, m: int, n: int, k: int) -> float:
        bm, bn = _SHAPES.T
        waves = -(-m // bm) * -(-n // bn) / self.sms
        cost = (0.7 * np.ceil(waves) + 0.3 * np.maximum(waves, 1)) * (bm * bn / 32768) ** 0.9
        return float(cost.min()) * (k + 200)

    def _bytes(self, m: int, n: int, k: int) -> int:
        return ITEM * (m * k + n * k + m * n)

    def memory(self, m: int, n: int, k: int) -> float:
        """us that reading and writing alone take."""
        return self.per_byte * self._bytes(m, n, k)

    def _model(self, m: int, n: int, k: int) -> float:
        return max(self.per_k * self._waves(m, n, k), self.memory(m, n, k))

    def __call__(self, m: int, n: int, k: int) -> float:
        size = (max(m, 1), max(n, 1), max(k, 1))
        if size in self.known:
            return self.known[size]
        if size not in self._cache:
            self._cache[size] = self._model(*size) * math.exp(self.ratio(*(math.log2(s) for s in size)))
        return self._cache[size]


class Tiles:
    """Waves of one Triton tile configuration: us = start + waves x (a + b K), and a smooth ratio to that."""

    def __init__(self, rows: Sequence[Wave]) -> None:
        us = np.array([w.us for w in rows])
        best = math.inf
        for soft in np.linspace(0, 1, 6):
            waves = np.array([filled(w.tiles, w.programs, w.per_sm, soft) for w in rows])
            a = np.column_stack([np.ones(len(rows)), waves, waves * [w.k for w in rows]]) / us[:, None]
            keep = a if len(rows) > 3 else a[:, 2:]
            x = np.linalg.lstsq(keep, np.ones(len(rows)), rcond=None)[0]
            miss = float(np.abs(keep @ x - 1).mean())
            if miss < best and x[-1] > 0:
                best, self.soft = miss, float(soft)
                self.start, self.a, self.b = (float(v) for v in (x if len(x) == 3 else (0.0, 0.0, x[0])))
        if math.isinf(best):
            raise Lacks("waves whose time does not grow with K")
        at = [(math.log2(w.tiles / w.programs), math.log2(w.k)) for w in rows]
        model = [self._model(w.tiles, w.programs, w.per_sm, w.k) for w in rows]
        self.ratio = Smooth(at, [math.log(w.us / t) for w, t in zip(rows, model, strict=True)])

    def _model(self, tiles: int, programs: int, per_sm: int, k: int) -> float:
        return max(self.start + float(filled(tiles, programs, per_sm, self.soft)) * (self.a + self.b * k), 1e-3)

    def __call__(self, tiles: int, programs: int, per_sm: int, k: int) -> float:
        """us of the whole GEMM."""
        ratio = self.ratio(math.log2(tiles / programs), math.log2(k))
        return self._model(tiles, programs, per_sm, k) * math.exp(ratio)


@dataclass(frozen=True)
class Pulling:
    """What the pulling programs of one fused variant reach: GB/s under the GEMM and after it, how many times as long a
    tile takes beside them, and what a call costs beside all this."""

    fixed: float = 20.0
    rate: float = 150.0
    drain: float = 300.0
    slow: float = 1.05


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
class Chunking:
    """What decomposed calls show of transfers and the probes of a profile do not: us that the ranks wait for each other
    at every barrier and collective, and how many times as long a copy takes in a call as in a chain of copies alone."""

    gap: float = 6.0
    copy: float = 1.0


@dataclass(frozen=True)
class Step:
    """One thing on one queue of a predicted call."""

    queue: str
    what: str
    start: float
    end: float


@dataclass(frozen=True)
class Moving:
    """What all-reduces and all-to-alls cost beside their parts whose groups copy engines move: us of a barrier beyond
    its own; how many times as long as alone a copy takes, and a GEMM while another kernel sums what it reads from the
    peers."""

    gap: float = 6.0
    copy: float = 1.0
    gemm: float = 1.3


@dataclass(eq=False)
class Work:
    """Something that its queue runs in its turn, once `after` has ended: us alone, and when it runs beside others."""

    queue: str
    what: str
    us: float
    after: Work | None = None
    start: float = -1.0
    end: float = math.inf


def side_by_side(works: Sequence[Work], beside: Beside, summing: float = 1.0) -> list[Step]:
    """When each runs. A queue runs its works in order, one at a time. GEMMs on several queues ("gemm", "gemm 2") share
    the SMs evenly, transfers ("comm", "comm 2") the links; a GEMM and a transfer slow each other down while both run.
    summing: how many times as long GEMMs take beside a transfer that is a sum."""
    queues: dict[str, list[Work]] = defaultdict(list)
    for w in reversed(works):
        queues[w.queue].append(w)
    left = {id(w): w.us for w in works}
    now = 0.0
    while any(queues.values()):
        running = [q[-1] for q in queues.values() if q and (q[-1].after is None or q[-1].after.end <= now)]
        gemms, moving = (sum(w.queue.startswith(q) for w in running) for q in ("gemm", "comm"))
        summed = any(w.queue.startswith("comm") and w.what == "sum" for w in running)
        slow = {
            "comm": max(moving, 1) * (beside.other if gemms else 1.0),
            "gemm": max(gemms, 1) * (beside.gemm if moving else 1.0) * (summing if summed else 1.0),
        }
        slower = [slow.get(w.queue[:4], 1.0) for w in running]
        step = min(left[id(w)] * s for w, s in zip(running, slower, strict=True))
        for w, s in zip(running, slower, strict=True):
            w.start = now if w.start < 0 else w.start
            left[id(w)] -= step / s
            if left[id(w)] <= 1e-9:
                w.end = now + step
                queues[w.queue].pop()
        now += step
    return [Step(w.queue, w.what, w.start, w.end) for w in works]


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
        """By group, the tiles that are done, and may be moved, when its waves are."""
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


def family(plan: Plan) -> str:
    """What calls are alike: of one kind; of one fused variant; signaled and moved by copies."""
    if isinstance(plan, Fused):
        return plan.to_json()
    return f"{plan.kind} by copies" if isinstance(plan, Signaled) and plan.copies else plan.kind


SHOTS = (OneShot(), TwoShot(post=True))  # the plans of low-latency rows


def by_posted_rows(what: str, plan: Plan) -> str:
    """What a profile calls a collective by a plan of SHOTS."""
    return f"{plan.kind} {what}"


def in_place(op: str, n: int) -> bool:
    """Whether a signaled plan leaves rows of N elements in ordinary order without moving them once more."""
    return collective(op) == "all_to_all" or (collective(op) == "all_reduce" and n % 8 == 0)


class Predictor:
    """Times of any plan at any shape on the profile's machine, in us. M, N, K are those of the GEMM on one rank, M that
    of all ranks. `clock`: how many times as long GEMMs take now as when the profile was made. `launch`: us that the
    host takes for one of a call's `operations`, now; None: as the profile has it, where it does."""

    def __init__(self, profile: Profile, clock: float = 1.0, launch: float | None = None) -> None:
        self.profile, self.machine, self.clock = profile, profile.machine, clock
        self.world, self.sms = profile.machine.world, profile.machine.sms
        then = profile.constant("launch")
        self.launch = then if launch is None else launch
        self.pace = 1.0 if self.launch is None or then is None else self.launch / then  # of the host, then and now
        points: dict[tuple[str, int], list[tuple[int, float]]] = defaultdict(list)
        for x in profile.latencies:
            points[x.what, x.ctas].append((x.nbytes, x.us))
        self.curves = {key: Curve(p) for key, p in points.items()}  # by what and ctas
        self.contention = {(b.what, b.ctas): b for b in profile.beside}
        self.ran: dict[tuple[str, str], list[TimedCall]] = defaultdict(list)  # by op and family
        for r in profile.ran:
            self.ran[r.op, family(Plan.from_json(r.plan))].append(r)
        self._tile_times: dict[tuple[int, ...], float] = {}
        self._eagers: dict[str, tuple[float, float]] = {}
        self._variants: dict[str, list[Fused]] = {}
        self._pulling: dict[tuple[str, str], Pulling] = {}
        self._signaling: dict[str, Signaling] = {}
        self._moving: dict[str, Moving] = {}
        self._chunking: Chunking | None = None
        self._corrections: dict[Hashable, Callable[[int, int, int], float]] = {}

    # -- parts
    @functools.cached_property
    def _gemms(self) -> Gemms:
        return Gemms(self.profile.gemms, self.sms)

    def gemm(self, m: int, n: int, k: int) -> float:
        """The library's GEMM alone."""
        return self._gemms(m, n, k) * self.clock

    @functools.cached_property
    def _tiles(self) -> dict[tuple, Tiles]:
        rows: dict[tuple, list[Wave]] = defaultdict(list)
        for w in self.profile.waves:
            rows[w.block_m, w.block_n, w.block_k, w.warps, w.stages, w.per_sm].append(w)
        return {key: Tiles(v) for key, v in rows.items()}

    def tiles(self, plan: Fused | Signaled, programs: int, tiles: int, m: int, n: int, k: int) -> float:
        """A persistent GEMM of `tiles` tiles of the plan's configuration over `programs` programs: no faster than
        memory is, and of few rows, where reading the weight is most of it, no faster than the library's."""
        us, memory = self._tiles_us(plan, programs, tiles, k), self._gemms.memory(m, n, k)
        if us < 2 * memory:
            library = self._gemms(m, n, k)
            us = max(us, library if library < 2 * memory else memory)
        return us * self.clock

    def _tiles_us(self, plan: Fused | Signaled, programs: int, tiles: int, k: int) -> float:
        per_sm = plan.per_sm if isinstance(plan, Fused) else 1
        asked = (plan.block_m, plan.block_n, plan.block_k, plan.warps, plan.stages, per_sm, programs, tiles, k)
        if asked not in self._tile_times:
            self._tile_times[asked] = self._tile_time(plan, per_sm, programs, tiles, k)
        return self._tile_times[asked]

    def _like(self, plan: Fused | Signaled, per_sm: int) -> tuple:
        """The measured tile configuration that is most like the plan's."""
        if not self._tiles:
            raise Lacks("no waves of tiles measured")

        def unlike(key: tuple) -> tuple:
            bm, bn, bk, warps, stages, per = key
            return (
                (bm, bn, per) != (plan.block_m, plan.block_n, per_sm),
                abs(bm * bn - plan.block_m * plan.block_n),
                (bk, warps) != (plan.block_k, plan.warps),
                abs(stages - plan.stages),
            )

        return min(self._tiles, key=unlike)

    def _tile_time(self, plan: Fused | Signaled, per_sm: int, programs: int, tiles: int, k: int) -> float:
        key = self._like(plan, per_sm)
        area = plan.block_m * plan.block_n * per_sm / (key[0] * key[1] * key[5])
        return self._tiles[key](tiles, programs, per_sm, k) * area

    def latency(self, what: str, nbytes: float = 0, ctas: int = 0) -> float:
        curve = self.curves.get((what, ctas))
        if curve is None:
            raise Lacks(f"{what}{f' with {ctas} CTAs' if ctas else ''} was not measured on {self.machine.name}")
        return curve(nbytes)

    def posted(self, what: str, nbytes: int) -> dict[Plan, float]:
        """us of a collective by each plan of low-latency rows that was measured for so many bytes."""
        curves = {plan: self.curves.get((by_posted_rows(what, plan), 0)) for plan in SHOTS}
        return {plan: c(nbytes) for plan, c in curves.items() if c is not None and nbytes <= c.sizes[-1]}

    def optional(self, what: str, nbytes: float = 0) -> float:
        """0 for what was not measured."""
        return self.latency(what, nbytes) if (what, 0) in self.curves else 0.0

    def beside(self, what: str, ctas: int) -> Beside:
        """How a GEMM and `what` slow each other down: not at all where that was not measured."""
        return self.contention.get((what, ctas)) or Beside(what, ctas, 1.0, 1.0)

    # -- a whole call
    def time(
        self, op: str, plan: Plan, m: int, n: int, k: int, mode: str = "graph", received: int | None = None
    ) -> float:
        """us of one call, back to back with others. received: for all-to-all, rows that the busiest rank gets, where
        that is more than M, the rows that the busiest one sends. Raises Lacks where the profile does not tell."""
        us = self.model(op, plan, m, n, k, received) * math.exp(self._correction(op, plan)(m, n, k))
        if mode == "eager":
            gap, host = self._eager(plan.kind if isinstance(plan, Fused) else family(plan))
            given = (self.launch or 0.0) * self.operations(op, plan)
            return max(us + gap, host * self.pace * self._launches(plan), given)
        return us

    def operations(self, op: str, plan: Plan) -> int:
        """What the host gives to streams in one call: kernels, copies, barriers, collectives. Each takes it about as
        long, with the event that orders it."""
        moved, others = collective(op), self.world - 1
        groups = len(plan.groups) or self.world if isinstance(plan, Decomposed | Signaled) else 0
        if isinstance(plan, Decomposed):
            if moved == "all_reduce":
                return 2 * groups
            return 4 + others + groups  # staged, copied, multiplied, and two barriers
        if isinstance(plan, Signaled):
            return 2 + groups * (3 + others if plan.copies else 2)
        if isinstance(plan, Fused) and moved == "all_gather":
            return 1 if plan.pullers else 4 + 2 * others  # a copy and a signal for every peer
        return 2

    def _launches(self, plan: Plan) -> int:
        """How the host's time for a call grows with the plan's groups."""
        return 3 + (len(plan.groups) or self.world) if isinstance(plan, Decomposed | Signaled) else 1

    def _eager(self, alike: str) -> tuple[float, float]:
        """By family (of all fused ones together): us that an eager call takes more than in a graph, and host time of a
        launch: the shortest measured eager call cannot have taken longer on the host."""
        if alike not in self._eagers:
            calls = [
                r for (_, name), rs in self.ran.items() if ("fused" if name[0] == "{" else name) == alike for r in rs
            ]
            graph = {identity(replace(r, mode="eager")): r.us for r in calls if r.mode == "graph"}
            eager = [(r, self._launches(Plan.from_json(r.plan))) for r in calls if r.mode == "eager"]
            host = min((r.us / launches for r, launches in eager), default=0.0)
            seen = [r for r, launches in eager if identity(r) in graph and r.us > HIDES * host * launches]
            more = [r.us - graph[identity(r)] for r in seen]  # of what hides the host's time
            self._eagers[alike] = max(min(more, default=0.0), 0.0), host
        return self._eagers[alike]

    def model(self, op: str, plan: Plan, m: int, n: int, k: int, received: int | None = None) -> float:
        """`time` without the correction by what ran."""
        if op not in collectives():
            raise ValueError(f"{op!r} is not one of {sorted(collectives())}")
        if self.world == 1:
            return self.gemm(m, n, k)
        if isinstance(plan, Fused):
            return self._fused(op, plan, m, n, k, self.pulling(op, plan))
        steps = self.steps(op, plan, m, n, k, received)
        return max(s.end for s in steps)

    def steps(self, op: str, plan: Plan, m: int, n: int, k: int, received: int | None = None) -> list[Step]:
        """What runs when, for the plans that run several things: a picture of the prediction."""
        if isinstance(plan, Decomposed):
            if collective(op) == "all_gather":
                return self._gather_chunks(plan, m, n, k)
            return (
                self._push_chunks(plan, m, n, k)
                if collective(op) == "reduce_scatter"
                else self._reduce_chunks(plan, m, n, k)
            )
        if isinstance(plan, Signaled):
            return (self._copied if plan.copies else self._signaled)(op, plan, m, n, k, received)
        if not isinstance(plan, Sequential) and plan not in SHOTS:
            raise Lacks(f"no model of {plan} as steps")
        what = collective(op) if isinstance(plan, Sequential) else by_posted_rows(collective(op), plan)
        gemm, moved = self.gemm(m, n, k), self.latency(what, self._moved(op, m, n, k, received))
        if collective(op) == "all_gather":
            return [Step("comm", what, 0, moved), Step("gemm", "gemm", moved, moved + gemm)]
        if what == "all_to_all":  # rows are put in the order of their ranks in between
            before = gemm + self.optional("local", m * n * ITEM)
            return [Step("gemm", "gemm", 0, before), Step("comm", what, before, before + moved)]
        return [Step("gemm", "gemm", 0, gemm), Step("comm", what, gemm, gemm + moved)]

    def _moved(self, op: str, m: int, n: int, k: int, received: int | None = None) -> int:
        return max(m, received or 0) * (k if collective(op) == "all_gather" else n) * ITEM

    # -- decomposed
    @property
    def chunking(self) -> Chunking:
        """Fitted to the profile's decomposed calls of all ops, where there are some."""
        if self._chunking is None:
            self._chunking = Chunking()  # what the fit starts from
            ran = [r for op in collectives() for r in self.ran.get((op, "decomposed"), []) if r.mode == "graph"]
            with contextlib.suppress(Lacks):  # a profile that stopped half way
                if len(ran) > 2:
                    self._chunking = self._fitted(Chunking(), ran, self._with_chunking)
        return self._chunking

    def _with_chunking(self, plan: Plan, r: TimedCall, more: Chunking) -> float:
        self._chunking = more
        return self.model(r.op, plan, r.m, r.n, r.k)

    def _met(self) -> float:
        """us of a barrier, with the wait for the last rank."""
        return self.latency("barrier") + self.chunking.gap

    def _copy(self, nbytes: float) -> float:
        """us of one of a call's copies from or to a peer."""
        return self.latency("copy", nbytes) * self.chunking.copy

    def _gather_chunks(self, plan: Decomposed, m: int, n: int, k: int) -> list[Step]:
        rows, size = m // self.world, m // self.world * k * ITEM
        local, barrier = self.optional("local", size), self._met()
        copy = self._copy(size)
        groups = plan.groups or (1,) * self.world
        staged = Work("gemm", "enter", local)
        works, landed = [staged, Work("comm", "barrier", barrier, staged)], staged
        if groups[0] > 1:  # the own rows are put in place beside the barrier
            works.append(Work("gemm", "own rows", local))
        for i, g in enumerate(groups):
            if g > (i == 0):
                landed = Work("comm", "copy", copy * (g - (i == 0)))
                works.append(landed)
            works.append(Work("gemm 2" if i % 2 else "gemm", f"gemm {i}", self.gemm(g * rows, n, k), landed))
        return side_by_side([*works, Work("comm", "leave", barrier)], self.beside("copy", 0))

    def _push_chunks(self, plan: Decomposed, m: int, n: int, k: int) -> list[Step]:
        groups, rows = plan.groups or (1,) * self.world, m // self.world
        barrier = self._met()
        pieces = plan.pieces if rows % plan.pieces == 0 and set(groups) == {1} else 1
        rows //= pieces
        size = rows * n * ITEM
        copy, added = self._copy(size), self.optional("sum", size)
        works, lanes = [Work("comm", "enter", barrier)], itertools.cycle(("gemm", "gemm 2"))
        for _ in range(pieces):
            for i, g in enumerate(reversed(groups)):
                chunk = Work(next(lanes), f"gemm {i}", self.gemm(g * rows, n, k))
                own = i == len(groups) - 1
                works += [chunk, Work("comm", "copy", copy * (g - own), chunk)]
            pushed = Work("comm", "barrier", barrier)
            works += [pushed, Work("sum", "sum", added, pushed)]
        return side_by_side(works, self.beside("copy", 0))

    def _reduce_chunks(self, plan: Decomposed, m: int, n: int, k: int) -> list[Step]:
        rows, gap = m // self.world, self.chunking.gap
        works: list[Work] = []
        for i, g in enumerate(plan.groups or (1,) * self.world):
            chunk = Work("gemm", f"gemm {i}", self.gemm(g * rows, n, k))
            moved = gap + self.latency("all_reduce", g * rows * n * ITEM)
            works += [chunk, Work("comm", "all_reduce", moved, chunk)]
        return side_by_side(works, self.beside("all_reduce", 0))

    # -- signaled
    def signaled_parts(
        self, op: str, plan: Signaled, m: int, n: int, k: int, received: int | None = None
    ) -> SignaledParts:
        """What the accumulate rule works with. The GEMM has the SMs that the collective leaves."""
        if not 0 < plan.ctas < self.sms:
            raise ValueError(f"{plan.ctas} CTAs leave none of {self.sms} SMs, or are none")
        what, programs = collective(op), self.sms - plan.ctas
        owners = self.world if collective(op) == "reduce_scatter" else 1
        columns = -(-n // plan.block_n)
        tiles = owners * -(-m // owners // plan.block_m) * columns
        waves, unit = -(-tiles // programs), owners
        if in_place(op, n):  # whole rows of tiles
            unit = max(1, min(plan.group_m, programs // columns)) * columns
        alone = self.tiles(plan, programs, tiles, m, n, k) / waves
        beside, more = self.beside(what, plan.ctas), self.signaling(op)
        tile = plan.block_m * plan.block_n * ITEM * max(1.0, (received or 0) / m)
        curve = functools.partial(self.latency, what, ctas=plan.ctas)
        self.latency(what, 1, plan.ctas)  # raises Lacks
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

    def signaling(self, op: str) -> Signaling:
        return self._fitted_to(self._signaling, Signaling(), op, Signaled())

    def moving(self, op: str) -> Moving:
        return self._fitted_to(self._moving, Moving(), op, Signaled(copies=True))

    def _fitted_to(self, known: dict[str, Fit], start: Fit, op: str, like: Signaled) -> Fit:
        """Fitted to the profile's calls of the op by plans of that family, where there are some; once, and then
        `known`."""
        if op not in known:
            known[op] = start
            ran = [r for r in self.ran.get((op, family(like)), []) if r.mode == "graph"]

            def model(plan: Plan, r: TimedCall, more: Fit) -> float:
                known[op] = more
                return self.model(op, plan, r.m, r.n, r.k)

            if len(ran) > 2:
                known[op] = self._fitted(start, ran, model)
        return known[op]

    def _signaled(self, op: str, plan: Signaled, m: int, n: int, k: int, received: int | None) -> list[Step]:
        part = self.signaled_parts(op, plan, m, n, k, received)
        steps: list[Step] = []
        at, moved, done = 0.0, -part.gap, 0
        groups = partition(plan.groups, part.waves)
        gemm = part.gemm(groups[0])
        for i, (g, end) in enumerate(zip(groups, part.ends(groups), strict=True)):
            took = g * (part.beside if i else part.alone)
            steps.append(Step("gemm", f"group {i}", at, at + took))
            at += took
            if end > done:
                begin = max(at + part.signal, moved + part.gap)
                moved = float(part.moved(begin, part.transfer(end - done), gemm))
                steps.append(Step("comm", collective(op), begin, moved))
            done = end
        if in_place(op, n):
            return steps
        out = self._moved(op, m, n, k, received) // (self.world if collective(op) == "reduce_scatter" else 1)
        return [*steps, Step("gemm", "put in order", moved, moved + self.optional("local", out))]

    def _copied(self, op: str, plan: Signaled, m: int, n: int, k: int, received: int | None) -> list[Step]:
        """Reduce-scatter: a group is pushed when its waves are done, but for the own rows, the last; one sum at the
        end. All-reduce: once every rank has a group, it is summed by pulling on SMs, and once all have, copy engines
        pull the sums. All-to-all: each group is pulled, once every rank has it."""
        what = collective(op)
        tiles, programs = -(-m // plan.block_m) * -(-n // plan.block_n), self.sms - plan.ctas
        waves, share = -(-tiles // programs), (self.world - 1) / self.world
        wave, nbytes = self.tiles(plan, programs, tiles, m, n, k) / waves, m * n * ITEM * max(1.0, (received or 0) / m)
        scattered = what == "reduce_scatter"
        more = Moving() if scattered else self.moving(op)
        barrier = self._met() if scattered else self.latency("barrier") + more.gap
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
                works.append(Work("comm", "copy", self._copy(part * nbytes), gemm))
                continue
            there = Work("meet", "barrier", barrier, gemm)
            works.append(there)
            if what == "all_reduce":
                rate = self.latency("copy", FULL) / FULL  # us a byte: loads have no start-up cost of copies
                summed = Work("comm 2", "sum", part * nbytes * rate, there)
                there = Work("meet 2", "barrier", barrier, summed)
                works += [summed, there]
            works.append(Work("comm 3", "copy", self.latency("copy", part * nbytes) * more.copy, there))
        if scattered:
            pushed = Work("comm", "barrier", barrier)
            works += [pushed, Work("gemm", "sum", self.optional("sum", nbytes / self.world), pushed)]
        return side_by_side(works, self.beside("copy", 0), more.gemm)

    # -- fused
    def variants(self, op: str) -> Sequence[Fused]:
        """The fused plans of which the profile has calls."""
        if op not in self._variants:
            plans = [Plan.from_json(plan) for name, plan in self.ran if name == op and plan.startswith("{")]
            self._variants[op] = [plan for plan in plans if isinstance(plan, Fused)]
        return self._variants[op]

    def copying(self, op: str) -> list[int]:
        """The SMs left in the op's measured calls that are signaled and moved by copies."""
        ran = self.ran.get((op, family(Signaled(copies=True))), [])
        return sorted({json.loads(r.plan)["ctas"] for r in ran})

    def fit(self) -> None:
        """Do now what the first predictions would wait for."""
        for op, _ in list(self.ran):
            for plan in (Sequential(), Decomposed(), Signaled(), Signaled(copies=True), *self.variants(op)):
                with contextlib.suppress(Lacks):
                    self._correction(op, plan)

    def pulling(self, op: str, plan: Fused) -> Pulling:
        """What the pulling programs of this variant reach: fitted to the profile's calls of it."""
        key = (op, plan.to_json())
        if key not in self._pulling:
            ran = [r for r in self.ran.get(key, []) if r.mode == "graph"]
            if not ran:
                raise Lacks(f"no call of {op} with {plan} was measured on {self.machine.name}")
            names: tuple[str, ...] = ("fixed", "rate", "drain", "slow")
            if collective(op) == "all_gather":  # a copy engine is as fast as for decomposed plans
                names = ("fixed", "rate", "slow") if plan.pullers else ("fixed", "slow")
            model = lambda p, r, pull: self._fused(op, plan, r.m, r.n, r.k, pull)  # noqa: E731
            self._pulling[key] = self._fitted(Pulling(), ran, model, names)
        return self._pulling[key]

    def _fitted(
        self,
        start: Fit,
        ran: Sequence[TimedCall],
        model: Callable[[Plan, TimedCall, Fit], float],
        names: Sequence[str] = (),
    ) -> Fit:
        """Least squares of the log of model / measured; the parameters' logs are held near where they start, slow-downs
        more."""
        names = names or tuple(vars(start))
        first = np.log([getattr(start, n) for n in names])
        hold = np.array([0.3 if n in ("slow", "gemm", "other", "copy") else 0.05 for n in names])
        plans = [Plan.from_json(r.plan) for r in ran]

        def misses(x: np.ndarray) -> np.ndarray:
            with_ = replace(start, **dict(zip(names, np.exp(x).tolist(), strict=True)))
            off = [math.log(model(plan, r, with_) / r.us) for plan, r in zip(plans, ran, strict=True)]
            return np.concatenate([off, hold * (x - first)])

        return replace(start, **dict(zip(names, np.exp(_least_squares(misses, first)).tolist(), strict=True)))

    def _fused(self, op: str, plan: Fused, m: int, n: int, k: int, pull: Pulling) -> float:
        rows, bm = -(-m // self.world), plan.block_m
        columns = -(-n // plan.block_n)
        if collective(op) != "all_gather":
            chunks, programs = -(-rows // bm), self.sms  # what pulls and forwards shares their SMs
            # All tiles but the last wave's can be pulled under the GEMM, from the end of the first wave on.
            tiles = self.world * chunks * columns
            gemm = self.tiles(plan, programs, tiles, m, n, k) * pull.slow
            waves = max(1, -(-tiles // programs))
            total = (self.world - 1) * chunks * bm * n * ITEM * (2 if collective(op) == "all_reduce" else 1)
            early = (waves - 1) * programs / tiles
            under = min(total * early, pull.rate * 1e3 * gemm * (1 - 1 / waves))
            return pull.fixed + gemm + (total - under) / (pull.drain * 1e3)
        programs = self.sms * plan.per_sm - (plan.pullers or 1)
        if programs < 1:
            raise ValueError(f"{plan} leaves no program for the GEMM")
        # A chunk is a row of tiles, or a shorter shard; as many are under way as the pullers can work on. A copy engine
        # pulls whole shards, once every rank has staged its own. A row needs the last of its chunks, and after its
        # first tile as many waves are left as the tiles take that stand behind it in the order of tiles: the own rows',
        # if they are whole tiles, then the others'.
        row_tiles, each = -(-m // bm), min(bm, rows) if plan.pullers else rows
        chunks, own = -(-rows // each), 0 if rows % bm or m % self.world else rows // bm
        tiles = row_tiles * columns
        gemm = self.tiles(plan, programs, tiles, m, n, k) * pull.slow
        together = max(plan.pullers // plan.split, 1)
        staged = met = 0.0
        if plan.pullers:
            took = each * k * ITEM / (pull.rate * 1e3)
        else:
            took, local = self._copy(each * k * ITEM), self.optional("local", each * k * ITEM)
            staged = local if own else 2 * local  # the own rows are put in place too
            met = local + self._met()
        i = np.arange(row_tiles)
        last = np.minimum((i + 1) * bm, m) - 1
        pulled = (
            last // rows * chunks + last % rows // each - chunks
        )  # in the order of pulling; negative: the own shard
        arrived = np.where(pulled < 0, staged, met + (pulled // together + 1) * together * took)
        j = np.where(i < own, i, i - own)
        before = (i - j + j // plan.group_m * plan.group_m) * columns + j % plan.group_m
        soft = self._tiles[self._like(plan, plan.per_sm)].soft
        behind = filled(np.append(tiles - before, tiles), programs, plan.per_sm, soft)
        return pull.fixed + float((arrived + gemm * behind[:-1] / behind[-1]).max())

    # -- what ran
    def _correction(self, op: str, plan: Plan) -> Callable[[int, int, int], float]:
        """log of measured / model, by shape, from the profile's calls of this family."""
        key = (op, family(plan))
        if key not in self._corrections:
            ran = [r for r in self.ran.get(key, []) if r.mode == "graph"]
            points: dict[tuple[int, int, int], list[float]] = defaultdict(list)
            for r in ran:
                model = self.model(op, Plan.from_json(r.plan), r.m, r.n, r.k)
                points[r.m, r.n, r.k].append(math.log(r.us / model))
            self._corrections[key] = _near(points)
        return self._corrections[key]


def _near(points: dict[tuple[int, int, int], list[float]]) -> Callable[[int, int, int], float]:
    if not points:
        return lambda m, n, k: 0.0
    at = np.log2(np.array(list(points), float))
    values = np.array([sum(v) / len(v) for v in points.values()])
    middle = float(np.median(values))

    def correction(m: int, n: int, k: int) -> float:
        """The mean of near points' values; far from all of them half the middle one."""
        d2 = ((at - np.log2([m, n, k])) ** 2).sum(1)
        weight = 1 / (d2 + 0.02)
        return float((weight @ values + 0.5 * middle * 0.5) / (weight.sum() + 0.5))

    return correction


def _least_squares(misses: Callable[[np.ndarray], np.ndarray], x: np.ndarray, rounds: int = 25) -> np.ndarray:
    """Levenberg-Marquardt with differences wide enough for a function with steps (waves), outliers held down."""
    damp, size = 1e-2, 0.03

    def cost(v: np.ndarray) -> float:
        return float((2 * (np.sqrt(1 + (v / 0.05) ** 2) - 1)).sum())

    now = misses(x)
    for _ in range(rounds):
        j = np.column_stack([(misses(x + size * e) - misses(x - size * e)) / (2 * size) for e in np.eye(len(x))])
        w = 1 / np.sqrt(1 + (now / 0.05) ** 2)
        jj, jr = (j.T * w) @ j, (j.T * w) @ now
        for _ in range(6):
            step = np.clip(np.linalg.solve(jj + damp * np.diag(np.diag(jj) + 1e-9), -jr), -0.5, 0.5)
            then = misses(x + step)
            if cost(then) < cost(now):
                break
            damp *= 4
        else:
            return x
        done = cost(now) - cost(then) < 1e-5 * cost(now)
        x, now, damp = x + step, then, damp / 3
        if done:
            break
    return x
