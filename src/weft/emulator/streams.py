"""What host code gives to a rank's streams, and how it runs: launches, copies, calls, signals, events, collectives.

An operation starts with what its host task knew when it was given, runs in its stream's turn, and ends before the next
one begins. A launch keeps its stream busy until all its programs have ended; programs take turns in the rank's
`sm_count` slots, which all its streams share.
"""

from __future__ import annotations

import bisect
import dis
import sys
from collections import Counter, defaultdict
from collections.abc import Callable, Hashable, Mapping, Sequence
from types import CellType, FunctionType
from typing import TYPE_CHECKING, TypeVar, cast

import numpy as np
import torch
import triton.language as tl
from greenlet import GreenletExit
from triton import JITFunction
from triton.tools.tensor_descriptor import TensorDescriptor

from ..errors import Mismatch
from ..lang.channel import CALLS, DONE, BlockChannel
from . import interpret, memory
from .memory import ATOMIC_WRITE, READ, WRITE, extent
from .ran import Function
from .tasks import FLOPS, LINK, Arrival, Event, KernelRun, Meeting, Owner, Stream, Task, merged

if TYPE_CHECKING:
    from .machine import Machine

R = TypeVar("R")
Ranks = tuple[int, ...]  # of a World: all, or those of a part


class Streams:
    """The streams of all ranks."""

    def __init__(self, machine: Machine) -> None:
        self.machine = machine
        size = machine.size
        self.streams: dict[tuple[int, str], Stream] = {}
        self.pending: list[list[KernelRun]] = [[] for _ in range(size)]
        self.free = [[0.0] * machine.sm_count for _ in range(size)]  # per rank: since when each slot is free
        self.resident: list[list[Task]] = [[] for _ in range(size)]
        self.crowded: list[list[Task]] = [[] for _ in range(size)]  # streams whose library work finds no free slot
        self.current: list[Stream | None] = [None] * size  # by rank, where the main stream is not the current one
        self.meetings: dict[Ranks, list[Meeting]] = defaultdict(list)
        self.met: Counter[tuple[Ranks, int]] = Counter()
        self.latest: dict[
            tuple[int, Ranks, str | None], Meeting
        ] = {}  # by rank and communicator: the collective given to it last
        self.exchanges: dict[Ranks, list[dict[int, object]]] = defaultdict(list)
        self.exchanged: Counter[tuple[Ranks, int]] = Counter()
        self.given = [0] * size  # operations that each rank's host code has given
        self.launches: dict[tuple[int, Function], list[int]] = defaultdict(list)  # by rank and kernel: which of them
        self.launched: Counter[int] = Counter()  # by address of a channel's state
        self.running: dict[
            tuple[Function, int], KernelRun
        ] = {}  # by kernel and such an address: the launch that began last

    @property
    def idle(self) -> bool:
        return all(s.idle for s in self.streams.values())

    def clear(self) -> None:
        for stream in self.streams.values():
            stream.queue.clear()

    def stream(self, rank: int, name: str) -> Stream:
        found = self.streams.get((rank, name))
        if found is None:
            key = ("stream", rank, name)
            task = self.machine.task(f"rank {rank} stream {name}", rank, "stream", f"stream:{name}", key)
            task.bulk_view = task.clock
            found = self.streams[rank, name] = Stream(rank, name, task)
            self.machine.start(task, lambda: self._serve(found))
            self.machine.unready(task)
        return found

    def _serve(self, stream: Stream) -> None:
        task = stream.task
        while True:
            while not stream.queue:
                for waiter in stream.finishers:
                    self.machine.wake(waiter)
                stream.finishers.clear()
                self.machine.block("idle")
            do, clock, time, owner = stream.queue.popleft()
            stream.busy = owner.name
            self.machine.owners[task.slot].append((task.own, owner))
            task.join(clock)
            task.time = max(task.time, time)
            try:
                do()
            except GreenletExit:
                raise
            except BaseException as error:
                error.add_note(f"in {owner.name} (seed {self.machine.seed})")
                raise
            del do  # and with it the operation's tensors
            task.advance()
            stream.busy = ""
            self.machine.progress += 1

    def enqueue(self, stream: Stream, text: str, do: Callable[[], None]) -> None:
        host = self.machine.hosts[stream.rank]
        file, line = call_site()
        owner = Owner(f"{stream.task.name}, {text} at {file}:{line}", stream.rank, given=self.given[stream.rank])
        self.given[stream.rank] += 1
        stream.queue.append((do, host.clock.copy(), host.time, owner))
        if stream.task.waits == "idle" or stream.task.waits is None:
            if not stream.busy:
                self.machine.wake(stream.task)
        self.machine.pause()

    def finish(self, stream: Stream) -> None:
        """Block the host until the stream is drained. On a GPU this does nothing, so it orders nothing either."""
        host = self.machine.current
        while not stream.idle:
            stream.finishers.append(host)
            self.machine.block(f"the end of stream {stream.name} of rank {stream.rank}")
        host.time = max(host.time, stream.task.time)

    def synchronize(self, rank: int) -> None:
        host = self.machine.current
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
                self.machine.wake(waiter)
            event.waiters.clear()

        self.enqueue(stream, "record", do)
        return event

    def wait_event(self, stream: Stream, event: Event) -> None:
        def do() -> None:
            task = stream.task
            while not event.done:
                event.waiters.append(task)
                self.machine.block(event.text)
            assert event.clock is not None
            task.join(event.clock)
            self.machine.waited(task, event.time, event.text, event.by)

        self.enqueue(stream, "wait_event", do)

    def launch(
        self,
        kernel: JITFunction,
        grid: tuple[int, int, int],
        args: Mapping[str, object],
        stream: Stream,
        co_resident: bool = False,
        per_sm: int = 1,
    ) -> None:
        rank = stream.rank
        for name, value in args.items():
            self.track(name, value, rank)
        args = dict(args)
        states = [value.state for value in args.values() if isinstance(value, BlockChannel)]
        for state in states:
            self.launched[state.data_ptr()] += 1
        bound = interpret.bind(kernel, args)
        count = grid[0] * grid[1] * grid[2]
        body = self.machine.programs.interpreted(kernel)
        given, earlier = self.given[rank], self.launches[rank, kernel.fn]
        earlier.append(given)
        number, fits = len(earlier), co_resident or count <= self.machine.sm_count * per_sm

        def do() -> None:
            if count == 0:
                return
            now = stream.task.time
            run = KernelRun(
                kernel, body, bound, grid, stream, count, now, now, number, given, co_resident, per_sm, fits
            )
            self._number(run, states)
            if co_resident:
                for at in range(count):
                    run.started += 1
                    self._start_program(run, at, now, [1])
            else:
                self.pending[rank].append(run)
                self._dispatch(rank)
            while run.left:
                self.machine.block(f"the end of {kernel.__name__}")
            stream.task.join(run.clock)
            stream.task.time = run.ended
            for held in (args, bound, states):  # held until here: the kernel's tensors
                held.clear()

        self.enqueue(stream, kernel.__name__, do)

    def _number(self, run: KernelRun, states: list[torch.Tensor]) -> None:
        """Which call a launch is, by its channels' words, and whether the launch before it left them as they were."""
        for state in states:
            call, done, key = int(state[CALLS.value]) + 1, int(state[DONE.value]), (run.kernel.fn, state.data_ptr())
            run.call, before = run.call or call, self.running.get(key)
            if before is not None and not before.left and before.call == call:
                why = f"end_call counts {done} programs so far" if done else "no end_call"
                run.uncounted = f"launch {run.number}, but the call number is still {call}: {why}"
            self.running[key] = run

    def launch_of(self, owner: Owner, kernel: JITFunction) -> int:
        """The number of a launch of the kernel, or of the first that comes after an operation of another kind."""
        return bisect.bisect_left(self.launches[owner.rank, kernel.fn], owner.given) + 1

    def track(self, name: str, value: object, rank: int) -> None:
        """Register every tensor of an argument (`name` empty: it keeps the name it has)."""
        if isinstance(value, torch.Tensor):
            region = self.machine.memory.find(value.data_ptr(), value.data_ptr() + 1) if value.numel() else None
            if region is not None and not region.storage.expired():
                rank = region.rank
            self.machine.memory.register(value, name, rank)
        elif isinstance(value, TensorDescriptor):
            self.track(name, value.base, rank)
        elif isinstance(value, tuple):
            names = getattr(value, "_fields", range(len(value)))
            for key, part in zip(names, value, strict=True):
                self.track(f"{name}.{key}", part, rank)

    def _dispatch(self, rank: int) -> None:
        """Make programs resident while the rank has free slots."""
        free, pending = self.free[rank], self.pending[rank]
        if free:
            for task in self.crowded[rank]:
                task.time = max(task.time, min(free))
                self.machine.wake(task)
            self.crowded[rank].clear()
        while free and pending:
            run = pending[0] if len(pending) == 1 else self.machine.rng.choice(pending)
            first, count = run.started, run.grid[0] * run.grid[1] * run.grid[2]
            run.started = min(first + run.per_sm, count)
            if run.started == count:
                pending.remove(run)
            since = min(free)
            free.remove(since)
            sharing = [run.started - first]
            for at in range(first, run.started):
                self._start_program(run, at, max(since, run.begun), sharing)

    def _room(self, stream: Stream, what: str) -> None:
        """Library work runs on SMs: while others hold them all it cannot begin. Once one is free it can, before
        programs that come later; it ends whatever others do, so it needs no slot of its own."""
        rank = stream.rank
        if not self.free[rank]:
            held = ", ".join(t.name for t in self.resident[rank])
            self.crowded[rank].append(stream.task)
            self.machine.block(f"an SM for {what}: all {self.machine.sm_count} slots of the rank are held by {held}")

    def _start_program(self, run: KernelRun, at: int, time: float, sharing: list[int]) -> None:
        """Start one program. sharing: how many programs of its slot have not ended."""
        stream = run.stream
        rank, kernel = stream.rank, run.kernel.__name__
        key = (rank, stream.name, at)
        bulk, atom = (self.machine.slot((agent, *key), rank) for agent in ("bulk", "atom"))
        self.machine.widen(stream.task)
        name = f"rank {rank} {kernel}[{at}]"
        track = kernel if stream.name == "main" else f"{kernel} ({stream.name})"  # one kernel may run beside itself
        task = self.machine.task(name, rank, "program", f"{track}:{at}", key, stream.task.clock)
        task.run, task.grid, task.time, task.begun = run, run.grid, time, time
        owner = Owner(task.told, rank, run, run.given)
        self.machine.owners[task.slot][-1] = (task.own, owner)
        for slot in (bulk, atom, task.slot):
            self.machine.programs_of[slot] = task.slot
        task.settled = task.own
        x, rest = at % run.grid[0], at // run.grid[0]
        task.index = (x, rest % run.grid[1], rest // run.grid[1])
        for slot in (bulk, atom):
            self.machine.clocks[slot] += 1
            self.machine.owners[slot].append((self.machine.clocks[slot], owner))
        task.bulk_slot, task.bulk_clock = bulk, self.machine.clocks[bulk]
        task.atom_slot, task.atom_clock = atom, self.machine.clocks[atom]
        task.fence()
        task.start = task.bulk_view
        self.resident[rank].append(task)
        self.machine.report.programs += 1

        def body() -> None:
            try:
                with np.errstate(all="ignore"):  # a kernel's NaN and infinity are its own business
                    run.body(**run.args)
            except GreenletExit:
                raise
            except BaseException as error:
                error.add_note(f"in {name} (seed {self.machine.seed})")
                if isinstance(error, (AttributeError, TypeError, ValueError)):
                    error.add_note(f"launched with {', '.join(map(_described, run.args.items()))}")
                raise
            task.clock[bulk], task.clock[atom] = task.bulk_clock, task.atom_clock
            run.clock = merged(run.clock, task.clock)
            run.ended = max(run.ended, task.time)
            run.left -= 1
            self.machine.span(task, kernel, "compute", task.begun)
            self.resident[rank].remove(task)
            sharing[0] -= 1
            if not run.co_resident and not sharing[0]:
                self.free[rank].append(task.time)
            if run.left == 0:
                self.machine.wake(stream.task)
            self._dispatch(rank)

        self.machine.start(task, body)

    def whole(self, tensor: torch.Tensor, kind: int) -> None:
        """An access to all of a tensor by the current stream."""
        if tensor.numel() == 0:
            return
        size = tensor.element_size()
        strides = tuple(s * size for s in tensor.stride())
        lo, hi, at = extent(tensor.data_ptr(), tensor.shape, strides, size)
        region = self.machine.region(lo, hi, kind)
        if self.machine.races:
            self.machine.touch(region, region.shadow(at - region.base, tuple(tensor.shape), strides, size), kind)

    def changed(self, tensor: torch.Tensor) -> None:
        """New contents: whoever waits for a word in it looks again."""
        if tensor.numel():
            size = tensor.element_size()
            lo, hi, _ = extent(tensor.data_ptr(), tensor.shape, [s * size for s in tensor.stride()], size)
            self.machine.range_changed(lo, hi, self.machine.region(lo, hi, WRITE))

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
                self.machine.pause()
                self.whole(part, READ)
                self.whole(to, WRITE)
                to.copy_(part)
                task.time += to.numel() * to.element_size() * LINK
                self.changed(to)
            self.machine.span(task, "copy", "copy", start)

        self.enqueue(stream, f"copy of {list(src.shape)}", do)

    def call(
        self, fn: Callable[[], object], reads: Sequence[torch.Tensor], writes: Sequence[torch.Tensor], stream: Stream
    ) -> None:
        fn, reads, writes = bound(fn), list(reads), list(writes)
        for t in (*reads, *writes):
            self.track("", t, stream.rank)
        name = getattr(fn, "__name__", "call")

        def do() -> None:
            task = stream.task
            start = task.time
            self.machine.pause()
            self._room(stream, name)
            for t in reads:
                self.whole(t, READ)
            fn()
            for t in writes:
                self.whole(t, WRITE)
                self.changed(t)
            task.time += _call_time(reads, writes, self.machine.sm_count)
            self.machine.pause()
            self.machine.span(task, name, "call", start)

        self.enqueue(stream, f"call of {name}", do)

    def signal(self, word: torch.Tensor, value: torch.Tensor, stream: Stream) -> None:
        self.track("", word, stream.rank)
        self.track("", value, stream.rank)

        def do() -> None:
            task = stream.task
            self.machine.pause()
            self.whole(value, READ)
            address = word.data_ptr()
            self.machine.word(address, ATOMIC_WRITE)
            word.copy_(value)
            self.machine.release(task, address, True, True, True)
            self.machine.word_changed(address)
            task.advance()

        self.enqueue(stream, "signal", do)

    def wait(self, word: torch.Tensor, value: torch.Tensor, stream: Stream) -> None:
        self.track("", word, stream.rank)
        self.track("", value, stream.rank)

        def do() -> None:
            self.whole(value, READ)
            self.machine.await_word(word.data_ptr(), int(value.item()), -1, -1, True)

        self.enqueue(stream, "wait", do)

    def meet(
        self,
        kind: str,
        stream: Stream,
        signature: tuple[Hashable, ...] = (),
        reads: Sequence[torch.Tensor] = (),
        writes: Sequence[torch.Tensor] = (),
        work: Callable[[list[Arrival]], None] | None = None,
        hears: Sequence[int] | None = None,
        on: str | None = None,
        among: Ranks = (),
    ) -> None:
        """A barrier of the streams of the ranks `among`, or a collective; the last to come does its work. hears: those
        of them whose data this one gets, all by default. on: the communicator, whose collectives go one after another,
        on whatever streams.

        It orders a rank behind what those had done when they came, but not behind its end on them: their part may still
        go on when this rank's has ended, so each rank's own stream makes its reads and writes."""
        rank = stream.rank
        number = self.met[among, rank]
        self.met[among, rank] += 1
        meetings = self.meetings[among]
        if number == len(meetings):
            meetings.append(Meeting(among, number, kind, signature, rank))
        meeting = meetings[number]
        if (meeting.kind, meeting.signature) != (kind, signature):
            raise Mismatch(
                f"collective {number}: rank {rank} calls {kind}{list(signature)}, "
                f"rank {meeting.first} calls {meeting.kind}{list(meeting.signature)}"
            )
        for t in (*reads, *writes):
            self.track("", t, rank)
        moves = any(t.numel() for t in (*reads, *writes))
        before = None
        if moves:
            before, self.latest[rank, among, on] = self.latest.get((rank, among, on)), meeting
        heard = range(len(among)) if hears is None else hears

        def do() -> None:
            task = stream.task
            self.machine.pause()
            while before is not None and not before.done:
                before.next.append(task)
                self.machine.block(before)
            if moves:
                self._room(stream, kind)
            meeting.arrived[rank] = Arrival(task, reads, writes, heard)
            if len(meeting.arrived) < len(among):
                while not meeting.done:
                    self.machine.block(meeting)
                return
            self._held(meeting, task, work)

        self.enqueue(stream, kind, do)

    def _held(self, meeting: Meeting, task: Task, work: Callable[[list[Arrival]], None] | None) -> None:
        """Its ranks have all come to the meeting, `task` the last of them: what it is for, and everybody goes on."""
        kind = meeting.kind
        parts = [meeting.arrived[r] for r in meeting.ranks]
        came = [part.task.clock.copy() for part in parts]
        last = max((part.task for part in parts), key=lambda t: t.time)
        end = begun = last.time
        for part in parts:
            part.task.advance()
            for r in part.hears:
                part.task.join(came[r])
            end += self._moves(part)
        if work is not None:
            work(parts)
        meeting.done = True
        for part in parts:
            other = part.task
            self.machine.waited(other, begun, kind, (last.rank, last.track))
            start, other.time = other.time, end
            self.machine.span(other, kind, "copy", start)
            if other is not task:
                self.machine.wake(other)
        for other in meeting.next:
            self.machine.wake(other)

    def _moves(self, part: Arrival) -> float:
        """A rank's reads and writes in a collective, and the time that they take."""
        me, self.machine.current = self.machine.current, part.task
        try:
            for kind, tensors in ((READ, part.reads), (WRITE, part.writes)):
                for t in tensors:
                    self.whole(t, kind)
        finally:
            self.machine.current = me
        return sum(t.numel() * t.element_size() for t in (*part.reads, *part.writes)) * LINK

    def exchange(self, rank: int, obj: R, among: Ranks) -> list[R]:
        """All-gather an object on the hosts of the ranks `among`, of which `rank` is one."""
        number = self.exchanged[among, rank]
        self.exchanged[among, rank] += 1
        exchanges = self.exchanges[among]
        if number == len(exchanges):
            exchanges.append({})
        table = exchanges[number]
        host = self.machine.current
        table[rank] = obj
        if len(table) < len(among):
            while len(table) < len(among):
                missing = sorted(set(among) - set(table))
                self.machine.block(f"exchange {number}, which ranks {missing} have not called")
        else:
            others = [other for r in among if (other := self.machine.hosts[r]) is not host]
            for other in others:
                host.join(other.clock)
            for other in others:
                other.join(host.clock)
                self.machine.wake(other)
        return [cast(R, table[r]) for r in among]


def _described(argument: tuple[str, object]) -> str:
    """A kernel's argument by its type, or its value where it is plain."""
    name, value = argument
    if isinstance(value, tl.tensor):
        return f"{name}: {value.type}"
    return (
        f"{name}: {type(value).__name__}" if isinstance(value, (tuple, tl.tensor_descriptor)) else f"{name}={value!r}"
    )


def bound(fn: Callable[[], object]) -> Callable[[], object]:
    """`fn` with its free variables as they are now: on a GPU it is called at once, here in the stream's turn."""
    if (
        not isinstance(fn, FunctionType)
        or fn.__closure__ is None
        or "STORE_DEREF" in {i.opname for i in dis.get_instructions(fn)}
    ):
        return fn
    cells = tuple(CellType(cell.cell_contents) for cell in fn.__closure__)
    return FunctionType(fn.__code__, fn.__globals__, fn.__name__, fn.__defaults__, cells)


_HOST_SIDE = (
    "weft/lang/host.py",
    "weft/emulator/streams.py",
    "weft/backends/emulated.py",
    "weft/world.py",
)


def call_site() -> tuple[str, int]:
    """(file, line) of the op or user code that gave a World an operation."""
    frame = sys._getframe(1)
    while frame.f_back is not None and frame.f_code.co_filename.endswith(_HOST_SIDE):
        frame = frame.f_back
    return frame.f_code.co_filename, frame.f_lineno


def _call_time(reads: Sequence[torch.Tensor], writes: Sequence[torch.Tensor], sms: int) -> float:
    """Bytes, or the work of a matrix product where the sizes are those of one (|A| |B| |C| = (M N K)^2)."""
    nbytes = sum(t.numel() * t.element_size() for t in (*reads, *writes))
    out = nbytes / 1000 / sms
    if len(reads) >= 2 and writes:
        out = max(out, 2 * (reads[0].numel() * reads[1].numel() * writes[0].numel()) ** 0.5 * FLOPS / sms)
    return out


def fresh(nbytes: int, alignment: int, poison: bool) -> tuple[torch.Tensor, int]:
    """Allocate bytes between two untracked margins; return the memory and where the bytes begin in it."""
    raw = torch.zeros(nbytes + 3 * alignment, dtype=torch.uint8)
    at = alignment + -(raw.data_ptr() + alignment) % alignment
    if poison and nbytes:
        raw[at : at + nbytes] = torch.from_numpy(np.tile(memory.POISON, nbytes // 2 + 1)[:nbytes])
    return raw, at
