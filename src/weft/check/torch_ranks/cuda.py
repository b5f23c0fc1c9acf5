"""torch.cuda on emulated ranks. Each rank has one GPU with streams, events and graphs. A graph is a list of operations
to replay."""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import SimpleNamespace

import torch

from ...architectures import HOPPER
from ...emulator.tasks import EmulatedEvent, EmulatedStream
from ...errors import Unsupported
from .ranks import current_rank, random_numbers, rank_number

_numbers = itertools.count(1)
_by_number: weakref.WeakValueDictionary[int, EmulatedStream] = weakref.WeakValueDictionary()


def stream_of(number: int) -> EmulatedStream:
    """Return the stream whose `Stream.cuda_stream` is this number."""
    return current_rank().stream() if number == 0 else _by_number[number]


class Stream:
    """The replacement of torch.cuda.Stream."""

    def __init__(self, device: object = None, priority: int = 0, *, emulated: EmulatedStream | None = None) -> None:
        self.emulated = emulated or current_rank().new_stream()
        self.priority, self.cuda_stream = priority, next(_numbers)
        _by_number[self.cuda_stream] = self.emulated
        self.device = torch.device("cuda", rank_number())

    def __eq__(self, stream: object) -> bool:
        return isinstance(stream, Stream) and stream.emulated is self.emulated

    def __hash__(self) -> int:
        return id(self.emulated)

    def __enter__(self) -> Stream:
        self._before = current_rank().backend.on(self.emulated)
        self._before.__enter__()
        return self

    def __exit__(self, *_: object) -> None:
        self._before.__exit__(None, None, None)

    def synchronize(self) -> None:
        current_rank().wait_for(self.emulated)

    def query(self) -> bool:
        return self.emulated.idle

    def record_event(self, event: Event | None = None) -> Event:
        event = event or Event()
        event.record(self)
        return event

    def wait_event(self, event: Event) -> None:
        event.wait(self)

    def wait_stream(self, stream: Stream) -> None:
        self.wait_event(stream.record_event())


class Event:
    """The replacement of torch.cuda.Event. The times of an event are virtual times of the emulator."""

    def __init__(
        self, enable_timing: bool = False, blocking: bool = False, interprocess: bool = False, **_: object
    ) -> None:
        self.recorded: EmulatedEvent | None = None
        self.stream: EmulatedStream | None = None

    def record(self, stream: Stream | None = None) -> None:
        rank = current_rank()
        recording = self.stream = rank.stream() if stream is None else stream.emulated

        def enqueue() -> None:
            self.recorded = rank.streams.record_event(recording)

        rank.enqueue_or_capture(enqueue)

    def wait(self, stream: Stream | None = None) -> None:
        rank = current_rank()
        waiting = rank.stream() if stream is None else stream.emulated

        def enqueue() -> None:
            if self.recorded is not None:  # a wait for an event that was never recorded does nothing
                rank.streams.wait_event(waiting, self.recorded)

        rank.enqueue_or_capture(enqueue)

    def synchronize(self) -> None:
        if self.stream is not None:
            current_rank().wait_for(self.stream)

    def query(self) -> bool:
        return self.recorded is None or self.recorded.done

    def elapsed_time(self, end: Event) -> float:
        current_rank().synchronize()
        assert self.recorded is not None and end.recorded is not None
        return (end.recorded.time - self.recorded.time) / 1000


class CapturedGraph:
    """torch.cuda.CUDAGraph: the operations enqueued during the capture, which each replay enqueues again."""

    def __init__(self, *_: object, **__: object) -> None:
        self.operations: list[Callable[[], object]] = []
        self.origin: EmulatedStream | None = None

    def capture_begin(self, *_: object, **__: object) -> None:
        rank = current_rank()
        self.operations, self.origin, rank.capture = [], rank.stream(), self

    def capture_end(self) -> None:
        current_rank().capture = None

    def replay(self) -> None:
        rank = current_rank()
        if self.origin is None:
            raise RuntimeError("replay of a CUDA graph that was not captured")
        current, origin = Stream(emulated=rank.stream()), Stream(emulated=self.origin)
        origin.wait_stream(current)
        for operation in self.operations:
            rank.enqueue_or_capture(operation)
        current.wait_stream(origin)

    def reset(self) -> None:
        self.operations = []

    def pool(self) -> tuple[int, int]:
        return (0, 0)


