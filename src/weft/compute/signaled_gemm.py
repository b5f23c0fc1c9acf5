"""A GEMM that signals when a group of its tiles is in memory, so that a collective can send the group while the GEMM
continues.

    GEMM         | group 0 of tiles      | group 1               | group 2        |
    comm stream     wait for group 0 ... | collective of group 0 | collective of 1 | collective of 2 |

The GEMM is persistent and uses all SMs except the communicator's. Program p computes tiles p, p + programs, and so on.
The order is known before the launch, so a group is a range of tile numbers, which covers about a whole number of waves.
Each tile is contiguous in memory, and so is each group of tiles, so that a collective sends one contiguous slice
(FlashOverlap, section 4.2). If a group consists of whole rows of tiles, it is also contiguous with its rows in ordinary
order (IN_ORDER).

A program increments a group's counter once, for its last tile of the group, a few K steps into its next tile (gemm.py).
Only after this increment does the program read the table entry of its next group, because reading the table in every
tile costs time if K is short. The group is complete when all programs with a tile in it have incremented the counter.
The release has scope gpu, because only a kernel on a stream of this GPU waits for the counter (backends/barrier.py,
wait_group), and the collective follows this kernel on the stream. The GEMM waits for no rank, so neither a slow
communicator nor a slow peer can hang it.

On Hopper and later the kernel is one loop over the K steps of all tiles (FLAT). Older GPUs have no TMA. On such a GPU,
a loop over tiles computes the addresses for ordinary loads and stores once for each tile, and a program increments the
counter directly after the stores.
"""

from typing import NamedTuple

import triton.language as tl

from ..lang.channel import rank_of, select
from ..lang.descriptors import tiles_of
from ..lang.intrinsics import flush_stores
from ..lang.jit import jit
from .gemm import FLUSHED, column_halves, gemm_tile, grouped_tile


class Order(NamedTuple):
    """The order in which `signaled_gemm` computes and stores its tiles; the kernel's docstring describes the fields."""

    OWNERS: tl.constexpr
    IN_ORDER: tl.constexpr
    ROTATE: tl.constexpr
    FLAT: tl.constexpr


@jit
def store_rows(out, left, right, out_rows, row, col, M, N, BM: tl.constexpr, BN: tl.constexpr):
    """Store the halves of a tile in the rows out_rows of out [M, N]."""
    COLS: tl.constexpr = BN // 2
    rows = out + out_rows.to(tl.int64)[:, None] * N
    ok = (row + tl.arange(0, BM) < M)[:, None]
    c = col + tl.arange(0, COLS)[None, :]
    tl.store(rows + c, left.to(out.dtype.element_ty), mask=ok & (c < N))
    tl.store(rows + (c + COLS), right.to(out.dtype.element_ty), mask=ok & (c + COLS < N))


