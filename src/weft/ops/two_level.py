"""The ops on several nodes, plan TwoLevel: each node runs the op itself, on the node's World and with the plan that
"auto" chooses there, while rows are sent between the nodes on a second stream (world.Levels).

    all-gather + GEMM      between  send own shard to the other nodes, receive theirs, node by node, chunk by chunk
                           stream   node's op of the own node's shards | of the next arrived node's | ..
    GEMM + reduce-scatter  stream   node's op of the next node's rows | of the node after it | .. of the own one's | sum
                           between                                    | send sums to owners, receive own sums | ..
    GEMM + all-reduce      stream   node's GEMM + reduce-scatter of a chunk | of the next | .. | gather in the node
                           between                                          | all-reduce of the chunk | ..
    all-reduce, norm       stream   node's sums of a chunk | of the next | .. | norm, gather in the node
                           between                         | all-reduce of the chunk | ..
    GEMM + all-to-all      stream   GEMM of the next node's rows | .. of the own one's | rows to their ranks in the node
                           between                               | rows to the same local rank of their node | ..

Every transfer goes between ranks with the same local rank in their nodes. A node sums in float32 in the order of its
ranks, and rounds once. Reduce-scatter then sums the nodes' results in float32 in the order of the nodes; all-reduce
sums them as NCCL does.

Events of each rank order its two streams, which suffices: a transfer reads and writes memory of this call alone, or
symmetric memory of the node. All-reduce writes a row of symmetric memory that peers have pulled in the call before only
after each of them has given its part of the row's sum in this call, which comes after those pulls on the peer's stream.
All-to-all, in which a row has only one source, ends with a barrier.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

import torch

from ..backends.base import Stream, SymmetricTensor
from ..op import REGISTRY
from ..plans import TwoLevel
from ..transport.collectives import add_bias
from ..transport.copy_engine import COPIES, sum_parts
from ..transport.memory import lock, workspace
from ..transport.two_level import BETWEEN, RowChunk, hops, of_node, pull_rows, send, sum_rows
from ..world import World
from .all_gather_matmul.call import GATHER_GEMM, GatherCall, GatheredRows
from .all_reduce.call import PLAIN_SUM, SumCall, Tensors
from .all_reduce.kernels import ABSENT, OWN, WHOLE
from .all_reduce.runs import norm_rows
from .common import Factors, split_rows
from .matmul_reduce.call import GEMM_REDUCE_SCATTER, ReduceCall
from .recipes import UNSCALED, ScaledFactors

if TYPE_CHECKING:
    from .matmul_all_to_all.op import RoutedCall, Routing


def _cut(rows: int, chunk: int, chunks: int) -> slice:
    """Return the rows of one of `chunks` chunks of about the same size."""
    return slice(rows * chunk // chunks, rows * (chunk + 1) // chunks)


def _slices(world: World, shards: Sequence[int], node: int, chunk: int = 0, chunks: int = 1) -> list[slice]:
    """Return, for each rank of a node, the rows of a chunk of its shard, as rows of the whole matrix."""
    start, slices = sum(shards[: node * world.levels.node.size]), []
    for rows in of_node(world, node, shards):
        cut = _cut(rows, chunk, chunks)
        slices.append(slice(start + cut.start, start + cut.stop))
        start += rows
    return slices


def _lengths(slices: Sequence[slice]) -> tuple[int, ...]:
    return tuple(rows.stop - rows.start for rows in slices)


def _as_one_slice(slices: Sequence[slice]) -> slice | None:
    """Return the union of the slices as one slice, or None if they are not contiguous."""
    whole = slice(slices[0].start, slices[-1].stop)
    return whole if whole.stop - whole.start == sum(_lengths(slices)) else None


# -- all-gather + GEMM -------------------------------------------------------------------------------------------------
def run_gather(
    world: World, call: GatherCall, plan: TwoLevel, operands: ScaledFactors, out: torch.Tensor
) -> GatheredRows | None:
    """Run all-gather + GEMM. Return the gathered activation, or None if the call does not ask for it."""
    x, local_rank, chunks = operands.x, world.levels.node.rank, plan.pieces
    stream, between = world.current_stream(), world.side_stream(BETWEEN)
    gathered = world.empty((call.rows, call.k), call.dtype) if call.gathered else None
    steps = [(source, target, chunk) for source, target in hops(world) for chunk in range(chunks)]
    node_slices = [_slices(world, call.shards, source, chunk, chunks) for source, _, chunk in steps]
    parts = [world.empty((_lengths(slices)[local_rank], call.k), call.dtype) for slices in node_slices]
    world.wait_event(between, world.record(stream))
    arrived = []
    for (source, target, chunk), part in zip(steps, parts, strict=True):
        send(world, x[_cut(x.shape[0], chunk, chunks)], target, part, source, between)
        arrived.append(world.record(between))
    _multiply_node(world, call, operands, _slices(world, call.shards, world.node), out, gathered)
    for slices, part, event in zip(node_slices, parts, arrived, strict=True):
        world.wait_event(stream, event)
        _multiply_node(world, call, operands._replace(x=part), slices, out, gathered)
    return None if gathered is None else GatheredRows(gathered, None)


def _multiply_node(
    world: World,
    call: GatherCall,
    operands: ScaledFactors,
    slices: Sequence[slice],
    out: torch.Tensor,
    gathered: torch.Tensor | None,
) -> None:
    """Run the op on this node, for the rows `slices` of the whole matrix, one slice for each of its ranks. operands.x
    has the rows of this rank's slice."""
    whole, rows, node = _as_one_slice(slices), _lengths(slices), world.levels.node
    if not any(rows):
        return
    into, options = None if whole is None else out[whole], (rows, call.gated, call.gathered, *UNSCALED)
    y, full, _ = REGISTRY[GATHER_GEMM].call(node, "auto", operands, options, into)
    for result, part in ((out, y), (gathered, full)):
        if result is not None and part is not None and (whole is None or result is gathered):
            _put(world, result, slices, part)


