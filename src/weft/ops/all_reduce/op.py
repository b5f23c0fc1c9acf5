"""All-reduce, and all-reduce + residual + norm (TokenWeave, section 4)."""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import replace
from typing import ClassVar, Unpack, overload

import torch

from ...architectures import ADA, HOPPER, lacks
from ...backends.base import Stream
from ...backends.library_gemm import stepped
from ...errors import Unsupported
from ...op import Direct, Op, Operands, Returned, Run, check_call, registered
from ...plans import (
    Decomposed,
    Multicast,
    OneShot,
    Plan,
    Sequential,
    TwoLevel,
    TwoShotCounted,
    TwoShotLowLatency,
    TwoShotPull,
    TwoShotPush,
    is_low_latency,
)
from ...tensor_checks import aligned, check_device, dense, dims, output, overlap
from ...torch_library import CallOptions
from ...transport.low_latency import VECTOR
from ...world import World
from ..common import OutOptions, split_rows
from ..recipes import E4M3, SCALE_BLOCK
from ..two_level import run_sum
from .call import NORM, NORMS, OUTPUTS, PLAIN_SUM, SUMMED_DTYPES, NormOperands, SumCall, SumOperands, Tensors, sum_call
from .kernels import ABSENT, OWN, RMS, WHOLE
from .multicast import run_multicast, why_no_multicast
from .runs import (
    post,
    posting,
    run_decomposed,
    run_one_shot,
    run_sequential,
    run_two_shot,
    run_two_shot_low_latency,
)

WIDEST = 16384  # columns that a program holds in registers
SHORT = 512  # bytes of a row, of which shorter ones were not measured
STAGED = 64 << 20  # bytes of memory for rows that are posted, up to which they are timed


