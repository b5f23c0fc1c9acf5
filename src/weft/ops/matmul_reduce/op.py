"""The sum of x @ weight.T over ranks: the row-parallel half of a tensor-parallel layer. The sum is scattered by rows or
complete on every rank."""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar, Never

import torch

from ...op import REGISTRY, registered
from ...plans import (
    Decomposed,
    Fused,
    FusedAllReduce,
    FusedReduceScatter,
    OneShot,
    Plan,
    Sequential,
    Signaled,
    TwoLevel,
    TwoShotLowLatency,
    is_low_latency,
)
from ...prepared import unprepared
from ...scaled_tensor import ScaledTensor
from ...tensor_checks import requires_grad
from ...torch_library import Backward, CallOptions, column_sums, product
from ...transport.collectives import gather_in_backward
from ...world import World
from ..common import MatmulOp, check_16_byte_rows, check_rows, plain_rows, split_rows
from ..norm import Remap
from ..recipes import (
    PRODUCT_OPTIONS,
    SCALED_FACTORS,
    UNSCALED,
    ProductOptions,
    ScaledFactors,
    check_product,
    scaled_factors,
)
from ..removed import unexpected
from .call import GEMM_ALL_REDUCE, GEMM_REDUCE_SCATTER, ReduceCall
from .cost import ALL_REDUCE_COSTS, SCATTER_COSTS
from .runs import prepare_at_once, prepare_fused, prepare_reduced
from .signaled import prepare_signaled
from .two_level import run_reduce_all, run_scatter


class MatmulReduce(MatmulOp[ReduceCall]):
    """The base class of the ops GEMM + reduce-scatter and GEMM + all-reduce."""

    operand_type = ScaledFactors

    everywhere: ClassVar[bool]  # true for all-reduce, false for reduce-scatter
    transposes = Sequential, Decomposed, Fused, OneShot, TwoShotLowLatency, TwoLevel

    def saved_tensors(
        self,
        operands: ScaledFactors,
        results: Sequence[torch.Tensor | None],
        options: CallOptions,
        needs: Sequence[bool],
    ) -> Sequence[torch.Tensor | None]:
        x, weight, *_ = operands
        return x if needs[1] else None, weight if needs[0] else None

    def outputs(self, world: World, call: ReduceCall) -> list[tuple[tuple[int, ...], torch.dtype]]:
        rows = call.rows if self.everywhere else call.shards[world.rank]
        return [((rows, call.n), call.dtype)]

    def batch_invariance_unsupported(self, world: World, call: ReduceCall, plan: Plan) -> str | None:
        if call.bias and world.size > 1 and is_low_latency(plan):
            return "it adds the bias to a sum that is rounded already, other plans before they round it"
        return super().batch_invariance_unsupported(world, call, plan)

    def check(self, world: World, operands: ScaledFactors, options: CallOptions) -> ReduceCall:
        (x, weight, bias, *_), (rows, reorder, *rest) = operands, (None, *options) if self.everywhere else options
        scaling, dtype = check_product(self.name, world, operands, ProductOptions(*rest))
        (n, k), m = weight.shape, x.shape[0]
        shards = split_rows(world, m) if rows is None else check_rows(self.name, world, rows, x, whole=True)
        return ReduceCall(shards, n, k, dtype, bias is not None, m, self.everywhere, reorder, scaling=scaling)


