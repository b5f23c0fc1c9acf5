"""One chooser makes every decision among several candidates: the plan of an op, the library of a GEMM or of attention,
and the way in which a decoder's layers run. A `Choice` lists the candidates. The decision is, in this order:

    remembered    the earlier choice of this World, or of this process, or the stored result of earlier measurements
    measured      at the first use outside a capture, if times mean something there, in rounds (`timing.interleaved`).
                  The expected candidate stays unless another is `worth` times as fast; among others, an earlier one
                  stays unless a later one is MIN_SPEEDUP times as fast
    predicted     inside a capture, and where ranks share a GPU or are emulated

The stored candidate, or else the predicted one, is the `expected` candidate. The expected candidate is timed with the
other candidates, which are chosen only if they are faster. An op chooses its plan by `Op.choose` (op.py), which reads
the stored plan (planner/table.py) and calls `trial` and `remembered`; `Chooser.choose` makes all other choices.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, Generic, Protocol, TypeAlias, TypeVar

import torch

from .timing import CallTime, Clock, cuda_clock, interleaved

TIMES, ROUNDS = 10, 5
LAUNCH = 500.0  # an upper bound, in us, on the time that the host usually needs for a call
LONG = 40_000.0  # the maximum time, in us, of a candidate's calls in one round; a round has at most TIMES calls
TIMED_ALONE = 150_000.0  # the time, in us, from which a call is timed alone even if shorter ones are timed together
ENOUGH = 250_000.0  # the time, in us, of a candidate's calls after which one further round is enough
MIN_SPEEDUP = 1.01  # medians of equal candidates differ by up to about 1%
LAUNCH_MODES = ("eager", "graph")

R = TypeVar("R")
T = TypeVar("T", bound=Hashable)


def bucket(m: int, steps: int) -> int:
    """Return the number of rows m rounded up to one of `steps` steps per octave (`steps` is a power of two). Calls in
    one bucket share a decision."""
    step = 1 << max(m.bit_length() - steps.bit_length(), 0)
    return -(-m // step) * step


def rounds_of(us: float) -> int:
    """Return the number of rounds for calls of this time, at least two. The longer a call, the less its times differ,
    so the median of a few long calls is as exact as that of many short calls."""
    return min(ROUNDS, 1 + math.ceil(ENOUGH / us))


@dataclass(frozen=True)
class Choice(Generic[T]):
    """A decision to make. key: identifies the uses that share the decision. The key of a collective choice is the same
    on every rank. expected: returns, for "graph" or "eager", the candidate that is stored or predicted as the fastest.
    candidates: returns the candidates to time with it, the same on every rank; none if nothing is timed. run: the
    function that runs a candidate. prepare: the function that is called once for each candidate before the candidate
    runs. title, sizes: describe the trial. worth: how many times as fast as the expected candidate another must be.
    host_factor: the largest factor by which the host's part of an eager call's time grows in the uses that share the
    decision. hopeless: a candidate other than the expected one is not timed in rounds if its first timed calls take
    more than this many times the fastest candidate's time. If only the expected one is left, none is. together: the
    least number of calls that are timed together, unless a call takes TIMED_ALONE."""

    key: Hashable
    expected: Callable[[str], T]
    candidates: Callable[[], Sequence[T]] = tuple
    run: Callable[[T], object] = lambda candidate: None
    prepare: Callable[[T], object] = lambda candidate: None
    title: str = ""
    sizes: tuple[int, ...] = ()
    worth: float = MIN_SPEEDUP
    host_factor: float = 1.0
    hopeless: float = math.inf
    together: int = 1

    def calls(self, us: float) -> int:
        """Return the number of calls to time together if a call takes this time."""
        return max(1 if us >= TIMED_ALONE else self.together, min(TIMES, int(LONG / us)))


@dataclass(frozen=True)
class Trial(Generic[T]):
    """The times of the candidates of one choice. times: by candidate, the slowest rank's times. expected: by mode, the
    expected candidate. faster: by mode, the candidates that were faster than it, in the order of choice."""

    title: str
    sizes: tuple[int, ...]
    times: dict[T, CallTime]
    expected: dict[str, T]
    faster: dict[str, tuple[T, ...]]

    def chosen(self, mode: str) -> T:
        """Return the candidate to run."""
        return next(iter(self.faster[mode]), self.expected[mode])

    def timings(self, mode: str) -> str:
        """Return the times as a sentence that starts with the fastest candidate."""
        us = sorted((time.us(mode), str(candidate)) for candidate, time in self.times.items())
        return "timed at the first call of this size: " + ", ".join(
            f"{candidate} {time:.0f} us" for time, candidate in us
        )


AnyTrial: TypeAlias = Trial[Any]


class Ranks(Protocol):
    """The part of a World that a collective choice uses."""

    def exchange(self, obj: R, title: str = ..., /) -> list[R]: ...
    def wait_for_streams(self) -> None: ...
    def log_once(self, message: str) -> None: ...


@dataclass(eq=False)
class Chooser:
    """The decisions of one World, which its ranks make together; or, without `ranks`, the decisions of one rank alone.

    clock: times calls; None if times mean nothing. capturing: returns whether the current stream is being captured.
    """

    clock: Clock | None
    capturing: Callable[[], bool]
    ranks: Ranks | None = None
    trials: dict[Hashable, AnyTrial] = field(default_factory=dict)
    alone: ClassVar[Chooser]  # this process's chooser, for choices that do not involve other ranks

    def choose(self, choice: Choice[T], mode: str = "graph") -> T:
        """Return the candidate to run. With several ranks, the first call is collective."""
        self.trial(choice)
        known = self.remembered(choice.key, mode)
        return choice.expected(mode) if known is None else known

    def remembered(
        self, key: Hashable, mode: str, usable: Callable[[Any], bool] = lambda candidate: True
    ) -> Any | None:
        """Return the fastest usable candidate that was measured to be faster than the expected one, or None."""
        trial = self.trials.get(key)
        return next(filter(usable, trial.faster[mode]), None) if trial else None

    def trial(self, choice: Choice[T]) -> Trial[T] | None:
        """Return the trial of this choice, and run it now if there was none; return None if nothing is timed."""
        known = self.trials.get(choice.key)
        if known is not None or self.clock is None:
            return known
        if not self.capturing():
            candidates = choice.candidates()  # may run some candidates to check their results
            known = self._timed(choice, candidates) if candidates else None
            if known is not None:
                self.trials[choice.key] = known
        elif self.ranks is not None and choice.candidates():
            self.ranks.log_once(f"{choice.title}: a size first seen inside a CUDA graph capture cannot be timed")
        return known

    def last(self, title: str, sizes: tuple[int, ...]) -> AnyTrial | None:
        """Return the last trial with this title and exactly these sizes, or None."""
        return next((t for t in reversed(self.trials.values()) if (t.title, t.sizes) == (title, sizes)), None)

    def _timed(self, choice: Choice[T], candidates: Sequence[T]) -> Trial[T]:
        expected = {mode: choice.expected(mode) for mode in LAUNCH_MODES}
        single_calls: dict[T, CallTime] = {}
        for candidate in dict.fromkeys((*expected.values(), *candidates)):
            choice.prepare(candidate)
            choice.run(candidate)
            # All ranks have the same times, and so time equally many calls.
            calls = 1 if min((c.gpu for c in single_calls.values()), default=0.0) >= TIMED_ALONE else choice.together
            single_calls[candidate] = self._slowest([self.time(choice, candidate, calls, LAUNCH)])[0]
        fastest = min(map(max, single_calls.values()))
        limit = choice.hopeless * fastest
        for way, call in single_calls.items():
            if max(call) > limit and way not in expected.values():  # possibly only the first timed call was slow
                again = self.time(choice, way, 1 if call.gpu >= TIMED_ALONE else choice.together, LAUNCH)
                single_calls[way] = min(call, *self._slowest([again]), key=max)
        hopeful = [way for way, call in single_calls.items() if max(call) <= limit or way in expected.values()]
        rivals = hopeful if len(hopeful) > 1 else []

        def sample(candidate: T) -> CallTime:
            gpu, host = single_calls[candidate]
            times = choice.calls(gpu)
            return self.time(choice, candidate, times, host + times * max(host - gpu, 0.0))

        rounds = interleaved(rivals, sample, rounds_of(fastest))
        medians = [CallTime(*map(statistics.median, zip(*samples, strict=True))) for samples in rounds.values()]
        took = single_calls | dict(zip(rounds, self._slowest(medians), strict=True))
        faster = {mode: _faster(choice, candidates, took, mode, expected[mode]) for mode in expected}
        return Trial(choice.title, choice.sizes, took, expected, faster)

    def time(self, choice: Choice[T], candidate: T, times: int, ahead: float) -> CallTime:
        """Time this rank's calls of a candidate; all ranks call this function together."""
        if self.ranks is not None:
            self.ranks.wait_for_streams()
            self.ranks.exchange(None, "start of a trial")
        assert self.clock is not None
        return self.clock(lambda: choice.run(candidate), times, ahead)

    def _slowest(self, times: list[CallTime]) -> list[CallTime]:
        """Return the slowest rank's time for each of these times. Collective."""
        of_ranks = [times] if self.ranks is None else self.ranks.exchange(times, "times of a trial")
        return [CallTime(*map(max, zip(*ranks, strict=True))) for ranks in zip(*of_ranks, strict=True)]


def _faster(
    choice: Choice[T], candidates: Sequence[T], times: Mapping[T, CallTime], mode: str, expected: T
) -> tuple[T, ...]:
    """Return the candidates that are faster than the expected one, both as timed and with the host's time multiplied by
    `host_factor`. Each candidate is the one to choose if all candidates before it are excluded."""

    def is_faster(candidate: T, rival: T, worth: float) -> bool:
        factors = 1.0, choice.host_factor
        return all(times[candidate].us(mode, f) * worth < times[rival].us(mode, f) for f in factors)

    faster: list[T] = []
    while True:
        best = expected
        for candidate in (candidate for candidate in candidates if candidate not in faster):
            worth = choice.worth if best == expected else MIN_SPEEDUP
            best = candidate if is_faster(candidate, best, worth) else best
        if best == expected:
            return tuple(faster)
        faster.append(best)


Chooser.alone = Chooser(cuda_clock, lambda: torch.cuda.is_current_stream_capturing())
