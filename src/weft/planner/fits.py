"""Parameters that cannot be measured alone are fitted to a profile's calls of the plan's kind. The fitted parameters
are the time that ranks wait for each other at every barrier and collective and the rates of copies and collectives
inside a call. For each fused plan, they are also a pull rate during the GEMM and one after it, the slow-down of its
tiles, and a fixed cost."""

from __future__ import annotations

import contextlib
import functools
import math
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TypeVar

import numpy as np

from ..cost.decomposed import Chunking
from ..cost.fused import Pulling
from ..cost.model import AnyCost
from ..cost.signaled import Moving, Signaling
from ..op import REGISTRY, collectives
from ..plans import Decomposed, Plan
from .curves import least_squares
from .parts import NotMeasured, PartTimes
from .profile import Profile, TimedCall

FEWEST = 3  # parameters are fitted only if there are at least this number of calls
Fit = TypeVar("Fit", Chunking, Moving, Pulling, Signaling)


class Fits(PartTimes):
    """The times of parts, and the parameters fitted to the profile's calls. Each parameter is fitted when it is first
    needed."""

    def __init__(self, profile: Profile) -> None:
        super().__init__(profile)
        self.calls: dict[tuple[str, str], list[TimedCall]] = defaultdict(list)  # by (op, family)
        self._measured: dict[str, dict[Plan, None]] = defaultdict(dict)
        for r in profile.calls:
            plan = Plan.from_json(r.plan)
            self.calls[r.op, plan.family].append(r)
            self._measured[r.op][plan] = None
        self._parameters: dict[tuple[str, str], object] = {}

    def graphs(self, op: str, name: str) -> list[TimedCall]:
        """Return the profile's calls of a family in CUDA graphs."""
        return [r for r in self.calls.get((op, name), []) if r.mode == "graph"]

    def measured_plans(self, op: str) -> list[Plan]:
        """Return the plans for which the profile has calls."""
        return list(self._measured.get(op, ()))

    def cost(self, op: str, plan: Plan) -> AnyCost:
        """Return the model of the plan. Raises NotMeasured if the plan has no model on this machine."""
        cost = REGISTRY[op].costs.get(type(plan))
        if cost is None or not cost.possible(self):
            raise NotMeasured(f"no model of {plan} for {op}")
        return cost

    @functools.cached_property
    def chunking(self) -> Chunking:
        """Return the parameters fitted to the profile's decomposed calls of all ops, or the defaults if the profile
        contains fewer than three such calls."""
        ran = [r for op in collectives() for r in self.graphs(op, Decomposed.kind)]
        with contextlib.suppress(NotMeasured):  # `weft tune` may stop before it has measured all parts of the model
            return self._fitted(Chunking(), ran)
        return Chunking()

    def parameters(self, op: str, plan: Plan) -> object:
        """Return the parameters of the plan's model, fitted to the profile's calls of its family; None if the model has
        no parameters."""
        cost = self.cost(op, plan)
        start, key = cost.start(plan), (op, plan.family)
        if start is None or isinstance(start, Chunking):
            return start and self.chunking
        if key not in self._parameters:
            ran = self.graphs(*key)
            if not ran and cost.needs_calls:
                raise NotMeasured(f"no call of {op} with {plan} was measured on {self.machine.name}")
            self._parameters[key] = self._fitted(start, ran, cost.fitted_names(plan), 1 if cost.needs_calls else FEWEST)
        return self._parameters[key]

    def _fitted(self, start: Fit, ran: Sequence[TimedCall], names: Sequence[str] = (), fewest: int = FEWEST) -> Fit:
        """Return the parameters `start`, which are fitted if there are enough calls."""

        def model(plan: Plan, r: TimedCall, x: Fit) -> float:
            return self.cost(r.op, plan).us(self, REGISTRY[r.op].gemm_call(r.m, r.n, r.k), plan, x)

        return fitted(start, ran, model, names) if len(ran) >= fewest else start


def fitted(
    start: Fit,
    ran: Sequence[TimedCall],
    model: Callable[[Plan, TimedCall, Fit], float],
    parameters: Sequence[str] = (),
) -> Fit:
    """Fit the named `parameters` of `start` (empty: all) so that `model` predicts the measured times, by least squares
    of log(model / measured). A penalty keeps the logarithms of the parameters near their start values. The penalty is
    smaller for parameters of waits and links than for slow-downs. model: returns the time of a call, in us, from its
    plan, its row of the profile and the parameters."""
    parameters = parameters or tuple(vars(start))
    start_logs = np.log([getattr(start, n) for n in parameters])
    penalty = np.array([0.3 if n in ("slow", "gemm", "transfer", "copy") else 0.05 for n in parameters])
    plans = [Plan.from_json(r.plan) for r in ran]

    def residuals(x: np.ndarray) -> np.ndarray:
        parameters_at_x = replace(start, **dict(zip(parameters, np.exp(x).tolist(), strict=True)))
        errors = [math.log(model(plan, r, parameters_at_x) / r.us) for plan, r in zip(plans, ran, strict=True)]
        return np.concatenate([errors, penalty * (x - start_logs)])

    return replace(start, **dict(zip(parameters, np.exp(least_squares(residuals, start_logs)).tolist(), strict=True)))
