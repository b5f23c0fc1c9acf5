"""All-reduce, and all-reduce + residual + norm (TokenWeave, section 4)."""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import replace
from typing import ClassVar, Never

import torch

from ...architectures import lacks
from ...backends.base import Stream
from ...backends.library_gemm import stepped
from ...op import Op, Operands, registered
from ...plans import (
    Decomposed,
    Multicast,
    OneShot,
    Plan,
    Sequential,
    TwoLevel,
    TwoShotLowLatency,
    TwoShotPull,
    TwoShotPush,
    is_low_latency,
)
from ...prepared import Prepare, Prepared
from ...scaled_tensor import E4M3, ScaledTensor
from ...tensor_checks import check_devices, dims, overlap
from ...torch_library import CallOptions
from ...transport.low_latency import VECTOR
from ...world import World
from ..common import split_rows
from ..recipes import check_quantized
from ..removed import unexpected
from .call import NORM, NORMS, PLAIN_SUM, SUMMED_DTYPES, NormOperands, SumCall, SumOperands, sum_call
from .kernels import ABSENT, LAYER, OWN, RMS, WHOLE
from .multicast import prepare_multicast, why_no_multicast
from .runs import (
    prepare_decomposed,
    prepare_one_shot,
    prepare_sequential,
    prepare_two_shot,
    prepare_two_shot_low_latency,
)
from .two_level import prepare_sum

WIDEST = 16384  # the largest number of columns that a program can hold in registers
SHORT = 512  # the size in bytes of the shortest row that was measured
STAGED = 64 << 20  # plans that post rows are timed if they need at most this many bytes for posted rows


