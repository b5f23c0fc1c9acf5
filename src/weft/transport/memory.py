"""How kernels see memory of every rank: TMA descriptors, the halves of an arena, and what serialises its use across
streams."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from triton.tools.tensor_descriptor import TensorDescriptor

from ..backends.base import Stream, SymmetricTensor
from ..lang.host import beyond
from ..world import Arena, World


def rank_word(world: World) -> torch.Tensor:
    """This rank, where a kernel can read it: as an argument it would be another kernel on every rank."""
    return world.cached("rank word", lambda: world.tensor([world.rank], torch.int32))


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


class Halves(NamedTuple):
    """An arena as kernels see it: two halves of `half` elements in every rank's memory, which calls use in turn."""

    addresses: torch.Tensor  # int64 [world], by rank
    granules: torch.Tensor  # int32 [world], by rank: where a descriptor of all of them has it (`Flat`)
    turn: torch.Tensor  # int32 [1]: calls so far
    half: int

    @classmethod
    def of(cls, arena: Arena, granules: torch.Tensor, half: int) -> Halves:
        return cls(arena.memory.addresses, granules, arena.epoch, half)


def workspace(world: World, name: str, shape: Sequence[int], dtype: torch.dtype) -> SymmetricTensor:
    """A tensor in the World's buffer of that name (`World.buffer`). Collective when the buffer has to grow."""
    return world.buffer(name, math.prod(shape) * dtype.itemsize).view(0, shape, dtype)


class Lock:
    """Serialises, across streams, what shares the memory of one name (`World.order`)."""

    last_stream: Stream = None
    last_captured: Stream = None


def lock(world: World, name: str) -> Lock:
    return world.cached(("lock", name), Lock)