class Reduce(Op[SumCall]):
    """All-reduce, and what may come behind it."""

    runs: ClassVar[Mapping[type[Plan], Run]] = {
        Sequential: run_sequential,
        Decomposed: run_decomposed,
        OneShot: run_one_shot,
        TwoShotPush: run_two_shot,
        TwoShotPull: run_two_shot,
        TwoShotLowLatency: run_two_shot_low_latency,
        Multicast: run_multicast,
        TwoLevel: run_sum,
    }
    refuses: ClassVar[Mapping[type[Plan], Sequence[str]]] = {Decomposed: ("groups", "pieces")}
    small = TwoShotPush
    over_nodes: ClassVar[Sequence[Plan]] = (TwoLevel(), TwoLevel(4))
    depends_on_addresses = True

    def candidates(self, world: World, call: SumCall) -> Sequence[Plan]:
        """Return the plans whose memory for staged rows is in proportion: low-latency rows take (W + 1) times theirs,
        three times over, in one shot."""
        nbytes = call.m * call.h * call.dtype.itemsize
        return [plan for plan in self.tries if not is_low_latency(plan) or 3 * (world.size + 1) * nbytes <= STAGED]

    def trial_key(self, call: SumCall) -> Hashable:
        """Return the call with its number of rows as the library's GEMM counts M."""
        return replace(call, m=stepped(call.m))

    def sizes(self, call: SumCall) -> tuple[int, int, int]:
        return call.m, call.h, 1

    def outputs(self, world: World, call: SumCall) -> list[tuple[tuple[int, ...], torch.dtype]]:
        kept = call.m if call.keep == WHOLE.value else split_rows(world, call.m)[world.rank]
        scales = [(call.scales, torch.float32)] if call.group else []
        return [((call.m, call.h), call.out_dtype), *([((kept, call.h), call.dtype)] if call.keep else []), *scales]

    def fits(self, world: World, call: SumCall, plan: Plan, asked: str | Plan) -> str | None:
        if call.h * call.dtype.itemsize % VECTOR:
            return f"{call.m * call.h} elements are no whole 16-byte words"
        if isinstance(plan, TwoLevel):
            return "scales of rows do not go between nodes" if call.group else None
        # With another dtype of the output a two-shot plan counts rows.
        if is_low_latency(plan) and (isinstance(plan, OneShot) or call.out_dtype == call.dtype):
            return world.peer_reason
        reason = world.symmetric_reason
        if reason is None and (isinstance(plan, Multicast) or (isinstance(plan, TwoShotCounted) and plan.bulk)):
            reason = lacks(world.capability, HOPPER, "bulk copies and multicast")
        return why_no_multicast(world, call) if reason is None and isinstance(plan, Multicast) else reason

    def execute(
        self, world: World, call: SumCall, plan: Plan, operands: Operands, out: torch.Tensor | None
    ) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor | None]:
        """Peers may write to `out` where it is symmetric, and read x: so whether they do is agreed."""
        x, residual, weight, bias, scale = operands
        x, stream = dense(x) if call.h else x, world.current_stream()
        # A program may be done with a row that another has yet to read: here of x, and below.
        in_place = not is_low_latency(plan) and isinstance(out, torch.Tensor) and out.data_ptr() == x.data_ptr()
        if isinstance(out, torch.Tensor) and overlap(out, x) and not in_place:
            x = _apart(x, world, stream)
        place = (
            world.shared(out) if isinstance(out, torch.Tensor) and out.data_ptr() % 16 == 0 else None
        )  # in whole words
        source = world.shared(x) if _pulls(plan) else None
        world.check()
        world.begin(self.check_same_on_all_ranks(world, call, plan, out=place and place[1], x=source and source[1]))
        (shape, dtype), *more = self.outputs(world, call)
        result = output(self.name, world, out, shape, dtype)
        kept = world.empty(*more[0]) if call.keep else None
        scales = world.empty(*more[-1]) if call.group else None
        if call.m == 0:
            return result, kept, scales
        residual, weight, bias, scale = (
            t if t is None else _apart(dense(t), world, stream) if overlap(out, t) else dense(t)
            for t in (residual, weight, bias, scale)
        )
        shared = source and source[0], place and place[0]
        t = Tensors(x, residual, weight, bias, scale, result, kept, *shared, scales)
        self.runs[type(plan)](world, call, plan, t, stream)
        world.finish(stream)
        return result, kept, scales

    def check_same_on_all_ranks(self, world: World, call: SumCall, plan: Plan, **places: Hashable) -> int | None:
        return (
            super().check_same_on_all_ranks(world, call, plan, **places) if places else None
        )  # as `execute` knows them

    def operand_addresses(self, world: World, operands: Operands, out: torch.Tensor | None) -> Hashable:
        """Return where x and `out` lie in symmetric memory, None for one that does not: there plans read and write
        directly, which a capture must find prepared."""
        x = operands[0]
        source = world.shared(x) if x is not None else None
        place = world.shared(out) if isinstance(out, torch.Tensor) else None
        return (source and source[1], place and place[1])

    def rehearse(self, world: World, call: SumCall, plan: Plan, operands: Operands, out: torch.Tensor | None) -> None:
        """Make the call where x and `out` lie, which a plan may make use of, unless they overlap: it must not sum
        sums."""
        self.execute(world, call, plan, operands, None if overlap(out, *operands[:2]) else out)


class AllReduceRmsNorm(Reduce):
    """Operands: x, residual, weight, bias, scale; options: eps, norm, dtype of the normalised rows or None, full
    residual, recipe of scales to return or "". Returns the rows, the new residual, and scales or None."""

    name = NORM
    takes = NormOperands
    alone = 2.0  # a partial sum and the residual are read, the new ones written
    tries = (
        OneShot(warps=16),
        TwoShotLowLatency(),
        TwoShotPush(rows=4, spread=True),
        TwoShotPush(warps=8, bulk=True, spread=True),
    )
    signature = (
        "Tensor x, Tensor? residual, Tensor weight, Tensor? bias, Tensor? scale, float eps, str norm,"
        " ScalarType? out_dtype, bool full_residual, str quantize"
    )
    results = 3

    def check(self, world: World, operands: NormOperands, options: CallOptions) -> SumCall:
        return _described(world, operands, *options)

    def direct(self, world: World, call: SumCall, plan: Plan) -> Direct | None:
        """Return a direct function for plans of few rows, where the host's time is most of a call's; None for
        others."""
        if not is_low_latency(plan) or call.out_dtype != call.dtype:
            return None
        number = Op.check_same_on_all_ranks(self, world, call, plan, out=None, x=None)  # as `execute` has it
        prepared_for = posting(world, call, plan)
        (shape, dtype), *more = self.outputs(world, call)
        check, current, finish = world.check, world.current_stream, world.finish

        def run(x: torch.Tensor, *others: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor | None, None]:
            check()
            world.begin(number)
            stream, y = current(), world.empty(shape, dtype)
            kept = world.empty(*more[0]) if more else None
            residual, weight, bias, scale = (None if t is None else aligned(t) for t in others)
            post(world, prepared_for, Tensors(aligned(x), residual, weight, bias, scale, y, kept), stream)
            finish(stream)
            return y, kept, None

        return run


