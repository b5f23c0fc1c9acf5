"""What a profile measured alone, at any size: library GEMMs, waves of Triton tiles, collectives and copies by bytes,
and how much two of them slow each other down."""

from __future__ import annotations

import functools
import math
from collections import defaultdict
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from ..plans import GemmTile, OneShot, Plan, TwoShotLowLatency
from .curves import Curve, Smooth, filled
from .profile import Beside, Gemm, Profile, ProfileError, Wave

ITEM = 2  # bytes of an element, bfloat16 or float16
# Tiles that the library chooses among, as tensor cores take rows and columns; which one it takes is not known.
_SHAPES = np.array([(a, b) for a in (64, 128, 192, 256) for b in range(64, 257, 16) if a * b <= 192 * 256])
SHOTS = (OneShot(), TwoShotLowLatency())  # the plans of low-latency rows


class Lacks(ProfileError):
    """The profile has not measured something that this prediction needs."""


def by_posted_rows(what: str, plan: Plan) -> str:
    """What a profile calls a collective by a plan of SHOTS."""
    return f"{plan.kind} {what}"


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


class Occupancy(NamedTuple):
    """The tiles of a GEMM, and how many programs that compute such tiles an SM holds at once."""

    tile: GemmTile
    per_sm: int = 1


class PartTimes:
    """us of the parts of calls on the profile's machine. `clock`: how many times as long GEMMs take now as when the
    profile was made."""

    def __init__(self, profile: Profile, clock: float = 1.0) -> None:
        self.profile, self.machine, self.clock = profile, profile.machine, clock
        self.world, self.sms = profile.machine.world, profile.machine.sms
        points: dict[tuple[str, int], list[tuple[int, float]]] = defaultdict(list)
        for x in profile.latencies:
            points[x.what, x.ctas].append((x.nbytes, x.us))
        self.curves = {key: Curve(p) for key, p in points.items()}  # by what and ctas
        self.contention = {(b.what, b.ctas): b for b in profile.beside}
        self._most_like: dict[Occupancy, tuple] = {}
        self._tile_times: dict[tuple[Occupancy, int, int, int], float] = {}

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

    def tiles(self, on: Occupancy, programs: int, tiles: int, m: int, n: int, k: int) -> float:
        """A persistent GEMM of `tiles` such tiles over `programs` programs: no faster than memory is, and of few rows,
        where reading the weight is most of it, no faster than the library's."""
        us, memory = self._tiles_us(on, programs, tiles, k), self._gemms.memory(m, n, k)
        if us < 2 * memory:
            library = self._gemms(m, n, k)
            us = max(us, library if library < 2 * memory else memory)
        return us * self.clock

    def _tiles_us(self, on: Occupancy, programs: int, tiles: int, k: int) -> float:
        asked = (on, programs, tiles, k)
        if asked not in self._tile_times:
            like = self._like(on)
            area = on.tile.block_m * on.tile.block_n * on.per_sm / (like[0] * like[1] * like[5])
            self._tile_times[asked] = self._tiles[like](tiles, programs, on.per_sm, k) * area
        return self._tile_times[asked]

    def _like(self, on: Occupancy) -> tuple:
        """The measured tiles that are most like these."""
        if on not in self._most_like:
            self._most_like[on] = self._find_like(on)
        return self._most_like[on]

    def _find_like(self, on: Occupancy) -> tuple:
        if not self._tiles:
            raise Lacks("no waves of tiles measured")
        tile = on.tile

        def unlike(key: tuple) -> tuple:
            bm, bn, bk, warps, stages, per = key
            return (
                (bm, bn, per) != (tile.block_m, tile.block_n, on.per_sm),
                abs(bm * bn - tile.block_m * tile.block_n),
                (bk, warps) != (tile.block_k, tile.warps),
                abs(stages - tile.stages),
            )

        return min(self._tiles, key=unlike)

    def soft(self, on: Occupancy) -> float:
        """`filled`'s, of these tiles."""
        return self._tiles[self._like(on)].soft

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
