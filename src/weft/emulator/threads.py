"""This module finds a store and a later load of the same elements by different threads of one program without a barrier
in between.

The compiler assigns the elements of a block to threads. If a program stores an element and loads it again at the same
index of a block with the same shape and element size, this module assumes that one thread executes both accesses, which
is mostly true. Otherwise it assumes that a different thread loads the element, possibly before the store. One thread
stores a scalar, but all threads load it.
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
    lo: int  # the address of each element's first byte
    hi: int  # the address after each element's last byte
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
    """Return the address of an element that one thread has stored and a different thread may load; None if there is no
    such element."""
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
