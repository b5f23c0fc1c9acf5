"""Ranks as greenlets on one CPU thread, in the emulator: for development, tests and teaching.

Streams and events are the emulator's; memory is CPU tensors. What `empty` hands out is NaN until something writes it.
`finish` blocks the calling host task until the stream is drained, because the caller reads CPU memory directly; it adds
no order between streams, as on a GPU, so a missing event is still found.
"""

from __future__ import annotations

import functools
import math
import pickle
from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch
from triton import JITFunction
from triton.tools.tensor_descriptor import TensorDescriptor

from ..emulator import Machine, Report
from ..emulator.streams import call_site, fresh
from ..emulator.tasks import Arrival, Event, Stream
from ..errors import Mismatch, WeftError
from ..lang.host import check_copy
from ..lang.jit import check_launch
from ..transport import barrier
from .base import (
    NONE_MOVING,
    Arguments,
    Backend,
    Moving,
    Options,
    R,
    Scale,
    SymmetricTensor,
    check_memory,
    check_tensors,
    sum_in_order,
)

if TYPE_CHECKING:
    from ..emulator.mutate import Mutation

ALIGN = 256
GAP = 1 << 20


@dataclass(frozen=True)
class _Symmetric(SymmetricTensor):
    """Whose addresses are of tensors of the same shape."""

    table_of: Callable[[tuple[torch.Tensor, ...]], torch.Tensor] = field(kw_only=True)

    def table(self, peers: tuple[torch.Tensor, ...], offset: int) -> torch.Tensor:
        return self.table_of(peers)


