"""GEMM + reduce-scatter and GEMM + all-reduce on several nodes (transport/two_level.py).

reduce-scatter  stream   node's op of the next node's rows | of the node after it | .. of the own one's | sum
                between                                    | send sums to owners, receive own sums | ..
all-reduce      stream   node's GEMM + reduce-scatter of a chunk | of the next | .. | gather in the node
                between                                          | all-reduce of the chunk | ..
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from ...op import REGISTRY
from ...plans import TwoLevel
from ...transport.collectives import add_bias
from ...transport.copy_engine import COPIES, sum_parts
from ...transport.memory import lock
from ...transport.two_level import (
    BETWEEN,
    as_one_slice,
    chunk_memory,
    cut,
    lengths,
    node_pairs,
    pull_rows,
    row_chunks,
    send,
    slices_of_node,
)
from ...world import World
from ..recipes import UNSCALED, ScaledFactors
from .call import GEMM_REDUCE_SCATTER, ReduceCall


def run_scatter(world: World, call: ReduceCall, plan: TwoLevel, operands: ScaledFactors, out: torch.Tensor) -> None:
    """Run GEMM + reduce-scatter."""
    levels, chunks, rows = world.levels, plan.pieces, out.shape[0]
    local_rank, stream, between = levels.node.rank, world.current_stream(), world.side_stream(BETWEEN)
    staging = world.empty((levels.across.size, rows, call.n), call.dtype)  # one part for each source node
    # The list keeps the parts until this stream has waited for their transfers. Otherwise the allocator would reuse the
    # memory of a released part on this stream while `between` still reads it.
    sent = []
    for target, source in node_pairs(world):
        for chunk in range(chunks):
            slices = slices_of_node(world, call.shards, target, chunk, chunks)
            part = world.empty((lengths(slices)[local_rank], call.n), call.dtype)
            sent.append(part)
            _reduce_node(world, operands, slices, part)
            world.wait_event(between, world.record(stream))
            send(world, part, target, staging[source][cut(rows, chunk, chunks)], source, between)
    own_sum = world.empty((rows, call.n), call.dtype)
    _reduce_node(world, operands, slices_of_node(world, call.shards, world.node), own_sum)
    world.wait_event(stream, world.record(between))
    if rows:
        sum_parts(own_sum, staging, out, operands.bias, levels.across, stream)


def _reduce_node(world: World, operands: ScaledFactors, slices: Sequence[slice], out: torch.Tensor) -> None:
    """Run GEMM + reduce-scatter on this node. `slices` contains a range of rows of x for each rank of the node."""
    (x, weight, *_), whole, rows = operands, as_one_slice(slices), lengths(slices)
    if not any(rows):
        return
    if whole is None:
        parts, part = [x[lines] for lines in slices], world.empty((sum(rows), x.shape[1]), x.dtype)
        world.call(lambda: torch.cat(parts, out=part), parts, [part], world.current_stream())
    else:
        part = x[whole]
    REGISTRY[GEMM_REDUCE_SCATTER].call(
        world.levels.node, "auto", ScaledFactors(part, weight), (rows, True, *UNSCALED), out
    )


def run_reduce_all(world: World, call: ReduceCall, plan: TwoLevel, operands: ScaledFactors, out: torch.Tensor) -> None:
    """Run GEMM + all-reduce."""
    node, across = world.levels.node, world.levels.across
    stream, between = world.current_stream(), world.side_stream(BETWEEN)
    chunks = row_chunks(world, call.m, plan)
    node.order(lock(node, COPIES), stream)
    memory, sum_events = chunk_memory(world, "rows", chunks, call.n, call.dtype), []
    for chunk in chunks:
        own_rows = memory.local[chunk.index, : chunk.shards[node.rank]]
        _reduce_node(world, operands, [chunk.rows(p) for p in range(node.size)], own_rows)
        world.wait_event(between, world.record(stream))
        across.all_reduce(own_rows, between)
        sum_events.append(world.record(between))
    for chunk, event in zip(chunks, sum_events, strict=True):
        world.wait_event(stream, event)
        node.barrier(stream)
        pull_rows(world, memory, chunk, out, 0, stream)
    add_bias(world, out, operands.bias, stream)
