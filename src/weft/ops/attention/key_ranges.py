"""The keys that a rank's queries attend to, as a few rectangles of the score matrix, each computed by a library.

Rank r holds n_r rows of the sequence, and queries for the last m_r of them. In the layout "contiguous" the ranks' rows
follow one another. In the layout "zigzag" the sequence is cut into 2 W chunks, and rank r holds chunks r and
2 W - 1 - r, so that all ranks have equal work under a causal mask. In this layout a rank's local rows are one causal
block. All of its queries see the first chunk of a rank with a smaller number, and none see the second. Only the queries
of its second chunk see keys of a rank with a larger number, and they see all of them:

    W = 2      keys 0 3 | 1 2          rank 0 holds chunks 0 and 3, rank 1 holds chunks 1 and 2
    rank 0  0:      \\ . | . .          \\ causal, # all, . none
            3:      # \\ | # #
    rank 1  1:      # . | \\ .
            2:      # . | # \\

Remote ranks are visited in the order r - 1, r - 2, .. 0, W - 1, .. r + 1, so that at every step each rank pushes to a
different rank.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from itertools import accumulate, chain, pairwise
from typing import NamedTuple

import torch

from ...lang.mapping import balanced_rows
from ...transport.collectives import gather
from ...world import World
from .libraries import Packed


class KeyRange(NamedTuple):
    """Keys lo to hi in the shard of rank `source`."""

    source: int
    lo: int
    hi: int


class CausalBlock(NamedTuple):
    """A block of local keys lo to hi and all local queries. If `causal` is set, the block is on the diagonal of the
    causal mask; otherwise every query sees all keys of the block."""

    lo: int
    hi: int
    causal: bool


class KeyGroup(NamedTuple):
    """Key ranges for one library call. The queries from `first_query` on see all of these keys; earlier queries see
    none of them."""

    first_query: int
    ranges: tuple[KeyRange, ...]

    @property
    def rows(self) -> int:
        return sum(key_range.hi - key_range.lo for key_range in self.ranges)


class KeyRanges(NamedTuple):
    """The local and remote keys that a rank's queries see. If `packed` is set, it replaces the causal flags and
    defines which queries see which of these keys."""

    local: tuple[CausalBlock, ...]
    remote: tuple[KeyGroup, ...]
    packed: Packed | None = None


def first_chunk(rows: int) -> int:
    """Return the number of rows in the first of a rank's two chunks."""
    return rows - rows // 2


@functools.lru_cache(maxsize=1024)
def causal_key_ranges(rank: int, shards: tuple[int, ...], queries: int, causal: bool, zigzag: bool) -> KeyRanges:
    """Return the keys that the queries in the last `queries` rows of `rank` see. The key ranges do not depend on
    `queries`."""
    size, n = len(shards), shards[rank]
    order = [(rank - step) % size for step in range(1, size)]
    whole = {source: KeyRange(source, 0, shards[source]) for source in order}
    if not causal:
        return KeyRanges(_nonempty_blocks(CausalBlock(0, n, False)), _nonempty_groups((0, list(whole.values()))))
    if not n:
        return KeyRanges((), ())
    local = _nonempty_blocks(CausalBlock(n - queries, n, True), CausalBlock(0, n - queries, False))
    lower, higher = [source for source in order if source < rank], [source for source in order if source > rank]
    if not zigzag:
        return KeyRanges(local, _nonempty_groups((0, [whole[source] for source in lower])))
    first_chunks = [KeyRange(source, 0, first_chunk(shards[source])) for source in lower]
    second = first_chunk(n)  # the first query of this rank's second chunk
    return KeyRanges(
        local, _nonempty_groups((0, first_chunks), (second, [whole[source] for source in higher if second < n]))
    )


def _nonempty_blocks(*blocks: CausalBlock) -> tuple[CausalBlock, ...]:
    return tuple(block for block in blocks if block.hi > block.lo)


def _nonempty_groups(*groups: tuple[int, Sequence[KeyRange]]) -> tuple[KeyGroup, ...]:
    nonempty = [(first_query, tuple(r for r in ranges if r.hi > r.lo)) for first_query, ranges in groups]
    return tuple(KeyGroup(first_query, ranges) for first_query, ranges in nonempty if ranges)


@functools.lru_cache(maxsize=1024)
def packed_key_ranges(
    rank: int, shards: tuple[int, ...], queries: int, cu_seqlens: tuple[int, ...], causal: bool, window: int
) -> KeyRanges:
    """Return the keys that the queries in the last `queries` rows of `rank` see in packed sequences. These keys are one
    run of consecutive local and remote keys."""
    shard_starts = [0, *accumulate(shards)]
    query_start, query_stop = shard_starts[rank + 1] - queries, shard_starts[rank + 1]
    cu_queries, cu_keys, start = [0], [0], query_stop
    for lo, hi in pairwise(cu_seqlens):
        query_lo, query_hi = max(lo, query_start), min(hi, query_stop)
        if query_lo >= query_hi:
            continue
        lo = max(lo, query_lo - window + 1) if window else lo
        start = min(start, lo)
        cu_queries.append(query_hi - query_start)
        cu_keys.append((query_hi if causal else hi) - start)
    stop = start + cu_keys[-1]
    ranges = [
        KeyRange(source, max(start, lo) - lo, min(stop, hi) - lo)
        for source, (lo, hi) in enumerate(pairwise(shard_starts))
    ]
    packed, shard_start = Packed(tuple(cu_queries), tuple(cu_keys), causal, window), shard_starts[rank]
    if shard_start <= start and stop <= query_stop:
        return KeyRanges(_nonempty_blocks(CausalBlock(start - shard_start, stop - shard_start, False)), (), packed)
    return KeyRanges((), _nonempty_groups((0, ranges)), packed)


