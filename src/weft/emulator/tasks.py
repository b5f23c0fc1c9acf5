"""What a run is made of: tasks, streams, running kernels, what they wait for, and the report in the end."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np
import torch
from greenlet import greenlet
from triton import JITFunction

from ..trace.span import Span
from .host import HostThread
from .ran import Function, Ran

if TYPE_CHECKING:
    from .machine import Machine
    from .memory import Region
    from .threads import Block

# Virtual time: 1 is one SM touching 1 kB. The other two in proportion, for an H200 (690 TFLOP/s and 132 SMs,
# 330 GB/s a link, about 80 GB/s an SM).
FLOPS, LINK = 1 / 65_000, 0.25e-3

Site = tuple[tuple[str, int, str], ...]


def place(site: Site) -> str:
    return " < ".join(f"{file}:{line} ({name})" for file, line, name in site) or "?"


@dataclass(eq=False)
class Task:
    """One agent. `clock` is its vector clock; `own` its own entry, stamped on what it does."""

    machine: Machine
    name: str
    rank: int
    kind: str  # "host", "stream", "program"
    track: str
    slot: int
    clock: np.ndarray
    own: int = 0
    settled: int = 0
    atom_slot: int = (
        -1
    )  # atomics of one element: made by one thread, so its next release covers them without a flush_stores
    atom_clock: int = 0
    bulk_slot: int = -1
    bulk_clock: int = 0
    bulk_view: np.ndarray = None  # type: ignore[assignment]
    fenced: tuple[np.ndarray, bool] | None = None  # what its last release fence covered, and whether at scope sys
    cache: dict[tuple[int, int, int], int] = field(default_factory=dict)  # (site, state, kind) -> state after it
    greenlet: greenlet = None
    host: HostThread | None = None
    position: int = -1  # in machine.ready
    waits: Wait | Poll | Meeting | str | None = None  # what it waits for
    done: bool = False
    time: float = 0.0
    begun: float = 0.0  # start of the compute span being built
    polls: int = 0
    polled: tuple[int, ...] = ()
    reads: dict[int, int] = field(default_factory=dict)  # plain loads by address, since `reads_at`
    reads_at: int = 0  # `machine.progress`
    stored: dict[Region, dict[Hashable, Block]] = field(default_factory=dict)  # since the last barrier of its threads
    index: tuple[int, int, int] = (0, 0, 0)
    grid: tuple[int, int, int] = (1, 1, 1)
    run: KernelRun | None = None
    start: np.ndarray = None  # type: ignore[assignment]  # a program's clock when it began
    acquired: bool = False

    @property
    def told(self) -> str:
        """Its name in a finding, where a kernel may have been launched several times."""
        return f"{self.name}, launch {self.run.number}" if self.run and self.run.number > 1 else self.name

    @property
    def wait(self) -> Wait:
        """What a task in `Machine.waiting` waits for."""
        assert isinstance(self.waits, Wait)
        return self.waits

    @property
    def poll(self) -> Poll:
        """What a task in `Machine.polling` waits for."""
        assert isinstance(self.waits, Poll)
        return self.waits

    def advance(self) -> None:
        """Later accesses are told from earlier ones."""
        self.own += 1
        if self.atom_slot == self.slot:
            self.atom_clock = self.own
        self.clock[self.slot] = self.own
        self.machine.clocks[self.slot] = self.own
        self.cache.clear()

    def fence(self) -> None:
        self.bulk_view = self.clock.copy()
        self.advance()

    def join(self, other: np.ndarray) -> None:
        if len(other) == len(self.clock):
            np.maximum(self.clock, other, out=self.clock)
        else:
            self.machine.widen(self)
            part = self.clock[: len(other)]
            np.maximum(part, other, out=part)


@dataclass(eq=False)
class Wait:
    """A task blocked until a counter reaches a target."""

    address: int
    target: int
    tile: int
    peer: int
    site: Site


@dataclass(eq=False)
class Poll:
    """A task that spins on a word which does not change."""

    address: int | None
    site: Site
    plain: bool = False  # by ordinary loads


@dataclass(eq=False)
class Update:
    """A change of a word, and what all releases up to it covered (clocks; never changed in place)."""

    value: int
    time: float
    by: Task
    system: np.ndarray | None  # releases at scope sys
    ranks: dict[int, np.ndarray]  # all releases, by rank


@dataclass(eq=False)
class KernelRun:
    kernel: JITFunction
    body: Function
    args: dict[str, object]
    grid: tuple[int, int, int]
    stream: Stream
    left: int  # programs that have not ended
    begun: float
    ended: float
    number: int  # of the launches of this kernel by this rank
    given: int  # its place among the operations that the rank's host code gave to streams
    co_resident: bool = False  # small enough to be resident beside other kernels' programs
    per_sm: int = 1  # programs that share a slot
    fits: bool = True  # all its programs can be resident at once
    call: int = 0  # its number as its first channel had it when the launch began; 0: no channel
    uncounted: str = ""  # the number is that of an earlier launch, and why
    started: int = 0
    clock: np.ndarray = None  # type: ignore[assignment]


@dataclass(eq=False)
class Owner:
    """Who made an access: a program, an operation of a stream, or host code."""

    name: str
    rank: int
    run: KernelRun | None = None
    given: int = 0  # its place among the operations that the rank's host code gave to streams


@dataclass(eq=False)
class Event:
    done: bool = False
    clock: np.ndarray | None = None
    time: float = 0.0
    by: tuple[int, str] | None = None
    waiters: list[Task] = field(default_factory=list)
    text: str = ""


@dataclass(eq=False)
class Stream:
    rank: int
    name: str
    task: Task
    queue: deque[tuple[Callable[[], None], np.ndarray, float, Owner]] = field(default_factory=deque)
    busy: str = ""
    finishers: list[Task] = field(default_factory=list)

    @property
    def idle(self) -> bool:
        return not self.queue and not self.busy


@dataclass(eq=False)
class Arrival:
    """A rank's part in a meeting."""

    task: Task
    reads: Sequence[torch.Tensor]
    writes: Sequence[torch.Tensor]
    hears: Sequence[int]


