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
from dataclasses import replace

from ..cost.signaled import SignaledCost, SignaledParts
from ..op import REGISTRY, collectives
from ..plans import Plan, Signaled
from .curves import near_mean
from .fits import Fits
from .parts import NotMeasured
from .profile import Profile, identity

GPU_BOUND = 1.5  # the GPU bounds an eager call that takes this many times as long as the host's work


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
        self._eager = functools.cache(self._eager_times)
        self._corrections: dict[Hashable, Callable[[int, int, int], float]] = {}

    def time(
        self,
        op: str,
        plan: Plan,
        m: int,
        n: int,
        k: int,
        mode: str = "graph",
        received: int | None = None,
        slow: float = 1.0,
    ) -> float:
        """Return the time, in us, of one call among back-to-back calls. received: for an all-to-all, the rows of the
        rank that receives most, if that number is larger than M, the rows of the rank that sends most. slow: for eager
        calls, the slow-down of the host relative to the profile, or to `launch`. Raises NotMeasured if the profile
        lacks a measurement."""
        us = self.model(op, plan, m, n, k, received) * math.exp(self._correction(op, plan)(m, n, k))
        if mode == "eager":
            cost = self.cost(op, plan)
            gap, host = self._eager(cost.eager_family(plan))
            launches_us = (self.launch or 0.0) * cost.operations(plan, self.world)
            return max(us + gap, slow * host * self.pace * cost.launches(plan, self.world), slow * launches_us)
        return us

    def _eager_times(self, group: str) -> tuple[float, float]:
        """Return two times in us for a family (all fused plans form one): the difference between an eager call and a
        captured call, and the host's time for a launch, for which the shortest measured eager call is an upper
        bound."""
        calls = [
            (r, cost.launches(plan, self.world))
            for r in self.profile.calls
            for plan in [Plan.from_json(r.plan)]
            for cost in [REGISTRY[r.op].costs.get(type(plan))]
            if cost is not None and cost.eager_family(plan) == group
        ]
        graph = {identity(replace(r, mode="eager")): r.us for r, _ in calls if r.mode == "graph"}
        eager = [(r, launches) for r, launches in calls if r.mode == "eager"]
        host = min((r.us / launches for r, launches in eager), default=0.0)
        gpu_bound = [r for r, launches in eager if identity(r) in graph and r.us > GPU_BOUND * host * launches]
        differences = [r.us - graph[identity(r)] for r in gpu_bound]  # in these calls the GPU hides the host
        return max(min(differences, default=0.0), 0.0), host

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
