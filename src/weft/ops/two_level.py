"""How ops run on ranks of several nodes alike by plan TwoLevel: the op itself on each node, on the node's World and by
the plan that "auto" has there, and transfers between the nodes under it, on a stream of their own (world.Levels).

    all-gather + GEMM      between  own shard to the other nodes, theirs to here, node by node and piece by piece
                           stream   node's op of the own node's shards | of the first other's, once here | ..
    GEMM + reduce-scatter  stream   node's op of the next node's rows | of the one behind it | .. of the own one's | sum
                           between                                    | sums to their owner, its own to here | ..
    GEMM + all-reduce      stream   node's GEMM + reduce-scatter of a piece | of the next | .. | gather in the node
                           between                                          | all-reduce of the piece | ..
    all-reduce, norm       stream   node's sums of a piece | of the next | .. | norm, gather in the node
                           between                         | all-reduce of the piece | ..
    GEMM + all-to-all      stream   GEMM of the next node's rows | .. of the own one's | rows to their ranks in the node
                           between                               | rows to this place in their node | ..

What a node sums is in float32 in the order of its ranks, and rounded once. Reduce-scatter then sums the nodes' in
float32 in the order of the nodes; all-reduce sums them as NCCL does.

A rank's events order the two streams, and nothing else has to: what crosses lies in memory of the call alone, or in
symmetric memory of the node. All-reduce writes a row there that peers have pulled in the call before only once each of
them has given its part of the row's sum in this call, which its stream does behind those pulls. All-to-all, where a
row has one source, ends with a barrier.
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
from ..transport.two_level import BETWEEN, RowPiece, hops, of_node, pull_rows, send, sum_rows
from ..world import World
from .all_gather_matmul.call import GATHER_GEMM, GatherCall, GatheredRows
from .all_reduce.call import PLAIN_SUM, SumCall, Tensors
from .all_reduce.kernels import ABSENT, OWN, WHOLE
from .all_reduce.runs import norm_rows
from .common import Factors, split_rows
from .matmul_reduce.call import GEMM_REDUCE_SCATTER, ReduceCall
from .recipes import ScaledFactors

if TYPE_CHECKING:
    from .matmul_all_to_all.op import RoutedCall, Routing


def _cut(rows: int, piece: int, pieces: int) -> slice:
    return slice(rows * piece // pieces, rows * (piece + 1) // pieces)


def _slices(world: World, shards: Sequence[int], node: int, piece: int = 0, pieces: int = 1) -> list[slice]:
    """Return, for each rank of a node, the rows of a piece of its shard, as rows of the whole."""
    first, slices = sum(shards[: node * world.levels.node.size]), []
    for rows in of_node(world, node, shards):
        cut = _cut(rows, piece, pieces)
        slices.append(slice(first + cut.start, first + cut.stop))
        first += rows
    return slices


def _lengths(slices: Sequence[slice]) -> tuple[int, ...]:
    return tuple(rows.stop - rows.start for rows in slices)


def _together(slices: Sequence[slice]) -> slice | None:
    """All of the slices as one; None where others lie between them."""
    whole = slice(slices[0].start, slices[-1].stop)
    return whole if whole.stop - whole.start == sum(_lengths(slices)) else None


# -- all-gather + GEMM -------------------------------------------------------------------------------------------------
def run_gather(
    world: World, call: GatherCall, plan: TwoLevel, operands: ScaledFactors, out: torch.Tensor
) -> GatheredRows | None:
    """Return the gathered activation, or None where the call wants none."""
    x, place, pieces = operands.x, world.levels.node.rank, plan.pieces
    stream, between = world.current_stream(), world.side_stream(BETWEEN)
    gathered = world.empty((call.rows, call.k), call.dtype) if call.gathered else None
    steps = [(source, to, piece) for source, to in hops(world) for piece in range(pieces)]
    theirs = [_slices(world, call.shards, source, piece, pieces) for source, _, piece in steps]
    parts = [world.empty((_lengths(slices)[place], call.k), call.dtype) for slices in theirs]
    world.wait_event(between, world.record(stream))
    landed = []
    for (source, to, piece), part in zip(steps, parts, strict=True):
        send(world, x[_cut(x.shape[0], piece, pieces)], to, part, source, between)
        landed.append(world.record(between))
    _multiply_node(world, call, operands, _slices(world, call.shards, world.node), out, gathered)
    for slices, part, event in zip(theirs, parts, landed, strict=True):
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
    """The op on this node, of the rows `slices` of the whole, of which operands.x has this rank's place's."""
    whole, rows, node = _together(slices), _lengths(slices), world.levels.node
    if not any(rows):
        return
    into, options = None if whole is None else out[whole], (rows, call.gated, call.gathered, None, False)
    y, full, _ = REGISTRY[GATHER_GEMM].call(node, "auto", operands, options, into)
    for to, part in ((out, y), (gathered, full)):
        if to is not None and part is not None and (whole is None or to is gathered):
            _put(world, to, slices, part)


def _put(world: World, to: torch.Tensor, slices: Sequence[slice], part: torch.Tensor) -> None:
    """Copy the rows of `part`, which lie one behind another, to where they are in the whole."""
    outs = [to[rows] for rows in slices if rows.stop > rows.start]
    parts = list(part.split([len(rows) for rows in outs]))
    world.call(lambda: torch._foreach_copy_(outs, parts), parts, outs, world.current_stream())


# -- GEMM + reduce-scatter ---------------------------------------------------------------------------------------------
def run_scatter(world: World, call: ReduceCall, plan: TwoLevel, operands: ScaledFactors, out: torch.Tensor) -> None:
    levels, pieces, rows = world.levels, plan.pieces, out.shape[0]
    place, stream, between = levels.node.rank, world.current_stream(), world.side_stream(BETWEEN)
    staging = world.empty((levels.across.size, rows, call.n), call.dtype)  # by the node that the rows come from
    for to, source in hops(world):
        for piece in range(pieces):
            slices = _slices(world, call.shards, to, piece, pieces)
            part = world.empty((_lengths(slices)[place], call.n), call.dtype)
            _reduce_node(world, operands, slices, part)
            world.wait_event(between, world.record(stream))
            send(world, part, to, staging[source][_cut(rows, piece, pieces)], source, between)
    own = world.empty((rows, call.n), call.dtype)
    _reduce_node(world, operands, _slices(world, call.shards, world.node), own)
    world.wait_event(stream, world.record(between))
    if rows:
        sum_parts(own, staging, out, operands.bias, levels.across, stream)


def _reduce_node(world: World, operands: ScaledFactors, slices: Sequence[slice], out: torch.Tensor) -> None:
    """GEMM + reduce-scatter on this node, of the rows `slices` of x, one slice for each of its ranks."""
    (x, weight, *_), whole, rows = operands, _together(slices), _lengths(slices)
    if not any(rows):
        return
    if whole is None:
        parts, part = [x[lines] for lines in slices], world.empty((sum(rows), x.shape[1]), x.dtype)
        world.call(lambda: torch.cat(parts, out=part), parts, [part], world.current_stream())
    else:
        part = x[whole]
    REGISTRY[GEMM_REDUCE_SCATTER].call(
        world.levels.node, "auto", ScaledFactors(part, weight), (rows, True, None, False), out
    )


# -- all-reduce --------------------------------------------------------------------------------------------------------
def _pieces(world: World, m: int, plan: TwoLevel) -> list[RowPiece]:
    """Rows of the whole, one piece behind the other, of each of which every rank of a node owns a part."""
    node, count = world.levels.node, min(plan.pieces, m)
    cuts = [_cut(m, piece, count) for piece in range(count)]
    return [RowPiece(i, cut.start, split_rows(node, cut.stop - cut.start)) for i, cut in enumerate(cuts)]


def _held(world: World, name: str, pieces: Sequence[RowPiece], columns: int, dtype: torch.dtype) -> SymmetricTensor:
    """Symmetric memory of the node for the rows that each of its ranks owns of every piece."""
    shape = len(pieces), max(max(piece.shards) for piece in pieces), columns
    return workspace(world.levels.node, f"two levels, {name}", shape, dtype)


def run_reduce_all(world: World, call: ReduceCall, plan: TwoLevel, operands: ScaledFactors, out: torch.Tensor) -> None:
    node, across = world.levels.node, world.levels.across
    stream, between = world.current_stream(), world.side_stream(BETWEEN)
    pieces = _pieces(world, call.m, plan)
    node.order(lock(node, COPIES), stream)
    held, summed = _held(world, "rows", pieces, call.n, call.dtype), []
    for piece in pieces:
        mine = held.local[piece.index, : piece.shards[node.rank]]
        _reduce_node(world, operands, [piece.rows(p) for p in range(node.size)], mine)
        world.wait_event(between, world.record(stream))
        across.all_reduce(mine, between)
        summed.append(world.record(between))
    for piece, event in zip(pieces, summed, strict=True):
        world.wait_event(stream, event)
        node.barrier(stream)
        pull_rows(world, held, piece, out, 0, stream)
    add_bias(world, out, operands.bias, stream)


def run_sum(world: World, call: SumCall, plan: TwoLevel, t: Tensors, stream: Stream) -> None:
    """All-reduce, and what may come behind the sum, which the owner of a row on each node does. The owners' rows of a
    residual, which it does not have, are added before."""
    node, across, between = world.levels.node, world.levels.across, world.side_stream(BETWEEN)
    pieces, plain = _pieces(world, call.m, plan), call.op == PLAIN_SUM
    node.order(lock(node, COPIES), stream)
    source = workspace(node, "two levels, x", (call.m, call.h), call.dtype)
    held = _held(world, "rows", pieces, call.h, call.out_dtype)
    sums = _held(world, "sums", pieces, call.h, call.dtype) if call.keep else None
    own = split_rows(world, call.m)
    first = 0 if call.keep == WHOLE.value else sum(own[: world.rank])  # of the new residual
    node.copy(source.local, t.x, stream)
    if call.residual == OWN.value and t.residual is not None and own[world.rank]:
        rows, residual = source.local[first : first + own[world.rank]], t.residual
        world.call(lambda: rows.add_(residual), [rows, residual], [rows], stream)
    node.barrier(stream)
    totals, summed = [], []
    for piece in pieces:
        mine = piece.shards[node.rank]
        total = held.local[piece.index, :mine] if plain else node.empty((mine, call.h), call.dtype)
        sum_rows(world, source, piece, total, stream)
        world.wait_event(between, world.record(stream))
        across.all_reduce(total, between)
        totals.append(total)
        summed.append(world.record(between))
    for piece, total, event in zip(pieces, totals, summed, strict=True):
        world.wait_event(stream, event)
        if sums is not None and total.shape[0]:
            _norm(world, call, piece, total, t, held, sums, stream)
        node.barrier(stream)
        pull_rows(world, held, piece, t.out, 0, stream)
        if sums is not None and t.kept is not None:
            pull_rows(world, sums, piece, t.kept, first, stream)


def _norm(
    world: World,
    call: SumCall,
    piece: RowPiece,
    total: torch.Tensor,
    t: Tensors,
    held: SymmetricTensor,
    sums: SymmetricTensor,
    stream: Stream,
) -> None:
    """Normalise this rank's rows of a piece, which are summed, to `held`, and keep them with the residual in `sums`."""
    node = world.levels.node
    rows, mine, whole = piece.rows(node.rank), total.shape[0], call.residual == WHOLE.value
    part = replace(
        t,
        x=total,
        residual=t.residual[rows] if whole and t.residual is not None else None,
        out=held.local[piece.index, :mine],
        kept=sums.local[piece.index, :mine],
    )
    owned = replace(call, m=mine, residual=(WHOLE if whole else ABSENT).value, keep=WHOLE.value)
    norm_rows(node, owned)(stream, **part.arguments(), x=part.x, out=part.out)


