"""Runs one program under many schedules."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

from ..backends.emulated import EmulatedBackend, spmd
from ..emulator.host import folded
from ..emulator.ran import Ran
from ..errors import Deadlock, Race


@dataclass
class Exploration:
    """The results of a set of seeds. `findings` contains (seed, exception) for each seed that failed."""

    runs: int = 0
    schedules: int = 0  # the number of different schedules
    programs: int = 0  # the number of kernel programs in all runs that did not fail
    modes: Counter[str] = field(default_factory=Counter)
    findings: list[tuple[int, Exception]] = field(default_factory=list)
    ran: Ran = field(default_factory=Ran)  # the kernels of the same runs

    @property
    def races(self) -> list[int]:
        return [seed for seed, error in self.findings if isinstance(error, Race)]

    @property
    def deadlocks(self) -> list[int]:
        return [seed for seed, error in self.findings if isinstance(error, Deadlock)]


def explore(
    fn: Callable[[EmulatedBackend], object],
    size: int,
    seeds: Iterable[int],
    *,
    stop: bool = False,
    **options: Any,
) -> Exploration:
    """Run `fn(backend)` as `size` ranks under every seed. stop: stop at the first finding."""
    out, seen = Exploration(), set()
    for seed in seeds:
        out.runs += 1
        try:
            _, report = spmd(fn, size, seed=seed, **options)
        except Exception as error:
            out.findings.append((seed, folded(error)))
            if stop:
                break
            continue
        seen.add(report.schedule)
        out.programs += report.programs
        out.ran.add(report.ran)
        out.modes[report.mode] += 1
    out.schedules = len(seen)
    return out
