"""Shared random inputs and error measures.

Each file cases_<package>.py defines the expected results of a package of src/weft once for all backends; each function
runs on one rank.
"""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import replace
from typing import Any, TypeVar

import torch

import weft
from weft.plans import Plan

P = TypeVar("P", bound=Plan)


def changed(plan: P, **changes: Any) -> P:
    """Return the plan with different values for its fields or its tile's fields."""
    tile: Any = plan.tile  # type: ignore[attr-defined]
    in_tile = {name: changes.pop(name) for name in list(changes) if hasattr(tile, name)}
    return replace(plan, tile=replace(tile, **in_tile), **changes)


def draw(seed: int, *shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    """Return the same values on every rank and device."""
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def distance(actual: torch.Tensor, expected: torch.Tensor) -> float:
    """Return the relative Frobenius error; NaN counts as infinite."""
    if actual.shape != expected.shape:
        raise AssertionError(f"shape {list(actual.shape)}, expected {list(expected.shape)}")
    if expected.numel() == 0:
        return 0.0
    actual = actual.to(expected.device).to(expected.dtype)
    error = ((actual - expected).norm() / expected.norm().clamp_min(1e-30)).item()
    return error if error == error else float("inf")


def wide(t: torch.Tensor, world: weft.World) -> torch.Tensor:
    """Return float64 for small references, and float32 on the GPU for large ones."""
    return t.double() if t.numel() < 1 << 20 else t.to(world.device).float()


def product(x: torch.Tensor, w: torch.Tensor, world: weft.World) -> torch.Tensor:
    """Return x @ w.T in float64 or float32."""
    x = wide(x, world)
    return x @ wide(w, world).to(x).t()


def strided(t: torch.Tensor) -> torch.Tensor:
    """Return a non-contiguous tensor with the same values."""
    return t.t().contiguous().t() if t.dim() == 2 else t


def on_stream(world: weft.World, name: str) -> Any:
    """Make stream `name` the current stream of `world`, as `torch.cuda.stream` does."""
    return world.on(world.side_stream(name)) if name else nullcontext()
