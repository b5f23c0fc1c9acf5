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
    full_residual: bool = False,
    out: torch.Tensor | None = None,
    world: World,
    plan: str | Plan = "auto",
) -> tuple[torch.Tensor, torch.Tensor]:
    """RMSNorm of all_reduce(x) + residual [M, H], and that sum.

    x [M, H], this rank's partial, is overwritten. residual [m_r, H], this rank's `balanced_rows` of M, or, with
    full_residual, [M, H], the same on every rank; updated in place. On the World's current stream.
    """
    rows = balanced_rows(x.shape[0], world.size)
    mine, at = rows[world.rank], sum(rows[: world.rank])
    want = x.shape[0] if full_residual else mine
    if residual.shape != (want, x.shape[1]):
        raise ValueError(f"residual {dims(residual)} must have {want} rows, with full_residual={full_residual}, for x {dims(x)}")  # fmt: skip
    stream = world.current_stream()
    if world.size > 1:
        world.all_reduce(x, stream)
    if full_residual:
        y = add_rms_norm(x, residual, weight, eps, world)
    else:
        y = gather(add_rms_norm(x[at : at + mine], residual, weight, eps, world), world, rows, stream)
    if out is None:
        return y, residual
    world.copy(out, y, stream)
    return out, residual


def normed_output(world: World, rows: int, hidden: int, dtype: torch.dtype, part: int) -> torch.Tensor | None:
    """`out` for `all_reduce_rms_norm`; None: memory of its own. `part`: of a woven batch."""
    return None


def partial_output(world: World, rows: int, hidden: int, dtype: torch.dtype, part: int) -> torch.Tensor:
    """Where the GEMM before `all_reduce_rms_norm` best writes its output [rows, hidden]."""
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
