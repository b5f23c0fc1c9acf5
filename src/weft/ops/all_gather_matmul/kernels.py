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

from ...compute.gemm import Tile, gemm_tile, grouped_tile, store_tile
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


@jit
def copy_own_chunks(
    x,
    mine,
    ch,
    ready,
    rows_lo,
    rows_n,
    first_channel,
    K,
    pid,
    pull,
    PROGRAMS: tl.constexpr,
    CHUNK: tl.constexpr,
):
    """Copy parts of the own shard to the arena, spread over all programs. A part is counted once for the peers and once
    for the GEMM."""
    PARTS: tl.constexpr = pull.PARTS
    BLOCK: tl.constexpr = pull.ROWS * pull.COLS
    o = tl.arange(0, BLOCK)
    if pid == 0:  # so that even an empty shard is heard of
        tl.atomic_add(ready, 1, sem="release", scope="sys")
    for part in range(pid, tl.cdiv(rows_n, CHUNK) * PARTS, PROGRAMS):
        chunk = part // PARTS
        size = min(CHUNK, rows_n - chunk * CHUNK) * K
        src = x + (chunk * CHUNK).to(tl.int64) * K
        dst = mine + (rows_lo + chunk * CHUNK).to(tl.int64) * K
        for at in tl.range((part % PARTS) * BLOCK, size, PARTS * BLOCK, num_stages=3):
            tl.store(dst + at + o, tl.load(src + at + o, mask=at + o < size), mask=at + o < size)
        flush_stores(False)
        release_fence("sys")
        tl.atomic_add(ready, 1, sem="relaxed", scope="sys")
        tl.atomic_add(ch.counters + first_channel + chunk, 1, sem="relaxed", scope="gpu")


