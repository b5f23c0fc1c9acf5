"""GEMM + reduce-scatter and GEMM + all-reduce, in which the owner of a tile pulls the partial tiles of all ranks.

    GEMM programs      compute a persistent GEMM whose tile order interleaves the owners: all ranks compute the tiles at
                       one position of every owner's run (`Runs`) at about the same time. A program stores a tile in
                       this rank's half of the arena, and counts it a few K steps into its next tile (compute/gemm.py).
                       If two programs share the tiles of the last round (`whole_tiles`), a whole tile counts twice and
                       half of a tile once.
    forward programs   notify all ranks when the tiles of one column at one position of every run have been stored.
                       GEMM programs release their stores only to this GPU, because a release to the peers would wait
                       for busy links.
    pull programs      draw the tiles with this rank's rows in the order in which they become complete. For each tile, a
                       program waits until all ranks have notified this one, reads the tile from every rank through a
                       deep asynchronous pipeline, adds the parts in float32 in rank order, and stores the sum

                       t -->
    GEMM programs      | tile 0 of r+1, r+2, .. | tile 1 of r+1, .. | ...
    pull programs      |        ...wait...      | sum tile 0        | sum tile 1 | ...

Tiles cover the rows without regard to shards. In a reduce-scatter every rank with rows in a tile sums the tile, and
stores only its own rows; in an all-reduce only the tile's owner does.

The forward and pull programs form a separate kernel. The kernel is so small (48 KiB of shared memory, four warps) that
its programs fit on the SMs together with the GEMM's programs, which occupy every SM.

For all-reduce the owner overwrites its own partial tile, which no other rank reads, with the sum, and notifies every
rank. Every second ticket pulls the other owners' sums of the tile that was summed LAG tickets earlier. A ticket waits
only for GEMM tiles, which wait for nothing, and for sums with smaller ticket numbers. So some program can always
proceed.

Order of accesses. A rank writes the same half of the arena again in call n + 2. The rank starts call n + 2 only after
every peer has notified it in call n + 1, and each peer started call n + 1 after the peer's call n had ended.

All ranks increment the same counters, and a fast rank may increment a counter for its tile of the next call before a
slow rank's increment of this call has arrived. A sum may then start although the slow rank's increment is missing, but
never while data are missing. Before the fast rank left this call, the slow rank had notified it of all the slow rank's
tiles, also of those at positions that the fast rank's run does not reach, each time by a release that covers all
owners. The fast rank's increment is a release too, so it also publishes those tiles.

Three alternatives were measured and rejected (docs/design-notes.md). The first has pull programs on separate SMs. In
the second, GEMM programs pull when they have no tiles left, so that the loads of the last tiles wait for these pulls.
In the third, GEMM programs notify the owners, immediately or one tile later.

Symbols of shapes:

    M, N, K    M rows of x, N columns of the result, and K columns of x on this rank
    W          the number of ranks; rank r owns m_r rows of the result
"""

from typing import NamedTuple

import torch
import triton.language as tl

from ...compute.gemm import FLUSHED, column_halves, grouped_tile, second_operand, whole_tiles
from ...compute.scaled_gemm import add_step, row_scales, rows_below, scale_half, tile_scales, weight_scale
from ...lang.channel import address_of, calls_of, end_call, rank_of, select, take_ticket
from ...lang.descriptors import tiles_of
from ...lang.intrinsics import flush_stores, wait_until
from ...lang.jit import jit
from ...lang.primitives import channel_broadcast, channel_wait


class Sums(NamedTuple):
    """The work of the programs. GEMM_PROGRAMS programs compute; FORWARD_PROGRAMS programs forward and then pull, and
    PULL_PROGRAMS further programs only pull. Tiles are loaded in blocks of R rows, with STAGES blocks in flight. With
    ALL every rank receives the sums, LAG tickets later."""

    GEMM_PROGRAMS: tl.constexpr
    FORWARD_PROGRAMS: tl.constexpr
    PULL_PROGRAMS: tl.constexpr
    R: tl.constexpr
    STAGES: tl.constexpr
    LAG: tl.constexpr
    ALL: tl.constexpr


class Runs(NamedTuple):
    """Tables, int32, of the owners of tile rows. Tiles cover the rows of x without regard to shards. An owner's run
    contains the tile rows that begin in its shard, or, with ALL, every W-th tile row. `offsets` contains the first row
    of each rank's shard, and the number of rows. `order` contains the tile rows in the order in which this rank
    computes them: the first of each run, beginning with the next rank's, then the second of each run, and so on.
    `positions` contains each tile row's position in its run. `owners` contains the number of positions, and then the
    number of runs that reach each position."""

    offsets: torch.Tensor
    order: torch.Tensor
    positions: torch.Tensor
    owners: torch.Tensor


