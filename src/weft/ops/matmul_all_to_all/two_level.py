"""GEMM + all-to-all on several nodes (transport/two_level.py).

stream   GEMM of the next node's rows | .. of the own one's | rows to their ranks in the node
between                               | rows to the same local rank of their node | ..
"""

from __future__ import annotations

from itertools import accumulate
from typing import TYPE_CHECKING

import torch

from ...backends.base import Stream, SymmetricTensor
from ...plans import TwoLevel
from ...transport.copy_engine import COPIES
from ...transport.memory import lock, workspace
from ...transport.two_level import BETWEEN, local_slice, node_pairs, send
from ...world import World
from ..common import Factors

if TYPE_CHECKING:
    from .op import RoutedCall, Routing


def run_exchange(world: World, call: RoutedCall, plan: TwoLevel, operands: Factors, out: torch.Tensor) -> None:
    """Run GEMM + all-to-all. Each row is sent to the rank of its destination node that has the same local rank as this
    rank, and the destination rank pulls the row from that rank. `pool` holds the rows that a rank has received. The
    rows are ordered by source node, and for each node by destination."""
    (x, weight, bias), routing, node = operands, call.routing, world.levels.node
    stream, between = world.current_stream(), world.side_stream(BETWEEN)
    order, ordered = routing.by_destination(world), world.empty((call.sent, call.k), call.dtype)
    node.order(lock(node, COPIES), stream)
    longest = max(_pool_rows(world, routing, rank)[-1] for rank in range(world.size))
    pool = workspace(node, "two levels, pool", (longest, call.n), call.dtype)
    starts = _pool_rows(world, routing, world.rank)
    world.call(lambda: torch.index_select(x, 0, order, out=ordered), [x, order], [ordered], stream)

    def multiply(target: int, y: torch.Tensor) -> None:
        start = sum(routing.counts[world.rank][: target * node.size])
        world.backend.linear(ordered[start : start + y.shape[0]], weight, bias, stream, y)

    # The buffers must stay alive until this stream has waited for the transfers, as in `run_scatter`. NCCL receives
    # into ordinary memory: a graph in which it receives into symmetric memory hung on four H200s.
    buffers, arrived = [], []
    for target, source in node_pairs(world):
        y = world.empty((sum(local_slice(world, target, routing.counts[world.rank])), call.n), call.dtype)
        part = world.empty((starts[source + 1] - starts[source], call.n), call.dtype)
        buffers += [y, part]
        multiply(target, y)
        world.wait_event(between, world.record(stream))
        send(world, y, target, part, source, between)
        world.copy(pool.local[starts[source] : starts[source + 1]], part, between)
        arrived.append((source, world.record(between)))
    multiply(world.node, pool.local[starts[world.node] : starts[world.node + 1]])
    _pull_routed(world, routing, pool, world.node, out, stream)
    for source, event in arrived:
        world.wait_event(stream, event)
        _pull_routed(world, routing, pool, source, out, stream)
    node.barrier(stream)


def _pool_rows(world: World, routing: Routing, rank: int) -> list[int]:
    """Return the offset of each node's rows in a rank's pool, and the end of the last node's rows."""
    node_size = world.levels.node.size
    node, local_rank = divmod(rank, node_size)
    sources = range(local_rank, world.size, node_size)
    return list(accumulate((sum(local_slice(world, node, routing.counts[s])) for s in sources), initial=0))


def _pull_routed(
    world: World, routing: Routing, pool: SymmetricTensor, source: int, out: torch.Tensor, stream: Stream
) -> None:
    """Pull this rank's rows from node `source` that have arrived on this node. Each rank of `source` has sent its rows
    to the rank of this node with the same local rank."""
    node, me = world.levels.node, world.rank
    node.barrier(stream)
    for p in (node.rank, *node.other_ranks):
        sender = source * node.size + p
        offset = _pool_rows(world, routing, world.node * node.size + p)[source]
        offset += sum(local_slice(world, world.node, routing.counts[sender])[: node.rank])
        start, count = sum(counts[me] for counts in routing.counts[:sender]), routing.counts[sender][me]
        if count:
            node.copy(out[start : start + count], pool.peers[p][offset : offset + count], stream)
