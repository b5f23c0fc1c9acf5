"""The machine runs all ranks of a world as greenlets of one thread, schedules them by a seed, and tracks happens-before
with vector clocks.

A task is a rank's host code (host.py), a stream, which runs its operations in order, or a resident program of a running
kernel. The current task runs until a scheduling point (an atomic, an intrinsic, an operation enqueued on a stream,
sometimes a load or store), which picks the next task. When no task can run, the run has ended or is deadlocked.

These edges order two tasks:
    host -> stream                  the host's clock when it enqueues an operation (`synchronize`, `exchange`)
    stream -> stream                record / wait_event, barriers of streams, collectives
    stream -> program -> stream     the start and the end of a kernel
    release -> acquire              through a counter; scope "gpu" between tasks of one rank only

Inside a program the GPU's order is weaker than program order, and so is this model's:
    - a release by one thread covers ordinary accesses, and atomics of a block, which many threads make, only up to the
      last `flush_stores` or `tl.debug_barrier` (`flushed`);
    - a separate agent (`bulk_agent`) makes bulk (TMA) stores; it joins the program at
      `flush_stores(BULK=True)`;
    - bulk loads and stores have the clock that the program had at its last proxy fence (`bulk_view`).
"""

from __future__ import annotations

import ast
import ctypes
import itertools
import random
from collections import deque
from collections.abc import Callable, Hashable, Sequence
from typing import NoReturn, Protocol, TypeVar

import numpy as np
import torch
from greenlet import GreenletExit, getcurrent, greenlet
from triton import JITFunction

from ..errors import Deadlock, MemoryFault, Mismatch, Race, SignalError, Unsupported
from ..lang.channel import CALLS, DONE
from ..residency import Ledgers
from ..span import Span
from . import deadlock, interpret
from .bounds import Extent, PointerBounds
from .host import HostThread
from .memory import (
    ATOMIC_READ,
    ATOMIC_WRITE,
    BULK_READ,
    BULK_WRITE,
    CTA_SCOPE,
    GPU_SCOPE,
    READ,
    WRITE,
    Finding,
    Memory,
    Region,
    verb,
)
from .programs import Programs
from .streams import Streams
from .tasks import (
    H200,
    Collective,
    Costs,
    KernelRun,
    Owner,
    Poll,
    Report,
    SourceSite,
    Task,
    Update,
    Wait,
    merged,
    place,
    reached,
)
from .torch_order import TorchOrder

R = TypeVar("R")

LOG = 128  # the number of most recent changes that are stored for each word
IDLE_ROUNDS = 64  # spinning tasks are deadlocked after this number of rounds of polls without any change

MODES = ("clock", "random", "starve", "burst")


WINDOW, WINDOW_STEP = 1 << 60, 1 << 36  # the first multicast address, and the distance between windows


# A channel's counters, its number of calls, and the arrivals of one call (`EmulatedBackend.register_channel`).
Channel = tuple[torch.Tensor, torch.Tensor | int, list[int] | int | None]


