"""Times of the parts of a call at any size, computed from a profile: library GEMMs, waves of Triton tiles, collectives
and copies by bytes, and the factors by which a GEMM and a transfer slow each other down."""

from __future__ import annotations

import functools
import math
from collections import defaultdict
from collections.abc import Sequence

import numpy as np

from ..cost.model import ITEM, SHOTS, Occupancy, filled, low_latency_name
from ..cost.two_level import OverNodes
from ..plans import Plan
from .curves import Curve, Smooth
from .profile import Gemm, Profile, ProfileError, Slowdown, Wave

# Tile shapes among which a library may choose; the actual choice is unknown.
_SHAPES = np.array([(a, b) for a in (64, 128, 192, 256) for b in range(64, 257, 16) if a * b <= 192 * 256])


class NotMeasured(ProfileError):
    """The profile lacks a measurement that this prediction requires."""


# The shape of the curve of a library's GEMM times. The shape was set by hand when the predictor was written, and is not
# fitted. `Smooth` corrects it by the ratios to the GEMMs measured on the machine, so it only determines how to
# interpolate between them.
WHOLE_WAVES = 0.7  # the fraction of the time that grows with waves rounded up; the rest grows with the number of tiles
TILE_POWER = 0.9  # a tile of half the size needs 0.54 times as long
K_OF_EPILOGUE = 200  # the prologue and epilogue of a tile need as much time as this number of columns of K


