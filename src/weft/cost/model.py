"""The base of all cost models: classes for the sizes of a call, for the times of its parts, and for a model.

An op declares a `Cost` for each class of plans whose time is predictable (`Op.costs`). The file that contains the
`Cost` is next to the op (`ops/<name>/cost.py`), or in this package if several ops share it. The planner accesses plans
only through their models.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any, Generic, NamedTuple, Protocol, TypeAlias, TypeVar

import numpy as np

from ..plans import GemmTile, LowLatencyShot, OneShot, Plan, Sequential, TwoShotLowLatency
from .queues import Slowing, Step, end

if TYPE_CHECKING:
    from .decomposed import Chunking
    from .two_level import OverNodes

ITEM = 2  # bytes of a bfloat16 or float16 element
SHOTS = (OneShot(), TwoShotLowLatency())  # the low-latency plans
P = TypeVar("P", bound=Plan)
F = TypeVar("F")


class GemmCall(NamedTuple):
    """The sizes of one call. N and K are the sizes of the GEMM on one rank; M counts the rows of all ranks.

    `collective` is NCCL's collective. If `gathers` is true, the collective transfers the GEMM's input before the GEMM;
    otherwise it transfers the GEMM's output. In an all-to-all, M is the number of rows that the busiest sender sends,
    and `received` is the number that the busiest receiver receives, if that number is larger.
    """

    collective: str
    gathers: bool
    m: int
    n: int
    k: int
    received: int | None = None

    @property
    def busiest(self) -> int:
        """Return the largest number of rows that a rank sends or receives."""
        return max(self.m, self.received or 0)

    @property
    def skew(self) -> float:
        """Return the ratio of received to sent rows of the busiest rank, at least 1."""
        return max(1.0, (self.received or 0) / self.m)

    def moved(self, rows: int) -> int:
        """Return the number of bytes that the collective transfers for `rows` rows."""
        return rows * (self.k if self.gathers else self.n) * ITEM


class Conditions(NamedTuple):
    """The conditions, besides a call's sizes, that decide which plans are candidates for the call.

    `even` means that all ranks have the same number of rows, as decomposed plans require. `movable` means that copies
    can move the groups of a signaled plan. `limits` means that the number of a communicator's CTAs can be limited;
    otherwise a signaled plan would use a different number of SMs than predicted. `measured` contains the op's plans
    with calls in the profile. `parameters` returns the parameters of a plan's model.
    """

    even: bool
    movable: bool
    limits: bool
    measured: Sequence[Plan]
    parameters: Callable[[Plan], object]


class Occupancy(NamedTuple):
    """The tile of a GEMM, and the number of programs with such tiles that run on one SM at once."""

    tile: GemmTile
    per_sm: int = 1


class Parts(Protocol):
    """The times, in us, of the parts of calls on one machine (`planner.parts.PartTimes`)."""

    world: int
    sms: int
    over_nodes: OverNodes | None

    @property
    def chunking(self) -> Chunking: ...
    def gemm(self, m: int, n: int, k: int) -> float: ...
    def tiles(self, occupancy: Occupancy, programs: int, tiles: int, m: int, n: int, k: int) -> float: ...
    def soft(self, occupancy: Occupancy) -> float: ...
    def latency(self, operation: str, nbytes: float = 0, ctas: int = 0) -> float: ...
    def optional(self, operation: str, nbytes: float = 0) -> float: ...
    def slowdown(self, operation: str, ctas: int) -> Slowing: ...
    def limited(self, operation: str) -> list[int]: ...
    def low_latency_times(self, operation: str, nbytes: int) -> dict[Plan, float]: ...


class Cost(Generic[P, F]):
    """The cost model of an op's calls with one class of plans. If the model has parameters that no probe can measure
    alone, `start` returns their initial values. The planner fits them to the profile's calls of the plan's family. With
    `needs_calls`, the model predicts nothing without such a call."""

    needs_calls = False

    def start(self, plan: P) -> F | None:
        """Return the initial values of the parameters, or None if the model has no parameters."""
        return None

    def fitted_names(self, plan: P) -> tuple[str, ...]:
        """Return the names of the parameters to fit; an empty result means all of them."""
        return ()

    def possible(self, p: Parts) -> bool:
        """Return whether the machine can run such plans."""
        return True

    def steps(self, p: Parts, call: GemmCall, plan: P, fit: F) -> list[Step]:
        """Return the start and end of each step of a call."""
        raise NotImplementedError

    def us(self, p: Parts, call: GemmCall, plan: P, fit: F) -> float:
        """Return the time of a call in us."""
        return end(self.steps(p, call, plan, fit))

    def candidates(self, p: Parts, call: GemmCall, conditions: Conditions) -> Iterable[P]:
        """Return the plans that are worth predicting."""
        return ()

    def operations(self, plan: P, world: int) -> int:
        """Return the number of operations (kernels, copies, barriers, collectives) that the host submits to streams in
        one known call that returns only its result. A sequence (`World.sequence`) is one operation, because the host
        launches it as one graph. Plans of one kind differ in host time by these operations and the events that order
        them."""
        return 2


AnyCost: TypeAlias = Cost[Any, Any]


class InARow(Cost[P, None]):
    """The cost model of cuBLAS and a collective, one after the other."""

    def name(self, call: GemmCall, plan: P) -> str:
        """Return the collective's name in profiles."""
        return call.collective

    def steps(self, p: Parts, call: GemmCall, plan: P, fit: None) -> list[Step]:
        name = self.name(call, plan)
        gemm, transfer = p.gemm(call.m, call.n, call.k), p.latency(name, call.moved(call.busiest))
        if call.gathers:
            return [Step("comm", name, 0, transfer), Step("gemm", "gemm", transfer, transfer + gemm)]
        gemm += self.sort_us(p, call)
        return [Step("gemm", "gemm", 0, gemm), Step("comm", name, gemm, gemm + transfer)]

    def sort_us(self, p: Parts, call: GemmCall) -> float:
        """Return the time, in us, of sorting rows between the GEMM and the collective."""
        return 0.0


