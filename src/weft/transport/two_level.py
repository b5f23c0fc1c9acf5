"""Transfers between nodes, and the sums and gathers inside a node before and after them (`World.levels`).

With L ranks per node, rank r is in node r // L with local rank r % L. Between nodes only ranks with the same local rank
exchange data. Inside a node copy engines move rows out of symmetric memory, so that no kernel occupies the SMs that a
transfer between nodes needs. A barrier of the node's ranks before these copies ensures that the rows are complete.

Plan TwoLevel: each node runs the op on the node's World, with the plan that "auto" chooses for that World, while a
second stream sends rows between the nodes. A node sums in float32 in the order of its ranks, and rounds once.
Reduce-scatter then sums the nodes' results in float32 in the order of the nodes; all-reduce sums them in NCCL's order.

The events of each rank order its two streams, and no further order is needed: a transfer reads and writes only memory
of this call, or symmetric memory of the node. All-reduce writes again a row of symmetric memory that peers pulled in
the previous call. It does so only after each peer has contributed to the row's sum in this call, and on the peer's
stream that contribution comes after the pulls. In an all-to-all a row has only one source, so the call ends with a
barrier.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch

from ..backends.base import Stream, SymmetricTensor
from ..lang.mapping import balanced_rows
from ..plans import TwoLevel
from ..world import World
from .copy_engine import pull_parts, sum_parts
from .memory import workspace

BETWEEN = "between nodes"  # the name of the stream of the transfers


def node_pairs(world: World) -> Iterator[tuple[int, int]]:
    """Yield the pair of nodes of each transfer. For j = 1, 2, .., this node sends to the j-th node after it, and
    receives from the j-th node before it, modulo the number of nodes."""
    count = world.levels.across.size
    return (((world.node + j) % count, (world.node - j) % count) for j in range(1, count))


def local_slice(world: World, node: int, by_rank: Sequence[int]) -> tuple[int, ...]:
    """Return the entries of `by_rank` for the ranks of a node."""
    size = world.levels.node.size
    return tuple(by_rank[node * size : (node + 1) * size])


def cut(rows: int, chunk: int, chunks: int) -> slice:
    """Return the rows of a chunk, if the rows are cut into `chunks` chunks of about the same size."""
    return slice(rows * chunk // chunks, rows * (chunk + 1) // chunks)


def slices_of_node(world: World, shards: Sequence[int], node: int, chunk: int = 0, chunks: int = 1) -> list[slice]:
    """Return the rows of a chunk of each rank's shard on a node, as rows of the whole matrix."""
    start, slices = sum(shards[: node * world.levels.node.size]), []
    for rows in local_slice(world, node, shards):
        part = cut(rows, chunk, chunks)
        slices.append(slice(start + part.start, start + part.stop))
        start += rows
    return slices


def lengths(slices: Sequence[slice]) -> tuple[int, ...]:
    return tuple(rows.stop - rows.start for rows in slices)


def as_one_slice(slices: Sequence[slice]) -> slice | None:
    """Return the union of the slices as one slice, or None if they are not contiguous."""
    whole = slice(slices[0].start, slices[-1].stop)
    return whole if whole.stop - whole.start == sum(lengths(slices)) else None


def send(world: World, part: torch.Tensor, target: int, out: torch.Tensor, source: int, stream: Stream) -> None:
    """Send `part` to node `target`, and receive `out` from node `source`. Both peers have this rank's local rank."""
    across = world.levels.across
    outs = [out if node == source else out[:0] for node in range(across.size)]
    parts = [part if node == target else part[:0] for node in range(across.size)]
    across.backend.all_to_all(outs, parts, stream)


@dataclass(frozen=True)
class RowChunk:
    """The rows of a matrix from `begin` to `begin + sum(shards)`. Local rank r of each node owns shards[r] of these
    rows. `index` is the number of the chunk."""

    index: int
    begin: int
    shards: tuple[int, ...]

    def rows(self, local_rank: int) -> slice:
        lo = self.begin + sum(self.shards[:local_rank])
        return slice(lo, lo + self.shards[local_rank])


def row_chunks(world: World, m: int, plan: TwoLevel) -> list[RowChunk]:
    """Return consecutive chunks of all m rows. Each rank of a node owns a part of each chunk."""
    node, count = world.levels.node, min(plan.pieces, m)
    parts = [cut(m, chunk, count) for chunk in range(count)]
    return [
        RowChunk(i, part.start, tuple(balanced_rows(part.stop - part.start, node.size))) for i, part in enumerate(parts)
    ]


def chunk_memory(
    world: World, name: str, chunks: Sequence[RowChunk], columns: int, dtype: torch.dtype
) -> SymmetricTensor:
    """Return symmetric memory of the node for the rows of every chunk. Each rank's memory has the rows that the rank
    owns."""
    shape = len(chunks), max(max(chunk.shards) for chunk in chunks), columns
    return workspace(world.levels.node, f"two levels, {name}", shape, dtype)


def sum_rows(world: World, source: SymmetricTensor, chunk: RowChunk, out: torch.Tensor, stream: Stream) -> None:
    """Sum the chunk of `source` [M, H] over the node's ranks, in float32 and in rank order, and store this rank's rows
    of the sum in `out`."""
    node = world.levels.node
    rows, count = chunk.rows(node.rank), len(out)
    if not count:
        return
    staging = node.empty((node.size, count, source.local.shape[1]), source.local.dtype)
    pull_parts(node, source, rows, staging, stream)
    sum_parts(source.local[rows], staging, out, None, node, stream)


def pull_rows(
    world: World, memory: SymmetricTensor, chunk: RowChunk, out: torch.Tensor, begin: int, stream: Stream
) -> None:
    """Copy the chunk's rows to `out`, which begins with row `begin` of the matrix; rows outside `out` are not copied.
    `memory`, [chunks, rows, columns], has on each rank of the node the rows of every chunk that the rank owns."""
    node, end = world.levels.node, begin + out.shape[0]
    for p in (node.rank, *node.other_ranks):
        rows = chunk.rows(p)
        lo, hi = max(rows.start, begin), min(rows.stop, end)
        if lo < hi:
            part = memory.peers[p][chunk.index, lo - rows.start : hi - rows.start]
            node.copy(out[lo - begin : hi - begin], part, stream)
