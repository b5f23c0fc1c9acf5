"""What runs beside what in a predicted call: works on queues, and how they slow each other down."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

from .profile import Beside


@dataclass(frozen=True)
class Step:
    """One thing on one queue of a predicted call."""

    queue: str
    what: str
    start: float
    end: float


@dataclass(eq=False)
class Work:
    """Something that its queue runs in its turn, once `after` has ended: us alone, and when it runs beside others."""

    queue: str
    what: str
    us: float
    after: Work | None = None
    start: float = -1.0
    end: float = math.inf


def side_by_side(works: Sequence[Work], beside: Beside, summing: float = 1.0) -> list[Step]:
    """When each runs. A queue runs its works in order, one at a time. GEMMs on several queues ("gemm", "gemm 2") share
    the SMs evenly, transfers ("comm", "comm 2") the links; a GEMM and a transfer slow each other down while both run.
    summing: how many times as long GEMMs take beside a transfer that is a sum."""
    queues: dict[str, list[Work]] = defaultdict(list)
    for w in reversed(works):
        queues[w.queue].append(w)
    left = {id(w): w.us for w in works}
    now = 0.0
    while any(queues.values()):
        running = [q[-1] for q in queues.values() if q and (q[-1].after is None or q[-1].after.end <= now)]
        gemms, moving = (sum(w.queue.startswith(q) for w in running) for q in ("gemm", "comm"))
        summed = any(w.queue.startswith("comm") and w.what == "sum" for w in running)
        slow = {
            "comm": max(moving, 1) * (beside.other if gemms else 1.0),
            "gemm": max(gemms, 1) * (beside.gemm if moving else 1.0) * (summing if summed else 1.0),
        }
        slower = [slow.get(w.queue[:4], 1.0) for w in running]
        step = min(left[id(w)] * s for w, s in zip(running, slower, strict=True))
        for w, s in zip(running, slower, strict=True):
            w.start = now if w.start < 0 else w.start
            left[id(w)] -= step / s
            if left[id(w)] <= 1e-9:
                w.end = now + step
                queues[w.queue].pop()
        now += step
    return [Step(w.queue, w.what, w.start, w.end) for w in works]


def end(steps: Sequence[Step]) -> float:
    """When all of them have ended."""
    return max(s.end for s in steps)