def _put(world: World, out: torch.Tensor, slices: Sequence[slice], part: torch.Tensor) -> None:
    """Copy the rows of `part`, which are those of the slices one after another, to the slices of `out`."""
    outs = [out[rows] for rows in slices if rows.stop > rows.start]
    parts = list(part.split([len(rows) for rows in outs]))
    world.call(lambda: torch._foreach_copy_(outs, parts), parts, outs, world.current_stream())


# -- GEMM + reduce-scatter ---------------------------------------------------------------------------------------------
def run_scatter(world: World, call: ReduceCall, plan: TwoLevel, operands: ScaledFactors, out: torch.Tensor) -> None:
    """Run GEMM + reduce-scatter."""
    levels, chunks, rows = world.levels, plan.pieces, out.shape[0]
    local_rank, stream, between = levels.node.rank, world.current_stream(), world.side_stream(BETWEEN)
    staging = world.empty((levels.across.size, rows, call.n), call.dtype)  # by source node
    # The parts are kept until this stream has waited for their transfers: the allocator gives the memory of a tensor
    # that is no longer held to the next one of this stream, while `between` still reads it.
    sent = []
    for target, source in hops(world):
        for chunk in range(chunks):
            slices = _slices(world, call.shards, target, chunk, chunks)
            part = world.empty((_lengths(slices)[local_rank], call.n), call.dtype)
            sent.append(part)
            _reduce_node(world, operands, slices, part)
            world.wait_event(between, world.record(stream))
            send(world, part, target, staging[source][_cut(rows, chunk, chunks)], source, between)
    own_sum = world.empty((rows, call.n), call.dtype)
    _reduce_node(world, operands, _slices(world, call.shards, world.node), own_sum)
    world.wait_event(stream, world.record(between))
    if rows:
        sum_parts(own_sum, staging, out, operands.bias, levels.across, stream)


def _reduce_node(world: World, operands: ScaledFactors, slices: Sequence[slice], out: torch.Tensor) -> None:
    """Run GEMM + reduce-scatter on this node, for the rows `slices` of x, one slice for each of its ranks."""
    (x, weight, *_), whole, rows = operands, _as_one_slice(slices), _lengths(slices)
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


# -- all-reduce --------------------------------------------------------------------------------------------------------
def _row_chunks(world: World, m: int, plan: TwoLevel) -> list[RowChunk]:
    """Return consecutive chunks of all m rows. Each rank of a node owns a part of each chunk."""
    node, count = world.levels.node, min(plan.pieces, m)
    cuts = [_cut(m, chunk, count) for chunk in range(count)]
    return [RowChunk(i, cut.start, split_rows(node, cut.stop - cut.start)) for i, cut in enumerate(cuts)]