class Reduce(Op[SumCall]):
    """The base class of the ops all-reduce and all-reduce + residual + norm."""

    runs: ClassVar[Mapping[type[Plan], Prepare]] = {
        Sequential: prepare_sequential,
        Decomposed: prepare_decomposed,
        OneShot: prepare_one_shot,
        TwoShotPush: prepare_two_shot,
        TwoShotPull: prepare_two_shot,
        TwoShotLowLatency: prepare_two_shot_low_latency,
        Multicast: prepare_multicast,
        TwoLevel: prepare_sum,
    }
    unsupported_fields: ClassVar[Mapping[type[Plan], Sequence[str]]] = {Decomposed: ("groups", "pieces")}
    batch_invariant_plans = TwoShotPush, TwoShotPull, TwoShotLowLatency, OneShot, Decomposed
    emulator_plan = TwoShotPush
    over_nodes: ClassVar[Sequence[Plan]] = (TwoLevel(), TwoLevel(4))
    depends_on_addresses = True

    def candidates(self, world: World, call: SumCall) -> Sequence[Plan]:
        """Return the plans that need at most STAGED bytes for staged rows. One-shot low-latency plans stage 3 (W + 1)
        times the bytes of x."""
        nbytes = call.m * call.h * call.dtype.itemsize
        return [
            plan for plan in self.autotune_plans if not is_low_latency(plan) or 3 * (world.size + 1) * nbytes <= STAGED
        ]

    def trial_key(self, call: SumCall) -> Hashable:
        """Return the call with M rounded in the same way as for trials of GEMMs. The key ignores epsilon."""
        return replace(call, m=stepped(call.m), eps=0.0, shape=())

    def sizes(self, call: SumCall) -> tuple[int, int, int]:
        return call.m, call.h, 1

    def outputs(self, world: World, call: SumCall) -> list[tuple[tuple[int, ...], torch.dtype]]:
        kept = call.m if call.keep == WHOLE.value else split_rows(world, call.m)[world.rank]
        scales = [(call.scales, torch.float32)] if call.group else []
        return [((call.m, call.h), call.out_dtype), *([((kept, call.h), call.dtype)] if call.keep else []), *scales]

    def unsupported(self, world: World, call: SumCall, plan: Plan, asked: str | Plan) -> str | None:
        if call.h * call.dtype.itemsize % VECTOR:
            return f"{call.m * call.h} elements are no whole 16-byte words"
        if isinstance(plan, TwoLevel):
            return "scales of rows do not go between nodes" if call.group else None
        # If the dtypes of the output and of x differ, a two-shot plan counts rows instead of posting them.
        if is_low_latency(plan) and (isinstance(plan, OneShot) or call.out_dtype == call.dtype):
            return world.backend.peers_unsupported
        reason = world.backend.symmetric_unsupported
        if reason is None and isinstance(plan, Multicast):
            reason = lacks(world.backend.capability, "multicast", "multicast addresses")
        return why_no_multicast(world, call) if reason is None and isinstance(plan, Multicast) else reason

    def batch_invariance_unsupported(self, world: World, call: SumCall, plan: Plan) -> str | None:
        if call.out_dtype == E4M3:
            return "plans may round rows of 8 bits in different places"
        if call.norm == LAYER.value and isinstance(plan, TwoShotLowLatency):
            return "its LayerNorm by pairs needs more registers than a thread has"  # it spills at H 8192
        return super().batch_invariance_unsupported(world, call, plan)

    def without_overlap(self, world: World, plan: Plan, operands: Operands, out: torch.Tensor) -> Operands:
        """Return the operands. Operands that overlap `out` are copied, because a program may store a row before another
        program has read it. No copy is needed if `out` is x itself and the plan posts no rows, because such a plan
        reads each row of x before it stores that row."""
        in_place = not is_low_latency(plan) and out.data_ptr() == operands[0].data_ptr()
        stream = world.current_stream()
        return type(operands)(
            *(
                t if t is None or (in_place and t is operands[0]) or not overlap(out, t) else _copy(t, world, stream)
                for t in operands
            )
        )

    def compared(self, plan: Plan, addresses: Hashable) -> Mapping[str, Hashable]:
        """If `out` and x are in symmetric memory, return their offsets, so that peers may write `out` and read x."""
        assert isinstance(addresses, tuple)
        x, out = (address if address and address[1] % 16 == 0 else None for address in addresses)
        return dict(out=out, x=x if isinstance(plan, Decomposed | Multicast | TwoShotPull) else None)

    def operand_addresses(self, world: World, operands: Operands, out: torch.Tensor | None) -> Hashable:
        """Return the symmetric offsets of x and `out`, or None for a tensor that is not in symmetric memory. Plans
        access symmetric tensors directly, and these accesses must be prepared before a capture."""
        x = operands[0]
        shared_x = world.shared(x) if x is not None else None
        shared_out = world.shared(out) if isinstance(out, torch.Tensor) else None
        return (shared_x and shared_x[1], shared_out and shared_out[1])

    def warm_up_capture(self, prepared: Prepared[SumCall], operands: Operands, out: torch.Tensor | None) -> None:
        """Make the call with the caller's x and `out`, because a plan may use their symmetric memory. If they overlap,
        make the call without `out`, because a repeated call would otherwise sum its own results."""
        prepared(operands, None if overlap(out, *operands[:2]) else out)