class SequentialCost(InARow[Sequential]):
    """The cost model of cuBLAS and NCCL."""

    def candidates(self, p: Parts, call: GemmCall, conditions: Conditions) -> list[Sequential]:
        return [Sequential()]


class ShotCost(InARow[LowLatencyShot]):
    """The cost model of cuBLAS and a low-latency collective, up to the measured number of bytes. `shot` is the measured
    plan."""

    def __init__(self, shot: LowLatencyShot) -> None:
        self.shot = shot

    def name(self, call: GemmCall, plan: LowLatencyShot) -> str:
        return low_latency_name(call.collective, plan)

    def candidates(self, p: Parts, call: GemmCall, conditions: Conditions) -> list[LowLatencyShot]:
        times = p.low_latency_times(call.collective, call.moved(call.m))
        return [self.shot] if has_16_byte_rows(call) and self.shot in times and self.takes(p, call) else []

    def takes(self, p: Parts, call: GemmCall) -> bool:
        """Return whether every rank has rows."""
        return call.m >= p.world


class WholeShotCost(ShotCost):
    """The cost model of a low-latency all-reduce, which can run even if some ranks have no rows."""

    def takes(self, p: Parts, call: GemmCall) -> bool:
        return True


def low_latency_name(collective_name: str, plan: Plan) -> str:
    """Return the profile's name for a collective that runs with a low-latency plan, one of SHOTS."""
    return f"{plan.kind if plan in SHOTS else plan} {collective_name}"


def has_16_byte_rows(call: GemmCall) -> bool:
    """Return whether weft's kernels support these sizes, that is, whether rows are whole 16-byte words."""
    return call.k % 8 == 0 and call.n % 8 == 0


def filled(tiles: float | np.ndarray, programs: int, per_sm: int, soft: float) -> np.ndarray:
    """Return the number of waves in which `programs` programs compute `tiles` tiles (a number or an array). A last wave
    that leaves SMs idle costs less than a full wave, because the busy SMs use the power of the idle ones. The reduction
    is the fraction `soft` of the idle part. With two programs on an SM, half a wave needs half the time."""
    whole, rest = np.divmod(tiles, programs)
    last = np.ceil(rest * per_sm / programs) / per_sm
    return whole + np.where(whole > 0, (1 - soft) * last + soft * rest / programs, last)