@contextmanager
def graph(cuda_graph: CapturedGraph, pool: object = None, stream: Stream | None = None, **_: object) -> Iterator[None]:
    with use_stream(stream or Stream()):
        cuda_graph.capture_begin()
        try:
            yield
        finally:
            cuda_graph.capture_end()


@contextmanager
def use_stream(stream: Stream | None) -> Iterator[None]:
    if stream is None:
        yield
        return
    with current_rank().backend.on(stream.emulated):
        yield


class device:
    """torch.cuda.device, for ranks that have one GPU each."""

    def __init__(self, which: object) -> None:
        set_device(which)

    def __enter__(self) -> None: ...

    def __exit__(self, *_: object) -> None: ...


def set_device(which: object) -> None:
    """Check that a rank selects the GPU with its own number."""
    number = which if isinstance(which, int) else torch.device(str(which)).index
    if number is not None and number != rank_number():
        raise Unsupported(f"rank {rank_number()} uses GPU {number}: every emulated rank has the GPU of its own number")


def _set_stream(stream: Stream) -> None:
    rank = current_rank()
    rank.streams.current[rank.rank] = stream.emulated


def _properties(_: object = None) -> SimpleNamespace:
    return SimpleNamespace(
        name="emulated",
        multi_processor_count=current_rank().backend.sm_count,
        major=9,
        minor=0,
        total_memory=80 << 30,
        warp_size=32,
        max_threads_per_multi_processor=2048,
        L2_cache_size=50 << 20,
        shared_memory_per_block_optin=227 << 10,
        regs_per_multiprocessor=65536,
    )


class Generator(torch.Generator):
    """The replacement of torch.Generator, whose random numbers do not depend on the device."""

    device = torch.device("cpu")

    def __new__(cls, device: object = "cpu") -> Generator:
        return super().__new__(cls)

    def __init__(self, device: object = "cpu") -> None:
        super().__init__()
        self.device = torch.device(str(device))


def _seed(seed: int) -> torch.Generator:
    """Seed the rank's random numbers or, while a file is being loaded, the process's."""
    return random_numbers().manual_seed(seed)


def replacements() -> Iterator[tuple[object, str, object]]:
    """Yield (place, name, value) of each object that replaces torch's."""
    functions: dict[str, object] = dict(
        is_available=lambda: True,
        is_initialized=lambda: True,
        init=lambda: None,
        device_count=lambda: current_rank().size,
        current_device=rank_number,
        set_device=set_device,
        device=device,
        synchronize=lambda device=None: current_rank().synchronize(),
        current_stream=lambda device=None: Stream(emulated=current_rank().stream()),
        default_stream=lambda device=None: Stream(
            emulated=current_rank().streams.stream(current_rank().backend.machine_rank, "main")
        ),
        stream=use_stream,
        set_stream=_set_stream,
        Stream=Stream,
        Event=Event,
        CUDAGraph=CapturedGraph,
        graph=graph,
        is_current_stream_capturing=lambda: current_rank().capture is not None,
        empty_cache=lambda: None,
        get_device_properties=_properties,
        get_device_capability=lambda device=None: divmod(HOPPER, 10),
        get_device_name=lambda device=None: "emulated",
        can_device_access_peer=lambda device, peer: True,
        manual_seed=_seed,
        manual_seed_all=_seed,
        _sleep=lambda cycles: None,
        reset_peak_memory_stats=lambda device=None: None,
    )
    for name, value in functions.items():
        yield torch.cuda, name, value
    for name in ("range_push", "range_pop", "range_start", "range_end", "mark"):
        yield torch.cuda.nvtx, name, lambda *_: 0
    same_as_of_cuda = dict(current_device_index="current_device", set_device_index="set_device")
    for name in ("is_available", "device_count", "synchronize", "current_stream", "set_stream"):
        same_as_of_cuda[name] = name
    for name, cuda_name in same_as_of_cuda.items():
        yield torch.accelerator, name, functions[cuda_name]
    yield torch.accelerator, "current_accelerator", lambda check_available=False: torch.device("cuda")
    yield torch, "manual_seed", _seed
    yield torch, "Generator", Generator