class AllReduce(Reduce):
    """Operand: x, of any shape. Rows are as many elements as serve the kernels (`_columns`)."""

    name = PLAIN_SUM
    takes = SumOperands
    signature = "Tensor x"
    alone = 0.0
    tries = (OneShot(), TwoShotLowLatency())

    def check(self, world: World, operands: SumOperands, options: CallOptions) -> SumCall:
        x = operands.x
        _checked(PLAIN_SUM, world, dict(x=x))
        return sum_call(world, x.shape, x.dtype)

    def meta(
        self, world: World, operands: SumOperands, options: CallOptions
    ) -> list[tuple[tuple[int, ...], torch.dtype]]:
        x = operands.x
        return [(tuple(x.shape), x.dtype)]

    def execute(
        self, world: World, call: SumCall, plan: Plan, operands: SumOperands, out: torch.Tensor | None
    ) -> Returned:
        x = operands.x
        y = None if out is None else output(self.name, world, out, x.shape, x.dtype).view(call.m, call.h)
        rows = dense(x).view(call.m, call.h)
        made, *_ = super().execute(world, call, plan, NormOperands(rows), y)
        return made.view(x.shape) if out is None else out

    def sizes(self, call: SumCall) -> tuple[int, int, int]:
        return call.m, call.h * call.dtype.itemsize // 2, 1  # bytes decide, in elements of two

    def candidates(self, world: World, call: SumCall) -> Sequence[Plan]:
        """Return what is timed: rows that are shorter than what was measured, and all without a profile."""
        return super().candidates(world, call) if self._short(world, call) else ()

    def expected(self, world: World, call: SumCall, mode: str) -> Plan:
        whole = call.h * call.dtype.itemsize % VECTOR == 0
        return super().expected(world, call, mode) if whole and not self._short(world, call) else Sequential()

    def _short(self, world: World, call: SumCall) -> bool:
        return call.h * call.dtype.itemsize < SHORT and call.m > world.sm_count

    def direct(self, world: World, call: SumCall, plan: Plan) -> Direct | None:
        if not isinstance(plan, Sequential) and not is_low_latency(plan):
            return None
        number = Op.check_same_on_all_ranks(self, world, call, plan, out=None, x=None)  # as `execute` has it
        check, current, finish = world.check, world.current_stream, world.finish
        if not is_low_latency(plan):
            copied, all_reduce = world.results, world.all_reduce

            def sum_copy(x: torch.Tensor) -> torch.Tensor:
                check()
                world.begin(number)
                stream = current()
                (y,) = copied(lambda: (x.clone(),), [(x.shape, x.dtype)], [x], stream)
                all_reduce(y, stream)
                finish(stream)
                return y

            return sum_copy
        prepared_for = posting(world, call, plan)

        def run(x: torch.Tensor) -> torch.Tensor:
            check()
            world.begin(number)
            stream, y = current(), world.empty(x.shape, x.dtype)
            post(world, prepared_for, Tensors(aligned(x), None, None, None, None, y, None), stream)
            finish(stream)
            return y

        return run


ALL_REDUCE_RMS_NORM, ALL_REDUCE = registered(AllReduceRmsNorm()), registered(AllReduce())


class NormOptions(OutOptions, total=False):
    bias: torch.Tensor | None
    norm: str
    out_dtype: torch.dtype | None
    scale: torch.Tensor | None
    full_residual: bool


