"""The errors that weft raises. Every message quotes the shapes, ranks or words that caused it."""

from __future__ import annotations

from typing import Any


class WeftError(RuntimeError):
    """Base of every error that weft defines."""


class Timeout(WeftError):
    """A bounded wait expired: names the op, rank, tile, channel and the peer that did not arrive. Every later use of
    the World raises it again."""


class Mismatch(WeftError):
    """Ranks disagree on a shape, dtype, plan or on the order of ops; raised on every rank. Where that was before any
    launch, the World works as before; else every later use of it raises it again."""


class Overflow(WeftError):
    """A rank's experts received more rows than `max_rows` or `max_m` has room for; the message says which ranks'
    experts, and how many rows were dropped. It is raised on that rank and on those whose tokens' rows these were, by
    `World.synchronize` or by a later call of an op, after its launch: the other ranks have made that call too, so it
    must not be repeated.

    result: the result of that call; None for `World.synchronize`.
    """

    def __init__(self, message: str, result: Any = None) -> None:
        super().__init__(message)
        self.result = result


class Unsupported(WeftError):
    """A plan cannot serve this call (no peer access, a stride that TMA cannot take, ...), or a grid cannot be resident
    at once; the message says why."""


class Race(WeftError):
    """Emulator: two accesses to one element, one of them a write, that no release/acquire or stream order relates."""


class Deadlock(WeftError):
    """Emulator: every task waits; the message has the wait-for graph."""


class MemoryFault(WeftError):
    """Emulator: an access outside the tensor that its pointer comes from, or a read of memory that nothing has
    written."""


class SignalError(WeftError):
    """Emulator: at the end of a run a channel's counter is above (doubled signal) or below (lost signal) its due."""
