"""What the ops around one GEMM have in common: checks, which plans fit, descriptors, sums of staged rows."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from triton.tools.tensor_descriptor import TensorDescriptor

from ..backends.base import SymmetricTensor
from ..errors import Unsupported
from ..kernels.elementwise import sum_staged
from ..lang.host import beyond
from ..lang.mapping import balanced_rows
from ..op import Call, Op
from ..operands import DTYPES, check_device, dims, places
from ..plan import SMALL, SMALL_SIGNALED, Decomposed, Fused, OneShot, Plan, Signaled, TwoShot
from ..world import World


def validate(op: str, world: World, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> None:
    """Raise ValueError or TypeError, quoting what was given, for anything this rank alone can see is wrong."""
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


Factors = tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]  # x, weight, bias


@dataclass(frozen=True)
class MatmulCall(Call):
    """A GEMM [M, K] x [N, K]^T on every rank, and what goes before or after it. shards: rows of every rank."""

    shards: tuple[int, ...]
    n: int
    k: int
    dtype: torch.dtype
    bias: bool

    @property
    def rows(self) -> int:
        return sum(self.shards)

    @property
    def even(self) -> bool:
        return min(self.shards) == max(self.shards)

    def agreed(self) -> dict[str, Hashable]:
        return dict(rows=self.shards, N=self.n, K=self.k, dtype=str(self.dtype), bias=self.bias)


class MatmulOp(Op):
    """What the ops around one GEMM have in common. Operands: x, weight, bias."""

    def sizes(self, call: MatmulCall) -> tuple[int, int, int]:
        return call.rows, call.n, call.k

    fused: ClassVar[Fused] = Fused()  # what plan="fused" means: what served most shapes on 8 H200s
    scatters_rows: ClassVar[bool] = True  # rows are some rank's, before or after

    def default(self, world: World, kind: type[Plan]) -> Plan:
        if kind is Fused:
            return SMALL if world.scale.small else self.fused
        return SMALL_SIGNALED if kind is Signaled and world.scale.small else kind()

    def fits(self, world: World, call: MatmulCall, plan: Plan, asked: str | Plan) -> str | None:
        if isinstance(plan, Fused | OneShot | TwoShot):
            return world.symmetric_reason or whole_words(K=call.k, N=call.n) or self.lopsided(world, call, plan, asked)
        if isinstance(plan, Decomposed):
            return world.symmetric_reason or self.lopsided(world, call, plan, asked)
        assert isinstance(plan, Signaled)
        reason = whole_words(K=call.k) or (world.symmetric_reason if plan.copies else None)
        if reason is None and not 0 < plan.ctas < world.sm_count:
            raise Unsupported(
                f"{self.name}: {plan.ctas} CTAs of the communicator leave none of {world.sm_count} SMs for the GEMM"
            )
        return reason

    def lopsided(self, world: World, call: MatmulCall, plan: Plan, asked: str | Plan) -> str | None:
        """Why shards of these lengths do not suit the plan: "", which is not said, where nobody asked for it."""
        why = None
        if isinstance(plan, OneShot) and self.scatters_rows:
            if asked == "auto" and world.size * max(call.shards) > 2 * call.rows:
                return ""  # its memory is of the longest part for every rank
            if min(call.shards) == 0 < max(call.shards):
                why = "a rank without rows would not wait for the others"
        elif not call.even and self.copies_shards(plan):
            why = "copies are of shards of one length"
        return "" if why and asked == "auto" else why

    def copies_shards(self, plan: Plan) -> bool:
        """Whether a copy engine moves whole shards."""
        return isinstance(plan, Decomposed)


def whole_words(**sizes: int) -> str | None:
    """Why rows of so many elements do not suit bulk copies."""
    for name, size in sizes.items():
        if size % 8:
            return f"{name} {size} must be a multiple of 8 (16-byte rows for bulk copies)"
    return None


def given_rows(op: str, world: World, rows: Sequence[int], x: torch.Tensor, whole: bool) -> tuple[int, ...]:
    """Rows of every rank, as given: x has all of them (`whole`), or this rank's."""
    named, mine = len(rows) == world.size and min(rows) >= 0, x.shape[0]
    if whole and not (named and sum(rows) == mine):
        raise ValueError(
            f"{op}: rows {list(rows)} must name {world.size} ranks and sum to the rows of x {list(x.shape)}"
        )
    if not whole and not (named and rows[world.rank] == mine):
        raise ValueError(f"{op}: rows {list(rows)} must name {world.size} ranks and {mine} for rank {world.rank}")
    return tuple(rows)


def split_rows(world: World, m: int) -> tuple[int, ...]:
    return tuple(balanced_rows(m, world.size))


def rank_word(world: World) -> torch.Tensor:
    """This rank, where a kernel can read it: as an argument it would be another kernel on every rank."""
    return world.cached("rank word", lambda: world.tensor([world.rank], torch.int32))


def sum_parts(
    own: torch.Tensor, staging: torch.Tensor, out: torch.Tensor, bias: torch.Tensor | None, world: World, stream: Any
) -> None:
    """out [rows, N] = own + the other ranks' staging [world, rows, N] + bias, in fp32 in rank order."""
    rows, n = out.shape
    block = world.scale.block
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
