"""All-gather + GEMM in one launch: a few programs pull the peers' shards, the others run a GEMM gated by chunk.

    own chunks   every program copies a part of the own shard into this rank's half of the arena, then counts up
                 `ready` (for the peers) and the chunk's channel (for own tiles that span shards)
    pullers      wait until a peer is ready, then pull its chunks through a deep asynchronous pipeline into the same
                 place of the own arena, nearest peer first, and count up each chunk's channel
    the rest     persistent GEMM: the own rows straight from x, then row tiles in the order in which the chunks arrive,
                 each once its chunks are there

                 t -->
    pullers      | own | r+1 . . . | r+2 . . . | ...
    GEMM         | own | own tiles | r+1 tiles | ...

Or (`copied_gemm`) a copy engine pulls the shards, one after the other, and every SM computes.

Measured and dropped (docs/design-notes.md): chunks of all peers in turn, not peer after peer, and pulling programs in a
small kernel of their own beside a GEMM on every SM.

Order of accesses. Peers read the arena half of call n; it is written again in call n + 2, and a rank reaches call n + 2
only after hearing from every peer in call n + 1, whose programs started after that peer's call n had ended. So two
halves and no barrier.
"""

from typing import NamedTuple

import torch
import triton.language as tl

from ...compute.gemm import Tile, grouped_tile
from ...compute.scaled_gemm import BLOCK, BY_BLOCK, BY_TENSOR, TileScales, product_tile, tile_scales
from ...lang.channel import address_of, calls_of, counters_of, end_call, rank_of
from ...lang.descriptors import tiles_of
from ...lang.intrinsics import flush_stores, release_fence, wait_until
from ...lang.jit import jit
from ...lang.primitives import consumer_tile_wait


class Shards(NamedTuple):
    """Two tables by rank, with one entry more: the first row of each rank's shard, and the first channel of its chunks.
    The last entry of `channels` is the channel behind all chunks, which says that a rank is ready."""

    offsets: torch.Tensor  # int32 [world + 1]
    channels: torch.Tensor  # int32 [world + 1]


class Pull(NamedTuple):
    """PULLERS programs pull, SPLIT of them share a chunk, in blocks of ROWS x COLS elements, STAGES of them under way.
    An own chunk is copied in PARTS parts. BULK: by TMA, for chunks that are whole blocks; else by ordinary asynchronous
    loads."""

    PULLERS: tl.constexpr
    PARTS: tl.constexpr
    SPLIT: tl.constexpr
    BULK: tl.constexpr
    ROWS: tl.constexpr
    COLS: tl.constexpr
    STAGES: tl.constexpr


class Product(NamedTuple):
    """WORKERS programs compute, GATED as in `store_tile`. FLATTEN: a tile's epilogue under the next one's loads."""

    tile: Tile
    WORKERS: tl.constexpr
    GATED: tl.constexpr
    FLATTEN: tl.constexpr


class Gathering(NamedTuple):
    """How programs pull, and what they compute."""

    pull: Pull
    product: Product


WORD = tl.constexpr(4)  # float32 in 16 bytes, of which the scales of a gathered row are whole ones
WORDS = tl.constexpr(2048)  # float32 that a program copies at a time


@jit
def scales_in_row(K, SCALED: tl.constexpr):
    """How many scales a row of x has."""
    count = 1
    if SCALED == BY_BLOCK:
        count = K // BLOCK
    return count


@jit
def slot_of(K, SCALED: tl.constexpr):
    """float32 from the scales of a gathered row to those of the next one."""
    return tl.cdiv(scales_in_row(K, SCALED), WORD) * WORD


@jit
def gathered_scales(arena, rank, base, M, K, CHUNK: tl.constexpr):
    """Where the scales of all rows are in the half at element `base` of a rank's arena: behind [M, K] of 8 bits, M
    rounded up to whole tiles, which are loaded."""
    rows = tl.cdiv(M, CHUNK) * CHUNK
    return address_of(arena.addresses, rank, tl.float32) + (base + rows.to(tl.int64) * K) // 4


