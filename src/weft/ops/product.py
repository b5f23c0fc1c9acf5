"""The op x @ weight.T on one GPU, for 16-bit or scaled 8-bit operands. No rank waits for another."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Never

import torch

from ..backends.base import Stream
from ..backends.library_gemm import ScaledOperands
from ..op import Local, RowsCall, registered
from ..plans import Persistent, Plan, Sequential
from ..prepared import unprepared
from ..scaled_tensor import ScaledTensor, Scaling
from ..tensor_checks import bulk, dense
from ..torch_library import CallOptions
from ..world import World
from .common import check_16_byte_rows
from .matmul import invariant_matmul
from .recipes import (
    PRODUCT_OPTIONS,
    SCALED_FACTORS,
    ProductOptions,
    ScaledFactors,
    check_product,
    scaled_factors,
    tile_unsupported,
)
from .removed import unexpected
from .scaled_gemm import default_plan, multiply, multiply_persistent

_OP = "matmul"


@dataclass(frozen=True)
class ProductCall(RowsCall):
    """A checked call of x [m, k] @ weight [n, k].T + bias. `dtype` is the result's dtype."""

    n: int
    k: int
    dtype: torch.dtype
    scaling: Scaling | None
    bias: bool


def scaled_operands(scaling: Scaling, operands: ScaledFactors) -> ScaledOperands:
    """Return the operands with their scales."""
    x, weight, bias, x_scale, weight_scale = operands
    assert x_scale is not None and weight_scale is not None
    scaled_x = ScaledTensor(x, x_scale, scaling.recipe)
    return ScaledOperands(scaled_x, scaled_x._replace(values=weight, scales=weight_scale), bias, scaling.fast_accum)


def linear(
    world: World,
    scaling: Scaling | None,
    dtype: torch.dtype,
    operands: ScaledFactors,
    stream: Stream,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """Compute x @ weight.T + bias on a stream, in `out` or in a new tensor of this dtype. The fastest library computes
    the result; on a batch-invariant World weft's own GEMM does."""
    x, weight, bias, *_ = operands
    if scaling is None and world.batch_invariant:
        return invariant_matmul(world, x, weight, bias, stream, out)
    if scaling is None:
        return world.backend.linear(x, weight, bias, stream, out)
    result = world.empty((x.shape[0], weight.shape[0]), dtype) if out is None else out
    multiply(world, scaled_operands(scaling, operands), stream, result)
    return result


def run_sequential(world: World, call: ProductCall, plan: Plan, operands: ScaledFactors, out: torch.Tensor) -> None:
    linear(world, call.scaling, call.dtype, operands, world.current_stream(), out)


def run_persistent(
    world: World, call: ProductCall, plan: Persistent, operands: ScaledFactors, out: torch.Tensor
) -> None:
    assert call.scaling is not None
    multiply_persistent(world, plan, scaled_operands(call.scaling, operands), out)


class Matmul(Local[ProductCall]):
    """The op x @ weight.T + bias. The options are the fields of `ProductOptions`."""

    name = _OP
    signature = f"{SCALED_FACTORS}, {PRODUCT_OPTIONS}"
    operand_type = ScaledFactors
    runs = {Sequential: unprepared(run_sequential), Persistent: unprepared(run_persistent)}
    by_library = False
    batch_invariant_plans = (Sequential,)

    def check(self, world: World, operands: ScaledFactors, options: CallOptions) -> ProductCall:
        scaling, dtype = check_product(self.name, world, operands, ProductOptions(*options))
        x, weight, bias, *_ = operands
        return ProductCall(x.shape[0], weight.shape[0], x.shape[1], dtype, scaling, bias is not None)

    def outputs(self, world: World, call: ProductCall) -> list[tuple[tuple[int, ...], torch.dtype]]:
        return [((call.m, call.n), call.dtype)]

    def sizes(self, call: ProductCall) -> tuple[int, int, int]:
        return call.m, call.n, call.k

    def unsupported(self, world: World, call: ProductCall, plan: Plan, asked: str | Plan) -> str | None:
        if call.scaling is None:
            return "weft's own kernel takes 8-bit operands only"
        return tile_unsupported(call.scaling, plan.tile) if isinstance(plan, Persistent) else None

    def batch_invariance_unsupported(self, world: World, call: ProductCall, plan: Plan) -> str | None:
        if call.scaling is not None:
            return "libraries multiply 8-bit operands"
        return super().batch_invariance_unsupported(world, call, plan) or check_16_byte_rows(K=call.k, N=call.n)

    def choose(self, world: World, call: ProductCall, asked: str | Plan, capturing: bool) -> Plan:
        if asked == Persistent.kind and call.scaling is not None:
            asked = default_plan(world, call.scaling)
        return super().choose(world, call, asked, capturing)

    def dense_operands(self, plan: Plan, operands: ScaledFactors) -> ScaledFactors:
        """Return dense operands. If the scales by block of x are stored column after column, they are not copied."""
        x, weight, bias, x_scale, weight_scale = operands
        x, weight, bias, weight_scale = bulk((x, weight, bias, weight_scale))  # type: ignore[assignment]
        if x_scale is not None and not (x_scale.dim() == 2 and x_scale.t().is_contiguous()):
            x_scale = dense(x_scale)
        return ScaledFactors(x, weight, bias, x_scale, weight_scale)


MATMUL = registered(Matmul())


def matmul(
    x: torch.Tensor | ScaledTensor,
    weight: torch.Tensor | ScaledTensor,
    bias: torch.Tensor | None = None,
    *,
    out_dtype: torch.dtype | None = None,
    use_fast_accum: bool = False,
    world: World,
    plan: str | Plan = "auto",
    out: torch.Tensor | None = None,
    **removed: Never,
) -> torch.Tensor:
    """Compute x @ weight.T + bias for 8-bit or 16-bit operands on this GPU, and return the result. No rank waits for
    another.

    Args:
        x: [M, K], a `weft.ScaledTensor` with K a multiple of 16, or bfloat16 or float16. If x or the weight is not
            contiguous, it is copied.
        weight: [N, K], laid out as in `nn.Linear`: a `weft.ScaledTensor` with x's recipe and N a multiple of 8, or a
            tensor of x's dtype.
        bias: [N], of the result's dtype.
        out_dtype: the dtype of the result: bfloat16 (also for None) or float16. For 16-bit operands the result has x's
            dtype.
        use_fast_accum: as in torch._scaled_mm. True keeps sums over K in the tensor cores' accumulators, which have a
            precision of about 14 bits. False adds the sum over every 128 elements of K in float32. With scales by
            block, these sums are always added in float32.
        plan: "auto" and "sequential" run weft's own kernel or an installed library, whichever was fastest when the
            first call of this size timed them. "persistent" or a `weft.plans.Persistent` runs weft's own kernel.
        out: [M, N], contiguous: the tensor for the result.

    Returns:
        [M, N]. The function is not differentiable, and raises ValueError for an operand that requires a gradient.

    Raises:
        ValueError, TypeError: a shape, dtype or device is invalid; the message quotes it.
        Unsupported: the GPU cannot multiply 8-bit operands.

    Examples:
        >>> x, w = torch.ones(2, 16).bfloat16(), torch.ones(8, 16).bfloat16()
        >>> weft.spmd(lambda world: weft.matmul(x, w, world=world)[0, 0].item(), 1, backend="emulated")
        [16.0]
    """
    if removed:
        raise unexpected(_OP, removed)
    operands, options = scaled_factors(_OP, x, weight, bias, out_dtype, use_fast_accum)
    return MATMUL(world, plan, operands, options, out)
