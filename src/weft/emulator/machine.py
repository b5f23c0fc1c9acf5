"""Every rank of a world as greenlets of one thread, scheduled by a seed, with happens-before kept in vector clocks.

Tasks are: the host code of each rank, each stream (which runs its operations in order), and each resident program of a
running kernel. Whoever runs goes on until a scheduling point (an atomic, an intrinsic, an operation given to a stream,
now and then a load or store) and picks the next task there. When no task can run, the run is over or deadlocked.

What orders two tasks:
    host -> stream                  what the host knew when it gave the operation (`synchronize`, `exchange`)
    stream -> stream                record / wait_event, meet, collectives
    stream -> program -> stream     start and end of a kernel
    release -> acquire              through a counter; scope "gpu" between tasks of one rank only

Inside a program the GPU is weaker than program order, and so is this model:
    - a release by one thread covers ordinary accesses only up to the last `settle` or `tl.debug_barrier` (`settled`);
    - bulk (TMA) stores are made by an agent of their own (`bulk_slot`), which joins the program at `settle(BULK=True)`;
    - bulk loads and stores know only what the program knew at its last proxy fence (`bulk_view`).
"""

from __future__ import annotations

import ctypes
import math
import random
import sys
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from greenlet import GreenletExit, getcurrent, greenlet
from triton.runtime.jit import JITFunction
from triton.tools.tensor_descriptor import TensorDescriptor

from weft.errors import Deadlock, MemoryFault, Mismatch, Race, SignalError
from weft.trace.span import Span

from . import interpret, memory
from .memory import ATOMIC_READ, ATOMIC_WRITE, BULK_READ, BULK_WRITE, READ, VERB, WRITE, Memory, Region, _Found

# Virtual time: 1 is one SM touching 1 kB. The other two in proportion, for an H200 (FACTS: 690 TFLOP/s and 132 SMs,
# 330 GB/s a link, about 80 GB/s an SM).
FLOPS, LINK = 1 / 65_000, 0.25e-3
LOG = 128  # changes of a word that are remembered
IDLE_ROUNDS = 64  # how often spinning tasks may all look again before it is a deadlock

Site = tuple[tuple[str, int, str], ...]
MODES = ("clock", "random", "starve", "burst")


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
    atom_slot: int = -1  # its atomics: made by one thread, so its next release covers them without a settle
    atom_clock: int = 0
    bulk_slot: int = -1
    bulk_clock: int = 0
    bulk_view: np.ndarray = None  # type: ignore[assignment]
    fenced: tuple[np.ndarray, bool] | None = None  # what its last release fence covered, and whether at scope sys
    cache: dict[int, int] = field(default_factory=dict)
    greenlet: greenlet = None  # type: ignore[assignment]
    position: int = -1  # in machine.ready
    waits: Any = None  # what it waits for: a Wait, Poll or text
    done: bool = False
    time: float = 0.0
    begun: float = 0.0  # start of the compute span being built
    polls: int = 0
    polled: tuple[int, ...] = ()
    index: tuple[int, int, int] = (0, 0, 0)
    grid: tuple[int, int, int] = (1, 1, 1)
    run: KernelRun | None = None

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
    body: Callable[..., Any]
    args: dict[str, Any]
    grid: tuple[int, int, int]
    stream: Stream
    left: int  # programs that have not ended
    begun: float
    ended: float
    started: int = 0
    clock: np.ndarray = None  # type: ignore[assignment]


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
    queue: deque[tuple[Callable[[], None], np.ndarray, float, str]] = field(default_factory=deque)
    busy: str = ""
    finishers: list[Task] = field(default_factory=list)

    @property
    def idle(self) -> bool:
        return not self.queue and not self.busy


@dataclass(eq=False)
class Meeting:
    """One barrier or collective: all ranks must come, with the same signature."""

    number: int
    kind: str
    signature: tuple[Any, ...]
    first: int
    arrived: dict[int, tuple[Task, tuple[torch.Tensor, ...]]] = field(default_factory=dict)
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
    functions: list[JITFunction] = field(default_factory=list)  # every function that was interpreted
    reached: set[tuple[str, int]] = field(default_factory=set)  # recorded runs: statements of kernels, (file, line)
    bulk_lines: set[tuple[str, int]] = field(default_factory=set)  # recorded: calls that settled bulk stores
    sys_lines: set[tuple[str, int]] = field(default_factory=set)  # recorded: atomics and waits at scope sys
    host_sites: list[tuple[str, int, str]] = field(default_factory=list)  # recorded: (file, line, backend method)