@dataclass(eq=False)
class Meeting:
    """One barrier or collective: all of its ranks must come, with the same signature."""

    ranks: tuple[int, ...]
    number: int
    kind: str
    signature: tuple[Hashable, ...]
    first: int
    arrived: dict[int, Arrival] = field(default_factory=dict)
    next: list[Task] = field(default_factory=list)  # that come to the communicator's next one, and wait for this to end
    done: bool = False


@dataclass
class Report:
    """What a run did."""

    seed: int
    mode: str
    size: int
    programs: int = 0
    switches: int = 0
    accesses: int = 0
    schedule: int = 0  # a hash of who ran when: equal for equal schedules
    counters: dict[str, list[int]] = field(default_factory=dict)
    timeline: list[Span] = field(default_factory=list)
    ran: Ran = field(default_factory=Ran)
    reached: set[tuple[str, int]] = field(default_factory=set)  # recorded runs: statements of kernels, (file, line)
    bulk_lines: set[tuple[str, int]] = field(default_factory=set)  # recorded: calls that settled bulk stores
    sys_lines: set[tuple[str, int]] = field(default_factory=set)  # recorded: atomics and waits at scope sys
    host_sites: list[tuple[str, int, str]] = field(default_factory=list)  # recorded: (file, line, backend method)


def reached(value: int, target: int) -> bool:
    """value >= target, modulo 2^32."""
    return (value - target) & 0xFFFFFFFF < 0x80000000


def merged(a: np.ndarray | None, b: np.ndarray) -> np.ndarray:
    if a is None:
        return b.copy()
    if len(a) < len(b):
        a, b = b, a
    out = a.copy()
    np.maximum(a[: len(b)], b, out=out[: len(b)])
    return out
