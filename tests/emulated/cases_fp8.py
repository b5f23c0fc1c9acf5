"""Cases of the ops with 8-bit operands, for every backend: each function runs on one rank and returns its error.

References are float64 GEMMs of the dequantized operands. The operands are already rounded to e4m3, so that all errors
come from summing and from rounding the result.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch

import weft
from tests.emulated.cases import distance, draw
from weft.compute.quantize import LARGEST as LARGEST_OF_E4M3
from weft.lang.mapping import balanced_rows
from weft.scaled_tensor import E4M3

SCALINGS = ("tensor", "row", "block")
LARGEST = LARGEST_OF_E4M3.value


def dequantized(t: torch.Tensor, scale: torch.Tensor, rows: int = 1) -> torch.Tensor:
    """Return the float32 values of t [R, K]. With block scaling, `rows` rows share a scale."""
    if scale.dim() == 2 and scale.shape[1] * 128 == t.shape[1] and scale.shape[0] * rows >= t.shape[0]:
        return weft.ScaledTensor(t, scale, "block").dequantized(rows)
    return weft.ScaledTensor(t, scale, "row" if scale.numel() > 1 else "tensor").dequantized()


def scaled(t: torch.Tensor, scaling: str, rows: int = 1) -> tuple[torch.Tensor, torch.Tensor]:
    """Return t [R, K], of any floating-point dtype, in e4m3, and its scales. `rows` is the number of rows of a
    block."""
    t = t.float()
    r, k = t.shape
    if scaling == "tensor":
        scale = (t.abs().max().clamp_min(1e-12) if t.numel() else torch.ones(())).view(1) / LARGEST
        return (t / scale).clamp(-LARGEST, LARGEST).to(E4M3), scale
    if scaling == "row":
        scale = t.abs().amax(1, keepdim=True).clamp_min(1e-12) / LARGEST
        return (t / scale).clamp(-LARGEST, LARGEST).to(E4M3), scale
    blocks = -(-r // rows)
    padded = torch.nn.functional.pad(t, (0, 0, 0, blocks * rows - r)).view(blocks, rows, k // 128, 128)
    scale = padded.abs().amax((1, 3)).clamp_min(1e-12) / LARGEST
    whole = scale.repeat_interleave(rows, 0)[:r].repeat_interleave(128, 1)
    return (t / whole).clamp(-LARGEST, LARGEST).to(E4M3), scale


def factors(
    seed: int, m: int, n: int, k: int, scaling: str, device: torch.device
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return x, weight and their scales, with rows of very different magnitudes; they are the same on every rank."""
    x = draw(seed, m, k) * torch.exp(draw(seed + 1, m, 1))
    w = draw(seed + 2, n, k) * torch.exp(draw(seed + 3, n, 1)) * 0.1
    (x8, xs), (w8, ws) = scaled(x, scaling), scaled(w, scaling, 128)
    return x8.to(device), w8.to(device), xs.to(device), ws.to(device)


def wanted(x: torch.Tensor, w: torch.Tensor, xs: torch.Tensor, ws: torch.Tensor, scaling: str) -> torch.Tensor:
    """Return the matrix product in float64, or in float32 if the operands are large."""
    rows = 128 if scaling == "block" else 1
    a, b = dequantized(x, xs), dequantized(w, ws, rows)
    return a.double() @ b.double().t() if a.numel() + b.numel() < 1 << 22 else a @ b.t()


def matmul_case(
    world: weft.World, m: int, n: int, k: int, scaling: str, plan: Any = "persistent", bias: bool = False,
    dtype: torch.dtype = torch.bfloat16, fast: bool = False, seed: int = 0, by_columns: bool = False,
) -> float:  # fmt: skip
    """Return the error of weft.matmul. With `by_columns`, x's scales are stored column by column."""
    x, w, xs, ws = factors(seed * 10, m, n, k, scaling, world.device)
    b = draw(seed * 10 + 5, n, dtype=dtype).to(world.device) if bias else None
    operand = weft.ScaledTensor(x, xs.t().contiguous().t() if by_columns else xs, scaling)
    actual = weft.matmul(
        operand, weft.ScaledTensor(w, ws, scaling), b, out_dtype=dtype, use_fast_accum=fast, world=world, plan=plan
    )
    world.synchronize()
    expected = wanted(x, w, xs, ws, scaling)
    assert actual.dtype == dtype
    return distance(actual, expected if b is None else expected + b.to(expected))


