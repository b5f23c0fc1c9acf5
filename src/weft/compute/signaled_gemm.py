"""GEMM that says which groups of its tiles are in memory, so that a collective can take each group while it goes on.

    GEMM         | group 0 of tiles      | group 1               | group 2        |
    comm stream     wait for group 0 ... | collective of group 0 | collective of 1 | collective of 2 |

A persistent GEMM on all SMs but the communicator's. Program p computes tiles p, p + programs, ..: the order is known
before the launch, so a group is a run of tile numbers, about whole waves of them. A tile is stored in one piece at its
slot, and a group's slots are one after another: what the collective takes is one contiguous slice (FlashOverlap,
section 4.2). Where a group is whole rows of tiles, rows in ordinary order are such a slice too (IN_ORDER).

A program counts a group up once, for its last tile of it, a little into its next one (gemm.py), and only then reads
which group it has next: a look at a table in every tile is not free where K is short. The group is complete when all
programs with a tile in it did. The count needs scope gpu only: who waits is a kernel on a stream of this GPU
(transport/barrier.py, wait_group), and the collective comes after it on that stream. The GEMM waits for nobody, so
neither a slow communicator nor a slow peer can hang it.

On Hopper and later it is one loop over the K steps of all tiles (FLAT). Before, where loads and stores are ordinary
ones, addresses are computed once a tile in a loop of its own, and a program counts its group up right behind the
stores.
"""

from typing import NamedTuple

import triton.language as tl

from ..lang.channel import rank_of, select
from ..lang.descriptors import tiles_of
from ..lang.intrinsics import flush_stores
from ..lang.jit import jit
from .gemm import FLUSHED, column_halves, gemm_tile, grouped_tile


class Order(NamedTuple):
    """The order in which `signaled_gemm` computes and stores its tiles; its docstring describes the fields."""

    OWNERS: tl.constexpr
    IN_ORDER: tl.constexpr
    ROTATE: tl.constexpr
    FLAT: tl.constexpr


@jit
def store_rows(pool, left, right, place, row, col, M, N, BM: tl.constexpr, BN: tl.constexpr):
    """A tile's halves to pool [M, N], its rows at `place`."""
    COLS: tl.constexpr = BN // 2
    to = pool + place.to(tl.int64)[:, None] * N
    ok = (row + tl.arange(0, BM) < M)[:, None]
    c = col + tl.arange(0, COLS)[None, :]
    tl.store(to + c, left.to(pool.dtype.element_ty), mask=ok & (c < N))
    tl.store(to + (c + COLS), right.to(pool.dtype.element_ty), mask=ok & (c + COLS < N))