class AllReduceRmsNorm(Reduce):
    """The op all_reduce_rms_norm. The operands are x, residual, weight, bias and scale. The options are eps, norm, the
    dtype of the normalised rows or None, full_residual, and the recipe of 8-bit rows or None. The results are the rows,
    the new residual, and the scales or None."""

    name = NORM
    operand_type = NormOperands
    elementwise_passes = 2.0  # it reads the partial sum and the residual, and writes the rows and a new residual
    autotune_plans = (
        OneShot(warps=16),
        TwoShotLowLatency(),
        TwoShotPush(spread=True),
        TwoShotPull(programs=16),
    )
    signature = (
        "Tensor x, Tensor? residual, Tensor weight, Tensor? bias, Tensor? scale, float eps, str norm,"
        " ScalarType? out_dtype, bool full_residual, str? recipe"
    )
    results = 3

    def check(self, world: World, operands: NormOperands, options: CallOptions) -> SumCall:
        """Check the operands and options, and return the call. Raises ValueError or TypeError for every error that this
        rank can detect alone."""
        (x, residual, weight, bias, scale, kept), (eps, norm, out_dtype, full_residual, recipe) = operands, options
        _check_tensors(NORM, world, operands)
        if x.dim() != 2 or x.shape[0] < 1 or x.shape[1] < 1:
            raise ValueError(f"{NORM}: x must be [M, H] with M at least 1, got {dims(x)}")
        m, h = x.shape
        vector = 16 // x.dtype.itemsize
        if h % vector:
            raise ValueError(
                f"{NORM}: H {h} of x {dims(x)} is not a multiple of {vector} (rows of whole 16-byte words)"
            )
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
        if kept is not None and (kept.shape != (rows, h) or kept.dtype != x.dtype or not kept.is_contiguous()):
            raise ValueError(f"{NORM}: kept {dims(kept)} must be contiguous, [{rows}, {h}] {x.dtype}")
        if norm not in NORMS:
            raise ValueError(f'{NORM}: norm {norm!r} is not "rms" or "layer"')
        for name, t in (("weight", weight), ("bias", bias)):
            if t is not None and t.shape != (h,):
                raise ValueError(f"{NORM}: {name} {dims(t)} must be [{h}], as H of x {dims(x)}")
            if t is not None and t.dtype not in (x.dtype, torch.float32):
                raise TypeError(f"{NORM}: {name} is {dims(t)}; {x.dtype}, as x, or float32 is needed")
        group, out_dtype = 0, out_dtype or x.dtype
        if recipe is not None:
            group = check_quantized(f"{NORM}_quantized", world, x, h, recipe, scale, static=True)
            out_dtype = E4M3
        elif out_dtype not in SUMMED_DTYPES:
            raise TypeError(f"{NORM}: out_dtype {out_dtype} is not one of {[str(d) for d in SUMMED_DTYPES]}")
        layout = WHOLE if full_residual or world.size == 1 else OWN
        return SumCall(
            NORM,
            m,
            h,
            x.dtype,
            out_dtype,
            NORMS[norm].value,
            eps,
            (ABSENT if residual is None else layout).value,
            layout.value,
            bias is not None,
            scale is not None,
            group,
            world.batch_invariant,
        )


class AllReduce(Reduce):
    """The op all_reduce. The operand x has any shape; kernels treat it as a matrix (`call.sum_call`)."""

    name = PLAIN_SUM
    operand_type = SumOperands
    signature = "Tensor x"
    elementwise_passes = 0.0
    autotune_plans = (OneShot(), TwoShotLowLatency())

    def check(self, world: World, operands: SumOperands, options: CallOptions) -> SumCall:
        _check_tensors(PLAIN_SUM, world, operands)
        return sum_call(world, operands.x.shape, operands.x.dtype)

    def outputs(self, world: World, call: SumCall) -> list[tuple[tuple[int, ...], torch.dtype]]:
        return [(call.shape, call.dtype)]

    def meta(
        self, world: World, operands: SumOperands, options: CallOptions
    ) -> list[tuple[tuple[int, ...], torch.dtype]]:
        x = operands.x
        return [(tuple(x.shape), x.dtype)]

    def sizes(self, call: SumCall) -> tuple[int, int, int]:
        return call.m, call.h * call.dtype.itemsize // 2, 1  # the key is the size in bytes, counted in 16-bit elements

    def candidates(self, world: World, call: SumCall) -> Sequence[Plan]:
        """Return the plans to time. Plans are timed only for short rows, because the planner's measurements include no
        short rows."""
        return super().candidates(world, call) if self._short(world, call) else ()

    def expected(self, world: World, call: SumCall, mode: str) -> Plan:
        whole = call.h * call.dtype.itemsize % VECTOR == 0
        return super().expected(world, call, mode) if whole and not self._short(world, call) else Sequential()

    def _short(self, world: World, call: SumCall) -> bool:
        return call.h * call.dtype.itemsize < SHORT and call.m > world.sm_count


ALL_REDUCE_RMS_NORM, ALL_REDUCE = registered(AllReduceRmsNorm()), registered(AllReduce())