def quantize_case(
    world: weft.World, m: int, k: int, scaling: str, *, gated: bool = False, weight: bool = False, by_columns: bool = False,
    with_scale: bool = False, dtype: torch.dtype = torch.bfloat16, seed: int = 0,
) -> float:  # fmt: skip
    """Return the error of the dequantized rows of weft.quantize or silu_mul_quantized; the scales must be right too."""
    x = (draw(seed, m, 2 * k if gated else k) * torch.exp(draw(seed + 1, m, 1))).to(dtype)
    scale = torch.tensor([0.02], device=world.device) if with_scale else None
    if gated:
        actual, scales, recipe = weft.silu_mul_quantized(x.to(world.device), scaling, scale=scale, world=world)
        expected = torch.nn.functional.silu(x[:, :k].float()) * x[:, k:].float()
    else:
        actual, scales, recipe = weft.quantize(
            x.to(world.device), scaling, scale=scale, weight=weight, by_columns=by_columns, world=world
        )
        expected = x.float()
    world.synchronize()
    assert recipe == scaling
    rows = 128 if weight else 1
    (rounded, expected_scales), actual_on_host = scaled(expected, scaling, rows), actual.cpu()
    assert scales.t().is_contiguous() if by_columns else scales.is_contiguous()
    if with_scale:
        expected_scales, rounded = torch.tensor([0.02]), (expected / 0.02).clamp(-LARGEST, LARGEST).to(E4M3)
    assert (
        actual.dtype == E4M3
        and scales.shape == expected_scales.shape
        and distance(scales.cpu(), expected_scales) < 1e-5
    )
    return distance(dequantized(actual_on_host, scales.cpu(), rows), dequantized(rounded, expected_scales, rows))


def all_gather_case(
    world: weft.World, shards: Sequence[int], n: int, k: int, scaling: str, plan: Any = "fused", bias: bool = False,
    dtype: torch.dtype = torch.bfloat16, fast: bool = False, calls: int = 1, seed: int = 0,
) -> float:  # fmt: skip
    """Return the largest error of all_gather_matmul over calls with fresh inputs. Gathered rows and scales must equal
    the rows and scales of the ranks."""
    worst, me, m = 0.0, world.rank, sum(shards)
    for call in range(calls):
        s = (seed * 100 + call) * 10
        x, _, xs, _ = factors(s, m, 8, k, scaling, world.device)
        _, w, _, ws = factors(s + 7 * me, 8, n, k, scaling, world.device)
        b = draw(s + 5 + 7 * me, n, dtype=dtype).to(world.device) if bias else None
        own_rows = slice(sum(shards[:me]), sum(shards[: me + 1]))
        x_shard, x_scale = x[own_rows].clone(), xs if scaling == "tensor" else xs[own_rows].clone()
        actual, (rows, scales, _) = weft.all_gather_matmul_with_gathered(
            weft.ScaledTensor(x_shard, x_scale, scaling), weft.ScaledTensor(w, ws, scaling), b, out_dtype=dtype,
            use_fast_accum=fast, world=world, plan=plan, rows=None if len(set(shards)) == 1 else shards,
        )  # fmt: skip
        world.synchronize()
        expected = wanted(x, w, xs, ws, scaling)
        worst = max(worst, distance(actual, expected if b is None else expected + b.to(expected)))
        same = torch.equal(rows.view(torch.uint8), x.view(torch.uint8))
        assert same and torch.equal(scales, xs), "the gathered rows differ"
    return worst


def reduce_case(
    world: weft.World, m: int, n: int, k: int, scaling: str, plan: Any = "fused", everywhere: bool = False,
    bias: bool = False, dtype: torch.dtype = torch.bfloat16, fast: bool = False, calls: int = 1, seed: int = 0,
    rows: Sequence[int] | None = None,
) -> float:  # fmt: skip
    """Return the largest error over calls of matmul_reduce_scatter (by `rows`, or split as evenly as possible), or
    of matmul_all_reduce."""
    worst, me = 0.0, world.rank
    op: Any = weft.matmul_all_reduce if everywhere else weft.matmul_reduce_scatter
    shards = list(rows or balanced_rows(m, world.size))
    for call in range(calls):
        s = (seed * 100 + call) * 100
        parts = [factors(s + 10 * r, m, n, k, scaling, world.device) for r in range(world.size)]
        b = draw(s + 99, n, dtype=dtype).to(world.device) if bias else None
        x, w, xs, ws = parts[me]
        run = op if rows is None else partial(op, rows=rows)
        operand, weight = weft.ScaledTensor(x, xs, scaling), weft.ScaledTensor(w, ws, scaling)
        actual = run(operand, weight, b, out_dtype=dtype, use_fast_accum=fast, world=world, plan=plan)
        world.synchronize()
        expected = sum(wanted(*part, scaling) for part in parts)
        expected = expected if b is None else expected + b.to(expected)
        worst = max(worst, distance(actual, expected if everywhere else expected.split(shards)[me]))
    return worst


def case(
    world: weft.World, op: str, rows: Sequence[int], n: int, k: int, scaling: str, plan: Any, **options: Any
) -> float:
    """Return the error of one op with `rows` on its ranks; M is their sum."""
    if op == "all_gather_matmul":
        return all_gather_case(world, rows, n, k, scaling, plan, **options)
    everywhere = op == "matmul_all_reduce"
    balanced = everywhere or list(rows) == balanced_rows(sum(rows), world.size)
    named = None if balanced else rows
    return reduce_case(world, sum(rows), n, k, scaling, plan, everywhere, rows=named, **options)
