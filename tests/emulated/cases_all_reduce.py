"""The cases of the all-reduce ops, written once for every backend: each function runs on one rank and returns its
error.
"""

from __future__ import annotations

import random
from dataclasses import replace
from typing import Any

import torch

import weft
from tests.emulated.cases import distance, draw, strided
from weft.lang.mapping import balanced_rows
from weft.plans import Decomposed, Multicast, OneShot, Plan, TwoShotCounted, TwoShotLowLatency, TwoShotPull, TwoShotPush

FP8 = torch.float8_e4m3fn
SCALE = 0.05


def reference(
    h: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, norm: str, eps: float, out_dtype: torch.dtype
) -> torch.Tensor:
    y = h - h.mean(1, keepdim=True) if norm == "layer" else h
    y = y * torch.rsqrt((y * y).mean(1, keepdim=True) + eps) * weight.to(h)
    if bias is not None:
        y = y + bias.to(h)
    if out_dtype == FP8:
        y = (y / SCALE).clamp(-448, 448).float().to(FP8).to(h.dtype)
    return y


def requantized(
    expected: torch.Tensor, actual: torch.Tensor, scales: torch.Tensor, recipe: str | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the quantized rows, and the rows after dequantization."""
    group = expected.shape[1] if recipe == "row" else 128
    parts = expected.float().view(len(expected), -1, group)
    scale = parts.abs().amax(2, keepdim=True).clamp_min(1e-12) / 448
    assert scales.shape == scale.shape[:2] and actual.dtype == FP8 and distance(scales, scale[:, :, 0]) < 1e-2
    rounded = (parts / scale).to(FP8).float() * scale
    return rounded.view(expected.shape), (actual.float().view(parts.shape) * scales[:, :, None]).view(expected.shape)


def norm_case(
    world: weft.World, m: int, h: int, plan: str | Plan = "two_shot", *, norm: str = "rms", bias: bool = False,
    residual: bool = True, full: bool = False, dtype: torch.dtype = torch.bfloat16, weights: torch.dtype | None = None,
    out_dtype: torch.dtype | None = None, calls: int = 2, seed: int = 0, into: str = "", symmetric: bool = False,
    views: bool = False, quantize: str | None = None,
) -> float:  # fmt: skip
    """Return the largest error of the results and new residuals over `calls` calls with fresh inputs. With `quantize`,
    a recipe, the function returns the error of the dequantized rows. `into` is "" (a fresh output), "plain" or
    "symmetric" memory. With `symmetric`, x is in symmetric memory; with `views`, it is not contiguous."""
    worst, device, eps = 0.0, world.device, 1e-5
    rows = balanced_rows(m, world.size)
    lo = sum(rows[: world.rank])
    own_rows = slice(0, m) if full else slice(lo, lo + rows[world.rank])
    to = FP8 if quantize else out_dtype or dtype
    scale = torch.tensor([SCALE], device=device) if quantize == "tensor" else None
    out = place = None
    if into == "symmetric":
        out = world.symmetric((m, h), to, "out").local
    elif into:
        out = world.zeros((m, h), to)
    if symmetric:
        place = world.symmetric((m, h), dtype, "x").local
    for call in range(calls):
        s = seed * 1000 + call * 100
        xs = [draw(s + r, m, h, dtype=dtype) for r in range(world.size)]
        old = draw(s + 50, m, h, dtype=dtype) if residual else None
        weight = draw(s + 51, h, dtype=weights or dtype).to(device)
        shift = draw(s + 52, h, dtype=weights or dtype).to(device) if bias else None
        x, old_rows = xs[world.rank].to(device), None if old is None else old[own_rows].to(device)
        if views:
            x, old_rows = strided(x), None if old_rows is None else strided(old_rows)
        if place is not None:
            x = place.copy_(x)
        options = dict[str, Any](bias=shift, norm=norm, full_residual=full, out=out, world=world, plan=plan)
        scales = None
        if quantize:
            (y, scales, _), new = weft.all_reduce_rms_norm_quantized(
                x, old_rows, weight, quantize, eps, scale=scale, **options
            )
        else:
            y, new = weft.all_reduce_rms_norm(x, old_rows, weight, eps, out_dtype=out_dtype, **options)
        world.synchronize()
        by_group = quantize in ("row", "block")
        assert out is None or y is out
        wide = torch.float64 if m * h < 1 << 20 else torch.float32
        total = sum(part.to(wide) for part in xs)
        if old is not None:
            total = total + old.to(wide)
        expected = reference(
            total, weight.cpu(), None if shift is None else shift.cpu(), norm, eps, dtype if by_group else to
        )
        if scales is not None and by_group:
            expected, y = requantized(expected, y.cpu(), scales.cpu(), quantize)
        worst = max(worst, distance(new.cpu(), total[own_rows]), distance(y.cpu().to(wide), expected))
        if place is not None or into == "symmetric":
            world.exchange(None)  # the host writes to this memory next
    return worst


def sum_case(
    world: weft.World, shape: tuple[int, ...], plan: str | Plan = "two_shot", *, dtype: torch.dtype = torch.bfloat16,
    calls: int = 2, seed: int = 0, into: bool = False, views: bool = False,
) -> float:  # fmt: skip
    """Return the largest error of all_reduce over `calls` calls with fresh inputs."""
    worst = 0.0
    for call in range(calls):
        s = seed * 1000 + call * 100
        xs = [draw(s + r, *shape, dtype=dtype) for r in range(world.size)]
        x = xs[world.rank].to(world.device)
        out = world.zeros(shape, dtype) if into else None
        y = weft.all_reduce(strided(x) if views else x, world=world, plan=plan, out=out)
        world.synchronize()
        assert out is None or y is out
        worst = max(worst, distance(y.cpu(), sum(part.double() for part in xs)))
    return worst


def random_case(world: weft.World, plan: Plan, rng: random.Random, most: int, width: int) -> float:
    """Make a call with arguments drawn from `rng`, the same on every rank, for up to `most` rows of up to `width`
    elements. Return the error divided by the bound of the output's dtype; a correct result gives at most 1."""
    dtype = rng.choice([torch.bfloat16, torch.float16, torch.float32])
    m, h = rng.randrange(1, most), 8 * rng.randrange(1, width // 8 + 1)
    if rng.random() < 0.5:
        h = -(-h // 64) * 64  # a multiple of 64 columns, as bulk copies need
    if isinstance(plan, TwoShotCounted):
        plan = replace(plan, stages=rng.choice([2, 9]))
    seed = rng.randrange(1000)
    if rng.random() < 0.25:
        return sum_case(world, (m, h), plan, dtype=dtype, seed=seed, views=rng.random() < 0.3) / bound(dtype)
    options: dict[str, Any] = dict(
        norm=rng.choice(["rms", "layer"]), bias=rng.random() < 0.5, residual=rng.random() < 0.8, full=rng.random() < 0.4,
        weights=rng.choice([None, torch.float32]), quantize=rng.choice([None, None, "tensor"]), into=rng.choice(["", "plain", "symmetric"]),
        symmetric=rng.random() < 0.3, views=rng.random() < 0.2, seed=seed,
    )  # fmt: skip
    if options["quantize"] and rng.random() < 0.7:
        options["quantize"] = "row" if h % 128 or rng.random() < 0.5 else "block"
    return norm_case(world, m, h, plan, dtype=dtype, **options) / bound(FP8 if options["quantize"] else dtype)


def bound(dtype: torch.dtype) -> float:
    """Return the relative error that rounding of the sum, the residual and the output can cause; with float8, two
    roundings may differ."""
    return {torch.float32: 1e-5, torch.float16: 1e-3, torch.bfloat16: 5e-3, FP8: 2e-2}[dtype]


PLANS: dict[str, Plan] = {
    "decomposed": Decomposed(),
    "multicast": Multicast(programs=3, warps=4),
    "one shot": OneShot(programs=3, warps=4),
    "two shots": TwoShotPush(programs=3, warps=4, stages=4),
    "two shots, posted": TwoShotLowLatency(programs=3, warps=4),
    "two shots, spread": TwoShotPush(programs=3, warps=4, spread=True),
    "two shots, pulled": TwoShotPull(programs=3, warps=4),
    "two shots, a source at a time": TwoShotPush(programs=3, warps=4, stages=2),  # as for wide rows of many ranks
    "two shots, pulled a source at a time": TwoShotPull(programs=3, warps=4, stages=2),
}
