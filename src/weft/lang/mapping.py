"""Mappings from a tile to its rows (f_S), its rank (f_R) and its channels (f_C) (TileLink, section 3).

There are two mappings, with the same functions. `StaticMapping` is affine: its functions are divisions, so a kernel
evaluates them without reading memory. `TableMapping` reads tables that are filled at run time, for uneven shards and
for routing that is known only on the device (MoE). The functions of a StaticMapping are plain arithmetic: host code
calls them as `static_rows.fn(mapping, tile)`, with Python ints as arguments and results.
"""

import bisect
import itertools
import operator
from collections.abc import Sequence
from typing import NamedTuple

import torch
import triton
import triton.language as tl

from .jit import jit


def check_numbers(**numbers: tuple[object, int]) -> None:
    """Raise TypeError for a value that is not an integer, and ValueError for a value below its minimum. numbers: a pair
    (value, minimum) for each name."""
    for name, (number, least) in numbers.items():
        if not isinstance(number, int):
            raise TypeError(f"{name} is an integer, not {number!r}")
        if number < least:
            raise ValueError(f"{name} is at least {least}, not {number}")


class StaticMapping(NamedTuple):
    """Tiles of `tile_rows` rows over shards of `rank_rows` rows each, with one channel for every `channel_rows` rows.

    arrivals: the number of notifications that a channel receives per call. rows: the total number of rows; the last
    tile may be short. single: whether every tile is in exactly one channel (`channel_rows % tile_rows == 0`); the wait
    is then one poll.
    """

    tile_rows: int
    rank_rows: int
    channel_rows: int
    rows: int
    arrivals: int
    single: tl.constexpr
    table: tl.constexpr = tl.constexpr(False)

    @classmethod
    def over(cls, rows: int, world: int, *, tile_rows: int, channel_rows: int, arrivals: int) -> "StaticMapping":
        """Return the mapping of `rows` split evenly over `world` ranks. Raises ValueError if no affine mapping
        exists."""
        check_numbers(rows=(rows, 0), world=(world, 1), tile_rows=(tile_rows, 1), channel_rows=(channel_rows, 1))
        if rows % world:
            raise ValueError(f"{rows} rows do not split evenly over {world} ranks; use TableMapping")
        rank_rows = rows // world
        if rank_rows % channel_rows:
            raise ValueError(f"a shard of {rank_rows} rows is not a multiple of {channel_rows} rows a channel")
        single = channel_rows % tile_rows == 0
        return cls(tile_rows, rank_rows, channel_rows, rows, arrivals, tl.constexpr(single))


class TableMapping(NamedTuple):
    """Tiles with rows, rank and channels in int32 device tables that are indexed by tile.

    row_lo, row_hi: f_S. rank: f_R. channel_lo, channel_hi: f_C. arrivals: the number of notifications per call, for
    each channel. single: whether every tile is in exactly one channel.
    """

    row_lo: torch.Tensor
    row_hi: torch.Tensor
    rank: torch.Tensor
    channel_lo: torch.Tensor
    channel_hi: torch.Tensor
    arrivals: torch.Tensor
    single: tl.constexpr = tl.constexpr(False)
    table: tl.constexpr = tl.constexpr(True)


@jit
def static_rows(m, tile):
    """Return f_S(tile) of a StaticMapping: the tile's first row and the row after its last row."""
    lo = tile * m.tile_rows
    return lo, min(lo + m.tile_rows, m.rows)


@jit
def static_rank(m, tile):
    """Return f_R(tile) of a StaticMapping: the rank that holds the tile's first row."""
    return tile * m.tile_rows // m.rank_rows


@jit
def static_channels(m, tile):
    """Return f_C(tile) of a StaticMapping: the tile's first channel and the channel after its last channel."""
    lo = tile * m.tile_rows
    hi = min(lo + m.tile_rows, m.rows)
    return lo // m.channel_rows, (hi - 1) // m.channel_rows + 1


@jit
def tile_rows(m, tile):
    """Return f_S(tile): the tile's first row and the row after its last row."""
    if m.table:
        return tl.load(m.row_lo + tile), tl.load(m.row_hi + tile)
    else:
        return static_rows(m, tile)


@jit
def tile_rank(m, tile):
    """Return f_R(tile): the rank to which the tile belongs."""
    if m.table:
        return tl.load(m.rank + tile)
    else:
        return static_rank(m, tile)


@jit
def tile_channels(m, tile):
    """Return f_C(tile): the tile's first channel and the channel after its last channel."""
    if m.table:
        return tl.load(m.channel_lo + tile), tl.load(m.channel_hi + tile)
    else:
        return static_channels(m, tile)


@jit
def channel_arrivals(m, channel):
    """Return the number of notifications that a channel receives in one call."""
    if m.table:
        return tl.load(m.arrivals + channel)
    else:
        return m.arrivals


def balanced_rows(rows: int, world: int) -> list[int]:
    """Return the number of rows of every rank if `rows` rows are split as evenly as possible. Longer shards come
    first."""
    check_numbers(rows=(rows, 0), world=(world, 1))
    return [rows // world + (r < rows % world) for r in range(world)]


@jit
def first_row(rank, M, W: tl.constexpr):
    """Return the first row of a rank's shard if the rows are split as in `balanced_rows`. Kernels call this
    function."""
    return rank * (M // W) + tl.minimum(rank, M % W)


def shard_tables(shards: Sequence[int], *, tile_rows: int, channel_rows: int) -> dict[str, list[int]]:
    """Return the tables of a `TableMapping` for shards of any length, one after another without padding.

    Channels are assigned to each shard's runs of `channel_rows` rows in order, so a tile that spans shards waits for a
    contiguous range. The result also contains `offset` (the first row of each rank) and `channel_base` (the first
    channel of each rank), each with world + 1 entries.
    """
    check_numbers(tile_rows=(tile_rows, 1), channel_rows=(channel_rows, 1))
    rows = list(map(operator.index, shards))
    offset = [0, *itertools.accumulate(rows)]
    base = [0, *itertools.accumulate(triton.cdiv(n, channel_rows) for n in rows)]

    def rank_of(row: int) -> int:
        return bisect.bisect_right(offset, row) - 1

    def channel_of(row: int) -> int:
        rank = rank_of(row)
        return base[rank] + (row - offset[rank]) // channel_rows

    starts = range(0, offset[-1], tile_rows)
    ends = [min(lo + tile_rows, offset[-1]) for lo in starts]
    return {
        "row_lo": list(starts),
        "row_hi": ends,
        "rank": [rank_of(lo) for lo in starts],
        "channel_lo": [channel_of(lo) for lo in starts],
        "channel_hi": [channel_of(hi - 1) + 1 for hi in ends],
        "offset": offset,
        "channel_base": base,
    }
