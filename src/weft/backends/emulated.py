"""Ranks as greenlets on one CPU thread, in the emulator: for development, tests and teaching.

Streams and events are the emulator's; memory is CPU tensors. What `empty` hands out is NaN until something writes it.
`finish` blocks the calling host task until the stream is drained, because the caller reads CPU memory directly; it adds
no order between streams, as on a GPU, so a missing event is still found.
"""

from __future__ import annotations

import functools
import logging
import math
import pickle
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from types import FunctionType
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from triton import JITFunction

from ..emulator import Machine, Report
from ..emulator.streams import call_site, fresh
from ..emulator.tasks import Arrival, Event, Stream
from ..errors import Mismatch, Unsupported, WeftError
from ..lang.host import check_copy
from ..lang.jit import check_launch
from ..scale import Scale
from ..transport import barrier
from .base import (
    Arguments,
    Backend,
    Options,
    R,
    SymmetricTensor,
    check_memory,
    check_tensors,
    sum_in_order,
)
from .nodes import numbered, placed, spread

if TYPE_CHECKING:
    from ..emulator.mutate import Mutation
    from ..kernel_launch import Launch

B = TypeVar("B", bound=Backend)
ALIGN = 256
GAP = 1 << 20
# Seconds of this process that a rank takes for a multiply-add and for an element, on a core of a server of 2026-11; of
# a call of which more is said, and of one that is proposed in its place.
MULTIPLY_ADD, ELEMENT = 1.4e-7, 8e-6
ANNOUNCED, PROPOSED = 60.0, 5.0
log = logging.getLogger("weft")


@dataclass(frozen=True, eq=False)
class _Symmetric(SymmetricTensor):
    """A symmetric tensor whose `addresses` are of tensors of its own shape, a view's too, by `table_of`."""

    table_of: Callable[[tuple[torch.Tensor, ...]], torch.Tensor] = field(kw_only=True)

    def table(self, peers: tuple[torch.Tensor, ...], offset: int) -> torch.Tensor:
        return self.table_of(peers)


def _one_call_at_a_time(backend: type[B]) -> type[B]:
    """Make the backend's public methods, which host code calls from any thread of the rank, run one at a time."""

    def wrapped(method: Callable[..., R]) -> Callable[..., R]:
        @functools.wraps(method)
        def call(self: EmulatedBackend, *args: object, **options: object) -> R:
            host = self.machine.hosts[self.here].host
            assert host is not None
            with host.calling():
                return method(self, *args, **options)

        return call

    for name, method in list(vars(backend).items()):
        if isinstance(method, FunctionType) and not name.startswith("_"):
            setattr(backend, name, wrapped(method))
    return backend


