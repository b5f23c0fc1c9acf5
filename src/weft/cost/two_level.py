"""The model of two-level plans. The node's op runs on the rows of one node after another, by the plan with the fastest
prediction for one node. Transfers between nodes run on a separate queue, before the op (all-gather) or after it.

The node's kernels leave BETWEEN_CTAS SMs to the transfers and are slower in proportion. cuBLAS's GEMM leaves none, but
shares its SMs with the transfers, so the model slows it by the same factor.
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
    """Times on `nodes` equal nodes. `node` has the parts of one node. `node_us` returns the us of a collective's op on
    one node. `send` returns the us of a send of n bytes from every rank to the rank with the same local rank in a
    different node. `all_reduce` returns the us of an all-reduce among the ranks with the same local rank."""

    nodes: int
    node: Parts
    node_us: Callable[[GemmCall], float]
    send: Callable[[float], float]
    all_reduce: Callable[[float], float]

    def op(self, call: GemmCall, m: int) -> float:
        """Return the us of the node's op on m rows."""
        sms = self.node.sms
        return self.node_us(call._replace(m=m)) * sms / (sms - min(BETWEEN_CTAS, sms // 4))


class TwoLevelCost(Cost[TwoLevel, None]):
    """The model of an op's plans over several nodes, in up to four pieces."""

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