@jit
def tile_origin(t, first_rows, tiles_m, tiles_n, rotation, tile, order):
    """Return the first row and the first column of tile t."""
    tm, tn = grouped_tile(t // order.OWNERS, tiles_m, tiles_n, tile.GROUP_M)
    if order.ROTATE:
        tm = (tm + rotation) % tiles_m
    return select(first_rows, t % order.OWNERS, order.OWNERS) + tm * tile.BM, tn * tile.BN


@jit
def load_out_rows(row_map, row, M, BM: tl.constexpr):
    """Return the row of `out` for each row of the tile that begins at `row`."""
    r = row + tl.arange(0, BM)
    return tl.load(row_map + r, mask=r < M, other=0)


@jit
def load_group(groups):
    """Return an entry of a program's table: the program's last tile in the group, the group's number, the group's first
    tile, and the number of tiles that each owner has in the group."""
    return tl.load(groups), tl.load(groups + 1), tl.load(groups + 2), tl.load(groups + 3)


@jit
def store_signaled(out, acc, bias, ch, row_map, out_rows, t, group_start, tiles_per_owner, row, col, M, N, tile, order):
    """Add the bias to tile t, and store the tile. With row_map it is stored in the rows out_rows, with IN_ORDER at
    (row, col), otherwise contiguously."""
    BM: tl.constexpr = tile.BM
    BN: tl.constexpr = tile.BN
    if bias is not None:
        c = col + tl.arange(0, BN)
        ok = c < N
        if row_map is None:
            ok &= rank_of(ch) == 0
        acc += tl.load(bias + c, mask=ok, other=0.0).to(tl.float32)[None, :]
    left, right = column_halves(acc, BM, BN)
    if row_map is not None:
        store_rows(out, left, right, out_rows, row, col, M, N, BM, BN)
    elif order.IN_ORDER:
        out.store([row, col], left.to(out.dtype))
        out.store([row, col + BN // 2], right.to(out.dtype))
    else:
        i = t - group_start
        tile_index = group_start + i % order.OWNERS * tiles_per_owner + i // order.OWNERS
        out.store([tile_index * (2 * BM), 0], left.to(out.dtype))
        out.store([tile_index * (2 * BM) + BM, 0], right.to(out.dtype))


@jit(do_not_specialize=("tiles", "tiles_m", "shard", "M"))
def signaled_gemm(x_desc, w_desc, out, bias, ch, groups, offsets, row_map, tiles, tiles_m, shard, M, N, K, tile, order):
    """Compute out = x_desc [M, K] @ w_desc [N, K]^T in groups of tiles, and increment ch.counters + group when a group
    is in memory.

    out is a descriptor of [tiles x 2 BM, BN / 2] in blocks of BM rows, in which the left half of each tile precedes the
    right half. With IN_ORDER it is a descriptor of [M, N]. groups, int32 [.., programs, 4], contains the entries that
    `load_group` returns for the first group of each program, then for the second group, and so on. In memory the tiles
    of a group are ordered by owner. OWNERS is the number of ranks that own the rows of x. `offsets` contains the first
    row of each owner (0 for the first owner), and each owner has tiles_m rows of tiles. Consecutive tiles belong to
    consecutive owners. With ROTATE each rank begins after its own shard, of `shard` rows of tiles, and wraps around;
    otherwise all ranks begin at the first row. Rank 0 adds bias [N], which may be None.

    row_map is None, or int32 [M] with the row of `out` for each row, where `out` is a pointer to [M, N]. An all-to-all
    uses row_map to store the rows that a group sends to one rank contiguously in `out`. In this case groups consist of
    whole rows of tiles, M may differ between ranks, N is a multiple of 8, there is one owner, and every rank adds the
    bias to its rows."""
    x_desc, w_desc, out = tiles_of(x_desc), tiles_of(w_desc), tiles_of(out)
    OWNERS: tl.constexpr = order.OWNERS
    BM: tl.constexpr = tile.BM
    BN: tl.constexpr = tile.BN
    BK: tl.constexpr = tile.BK
    BULK: tl.constexpr = row_map is None
    if row_map is not None:
        N = N // 8 * 8
    tiles_n = tl.cdiv(N, BN)
    steps = tl.cdiv(K, BK)
    flush_step = min(FLUSHED, steps - 1)
    first_rows = (0,)
    for i in tl.static_range(1, OWNERS):
        first_rows = first_rows + (tl.load(offsets + i),)
    if order.ROTATE:
        rotation = (rank_of(ch) + 1) * shard % tiles_m
    else:
        rotation = 0
    groups += 4 * tl.program_id(0)
    last_tile, group, group_start, tiles_per_owner = load_group(groups)
    if order.FLAT:
        t = tl.program_id(0) - tl.num_programs(0)
        step, row, col, stored_group = steps - 1, 0, 0, -1
        out_rows = tl.zeros((BM,), tl.int32)
        acc = tl.zeros((BM, BN), tl.float32)
        for _ in tl.range(0, tl.cdiv(tiles - tl.program_id(0), tl.num_programs(0)) * steps):
            step = tl.where(step == steps - 1, 0, step + 1)
            if step == 0:
                t += tl.num_programs(0)
                row, col = tile_origin(t, first_rows, tiles_m, tiles_n, rotation, tile, order)
                if row_map is not None:
                    out_rows = load_out_rows(row_map, row, M, BM)
            acc = tl.dot(x_desc.load([row, step * BK]), w_desc.load([col, step * BK]).T, acc)
            if (step == flush_step) & (stored_group >= 0):
                flush_stores(BULK)
                tl.atomic_add(ch.counters + stored_group, 1, sem="release", scope="gpu")
                stored_group = -1
                groups += 4 * tl.num_programs(0)
                last_tile, group, group_start, tiles_per_owner = load_group(groups)
            if step == steps - 1:
                store_signaled(
                    out, acc, bias, ch, row_map, out_rows, t, group_start, tiles_per_owner, row, col, M, N, tile, order
                )
                stored_group = tl.where(t == last_tile, group, -1)
                acc = tl.zeros((BM, BN), tl.float32)
        if stored_group >= 0:
            flush_stores(BULK)
            tl.atomic_add(ch.counters + stored_group, 1, sem="release", scope="gpu")
    else:
        for t in tl.range(tl.program_id(0), tiles, tl.num_programs(0)):
            row, col = tile_origin(t, first_rows, tiles_m, tiles_n, rotation, tile, order)
            acc = gemm_tile(x_desc, w_desc, row, col, K, BM, BN, BK)
            out_rows = load_out_rows(row_map, row, M, BM) if row_map is not None else 0
            store_signaled(
                out, acc, bias, ch, row_map, out_rows, t, group_start, tiles_per_owner, row, col, M, N, tile, order
            )
            if t == last_tile:
                flush_stores(BULK)
                tl.atomic_add(ch.counters + group, 1, sem="release", scope="gpu")
                groups += 4 * tl.num_programs(0)
                last_tile, group, group_start, tiles_per_owner = load_group(groups)
