"""The errors that weft raises. Every message quotes the shapes, ranks or words that caused it."""

from __future__ import annotations

from typing import Any


class WeftError(RuntimeError):
    """Base of every error that weft defines."""


class Timeout(WeftError):
    """A bounded wait expired. The message names the op, rank, tile and channel, and the peer that did not arrive. Every
    later use of the World raises this error again."""


class Mismatch(WeftError):
    """Ranks disagree on a shape, a dtype, a plan or the order of ops. Every rank raises it. If the ranks had launched
    nothing of the call, the World stays usable; otherwise every later use of the World raises the error again."""


class Overflow(WeftError):
    """A rank's experts received more rows than `max_rows` or `max_m` allows. The message names the ranks of these
    experts and the number of dropped rows. Two groups of ranks raise this error: those that own the experts, and those
    that own the dropped rows' tokens. They raise it in `World.synchronize` or in a later call of an op, after the
    launch of that call. The other ranks have made that later call too, so the caller must not repeat it.

    result: the result of that later call; None for `World.synchronize`.
    """

    def __init__(self, message: str, result: Any = None) -> None:
        super().__init__(message)
        self.result = result


class Unsupported(WeftError):
    """A plan cannot serve this call (no peer access, a stride that TMA does not support, ...), or a grid cannot be
    resident at once; the message gives the reason."""


class Race(WeftError):
    """Emulator: neither release/acquire nor stream order orders two accesses to one element, one of which is a
    write."""


class Deadlock(WeftError):
    """Emulator: every task waits; the message contains the wait-for graph."""


class MemoryFault(WeftError):
    """Emulator: an access outside the tensor from which its pointer is derived, or a read of memory that was never
    written."""


class SignalError(WeftError):
    """Emulator: at the end of a run, a channel's counter is above (doubled signal) or below (lost signal) the expected
    value."""
