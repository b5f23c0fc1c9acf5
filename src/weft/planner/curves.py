"""Numbers between measured ones, and what is fitted to measured ones."""

from __future__ import annotations

import bisect
import math
from collections.abc import Callable, Sequence

import numpy as np


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


def near_mean(points: dict[tuple[int, int, int], list[float]]) -> Callable[[int, int, int], float]:
    if not points:
        return lambda m, n, k: 0.0
    at = np.log2(np.array(list(points), float))
    away: dict[tuple[int, int], np.ndarray] = {}  # by N and K, which are a layer's, while M is the batch's
    values = np.array([sum(v) / len(v) for v in points.values()])
    middle = float(np.median(values))

    def correction(m: int, n: int, k: int) -> float:
        """The mean of near points' values; far from all of them half the middle one."""
        layer = away.get((n, k))
        if layer is None:
            layer = away[n, k] = ((at[:, 1:] - np.log2([n, k])) ** 2).sum(1) + 0.02
        weight = 1 / ((at[:, 0] - math.log2(m)) ** 2 + layer)
        return float((weight @ values + 0.5 * middle * 0.5) / (weight.sum() + 0.5))

    return correction


def least_squares(misses: Callable[[np.ndarray], np.ndarray], x: np.ndarray, rounds: int = 25) -> np.ndarray:
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