class MatmulReduceScatter(MatmulReduce):
    """The op matmul_reduce_scatter. The options are the number of rows that each rank receives, or None for
    `balanced_rows`; reorder; and the fields of `ProductOptions`."""

    name, collective = GEMM_REDUCE_SCATTER, "reduce_scatter"
    costs = SCATTER_COSTS
    signature = f"{SCALED_FACTORS}, SymInt[]? rows, bool reorder, {PRODUCT_OPTIONS}"
    everywhere = False
    # In 76 shapes and modes on 2 to 8 H200s, 4 or 2 forward programs were at most 1.3% faster than 16 (2026-11).
    variants = (FusedReduceScatter(), FusedReduceScatter(pull_programs=64))
    runs = {
        Sequential: prepare_at_once,
        Decomposed: prepare_reduced,
        FusedReduceScatter: prepare_fused,
        OneShot: prepare_at_once,
        Signaled: prepare_signaled,
        TwoLevel: unprepared(run_scatter),
    }
    over_nodes = (TwoLevel(), TwoLevel(2))
    batch_invariant_plans = FusedReduceScatter, Decomposed, OneShot
    emulator_plan = FusedReduceScatter

    def backward(self, world: World, ctx: Backward) -> Sequence[torch.Tensor | None]:
        """Return dx, dweight and dbias. An all-gather + GEMM of dy computes dx; dweight uses the gathered dy."""
        (x, weight), (dy,), (rows, *_), needs = ctx.saved, ctx.gradients, ctx.options, ctx.needs
        assert dy is not None
        shards = split_rows(world, ctx.shapes[0][0]) if rows is None else rows
        dx = full = None
        if needs[0]:
            assert weight is not None
            options = shards, 0, needs[1] or needs[2], *UNSCALED
            dx, full, _ = REGISTRY["all_gather_matmul"](world, "auto", ScaledFactors(dy, weight.t()), options)
        elif needs[1] or needs[2]:
            full = gather_in_backward(world, dy, shards)
        dw = product(world, full.t(), x) if needs[1] and x is not None and full is not None else None
        return dx, dw, column_sums(world, full) if needs[2] and full is not None else None, None, None

    def unsupported(self, world: World, call: ReduceCall, plan: Plan, asked: str | Plan) -> str | None:
        reason = super().unsupported(world, call, plan, asked)
        if reason is None and isinstance(plan, Signaled) and plan.copies:
            reason = check_16_byte_rows(N=call.n)
            if reason is None and not (call.even and self.movable(plan, call.rows, world.size)):
                reason = f"shards {list(call.shards)} must be equal, and whole tiles of {plan.tile.block_m} rows"
        return reason

    def movable(self, plan: Plan, m: int, world: int) -> bool:
        """Return whether copy engines can move the plan's groups. For this the shards must be equal and consist of
        whole tiles."""
        return not isinstance(plan, Signaled) or not plan.copies or m % (world * plan.tile.block_m) == 0


class MatmulAllReduce(MatmulReduce):
    """The op matmul_all_reduce. The options are reorder and the fields of `ProductOptions`."""

    name, collective = GEMM_ALL_REDUCE, "all_reduce"
    costs = ALL_REDUCE_COSTS
    signature = f"{SCALED_FACTORS}, bool reorder, {PRODUCT_OPTIONS}"
    everywhere = True
    # In 76 shapes and modes on 2 to 8 H200s, 4 forward programs were at most 2.1% faster than 16 (2026-11).
    variants = (FusedAllReduce(),)
    runs = {
        Sequential: prepare_at_once,
        Decomposed: prepare_reduced,
        FusedAllReduce: prepare_fused,
        OneShot: prepare_at_once,
        TwoShotLowLatency: prepare_at_once,
        Signaled: prepare_signaled,
        TwoLevel: unprepared(run_reduce_all),
    }
    over_nodes = (TwoLevel(2), TwoLevel(4))
    # Signaled plans with copy engines were at least 1.3% slower than the fastest plan in 52 calls on 2 and 4 H200s
    # (2026-11).
    unsupported_fields = {Decomposed: ("pieces",), Signaled: ("copies",)}
    batch_invariant_plans = FusedAllReduce, TwoShotLowLatency, OneShot
    emulator_plan = FusedAllReduce

    def default(self, world: World, kind: type[Plan]) -> Plan:
        """Return the default plan of this class. TwoLevel has two pieces, because with a single piece nothing would
        overlap."""
        return TwoLevel(2) if kind is TwoLevel else super().default(world, kind)

    def backward(self, world: World, ctx: Backward) -> Sequence[torch.Tensor | None]:
        """Return dx, dweight and dbias. The gradients need no communication, because every rank holds all of dy."""
        (x, weight), (dy,), needs = ctx.saved, ctx.gradients, ctx.needs
        assert dy is not None
        dy = dy.contiguous()
        dx = product(world, dy, weight) if needs[0] and weight is not None else None
        dw = product(world, dy.t(), x) if needs[1] and x is not None else None
        return dx, dw, column_sums(world, dy) if needs[2] else None, None, None


MATMUL_REDUCE_SCATTER = registered(MatmulReduceScatter())
MATMUL_ALL_REDUCE = registered(MatmulAllReduce())


