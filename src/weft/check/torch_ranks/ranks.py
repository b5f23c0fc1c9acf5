"""The emulated rank for which a thread acts."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, NoReturn

import torch
from torch.utils._python_dispatch import _disable_current_modes

from ...backends.emulated import EmulatedBackend
from ...emulator.tasks import EmulatedStream
from ...errors import Unsupported

if TYPE_CHECKING:
    from .cuda import CapturedGraph

_thread = threading.local()


class Rank:
    """One rank: its backend, its random numbers, and the graph that it captures."""

    def __init__(self, backend: EmulatedBackend) -> None:
        self.backend, self.rank, self.size = backend, backend.rank, backend.size
        self.streams = backend.machine.streams
        self.generator = torch.Generator()
        self.capture: CapturedGraph | None = None
        self.stream_count = 0  # the number of streams so far, which is part of their names
        self.named: Counter[str] = Counter()  # for each name in reports, the number of tensors that have it so far
        # Memory that kernels may access only by its address. On a GPU, stream order also orders the reuse of freed
        # memory.
        self.allocated: list[torch.Tensor] = []

    def stream(self) -> EmulatedStream:
        return self.backend.current_stream()

    def new_stream(self) -> EmulatedStream:
        self.stream_count += 1
        return self.backend.side_stream(f"torch {self.stream_count}")

    def enqueue_or_capture(self, enqueue: Callable[[], object]) -> None:
        """Enqueue an operation now or, in a capture, at each replay of the graph."""
        if self.capture is not None:
            self.capture.operations.append(enqueue)
            return
        with self.backend.machine.host_threads[self.rank].calling():
            enqueue()

    def wait_for(self, stream: EmulatedStream) -> None:
        """Make the host wait until a stream has run all operations enqueued so far."""
        if self.capture is not None:
            raise Unsupported("a synchronisation while a CUDA graph is captured: torch raises here too")
        self.backend.finish(stream)
        self.backend.machine.current.join(stream.task.clock)

    def synchronize(self) -> None:
        self.backend.synchronize()
        self.allocated.clear()


def next_state(generator: torch.Generator, draw: Callable[[], object] | None) -> torch.Tensor:
    """Return a generator's state, and give the generator its next state. The host calls this when it enqueues an
    operation, because the host may seed the generator again before the stream runs the operation. draw: runs the
    operation on other memory; None if the operation reads tensors, after which the next state differs from torch's."""
    with untracked():
        state = generator.get_state()
        if draw is None:
            generator.manual_seed(int(torch.randint(2**62, (), generator=generator)))
        else:
            with_random_numbers(state, lambda: (draw(), generator.set_state(torch.default_generator.get_state())))
        return state


def with_random_numbers(state: torch.Tensor, run: Callable[[], object]) -> object:
    """Call a function with the random numbers of a generator's state instead of the process's random numbers, which all
    ranks share."""
    process = torch.default_generator
    before = process.get_state()
    process.set_state(state)
    try:
        return run()
    finally:
        process.set_state(before)


@contextmanager
def acting(rank: Rank) -> Iterator[None]:
    """Let the calling thread act for a rank."""
    _thread.rank = rank
    try:
        yield
    finally:
        del _thread.rank


def current_rank() -> Rank:
    """Return the calling thread's rank. Raises Unsupported in a thread without a rank."""
    rank = getattr(_thread, "rank", None)
    if rank is None:
        raise Unsupported("this call belongs into main(rank, world_size), on the thread that runs it")
    assert isinstance(rank, Rank)
    return rank


def rank_number() -> int:
    """Return the calling thread's rank, or 0 while a file is being loaded."""
    rank = getattr(_thread, "rank", None)
    return 0 if rank is None else rank.rank


def random_numbers() -> torch.Generator:
    """Return the generator of the calling thread's rank, or the process's generator while a file is being loaded."""
    rank = getattr(_thread, "rank", None)
    return torch.default_generator if rank is None else rank.generator


def refused(name: str) -> Callable[..., NoReturn]:
    """Return a function that replaces torch's function of this name, which the emulator does not support."""

    def refuse(*_: object, **__: object) -> NoReturn:
        raise Unsupported(f"{name}: the emulator does not model it")

    return refuse


@contextmanager
def untracked() -> Iterator[None]:
    """Call torch itself, for the emulator's own work on tensors. Such work is not an operation of the rank."""
    with torch._C.DisableTorchFunction(), _disable_current_modes():
        yield
