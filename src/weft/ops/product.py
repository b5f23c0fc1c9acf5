"""x @ weight.T on one GPU, of 16-bit or of scaled 8-bit operands. No rank waits for another."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from ..backends.base import Stream
from ..backends.library_gemm import ScaledOperands
from ..op import Call, Local, registered
from ..plans import Persistent, Plan, Sequential
from ..tensor_checks import bulk, dense
from ..torch_library import CallOptions
from ..world import World
from .recipes import Recipe, ScaledFactors, check_product, unfit
from .scaled_gemm import default_plan, multiply, multiply_persistent

_OP = "matmul"


@dataclass(frozen=True)
class ProductCall(Call):
    """A checked call: x [m, k] @ weight [n, k].T + bias. dtype: that of the result. recipe: that of 8-bit operands, or
    None for others."""

    m: int
    n: int
    k: int
    dtype: torch.dtype
    recipe: Recipe | None
    bias: bool

    @property
    def rows(self) -> int:
        return self.m


def linear(
    world: World,
    recipe: Recipe | None,
    dtype: torch.dtype,
    operands: ScaledFactors,
    stream: Stream,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """Compute x @ weight.T + bias on a stream with the fastest library, in `out` or in a new tensor of this dtype."""
    x, weight, bias, x_scale, weight_scale = operands
    if recipe is None:
        return world.linear(x, weight, bias, stream, out)
    assert x_scale is not None and weight_scale is not None
    result = world.empty((x.shape[0], weight.shape[0]), dtype) if out is None else out
    scaled_operands = ScaledOperands(x, weight, bias, x_scale, weight_scale, recipe.scaling, recipe.fast_accum)
    multiply(world, recipe, scaled_operands, stream, result)
    return result


def run_sequential(world: World, call: ProductCall, plan: Plan, operands: ScaledFactors, out: torch.Tensor) -> None:
    linear(world, call.recipe, call.dtype, operands, world.current_stream(), out)


def run_persistent(
    world: World, call: ProductCall, plan: Persistent, operands: ScaledFactors, out: torch.Tensor
) -> None:
    x, weight, bias, x_scale, weight_scale = operands
    assert call.recipe is not None and x_scale is not None and weight_scale is not None
    recipe = call.recipe
    scaled_operands = ScaledOperands(x, weight, bias, x_scale, weight_scale, recipe.scaling, recipe.fast_accum)
    multiply_persistent(world, recipe, plan, scaled_operands, out)


class Matmul(Local[ProductCall]):
    """The op x @ weight.T + bias. The options are the dtype of the result or None, and fast_accum."""

    name = _OP
    signature = (
        "Tensor x, Tensor weight, Tensor? bias, Tensor? x_scale, Tensor? weight_scale, ScalarType? out_dtype, "
        "bool use_fast_accum"
    )
    takes = ScaledFactors
    runs = {Sequential: run_sequential, Persistent: run_persistent}
    by_library = False

    def check(self, world: World, operands: ScaledFactors, options: CallOptions) -> ProductCall:
        recipe, dtype = check_product(self.name, world, operands, *options)
        x, weight, bias, *_ = operands
        return ProductCall(x.shape[0], weight.shape[0], x.shape[1], dtype, recipe, bias is not None)

    def outputs(self, world: World, call: ProductCall) -> list[tuple[tuple[int, ...], torch.dtype]]:
        return [((call.m, call.n), call.dtype)]

    def sizes(self, call: ProductCall) -> tuple[int, int, int]:
        return call.m, call.n, call.k

    def fits(self, world: World, call: ProductCall, plan: Plan, asked: str | Plan) -> str | None:
        if call.recipe is None:
            return "weft's own kernel takes 8-bit operands only"
        return unfit(call.recipe, plan.tile) if isinstance(plan, Persistent) else None

    def choose(self, world: World, call: ProductCall, asked: str | Plan, capturing: bool) -> Plan:
        if asked == Persistent.kind and call.recipe is not None:
            asked = default_plan(world, call.recipe)
        return super().choose(world, call, asked, capturing)

    def dense_operands(self, plan: Plan, operands: ScaledFactors) -> ScaledFactors:
        """Return dense operands. The scales by block of x may be laid out column after column, and are then not
        copied."""
        x, weight, bias, x_scale, weight_scale = operands
        x, weight, bias, weight_scale = bulk((x, weight, bias, weight_scale))  # type: ignore[assignment]
        if x_scale is not None and not (x_scale.dim() == 2 and x_scale.t().is_contiguous()):
            x_scale = dense(x_scale)
        return ScaledFactors(x, weight, bias, x_scale, weight_scale)


MATMUL = registered(Matmul())


def matmul(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    *,
    x_scale: torch.Tensor | None = None,
    weight_scale: torch.Tensor | None = None,
    out_dtype: torch.dtype | None = None,
    use_fast_accum: bool = False,
    world: World,
    plan: str | Plan = "auto",
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """Return x @ weight.T + bias on this GPU, of 8-bit operands and their scales, or of 16-bit operands. No rank waits
    for another.

    Args:
        x: [M, K], either e4m3 (torch.float8_e4m3fn) with scales, and K a multiple of 16; or bfloat16 or float16 without
            scales. If x or the weight is not contiguous, it is copied.
        weight: [N, K], of x's dtype, laid out as in `nn.Linear`. In e4m3 N is a multiple of 8.
        bias: [N], of the result's dtype.
        x_scale, weight_scale: float32. The value of an element is the element times its scale. Their shapes tell the
            recipe: by tensor, [1] or [] each; by row, x_scale [M] or [M, 1] and weight_scale [N], [N, 1] or [1, N]; by
            block, x_scale [M, K / 128] and weight_scale [N / 128 rounded up, K / 128], for K a multiple of 128
            (DeepSeek-V3, section 3.3.2).
        out_dtype: the dtype of the result: bfloat16 (also for None) or float16. For 16-bit operands it is x's.
        use_fast_accum: as in torch._scaled_mm, True leaves sums over K in the tensor cores' accumulators, of about 14
            bits; False adds each 128 of K in float32. By block they are always added in float32.
        plan: "auto" and "sequential" run the fastest of weft's own kernel and of the installed libraries, which are
            timed at the first call of a size. "persistent" or a `weft.plans.Persistent` runs weft's own kernel.
        out: [M, N], contiguous: the tensor for the result.

    Returns:
        [M, N]. It is not differentiable: an operand that requires a gradient is refused.

    Raises:
        ValueError, TypeError: shapes, dtypes or devices do not fit; the message quotes them.
        Unsupported: the GPU does not multiply 8-bit operands.
    """
    return MATMUL(world, plan, ScaledFactors(x, weight, bias, x_scale, weight_scale), (out_dtype, use_fast_accum), out)