def _chunk_memory(
    world: World, name: str, chunks: Sequence[RowChunk], columns: int, dtype: torch.dtype
) -> SymmetricTensor:
    """Return symmetric memory of the node, for the rows of every chunk that each of its ranks owns."""
    shape = len(chunks), max(max(chunk.shards) for chunk in chunks), columns
    return workspace(world.levels.node, f"two levels, {name}", shape, dtype)


def run_reduce_all(world: World, call: ReduceCall, plan: TwoLevel, operands: ScaledFactors, out: torch.Tensor) -> None:
    """Run GEMM + all-reduce."""
    node, across = world.levels.node, world.levels.across
    stream, between = world.current_stream(), world.side_stream(BETWEEN)
    chunks = _row_chunks(world, call.m, plan)
    node.order(lock(node, COPIES), stream)
    memory, sum_events = _chunk_memory(world, "rows", chunks, call.n, call.dtype), []
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


def run_sum(world: World, call: SumCall, plan: TwoLevel, t: Tensors, stream: Stream) -> None:
    """Run all-reduce, with or without a norm. On each node the owner of a row adds the residual and normalises the sum.
    A residual of own rows is added before the sum, because the owner on a node does not have it."""
    node, across, between = world.levels.node, world.levels.across, world.side_stream(BETWEEN)
    chunks, plain = _row_chunks(world, call.m, plan), call.op == PLAIN_SUM
    node.order(lock(node, COPIES), stream)
    source = workspace(node, "two levels, x", (call.m, call.h), call.dtype)
    memory = _chunk_memory(world, "rows", chunks, call.h, call.out_dtype)
    sums = _chunk_memory(world, "sums", chunks, call.h, call.dtype) if call.keep else None
    shards = split_rows(world, call.m)
    residual_start = 0 if call.keep == WHOLE.value else sum(shards[: world.rank])  # the first row of the new residual
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
    """Normalise `total`, the sums of this rank's rows of a chunk, to `memory`, and store the sums with the residual in
    `sums`."""
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


# -- GEMM + all-to-all -------------------------------------------------------------------------------------------------
def run_exchange(world: World, call: RoutedCall, plan: TwoLevel, operands: Factors, out: torch.Tensor) -> None:
    """Run GEMM + all-to-all. Rows go to the rank of their node with this rank's local rank, from which the ranks of
    that node pull them. `pool` holds the rows that a rank has received, by source node, and for each node in the order
    of their destinations."""
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
        world.linear(ordered[start : start + y.shape[0]], weight, bias, stream, y)

    sent, arrived = [], []  # `sent` is kept until this stream has waited for the transfers, as in `run_scatter`
    for target, source in hops(world):
        y = world.empty((sum(of_node(world, target, routing.counts[world.rank])), call.n), call.dtype)
        sent.append(y)
        multiply(target, y)
        world.wait_event(between, world.record(stream))
        send(world, y, target, pool.local[starts[source] : starts[source + 1]], source, between)
        arrived.append((source, world.record(between)))
    multiply(world.node, pool.local[starts[world.node] : starts[world.node + 1]])
    _pull_routed(world, routing, pool, world.node, out, stream)
    for source, event in arrived:
        world.wait_event(stream, event)
        _pull_routed(world, routing, pool, source, out, stream)
    node.barrier(stream)


def _pool_rows(world: World, routing: Routing, rank: int) -> list[int]:
    """Return, for a rank's pool, the offset of the rows from each node, and the end."""
    node_size = world.levels.node.size
    node, local_rank = divmod(rank, node_size)
    starts = [0]
    for source in range(local_rank, world.size, node_size):
        starts.append(starts[-1] + sum(of_node(world, node, routing.counts[source])))
    return starts


def _pull_routed(
    world: World, routing: Routing, pool: SymmetricTensor, source: int, out: torch.Tensor, stream: Stream
) -> None:
    """Pull the rows for this rank that come from node `source` and have arrived on this node: each rank of that node
    has sent its rows to the same local rank of this node."""
    node, me = world.levels.node, world.rank
    node.barrier(stream)
    for p in (node.rank, *node.other_ranks):
        sender = source * node.size + p
        offset = _pool_rows(world, routing, world.node * node.size + p)[source]
        offset += sum(of_node(world, world.node, routing.counts[sender])[: node.rank])
        start, count = sum(counts[me] for counts in routing.counts[:sender]), routing.counts[sender][me]
        if count:
            node.copy(out[start : start + count], pool.peers[p][offset : offset + count], stream)
