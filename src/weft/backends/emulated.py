"""Ranks run as greenlets on one CPU thread, in the emulator, for development, tests and teaching.

Streams and events are the emulator's; memory is CPU tensors. Memory from `empty` is NaN until it is written. `finish`
blocks the calling host task until the stream is drained, because the caller reads CPU memory directly. As on a GPU, it
does not order streams, so the emulator still finds a missing event. With `ahead`, `finish` does nothing, as on a GPU,
so an operator begins while earlier operators are still running.
"""

from __future__ import annotations

import functools
import logging
import math
import pickle
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from types import FunctionType
from typing import Any, TypeVar, cast

import numpy as np
import torch
from triton import JITFunction

from ..emulator import Machine, Report
from ..emulator.memory import POISON
from ..emulator.streams import call_site
from ..emulator.tasks import Arrival, EmulatedEvent, EmulatedStream
from ..errors import Mismatch, Unsupported, WeftError
from ..kernel_launch import Launch, Moved
from ..lang.host import check_copy
from ..lang.intrinsics import GUARD_WORDS
from ..lang.jit import Options, check_launch
from ..residency import Ledgers, Notes, Noting, ResidentPrograms, SMs
from ..scale import Scale
from ..symmetric import Reads, check_memory, check_tensors
from . import barrier
from .base import (
    Arguments,
    Backend,
    CallRecord,
    R,
    SymmetricTensor,
    sum_in_order,
)
from .nodes import numbered, placed, spread

B = TypeVar("B", bound=Backend)
ALIGN = 256
GAP = 1 << 20
# The seconds that an emulated rank needs for one multiply-add and for one element, on one core of a server (2026-11).
MULTIPLY_ADD, ELEMENT = 1.4e-7, 8e-6
# The emulator warns of a call that needs more than ANNOUNCED seconds, and proposes sizes that need at most PROPOSED
# seconds.
ANNOUNCED, PROPOSED = 60.0, 5.0
log = logging.getLogger("weft")


@dataclass(frozen=True, eq=False)
class _Symmetric(SymmetricTensor):
    """A symmetric tensor whose `addresses`, and whose views' `addresses`, come from `table_of`, which numbers tensors
    for the bounds check."""

    table_of: Callable[[Sequence[torch.Tensor]], torch.Tensor] = field(kw_only=True)

    def table(self, peers: Sequence[torch.Tensor], offset: int) -> torch.Tensor:
        return self.table_of(peers)


def _one_call_at_a_time(backend: type[B]) -> type[B]:
    """Make the backend's public methods run one at a time; host code calls them from any thread of the rank. If a call
    leaves work on a stream, later torch operations are ordered after that work (torch_order.py)."""

    def wrapped(method: Callable[..., R]) -> Callable[..., R]:
        @functools.wraps(method)
        def call(self: EmulatedBackend, *args: object, **options: object) -> R:
            host = self.machine.host_threads[self.machine_rank]
            with host.calling(), torch._C.DisableTorchFunction():  # torch's modes are for host code's own operations
                result = method(self, *args, **options)
            if not self._machine.ahead and host.on_rank_thread and not host.in_call:
                self._machine.torch_order[self.machine_rank].set(not self._machine.streams.idle_on(self.machine_rank))
            return result

        return call

    for name, method in list(vars(backend).items()):
        if isinstance(method, FunctionType) and not name.startswith("_"):
            setattr(backend, name, wrapped(method))
    return backend


