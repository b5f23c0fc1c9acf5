"""What every op does before it launches: validate, agree, pick a plan, prepare."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import triton.language as tl
from triton.tools.tensor_descriptor import TensorDescriptor

from ..backends.base import SymmetricTensor
from ..errors import Unsupported
from ..kernels.elementwise import sum_staged
from ..lang.host import beyond
from ..lang.mapping import balanced_rows
from ..plan import Decomposed, Fused, OneShot, Plan, Sequential, Signaled, TwoShot
from ..plan.choose import choose, kinds
from ..plan.table import learned
from ..world import World

DTYPES = {torch.bfloat16: tl.bfloat16, torch.float16: tl.float16}


def dims(t: torch.Tensor) -> str:
    return f"{list(t.shape)} {str(t.dtype).removeprefix('torch.')} on {t.device}"


def check_call(op: str, world: World, plan: str | Plan = "auto") -> None:
    """Raise TypeError for what is no World or no plan."""
    if not isinstance(world, World):
        raise TypeError(f"{op}: world must be a weft.World, got {type(world).__name__}")
    if not isinstance(plan, (str, Plan)):
        raise TypeError(f'{op}: plan must be "auto", a kind or a Plan, got {plan!r}')


def check_device(op: str, world: World, name: str, t: object) -> None:
    """Raise TypeError for what is no tensor, ValueError for a tensor that is not on this rank's device."""
    if not isinstance(t, torch.Tensor):
        raise TypeError(f"{op}: {name} must be a tensor on {world.device}, got {type(t).__name__}")
    if t.device.type != world.device.type or (t.device.index is not None and t.device.index != world.device.index):
        raise ValueError(f"{op}: {name} {dims(t)} is not on this rank's device, {world.device}")


