"""The check that an access stays inside the tensor from which its pointer is derived.

A pointer argument of a kernel carries the number of its tensor in its upper bits, which no address uses. Arithmetic,
`tl.where`, a table of addresses, and a cast to an integer and back all keep the number, element by element. An access
is therefore checked against exactly the tensor from which its address is derived. Number 0 means an address without a
tensor, which may be in any tracked memory.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np
import torch

BITS = 48  # the bits of an address
ADDRESS = (1 << BITS) - 1
NUMBERS = 1 << 15  # a larger number would make an int64 address negative


@dataclass
class Extent:
    """The bytes that a tensor spans, from `lo` on."""

    name: str
    lo: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]  # bytes
    size: int  # the bytes of an element

    @classmethod
    def of_tensor(cls, tensor: torch.Tensor, name: str) -> Extent:
        size = tensor.element_size()
        return cls(name, tensor.data_ptr(), tuple(tensor.shape), tuple(s * size for s in tensor.stride()), size)

    @cached_property
    def end(self) -> int:
        """Return the address that follows the tensor's last byte."""
        if 0 in self.shape:
            return self.lo
        return self.lo + self.size + sum((n - 1) * s for n, s in zip(self.shape, self.strides, strict=True))

    @cached_property
    def gaps(self) -> bool:
        """Return whether there are unused bytes between the elements. The result is False if axes interleave, because
        there is no simple test for that case."""
        span, gaps = self.size, False
        for stride, n in sorted((s, n) for s, n in zip(self.strides, self.shape, strict=True) if s and n > 1):
            if stride < span:
                return False
            gaps |= stride > span
            span += stride * (n - 1)
        return gaps

    @property
    def axes(self) -> list[int]:
        """Return the axes along which the address changes, in descending order of stride."""
        moving = [i for i, n in enumerate(self.shape) if n != 1] or range(len(self.shape))[-1:]
        return sorted((i for i in moving if self.strides[i]), key=lambda i: -self.strides[i])

    def outside(self, addresses: np.ndarray, size: int) -> np.ndarray:
        """Return a mask of the accesses of `size` bytes at `addresses` (int64) that touch bytes outside all elements of
        the tensor."""
        out = (addresses < self.lo) | (addresses + size > self.end)
        if self.gaps:
            for byte in (0, size - 1):
                rest = addresses + byte - self.lo
                for i in self.axes:
                    index, rest = np.divmod(rest, self.strides[i])
                    out |= index >= self.shape[i]
                out |= rest >= self.size
        return out

    def index(self, address: int) -> str:
        """Return the element at an address as text, for a report. On the axis with the longest stride, the element's
        index may exceed the size."""
        rest, index = address - self.lo, [0] * len(self.shape)
        for i in self.axes:
            index[i], rest = divmod(rest, self.strides[i])
        return f"{self.name}{index or ''}" + (f" + {rest} bytes" if rest else "")


class PointerBounds:
    """The tensors that are arguments of a run's kernels, by number."""

    def __init__(self) -> None:
        self.extents: list[Extent | None] = [None]
        self._numbers: dict[tuple[int, tuple[int, ...], tuple[int, ...], int], int] = {}

    def pointer(self, tensor: torch.Tensor, name: str) -> int:
        """Return the tensor's address and number as one integer. The integer is the address alone if accesses may leave
        the tensor (`weft.lang.beyond`), or if all numbers are in use."""
        extent = Extent.of_tensor(tensor, name)
        if hasattr(tensor, "reaches_beyond"):
            return extent.lo
        key = (extent.lo, extent.shape, extent.strides, extent.size)
        number = self._numbers.get(key)
        if number is None:
            if len(self.extents) == NUMBERS:
                return extent.lo
            number = self._numbers[key] = len(self.extents)
            self.extents.append(extent)
        elif (known := self.extents[number]) is not None:
            known.name = name  # the memory may have belonged to a different tensor before
        return number << BITS | extent.lo

    def extent_of(self, pointer: int) -> Extent | None:
        """Return the extent of the tensor from which a pointer is derived, or None for an address without a number."""
        number = pointer >> BITS
        return self.extents[number] if 0 < number < len(self.extents) else None