class Grid(NamedTuple):
    """The number of positions in a run, the number of tile columns, and the number of columns."""

    steps: tl.tensor
    tiles_n: tl.tensor
    N: tl.tensor


@jit
def sum_half_tiles(
    flat_desc, arenas, sums, first_row, tm, tn, half, count, out, lo, hi, bias, grid, tile, how, W: tl.constexpr
):
    """Sum `count` halves of tile (tm, tn) over all ranks, beginning with half `half`, and store the rows lo .. hi.
    `arenas` contains the granule of each rank's arena, and row 0 of `out` is row lo. With ALL the sums are also stored
    in `sums`, this rank's arena, from which the other ranks pull them."""
    BM: tl.constexpr = tile.BM
    COLS: tl.constexpr = tile.BN // 2
    R: tl.constexpr = how.R
    PARTS: tl.constexpr = BM // R
    r = tl.arange(0, R)[:, None]
    c = tl.arange(0, COLS)
    acc = tl.zeros((R, COLS), tl.float32)
    for q in tl.range(0, count * PARTS * W, num_stages=how.STAGES):
        rank = q % W
        side = half + q // (PARTS * W)
        part = q // W % PARTS
        flat_row = first_row + (tm * grid.tiles_n + tn) * (2 * BM) + side * BM + part * R
        block = tl.reshape(flat_desc.load([select(arenas, rank, W), flat_row, 0]), (R, COLS))
        acc = tl.where(rank == 0, 0.0, acc) + block.to(tl.float32)
        if rank == W - 1:
            row = tm * BM + part * R + r
            col = (tn * 2 + side) * COLS + c
            total = acc
            if bias is not None:
                total += tl.load(bias + col, mask=col < grid.N, other=0.0).to(tl.float32)[None, :]
            ok = (row >= lo) & (row < hi) & (col < grid.N)[None, :]
            offset = (row - lo).to(tl.int64) * grid.N + col[None, :]
            tl.store(out + offset, total.to(out.dtype.element_ty), mask=ok)
            if how.ALL:
                tl.store(sums + (flat_row + r).to(tl.int64) * COLS + c[None, :], total.to(out.dtype.element_ty))