@jit
def corner(t, firsts, tiles_m, tiles_n, turn, tile, order):
    """The first row and column of tile t."""
    tm, tn = grouped_tile(t // order.OWNERS, tiles_m, tiles_n, tile.GROUP_M)
    if order.ROTATE:
        tm = (tm + turn) % tiles_m
    return select(firsts, t % order.OWNERS, order.OWNERS) + tm * tile.BM, tn * tile.BN


@jit
def places_of(rows, row, M, BM: tl.constexpr):
    """Where a tile's rows go, which begin at `row`."""
    r = row + tl.arange(0, BM)
    return tl.load(rows + r, mask=r < M, other=0)


@jit
def store_signaled(out, acc, bias, ch, rows, place, t, first, each, row, col, M, N, tile, order):
    """Tile t, + bias, to its slot, or to its rows."""
    BM: tl.constexpr = tile.BM
    BN: tl.constexpr = tile.BN
    if bias is not None:
        c = col + tl.arange(0, BN)
        ok = c < N
        if rows is None:
            ok &= rank_of(ch) == 0
        acc += tl.load(bias + c, mask=ok, other=0.0).to(tl.float32)[None, :]
    left, right = column_halves(acc, BM, BN)
    if rows is not None:
        store_rows(out, left, right, place, row, col, M, N, BM, BN)
    elif order.IN_ORDER:
        out.store([row, col], left.to(out.dtype))
        out.store([row, col + BN // 2], right.to(out.dtype))
    else:
        slot = first + (t - first) % order.OWNERS * each + (t - first) // order.OWNERS
        out.store([slot * (2 * BM), 0], left.to(out.dtype))
        out.store([slot * (2 * BM) + BM, 0], right.to(out.dtype))


@jit(do_not_specialize=("tiles", "tiles_m", "shard", "M"))
def signaled_gemm(x_desc, w_desc, out, bias, ch, turns, offsets, rows, tiles, tiles_m, shard, M, N, K, tile, order):
    """x_desc [M, K], w_desc [N, K]; out, a descriptor: [2 BM slots, BN / 2] in blocks of BM rows: a slot holds a tile's
    left half, then its right half; or [M, N] with IN_ORDER. turns: int32 [.., programs, 4], for a program's first
    group, its second, ..: the program's last tile of it, the group, its first tile, and its tiles by owner. A group's
    slots are owner after owner. OWNERS ranks' rows, which begin at `offsets` (the first at 0) and are tiles_m tiles
    each, take turns tile by tile. ROTATE: a rank begins behind its own part, of `shard` rows of tiles, and goes round;
    else all begin at the first. bias [N], or None, is added on rank 0.

    rows: None; or int32 by row, its row of `out`, a pointer to [M, N], for rows that each go to a rank of their own:
    within a group of whole rows of tiles, those that go to one rank are contiguous. Then M may differ by rank, N is a
    multiple of 8, there is one owner, and the bias is added to every row."""
    x_desc, w_desc, out = tiles_of(x_desc), tiles_of(w_desc), tiles_of(out)
    OWNERS: tl.constexpr = order.OWNERS
    BM: tl.constexpr = tile.BM
    BN: tl.constexpr = tile.BN
    BK: tl.constexpr = tile.BK
    BULK: tl.constexpr = rows is None
    if rows is not None:
        N = N // 8 * 8
    tiles_n = tl.cdiv(N, BN)
    steps = tl.cdiv(K, BK)
    late = min(FLUSHED, steps - 1)
    firsts = (0,)
    for i in tl.static_range(1, OWNERS):
        firsts = firsts + (tl.load(offsets + i),)
    if order.ROTATE:
        turn = (rank_of(ch) + 1) * shard % tiles_m
    else:
        turn = 0
    turns += 4 * tl.program_id(0)
    last, group, first, each = tl.load(turns), tl.load(turns + 1), tl.load(turns + 2), tl.load(turns + 3)
    if order.FLAT:
        t = tl.program_id(0) - tl.num_programs(0)
        step, row, col, stored = steps - 1, 0, 0, -1
        place = tl.zeros((BM,), tl.int32)
        acc = tl.zeros((BM, BN), tl.float32)
        for _ in tl.range(0, tl.cdiv(tiles - tl.program_id(0), tl.num_programs(0)) * steps):
            step = tl.where(step == steps - 1, 0, step + 1)
            if step == 0:
                t += tl.num_programs(0)
                row, col = corner(t, firsts, tiles_m, tiles_n, turn, tile, order)
                if rows is not None:
                    place = places_of(rows, row, M, BM)
            acc = tl.dot(x_desc.load([row, step * BK]), w_desc.load([col, step * BK]).T, acc)
            if (step == late) & (stored >= 0):
                flush_stores(BULK)
                tl.atomic_add(ch.counters + stored, 1, sem="release", scope="gpu")
                stored = -1
                turns += 4 * tl.num_programs(0)
                last, group, first, each = tl.load(turns), tl.load(turns + 1), tl.load(turns + 2), tl.load(turns + 3)
            if step == steps - 1:
                store_signaled(out, acc, bias, ch, rows, place, t, first, each, row, col, M, N, tile, order)
                stored = tl.where(t == last, group, -1)
                acc = tl.zeros((BM, BN), tl.float32)
        if stored >= 0:
            flush_stores(BULK)
            tl.atomic_add(ch.counters + stored, 1, sem="release", scope="gpu")
    else:
        for t in tl.range(tl.program_id(0), tiles, tl.num_programs(0)):
            row, col = corner(t, firsts, tiles_m, tiles_n, turn, tile, order)
            acc = gemm_tile(x_desc, w_desc, row, col, K, BM, BN, BK)
            place = places_of(rows, row, M, BM) if rows is not None else 0
            store_signaled(out, acc, bias, ch, rows, place, t, first, each, row, col, M, N, tile, order)
            if t == last:
                flush_stores(BULK)
                tl.atomic_add(ch.counters + group, 1, sem="release", scope="gpu")
                turns += 4 * tl.num_programs(0)
                last, group, first, each = tl.load(turns), tl.load(turns + 1), tl.load(turns + 2), tl.load(turns + 3)
