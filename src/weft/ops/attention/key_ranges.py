"""Which keys a rank's queries see, as a few blocks that a library computes: all of them, or a causal square.

Rank r holds n_r rows of the sequence, and queries for the last m_r of them. "contiguous": the ranks' rows one after
another. "zigzag": the sequence is cut into 2 W chunks, and rank r holds chunks r and 2 W - 1 - r, so that a causal mask
leaves every rank the same work. Then a rank's own rows are one causal square; of a rank before it all its queries see
the first chunk alone, of a rank behind it the queries of its second chunk see everything:

    W = 2      keys 0 3 | 1 2          keys of rank 0: chunks 0 and 3, of rank 1: chunks 1 and 2
    rank 0  0:      \\ . | . .          \\ causal, # all, . none
            3:      # \\ | # #
    rank 1  1:      # . | \\ .
            2:      # . | # \\

Other ranks come in the order r - 1, r - 2, .. 0, W - 1, .. r + 1: at every step each rank pushes to another one.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from itertools import accumulate, pairwise
from typing import NamedTuple

import torch

from ...lang.mapping import balanced_rows
from ...transport.collectives import gather
from ...world import World
from .libraries import Packed


class Piece(NamedTuple):
    """Rows lo to hi of a rank's part."""

    source: int
    lo: int
    hi: int


class Square(NamedTuple):
    """This rank's keys lo to hi, which all its queries see; causal: as a causal square."""

    lo: int
    hi: int
    causal: bool


class Group(NamedTuple):
    """Pieces that the queries from `first` on see whole."""

    first: int
    pieces: tuple[Piece, ...]

    @property
    def rows(self) -> int:
        return sum(piece.hi - piece.lo for piece in self.pieces)


class Sight(NamedTuple):
    """packed: how the queries see what is there, instead of whole or as a square."""

    own: tuple[Square, ...]
    others: tuple[Group, ...]
    packed: Packed | None = None


def first_chunk(rows: int) -> int:
    """Return the number of rows of the first of a rank's two chunks."""
    return rows - rows // 2


@functools.lru_cache(maxsize=1024)
def sight(rank: int, shards: tuple[int, ...], queries: int, causal: bool, zigzag: bool) -> Sight:
    """Return what rank's queries see. The pieces do not depend on `queries`."""
    size, n = len(shards), shards[rank]
    order = [(rank - step) % size for step in range(1, size)]
    whole = {s: Piece(s, 0, shards[s]) for s in order}
    if not causal:
        return Sight(_squares(Square(0, n, False)), _groups((0, [whole[s] for s in order])))
    if not n:
        return Sight((), ())
    own = _squares(Square(n - queries, n, True), Square(0, n - queries, False))
    before, behind = [s for s in order if s < rank], [s for s in order if s > rank]
    if not zigzag:
        return Sight(own, _groups((0, [whole[s] for s in before])))
    firsts = [Piece(s, 0, first_chunk(shards[s])) for s in before]
    later = first_chunk(n)
    return Sight(own, _groups((0, firsts), (later, [whole[s] for s in behind if later < n])))


def _squares(*squares: Square) -> tuple[Square, ...]:
    return tuple(s for s in squares if s.hi > s.lo)


def _groups(*groups: tuple[int, Sequence[Piece]]) -> tuple[Group, ...]:
    made = [Group(first, tuple(p for p in pieces if p.hi > p.lo)) for first, pieces in groups]
    return tuple(group for group in made if group.pieces)


@functools.lru_cache(maxsize=1024)
def packed_sight(
    rank: int, shards: tuple[int, ...], queries: int, bounds: tuple[int, ...], causal: bool, window: int
) -> Sight:
    """Return what rank's queries see of sequences that begin and end at `bounds`: one run of keys, the own ones among
    them."""
    ends = [0, *accumulate(shards)]
    first, last = ends[rank + 1] - queries, ends[rank + 1]
    of_queries, of_keys, start = [0], [0], last
    for lo, hi in pairwise(bounds):
        mine = max(lo, first), min(hi, last)
        if mine[0] >= mine[1]:
            continue
        lo = max(lo, mine[0] - window + 1) if window else lo
        start = min(start, lo)
        of_queries.append(mine[1] - first)
        of_keys.append((mine[1] if causal else hi) - start)
    stop = start + of_keys[-1]
    cut = [(max(start, a), min(stop, b), a) for a, b in pairwise(ends)]
    pieces = [Piece(r, lo - a, hi - a) for r, (lo, hi, a) in enumerate(cut)]
    packed = Packed(tuple(of_queries), tuple(of_keys), causal, window)
    if ends[rank] <= start and stop <= last:
        return Sight(_squares(Square(start - ends[rank], stop - ends[rank], False)), (), packed)
    return Sight((), _groups((0, pieces)), packed)


