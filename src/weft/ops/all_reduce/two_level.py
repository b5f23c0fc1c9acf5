"""All-reduce, with or without a norm, on several nodes (transport/two_level.py).

stream   node's sums of a chunk | of the next | .. | norm, gather in the node
between                         | all-reduce of the chunk | ..
"""

from __future__ import annotations

from dataclasses import replace

import torch

from ...backends.base import Stream, SymmetricTensor
from ...plans import TwoLevel
from ...transport.copy_engine import COPIES
from ...transport.memory import lock, workspace
from ...transport.two_level import BETWEEN, RowChunk, chunk_memory, pull_rows, row_chunks, sum_rows
from ...world import World
from ..common import split_rows
from .call import PLAIN_SUM, SumCall, Tensors
from .kernels import ABSENT, OWN, WHOLE
from .runs import SumRun, norm_rows, summing


@summing
def prepare_sum(world: World, call: SumCall, plan: TwoLevel) -> SumRun:
    """Prepare all-reduce, with or without a norm. On each node, the rank that owns the row in that node adds the
    residual and normalises the sum. If every rank holds only its own rows of the residual, each rank adds them before
    the sum over ranks, because the owner in a node does not hold them."""

    def run(t: Tensors, stream: Stream) -> None:
        t = t.as_matrices(world, call, False)
        node, across, between = world.levels.node, world.levels.across, world.side_stream(BETWEEN)
        chunks, plain = row_chunks(world, call.m, plan), call.op == PLAIN_SUM
        node.order(lock(node, COPIES), stream)
        source = workspace(node, "two levels, x", (call.m, call.h), call.dtype)
        memory = chunk_memory(world, "rows", chunks, call.h, call.out_dtype)
        sums = chunk_memory(world, "sums", chunks, call.h, call.dtype) if call.keep else None
        shards = split_rows(world, call.m)
        residual_start = (
            0 if call.keep == WHOLE.value else sum(shards[: world.rank])
        )  # the first row of the new residual
        node.copy(source.local, t.x, stream)
        if call.residual == OWN.value and t.residual is not None and shards[world.rank]:
            rows, residual = source.local[residual_start : residual_start + shards[world.rank]], t.residual
            world.call(lambda: rows.add_(residual), [rows, residual], [rows], stream)
        node.barrier(stream)
        totals, sum_events = [], []
        for chunk in chunks:
            own_count = chunk.shards[node.rank]
            total = memory.local[chunk.index, :own_count] if plain else node.empty((own_count, call.h), call.dtype)
            sum_rows(world, source, chunk, total, stream)
            world.wait_event(between, world.record(stream))
            across.all_reduce(total, between)
            totals.append(total)
            sum_events.append(world.record(between))
        for chunk, total, event in zip(chunks, totals, sum_events, strict=True):
            world.wait_event(stream, event)
            if sums is not None and total.shape[0]:
                _norm(world, call, chunk, total, t, memory, sums, stream)
            node.barrier(stream)
            pull_rows(world, memory, chunk, t.out, 0, stream)
            if sums is not None and t.kept is not None:
                pull_rows(world, sums, chunk, t.kept, residual_start, stream)

    return run


def _norm(
    world: World,
    call: SumCall,
    chunk: RowChunk,
    total: torch.Tensor,
    t: Tensors,
    memory: SymmetricTensor,
    sums: SymmetricTensor,
    stream: Stream,
) -> None:
    """Normalise `total`, which contains the sums of this rank's rows in a chunk. Store the normalised rows in `memory`,
    and the sums with the residual in `sums`."""
    node = world.levels.node
    rows, own_count, whole = chunk.rows(node.rank), total.shape[0], call.residual == WHOLE.value
    part = replace(
        t,
        x=total,
        residual=t.residual[rows] if whole and t.residual is not None else None,
        out=memory.local[chunk.index, :own_count],
        kept=sums.local[chunk.index, :own_count],
    )
    owned = replace(call, m=own_count, residual=(WHOLE if whole else ABSENT).value, keep=WHOLE.value)
    norm_rows(node, owned)(stream, **part.arguments(), x=part.x, out=part.out)
