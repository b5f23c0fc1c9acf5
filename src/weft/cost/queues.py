"""Simulation of the queues of one call. The simulation computes the time at which each piece of work runs, and the
factors by which concurrent pieces slow each other down."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol


class Slowing(Protocol):
    """The slow-downs of a GEMM and of a transfer that run concurrently: for each of them, its time while both run,
    divided by its time alone (`planner.profile.Slowdown`)."""

    @property
    def gemm(self) -> float: ...
    @property
    def transfer(self) -> float: ...


@dataclass(frozen=True)
class Step:
    """One piece of work on a queue of a predicted call, with its start and end in us."""

    queue: str
    name: str
    start: float
    end: float


@dataclass(eq=False)
class Work:
    """A piece of work. The queue runs the piece in order, once `after` has ended. `us` is its time alone."""

    queue: str
    name: str
    us: float
    after: Work | None = None
    start: float = -1.0
    end: float = math.inf


def side_by_side(works: Sequence[Work], slowdown: Slowing) -> list[Step]:
    """Return the start and end of each piece of work. A queue runs its pieces in order, one at a time. GEMMs on several
    queues ("gemm", "gemm 2") share the SMs evenly, and transfers ("comm", "comm 2") share the links. A GEMM and a
    transfer slow each other down while both run."""
    queues: dict[str, list[Work]] = defaultdict(list)
    for w in reversed(works):
        queues[w.queue].append(w)
    remaining = {id(w): w.us for w in works}
    time = 0.0
    while any(queues.values()):
        running = [q[-1] for q in queues.values() if q and (q[-1].after is None or q[-1].after.end <= time)]
        gemms, moving = (sum(w.queue.startswith(q) for w in running) for q in ("gemm", "comm"))
        factors = {
            "comm": max(moving, 1) * (slowdown.transfer if gemms else 1.0),
            "gemm": max(gemms, 1) * (slowdown.gemm if moving else 1.0),
        }
        slow = [factors.get(w.queue[:4], 1.0) for w in running]
        step = min(remaining[id(w)] * s for w, s in zip(running, slow, strict=True))
        for w, s in zip(running, slow, strict=True):
            w.start = time if w.start < 0 else w.start
            remaining[id(w)] -= step / s
            if remaining[id(w)] <= 1e-9:
                w.end = time + step
                queues[w.queue].pop()
        time += step
    return [Step(w.queue, w.name, w.start, w.end) for w in works]


def end(steps: Sequence[Step]) -> float:
    """Return the time at which all steps have ended."""
    return max(s.end for s in steps)