def matmul_reduce_scatter(
    x: torch.Tensor | ScaledTensor,
    weight: torch.Tensor | ScaledTensor,
    bias: torch.Tensor | None = None,
    *,
    world: World,
    plan: str | Plan = "auto",
    out: torch.Tensor | None = None,
    rows: Sequence[int] | None = None,
    out_dtype: torch.dtype | None = None,
    use_fast_accum: bool = False,
    **removed: Never,
) -> torch.Tensor:
    """Return this rank's rows of the sum of x @ weight.T over ranks, plus bias: the row-parallel half of a layer
    (TileLink, section 5).

    Every rank holds some columns of the activation, with all rows, and receives some rows of the output, with all
    columns.

    Args:
        x: [M, K], this rank's columns of the activation. M is any number, including 0.
        weight: [N, K], this rank's part, laid out as in `nn.Linear`.
        bias: [N], the same on all ranks. The bias is added once, to the sum.
        world: the ranks. All ranks must make the same call in the same order.
        plan: "auto", the name of a plan class ("sequential", "decomposed", "fused", "signaled", "one_shot"; on several
            nodes "two_level") or a Plan; the same on all ranks.
        out: [m_r, N], contiguous: the tensor for the result, which may share memory with an operand. A call with `out`
            is not differentiable.
        rows: the number of rows that each rank receives, in rank order. None: M is split as evenly as possible, with
            longer shards first (`weft.lang.balanced_rows`).
        out_dtype, use_fast_accum: as in `weft.matmul`, if x and weight are `weft.ScaledTensor`. Partial sums, the
            result and the bias have the dtype out_dtype. "signaled" supports only 16-bit operands. A call with 8-bit
            operands has no gradient.

    Dtypes, devices, layouts and errors are as for `all_gather_matmul`. Sums over ranks are accumulated in float32, in
    rank order. With "sequential", and "signaled" without `copies`, the order is NCCL's.

    Returns:
        [m_r, N], with m_r = rows[world.rank].

    Backward: an all-gather + GEMM multiplies dy by the transposed weight to compute dx; dweight uses the gathered dy.
    dbias is the sum of dy over all rows of all ranks, and is the same on every rank, so that the copies of the bias
    stay equal.

    Memory, in addition to the output: all ops of the World share the symmetric memory. The op needs none of it
    (sequential), 2 M N elements (decomposed; fused, with rows rounded up to whole tiles), or 3 M N elements, where M is
    W times the longest shard (one shot, for few rows). Sequential and one-shot plans also use [M, N] elements of
    ordinary memory during the call. Signaled plans use M N (1 + 1 / W) elements of ordinary memory, with the rows of a
    shard rounded up to whole tiles; with `copies` they use 2 M N elements of symmetric memory.

    Examples:
        >>> x, w = torch.ones(2, 16).bfloat16(), torch.ones(8, 16).bfloat16()
        >>> weft.spmd(lambda world: weft.matmul_reduce_scatter(x, w, world=world).sum().item(), 2, backend="emulated")
        [256.0, 256.0]
    """
    if removed:
        raise unexpected(GEMM_REDUCE_SCATTER, removed)
    operands, options = scaled_factors(GEMM_REDUCE_SCATTER, x, weight, bias, out_dtype, use_fast_accum)
    return MATMUL_REDUCE_SCATTER(world, plan, operands, (plain_rows(GEMM_REDUCE_SCATTER, rows), True) + options, out)


def matmul_reduce_scatter_tiles(
    x: torch.Tensor | ScaledTensor,
    weight: torch.Tensor | ScaledTensor,
    bias: torch.Tensor | None = None,
    *,
    world: World,
    plan: str | Plan = "auto",
    rows: Sequence[int] | None = None,
    out_dtype: torch.dtype | None = None,
    use_fast_accum: bool = False,
) -> tuple[torch.Tensor, Remap | None]:
    """Return `matmul_reduce_scatter` in tiles.

    The result stays in the order in which the plan's communication stores it. `weft.rms_norm` and `weft.residual_add`
    read it in this order by means of the `weft.Remap`. All plans except "signaled" return rows in ordinary order, and
    None as the Remap. The function has no gradient and does not support torch.compile. Arguments and errors are as for
    `matmul_reduce_scatter`.

    Examples:
        >>> x, w = torch.ones(2, 16).bfloat16(), torch.ones(8, 16).bfloat16()
        >>> def rank(world):
        ...     tiles, remap = weft.matmul_reduce_scatter_tiles(x, w, world=world)
        ...     return tuple(tiles.shape), remap
        >>> weft.spmd(rank, 2, backend="emulated")
        [((1, 8), None), ((1, 8), None)]
    """
    check_plain(f"{GEMM_REDUCE_SCATTER}_tiles", x, weight, bias)
    operands, options = scaled_factors(GEMM_REDUCE_SCATTER, x, weight, bias, out_dtype, use_fast_accum)
    results = MATMUL_REDUCE_SCATTER(world, plan, operands, (plain_rows(GEMM_REDUCE_SCATTER, rows), False) + options)
    return results if isinstance(results, tuple) else (results, None)


