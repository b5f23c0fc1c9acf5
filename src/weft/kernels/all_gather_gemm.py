"""All-gather + GEMM in one launch: a few programs pull the peers' shards, the others run a GEMM gated by chunk.

    own chunks   every program copies a part of the own shard into this rank's half of the arena, then counts up
                 `ready` (for the peers) and the chunk's channel (for the own GEMM)
    pullers      wait until a peer is ready, then pull its chunks through a deep asynchronous pipeline into the same
                 place of the own arena, nearest peer first, and count up each chunk's channel
    the rest     persistent GEMM over row tiles in the order in which the chunks arrive; a tile waits for its chunks

                 t -->
    pullers      | own | r+1 . . . | r+2 . . . | ...
    GEMM         | own | own tiles | r+1 tiles | ...

INTERLEAVE: chunk 0 of every peer, then chunk 1 of every peer, and so on, in pulling and in the GEMM's tile order, so that
at any time a rank reads from all peers and no peer is read by two ranks that drifted apart. For even shards only.

The pullers are programs of the same launch (ROLE both), or a launch of their own (ROLE pull, ROLE gemm) whose programs are
so small that they fit on the SMs beside the GEMM's: 48 KiB of shared memory, four warps. Then the GEMM keeps every SM, and
a chunk is split over so many pullers that it arrives a few microseconds after it was asked for.

Order of accesses. Peers read the arena half of call n; it is written again in call n + 2, and a rank reaches call n + 2
only after hearing from every peer in call n + 1, whose programs started after that peer's call n had ended. So two
halves and no barrier.
"""

import triton.language as tl

