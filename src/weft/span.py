"""A span is one interval of work or waiting. Every backend records spans in this form."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Span:
    """An interval on one track of one rank. start, end: microseconds on a GPU; in the emulator, virtual time, in kB
    that one SM reads or writes."""

    rank: int
    # In the emulator "kernel:3" (program 3; on a side stream, "kernel (pull):3"), "stream:main", "stream:copy", "host".
    # On a GPU the kind of work, "compute", "all-gather", "copy engine" or "reduce"; "compute 2" where two overlap.
    track: str
    name: str  # kernel, op or copy
    kind: str  # "compute", "local" (element-wise), "copy", "gather", "reduce", "wait", "call"
    start: float
    end: float
    detail: str = ""  # the tile and channel of a wait; on a GPU, the kernel's full name
    releaser: tuple[int, str] | None = None  # the (rank, track) of the notify that ended a wait
