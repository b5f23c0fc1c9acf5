"""The data of an emulated run: tasks, streams, running kernels, waits of tasks, and the report of the run."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Hashable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np
import torch
from greenlet import greenlet
from triton import JITFunction

from ..span import Span
from .host import HostThread
from .ran import Function, Ran

if TYPE_CHECKING:
    from .machine import Machine
    from .memory import Region
    from .threads import AccessedBlock


@dataclass(frozen=True)
class Costs:
    """The virtual time of work. flop: one floating-point operation of a program; byte: one byte that a program reads or
    writes; link: one byte that a copy engine or a collective transfers to a rank. unit: the name of the unit.

    By default 1 is the time in which one SM reads or writes 1 kB. All other times are in proportion, for an H200 (690
    TFLOP/s on 132 SMs, 330 GB/s per link, about 80 GB/s per SM).
    """

    flop: float = 1 / 65_000
    byte: float = 1e-3
    link: float = 0.25e-3
    unit: str = "virtual time (1 = one SM touches 1 kB)"

    def product(self, flops: float, nbytes: float, sms: int) -> float:
        """Return the time of a library call on all SMs."""
        return max(flops * self.flop, nbytes * self.byte) / sms


H200 = Costs()


SourceSite = tuple[tuple[str, int, str], ...]


def place(site: SourceSite) -> str:
    """Return a site as text, with the innermost frame first."""
    return " < ".join(f"{file}:{line} ({name})" for file, line, name in site) or "?"


@dataclass(eq=False)
class Task:
    """A task is one agent of the happens-before relation: host code, a stream or a program.

    `clock` is the task's vector clock, and `agent` its index in all clocks. `tick`, the task's own entry, stamps the
    task's accesses. `flushed` is the tick up to which a release covers the task's ordinary stores.
    """

    machine: Machine
    name: str
    rank: int
    kind: str  # "host", "stream", "program"
    track: str
    agent: int
    clock: np.ndarray
    tick: int = 0
    flushed: int = 0
    # The agent of one-element atomics: one thread executes them, so that thread's next release covers them without a
    # flush_stores.
    atomic_agent: int = -1
    atomic_clock: int = 0
    bulk_agent: int = -1
    bulk_clock: int = 0
    bulk_view: np.ndarray = None  # type: ignore[assignment]
    later: np.ndarray | None = (
        None  # the clock that one thread of a program acquired; the other threads acquire it at their next barrier
    )
    at_end: np.ndarray | None = None  # later operations of the stream are ordered after this clock
    # The clocks that the task's relaxed atomics have read; one was released to the task's own rank, the other to all
    # ranks. The task's next fence acquires these clocks.
    observed: list[np.ndarray | None] = field(default_factory=lambda: [None, None])
    threads: np.ndarray | None = None  # bool [threads], whether a thread runs the current branch; None: all do
    fenced: tuple[np.ndarray, bool] | None = None  # the last release fence: its clock, and whether its scope is "sys"
    cache: dict[tuple[int, int, int], int] = field(default_factory=dict)  # (site, state, kind) -> state after it
    greenlet: greenlet = None
    host: HostThread | None = None
    position: int = -1  # the task's index in machine.ready
    waits: Wait | Poll | Collective | str | None = None
    done: bool = False
    time: float = 0.0
    begun: float = 0.0  # the start of the compute span that is being recorded
    polls: int = 0
    polled: tuple[int, ...] = ()
    reads: dict[int, int] = field(default_factory=dict)  # the number of plain loads of each address since `reads_at`
    reads_at: int = 0  # a value of `machine.progress`
    stored: dict[Region, dict[Hashable, AccessedBlock]] = field(default_factory=dict)  # stores since the last barrier
    index: tuple[int, int, int] = (0, 0, 0)
    grid: tuple[int, int, int] = (1, 1, 1)
    run: KernelRun | None = None
    start: np.ndarray = None  # type: ignore[assignment]  # the clock of a program when the program began
    acquired: bool = False

    @property
    def report_name(self) -> str:
        """Return the task's name in a report. The name includes the number of the launch if the kernel was launched
        several times."""
        return f"{self.name}, launch {self.run.number}" if self.run and self.run.number > 1 else self.name

    @property
    def wait(self) -> Wait:
        """Return the Wait of a task in `Machine.waiting`."""
        assert isinstance(self.waits, Wait)
        return self.waits

    @property
    def poll(self) -> Poll:
        """Return the Poll of a task in `Machine.polling`."""
        assert isinstance(self.waits, Poll)
        return self.waits

    def advance(self) -> None:
        """Begin a new tick, so that later accesses can be told from earlier ones."""
        self.tick += 1
        if self.atomic_agent == self.agent:
            self.atomic_clock = self.tick
        self.clock[self.agent] = self.tick
        self.machine.clocks[self.agent] = self.tick
        self.cache.clear()

    def fence(self) -> None:
        self.bulk_view = self.clock.copy()
        self.advance()

    def join(self, clock: np.ndarray) -> None:
        if len(clock) == len(self.clock):
            np.maximum(self.clock, clock, out=self.clock)
        else:
            self.machine.widen(self)
            part = self.clock[: len(clock)]
            np.maximum(part, clock, out=part)


@dataclass(eq=False)
class Wait:
    """The reason why a task is blocked: the task waits until a counter reaches a target."""

    address: int
    target: int
    tile: int
    peer: int
    site: SourceSite


@dataclass(eq=False)
class Poll:
    """The reason why a task sleeps: the task spins on a word that does not change."""

    address: int | None
    site: SourceSite
    plain: bool = False  # whether the task spins with ordinary loads


@dataclass(eq=False)
class Update:
    """A change of a word, with the clocks that all releases up to this change cover; these clocks are never changed in
    place."""

    value: int
    time: float
    task: Task
    system: np.ndarray | None  # the clock of the releases at scope "sys"
    ranks: dict[int, np.ndarray]  # the clock of all releases, by rank


@dataclass(eq=False)
class KernelRun:
    """One launch of a kernel."""

    kernel: JITFunction
    body: Function
    args: dict[str, object]
    grid: tuple[int, int, int]
    stream: EmulatedStream
    number: int  # the number of this rank's launches of this kernel so far, including this launch
    enqueue_index: int  # the launch's index among the operations that the rank's host code enqueued
    co_resident: bool  # whether the launch's programs are resident together with other kernels' programs
    per_sm: int  # programs that share an SM
    warps: int  # warps of a program
    begun: float = 0.0
    ended: float = 0.0
    left: int = 0  # programs that have not ended
    call: int = 0  # the call's number in the first channel when the launch began; 0 without a channel
    uncounted: str = ""  # the reason why `call` is the number of an earlier launch; empty if it is not
    started: int = 0
    clock: np.ndarray = None  # type: ignore[assignment]

    @property
    def programs(self) -> int:
        return math.prod(self.grid)

    def fits(self, sm_count: int) -> bool:
        """Return whether all programs of the launch can be resident at once."""
        return self.co_resident or self.programs <= sm_count * self.per_sm


@dataclass(eq=False)
class Owner:
    """The author of an access: a program, an operation of a stream, or host code."""

    name: str
    rank: int
    run: KernelRun | None = None
    enqueue_index: int = 0  # the operation's index among the operations that the rank's host code enqueued
    released: bool = False  # whether a program has made a release so far


@dataclass(eq=False)
class EmulatedEvent:
    """An event that a stream records, and the tasks that wait for it."""

    done: bool = False
    clock: np.ndarray | None = None
    time: float = 0.0
    releaser: tuple[int, str] | None = None  # (rank, track) of the stream that recorded it
    waiters: list[Task] = field(default_factory=list)
    text: str = ""


@dataclass(eq=False)
class EmulatedStream:
    """A stream of one rank: its task runs the operations of `queue` in order."""

    rank: int
    name: str
    task: Task
    queue: deque[tuple[Callable[[], None], np.ndarray, float, Owner]] = field(default_factory=deque)
    busy: str = ""
    finishers: list[Task] = field(default_factory=list)

    @property
    def idle(self) -> bool:
        return not self.queue and not self.busy


class CountedWrites:
    """The tensors to which a stream operation writes through torch. The versions of these tensors, which tell autograd
    that a tensor was changed, count a write when it is enqueued, as on a GPU, and not when the stream executes it
    (`kept`)."""

    def __init__(self, tensors: Sequence[torch.Tensor]) -> None:
        self._versioned = tuple(t for t in tensors if not t.is_inference())
        torch.autograd.graph.increment_version(self._versioned)

    def kept(self) -> AbstractContextManager[None]:
        """Return a context manager within which writes do not change the versions."""
        return torch.autograd._unsafe_preserve_version_counter(self._versioned)


@dataclass(eq=False)
class Arrival:
    """A rank's part in a collective. `sources` are the indices of the ranks whose data this rank receives."""

    task: Task
    reads: Sequence[torch.Tensor]
    writes: Sequence[torch.Tensor]
    sources: Sequence[int]
    counted: CountedWrites