from ..lang.channel import address_of, calls_of, counters_of, end_call, place_of, rank_of
from ..lang.intrinsics import release_fence, settle, wait_until
from ..lang.jit import jit
from ..lang.primitives import consumer_tile_wait
from .gemm import BOTH, GEMM, PULL, gemm_tile, grouped_tile, store_tile


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
    PROGRAMS: tl.constexpr,
    CHUNK: tl.constexpr,
    PARTS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Parts of the own shard, spread over all programs. A part is counted once for the peers and once for the GEMM."""
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
        settle(False)
        release_fence("sys")
        tl.atomic_add(ready, 1, sem="relaxed", scope="sys")
        tl.atomic_add(ch.counters + first_channel + chunk, 1, sem="relaxed", scope="gpu")


@jit
def pull_chunks(
    arenas, flat_desc, granules, base, mine, ch, ready_channel, offsets, channel_base, K, pid,
    DTYPE: tl.constexpr, PULLERS: tl.constexpr, CHUNK: tl.constexpr, PARTS: tl.constexpr, SPLIT: tl.constexpr,
    BULK: tl.constexpr, ROWS: tl.constexpr, COLS: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """All peers' shards, nearest peer first. SPLIT pullers share a chunk, in blocks of ROWS x COLS elements. BULK: by TMA
    through `flat_desc`, for chunks that are whole blocks; else by ordinary asynchronous loads."""
    W: tl.constexpr = ch.world
    BLOCK: tl.constexpr = ROWS * COLS
    me = rank_of(ch)
    o = tl.arange(0, BLOCK)
    GROUPS: tl.constexpr = PULLERS // SPLIT
    lane = pid % SPLIT
    turns = 0
    iters = tl.cdiv(CHUNK * K, SPLIT * BLOCK)
    for j in range(1, W):
        s = (me + j) % W
        row = tl.load(offsets + s)
        rows_n = tl.load(offsets + s + 1) - row
        chunks = tl.cdiv(rows_n, CHUNK)
        wait_until(counters_of(ch, s) + ready_channel, calls_of(ch) * (chunks * PARTS + 1), ch.guard, -1, s, "sys")
        first = tl.load(channel_base + s)
        granule = tl.load(granules + s)
        src = address_of(arenas, s, DTYPE) + base
        start = (turns + pid // SPLIT) % GROUPS  # a short shard's chunks go to other pullers than the last shard's
        turns += GROUPS - chunks % GROUPS
        for q in tl.range(0, tl.cdiv(chunks - start, GROUPS) * iters, num_stages=STAGES):
            chunk = q // iters * GROUPS + start
            at = (row + chunk * CHUNK).to(tl.int64) * K
            e = (q % iters * SPLIT + lane) * BLOCK
            size = min(CHUNK, rows_n - chunk * CHUNK) * K
            if BULK:
                block = tl.reshape(flat_desc.load([granule, ((base + at + e) // COLS).to(tl.int32), 0]), (BLOCK,))
            else:
                block = tl.load(src + at + e + o, mask=e + o < size)
            tl.store(mine + at + e + o, block, mask=e + o < size)
            if q % iters == iters - 1:
                settle(False)
                tl.atomic_add(ch.counters + first + chunk, PARTS // SPLIT, sem="release", scope="gpu")


@jit
def pull_interleaved(
    flat_desc, granules, base, mine, ch, ready_channel, rows_n, K, pid,
    PULLERS: tl.constexpr, CHUNK: tl.constexpr, PARTS: tl.constexpr, SPLIT: tl.constexpr,
    ROWS: tl.constexpr, COLS: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """All peers' shards of rows_n rows each, chunk by chunk over the peers, in whole blocks by TMA."""
    W: tl.constexpr = ch.world
    BLOCK: tl.constexpr = ROWS * COLS
    GROUPS: tl.constexpr = PULLERS // SPLIT
    me = rank_of(ch)
    o = tl.arange(0, BLOCK)
    chunks = rows_n // CHUNK
    places = ()
    for i in tl.static_range(W):
        places = places + (tl.load(granules + i),)
    for j in range(1, W):
        s = (me + j) % W
        wait_until(counters_of(ch, s) + ready_channel, calls_of(ch) * (chunks * PARTS + 1), ch.guard, -1, s, "sys")
    iters = CHUNK * K // (SPLIT * BLOCK)
    for q in tl.range(0, tl.cdiv((W - 1) * chunks - pid // SPLIT, GROUPS) * iters, num_stages=STAGES):
        g = q // iters * GROUPS + pid // SPLIT
        s = (me + 1 + g % (W - 1)) % W
        chunk = s * chunks + g // (W - 1)
        e = chunk.to(tl.int64) * CHUNK * K + (q % iters * SPLIT + pid % SPLIT) * BLOCK
        block = flat_desc.load([place_of(places, s, W), ((base + e) // COLS).to(tl.int32), 0])
        tl.store(mine + e + o, tl.reshape(block, (BLOCK,)))
        if q % iters == iters - 1:
            settle(False)
            tl.atomic_add(ch.counters + chunk, PARTS // SPLIT, sem="release", scope="gpu")


@jit
def interleaved_tile(tm, own, me, W: tl.constexpr):
    """Row tile number tm when a rank takes its `own` row tiles first, then the peers' in turn."""
    u = tm - own
    peer = (me + 1 + u % (W - 1)) % W
    return tl.where(tm < own, me * own + tm, peer * own + u // (W - 1))


@jit
def all_gather_gemm(
    x, arenas, flat_desc, granules, arena_desc, w_desc, out_desc, bias, turn, ch, offsets, channel_base, ready_channel,
    half, M, N, K,
    DTYPE: tl.constexpr, ROLE: tl.constexpr, PULLERS: tl.constexpr, WORKERS: tl.constexpr, CHUNK: tl.constexpr, PARTS: tl.constexpr, SPLIT: tl.constexpr,
    BULK: tl.constexpr, INTERLEAVE: tl.constexpr, ROWS: tl.constexpr, COLS: tl.constexpr, STAGES: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, GROUP_M: tl.constexpr, BIAS: tl.constexpr, GATED: tl.constexpr, FLATTEN: tl.constexpr,
):  # fmt: skip
    """x [m_r, K] own shard; arenas: address by rank of two halves of `half` elements, a half holding the gathered [M, K];
    flat_desc: every rank's arena as [granule, row, COLS] in [1, ROWS, COLS] blocks, `granules` by rank; arena_desc: the
    own arena as [.., K]; w_desc [N, K]; out_desc [M, N], or [M, about N / 2] (GATED, see `store_tile`). PULLERS programs
    pull and WORKERS compute, in one launch or two."""
    W: tl.constexpr = ch.world
    pid = tl.program_id(0)
    # Rows are whole 16-byte words; a compiler that does not know makes narrow loads and no pipeline.
    K = K // 8 * 8
    half = half // 8 * 8
    me = rank_of(ch)
    base = (tl.load(turn) % 2).to(tl.int64) * half
    row = tl.load(offsets + me)
    if ROLE != GEMM:
        mine = address_of(arenas, me, DTYPE) + base
        COPIERS: tl.constexpr = PULLERS + WORKERS if ROLE == BOTH else PULLERS
        copy_own_chunks(
            x, mine, ch, ch.counters + ready_channel, row, tl.load(offsets + me + 1) - row, tl.load(channel_base + me), K, pid,
            COPIERS, CHUNK, PARTS, ROWS * COLS,
        )  # fmt: skip
        if ROLE == PULL or pid < PULLERS:
            if INTERLEAVE:
                pull_interleaved(
                    flat_desc, granules, base, mine, ch, ready_channel, M // W, K, pid,
                    PULLERS, CHUNK, PARTS, SPLIT, ROWS, COLS, STAGES,
                )  # fmt: skip
            else:
                pull_chunks(
                    arenas, flat_desc, granules, base, mine, ch, ready_channel, offsets, channel_base, K, pid,
                    DTYPE, PULLERS, CHUNK, PARTS, SPLIT, BULK, ROWS, COLS, STAGES,
                )  # fmt: skip
    if ROLE != PULL:
        worker = pid - PULLERS if ROLE == BOTH else pid
        if ROLE == GEMM or worker >= 0:
            tiles_m = tl.cdiv(M, BM)
            tiles_n = tl.cdiv(N, BN)
            first_row = (base // K).to(tl.int32)
            for t in tl.range(worker, tiles_m * tiles_n, WORKERS, flatten=FLATTEN):
                tm, tn = grouped_tile(t, tiles_m, tiles_n, GROUP_M)
                if INTERLEAVE:
                    tm = interleaved_tile(tm, tiles_m // W, me, W)
                else:
                    tm = (tm + row // BM) % tiles_m
                consumer_tile_wait(ch, tm, "gpu")
                acc = gemm_tile(arena_desc, w_desc, first_row + tm * BM, tn * BN, K, BM, BN, BK)
                store_tile(out_desc, acc, bias, tm * BM, tn * BN, N, BM, BN, BIAS, GATED)
    end_call(ch, turn, PULLERS + WORKERS)