@overload
def all_reduce_rms_norm(
    x: torch.Tensor,
    residual: torch.Tensor | None,
    weight: torch.Tensor,
    eps: float = 1e-6,
    *,
    quantize: None = None,
    **options: Unpack[NormOptions],
) -> tuple[torch.Tensor, torch.Tensor]: ...
@overload
def all_reduce_rms_norm(
    x: torch.Tensor,
    residual: torch.Tensor | None,
    weight: torch.Tensor,
    eps: float = 1e-6,
    *,
    quantize: str,
    **options: Unpack[NormOptions],
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]: ...
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
    quantize: str | None = None,
    out: torch.Tensor | None = None,
    world: World,
    plan: str | Plan = "auto",
) -> tuple[torch.Tensor, torch.Tensor] | tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """norm(h) * weight + bias and h, for h = residual + the sum of x over ranks: what stands between a row-parallel
    layer and the next column-parallel one (TokenWeave, section 4).

    Args:
        x: [M, H], this rank's part of the sum. M at least 1; H at most 16,384, its rows whole 16-byte words. bfloat16,
            float16 or float32, as the residual.
        residual: [m_r, H], the rows that this rank owns (`weft.lang.balanced_rows(M, W)`, in the order of the ranks);
            with full_residual [M, H], the same on all ranks; or None.
        weight: [H], of x's dtype or float32, the same on all ranks.
        bias: [H], as the weight: added after the norm.
        norm: "rms" (Zhang and Sennrich 2019) or "layer" (Ba et al. 2016).
        out_dtype: of the normalised rows; None: x's.
        scale: float32 [1]: the normalised rows are divided by it and clamped to +-448. Goes with out_dtype
            torch.float8_e4m3fn, and is needed there without `quantize`.
        quantize: "row" or "block": the normalised rows are float8_e4m3fn, divided by scales of their own, one a row or
            one for each 128 columns, as `weft.quantize` has them, and the scales are returned too.
        full_residual: the residual, old and new, is [M, H] on every rank, not this rank's rows alone. In two shots the
            new one travels as the normalised rows do.
        out: [M, H], contiguous, where to write the normalised rows. In memory of `World.symmetric` (the same place on
            every rank) the peers store there directly, if the plan counts rows; where it posts them this rank alone
            writes `out`. Into any other tensor a plan that counts copies them from the library's own. Between two calls
            it is the caller's: it is not written before this rank's next call.
        world: the ranks. All of them must make the same call in the same order.
        plan: "auto", a kind ("sequential", "decomposed", "one_shot", "two_shot", "multicast"; over nodes "two_level")
            or a Plan; the same on all ranks.

    Computed in float32: the sum in the order of the ranks ("sequential": as NCCL does it), the residual, the norm; the
    new residual is rounded once.

    Returns:
        The normalised rows [M, H], the same bits on every rank, and the new residual h, [M, H] or [m_r, H]; with
        `quantize` also the scales, float32 [M, 1] or [M, H / 128].

    Memory beside the outputs, symmetric and shared by all calls of the World: none (sequential), 3 (W + 1) M H elements
    (one shot), 3 M H, and 3 M H more with a full residual, and 3 H for each of the M rows rounded up to a multiple of W
    (two shots, posted). Other two shots: M H for what is stored at the owner or, pulled, for x unless it lies in memory
    of `World.symmetric`; M H each for the output, unless `out` does, and for a full residual. Decomposed and multicast:
    as two shots, pulled; for decomposed also M H of ordinary memory during the call.

    Raises:
        ValueError, TypeError: shapes, dtypes or devices that do not fit, quoted; an operand that requires a gradient
            (there
            is none for this op: use torch.no_grad()).
        Mismatch, Timeout, WeftError: as `all_gather_matmul`.
    """
    options = float(eps), norm, out_dtype, full_residual, quantize or ""
    y, kept, scales = ALL_REDUCE_RMS_NORM(world, plan, NormOperands(x, residual, weight, bias, scale), options, out)
    return (y, kept, scales) if quantize else (y, kept)


def posts_rows(world: World, m: int, h: int, dtype: torch.dtype, plan: str | Plan) -> bool:
    """Whether eager calls of `all_reduce_rms_norm` with such an x post its rows: then they gain nothing from x or `out`
    in symmetric memory, where peers neither read nor write."""

    def chosen() -> bool:
        layout = OWN.value if world.size > 1 else WHOLE.value
        call = SumCall(NORM, m, h, dtype, dtype, RMS.value, 0.0, layout, layout, False, False)
        return is_low_latency(ALL_REDUCE_RMS_NORM.choose(world, call, plan, False))

    found: bool = world.cached((NORM, "posts", m, h, dtype, plan), chosen)
    return found