@jit
def copy_own_scales(scales, gathered, chunk, row, rows_n, K, CHUNK: tl.constexpr, SCALED: tl.constexpr):
    """Copy the scales of an own chunk, whose shard begins at gathered row `row`."""
    count = scales_in_row(K, SCALED)
    slot = slot_of(K, SCALED)
    first = chunk * CHUNK
    o = tl.arange(0, WORDS)
    words = min(CHUNK, rows_n - first) * count
    for word in range(0, words, WORDS):
        i = word + o
        at = (row + first + i // count).to(tl.int64) * slot + i % count
        values = tl.load(scales.x + first.to(tl.int64) * count + i, mask=i < words, other=0.0)
        tl.store(gathered + at, values, mask=i < words)


@jit
def pull_scales(
    theirs, mine, row, rows_n, chunk, step, K, CHUNK: tl.constexpr, SCALED: tl.constexpr, STAGES: tl.constexpr
):
    """Pull the scales of chunks `chunk`, `chunk + step`, .. of a shard of rows_n rows that begins at row `row`. They
    come in whole 16-byte words, and are there before the program releases rows of those chunks."""
    slot = slot_of(K, SCALED)
    pieces = tl.cdiv(CHUNK * slot, WORDS)
    o = tl.arange(0, WORDS)
    for q in tl.range(0, tl.cdiv(tl.cdiv(rows_n, CHUNK) - chunk, step) * pieces, num_stages=STAGES):
        first = (q // pieces * step + chunk) * CHUNK
        i = q % pieces * WORDS + o
        at = (row + first).to(tl.int64) * slot
        ok = i < min(CHUNK, rows_n - first) * slot
        tl.store(mine + at + i, tl.load(theirs + at + i, mask=ok), mask=ok)


@jit
def copy_own_chunks(
    x, mine, scales, gathered, ch, ready, rows_lo, rows_n, first_channel, K, pid, pull, tile, PROGRAMS: tl.constexpr
):
    """Copy parts of the own shard to the arena, spread over all programs, and the scales of a chunk with its first
    part. A part is counted once for the peers and once for the GEMM. gathered: where the scales of all rows are, or
    None."""
    CHUNK: tl.constexpr = tile.BM
    PARTS: tl.constexpr = pull.PARTS
    BLOCK_SIZE: tl.constexpr = pull.ROWS * pull.COLS
    o = tl.arange(0, BLOCK_SIZE)
    if pid == 0:  # so that even an empty shard is heard of
        tl.atomic_add(ready, 1, sem="release", scope="sys")
    for part in range(pid, tl.cdiv(rows_n, CHUNK) * PARTS, PROGRAMS):
        chunk = part // PARTS
        size = min(CHUNK, rows_n - chunk * CHUNK) * K
        src = x + (chunk * CHUNK).to(tl.int64) * K
        dst = mine + (rows_lo + chunk * CHUNK).to(tl.int64) * K
        for at in tl.range((part % PARTS) * BLOCK_SIZE, size, PARTS * BLOCK_SIZE, num_stages=3):
            tl.store(dst + at + o, tl.load(src + at + o, mask=at + o < size), mask=at + o < size)
        if gathered is not None:
            if part % PARTS == 0:
                copy_own_scales(scales, gathered, chunk, rows_lo, rows_n, K, CHUNK, tile.SCALED)
        flush_stores(False)
        release_fence("sys")
        tl.atomic_add(ready, 1, sem="relaxed", scope="sys")
        tl.atomic_add(ch.counters + first_channel + chunk, 1, sem="relaxed", scope="gpu")


@jit
def pull_chunks(flat_desc, arena, base, mine, gathered, ch, shards, M, K, pid, pull, tile):
    """Pull all peers' shards into the own arena, nearest peer first; the scales of a program's chunks before their
    rows, where they are gathered."""
    CHUNK: tl.constexpr = tile.BM
    W: tl.constexpr = ch.world
    PARTS: tl.constexpr = pull.PARTS
    SPLIT: tl.constexpr = pull.SPLIT
    BLOCK_SIZE: tl.constexpr = pull.ROWS * pull.COLS
    me = rank_of(ch)
    o = tl.arange(0, BLOCK_SIZE)
    GROUPS: tl.constexpr = pull.PULLERS // SPLIT
    lane = pid % SPLIT
    ready = tl.load(shards.channels + W)
    turns = 0
    iters = tl.cdiv(CHUNK * K, SPLIT * BLOCK_SIZE)
    for j in range(1, W):
        s = (me + j) % W
        row = tl.load(shards.offsets + s)
        rows_n = tl.load(shards.offsets + s + 1) - row
        chunks = tl.cdiv(rows_n, CHUNK)
        wait_until(counters_of(ch, s) + ready, calls_of(ch) * (chunks * PARTS + 1), ch.guard, -1, s, "sys")
        first = tl.load(shards.channels + s)
        granule = tl.load(arena.granules + s)
        src = address_of(arena.addresses, s, mine.dtype.element_ty) + base
        start = (turns + pid // SPLIT) % GROUPS  # a short shard's chunks go to other pullers than the last shard's
        turns += GROUPS - chunks % GROUPS
        if gathered is not None:
            if lane == 0:
                theirs = gathered_scales(arena, s, base, M, K, CHUNK)
                pull_scales(theirs, gathered, row, rows_n, start, GROUPS, K, CHUNK, tile.SCALED, pull.STAGES)
        for q in tl.range(0, tl.cdiv(chunks - start, GROUPS) * iters, num_stages=pull.STAGES):
            chunk = q // iters * GROUPS + start
            at = (row + chunk * CHUNK).to(tl.int64) * K
            e = (q % iters * SPLIT + lane) * BLOCK_SIZE
            size = min(CHUNK, rows_n - chunk * CHUNK) * K
            if pull.BULK:
                block = flat_desc.load([granule, ((base + at + e) // pull.COLS).to(tl.int32), 0])
                block = tl.reshape(block, (BLOCK_SIZE,))
            else:
                block = tl.load(src + at + e + o, mask=e + o < size)
            tl.store(mine + at + e + o, block, mask=e + o < size)
            if q % iters == iters - 1:
                flush_stores(False)
                tl.atomic_add(ch.counters + first + chunk, PARTS // SPLIT, sem="release", scope="gpu")


@jit
def gated_tiles(x_desc, a_desc, w_desc, out_desc, bias, scales, gathered, ch, worker, own, row, M, N, K, product):
    """Compute one worker's tiles: the `own` row tiles straight from x, which wait for nothing, then the others',
    nearest peer first, each once its rows are there. The own rows start at `row`. gathered: the row of a_desc at which
    row 0 of the gathered activation is, where the scales of its rows begin, and from one row's to the next."""
    first_row, all_scales, stride = gathered
    BM: tl.constexpr = product.tile.BM
    BN: tl.constexpr = product.tile.BN
    GROUP_M: tl.constexpr = product.tile.GROUP_M
    WORKERS: tl.constexpr = product.WORKERS
    GATED: tl.constexpr = product.GATED
    FLATTEN: tl.constexpr = product.FLATTEN
    tiles_m = tl.cdiv(M, BM)
    tiles_n = tl.cdiv(N, BN)
    for t in tl.range(worker, own * tiles_n, WORKERS, flatten=FLATTEN):
        tm, tn = grouped_tile(t, own, tiles_n, GROUP_M)
        of_tile = None
        if product.tile.SCALED:
            of_tile = tile_scales(scales, scales.x, tm * BM, own * BM, K, product.tile.SCALED)
        product_tile(
            x_desc, w_desc, out_desc, bias, of_tile, tm * BM, row + tm * BM, tn * BN, N, K, product.tile, GATED
        )
    turns = tl.cdiv(max(own * tiles_n - worker, 0), WORKERS)
    for t in tl.range(worker + turns * WORKERS - own * tiles_n, (tiles_m - own) * tiles_n, WORKERS, flatten=FLATTEN):
        tm, tn = grouped_tile(t, tiles_m - own, tiles_n, GROUP_M)
        tm = (tm + row // BM + own) % tiles_m
        consumer_tile_wait(ch, tm, "gpu")
        of_tile = None
        if product.tile.SCALED:
            begin = all_scales + (tm * BM).to(tl.int64) * stride
            of_tile = TileScales(begin, scales.w, M - tm * BM, stride, 1)
        product_tile(
            a_desc, w_desc, out_desc, bias, of_tile, first_row + tm * BM, tm * BM, tn * BN, N, K, product.tile, GATED
        )


@jit(do_not_specialize=("own", "M"))
def all_gather_gemm(
    x, x_desc, arena_desc, flat_desc, w_desc, out_desc, bias, scales, arena, shards, ch, own, M, N, K, how: Gathering
):
    """x [m_r, K] own shard, x_desc the same; own: its row tiles if they are whole tiles of the product, else 0; a half
    of the arena (`transport.memory.Halves`) holds the gathered [M, K]; arena_desc: the own arena as [.., K]; flat_desc:
    every rank's as [granule, row, COLS] in [1, ROWS, COLS] blocks; w_desc [N, K], or [K, N] (TRANS_B); bias [N] or
    None; out_desc [M, N], or [M, about N / 2] (GATED, see `store_tile`). A chunk is a tile's rows. scales: None, or the
    `Scales` of 8-bit operands, x's of the own rows; those of rows and blocks are gathered behind the rows."""
    x_desc, w_desc, out_desc = tiles_of(x_desc), tiles_of(w_desc), tiles_of(out_desc)
    arena_desc, flat_desc = tiles_of(arena_desc), tiles_of(flat_desc)
    PULLERS: tl.constexpr = how.pull.PULLERS
    PROGRAMS: tl.constexpr = PULLERS + how.product.WORKERS
    W: tl.constexpr = ch.world
    pid = tl.program_id(0)
    # Rows are whole 16-byte words; a compiler that does not know makes narrow loads and no pipeline.
    ELEMENTS: tl.constexpr = 128 // x.dtype.element_ty.primitive_bitwidth
    K = K // ELEMENTS * ELEMENTS
    half = arena.half // ELEMENTS * ELEMENTS
    me = rank_of(ch)
    base = (tl.load(arena.epoch) & 1).to(tl.int64) * half
    row = tl.load(shards.offsets + me)
    rows_n = tl.load(shards.offsets + me + 1) - row
    mine = address_of(arena.addresses, me, x.dtype.element_ty) + base
    ready = ch.counters + tl.load(shards.channels + W)
    gathered = None
    if how.product.tile.SCALED > BY_TENSOR:  # else one scale for all rows of all ranks
        gathered = gathered_scales(arena, me, base, M, K, how.product.tile.BM)
    channel = tl.load(shards.channels + me)
    copy_own_chunks(
        x, mine, scales, gathered, ch, ready, row, rows_n, channel, K, pid, how.pull, how.product.tile, PROGRAMS
    )
    if pid < PULLERS:
        pull_chunks(flat_desc, arena, base, mine, gathered, ch, shards, M, K, pid, how.pull, how.product.tile)
    else:
        worker = pid - PULLERS
        first_row = (base // K).to(tl.int32)
        where = first_row, 0, 0
        if gathered is not None:
            where = first_row, gathered, slot_of(K, how.product.tile.SCALED)
        elif how.product.tile.SCALED:
            where = first_row, scales.x, 0
        gated_tiles(
            x_desc, arena_desc, w_desc, out_desc, bias, scales, where, ch, worker, own, row, M, N, K, how.product
        )
    end_call(ch, arena.epoch, PROGRAMS)


@jit(do_not_specialize=("own", "M"))
def copied_gemm(
    x_desc, gathered_desc, w_desc, out_desc, bias, scales, all_scales, turn, ch, offsets, own, M, N, K, product
):
    """The GEMM alone, over x_desc [m_r, K] and, for the peers' rows, gathered_desc [M, K] that a copy engine fills:
    channel r stands for rank r's rows and is set by the copy engine behind them; the own rows are there when this
    starts. all_scales: None, or those of all rows, which come with them; by tensor scales.x."""
    x_desc, w_desc, out_desc = tiles_of(x_desc), tiles_of(w_desc), tiles_of(out_desc)
    gathered_desc = tiles_of(gathered_desc)
    me = rank_of(ch)
    pid = tl.program_id(0)
    if pid == 0:
        tl.atomic_add(ch.counters + me, 1, sem="relaxed", scope="gpu")
    row = tl.load(offsets + me)
    where = 0, 0, 0
    if product.tile.SCALED > BY_TENSOR:
        where = 0, all_scales, scales_in_row(K, product.tile.SCALED)
    elif product.tile.SCALED:
        where = 0, all_scales, 0
    gated_tiles(x_desc, gathered_desc, w_desc, out_desc, bias, scales, where, ch, pid, own, row, M, N, K, product)
    end_call(ch, turn, product.WORKERS)
