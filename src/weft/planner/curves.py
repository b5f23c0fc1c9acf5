"""Interpolation between measured numbers, and least squares."""

from __future__ import annotations

import bisect
import math
from collections.abc import Callable, Sequence

import numpy as np


class Smooth:
    """A smooth function through scattered points, by local linear regression: each value comes from a linear fit that
    gives near points the largest weights. The function passes (almost) through the points, never leaves the range of
    their values, and is constant beyond the outermost points. SLOPE is the penalty for a slope."""

    SLOPE = 0.05

    def __init__(self, points: Sequence[Sequence[float]], values: Sequence[float]) -> None:
        self.points, self.values = np.asarray(points, float), np.asarray(values, float)
        self.ridge = np.diag([0.0] + [self.SLOPE] * self.points.shape[1])
        self.lowest, self.highest = self.points.min(0), self.points.max(0)
        self.least, self.largest = float(self.values.min()), float(self.values.max())

    def __call__(self, *point: float) -> float:
        away = self.points - np.clip(point, self.lowest, self.highest)
        weight = ((away * away).sum(1) + 0.04) ** -1.5
        a = np.column_stack([np.ones(len(away)), away])
        left = (a.T * weight) @ a + self.ridge * weight.sum()
        value = float(np.linalg.solve(left, (a.T * weight) @ self.values)[0])
        return min(max(value, self.least), self.largest)


class Curve:
    """The time in us as a piecewise linear function of bytes. Below the smallest measured size, the time is constant.
    Above the largest one, the last slope continues, unless that slope is negative, which would be noise."""

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


def near_mean(points: dict[tuple[int, int, int], list[float]]) -> Callable[[int, int, int], float]:
    """Return a correction by shape: the mean of the values at near points (M, N, K), or half the median of all values
    far from all points."""
    if not points:
        return lambda m, n, k: 0.0
    log_sizes = np.log2(np.array(list(points), float))
    squared_distances: dict[tuple[int, int], np.ndarray] = {}  # by (N, K), because a layer has few (N, K) and many M
    values = np.array([sum(v) / len(v) for v in points.values()])
    middle = float(np.median(values))

    def correction(m: int, n: int, k: int) -> float:

        layer_distances = squared_distances.get((n, k))
        if layer_distances is None:
            layer_distances = squared_distances[n, k] = ((log_sizes[:, 1:] - np.log2([n, k])) ** 2).sum(1) + 0.02
        weight = 1 / ((log_sizes[:, 0] - math.log2(m)) ** 2 + layer_distances)
        return float((weight @ values + 0.5 * middle * 0.5) / (weight.sum() + 0.5))

    return correction


def least_squares(residuals: Callable[[np.ndarray], np.ndarray], x: np.ndarray, rounds: int = 25) -> np.ndarray:
    """Minimise by Levenberg-Marquardt, robust to outliers, using finite differences that are wide enough for a function
    with steps (waves)."""
    damping, step_size = 1e-2, 0.03

    def cost(v: np.ndarray) -> float:
        return float((2 * (np.sqrt(1 + (v / 0.05) ** 2) - 1)).sum())

    current = residuals(x)
    for _ in range(rounds):
        j = np.column_stack(
            [(residuals(x + step_size * e) - residuals(x - step_size * e)) / (2 * step_size) for e in np.eye(len(x))]
        )
        w = 1 / np.sqrt(1 + (current / 0.05) ** 2)
        jj, jr = (j.T * w) @ j, (j.T * w) @ current
        for _ in range(6):
            step = np.clip(np.linalg.solve(jj + damping * np.diag(np.diag(jj) + 1e-9), -jr), -0.5, 0.5)
            trial = residuals(x + step)
            if cost(trial) < cost(current):
                break
            damping *= 4
        else:
            return x
        converged = cost(current) - cost(trial) < 1e-5 * cost(current)
        x, current, damping = x + step, trial, damping / 3
        if converged:
            break
    return x
