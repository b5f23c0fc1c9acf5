"""Two-level plans: the node's op on the rows of one node after the other, by the fastest plan that is predicted there,
and transfers between nodes on a queue of their own, before it (all-gather) or behind it.

The node's kernels leave BETWEEN_CTAS SMs to the transfers, so they take as much longer as they have fewer SMs: the
library's GEMM, which leaves none, is taken to be slowed as much by what it shares them with.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from ...backends.base import BETWEEN_CTAS
from ...op import around, collective
from ...plans import TwoLevel
from ..parts import ITEM, Lacks, PartTimes
from ..queues import Step


@dataclass(frozen=True)
class OverNodes:
    """What `nodes` nodes alike take. node: the parts of one. node_us: of an op there, (op, M, N, K). send: us of so
    many bytes of every rank to its place in another node. all_reduce: of so many among the ranks of one place."""

    nodes: int
    node: PartTimes
    node_us: Callable[[str, int, int, int], float]
    send: Callable[[float], float]
    all_reduce: Callable[[float], float]

    def op(self, name: str, m: int, n: int, k: int) -> float:
        sms = self.node.sms
        return self.node_us(name, m, n, k) * sms / (sms - min(BETWEEN_CTAS, sms // 4))


def steps(p: OverNodes, op: str, plan: TwoLevel, m: int, n: int, k: int) -> list[Step]:
    """M of all ranks. Raises Lacks for GEMM + all-to-all."""
    what = collective(op)
    if what == "all_gather":
        return _gather(p, op, plan, m, n, k)
    if what == "reduce_scatter":
        return _scatter(p, op, plan, m, n, k)
    if what == "all_reduce":
        return _reduce(p, plan, m, n, k)
    raise Lacks(f"no model of {plan} for {op}")


def _gather(p: OverNodes, op: str, plan: TwoLevel, m: int, n: int, k: int) -> list[Step]:
    rows, pieces = m // p.nodes, plan.pieces
    sent = p.send(rows // p.node.world // pieces * k * ITEM)
    placed = p.node.optional("local", rows // pieces * n * ITEM) if pieces > 1 else 0.0
    now = p.op(op, rows, n, k)
    found = [Step("gemm", "own node", 0.0, now)]
    for i in range((p.nodes - 1) * pieces):
        landed = (i + 1) * sent
        found.append(Step("comm", "send", landed - sent, landed))
        begin, now = max(now, landed), max(now, landed) + p.op(op, rows // pieces, n, k) + placed
        found.append(Step("gemm", f"piece {i}", begin, now))
    return found


def _scatter(p: OverNodes, op: str, plan: TwoLevel, m: int, n: int, k: int) -> list[Step]:
    rows, pieces = m // p.nodes, plan.pieces
    shard = rows // p.node.world * n * ITEM
    sent = p.send(shard // pieces)
    gathered = p.node.optional("local", rows // pieces * k * ITEM) if pieces > 1 else 0.0
    now = landed = 0.0
    found = []
    for i in range((p.nodes - 1) * pieces):
        begin, now = now, now + gathered + p.op(op, rows // pieces, n, k)
        found.append(Step("gemm", f"piece {i}", begin, now))
        start, landed = max(now, landed), max(now, landed) + sent
        found.append(Step("comm", "send", start, landed))
    done = now + p.op(op, rows, n, k)
    summed = max(done, landed) + p.node.optional("local", (p.nodes + 1) * shard / 2)
    return [*found, Step("gemm", "own node", now, done), Step("gemm", "sum", max(done, landed), summed)]


def _reduce(p: OverNodes, plan: TwoLevel, m: int, n: int, k: int) -> list[Step]:
    pieces, scatter = plan.pieces, around("reduce_scatter")
    rows, found = m // pieces, []
    part = rows // p.node.world * n * ITEM
    moved, gathered = p.all_reduce(part), p.node.world * p.node.latency("copy", part) + p.node.latency("barrier")
    now, landed, ends = 0.0, 0.0, []
    for i in range(pieces):
        begin, now = now, now + p.op(scatter, rows, n, k)
        found.append(Step("gemm", f"piece {i}", begin, now))
        start, landed = max(now, landed), max(now, landed) + moved
        found.append(Step("comm", "all_reduce", start, landed))
        ends.append(landed)
    for landed in ends:
        begin, now = max(now, landed), max(now, landed) + gathered
        found.append(Step("gemm", "gather", begin, now))
    return found