@jit
def gather_tile(flat_desc, arenas, first_row, step, owners, tn, me, out, rows, grid, tile, how, W: tl.constexpr):
    """The first `owners` ranks have summed the tiles of column tn at position `step` of their runs. Copy the other
    ranks' sums to `out`, which has `rows` rows, beginning with the nearest rank."""
    BM: tl.constexpr = tile.BM
    COLS: tl.constexpr = tile.BN // 2
    R: tl.constexpr = how.R
    PARTS: tl.constexpr = 2 * BM // R
    r = tl.arange(0, R)[:, None]
    c = tl.arange(0, COLS)[None, :]
    peers = owners - (me < owners).to(tl.int32)
    for q in tl.range(0, peers * PARTS, num_stages=how.STAGES):
        s = (me + 1 + q // PARTS) % owners
        part = q % PARTS
        tm = step * W + s
        flat_row = first_row + (tm * grid.tiles_n + tn) * (2 * BM) + part * R
        block = tl.reshape(flat_desc.load([select(arenas, s, W), flat_row, 0]), (R, COLS))
        row = tm * BM + part * R % BM + r
        col = (tn * 2 + part * R // BM) * COLS + c
        tl.store(out + row.to(tl.int64) * grid.N + col, block, mask=(row < rows) & (col < grid.N))


@jit
def sum_tiles(flat_desc, arena, first_row, me, out, bias, ch, runs, grid, tile, how):
    """Draw tickets until no ticket is left, and sum or gather the tiles of each ticket. With ALL an owner sums the tile
    rows of its run. Otherwise it sums all tiles with rows of its shard, of which the tile that begins before the shard
    comes last. Every rank waits for the tiles at every position, even if its own run does not reach the position."""
    W: tl.constexpr = ch.world
    BM: tl.constexpr = tile.BM
    GROUP: tl.constexpr = tile.GROUP_M // W
    LAG: tl.constexpr = how.LAG
    steps, tiles_n, N = grid
    target = calls_of(ch) * W
    arenas = ()
    for rank in tl.static_range(W):
        arenas = arenas + (tl.load(arena.granules + rank),)
    sums = address_of(arena.addresses, me, out.dtype.element_ty)
    rows = tl.load(runs.offsets + W)
    if how.ALL:  # an even ticket sums one tile, and an odd ticket gathers the other owners' sums of one tile
        tiles = steps * tiles_n
        ticket = take_ticket(ch, 1)
        while ticket < 2 * (tiles + LAG):
            i = ticket // 2
            if ticket % 2 == 0:
                if i < tiles:
                    step, tn = grouped_tile(i, steps, tiles_n, GROUP)
                    tm = step * W + me
                    channel = step * tiles_n + tn
                    wait_until(ch.counters + channel, target, ch.guard, channel, -1, "sys")
                    if tm * BM < rows:
                        sum_half_tiles(
                            flat_desc, arenas, sums, first_row, tm, tn, 0, 2, out, 0, rows, bias, grid, tile, how, W
                        )
                        channel_broadcast(ch, tiles + channel, False)
            else:
                if i >= LAG:
                    step, tn = grouped_tile(i - LAG, steps, tiles_n, GROUP)
                    channel = step * tiles_n + tn
                    owners = tl.load(runs.owners + 1 + step)
                    wait_until(ch.counters + tiles + channel, calls_of(ch) * owners, ch.guard, channel, -1, "sys")
                    gather_tile(flat_desc, arenas, first_row, step, owners, tn, me, out, rows, grid, tile, how, W)
            ticket = take_ticket(ch, 1)
    else:  # without ALL, a ticket sums one half of a tile
        lo = tl.load(runs.offsets + me)
        hi = tl.load(runs.offsets + me + 1)
        run = tl.cdiv(lo, BM)
        # 1 if the shard's first rows are in a tile that begins before the shard, and otherwise 0
        before = ((lo % BM > 0) & (lo < hi)).to(tl.int32)
        position_before = tl.load(runs.positions + run - 1, mask=before > 0, other=0)
        ticket = take_ticket(ch, 1)
        while ticket < 2 * (steps + before) * tiles_n:
            i, tn = grouped_tile(ticket // 2, steps + before, tiles_n, GROUP)
            tm = tl.where(i == steps, run - 1, run + i)
            channel = tl.where(i == steps, position_before, i) * tiles_n + tn
            wait_until(ch.counters + channel, target, ch.guard, channel, -1, "sys")
            if tm * BM < hi:
                sum_half_tiles(
                    flat_desc, arenas, sums, first_row, tm, tn, ticket % 2, 1, out, lo, hi, bias, grid, tile, how, W
                )
            ticket = take_ticket(ch, 1)


@jit
def forward_tiles(ch, owners, grid, pid, FORWARD_PROGRAMS: tl.constexpr, GROUP: tl.constexpr, COUNT: tl.constexpr):
    """Notify every owner that the tiles of one column at one position of all runs are complete, after this rank's GEMM
    programs have stored them and counted each of them COUNT times."""
    tiles = grid.steps * grid.tiles_n
    for i in range(pid, tiles, FORWARD_PROGRAMS):
        step, tn = grouped_tile(i, grid.steps, grid.tiles_n, GROUP)
        channel = step * grid.tiles_n + tn
        channel_wait(ch, 2 * tiles + channel, COUNT * tl.load(owners + 1 + step), channel, rank_of(ch), "gpu")
        channel_broadcast(ch, channel, False)


@jit
def zero_accumulators(tile):
    """Return zeroed float32 accumulators for a tile, [BM, BN], and for its upper and lower halves, [BM / 2, BN] each.
    For accumulators that the loop over tiles does not use, the integer 0 is returned."""
    acc, upper, lower = 0, 0, 0
    if tile.PROMOTE:
        upper = tl.zeros((tile.BM // 2, tile.BN), tl.float32)
        lower = tl.zeros((tile.BM // 2, tile.BN), tl.float32)
    else:
        acc = tl.zeros((tile.BM, tile.BN), tl.float32)
    return acc, upper, lower


@jit
def store_partial(arena_desc, acc, scales, granule, flat_row, col, N, tile):
    """Store the partial sums of a tile, or of half of its rows. In the arena the left half of the columns begins at row
    flat_row, and the right half begins BM rows later. `scales` are the TileScales of 8-bit operands, or None."""
    ROWS: tl.constexpr = acc.shape[0]
    COLS: tl.constexpr = tile.BN // 2
    left, right = column_halves(acc, ROWS, tile.BN)
    if tile.SCALED:
        left = scale_half(left, None, scales, col, N, tile.SCALED)
    arena_desc.store([granule, flat_row, 0], tl.reshape(left.to(arena_desc.dtype), (1, ROWS, COLS)))
    if tile.SCALED:  # the scales are loaded after the store; `store_scaled_tile` explains why
        right = scale_half(right, None, scales, col + COLS, N, tile.SCALED)
    arena_desc.store([granule, flat_row + tile.BM, 0], tl.reshape(right.to(arena_desc.dtype), (1, ROWS, COLS)))


@jit
def count_stored(counter, count):
    """Count a tile, after this program's stores, for the forward programs of this GPU."""
    flush_stores(True)
    tl.atomic_add(counter, count, sem="release", scope="gpu")


@jit
def compute_half(x_desc, w_half_desc, arena_desc, place, whole, stored_tile, runs, grid, K, tile):
    """Compute this program's half of one of the tiles after the first `whole` ones, if there is such a tile, store it
    in the arena in the same way as `store_partial`, and count it. `place` contains the granule of this rank's arena,
    row 0 of its half, the counters of stored tiles, and the number of tile rows. stored_tile is a whole tile that the
    program has stored and not counted, or -1. The function counts this tile FLUSHED K steps into the half, and returns
    the tile that is still not counted."""
    granule, first_row, stored, tiles_m = place
    w_half_desc = tiles_of(w_half_desc)
    BM: tl.constexpr = tile.BM
    COLS: tl.constexpr = tile.BN // 2
    steps = tl.cdiv(K, tile.BK)
    half = 2 * whole + tl.program_id(0)
    # K > 0 is always true; without this test ptxas cannot infer it, and serialises wgmmas.
    if (half < 2 * tiles_m * grid.tiles_n) & (K > 0):
        i, tn = grouped_tile(half // 2, tiles_m, grid.tiles_n, tile.GROUP_M)
        tm = tl.load(runs.order + i)
        side = half % 2
        acc = tl.zeros((BM, COLS), tl.float32)
        for step in range(0, steps):
            k = step * tile.BK
            b = second_operand(w_half_desc, (2 * tn + side) * COLS, k, tile.TRANS_B)
            acc = tl.dot(x_desc.load([tm * BM, k]), b, acc)
            if (step == min(FLUSHED, steps - 1)) & (stored_tile >= 0):
                count_stored(stored + stored_tile, 2)
            if step == steps - 1:  # stored after the loop, ptxas would serialise wgmmas of Triton 3.9
                flat_row = first_row + ((tm * grid.tiles_n + tn) * 2 + side) * BM
                arena_desc.store([granule, flat_row, 0], tl.reshape(acc.to(arena_desc.dtype), (1, BM, COLS)))
                acc = tl.zeros((BM, COLS), tl.float32)
        count_stored(stored + tl.load(runs.positions + tm) * grid.tiles_n + tn, 1)
        stored_tile = -1
    return stored_tile


@jit
def gemm_reduce(
    x_desc, w_desc, w_half_desc, arena_desc, flat_desc, arena, out, bias, scales, ch, runs, N, K, tile, how,
    COMPUTE: tl.constexpr,
):  # fmt: skip
    """Compute out = the sum over ranks of x_desc [M, K] @ w_desc [N, K]^T, + bias [N] (or None). `out` contains this
    rank's rows [m_r, N], or, with ALL, all rows [M, N]. The launch with COMPUTE consists of the GEMM programs, and the
    launch without COMPUTE of the forward and pull programs.

    With TRANS_B, w_desc is [K, N]. w_half_desc describes the same in blocks of half as many columns of the result, if
    halves of tiles are computed in the last round (`whole_tiles`), and is otherwise None. A half of the arena
    (`transport.memory.Halves`) contains all tiles of [M, N]. Each tile is stored as its left and its right half,
    [2, BM, BN / 2]. arena_desc (blocks [1, BM, BN / 2]; with PROMOTE half the rows, as in x_desc) and flat_desc (blocks
    [1, R, BN / 2]) describe the arenas of all ranks as [granule, row, BN / 2]. scales are the `Scales` of 8-bit
    operands, or None; they are applied before tiles are stored. runs are the `Runs` of the tile rows. GROUP_M is a
    multiple of the world size. how is a `Sums`.

    For each position in a run and each tile column there are counters for the tiles at this position, for their sums,
    and for the tiles that this rank has stored. Only this rank's programs increment the last group of counters."""
    x_desc, w_desc = tiles_of(x_desc), tiles_of(w_desc)
    arena_desc, flat_desc = tiles_of(arena_desc), tiles_of(flat_desc)
    W: tl.constexpr = ch.world
    BM: tl.constexpr = tile.BM
    BN: tl.constexpr = tile.BN
    BK: tl.constexpr = tile.BK
    GEMM_PROGRAMS: tl.constexpr = how.GEMM_PROGRAMS
    COUNT: tl.constexpr = 1 if w_half_desc is None else 2  # how often a whole tile is counted
    pid = tl.program_id(0)
    # Rows are whole 16-byte words. Without this hint the compiler generates narrow stores and spills registers.
    N = N // 8 * 8
    me = rank_of(ch)
    tiles_n = tl.cdiv(N, BN)
    grid = Grid(tl.load(runs.owners), tiles_n, N)
    first_row = (tl.load(arena.epoch) & 1) * (arena.half // (BN // 2)).to(tl.int32)
    if COMPUTE:
        granule = tl.load(arena.granules + me)
        rows = tl.load(runs.offsets + W)
        tiles_m = tl.cdiv(rows, BM)
        stored = ch.counters + 2 * grid.steps * tiles_n
        steps = tl.cdiv(K, BK)
        flush_step = min(FLUSHED, steps - 1)
        whole = tiles_m * tiles_n if w_half_desc is None else whole_tiles(tiles_m * tiles_n, GEMM_PROGRAMS)
        t = pid - GEMM_PROGRAMS
        step, row, col, flat_row, channel, stored_tile = steps - 1, 0, 0, 0, 0, -1
        acc, upper, lower = zero_accumulators(tile)
        # This kernel and signaled_gemm could share one loop, in which each tile is a group, the arena is an additional
        # output, and no table of groups is read. Compiled in this way for sm_90a, this kernel used 173 registers
        # instead of 165 and 1,112 instructions instead of 1,072 (8 ranks: 181 instead of 175, 1,160 instead of 1,128).
        # Neither version spilled, but the shared loop had 6 more compile-time branches. So there are two loops.
        for _ in tl.range(0, tl.cdiv(whole - pid, GEMM_PROGRAMS) * steps):
            step = tl.where(step == steps - 1, 0, step + 1)
            if step == 0:
                t += GEMM_PROGRAMS
                i, tn = grouped_tile(t, tiles_m, tiles_n, tile.GROUP_M)
                tm = tl.load(runs.order + i)
                row = tm * BM
                col = tn * BN
                channel = tl.load(runs.positions + tm) * tiles_n + tn
                flat_row = first_row + (tm * tiles_n + tn) * (2 * BM)
            if tile.PROMOTE:
                scales_of_tile = tile_scales(scales, scales.x, row, rows, K, tile.SCALED)
                w = weight_scale(scales_of_tile, col, step * BK, K, tile.SCALED)
                upper_scale = row_scales(scales_of_tile, 0, step * BK, BM // 2, tile.SCALED) * w
                lower_scale = row_scales(scales_of_tile, BM // 2, step * BK, BM // 2, tile.SCALED) * w
                upper, lower = add_step(
                    upper, lower, x_desc, w_desc, row, col, step * BK, upper_scale, lower_scale, tile
                )
            else:
                acc = tl.dot(x_desc.load([row, step * BK]), second_operand(w_desc, col, step * BK, tile.TRANS_B), acc)
            if (step == flush_step) & (stored_tile >= 0):
                count_stored(stored + stored_tile, COUNT)
                stored_tile = -1
            if step == steps - 1:
                scales_of_tile = None
                if tile.SCALED:
                    scales_of_tile = tile_scales(scales, scales.x, row, rows, K, tile.SCALED)
                if tile.PROMOTE:
                    store_partial(arena_desc, upper, scales_of_tile, granule, flat_row, col, N, tile)
                    scales_of_tile = rows_below(scales_of_tile, BM // 2)
                    store_partial(arena_desc, lower, scales_of_tile, granule, flat_row + BM // 2, col, N, tile)
                else:
                    store_partial(arena_desc, acc, scales_of_tile, granule, flat_row, col, N, tile)
                stored_tile = channel
                acc, upper, lower = zero_accumulators(tile)
        if w_half_desc is not None:
            place = granule, first_row, stored, tiles_m
            stored_tile = compute_half(x_desc, w_half_desc, arena_desc, place, whole, stored_tile, runs, grid, K, tile)
        if stored_tile >= 0:
            count_stored(stored + stored_tile, COUNT)
    else:
        if pid < how.FORWARD_PROGRAMS:
            forward_tiles(ch, runs.owners, grid, pid, how.FORWARD_PROGRAMS, tile.GROUP_M // W, COUNT)
        sum_tiles(flat_desc, arena, first_row, me, out, bias, ch, runs, grid, tile, how)
    end_call(ch, arena.epoch, how.FORWARD_PROGRAMS + how.PULL_PROGRAMS + GEMM_PROGRAMS)