def matmul_all_reduce(
    x: torch.Tensor | ScaledTensor,
    weight: torch.Tensor | ScaledTensor,
    bias: torch.Tensor | None = None,
    *,
    world: World,
    plan: str | Plan = "auto",
    out: torch.Tensor | None = None,
    out_dtype: torch.dtype | None = None,
    use_fast_accum: bool = False,
    **removed: Never,
) -> torch.Tensor:
    """Return the sum of x @ weight.T over ranks, plus bias, on every rank: a row-parallel layer without sequence
    parallelism (TileLink, section 5).

    The arguments are the arguments of `matmul_reduce_scatter` except `rows`: x [M, K], weight [N, K], bias [N] (the
    same on all ranks), out [M, N], and, for 8-bit operands, out_dtype and use_fast_accum. plan may also be "two_shot",
    for few rows. Dtypes, devices and errors are as for `all_gather_matmul`.

    Returns:
        [M, N], the same bits on every rank.

    The backward pass does not communicate: dx = dy @ weight, dweight = dy.T @ x, and dbias is the sum of dy over its
    rows. So every rank must compute the same loss from the output, and the loss counts only once. If dy differs between
    ranks, the caller must first sum it over the ranks.

    Memory, in addition to the output: all ops of the World share the symmetric memory. The op needs none of it
    (sequential, decomposed) or 2 M N elements with rows rounded up to whole tiles (fused). Signaled plans need no
    further memory if N is a multiple of 8; otherwise they need M N elements of ordinary memory, rounded up to whole
    tiles. One-shot and two-shot plans use M N elements of ordinary memory, and the memory of `weft.all_reduce`.

    Examples:
        >>> x, w = torch.ones(2, 16).bfloat16(), torch.ones(8, 16).bfloat16()
        >>> weft.spmd(lambda world: weft.matmul_all_reduce(x, w, world=world)[0, 0].item(), 2, backend="emulated")
        [32.0, 32.0]
    """
    if removed:
        raise unexpected(GEMM_ALL_REDUCE, removed)
    operands, options = scaled_factors(GEMM_ALL_REDUCE, x, weight, bias, out_dtype, use_fast_accum)
    return MATMUL_ALL_REDUCE(world, plan, operands, (True,) + options, out)


def matmul_all_reduce_tiles(
    x: torch.Tensor | ScaledTensor,
    weight: torch.Tensor | ScaledTensor,
    bias: torch.Tensor | None = None,
    *,
    world: World,
    plan: str | Plan = "auto",
    out_dtype: torch.dtype | None = None,
    use_fast_accum: bool = False,
) -> tuple[torch.Tensor, Remap | None]:
    """Return `matmul_all_reduce` in tiles.

    Tiles, Remap and restrictions are as for `matmul_reduce_scatter_tiles`.

    Examples:
        >>> x, w = torch.ones(2, 16).bfloat16(), torch.ones(8, 16).bfloat16()
        >>> def rank(world):
        ...     tiles, remap = weft.matmul_all_reduce_tiles(x, w, world=world)
        ...     return tuple(tiles.shape), remap
        >>> weft.spmd(rank, 2, backend="emulated")
        [((2, 8), None), ((2, 8), None)]
    """
    check_plain(f"{GEMM_ALL_REDUCE}_tiles", x, weight, bias)
    operands, options = scaled_factors(GEMM_ALL_REDUCE, x, weight, bias, out_dtype, use_fast_accum)
    results = MATMUL_ALL_REDUCE(world, plan, operands, (False,) + options)
    return results if isinstance(results, tuple) else (results, None)


def check_plain(
    op: str, x: torch.Tensor | ScaledTensor, weight: torch.Tensor | ScaledTensor, bias: torch.Tensor | None
) -> None:
    """Raise ValueError for a call in compiled code or with a gradient."""
    if torch.compiler.is_compiling() or (torch.is_grad_enabled() and requires_grad(x, weight, bias)):
        raise ValueError(f"{op}: such a call has no gradient (use torch.no_grad()) and is not compiled")
