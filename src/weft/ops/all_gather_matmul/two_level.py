"""All-gather + GEMM on several nodes (transport/two_level.py).

between  send own shard to the other nodes, receive theirs, node by node, chunk by chunk
stream   node's op of the own node's shards | of the next arrived node's | ..
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from ...op import REGISTRY
from ...plans import TwoLevel
from ...transport.two_level import BETWEEN, as_one_slice, cut, lengths, node_pairs, send, slices_of_node
from ...world import World
from ..recipes import UNSCALED, ScaledFactors
from .call import GATHER_GEMM, GatherCall, GatheredRows


def run_gather(
    world: World, call: GatherCall, plan: TwoLevel, operands: ScaledFactors, out: torch.Tensor
) -> GatheredRows:
    """Run all-gather + GEMM. Return the gathered activation, if the caller requests it."""
    x, local_rank, chunks = operands.x, world.levels.node.rank, plan.pieces
    stream, between = world.current_stream(), world.side_stream(BETWEEN)
    gathered = world.empty((call.rows, call.k), call.dtype) if call.gathered else None
    steps = [(source, target, chunk) for source, target in node_pairs(world) for chunk in range(chunks)]
    node_slices = [slices_of_node(world, call.shards, source, chunk, chunks) for source, _, chunk in steps]
    parts = [world.empty((lengths(slices)[local_rank], call.k), call.dtype) for slices in node_slices]
    world.wait_event(between, world.record(stream))
    arrived = []
    for (source, target, chunk), part in zip(steps, parts, strict=True):
        send(world, x[cut(x.shape[0], chunk, chunks)], target, part, source, between)
        arrived.append(world.record(between))
    _multiply_node(world, call, operands, slices_of_node(world, call.shards, world.node), out, gathered)
    for slices, part, event in zip(node_slices, parts, arrived, strict=True):
        world.wait_event(stream, event)
        _multiply_node(world, call, operands._replace(x=part), slices, out, gathered)
    return GatheredRows(gathered)


def _multiply_node(
    world: World,
    call: GatherCall,
    operands: ScaledFactors,
    slices: Sequence[slice],
    out: torch.Tensor,
    gathered: torch.Tensor | None,
) -> None:
    """Run the op on this node. `slices` contains a range of rows of the whole matrix for each rank of the node;
    operands.x contains the rows in this rank's range."""
    whole, rows, node = as_one_slice(slices), lengths(slices), world.levels.node
    if not any(rows):
        return
    into, options = None if whole is None else out[whole], (rows, call.gated, call.gathered, *UNSCALED)
    y, full, _ = REGISTRY[GATHER_GEMM].call(node, "auto", operands, options, into)
    for result, part in ((out, y), (gathered, full)):
        if result is not None and part is not None and (whole is None or result is gathered):
            _put(world, result, slices, part)


def _put(world: World, out: torch.Tensor, slices: Sequence[slice], part: torch.Tensor) -> None:
    """Copy the rows of `part`, which are the concatenated slices, to the slices of `out`."""
    outs = [out[rows] for rows in slices if rows.stop > rows.start]
    parts = list(part.split([len(rows) for rows in outs]))
    world.call(lambda: torch._foreach_copy_(outs, parts), parts, outs, world.current_stream())
