"""GEMM + reduce-scatter and GEMM + all-reduce, in which the owner of a tile pulls the partial tiles of all ranks.

    GEMM programs      compute a persistent GEMM whose tile order interleaves the owners: all ranks compute tile (lm,
                       tn) of every owner at about the same time. A program stores a tile in this rank's half of the
                       arena, and counts it a few K steps into its next tile (compute/gemm.py).
    forward programs   notify all owners when tile (lm, tn) of every owner has been stored. GEMM programs release their
                       stores only to this GPU, because a release to the peers would wait for busy links.
    pull programs      draw this rank's own tiles in the order in which they become complete. For each tile, a program
                       waits until all ranks have notified this one, reads the tile from every rank through a deep
                       asynchronous pipeline, adds the parts in float32 in rank order, and stores the sum

                       t -->
    GEMM programs      | tile 0 of r+1, r+2, .. | tile 1 of r+1, .. | ...
    pull programs      |        ...wait...      | sum tile 0        | sum tile 1 | ...

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
tiles, each time by a release that covers all owners. The fast rank's increment is a release too, so it also publishes
those tiles.

Three alternatives were measured and rejected (docs/design-notes.md). The first has pull programs on separate SMs. In
the second, GEMM programs pull when they have no tiles left, so that the loads of the last tiles wait for these pulls.
In the third, GEMM programs notify the owners, immediately or one tile later.

Symbols of shapes:

    M, N, K    M rows of x, N columns of the result, and K columns of x on this rank
    W          the number of ranks; rank r owns m_r rows of the result
"""

from typing import NamedTuple

import triton.language as tl

from ...compute.gemm import FLUSHED, column_halves, grouped_tile, second_operand
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


class Grid(NamedTuple):
    """The numbers of tile rows and tile columns of the longest shard, and the number of columns."""

    tiles_m: tl.tensor
    tiles_n: tl.tensor
    N: tl.tensor


