"""Finds a store and a later load of the same elements by different threads of one program with no barrier in between.

The compiler decides which thread has which element of a block. An element that a program stores and loads again is
taken to stay with its thread if it has the same index in two blocks of one shape and element size, which is mostly so.
Otherwise another thread is taken to load it, which may do so before it is stored. A scalar is stored by one thread and
loaded by all.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from .bounds import ADDRESS


@dataclass(eq=False)
class AccessedBlock:
    """The addresses that one statement stores or loads."""

    ptrs: np.ndarray
    mask: np.ndarray | None
    size: int  # bytes of an element
    lo: int  # the first of its bytes
    hi: int  # the byte after the last
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


def moved(stored: AccessedBlock, loaded: AccessedBlock) -> int | None:
    """Return the address of an element that one thread has stored and another one may load; None where there is
    none."""
    if stored.hi <= loaded.lo or loaded.hi <= stored.lo:
        return None
    stored_addresses, loaded_addresses, active = stored.addresses, loaded.addresses, loaded.active
    if stored.size == loaded.size and stored_addresses.shape == loaded_addresses.shape and loaded_addresses.size > 1:
        active = active & ~(stored.active & (stored_addresses == loaded_addresses))
    part = math.gcd(stored.size, loaded.size)
    written = _subaddresses(stored_addresses[stored.active], stored.size, part).ravel()
    differs = np.isin(_subaddresses(loaded_addresses[active], loaded.size, part), written).any(axis=1)
    return int(loaded_addresses[active][differs.argmax()]) if differs.any() else None


def _subaddresses(addresses: np.ndarray, size: int, part: int) -> np.ndarray:
    """Return the addresses [n, size // part] of the parts of elements of `size` bytes."""
    return addresses[:, None] + np.arange(0, size, part, dtype=np.uint64)
