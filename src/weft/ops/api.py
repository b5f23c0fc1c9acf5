"""The public ops: what a call means, and which way it goes.

Ways:
    no gradient needed    straight to the implementation: a host cost of microseconds
    gradient needed       through autograd.py's Functions
    torch.compile         through the operators that autograd.py registers with torch.library
"""

from __future__ import annotations

import operator
from collections.abc import Sequence
from typing import Literal, overload

import torch

from ..operands import requires_grad
from ..plans import Plan
from ..world import World
from . import activation, autograd
from .all_gather_matmul.op import ALL_GATHER_MATMUL
from .autograd import into, text_of
from .matmul_reduce.op import MATMUL_ALL_REDUCE, MATMUL_REDUCE_SCATTER
from .norm import Remap


@overload
def all_gather_matmul(
    x_shard: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None, *, world: World,
    plan: str | Plan = "auto", out: torch.Tensor | None = None, return_gathered: Literal[False] = False,
    rows: Sequence[int] | None = None,
) -> torch.Tensor: ...  # fmt: skip
@overload
def all_gather_matmul(
    x_shard: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None, *, world: World,
    plan: str | Plan = "auto", out: torch.Tensor | None = None, return_gathered: Literal[True],
    rows: Sequence[int] | None = None,
) -> tuple[torch.Tensor, torch.Tensor]: ...  # fmt: skip
@overload
def all_gather_matmul(
    x_shard: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None, *, world: World,
    plan: str | Plan = "auto", out: torch.Tensor | None = None, return_gathered: bool,
    rows: Sequence[int] | None = None,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]: ...  # fmt: skip