@jit
def sum_half_tiles(
    flat_desc, arenas, sums, first_row, start, count, me, out, lo, rows_n, bias, grid, tile, how, W: tl.constexpr
):
    """Sum this rank's own half tiles start .. start + count over all ranks. Row 0 of this rank's shard is row `lo` of
    `out`. `arenas` contains the granule of each rank's arena. With ALL the sums are also stored in `sums`, this rank's
    arena, from which the other ranks pull them."""
    BM: tl.constexpr = tile.BM
    COLS: tl.constexpr = tile.BN // 2
    GROUP: tl.constexpr = tile.GROUP_M // W
    R: tl.constexpr = how.R
    PARTS: tl.constexpr = BM // R
    tiles_m, tiles_n, N = grid
    r = tl.arange(0, R)[:, None]
    c = tl.arange(0, COLS)
    acc = tl.zeros((R, COLS), tl.float32)
    for q in tl.range(0, count * PARTS * W, num_stages=how.STAGES):
        rank = q % W
        half_tile = start + q // (PARTS * W)
        part = q // W % PARTS
        lm, tn = grouped_tile(half_tile // 2, tiles_m, tiles_n, GROUP)
        flat_row = first_row + ((me * tiles_m + lm) * tiles_n + tn) * (2 * BM) + half_tile % 2 * BM + part * R
        block = tl.reshape(flat_desc.load([select(arenas, rank, W), flat_row, 0]), (R, COLS))
        acc = tl.where(rank == 0, 0.0, acc) + block.to(tl.float32)
        if rank == W - 1:
            row = lm * BM + part * R
            col = (tn * 2 + half_tile % 2) * COLS + c
            total = acc
            if bias is not None:
                total += tl.load(bias + col, mask=col < N, other=0.0).to(tl.float32)[None, :]
            ok = (row + r < rows_n) & (col < N)[None, :]
            tl.store(out + (lo + row + r).to(tl.int64) * N + col[None, :], total.to(out.dtype.element_ty), mask=ok)
            if how.ALL:
                tl.store(sums + (flat_row + r).to(tl.int64) * COLS + c[None, :], total.to(out.dtype.element_ty))


@jit
def gather_tile(flat_desc, arenas, first_row, tile_index, me, out, offsets, grid, tile, how, W: tl.constexpr):
    """Every other owner has summed its tile tile_index. Copy these sums to `out`, beginning with the nearest owner."""
    BM: tl.constexpr = tile.BM
    COLS: tl.constexpr = tile.BN // 2
    GROUP: tl.constexpr = tile.GROUP_M // W
    R: tl.constexpr = how.R
    PARTS: tl.constexpr = 2 * BM // R
    tiles_m, tiles_n, N = grid
    r = tl.arange(0, R)[:, None]
    c = tl.arange(0, COLS)[None, :]
    lm, tn = grouped_tile(tile_index, tiles_m, tiles_n, GROUP)
    for q in tl.range(0, (W - 1) * PARTS, num_stages=how.STAGES):
        s = (me + 1 + q // PARTS) % W
        part = q % PARTS
        flat_row = first_row + ((s * tiles_m + lm) * tiles_n + tn) * (2 * BM) + part * R
        block = tl.reshape(flat_desc.load([select(arenas, s, W), flat_row, 0]), (R, COLS))
        lo = tl.load(offsets + s)
        row = lo + lm * BM + part * R % BM + r
        col = (tn * 2 + part * R // BM) * COLS + c
        tl.store(out + row.to(tl.int64) * N + col, block, mask=(row < tl.load(offsets + s + 1)) & (col < N))


@jit
def sum_tiles(flat_desc, arena, first_row, me, out, bias, ch, offsets, grid, tile, how):
    """Draw tickets until no ticket is left, and sum or gather the tiles of each ticket."""
    W: tl.constexpr = ch.world
    GROUP: tl.constexpr = tile.GROUP_M // W
    LAG: tl.constexpr = how.LAG
    tiles_m, tiles_n, N = grid
    target = calls_of(ch) * W
    arenas = ()
    for i in tl.static_range(W):
        arenas = arenas + (tl.load(arena.granules + i),)
    sums = address_of(arena.addresses, me, out.dtype.element_ty)
    lo = tl.load(offsets + me)
    rows_n = tl.load(offsets + me + 1) - lo
    own_tiles = tiles_m * tiles_n
    if how.ALL:  # an even ticket sums one tile, and an odd ticket gathers the other owners' sums of one tile
        ticket = take_ticket(ch, 1)
        while ticket < 2 * (own_tiles + LAG):
            step = ticket // 2
            if ticket % 2 == 0:
                if step < own_tiles:
                    lm, tn = grouped_tile(step, tiles_m, tiles_n, GROUP)
                    channel = lm * tiles_n + tn
                    wait_until(ch.counters + channel, target, ch.guard, channel, -1, "sys")
                    sum_half_tiles(
                        flat_desc, arenas, sums, first_row, 2 * step, 2, me, out, lo, rows_n, bias, grid, tile, how, W
                    )
                    channel_broadcast(ch, own_tiles + step, False)
            else:
                if step >= LAG:
                    wait_until(ch.counters + own_tiles + step - LAG, target, ch.guard, step - LAG, -1, "sys")
                    gather_tile(flat_desc, arenas, first_row, step - LAG, me, out, offsets, grid, tile, how, W)
            ticket = take_ticket(ch, 1)
    else:  # without ALL, a ticket sums one half of a tile
        ticket = take_ticket(ch, 1)
        while ticket < 2 * own_tiles:
            lm, tn = grouped_tile(ticket // 2, tiles_m, tiles_n, GROUP)
            channel = lm * tiles_n + tn
            wait_until(ch.counters + channel, target, ch.guard, channel, -1, "sys")
            sum_half_tiles(flat_desc, arenas, sums, first_row, ticket, 1, me, out, 0, rows_n, bias, grid, tile, how, W)
            ticket = take_ticket(ch, 1)


@jit
def forward_tiles(ch, grid, pid, FORWARD_PROGRAMS: tl.constexpr, GROUP: tl.constexpr):
    """Notify every owner that its tile (lm, tn) is complete, after this rank's GEMM programs have stored tile (lm, tn)
    of all owners."""
    tiles_m, tiles_n, _ = grid
    own_tiles = tiles_m * tiles_n
    for step in range(pid, own_tiles, FORWARD_PROGRAMS):
        lm, tn = grouped_tile(step, tiles_m, tiles_n, GROUP)
        tile = lm * tiles_n + tn
        channel_wait(ch, 2 * own_tiles + tile, ch.world, tile, rank_of(ch), "gpu")
        channel_broadcast(ch, tile, False)


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


@jit(do_not_specialize=("tiles_m",))
def gemm_reduce(
    x_desc, w_desc, arena_desc, flat_desc, arena, out, bias, scales, ch, offsets, tiles_m, N, K, tile, how,
    COMPUTE: tl.constexpr,
):  # fmt: skip
    """Compute out = the sum over ranks of x_desc [M, K] @ w_desc [N, K]^T, + bias [N] (or None). `out` contains this
    rank's rows [m_r, N], or, with ALL, all rows [M, N]. The launch with COMPUTE consists of the GEMM programs, and the
    launch without COMPUTE of the forward and pull programs.

    With TRANS_B, w_desc is [K, N]. A half of the arena (`transport.memory.Halves`) contains the tiles of all owners.
    Each tile is stored as its left and its right half, [2, BM, BN / 2]. arena_desc (blocks [1, BM, BN / 2]; with
    PROMOTE half the rows, as in x_desc) and flat_desc (blocks [1, R, BN / 2]) describe the arenas of all ranks as
    [granule, row, BN / 2]. scales are the `Scales` of 8-bit operands, or None; they are applied before tiles are
    stored. offsets, int32 [world + 1], contains the first row of each rank's shard. tiles_m is the number of tile rows
    in the longest shard. GROUP_M is a multiple of the world size. how is a `Sums`.

    There are counters for the tiles of this rank's shard, for the sums of these tiles, and for the tiles of all owners
    that this rank has stored. Only this rank's programs increment the last group of counters."""
    x_desc, w_desc = tiles_of(x_desc), tiles_of(w_desc)
    arena_desc, flat_desc = tiles_of(arena_desc), tiles_of(flat_desc)
    W: tl.constexpr = ch.world
    BM: tl.constexpr = tile.BM
    BN: tl.constexpr = tile.BN
    BK: tl.constexpr = tile.BK
    COLS: tl.constexpr = BN // 2
    GEMM_PROGRAMS: tl.constexpr = how.GEMM_PROGRAMS
    pid = tl.program_id(0)
    # Rows are whole 16-byte words. Without this hint the compiler generates narrow stores and spills registers.
    N = N // 8 * 8
    me = rank_of(ch)
    tiles_n = tl.cdiv(N, BN)
    own_tiles = tiles_m * tiles_n
    first_row = (tl.load(arena.epoch) & 1) * (arena.half // COLS).to(tl.int32)
    if COMPUTE:
        granule = tl.load(arena.granules + me)
        first_rows = ()
        for i in tl.static_range(W):
            first_rows = first_rows + (tl.load(offsets + i),)
        rows = tl.load(offsets + W)
        steps = tl.cdiv(K, BK)
        flush_step = min(FLUSHED, steps - 1)
        t = pid - GEMM_PROGRAMS
        step, row, col, flat_row, channel, stored_tile = steps - 1, 0, 0, 0, 0, -1
        acc, upper, lower = zero_accumulators(tile)
        # This kernel and signaled_gemm could share one loop, in which each tile is a group, the arena is an additional
        # output, and no table of groups is read. Compiled in this way for sm_90a, this kernel used 173 registers
        # instead of 165 and 1,112 instructions instead of 1,072 (8 ranks: 181 instead of 175, 1,160 instead of 1,128).
        # Neither version spilled, but the shared loop had 6 more compile-time branches. So there are two loops.
        for _ in tl.range(0, tl.cdiv(W * own_tiles - pid, GEMM_PROGRAMS) * steps):
            step = tl.where(step == steps - 1, 0, step + 1)
            if step == 0:
                t += GEMM_PROGRAMS
                tm, tn = grouped_tile(t, W * tiles_m, tiles_n, tile.GROUP_M)
                owner = (tm + me + 1) % W
                lm = tm // W
                row = select(first_rows, owner, W) + lm * BM
                col = tn * BN
                channel = lm * tiles_n + tn
                flat_row = first_row + (owner * own_tiles + channel) * (2 * BM)
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
                flush_stores(True)
                tl.atomic_add(ch.counters + 2 * own_tiles + stored_tile, 1, sem="release", scope="gpu")
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
        if stored_tile >= 0:
            flush_stores(True)
            tl.atomic_add(ch.counters + 2 * own_tiles + stored_tile, 1, sem="release", scope="gpu")
    else:
        grid = Grid(tiles_m, tiles_n, N)
        if pid < how.FORWARD_PROGRAMS:
            forward_tiles(ch, grid, pid, how.FORWARD_PROGRAMS, tile.GROUP_M // W)
        sum_tiles(flat_desc, arena, first_row, me, out, bias, ch, offsets, grid, tile, how)
    end_call(ch, arena.epoch, how.FORWARD_PROGRAMS + how.PULL_PROGRAMS + GEMM_PROGRAMS)
