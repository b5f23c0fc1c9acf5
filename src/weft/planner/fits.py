"""Parameters that cannot be measured alone. They are fitted to a profile's calls of the plan's kind: the time that
ranks wait for each other at every barrier and collective, the rates of copies and collectives inside a call, and for
each fused variant a pull rate under the GEMM and after it, the slow-down of its tiles and a fixed cost."""

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
from .parts import NotMeasured, PartTimes
from .profile import Profile, TimedCall
from .queues import end

Fit = TypeVar("Fit", Chunking, Moving, Pulling, Signaling)


@functools.lru_cache(maxsize=4096)
def family(plan: Plan) -> str:
    """Return the name of the calls whose times are fitted together: those of one kind, of one fused plan, or of the
    signaled plans whose groups copy engines move."""
    if isinstance(plan, Fused):
        return plan.to_json()
    return f"{plan.kind} by copies" if isinstance(plan, Signaled) and plan.copies else plan.kind


class Fits(PartTimes):
    """The parts, and the parameters fitted to the profile's calls. Each is fitted when it is first needed."""

    def __init__(self, profile: Profile, clock: float = 1.0) -> None:
        super().__init__(profile, clock)
        self.calls: dict[tuple[str, str], list[TimedCall]] = defaultdict(list)  # by (op, family)
        for r in profile.calls:
            self.calls[r.op, family(Plan.from_json(r.plan))].append(r)
        self._variants: dict[str, list[Fused]] = {}
        self._copying: dict[str, list[int]] = {}
        self._pulling: dict[tuple[str, Fused], Pulling] = {}
        self._signaling: dict[str, Signaling] = {}
        self._moving: dict[str, Moving] = {}
        self._chunking: Chunking | None = None

    def graphs(self, op: str, name: str) -> list[TimedCall]:
        """Return the profile's calls of a family in CUDA graphs."""
        return [r for r in self.calls.get((op, name), []) if r.mode == "graph"]

    def variants(self, op: str) -> Sequence[Fused]:
        """Return the fused plans of which the profile has calls."""
        if op not in self._variants:
            plans = [Plan.from_json(plan) for name, plan in self.calls if name == op and plan.startswith("{")]
            self._variants[op] = [plan for plan in plans if isinstance(plan, Fused)]
        return self._variants[op]

    def copying(self, op: str) -> list[int]:
        """Return the numbers of SMs that the GEMM leaves free, in the op's measured signaled calls moved by copies."""
        if op not in self._copying:
            ran = self.calls.get((op, family(Signaled(copies=True))), [])
            self._copying[op] = sorted({json.loads(r.plan)["ctas"] for r in ran})
        return self._copying[op]

    @property
    def chunking(self) -> Chunking:
        """Return the parameters fitted to the profile's decomposed calls of all ops; the defaults if there are fewer
        than three."""
        if self._chunking is None:
            self._chunking = Chunking()
            ran = [r for op in collectives() for r in self.graphs(op, "decomposed")]
            with contextlib.suppress(NotMeasured):  # `weft tune` was stopped before it measured what the model needs
                if len(ran) > 2:
                    self._chunking = fitted(
                        Chunking(), ran, lambda plan, r, x: end(decomposed.steps(self, r.op, plan, r.m, r.n, r.k, x))
                    )
        return self._chunking

    def signaling(self, op: str) -> Signaling:
        """Return the parameters fitted to the op's signaled calls whose groups a collective moves."""
        if op not in self._signaling:
            self._signaling[op] = Signaling()
            ran = self.graphs(op, family(Signaled()))
            if len(ran) > 2:
                self._signaling[op] = fitted(
                    Signaling(), ran, lambda plan, r, x: end(signaled.steps(self, op, plan, r.m, r.n, r.k, x))
                )
        return self._signaling[op]

    def moving(self, op: str) -> Moving:
        """Return the parameters fitted to the op's signaled calls whose groups copy engines move."""
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
        """Return the rates of the programs that pull in this variant, fitted to the profile's calls of it."""
        key = (op, plan)
        if key not in self._pulling:
            ran, chunking = self.graphs(op, family(plan)), self.chunking
            if not ran:
                raise NotMeasured(f"no call of {op} with {plan} was measured on {self.machine.name}")
            parameters: tuple[str, ...] = ("fixed", "rate", "drain", "slow")
            if collective(op) == "all_gather":  # the rate of a copy engine is known from decomposed plans
                parameters = ("fixed", "rate", "slow") if isinstance(plan, FusedGather) else ("fixed", "slow")
            self._pulling[key] = fitted(
                Pulling(), ran, lambda _, r, x: fused.us(self, op, plan, r.m, r.n, r.k, x, chunking), parameters
            )
        return self._pulling[key]


def fitted(
    start: Fit,
    ran: Sequence[TimedCall],
    model: Callable[[Any, TimedCall, Fit], float],
    parameters: Sequence[str] = (),
) -> Fit:
    """Fit the named `parameters` of `start` (empty: all) so that `model` predicts the measured times, by least squares
    of log(model / measured). A penalty keeps the parameters' logs near their start values; it is smaller for those that
    describe waits and links than for slow-downs. model: returns the us of a call from its plan, its row of the profile
    and the parameters."""
    parameters = parameters or tuple(vars(start))
    start_logs = np.log([getattr(start, n) for n in parameters])
    penalty = np.array([0.3 if n in ("slow", "gemm", "transfer", "copy") else 0.05 for n in parameters])
    plans = [Plan.from_json(r.plan) for r in ran]

    def residuals(x: np.ndarray) -> np.ndarray:
        parameters_at_x = replace(start, **dict(zip(parameters, np.exp(x).tolist(), strict=True)))
        errors = [math.log(model(plan, r, parameters_at_x) / r.us) for plan, r in zip(plans, ran, strict=True)]
        return np.concatenate([errors, penalty * (x - start_logs)])

    return replace(start, **dict(zip(parameters, np.exp(least_squares(residuals, start_logs)).tolist(), strict=True)))
