"""Every rank of a world as greenlets of one thread, scheduled by a seed, with happens-before kept in vector clocks.

Tasks are: the host code of each rank (host.py), each stream (which runs its operations in order), and each resident
program of a running kernel. Whoever runs goes on until a scheduling point (an atomic, an intrinsic, an operation given
to a stream, now and then a load or store) and picks the next task there. When no task can run, the run is over or
deadlocked.

What orders two tasks:
    host -> stream                  what the host knew when it gave the operation (`synchronize`, `exchange`)
    stream -> stream                record / wait_event, meet, collectives
    stream -> program -> stream     start and end of a kernel
    release -> acquire              through a counter; scope "gpu" between tasks of one rank only

Inside a program the GPU is weaker than program order, and so is this model:
    - a release by one thread covers ordinary accesses, and atomics of a block, which many threads make, only up to the
      last `flush_stores` or `tl.debug_barrier` (`settled`);
    - bulk (TMA) stores are made by an agent of their own (`bulk_slot`), which joins the program at
      `flush_stores(BULK=True)`;
    - bulk loads and stores know only what the program knew at its last proxy fence (`bulk_view`).
"""

from __future__ import annotations

import ctypes
import math
import random
from collections import deque
from collections.abc import Callable, Hashable, Sequence
from typing import TYPE_CHECKING, NoReturn, TypeVar

import numpy as np
import torch
from greenlet import GreenletExit, getcurrent, greenlet

from ..errors import Deadlock, MemoryFault, Mismatch, Race, SignalError, Unsupported
from ..lang.channel import CALLS, DONE
from ..trace.span import Span
from . import deadlock, interpret
from .bounds import Bounds, Extent
from .host import HostThread
from .memory import ATOMIC_READ, ATOMIC_WRITE, BULK_READ, BULK_WRITE, NEAR, READ, WRITE, Found, Memory, Region, verb
from .programs import Programs
from .streams import Streams
from .tasks import KernelRun, Meeting, Owner, Poll, Report, Site, Task, Update, Wait, merged, place, reached

if TYPE_CHECKING:
    from .mutate import Mutation

R = TypeVar("R")

LOG = 128  # changes of a word that are remembered
IDLE_ROUNDS = 64  # how often spinning tasks may all look again before it is a deadlock

MODES = ("clock", "random", "starve", "burst")


