"""How all-reduces run, with or without a residual add and norm behind the sum (TokenWeave, section 4).

Sequential: NCCL's all-reduce, then one kernel. One shot and two shots: one launch
(ops/all_reduce/low_latency_kernels.py for few rows, ops/all_reduce/kernels.py). Decomposed: two shots whose rows a copy
engine moves, so that SMs are taken only for the owner's sums between them. Multicast: two shots in one launch whose
sums and stores are the switch's; compiled and emulated, never run on hardware.
"""

from __future__ import annotations

import itertools
from collections.abc import Hashable
from dataclasses import dataclass, replace

import torch
import triton.language as tl
from triton.tools.tensor_descriptor import TensorDescriptor

from ...architectures import ADA, HOPPER, lacks, shared_kib
from ...backends.base import Arguments, Stream, SymmetricTensor
from ...errors import Unsupported
from ...lang.host import beyond
from ...lang.jit import constants
from ...library import CallOptions
from ...op import Call, Direct, Op, Operands, Returned, check_call, registered
from ...operands import aligned, check_device, dense, dims, output, overlap, places
from ...plans import SMALL_REDUCE, Decomposed, Multicast, OneShot, Plan, Sequential, TwoShot, posts
from ...transport import low_latency as posted
from ...transport.copies import COPIES
from ...transport.low_latency import VECTOR
from ...transport.memory import Flat, flat, lock, rank_word
from ...world import World
from ..common import split_rows
from .kernels import (
    ABSENT,
    LAYER,
    OWN,
    PLAIN,
    RMS,
    WHOLE,
    Norm,
    Places,
    Shots,
    add_norm,
    multicast_shot,
    sum_norm,
    two_shot,
)
from .low_latency_kernels import one_shot, two_shot_low_latency

NORM, _SUM = "all_reduce_rms_norm", "all_reduce"
_DTYPES = {torch.bfloat16: tl.bfloat16, torch.float16: tl.float16, torch.float32: tl.float32}
OUTPUTS = {**_DTYPES, torch.float8_e4m3fn: tl.float8e4nv}
NORMS = {"rms": RMS, "layer": LAYER}
WIDEST = 16384  # columns that a program holds in registers
REST_KIB = 11  # of a program's shared memory, that rows under way do not take
SHORT = 512  # bytes of a row
LINE = 128  # bytes of a row that bulk copies take as one line, of at most 256


Symmetric = SymmetricTensor | None


