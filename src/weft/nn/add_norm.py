"""What ends a tensor-parallel sublayer: the sum over ranks of its partial output, residual add, RMSNorm."""

from __future__ import annotations

import torch

from ..kernels.elementwise import add_rms_norm as kernel
from ..lang.mapping import balanced_rows
from ..ops.all_gather_matmul import gather
from ..ops.common import dims, places
from ..plan import Plan
from ..world import World


def all_reduce_rms_norm(
    x: torch.Tensor,
    residual: torch.Tensor,
    weight: torch.Tensor,
    eps: float,
    *,
    world: World,
    plan: str | Plan = "auto",
) -> tuple[torch.Tensor, torch.Tensor]:
    """RMSNorm of all_reduce(x) + residual, and that sum.

    x [M, H], this rank's partial, is overwritten. residual [M, H], the same on every rank, or [m_r, H], this rank's
    `balanced_rows` of M; it is updated in place. On the World's current stream.
    """
    m = x.shape[0]
    rows = balanced_rows(m, world.size)
    mine = rows[world.rank]
    if residual.shape[1:] != x.shape[1:] or residual.shape[0] not in (m, mine):
        raise ValueError(f"residual {dims(residual)} is neither all rows of x {dims(x)} nor this rank's {mine}")
    stream = world.current_stream()
    if world.size > 1:
        world.all_reduce(x, stream)
    if residual.shape[0] == m:
        return add_rms_norm(x, residual, weight, eps, world), residual
    at = sum(rows[: world.rank])
    part = add_rms_norm(x[at : at + mine], residual, weight, eps, world)
    return gather(part, world, rows, stream), residual


def partial_output(world: World, rows: int, hidden: int, dtype: torch.dtype, part: int) -> torch.Tensor:
    """Where the GEMM before `all_reduce_rms_norm` best writes its output [rows, hidden]; `part`: of a woven batch."""
    return world.empty((rows, hidden), dtype)


def keeps_shards(world: World, rows: int, hidden: int, dtype: torch.dtype) -> bool:
    """Whether the residual of so many tokens is best held by rows, each at its owner: not where every rank sums all rows
    itself, as is fastest for small messages."""
    small = 256 << 10 if world.sm_count >= 32 else 1 << 10
    return world.size > 1 and rows >= world.size and rows * hidden * dtype.itemsize > small


def add_rms_norm(
    x: torch.Tensor, residual: torch.Tensor | None, weight: torch.Tensor, eps: float, world: World
) -> torch.Tensor:
    """RMSNorm of x + residual [m, H], which becomes the residual; of x alone where there is none. No communication."""
    out = world.empty(tuple(x.shape), x.dtype)
    rows, cols = x.shape
    if rows == 0:
        return out
    add = residual is not None
    block = 1 << (cols - 1).bit_length()

    def args() -> dict[str, object]:
        return dict(x=x, residual=residual if add else out, weight=weight, out=out, rows=rows, H=cols, eps=eps, ADD=add, BLOCK=block)  # fmt: skip

    key = (kernel.fn.__name__, rows, cols, eps, add, x.dtype, *places(x, residual, weight, out))
    warps = max(2, min(32, block // 512))  # 16 elements a thread: two programs of 16 warps fit on an SM
    programs = min(world.sm_count * (32 // warps), rows)
    world.launch(kernel, programs, args, dict(num_warps=warps), world.current_stream(), key)
    return out
