"""What weft.lang's intrinsics mean while a kernel is interpreted."""

from __future__ import annotations

from typing import Any

from weft.lang.jit import Intrinsic

from . import interpret
from .interpret import as_int
from .interpret import plain as _plain


def wait_until(ptr: Any, target: Any, guard: Any, tile: Any, peer: Any, SCOPE: Any = "gpu") -> Any:
    machine = interpret.hooks
    value = machine.await_word(as_int(ptr), as_int(target), as_int(tile), as_int(peer), _plain(SCOPE) == "sys")
    machine.current.fence()
    return interpret.int32(value)


def settle(BULK: Any = True) -> None:
    interpret.hooks.settle(bool(_plain(BULK)))


def bulk_fence() -> None:
    interpret.hooks.pause()
    interpret.hooks.current.fence()


def release_fence(SCOPE: Any = "sys") -> None:
    interpret.hooks.release_fence(_plain(SCOPE) == "sys")


Intrinsic.emulated.update(
    wait_until=wait_until, settle=settle, bulk_fence=bulk_fence, release_fence=release_fence
)
