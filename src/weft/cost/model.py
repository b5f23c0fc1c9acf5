"""What every cost model has: the sizes of a call, the times of its parts, and the class of a model.

An op declares a `Cost` for each class of plans whose time can be predicted (`Op.costs`). It lies beside the op
(`ops/<name>/cost.py`), or here if several ops share it. The planner knows plans by their models alone.
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

ITEM = 2  # bytes of an element, bfloat16 or float16
SHOTS = (OneShot(), TwoShotLowLatency())  # the low-latency plans
P = TypeVar("P", bound=Plan)
F = TypeVar("F")


class GemmCall(NamedTuple):
    """The sizes of one call. M, N, K are those of the GEMM on one rank, but M counts the rows of all ranks.

    collective: the library's collective. gathers: it moves the GEMM's input, before it; otherwise it moves the output.
    received: all-to-all: rows that the busiest receiver gets, if more than M, the rows that the busiest sender sends.
    """

    collective: str
    gathers: bool
    m: int
    n: int
    k: int
    received: int | None = None

    @property
    def busiest(self) -> int:
        """Return the rows of the rank that sends or receives most."""
        return max(self.m, self.received or 0)

    @property
    def skew(self) -> float:
        """Return the rows that the busiest rank receives over those that it sends, at least 1."""
        return max(1.0, (self.received or 0) / self.m)

    def moved(self, rows: int) -> int:
        """Return the bytes that the collective moves of so many rows."""
        return rows * (self.k if self.gathers else self.n) * ITEM


class Conditions(NamedTuple):
    """What decides which plans are candidates for a call, beside its sizes.

    even: all ranks have the same number of rows; without it nothing is decomposed. movable: copies can move the groups
    of a signaled plan. limits: a communicator can be limited to a number of CTAs; without it a signaled plan would take
    other SMs than predicted. measured: the op's plans of which the profile has calls. parameters: those of a plan's
    model.
    """

    even: bool
    movable: bool
    limits: bool
    measured: Sequence[Plan]
    parameters: Callable[[Plan], object]


class Occupancy(NamedTuple):
    """The tile of a GEMM, and how many programs with such tiles an SM holds at once."""

    tile: GemmTile
    per_sm: int = 1


class Parts(Protocol):
    """us of the parts of calls on one machine (`planner.parts.PartTimes`)."""

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
    """The model of an op's calls by one class of plans. A model that has parameters which cannot be measured alone
    returns their start values from `start`; they are fitted to the profile's calls of the plan's family. needs_calls:
    nothing is predicted without such a call."""

    needs_calls = False

    def start(self, plan: P) -> F | None:
        """Return the parameters before they are fitted; None if there are none."""
        return None

    def fitted_names(self, plan: P) -> tuple[str, ...]:
        """Return the names of the parameters to fit; empty: all."""
        return ()

    def possible(self, p: Parts) -> bool:
        """Return whether the machine can run such plans."""
        return True

    def steps(self, p: Parts, call: GemmCall, plan: P, fit: F) -> list[Step]:
        """Return the start and end of each step of a call."""
        raise NotImplementedError

    def us(self, p: Parts, call: GemmCall, plan: P, fit: F) -> float:
        """Return the us of a call."""
        return end(self.steps(p, call, plan, fit))

    def candidates(self, p: Parts, call: GemmCall, conditions: Conditions) -> Iterable[P]:
        """Return the plans that are worth predicting."""
        return ()

    def operations(self, plan: P, world: int) -> int:
        """Return the number of operations that the host submits to streams in one call: kernels, copies, barriers,
        collectives. Each takes the host about as long, including the event that orders it."""
        return 2

    def eager_family(self, plan: P) -> str:
        """Return the name of the plans for whose eager calls the host takes about as long."""
        return plan.family

    def launches(self, plan: P, world: int) -> int:
        """Return the factor by which the host's time for a call grows with the plan's groups."""
        return 1


AnyCost: TypeAlias = Cost[Any, Any]


class InARow(Cost[P, None]):
    """cuBLAS and a collective, one after the other."""

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
        """Return the us between the GEMM and the collective."""
        return 0.0


class SequentialCost(InARow[Sequential]):
    """cuBLAS and NCCL."""

    def candidates(self, p: Parts, call: GemmCall, conditions: Conditions) -> list[Sequential]:
        return [Sequential()]


class ShotCost(InARow[LowLatencyShot]):
    """cuBLAS and a low-latency collective, up to the measured number of bytes. shot: the plan that was measured."""

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
    """A low-latency all-reduce, which needs no rows on every rank."""

    def takes(self, p: Parts, call: GemmCall) -> bool:
        return True


def low_latency_name(collective_name: str, plan: Plan) -> str:
    """Return the name that a profile gives to a collective by a low-latency plan, of which it has those of SHOTS."""
    return f"{plan.kind if plan in SHOTS else plan} {collective_name}"


def has_16_byte_rows(call: GemmCall) -> bool:
    """Return whether weft's kernels take these sizes, whose rows must be whole 16-byte words."""
    return call.k % 8 == 0 and call.n % 8 == 0


def filled(tiles: float | np.ndarray, programs: int, per_sm: int, soft: float) -> np.ndarray:
    """Return the waves that `tiles` tiles (a number or an array) take over `programs` programs. A last wave that leaves
    SMs idle costs less than a whole one, by the fraction `soft` of what is missing, because the other SMs get its
    power. With two programs on an SM, half a wave takes half the time."""
    whole, rest = np.divmod(tiles, programs)
    last = np.ceil(rest * per_sm / programs) / per_sm
    return whole + np.where(whole > 0, (1 - soft) * last + soft * rest / programs, last)
