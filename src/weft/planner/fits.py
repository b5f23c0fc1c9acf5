"""What cannot be measured alone and is fitted to a profile's calls of the plan's kind: what ranks lose by waiting for
each other at every barrier and collective, what copies and collectives reach inside a call, and for each fused variant
a rate, a drain rate, a slow-down of the tiles and a fixed cost."""

from __future__ import annotations

import contextlib
import functools
import json
import math
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, TypeVar

import numpy as np

from ..op import collective, collectives
from ..plans import Fused, FusedGather, Plan, Signaled
from .curves import least_squares
from .models import decomposed, fused, signaled
from .models.decomposed import Chunking
from .models.fused import Pulling
from .models.signaled import Moving, Signaling
from .parts import Lacks, PartTimes
from .profile import Profile, TimedCall
from .queues import end

Fit = TypeVar("Fit", Chunking, Moving, Pulling, Signaling)


@functools.lru_cache(maxsize=4096)
def family(plan: Plan) -> str:
    """What calls are alike: of one kind; of one fused variant; signaled and moved by copies."""
    if isinstance(plan, Fused):
        return plan.to_json()
    return f"{plan.kind} by copies" if isinstance(plan, Signaled) and plan.copies else plan.kind


class Fits(PartTimes):
    """The parts, and what was fitted to the profile's calls, each when it is first asked for."""

    def __init__(self, profile: Profile, clock: float = 1.0) -> None:
        super().__init__(profile, clock)
        self.ran: dict[tuple[str, str], list[TimedCall]] = defaultdict(list)  # by op and family
        for r in profile.ran:
            self.ran[r.op, family(Plan.from_json(r.plan))].append(r)
        self._variants: dict[str, list[Fused]] = {}
        self._copying: dict[str, list[int]] = {}
        self._pulling: dict[tuple[str, Fused], Pulling] = {}
        self._signaling: dict[str, Signaling] = {}
        self._moving: dict[str, Moving] = {}
        self._chunking: Chunking | None = None

    def graphs(self, op: str, alike: str) -> list[TimedCall]:
        """The profile's calls of that family inside graphs."""
        return [r for r in self.ran.get((op, alike), []) if r.mode == "graph"]

    def variants(self, op: str) -> Sequence[Fused]:
        """The fused plans of which the profile has calls."""
        if op not in self._variants:
            plans = [Plan.from_json(plan) for name, plan in self.ran if name == op and plan.startswith("{")]
            self._variants[op] = [plan for plan in plans if isinstance(plan, Fused)]
        return self._variants[op]

    def copying(self, op: str) -> list[int]:
        """The SMs left in the op's measured calls that are signaled and moved by copies."""
        if op not in self._copying:
            ran = self.ran.get((op, family(Signaled(copies=True))), [])
            self._copying[op] = sorted({json.loads(r.plan)["ctas"] for r in ran})
        return self._copying[op]

    @property
    def chunking(self) -> Chunking:
        """Fitted to the profile's decomposed calls of all ops, where there are some."""
        if self._chunking is None:
            self._chunking = Chunking()
            ran = [r for op in collectives() for r in self.graphs(op, "decomposed")]
            with contextlib.suppress(Lacks):  # a profile that stopped half way
                if len(ran) > 2:
                    self._chunking = fitted(
                        Chunking(), ran, lambda plan, r, x: end(decomposed.steps(self, r.op, plan, r.m, r.n, r.k, x))
                    )
        return self._chunking

    def signaling(self, op: str) -> Signaling:
        """Fitted to the profile's signaled calls of the op that a collective moves."""
        if op not in self._signaling:
            self._signaling[op] = Signaling()
            ran = self.graphs(op, family(Signaled()))
            if len(ran) > 2:
                self._signaling[op] = fitted(
                    Signaling(), ran, lambda plan, r, x: end(signaled.steps(self, op, plan, r.m, r.n, r.k, x))
                )
        return self._signaling[op]

    def moving(self, op: str) -> Moving:
        """Fitted to the profile's signaled calls of the op that copies move."""
        if op not in self._moving:
            self._moving[op] = Moving()
            ran = self.graphs(op, family(Signaled(copies=True)))
            chunking = self.chunking
            if len(ran) > 2:
                self._moving[op] = fitted(
                    Moving(),
                    ran,
                    lambda plan, r, x: end(signaled.steps_by_copies(self, op, plan, r.m, r.n, r.k, chunking, x)),
                )
        return self._moving[op]

    def pulling(self, op: str, plan: Fused) -> Pulling:
        """What the pulling programs of this variant reach: fitted to the profile's calls of it."""
        key = (op, plan)
        if key not in self._pulling:
            ran, chunking = self.graphs(op, family(plan)), self.chunking
            if not ran:
                raise Lacks(f"no call of {op} with {plan} was measured on {self.machine.name}")
            names: tuple[str, ...] = ("fixed", "rate", "drain", "slow")
            if collective(op) == "all_gather":  # a copy engine is as fast as for decomposed plans
                names = ("fixed", "rate", "slow") if isinstance(plan, FusedGather) else ("fixed", "slow")
            self._pulling[key] = fitted(
                Pulling(), ran, lambda _, r, x: fused.us(self, op, plan, r.m, r.n, r.k, x, chunking), names
            )
        return self._pulling[key]


def fitted(
    start: Fit,
    ran: Sequence[TimedCall],
    model: Callable[[Any, TimedCall, Fit], float],
    names: Sequence[str] = (),
) -> Fit:
    """Least squares of the log of model / measured; the parameters' logs are held near where they start, slow-downs
    more. model: us of a call, by its plan and the parameters."""
    names = names or tuple(vars(start))
    first = np.log([getattr(start, n) for n in names])
    hold = np.array([0.3 if n in ("slow", "gemm", "other", "copy") else 0.05 for n in names])
    plans = [Plan.from_json(r.plan) for r in ran]

    def misses(x: np.ndarray) -> np.ndarray:
        with_ = replace(start, **dict(zip(names, np.exp(x).tolist(), strict=True)))
        off = [math.log(model(plan, r, with_) / r.us) for plan, r in zip(plans, ran, strict=True)]
        return np.concatenate([off, hold * (x - first)])

    return replace(start, **dict(zip(names, np.exp(least_squares(misses, first)).tolist(), strict=True)))
