"""Attention by heads (DeepSpeed-Ulysses): every rank gets the whole sequence of some of the heads.

    push q, k, v | barrier | attention of 1 / W of the heads over the whole sequence | push out, lse | barrier | copy

A push writes blocks of a matrix where their readers read them, so that rows of all heads become whole sequences of few
heads, and back, on the way. A causal mask is then one square, the same work for all ranks in any layout, and nothing is
merged. What a barrier orders: behind the first, all rows have come, and nobody reads the last call's results any
more; behind the second, all results have come, and nobody reads queries or keys any more. Results have memory of their
own: while one rank still copies them another pushes queries of the next call, which may be of another size.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import accumulate

import torch

from ...backends.base import SymmetricTensor
from ...kernel_launch import Launch, prepared
from ...plans import HeadParallel
from ...transport.memory import lock, workspace
from ...transport.sm_push import Block, block_launch
from ...world import World
from .key_ranges import Sight, zigzag_chunks
from .segmented import Heads, Keys, Partial, attend, merged

Tensor = torch.Tensor

MEMORY = "attention heads"


@dataclass(frozen=True)
class HeadSplit:
    """Which heads and rows are whose. chunks: by rank, (first row here, first row of the sequence, rows) of what lies
    together in both."""

    of: Heads
    chunks: tuple[tuple[tuple[int, int, int], ...], ...]

    @staticmethod
    def over(of: Heads, zigzag: bool) -> HeadSplit:
        if zigzag:
            return HeadSplit(of, zigzag_chunks(of.shards))
        ends = accumulate(of.shards, initial=0)
        return HeadSplit(of, tuple(((0, at, rows),) for at, rows in zip(ends, of.shards, strict=False)))

    @property
    def part(self) -> Heads:
        """What a rank computes: the whole sequence of some heads."""
        of, size = self.of, len(self.of.shards)
        return replace(of, shards=(sum(of.shards),), heads=of.heads // size, kv_heads=of.kv_heads // size)

    def out(self, rank: int, heads: int) -> list[Block]:
        """Return the blocks by which rows [n, heads of all ranks, D] of a rank go to every reader's [S, its heads,
        D]."""
        size, width = len(self.chunks), heads * self.of.dim
        return [
            (reader, rows, width, to * width, width, (at * size + reader) * width, size * width)
            for reader in ring(rank, size)
            for at, to, rows in self.chunks[rank]
        ]

    def back(self, rank: int) -> list[Block]:
        """Return the blocks by which results [S, this rank's heads, D] go back to the rows' ranks, [n, heads, D]."""
        size, width = len(self.chunks), self.part.heads * self.of.dim
        return [
            (reader, rows, width, (to * size + rank) * width, size * width, at * width, width)
            for reader in ring(rank, size)
            for to, at, rows in self.chunks[reader]
        ]

    def lse_back(self, rank: int) -> list[Block]:
        """Return the blocks by which lse [this rank's heads, S] goes back to the rows' ranks, [heads, n]."""
        heads, total = self.part.heads, sum(self.of.shards)
        return [
            (reader, heads, rows, rank * heads * self.of.shards[reader] + to, self.of.shards[reader], at, total)
            for reader in ring(rank, len(self.chunks))
            for to, at, rows in self.chunks[reader]
        ]


def ring(rank: int, size: int) -> list[int]:
    """Return every rank, from the next one on."""
    return [(rank + step) % size for step in range(1, size + 1)]


def forward(
    world: World,
    of: Heads,
    plan: HeadParallel,
    seen: Sight,
    zigzag: bool,
    q: Tensor,
    own: Keys,
    sinks: Tensor | None,
    out: Tensor,
) -> Tensor:
    """lse float32 [heads, m]; and out [m, heads, D] is written. seen: of a rank that has the whole sequence. Queries
    are the last of their rank's places."""
    stream, rank, n, m = world.current_stream(), world.rank, len(own.k), len(q)
    split = world.cached((MEMORY, "split", of, zigzag), lambda: HeadSplit.over(of, zigzag))
    part = split.part
    planes = memory_of(world, split)
    world.order(lock(world, MEMORY), stream)
    if m < n:  # others count with as many queries as keys
        every = world.zeros((n, of.heads, of.dim), of.dtype)
        world.copy(every[n - m :], q, stream)
        q = every
    for plane, t, heads in ((0, q, part.heads), (1, own.k, part.kv_heads), (2, own.v, part.kv_heads)):
        push(world, plan, (split, "out", heads), t, planes[plane])
    world.barrier(stream, MEMORY)
    whole, square = Keys(planes[1].local, planes[2].local), seen.own[0]
    made = attend(world, part, 0, planes[0].local, whole, seen.packed or square.causal)
    if sinks is not None:
        partial, made = (
            made,
            Partial(0, world.empty(made.out.shape, of.dtype), world.empty(made.lse.shape, torch.float32)),
        )
        merged(world, [partial], sinks[rank * part.heads : (rank + 1) * part.heads], made.out, made.lse)
    push(world, plan, (split, "back"), made.out, planes[3])
    push(world, plan, (split, "lse_back"), made.lse, planes[4])
    world.barrier(stream, MEMORY)
    lse = world.empty((of.heads, m), torch.float32)
    rows, sums = planes[3].local[n - m : n], planes[4].local[: of.heads * n].view(of.heads, n)[:, n - m :]

    def copy() -> None:
        out.copy_(rows)
        lse.copy_(sums)

    world.call(copy, [rows, sums], [out, lse], stream)
    return lse


def memory_of(world: World, split: HeadSplit) -> list[SymmetricTensor]:
    """Return the memory of queries, keys and values that this rank computes with; of results, and their lse, of its own
    rows."""
    of, part = split.of, split.part
    total, most = sum(of.shards), max(of.shards)
    sizes = {"queries": part.heads, "keys": part.kv_heads, "values": part.kv_heads}
    return [
        *(workspace(world, f"{MEMORY}, {use}", (total, heads, of.dim), of.dtype) for use, heads in sizes.items()),
        workspace(world, f"{MEMORY}, results", (most, of.heads, of.dim), of.dtype),
        workspace(world, f"{MEMORY}, lse", (most * of.heads,), torch.float32),
    ]


def push(
    world: World, plan: HeadParallel, which: tuple[HeadSplit, str, *tuple[int, ...]], t: Tensor, to: SymmetricTensor
) -> None:
    """Push blocks of t to their readers. which: a HeadSplit, and its method with the arguments behind the rank."""
    _push(world, plan.programs, which, t.dtype)(world.current_stream(), x=t, memory=to.addresses)


@prepared
def _push(world: World, programs: int, which: tuple[HeadSplit, str, *tuple[int, ...]], dtype: torch.dtype) -> Launch:
    split, name, *more = which
    return block_launch(world, programs, (MEMORY, *which), getattr(split, name)(world.rank, *more), dtype)
