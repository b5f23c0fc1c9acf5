"""A store and then a load of the same elements by different threads of one program, with no barrier between.

Which thread has which element of a block is the compiler's affair. An element that a program stored and loads again is
taken to stay with its thread if it has the same place in two blocks of one shape and element size, which is mostly so,
and else to go to another one, which may look before it is there. A scalar is stored by one thread and loaded by all.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from .bounds import ADDRESS


@dataclass(eq=False)
class Block:
    """What one statement stores or loads."""

    ptrs: np.ndarray
    mask: np.ndarray | None
    size: int  # bytes of an element
    lo: int  # the bytes that it lies in
    hi: int
    site: int = 0

    @property
    def addresses(self) -> np.ndarray:
        return self.ptrs & np.uint64(ADDRESS)

    @property
    def active(self) -> np.ndarray:
        return np.broadcast_to(True if self.mask is None else self.mask, self.ptrs.shape)

    @property
    def key(self) -> tuple[int, int, int, tuple[int, ...]]:
        return self.lo, self.hi, self.size, self.ptrs.shape


def moved(stored: Block, loaded: Block) -> int | None:
    """The address of an element that another thread has stored."""
    if stored.hi <= loaded.lo or loaded.hi <= stored.lo:
        return None
    there, here, wanted = stored.addresses, loaded.addresses, loaded.active
    if stored.size == loaded.size and there.shape == here.shape and here.size > 1:
        wanted = wanted & ~(stored.active & (there == here))
    part = math.gcd(stored.size, loaded.size)
    written = _parts(there[stored.active], stored.size, part).ravel()
    found = np.isin(_parts(here[wanted], loaded.size, part), written).any(axis=1)
    return int(here[wanted][found.argmax()]) if found.any() else None


def _parts(addresses: np.ndarray, size: int, part: int) -> np.ndarray:
    return addresses[:, None] + np.arange(0, size, part, dtype=np.uint64)
