"""All-reduce, with or without the residual add and norm that follow it in a transformer layer (TokenWeave, section 4)."""

from __future__ import annotations

import torch

from ...op import check_call
from ...operands import check_device, dense, dims, requires_grad
from ...plans import Plan
from ...world import World
from ..autograd import into, operator, plan_of, text_of, world_of
from ..common import split_rows
from .op import (
    ABSENT,
    ALL_REDUCE_RMS_NORM,
    DTYPES,
    NORM,
    NORMS,
    OUTPUTS,
    OWN,
    SUM,
    WHOLE,
    WIDEST,
    Call,
    sum_everywhere,
)

# -- the ops -----------------------------------------------------------------------------------------------------------


def all_reduce_rms_norm(
    x: torch.Tensor,
    residual: torch.Tensor | None,
    weight: torch.Tensor,
    eps: float = 1e-6,
    *,
    bias: torch.Tensor | None = None,
    norm: str = "rms",
    out_dtype: torch.dtype | None = None,
    scale: torch.Tensor | None = None,
    full_residual: bool = False,
    out: torch.Tensor | None = None,
    world: World,
    plan: str | Plan = "auto",
) -> tuple[torch.Tensor, torch.Tensor]:
    """norm(h) * weight + bias and h, for h = residual + the sum of x over ranks: what stands between a row-parallel layer
    and the next column-parallel one (TokenWeave, section 4).

    Args:
        x: [M, H], this rank's part of the sum. M at least 1; H at most 16,384, its rows whole 16-byte words. bfloat16,
            float16 or float32, as the residual.
        residual: [m_r, H], the rows that this rank owns (`weft.lang.balanced_rows(M, W)`, in the order of the ranks); with
            full_residual [M, H], the same on all ranks; or None.
        weight: [H], of x's dtype or float32, the same on all ranks.
        bias: [H], as the weight: added after the norm.
        norm: "rms" (Zhang and Sennrich 2019) or "layer" (Ba et al. 2016).
        out_dtype: of the normalised rows; None: x's.
        scale: float32 [1]: the normalised rows are divided by it and clamped to +-448. Goes with out_dtype
            torch.float8_e4m3fn, and is needed there.
        full_residual: the residual, old and new, is [M, H] on every rank, not this rank's rows alone. In two shots the new one
            travels as the normalised rows do.
        out: [M, H], contiguous, where to write the normalised rows. In memory of `World.symmetric` (the same place on every
            rank) the peers store there directly, if the plan counts rows; where it posts them this rank alone writes `out`. Into any
            other tensor a plan that counts copies them from the library's own. Between two calls it is the caller's: it is not
            written before this rank's next call.
        world: the ranks. All of them must make the same call in the same order.
        plan: "auto", a kind ("sequential", "decomposed", "one_shot", "two_shot", "multicast") or a Plan; the same on all
            ranks.

    Computed in float32: the sum in the order of the ranks ("sequential": as NCCL does it), the residual, the norm; the
    new residual is rounded once.

    Returns:
        The normalised rows [M, H], the same bits on every rank, and the new residual h, [M, H] or [m_r, H].

    Memory beside the outputs, symmetric and shared by all calls of the World: none (sequential), 3 (W + 1) M H elements
    (one shot), 3 M H, and 3 M H more with a full residual, and 3 H for each of the M rows rounded up to a multiple of W (two
    shots, posted). Other two shots: M H for what is stored at the owner
    or, pulled, for x unless it lies in memory of `World.symmetric`; M H each for the output, unless `out` does, and for a
    full residual. Decomposed and multicast: as two shots, pulled; for decomposed also M H of ordinary memory during the call.

    Raises:
        ValueError, TypeError: shapes, dtypes or devices that do not fit, quoted; an operand that requires a gradient (there
            is none for this op: use torch.no_grad()).
        Mismatch, Timeout, WeftError: as `all_gather_matmul`.
    """
    _refuse_gradients(NORM, x, residual, weight, bias, scale)
    if torch.compiler.is_compiling():
        y, kept = torch.ops.weft.all_reduce_rms_norm(
            x, residual, weight, bias, scale, eps, norm, out_dtype or x.dtype, full_residual, world.name, text_of(plan)
        )
        return into(NORM, out, y), kept
    call = _described(x, residual, weight, eps, bias, norm, out_dtype, scale, full_residual, world)
    if out is not None:
        check_device(NORM, world, "out", out)
    y, kept = ALL_REDUCE_RMS_NORM(world, plan, (x, residual, weight, bias, scale), (call,), out)
    assert kept is not None
    return y, kept


def all_reduce(
    x: torch.Tensor, *, world: World, plan: str | Plan = "auto", out: torch.Tensor | None = None
) -> torch.Tensor:
    """The sum of x over ranks, on every rank.

    Args:
        x: any shape, bfloat16, float16 or float32; contiguous or not (then it is copied).
        world, plan, out: as for `all_reduce_rms_norm`; `out` of x's shape.

    Summed in float32 in the order of the ranks ("sequential": as NCCL does it). Sizes that are no multiple of 16 bytes are
    always sequential.

    Returns:
        A tensor of x's shape, the same bits on every rank.

    Raises as `all_reduce_rms_norm`.
    """
    _refuse_gradients(SUM, x)
    if torch.compiler.is_compiling():
        y = torch.ops.weft.all_reduce(x, world.name, text_of(plan))
        return into(SUM, out, y)
    _check(SUM, world, dict(x=x, out=out))
    if out is not None and (out.shape != x.shape or not out.is_contiguous()):
        raise ValueError(f"{SUM}: out {dims(out)} must be contiguous and of the shape of x {dims(x)}")
    if x.numel() == 0:
        return x.clone() if out is None else out
    return sum_everywhere(dense(x), world, plan, out)