class Machine:
    """One run of a world."""

    def __init__(
        self,
        size: int,
        *,
        seed: int = 0,
        sm_count: int = 6,
        races: bool = True,
        preempt: float = 0.05,
        mutation: Any = None,
        record: bool = False,
    ) -> None:
        self.size, self.seed, self.sm_count, self.preempt = size, seed, sm_count, preempt
        self.mutation, self.record = mutation, record
        self.rng = random.Random(seed)
        self.mode = MODES[seed % len(MODES)]
        self.memory = Memory(self, races)
        self.races = races
        self.report = Report(seed, self.mode, size)
        self.reached = self.report.reached
        # tasks
        self.tasks: list[Task] = []
        self.ready: list[Task] = []
        self.current: Task = None  # type: ignore[assignment]
        self.hub = getcurrent()
        self.closing = False
        self.progress = self.rounds = self.looked = 0
        self.starved: Any = None
        self.starve_left = 0
        # clocks
        self.clocks: list[int] = []
        self.slots: dict[Any, int] = {}
        self.owners: list[list[tuple[int, str]]] = []  # per slot: (first clock, task name)
        self.width = 64
        self.sites: list[Site] = [()]
        self.site_ids: dict[Site, int] = {(): 0}
        # the world
        self.words: dict[int, deque[Update]] = {}  # latest changes of every counter and flag
        self.waiting: dict[int, list[Task]] = {}
        self.polling: list[Task] = []
        self.hosts: list[Task] = []
        self.streams: dict[tuple[int, str], Stream] = {}
        self.pending: list[list[KernelRun]] = [[] for _ in range(size)]
        self.free: list[list[float]] = [[0.0] * sm_count for _ in range(size)]  # per rank: since when each slot is free
        self.resident: list[list[Task]] = [[] for _ in range(size)]
        self.meetings: list[Meeting] = []
        self.met = [0] * size
        self.exchanges: list[dict[int, Any]] = []
        self.exchanged = [0] * size
        self.bodies: dict[Any, Callable[..., Any]] = {}  # by raw function: a JITFunction's hash is its whole source
        self.programs_of: dict[int, int] = {}  # slot of a program or of its bulk agent -> slot of the program
        self.channels: dict[tuple[int, str, int], tuple[str, int, torch.Tensor, Any, Any]] = {}
        self.seen_sites: set[tuple[str, int, str]] = set()

    # -- running -----------------------------------------------------------------------------------------------------
    def run(self, hosts: Sequence[Callable[[], Any]]) -> list[Any]:
        results: list[Any] = [None] * self.size

        def host(rank: int, fn: Callable[[], Any]) -> Callable[[], None]:
            def body() -> None:
                try:
                    results[rank] = fn()
                except GreenletExit:
                    raise
                except BaseException as error:
                    error.add_note(f"raised by rank {rank} of {self.size} (emulated, seed {self.seed})")
                    raise

            return body

        with interpret.patched(self):
            try:
                for rank, fn in enumerate(hosts):
                    task = self.task(f"rank {rank} host", rank, "host", "host", ("host", rank))
                    self.hosts.append(task)
                    self.start(task, host(rank, fn))
                self._loop()
            finally:
                self._close()
        self._check_channels()
        return results

    def _loop(self) -> None:
        """The hub: gets control when a task ends or nothing can run."""
        while True:
            if not self.ready and not self._stalled():
                return
            task = self._pick()
            self.current = task
            task.greenlet.switch()

    def _stalled(self) -> bool:
        """Nothing is ready: look again at what host code may have changed, let spinners spin, or give up."""
        for address, tasks in list(self.waiting.items()):
            value = self.peek(address)
            for task in list(tasks):
                if _reached(value, task.waits.target):
                    self._wake_word(task)
        if self.ready:
            return True
        if self.polling:
            if self.looked != self.progress:
                self.looked, self.rounds = self.progress, 0
            if self.rounds < IDLE_ROUNDS:
                self.rounds += 1
                for task in self.polling[:]:
                    self._wake_poll(task)
                return True
        if all(t.done for t in self.hosts) and all(s.idle for s in self.streams.values()):
            return False
        raise Deadlock(self._graph())

    def _close(self) -> None:
        self.closing = True
        for task in self.tasks:
            if task.greenlet is not None and task.greenlet and not task.greenlet.dead:
                task.greenlet.throw(GreenletExit)
        for stream in self.streams.values():
            stream.queue.clear()
        self.report.host_sites = sorted(self.seen_sites)

    # -- tasks and the scheduler -------------------------------------------------------------------------------------
    def task(self, name: str, rank: int, kind: str, track: str, key: Any, clock: np.ndarray | None = None) -> Task:
        slot = self.slot(key)
        task = Task(self, name, rank, kind, track, slot, np.zeros(self.width, np.int32))
        if clock is not None:
            task.clock[: len(clock)] = clock
        task.own = task.settled = self.clocks[slot]
        task.advance()
        task.atom_slot, task.atom_clock = slot, task.own
        self.owners[slot].append((task.own, name))
        if len(self.tasks) > 64 + 4 * len(self.clocks):
            self.tasks = [t for t in self.tasks if not t.done]
        self.tasks.append(task)
        return task

    def slot(self, key: Any) -> int:
        found = self.slots.get(key)
        if found is None:
            found = self.slots[key] = len(self.clocks)
            self.clocks.append(0)
            self.owners.append([])
            if found >= self.width:
                self.width *= 2
                self.tasks = [t for t in self.tasks if not t.done]
                for task in self.tasks:
                    self.widen(task)
        return found

    def widen(self, task: Task) -> None:
        for name in ("clock", "bulk_view"):
            old = getattr(task, name)
            if old is not None and len(old) < self.width:
                wide = np.zeros(self.width, np.int32)
                wide[: len(old)] = old
                setattr(task, name, wide)

    def start(self, task: Task, body: Callable[[], None]) -> None:
        def whole() -> None:
            try:
                body()
            finally:
                if not self.closing:
                    self._ended(task)

        task.greenlet = greenlet(whole, self.hub)
        self._make_ready(task)

    def _ended(self, task: Task) -> None:
        task.done = True
        task.cache = {}
        self.progress += 1
        self._unready(task)

    def _make_ready(self, task: Task) -> None:
        task.position = len(self.ready)
        self.ready.append(task)

    def _unready(self, task: Task) -> None:
        i = task.position
        if i < 0:
            return
        last = self.ready.pop()
        if last is not task:
            self.ready[i] = last
            last.position = i
        task.position = -1

    def _pick(self) -> Task:
        ready = self.ready
        n = len(ready)
        if n == 1:
            return ready[0]
        mode = self.mode
        if mode == "clock":
            return min(ready, key=lambda t: (t.time, t.slot))
        if mode == "burst":
            now = self.current
            if now is not None and now.position >= 0 and self.rng.random() < 0.9:
                return now
        elif mode == "starve":
            if self.starve_left <= 0:
                victim = self.rng.choice(self.tasks)
                self.starved = victim.rank if self.rng.random() < 0.5 else victim
                self.starve_left = self.rng.randrange(20, 400)
            self.starve_left -= 1
            for _ in range(4):
                task = ready[int(self.rng.random() * n)]
                if task is not self.starved and task.rank != self.starved:
                    return task
            others = [t for t in ready if t is not self.starved and t.rank != self.starved]
            return self.rng.choice(others or ready)
        return ready[int(self.rng.random() * n)]

    def _switch(self) -> None:
        """Give control to whoever is picked; comes back when this task is picked again."""
        if self.closing:
            raise GreenletExit
        if not self.ready:
            self.hub.switch()
        else:
            me, task = self.current, self._pick()
            if task is not me:
                self.current = task
                self.report.switches += 1
                self.report.schedule = hash((self.report.schedule, task.slot))
                task.greenlet.switch()

    def pause(self) -> None:
        """A scheduling point."""
        if len(self.ready) > 1 or self.closing:
            self._switch()

    def block(self, waits: Any) -> None:
        """Not ready until `wake`."""
        task = self.current
        task.waits = waits
        self._unready(task)
        self._switch()
        task.waits = None

    def wake(self, task: Task) -> None:
        if task.position < 0 and not task.done:
            self._make_ready(task)

    # -- words -------------------------------------------------------------------------------------------------------
    def peek(self, address: int) -> int:
        return ctypes.c_int32.from_address(address).value

    def _wake_word(self, task: Task) -> None:
        tasks = self.waiting[task.waits.address]
        tasks.remove(task)
        if not tasks:
            del self.waiting[task.waits.address]
        self.wake(task)

    def _wake_poll(self, task: Task) -> None:
        self.polling.remove(task)
        self.wake(task)

    def word_changed(self, address: int) -> None:
        self.progress += 1
        if self.waiting and (tasks := self.waiting.get(address)):
            value = self.peek(address)
            for task in tasks[:]:
                if _reached(value, task.waits.target):
                    self._wake_word(task)
        if self.polling:
            for task in self.polling[:]:
                if task.waits.address is None or task.waits.address == address:
                    self._wake_poll(task)

    def range_changed(self, lo: int, hi: int, region: Region) -> None:
        self.progress += 1
        if region.words:  # an ordinary store to a counter ends what was released through it
            for address in [a for a in self.words if lo <= a < hi]:
                del self.words[address]
        if self.waiting:
            for address in [a for a in self.waiting if lo <= a < hi]:
                self.word_changed(address)
        if self.polling:
            for task in self.polling[:]:
                if task.waits.address is None or lo <= task.waits.address < hi:
                    self._wake_poll(task)

    def await_word(self, address: int, target: int, tile: int, peer: int, scope_sys: bool) -> int:
        """Block until the word has reached `target`, then acquire.

        What the program then knows is only that the target was reached, so it acquires what had been released when the
        word first reached it, even if more has come since: an arrival too few is found in every schedule.
        """
        task = self.current
        if self.record and scope_sys and task.kind == "program":
            self.report.sys_lines.add(interpret.where()[0][:2])
        self.pause()
        self._word(address, ATOMIC_READ)
        while not _reached(self.peek(address), target):
            self.waiting.setdefault(address, []).append(task)
            self.block(Wait(address, target, tile, peer, interpret.where()))
        self._word(address, ATOMIC_READ)
        value = self.peek(address)
        for update in self.words.get(address, ()):
            if _reached(update.value, target):
                detail = f"{self.label(address)} >= {target}" + (f", tile {tile}" if tile >= 0 else "")
                self.waited(task, update.time, detail, (update.by.rank, update.by.track))
                self.acquire(task, update, scope_sys)
                break
        return value

    def acquire(self, task: Task, update: Update, scope_sys: bool) -> None:
        if (own := update.ranks.get(task.rank)) is not None:
            task.join(own)
        if scope_sys and update.system is not None:
            task.join(update.system)

    def release(self, task: Task, address: int, scope_sys: bool, store: bool, released: bool) -> None:
        """Note a change, and publish what the task has settled. A store begins anew, an update continues."""
        log = self.words.get(address)
        if log is None:
            log = self.words[address] = deque(maxlen=LOG)
            region = self.memory.find(address, address + 1)
            assert region is not None
            region.words = True
        last = log[-1] if log else None
        system = None if last is None or store else last.system
        ranks = {} if last is None or store else last.ranks
        out = None
        if released:
            out = self._covered(task)
        elif task.fenced is not None:
            out, fence_sys = task.fenced
            scope_sys &= fence_sys
            out[task.atom_slot] = task.atom_clock
        if out is not None:
            if task.kind == "program":
                task.atom_clock += 1
                self.clocks[task.atom_slot] = task.atom_clock
                task.cache.clear()
            ranks = {**ranks, task.rank: _merged(ranks.get(task.rank), out)}
            if scope_sys:
                system = _merged(system, out)
        if store:
            log.clear()
        log.append(Update(self.peek(address), max(task.time, last.time) if last else task.time, task, system, ranks))

    def _covered(self, task: Task) -> np.ndarray:
        """What a release by the task covers now."""
        out = task.clock.copy()
        if task.kind == "program":
            out[task.slot], out[task.atom_slot] = task.settled, task.atom_clock
        return out

    def release_fence(self, scope_sys: bool) -> None:
        self.pause()
        task = self.current
        if self.record and scope_sys:
            self.report.sys_lines.add(interpret.where()[0][:2])
        task.fenced = (self._covered(task), scope_sys)

    def _word(self, address: int, kind: int, size: int = 4) -> None:
        region = self.region(address, address + size, kind)
        at = address - region.base
        self.touch(region, region.shadow(at, (1,), (size,), size), kind)

    # -- accesses ----------------------------------------------------------------------------------------------------
    def site(self) -> int:
        """The number of the current place in the source (0 outside a program)."""
        if self.current.kind != "program":
            return 0
        found = interpret.where()
        number = self.site_ids.get(found)
        if number is None:
            number = self.site_ids[found] = len(self.sites)
            self.sites.append(found)
        return number

    def region(self, lo: int, hi: int, kind: int) -> Region:
        region = self.memory.find(lo, hi)
        if region is None:
            near = self.memory.find(lo, lo + 1) or self.memory.find(hi - 1, hi)
            hint = f"; the access begins or ends in {near.label(max(lo, near.base))}" if near else ""
            raise MemoryFault(f"{VERB[kind]} of {hi - lo} bytes outside every tensor, at {lo:#x}{hint}\n{self.me()}")
        return region

    def touch(self, region: Region, block: np.ndarray, kind: int) -> None:
        self.report.accesses += 1
        try:
            self.memory.touch(self.current, region, block, kind)
        except _Found as found:
            self._explain(found)

    def me(self) -> str:
        task = self.current
        if task.kind == "program":
            return f"    {task.name} at {place(interpret.where())}"
        return f"    {self._owner(task.slot, task.own)}"

    def label(self, address: int) -> str:
        region = self.memory.find(address, address + 1)
        return region.label(address) if region else f"{address:#x}"

    def _owner(self, slot: int, clock: int) -> str:
        name = "?"
        for first, text in self.owners[slot]:
            if first > clock:
                break
            name = text
        return name

    def _explain(self, found: _Found) -> None:
        region = found.region
        what = region.label(region.base + found.granule * region.granule)
        if found.other is None:
            raise MemoryFault(f"{VERB[found.kind]} of {what}, which nothing has written\n{self.me()}") from None
        slot, clock, kind, site = found.other
        owner = self._owner(slot, clock)
        reason = "no release and acquire, stream or event orders the first before the second"
        task = self.current
        if task.kind == "program" and slot in (task.slot, task.bulk_slot, task.atom_slot):
            reason = "the program's own bulk and ordinary accesses are not ordered without settle or bulk_fence"
        elif found.kind in (BULK_READ, BULK_WRITE) and task.clock[slot] >= clock:
            reason = "acquired, but no proxy fence (wait_until, bulk_fence) stands before this bulk access"
        elif self._unsettled(task, slot, clock):
            reason = (
                "the acquired release does not cover it: no settle (or tl.debug_barrier; settle(BULK=True) for bulk "
                "stores) stands between it and the release"
            )
        at = f" at {place(self.sites[site])}" if site else ""
        raise Race(
            f"race on {what}: {VERB[found.kind]} after {VERB[kind]}\n"
            f"    first:  {VERB[kind]} by {owner}{at}\n    second: {VERB[found.kind]} by{self.me()[3:]}\n    {reason}"
        ) from None

    def _unsettled(self, task: Task, slot: int, clock: int) -> bool:
        """Whether `task` acquired from the program that made the access, but from before the access was settled."""
        program = self.programs_of.get(slot)
        if program is None:
            return False
        name = self._owner(slot, clock)
        begun = [first for first, text in self.owners[program] if text == name]
        return bool(begun) and bool(task.clock[program] >= begun[-1])

    def load(self, ptrs: np.ndarray, mask: Any, other: Any, dtype: np.dtype, volatile: bool) -> np.ndarray:
        task = self.current
        if volatile:
            self.pause()
        elif self.preempt and self.rng.random() < self.preempt:
            self.pause()
        out = None
        kind = ATOMIC_READ if volatile else READ
        if mask is not None:
            rows = _sub_block(ptrs, mask)
            if rows is None:
                out = np.zeros(ptrs.shape, dtype) if other is None else np.array(np.broadcast_to(other, ptrs.shape))
                self._gather(ptrs[mask], dtype, kind, out, np.asarray(mask))
                return out
            if rows is not True:
                out = np.zeros(ptrs.shape, dtype) if other is None else np.array(np.broadcast_to(other, ptrs.shape))
                if ptrs[rows].size:
                    out[rows] = self.load(ptrs[rows], None, None, dtype, volatile)
                return out
        size = dtype.itemsize
        task.time += ptrs.size * size / 1000
        strides = _strides(ptrs)
        if strides is None:
            out = np.empty(ptrs.shape, dtype)
            self._gather(ptrs.ravel(), dtype, kind, out, None)
            return out
        lo, hi, at = _extent(int(ptrs.item(0)), ptrs.shape, strides, size)
        region = self.region(lo, hi, kind)
        at -= region.base
        if self.races:
            self.touch(region, region.shadow(at, ptrs.shape, strides, size), kind)
        value = np.array(np.ndarray(ptrs.shape, dtype, region.bytes, at, strides))
        if volatile:
            self._polled((lo, value.tobytes().__hash__()), lo)
        return value

    def store(self, ptrs: np.ndarray, value: np.ndarray, mask: Any) -> None:
        if self.preempt and self.rng.random() < self.preempt:
            self.pause()
        if mask is not None:
            rows = _sub_block(ptrs, mask)
            if rows is None:
                self._scatter(ptrs[mask], np.broadcast_to(value, ptrs.shape)[mask])
                return
            if rows is not True:
                ptrs, value = ptrs[rows], np.broadcast_to(value, ptrs.shape)[rows]
                if ptrs.size == 0:
                    return
        size = value.dtype.itemsize
        self.current.time += ptrs.size * size / 1000
        strides = _strides(ptrs)
        if strides is None:
            self._scatter(ptrs.ravel(), np.broadcast_to(value, ptrs.shape).ravel())
            return
        lo, hi, at = _extent(int(ptrs.item(0)), ptrs.shape, strides, size)
        region = self.region(lo, hi, WRITE)
        at -= region.base
        if self.races:
            self.touch(region, region.shadow(at, ptrs.shape, strides, size), WRITE)
        np.ndarray(ptrs.shape, value.dtype, region.bytes, at, strides)[...] = value
        self.range_changed(lo, hi, region)

    def _by_region(self, ptrs: np.ndarray, size: int, kind: int) -> list[tuple[Region, Any, np.ndarray]]:
        """Single elements grouped by region: (region, which elements, byte offsets)."""
        if ptrs.size == 0:
            return []
        out = []
        left = np.arange(ptrs.size)
        while left.size:
            rest = ptrs[left]
            low = int(rest.min())
            region = self.region(low, low + size, kind)
            inside = rest + np.uint64(size) <= np.uint64(region.end)
            out.append((region, left[inside], (rest[inside] - np.uint64(region.base)).astype(np.int64)))
            left = left[~inside]
        return out

    def _touch_scattered(self, region: Region, offsets: np.ndarray, size: int, kind: int) -> None:
        if self.races:
            self.report.accesses += 1
            try:
                self.memory.touch_scattered(self.current, region, region.scattered(offsets, size), kind)
            except _Found as found:
                self._explain(found)

    def _gather(self, ptrs: np.ndarray, dtype: np.dtype, kind: int, out: np.ndarray, mask: Any) -> None:
        values = np.empty(ptrs.size, dtype)
        for region, which, offsets in self._by_region(ptrs, dtype.itemsize, kind):
            self._touch_scattered(region, offsets, dtype.itemsize, kind)
            data = region.bytes[offsets[:, None] + np.arange(dtype.itemsize)]
            values[which] = data.view(dtype).ravel()
        if mask is None:
            out[...] = values.reshape(out.shape)
        else:
            out[mask] = values

    def _scatter(self, ptrs: np.ndarray, values: np.ndarray) -> None:
        size = values.dtype.itemsize
        for region, which, offsets in self._by_region(ptrs, size, WRITE):
            self._touch_scattered(region, offsets, size, WRITE)
            data = np.ascontiguousarray(values[which]).view(np.uint8).reshape(-1, size)
            region.bytes[offsets[:, None] + np.arange(size)] = data
            self.range_changed(int(offsets.min()) + region.base, int(offsets.max()) + region.base + size, region)

    def _box(self, desc: interpret.Desc, offsets: list[int], kind: int) -> Any:
        """The part of a descriptor's block inside its tensor: (slices of the block, region, byte offset, shape)."""
        base, dims, strides, size, dtype = desc.plain
        inner, shape, at = [], [], base
        for offset, block, dim, stride in zip(offsets, desc.block_shape, dims, strides, strict=True):
            low, high = max(0, -offset), min(block, dim - offset)
            if high <= low:
                return None
            inner.append(slice(low, high))
            shape.append(high - low)
            at += (offset + low) * stride
        lo, hi, at = _extent(at, shape, strides, size)
        region = self.region(lo, hi, kind)
        at -= region.base
        if self.races:
            self.touch(region, region.shadow(at, tuple(shape), tuple(strides), size), kind)
        self.current.time += math.prod(shape) * size / 1000
        return tuple(inner), lo, hi, region, np.ndarray(shape, dtype, region.bytes, at, strides)

    def bulk_load(self, desc: interpret.Desc, offsets: list[int]) -> np.ndarray:
        if self.preempt and self.rng.random() < self.preempt:
            self.pause()
        found = self._box(desc, offsets, BULK_READ)
        if found is not None and list(found[4].shape) == list(desc.block_shape):
            return np.array(found[4])
        out = np.full(desc.block_shape, desc.fill, desc.plain[4])
        if found is not None:
            out[found[0]] = found[4]
        return out

    def bulk_store(self, desc: interpret.Desc, offsets: list[int], value: np.ndarray) -> None:
        if self.preempt and self.rng.random() < self.preempt:
            self.pause()
        found = self._box(desc, offsets, BULK_WRITE)
        if found is not None:
            found[4][...] = np.broadcast_to(value, desc.block_shape)[found[0]]
            self.range_changed(found[1], found[2], found[3])

    def atomic(
        self,
        ptrs: np.ndarray,
        mask: Any,
        dtype: np.dtype,
        do: Callable[[], Any],
        acquire: bool,
        release: bool,
        scope_sys: bool,
    ) -> Any:
        self.pause()
        task = self.current
        if self.record and scope_sys:
            self.report.sys_lines.add(interpret.where()[0][:2])
        size = dtype.itemsize
        flat = ptrs.ravel() if mask is None else ptrs[np.broadcast_to(mask, ptrs.shape)]
        addresses = [int(a) for a in flat.ravel()]
        task.time += len(addresses) * size / 1000
        for address in addresses:
            self.region(address, address + size, ATOMIC_WRITE)
        before = [ctypes.string_at(a, size) for a in addresses]
        result = do()
        after = [ctypes.string_at(a, size) for a in addresses]
        for address, old, new in zip(addresses, before, after, strict=True):
            self._word(address, ATOMIC_READ if old == new else ATOMIC_WRITE, size)
            if acquire and (log := self.words.get(address)):
                self.acquire(task, log[-1], scope_sys)
            if old != new:
                self.release(task, address, scope_sys, False, release)
                self.word_changed(address)
        if before != after or not addresses:
            task.polls = 0
        else:
            self._polled((addresses[0], hash(after[0])), addresses[0] if len(addresses) == 1 else None)
        return result

    def _polled(self, seen: tuple[int, ...], address: int | None) -> None:
        """The task looked and changed nothing: the second time, it sleeps until something changes."""
        task = self.current
        same = task.polled == seen
        task.polled = seen
        task.polls += 1
        if task.polls >= 2:
            if same and (log := self.words.get(address or 0)):
                task.time = max(task.time, log[-1].time)
            self.polling.append(task)
            self.block(Poll(address if same else None, interpret.where()))

    def worked(self, flops: float) -> None:
        self.current.time += flops * FLOPS

    def settle(self, bulk: bool) -> None:
        self.pause()
        task = self.current
        task.settled = task.own
        if bulk:
            if self.record:
                self.report.bulk_lines.add(interpret.where()[0][:2])
            task.clock[task.bulk_slot] = task.bulk_clock
            task.bulk_clock += 1
            self.clocks[task.bulk_slot] = task.bulk_clock
            task.fence()
        else:
            task.advance()

    # -- spans -------------------------------------------------------------------------------------------------------
    def span(self, task: Task, name: str, kind: str, start: float, **more: Any) -> None:
        if task.time > start:
            self.report.timeline.append(Span(task.rank, task.track, name, kind, start, task.time, **more))

    def waited(self, task: Task, until: float, detail: str, releaser: tuple[int, str] | None) -> None:
        """The task could go on at virtual time `until` only."""
        if until <= task.time:
            return
        name = task.run.kernel.__name__ if task.run else task.name
        if task.kind == "program":
            self.span(task, name, "compute", task.begun)
        start, task.time = task.time, until
        self.span(task, name, "wait", start, detail=detail, releaser=releaser)
        task.begun = until

    # -- interpreted functions ---------------------------------------------------------------------------------------
    def interpreted(self, fn: JITFunction) -> Callable[..., Any]:
        body = self.bodies.get(fn.fn)
        if body is None:
            self.report.functions.append(fn)
            mutation = self.mutation
            if mutation is not None and mutation.changes(fn):
                body = interpret.rewrite(fn, mutation.apply)
            else:
                key = (fn.fn, self.record)
                body = _rewritten.get(key)
                if body is None:
                    own = self.record and not fn.__module__.startswith("triton.")
                    body = _rewritten[key] = interpret.rewrite(fn, reach=own)
            self.bodies[fn.fn] = body
        return body

    # -- streams -----------------------------------------------------------------------------------------------------
    def stream(self, rank: int, name: str) -> Stream:
        found = self.streams.get((rank, name))
        if found is None:
            task = self.task(f"rank {rank} stream {name}", rank, "stream", f"stream:{name}", ("stream", rank, name))
            task.bulk_view = task.clock
            found = self.streams[rank, name] = Stream(rank, name, task)
            self.start(task, lambda: self._serve(found))
            self._unready(task)
        return found

    def _serve(self, stream: Stream) -> None:
        task = stream.task
        while True:
            while not stream.queue:
                for waiter in stream.finishers:
                    self.wake(waiter)
                stream.finishers.clear()
                self.block("idle")
            do, clock, time, text = stream.queue.popleft()
            stream.busy = text
            self.owners[task.slot].append((task.own, f"{task.name}, {text}"))
            task.join(clock)
            task.time = max(task.time, time)
            do()
            task.bulk_view = task.clock
            task.advance()
            stream.busy = ""
            self.progress += 1

    def enqueue(self, stream: Stream, text: str, do: Callable[[], None]) -> None:
        host = self.hosts[stream.rank]
        file, line = call_site()
        text = f"{text} at {file}:{line}"
        stream.queue.append((do, host.clock.copy(), host.time, text))
        if stream.task.waits == "idle" or stream.task.waits is None:
            if not stream.busy:
                self.wake(stream.task)
        self.pause()

    def finish(self, stream: Stream) -> None:
        """Block the host until the stream is drained. On a GPU this does nothing, so it orders nothing either."""
        host = self.current
        while not stream.idle:
            stream.finishers.append(host)
            self.block(f"the end of stream {stream.name} of rank {stream.rank}")
        host.time = max(host.time, stream.task.time)

    def synchronize(self, rank: int) -> None:
        host = self.current
        for stream in [s for (r, _), s in self.streams.items() if r == rank]:
            self.finish(stream)
            host.join(stream.task.clock)

    def record_event(self, stream: Stream) -> Event:
        event = Event(text=f"an event of stream {stream.name} of rank {stream.rank}")

        def do() -> None:
            task = stream.task
            event.done, event.clock, event.time = True, task.clock.copy(), task.time
            event.by = (task.rank, task.track)
            for waiter in event.waiters:
                self.wake(waiter)
            event.waiters.clear()

        self.enqueue(stream, "record", do)
        return event

    def wait_event(self, stream: Stream, event: Event) -> None:
        def do() -> None:
            task = stream.task
            while not event.done:
                event.waiters.append(task)
                self.block(event.text)
            assert event.clock is not None
            task.join(event.clock)
            self.waited(task, event.time, event.text, event.by)

        self.enqueue(stream, "wait_event", do)

    # -- kernels -----------------------------------------------------------------------------------------------------
    def launch(self, kernel: JITFunction, grid: tuple[int, int, int], args: dict[str, Any], stream: Stream) -> None:
        rank = stream.rank
        for name, value in args.items():
            self.track(name, value, rank)
        args = dict(args)
        bound = interpret.bind(kernel, args)
        count = grid[0] * grid[1] * grid[2]
        body = self.interpreted(kernel)

        def do() -> None:
            if count == 0:
                return
            now = stream.task.time
            run = KernelRun(kernel, body, bound, grid, stream, count, now, now)
            self.pending[rank].append(run)
            self._dispatch(rank)
            while run.left:
                self.block(f"the end of {kernel.__name__}")
            stream.task.join(run.clock)
            stream.task.time = run.ended
            args.clear()  # held until here: the kernel's tensors

        self.enqueue(stream, kernel.__name__, do)

    def track(self, name: str, value: Any, rank: int) -> None:
        """Register every tensor of an argument (`name` empty: it keeps the name it has)."""
        if isinstance(value, torch.Tensor):
            region = self.memory.find(value.data_ptr(), value.data_ptr() + 1) if value.numel() else None
            if region is not None and not region.storage.expired():
                rank = region.rank
            self.memory.register(value, name, rank)
        elif isinstance(value, TensorDescriptor):
            self.track(name, value.base, rank)
        elif isinstance(value, tuple):
            names = getattr(value, "_fields", range(len(value)))
            for key, part in zip(names, value, strict=True):
                self.track(f"{name}.{key}", part, rank)

    def _dispatch(self, rank: int) -> None:
        """Make programs resident while the rank has free slots."""
        free, pending = self.free[rank], self.pending[rank]
        while free and pending:
            run = pending[0] if len(pending) == 1 else self.rng.choice(pending)
            at = run.started
            run.started += 1
            if run.started == run.grid[0] * run.grid[1] * run.grid[2]:
                pending.remove(run)
            since = min(free)
            free.remove(since)
            self._start_program(run, at, max(since, run.begun))

    def _start_program(self, run: KernelRun, at: int, time: float) -> None:
        stream = run.stream
        rank, kernel = stream.rank, run.kernel.__name__
        key = (rank, stream.name, at)
        bulk, atom = self.slot(("bulk", *key)), self.slot(("atom", *key))
        self.widen(stream.task)
        name = f"rank {rank} {kernel}[{at}]"
        task = self.task(name, rank, "program", f"{kernel}:{at}", key, stream.task.clock)
        for slot in (bulk, atom, task.slot):
            self.programs_of[slot] = task.slot
        task.settled = task.own
        task.run, task.grid, task.time, task.begun = run, run.grid, time, time
        x, rest = at % run.grid[0], at // run.grid[0]
        task.index = (x, rest % run.grid[1], rest // run.grid[1])
        for slot in (bulk, atom):
            self.clocks[slot] += 1
            self.owners[slot].append((self.clocks[slot], name))
        task.bulk_slot, task.bulk_clock = bulk, self.clocks[bulk]
        task.atom_slot, task.atom_clock = atom, self.clocks[atom]
        task.fence()
        self.resident[rank].append(task)
        self.report.programs += 1

        def body() -> None:
            try:
                run.body(**run.args)
            except GreenletExit:
                raise
            except BaseException as error:
                error.add_note(f"in {name} (seed {self.seed})")
                raise
            task.clock[bulk], task.clock[atom] = task.bulk_clock, task.atom_clock
            run.clock = _merged(run.clock, task.clock)
            run.ended = max(run.ended, task.time)
            run.left -= 1
            self.span(task, kernel, "compute", task.begun)
            self.resident[rank].remove(task)
            self.free[rank].append(task.time)
            if run.left == 0:
                self.wake(stream.task)
            self._dispatch(rank)

        self.start(task, body)

    # -- copies, calls, signals --------------------------------------------------------------------------------------
    def whole(self, tensor: torch.Tensor, kind: int) -> None:
        """An access to all of a tensor by the current stream."""
        if tensor.numel() == 0:
            return
        size = tensor.element_size()
        strides = tuple(s * size for s in tensor.stride())
        lo, hi, at = _extent(tensor.data_ptr(), tensor.shape, strides, size)
        region = self.region(lo, hi, kind)
        if self.races:
            self.touch(region, region.shadow(at - region.base, tuple(tensor.shape), strides, size), kind)

    def changed(self, tensor: torch.Tensor) -> None:
        """New contents: whoever waits for a word in it looks again."""
        if tensor.numel():
            size = tensor.element_size()
            lo, hi, _ = _extent(tensor.data_ptr(), tensor.shape, [s * size for s in tensor.stride()], size)
            self.range_changed(lo, hi, self.region(lo, hi, WRITE))

    def copy(self, dst: torch.Tensor, src: torch.Tensor, stream: Stream) -> None:
        self.track("", dst, stream.rank)
        self.track("", src, stream.rank)

        def do() -> None:
            task = stream.task
            start = task.time
            pieces = min(4, dst.shape[0]) if dst.ndim else 1
            parts = [(dst, src)]
            if pieces > 1:
                parts = list(zip(dst.tensor_split(pieces), src.tensor_split(pieces), strict=True))
            for to, part in parts:
                self.pause()
                self.whole(part, READ)
                self.whole(to, WRITE)
                to.copy_(part)
                task.time += to.numel() * to.element_size() * LINK
                self.changed(to)
            self.span(task, "copy", "copy", start)

        self.enqueue(stream, f"copy of {list(src.shape)}", do)

    def call(
        self, fn: Callable[[], Any], reads: Sequence[torch.Tensor], writes: Sequence[torch.Tensor], stream: Stream
    ) -> None:
        reads, writes = list(reads), list(writes)
        for t in (*reads, *writes):
            self.track("", t, stream.rank)
        name = getattr(fn, "__name__", "call")

        def do() -> None:
            task = stream.task
            start = task.time
            self.pause()
            for t in reads:
                self.whole(t, READ)
            fn()
            for t in writes:
                self.whole(t, WRITE)
                self.changed(t)
            task.time += _call_time(reads, writes, self.sm_count)
            self.pause()
            self.span(task, name, "call", start)

        self.enqueue(stream, f"call of {name}", do)

    def signal(self, word: torch.Tensor, value: torch.Tensor, stream: Stream) -> None:
        self.track("", word, stream.rank)
        self.track("", value, stream.rank)

        def do() -> None:
            task = stream.task
            self.pause()
            self.whole(value, READ)
            address = word.data_ptr()
            self._word(address, ATOMIC_WRITE)
            word.copy_(value)
            self.release(task, address, True, True, True)
            self.word_changed(address)
            task.advance()

        self.enqueue(stream, "signal", do)

    def wait(self, word: torch.Tensor, value: torch.Tensor, stream: Stream) -> None:
        self.track("", word, stream.rank)
        self.track("", value, stream.rank)

        def do() -> None:
            self.whole(value, READ)
            self.await_word(word.data_ptr(), int(value.item()), -1, -1, True)

        self.enqueue(stream, "wait", do)

    # -- all ranks ---------------------------------------------------------------------------------------------------
    def meet(
        self,
        kind: str,
        stream: Stream,
        signature: tuple[Any, ...],
        tensors: tuple[torch.Tensor, ...],
        work: Callable[[list[tuple[torch.Tensor, ...]]], None] | None,
    ) -> None:
        """A barrier of all ranks' streams; the last to come does the work, whose reads and writes are then ordered."""
        rank = stream.rank
        number = self.met[rank]
        self.met[rank] += 1
        if number == len(self.meetings):
            self.meetings.append(Meeting(number, kind, signature, rank))
        meeting = self.meetings[number]
        if (meeting.kind, meeting.signature) != (kind, signature):
            raise Mismatch(
                f"collective {number}: rank {rank} calls {kind}{list(signature)}, "
                f"rank {meeting.first} calls {meeting.kind}{list(meeting.signature)}"
            )
        for t in tensors:
            self.track("", t, rank)

        def do() -> None:
            task = stream.task
            self.pause()
            meeting.arrived[rank] = (task, tensors)
            if len(meeting.arrived) < self.size:
                while not meeting.done:
                    self.block(meeting)
                return
            others = [meeting.arrived[r][0] for r in range(self.size)]
            for other in others:
                if other is not task:
                    task.join(other.clock)
            last = max(others, key=lambda t: t.time)
            before = task.time
            task.time = last.time
            if work is not None:
                work([meeting.arrived[r][1] for r in range(self.size)])
            end = task.time
            task.time = before
            for other in others:
                if other is not task:
                    other.join(task.clock)
                self.waited(other, last.time, kind, (last.rank, last.track))
                start, other.time = other.time, end
                self.span(other, kind, "copy", start)
            meeting.done = True
            for other in others:
                if other is not task:
                    self.wake(other)

        self.enqueue(stream, kind, do)

    def exchange(self, rank: int, obj: Any) -> list[Any]:
        number = self.exchanged[rank]
        self.exchanged[rank] += 1
        if number == len(self.exchanges):
            self.exchanges.append({})
        table = self.exchanges[number]
        host = self.current
        table[rank] = obj
        if len(table) < self.size:
            while len(table) < self.size:
                missing = sorted(set(range(self.size)) - set(table))
                self.block(f"exchange {number}, which ranks {missing} have not called")
        else:
            for other in self.hosts:
                if other is not host:
                    host.join(other.clock)
            for other in self.hosts:
                if other is not host:
                    other.join(host.clock)
                    self.wake(other)
        return [table[r] for r in range(self.size)]

    # -- the end -----------------------------------------------------------------------------------------------------
    def _check_channels(self) -> None:
        for name, rank, counters, epoch, arrivals in self.channels.values():
            values = counters.reshape(-1).tolist()
            self.report.counters[f"{name} of rank {rank}"] = values
            if arrivals is None:
                continue
            calls = int(epoch.reshape(-1)[0]) if isinstance(epoch, torch.Tensor) else int(epoch)
            due = arrivals.reshape(-1).tolist() if isinstance(arrivals, torch.Tensor) else [int(arrivals)] * len(values)
            for i, (value, each) in enumerate(zip(values, due, strict=True)):
                if value != calls * each:
                    log = self.words.get(counters.data_ptr() + i * counters.element_size(), ())
                    what = "doubled" if value > calls * each else "lost"
                    raise SignalError(
                        f"{what} signal: {name}[{i}] of rank {rank} is {value} at the end, "
                        f"not {calls * each} ({calls} calls of {each} arrivals); raised by "
                        + (", ".join(f"{u.by.name} to {u.value}" for u in list(log)[-8:]) or "nobody")
                    )

    def _describe(self, task: Task, depth: int = 0) -> list[str]:
        waits, pad = task.waits, "  " * (depth + 1)
        if isinstance(waits, Wait):
            more = "".join(
                f", {name} {value}" for name, value in (("tile", waits.tile), ("peer", waits.peer)) if value >= 0
            )
            what = f"{self.label(waits.address)} >= {waits.target}, now {self.peek(waits.address)}{more}"
            at = f" at {place(waits.site)}" if waits.site else ""
            return [f"{pad}{task.name} waits for {what}{at}", *self._raisers(waits.address, pad)]
        if isinstance(waits, Poll):
            what = f"{self.label(waits.address)}, now {self.peek(waits.address)}" if waits.address else "several words"
            lines = self._raisers(waits.address, pad) if waits.address else []
            return [f"{pad}{task.name} polls {what} at {place(waits.site)}", *lines]
        if isinstance(waits, Meeting):
            missing = sorted(set(range(self.size)) - set(waits.arrived))
            what = f"{waits.kind} (collective {waits.number}) of ranks {missing}"
            return [f"{pad}{task.name} waits for {what}"]
        return [f"{pad}{task.name} waits for {waits}"]

    def _raisers(self, address: int, pad: str) -> list[str]:
        """Who could still raise a word: those that raised it or its neighbours before, and are not done."""
        region = self.memory.find(address, address + 1)
        by = [u.by for u in self.words.get(address, ())][-6:]
        so_far = ", ".join(dict.fromkeys(f"{t.name}{' (ended)' if t.done else ''}" for t in by))
        near: dict[str, None] = {}
        for other, entry in self.words.items():
            if region is not None and region.base <= other < region.end:
                near.update({u.by.name: None for u in entry if not u.by.done})
        lines = [f"{pad}    raised so far by {so_far or 'nobody'}"]
        alive = ", ".join(near)
        lines.append(f"{pad}    could be raised by {alive or 'no task that ever raised a word of this memory'}")
        return lines

    def _graph(self) -> str:
        stuck = [t for t in self.tasks if not t.done and t.waits not in (None, "idle")]
        lines = [f"{len(stuck)} tasks wait and none can go on (seed {self.seed}, {self.mode}):"]
        order = {"program": 0, "stream": 1, "host": 2}
        for task in sorted(stuck, key=lambda t: (order[t.kind], t.rank)):
            lines += self._describe(task)
        for rank in range(self.size):
            for run in self.pending[rank]:
                total = run.grid[0] * run.grid[1] * run.grid[2]
                held = ", ".join(t.name for t in self.resident[rank])
                lines.append(
                    f"  rank {rank} {run.kernel.__name__}[{run.started}..{total - 1}] are not resident: all "
                    f"{self.sm_count} slots of the rank are held by {held}"
                )
            if self.hosts[rank].done:
                lines.append(f"  rank {rank} host has returned")
        return "\n".join(lines)


_HOST_SIDE = ("weft/emulator/machine.py", "weft/backends/emulated.py", "weft/world.py", "weft/symmetric.py")


def call_site() -> tuple[str, int]:
    """(file, line) of the op or user code that gave a World an operation."""
    frame = sys._getframe(1)
    while frame.f_back is not None and frame.f_code.co_filename.endswith(_HOST_SIDE):
        frame = frame.f_back
    return frame.f_code.co_filename, frame.f_lineno


_rewritten: dict[tuple[Any, bool], Callable[..., Any]] = {}


def _reached(value: int, target: int) -> bool:
    """value >= target, modulo 2^32."""
    return (value - target) & 0xFFFFFFFF < 0x80000000


def _merged(a: np.ndarray | None, b: np.ndarray) -> np.ndarray:
    if a is None:
        return b.copy()
    if len(a) < len(b):
        a, b = b, a
    out = a.copy()
    np.maximum(a[: len(b)], b, out=out[: len(b)])
    return out


def _strides(ptrs: np.ndarray) -> tuple[int, ...] | None:
    """The byte strides of a block of addresses, or None if it is not a strided block."""
    if ptrs.size == 1:
        return (0,) * ptrs.ndim
    signed = ptrs.view(np.int64)
    first = signed.item(0)
    strides = []
    total = None
    for axis, n in enumerate(ptrs.shape):
        if n == 1:
            strides.append(0)
            continue
        line = signed[tuple(slice(None) if i == axis else 0 for i in range(ptrs.ndim))]
        step = line.item(1) - first
        strides.append(step)
        part = _steps(n, step).reshape(tuple(n if i == axis else 1 for i in range(ptrs.ndim)))
        total = part if total is None else total + part
    if total is None or not (signed - first == total).all():
        return None
    return tuple(strides)


_step_cache: dict[tuple[int, int], np.ndarray] = {}


def _steps(n: int, step: int) -> np.ndarray:
    found = _step_cache.get((n, step))
    if found is None:
        if len(_step_cache) > 4096:
            _step_cache.clear()
        found = _step_cache[n, step] = np.arange(n, dtype=np.int64) * step
    return found


def _extent(start: int, shape: Sequence[int], strides: Sequence[int], size: int) -> tuple[int, int, int]:
    """(lowest byte, end, start) of a strided block."""
    lo = hi = start
    for n, s in zip(shape, strides, strict=True):
        if s >= 0:
            hi += (n - 1) * s
        else:
            lo += (n - 1) * s
    return lo, hi + size, start


def _sub_block(ptrs: np.ndarray, mask: Any) -> Any:
    """True where the mask is all set, slices where it is a leading box, None otherwise."""
    mask = np.asarray(mask)
    if mask.all():
        return True
    if mask.shape != ptrs.shape:
        mask = np.broadcast_to(mask, ptrs.shape)
    lengths = []
    for axis in range(mask.ndim):
        other = tuple(i for i in range(mask.ndim) if i != axis)
        line = mask.any(axis=other) if other else mask
        n = int(line.sum())
        lengths.append(n)
    box = tuple(slice(0, n) for n in lengths)
    if int(np.prod(lengths)) == int(mask.sum()) and mask[box].all():
        return box
    return None


def _call_time(reads: Sequence[torch.Tensor], writes: Sequence[torch.Tensor], sms: int) -> float:
    """Bytes, or the work of a matrix product where the sizes are those of one (|A| |B| |C| = (M N K)^2)."""
    nbytes = sum(t.numel() * t.element_size() for t in (*reads, *writes))
    out = nbytes / 1000 / sms
    if len(reads) >= 2 and writes:
        out = max(out, 2 * (reads[0].numel() * reads[1].numel() * writes[0].numel()) ** 0.5 * FLOPS / sms)
    return out


def fresh(nbytes: int, alignment: int, poison: bool) -> tuple[torch.Tensor, int]:
    """Bytes between two untracked margins, and where they begin."""
    raw = torch.zeros(nbytes + 3 * alignment, dtype=torch.uint8)
    at = alignment + -(raw.data_ptr() + alignment) % alignment
    if poison and nbytes:
        raw[at : at + nbytes] = torch.from_numpy(np.tile(memory.POISON, nbytes // 2 + 1)[:nbytes])
    return raw, at
