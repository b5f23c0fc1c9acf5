"""What weft.lang's intrinsics mean while a kernel is interpreted."""

from __future__ import annotations

from typing import Any

from weft.lang.jit import Intrinsic

from . import interpret
from .interpret import as_int, int32, plain


def wait_until(ptr: Any, target: Any, guard: Any, tile: Any, peer: Any, SCOPE: Any = "gpu") -> Any:
    scope_sys = plain(SCOPE) == "sys"
    return int32(interpret.hooks.wait_until(as_int(ptr), as_int(target), as_int(tile), as_int(peer), scope_sys))


def settle(BULK: Any = True) -> None:
    interpret.hooks.settle(bool(plain(BULK)))


def bulk_fence() -> None:
    interpret.hooks.bulk_fence()


def release_fence(SCOPE: Any = "sys") -> None:
    interpret.hooks.release_fence(plain(SCOPE) == "sys")


Intrinsic.emulated.update(wait_until=wait_until, settle=settle, bulk_fence=bulk_fence, release_fence=release_fence)
