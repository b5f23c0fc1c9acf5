"""All-gather + GEMM in one launch. A few programs pull the peers' shards. The remaining programs compute a GEMM, in
which each tile waits for the chunks that the tile reads.

    all programs    copy one part each of this rank's shard into this rank's half of the arena, then increment `ready`
                    (for the peers) and the tile's channel (for tiles that span shards)
    pull programs   wait until a peer is ready, beginning with the nearest peer, then pull the peer's chunks through a
                    deep asynchronous pipeline to the same offset of this rank's arena, and increment the channel of
                    each chunk's tile
    GEMM programs   compute a persistent GEMM. They read the tiles of own rows directly from x. Then they compute the
                    other row tiles in the order in which the chunks arrive, each tile when its chunks have arrived

                    t -->
    pull programs   | own | r+1 . . . | r+2 . . . | ...
    GEMM programs   | own | own tiles | r+1 tiles | ...

Tiles cover the gathered rows without regard to shards. A chunk contains a shard's rows of one row tile. A tile that
spans shards therefore has a chunk of each of these shards. The tile has one channel, which counts all its chunks, so
that every tile waits for one counter.

In `copied_gemm` a copy engine pulls the shards one after another, and all SMs compute.

Two alternatives were measured and rejected, because a copy engine was at least as fast (8 H200, 2026-11). In the first,
programs pull chunks of all peers in turn. In the second, a small separate kernel pulls, concurrently with a GEMM on
every SM.

Order of accesses. Peers read the arena half of call n, and the rank writes it again in call n + 2. The rank reaches
call n + 2 only after every peer has incremented the rank's `ready` in call n + 1, and the peer's programs of call n + 1
started after the peer's call n had ended. Therefore two halves suffice, without a barrier.

Symbols of shapes:

    M, N, K    M rows on all ranks (m_r of them on rank r), N columns of this rank's result, and K columns of x
    W          ranks
"""

from typing import NamedTuple

import triton.language as tl

from ...compute.gemm import Tile, gemm_tile, grouped_tile, store_half_tile, whole_tiles
from ...compute.scaled_gemm import BLOCK, BY_BLOCK, BY_TENSOR, TileScales, product_tile, tile_scales
from ...lang.channel import address_of, calls_of, counters_of, end_call, rank_of
from ...lang.descriptors import tiles_of
from ...lang.intrinsics import flush_stores, release_fence, wait_until
from ...lang.jit import jit
from ...lang.primitives import consumer_tile_wait
from ...lang.stock import AFTER_FENCE


class Pull(NamedTuple):
    """The parameters of pulling. SPLIT of the PULL_PROGRAMS programs share a chunk and pull it in blocks of ROWS x COLS
    elements, with STAGES blocks in flight. This rank's chunks are copied in PARTS parts each. With BULK, which requires
    that all chunks consist of SPLIT x whole blocks, TMA loads the blocks; otherwise ordinary asynchronous loads are
    used."""

    PULL_PROGRAMS: tl.constexpr
    PARTS: tl.constexpr
    SPLIT: tl.constexpr
    BULK: tl.constexpr
    ROWS: tl.constexpr
    COLS: tl.constexpr
    STAGES: tl.constexpr


class Product(NamedTuple):
    """The parameters of the GEMM. GEMM_PROGRAMS programs compute tiles. GATED: as in `store_tile`. With FLATTEN, a
    tile's epilogue overlaps the next tile's loads."""

    tile: Tile
    GEMM_PROGRAMS: tl.constexpr
    GATED: tl.constexpr
    FLATTEN: tl.constexpr


class Gathering(NamedTuple):
    """The parameters of the pull programs and of the GEMM programs."""

    pull: Pull
    product: Product


WORD = tl.constexpr(4)  # the float32 elements in a 16-byte word; the scales of a gathered row are padded to whole words
WORDS = tl.constexpr(2048)  # the number of float32 elements that a program copies at a time


@jit
def scales_in_row(K, SCALED: tl.constexpr):
    """Return the number of scales for each row of x."""
    count = 1
    if SCALED == BY_BLOCK:
        count = K // BLOCK
    return count


@jit
def scales_stride(K, SCALED: tl.constexpr):
    """Return the distance between the scales of successive gathered rows, in float32 elements."""
    return tl.cdiv(scales_in_row(K, SCALED), WORD) * WORD


