"""Model of two-level plans: the node's op runs on the rows of one node after another, by the plan predicted fastest
there, and transfers between nodes run on a queue of their own, before the op (all-gather) or after it.

The node's kernels leave BETWEEN_CTAS SMs to the transfers and are slowed in proportion. The library's GEMM leaves none;
the model slows it as much, since it shares its SMs with the transfers.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from ...backends.base import BETWEEN_CTAS
from ...op import collective, op_around
from ...plans import TwoLevel
from ..parts import ITEM, NotMeasured, PartTimes
from ..queues import Step


@dataclass(frozen=True)
class OverNodes:
    """Times on `nodes` equal nodes. node: the parts of one node. node_us: us of an op on one node, by (op, M, N, K).
    send: us of sending so many bytes from every rank to the rank with the same local rank in another node. all_reduce:
    us of an all-reduce among the ranks with the same local rank."""

    nodes: int
    node: PartTimes
    node_us: Callable[[str, int, int, int], float]
    send: Callable[[float], float]
    all_reduce: Callable[[float], float]

    def op(self, name: str, m: int, n: int, k: int) -> float:
        sms = self.node.sms
        return self.node_us(name, m, n, k) * sms / (sms - min(BETWEEN_CTAS, sms // 4))


def steps(p: OverNodes, op: str, plan: TwoLevel, m: int, n: int, k: int) -> list[Step]:
    """Return the steps of a call; m counts the rows of all ranks. Raises NotMeasured for GEMM + all-to-all."""
    collective_name = collective(op)
    if collective_name == "all_gather":
        return _gather(p, op, plan, m, n, k)
    if collective_name == "reduce_scatter":
        return _scatter(p, op, plan, m, n, k)
    if collective_name == "all_reduce":
        return _reduce(p, plan, m, n, k)
    raise NotMeasured(f"no model of {plan} for {op}")


def _gather(p: OverNodes, op: str, plan: TwoLevel, m: int, n: int, k: int) -> list[Step]:
    rows, piece_count = m // p.nodes, plan.pieces
    send_us = p.send(rows // p.node.world // piece_count * k * ITEM)
    place_us = p.node.optional("local", rows // piece_count * n * ITEM) if piece_count > 1 else 0.0
    computed = p.op(op, rows, n, k)
    steps = [Step("gemm", "own node", 0.0, computed)]
    for i in range((p.nodes - 1) * piece_count):
        arrived = (i + 1) * send_us
        steps.append(Step("comm", "send", arrived - send_us, arrived))
        start, computed = (
            max(computed, arrived),
            max(computed, arrived) + p.op(op, rows // piece_count, n, k) + place_us,
        )
        steps.append(Step("gemm", f"piece {i}", start, computed))
    return steps


def _scatter(p: OverNodes, op: str, plan: TwoLevel, m: int, n: int, k: int) -> list[Step]:
    rows, piece_count = m // p.nodes, plan.pieces
    shard = rows // p.node.world * n * ITEM
    send_us = p.send(shard // piece_count)
    gather_us = p.node.optional("local", rows // piece_count * k * ITEM) if piece_count > 1 else 0.0
    computed = sent = 0.0
    steps = []
    for i in range((p.nodes - 1) * piece_count):
        start, computed = computed, computed + gather_us + p.op(op, rows // piece_count, n, k)
        steps.append(Step("gemm", f"piece {i}", start, computed))
        start, sent = max(computed, sent), max(computed, sent) + send_us
        steps.append(Step("comm", "send", start, sent))
    done = computed + p.op(op, rows, n, k)
    sum_end = max(done, sent) + p.node.optional("local", (p.nodes + 1) * shard / 2)
    return [*steps, Step("gemm", "own node", computed, done), Step("gemm", "sum", max(done, sent), sum_end)]


def _reduce(p: OverNodes, plan: TwoLevel, m: int, n: int, k: int) -> list[Step]:
    piece_count, scatter = plan.pieces, op_around("reduce_scatter")
    rows, steps = m // piece_count, []
    part = rows // p.node.world * n * ITEM
    all_reduce_us, gather_us = (
        p.all_reduce(part),
        p.node.world * p.node.latency("copy", part) + p.node.latency("barrier"),
    )
    computed, reduced, ends = 0.0, 0.0, []
    for i in range(piece_count):
        start, computed = computed, computed + p.op(scatter, rows, n, k)
        steps.append(Step("gemm", f"piece {i}", start, computed))
        start, reduced = max(computed, reduced), max(computed, reduced) + all_reduce_us
        steps.append(Step("comm", "all_reduce", start, reduced))
        ends.append(reduced)
    for reduced in ends:
        start, computed = max(computed, reduced), max(computed, reduced) + gather_us
        steps.append(Step("gemm", "gather", start, computed))
    return steps