@_one_call_at_a_time
class EmulatedBackend(Backend):
    """One rank of an emulated world, for any of its threads (`HostThread.calling`)."""

    name = "emulated"
    compares = compares_at_once = True

    def __init__(self, machine: Machine, machine_rank: int, ranks: tuple[int, ...], path: tuple[int, ...] = ()) -> None:
        """Create the backend of the machine's rank `machine_rank`, in a World of the machine's ranks `ranks`. path: the
        number of each split that led to this World. The path is the same on all these ranks, and identifies the
        World."""
        self._machine, self.machine_rank, self.ranks, self.path = machine, machine_rank, ranks, path
        self._splits = self._calls = 0
        self.rank, self.size = ranks.index(machine_rank), len(ranks)
        self.nodes = numbered([machine.nodes[rank] for rank in ranks])
        self.peers_unsupported = self.symmetric_unsupported = spread(self.nodes)
        self.device = torch.device("cpu")
        self.sm_count = machine.sm_count
        self.scale = Scale.for_programs(machine.sm_count)
        self._guard: torch.Tensor | None = None
        self.ledgers = machine.ledgers.setdefault(machine_rank, Ledgers(SMs(machine.sm_count, (1,))))
        self._noting = Noting()
        # The numbers are the same in every run, so a rank can reuse the code that torch.compile generated in an earlier
        # run.
        self.world_numbers = machine.world_numbers[machine_rank]

    @property
    def machine(self) -> Machine:
        """Return the machine of this run. Every operation calls this method, so that no operation runs after the end of
        the run."""
        if self._machine.ended:
            raise WeftError(
                f"rank {self.machine_rank}'s World belongs to an emulated run that has ended; use it in the function "
                "that is passed to spmd"
            )
        return self._machine

    # -- host --------------------------------------------------------------------------------------------------------
    def exchange(self, obj: R) -> list[R]:
        return [pickle.loads(data) for data in self._exchange(pickle.dumps(obj))]

    def _exchange(self, obj: R) -> list[R]:
        return self.machine.streams.exchange(self.machine_rank, obj, self.ranks)

    def split(self, groups: Sequence[Sequence[int]]) -> EmulatedBackend:
        group = next(group for group in groups if self.rank in group)
        self._splits += 1
        return EmulatedBackend(
            self.machine, self.machine_rank, tuple(self.ranks[r] for r in group), (*self.path, self._splits)
        )

    def compared(self, call: CallRecord) -> Mapping[int, CallRecord] | None:
        """Compare the call with the calls that other ranks have made so far. No rank waits, so hosts need not run in
        step."""
        self._calls += 1
        key = (self.path, self.ranks, self._calls)
        calls = cast(dict[int, CallRecord], self.machine.calls.setdefault(key, {}))
        calls[self.rank] = call
        if len(calls) == self.size:
            del self.machine.calls[key]
        return dict(sorted(calls.items())) if any(peer_call != call for peer_call in calls.values()) else None

    def synchronize(self) -> None:
        self.machine.streams.synchronize(self.machine_rank)
        self.check()

    def check(self) -> None:
        """Do nothing: the emulator's waits have no time limit, and a wait that cannot end is reported as a deadlock."""

    def left_out(self) -> int:
        return 0 if self._guard is None else int(self._guard[3])

    def left_out_by_rank(self) -> list[int]:
        return self.guard()[4:].tolist()

    def begins(self, op: str, sizes: tuple[int, int, int], multiply_adds: int) -> None:
        seconds = self.size * (multiply_adds * MULTIPLY_ADD + math.prod(sizes[:2]) * ELEMENT)
        if self.rank or seconds < ANNOUNCED:
            return
        smaller, left = list(sizes), seconds
        while left > PROPOSED:
            smaller[smaller.index(max(smaller))] //= 2
            left /= 2
        log.warning(
            "%s of M, N, K = %d, %d, %d takes about %s in the emulator; smaller sizes: %d, %d, %d take about %s",
            op, *sizes, _duration(seconds), *smaller, _duration(left),
        )  # fmt: skip

    # -- memory ------------------------------------------------------------------------------------------------------
    def _allocate(self, nbytes: int, name: str, granule: int, poison: bool) -> torch.Tensor:
        """Allocate bytes between two untracked margins."""
        raw = torch.zeros(nbytes + 3 * ALIGN, dtype=torch.uint8)
        start = ALIGN + -raw.data_ptr() % ALIGN
        flat = raw[start : start + nbytes]
        if poison and nbytes:
            flat.copy_(torch.from_numpy(np.resize(POISON, nbytes)))
        self.machine.memory.add(
            raw.data_ptr() + start, max(nbytes, 1), raw.untyped_storage(), name, self.machine_rank, granule, not poison
        ).node_local = True
        return flat

    def _copies(self, nbytes: int, name: str) -> tuple[torch.Tensor, ...]:
        """Allocate every rank's copy in one allocation, so that one descriptor spans all copies. The gap between two
        copies is larger than a copy, so an index past the end of one copy does not reach the next one."""
        step = 2 * (-(-nbytes // ALIGN) * ALIGN) + GAP
        raw = torch.empty(GAP + step * self.size + ALIGN, dtype=torch.uint8)  # untouched gaps occupy no memory
        start = GAP + -raw.data_ptr() % ALIGN
        copies = tuple(raw[start + r * step : start + r * step + nbytes] for r in range(self.size))
        for rank, copy in zip(self.ranks, copies, strict=True):
            copy.zero_()
            region = self.machine.memory.add(
                copy.data_ptr(), max(nbytes, 1), raw.untyped_storage(), name, rank, 4, True
            )
            region.node_local = True
        return copies

    def symmetric(self, nbytes: int, name: str) -> SymmetricTensor:
        if reason := spread(self.nodes):
            raise Unsupported(f"{name}: no symmetric memory: {reason}")
        copies = self._copies(nbytes, name) if self.rank == 0 else None
        peers = self._exchange(copies)[0]
        assert peers is not None  # rank 0 has allocated the copies
        local = peers[self.rank]
        starts = [t.data_ptr() for t in peers]
        window = self.machine.add_window(nbytes, starts)
        return _Symmetric(local, peers, self.table(peers, name), window, table_of=lambda peers: self.table(peers, name))

    def table(self, tensors: Sequence[torch.Tensor], name: str) -> torch.Tensor:
        """Return the addresses of tensors for a kernel, with their numbers (emulator/bounds.py)."""
        return self.tensor([self.machine.bounds.pointer(t, name) for t in tensors], torch.int64)

    def _typed(self, shape: Sequence[int], dtype: torch.dtype, poison: bool) -> torch.Tensor:
        shape = check_memory(shape, dtype)
        flat = self._allocate(math.prod(shape) * dtype.itemsize, "scratch", dtype.itemsize, poison)
        return flat.view(dtype).view(tuple(shape))

    def empty(self, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        return self._typed(shape, dtype, poison=True)

    def zeros(self, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        return self._typed(shape, dtype, poison=False)

    def tensor(self, values: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        values_tensor = torch.as_tensor(values, dtype=dtype)
        if values_tensor.dim() != 1:
            raise ValueError(f"World.tensor takes a list of numbers, not {values!r}")
        return self.zeros(values_tensor.shape, dtype).copy_(values_tensor)

    def guard(self) -> torch.Tensor:
        if self._guard is None:
            self._guard = self.zeros((GUARD_WORDS,), torch.int64)
            self._guard[0] = 1 << 62  # the emulator itself ends waits that can never be satisfied
        return self._guard

    # -- streams -----------------------------------------------------------------------------------------------------
    def current_stream(self) -> EmulatedStream:
        return self.machine.streams.current_stream(self.machine_rank)

    @contextmanager
    def on(self, stream: EmulatedStream) -> Iterator[None]:
        current = self.machine.streams.current
        before, current[self.machine_rank] = current[self.machine_rank], _stream(stream)
        try:
            yield
        finally:
            current[self.machine_rank] = before

    def side_stream(self, name: str, urgent: bool = True) -> EmulatedStream:
        part = "" if self.size == self.machine.size else f" of ranks {list(self.ranks)}"
        return self.machine.streams.stream(self.machine_rank, name + part)

    def side_streams(self) -> Sequence[EmulatedStream]:
        return [stream for (rank, _), stream in self.machine.streams.streams.items() if rank == self.machine_rank]

    def record(self, stream: EmulatedStream) -> EmulatedEvent:
        return self.machine.streams.record_event(_stream(stream))

    def wait_event(self, stream: EmulatedStream, event: EmulatedEvent) -> None:
        _stream(stream)
        if not isinstance(event, EmulatedEvent):
            raise TypeError(f"an event is what World.record(stream) returned, not {type(event).__name__}")
        if not self._dropped("wait_event"):
            self.machine.streams.wait_event(stream, event)

    def start_after(self, stream: EmulatedStream, earlier: EmulatedStream) -> None:
        """Add no happens-before edge: if no other edge orders two memory accesses, they are still a Race."""
        self.machine.streams.wait_event(stream, self.machine.streams.record_event(earlier), orders_memory=False)

    def capturing(self) -> bool:
        return False

    def on_side_stream(self) -> bool:
        return self.current_stream() is not self.machine.streams.stream(self.machine_rank, "main")

    def finish(self, stream: EmulatedStream | None = None) -> None:
        host = self.machine.host_threads[self.machine_rank]
        if not self.machine.ahead or not host.on_rank_thread:  # only the rank's own thread orders torch operations
            self.machine.streams.finish(stream or self.current_stream())

    # -- stream operations -------------------------------------------------------------------------------------------
    def launch(
        self,
        kernel: JITFunction,
        grid: int,
        args: Arguments,
        options: Options,
        stream: EmulatedStream,
    ) -> None:
        check_launch(kernel, grid, options)
        _stream(stream)
        if kernel.__module__ == barrier.__name__ and self._dropped(kernel.__name__):
            return  # a mutation can remove the barrier kernel in the same way as an ordering edge of host code
        self.machine.report.ran.launched(kernel, args, options)
        if not options.get("local") and not options.get("co_resident"):
            self._noting.add(stream, ResidentPrograms(-(-grid // options.get("per_sm", 1)), (1,)))
        self.machine.streams.launch(
            kernel, (grid, 1, 1), args, stream, bool(options.get("co_resident")), options.get("per_sm", 1)
        )

    def note_launches(self) -> AbstractContextManager[Notes]:
        return self._noting.noting()

    def run_launch(self, launch: Launch, stream: EmulatedStream, moving: Mapping[str, Moved]) -> None:
        self.launch(launch.kernel, launch.grid, launch.arguments(moving), launch.options, stream)

    def copy(self, dst: torch.Tensor, src: torch.Tensor, stream: EmulatedStream) -> None:
        check_copy(dst, src)
        self.machine.streams.copy(dst, src, _stream(stream))

    def signal(self, word: torch.Tensor, value: torch.Tensor, stream: EmulatedStream) -> None:
        _stream(stream)
        if not self._dropped("signal"):
            self.machine.streams.signal(_word(word), _word(value), stream)

    def wait(self, word: torch.Tensor, value: torch.Tensor, stream: EmulatedStream) -> None:
        _stream(stream)
        if not self._dropped("wait"):
            self.machine.streams.wait(_word(word), _word(value), stream)

    def call(
        self,
        fn: Callable[[], object],
        reads: Reads,
        writes: Sequence[torch.Tensor],
        stream: EmulatedStream,
    ) -> None:
        if not callable(fn):
            raise TypeError(f"World.call takes a function that enqueues the library's work, not {type(fn).__name__}")
        check_tensors("World.call", *[t for t in reads if not callable(t)], *writes)
        self.machine.streams.call(fn, reads, writes, _stream(stream))

    def stream_barrier(self, stream: EmulatedStream) -> None:
        if not self._dropped("stream_barrier"):
            self.machine.streams.collective("barrier", stream, among=self.ranks)

    def _dropped(self, method: str) -> bool:
        """Return whether the mutation under test removes this call; a recorded run notes its call site."""
        machine = self.machine
        if machine.mutation is None and not machine.record:
            return False
        site = (*call_site(), method)
        machine.seen_sites.add(site)
        return machine.mutation is not None and machine.mutation.drops(site)

    # -- collectives -------------------------------------------------------------------------------------------------
    def communicator(self, ctas: int) -> str:
        return f"{ctas} CTAs"

    def all_gather(self, out: torch.Tensor, x: torch.Tensor, stream: EmulatedStream) -> None:
        check_tensors("all_gather", out, x)
        self._sizes("all_gather", out, x, out.shape[0], x.shape[0] * self.size)
        check_dense("all_gather", out, x)

        def work(arrivals: list[Arrival]) -> None:
            full = torch.cat([arrival.reads[0] for arrival in arrivals])
            for arrival in arrivals:
                arrival.writes[0].copy_(full)

        self._collective("all_gather", stream, x, out, work)

    def reduce_scatter(self, out: torch.Tensor, x: torch.Tensor, stream: EmulatedStream, on: str | None = None) -> None:
        check_tensors("reduce_scatter", out, x)
        self._sizes("reduce_scatter", out, x, x.shape[0], out.shape[0] * self.size)
        check_dense("reduce_scatter", out, x)

        def work(arrivals: list[Arrival]) -> None:
            total = sum_in_order([arrival.reads[0] for arrival in arrivals])
            for arrival, rows in zip(arrivals, total.tensor_split(self.size), strict=True):
                arrival.writes[0].copy_(rows)

        self._collective("reduce_scatter", stream, x, out, work, on)

    def all_reduce(self, x: torch.Tensor, stream: EmulatedStream, on: str | None = None) -> None:
        check_tensors("all_reduce", x)
        check_dense("all_reduce", x)

        def work(arrivals: list[Arrival]) -> None:
            total = sum_in_order([arrival.reads[0] for arrival in arrivals])
            for arrival in arrivals:
                arrival.writes[0].copy_(total)

        self._collective("all_reduce", stream, x, x, work, on)

    def all_to_all(
        self,
        outs: Sequence[torch.Tensor],
        inputs: Sequence[torch.Tensor],
        stream: EmulatedStream,
        on: str | None = None,
    ) -> None:
        check_tensors("all_to_all", *outs, *inputs)
        check_dense("all_to_all", *outs, *inputs)

        def work(arrivals: list[Arrival]) -> None:
            for receiver, arrival in enumerate(arrivals):
                for out, x in zip(arrival.writes, [sender.reads[receiver] for sender in arrivals], strict=True):
                    if out.shape != x.shape:
                        raise Mismatch(
                            f"all_to_all: rank {receiver} expects {list(out.shape)} where {list(x.shape)} is sent"
                        )
                    out.copy_(x)

        kind = (*inputs[0].shape[1:], str(inputs[0].dtype))
        sources = [r for r, out in enumerate(outs) if out.numel()]
        self._noting.add("collectives", ResidentPrograms(1, (1,), self.path))
        self.machine.streams.collective(
            "all_to_all", _stream(stream), kind, list(inputs), list(outs), work, sources, on, self.ranks
        )

    def _collective(
        self,
        kind: str,
        stream: EmulatedStream,
        x: torch.Tensor,
        out: torch.Tensor,
        work: Callable[[list[Arrival]], None],
        on: str | None = None,
    ) -> None:
        """Enqueue a collective in which every rank needs every other rank's part of x. For an empty x NCCL launches no
        kernel and orders nothing."""
        sources = range(self.size) if x.numel() else ()
        self._noting.add("collectives", ResidentPrograms(1, (1,), self.path))
        self.machine.streams.collective(
            kind, _stream(stream), (*x.shape, str(x.dtype)), [x], [out], work, sources, on, self.ranks
        )

    def _sizes(self, name: str, out: torch.Tensor, x: torch.Tensor, actual: int, expected: int) -> None:
        if actual != expected or out.shape[1:] != x.shape[1:] or out.dtype != x.dtype:
            raise ValueError(
                f"{name} of {list(x.shape)} {x.dtype} to {list(out.shape)} {out.dtype} over {self.size} ranks"
            )

    # -- names and counts --------------------------------------------------------------------------------------------
    def name_counters(self, describe: Callable[[int], str]) -> None:
        self.machine.channel_names.setdefault(self.machine_rank, []).append(describe)

    def name_calls(self, disagreement: Callable[[Mapping[int, int]], Mismatch]) -> None:
        self.machine.disagreements[self.guard().data_ptr()] = disagreement

    def name_elements(self, tensor: torch.Tensor, name: str) -> None:
        self.machine.memory.register(tensor, name, self.machine_rank)

    def register_channel(
        self, name: str, counters: torch.Tensor, state: torch.Tensor | int, arrivals: list[int] | int | None
    ) -> None:
        """Register counters, each of which must equal calls x arrivals at the end of the run. arrivals: one number for
        all counters, one number per counter, or None if unknown. state: a BlockChannel's state, which contains the
        number of calls, or that number itself."""
        self.machine.channels[self.machine_rank, name, counters.data_ptr()] = counters, state, arrivals


def _duration(seconds: float) -> str:
    for unit, length in (("hours", 3600), ("minutes", 60)):
        if seconds > 2 * length:
            return f"{seconds / length:.0f} {unit}"
    return f"{seconds:.0f} seconds"


def _stream(stream: object) -> EmulatedStream:
    if not isinstance(stream, EmulatedStream):
        raise TypeError(f"a stream is World.current_stream() or a World.side_stream(name), not {stream!r}")
    return stream


def _word(tensor: torch.Tensor) -> torch.Tensor:
    check_tensors("a flag", tensor)
    if tensor.numel() != 1 or tensor.dtype != torch.int32:
        raise ValueError(f"a flag is an int32 tensor of one element, not {tensor.dtype} {list(tensor.shape)}")
    return tensor


def check_dense(name: str, *tensors: torch.Tensor) -> None:
    """Raise ValueError for tensors that are not contiguous, because NCCL refuses them."""
    if not all(t.is_contiguous() for t in tensors):
        raise ValueError(f"{name}: tensors must be contiguous")


def spmd(
    fn: Callable[[EmulatedBackend], R],
    size: int,
    *,
    nodes: int | Sequence[int] = 1,
    **options: Any,
) -> tuple[list[R], Report]:
    """Run `fn(backend)` as `size` ranks. Return the results by rank, and the run's report. nodes: the number of nodes
    of equal size, or the number of ranks on each node. options: see Machine."""
    machine = Machine(size, nodes=placed(nodes, size), **options)
    return drive(fn, machine), machine.report


def drive(fn: Callable[[EmulatedBackend], R], machine: Machine) -> list[R]:
    """Run `fn(backend)` as every rank of a machine, and return the results by rank. `machine.report` is complete even
    if this function raises an error."""
    everyone = tuple(range(machine.size))
    backends = [EmulatedBackend(machine, rank, everyone) for rank in everyone]
    try:
        return machine.run([functools.partial(fn, b) for b in backends])
    finally:
        machine.memory.forget()
