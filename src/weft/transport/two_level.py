"""What crosses between nodes, and what the ranks of a node sum and gather around it (`World.levels`).

Rank r is in node r // L with place r % L, for L ranks a node, and is sent to by the ranks of its place alone. In a node
copy engines move rows out of symmetric memory, so that no kernel holds the SMs that a transfer between nodes needs; a
barrier of the node's ranks before says that the rows are there.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch

from ..backends.base import Stream, SymmetricTensor
from ..world import World
from .copy_engine import pull_parts, sum_parts

BETWEEN = "between nodes"  # the stream of the transfers


def hops(world: World) -> Iterator[tuple[int, int]]:
    """Yield the nodes (own + j, own - j), modulo their number, for j = 1, 2, ..: in each transfer every node sends to
    one of them and receives from the other."""
    count = world.levels.across.size
    return (((world.node + j) % count, (world.node - j) % count) for j in range(1, count))


def of_node(world: World, node: int, by_rank: Sequence[int]) -> tuple[int, ...]:
    """The entries of a node's ranks."""
    each = world.levels.node.size
    return tuple(by_rank[node * each : (node + 1) * each])


def send(world: World, part: torch.Tensor, to: int, into: torch.Tensor, source: int, stream: Stream) -> None:
    """Send `part` to this rank's place in node `to`, and receive `into` from that in node `source`."""
    across = world.levels.across
    outs = [into if node == source else into[:0] for node in range(across.size)]
    parts = [part if node == to else part[:0] for node in range(across.size)]
    across.all_to_all(outs, parts, stream)


@dataclass(frozen=True)
class RowPiece:
    """Rows first .. first + sum(shards) of a matrix: `shards` of each of a node's ranks. index: which piece."""

    index: int
    first: int
    shards: tuple[int, ...]

    def rows(self, place: int) -> slice:
        lo = self.first + sum(self.shards[:place])
        return slice(lo, lo + self.shards[place])


def sum_rows(world: World, source: SymmetricTensor, piece: RowPiece, into: torch.Tensor, stream: Stream) -> None:
    """into = this rank's rows of the piece of `source` [M, H], summed over the ranks of the node in their order, in
    float32."""
    node = world.levels.node
    rows, count = piece.rows(node.rank), len(into)
    if not count:
        return
    staging = pull_parts(node, source, rows, count, stream)
    sum_parts(source.local[rows], staging, into, None, node, stream)


def pull_rows(
    world: World, held: SymmetricTensor, piece: RowPiece, into: torch.Tensor, first: int, stream: Stream
) -> None:
    """Copy to `into`, which are rows `first` and on of the whole, those that the piece has of them. held: [pieces,
    rows, columns], on each rank of the node its rows of every piece."""
    node, last = world.levels.node, first + into.shape[0]
    for p in (node.rank, *node.other_ranks):
        rows = piece.rows(p)
        lo, hi = max(rows.start, first), min(rows.stop, last)
        if lo < hi:
            part = held.peers[p][piece.index, lo - rows.start : hi - rows.start]
            node.copy(into[lo - first : hi - first], part, stream)