WINDOW, WINDOW_STEP = 1 << 60, 1 << 36  # multicast addresses: the first, and how far apart windows begin


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
        mutation: Mutation | None = None,
        record: bool = False,
    ) -> None:
        self.nodes: tuple[int, ...] = (0,) * size  # by rank the number of its node
        self.size, self.seed, self.sm_count, self.preempt = size, seed, sm_count, preempt
        self.mutation, self.record = mutation, record
        self.rng = random.Random(seed)
        self.mode = MODES[seed % len(MODES)]
        self.memory = Memory(self, races)
        self.bounds = Bounds()
        self.races = races
        self.report = Report(seed, self.mode, size)
        # tasks
        self.tasks: list[Task] = []
        self.ready: list[Task] = []
        self.current: Task = None  # type: ignore[assignment]
        self.hub = getcurrent()
        self.beginning: Task | None = None
        self.closing = self.ended = False
        self.progress = self.rounds = self.looked = 0
        self.starved: Task | int | None = None  # or all of a rank
        self.starve_left = 0
        # clocks
        self.clocks: list[int] = []
        self.slots: dict[Hashable, int] = {}
        self.ranks: list[int] = []  # by slot
        self.owners: list[list[tuple[int, Owner]]] = []  # per slot: (first clock, who)
        self.width = 64
        self.sites: list[Site] = [()]
        self.site_ids: dict[tuple[int, ...], int] = {}  # by `interpret.trail`
        # the world
        self.words: dict[int, deque[Update]] = {}  # latest changes of every counter and flag
        self.calls: dict[Hashable, dict[int, object]] = {}  # by rank, of those that not all ranks have come to
        self.windows: list[
            tuple[int, list[int]]
        ] = []  # bytes of a multicast window, and where every rank's memory begins
        self.waiting: dict[int, list[Task]] = {}
        self.polling: list[Task] = []
        self.crowded: dict[KernelRun, str] = {}  # launches that signal without being resident at once, and what to say
        self.hosts: list[Task] = []
        self.programs_of: dict[int, int] = {}  # slot of a program or of its bulk agent -> slot of the program
        self.channels: dict[
            tuple[int, str, int], tuple[str, int, torch.Tensor, torch.Tensor | int, list[int] | int | None]
        ] = {}  # `EmulatedBackend.register_channel`
        self.channel_names: dict[int, list[Callable[[int], str]]] = {}  # by rank: of the counter at an address
        self.disagreements: dict[int, Callable[[dict[int, int]], Mismatch]] = {}  # by guard: what its World says
        self.seen_sites: set[tuple[str, int, str]] = set()
        self.programs, self.streams = Programs(self), Streams(self)

    # -- running -----------------------------------------------------------------------------------------------------
    def add_window(self, nbytes: int, starts: list[int]) -> int:
        """A multicast address for memory that every rank has a copy of: it is no memory's own."""
        self.windows.append((nbytes, starts))
        return WINDOW + (len(self.windows) - 1) * WINDOW_STEP

    def window(self, address: int) -> list[int]:
        """One address of every rank."""
        number, at = divmod(address - WINDOW, WINDOW_STEP)
        if not 0 <= number < len(self.windows) or at >= self.windows[number][0]:
            raise ValueError(f"{address:#x} is no multicast address")
        return [start + at for start in self.windows[number][1]]

    def run(self, hosts: Sequence[Callable[[], R]]) -> list[R]:
        results: dict[int, R] = {}

        def host(rank: int, fn: Callable[[], R]) -> Callable[[], None]:
            def body() -> None:
                try:
                    results[rank] = fn()
                except GreenletExit:
                    raise
                except BaseException as error:
                    error.add_note(f"raised by rank {rank} of {self.size} (emulated, seed {self.seed})")
                    raise

            return body

        threads = torch.get_num_threads()
        # This thread works for the ranks' streams, on tensors that they made in any mode of gradients, and records
        # none.
        with interpret.patched(self.programs), torch.inference_mode():
            torch.set_num_threads(1)  # one task runs at a time, on small tensors
            try:
                for rank, fn in enumerate(hosts):
                    task = self.task(f"rank {rank} host", rank, "host", "host", ("host", rank))
                    self.hosts.append(task)
                    task.host = HostThread(rank, host(rank, fn))
                    self.start(task, task.host.run)
                self._loop()
            except BaseException:
                self._cut()
                raise
            finally:
                self._close()
                self.ended = True
                torch.set_num_threads(threads)
        self._check_channels()
        if self.crowded:
            raise Unsupported(next(iter(self.crowded.values())))
        return [results[rank] for rank in range(self.size)]

    def _loop(self) -> None:
        """The hub: gets control when a task ends or nothing can run."""
        while True:
            task, self.beginning = self.beginning, None
            if task is None:
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
                if reached(value, task.wait.target):
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
        if all(t.done for t in self.hosts) and self.streams.idle:
            return False
        raise Deadlock(deadlock.graph(self))

    def _cut(self) -> None:
        """The run ends badly: the timeline goes on to here, and a tenth further for those that wait in vain."""
        now = 1.1 * max(task.time for task in self.tasks)
        for task in self.tasks:
            if task.kind == "program" and not task.done and task.run is not None:
                self.span(task, task.run.kernel.__name__, "compute", task.begun)
                task.begun = task.time
            if not task.done and isinstance(task.waits, Wait | Poll):
                word = self.label(task.waits.address) if task.waits.address else "several words"
                self.waited(task, now, f"{word}, in vain", None)

    def _close(self) -> None:
        self.closing = True
        for task in self.tasks:
            if task.greenlet is not None and task.greenlet and not task.greenlet.dead:
                task.greenlet.throw(GreenletExit)
        self.streams.clear()
        self.report.host_sites = sorted(self.seen_sites)

    # -- tasks and the scheduler -------------------------------------------------------------------------------------
    def task(self, name: str, rank: int, kind: str, track: str, key: Hashable, clock: np.ndarray | None = None) -> Task:
        slot = self.slot(key, rank)
        task = Task(self, name, rank, kind, track, slot, np.zeros(self.width, np.int32))
        if clock is not None:
            task.clock[: len(clock)] = clock
        task.own = task.settled = self.clocks[slot]
        task.advance()
        task.atom_slot, task.atom_clock = slot, task.own
        self.owners[slot].append((task.own, Owner(name, rank)))
        if len(self.tasks) > 64 + 4 * len(self.clocks):
            self.tasks = [t for t in self.tasks if not t.done]
        self.tasks.append(task)
        return task

    def slot(self, key: Hashable, rank: int) -> int:
        found = self.slots.get(key)
        if found is None:
            found = self.slots[key] = len(self.clocks)
            self.clocks.append(0)
            self.ranks.append(rank)
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
        self.unready(task)

    def _make_ready(self, task: Task) -> None:
        task.position = len(self.ready)
        self.ready.append(task)

    def unready(self, task: Task) -> None:
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
        host = self.current.host
        if host is not None and host.outside():
            host.ask(self._switch)
            return
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
                if task.greenlet:
                    task.greenlet.switch()
                else:  # begun by the hub: a greenlet inherits the stack depth of whoever begins it
                    self.beginning = task
                    self.hub.switch()

    def pause(self) -> None:
        """A scheduling point."""
        if len(self.ready) > 1 or self.closing:
            self._switch()

    def block(self, waits: Wait | Poll | Meeting | str) -> None:
        """Not ready until `wake`."""
        task = self.current
        task.waits = waits
        self.unready(task)
        self._switch()
        task.waits = None

    def wake(self, task: Task) -> None:
        if task.position < 0 and not task.done:
            self._make_ready(task)

    # -- words -------------------------------------------------------------------------------------------------------
    def peek(self, address: int) -> int:
        return ctypes.c_int32.from_address(address).value

    def _wake_word(self, task: Task) -> None:
        tasks = self.waiting[task.wait.address]
        tasks.remove(task)
        if not tasks:
            del self.waiting[task.wait.address]
        self.wake(task)

    def _wake_poll(self, task: Task) -> None:
        self.polling.remove(task)
        self.wake(task)

    def word_changed(self, address: int) -> None:
        self.progress += 1
        if self.waiting and (tasks := self.waiting.get(address)):
            value = self.peek(address)
            for task in tasks[:]:
                if reached(value, task.wait.target):
                    self._wake_word(task)
        if self.polling:
            for task in self.polling[:]:
                if task.poll.address is None or task.poll.address == address:
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
                if task.poll.address is None or lo <= task.poll.address < hi:
                    self._wake_poll(task)

    def await_word(self, address: int, target: int, tile: int, peer: int, scope_sys: bool) -> int:
        """Block until the word has reached `target`, then acquire.

        What the program then knows is only that the target was reached, so it acquires what had been released when the
        word last rose to it, even if more has come since: an arrival too few is found in every schedule.
        """
        task = self.current
        if self.record and scope_sys and task.kind == "program":
            self.report.sys_lines.add(interpret.where()[0][:2])
        self.signals("waits")
        self.pause()
        look = ATOMIC_READ if scope_sys else ATOMIC_READ | NEAR
        self.word(address, look)
        while not reached(self.peek(address), target):
            self.waiting.setdefault(address, []).append(task)
            self.block(Wait(address, target, tile, peer, interpret.where()))
        self.word(address, look)
        value = self.peek(address)
        first = None
        for update in reversed(self.words.get(address, ())):
            if not reached(update.value, target):
                break
            first = update
        if first is not None:
            detail = f"{self.label(address)} >= {target}" + (f", tile {tile}" if tile >= 0 else "")
            self.waited(task, first.time, detail, (first.by.rank, first.by.track))
            self.acquire(task, first, scope_sys)
        return value

    def signals(self, what: str) -> None:
        """The current task waits or notifies: if it is a program, all of its grid should be resident at once."""
        run = self.current.run
        if run is not None and not run.fits and run not in self.crowded:
            self.crowded[run] = (
                f"{run.kernel.__name__}: {math.prod(run.grid)} programs, of which one {what}, are not resident at once "
                f"on the {self.sm_count} SMs of rank {self.current.rank}, {run.per_sm} a SM: one that never starts "
                f"never signals (launch at most world.sm_count)\n{self.me()}"
            )

    def acquire(self, task: Task, update: Update, scope_sys: bool) -> None:
        task.acquired = True
        if (own := update.ranks.get(task.rank)) is not None:
            task.join(own)
        if scope_sys and update.system is not None:
            task.join(update.system)

    def release(
        self, task: Task, address: int, scope_sys: bool, store: bool, released: bool, fenced: bool = True
    ) -> None:
        """Note a change, and publish what the task has settled. A store begins anew, an update continues. fenced:
        whether a release fence before it covers it."""
        log = self.words.get(address)
        if log is None:
            log = self.words[address] = deque(maxlen=LOG)
            region = self.memory.find(address, address + 1)
            assert region is not None
            region.words = True
        if task.run is not None and not task.run.fits:
            region = self.memory.find(address, address + 1)
            if region is not None and region.name == "channels":
                self.signals("notifies")
        last = log[-1] if log else None
        system = None if last is None or store else last.system
        ranks = {} if last is None or store else last.ranks
        out = None
        if released:
            out = self.covered(task)
        elif fenced and task.fenced is not None:
            out, fence_sys = task.fenced
            scope_sys &= fence_sys
            out[task.atom_slot] = task.atom_clock
        if out is not None:
            if task.kind == "program":
                task.atom_clock += 1
                self.clocks[task.atom_slot] = task.atom_clock
                task.cache.clear()
            ranks = {**ranks, task.rank: merged(ranks.get(task.rank), out)}
            if scope_sys:
                system = merged(system, out)
        log.append(Update(self.peek(address), max(task.time, last.time) if last else task.time, task, system, ranks))

    def covered(self, task: Task) -> np.ndarray:
        """What a release by the task covers now."""
        out = task.clock.copy()
        if task.kind == "program":
            out[task.slot], out[task.atom_slot] = task.settled, task.atom_clock
        return out

    def word(self, address: int, kind: int, size: int = 4) -> None:
        region = self.region(address, address + size, kind)
        at = address - region.base
        self.touch(region, region.shadow(at, (1,), (size,), size), kind)

    # -- accesses ----------------------------------------------------------------------------------------------------
    def site(self) -> int:
        """The number of the current place in the source (0 outside a program)."""
        if self.current.kind != "program":
            return 0
        trail = interpret.trail()
        number = self.site_ids.get(trail)
        if number is None:
            number = self.site_ids[trail] = len(self.sites)
            self.sites.append(interpret.where())
        return number

    def loaded(self, slot: int, clock: int, site: int) -> None:
        """Note a load of what was written by `slot` at `clock`, if the program knows of that by a wait alone."""
        task = self.current
        if task.kind == "program" and task.acquired and slot not in (task.slot, task.bulk_slot):
            if slot >= len(task.start) or task.start[slot] < clock:
                self.report.ran.behind.add(tuple(frame[:2] for frame in self.sites[site]))

    def region(self, lo: int, hi: int, kind: int) -> Region:
        region = self.memory.find(lo, hi)
        if region is None:
            near = self.memory.find(lo, lo + 1) or self.memory.find(hi - 1, hi)
            hint = self.memory.co_resident(lo)
            if near:
                hint = f"; the access begins or ends in {near.label(max(lo, near.base))}"
            raise MemoryFault(f"{verb(kind)} of {hi - lo} bytes outside every tensor, at {lo:#x}{hint}\n{self.me()}")
        if region.placed and self.nodes[region.rank] != self.nodes[self.current.rank]:
            own, other = self.current.rank, region.rank
            raise MemoryFault(
                f"{verb(kind)} of {region.label(lo)} by rank {own}: rank {own} is on node {self.nodes[own]}, rank "
                f"{other} on node {self.nodes[other]}, and between nodes only the library's collectives move data\n"
                f"{self.me()}"
            )
        return region

    def outside(self, bounds: Extent, address: int, kind: int) -> NoReturn:
        """Raise for an access to no element of the tensor that its pointer was derived from."""
        region = self.memory.find(bounds.lo, bounds.lo + 1)
        rank = region.rank if region else self.current.rank
        text = f"{verb(kind)} of {bounds.index(address)} of rank {rank}, which has the shape {list(bounds.shape)}"
        if region and region.name == "channels":
            what = {ATOMIC_READ: "wait", ATOMIC_WRITE: "notify"}.get(kind & 7, verb(kind))
            channel, name = (address - bounds.lo) // 4, self._counter(self.current.rank, bounds.lo).partition(" of ")[2]
            text = f'{what} past the end: channel {channel} of "{name}", which has 0..{bounds.shape[0] - 1}'
        raise MemoryFault(f"{text}\n{self.me()}")

    def touch(self, region: Region, block: np.ndarray, kind: int) -> None:
        self.report.accesses += 1
        try:
            self.memory.touch(self.current, region, block, kind)
        except Found as found:
            self.explain(found)

    def me(self) -> str:
        task = self.current
        if task.kind == "program":
            return f"    {task.told} at {place(interpret.where())}"
        return f"    {self._owner(task.slot, task.own).name}"

    def label(self, address: int) -> str:
        region = self.memory.find(address, address + 1)
        if region is None:
            return f"{address:#x}"
        if region.name == "channels":
            return f"{self._counter(region.rank, address)} of rank {region.rank}"
        return region.label(address)

    def _counter(self, rank: int, address: int) -> str:
        """A rank may be of several Worlds: the name in the one that has the counter."""
        told = [name(address) for name in self.channel_names.get(rank, [])]
        return next((name for name in told if not name.startswith("address ")), f"address {address:#x}")

    def _owner(self, slot: int, clock: int) -> Owner:
        found = self.owners[slot][0][1]
        for first, owner in self.owners[slot]:
            if first > clock:
                break
            found = owner
        return found

    def explain(self, found: Found) -> None:
        region = found.region
        what = region.label(region.base + found.granule * region.granule)
        if found.other is None:
            raise MemoryFault(f"{verb(found.kind)} of {what}, which nothing has written\n{self.me()}") from None
        slot, clock, kind, site = found.other
        first, second = self._owner(slot, clock), self._owner(self.current.slot, self.current.own)
        reason = "no release and acquire, stream or event orders the first before the second"
        task = self.current
        if task.kind == "program" and slot in (task.slot, task.bulk_slot, task.atom_slot):
            reason = "the program's own bulk and ordinary accesses are not ordered without flush_stores or bulk_fence"
        elif found.kind in (BULK_READ, BULK_WRITE) and task.clock[slot] >= clock:
            reason = "acquired, but no proxy fence (wait_until, bulk_fence) stands before this bulk access"
        elif (kind | found.kind) & NEAR:
            reason = 'atomics of two ranks need scope "sys", both of them: else one may miss or undo the other'
        elif early := self._early(first, kind, second, found.kind):
            reason = early
        elif self._unsettled(task, slot, clock):
            reason = (
                "the acquired release does not cover it: it comes after the release, or no flush_stores (or "
                "tl.debug_barrier; flush_stores(BULK=True) for bulk stores) stands between them"
            )
        at = f" at {place(self.sites[site])}" if site else ""
        raise Race(
            f"race on {what}: {verb(found.kind)} after {verb(kind)}\n"
            f"    first:  {verb(kind)} by {first.name}{at}\n"
            f"    second: {verb(found.kind)} by{self.me()[3:]}\n    {reason}"
        ) from None

    def unsynchronized(self, address: int, site: int) -> NoReturn:
        """Raise for a load of what another thread of the program has stored."""
        task = self.current
        raise Race(
            f"race on {self.label(address)}: read after write by another thread of the program\n"
            f"    first:  write by {task.told} at {place(self.sites[site])}\n    second: read by{self.me()[3:]}\n"
            "    it has another place in the second block, so another thread may load it than stored it, and no "
            "tl.debug_barrier, flush_stores or wait, at which the threads wait for one another, stands between them"
        )

    def _early(self, first: Owner, kind: int, second: Owner, other: int) -> str:
        """That memory is used again while a peer still reads it, or that a call was not counted; empty if neither is
        so."""
        reasons = []
        for reader, read, writer, write in ((first, kind, second, other), (second, other, first, kind)):
            if read in (READ, BULK_READ) and write in (WRITE, BULK_WRITE) and (text := self._reused(reader, writer)):
                reasons.append(text)
        for who in (first, second):
            if who.run is not None and who.run.uncounted:
                reasons.append(f"rank {who.rank} {who.run.kernel.__name__}, {who.run.uncounted}")
        return "\n    ".join(dict.fromkeys(reasons))

    def _reused(self, reader: Owner, writer: Owner) -> str:
        """A kernel that is one of the two says which calls they belong to: those that have as many of its launches
        before them."""
        run = reader.run or writer.run
        if run is None or reader.rank == writer.rank:
            return ""
        read, write = (self.streams.launch_of(who, run.kernel) for who in (reader, writer))
        if read >= write:
            return ""
        return (
            f"a write after a read of an earlier call: rank {reader.rank} reads {_standing(reader, run, read)}, "
            f"rank {writer.rank} writes {_standing(writer, run, write)} of {run.kernel.__name__}\n"
            "    nothing that the writer has heard says that the read is over: use two halves in turn, or world.barrier"
        )

    def _unsettled(self, task: Task, slot: int, clock: int) -> bool:
        """Whether `task` acquired from the program that made the access, but from before the access was settled."""
        program = self.programs_of.get(slot)
        if program is None:
            return False
        owner = self._owner(slot, clock)
        begun = [first for first, other in self.owners[program] if other is owner]
        return bool(begun) and bool(task.clock[program] >= begun[-1])

    # -- spans -------------------------------------------------------------------------------------------------------
    def span(
        self, task: Task, name: str, kind: str, start: float, detail: str = "", releaser: tuple[int, str] | None = None
    ) -> None:
        if task.time > start:
            self.report.timeline.append(Span(task.rank, task.track, name, kind, start, task.time, detail, releaser))

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

    # -- the end -----------------------------------------------------------------------------------------------------
    def _check_channels(self) -> None:
        for name, rank, counters, state, arrivals in self.channels.values():
            values = counters.reshape(-1).tolist()
            self.report.counters[f"{name} of rank {rank}"] = values
            calls, uncounted = state, ""
            if isinstance(state, torch.Tensor):
                calls, launches = int(state[CALLS.value]), self.streams.launched[state.data_ptr()]
                if launches and any(values) and (not calls or state[DONE.value]):
                    uncounted = f"launched {launches} times, {calls} calls counted: "
                    uncounted += "end_call missing, or not reached by all programs"
            if arrivals is None:
                if uncounted:
                    raise SignalError(f"{name} of rank {rank}: {uncounted}")
                continue
            due = [arrivals] * len(values) if isinstance(arrivals, int) else arrivals
            for i, (value, each) in enumerate(zip(values, due, strict=True)):
                if (value - calls * each) % 2**32:
                    log = self.words.get(counters.data_ptr() + i * counters.element_size(), ())
                    what = "doubled" if value > calls * each else "lost"
                    raise SignalError(
                        f"{what} signal: {name}[{i}] of rank {rank} is {value} at the end, "
                        f"not {calls * each} ({uncounted or f'{calls} calls'} of {each} arrivals); raised by "
                        + (", ".join(f"{u.by.name} to {u.value}" for u in list(log)[-8:]) or "nobody")
                    )


def _standing(who: Owner, run: KernelRun, number: int) -> str:
    """Where an access stands to the launches of a kernel."""
    if who.run is not None and who.run.kernel.fn is run.kernel.fn:
        return f"in launch {number}" + (f" (call {who.run.call})" if who.run.call else "")
    return f"between launches {number - 1} and {number}" if number > 1 else "before launch 1"