@jit
def pull_chunks(flat_desc, arena, base, mine, ch, shards, K, pid, pull, CHUNK: tl.constexpr):
    """Pull all peers' shards into the own arena, nearest peer first."""
    W: tl.constexpr = ch.world
    PARTS: tl.constexpr = pull.PARTS
    SPLIT: tl.constexpr = pull.SPLIT
    BLOCK: tl.constexpr = pull.ROWS * pull.COLS
    me = rank_of(ch)
    o = tl.arange(0, BLOCK)
    GROUPS: tl.constexpr = pull.PULLERS // SPLIT
    lane = pid % SPLIT
    ready = tl.load(shards.channels + W)
    turns = 0
    iters = tl.cdiv(CHUNK * K, SPLIT * BLOCK)
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
        for q in tl.range(0, tl.cdiv(chunks - start, GROUPS) * iters, num_stages=pull.STAGES):
            chunk = q // iters * GROUPS + start
            at = (row + chunk * CHUNK).to(tl.int64) * K
            e = (q % iters * SPLIT + lane) * BLOCK
            size = min(CHUNK, rows_n - chunk * CHUNK) * K
            if pull.BULK:
                block = tl.reshape(flat_desc.load([granule, ((base + at + e) // pull.COLS).to(tl.int32), 0]), (BLOCK,))
            else:
                block = tl.load(src + at + e + o, mask=e + o < size)
            tl.store(mine + at + e + o, block, mask=e + o < size)
            if q % iters == iters - 1:
                flush_stores(False)
                tl.atomic_add(ch.counters + first + chunk, PARTS // SPLIT, sem="release", scope="gpu")


@jit
def gated_tiles(x_desc, a_desc, w_desc, out_desc, bias, ch, worker, own, row, first_row, M, N, K, product):
    """Compute one worker's tiles: the `own` row tiles straight from x, which wait for nothing, then the others',
    nearest peer first, each once its rows are there. The own rows start at `row`; row 0 of the gathered activation is
    row `first_row` of a_desc."""
    BM: tl.constexpr = product.tile.BM
    BN: tl.constexpr = product.tile.BN
    BK: tl.constexpr = product.tile.BK
    GROUP_M: tl.constexpr = product.tile.GROUP_M
    WORKERS: tl.constexpr = product.WORKERS
    GATED: tl.constexpr = product.GATED
    FLATTEN: tl.constexpr = product.FLATTEN
    TRANS_B: tl.constexpr = product.tile.TRANS_B
    tiles_m = tl.cdiv(M, BM)
    tiles_n = tl.cdiv(N, BN)
    for t in tl.range(worker, own * tiles_n, WORKERS, flatten=FLATTEN):
        tm, tn = grouped_tile(t, own, tiles_n, GROUP_M)
        acc = gemm_tile(x_desc, w_desc, tm * BM, tn * BN, K, BM, BN, BK, TRANS_B)
        store_tile(out_desc, acc, bias, row + tm * BM, tn * BN, N, BM, BN, GATED)
    turns = tl.cdiv(max(own * tiles_n - worker, 0), WORKERS)
    for t in tl.range(worker + turns * WORKERS - own * tiles_n, (tiles_m - own) * tiles_n, WORKERS, flatten=FLATTEN):
        tm, tn = grouped_tile(t, tiles_m - own, tiles_n, GROUP_M)
        tm = (tm + row // BM + own) % tiles_m
        consumer_tile_wait(ch, tm, "gpu")
        acc = gemm_tile(a_desc, w_desc, first_row + tm * BM, tn * BN, K, BM, BN, BK, TRANS_B)
        store_tile(out_desc, acc, bias, tm * BM, tn * BN, N, BM, BN, GATED)


@jit(do_not_specialize=("own", "M"))
def all_gather_gemm(
    x, x_desc, arena_desc, flat_desc, w_desc, out_desc, bias, arena, shards, ch, own, M, N, K, pull, product
):
    """x [m_r, K] own shard, x_desc the same; own: its row tiles if they are whole tiles of the product, else 0; a half
    of the arena (`transport.memory.Halves`) holds the gathered [M, K]; arena_desc: the own arena as [.., K]; flat_desc:
    every rank's as [granule, row, COLS] in [1, ROWS, COLS] blocks; w_desc [N, K], or [K, N] (TURNED); bias [N] or None;
    out_desc [M, N], or [M, about N / 2] (GATED, see `store_tile`). A chunk is a tile's rows."""
    x_desc, w_desc, out_desc = tiles_of(x_desc), tiles_of(w_desc), tiles_of(out_desc)
    arena_desc, flat_desc = tiles_of(arena_desc), tiles_of(flat_desc)
    CHUNK: tl.constexpr = product.tile.BM
    PULLERS: tl.constexpr = pull.PULLERS
    PROGRAMS: tl.constexpr = PULLERS + product.WORKERS
    W: tl.constexpr = ch.world
    pid = tl.program_id(0)
    # Rows are whole 16-byte words; a compiler that does not know makes narrow loads and no pipeline.
    K = K // 8 * 8
    half = arena.half // 8 * 8
    me = rank_of(ch)
    base = (tl.load(arena.turn) & 1).to(tl.int64) * half
    row = tl.load(shards.offsets + me)
    rows_n = tl.load(shards.offsets + me + 1) - row
    mine = address_of(arena.addresses, me, x.dtype.element_ty) + base
    ready = ch.counters + tl.load(shards.channels + W)
    copy_own_chunks(x, mine, ch, ready, row, rows_n, tl.load(shards.channels + me), K, pid, pull, PROGRAMS, CHUNK)
    if pid < PULLERS:
        pull_chunks(flat_desc, arena, base, mine, ch, shards, K, pid, pull, CHUNK)
    else:
        worker = pid - PULLERS
        first_row = (base // K).to(tl.int32)
        gated_tiles(x_desc, arena_desc, w_desc, out_desc, bias, ch, worker, own, row, first_row, M, N, K, product)
    end_call(ch, arena.turn, PROGRAMS)


@jit(do_not_specialize=("own", "M"))
def copied_gemm(x_desc, gathered_desc, w_desc, out_desc, bias, turn, ch, offsets, own, M, N, K, product):
    """The GEMM alone, over x_desc [m_r, K] and, for the peers' rows, gathered_desc [M, K] that a copy engine fills:
    channel r stands for rank r's rows and is set by the copy engine behind them; the own rows are there when this
    starts."""
    x_desc, w_desc, out_desc = tiles_of(x_desc), tiles_of(w_desc), tiles_of(out_desc)
    gathered_desc = tiles_of(gathered_desc)
    me = rank_of(ch)
    pid = tl.program_id(0)
    if pid == 0:
        tl.atomic_add(ch.counters + me, 1, sem="relaxed", scope="gpu")
    row = tl.load(offsets + me)
    gated_tiles(x_desc, gathered_desc, w_desc, out_desc, bias, ch, pid, own, row, 0, M, N, K, product)
    end_call(ch, turn, product.WORKERS)