@functools.lru_cache(maxsize=1024)
def split_groups(groups: tuple[KeyGroup, ...], calls: int) -> tuple[KeyGroup, ...]:
    """Split each group into at most `calls` groups of whole ranges. Smaller groups come first, so that attention starts
    early."""
    split = []
    for first_query, ranges in groups:
        start = 0
        for count in reversed(balanced_rows(len(ranges), min(calls, len(ranges)))):
            split.append(KeyGroup(first_query, ranges[start : start + count]))
            start += count
    return tuple(split)


@functools.lru_cache(maxsize=1024)
def buffer_rows(groups: tuple[KeyGroup, ...]) -> tuple[tuple[KeyRange, int], ...]:
    """Return each range together with its first row in the reader's buffer, in which the ranges follow one another."""
    ranges = [key_range for group in groups for key_range in group.ranges]
    starts = accumulate((key_range.hi - key_range.lo for key_range in ranges), initial=0)
    return tuple(zip(ranges, starts, strict=False))


# -- the zigzag layout -------------------------------------------------------------------------------------------------
def _chunks(length: int, size: int) -> list[tuple[range, range]]:
    """Return the two chunks of each of `size` ranks, for a sequence of `length` rows."""
    ends = accumulate(balanced_rows(length, 2 * size), initial=0)
    chunks = [range(lo, hi) for lo, hi in pairwise(ends)]
    return [(chunks[r], chunks[-1 - r]) for r in range(size)]


def zigzag_rows(length: int, size: int) -> tuple[int, ...]:
    """Return the number of rows that each of `size` ranks holds in the zigzag layout, for a sequence of `length`
    rows."""
    return tuple(len(early) + len(late) for early, late in _chunks(length, size))


@functools.lru_cache(maxsize=1024)
def zigzag_chunks(shards: tuple[int, ...]) -> tuple[tuple[tuple[int, int, int], ...], ...]:
    """Return, for each rank, its two chunks as (first row in the rank's shard, first row in the sequence, rows)."""
    return tuple(
        ((0, early.start, len(early)), (len(early), late.start, len(late)))
        for early, late in _chunks(sum(shards), len(shards))
    )


def zigzag_positions(length: int, world: World) -> torch.Tensor:
    """Return int64 [n_r], the positions of this rank's rows in a sequence of `length` (for rotary embeddings, masks and
    labels)."""
    early, late = _chunks(length, world.size)[world.rank]
    return torch.tensor([*early, *late], dtype=torch.int64, device=world.device)


def zigzag_split(x: torch.Tensor, world: World) -> torch.Tensor:
    """Return this rank's rows of x [S, ..]: chunks r and 2 W - 1 - r of 2 W chunks. Every rank must pass the whole
    sequence.

    The lengths of chunks differ by at most one row. If 2 W does not divide S, ranks have different numbers of rows;
    attention then needs `rows=weft.zigzag_rows(S, world.size)`.
    """
    chunks = _chunks(x.shape[0], world.size)[world.rank]
    return torch.cat([x[chunk.start : chunk.stop] for chunk in chunks])


def zigzag_restore(x: torch.Tensor, world: World, length: int | None = None) -> torch.Tensor:
    """Return the whole sequence [S, ..] in its original order on every rank. Each rank passes its zigzag rows x [n_r,
    ..].

    The function is a collective and has no gradient. `length` is S; None means that all ranks have as many rows as this
    rank. Raises ValueError if x does not have this rank's number of rows for `length`.
    """
    length = x.shape[0] * world.size if length is None else length
    rows, stream = zigzag_rows(length, world.size), world.current_stream()
    if rows[world.rank] != x.shape[0]:
        raise ValueError(
            f"zigzag_restore: x {list(x.shape)} of a sequence of {length} must have {rows[world.rank]} rows"
        )
    world.begin(
        world.check_same_on_all_ranks("zigzag_restore", rows=rows, columns=tuple(x.shape[1:]), dtype=str(x.dtype))
    )
    flat = gather(x.detach().reshape(x.shape[0], math.prod(x.shape[1:])).contiguous(), world, rows, stream)
    out, start = world.empty((length, *x.shape[1:]), x.dtype), 0
    for chunk in chain.from_iterable(_chunks(length, world.size)):
        if len(chunk):
            rows_of_chunk = flat[start : start + len(chunk)].view(len(chunk), *x.shape[1:])
            world.copy(out[chunk.start : chunk.stop], rows_of_chunk, stream)
        start += len(chunk)
    world.finish(stream)
    return out