@functools.lru_cache(maxsize=1024)
def divided(groups: tuple[Group, ...], calls: int) -> tuple[Group, ...]:
    """Divide each group into at most `calls` parts of whole pieces, the larger ones last: what comes late is computed
    at once."""
    parts = []
    for first, pieces in groups:
        at = 0
        for count in reversed(balanced_rows(len(pieces), min(calls, len(pieces)))):
            parts.append(Group(first, pieces[at : at + count]))
            at += count
    return tuple(parts)


@functools.lru_cache(maxsize=1024)
def landing(groups: tuple[Group, ...]) -> tuple[tuple[Piece, int], ...]:
    """Return the pieces, and at which row of the reader's memory each one lands: one behind another."""
    pieces = [piece for group in groups for piece in group.pieces]
    starts = accumulate((piece.hi - piece.lo for piece in pieces), initial=0)
    return tuple(zip(pieces, starts, strict=False))


# -- the zigzag layout -------------------------------------------------------------------------------------------------
def _chunks(length: int, size: int) -> list[range]:
    ends = [0]
    for rows in balanced_rows(length, 2 * size):
        ends.append(ends[-1] + rows)
    return [range(lo, hi) for lo, hi in pairwise(ends)]


def zigzag_rows(length: int, size: int) -> tuple[int, ...]:
    """Return the rows of every rank of a sequence of this length."""
    chunks = _chunks(length, size)
    return tuple(len(chunks[r]) + len(chunks[2 * size - 1 - r]) for r in range(size))


@functools.lru_cache(maxsize=1024)
def zigzag_chunks(shards: tuple[int, ...]) -> tuple[tuple[tuple[int, int, int], ...], ...]:
    """Return, by rank, for each of its two chunks: the first row in the rank's part, the first row in the sequence, and
    the number of rows."""
    firsts = [first_chunk(n) for n in shards]
    seconds = [n - first for n, first in zip(shards, firsts, strict=True)]
    starts, last = list(accumulate([*firsts, *reversed(seconds)], initial=0)), 2 * len(shards) - 1
    return tuple(
        ((0, starts[r], first), (first, starts[last - r], second))
        for r, (first, second) in enumerate(zip(firsts, seconds, strict=True))
    )


def zigzag_positions(length: int, world: World) -> torch.Tensor:
    """int64: where in a sequence of `length` this rank's rows stand (for rotary embeddings, masks, labels)."""
    chunks = _chunks(length, world.size)
    mine = [*chunks[world.rank], *chunks[2 * world.size - 1 - world.rank]]
    return torch.tensor(mine, dtype=torch.int64, device=world.device)


def zigzag_split(x: torch.Tensor, world: World) -> torch.Tensor:
    """This rank's rows of x [S, ..], which every rank has whole: chunks r and 2 W - 1 - r of 2 W, which are as even as
    can be. Where 2 W does not divide S, ranks have different numbers of rows, which attention is then told as
    `rows=weft.zigzag_rows(S, world.size)`."""
    chunks = _chunks(x.shape[0], world.size)
    first, second = chunks[world.rank], chunks[2 * world.size - 1 - world.rank]
    return torch.cat([x[first.start : first.stop], x[second.start : second.stop]])


def zigzag_restore(x: torch.Tensor, world: World, length: int | None = None) -> torch.Tensor:
    """Collective. The whole [S, ..] on every rank, in the order of the sequence, of this rank's rows x [n_r, ..].

    length: S, where ranks have different numbers of rows; None: all have as many as this one. Raises ValueError where x
    has another number of rows than that leaves this rank. No gradient.
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
    out, chunks, at = world.empty((length, *x.shape[1:]), x.dtype), _chunks(length, world.size), 0
    for rank in range(world.size):
        for chunk in (chunks[rank], chunks[2 * world.size - 1 - rank]):
            if len(chunk):
                world.copy(
                    out[chunk.start : chunk.stop], flat[at : at + len(chunk)].view(len(chunk), *x.shape[1:]), stream
                )
            at += len(chunk)
    world.finish(stream)
    return out