class Mutation(Protocol):
    """A change of one call; a test makes it to show that the emulator reports it."""

    def changes(self, fn: JITFunction) -> bool:
        """Return whether the call is in the source of this function."""

    def apply(self, tree: ast.Module) -> None:
        """Apply the change to the call in the function's source."""

    def drops(self, site: tuple[str, int, str]) -> bool:
        """Return whether the mutation drops the call at this site of host code: the file, the line and the backend's
        method."""


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
        nodes: Sequence[int] | None = None,
        ahead: bool = False,
        ends_release: bool = False,
        costs: Costs = H200,
    ) -> None:
        """Make the machine of a run. nodes: the number of each rank's node, by rank. ahead: operators return before
        their streams are drained, as on a GPU, and torch operations run in the order of the current stream
        (torch_order.py).

        ends_release: a relaxed atomic of a kernel publishes the writes of earlier operations on the kernel's stream,
        and the update that it reads orders later operations. PTX does not promise this order. GPUs, however, make
        writes visible to all when an operation ends, and the signals of published kernels rely on it. weft's own
        kernels release and acquire."""
        self.nodes, self.ends_release = nodes or (0,) * size, ends_release
        self.size, self.seed, self.sm_count, self.preempt = size, seed, sm_count, preempt
        self.races, self.mutation, self.record, self.ahead, self.costs = races, mutation, record, ahead, costs
        self.rng, self.mode = random.Random(seed), MODES[seed % len(MODES)]
        self.memory = Memory(self)
        self.bounds = PointerBounds()
        self.report = Report(seed, self.mode, size)
        # tasks
        self.tasks: list[Task] = []
        self.ready: list[Task] = []
        self.current: Task = None  # type: ignore[assignment]
        self.hub = getcurrent()
        self.beginning: Task | None = None
        self.closing = self.ended = False
        self.progress = self.rounds = self.looked = 0
        self.starved: Task | int | None = None  # a task, or a rank with all its tasks
        self.starve_left = 0
        # clocks
        self.clocks: list[int] = []
        self.agents: dict[Hashable, int] = {}
        self.ranks: list[int] = []  # the rank of each agent
        self.owners: list[list[tuple[int, Owner]]] = []  # by agent: (a tick, the owner of accesses from this tick on)
        self.width = 64
        self.sites: list[SourceSite] = [()]
        self.site_ids: dict[tuple[int, ...], int] = {}  # the site that belongs to each `interpret.trail`
        # the world
        self.words: dict[int, deque[Update]] = {}  # the latest changes of every counter and flag
        self.ledgers: dict[int, Ledgers] = {}  # by rank
        self.calls: dict[Hashable, dict[int, object]] = {}  # calls by rank; they remain until all ranks have made them
        # The number of bytes of each multicast window, and the address of its memory on every rank.
        self.windows: list[tuple[int, list[int]]] = []
        self.waiting: dict[int, list[Task]] = {}
        self.polling: list[Task] = []
        self.not_resident: dict[KernelRun, str] = {}  # the error message for launches that signal but are not resident
        self.hosts: list[Task] = []
        self.host_threads: list[HostThread] = []
        self.program_of_agent: dict[int, int] = {}  # for each agent of a program, the program's main agent
        # `EmulatedBackend.register_channel` fills this table, keyed by the rank, the channel's name and its address.
        self.channels: dict[tuple[int, str, int], Channel] = {}
        self.channel_names: dict[int, list[Callable[[int], str]]] = {}  # by rank, functions that name a counter
        self.disagreements: dict[int, Callable[[dict[int, int]], Mismatch]] = {}  # by a World's guard, makes its error
        self.seen_sites: set[tuple[str, int, str]] = set()
        self.programs, self.streams = Programs(self), Streams(self)
        self.world_numbers = [itertools.count() for _ in range(size)]
        self.torch_order = [TorchOrder(self, rank) for rank in range(size)]

    # -- running -----------------------------------------------------------------------------------------------------
    def add_window(self, nbytes: int, starts: list[int]) -> int:
        """Return a new multicast address for memory with a copy on every rank. That address differs from all addresses
        of any rank's own memory."""
        self.windows.append((nbytes, starts))
        return WINDOW + (len(self.windows) - 1) * WINDOW_STEP

    def window(self, address: int) -> list[int]:
        """Return the address in every rank's memory to which a multicast address refers."""
        number, offset = divmod(address - WINDOW, WINDOW_STEP)
        if not 0 <= number < len(self.windows) or offset >= self.windows[number][0]:
            raise ValueError(f"{address:#x} is no multicast address")
        return [start + offset for start in self.windows[number][1]]

    def run(self, hosts: Sequence[Callable[[], R]]) -> list[R]:
        """Run each rank's function to its end, and return the results by rank."""
        results: dict[int, R] = {}

        def host(rank: int, fn: Callable[[], R]) -> Callable[[], None]:
            def body() -> None:
                try:
                    if self.ahead:
                        self.torch_order[rank].set(True)
                    results[rank] = fn()
                except GreenletExit:
                    raise
                except BaseException as error:
                    error.add_note(f"raised by rank {rank} of {self.size} (emulated, seed {self.seed})")
                    raise
                finally:  # torch would free a mode left here after `Thread.join`, perhaps while the interpreter exits
                    self.torch_order[rank].set(False)

            return body

        threads = torch.get_num_threads()
        # This thread runs the ranks' streams on tensors created in any gradient mode, and must not record gradients.
        with interpret.patched(self.programs), torch.inference_mode():
            torch.set_num_threads(1)  # one task runs at a time, on small tensors
            try:
                for rank, fn in enumerate(hosts):
                    task = self.task(f"rank {rank} host", rank, "host", "host", ("host", rank))
                    self.hosts.append(task)
                    task.host = HostThread(rank, host(rank, fn))
                    self.host_threads.append(task.host)
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
        if self.not_resident:
            raise Unsupported(next(iter(self.not_resident.values())))
        return [results[rank] for rank in range(self.size)]

    def _loop(self) -> None:
        """Resume one task after another. This greenlet, the hub, receives control when a task ends or no task can
        run."""
        while True:
            task, self.beginning = self.beginning, None
            if task is None:
                if not self.ready and not self._stalled():
                    return
                task = self._pick()
            self.current = task
            task.greenlet.switch()

    def _stalled(self) -> bool:
        """Wake tasks when none is ready: first tasks that wait for a word that host code has changed, then spinning
        tasks. Returns False if the run has ended, and raises Deadlock if no task can continue."""
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
        """Complete the timeline of a failed run: draw each unfinished wait longer, by a tenth of the run."""
        end = 1.1 * max(task.time for task in self.tasks)
        for task in self.tasks:
            if task.kind == "program" and not task.done and task.run is not None:
                self.span(task, task.run.kernel.__name__, "compute", task.begun)
                task.begun = task.time
            if not task.done and isinstance(task.waits, Wait | Poll):
                word = self.label(task.waits.address) if task.waits.address else "several words"
                self.waited(task, end, f"{word}, in vain", None)

    def _close(self) -> None:
        self.closing = True
        for task in self.tasks:
            if task.greenlet is not None and task.greenlet and not task.greenlet.dead:
                self.current = task  # because host code that ends may still make calls, which belong to the rank's task
                task.greenlet.throw(GreenletExit)
        self.streams.clear()
        self.report.host_sites = sorted(self.seen_sites)

    # -- tasks and the scheduler -------------------------------------------------------------------------------------
    def task(self, name: str, rank: int, kind: str, track: str, key: Hashable, clock: np.ndarray | None = None) -> Task:
        """Return a new task with a separate clock; the memory model of the rank identifies the task by `key`."""
        agent = self.agent(key, rank)
        task = Task(self, name, rank, kind, track, agent, np.zeros(self.width, np.int32))
        if clock is not None:
            task.clock[: len(clock)] = clock
        task.tick = task.flushed = self.clocks[agent]
        task.advance()
        task.atomic_agent, task.atomic_clock = agent, task.tick
        self.owners[agent].append((task.tick, Owner(name, rank)))
        if len(self.tasks) > 64 + 4 * len(self.clocks):
            self.tasks = [t for t in self.tasks if not t.done]
        self.tasks.append(task)
        return task

    def agent(self, key: Hashable, rank: int) -> int:
        """Return the index in the vector clocks of the agent with this key; the first use creates a new index."""
        agent = self.agents.get(key)
        if agent is None:
            agent = self.agents[key] = len(self.clocks)
            self.clocks.append(0)
            self.ranks.append(rank)
            self.owners.append([])
            if agent >= self.width:
                self.width *= 2
                self.tasks = [t for t in self.tasks if not t.done]
                for task in self.tasks:
                    self.widen(task)
        return agent

    def widen(self, task: Task) -> None:
        for name in ("clock", "bulk_view"):
            narrow = getattr(task, name)
            if narrow is not None and len(narrow) < self.width:
                wide = np.zeros(self.width, np.int32)
                wide[: len(narrow)] = narrow
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
            return min(ready, key=lambda t: (t.time, t.agent))
        if mode == "burst":
            current = self.current
            if current is not None and current.position >= 0 and self.rng.random() < 0.9:
                return current
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
        """Give control to the selected task, and return when this task is selected again."""
        me, task = self.current, None
        if self.ready and not self.closing:
            task = self._pick()
            if task is me:  # the machine's thread is not needed
                return
        if me.host is not None and me.host.outside():
            me.host.ask(lambda: self._switch_to(task))
        else:
            self._switch_to(task)

    def _switch_to(self, task: Task | None) -> None:
        """Give control to the task, or to the hub if there is no task. Called on the machine's thread."""
        if self.closing:
            raise GreenletExit
        if task is None:
            self.hub.switch()
            return
        self.current = task
        self.report.switches += 1
        self.report.schedule = hash((self.report.schedule, task.agent))
        if task.greenlet:
            task.greenlet.switch()
        else:  # the hub starts the task, because a greenlet inherits the stack depth of the greenlet that starts it
            self.beginning = task
            self.hub.switch()

    def pause(self) -> None:
        """Let another task run if the schedule selects one; this is a scheduling point."""
        if len(self.ready) > 1 or self.closing:
            self._switch()

    def block(self, waits: Wait | Poll | Collective | str) -> None:
        """Make the current task not ready until `wake`."""
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

    def store_word(self, address: int, value: int, store: bool = True, releases: bool = True) -> None:
        """Change a word by an operation of the current stream. store: as in `release`. releases: whether a memory
        barrier precedes the change."""
        self.word(address, ATOMIC_WRITE)
        ctypes.c_int32.from_address(address).value = value
        self.release(self.current, address, True, store, releases)
        self.word_changed(address)
        self.current.advance()

    def poll_word(self, address: int, done: Callable[[int], bool], acquires: bool = True) -> None:
        """Block the current stream until a word has the value for which the stream waits."""
        self.pause()
        while not done(self.peek(address)):
            self.sleep(address)
        self.word(address, ATOMIC_READ)
        if acquires and (log := self.words.get(address)):
            self.acquire(self.current, log[-1], True)

    def sleep(self, address: int | None, plain: bool = False) -> None:
        """Block the current task until a word changes (None: any word). plain: the task reads the word by ordinary
        loads."""
        self.polling.append(self.current)
        self.block(Poll(address, interpret.where(), plain))

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
        if region.words:  # an ordinary store to a counter ends its release sequence
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

        The program can conclude only that the word has reached the target. The program therefore acquires the releases
        up to the word's last rise to the target, even if there are later releases. The emulator thus detects, in every
        schedule, a target that is too low by one arrival.
        """
        task = self.current
        if self.record and scope_sys and task.kind == "program":
            self.report.sys_lines.add(interpret.where()[0][:2])
        self.signals("waits")
        self.pause()
        look = ATOMIC_READ if scope_sys else ATOMIC_READ | GPU_SCOPE
        self.word(address, look)
        while not reached(self.peek(address), target):
            self.waiting.setdefault(address, []).append(task)
            self.block(Wait(address, target, tile, peer, interpret.where()))
        self.word(address, look)
        value = self.peek(address)
        update_at_target = None
        for update in reversed(self.words.get(address, ())):
            if not reached(update.value, target):
                break
            update_at_target = update
        if update_at_target is not None:
            detail = f"{self.label(address)} >= {target}" + (f", tile {tile}" if tile >= 0 else "")
            self.waited(task, update_at_target.time, detail, (update_at_target.task.rank, update_at_target.task.track))
            self.acquire(task, update_at_target, scope_sys)
        return value

    def signals(self, action: str) -> None:
        """Note that the current task waits or notifies. If the task is a program, its whole grid should be resident at
        once."""
        run = self.current.run
        if run is not None and not run.fits(self.sm_count) and run not in self.not_resident:
            self.not_resident[run] = (
                f"{run.kernel.__name__}: {run.programs} programs are not resident at once on the "
                f"{self.sm_count} SMs of rank {self.current.rank}, {run.per_sm} an SM, and one of them {action}: a "
                f"program that never starts never signals (launch at most world.sm_count)\n{self.me()}"
            )

    def acquire(self, task: Task, update: Update, scope_sys: bool, later: bool = False) -> None:
        """Order the task after the clock that an update of a word released; later: only from its threads' next barrier
        on."""
        task.acquired = True
        for clock in self.published(task, update, scope_sys):
            if later:
                task.later = merged(task.later, clock)
            else:
                task.join(clock)
                self.show_copies(task)

    def show_copies(self, task: Task) -> None:
        """Let the task's bulk accesses observe the stream operations after which the task is ordered, with
        `ends_release`. Stream operations do not write through the SM's caches, so no proxy fence is needed."""
        if self.ends_release and task.kind == "program":
            self.widen(task)
            streams = [agent for key, agent in self.agents.items() if isinstance(key, tuple) and key[0] == "stream"]
            task.bulk_view[streams] = np.maximum(task.bulk_view[streams], task.clock[streams])

    def observe(self, task: Task, update: Update, scope_sys: bool) -> None:
        """Note that a relaxed atomic has read an update. With `ends_release`, accesses after the task's next fence, and
        later operations on the kernel's stream, are ordered after the clock that the update released."""
        if self.ends_release and task.kind == "program":
            for wide, clock in enumerate((update.ranks.get(task.rank), update.system if scope_sys else None)):
                if clock is not None:
                    task.observed[wide] = merged(task.observed[wide], clock)
                    task.at_end = merged(task.at_end, clock)

    def published(self, task: Task, update: Update, scope_sys: bool) -> list[np.ndarray]:
        """Return the clocks that an update makes visible to a task."""
        clocks = [update.ranks.get(task.rank), update.system if scope_sys else None]
        return [clock for clock in clocks if clock is not None]

    def release(
        self, task: Task, address: int, scope_sys: bool, store: bool, released: bool, fenced: bool = True
    ) -> None:
        """Record a change of a word, and publish the task's flushed accesses with it. store: the change is a store,
        which begins a new release sequence; an update continues the current one. released: whether the change itself is
        a release. fenced: whether an earlier release fence covers the change."""
        log = self.words.get(address)
        if log is None:
            log = self.words[address] = deque(maxlen=LOG)
            region = self.memory.find(address, address + 1)
            assert region is not None
            region.words = True
        if task.run is not None and not task.run.fits(self.sm_count):
            region = self.memory.find(address, address + 1)
            if region is not None and region.name == "channels":
                self.signals("notifies")
        last = log[-1] if log else None
        system = None if last is None or store else last.system
        ranks = {} if last is None or store else last.ranks
        covered = None
        if released:
            covered = self.covered(task)
        elif fenced and task.fenced is not None:
            covered, fence_sys = task.fenced
            scope_sys &= fence_sys
            covered[task.atomic_agent] = task.atomic_clock
        if covered is None and self.ends_release and task.kind == "program":
            ranks = {**ranks, task.rank: merged(ranks.get(task.rank), task.start)}
            if scope_sys:
                system = merged(system, task.start)
        if covered is not None:
            if task.kind == "program":
                self.owners[task.agent][-1][1].released = True
                task.atomic_clock += 1
                self.clocks[task.atomic_agent] = task.atomic_clock
                task.cache.clear()
            ranks = {**ranks, task.rank: merged(ranks.get(task.rank), covered)}
            if scope_sys:
                system = merged(system, covered)
        log.append(Update(self.peek(address), max(task.time, last.time) if last else task.time, task, system, ranks))

    def covered(self, task: Task) -> np.ndarray:
        """Return the clock that a release by the task covers now."""
        out = task.clock.copy()
        if task.kind == "program":
            out[task.agent], out[task.atomic_agent] = task.flushed, task.atomic_clock
        return out

    def word(self, address: int, kind: int, size: int = 4) -> None:
        region = self.region(address, address + size, kind)
        offset = address - region.base
        self.touch(region, region.shadow(offset, (1,), (size,), size), kind)

    # -- accesses ----------------------------------------------------------------------------------------------------
    def site(self) -> int:
        """Return the number of the current position in the source (0 outside a program)."""
        if self.current.kind != "program":
            return 0
        trail = interpret.trail()
        number = self.site_ids.get(trail)
        if number is None:
            number = self.site_ids[trail] = len(self.sites)
            self.sites.append(interpret.where())
        return number

    def loaded(self, agent: int, clock: int, site: int) -> None:
        """Note a load of an element that `agent` wrote at `clock`, if only the program's own wait orders the program
        after that write."""
        task = self.current
        if task.kind == "program" and task.acquired and agent not in (task.agent, task.bulk_agent):
            if agent >= len(task.start) or task.start[agent] < clock:
                self.report.ran.behind.add(tuple(frame[:2] for frame in self.sites[site]))

    def region(self, lo: int, hi: int, kind: int) -> Region:
        region = self.memory.find(lo, hi)
        if region is None:
            near = self.memory.find(lo, lo + 1) or self.memory.find(hi - 1, hi)
            hint = self.memory.neighbour_hint(lo)
            if near:
                hint = f"; the access begins or ends in {near.label(max(lo, near.base))}"
            raise MemoryFault(f"{verb(kind)} of {hi - lo} bytes outside every tensor, at {lo:#x}{hint}\n{self.me()}")
        if region.node_local and self.nodes[region.rank] != self.nodes[self.current.rank]:
            rank, owner = self.current.rank, region.rank
            raise MemoryFault(
                f"{verb(kind)} of {region.label(lo)} by rank {rank}: rank {rank} is on node {self.nodes[rank]}, rank "
                f"{owner} on node {self.nodes[owner]}, and between nodes only the library's collectives move data\n"
                f"{self.me()}"
            )
        return region

    def outside(self, bounds: Extent, address: int, kind: int) -> NoReturn:
        """Raise an error for an access to bytes outside all elements of the tensor from which the pointer is
        derived."""
        region = self.memory.find(bounds.lo, bounds.lo + 1)
        rank = region.rank if region else self.current.rank
        text = f"{verb(kind)} of {bounds.index(address)} of rank {rank}, which has the shape {list(bounds.shape)}"
        if region and region.name == "channels":
            action = {ATOMIC_READ: "wait", ATOMIC_WRITE: "notify"}.get(kind & 7, verb(kind))
            channel, name = (address - bounds.lo) // 4, self._counter(self.current.rank, bounds.lo).partition(" of ")[2]
            text = f'{action} past the end: channel {channel} of "{name}", which has channels 0..{bounds.shape[0] - 1}'
        raise MemoryFault(f"{text}\n{self.me()}")

    def touch(self, region: Region, block: np.ndarray, kind: int) -> None:
        self.report.accesses += 1
        try:
            self.memory.touch(self.current, region, block, kind)
        except Finding as access:
            self.explain(access)

    def me(self) -> str:
        task = self.current
        if task.kind == "program":
            return f"    {task.report_name} at {place(interpret.where())}"
        return f"    {self.owner(task.agent, task.tick).name}"

    def label(self, address: int) -> str:
        region = self.memory.find(address, address + 1)
        if region is None:
            return f"{address:#x}"
        if region.name == "channels":
            return f"{self._counter(region.rank, address)} of rank {region.rank}"
        return region.label(address)

    def _counter(self, rank: int, address: int) -> str:
        """Return the name of a rank's counter. A rank may belong to several Worlds; the World that contains this
        counter supplies the name."""
        labels = [name(address) for name in self.channel_names.get(rank, [])]
        return next((name for name in labels if not name.startswith("address ")), f"address {address:#x}")

    def owner(self, agent: int, tick: int) -> Owner:
        """Return the owner of an agent's access at a tick."""
        owner_then = self.owners[agent][0][1]
        for first_tick, owner in self.owners[agent]:
            if first_tick > tick:
                break
            owner_then = owner
        return owner_then

    def explain(self, access: Finding) -> None:
        """Raise a finding whose message names the accesses, their tasks and sites, and the missing edge."""
        region = access.region
        element = region.label(region.base + access.granule * region.granule)
        if access.stamp is None:
            raise MemoryFault(f"{verb(access.kind)} of {element}, which nothing has written\n{self.me()}") from None
        agent, clock, kind, site = access.stamp
        earlier, later = self.owner(agent, clock), self.owner(self.current.agent, self.current.tick)
        reason = "no release and acquire, stream or event orders the first before the second"
        task = self.current
        if task.kind == "program" and agent in (task.agent, task.bulk_agent, task.atomic_agent):
            reason = "the program's own bulk and ordinary accesses are not ordered without flush_stores or bulk_fence"
        elif access.kind in (BULK_READ, BULK_WRITE) and task.clock[agent] >= clock:
            reason = "acquired, but no proxy fence (wait_until, bulk_fence) stands before this bulk access"
        elif (kind | access.kind) & CTA_SCOPE:
            reason = 'scope "cta" orders nothing between programs: atomics of two programs need scope "gpu" or "sys"'
        elif (kind | access.kind) & GPU_SCOPE:
            reason = 'atomics of two ranks need scope "sys", both of them: else one may miss or undo the other'
        elif early := self._early(earlier, kind, later, access.kind):
            reason = early
        elif self._unflushed(task, agent, clock) and not earlier.released:
            reason = 'the first program has made no release so far: its atomics are relaxed, or their scope is "cta"'
        elif self._unflushed(task, agent, clock):
            reason = (
                "the acquired release does not cover it: it comes after the release, or no flush_stores (or "
                "tl.debug_barrier; flush_stores(BULK=True) for bulk stores) stands between them"
            )
        location = f" at {place(self.sites[site])}" if site else ""
        raise Race(
            f"race on {element}: {verb(access.kind)} after {verb(kind)}\n"
            f"    first:  {verb(kind)} by {earlier.name}{location}\n"
            f"    second: {verb(access.kind)} by{self.me()[3:]}\n    {reason}"
        ) from None

    def unsynchronized(self, address: int, site: int) -> NoReturn:
        """Raise an error for a load of an element that a different thread of the program has stored."""
        task = self.current
        raise Race(
            f"race on {self.label(address)}: read after write by another thread of the program\n"
            f"    first:  write by {task.report_name} at {place(self.sites[site])}\n"
            f"    second: read by{self.me()[3:]}\n"
            "    the element has different indices in the two blocks, so the thread that loads it may not be the one "
            "that stored it, and there is no tl.debug_barrier, flush_stores or wait between the two"
        )

    def _early(self, earlier: Owner, kind: int, later: Owner, later_kind: int) -> str:
        """If a program overwrites memory that a peer still reads, or if a call was not counted, return this as the
        reason of the race; otherwise return ""."""
        reasons = []
        for reader, read, writer, write in ((earlier, kind, later, later_kind), (later, later_kind, earlier, kind)):
            if read in (READ, BULK_READ) and write in (WRITE, BULK_WRITE) and (text := self._reused(reader, writer)):
                reasons.append(text)
        for who in (earlier, later):
            if who.run is not None and who.run.uncounted:
                reasons.append(f"rank {who.rank} {who.run.kernel.__name__}, {who.run.uncounted}")
        return "\n    ".join(dict.fromkeys(reasons))

    def _reused(self, reader: Owner, writer: Owner) -> str:
        """Return the reason why a write is one call too early, or "". The position of an access among the launches of a
        kernel determines the call to which the access belongs."""
        run = reader.run or writer.run
        if run is None or reader.rank == writer.rank:
            return ""
        read, write = (self.streams.launch_of(who, run.kernel) for who in (reader, writer))
        if read >= write:
            return ""
        return (
            f"a write after a read of an earlier call: rank {reader.rank} reads {_standing(reader, run, read)}, "
            f"rank {writer.rank} writes {_standing(writer, run, write)} of {run.kernel.__name__}\n"
            "    no release orders the end of the read before the write: alternate between two buffers, or call "
            "world.barrier"
        )

    def _unflushed(self, task: Task, agent: int, clock: int) -> bool:
        """Return whether `task` acquired a release of the program that made the access, although that release precedes
        the flush of the access."""
        program = self.program_of_agent.get(agent)
        if program is None:
            return False
        owner = self.owner(agent, clock)
        starts = [tick for tick, owner_then in self.owners[program] if owner_then is owner]
        return bool(starts) and bool(task.clock[program] >= starts[-1])

    # -- spans -------------------------------------------------------------------------------------------------------
    def span(
        self, task: Task, name: str, kind: str, start: float, detail: str = "", releaser: tuple[int, str] | None = None
    ) -> None:
        if task.time > start:
            self.report.timeline.append(Span(task.rank, task.track, name, kind, start, task.time, detail, releaser))

    def waited(self, task: Task, until: float, detail: str, releaser: tuple[int, str] | None) -> None:
        """Record that the task could not continue before virtual time `until`."""
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
        for (rank, name, _), (counters, state, arrivals) in self.channels.items():
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
            for i, (value, due_per_call) in enumerate(zip(values, due, strict=True)):
                if (value - calls * due_per_call) % 2**32:
                    log = self.words.get(counters.data_ptr() + i * counters.element_size(), ())
                    fault = "doubled" if value > calls * due_per_call else "lost"
                    raise SignalError(
                        f"{fault} signal: {name}[{i}] of rank {rank} is {value} at the end, "
                        f"not {calls * due_per_call} ({uncounted or f'{calls} calls'} of {due_per_call} arrivals); "
                        "raised by " + (", ".join(f"{u.task.name} to {u.value}" for u in list(log)[-8:]) or "nobody")
                    )


def _standing(who: Owner, run: KernelRun, number: int) -> str:
    """Return the position of an access among the launches of a kernel."""
    if who.run is not None and who.run.kernel.fn is run.kernel.fn:
        return f"in launch {number}" + (f" (call {who.run.call})" if who.run.call else "")
    return f"between launches {number - 1} and {number}" if number > 1 else "before launch 1"
