"""The common part of the cost models of fused plans: the rates of the programs that pull."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import TypeVar

from ..plans import Fused
from .model import Conditions, Cost, GemmCall, Parts, has_16_byte_rows

F = TypeVar("F", bound=Fused)


@dataclass(frozen=True)
class Pulling:
    """Parameters of one fused variant. `rate` and `drain` are the rates of the programs that pull, in GB/s, during the
    GEMM and after it. `slow` is the ratio of a tile's time while these programs run to the tile's time alone. `fixed`
    is the remaining time of a call, in us."""

    fixed: float = 20.0
    rate: float = 150.0
    drain: float = 300.0
    slow: float = 1.05


class FusedCost(Cost[F, Pulling]):
    """The cost model of an op's fused plans of one class. The candidates are the plans with calls in the profile;
    without such calls the model predicts nothing."""

    needs_calls = True

    def __init__(self, plan: type[F]) -> None:
        self.plan = plan

    def start(self, plan: F) -> Pulling:
        return Pulling()

    def candidates(self, p: Parts, call: GemmCall, conditions: Conditions) -> Iterable[F]:
        return [plan for plan in conditions.measured if type(plan) is self.plan] if has_16_byte_rows(call) else ()
