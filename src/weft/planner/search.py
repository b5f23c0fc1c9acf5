"""This module finds the best plan for a shape without running any plan. The models of the op (`Op.costs`) list the
candidates, and the predictor predicts their times.

An overlapped plan is chosen only if it is predicted faster than sequential by more than `gain`.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass

from ..chooser import bucket
from ..cost.model import Conditions
from ..op import REGISTRY
from ..plans import Plan, Sequential, Signaled, settings
from ..timing import CallTime
from .parts import NotMeasured
from .predict import Predictor
from .table import GAIN

EAGER_GAIN = 1.05
SLOW_HOST = 2.0  # the factor by which a host may be slower than when it was timed
UNRANKED = 1.25  # the order of plans of different classes with times predicted within this factor is unknown


@dataclass(frozen=True)
class Option:
    """A plan and its predicted time."""

    plan: Plan
    us: float


@dataclass(frozen=True)
class Decision:
    """The plan chosen for one op and shape, and the candidates. N and K are those of one rank's GEMM; M counts the rows
    of all ranks.

    plan: the plan that "auto" runs. why: the basis of the decision, in words. options: all candidates by predicted
    time, the fastest first; empty if nothing was predicted. `print` shows the best candidate of every kind.
    """

    op: str
    m: int
    n: int
    k: int
    world: int
    mode: str
    plan: Plan
    why: str
    options: tuple[Option, ...] = ()

    @property
    def us(self) -> float | None:
        """Return the predicted time of the plan in us, or None."""
        return next((o.us for o in self.options if o.plan == self.plan), None)

    @property
    def sequential(self) -> float | None:
        return next((o.us for o in self.options if isinstance(o.plan, Sequential)), None)

    def __str__(self) -> str:
        how = {"graph": "in a CUDA graph", "eager": "eager"}[self.mode]
        lines = [f"{self.op}, M {self.m}, N {self.n}, K {self.k}, {self.world} GPUs, {how}: {brief(self.plan)}"]
        lines.append(f"  {self.why}")
        shown = set()
        for o in self.options:
            best = o.plan.kind not in shown
            if not best and o.plan != self.plan:
                continue
            shown.add(o.plan.kind)
            ratio = f"{self.sequential / o.us:6.2f}x" if self.sequential else ""
            lines.append(f"  {'>' if o.plan == self.plan else ' '} {o.us:9.1f} us {ratio}  {brief(o.plan)}")
        left = len(self.options) - (len(lines) - 2)
        return "\n".join([*lines, f"    ({left} more candidates in .options)"] if left > 0 else lines)


def gain(mode: str) -> float:
    """Return the speedup over sequential that a plan must be predicted to have. Eager calls need EAGER_GAIN: plans with
    a smaller predicted gain were slower as often as faster (2 H200, 2026-11), because host time varies between
    calls."""
    return GAIN if mode == "graph" else EAGER_GAIN


def wins(time: CallTime, sequential: CallTime, mode: str) -> bool:
    """Return whether a plan is predicted to be faster than sequential by more than `gain`. An eager plan must be this
    much faster on the present host or on one slower by SLOW_HOST, and slower than sequential on neither, because the
    speed of a host changes by this factor within minutes: 53 us in a profile, 61 to 147 us in two runs (sequential
    calls of the smallest sizes, 2 H200, 2026-11). Where the host bounds the call, a plan of one launch, which needs
    less of the host than sequential, therefore wins on hosts of any speed (GEMM + reduce-scatter, 4 H200, 2026-11:
    fused 92 us, sequential 145 us). A plan on several streams needs more of the host than sequential, and wins only
    where the GPU hides the host's time."""
    ratios = [sequential.us(mode, slow) / time.us(mode, slow) for slow in (1.0, SLOW_HOST)]
    return min(ratios) >= 1 and max(ratios) > gain(mode)


def brief(plan: Plan) -> str:
    """Return a plan as text: its kind, a word for its variant, and the fields that differ from its class's defaults."""
    defaults = settings(type(plan)())
    settings_text = [plan.variant] if plan.variant else []
    settings_text += [f"{name}={value}" for name, value in settings(plan).items() if value != defaults[name]]
    return f"{plan.kind} ({', '.join(settings_text)})" if settings_text else plan.kind


def candidates(
    p: Predictor,
    op: str,
    m: int,
    n: int,
    k: int,
    even: bool = True,
    received: int | None = None,
    movable: bool | None = None,
    limits: bool = True,
) -> list[Plan]:
    """Return the plans whose times are worth predicting; the cost models of the op's plans list these plans.

    even, movable, limits: as for `Conditions`; movable None: depends on M (`Op.movable`).
    """
    if p.world == 1:
        return [Sequential()]
    definition = REGISTRY[op]
    if movable is None:
        movable = definition.movable(Signaled(copies=True), m, p.world)
    conditions = Conditions(even, movable, limits, p.measured_plans(op), lambda plan: p.parameters(op, plan))
    call = definition.gemm_call(m, n, k, received)
    return [plan for cost in definition.costs.values() for plan in cost.candidates(p, call, conditions)]


