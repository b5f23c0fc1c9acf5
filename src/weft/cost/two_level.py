"""The model of two-level plans. The node's op runs on the rows of one node after another, with the plan predicted to be
fastest for one node. Transfers between nodes run on a separate queue, before the op (all-gather) or after it.

The node's kernels leave BETWEEN_CTAS SMs to the transfers and are slower in proportion. cuBLAS's GEMM leaves no SMs,
but shares its SMs with the transfers, so the model slows it down by the same factor.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from ..backends.base import BETWEEN_CTAS
from ..plans import TwoLevel
from .model import Conditions, Cost, GemmCall, Parts
from .queues import Step


@dataclass(frozen=True)
class OverNodes:
    """Times on `nodes` equal nodes. `node` contains the times of the parts on one node. `node_us` returns the time, in
    us, of a collective's op on one node. `send` returns the time, in us, in which every rank sends n bytes to the rank
    with the same local rank on a different node. `all_reduce` returns the time, in us, of an all-reduce among the ranks
    with the same local rank."""

    nodes: int
    node: Parts
    node_us: Callable[[GemmCall], float]
    send: Callable[[float], float]
    all_reduce: Callable[[float], float]

    def op(self, call: GemmCall, m: int) -> float:
        """Return the time, in us, of the node's op on m rows."""
        sms = self.node.sms
        return self.node_us(call._replace(m=m)) * sms / (sms - min(BETWEEN_CTAS, sms // 4))


class TwoLevelCost(Cost[TwoLevel, None]):
    """The cost model of an op's plans over several nodes, in up to four pieces."""

    def possible(self, p: Parts) -> bool:
        return p.over_nodes is not None

    def candidates(self, p: Parts, call: GemmCall, conditions: Conditions) -> list[TwoLevel]:
        return [] if p.over_nodes is None else [TwoLevel(count) for count in (1, 2, 4)]

    def steps(self, p: Parts, call: GemmCall, plan: TwoLevel, fit: None) -> list[Step]:
        assert p.over_nodes is not None
        return self.node_steps(p.over_nodes, call, plan)

    def node_steps(self, p: OverNodes, call: GemmCall, plan: TwoLevel) -> list[Step]:
        """Return the steps of a call on several nodes."""
        raise NotImplementedError
