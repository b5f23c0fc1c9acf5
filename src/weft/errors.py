"""What weft raises. Every message quotes the shapes, ranks or words that caused it."""

from __future__ import annotations

from typing import Any


class WeftError(RuntimeError):
    """Base of every error that weft raises on its own account."""


class Timeout(WeftError):
    """A bounded wait expired: names the op, rank, tile, channel and the peer that did not arrive."""


class Mismatch(WeftError):
    """Ranks disagree on a shape, dtype, plan or on the order of ops; raised on every rank, before any launch."""


class Overflow(WeftError):
    """More rows came to a rank's experts than `max_rows` or `max_m` has room for; says how many were left out. Raised
    on the ranks that it befell, by `World.synchronize`, or by a later call of an op, behind its launch: the other ranks
    have made that call too, so it is not to be made again.

    result: what that call returns; of `World.synchronize`, None."""

    def __init__(self, message: str, result: Any = None) -> None:
        super().__init__(message)
        self.result = result


class Unsupported(WeftError):
    """A plan cannot serve this call (no peer access, a stride TMA cannot take, ...), or a grid is not resident at once;
    says why."""


class Race(WeftError):
    """Emulator: two accesses to one element, one of them a write, unordered by release/acquire or stream order."""


class Deadlock(WeftError):
    """Emulator: every task waits; the message holds the wait-for graph."""


class MemoryFault(WeftError):
    """Emulator: an access outside the tensor that its pointer comes from, or a read of memory nothing wrote."""


class SignalError(WeftError):
    """Emulator: at the end of a run a channel's counter is above (doubled signal) or below (lost signal) its due."""
