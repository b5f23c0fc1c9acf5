"""Decomposed plans for ranks without symmetric memory. Shards are cut into parts, and NCCL's collective of one part
runs during the GEMM of a different part.

    all-gather       comm    gather part 0 | gather part 1 | ...
                     stream                | GEMM 0, put in order | GEMM 1, ..
    reduce-scatter   stream  collect rows of part 0, GEMM 0 | part 1 ..
                     comm                                   | reduce-scatter part 0 | ..

A part contains the same fraction of a shard's rows as the plan's groups contain of all shards. Collectives need
contiguous memory, so rows are copied within the GPU. The copy is one pass over the GPU's memory, which is several times
as fast as the link. All memory is allocated before the streams diverge, because the caching allocator orders the reuse
of memory only on one stream.
"""

from __future__ import annotations

import torch

from ..plans import Decomposed
from ..transport.collectives import add_bias
from ..transport.order import group_steps
from ..world import World
from .recipes import ScaledFactors


def parts_of(plan: Decomposed, rows: int, size: int) -> list[tuple[int, int]]:
    """Split a shard of `rows` rows into parts, and return the range of rows for every part."""
    parts = [(rows * group.start // size, rows * group.stop // size) for group in group_steps(plan, size)]
    return [(lo, hi) for lo, hi in parts if hi > lo]


def gather(world: World, plan: Decomposed, operands: ScaledFactors, out: torch.Tensor) -> torch.Tensor:
    """Compute out [M, N], and return the gathered x [M, K]."""
    x, weight, bias, *_ = operands
    (rows, k), n, size = x.shape, weight.shape[0], world.size
    stream, comm = world.current_stream(), world.side_stream("comm")
    arrived, product = world.empty((size * rows, k), x.dtype), world.empty((size * rows, n), x.dtype)
    gathered = world.empty((size * rows, k), x.dtype)
    world.wait_event(comm, world.record(stream))
    for lo, hi in parts_of(plan, rows, size):
        x_part, y_part = arrived[size * lo : size * hi], product[size * lo : size * hi]
        world.all_gather(x_part, x[lo:hi], comm)
        world.wait_event(stream, world.record(comm))
        world.backend.linear(x_part, weight, bias, stream, y_part)
        for whole, part in ((out, y_part), (gathered, x_part)):
            _copy(world, whole.view(size, rows, -1)[:, lo:hi], part.view(size, hi - lo, -1))
    return gathered


def scatter(world: World, plan: Decomposed, operands: ScaledFactors, out: torch.Tensor) -> None:
    """Compute this rank's rows of the sum over ranks, out [m, N]."""
    x, weight, bias, *_ = operands
    (rows, n), k, size = out.shape, x.shape[1], world.size
    stream, comm = world.current_stream(), world.side_stream("comm")
    together, partial = world.empty((size * rows, k), x.dtype), world.empty((size * rows, n), x.dtype)
    world.wait_event(comm, world.record(stream))
    for lo, hi in parts_of(plan, rows, size):
        x_part, y_part = together[size * lo : size * hi], partial[size * lo : size * hi]
        _copy(world, x_part.view(size, hi - lo, k), x.view(size, rows, k)[:, lo:hi])
        world.backend.linear(x_part, weight, None, stream, y_part)
        world.wait_event(comm, world.record(stream))
        world.reduce_scatter(out[lo:hi], y_part, comm)
    world.wait_event(stream, world.record(comm))
    add_bias(world, out, bias, stream)


def _copy(world: World, target: torch.Tensor, source: torch.Tensor) -> None:
    world.call(lambda: target.copy_(source), [source], [target], world.current_stream())