@_one_call_at_a_time
class EmulatedBackend(Backend):
    """One rank of an emulated world, for any of its threads (`HostThread.calling`)."""

    name = "emulated"
    compares = True

    def __init__(self, machine: Machine, here: int, ranks: tuple[int, ...], path: tuple[int, ...] = ()) -> None:
        """The backend of rank `here` of the machine, in a World of the machine's ranks `ranks`. path: which of the
        splits of its World this one comes from, and so on up; the same on all these ranks, and no other World's."""
        self._machine, self.here, self.ranks, self.path = machine, here, ranks, path
        self._splits = self._calls = 0
        self.rank, self.size = ranks.index(here), len(ranks)
        self.nodes = numbered([machine.nodes[rank] for rank in ranks])
        self.peer_reason = self.symmetric_reason = spread(self.nodes)
        self.device = torch.device("cpu")
        self.sm_count = machine.sm_count
        self.scale = Scale.of(machine.sm_count)
        self._guard: torch.Tensor | None = None

    @property
    def machine(self) -> Machine:
        """The run. Every operation asks for it, so that none is done after its end."""
        if self._machine.ended:
            raise WeftError(
                f"rank {self.here}'s World is of an emulated run that has ended; use it in the function given to spmd"
            )
        return self._machine

    # -- host --------------------------------------------------------------------------------------------------------
    def exchange(self, obj: R) -> list[R]:
        return [pickle.loads(data) for data in self._exchange(pickle.dumps(obj))]

    def _exchange(self, obj: R) -> list[R]:
        return self.machine.streams.exchange(self.here, obj, self.ranks)

    def split(self, groups: Sequence[Sequence[int]]) -> EmulatedBackend:
        own = next(group for group in groups if self.rank in group)
        self._splits += 1
        return EmulatedBackend(self.machine, self.here, tuple(self.ranks[r] for r in own), (*self.path, self._splits))

    def compared(self, call: object) -> Mapping[int, object] | None:
        """Compare the call with those of the ranks that have come so far: no rank waits, so that their hosts stay as
        far apart as they are."""
        self._calls += 1
        key = (self.path, self.ranks, self._calls)
        calls = self.machine.calls.setdefault(key, {})
        calls[self.rank] = call
        if len(calls) == self.size:
            del self.machine.calls[key]
        return dict(sorted(calls.items())) if any(other != call for other in calls.values()) else None

    def synchronize(self) -> None:
        self.machine.streams.synchronize(self.here)
        self.check()

    def check(self) -> None:
        """Do nothing: waits are not bounded by time here, and a wait that cannot end is reported as a deadlock."""

    def left_out(self) -> int:
        return 0 if self._guard is None else int(self._guard[3])

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
        raw, at = fresh(nbytes, ALIGN, poison)
        self.machine.memory.add(
            raw.data_ptr() + at, max(nbytes, 1), raw.untyped_storage(), name, self.here, granule, not poison
        ).placed = True
        return raw[at : at + nbytes]

    def _copies(self, nbytes: int, name: str) -> tuple[torch.Tensor, ...]:
        """Allocate every rank's copy in one piece of memory, so that one descriptor spans them. The gap between two is
        larger than a copy, so that an index past the end of one does not meet the next."""
        step = 2 * (-(-nbytes // ALIGN) * ALIGN) + GAP
        raw = torch.empty(GAP + step * self.size + ALIGN, dtype=torch.uint8)  # nobody touches the gaps: they take none
        at = GAP + -raw.data_ptr() % ALIGN
        copies = tuple(raw[at + r * step : at + r * step + nbytes] for r in range(self.size))
        for rank, copy in zip(self.ranks, copies, strict=True):
            copy.zero_()
            region = self.machine.memory.add(
                copy.data_ptr(), max(nbytes, 1), raw.untyped_storage(), name, rank, 4, True
            )
            region.placed = True
        return copies

    def symmetric(self, nbytes: int, name: str) -> SymmetricTensor:
        for rank, (other, title) in enumerate(self._exchange((nbytes, name))):
            if (other, title) != (nbytes, name):
                raise Mismatch(
                    f"symmetric memory: rank {self.rank} asks for {nbytes} bytes of {name!r}, "
                    f"rank {rank} for {other} bytes of {title!r}"
                )
        if reason := spread(self.nodes):
            raise Unsupported(f"{name}: no symmetric memory: {reason}")
        made = self._copies(nbytes, name) if self.rank == 0 else None
        peers = self._exchange(made)[0]
        assert peers is not None  # rank 0 made them
        local = peers[self.rank]
        starts = [t.data_ptr() for t in peers]
        window = self.machine.add_window(nbytes, starts)
        return _Symmetric(local, peers, self.table(peers, name), window, table_of=lambda peers: self.table(peers, name))

    def table(self, tensors: Sequence[torch.Tensor], name: str) -> torch.Tensor:
        """Their addresses as a kernel is to have them (emulator/bounds.py)."""
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
        given = torch.as_tensor(values, dtype=dtype)
        if given.dim() != 1:
            raise ValueError(f"World.tensor takes a list of numbers, not {values!r}")
        return self.zeros(given.shape, dtype).copy_(given)

    def guard(self) -> torch.Tensor:
        if self._guard is None:
            self._guard = self.zeros((16,), torch.int64)
        return self._guard

    # -- streams -----------------------------------------------------------------------------------------------------
    def current_stream(self) -> Stream:
        return self.machine.streams.current[self.here] or self.machine.streams.stream(self.here, "main")

    @contextmanager
    def on(self, stream: Stream) -> Iterator[None]:
        current = self.machine.streams.current
        before, current[self.here] = current[self.here], _stream(stream)
        try:
            yield
        finally:
            current[self.here] = before

    def side_stream(self, name: str, urgent: bool = True) -> Stream:
        part = "" if self.size == self.machine.size else f" of ranks {list(self.ranks)}"
        return self.machine.streams.stream(self.here, name + part)

    def record(self, stream: Stream) -> Event:
        return self.machine.streams.record_event(_stream(stream))

    def wait_event(self, stream: Stream, event: Event) -> None:
        _stream(stream)
        if not isinstance(event, Event):
            raise TypeError(f"an event is what World.record(stream) returned, not a {type(event).__name__}")
        if not self._dropped("wait_event"):
            self.machine.streams.wait_event(stream, event)

    def capturing(self) -> bool:
        return False

    def on_side_stream(self) -> bool:
        return self.machine.streams.current[self.here] is not None

    def finish(self, stream: Stream) -> None:
        self.machine.streams.finish(stream)

    # -- stream operations -------------------------------------------------------------------------------------------
    def launch(
        self,
        kernel: JITFunction,
        grid: int,
        args: Arguments,
        options: Options,
        stream: Stream,
    ) -> None:
        check_launch(kernel, grid, options)
        _stream(stream)
        if kernel.__module__ == barrier.__name__ and self._dropped(kernel.__name__):
            return  # an edge between ranks that happens to be made by a kernel
        self.machine.report.ran.launched(kernel, args, options)
        self.machine.streams.launch(
            kernel, (grid, 1, 1), args, stream, bool(options.get("co_resident")), options.get("per_sm", 1)
        )

    def run_launch(self, launch: Launch, stream: Stream, moving: Mapping[str, Any]) -> None:
        self.launch(launch.kernel, launch.grid, launch.arguments(moving), launch.options, stream)

    def copy(self, dst: torch.Tensor, src: torch.Tensor, stream: Stream) -> None:
        check_copy(dst, src)
        self.machine.streams.copy(dst, src, _stream(stream))

    def signal(self, word: torch.Tensor, value: torch.Tensor, stream: Stream) -> None:
        _stream(stream)
        if not self._dropped("signal"):
            self.machine.streams.signal(_word(word), _word(value), stream)

    def wait(self, word: torch.Tensor, value: torch.Tensor, stream: Stream) -> None:
        _stream(stream)
        if not self._dropped("wait"):
            self.machine.streams.wait(_word(word), _word(value), stream)

    def call(
        self, fn: Callable[[], object], reads: Sequence[torch.Tensor], writes: Sequence[torch.Tensor], stream: Stream
    ) -> None:
        if not callable(fn):
            raise TypeError(
                f"World.call takes a function that makes the call in the stream's turn, not {type(fn).__name__}"
            )
        check_tensors("World.call", *reads, *writes)
        self.machine.streams.call(fn, reads, writes, _stream(stream))

    def stream_barrier(self, stream: Stream) -> None:
        if not self._dropped("stream_barrier"):
            self.machine.streams.collective("barrier", stream, among=self.ranks)

    def _dropped(self, method: str) -> bool:
        """Whether the mutation under test removes this call; a recorded run notes where it was made."""
        machine = self.machine
        if machine.mutation is None and not machine.record:
            return False
        site = (*call_site(), method)
        machine.seen_sites.add(site)
        return machine.mutation is not None and machine.mutation.drops(site)

    # -- collectives -------------------------------------------------------------------------------------------------
    def communicator(self, ctas: int) -> str:
        return f"{ctas} CTAs"

    def all_gather(self, out: torch.Tensor, x: torch.Tensor, stream: Stream) -> None:
        check_tensors("all_gather", out, x)
        self._sizes("all_gather", out, x, out.shape[0], x.shape[0] * self.size)
        _dense("all_gather", out, x)

        def work(parts: list[Arrival]) -> None:
            full = torch.cat([part.reads[0] for part in parts])
            for part in parts:
                part.writes[0].copy_(full)

        self._collective("all_gather", stream, x, out, work)

    def reduce_scatter(self, out: torch.Tensor, x: torch.Tensor, stream: Stream, on: str | None = None) -> None:
        check_tensors("reduce_scatter", out, x)
        self._sizes("reduce_scatter", out, x, x.shape[0], out.shape[0] * self.size)
        _dense("reduce_scatter", out, x)

        def work(parts: list[Arrival]) -> None:
            total = sum_in_order([part.reads[0] for part in parts])
            for part, rows in zip(parts, total.tensor_split(self.size), strict=True):
                part.writes[0].copy_(rows)

        self._collective("reduce_scatter", stream, x, out, work, on)

    def all_reduce(self, x: torch.Tensor, stream: Stream, on: str | None = None) -> None:
        check_tensors("all_reduce", x)
        _dense("all_reduce", x)

        def work(parts: list[Arrival]) -> None:
            total = sum_in_order([part.reads[0] for part in parts])
            for part in parts:
                part.writes[0].copy_(total)

        self._collective("all_reduce", stream, x, x, work, on)

    def all_to_all(
        self, outs: Sequence[torch.Tensor], parts: Sequence[torch.Tensor], stream: Stream, on: str | None = None
    ) -> None:
        check_tensors("all_to_all", *outs, *parts)
        _dense("all_to_all", *outs, *parts)

        def work(parts: list[Arrival]) -> None:
            for to, part in enumerate(parts):
                for out, x in zip(part.writes, [sender.reads[to] for sender in parts], strict=True):
                    if out.shape != x.shape:
                        raise Mismatch(f"all_to_all: rank {to} expects {list(out.shape)} where {list(x.shape)} is sent")
                    out.copy_(x)

        kind = (*parts[0].shape[1:], str(parts[0].dtype))
        hears = [r for r, out in enumerate(outs) if out.numel()]
        self.machine.streams.collective(
            "all_to_all", _stream(stream), kind, list(parts), list(outs), work, hears, on, self.ranks
        )

    def _collective(
        self,
        kind: str,
        stream: Stream,
        x: torch.Tensor,
        out: torch.Tensor,
        work: Callable[[list[Arrival]], None],
        on: str | None = None,
    ) -> None:
        """Every rank's part of x is needed by every other; of nothing, the library launches nothing, which orders
        nothing."""
        hears = range(self.size) if x.numel() else ()
        self.machine.streams.collective(
            kind, _stream(stream), (*x.shape, str(x.dtype)), [x], [out], work, hears, on, self.ranks
        )

    def _sizes(self, name: str, out: torch.Tensor, x: torch.Tensor, have: int, want: int) -> None:
        if have != want or out.shape[1:] != x.shape[1:] or out.dtype != x.dtype:
            raise ValueError(
                f"{name} of {list(x.shape)} {x.dtype} to {list(out.shape)} {out.dtype} over {self.size} ranks"
            )

    # -- names and counts --------------------------------------------------------------------------------------------
    def name_counters(self, describe: Callable[[int], str]) -> None:
        self.machine.channel_names.setdefault(self.here, []).append(describe)

    def name_calls(self, disagreement: Callable[[Mapping[int, int]], Mismatch]) -> None:
        self.machine.disagreements[self.guard().data_ptr()] = disagreement

    def name_elements(self, tensor: torch.Tensor, name: str) -> None:
        self.machine.memory.register(tensor, name, self.here)

    def register_channel(
        self, name: str, counters: torch.Tensor, state: torch.Tensor | int, arrivals: list[int] | int | None
    ) -> None:
        """Register counters, each of which must be calls x arrivals at the end of the run. arrivals: one number, one
        per counter, or None where it is not known. state: a BlockChannel's, which has the number of calls, or that
        number."""
        self.machine.channels[self.here, name, counters.data_ptr()] = (name, self.here, counters, state, arrivals)


def _duration(seconds: float) -> str:
    for unit, length in (("hours", 3600), ("minutes", 60)):
        if seconds > 2 * length:
            return f"{seconds / length:.0f} {unit}"
    return f"{seconds:.0f} seconds"


def _stream(stream: object) -> Stream:
    if not isinstance(stream, Stream):
        raise TypeError(f"a stream is World.current_stream() or a World.side_stream(name), not {stream!r}")
    return stream


def _word(tensor: torch.Tensor) -> torch.Tensor:
    check_tensors("a flag", tensor)
    if tensor.numel() != 1 or tensor.dtype != torch.int32:
        raise ValueError(f"a flag is an int32 tensor of one element, not {tensor.dtype} {list(tensor.shape)}")
    return tensor


def _dense(name: str, *tensors: torch.Tensor) -> None:
    """Raise ValueError for tensors that are not contiguous: NCCL takes no others."""
    if not all(t.is_contiguous() for t in tensors):
        raise ValueError(f"{name}: tensors must be contiguous")


def spmd(
    fn: Callable[[EmulatedBackend], R],
    size: int,
    *,
    seed: int = 0,
    sm_count: int = 6,
    races: bool = True,
    preempt: float = 0.05,
    mutation: Mutation | None = None,
    record: bool = False,
    nodes: int | Sequence[int] = 1,
) -> tuple[list[R], Report]:
    """`fn(backend)` as `size` ranks, on so many nodes alike or on nodes of so many ranks each; results by rank, and
    what the run did."""
    machine = Machine(
        size, seed=seed, sm_count=sm_count, races=races, preempt=preempt, mutation=mutation, record=record
    )
    machine.nodes = placed(nodes, size)
    return drive(fn, machine), machine.report


def drive(fn: Callable[[EmulatedBackend], R], machine: Machine) -> list[R]:
    """`fn(backend)` as every rank of a machine; results by rank. `machine.report` is there if it raises, too."""
    everyone = tuple(range(machine.size))
    backends = [EmulatedBackend(machine, rank, everyone) for rank in everyone]
    try:
        return machine.run([functools.partial(fn, b) for b in backends])
    finally:
        machine.memory.forget()