class EmulatedBackend(Backend):
    """One rank of an emulated world."""

    name = "emulated"

    def __init__(self, machine: Machine, here: int, ranks: tuple[int, ...]) -> None:
        """Of the machine's ranks `ranks`, one of which is `here`."""
        self._machine, self.here, self.ranks = machine, here, ranks
        self.rank, self.size = ranks.index(here), len(ranks)
        self.device = torch.device("cpu")
        self.sm_count = machine.sm_count
        self.scale = Scale.of(machine.sm_count)
        self._guard: torch.Tensor | None = None
        self._launches: dict[Hashable, dict[str, Hashable]] = {}

    @property
    def machine(self) -> Machine:
        """The run. Everything asks it, so nothing is done behind its end."""
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
        return EmulatedBackend(self.machine, self.here, tuple(self.ranks[r] for r in own))

    def synchronize(self) -> None:
        self.machine.streams.synchronize(self.here)
        self.check()

    def check(self) -> None:
        """Waits are not bounded by time here: a wait that cannot end is a deadlock, and reported as one."""
        if self._guard is not None and (lost := int(self._guard[3])) != self.lost:
            raise self._overflow(lost)

    # -- memory ------------------------------------------------------------------------------------------------------
    def _allocate(self, nbytes: int, name: str, granule: int, poison: bool) -> torch.Tensor:
        raw, at = fresh(nbytes, ALIGN, poison)
        self.machine.memory.add(
            raw.data_ptr() + at, max(nbytes, 1), raw.untyped_storage(), name, self.here, granule, not poison
        )
        return raw[at : at + nbytes]

    def _copies(self, nbytes: int, name: str) -> tuple[torch.Tensor, ...]:
        """Every rank's copy, in one piece of memory, so that one descriptor spans them. Between them is more room than
        one takes, so that an index past the end of one does not meet the next."""
        step = 2 * (-(-nbytes // ALIGN) * ALIGN) + GAP
        raw = torch.empty(GAP + step * self.size + ALIGN, dtype=torch.uint8)  # nobody touches the gaps: they take none
        at = GAP + -raw.data_ptr() % ALIGN
        copies = tuple(raw[at + r * step : at + r * step + nbytes] for r in range(self.size))
        for rank, copy in zip(self.ranks, copies, strict=True):
            copy.zero_()
            self.machine.memory.add(copy.data_ptr(), max(nbytes, 1), raw.untyped_storage(), name, rank, 4, True)
        return copies

    def symmetric(self, nbytes: int, name: str) -> SymmetricTensor:
        for rank, (other, title) in enumerate(self._exchange((nbytes, name))):
            if (other, title) != (nbytes, name):
                raise Mismatch(
                    f"symmetric memory: rank {self.rank} asks for {nbytes} bytes of {name!r}, "
                    f"rank {rank} for {other} bytes of {title!r}"
                )
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

    def aside(self) -> bool:
        return self.machine.streams.current[self.here] is not None

    def finish(self, stream: Stream) -> None:
        self.machine.streams.finish(stream)

    # -- stream operations -------------------------------------------------------------------------------------------
    def launch(
        self,
        kernel: JITFunction,
        grid: int,
        args: Arguments | Callable[[], Arguments],
        options: Options,
        stream: Stream,
        key: Hashable = None,
        moving: Moving = NONE_MOVING,
    ) -> None:
        check_launch(kernel, grid, options)
        _stream(stream)
        args = args() if callable(args) else args
        if key is not None:  # a backend that keeps the arguments of a key would run with the first ones
            elsewhere = [n for n, t in moving.items() if _address(args[n]) != t.data_ptr()]
            if elsewhere:
                raise ValueError(f"{kernel.__name__}: what moves is not what it is launched with: {elsewhere}")
            made = {n: _dtype(v) if n in moving else _identity(v) for n, v in args.items()}
            first = self._launches.setdefault(key, made)
            if first != made:
                wrong = ", ".join(sorted(n for n in made if first.get(n) != made[n]))
                raise ValueError(f"{kernel.__name__}: one launch key for two launches, which differ in {wrong}")
        if kernel.__module__ == barrier.__name__ and self._dropped(kernel.__name__):
            return  # an edge between ranks that happens to be made by a kernel
        self.machine.report.ran.launched(kernel, args, options)
        self.machine.streams.launch(
            kernel, (grid, 1, 1), args, stream, bool(options.get("beside")), options.get("per_sm", 1)
        )

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

    def meet(self, stream: Stream) -> None:
        if not self._dropped("meet"):
            self.machine.streams.meet("meet", stream, among=self.ranks)

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
        self.machine.streams.meet(
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
        self.machine.streams.meet(
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

    def name_elements(self, tensor: torch.Tensor, name: str) -> None:
        self.machine.memory.register(tensor, name, self.here)

    def register_channel(
        self, name: str, counters: torch.Tensor, state: torch.Tensor | int, arrivals: list[int] | int | None
    ) -> None:
        """At the end of the run each counter must be calls x arrivals (one number, one per counter, or None: not
        known). state: a BlockChannel's, which has the calls, or their number."""
        self.machine.channels[self.here, name, counters.data_ptr()] = (name, self.here, counters, state, arrivals)


def _address(value: object) -> int | None:
    return value.data_ptr() if isinstance(value, torch.Tensor) else None


def _dtype(value: object) -> torch.dtype | None:
    return value.dtype if isinstance(value, torch.Tensor) else None


def _identity(value: object) -> Hashable:
    """What a launch argument comes to on a GPU: addresses and numbers."""
    if isinstance(value, torch.Tensor):
        return value.data_ptr(), value.dtype
    if isinstance(value, TensorDescriptor):
        return _identity(value.base), tuple(value.shape), tuple(value.strides), tuple(value.block_shape)
    return tuple(_identity(v) for v in value) if isinstance(value, tuple) else str(value)


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
    """NCCL takes no others."""
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
) -> tuple[list[R], Report]:
    """`fn(backend)` as `size` ranks; results by rank, and what the run did."""
    machine = Machine(
        size, seed=seed, sm_count=sm_count, races=races, preempt=preempt, mutation=mutation, record=record
    )
    return drive(fn, machine), machine.report


def drive(fn: Callable[[EmulatedBackend], R], machine: Machine) -> list[R]:
    """`fn(backend)` as every rank of a machine; results by rank. `machine.report` is there if it raises, too."""
    everyone = tuple(range(machine.size))
    backends = [EmulatedBackend(machine, rank, everyone) for rank in everyone]
    try:
        return machine.run([functools.partial(fn, b) for b in backends])
    finally:
        machine.memory.forget()
