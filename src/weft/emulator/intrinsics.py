"""What weft.lang's intrinsics mean while a kernel is interpreted."""

from __future__ import annotations

from typing import Any

import numpy as np
import triton.language as tl

from weft.lang.jit import Intrinsic

from . import interpret
from .interpret import as_int, int32, plain


def wait_until(ptr: Any, target: Any, guard: Any, tile: Any, peer: Any, SCOPE: Any = "gpu", MANY: Any = 1) -> Any:
    scope_sys, first, rank = plain(SCOPE) == "sys", as_int(ptr), as_int(peer)
    for i in range(as_int(MANY)):
        seen = interpret.hooks.wait_until(first + 4 * i, as_int(target), as_int(tile), rank + i, scope_sys)
    return int32(seen)


def settle(BULK: Any = True) -> None:
    interpret.hooks.settle(bool(plain(BULK)))


def bulk_fence() -> None:
    interpret.hooks.bulk_fence()


def release_fence(SCOPE: Any = "sys") -> None:
    interpret.hooks.release_fence(plain(SCOPE) == "sys")


def window_fence() -> None:
    """Addresses have no aliases here."""


def window_sum(row: Any, H: Any, P: Any, DTYPE: Any) -> Any:
    """Every rank's row, summed in fp32 in the order of the ranks."""
    width, padded, dtype = as_int(H), as_int(P), plain(DTYPE)
    kind = np.dtype(np.uint16 if dtype == tl.bfloat16 else np.float16)
    total = np.zeros(padded, np.float32)
    for start in interpret.hooks.window(as_int(row)):
        part = interpret.hooks.load(_elements(start, width), None, None, kind, False)
        bits = (part.astype(np.uint32) << np.uint32(16)).view(np.float32) if kind == np.uint16 else part
        total[:width] += bits.astype(np.float32)
    return tl.tensor(interpret.TensorHandle(total, tl.float32), tl.block_type(tl.float32, [padded]))


def window_store(row: Any, y: Any, H: Any, P: Any) -> None:
    width = as_int(H)
    for start in interpret.hooks.window(as_int(row)):
        interpret.hooks.store(_elements(start, width), y.handle.data[:width], None)


def _elements(start: int, width: int) -> np.ndarray:
    """Addresses of elements of 16 bits."""
    return np.uint64(start) + np.arange(width, dtype=np.uint64) * np.uint64(2)


Intrinsic.emulated.update(wait_until=wait_until, settle=settle, bulk_fence=bulk_fence, release_fence=release_fence)
Intrinsic.emulated.update(window_fence=window_fence, window_sum=window_sum, window_store=window_store)
