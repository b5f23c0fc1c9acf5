"""The rule that determines which calls may be on a GPU at once.

A program that waits occupies its SM. Suppose that the launches of two calls, on two streams, do not all fit on the SMs
together. Then one rank may start the programs of the first call and another rank the programs of the second; each call
then waits for programs for which no SM is free. Therefore a `Ledger`, which all Worlds of a device's ranks share,
records the device's calls with programs that wait. A call that might not fit on the SMs together with earlier calls on
other streams starts after these calls (`World.order_residents`).

A call waits in this way only for calls that the host made before it. All ranks make their calls in one order, so the
first unfinished call waits for no other call. The first unfinished call finds free SMs on every rank, because the
ledger admitted the concurrent calls together with it. The first call ends, and then the other calls end in turn.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import contextmanager
from typing import NamedTuple

SUM_ERROR = 1e-9  # more than the rounding error of a sum of shares of SMs
MOST = 1024  # the largest number of examined combinations of launches; beyond it, calls run one after another


class ResidentPrograms(NamedTuple):
    """The programs of one launch, and the resources of an SM that each program occupies: registers, shared memory and
    the like. Collectives of one NCCL communicator run one after another, on all streams."""

    number: int
    taken: tuple[int, ...]
    communicator: Hashable = None


# A call's launches that wait: for each of its streams, the launches that run there one after another. Empty: the
# launches are not known.
Launches = tuple[frozenset[ResidentPrograms], ...]
UNKNOWN: Launches = ()


class SMs(NamedTuple):
    """The SMs of a device, and the free resources on each SM, in the units of `ResidentPrograms.taken`."""

    number: int
    room: tuple[int, ...]

    def fit(self, launches: Sequence[ResidentPrograms]) -> bool:
        """Return whether all programs of these launches fit, for any order of their starts and on any SMs."""
        collectives = {launch.communicator: launch for launch in launches if launch.communicator is not None}
        launches = [launch for launch in launches if launch.communicator is None] + [*collectives.values()]
        return all(self._always_starts(launch, launches) for launch in launches)

    def _always_starts(self, launch: ResidentPrograms, launches: Sequence[ResidentPrograms]) -> bool:
        """Return whether the last program of `launch` fits on an SM beside all other programs. An SM has no room for
        that program if the programs on the SM occupy more of one resource than that program leaves free. Each of the
        other programs contributes its share of that remainder, at most 1. The number of SMs without room is therefore
        at most the sum of all shares."""

        def share(programs: ResidentPrograms) -> float:
            return max(
                min(1.0, taken / (room - needed + 1))
                for taken, needed, room in zip(programs.taken, launch.taken, self.room, strict=True)
            )

        occupied = sum(programs.number * share(programs) for programs in launches) - share(launch)
        return occupied < self.number - SUM_ERROR


class Ledger:
    """The calls with programs that wait, on all streams of a device; either eager calls or captured ones."""

    def __init__(self, sms: SMs) -> None:
        self._sms = sms
        self._calls: dict[Hashable, set[Launches]] = {}  # the calls of each stream
        # By stream, the calls of each other stream that may still run: the calls made since this stream last waited for
        # the other stream.
        self._running: dict[Hashable, dict[Hashable, set[Launches]]] = {}
        self._fit: dict[Hashable, bool] = {}
        self.last_stream: Hashable = None
        self.recent: set[Launches] = set()  # the calls on `last_stream` made since the last call on a different stream

    def enter(self, stream: Hashable, launches: Launches) -> list[Hashable]:
        """Record a call on a stream, and return the streams that the call has to wait for."""
        # torch compares a stream only with a stream: `stream != None` is False, and other objects are read as streams.
        if self.last_stream is None or stream != self.last_stream:
            self.last_stream, self.recent = stream, set()
        self.recent.add(launches)
        running = self._running.get(stream)
        if running is None:
            running = self._running[stream] = {peer: set(calls) for peer, calls in self._calls.items()}
        self._calls.setdefault(stream, set()).add(launches)
        for peer, calls in list(self._running.items()):  # a copy, because another thread may add an entry
            if peer != stream:
                calls.setdefault(stream, set()).add(launches)
        key = launches, *(frozenset(calls) for calls in running.values())
        if key not in self._fit:
            self._fit[key] = self._fit_together(launches, list(running.values()))
        if self._fit[key]:
            return []
        waits_for = list(running)
        running.clear()
        return waits_for

    def _fit_together(self, launches: Launches, running: Sequence[set[Launches]]) -> bool:
        """Return whether a call fits beside any one call of each other stream."""
        by_stream = [{launches}, *running]
        if len(by_stream) > 1 and any(UNKNOWN in calls for calls in by_stream):
            return False
        choices = [set(itertools.chain(*(itertools.product(*call) for call in calls))) for calls in by_stream]
        combinations = itertools.islice(itertools.product(*choices), MOST + 1)
        return len(by_stream) == 1 or all(
            i < MOST and self._sms.fit([*itertools.chain(*chosen)]) for i, chosen in enumerate(combinations)
        )


class Ledgers:
    """The ledgers of one device. The caller orders the replays of a graph, so eager calls do not wait for captured
    calls."""

    def __init__(self, sms: SMs) -> None:
        self.eager, self.captured = Ledger(sms), Ledger(sms)


class Notes:
    """The launches of the call that is running."""

    def __init__(self) -> None:
        self.by_stream: dict[Hashable, set[ResidentPrograms]] = {}

    def add(self, stream: Hashable, programs: ResidentPrograms) -> None:
        self.by_stream.setdefault(stream, set()).add(programs)

    @property
    def launches(self) -> Launches:
        return tuple(map(frozenset, self.by_stream.values()))


class Noting:
    """The running calls of one rank that note their launches. `listen`, if set, is called with True when there are such
    calls, and otherwise with False."""

    def __init__(self, listen: Callable[[bool], None] = lambda noting: None) -> None:
        self._notes: list[Notes] = []
        self._listen = listen

    def add(self, stream: Hashable, programs: ResidentPrograms) -> None:
        for notes in self._notes:
            notes.add(stream, programs)

    @contextmanager
    def noting(self) -> Iterator[Notes]:
        notes = Notes()
        self._notes.append(notes)
        self._listen(True)
        try:
            yield notes
        finally:
            self._notes.remove(notes)
            self._listen(bool(self._notes))