@dataclass(eq=False)
class Collective:
    """One barrier or collective, which all its ranks must call with the same signature."""

    ranks: tuple[int, ...]
    number: int
    kind: str
    signature: tuple[Hashable, ...]
    first_rank: int
    arrived: dict[int, Arrival] = field(default_factory=dict)
    next: list[Task] = field(default_factory=list)  # tasks in the communicator's next collective, waiting for this one
    done: bool = False


@dataclass
class Report:
    """The result of a run."""

    seed: int
    mode: str
    size: int
    programs: int = 0
    switches: int = 0
    accesses: int = 0
    schedule: int = 0  # a hash of the order in which tasks ran; equal schedules have equal hashes
    counters: dict[str, list[int]] = field(default_factory=dict)
    timeline: list[Span] = field(default_factory=list)
    ran: Ran = field(default_factory=Ran)
    reached: set[tuple[str, int]] = field(default_factory=set)  # in recorded runs, (file, line) of kernels' statements
    bulk_lines: set[tuple[str, int]] = field(default_factory=set)  # in recorded runs, calls that flushed bulk stores
    sys_lines: set[tuple[str, int]] = field(default_factory=set)  # in recorded runs, atomics and waits at scope "sys"
    host_sites: list[tuple[str, int, str]] = field(default_factory=list)  # recorded (file, line, backend method)


def reached(value: int, target: int) -> bool:
    """Return whether value >= target, modulo 2^32."""
    return (value - target) & 0xFFFFFFFF < 0x80000000


def merged(a: np.ndarray | None, b: np.ndarray) -> np.ndarray:
    """Return the element-wise maximum of two clocks, as a new array."""
    if a is None:
        return b.copy()
    if len(a) < len(b):
        a, b = b, a
    out = a.copy()
    np.maximum(a[: len(b)], b, out=out[: len(b)])
    return out
