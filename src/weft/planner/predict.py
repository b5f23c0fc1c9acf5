"""Predict the time of a plan from a profile, without running the plan (FlashOverlap, section 4).

For each class of its plans an op declares a short model of the work that runs concurrently (`Op.costs`; `weft.cost`,
and `cost.py` next to the ops).

Times of parts come from the profile (`parts`); parameters that cannot be measured alone are fitted to the profile's
calls of the plan's kind (`fits`). Finally, the measured / predicted ratio of the profile's own calls near the shape
corrects the prediction for effects that the model omits.
"""

from __future__ import annotations

import contextlib
import functools
import math
from collections import defaultdict
from collections.abc import Callable, Hashable

from ..cost.signaled import SignaledCost, SignaledParts
from ..op import REGISTRY, collectives
from ..plans import Plan, Signaled
from ..timing import CallTime
from .curves import near_mean
from .fits import Fits
from .parts import NotMeasured
from .profile import Profile


class Predictor(Fits):
    """Predict the time, in us, of any plan at any shape on the profile's machine. N and K are those of one rank's GEMM;
    M counts the rows of all ranks.

    launch: the time, in us, that the host currently needs for one operation of a call; None: the profile's time, if the
    profile has one.
    """

    def __init__(self, profile: Profile, launch: float | None = None) -> None:
        super().__init__(profile)
        profile_launch = profile.constant("launch")
        self.launch = profile_launch if launch is None else launch
        # The host's current time for a launch, divided by its time in the profile.
        self.pace = 1.0 if self.launch is None or profile_launch is None else self.launch / profile_launch
        self._corrections: dict[Hashable, Callable[[int, int, int], float]] = {}

    def call_time(self, op: str, plan: Plan, m: int, n: int, k: int, received: int | None = None) -> CallTime:
        """Return the time of one call among back-to-back calls: the GPU's time, which is that in a CUDA graph, and the
        host's, of which an eager call takes the longer one. received: for an all-to-all, the rows of the rank that
        receives most, if that number is larger than M, the rows of the rank that sends most. Raises NotMeasured if the
        profile lacks a measurement."""
        us = self.model(op, plan, m, n, k, received) * math.exp(self._correction(op, plan)(m, n, k))
        return CallTime(us, self.host(op, plan))

    def time(
        self, op: str, plan: Plan, m: int, n: int, k: int, mode: str = "graph", received: int | None = None
    ) -> float:
        """Return the time, in us, of one call, as `call_time`. mode: "graph" or "eager"."""
        return self.call_time(op, plan, m, n, k, received).us(mode)

    def host(self, op: str, plan: Plan) -> float:
        """Return the time, in us, that the host currently needs for an eager call. This time is that of the shortest
        measured eager call of the plan's class, family and op (or of others of its kind, as far as none was measured),
        and of a launch for each operation that the measured call lacks. An operation that only the measured call has
        subtracts nothing, since a launch is an upper bound on its time: with subtraction, a signaled call of one group
        was chosen at twice the time of cuBLAS + NCCL (4 H200, 2026-11)."""
        family = plan.family
        alike = [
            ((type(known) is not type(plan), known.family != family, known_op != op, us), operations)
            for known_op, known, operations, us in self._eager_calls
            if known.kind == plan.kind
        ]
        (*_, us), operations = min(alike, default=((0.0,), 0))
        further = max(0, self.cost(op, plan).operations(plan, self.world) - operations)
        return self.pace * us + (self.launch or 0.0) * further

    @functools.cached_property
    def _eager_calls(self) -> list[tuple[str, Plan, int, float]]:
        """Return the op, the plan, the number of operations and the time, in us, of the profile's eager calls."""
        return [
            (r.op, plan, cost.operations(plan, self.world), r.us)
            for r in self.profile.calls
            for plan in [Plan.from_json(r.plan)]
            for cost in [REGISTRY[r.op].costs.get(type(plan))]
            if cost is not None and r.mode == "eager"
        ]

    def model(self, op: str, plan: Plan, m: int, n: int, k: int, received: int | None = None) -> float:
        """Return `time` in a CUDA graph, without the correction by measured calls."""
        if op not in REGISTRY or not REGISTRY[op].collective:
            raise ValueError(f"{op!r} is not one of {sorted(collectives())}")
        if self.world == 1:
            return self.gemm(m, n, k)
        call = REGISTRY[op].gemm_call(m, n, k, received)
        return self.cost(op, plan).us(self, call, plan, self.parameters(op, plan))

    def signaled_parts(self, op: str, plan: Signaled, m: int, n: int, k: int) -> SignaledParts:
        """Return the times of the parts that the accumulate rule combines."""
        cost = self.cost(op, plan)
        assert isinstance(cost, SignaledCost)
        return cost.parts(self, REGISTRY[op].gemm_call(m, n, k), plan, self.parameters(op, plan))

    def fit(self) -> None:
        """Fit all parameters now, so that no prediction waits for a fit."""
        for op in dict.fromkeys(op for op, _ in self.calls):
            for plan in self.measured_plans(op):
                with contextlib.suppress(NotMeasured):
                    self._correction(op, plan)

    def _correction(self, op: str, plan: Plan) -> Callable[[int, int, int], float]:
        """Return log(measured / model) by shape, from the profile's calls of this family."""
        key = (op, plan.family)
        if key not in self._corrections:
            points: dict[tuple[int, int, int], list[float]] = defaultdict(list)
            for r in self.graphs(*key):
                model = self.model(op, Plan.from_json(r.plan), r.m, r.n, r.k)
                points[r.m, r.n, r.k].append(math.log(r.us / model))
            self._corrections[key] = near_mean(points)
        return self._corrections[key]