def all_reduce_rms_norm(
    x: torch.Tensor,
    residual: torch.Tensor | None,
    weight: torch.Tensor,
    eps: float = 1e-6,
    *,
    bias: torch.Tensor | None = None,
    norm: str = "rms",
    out_dtype: torch.dtype | None = None,
    full_residual: bool = False,
    out: torch.Tensor | None = None,
    world: World,
    plan: str | Plan = "auto",
    **removed: Never,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return norm(h) * weight + bias and h, where h = residual + the sum of x over ranks. The function performs the
    operations between a row-parallel layer and the next column-parallel layer (TokenWeave, section 4).

    Args:
        x: [M, H], this rank's part of the sum, bfloat16, float16 or float32. M is at least 1, H is at most 16,384, and
            the size of a row is a multiple of 16 bytes.
        residual: [m_r, H] of x's dtype, the rows that this rank owns (`weft.lang.balanced_rows(M, W)`, in rank order);
            with full_residual [M, H], the same on all ranks; or None.
        weight: [H], of x's dtype or float32, the same on all ranks.
        bias: [H], of x's dtype or float32, the same on all ranks. The bias is added after the norm.
        norm: "rms" (Zhang and Sennrich 2019) or "layer" (Ba et al. 2016).
        out_dtype: the dtype of the normalised rows: bfloat16, float16 or float32. None: the dtype of x.
        full_residual: if true, the old and the new residual are [M, H] on every rank instead of containing only this
            rank's rows. A two-shot plan then stores the new residual on all ranks, like the normalised rows.
        out: [M, H], contiguous: the tensor for the normalised rows. If `out` is in memory from `World.symmetric`, at
            the same offset on every rank, and the plan counts rows, peers store rows directly in `out`. If the plan
            posts rows, only this rank writes `out`. If `out` is in ordinary memory, a plan that counts rows copies them
            from symmetric memory to `out`. No rank writes `out` between the end of a call and this rank's next call.
        world: the ranks. All ranks must make the same call in the same order.
        plan: "auto", the name of a plan class ("sequential", "decomposed", "one_shot", "two_shot", "multicast"; on
            several nodes "two_level") or a Plan; the same on all ranks.

    The sum, the residual and the norm are computed in float32. The ranks' parts are added in rank order, or with
    "sequential" in NCCL's order. The new residual is rounded once.

    Returns:
        The normalised rows [M, H], the same bits on every rank, and the new residual h, [M, H] or [m_r, H].

    Memory, in addition to the outputs: all calls of the World share the symmetric memory. The op needs none of it
    (sequential), 3 (W + 1) M H elements (one shot), or, in two-shot plans that post, 3 M H elements, 3 M H more with a
    full residual, and 3 M' H more, where M' is M rounded up to a multiple of W. Two-shot plans that count rows use M H
    elements for the rows on their owners or, if rows are pulled, for an x that is not in memory from `World.symmetric`.
    For an output that is not in such memory, they use M H elements more, and for a full residual M H elements more.
    Multicast plans use as much memory as two-shot plans that pull, and decomposed plans use M H elements more than
    those.

    Raises:
        ValueError, TypeError: a shape, dtype or device is invalid; the message quotes it. An operand that requires a
            gradient also raises ValueError, because this op computes no gradient; use torch.no_grad().
        Mismatch, Timeout, WeftError: as for `all_gather_matmul`.

    Examples:
        >>> x, residual, weight = torch.ones(4, 8), torch.ones(2, 8), torch.ones(8)
        >>> def rank(world):
        ...     y, h = weft.all_reduce_rms_norm(x, residual, weight, world=world)
        ...     return tuple(y.shape), tuple(h.shape), h[0, 0].item()
        >>> weft.spmd(rank, 2, backend="emulated")
        [((4, 8), (2, 8), 3.0), ((4, 8), (2, 8), 3.0)]
    """
    if removed:
        raise unexpected(NORM, removed)
    options = float(eps), norm, out_dtype, full_residual, None
    y, kept, _ = ALL_REDUCE_RMS_NORM(world, plan, NormOperands(x, residual, weight, bias), options, out)
    return y, kept


def all_reduce_rms_norm_quantized(
    x: torch.Tensor,
    residual: torch.Tensor | None,
    weight: torch.Tensor,
    recipe: str,
    eps: float = 1e-6,
    *,
    bias: torch.Tensor | None = None,
    norm: str = "rms",
    scale: torch.Tensor | None = None,
    full_residual: bool = False,
    out: torch.Tensor | None = None,
    world: World,
    plan: str | Plan = "auto",
) -> tuple[ScaledTensor, torch.Tensor]:
    """Return `all_reduce_rms_norm` with 8-bit rows.

    The launches that compute the normalised rows also compute their scales. recipe: as in `weft.quantize`. scale:
    float32 [1], for the recipe "tensor" only, which requires it: the rows are divided by the scale and clamped to
    +-448. out: the tensor for the values. The remaining arguments and the errors are as for `all_reduce_rms_norm`.

    Examples:
        >>> x, weight = torch.ones(4, 16).bfloat16(), torch.ones(16).bfloat16()
        >>> def rank(world):
        ...     y, h = weft.all_reduce_rms_norm_quantized(x, None, weight, "row", world=world)
        ...     return tuple(y.values.shape), tuple(y.scales.shape), h[0, 0].item()
        >>> weft.spmd(rank, 2, backend="emulated")
        [((4, 16), (4, 1), 2.0), ((4, 16), (4, 1), 2.0)]
    """
    operands, options = NormOperands(x, residual, weight, bias, scale), (float(eps), norm, None, full_residual, recipe)
    y, kept, scales = ALL_REDUCE_RMS_NORM(world, plan, operands, options, out)
    return ScaledTensor(y, scales if scale is None else scale, recipe), kept


def posts_rows(world: World, m: int, h: int, dtype: torch.dtype, plan: str | Plan) -> bool:
    """Return whether eager calls of `all_reduce_rms_norm` with x [m, h] post rows. If they do, placing x or `out` in
    symmetric memory does not make them faster, because peers neither read x nor write `out`."""

    def chosen() -> bool:
        layout = OWN.value if world.size > 1 else WHOLE.value
        call = SumCall(NORM, m, h, dtype, dtype, RMS.value, 0.0, layout, layout, False, False)
        return is_low_latency(ALL_REDUCE_RMS_NORM.choose(world, call, plan, False))

    posts: bool = world.cached((NORM, "posts", m, h, dtype, plan), chosen)
    return posts


def all_reduce(
    x: torch.Tensor, *, world: World, plan: str | Plan = "auto", out: torch.Tensor | None = None
) -> torch.Tensor:
    """Return the sum of x over ranks, on every rank.

    Args:
        x: any shape, bfloat16, float16 or float32. If x is not contiguous, it is copied.
        world, plan, out: as for `all_reduce_rms_norm`; `out` has x's shape.

    The sum is computed in float32 in rank order, or with "sequential" in NCCL's order. The sequential plan always sums
    tensors whose size is not a multiple of 16 bytes.

    Returns:
        A tensor of x's shape, the same bits on every rank.

    Raises the errors of `all_reduce_rms_norm`.

    Examples:
        >>> x = torch.ones(2, 8)
        >>> weft.spmd(lambda world: weft.all_reduce(x, world=world)[0, 0].item(), 2, backend="emulated")
        [2.0, 2.0]
    """
    return ALL_REDUCE(world, plan, SumOperands(x), (), out)


def _check_tensors(op: str, world: World, operands: NormOperands | SumOperands) -> None:
    check_devices(op, world, operands._asdict())
    x = operands.x
    if x.dtype not in SUMMED_DTYPES:
        raise TypeError(f"{op}: x is {dims(x)}; bfloat16, float16 and float32 are supported")


def _copy(t: torch.Tensor, world: World, stream: Stream) -> torch.Tensor:
    """Copy `t` on the stream, and return the copy."""
    copied = world.empty(t.shape, t.dtype)
    world.copy(copied, t, stream)
    return copied