# -- GEMM + all-to-all -------------------------------------------------------------------------------------------------
def run_exchange(world: World, call: RoutedCall, plan: TwoLevel, operands: Factors, out: torch.Tensor) -> None:
    """Rows go to this rank's place in their node, whose ranks pull them from there. `pool`: what a place got, node by
    node, and of each in the order of the ranks that it is for."""
    (x, weight, bias), routing, node = operands, call.routing, world.levels.node
    stream, between = world.current_stream(), world.side_stream(BETWEEN)
    order, ordered = routing.by_destination(world), world.empty((call.sent, call.k), call.dtype)
    node.order(lock(node, COPIES), stream)
    longest = max(_pool_rows(world, routing, rank)[-1] for rank in range(world.size))
    pool = workspace(node, "two levels, pool", (longest, call.n), call.dtype)
    begins = _pool_rows(world, routing, world.rank)
    world.call(lambda: torch.index_select(x, 0, order, out=ordered), [x, order], [ordered], stream)

    def multiply(to: int, y: torch.Tensor) -> None:
        first = sum(routing.counts[world.rank][: to * node.size])
        world.linear(ordered[first : first + y.shape[0]], weight, bias, stream, y)

    landed = []
    for to, source in hops(world):
        y = world.empty((sum(of_node(world, to, routing.counts[world.rank])), call.n), call.dtype)
        multiply(to, y)
        world.wait_event(between, world.record(stream))
        send(world, y, to, pool.local[begins[source] : begins[source + 1]], source, between)
        landed.append((source, world.record(between)))
    multiply(world.node, pool.local[begins[world.node] : begins[world.node + 1]])
    _pull_routed(world, routing, pool, world.node, out, stream)
    for source, event in landed:
        world.wait_event(stream, event)
        _pull_routed(world, routing, pool, source, out, stream)
    node.barrier(stream)


def _pool_rows(world: World, routing: Routing, rank: int) -> list[int]:
    """Return, for a rank's pool, where the rows that come from each node begin, and behind them the end."""
    each = world.levels.node.size
    node, place = divmod(rank, each)
    begins = [0]
    for source in range(place, world.size, each):
        begins.append(begins[-1] + sum(of_node(world, node, routing.counts[source])))
    return begins


def _pull_routed(
    world: World, routing: Routing, pool: SymmetricTensor, source: int, out: torch.Tensor, stream: Stream
) -> None:
    """Pull the rows for this rank that come from a node, which have landed here: each place of it has sent its own to
    the same place here."""
    node, me = world.levels.node, world.rank
    node.barrier(stream)
    for p in (node.rank, *node.other_ranks):
        sender = source * node.size + p
        begin = _pool_rows(world, routing, world.node * node.size + p)[source]
        begin += sum(of_node(world, world.node, routing.counts[sender])[: node.rank])
        first, count = sum(counts[me] for counts in routing.counts[:sender]), routing.counts[sender][me]
        if count:
            node.copy(out[first : first + count], pool.peers[p][begin : begin + count], stream)