def validate(op: str, world: World, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> None:
    """Raise ValueError or TypeError, quoting what was given, for anything this rank alone can see is wrong."""
    check_call(op, world)
    for name, t in (("x", x), ("weight", weight), ("bias", bias)):
        if t is not None or name != "bias":
            check_device(op, world, name, t)
    if x.dim() != 2 or weight.dim() != 2:
        raise ValueError(f"{op}: x and weight must be 2-D, got x {dims(x)} and weight {dims(weight)}")
    if x.shape[1] != weight.shape[1]:
        raise ValueError(
            f"{op}: x {dims(x)} and weight {dims(weight)} disagree on K (weight is [out, in] as in nn.Linear)"
        )
    if weight.shape[0] == 0 or weight.shape[1] == 0:
        raise ValueError(f"{op}: empty weight {dims(weight)}")
    for name, t in (("weight", weight), ("bias", bias)):
        if t is not None and t.dtype != x.dtype:
            raise TypeError(f"{op}: {name} is {dims(t)}, x is {dims(x)}: one dtype is needed")
    if x.dtype not in DTYPES:
        raise TypeError(f"{op}: x is {dims(x)}; bfloat16 and float16 are supported")
    if bias is not None and bias.shape != (weight.shape[0],):
        raise ValueError(f"{op}: bias {dims(bias)} does not match weight {dims(weight)}")


def call_key(
    op: str,
    world: World,
    plan: str | Plan,
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    *more: Hashable,
) -> Hashable:
    """What `World.decided` keeps a call's checked decision by: all that checks and plans look at."""
    if type(world) is not World or type(plan) is not str:
        check_call(op, world, plan)
    try:
        added = None if bias is None else (bias.shape, bias.stride(), bias.dtype, bias.get_device())
        return (
            op, plan, world.capturing(), learned(), x.shape, x.stride(), x.dtype, x.get_device(), weight.shape, weight.stride(),
            weight.dtype, weight.get_device(), added, *more,
        )  # fmt: skip
    except AttributeError:
        validate(op, world, x, weight, bias)  # which says what is no tensor
        raise


def contiguous(*tensors: torch.Tensor | None) -> bool:
    return all(t is None or t.is_contiguous() for t in tensors)


def dense(t: torch.Tensor) -> torch.Tensor:
    """`t` contiguous, at an address that bulk copies can take, and without rows at the start of memory of its own."""
    t = t.contiguous()
    return t if t.numel() and t.data_ptr() % 16 == 0 else t.clone()


def overlap(out: torch.Tensor | None, *others: torch.Tensor | None) -> bool:
    """Whether `out` has bytes in common with one of the others, or may have."""

    def end(t: torch.Tensor) -> int:
        last = sum((n - 1) * step for n, step in zip(t.shape, t.stride(), strict=True))
        return t.data_ptr() + (last + 1) * t.element_size()

    return out is not None and any(
        t is not None and t.numel() and out.data_ptr() < end(t) and t.data_ptr() < end(out) for t in others
    )


def output(op: str, world: World, out: torch.Tensor | None, rows: int, cols: int, dtype: torch.dtype) -> torch.Tensor:
    """`out` checked, or a fresh tensor [rows, cols]."""
    if out is None:
        return world.empty((rows, cols), dtype)
    check_device(op, world, "out", out)
    if out.shape != (rows, cols) or out.dtype != dtype or not out.is_contiguous():
        raise ValueError(f"{op}: out {dims(out)} must be contiguous, [{rows}, {cols}] {dtype} on {world.device}")
    return out


def shard_rows(op: str, world: World, rows: Sequence[int] | None, mine: int) -> tuple[int, ...]:
    """Rows of every rank: as given, or as many on each rank as on this one (which `World.agree` then checks)."""
    if rows is None:
        return (mine,) * world.size
    rows = tuple(int(r) for r in rows)
    if len(rows) != world.size or min(rows) < 0 or rows[world.rank] != mine:
        raise ValueError(f"{op}: rows {list(rows)} must name {world.size} ranks and {mine} for rank {world.rank}")
    return rows


def split_rows(world: World, m: int) -> tuple[int, ...]:
    return tuple(balanced_rows(m, world.size))


def supports_fused(world: World, k: int, n: int) -> str | None:
    """Why the fused kernels cannot take this call; None when they can."""
    if world.size == 1:
        return "one rank"
    if world.symmetric_reason:
        return world.symmetric_reason
    for name, size in (("K", k), ("N", n)):
        if size % 8:
            return f"{name} {size} must be a multiple of 8 (16-byte rows for bulk copies)"
    return None


def resolve(
    op: str, world: World, plan: str | Plan, m: int, n: int, k: int, fused_reason: str | None, capturing: bool
) -> Plan:
    """The Plan to run. A kind asked for by name that cannot serve falls back to sequential, said once."""
    check_call(op, world, plan)
    chosen = choose(op, world, plan, m, n, k, capturing) if isinstance(plan, str) else plan
    if chosen.kind not in kinds(op):
        raise ValueError(f"{op}: {chosen} is not one of {kinds(op)}")
    if world.size == 1:
        return Sequential()
    if isinstance(chosen, Fused | OneShot | TwoShot) and fused_reason:
        world.say_once(f"{op}: sequential instead of {chosen.kind}: {fused_reason}")
        return Sequential()
    if chosen.kind == "decomposed" and world.symmetric_reason:
        world.say_once(f"{op}: sequential instead of decomposed: {world.symmetric_reason}")
        return Sequential()
    if isinstance(chosen, Signaled):
        reason = f"K {k} must be a multiple of 8 (16-byte rows for bulk copies)" if k % 8 else None
        if op == "matmul_all_to_all" and n % 8:
            reason = f"N {n} must be a multiple of 8 (rows of whole 16-byte words)"
        if chosen.copies and not reason:
            reason = world.symmetric_reason
        if reason:
            world.say_once(f"{op}: sequential instead of signaled: {reason}")
            return Sequential()
        if not 0 < chosen.ctas < world.sm_count:
            raise Unsupported(
                f"{op}: {chosen.ctas} CTAs of the communicator leave none of {world.sm_count} SMs for the GEMM"
            )
    if isinstance(chosen, Fused):
        programs = world.sm_count * chosen.per_sm
        if op == "all_gather_matmul":
            if chosen.pullers >= programs:
                raise Unsupported(f"{op}: {chosen.pullers} pullers leave none of {programs} programs for the GEMM")
        elif chosen.forward < 1:
            raise Unsupported(f"{op}: {chosen} has no program that tells of finished tiles")
    return chosen


def served(op: str, world: World, asked: str | Plan, plan: Plan, shards: tuple[int, ...]) -> Plan:
    """The plan, or sequential where shards of these lengths do not suit it: said once, if the plan was asked for."""
    least, most = min(shards), max(shards)
    why = ""
    if isinstance(plan, OneShot) and op != "matmul_all_reduce":
        if asked == "auto" and world.size * most > 2 * sum(shards):  # memory is of the longest part for every rank
            return Sequential()
        if least == 0 < most:
            why = "a rank without rows would not wait for the others"
    elif least < most and (isinstance(plan, Decomposed) or (isinstance(plan, Fused) and copied(op, plan))):
        why = "copies are of shards of one length"
    if why and asked != "auto":
        world.say_once(f"{op}: sequential instead of {plan.kind}: {why}")
    return Sequential() if why else plan


def copied(op: str, plan: Fused) -> bool:
    """Whether a copy engine pulls the shards."""
    return op == "all_gather_matmul" and not plan.pullers


def other_mode(
    op: str, world: World, plan: str | Plan, m: int, n: int, k: int, fused_reason: str | None, chosen: Plan
) -> Plan | None:
    """The plan that "auto" would take inside a CUDA graph, where it differs: an eager first call runs it once as well, so
    that a later capture finds its workspace."""
    if plan != "auto" or world.capturing():
        return None
    other = resolve(op, world, plan, m, n, k, fused_reason, True)
    return None if other == chosen else other


def places(*tensors: torch.Tensor | None) -> tuple[int, ...]:
    """Addresses, for the key of a launch."""
    return tuple(0 if t is None else t.data_ptr() for t in tensors)


def rank_word(world: World) -> torch.Tensor:
    """This rank, where a kernel can read it: as an argument it would be another kernel on every rank."""
    return world.cached("rank word", lambda: world.tensor([world.rank], torch.int32))


def sum_parts(
    own: torch.Tensor, staging: torch.Tensor, out: torch.Tensor, bias: torch.Tensor | None, world: World, stream: Any
) -> None:
    """out [rows, N] = own + the other ranks' staging [world, rows, N] + bias, in fp32 in rank order."""
    rows, n = out.shape
    block = 4096 if world.sm_count > 32 else 256
    programs = min(world.sm_count * 4, -(-rows * n // block))
    args = dict(
        own=own, staging=staging, out=out, bias=bias if bias is not None else out, rows=rows, N=n,
        me=rank_word(world), W=world.size, BIAS=bias is not None, BLOCK=block, ALIGNED=n % 8 == 0,
    )  # fmt: skip
    key = (sum_staged, rows, n, out.dtype, *places(own, staging, out, bias))
    world.launch(sum_staged, programs, args, dict(num_warps=8), stream, key)


def descriptor(t: torch.Tensor, rows: int, cols: int, block: tuple[int, int]) -> TensorDescriptor:
    """TMA descriptor of a row-major [rows, cols] matrix at the start of `t`."""
    return TensorDescriptor(t, [rows, cols], [cols, 1], list(block))


def half_elements(half_bytes: int, cols: int, dtype: torch.dtype) -> int:
    """Where an arena's second half starts, in elements: at a whole row of `cols`, past the first half's bytes."""
    elements = half_bytes // dtype.itemsize
    return (elements + cols - 1) // cols * cols


@dataclass(frozen=True)
class Flat:
    """Every rank's copy of a symmetric tensor through one TMA descriptor: [granule, row, cols].

    The copies lie anywhere in this process's address space; the first coordinate steps by a granule, the largest power
    of two (at most 2 MiB) that divides all their distances from the lowest one.
    """

    base: torch.Tensor
    granule: int  # bytes
    index: list[int]  # by rank

    @classmethod
    def over(cls, memory: SymmetricTensor) -> Flat | None:
        """None where a distance is too long for a 32-bit coordinate."""
        addresses = [p.data_ptr() for p in memory.peers]
        low = min(addresses)
        together = 1 << 21
        for a in addresses:
            together |= a - low
        granule = together & -together
        index = [(a - low) // granule for a in addresses]
        if max(index) >= 1 << 31:
            return None
        return cls(memory.peers[addresses.index(low)], granule, index)

    def descriptor(self, dtype: torch.dtype, rows: int, cols: int) -> TensorDescriptor:
        """Blocks of [1, rows, cols]."""
        t = beyond(self.base.view(dtype))
        return TensorDescriptor(
            t, [2**31 - 1, 2**31 - 1, cols], [self.granule // dtype.itemsize, cols, 1], [1, rows, cols]
        )


def flat(world: World, memory: SymmetricTensor) -> tuple[Flat | None, torch.Tensor]:
    """The memory through one descriptor, and the int32 [world] granule of every rank."""

    def make() -> tuple[Flat | None, torch.Tensor]:
        f = Flat.over(memory)
        return f, world.tensor(f.index if f else [0] * world.size, torch.int32)

    return world.cached(("flat", memory.local.data_ptr()), make)


class Lock:
    """Serialises, across streams, what shares the memory of one name (`World.order`)."""

    last_stream: Any = None
    last_captured: Any = None


def lock(world: World, name: str) -> Lock:
    return world.cached(("lock", name), Lock)
