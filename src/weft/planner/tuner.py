"""The timer of `weft tune` replays one call back to back from a graph, on all ranks at once."""

from __future__ import annotations

import statistics
from collections.abc import Callable
from typing import Protocol, TypeVar

import torch

from ..backends.base import Stream
from ..timing import Events, behind_host, captured, length, repeated, span
from ..world import World

GRAPH_US = 3000.0  # the time, in us, for which a captured graph runs; a graph has at most BATCH calls
BATCH, REPLAYS, MOST_REPLAYS = 20, 4, 16  # graphs shorter than GRAPH_US are replayed up to MOST_REPLAYS times

Timed = Callable[[int], Events]  # a function that submits this number of calls and returns the events around them
R = TypeVar("R")


def exchanged(world: World, step: str, value: R) -> list[R]:
    """Return every rank's value. Raises RuntimeError if another rank is at a different step because it failed."""
    values = world.exchange((step, value))
    if any(t[0] != step for t in values):
        raise RuntimeError("another rank failed")
    return [t[1] for t in values]


class Timer(Protocol):
    """A timer that returns the slowest rank's time in us. All methods are collective."""

    def graph(self, fn: Callable[[], object]) -> float:
        """Return the time of one call of fn when calls are captured and replayed back to back."""

    def eager(self, fn: Callable[[], object]) -> float:
        """Return the time of one call of fn when calls are launched back to back."""

    def together(self, fn: Callable[[], object], transfer: Callable[[Stream], object]) -> tuple[float, float]:
        """Return the time of fn while transfer(stream) runs, divided by its time alone, and the same ratio for the
        transfer."""


class CudaTimer:
    """The Timer of GPUs."""

    def __init__(self, world: World) -> None:
        self.world, self.stream, self.pool = world, torch.cuda.Stream(), torch.cuda.graph_pool_handle()
        self.word = torch.zeros(1, device=world.device, dtype=torch.bfloat16)

    def _slowest(self, us: float) -> float:
        return max(exchanged(self.world, "time", us))

    def _rendezvous(self) -> None:
        """Make the streams of all ranks wait for each other, so that they continue together."""
        self.world.all_reduce(self.word, self.world.current_stream())

    def _once(self, fn: Callable[[], object]) -> float:
        """Return the approximate time of a call in us, after a warm-up call."""
        fn()
        self._rendezvous()
        two = span(repeated(fn, 2))
        two[1].synchronize()
        return self._slowest(length(two) / 2)

    def graph(self, fn: Callable[[], object]) -> float:
        with torch.cuda.stream(self.stream):
            once = max(self._once(fn), 1.0)
            calls = max(2, min(BATCH, int(GRAPH_US / once)))
            replays = max(REPLAYS, min(MOST_REPLAYS, int(GRAPH_US / once / BATCH)))
            graph = captured(fn, calls, self.stream, self.pool)
            spans = [behind_host(graph.replay, self._rendezvous) for _ in range(replays)]
            torch.cuda.synchronize()
            return self._slowest(statistics.median(map(length, spans)) / calls)

    def eager(self, fn: Callable[[], object]) -> float:
        with torch.cuda.stream(self.stream):
            self._once(fn)
            spans = []
            for _ in range(REPLAYS):
                self._rendezvous()
                spans.append(span(repeated(fn, BATCH)))
                torch.cuda.synchronize()
            return self._slowest(statistics.median(map(length, spans)) / BATCH)

    def together(self, fn: Callable[[], object], transfer: Callable[[Stream], object]) -> tuple[float, float]:
        """Time each function while the other one runs. The measured function runs a third as long as the other one, in
        the middle of the other's run."""
        with torch.cuda.stream(self.stream):
            side = self.world.side_stream("tune")

            def on_side(count: int) -> Events:
                return span(repeated(lambda: transfer(side), count), side)

            def on_main(count: int) -> Events:
                return span(repeated(fn, count))

            def timed(run: Timed, count: int, load: Timed | None = None, load_calls: int = 0) -> float:
                streams: dict[Timed, torch.cuda.Stream] = {on_side: side, on_main: self.stream}
                times = []
                for _ in range(3):
                    self._rendezvous()
                    side.wait_stream(self.stream)
                    if load:
                        load(max(load_calls // 4, 1))
                        streams[run].wait_stream(streams[load])
                        load(load_calls)
                    events = run(count)
                    torch.cuda.synchronize()
                    times.append(length(events))
                return self._slowest(statistics.median(times))

            on_side(1)
            on_main(1)
            torch.cuda.synchronize()
            a, b = timed(on_main, 2) / 2, timed(on_side, 2) / 2
            short_a, short_b = (max(2, int(2000 / us)) for us in (a, b))
            long_a, long_b = (max(2, int(8000 / us)) for us in (a, b))
            a, b = timed(on_main, short_a), timed(on_side, short_b)
            slow_a = timed(on_main, short_a, on_side, long_b) / a
            slow_b = timed(on_side, short_b, on_main, long_a) / b
            return max(slow_a, 1.0), max(slow_b, 1.0)
