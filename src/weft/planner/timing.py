"""How long a call takes on the GPU.

`chooser.span` is what every timing in weft rests on: two events around work, on one stream. What runs between them
differs, and so does what is measured. `CudaTimer` replays one call back to back from a graph, with all ranks at once,
for the profile. bench/common/timing.py and the demo time several functions in turns, so that a GPU that gets hot slows
all of them alike. The self-check (auto.py) times a GEMM on one GPU, without other ranks and in 20 ms.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable
from typing import Protocol, TypeVar

import torch

from ..backends.base import Stream
from ..chooser import CYCLES, Events, length, span
from ..world import World

GRAPH_US = 3000.0  # length of what is captured, in as many calls as that takes, up to BATCH
BATCH, REPLAYS, MOST_REPLAYS = 20, 4, 16  # of short things up to MOST_REPLAYS replays
AHEAD = 200 * CYCLES  # longer than the host takes to launch a replay

Timed = Callable[[int], Events]  # of so many calls
R = TypeVar("R")


def exchanged(world: World, what: str, value: R) -> list[R]:
    """Every rank's value. Raises RuntimeError where a rank is elsewhere, because something failed there."""
    theirs = world.exchange((what, value))
    if any(t[0] != what for t in theirs):
        raise RuntimeError("another rank failed")
    return [t[1] for t in theirs]


class Timer(Protocol):
    """How long things take, in us; the slowest rank's. Collective."""

    def graph(self, fn: Callable[[], object]) -> float:
        """A call of fn, captured and replayed back to back."""

    def eager(self, fn: Callable[[], object]) -> float:
        """A call of fn, launched back to back."""

    def together(self, fn: Callable[[], object], other: Callable[[Stream], object]) -> tuple[float, float]:
        """How many times as long fn takes while other(stream) runs, and the reverse."""


class CudaTimer:
    """The Timer of GPUs."""

    def __init__(self, world: World) -> None:
        self.world, self.stream, self.pool = world, torch.cuda.Stream(), torch.cuda.graph_pool_handle()
        self.word = torch.zeros(1, device=world.device, dtype=torch.bfloat16)

    def _slowest(self, us: float) -> float:
        return max(exchanged(self.world, "time", us))

    def _meet(self) -> None:
        """All ranks' streams go on from here together."""
        self.world.all_reduce(self.word, self.world.current_stream())

    def _once(self, fn: Callable[[], object]) -> float:
        """us of a call, roughly, after one to warm up."""
        fn()
        self._meet()
        two = span(lambda: (fn(), fn()))
        two[1].synchronize()
        return self._slowest(length(two) / 2)

    def graph(self, fn: Callable[[], object]) -> float:
        with torch.cuda.stream(self.stream):
            once = max(self._once(fn), 1.0)
            calls = max(2, min(BATCH, int(GRAPH_US / once)))
            replays = max(REPLAYS, min(MOST_REPLAYS, int(GRAPH_US / once / BATCH)))
            graph = torch.cuda.CUDAGraph()
            torch.cuda.synchronize()
            with torch.cuda.graph(graph, stream=self.stream, pool=self.pool):
                for _ in range(calls):
                    fn()
            graph.replay()
            spans = []
            for _ in range(replays):
                torch.cuda._sleep(AHEAD)  # else the host's launch counts, which takes longer than what is short
                self._meet()
                spans.append(span(graph.replay))
            torch.cuda.synchronize()
            return self._slowest(statistics.median(map(length, spans)) / calls)

    def eager(self, fn: Callable[[], object]) -> float:
        with torch.cuda.stream(self.stream):
            self._once(fn)
            spans = []
            for _ in range(REPLAYS):
                self._meet()
                spans.append(span(lambda: [fn() for _ in range(BATCH)]))
                torch.cuda.synchronize()
            return self._slowest(statistics.median(map(length, spans)) / BATCH)

    def together(self, fn: Callable[[], object], other: Callable[[Stream], object]) -> tuple[float, float]:
        """The one whose slow-down is asked for runs a third as long as the other, in its middle."""
        with torch.cuda.stream(self.stream):
            side = self.world.side_stream("tune")

            def on_side(count: int) -> Events:
                def beside() -> None:
                    for _ in range(count):
                        other(side)

                return span(beside, side)

            def on_main(count: int) -> Events:
                return span(lambda: [fn() for _ in range(count)])

            def alone(run: Timed, count: int) -> float:
                took = []
                for _ in range(3):
                    self._meet()
                    side.wait_stream(self.stream)
                    timed = run(count)
                    torch.cuda.synchronize()
                    took.append(length(timed))
                return self._slowest(statistics.median(took))

            def within(
                long: Timed, many: int, short: Timed, few: int, first: torch.cuda.Stream, then: torch.cuda.Stream
            ) -> float:
                took = []
                for _ in range(3):
                    self._meet()
                    side.wait_stream(self.stream)
                    long(max(many // 4, 1))
                    then.wait_stream(first)
                    long(many)
                    timed = short(few)
                    torch.cuda.synchronize()
                    took.append(length(timed))
                return self._slowest(statistics.median(took))

            on_side(1)
            on_main(1)
            torch.cuda.synchronize()
            a, b = alone(on_main, 2) / 2, alone(on_side, 2) / 2
            few_a, few_b = (max(2, int(2000 / us)) for us in (a, b))
            many_a, many_b = (max(2, int(8000 / us)) for us in (a, b))
            a, b = alone(on_main, few_a), alone(on_side, few_b)
            slow_a = within(on_side, many_b, on_main, few_a, side, self.stream) / a
            slow_b = within(on_main, many_a, on_side, few_b, self.stream, side) / b
            return max(slow_a, 1.0), max(slow_b, 1.0)
