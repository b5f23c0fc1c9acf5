"""Which calls may be on a GPU at once.

A program that waits keeps its room on an SM. Where the launches of two calls, on two streams, do not all fit on the SMs
together, one rank may start the programs of the first and another rank those of the second; each then waits for
programs that find no room. So the calls of a device that wait have a `Ledger`, which all Worlds of its ranks share. A
call that might not fit beside earlier ones of other streams comes after them (`World.order_residents`).

Every such wait is for a call that the host made before. All ranks make their calls in one order, so the first call that
has not ended waits for none of them, and finds room on every rank: those beside it were admitted with it. It ends, and
so do the others in turn.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import NamedTuple

MOST = 1024  # combinations of launches that are added up; where there are more, calls come one after another


class ResidentPrograms(NamedTuple):
    """The programs of one launch, and what each takes of an SM: registers, shared memory and the like. Collectives of
    one communicator of NCCL come one after another, whatever streams they are on."""

    number: int
    taken: tuple[int, ...]
    communicator: Hashable = None


# What a call launches that waits: for each of its streams, the launches that come there one after another. Empty: it is
# not known.
Launches = tuple[frozenset[ResidentPrograms], ...]
UNKNOWN: Launches = ()


class SMs(NamedTuple):
    """The SMs of a device, and the room on each, in the units of `ResidentPrograms.taken`."""

    number: int
    room: tuple[int, ...]

    def fit(self, launches: Sequence[ResidentPrograms]) -> bool:
        """Return whether all programs of these launches find room, whatever the order and the SMs in which they
        start."""
        collectives = {launch.communicator: launch for launch in launches if launch.communicator is not None}
        launches = [launch for launch in launches if launch.communicator is None] + [*collectives.values()]
        return all(self._always_starts(launch, launches) for launch in launches)

    def _always_starts(self, launch: ResidentPrograms, launches: Sequence[ResidentPrograms]) -> bool:
        """Return whether the last program of `launch` finds an SM beside all others. An SM lacks room for it if the
        programs there take more than the rest of one kind of room. Each adds to that its share of this rest, at most
        1; so there are no more such SMs than the sum of all shares."""

        def share(programs: ResidentPrograms) -> float:
            return max(
                min(1.0, taken / (room - needed + 1))
                for taken, needed, room in zip(programs.taken, launch.taken, self.room, strict=True)
            )

        return sum(programs.number * share(programs) for programs in launches) - share(launch) < self.number


class Ledger:
    """The calls that wait, of all streams of a device, in eager calls or in captures."""

    def __init__(self, sms: SMs) -> None:
        self._sms = sms
        self._calls: dict[Hashable, set[Launches]] = {}  # by stream
        # By stream, the calls of each other stream since it last waited for that one: those that may still run.
        self._running: dict[Hashable, dict[Hashable, set[Launches]]] = {}
        self._fit: dict[Hashable, bool] = {}
        self.last_stream: Hashable = None
        self.recent: set[Launches] = set()  # the calls there since one on another stream

    def enter(self, stream: Hashable, launches: Launches) -> list[Hashable]:
        """Note a call on a stream, and return the streams for which it has to wait."""
        if stream != self.last_stream:
            self.last_stream, self.recent = stream, set()
        self.recent.add(launches)
        running = self._running.get(stream)
        if running is None:
            running = self._running[stream] = {peer: set(calls) for peer, calls in self._calls.items()}
        self._calls.setdefault(stream, set()).add(launches)
        for peer, calls in list(self._running.items()):  # another thread may add one
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
    """The ledgers of one device. A replay of a graph is ordered by its caller, so eager calls do not wait for what was
    captured."""

    def __init__(self, sms: SMs) -> None:
        self.eager, self.captured = Ledger(sms), Ledger(sms)


@dataclass(eq=False)
class Residents:
    """The launches of calls of one kind. They are noted while the first of these calls runs; until then they count as
    all that there is room for."""

    launches: Launches = UNKNOWN
    noted: bool = False


class Notes:
    """The launches of one call that runs."""

    def __init__(self) -> None:
        self.by_stream: dict[Hashable, set[ResidentPrograms]] = {}

    def add(self, stream: Hashable, programs: ResidentPrograms) -> None:
        self.by_stream.setdefault(stream, set()).add(programs)

    @property
    def launches(self) -> Launches:
        return tuple(map(frozenset, self.by_stream.values()))


class Noting:
    """The calls of one rank whose launches are being noted; `listen`, where there is one, is called with whether there
    are any."""

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