def all_reduce(
    x: torch.Tensor, *, world: World, plan: str | Plan = "auto", out: torch.Tensor | None = None
) -> torch.Tensor:
    """The sum of x over ranks, on every rank.

    Args:
        x: any shape, bfloat16, float16 or float32; contiguous or not (then it is copied).
        world, plan, out: as for `all_reduce_rms_norm`; `out` of x's shape.

    Summed in float32 in the order of the ranks ("sequential": as NCCL does it). Sizes that are no multiple of 16 bytes
    are always sequential.

    Returns:
        A tensor of x's shape, the same bits on every rank.

    Raises as `all_reduce_rms_norm`.
    """
    return ALL_REDUCE(world, plan, SumOperands(x), (), out)


def _checked(op: str, world: World, tensors: dict[str, torch.Tensor | None]) -> None:
    check_call(op, world)
    for name, t in tensors.items():
        if t is not None or name in ("x", "weight"):
            check_device(op, world, name, t)
    x = tensors["x"]
    assert x is not None
    if x.dtype not in SUMMED_DTYPES:
        raise TypeError(f"{op}: x is {dims(x)}; bfloat16, float16 and float32 are supported")


def _described(
    world: World,
    operands: NormOperands,
    eps: float,
    norm: str,
    out_dtype: torch.dtype | None,
    full_residual: bool,
    quantize: str,
) -> SumCall:
    """The call, validated: ValueError or TypeError for anything that this rank alone can see is wrong."""
    x, residual, weight, bias, scale = operands
    _checked(NORM, world, dict(x=x, residual=residual, weight=weight, bias=bias, scale=scale))
    assert x is not None
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
    out_dtype = _checked_output(world, x, out_dtype, scale, quantize)
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
        {"": 0, "row": h, "block": SCALE_BLOCK}[quantize],
    )


def _checked_output(
    world: World, x: torch.Tensor, out_dtype: torch.dtype | None, scale: torch.Tensor | None, quantize: str
) -> torch.dtype:
    """The dtype of the normalised rows."""
    if quantize not in ("", "row", "block"):
        raise ValueError(f'{NORM}: quantize {quantize!r} is not "row" or "block"; by tensor: out_dtype and scale')
    if quantize and (scale is not None or out_dtype not in (None, E4M3)):
        raise ValueError(
            f"{NORM}: quantize={quantize!r} gives {E4M3} and scales, and takes no other out_dtype, nor a scale"
        )
    if quantize == "block" and x.shape[1] % SCALE_BLOCK:
        raise ValueError(
            f"{NORM}: H {x.shape[1]} of x {dims(x)} is not a multiple of {SCALE_BLOCK}, for scales by block"
        )
    dtype = E4M3 if quantize else out_dtype or x.dtype
    if dtype not in OUTPUTS:
        raise TypeError(f"{NORM}: out_dtype {dtype} is not one of {[str(d) for d in OUTPUTS]}")
    if (dtype == E4M3) != (scale is not None) and not quantize:
        raise ValueError(
            f"{NORM}: a scale goes with out_dtype torch.float8_e4m3fn, and only there; out_dtype is {dtype}"
        )
    if dtype == E4M3 and (missing := lacks(world.capability, ADA, "results in float8_e4m3fn")):
        raise Unsupported(f"{NORM}: {missing}")
    if scale is not None and (scale.numel() != 1 or scale.dtype != torch.float32):
        raise ValueError(f"{NORM}: scale {dims(scale)} must be float32 [1]")
    return dtype


def _apart(t: torch.Tensor, world: World, stream: Stream) -> torch.Tensor:
    """A copy of `t`, as it is now."""
    copied = world.empty(t.shape, t.dtype)
    world.copy(copied, t, stream)
    return copied


def _pulls(plan: Plan) -> bool:
    """Whether peers read x where it lies, if that is in symmetric memory."""
    return isinstance(plan, Decomposed | Multicast | TwoShotPull)