def all_gather_matmul(
    x_shard: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    *,
    world: World,
    plan: str | Plan = "auto",
    out: torch.Tensor | None = None,
    return_gathered: bool = False,
    rows: Sequence[int] | None = None,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """all_gather(x_shard) @ weight.T + bias: the column-parallel half of a layer (TileLink, section 5).

    Every rank holds some rows of the activation and some columns of the layer, and gets all rows of its columns.

    Args:
        x_shard: [m_r, K], this rank's rows. m_r may be 0, and need not be a multiple of anything.
        weight: [N, K], this rank's part, laid out as in `nn.Linear`.
        bias: [N], this rank's part.
        world: the ranks. All of them must make the same call in the same order.
        plan: "auto", a kind ("sequential", "decomposed", "fused", "one_shot") or a Plan; the same on all ranks.
        out: [M, N], contiguous: where to write the result; it may hold an operand. Not differentiable.
        return_gathered: also return the gathered activation, a tensor of its own. It is differentiable, and kept: the
            backward pass then does not gather again.
        rows: rows of every rank's shard, in the order of the ranks, where they are not all equal. None: all ranks have
            as many as this one.

    All tensors are bfloat16 or all float16, on `world.device`, contiguous or not (then they are copied). Sums are
    accumulated in float32.

    Returns:
        [M, N] with M = sum(rows), the shards in the order of the ranks; with `return_gathered` also [M, K].

    Backward: dx_shard is a GEMM + reduce-scatter of dy with the same rows, through a transposed copy of the weight;
    dweight gathers the activation again; dbias sums dy over its rows.

    Memory beside the output, symmetric and shared by all ops of the World: none (sequential), M K / W elements
    (decomposed, and fused with `pullers=0`), 2 M K (fused) or 3 M K elements (one shot, for few rows). All but fused with
    pullers also take [M, K] of ordinary memory during the call.

    Raises:
        ValueError, TypeError: shapes, dtypes or devices that do not fit, quoted.
        Mismatch: ranks disagree on shapes, dtype or plan, or make different calls.
        Timeout: a peer did not arrive; see the guide.
        WeftError: the first call of a shape inside a CUDA graph capture.
    """
    if torch.compiler.is_compiling():
        return _compiled_all_gather_matmul(x_shard, weight, bias, world, plan, out, return_gathered, rows)
    rows = _plain_rows("all_gather_matmul", rows)
    if torch.is_grad_enabled() and requires_grad(x_shard, weight, bias):
        _no_out("all_gather_matmul", out)
        y, full = autograd.all_gather_matmul_with_grad(x_shard, weight, bias, world, plan, return_gathered, rows, 0)
        return (y, full) if return_gathered else y
    y, full = ALL_GATHER_MATMUL(world, plan, (x_shard, weight, bias), (rows, 0, return_gathered), out)
    if full is None:
        return y
    return y, full.clone() if world.size == 1 else full  # one rank: it is x_shard itself


def _compiled_all_gather_matmul(x_shard, weight, bias, world, plan, out, return_gathered, rows):
    _no_grad_out("all_gather_matmul", out, x_shard, weight, bias)
    text = text_of(plan)
    y, full = torch.ops.weft.all_gather_matmul(x_shard, weight, bias, world.name, text, return_gathered, rows, 0)
    y = into("all_gather_matmul", out, y)
    return (y, full) if return_gathered else y


def all_gather_swiglu(
    x_shard: torch.Tensor,
    weight: torch.Tensor,
    columns: int,
    world: World,
    plan: str | Plan,
    rows: Sequence[int] | None,
) -> torch.Tensor:
    """silu(x @ gate.T) * (x @ up.T) [M, columns] for x = all_gather(x_shard), in one launch where the plan is fused.

    weight [S, K] alternates blocks of `world.scale.interleave` rows of gate and of up, the last two padded with zeros. No
    gradient: use all_gather_matmul and silu_mul.
    """
    if torch.compiler.is_compiling():
        text = text_of(plan)
        return torch.ops.weft.all_gather_matmul(x_shard, weight, None, world.name, text, False, rows, columns)[0]
    return ALL_GATHER_MATMUL(
        world, plan, (x_shard, weight, None), (_plain_rows("all_gather_matmul", rows), columns, False)
    )[0]


@overload
def matmul_reduce_scatter(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None, *, world: World,
    plan: str | Plan = "auto", out: torch.Tensor | None = None, rows: Sequence[int] | None = None,
    reorder: Literal[True] = True,
) -> torch.Tensor: ...  # fmt: skip
@overload
def matmul_reduce_scatter(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None, *, world: World,
    plan: str | Plan = "auto", out: None = None, rows: Sequence[int] | None = None, reorder: Literal[False],
) -> tuple[torch.Tensor, Remap | None]: ...  # fmt: skip
@overload
def matmul_reduce_scatter(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None, *, world: World,
    plan: str | Plan = "auto", out: None = None, rows: Sequence[int] | None = None, reorder: bool,
) -> torch.Tensor | tuple[torch.Tensor, Remap | None]: ...  # fmt: skip
def matmul_reduce_scatter(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    *,
    world: World,
    plan: str | Plan = "auto",
    out: torch.Tensor | None = None,
    rows: Sequence[int] | None = None,
    reorder: bool = True,
) -> torch.Tensor | tuple[torch.Tensor, Remap | None]:
    """This rank's rows of the sum over ranks of x @ weight.T, + bias: the row-parallel half of a layer (TileLink,
    section 5).

    Every rank holds all rows of some columns of the activation, and gets some rows of the whole output.

    Args:
        x: [M, K], this rank's columns of the activation. M may be 0, and need not be a multiple of anything.
        weight: [N, K], this rank's part, laid out as in `nn.Linear`.
        bias: [N], the same on all ranks. It is added once, to the sum.
        world: the ranks. All of them must make the same call in the same order.
        plan: "auto", a kind ("sequential", "decomposed", "fused", "signaled", "one_shot") or a Plan; the same on all ranks.
        out: [m_r, N], contiguous: where to write the result; it may hold an operand. Not differentiable.
        rows: rows that every rank gets, in the order of the ranks. None: M is split as evenly as possible, longer
            shards first (`weft.lang.balanced_rows`).
        reorder: False: leave the result as the plan's communication leaves it and return it with a `weft.Remap`, for
            `weft.rms_norm` or `weft.residual_add`; the Remap is None for rows in ordinary order (all plans but "signaled").
            Without gradient, `out` and torch.compile.

    Dtypes, devices, layouts and errors are those of `all_gather_matmul`. Sums over ranks are accumulated in float32, in
    the order of the ranks ("sequential", and "signaled" without `copies`: as NCCL does it).

    Returns:
        [m_r, N], with m_r = rows[world.rank].

    Backward: dx is an all-gather + GEMM of dy, through a transposed copy of the weight; dweight uses the dy that this
    gathered. dbias is the sum of dy over all rows of all ranks, so every rank gets the same, and the copies of the bias
    stay equal.

    Memory beside the output, symmetric and shared by all ops of the World: none (sequential), M N elements (decomposed)
    or 2 M N elements, rows rounded up to whole tiles (fused), or 3 M N, of the longest shard W times (one shot, for few
    rows). All of these but fused also take [M, N] of ordinary memory during the call; signaled takes M N (1 + 1 / W), rows
    rounded up to whole tiles a shard, and no symmetric memory, or, moved by copies, as decomposed.
    """
    if not reorder:
        _plain("matmul_reduce_scatter", out, x, weight, bias)
        return MATMUL_REDUCE_SCATTER(
            world, plan, (x, weight, bias), (_plain_rows("matmul_reduce_scatter", rows), False)
        )
    if torch.compiler.is_compiling():
        _no_grad_out("matmul_reduce_scatter", out, x, weight, bias)
        y = torch.ops.weft.matmul_reduce_scatter(x, weight, bias, world.name, text_of(plan), rows)
        return into("matmul_reduce_scatter", out, y)
    rows = _plain_rows("matmul_reduce_scatter", rows)
    if torch.is_grad_enabled() and requires_grad(x, weight, bias):
        _no_out("matmul_reduce_scatter", out)
        return autograd.matmul_reduce_scatter_with_grad(x, weight, bias, world, plan, rows)
    return MATMUL_REDUCE_SCATTER(world, plan, (x, weight, bias), (rows, True), out)


@overload
def matmul_all_reduce(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None, *, world: World,
    plan: str | Plan = "auto", out: torch.Tensor | None = None, reorder: Literal[True] = True,
) -> torch.Tensor: ...  # fmt: skip
@overload
def matmul_all_reduce(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None, *, world: World,
    plan: str | Plan = "auto", out: None = None, reorder: Literal[False],
) -> tuple[torch.Tensor, Remap | None]: ...  # fmt: skip
@overload
def matmul_all_reduce(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None, *, world: World,
    plan: str | Plan = "auto", out: None = None, reorder: bool,
) -> torch.Tensor | tuple[torch.Tensor, Remap | None]: ...  # fmt: skip
def matmul_all_reduce(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    *,
    world: World,
    plan: str | Plan = "auto",
    out: torch.Tensor | None = None,
    reorder: bool = True,
) -> torch.Tensor | tuple[torch.Tensor, Remap | None]:
    """The sum over ranks of x @ weight.T, + bias, on every rank: a row-parallel layer without sequence parallelism
    (TileLink, section 5).

    Args, dtypes and errors are those of `matmul_reduce_scatter`: x [M, K], weight [N, K], bias [N] the same on all
    ranks, out [M, N]. plan may also be "two_shot" (of few rows better TwoShot(post=True)).

    Returns:
        [M, N], the same bits on every rank.

    Backward communicates nothing: dx = dy @ weight, dweight = dy.T @ x, dbias sums dy. So every rank must compute the
    same loss from the output, which counts once; a dy that differs by rank must be summed over ranks before.

    Memory beside the output, symmetric and shared by all ops of the World: none (sequential, decomposed) or 2 M N
    elements, rows rounded up to whole tiles (fused); none with signaled, where N is a multiple of 8 (else M N elements of
    ordinary memory during the call, rounded up to whole tiles); moved by copies M N (1 + 1 / W), M rounded up a little. One
    shot and two shots: M N of ordinary memory, and what `weft.all_reduce` takes.
    """
    if not reorder:
        _plain("matmul_all_reduce", out, x, weight, bias)
        return MATMUL_ALL_REDUCE(world, plan, (x, weight, bias), (False,))
    if torch.compiler.is_compiling():
        _no_grad_out("matmul_all_reduce", out, x, weight, bias)
        y = torch.ops.weft.matmul_all_reduce(x, weight, bias, world.name, text_of(plan))
        return into("matmul_all_reduce", out, y)
    if torch.is_grad_enabled() and requires_grad(x, weight, bias):
        _no_out("matmul_all_reduce", out)
        return autograd.matmul_all_reduce_with_grad(x, weight, bias, world, plan)
    return MATMUL_ALL_REDUCE(world, plan, (x, weight, bias), (True,), out)


def silu_mul(x: torch.Tensor, *, world: World) -> torch.Tensor:
    """silu(gate) * up [M, I] for x [M, 2 I], whose columns are gate, then up: the activation of a Llama MLP.

    Computed in float32, in one launch; differentiable, also in one launch. x is bfloat16 or float16 on `world.device`.
    Raises ValueError or TypeError for anything else. No rank waits for another.
    """
    if not isinstance(x, torch.Tensor):
        raise TypeError(f"silu_mul: x must be a tensor, got {type(x).__name__}")
    if x.dim() != 2 or x.shape[1] % 2:
        raise ValueError(f"silu_mul: x must be [M, 2I], gate then up, got {list(x.shape)}")
    return silu_mul_blocks(x, x.shape[1] // 2, x.shape[1] // 2, world)


def silu_mul_blocks(x: torch.Tensor, columns: int, block: int, world: World) -> torch.Tensor:
    """`silu_mul` [M, columns] of x [M, S] that alternates `block` gate and `block` up columns, the last two padded."""
    if torch.compiler.is_compiling():
        return torch.ops.weft.silu_mul(x, world.name, columns, block)
    if torch.is_grad_enabled() and x.requires_grad:
        return autograd.silu_mul_with_grad(x, world, columns, block)
    return activation.forward(x, world, columns, block)


def _plain_rows(op: str, rows: Sequence[int] | None) -> tuple[int, ...] | None:
    """The caller's list or tensor as it is now: the backward pass reads it again, and decisions are kept by it."""
    try:
        return None if rows is None else tuple(operator.index(r) for r in rows)
    except TypeError:
        raise TypeError(f"{op}: rows must be integers, one for each rank, got {rows!r}") from None


def _no_out(op: str, out: torch.Tensor | None) -> None:
    if out is not None:
        raise ValueError(f"{op}: out= has no gradient, and an operand requires one; omit it, or use torch.no_grad()")


def _no_grad_out(
    op: str, out: torch.Tensor | None, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None
) -> None:
    if out is not None and torch.is_grad_enabled() and requires_grad(x, weight, bias):
        _no_out(op, out)


def _plain(op: str, out: torch.Tensor | None, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> None:
    if out is not None or torch.compiler.is_compiling() or (torch.is_grad_enabled() and requires_grad(x, weight, bias)):
        raise ValueError(
            f"{op}: reorder=False takes no out=, has no gradient (use torch.no_grad()) and is not compiled"
        )