@jit
def gathered_scales(arena, rank, base, M, K, CHUNK: tl.constexpr):
    """Return the address at which all rows' scales are stored, for the half at element `base` of a rank's arena. The
    scales follow the [M, K] 8-bit elements, where M is rounded up to whole tiles, because the GEMM loads whole
    tiles."""
    rows = tl.cdiv(M, CHUNK) * CHUNK
    return address_of(arena.addresses, rank, tl.float32) + (base + rows.to(tl.int64) * K) // 4


@jit
def chunks_of(row, rows_n, BM: tl.constexpr):
    """Return the first tile and the number of chunks of a shard with rows_n rows that begins at gathered row `row`."""
    first_tile = row // BM
    return first_tile, tl.where(rows_n > 0, tl.cdiv(row + rows_n, BM) - first_tile, 0)


@jit
def rows_of(tile, row, rows_n, BM: tl.constexpr):
    """Return the first gathered row of a shard's chunk in a row tile, and the row after the chunk's last row."""
    return max(tile * BM, row), min((tile + 1) * BM, row + rows_n)


@jit
def copy_own_scales(scales, all_scales, lo, hi, row, K, SCALED: tl.constexpr):
    """Copy the scales of this rank's gathered rows lo .. hi to the scales of all rows. This rank's shard begins at
    gathered row `row`."""
    count = scales_in_row(K, SCALED)
    stride = scales_stride(K, SCALED)
    o = tl.arange(0, WORDS)
    words = (hi - lo) * count
    for word in range(0, words, WORDS):
        i = word + o
        offset = (lo + i // count).to(tl.int64) * stride + i % count
        values = tl.load(scales.x + (lo - row).to(tl.int64) * count + i, mask=i < words, other=0.0)
        tl.store(all_scales + offset, values, mask=i < words)


@jit
def pull_scales(
    src, dst, row, rows_n, first_tile, end_tile, step, K, BM: tl.constexpr, SCALED: tl.constexpr, STAGES: tl.constexpr
):
    """Pull the scales of a shard's rows in the tiles first_tile, first_tile + step, .. before end_tile, in 16-byte
    words. The shard has rows_n rows and begins at row `row`. The program stores the scales before it releases rows of
    these tiles."""
    stride = scales_stride(K, SCALED)
    blocks = tl.cdiv(BM * stride, WORDS)
    o = tl.arange(0, WORDS)
    for q in tl.range(0, tl.cdiv(end_tile - first_tile, step) * blocks, num_stages=STAGES):
        lo, hi = rows_of(q // blocks * step + first_tile, row, rows_n, BM)
        i = q % blocks * WORDS + o
        offset = lo.to(tl.int64) * stride
        ok = i < (hi - lo) * stride
        tl.store(dst + offset + i, tl.load(src + offset + i, mask=ok), mask=ok)


@jit
def copy_own_chunks(
    x, own_half, scales, all_scales, ch, ready, row, rows_n, K, pid, pull, tile, PROGRAMS: tl.constexpr
):
    """Copy parts of this rank's shard, which has rows_n rows and begins at row `row`, to the arena. The parts are
    distributed over all programs. The scales of a chunk are copied with the chunk's first part. A program counts each
    part once for the peers and once for the GEMM. `all_scales` is the address of all rows' scales, or None."""
    PARTS: tl.constexpr = pull.PARTS
    BLOCK_SIZE: tl.constexpr = pull.ROWS * pull.COLS
    o = tl.arange(0, BLOCK_SIZE)
    first_tile, chunks = chunks_of(row, rows_n, tile.BM)
    if pid == 0:  # peers wait for this count even if the shard is empty
        tl.atomic_add(ch.counters + ready, 1, sem="release", scope="sys")
    for part in range(pid, chunks * PARTS, PROGRAMS):
        tm = first_tile + part // PARTS
        lo, hi = rows_of(tm, row, rows_n, tile.BM)
        size = (hi - lo) * K
        src = x + (lo - row).to(tl.int64) * K
        dst = own_half + lo.to(tl.int64) * K
        for offset in tl.range((part % PARTS) * BLOCK_SIZE, size, PARTS * BLOCK_SIZE, num_stages=3):
            tl.store(dst + offset + o, tl.load(src + offset + o, mask=offset + o < size), mask=offset + o < size)
        if all_scales is not None:
            if part % PARTS == 0:
                copy_own_scales(scales, all_scales, lo, hi, row, K, tile.SCALED)
        flush_stores(False)
        release_fence("sys")
        tl.atomic_add(ch.counters + ready, 1, sem=AFTER_FENCE, scope="sys")
        tl.atomic_add(ch.counters + tm, 1, sem=AFTER_FENCE, scope="gpu")


@jit
def pull_chunks(flat_desc, arena, base, own_half, all_scales, ch, offsets, ready, M, K, pid, pull, tile):
    """Pull all peers' shards into this rank's arena, beginning with the nearest peer. If scales are gathered, a program
    pulls the scales of its chunks before the chunks' rows. A program has the same number of blocks in every chunk,
    except that the blocks before the shard are left out of the first chunk, and the blocks after it out of the last."""
    BM: tl.constexpr = tile.BM
    W: tl.constexpr = ch.world
    PARTS: tl.constexpr = pull.PARTS
    SPLIT: tl.constexpr = pull.SPLIT
    BLOCK_SIZE: tl.constexpr = pull.ROWS * pull.COLS
    me = rank_of(ch)
    o = tl.arange(0, BLOCK_SIZE)
    GROUPS: tl.constexpr = pull.PULL_PROGRAMS // SPLIT
    lane = pid % SPLIT
    first_group = 0
    blocks = tl.cdiv(BM * K, SPLIT * BLOCK_SIZE)
    for j in range(1, W):
        s = (me + j) % W
        row = tl.load(offsets + s)
        rows_n = tl.load(offsets + s + 1) - row
        first_tile, chunks = chunks_of(row, rows_n, BM)
        wait_until(counters_of(ch, s) + ready, calls_of(ch) * (chunks * PARTS + 1), ch.guard, -1, s, "sys")
        granule = tl.load(arena.granules + s)
        src = address_of(arena.addresses, s, own_half.dtype.element_ty) + base
        # The programs that pull the chunks of a short shard differ from the programs that pulled the previous shard.
        start = (first_group + pid // SPLIT) % GROUPS
        first_group += GROUPS - chunks % GROUPS
        end_tile = first_tile + chunks
        first_tile += start
        if all_scales is not None:
            if lane == 0:
                src_scales = gathered_scales(arena, s, base, M, K, BM)
                pull_scales(
                    src_scales, all_scales, row, rows_n, first_tile, end_tile, GROUPS, K, BM, tile.SCALED, pull.STAGES
                )
        last = tl.cdiv(chunks - start, GROUPS) - 1  # the last of this program's chunks, counted from 0; -1 if none
        last_tile = first_tile + last * GROUPS
        begin = (rows_of(first_tile, row, rows_n, BM)[0] - first_tile * BM) * K // (SPLIT * BLOCK_SIZE)
        size = (rows_of(last_tile, row, rows_n, BM)[1] - last_tile * BM) * K
        end = last * blocks + tl.cdiv(size, SPLIT * BLOCK_SIZE)
        for q in tl.range(begin, end, num_stages=pull.STAGES):
            tm = first_tile + q // blocks * GROUPS
            lo, hi = rows_of(tm, row, rows_n, BM)
            offset = (tm * BM).to(tl.int64) * K
            element = (q % blocks * SPLIT + lane) * BLOCK_SIZE
            i = element + o
            ok = (i >= (lo - tm * BM) * K) & (i < (hi - tm * BM) * K)
            if pull.BULK:
                block = flat_desc.load([granule, ((base + offset + element) // pull.COLS).to(tl.int32), 0])
                block = tl.reshape(block, (BLOCK_SIZE,))
            else:
                block = tl.load(src + offset + i, mask=ok)
            tl.store(own_half + offset + i, block, mask=ok)
            if (q % blocks == blocks - 1) | (q == end - 1):
                flush_stores(False)
                tl.atomic_add(ch.counters + tm, PARTS // SPLIT, sem="release", scope="gpu")


@jit
def compute_tiles(x_desc, a_desc, w_descs, out_desc, bias, scales, gathered, ch, pid, row, rows_n, M, N, K, product):
    """Compute the tiles of one GEMM program. The row tiles that contain only this rank's rows read x directly and wait
    for nothing. The other tiles follow, beginning with the nearest peer's rows; each tile waits until its rows have
    arrived. The last of them contains the rows before this rank's rows, which arrive last. This rank's shard has rows_n
    rows and begins at row `row`. `gathered` contains the row of a_desc that holds row 0 of the gathered activation, the
    address of the rows' scales, and the stride of these scales. w_descs are w_desc and w_half_desc. If w_half_desc is
    not None, the last round contains no tile of own rows."""
    first_row, all_scales, stride = gathered
    w_desc, w_half_desc = w_descs
    BM: tl.constexpr = product.tile.BM
    BN: tl.constexpr = product.tile.BN
    GROUP_M: tl.constexpr = product.tile.GROUP_M
    GEMM_PROGRAMS: tl.constexpr = product.GEMM_PROGRAMS
    GATED: tl.constexpr = product.GATED
    FLATTEN: tl.constexpr = product.FLATTEN
    tiles_m = tl.cdiv(M, BM)
    tiles_n = tl.cdiv(N, BN)
    first_own = tl.cdiv(row, BM)
    own_tiles = max(tl.where(row + rows_n == M, tiles_m, (row + rows_n) // BM) - first_own, 0)
    for t in tl.range(pid, own_tiles * tiles_n, GEMM_PROGRAMS, flatten=FLATTEN):
        tm, tn = grouped_tile(t, own_tiles, tiles_n, GROUP_M)
        out_row = (first_own + tm) * BM
        scales_of_tile = None
        if product.tile.SCALED:
            scales_of_tile = tile_scales(scales, scales.x, out_row - row, rows_n, K, product.tile.SCALED)
        product_tile(
            x_desc, w_desc, out_desc, bias, scales_of_tile, out_row - row, out_row, tn * BN, N, K, product.tile, GATED
        )
    own_rounds = tl.cdiv(max(own_tiles * tiles_n - pid, 0), GEMM_PROGRAMS)
    start = pid + own_rounds * GEMM_PROGRAMS - own_tiles * tiles_n
    whole = tiles_m * tiles_n
    if w_half_desc is not None:
        whole = whole_tiles(tiles_m * tiles_n, GEMM_PROGRAMS)
    for t in tl.range(start, whole - own_tiles * tiles_n, GEMM_PROGRAMS, flatten=FLATTEN):
        tm, tn = grouped_tile(t, tiles_m - own_tiles, tiles_n, GROUP_M)
        tm = (tm + first_own + own_tiles) % tiles_m
        consumer_tile_wait(ch, tm, "gpu")
        scales_of_tile = None
        if product.tile.SCALED:
            begin = all_scales + (tm * BM).to(tl.int64) * stride
            scales_of_tile = TileScales(begin, scales.w, M - tm * BM, stride, 1)
        a_row = first_row + tm * BM
        product_tile(a_desc, w_desc, out_desc, bias, scales_of_tile, a_row, tm * BM, tn * BN, N, K, product.tile, GATED)
    if w_half_desc is not None:
        half = 2 * whole + pid
        w_half_desc = tiles_of(w_half_desc)
        # K > 0 is always true; without this test ptxas cannot infer it, and serialises wgmmas.
        if (half < 2 * tiles_m * tiles_n) & (K > 0):
            tm, tn = grouped_tile(half // 2 - own_tiles * tiles_n, tiles_m - own_tiles, tiles_n, GROUP_M)
            tm = (tm + first_own + own_tiles) % tiles_m
            col = tn * BN + half % 2 * (BN // 2)
            consumer_tile_wait(ch, tm, "gpu")
            acc = gemm_tile(
                a_desc, w_half_desc, first_row + tm * BM, col, K, BM, BN // 2, product.tile.BK, product.tile.TRANS_B
            )
            store_half_tile(out_desc, acc, bias, tm * BM, col, N, BM, BN // 2, GATED)


# This kernel and `copied_gemm` need no guarded loads, because a tile waits before its own K loop. Its loads stay after
# the wait whether or not the tile loop is flattened. Guarded loads would add 1 to 3 instructions to a loop of 435 to
# 551 (bf16), and 4 to 9 to a loop of 818 to 1,006 (8 bits by row), in the SASS of Triton 3.6 for sm_90a (2026-11).
@jit(do_not_specialize=("M",), guard_loads=False)
def all_gather_gemm(
    x, x_desc, arena_desc, flat_desc, w_desc, w_half_desc, out_desc, bias, scales, arena, offsets, ch, M, N, K, how
):
    """Compute out_desc [M, N] = all_gather(x) [M, K] @ w_desc [N, K]^T + bias [N] (or None).

    x [m_r, K] is this rank's shard, and x_desc is its descriptor. offsets, int32 [world + 1], contains the first row of
    each rank's shard. A half of the arena (`transport.memory.Halves`) holds the gathered [M, K]. arena_desc describes
    this rank's arena as [.., K], and flat_desc the arenas of all ranks as [granule, row, COLS] in [1, ROWS, COLS]
    blocks. With TRANS_B, w_desc is [K, N], and with GATED, out_desc is [M, about N / 2] (see `store_tile`). w_half_desc
    describes the same as w_desc in blocks of half as many columns of the result, if halves of tiles are computed in the
    last round (`whole_tiles`), and is otherwise None. scales is None, or the `Scales` of 8-bit operands, which contain
    the scales of this rank's rows of x. Scales by row and by block are gathered too, and are stored after the rows. how
    is a `Gathering`. The channel has a counter for each row tile, then `ready`, on which a rank notifies its peers."""
    x_desc, w_desc, out_desc = tiles_of(x_desc), tiles_of(w_desc), tiles_of(out_desc)
    w_descs = w_desc, w_half_desc
    arena_desc, flat_desc = tiles_of(arena_desc), tiles_of(flat_desc)
    PULL_PROGRAMS: tl.constexpr = how.pull.PULL_PROGRAMS
    PROGRAMS: tl.constexpr = PULL_PROGRAMS + how.product.GEMM_PROGRAMS
    pid = tl.program_id(0)
    # Rows are whole 16-byte words. Without this hint the compiler generates narrow loads and no pipeline.
    ELEMENTS: tl.constexpr = 128 // x.dtype.element_ty.primitive_bitwidth
    K = K // ELEMENTS * ELEMENTS
    half = arena.half // ELEMENTS * ELEMENTS
    me = rank_of(ch)
    base = (tl.load(arena.epoch) & 1).to(tl.int64) * half
    row = tl.load(offsets + me)
    rows_n = tl.load(offsets + me + 1) - row
    own_half = address_of(arena.addresses, me, x.dtype.element_ty) + base
    ready = tl.cdiv(M, how.product.tile.BM)
    all_scales = None
    if how.product.tile.SCALED > BY_TENSOR:  # with BY_TENSOR, all rows of all ranks share one scale
        all_scales = gathered_scales(arena, me, base, M, K, how.product.tile.BM)
    copy_own_chunks(
        x, own_half, scales, all_scales, ch, ready, row, rows_n, K, pid, how.pull, how.product.tile, PROGRAMS
    )
    if pid < PULL_PROGRAMS:
        pull_chunks(
            flat_desc, arena, base, own_half, all_scales, ch, offsets, ready, M, K, pid, how.pull, how.product.tile
        )
    else:
        pid -= PULL_PROGRAMS
        first_row = (base // K).to(tl.int32)
        gathered = first_row, 0, 0
        if all_scales is not None:
            gathered = first_row, all_scales, scales_stride(K, how.product.tile.SCALED)
        elif how.product.tile.SCALED:
            gathered = first_row, scales.x, 0
        compute_tiles(
            x_desc, arena_desc, w_descs, out_desc, bias, scales, gathered, ch, pid, row, rows_n, M, N, K, how.product
        )
    end_call(ch, arena.epoch, PROGRAMS)


@jit(do_not_specialize=("M",), guard_loads=False)
def copied_gemm(
    x_desc, gathered_desc, w_desc, w_half_desc, out_desc, bias, scales, all_scales, epoch, ch, offsets, M, N, K, product
):
    """Compute the GEMM of `all_gather_gemm`. The kernel reads the tiles of this rank's rows from x_desc [m_r, K], and
    the other tiles from gathered_desc [M, K], which a copy engine fills. The copy engine sets channel r after it has
    copied the rows of rank r, beginning with the nearest peer, so a tile waits only for the rank whose rows come last.
    This rank's rows are complete when the kernel starts. all_scales is None, or the scales of all rows, which are
    copied like the rows. For a scale by tensor, all_scales is scales.x."""
    x_desc, w_desc, out_desc = tiles_of(x_desc), tiles_of(w_desc), tiles_of(out_desc)
    gathered_desc, w_descs = tiles_of(gathered_desc), (w_desc, w_half_desc)
    me = rank_of(ch)
    pid = tl.program_id(0)
    row = tl.load(offsets + me)
    rows_n = tl.load(offsets + me + 1) - row
    gathered = 0, 0, 0
    if product.tile.SCALED > BY_TENSOR:
        gathered = 0, all_scales, scales_in_row(K, product.tile.SCALED)
    elif product.tile.SCALED:
        gathered = 0, all_scales, 0
    compute_tiles(
        x_desc, gathered_desc, w_descs, out_desc, bias, scales, gathered, ch, pid, row, rows_n, M, N, K, product
    )
    end_call(ch, epoch, product.GEMM_PROGRAMS)