class Gemms:
    """Times of library GEMMs of any size, from measured GEMMs of some sizes. The library selects one of many tile
    shapes. The modelled time is the longer of two times: that of the whole waves of the cheapest tile shape, and that
    of the memory traffic. A smooth correction through the measured ratios multiplies it."""

    def __init__(self, rows: Sequence[Gemm], sms: int) -> None:
        if len(rows) < 4:
            raise NotMeasured(f"{len(rows)} GEMMs measured, at least 4 are needed")
        self.sms, self.known = sms, {(g.m, g.n, g.k): g.us for g in rows}
        self.per_k = float(np.median([g.us / self._waves(g.m, g.n, g.k) for g in rows]))
        self.per_byte = min(g.us / self._bytes(g.m, g.n, g.k) for g in rows)
        log_sizes = [(math.log2(g.m), math.log2(g.n), math.log2(g.k)) for g in rows]
        self.ratio = Smooth(log_sizes, [math.log(g.us / self._model(g.m, g.n, g.k)) for g in rows])
        self._unmeasured = functools.cache(self._corrected)

    def _waves(self, m: int, n: int, k: int) -> float:
        bm, bn = _SHAPES.T
        waves = -(-m // bm) * -(-n // bn) / self.sms
        whole, tile = np.ceil(waves), (bm * bn / (128 * 256)) ** TILE_POWER
        cost = (WHOLE_WAVES * whole + (1 - WHOLE_WAVES) * np.maximum(waves, 1)) * tile
        return float(cost.min()) * (k + K_OF_EPILOGUE)

    def _bytes(self, m: int, n: int, k: int) -> int:
        return ITEM * (m * k + n * k + m * n)

    def memory(self, m: int, n: int, k: int) -> float:
        """Return the time, in us, of the memory traffic alone."""
        return self.per_byte * self._bytes(m, n, k)

    def _model(self, m: int, n: int, k: int) -> float:
        return max(self.per_k * self._waves(m, n, k), self.memory(m, n, k))

    def __call__(self, m: int, n: int, k: int) -> float:
        size = (max(m, 1), max(n, 1), max(k, 1))
        return self.known[size] if size in self.known else self._unmeasured(*size)

    def _corrected(self, m: int, n: int, k: int) -> float:
        return self._model(m, n, k) * math.exp(self.ratio(math.log2(m), math.log2(n), math.log2(k)))


class Tiles:
    """The time of waves of one Triton tile configuration: us = start + waves (a + b K), times a smooth correction."""

    def __init__(self, rows: Sequence[Wave]) -> None:
        us = np.array([w.us for w in rows])
        best = math.inf
        for soft in np.linspace(0, 1, 6):
            waves = np.array([filled(w.tiles, w.programs, w.per_sm, soft) for w in rows])
            a = np.column_stack([np.ones(len(rows)), waves, waves * [w.k for w in rows]]) / us[:, None]
            keep = a if len(rows) > 3 else a[:, 2:]
            x = np.linalg.lstsq(keep, np.ones(len(rows)), rcond=None)[0]
            error = float(np.abs(keep @ x - 1).mean())
            if error < best and x[-1] > 0:
                best, self.soft = error, float(soft)
                self.start, self.a, self.b = (float(v) for v in (x if len(x) == 3 else (0.0, 0.0, x[0])))
        if math.isinf(best):
            raise NotMeasured("waves whose time does not grow with K")
        log_sizes = [(math.log2(w.tiles / w.programs), math.log2(w.k)) for w in rows]
        model = [self._model(w.tiles, w.programs, w.per_sm, w.k) for w in rows]
        self.ratio = Smooth(log_sizes, [math.log(w.us / t) for w, t in zip(rows, model, strict=True)])

    def _model(self, tiles: int, programs: int, per_sm: int, k: int) -> float:
        return max(self.start + float(filled(tiles, programs, per_sm, self.soft)) * (self.a + self.b * k), 1e-3)

    def __call__(self, tiles: int, programs: int, per_sm: int, k: int) -> float:
        """Return the time of the whole GEMM in us."""
        ratio = self.ratio(math.log2(tiles / programs), math.log2(k))
        return self._model(tiles, programs, per_sm, k) * math.exp(ratio)


class PartTimes:
    """The times, in us, of the parts of calls on the profile's machine. over_nodes: the times between nodes, if there
    are several nodes."""

    over_nodes: OverNodes | None = None

    def __init__(self, profile: Profile) -> None:
        self.profile, self.machine = profile, profile.machine
        self.world, self.sms = profile.machine.world, profile.machine.sms
        points: dict[tuple[str, int], list[tuple[int, float]]] = defaultdict(list)
        for x in profile.latencies:
            points[x.operation, x.ctas].append((x.nbytes, x.us))
        self.curves = {key: Curve(p) for key, p in points.items()}  # keyed by operation and CTAs
        self.contention = {(b.operation, b.ctas): b for b in profile.slowdowns}
        self._closest = functools.cache(self._find_closest)
        self._tiles_us = functools.cache(self._time_tiles)

    @functools.cached_property
    def _gemms(self) -> Gemms:
        return Gemms(self.profile.gemms, self.sms)

    def gemm(self, m: int, n: int, k: int) -> float:
        """Return the time, in us, of the library's GEMM alone."""
        return self._gemms(m, n, k)

    @functools.cached_property
    def _tiles(self) -> dict[tuple, Tiles]:
        rows: dict[tuple, list[Wave]] = defaultdict(list)
        for w in self.profile.waves:
            rows[w.block_m, w.block_n, w.block_k, w.warps, w.stages, w.per_sm].append(w)
        return {key: Tiles(v) for key, v in rows.items()}

    def tiles(self, occupancy: Occupancy, programs: int, tiles: int, m: int, n: int, k: int) -> float:
        """Return the time, in us, of a persistent GEMM with `tiles` tiles on `programs` programs. The result is at
        least the time of the memory traffic. With so few rows that reading the weight dominates, it is also at least
        the time of the library's GEMM."""
        us, memory = self._tiles_us(occupancy, programs, tiles, k), self._gemms.memory(m, n, k)
        if us < 2 * memory:
            library = self._gemms(m, n, k)
            us = max(us, library if library < 2 * memory else memory)
        return us

    def _time_tiles(self, on: Occupancy, programs: int, tiles: int, k: int) -> float:
        closest = self._closest(on)
        area = on.tile.block_m * on.tile.block_n * on.per_sm / (closest[0] * closest[1] * closest[5])
        return self._tiles[closest](tiles, programs, on.per_sm, k) * area

    def _find_closest(self, occupancy: Occupancy) -> tuple:
        """Return the key of the measured tile configuration that is closest to the given one."""
        if not self._tiles:
            raise NotMeasured("no waves of tiles measured")
        tile = occupancy.tile

        def unlike(key: tuple) -> tuple:
            bm, bn, bk, warps, stages, per = key
            return (
                (bm, bn, per) != (tile.block_m, tile.block_n, occupancy.per_sm),
                abs(bm * bn - tile.block_m * tile.block_n),
                (bk, warps) != (tile.block_k, tile.warps),
                abs(stages - tile.stages),
            )

        return min(self._tiles, key=unlike)

    def soft(self, occupancy: Occupancy) -> float:
        """Return the argument `soft` of the function `filled` for these tiles."""
        return self._tiles[self._closest(occupancy)].soft

    def latency(self, operation: str, nbytes: float = 0, ctas: int = 0) -> float:
        curve = self.curves.get((operation, ctas))
        if curve is None:
            raise NotMeasured(
                f"{operation}{f' with {ctas} CTAs' if ctas else ''} was not measured on {self.machine.name}"
            )
        return curve(nbytes)

    def limited(self, operation: str) -> list[int]:
        """Return the CTA limits with which a collective was measured."""
        return sorted(ctas for name, ctas in self.curves if name == operation and ctas)

    def low_latency_times(self, operation: str, nbytes: int) -> dict[Plan, float]:
        """Return the time, in us, of a collective with each low-latency plan that was measured for at least `nbytes`
        bytes."""
        curves = {plan: self.curves.get((low_latency_name(operation, plan), 0)) for plan in SHOTS}
        return {plan: c(nbytes) for plan, c in curves.items() if c is not None and nbytes <= c.sizes[-1]}

    def optional(self, operation: str, nbytes: float = 0) -> float:
        """Return the latency of the operation, or 0 if it was not measured."""
        return self.latency(operation, nbytes) if (operation, 0) in self.curves else 0.0

    def slowdown(self, operation: str, ctas: int) -> Slowdown:
        """Return the factors by which a GEMM and a transfer slow each other down; both are 1 if they were not
        measured."""
        return self.contention.get((operation, ctas)) or Slowdown(operation, ctas, 1.0, 1.0)
