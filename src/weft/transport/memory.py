"""The means by which kernels access the memory of every rank: TMA descriptors, the halves of an arena, and the locks
that serialise uses of this memory across streams."""

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
    """Return the number of this rank, int32 [1]. A kernel loads the number from this tensor, because Triton would
    compile a separate kernel for some values of an integer argument."""
    return world.cached("rank word", lambda: world.tensor([world.rank], torch.int32))


def half_elements(half_bytes: int, cols: int, dtype: torch.dtype) -> int:
    """Return the element at which the second half of an arena starts: the start of the first whole row of `cols`
    elements after the bytes of the first half."""
    elements = half_bytes // dtype.itemsize
    return (elements + cols - 1) // cols * cols


@dataclass(frozen=True)
class Flat:
    """One TMA descriptor [granule, row, cols] for every rank's copy of a symmetric tensor.

    The copies may be anywhere in this process's address space. A step of the first coordinate is a granule, the largest
    power of two (at most 2 MiB) that divides the distances of all copies from the copy with the lowest address.

    `base` is the copy with the lowest address. `index` contains the first coordinate of each rank's copy.
    """

    base: torch.Tensor
    granule: int  # bytes
    index: list[int]

    @classmethod
    def from_memory(cls, memory: SymmetricTensor) -> Flat | None:
        """Return the Flat of `memory`, or None if a distance is too long for a 32-bit coordinate."""
        addresses = [p.data_ptr() for p in memory.peers]
        lowest = min(addresses)
        bits = 1 << 21
        for address in addresses:
            bits |= address - lowest
        granule = bits & -bits
        index = [(address - lowest) // granule for address in addresses]
        if max(index) >= 1 << 31:
            return None
        return cls(memory.peers[addresses.index(lowest)], granule, index)

    def descriptor(self, dtype: torch.dtype, rows: int, cols: int) -> TensorDescriptor:
        """Return the descriptor with blocks [1, rows, cols]."""
        t = beyond(self.base.view(dtype))
        return TensorDescriptor(
            t, [2**31 - 1, 2**31 - 1, cols], [self.granule // dtype.itemsize, cols, 1], [1, rows, cols]
        )


def flat(world: World, memory: SymmetricTensor) -> tuple[Flat | None, torch.Tensor]:
    """Return the memory's Flat, or None, and the Flat's `index` as a tensor, int32 [world]."""

    def make() -> tuple[Flat | None, torch.Tensor]:
        view = Flat.from_memory(memory)
        return view, world.tensor(view.index if view else [0] * world.size, torch.int32)

    return world.cached(("flat", memory.local.data_ptr()), make)


class Halves(NamedTuple):
    """An arena as an argument of kernels. Every rank's memory has two halves of `half` elements, which calls use
    alternately."""

    addresses: torch.Tensor  # int64 [world], the address of each rank's arena
    granules: torch.Tensor  # int32 [world], each rank's first coordinate in the descriptor of all ranks (`Flat`)
    epoch: torch.Tensor  # int32 [1], the number of calls so far; its parity selects the half
    half: int

    @classmethod
    def from_arena(cls, arena: Arena, granules: torch.Tensor, half: int) -> Halves:
        return cls(arena.memory.addresses, granules, arena.epoch, half)


def workspace(world: World, name: str, shape: Sequence[int], dtype: torch.dtype) -> SymmetricTensor:
    """Return a tensor in the World's buffer `name` (`World.buffer`). The call is collective when the buffer has to
    grow."""
    return world.buffer(name, math.prod(shape) * dtype.itemsize).view(0, shape, dtype)


class Lock:
    """A lock that serialises calls on different streams if they share the memory with one name (`World.order`)."""

    last_stream: Stream = None
    last_captured: Stream = None


def lock(world: World, name: str) -> Lock:
    return world.cached(("lock", name), Lock)
