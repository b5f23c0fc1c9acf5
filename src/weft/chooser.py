"""One chooser for whatever can be done in several ways: an op's plans, the library's GEMM, attention's library, how a
decoder's layers run. A `Choice` names the candidates, and they are settled in this order:

    remembered    what this World, or this process, decided before; or what was measured earlier and is stored
    measured      at the first use outside a capture, where times say something: the candidates run in rounds in which
                  each has its turn, so that a GPU that gets hot slows all of them, in an order of its own, so that none
                  always comes behind one that lets the GPU cool. Of times that differ by less than `worth`, the
                  expected candidate's counts, or else that of the one named first
    predicted     inside a capture, and where ranks share a GPU or are emulated

What is stored, or else predicted, is the `expected` candidate: it is one of those that are timed, and the one to beat.
"""

from __future__ import annotations

import random
import statistics
import time
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, Generic, NamedTuple, Protocol, TypeAlias, TypeVar

import torch

TIMES, ROUNDS = 10, 5
LAUNCH = 500.0  # us of the host for a call, at most as a rule
LONG = 40_000.0  # us that a candidate's turn takes with fewer calls than TIMES
WORTH = 1.01  # medians of equal candidates differ by about as much
CYCLES = 2_000  # of a GPU in a us, about
LAUNCHED = ("eager", "graph")

R = TypeVar("R")
T = TypeVar("T", bound=Hashable)
Events = tuple[torch.cuda.Event, torch.cuda.Event]


def span(work: Callable[[], object], stream: torch.cuda.Stream | None = None) -> Events:
    """Events around what `work` gives to a stream, by default the current one."""
    a, b = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    a.record(stream)
    work()
    b.record(stream)
    return a, b


def length(events: Events) -> float:
    """us between them, once both have been reached."""
    a, b = events
    return a.elapsed_time(b) * 1e3


class Took(NamedTuple):
    """The us that a call takes: the GPU's, which does not wait for the host, and the host's."""

    gpu: float
    host: float

    def us(self, mode: str) -> float:
        return self.gpu if mode == "graph" else max(self)


Clock = Callable[[Callable[[], object], int, float], Took]


def cuda_clock(run: Callable[[], object], times: int, ahead: float) -> Took:
    """Time so many calls on the current stream. ahead: us by which the host has to be ahead of the GPU, which sleeps
    1.5 times as long; otherwise what is short would wait for the host, which it does not in a CUDA graph."""
    torch.cuda._sleep(int(1.5 * CYCLES * ahead))
    began = time.perf_counter()
    events = span(lambda: [run() for _ in range(times)])
    took = (time.perf_counter() - began) * 1e6
    events[1].synchronize()
    return Took(length(events) / times, took / times)


@dataclass(frozen=True)
class Choice(Generic[T]):
    """key: what uses that share the decision have in common; collective choices: the same on every rank. expected: by
    mode, "graph" or "eager", what is stored or predicted to be the fastest. candidates: those to time beside it, the
    same on every rank; none where nothing is timed. run: does one of them. prepare: called once for each before it
    runs. title, sizes: for who asks what was timed. worth: how many times as fast as the expected candidate one has to
    be."""

    key: Hashable
    expected: Callable[[str], T]
    candidates: Callable[[], Sequence[T]] = tuple
    run: Callable[[T], object] = lambda candidate: None
    prepare: Callable[[T], object] = lambda candidate: None
    title: str = ""
    sizes: tuple[int, ...] = ()
    worth: float = WORTH


@dataclass(frozen=True)
class Trial(Generic[T]):
    """What the candidates of one choice took. took: for each, the slowest rank's times. expected: for each mode, the
    one to beat. faster: the one that did; None where there is none."""

    title: str
    sizes: tuple[int, ...]
    took: dict[T, Took]
    expected: dict[str, T]
    faster: dict[str, T | None]

    def taken(self, mode: str) -> T:
        faster = self.faster[mode]
        return self.expected[mode] if faster is None else faster

    def said(self, mode: str) -> str:
        us = sorted((took.us(mode), str(each)) for each, took in self.took.items())
        return "timed at the first call of this size: " + ", ".join(f"{each} {took:.0f} us" for took, each in us)


