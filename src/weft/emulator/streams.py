"""The operations that host code enqueues on a rank's streams, and the way in which they run: launches, copies, calls,
signals, events, collectives.

An operation starts with the clock that its host task had when it was enqueued. The operation runs when its stream
reaches it, and ends before the stream's next operation begins. A launch keeps its stream busy until all its programs
have ended. At most `sm_count` programs of all streams of a rank together are resident at once.
"""

from __future__ import annotations

import bisect
import dis
import sys
from collections import Counter, defaultdict
from collections.abc import Callable, Hashable, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
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
from ..symmetric import Reads
from . import interpret
from .bounds import Extent
from .memory import MAYBE_UNWRITTEN, READ, WRITE
from .ran import Function
from .tasks import (
    Arrival,
    Collective,
    CountedWrites,
    EmulatedEvent,
    EmulatedStream,
    KernelRun,
    Owner,
    Task,
    merged,
)

if TYPE_CHECKING:
    from .machine import Machine

R = TypeVar("R")
WorldRanks = tuple[int, ...]  # the machine's ranks that form a World


class Streams:
    """The streams of all ranks."""

    def __init__(self, machine: Machine) -> None:
        self.machine = machine
        size = machine.size
        self.streams: dict[tuple[int, str], EmulatedStream] = {}
        self.pending: list[list[KernelRun]] = [[] for _ in range(size)]
        # For each rank, the times since which its free SMs have been free.
        self.free = [[0.0] * machine.sm_count for _ in range(size)]
        self.calls_end = [0.0] * size  # the time at which each rank's last library call ended
        self.resident: list[list[Task]] = [[] for _ in range(size)]
        self.waiting_for_sm: list[list[Task]] = [[] for _ in range(size)]  # streams with library work but no free SM
        self.current: list[EmulatedStream | None] = [None] * size  # by rank; None: the main stream
        self.collectives: dict[WorldRanks, list[Collective]] = defaultdict(list)
        self.collective_counts: Counter[tuple[WorldRanks, int]] = Counter()
        # The last collective that was enqueued, by rank and communicator.
        self.latest: dict[tuple[int, WorldRanks, str | None], Collective] = {}
        self.exchanges: dict[WorldRanks, list[dict[int, object]]] = defaultdict(list)
        self.exchanged: Counter[tuple[WorldRanks, int]] = Counter()
        self.enqueued = [0] * size  # the number of operations that each rank's host code has enqueued
        self.launches: dict[tuple[int, Function], list[int]] = defaultdict(list)  # enqueue indices by rank and kernel
        self.launched: Counter[int] = Counter()  # launches by the address of a channel's state
        # The last launch that began, by kernel and address of a channel's state.
        self.running: dict[tuple[Function, int], KernelRun] = {}

    @property
    def idle(self) -> bool:
        return all(s.idle for s in self.streams.values())

    def idle_on(self, rank: int) -> bool:
        """Return whether the streams of a rank have no work left."""
        return all(s.idle for (stream_rank, _), s in self.streams.items() if stream_rank == rank)

    def clear(self) -> None:
        for stream in self.streams.values():
            stream.queue.clear()

    def stream(self, rank: int, name: str) -> EmulatedStream:
        """Return the rank's stream of that name, created on first use."""
        if (rank, name) not in self.streams:
            task = self.machine.task(
                f"rank {rank} stream {name}", rank, "stream", f"stream:{name}", ("stream", rank, name)
            )
            task.bulk_view = task.clock
            stream = self.streams[rank, name] = EmulatedStream(rank, name, task)
            self.machine.start(task, lambda: self._serve(stream))
            self.machine.unready(task)
        return self.streams[rank, name]

    def current_stream(self, rank: int) -> EmulatedStream:
        return self.current[rank] or self.stream(rank, "main")

    def _serve(self, stream: EmulatedStream) -> None:
        """Run the stream's operations in order, as the body of the stream's task."""
        task = stream.task
        while True:
            while not stream.queue:
                for waiter in stream.finishers:
                    self.machine.wake(waiter)
                stream.finishers.clear()
                self.machine.block("idle")
            do, clock, time, owner = stream.queue.popleft()
            stream.busy = owner.name
            self.machine.owners[task.agent].append((task.tick, owner))
            task.join(clock)
            task.time = max(task.time, time)
            try:
                do()
            except GreenletExit:
                raise
            except BaseException as error:
                error.add_note(f"in {owner.name} (seed {self.machine.seed})")
                raise
            del do  # also frees the operation's tensors
            task.advance()
            stream.busy = ""
            self.machine.progress += 1

    def enqueue(self, stream: EmulatedStream, text: str, do: Callable[[], None]) -> None:
        """Append an operation to the stream's queue, with the host's clock; `text` describes it in reports."""
        host = self.machine.hosts[stream.rank]
        file, line = call_site()
        owner = Owner(
            f"{stream.task.name}, {text} at {file}:{line}", stream.rank, enqueue_index=self.enqueued[stream.rank]
        )
        self.enqueued[stream.rank] += 1
        stream.queue.append((do, host.clock.copy(), host.time, owner))
        if stream.task.waits == "idle" or stream.task.waits is None:
            if not stream.busy:
                self.machine.wake(stream.task)
        self.machine.pause()

    def finish(self, stream: EmulatedStream) -> None:
        """Block the host until the stream is drained. On a GPU `finish` does nothing, so here it adds no happens-before
        edge."""
        host = self.machine.current
        while not stream.idle:
            stream.finishers.append(host)
            self.machine.block(f"the end of stream {stream.name} of rank {stream.rank}")
        host.time = max(host.time, stream.task.time)

    def torch_operation(
        self, rank: int, name: str, reads: Sequence[torch.Tensor], writes: Sequence[torch.Tensor], numbers: bool
    ) -> None:
        """Run the host's torch operation in the order of the rank's current stream: enqueue its accesses, and block
        until the stream has executed them. numbers: the operation returns numbers to the host, and so orders the host
        after the stream."""
        stream = self.current_stream(rank)

        def do() -> None:
            for kind, tensors in ((READ | MAYBE_UNWRITTEN, reads), (WRITE, writes)):
                for t in tensors:
                    self.access_all(t, kind)

        self.enqueue(stream, name, do)
        self.finish(stream)
        if numbers:
            self.machine.current.join(stream.task.clock)

    def written_by_torch(self, rank: int, tensors: Sequence[torch.Tensor]) -> None:
        """Track the results of a torch operation, which the rank's current stream has written."""
        previous, self.machine.current = self.machine.current, self.current_stream(rank).task
        try:
            for t in tensors:
                self.track("", t, rank)
                self.access_all(t, WRITE)
        finally:
            self.machine.current = previous

    def synchronize(self, rank: int) -> None:
        """Block the host until all the rank's streams are drained, and order the host after them."""
        host = self.machine.current
        for stream in [s for (r, _), s in self.streams.items() if r == rank]:
            self.finish(stream)
            host.join(stream.task.clock)

    def record_event(self, stream: EmulatedStream) -> EmulatedEvent:
        """Enqueue the recording of a new event, with the stream's clock at that point."""
        event = EmulatedEvent(text=f"an event of stream {stream.name} of rank {stream.rank}")

        def do() -> None:
            task = stream.task
            event.done, event.clock, event.time = True, task.clock.copy(), task.time
            event.releaser = (task.rank, task.track)
            for waiter in event.waiters:
                self.machine.wake(waiter)
            event.waiters.clear()

        self.enqueue(stream, "record", do)
        return event

    def wait_event(self, stream: EmulatedStream, event: EmulatedEvent, orders_memory: bool = True) -> None:
        """Enqueue a wait of the stream for the event."""

        def do() -> None:
            task = stream.task
            while not event.done:
                event.waiters.append(task)
                self.machine.block(event.text)
            assert event.clock is not None
            if orders_memory:
                task.join(event.clock)
            self.machine.waited(task, event.time, event.text, event.releaser)

        self.enqueue(stream, "wait_event", do)

    def launch(
        self,
        kernel: JITFunction,
        grid: tuple[int, int, int],
        args: Mapping[str, object],
        stream: EmulatedStream,
        co_resident: bool = False,
        per_sm: int = 1,
        warps: int = 4,
    ) -> None:
        """Enqueue a launch. co_resident: the launch's programs become resident at once, and occupy no SM that other
        programs need. per_sm: the number of programs that share an SM. warps: the number of warps of a program."""
        rank = stream.rank
        for name, value in args.items():
            self.track(name, value, rank)
        args = dict(args)
        states = [value.state for value in args.values() if isinstance(value, BlockChannel)]
        for state in states:
            self.launched[state.data_ptr()] += 1
        bound = interpret.bind(kernel, args)
        body = self.machine.programs.interpreted(kernel)
        index, earlier = self.enqueued[rank], self.launches[rank, kernel.fn]
        earlier.append(index)
        run = KernelRun(kernel, body, bound, grid, stream, len(earlier), index, co_resident, per_sm, warps)

        def do() -> None:
            if run.programs == 0:
                return
            run.begun = run.ended = stream.task.time
            run.left = run.programs
            self._number(run, states)
            if co_resident:
                for pid in range(run.programs):
                    run.started += 1
                    self._start_program(run, pid, run.begun, [1])
            else:
                self.pending[rank].append(run)
                self._dispatch(rank)
            while run.left:
                self.machine.block(f"the end of {kernel.__name__}")
            stream.task.join(run.clock)
            stream.task.time = run.ended
            for references in (args, bound, states):  # these references keep the kernel's tensors alive until here
                references.clear()

        self.enqueue(stream, kernel.__name__, do)

    def _number(self, run: KernelRun, states: list[torch.Tensor]) -> None:
        """Set `run.call`, the number of the call according to its channels' state, and set `run.uncounted` if the
        previous launch did not count its call."""
        for state in states:
            call, done, key = int(state[CALLS.value]) + 1, int(state[DONE.value]), (run.kernel.fn, state.data_ptr())
            run.call, before = run.call or call, self.running.get(key)
            if before is not None and not before.left and before.call == call:
                why = f"end_call counts {done} programs so far" if done else "no end_call"
                run.uncounted = f"launch {run.number}, but the call number is still {call}: {why}"
            self.running[key] = run

    def launch_of(self, owner: Owner, kernel: JITFunction) -> int:
        """Return the number of the owner's launch of the kernel or, for another operation, the number of the kernel's
        next launch."""
        return bisect.bisect_left(self.launches[owner.rank, kernel.fn], owner.enqueue_index) + 1

    def track(self, name: str, value: object, rank: int) -> None:
        """Register every tensor of an argument under `name`; with an empty name each tensor keeps its current name."""
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
        """Make programs resident while the rank has free SMs."""
        free, pending = self.free[rank], self.pending[rank]
        if free:
            for task in self.waiting_for_sm[rank]:
                task.time = max(task.time, min(free))
                self.machine.wake(task)
            self.waiting_for_sm[rank].clear()
        while free and pending:
            run = pending[0] if len(pending) == 1 else self.machine.rng.choice(pending)
            first_pid = run.started
            run.started = min(first_pid + run.per_sm, run.programs)
            if run.started == run.programs:
                pending.remove(run)
            free_since = min(free)
            free.remove(free_since)
            running = [run.started - first_pid]
            for pid in range(first_pid, run.started):
                self._start_program(run, pid, max(free_since, run.begun), running)

    def _wait_for_free_sm(self, stream: EmulatedStream, work: str) -> None:
        """Block until the rank has a free SM on which library work can begin. The work occupies no SM that programs
        need, because it ends independently of them."""
        rank = stream.rank
        if not self.free[rank]:
            held = ", ".join(t.name for t in self.resident[rank])
            self.waiting_for_sm[rank].append(stream.task)
            self.machine.block(f"an SM for {work}: all {self.machine.sm_count} SMs of the rank are held by {held}")

    def _start_program(self, run: KernelRun, pid: int, time: float, running_on_sm: list[int]) -> None:
        """Start program `pid` of a launch. running_on_sm: a one-element list with the number of running programs on the
        program's SM."""
        stream = run.stream
        rank, kernel = stream.rank, run.kernel.__name__
        key = (rank, stream.name, pid)
        bulk_agent, atomic_agent = (self.machine.agent((agent, *key), rank) for agent in ("bulk", "atom"))
        self.machine.widen(stream.task)
        name = f"rank {rank} {kernel}[{pid}]"
        track = kernel if stream.name == "main" else f"{kernel} ({stream.name})"  # two launches of a kernel may overlap
        task = self.machine.task(name, rank, "program", f"{track}:{pid}", key, stream.task.clock)
        task.run, task.grid, task.time, task.begun = run, run.grid, time, time
        owner = Owner(task.report_name, rank, run, run.enqueue_index)
        self.machine.owners[task.agent][-1] = (task.tick, owner)
        for agent in (bulk_agent, atomic_agent, task.agent):
            self.machine.program_of_agent[agent] = task.agent
        task.flushed = task.tick
        x, rest = pid % run.grid[0], pid // run.grid[0]
        task.index = (x, rest % run.grid[1], rest // run.grid[1])
        for agent in (bulk_agent, atomic_agent):
            self.machine.clocks[agent] += 1
            self.machine.owners[agent].append((self.machine.clocks[agent], owner))
        task.bulk_agent, task.bulk_clock = bulk_agent, self.machine.clocks[bulk_agent]
        task.atomic_agent, task.atomic_clock = atomic_agent, self.machine.clocks[atomic_agent]
        task.fence()
        task.start = task.bulk_view
        self.resident[rank].append(task)
        self.machine.report.programs += 1

        def body() -> None:
            try:
                with np.errstate(all="ignore"):  # numpy must not warn about NaN and infinity in a kernel
                    run.body(**run.args)
            except GreenletExit:
                raise
            except BaseException as error:
                error.add_note(f"in {name} (seed {self.machine.seed})")
                if isinstance(error, (AttributeError, TypeError, ValueError)):
                    error.add_note(f"launched with {', '.join(map(_described, run.args.items()))}")
                raise
            task.clock[bulk_agent], task.clock[atomic_agent] = task.bulk_clock, task.atomic_clock
            for clock in (task.clock, task.later, task.at_end):
                run.clock = run.clock if clock is None else merged(run.clock, clock)
            run.ended = max(run.ended, task.time)
            run.left -= 1
            self.machine.span(task, kernel, "compute", task.begun)
            self.resident[rank].remove(task)
            running_on_sm[0] -= 1
            if not run.co_resident and not running_on_sm[0]:
                self.free[rank].append(task.time)
            if run.left == 0:
                self.machine.wake(stream.task)
            self._dispatch(rank)

        self.machine.start(task, body)

    def access_all(self, tensor: torch.Tensor, kind: int) -> None:
        """Record an access of the current stream to the whole tensor."""
        if tensor.numel() == 0:
            return
        block = Extent.of_tensor(tensor, "")
        region = self.machine.region(block.lo, block.end, kind)
        if self.machine.races:
            states = region.shadow(block.lo - region.base, block.shape, block.strides, block.size)
            self.machine.touch(region, states, kind)

    def changed(self, tensor: torch.Tensor) -> None:
        """Wake the tasks that wait for a word in a tensor, after its contents have changed."""
        if tensor.numel():
            block = Extent.of_tensor(tensor, "")
            self.machine.range_changed(block.lo, block.end, self.machine.region(block.lo, block.end, WRITE))

    def _rank_of(self, tensor: torch.Tensor) -> int | None:
        """Return the rank whose memory contains a tensor, or None if the memory is not tracked."""
        region = self.machine.memory.find(tensor.data_ptr(), tensor.data_ptr() + 1)
        return None if region is None else region.rank

    def copy(self, dst: torch.Tensor, src: torch.Tensor, stream: EmulatedStream) -> None:
        """Enqueue a copy in up to four chunks; other tasks may run between two chunks."""
        self.track("", dst, stream.rank)
        self.track("", src, stream.rank)
        counted = CountedWrites([dst])

        def do() -> None:
            task, costs = stream.task, self.machine.costs
            start, local = task.time, self._rank_of(dst) == self._rank_of(src)
            per_byte = costs.product(0, 2, self.machine.sm_count) if local else costs.link
            count = min(4, dst.shape[0]) if dst.ndim else 1
            chunks = [(dst, src)]
            if count > 1:
                chunks = list(zip(dst.tensor_split(count), src.tensor_split(count), strict=True))
            for dst_chunk, src_chunk in chunks:
                self.machine.pause()
                self.access_all(src_chunk, READ)
                self.access_all(dst_chunk, WRITE)
                with counted.kept():
                    dst_chunk.copy_(src_chunk)
                task.time += dst_chunk.nbytes * per_byte
                self.changed(dst_chunk)
            self.machine.span(task, "copy", "copy", start)

        self.enqueue(stream, f"copy of {list(src.shape)}", do)

    def call(
        self,
        fn: Callable[[], object],
        reads: Reads,
        writes: Sequence[torch.Tensor],
        stream: EmulatedStream,
    ) -> None:
        """Enqueue a library call that reads and writes these tensors (`Backend.call`)."""
        fn, reads, writes = bound(fn), list(reads), list(writes)
        for t in (*reads, *writes):
            self.track("", t, stream.rank)  # a function has no memory to register yet
        name = getattr(fn, "__name__", "call")
        counted = CountedWrites(writes)

        def do() -> None:
            task = stream.task
            start = task.time
            self.machine.pause()
            self._wait_for_free_sm(stream, name)
            read = [t() if callable(t) else t for t in reads]
            for t in read:
                self.access_all(t, READ)
            with counted.kept():
                fn()
            for t in writes:
                self.access_all(t, WRITE)
                self.changed(t)
            start = task.time = max(start, self.calls_end[stream.rank])  # a library call uses all SMs
            self.calls_end[stream.rank] = task.time = start + self._call_time(read, writes)
            self.machine.pause()
            self.machine.span(task, name, "call", start)

        self.enqueue(stream, f"call of {name}", do)

    def signal(self, word: torch.Tensor, value: torch.Tensor, stream: EmulatedStream) -> None:
        """Enqueue a release-store of `value` to `word`."""
        self.track("", word, stream.rank)
        self.track("", value, stream.rank)

        def do() -> None:
            self.machine.pause()
            self.access_all(value, READ)
            self.machine.store_word(word.data_ptr(), int(value.item()))

        self.enqueue(stream, "signal", do)

    def wait(self, word: torch.Tensor, value: torch.Tensor, stream: EmulatedStream) -> None:
        """Enqueue a wait (acquire) until `word` has reached `value`."""
        self.track("", word, stream.rank)
        self.track("", value, stream.rank)

        def do() -> None:
            self.access_all(value, READ)
            self.machine.await_word(word.data_ptr(), int(value.item()), -1, -1, True)

        self.enqueue(stream, "wait", do)

    def _call_time(self, reads: Sequence[torch.Tensor], writes: Sequence[torch.Tensor]) -> float:
        """Return the virtual time of a library call. The time follows from its FLOPs if the sizes fit a matrix product
        (|A| |B| |C| = (M N K)^2), and otherwise from its bytes."""
        product = len(reads) >= 2 and len(writes) > 0
        flops = 2 * (reads[0].numel() * reads[1].numel() * writes[0].numel()) ** 0.5 if product else 0.0
        nbytes = sum(t.nbytes for t in (*reads, *writes))
        return self.machine.costs.product(flops, nbytes, self.machine.sm_count)

    def collective(
        self,
        kind: str,
        stream: EmulatedStream,
        signature: tuple[Hashable, ...] = (),
        reads: Sequence[torch.Tensor] = (),
        writes: Sequence[torch.Tensor] = (),
        work: Callable[[list[Arrival]], None] | None = None,
        sources: Sequence[int] | None = None,
        communicator: str | None = None,
        among: WorldRanks = (),
    ) -> None:
        """Enqueue a barrier or a collective of the streams of the ranks `among`; the last rank to arrive runs `work`.
        sources: the indices of the ranks whose data this rank receives, by default all ranks. communicator: the
        collectives of one communicator run one after another, even on different streams.

        A collective orders each rank after the work of its sources before they arrived, but not after the end of the
        collective on the sources. A source's part may still run when this rank's part has ended, so each rank's own
        stream makes the rank's reads and writes.
        """
        rank = stream.rank
        number = self.collective_counts[among, rank]
        self.collective_counts[among, rank] += 1
        collectives = self.collectives[among]
        if number == len(collectives):
            collectives.append(Collective(among, number, kind, signature, rank))
        collective = collectives[number]
        if (collective.kind, collective.signature) != (kind, signature):
            raise Mismatch(
                f"collective {number}: rank {rank} calls {kind}{list(signature)}, "
                f"rank {collective.first_rank} calls {collective.kind}{list(collective.signature)}"
            )
        for t in (*reads, *writes):
            self.track("", t, rank)
        moves = any(t.numel() for t in (*reads, *writes))
        before = None
        if moves:
            before, self.latest[rank, among, communicator] = self.latest.get((rank, among, communicator)), collective
        source_ranks = range(len(among)) if sources is None else sources
        counted = CountedWrites(writes)

        def do() -> None:
            task = stream.task
            self.machine.pause()
            while before is not None and not before.done:
                before.next.append(task)
                self.machine.block(before)
            if moves:
                self._wait_for_free_sm(stream, kind)
            collective.arrived[rank] = Arrival(task, reads, writes, source_ranks, counted)
            if len(collective.arrived) < len(among):
                while not collective.done:
                    self.machine.block(collective)
                return
            self._complete(collective, task, work)

        self.enqueue(stream, kind, do)

    def _complete(self, collective: Collective, task: Task, work: Callable[[list[Arrival]], None] | None) -> None:
        """Run a collective after all its ranks have arrived, with `task` as the last one, and wake the other ranks'
        tasks."""
        kind = collective.kind
        arrivals = [collective.arrived[r] for r in collective.ranks]
        clocks = [arrival.task.clock.copy() for arrival in arrivals]
        last = max((arrival.task for arrival in arrivals), key=lambda t: t.time)
        end = begun = last.time
        for arrival in arrivals:
            arrival.task.advance()
            for r in arrival.sources:
                arrival.task.join(clocks[r])
            others = [r for r in arrival.sources if collective.ranks[r] != arrival.task.rank]
            share = len(others) / max(1, len(arrival.sources))
            end = max(end, begun + share * self._access_tensors(kind, arrival))
        if work is not None:
            with ExitStack() as kept:
                for arrival in arrivals:
                    kept.enter_context(arrival.counted.kept())
                work(arrivals)
        collective.done = True
        for arrival in arrivals:
            waiting = arrival.task
            self.machine.waited(waiting, begun, kind, (last.rank, last.track))
            start, waiting.time = waiting.time, end
            self.machine.span(waiting, kind, "copy", start)
            if waiting is not task:
                self.machine.wake(waiting)
        for waiting in collective.next:
            self.machine.wake(waiting)

    def _access_tensors(self, collective: str, arrival: Arrival) -> float:
        """Record a rank's reads and writes in a collective. Return the time in which all the bytes of these reads and
        writes would cross the rank's link, in each direction."""
        previous, self.machine.current = self.machine.current, arrival.task
        try:
            for kind, tensors in ((READ, arrival.reads), (WRITE, arrival.writes)):
                for t in tensors:
                    self.access_all(t, kind)
        finally:
            self.machine.current = previous
        sent, received = (sum(t.nbytes for t in tensors) for tensors in (arrival.reads, arrival.writes))
        return (2 if collective == "all_reduce" else 1) * max(sent, received) * self.machine.costs.link

    def exchange(self, rank: int, obj: R, among: WorldRanks) -> list[R]:
        """All-gather an object on the hosts of the ranks `among`, which include `rank`."""
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
            peers = [host_of_peer for r in among if (host_of_peer := self.machine.hosts[r]) is not host]
            for host_of_peer in peers:
                host.join(host_of_peer.clock)
            for host_of_peer in peers:
                host_of_peer.join(host.clock)
                self.machine.wake(host_of_peer)
        return [cast(R, table[r]) for r in among]


def _described(argument: tuple[str, object]) -> str:
    """Return a kernel's argument as text: the value of a number or a string, and the type of any other argument."""
    name, value = argument
    if isinstance(value, tl.tensor):
        return f"{name}: {value.type}"
    return (
        f"{name}: {type(value).__name__}" if isinstance(value, (tuple, tl.tensor_descriptor)) else f"{name}={value!r}"
    )


def bound(fn: Callable[[], object]) -> Callable[[], object]:
    """Return `fn` with the current values of its free variables. On a GPU `fn` is called at once, but in the emulator
    only when the stream reaches it."""
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
    "weft/emulator/torch_order.py",
    "weft/emulator/streams.py",
    "weft/backends/base.py",
    "weft/backends/emulated.py",
    "weft/world.py",
)


_TORCH = str(Path(torch.__file__).parent)


def _host_side(file: str) -> bool:
    """Return whether a file belongs to the code between an op or user code and the streams."""
    return file.endswith(_HOST_SIDE) or "weft/check/torch_ranks/" in file or file.startswith(_TORCH)


def call_site() -> tuple[str, int]:
    """Return (file, line) of the op or user code that passed an operation to a World."""
    frame = sys._getframe(1)
    while frame.f_back is not None and _host_side(frame.f_code.co_filename):
        frame = frame.f_back
    return frame.f_code.co_filename, frame.f_lineno