def near(m: int, world: int) -> int:
    """Return m rounded up to a grid of 16 steps per octave; the plan of `m` is chosen for the returned M. Rounding down
    could remove a wave, and a plan for fewer waves would need a separate wave for the last tiles."""
    rounded = bucket(m, 16)
    return rounded if m % world else -(-rounded // world) * world


class Planner:
    """Choose plans with the predictor of one profile, and store the choices."""

    def __init__(self, predictor: Predictor) -> None:
        self.predictor = predictor
        self.decide = functools.lru_cache(maxsize=16384)(self._decide)
        self.sum = functools.lru_cache(maxsize=16384)(self._sum)
        self.nearest = functools.lru_cache(maxsize=16384)(self._nearest)
        predictor.fit()  # so that no decision waits for the fit

    def _decide(
        self,
        op: str,
        m: int,
        n: int,
        k: int,
        mode: str = "graph",
        even: bool = True,
        received: int | None = None,
        movable: bool | None = None,
        limits: bool = True,
    ) -> Decision:
        """Return the fastest of the candidates that win against sequential (`wins`), or sequential if there is none.
        Raises NotMeasured if the profile lacks even the sequential time."""
        p, times = self.predictor, dict[Plan, CallTime]()
        for plan in candidates(p, op, m, n, k, even, received, movable, limits):
            try:
                times[plan] = p.call_time(op, plan, m, n, k, received)
            except NotMeasured:
                if isinstance(plan, Sequential):
                    raise
        # Where the host bounds several plans of one launch, the GPU's time decides, as it does on a faster host.
        fastest = sorted(times, key=lambda plan: (times[plan].us(mode), times[plan].gpu))
        sequential = times[Sequential()]
        best = next((plan for plan in fastest if wins(times[plan], sequential, mode)), Sequential())
        why = f"predicted from the profile of {p.machine.name} ({p.profile.source}, {p.profile.created[:10]})"
        options = tuple(Option(plan, times[plan].us(mode)) for plan in fastest)
        return Decision(op, m, n, k, p.world, mode, best, why, options)

    def host_bounds(self, op: str, m: int, n: int, k: int) -> bool:
        """Return whether a host slower by SLOW_HOST needs more time for a sequential eager call than the GPU, or
        whether nothing is predicted. The fastest plan then depends on the host's speed, which a profile does not
        contain: of 131 eager sizes, predictions left 37 to 46 below 0.98x of cuBLAS + NCCL (4 H200, 2026-11), and
        trials at the first call left 5 of 88 (4 H100)."""
        try:
            time = self.predictor.call_time(op, Sequential(), m, n, k)
        except NotMeasured:
            return True
        return time.us("eager", SLOW_HOST) > time.gpu

    def rivals(self, op: str, m: int, n: int, k: int, limits: bool = True) -> list[Plan]:
        """Return the fastest plan of each class whose predicted time on the GPU is within UNRANKED of the fastest
        plan's; none if only one class is, or if the profile lacks a measurement. As in `_nearest`, the plans are those
        of `near(m)`, since a search takes milliseconds. Of 68 drawn calls of more than 150 us, a tenth took 15% to 23%
        longer than predicted, relative to sequential calls, and without a trial two were 7% and 9% slower than the best
        library (4 H200, 2026-11)."""
        world, planned_m = self.predictor.world, near(m, self.predictor.world)
        movable = REGISTRY[op].movable(Signaled(copies=True), m, world)
        try:
            decision = self.decide(op, planned_m, n, k, "graph", m % world == 0, movable=movable, limits=limits)
        except NotMeasured:
            return []
        best: dict[type[Plan], Option] = {}
        for option in decision.options:
            best.setdefault(type(option.plan), option)
        close = [option.plan for option in best.values() if option.us <= UNRANKED * decision.options[0].us]
        return close if len(close) > 1 else []

    def _sum(self, nbytes: int, passes: float = 0.0) -> Plan:
        """Return the fastest plan of an all-reduce of `nbytes` bytes alone: NCCL's, or a low-latency plan. passes: the
        bytes that the kernels after NCCL's read and write, divided by `nbytes`; a low-latency plan includes the work of
        these kernels. Raises NotMeasured."""
        p = self.predictor
        library = p.latency("all_reduce", nbytes) + p.optional("local", passes * nbytes)
        times = p.low_latency_times("all_reduce", nbytes)
        best = min(times, key=lambda plan: times[plan], default=Sequential())
        return best if best in times and library > GAIN * times[best] else Sequential()

    def _nearest(self, op: str, m: int, n: int, k: int, mode: str, limits: bool = True) -> Plan:
        """Return the plan that "auto" runs. The plan is that of `near(m)`, so serving, where M changes with every
        batch, searches a few hundred times and not once for every M. The plan is sequential if that plan is not
        predicted to be faster than sequential at M itself. Every rank receives the same plan, independent of earlier
        choices. Raises NotMeasured."""
        p, planned_m = self.predictor, near(m, self.predictor.world)
        movable = REGISTRY[op].movable(Signaled(copies=True), m, p.world)
        plan = self.decide(op, planned_m, n, k, mode, m % p.world == 0, movable=movable, limits=limits).plan
        if planned_m == m or isinstance(plan, Sequential):
            return plan
        time, sequential = (p.call_time(op, q, m, n, k) for q in (plan, Sequential()))
        return plan if wins(time, sequential, mode) else Sequential()