@dataclass(frozen=True)
class SumCall(Call):
    """What one call computes, besides its plan. `residual`, `keep`: ABSENT, OWN or WHOLE."""

    op: str
    m: int
    h: int
    dtype: torch.dtype
    out_dtype: torch.dtype
    norm: int
    eps: float
    residual: int
    keep: int
    bias: bool
    scaled: bool

    @property
    def rows(self) -> int:
        return self.m

    @property
    def padded(self) -> int:
        """P: H rounded up to a power of two."""
        return 1 << (self.h - 1).bit_length()

    @property
    def computed(self) -> Norm:
        """As the kernels take it."""
        made = constants(
            Norm,
            eps=0.0,
            DTYPE=_DTYPES[self.dtype],
            OUT=OUTPUTS[self.out_dtype],
            H=self.h,
            P=self.padded,
            NORM=self.norm,
            BIAS=self.bias,
            SCALED=self.scaled,
            RESIDUAL=self.residual,
            KEEP=self.keep,
        )
        return made._replace(eps=self.eps)

    def lines(self, dtype: torch.dtype) -> bool:
        """Whether bulk copies can take a row of this dtype: in whole lines, and not too many."""
        nbytes = self.h * dtype.itemsize
        return nbytes % LINE == 0 and self.padded * dtype.itemsize <= 256 * LINE

    def options(self, warps: int, per_sm: int = 1) -> dict[str, int]:
        """As many warps as asked for, but a thread has from 16 to 256 bytes of a row. All registers of the SM: ptxas
        would spill a word here and there to make room for one more program."""
        row = self.padded * self.dtype.itemsize
        warps = max(1, min(max(warps, row // 8192), row // 512))
        return dict(num_warps=warps, maxnreg=min(255, 65536 // (32 * warps * per_sm)))


@dataclass
class Tensors:
    """A call's operands, and where its results go; `residual` and `kept` may be None."""

    x: torch.Tensor
    residual: torch.Tensor | None
    weight: torch.Tensor | None
    bias: torch.Tensor | None
    scale: torch.Tensor | None
    out: torch.Tensor
    kept: torch.Tensor | None

    def arguments(self) -> dict[str, torch.Tensor]:
        given = dict(
            residual=self.residual, new_residual=self.kept, weight=self.weight, bias=self.bias, scale=self.scale
        )
        return {name: self.x if t is None else t for name, t in given.items()}

    def of(self, call: SumCall) -> dict[str, object]:
        """What the kernels take of a call alike, but for where results go."""
        return dict(self.moving(), M=call.m, norm=call.computed)

    def moving(self) -> dict[str, torch.Tensor]:
        """What a launch takes of a call and may lie elsewhere at the next."""
        return dict(x=self.x, **self.arguments())

    def kinds(self) -> tuple[Hashable, ...]:
        """For the key of a launch: the dtypes that a Call does not say."""
        return tuple(None if t is None else t.dtype for t in (self.weight, self.bias))

    def places(self) -> tuple[Hashable, ...]:
        """For the key of a launch, with its addresses."""
        at = places(self.x, self.residual, self.weight, self.bias, self.scale, self.out, self.kept)
        return (*at, *self.kinds())


class Reduce(Op[SumCall]):
    """All-reduce, and what may come behind it."""

    runs = {
        Sequential: "_sequential",
        Decomposed: "_decomposed",
        OneShot: "_one_shot",
        TwoShot: "_two_shot",
        Multicast: "_multicast",
    }
    small = SMALL_REDUCE

    def sizes(self, call: SumCall) -> tuple[int, int, int]:
        return call.m, call.h, 1

    def outputs(self, world: World, call: SumCall) -> list[tuple[tuple[int, ...], torch.dtype]]:
        kept = call.m if call.keep == WHOLE.value else split_rows(world, call.m)[world.rank]
        return [((call.m, call.h), call.out_dtype), *([((kept, call.h), call.dtype)] if call.keep else [])]

    def fits(self, world: World, call: SumCall, plan: Plan, asked: str | Plan) -> str | None:
        if call.h * call.dtype.itemsize % VECTOR:
            return f"{call.m * call.h} elements are no whole 16-byte words"
        if posts(plan) and (isinstance(plan, OneShot) or call.out_dtype == call.dtype):  # else rows are counted
            return world.peer_reason
        reason = world.symmetric_reason
        if reason is None and (isinstance(plan, Multicast) or (isinstance(plan, TwoShot) and plan.bulk)):
            reason = lacks(world.capability, HOPPER, "bulk copies and multicast")
        return _no_multicast(call, world) if reason is None and isinstance(plan, Multicast) else reason

    def execute(
        self, world: World, call: SumCall, plan: Plan, operands: Operands, out: torch.Tensor | None
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Peers may write to `out` where it is symmetric, and read x: so whether they do is agreed."""
        x, residual, weight, bias, scale = operands
        assert x is not None
        x = dense(x) if call.h else x
        place = (
            world.shared(out) if isinstance(out, torch.Tensor) and out.data_ptr() % 16 == 0 else None
        )  # in whole words
        source = world.shared(x) if _pulls(plan) else None
        world.check()
        self.agree(world, call, plan, out=place and place[1], x=source and source[1])
        (shape, dtype), *more = self.outputs(world, call)
        result = output(self.name, world, out, shape, dtype)
        kept = world.empty(*more[0]) if more else None
        if call.m == 0:
            return result, kept
        stream = world.current_stream()
        weight, bias, scale = (None if t is None else dense(t) for t in (weight, bias, scale))
        # A program may be done with a row that another has yet to read.
        if residual is not None:
            residual = _apart(dense(residual), world, stream) if overlap(out, residual) else dense(residual)
        if posts(plan) and overlap(out, x):
            x = _apart(x, world, stream)
        t = Tensors(x, residual, weight, bias, scale, result, kept)
        run = getattr(self, self.runs[type(plan)])
        run(world, call, plan, t, stream, place and place[0], source and source[0])
        world.finish(stream)
        return result, kept

    def agree(self, world: World, call: SumCall, plan: Plan, **places: Hashable) -> None:
        if places:  # as `execute` knows them
            super().agree(world, call, plan, **places)

    def lie(self, world: World, operands: Operands, out: torch.Tensor | None) -> Hashable:
        """In symmetric memory: there plans read and write directly, which a capture must find prepared."""
        x = operands[0]
        source = world.shared(x) if x is not None else None
        place = world.shared(out) if isinstance(out, torch.Tensor) else None
        return (source and source[1], place and place[1])

    def rehearse(self, world: World, call: SumCall, plan: Plan, operands: Operands, out: torch.Tensor | None) -> None:
        """Where x and `out` lie, which a plan may make use of; but it must not sum sums."""
        self.execute(world, call, plan, operands, None if overlap(out, *operands[:2]) else out)

    # -- the kinds of plans
    def _sequential(self, world: World, call: SumCall, plan: Plan, t: Tensors, stream: Stream, *_: object) -> None:
        _sequential(call, t, world, stream)

    def _one_shot(self, world: World, call: SumCall, plan: OneShot, t: Tensors, stream: Stream, *_: object) -> None:
        _posted(world.cached((call, plan), lambda: _posting(call, world, plan)), t, world, stream)

    def _two_shot(
        self, world: World, call: SumCall, plan: TwoShot, t: Tensors, stream: Stream, out: Symmetric, source: Symmetric
    ) -> None:
        if plan.post and call.out_dtype == call.dtype:
            _posted(world.cached((call, plan), lambda: _posting(call, world, plan)), t, world, stream)
        else:
            _two_shot(call, t, world, plan, stream, out, source)

    def _decomposed(
        self, world: World, call: SumCall, plan: Plan, t: Tensors, stream: Stream, out: Symmetric, source: Symmetric
    ) -> None:
        _decomposed(call, t, world, stream, out, source)

    def _multicast(
        self,
        world: World,
        call: SumCall,
        plan: Multicast,
        t: Tensors,
        stream: Stream,
        out: Symmetric,
        source: Symmetric,
    ) -> None:
        _multicast(call, t, world, plan, stream, out, source)


class AllReduceRmsNorm(Reduce):
    """Operands: x, residual, weight, bias, scale; options: eps, norm, dtype of the normalised rows or None, full
    residual. Returns them and the new residual."""

    name = NORM
    signature = (
        "Tensor x, Tensor? residual, Tensor weight, Tensor? bias, Tensor? scale, float eps, str norm,"
        " ScalarType? out_dtype, bool full_residual"
    )
    results = 2

    def check(self, world: World, operands: Operands, options: CallOptions) -> SumCall:
        return _described(world, operands, *options)

    def direct(self, world: World, call: SumCall, plan: Plan) -> Direct | None:
        """Of few rows, whose host time is most of a call's."""
        if not posts(plan) or call.out_dtype != call.dtype:
            return None
        Op.agree(self, world, call, plan, out=None, x=None)  # as `execute` has it
        of = world.cached((call, plan), lambda: _posting(call, world, plan))
        (shape, dtype), *more = self.outputs(world, call)
        check, current, finish = world.check, world.current_stream, world.finish

        def post(x: torch.Tensor, *others: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor | None]:
            check()
            stream, y = current(), world.empty(shape, dtype)
            kept = world.empty(*more[0]) if more else None
            residual, weight, bias, scale = (None if t is None else aligned(t) for t in others)
            _posted(of, Tensors(aligned(x), residual, weight, bias, scale, y, kept), world, stream)
            finish(stream)
            return y, kept

        return post


class AllReduce(Reduce):
    """Operand: x, of any shape. Rows are as many elements as serve the kernels (`_columns`)."""

    name = _SUM
    signature = "Tensor x"
    alone = True

    def check(self, world: World, operands: Operands, options: CallOptions) -> SumCall:
        (x,) = operands
        _checked(_SUM, world, dict(x=x))
        assert x is not None
        return _sum(x, world)

    def meta(self, world: World, operands: Operands, options: CallOptions) -> list[tuple[tuple[int, ...], torch.dtype]]:
        (x,) = operands
        assert x is not None
        return [(tuple(x.shape), x.dtype)]

    def execute(
        self, world: World, call: SumCall, plan: Plan, operands: Operands, out: torch.Tensor | None
    ) -> Returned:
        (x,) = operands
        assert x is not None
        y = None if out is None else output(self.name, world, out, x.shape, x.dtype).view(call.m, call.h)
        rows = dense(x).view(call.m, call.h)
        made, _ = super().execute(world, call, plan, (rows, None, None, None, None), y)
        return made.view(x.shape) if out is None else out

    def sizes(self, call: SumCall) -> tuple[int, int, int]:
        return call.m, call.h * call.dtype.itemsize // 2, 1  # bytes decide, in elements of two

    def auto(self, world: World, call: SumCall, mode: str) -> Plan:
        row = call.h * call.dtype.itemsize
        if row % VECTOR or (row < SHORT and call.m > world.sm_count):
            return Sequential()  # rows too short for what was measured
        return super().auto(world, call, mode)

    def direct(self, world: World, call: SumCall, plan: Plan) -> Direct | None:
        if not isinstance(plan, Sequential) and not posts(plan):
            return None
        check, current, finish = world.check, world.current_stream, world.finish
        if not posts(plan):
            copied, all_reduce = world.results, world.all_reduce

            def sum_copy(x: torch.Tensor) -> torch.Tensor:
                check()
                stream = current()
                (y,) = copied(lambda: (x.clone(),), [(x.shape, x.dtype)], [x], stream)
                all_reduce(y, stream)
                finish(stream)
                return y

            return sum_copy
        of = world.cached((call, plan), lambda: _posting(call, world, plan))

        def post(x: torch.Tensor) -> torch.Tensor:
            check()
            stream, y = current(), world.empty(x.shape, x.dtype)
            _posted(of, Tensors(aligned(x), None, None, None, None, y, None), world, stream)
            finish(stream)
            return y

        return post


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
    scale: torch.Tensor | None = None,
    full_residual: bool = False,
    out: torch.Tensor | None = None,
    world: World,
    plan: str | Plan = "auto",
) -> tuple[torch.Tensor, torch.Tensor]:
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
            torch.float8_e4m3fn, and is needed there.
        full_residual: the residual, old and new, is [M, H] on every rank, not this rank's rows alone. In two shots the
            new one travels as the normalised rows do.
        out: [M, H], contiguous, where to write the normalised rows. In memory of `World.symmetric` (the same place on
            every rank) the peers store there directly, if the plan counts rows; where it posts them this rank alone
            writes `out`. Into any other tensor a plan that counts copies them from the library's own. Between two calls
            it is the caller's: it is not written before this rank's next call.
        world: the ranks. All of them must make the same call in the same order.
        plan: "auto", a kind ("sequential", "decomposed", "one_shot", "two_shot", "multicast") or a Plan; the same on
            all ranks.

    Computed in float32: the sum in the order of the ranks ("sequential": as NCCL does it), the residual, the norm; the
    new residual is rounded once.

    Returns:
        The normalised rows [M, H], the same bits on every rank, and the new residual h, [M, H] or [m_r, H].

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
    options = float(eps), norm, out_dtype, full_residual
    y, kept = ALL_REDUCE_RMS_NORM(world, plan, (x, residual, weight, bias, scale), options, out)
    return y, kept


def posts_rows(world: World, m: int, h: int, dtype: torch.dtype, plan: str | Plan) -> bool:
    """Whether eager calls of `all_reduce_rms_norm` with such an x post its rows: then they gain nothing from x or `out`
    in symmetric memory, where peers neither read nor write."""

    def chosen() -> bool:
        layout = OWN.value if world.size > 1 else WHOLE.value
        call = SumCall(NORM, m, h, dtype, dtype, RMS.value, 0.0, layout, layout, False, False)
        return posts(ALL_REDUCE_RMS_NORM.choose(world, call, plan, False))

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
    return ALL_REDUCE(world, plan, (x,), (), out)


def _checked(op: str, world: World, tensors: dict[str, torch.Tensor | None]) -> None:
    check_call(op, world)
    for name, t in tensors.items():
        if t is not None or name in ("x", "weight"):
            check_device(op, world, name, t)
    x = tensors["x"]
    assert x is not None
    if x.dtype not in _DTYPES:
        raise TypeError(f"{op}: x is {dims(x)}; bfloat16, float16 and float32 are supported")


def _described(
    world: World, operands: Operands, eps: float, norm: str, out_dtype: torch.dtype | None, full_residual: bool
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
    out_dtype = out_dtype or x.dtype
    if out_dtype not in OUTPUTS:
        raise TypeError(f"{NORM}: out_dtype {out_dtype} is not one of {[str(d) for d in OUTPUTS]}")
    if (out_dtype == torch.float8_e4m3fn) != (scale is not None):
        raise ValueError(
            f"{NORM}: a scale goes with out_dtype torch.float8_e4m3fn, and only there; out_dtype is {out_dtype}"
        )
    if scale is not None and (missing := lacks(world.capability, ADA, "results in float8_e4m3fn")):
        raise Unsupported(f"{NORM}: {missing}")
    if scale is not None and (scale.numel() != 1 or scale.dtype != torch.float32):
        raise ValueError(f"{NORM}: scale {dims(scale)} must be float32 [1]")
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
    )


def _apart(t: torch.Tensor, world: World, stream: Stream) -> torch.Tensor:
    """A copy of `t`, as it is now."""
    copied = world.empty(t.shape, t.dtype)
    world.copy(copied, t, stream)
    return copied


def _pulls(plan: Plan) -> bool:
    """Whether peers read x where it lies, if that is in symmetric memory."""
    return isinstance(plan, Decomposed | Multicast) or (isinstance(plan, TwoShot) and plan.pull)


def _no_multicast(call: SumCall, world: World) -> str | None:
    """Collective on first use. Why the switch cannot serve this call; None when it can."""
    if call.dtype.itemsize != 2 or call.out_dtype != call.dtype:
        return "the switch's sums and stores are of bfloat16 or float16 here"
    if not world.buffer("multicast probe", 256).multicast:
        return "symmetric memory has no multicast address"
    return None


def _sequential(call: SumCall, t: Tensors, world: World, stream: Stream) -> None:
    """The owners' rows of a residual are added before the sum, where all ranks get them."""
    total = t.x
    if world.size > 1:
        total = t.out if call.op == _SUM else world.empty((call.m, call.h), call.dtype)
        world.copy(total, t.x, stream)
        residual = t.residual
        if call.residual == OWN.value and residual is not None and residual.shape[0]:
            lo = sum(split_rows(world, call.m)[: world.rank])
            own = total[lo : lo + residual.shape[0]]
            world.call(lambda: own.add_(residual), [own, residual], [own], stream)
        world.all_reduce(total, stream)
    elif call.op == _SUM:
        world.copy(t.out, t.x, stream)
    if call.op == _SUM:
        return
    added = call if call.residual == WHOLE.value else replace(call, residual=ABSENT.value)

    def args() -> Arguments:
        return dict(t.of(added), x=total, out=t.out, me=rank_word(world), W=world.size)

    key = (add_norm, call, *t.places(), total.data_ptr())
    per_sm = 2 if call.h <= 8192 else 1
    programs = min(call.m, world.sm_count * per_sm)
    world.launch(add_norm, programs, args, call.options(8, per_sm), stream, key)


def rows_of(call: SumCall, memory: Flat | None, dtype: torch.dtype) -> TensorDescriptor:
    """Every rank's rows of H elements: [granule, row, line, elements of a line], in blocks of one row. What lies past H
    in a block is not stored, nor is a row from 2^24 on."""
    assert memory is not None
    line, size = LINE // dtype.itemsize, dtype.itemsize
    shape, strides = [2**31 - 1, 2**24, call.h // line, line], [memory.granule // size, call.h, line, 1]
    return TensorDescriptor(beyond(memory.base.view(dtype)), shape, strides, [1, 1, call.padded // line, line])


def _posting(call: SumCall, world: World, plan: OneShot | TwoShot) -> posted.Posting:
    if isinstance(plan, OneShot):
        kernel, rows = one_shot, (world.size + 1) * call.m
    else:
        kernel = two_shot_low_latency
        rows = world.size * -(-call.m // world.size) + call.m * (1 + (call.keep == WHOLE.value))
    nbytes = rows * call.h * call.dtype.itemsize
    given = dict(M=call.m, norm=call.computed)
    return posted.Posting(kernel, f"{call.op} {call}", plan, nbytes, call.options(plan.warps), given)


def _posted(of: posted.Posting, t: Tensors, world: World, stream: Stream) -> None:
    # In whole words, as others' rows come in two shots.
    out = t.out if t.out.data_ptr() % 16 == 0 else world.empty(t.out.shape, t.out.dtype)

    def args() -> Arguments:
        given = t.arguments()
        words = dict(x=posted.words_of(t.x), residual=posted.words_of(given["residual"]))
        return dict(given, out=out) | words

    posted.launch(world, of, args, stream, dict(t.moving(), out=out), *t.kinds())
    if out is not t.out:
        world.copy(t.out, out, stream)


def _moved_by_bulk(
    call: SumCall, world: World, plan: TwoShot, staging: SymmetricTensor | None, out: SymmetricTensor
) -> tuple[dict[str, object], dict[str, torch.Tensor]] | None:
    """Where rows are stored as bulk copies take it: descriptors, and granules by rank. None: they cannot."""
    (near, near_granules), (far, far_granules) = flat(world, staging or out), flat(world, out)
    if not (plan.bulk and call.lines(call.dtype) and call.lines(call.out_dtype) and near and far):
        return None
    stage_desc = rows_of(call, near, call.dtype if staging else call.out_dtype)
    descriptors = dict(stage_desc=stage_desc, out_desc=rows_of(call, far, call.out_dtype))
    return descriptors, dict(stagings=near_granules, landings=far_granules)


def _room(world: World) -> int:
    """Bytes of shared memory for the rows under way."""
    return (shared_kib(world.capability) - REST_KIB) << 10


def _shots(plan: TwoShot, programs: int, world: World, row: int, bulk: bool) -> Shots:
    """As the kernel takes the plan. row: bytes."""
    under_way = (_room(world) - (2 * row if bulk else 0)) // row + 1
    return constants(
        Shots,
        PROGRAMS=programs,
        R=plan.rows,
        D=1 if plan.spread else world.size - 1,
        STAGES=max(1, min(plan.stages, under_way)),
        PULL=plan.pull,
        BULK=bulk,
    )


def _two_shot(
    call: SumCall,
    t: Tensors,
    world: World,
    plan: TwoShot,
    stream: Stream,
    out: SymmetricTensor | None,
    source: SymmetricTensor | None,
) -> None:
    """out, source: `t.out` and `t.x` on every rank, where they are symmetric."""
    m, h, size = call.m, call.h, call.dtype.itemsize
    programs = plan.programs or world.sm_count
    world.order(lock(world, "two-shot all-reduce"), stream)
    most = -(-m // world.size)
    blocks = -(-most // plan.rows)
    staging = landing = sums = None
    if not plan.pull:
        staging = world.buffer("two-shot all-reduce, staging", world.size * most * h * size)
    elif source is None:
        source = world.buffer("two-shot all-reduce, x", m * h * size)
        world.copy(source.local[: m * h * size].view(call.dtype).view(m, h), t.x, stream)
    if out is None:
        landing = out = world.buffer("two-shot all-reduce, out", m * h * call.out_dtype.itemsize)
    if call.keep == WHOLE.value:
        sums = world.buffer("two-shot all-reduce, sums", m * h * size)

    shared = [b.local.data_ptr() for b in (staging, source, out, sums) if b is not None]
    moved = None
    if plan.bulk:
        moved = world.cached((call, plan, *shared), lambda: _moved_by_bulk(call, world, plan, staging, out))

    def args() -> Arguments:
        ch = world.cached(
            (call, plan),
            lambda: world.channel(f"{call.op} {call} {plan}", (1 if plan.pull else blocks) + world.size, None),
        )
        to = dict(stagings=(staging or out).addresses, landings=out.addresses)
        descriptors, to = moved or (dict(stage_desc=t.x, out_desc=t.x), to)
        return dict(
            t.of(call),
            staging=staging.local.view(call.dtype) if staging else t.x,
            **descriptors,
            places=Places(parts=(source or out).addresses, sums=(sums or out).addresses, **to),
            turn=world.cached("two-shot all-reduce, turn", lambda: world.zeros((1,), torch.int32)),
            ch=ch,
            shots=_shots(plan, programs, world, call.padded * size, moved is not None),
        )

    moving = t.moving()
    if staging is None:
        moving["staging"] = t.x
    if moved is None:
        moving |= dict(stage_desc=t.x, out_desc=t.x)
    key = (two_shot, call, plan, *t.kinds(), *shared)
    world.launch(two_shot, programs, args, call.options(plan.warps), stream, key, moving)
    if landing is not None:
        nbytes = m * h * call.out_dtype.itemsize
        world.copy(t.out, landing.local[:nbytes].view(call.out_dtype).view(m, h), stream)
    if sums is not None and t.kept is not None:
        world.copy(t.kept, sums.local[: m * h * size].view(call.dtype).view(m, h), stream)


def _multicast(
    call: SumCall,
    t: Tensors,
    world: World,
    plan: Multicast,
    stream: Stream,
    out: SymmetricTensor | None,
    source: SymmetricTensor | None,
) -> None:
    m, h, size = call.m, call.h, call.dtype.itemsize
    programs = min(plan.programs or world.sm_count, world.sm_count)
    world.order(lock(world, "two-shot all-reduce"), stream)
    if source is None:
        source = world.buffer("two-shot all-reduce, x", m * h * size).view(0, (m, h), call.dtype)
        world.copy(source.local, t.x, stream)
    landing = out is None
    if out is None:
        out = world.buffer("two-shot all-reduce, out", m * h * size).view(0, (m, h), call.dtype)
    sums = None
    if call.keep == WHOLE.value:
        sums = world.buffer("two-shot all-reduce, sums", m * h * size).view(0, (m, h), call.dtype)
    addresses = tuple(s.multicast if s else 0 for s in (source, out, sums))

    def args() -> Arguments:
        ch = world.cached((call, plan), lambda: world.channel(f"{call.op} {call} {plan}", 1 + world.size, None))
        turn = world.cached("two-shot all-reduce, turn", lambda: world.zeros((1,), torch.int32))
        windows = world.cached(("windows", addresses), lambda: world.tensor(addresses, torch.int64))
        given = {n: v for n, v in t.arguments().items() if n != "scale"}
        return dict(windows=windows, **given, turn=turn, ch=ch, M=m, norm=call.computed, PROGRAMS=programs)

    key = (multicast_shot, call, plan, *t.places(), *addresses)
    world.launch(multicast_shot, programs, args, call.options(plan.warps), stream, key)
    if landing:
        world.copy(t.out, out.local, stream)
    if sums is not None and t.kept is not None:
        world.copy(t.kept, sums.local, stream)


def _decomposed(
    call: SumCall,
    t: Tensors,
    world: World,
    stream: Stream,
    out: SymmetricTensor | None,
    source: SymmetricTensor | None,
) -> None:
    """A copy engine pulls the peers' parts of the own rows, one kernel sums and normalises them, a copy engine pulls
    the other owners' rows. The barriers say: every part is there; every owner's rows are there, and no part is read any
    more; no row is read any more, so that the caller may write to `out`."""
    m, h, size, me = call.m, call.h, call.dtype.itemsize, world.rank
    shards = split_rows(world, m)
    ends = list(itertools.accumulate(shards, initial=0))
    mine, most, whole = shards[me], shards[0], call.keep == WHOLE.value
    copies = world.side_stream("copy")
    for holder in (lock(world, COPIES), lock(world, "two-shot all-reduce")):
        world.order(holder, stream)
    world.wait_event(copies, world.record(stream))
    if source is None:
        source = world.buffer("two-shot all-reduce, x", m * h * size).view(0, (m, h), call.dtype)
        world.copy(source.local, t.x, copies)
    landing = out is None
    if out is None:
        nbytes = m * h * call.out_dtype.itemsize
        out = world.buffer("two-shot all-reduce, out", nbytes).view(0, (m, h), call.out_dtype)
    sums = world.buffer("two-shot all-reduce, sums", m * h * size).view(0, (m, h), call.dtype) if whole else None
    staging = world.empty((world.size, most, h), call.dtype)
    kept = t.kept if sums is None else sums.local[ends[me] : ends[me + 1]]
    others = [(me + j) % world.size for j in range(1, world.size)]

    world.barrier(copies)
    for p in others if mine else ():
        world.copy(staging[p][:mine], source.peers[p][ends[me] : ends[me + 1]], copies)
    local = replace(t, x=source.local, out=out.local, kept=kept)

    def args() -> Arguments:
        owned = replace(call, keep=OWN.value if call.keep else ABSENT.value)
        return dict(
            local.of(owned),
            staging=staging,
            out=local.out,
            me=rank_word(world),
            W=world.size,
            R=1,
            STAGES=max(1, min(world.size + 1, _room(world) // (call.padded * size) + 1)),
        )

    key = (sum_norm, call, *local.places(), staging.data_ptr())
    world.launch(sum_norm, min(most, world.sm_count), args, call.options(16), copies, key)
    world.barrier(copies)
    for p in others:
        if shards[p]:
            rows = slice(ends[p], ends[p + 1])
            for everyone in (out, sums) if sums else (out,):
                world.copy(everyone.local[rows], everyone.peers[p][rows], copies)
    world.barrier(copies)
    world.wait_event(stream, world.record(copies))
    if landing:
        world.copy(t.out, out.local, stream)
    if sums is not None and t.kept is not None:
        world.copy(t.kept, sums.local, stream)


def sum_few(x: torch.Tensor, world: World, plan: OneShot | TwoShot, stream: Stream, out: torch.Tensor) -> None:
    """The same by a plan that posts, for a caller whose ranks have agreed and whose x is of whole 16-byte words."""
    of, shape = _few(x, world, plan)
    rows = x.view(shape)
    _posted(of, Tensors(rows, None, None, None, None, out.view(shape), None), world, stream)


def _few(x: torch.Tensor, world: World, plan: OneShot | TwoShot) -> tuple[posted.Posting, tuple[int, int]]:
    def make() -> tuple[posted.Posting, tuple[int, int]]:
        call = _sum(x, world)
        return world.cached((call, plan), lambda: _posting(call, world, plan)), (call.m, call.h)

    return world.cached((_SUM, x.shape, x.dtype, plan), make)


def _sum(x: torch.Tensor, world: World) -> SumCall:
    columns = _columns(x, world)
    rows = x.numel() // columns if columns else 0
    return SumCall(_SUM, rows, columns, x.dtype, x.dtype, PLAIN.value, 0.0, ABSENT.value, ABSENT.value, False, False)


def _columns(x: torch.Tensor, world: World) -> int:
    """Columns to see x as, in rows of whole 16-byte words where there are such: some 1,024, or up to 8,192 if that
    gives every SM some rows. Few sizes lead to other columns, for which kernels are compiled."""
    n, vector, columns = x.numel(), VECTOR // x.element_size(), 0
    for columns in (x.shape[-1] if x.dim() else 1, n & -n):
        for f in (2, 3, 5, 7):
            while columns % (f * vector) == 0 and (
                columns > 8192 or (columns > 1024 and n // columns < 2 * world.sm_count)
            ):
                columns //= f
        while 0 < columns < 512 and n // columns % 2 == 0:
            columns *= 2
        if columns <= 8192 and columns % vector == 0:
            break
    return columns
