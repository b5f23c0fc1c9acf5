"""GEMM + reduce-scatter and GEMM + all-reduce by pulling.

    GEMM programs   persistent GEMM whose tile order interleaves the owners: tile (lm, tn) of every owner is computed by
                    all ranks at about the same time; a tile is stored in this rank's half of the arena, and told of a
                    little into the program's next one (gemm.py)
    forwarders      once tile (lm, tn) of every owner is there, tell all owners. A GEMM program's own release reaches
    only
                    this GPU: one that reaches the peers waits for the links where they are busy
    pullers         draw own tiles in the order in which they become complete, wait for all ranks' notifies, read them
                    from every rank through a deep asynchronous pipeline, sum in fp32 in rank order, write

                 t -->
    GEMM         | tile 0 of r+1, r+2, .. | tile 1 of r+1, .. | ...
    pullers      |        ...wait...      | sum tile 0        | sum tile 1 | ...

Forwarders and pullers are a kernel of their own, so small (48 KiB of shared memory, four warps) that its programs fit
on the SMs beside the GEMM's, which keep every SM.

For all-reduce the owner writes the sum back over its own partial tile (nobody else reads that one) and tells every
rank; every second ticket pulls the other owners' sums of the tile LAG tickets earlier. A ticket waits only for GEMM
tiles, which wait for nothing, and for sums with smaller ticket numbers, so some program can always go on.

Order of accesses. An arena half is written again two calls later, and a rank gets there only after hearing from every
peer in the call between, which that peer started after it had ended this one.

A channel is counted up by all ranks, and a fast rank may count its tile of the next call where a slow rank's count of
this one has not landed yet. The sum may then start on the wrong count, but not on missing data: the fast rank was told
of all of the slow rank's tiles before it left this call, each with one release to all owners, and its own count passes
that on.

Measured and dropped (docs/design-notes.md): pullers on SMs of their own; GEMM programs that pull when out of tiles (a
flood of requests in which the last tiles' loads wait); telling owners from the GEMM program, at once or a tile later.
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
    """WORKERS programs compute; FORWARD programs forward and then pull, PULLERS further ones pull: BATCH half tiles a
    ticket, R rows at a time, STAGES of such blocks under way. ALL: the sums go to every rank, LAG tickets later."""

    WORKERS: tl.constexpr
    FORWARD: tl.constexpr
    PULLERS: tl.constexpr
    BATCH: tl.constexpr
    R: tl.constexpr
    STAGES: tl.constexpr
    LAG: tl.constexpr
    ALL: tl.constexpr


class Grid(NamedTuple):
    """Tiles of the longest shard, and columns."""

    tiles_m: tl.tensor
    tiles_n: tl.tensor
    N: tl.tensor


@jit
def sum_half_tiles(
    flat_desc, places, mine, first_row, first, count, me, out, lo, rows_n, bias, grid, tile, how, W: tl.constexpr
):
    """Sum own half tiles first .. first + count over ranks; the own shard's row 0 is row `lo` of `out`. ALL: the sums
    go back to the tiles of `mine` too, for the others."""
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
        half_tile = first + q // (PARTS * W)
        part = q // W % PARTS
        lm, tn = grouped_tile(half_tile // 2, tiles_m, tiles_n, GROUP)
        flat_row = first_row + ((me * tiles_m + lm) * tiles_n + tn) * (2 * BM) + half_tile % 2 * BM + part * R
        block = tl.reshape(flat_desc.load([select(places, rank, W), flat_row, 0]), (R, COLS))
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
                tl.store(mine + (flat_row + r).to(tl.int64) * COLS + c[None, :], total.to(out.dtype.element_ty))


@jit
def gather_tile(flat_desc, places, first_row, number, me, out, offsets, grid, tile, how, W: tl.constexpr):
    """Copy the other owners' sums of their tile of that number to `out`, nearest owner first."""
    BM: tl.constexpr = tile.BM
    COLS: tl.constexpr = tile.BN // 2
    GROUP: tl.constexpr = tile.GROUP_M // W
    R: tl.constexpr = how.R
    PARTS: tl.constexpr = 2 * BM // R
    tiles_m, tiles_n, N = grid
    r = tl.arange(0, R)[:, None]
    c = tl.arange(0, COLS)[None, :]
    lm, tn = grouped_tile(number, tiles_m, tiles_n, GROUP)
    for q in tl.range(0, (W - 1) * PARTS, num_stages=how.STAGES):
        s = (me + 1 + q // PARTS) % W
        part = q % PARTS
        flat_row = first_row + ((s * tiles_m + lm) * tiles_n + tn) * (2 * BM) + part * R
        block = tl.reshape(flat_desc.load([select(places, s, W), flat_row, 0]), (R, COLS))
        lo = tl.load(offsets + s)
        row = lo + lm * BM + part * R % BM + r
        col = (tn * 2 + part * R // BM) * COLS + c
        tl.store(out + row.to(tl.int64) * N + col, block, mask=(row < tl.load(offsets + s + 1)) & (col < N))


@jit
def sum_tiles(flat_desc, arena, first_row, me, out, bias, ch, offsets, grid, tile, how):
    """Draw tickets until none is left."""
    W: tl.constexpr = ch.world
    GROUP: tl.constexpr = tile.GROUP_M // W
    BATCH: tl.constexpr = how.BATCH
    LAG: tl.constexpr = how.LAG
    tiles_m, tiles_n, N = grid
    target = calls_of(ch) * W
    places = ()
    for i in tl.static_range(W):
        places = places + (tl.load(arena.granules + i),)
    mine = address_of(arena.addresses, me, out.dtype.element_ty)
    lo = tl.load(offsets + me)
    rows_n = tl.load(offsets + me + 1) - lo
    own_tiles = tiles_m * tiles_n
    if how.ALL:  # a ticket: one tile summed (even), or the other owners' sums of one tile (odd)
        ticket = take_ticket(ch, 1)
        while ticket < 2 * (own_tiles + LAG):
            step = ticket // 2
            if ticket % 2 == 0:
                if step < own_tiles:
                    lm, tn = grouped_tile(step, tiles_m, tiles_n, GROUP)
                    channel = lm * tiles_n + tn
                    wait_until(ch.counters + channel, target, ch.guard, channel, -1, "sys")
                    sum_half_tiles(
                        flat_desc, places, mine, first_row, 2 * step, 2, me, out, lo, rows_n, bias, grid, tile, how, W
                    )
                    channel_broadcast(ch, own_tiles + step, False)
            else:
                if step >= LAG:
                    wait_until(ch.counters + own_tiles + step - LAG, target, ch.guard, step - LAG, -1, "sys")
                    gather_tile(flat_desc, places, first_row, step - LAG, me, out, offsets, grid, tile, how, W)
            ticket = take_ticket(ch, 1)
    else:  # a ticket: one half tile summed; BATCH of them are drawn at a time until few are left
        end = 2 * own_tiles
        draw = min(BATCH, end)
        ticket = take_ticket(ch, draw)
        while ticket < end:
            count = min(draw, end - ticket)
            for step in range(ticket // 2, (ticket + count + 1) // 2):
                lm, tn = grouped_tile(step, tiles_m, tiles_n, GROUP)
                channel = lm * tiles_n + tn
                wait_until(ch.counters + channel, target, ch.guard, channel, -1, "sys")
            sum_half_tiles(
                flat_desc, places, mine, first_row, ticket, count, me, out, 0, rows_n, bias, grid, tile, how, W
            )
            if end - ticket < BATCH * (how.FORWARD + how.PULLERS) // 2:
                draw = 1
            ticket = take_ticket(ch, draw)


@jit
def forward_tiles(ch, grid, pid, FORWARD: tl.constexpr, GROUP: tl.constexpr):
    """Tell every owner of its tile (lm, tn) when this rank's GEMM programs have stored that tile of all owners."""
    tiles_m, tiles_n, _ = grid
    own_tiles = tiles_m * tiles_n
    for step in range(pid, own_tiles, FORWARD):
        lm, tn = grouped_tile(step, tiles_m, tiles_n, GROUP)
        tile = lm * tiles_n + tn
        channel_wait(ch, 2 * own_tiles + tile, ch.world, tile, rank_of(ch), "gpu")
        channel_broadcast(ch, tile, False)


@jit
def empty_sums(tile):
    """The float32 accumulators of a tile, [BM, BN], and of its halves of rows, [BM / 2, BN] each: 0 for what a loop of
    these tiles does not have."""
    acc, upper, lower = 0, 0, 0
    if tile.PROMOTE:
        upper = tl.zeros((tile.BM // 2, tile.BN), tl.float32)
        lower = tl.zeros((tile.BM // 2, tile.BN), tl.float32)
    else:
        acc = tl.zeros((tile.BM, tile.BN), tl.float32)
    return acc, upper, lower


@jit
def store_partial(arena_desc, acc, scales, granule, flat_row, col, N, tile):
    """Store a tile's sums, or those of a half of its rows, as its left half from flat_row of the arena on and its right
    one BM rows behind. scales: TileScales of 8-bit operands, or None."""
    ROWS: tl.constexpr = acc.shape[0]
    COLS: tl.constexpr = tile.BN // 2
    left, right = column_halves(acc, ROWS, tile.BN)
    if tile.SCALED:
        left = scale_half(left, None, scales, col, N, tile.SCALED)
    arena_desc.store([granule, flat_row, 0], tl.reshape(left.to(arena_desc.dtype), (1, ROWS, COLS)))
    if tile.SCALED:  # behind the store: `store_scaled_tile` says why
        right = scale_half(right, None, scales, col + COLS, N, tile.SCALED)
    arena_desc.store([granule, flat_row + tile.BM, 0], tl.reshape(right.to(arena_desc.dtype), (1, ROWS, COLS)))


@jit(do_not_specialize=("tiles_m",))
def gemm_reduce(
    x_desc, w_desc, arena_desc, flat_desc, arena, out, bias, scales, ch, offsets, tiles_m, N, K, tile, how,
    COMPUTE: tl.constexpr,
):  # fmt: skip
    """COMPUTE: the programs that compute; else those that forward and pull. One launch each.

    x_desc [M, K], w_desc [N, K], or [K, N] (TRANS_B); a half of the arena (`transport.memory.Halves`) holds all owners'
    tiles one after another, each as its left and its right half, [2, BM, BN / 2]. arena_desc (blocks [1, BM, BN / 2],
    PROMOTE: half the rows, as x_desc's) and flat_desc ([1, R, BN / 2]): every rank's arena as [granule, row, BN / 2].
    out [m_r, N], or [M, N] (ALL). bias [N] or None. scales: the `Scales` of 8-bit operands, by which tiles are stored,
    or None. offsets: int32 [world + 1], the first row of every rank's shard; tiles_m: row tiles of the longest shard.
    GROUP_M: a multiple of the world.
    Channels: the own shard's tiles, their sums, and the tiles of all owners that this rank has stored, which only its
    own programs count."""
    x_desc, w_desc = tiles_of(x_desc), tiles_of(w_desc)
    arena_desc, flat_desc = tiles_of(arena_desc), tiles_of(flat_desc)
    W: tl.constexpr = ch.world
    BM: tl.constexpr = tile.BM
    BN: tl.constexpr = tile.BN
    BK: tl.constexpr = tile.BK
    COLS: tl.constexpr = BN // 2
    WORKERS: tl.constexpr = how.WORKERS
    pid = tl.program_id(0)
    # Rows are whole 16-byte words; a compiler that does not know makes narrow stores and spills registers.
    N = N // 8 * 8
    me = rank_of(ch)
    tiles_n = tl.cdiv(N, BN)
    own_tiles = tiles_m * tiles_n
    first_row = (tl.load(arena.epoch) & 1) * (arena.half // COLS).to(tl.int32)
    if COMPUTE:
        granule = tl.load(arena.granules + me)
        firsts = ()
        for i in tl.static_range(W):
            firsts = firsts + (tl.load(offsets + i),)
        rows = tl.load(offsets + W)
        steps = tl.cdiv(K, BK)
        late = min(FLUSHED, steps - 1)
        t = pid - WORKERS
        step, row, col, flat_row, channel, stored = steps - 1, 0, 0, 0, 0, -1
        acc, upper, lower = empty_sums(tile)
        # signaled_gemm's loop could go through the same tiles, each a group of its own: without its table of turns,
        # which costs a look in every tile, and with this arena as one more place to store to. Compiled for sm_90a so,
        # this kernel had 173 registers for 165 and 1,112 instructions for 1,072 (8 ranks: 181 for 175, 1,160 for
        # 1,128), no spills, and that loop 6 more branches at compile time. So there are two loops.
        for _ in tl.range(0, tl.cdiv(W * own_tiles - pid, WORKERS) * steps):
            step = tl.where(step == steps - 1, 0, step + 1)
            if step == 0:
                t += WORKERS
                tm, tn = grouped_tile(t, W * tiles_m, tiles_n, tile.GROUP_M)
                owner = (tm + me + 1) % W
                lm = tm // W
                row = select(firsts, owner, W) + lm * BM
                col = tn * BN
                channel = lm * tiles_n + tn
                flat_row = first_row + (owner * own_tiles + channel) * (2 * BM)
            if tile.PROMOTE:
                of_tile = tile_scales(scales, scales.x, row, rows, K, tile.SCALED)
                w = weight_scale(of_tile, col, step * BK, K, tile.SCALED)
                upper_scale = row_scales(of_tile, 0, step * BK, BM // 2, tile.SCALED) * w
                lower_scale = row_scales(of_tile, BM // 2, step * BK, BM // 2, tile.SCALED) * w
                upper, lower = add_step(
                    upper, lower, x_desc, w_desc, row, col, step * BK, upper_scale, lower_scale, tile
                )
            else:
                acc = tl.dot(x_desc.load([row, step * BK]), second_operand(w_desc, col, step * BK, tile.TRANS_B), acc)
            if (step == late) & (stored >= 0):
                flush_stores(True)
                tl.atomic_add(ch.counters + 2 * own_tiles + stored, 1, sem="release", scope="gpu")
                stored = -1
            if step == steps - 1:
                of_tile = None
                if tile.SCALED:
                    of_tile = tile_scales(scales, scales.x, row, rows, K, tile.SCALED)
                if tile.PROMOTE:
                    store_partial(arena_desc, upper, of_tile, granule, flat_row, col, N, tile)
                    of_tile = rows_below(of_tile, BM // 2)
                    store_partial(arena_desc, lower, of_tile, granule, flat_row + BM // 2, col, N, tile)
                else:
                    store_partial(arena_desc, acc, of_tile, granule, flat_row, col, N, tile)
                stored = channel
                acc, upper, lower = empty_sums(tile)
        if stored >= 0:
            flush_stores(True)
            tl.atomic_add(ch.counters + 2 * own_tiles + stored, 1, sem="release", scope="gpu")
    else:
        grid = Grid(tiles_m, tiles_n, N)
        if pid < how.FORWARD:
            forward_tiles(ch, grid, pid, how.FORWARD, tile.GROUP_M // W)
        sum_tiles(flat_desc, arena, first_row, me, out, bias, ch, offsets, grid, tile, how)
    end_call(ch, arena.epoch, how.FORWARD + how.PULLERS + WORKERS)
