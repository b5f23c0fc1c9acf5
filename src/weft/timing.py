"""Times of calls on the GPU, measured by two events around work on one stream (`span`), and functions that all timers
share.

Trials (chooser.py), the profile (planner/tuner.py), the demo and the benchmark (bench/common/timing.py) sample several
functions in rounds (`interleaved`), replay graphs that `captured` makes, and let the host run ahead of the GPU
(`behind_host`).
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, TypeVar

import torch

CYCLES = 2_000  # the approximate number of GPU cycles in 1 us
AHEAD = 200 * CYCLES  # longer than the host needs to launch a replay

S = TypeVar("S")
T = TypeVar("T")
Events = tuple[torch.cuda.Event, torch.cuda.Event]


def span(work: Callable[[], object], stream: torch.cuda.Stream | None = None) -> Events:
    """Return the events around the work that `work` submits to a stream, by default the current one."""
    a, b = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    a.record(stream)
    work()
    b.record(stream)
    return a, b


def length(events: Events) -> float:
    """Return the time between the events in us. The GPU must have reached both events."""
    a, b = events
    return a.elapsed_time(b) * 1e3


def repeated(fn: Callable[[], object], times: int) -> Callable[[], None]:
    """Return a function that calls `fn` `times` times."""

    def run() -> None:
        for _ in range(times):
            fn()

    return run


def interleaved(names: Sequence[T], sample: Callable[[T], S], rounds: int) -> dict[T, list[S]]:
    """Return samples for each name, one per round. Rounds interleave the names, so a GPU that heats up slows down all
    of them. Each round has a different order, which is the same on all ranks, so that no name always follows one that
    lets the GPU cool."""
    samples: dict[T, list[S]] = {name: [] for name in names}
    for i in range(rounds):
        for name in random.Random(i).sample(list(samples), len(samples)):
            samples[name].append(sample(name))
    return samples


def captured(fn: Callable[[], object], calls: int, stream: torch.cuda.Stream, pool: Any = None) -> torch.cuda.CUDAGraph:
    """Return a graph of `calls` calls of `fn`, which has already been replayed once. The caller must have warmed up
    `fn`."""
    graph = torch.cuda.CUDAGraph()
    torch.cuda.synchronize()
    with torch.cuda.graph(graph, stream=stream, pool=pool):
        repeated(fn, calls)()
    graph.replay()
    return graph


def behind_host(work: Callable[[], object], rendezvous: Callable[[], object]) -> Events:
    """Return the events around `work`. The GPU sleeps until the host has launched all of the work, and starts the work
    after a rendezvous of all ranks' GPUs. Without the sleep, the events would include the host's launch time, which is
    longer than a short graph."""
    torch.cuda._sleep(AHEAD)
    rendezvous()
    return span(work)


class CallTime(NamedTuple):
    """The time of a call in us: the GPU's time, without waits for the host, and the host's time."""

    gpu: float
    host: float

    def us(self, mode: str, host_factor: float = 1.0) -> float:
        return self.gpu if mode == "graph" else max(self.gpu, self.host * host_factor)


Clock = Callable[[Callable[[], object], int, float], CallTime]


def cuda_clock(run: Callable[[], object], times: int, ahead: float) -> CallTime:
    """Time `times` calls on the current stream. ahead: the time, in us, by which the host must be ahead of the GPU,
    which first sleeps 1.5 times as long. Without the sleep, the GPU would wait for the host in short calls, which never
    happens in a CUDA graph."""
    torch.cuda._sleep(int(1.5 * CYCLES * ahead))
    began = time.perf_counter()
    events = span(repeated(run, times))
    took = (time.perf_counter() - began) * 1e6
    events[1].synchronize()
    return CallTime(length(events) / times, took / times)


def back_to_back(run: Callable[[], object], times: int, ahead: float) -> CallTime:
    """Time passes that are launched one after another, including the host's work for the launches. The host's time is
    the time of the first launch, which waits for no full queue, but at most the time of a pass."""
    torch.cuda.synchronize()
    began = time.perf_counter()
    run()
    launched = time.perf_counter()
    repeated(run, times - 1)()
    torch.cuda.synchronize()
    us = (time.perf_counter() - began) * 1e6 / times
    return CallTime(us, min((launched - began) * 1e6, us))