AnyTrial: TypeAlias = Trial[Any]


class Ranks(Protocol):
    """What a collective choice needs of a World."""

    def exchange(self, obj: R) -> list[R]: ...
    def wait_for_streams(self) -> None: ...
    def log_once(self, message: str) -> None: ...


@dataclass(eq=False)
class Chooser:
    """The decisions of one World, which its ranks make together; without `ranks`, of one rank for itself.

    clock: times calls; None where no time says anything. capturing: whether the current stream is in a capture."""

    clock: Clock | None
    capturing: Callable[[], bool]
    ranks: Ranks | None = None
    trials: dict[Hashable, AnyTrial] = field(default_factory=dict)
    alone: ClassVar[Chooser]  # of this process, for choices in which no rank waits for another

    def choose(self, choice: Choice[T], mode: str = "graph") -> T:
        """Return the candidate to run. Collective the first time, for a choice of several ranks."""
        self.trial(choice)
        known = self.remembered(choice.key, mode)
        return choice.expected(mode) if known is None else known

    def remembered(self, key: Hashable, mode: str = "graph") -> Any | None:
        """Return the candidate that was timed faster than the expected one; None where there is none."""
        trial = self.trials.get(key)
        return trial.faster[mode] if trial else None

    def trial(self, choice: Choice[T]) -> Trial[T] | None:
        """Return what the candidates took, timed now where they were not before; None where nothing is timed."""
        known = self.trials.get(choice.key)
        if known is not None or self.clock is None:
            return known
        if not self.capturing():
            candidates = choice.candidates()  # which may run some, to see whether they are right
            known = self._timed(choice, candidates) if candidates else None
            if known is not None:
                self.trials[choice.key] = known
        elif self.ranks is not None and choice.candidates():
            self.ranks.log_once(f"{choice.title}: a size first seen inside a CUDA graph capture cannot be timed")
        return known

    def last(self, title: str, sizes: tuple[int, ...]) -> AnyTrial | None:
        """Return the last trial of exactly these sizes, or None."""
        return next((t for t in reversed(self.trials.values()) if (t.title, t.sizes) == (title, sizes)), None)

    def _timed(self, choice: Choice[T], candidates: Sequence[T]) -> Trial[T]:
        usual = {mode: choice.expected(mode) for mode in LAUNCHED}
        once: dict[T, Took] = {}
        for each in dict.fromkeys((*usual.values(), *candidates)):
            choice.prepare(each)
            choice.run(each)
            once[each] = self._slowest([self.time(choice, each, 1, LAUNCH)])[0]
        rounds: dict[T, list[Took]] = {each: [] for each in once}
        for i in range(ROUNDS):
            for each in random.Random(i).sample(list(rounds), len(rounds)):
                gpu, host = once[each]
                times = max(1, min(TIMES, int(LONG / gpu)))
                rounds[each].append(self.time(choice, each, times, host + times * max(host - gpu, 0.0)))
        medians = [Took(*map(statistics.median, zip(*samples, strict=True))) for samples in rounds.values()]
        took = dict(zip(rounds, self._slowest(medians), strict=True))
        faster: dict[str, T | None] = {}
        for mode, best in usual.items():
            for each in candidates:
                worth = choice.worth if best == usual[mode] else WORTH
                best = each if took[each].us(mode) * worth < took[best].us(mode) else best
            faster[mode] = best if best != usual[mode] else None
        return Trial(choice.title, choice.sizes, took, usual, faster)

    def time(self, choice: Choice[T], candidate: T, times: int, ahead: float) -> Took:
        """Time this rank's calls, which all ranks make together."""
        if self.ranks is not None:
            self.ranks.wait_for_streams()
            self.ranks.exchange("trial")
        assert self.clock is not None
        return self.clock(lambda: choice.run(candidate), times, ahead)

    def _slowest(self, mine: list[Took]) -> list[Took]:
        """Return, for each Took of this rank, the slowest rank's. Collective."""
        every = [mine] if self.ranks is None else self.ranks.exchange(mine)
        return [Took(*map(max, zip(*ranks, strict=True))) for ranks in zip(*every, strict=True)]


Chooser.alone = Chooser(cuda_clock, lambda: torch.cuda.is_current_stream_capturing())
