"""One interval of work or waiting, as every backend records it."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Span:
    """start, end: microseconds on a GPU; virtual time of the emulator (bytes touched, in kB) otherwise."""

    rank: int
    # Emulator: "kernel:3" (program 3; on a side stream, "kernel (pull):3"), "stream:main", "stream:copy", "host". GPU:
    # what is done there, "compute", "all-gather", "copy engine" or "reduce"; "compute 2" beside another one.
    track: str
    name: str  # kernel, op or copy
    kind: str  # "compute", "local" (element-wise), "copy", "gather", "reduce", "wait", "call"
    start: float
    end: float
    detail: str = ""  # for a wait: which tile and channel, and who ended it; GPU: the kernel's full name
    releaser: tuple[int, str] | None = None  # for a wait: (rank, track) of the notify that ended it
