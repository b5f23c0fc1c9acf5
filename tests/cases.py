"""What the ops must compute, written once for every backend: each function runs on one rank and returns its error."""

from __future__ import annotations

from collections.abc import Sequence

import torch

import weft
from weft.lang.mapping import balanced_rows


def draw(seed: int, *shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    """The same values on every rank and device."""
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def distance(got: torch.Tensor, want: torch.Tensor) -> float:
    """Relative Frobenius error; NaN counts as infinite."""
    got, want = got.double().cpu(), want.double().cpu()
    if got.shape != want.shape:
        raise AssertionError(f"shape {list(got.shape)}, expected {list(want.shape)}")
    if want.numel() == 0:
        return 0.0
    error = ((got - want).norm() / want.norm().clamp_min(1e-30)).item()
    return error if error == error else float("inf")


def wide(t: torch.Tensor, world: weft.World) -> torch.Tensor:
    """float64 for small references, float32 on the GPU for large ones."""
    return t.double() if t.numel() < 1 << 20 else t.to(world.device).float()


def all_gather_case(
    world: weft.World, shards: Sequence[int], n: int, k: int, plan: object = "fused", bias: bool = False,
    dtype: torch.dtype = torch.bfloat16, seed: int = 0, calls: int = 1,
) -> float:  # fmt: skip
    """Largest error over `calls` calls with fresh inputs, the gathered activation included."""
    worst = 0.0
    for call in range(calls):
        s = seed * 1000 + call * 10
        parts = [draw(s + 100000 * (r + 1), rows, k, dtype=dtype) for r, rows in enumerate(shards)]
        w = draw(s + 1 + 7 * world.rank, n, k, dtype=dtype) * 0.1
        b = draw(s + 2, n, dtype=dtype) if bias else None
        device = world.device
        got, gathered = weft.all_gather_matmul(
            parts[world.rank].to(device), w.to(device), None if b is None else b.to(device), world=world, plan=plan,
            return_gathered=True, rows=None if len(set(shards)) == 1 else shards,
        )  # fmt: skip
        world.synchronize()
        full = torch.cat(parts)
        want = wide(full, world) @ wide(w, world).to(wide(full, world)).t()
        if b is not None:
            want = want + b.to(want)
        worst = max(worst, distance(got, want), distance(gathered, full))
    return worst


def reduce_case(
    world: weft.World, m: int, n: int, k: int, plan: object = "fused", bias: bool = False, everywhere: bool = False,
    dtype: torch.dtype = torch.bfloat16, seed: int = 0, calls: int = 1,
) -> float:  # fmt: skip
    """Largest error over `calls` calls of GEMM + reduce-scatter, or + all-reduce."""
    worst = 0.0
    op = weft.matmul_all_reduce if everywhere else weft.matmul_reduce_scatter
    for call in range(calls):
        s = seed * 1000 + call * 10
        xs = [draw(s + 100000 * (r + 1), m, k, dtype=dtype) for r in range(world.size)]
        ws = [draw(s + 200000 * (r + 1), n, k, dtype=dtype) * 0.1 for r in range(world.size)]
        b = draw(s + 2, n, dtype=dtype) if bias else None
        me, device = world.rank, world.device
        got = op(xs[me].to(device), ws[me].to(device), None if b is None else b.to(device), world=world, plan=plan)
        world.synchronize()
        first = wide(xs[0], world)
        want = sum(wide(x, world) @ wide(w, world).to(first).t() for x, w in zip(xs, ws, strict=True))
        if b is not None:
            want = want + b.to(want)
        if not everywhere:
            rows = balanced_rows(m, world.size)
            want = want[sum(rows[:me]) : sum(rows[: me + 1])]
        worst = max(worst, distance(got, want))
    return worst