def _refuse_gradients(op: str, *tensors: torch.Tensor | None) -> None:
    """Also while compiling, where the registered op would lose them."""
    if torch.is_grad_enabled() and requires_grad(*tensors):
        raise ValueError(f"{op}: an operand requires a gradient, and this op has none; use torch.no_grad()")


def _check(op: str, world: World, tensors: dict[str, torch.Tensor | None]) -> None:
    check_call(op, world)
    for name, t in tensors.items():
        if t is not None or name in ("x", "weight"):
            check_device(op, world, name, t)
    x = tensors["x"]
    assert x is not None
    if x.dtype not in DTYPES:
        raise TypeError(f"{op}: x is {dims(x)}; bfloat16, float16 and float32 are supported")


def _described(
    x: torch.Tensor,
    residual: torch.Tensor | None,
    weight: torch.Tensor,
    eps: float,
    bias: torch.Tensor | None,
    norm: str,
    out_dtype: torch.dtype | None,
    scale: torch.Tensor | None,
    full_residual: bool,
    world: World,
) -> Call:
    """The call, validated: ValueError or TypeError for anything that this rank alone can see is wrong."""
    _check(NORM, world, dict(x=x, residual=residual, weight=weight, bias=bias, scale=scale))
    if x.dim() != 2 or x.shape[0] < 1 or x.shape[1] < 1:
        raise ValueError(f"{NORM}: x must be [M, H] with M at least 1, got {dims(x)}")
    m, h = x.shape
    vector = 16 // x.dtype.itemsize
    if h % vector:
        raise ValueError(f"{NORM}: H {h} of x {dims(x)} is not a multiple of {vector} (rows of whole 16-byte words)")
    if h > WIDEST:
        raise ValueError(f"{NORM}: H {h} of x {dims(x)}; at most {WIDEST}")
    rows, whose = m, "all rows"
    if not full_residual:
        rows = split_rows(world, m)[world.rank]
        whose = f"the rows of rank {world.rank} of {world.size}, weft.lang.balanced_rows({m}, {world.size})"
    if residual is not None and residual.dtype != x.dtype:
        raise TypeError(f"{NORM}: residual is {dims(residual)}, x is {dims(x)}: one dtype is needed")
    if residual is not None and residual.shape != (rows, h):
        raise ValueError(
            f"{NORM}: residual {dims(residual)} must be [{rows}, {h}], {whose}, with full_residual={full_residual}"
        )
    if norm not in NORMS:
        raise ValueError(f'{NORM}: norm {norm!r} is not "rms" or "layer"')
    for name, t in (("weight", weight), ("bias", bias)):
        if t is not None and t.shape != (h,):
            raise ValueError(f"{NORM}: {name} {dims(t)} must be [{h}], as H of x {dims(x)}")
        if t is not None and t.dtype not in (x.dtype, torch.float32):
            raise TypeError(f"{NORM}: {name} is {dims(t)}; {x.dtype}, as x, or float32 is needed")
    out_dtype = out_dtype or x.dtype
    if out_dtype not in OUTPUTS:
        raise TypeError(f"{NORM}: out_dtype {out_dtype} is not one of {[str(d) for d in OUTPUTS]}")
    if (out_dtype == torch.float8_e4m3fn) != (scale is not None):
        raise ValueError(
            f"{NORM}: a scale goes with out_dtype torch.float8_e4m3fn, and only there; out_dtype is {out_dtype}"
        )
    if scale is not None and (scale.numel() != 1 or scale.dtype != torch.float32):
        raise ValueError(f"{NORM}: scale {dims(scale)} must be float32 [1]")
    layout = WHOLE if full_residual or world.size == 1 else OWN
    return Call(
        NORM, m, h, x.dtype, out_dtype, NORMS[norm].value, float(eps), (ABSENT if residual is None else layout).value,
        layout.value, bias is not None, scale is not None,
    )  # fmt: skip


# -- torch.library -----------------------------------------------------------------------------------------------------


def _all_reduce_rms_norm_fake(x, residual, weight, bias, scale, eps, norm, out_dtype, full, world, plan):
    m, h = x.shape
    w = world_of(world)
    rows = m if full else (m + w.size - 1 - w.rank) // w.size
    return x.new_empty((m, h), dtype=out_dtype), x.new_empty((rows, h))


@operator(
    "(Tensor x, Tensor? residual, Tensor weight, Tensor? bias, Tensor? scale, float eps, str norm, ScalarType out_dtype,"
    " bool full, str world, str plan) -> (Tensor, Tensor)",
    _all_reduce_rms_norm_fake,
)
def all_reduce_rms_norm_operator(x, residual, weight, bias, scale, eps, norm, out_dtype, full, world, plan):
    world = world_of(world)
    return all_reduce_rms_norm(
        x, residual, weight, eps, bias=bias, norm=norm, out_dtype=out_dtype, scale=scale, full_residual=full, world=world,
        plan=plan_of(plan),
    )  # fmt: skip


@operator("(Tensor x, str world, str plan) -> Tensor", lambda x, world, plan: x.new_empty(x.shape))
def all_reduce_operator(x, world, plan):
    return all_reduce(x, world=world_of(world), plan=plan_of(plan))
