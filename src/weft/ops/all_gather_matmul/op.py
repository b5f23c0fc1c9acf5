"""all_gather(x) @ weight.T: the column-parallel half of a tensor-parallel layer (TileLink, section 5.1)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar, Never, TypeVar

import torch

from ...backends import library_gemm
from ...errors import Unsupported
from ...op import REGISTRY, registered
from ...plans import (
    TWO_AN_SM,
    Decomposed,
    FlagGated,
    Fused,
    FusedGather,
    FusedGatherByCopies,
    OneShot,
    Plan,
    Sequential,
    TwoLevel,
)
from ...prepared import unprepared
from ...scaled_tensor import ScaledTensor
from ...torch_library import Backward, CallOptions, column_sums, product
from ...transport.collectives import gather_in_backward, reduce_scatter_in_backward
from ...world import World
from ..common import MatmulOp, check_16_byte_rows, check_rows, plain_rows
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
from .call import GATHER_GEMM, GatherCall
from .cost import GATHER_COSTS
from .runs import prepare_at_once, prepare_flag_gated, prepare_fused, prepare_gathered, usable
from .two_level import run_gather

Rows = TypeVar("Rows", bound=torch.Tensor | ScaledTensor)


class AllGatherMatmul(MatmulOp[GatherCall]):
    """The op all_gather(x) @ weight.T + bias. The options are the number of rows of every rank or None, gated,
    gathered, and the fields of `ProductOptions`. The results are the GEMM's result, the gathered activation or None,
    and the activation's scales or None."""

    name = GATHER_GEMM
    signature = f"{SCALED_FACTORS}, SymInt[]? rows, int gated, bool gathered, {PRODUCT_OPTIONS}"
    results = 3
    operand_type = ScaledFactors
    collective = "all_gather"
    gathers = True
    costs = GATHER_COSTS
    transposes = Sequential, Decomposed, Fused, OneShot, TwoLevel
    runs = {
        Sequential: prepare_at_once,
        Decomposed: prepare_gathered,
        FusedGather: prepare_fused,
        FusedGatherByCopies: prepare_fused,
        FlagGated: prepare_flag_gated,
        OneShot: prepare_at_once,
        TwoLevel: unprepared(run_gather),
    }
    unsupported_fields = {Decomposed: ("pieces",)}
    batch_invariant_plans = Sequential, FusedGather, FusedGatherByCopies, Decomposed, OneShot
    emulator_plan = FusedGather
    # In 76 shapes and modes on 2 to 8 H200s, FusedGatherByCopies with two programs per SM was at most 1.1% faster than
    # these plans (2026-11).
    variants = (FusedGather(), FusedGatherByCopies(), FusedGather(pull_programs=12, split=4), TWO_AN_SM)
    autotune_plans: ClassVar[Sequence[FlagGated]] = (FlagGated(), FlagGated(tile_n=160))
    over_nodes = (TwoLevel(), TwoLevel(2))

    def check(self, world: World, operands: ScaledFactors, options: CallOptions) -> GatherCall:
        (x, weight, bias, *_), (rows, gated, gathered, *rest) = operands, options
        scaling, dtype = check_product(self.name, world, operands, ProductOptions(*rest))
        shards = (x.shape[0],) * world.size if rows is None else check_rows(self.name, world, rows, x, whole=False)
        n, k = weight.shape
        return GatherCall(shards, n, k, dtype, bias is not None, gated, gathered, scaling=scaling)

    def outputs(self, world: World, call: GatherCall) -> list[tuple[tuple[int, ...], torch.dtype]]:
        gathered = [((call.rows, call.k), call.operand_dtype)] if call.gathered else []
        if call.gathered and call.scales_in_row:
            gathered.append(((call.rows, call.scales_in_row), torch.float32))
        return [((call.rows, call.gated or call.n), call.dtype), *gathered]

    def saved_tensors(
        self,
        operands: ScaledFactors,
        results: Sequence[torch.Tensor | None],
        options: CallOptions,
        needs: Sequence[bool],
    ) -> Sequence[torch.Tensor | None]:
        """Save the gathered activation instead of this rank's rows, if the call returns it."""
        (x, weight, *_), (_, gated, gathered, *_) = operands, options
        if gated:
            raise RuntimeError("all-gather + gated GEMM has no gradient: use all_gather_matmul, then silu_mul")
        return ((results[1] if gathered else x) if needs[1] else None, weight if needs[0] else None)

    def backward(self, world: World, ctx: Backward) -> Sequence[torch.Tensor | None]:
        """Return dx, dweight and dbias. A GEMM + reduce-scatter of dy computes dx. For dweight, the saved gathered
        activation is used, or the activation is gathered again."""
        (x, weight), (dy, dfull, _), (rows, _, gathered, *_) = ctx.saved, ctx.gradients, ctx.options
        like = dy if dy is not None else dfull
        assert like is not None
        shards = (like.shape[0] // world.size,) * world.size if rows is None else rows
        dx = dw = db = None
        if dy is not None:
            dy = dy.contiguous()
            if ctx.needs[1]:
                assert x is not None
                dw = product(world, dy.t(), x if gathered else gather_in_backward(world, x, shards))
            if ctx.needs[2]:
                db = column_sums(world, dy)
            if ctx.needs[0]:
                assert weight is not None
                options = shards, True, *UNSCALED
                dx = REGISTRY["matmul_reduce_scatter"](world, "auto", ScaledFactors(dy, weight.t()), options)
        if dfull is not None and gathered and ctx.needs[0]:
            part = reduce_scatter_in_backward(world, dfull, shards)
            total = dx if dx is not None else world.zeros(tuple(part.shape), part.dtype)
            world.call(lambda: total.add_(part), [total, part], [total], world.current_stream())
            dx = total
        return dx, dw, db, None, None

    def unsupported(self, world: World, call: GatherCall, plan: Plan, asked: str | Plan) -> str | None:
        if isinstance(plan, FlagGated) and call.scaling is None:
            return self._flag_gated_unsupported(world, call, plan, asked)
        reason = super().unsupported(world, call, plan, asked)
        if reason is None and not isinstance(plan, Decomposed):
            reason = check_16_byte_rows(N=call.gated)
        if reason is None and isinstance(plan, FusedGather):
            programs, pulling, split = world.sm_count * plan.per_sm, plan.pull_programs, plan.split
            if pulling >= programs:
                raise Unsupported(
                    f"{self.name}: {pulling} pull programs leave none of {programs} programs for the GEMM"
                )
            if pulling % split:
                raise Unsupported(f"{self.name}: {pulling} pull programs are not a multiple of split, which is {split}")
        return reason

    def _flag_gated_unsupported(self, world: World, call: GatherCall, plan: FlagGated, asked: str | Plan) -> str | None:
        missing = library_gemm.quack().lacks() if world.backend.name == "cuda" else None
        reason = (
            world.backend.symmetric_unsupported
            or check_16_byte_rows(K=call.k, N=call.n)
            or missing
            and f"quack: {missing}"
        )
        reason = reason or self.why_uneven(world, call, plan, asked)
        if reason is None and not self.movable(plan, call.rows, world.size):
            reason = f"shards of {call.shards[0]} rows are not whole clusters of {plan.cluster_m} x {plan.tile_m}"
        return reason

    def candidates(self, world: World, call: GatherCall) -> Sequence[Plan]:
        """Return the flag-gated plans that can serve the call: the shards consist of whole clusters of tiles, and the
        GEMM passes its check on every rank."""
        could = call.even and world.backend.symmetric_unsupported is None and call.scaling is None
        fit = [plan for plan in self.autotune_plans if could and self.movable(plan, call.rows, world.size)]
        key = (self.name, "usable", call.dtype)
        if not fit or (key not in world.decided and world.backend.capturing()):
            return ()
        if key not in world.decided:
            world.check_same_on_all_ranks(f'{self.name}: the first call with plan="auto" in {call.dtype}')
            world.decided[key] = usable(world, self.autotune_plans, call.dtype)
        return [
            plan for plan in fit if plan in world.decided[key] and self.unsupported(world, call, plan, "auto") is None
        ]

    def movable(self, plan: Plan, m: int, world: int) -> bool:
        return not isinstance(plan, FlagGated) or m % (world * plan.tile_m * plan.cluster_m) == 0

    def copies_shards(self, plan: Plan) -> bool:
        return isinstance(plan, Decomposed | FlagGated | FusedGatherByCopies)


ALL_GATHER_MATMUL = registered(AllGatherMatmul())


def all_gather_matmul(
    x_shard: torch.Tensor | ScaledTensor,
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
    """Return all_gather(x_shard) @ weight.T + bias: the column-parallel half of a layer (TileLink, section 5).

    Every rank holds some rows of the activation and some columns of the layer, and receives all rows of the result in
    its columns.

    Args:
        x_shard: [m_r, K], this rank's rows. m_r is any number, including 0.
        weight: [N, K], this rank's part, laid out as in `nn.Linear`.
        bias: [N], this rank's part.
        world: the ranks. All ranks must make the same call in the same order.
        plan: "auto", the name of a plan class ("sequential", "decomposed", "fused", "flag_gated", "one_shot"; on
            several nodes "two_level") or a Plan; the same on all ranks.
        out: [M, N], contiguous: the tensor for the result, which may share memory with an operand. A call with `out` is
            not differentiable.
        rows: the number of rows of each rank's shard, in the order of the ranks. None: every shard has m_r rows.
        out_dtype, use_fast_accum: as in `weft.matmul`, if x_shard and weight are `weft.ScaledTensor`. The rows and
            scales of x_shard are sent unchanged. A per-tensor scale must be the same on all ranks. A call with 8-bit
            operands has no gradient.

    All tensors that are not 8-bit are bfloat16, or all are float16, on `world.device`. A tensor that is not contiguous
    is copied, except for a weight whose transpose is contiguous. Sums are accumulated in float32.

    Returns:
        [M, N] with M = sum(rows), the shards in the order of the ranks.

    Backward: a GEMM + reduce-scatter with the same rows multiplies dy by the transposed weight to compute dx_shard. For
    dweight the activation is gathered again. dbias is the sum of dy over its rows.

    Memory, in addition to the output: all ops of the World share the symmetric memory. The op needs none of it
    (sequential), M K / W + M K elements (decomposed, and fused with copy engines), M K elements (flag-gated), 2 M K
    elements with rows rounded up to whole tiles (fused) or 3 M K elements (one shot, for few rows). Sequential and
    one-shot plans also use [M, K] elements of ordinary memory during the call.

    Raises:
        ValueError, TypeError: a shape, dtype or device is invalid; the message quotes it.
        Mismatch: ranks disagree on shapes, dtype or plan, or make different calls.
        Timeout: a peer did not arrive; see the guide.
        WeftError: the first call of a shape is inside a CUDA graph capture.

    Examples:
        >>> x, w = torch.ones(2, 16).bfloat16(), torch.ones(8, 16).bfloat16()
        >>> weft.spmd(lambda world: weft.all_gather_matmul(x, w, world=world).sum().item(), 2, backend="emulated")
        [512.0, 512.0]
    """
    if removed:
        raise unexpected(GATHER_GEMM, removed)
    operands, options = scaled_factors(GATHER_GEMM, x_shard, weight, bias, out_dtype, use_fast_accum)
    return ALL_GATHER_MATMUL(world, plan, operands, (plain_rows(GATHER_GEMM, rows), 0, False) + options, out)[0]


def all_gather_matmul_with_gathered(
    x_shard: Rows,
    weight: torch.Tensor | ScaledTensor,
    bias: torch.Tensor | None = None,
    *,
    world: World,
    plan: str | Plan = "auto",
    out: torch.Tensor | None = None,
    rows: Sequence[int] | None = None,
    out_dtype: torch.dtype | None = None,
    use_fast_accum: bool = False,
) -> tuple[torch.Tensor, Rows]:
    """Return the result of `all_gather_matmul`, and the gathered activation.

    The gathered activation [M, K] is a `weft.ScaledTensor` if x_shard is one. The gathered activation shares no memory
    with other tensors and is differentiable. The op saves it for the backward pass, which therefore does not gather the
    activation again. Arguments and errors are as for `all_gather_matmul`.

    Examples:
        >>> x, w = torch.ones(2, 16).bfloat16(), torch.ones(8, 16).bfloat16()
        >>> def shapes(world):
        ...     y, gathered = weft.all_gather_matmul_with_gathered(x, w, world=world)
        ...     return tuple(y.shape), tuple(gathered.shape)
        >>> weft.spmd(shapes, 2, backend="emulated")
        [((4, 8), (4, 16)), ((4, 8), (4, 16))]
    """
    operands, options = scaled_factors(GATHER_GEMM, x_shard, weight, bias, out_dtype, use_fast_accum)
    y, gathered, scales = ALL_GATHER_MATMUL(
        world, plan, operands, (plain_rows(GATHER_GEMM, rows), 0, True) + options, out
    )
    if isinstance(x_shard, ScaledTensor):
        return y, x_shard._replace(values=gathered, scales=x_shard.scales if scales is None else scales)
    return y, gathered


def all_gather_swiglu(
    x_shard: torch.Tensor,
    weight: torch.Tensor,
    columns: int,
    world: World,
    plan: str | Plan,
    rows: Sequence[int] | None,
) -> torch.Tensor:
    """Return silu(x @ gate.T) * (x @ up.T) [M, columns] for x = all_gather(x_shard). A fused plan computes the result
    in one launch.

    In weight [S, K], blocks of `world.backend.scale.interleave` gate rows alternate with equally large blocks of up
    rows. The last two blocks are padded with zeros. The function has no gradient; all_gather_matmul and silu_mul are
    differentiable.
    """
    options = plain_rows(GATHER_GEMM, rows), columns, False, *UNSCALED
    return ALL_GATHER_MATMUL(world, plan, ScaledFactors(x_shard, weight), options)[0]
