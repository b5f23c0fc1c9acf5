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

Measured and dropped (docs/tried.md): chunks of all peers in turn instead of peer after peer, and pulling programs in a
small kernel of their own beside a GEMM on every SM.

Order of accesses. Peers read the arena half of call n; it is written again in call n + 2, and a rank reaches call n + 2
only after hearing from every peer in call n + 1, whose programs started after that peer's call n had ended. So two
halves and no barrier.
"""

import triton.language as tl

from ...compute.gemm import gemm_tile, grouped_tile, store_tile
from ...lang.channel import address_of, calls_of, counters_of, end_call, rank_of
from ...lang.intrinsics import release_fence, settle, wait_until
from ...lang.jit import jit
from ...lang.primitives import consumer_tile_wait


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
    arenas,
    flat_desc,
    granules,
    base,
    mine,
    ch,
    ready_channel,
    offsets,
    channel_base,
    K,
    pid,
    DTYPE: tl.constexpr,
    PULLERS: tl.constexpr,
    CHUNK: tl.constexpr,
    PARTS: tl.constexpr,
    SPLIT: tl.constexpr,
    BULK: tl.constexpr,
    ROWS: tl.constexpr,
    COLS: tl.constexpr,
    STAGES: tl.constexpr,
):
    """All peers' shards, nearest peer first. SPLIT pullers share a chunk, in blocks of ROWS x COLS elements. BULK: by
    TMA through `flat_desc`, for chunks that are whole blocks; else by ordinary asynchronous loads."""
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
def gated_tiles(
    x_desc,
    a_desc,
    w_desc,
    out_desc,
    bias,
    ch,
    worker,
    own,
    row,
    first_row,
    M,
    N,
    K,
    WORKERS: tl.constexpr,
    BM: tl.constexpr,
    BN: tl.constexpr,
    BK: tl.constexpr,
    GROUP_M: tl.constexpr,
    BIAS: tl.constexpr,
    GATED: tl.constexpr,
    FLATTEN: tl.constexpr,
):
    """One worker's tiles: the `own` row tiles straight from x, which wait for nothing, then the others', nearest peer
    first, each once its rows are there. The own rows start at `row`; row 0 of the gathered activation is row
    `first_row` of a_desc."""
    tiles_m = tl.cdiv(M, BM)
    tiles_n = tl.cdiv(N, BN)
    for t in tl.range(worker, own * tiles_n, WORKERS, flatten=FLATTEN):
        tm, tn = grouped_tile(t, own, tiles_n, GROUP_M)
        acc = gemm_tile(x_desc, w_desc, tm * BM, tn * BN, K, BM, BN, BK)
        store_tile(out_desc, acc, bias, row + tm * BM, tn * BN, N, BM, BN, BIAS, GATED)
    turns = tl.cdiv(max(own * tiles_n - worker, 0), WORKERS)
    for t in tl.range(worker + turns * WORKERS - own * tiles_n, (tiles_m - own) * tiles_n, WORKERS, flatten=FLATTEN):
        tm, tn = grouped_tile(t, tiles_m - own, tiles_n, GROUP_M)
        tm = (tm + row // BM + own) % tiles_m
        consumer_tile_wait(ch, tm, "gpu")
        acc = gemm_tile(a_desc, w_desc, first_row + tm * BM, tn * BN, K, BM, BN, BK)
        store_tile(out_desc, acc, bias, tm * BM, tn * BN, N, BM, BN, BIAS, GATED)


@jit(do_not_specialize=("ready_channel", "own", "half", "M"))
def all_gather_gemm(
    x, x_desc, arenas, flat_desc, granules, arena_desc, w_desc, out_desc, bias, turn, ch, offsets, channel_base,
    ready_channel, own, half, M, N, K,
    DTYPE: tl.constexpr, PULLERS: tl.constexpr, WORKERS: tl.constexpr, CHUNK: tl.constexpr, PARTS: tl.constexpr,
    SPLIT: tl.constexpr, BULK: tl.constexpr, ROWS: tl.constexpr, COLS: tl.constexpr, STAGES: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, GROUP_M: tl.constexpr, BIAS: tl.constexpr,
    GATED: tl.constexpr, FLATTEN: tl.constexpr,
):  # fmt: skip
    """x [m_r, K] own shard, x_desc the same; own: its row tiles if they are whole tiles of the product, else 0; arenas:
    address by rank of two halves of `half` elements, a half holding the gathered [M, K]; flat_desc: every rank's arena
    as [granule, row, COLS] in [1, ROWS, COLS] blocks, `granules` by rank; arena_desc: the own arena as [.., K]; w_desc
    [N, K]; out_desc [M, N], or [M, about N / 2] (GATED, see `store_tile`). PULLERS programs pull and WORKERS
    compute."""
    pid = tl.program_id(0)
    # Rows are whole 16-byte words; a compiler that does not know makes narrow loads and no pipeline.
    K = K // 8 * 8
    half = half // 8 * 8
    me = rank_of(ch)
    base = (tl.load(turn) & 1).to(tl.int64) * half
    row = tl.load(offsets + me)
    mine = address_of(arenas, me, DTYPE) + base
    copy_own_chunks(
        x,
        mine,
        ch,
        ch.counters + ready_channel,
        row,
        tl.load(offsets + me + 1) - row,
        tl.load(channel_base + me),
        K,
        pid,
        PULLERS + WORKERS,
        CHUNK,
        PARTS,
        ROWS * COLS,
    )
    if pid < PULLERS:
        pull_chunks(
            arenas,
            flat_desc,
            granules,
            base,
            mine,
            ch,
            ready_channel,
            offsets,
            channel_base,
            K,
            pid,
            DTYPE,
            PULLERS,
            CHUNK,
            PARTS,
            SPLIT,
            BULK,
            ROWS,
            COLS,
            STAGES,
        )
    else:
        gated_tiles(
            x_desc,
            arena_desc,
            w_desc,
            out_desc,
            bias,
            ch,
            pid - PULLERS,
            own,
            row,
            (base // K).to(tl.int32),
            M,
            N,
            K,
            WORKERS,
            BM,
            BN,
            BK,
            GROUP_M,
            BIAS,
            GATED,
            FLATTEN,
        )
    end_call(ch, turn, PULLERS + WORKERS)


@jit(do_not_specialize=("own", "M"))
def copied_gemm(
    x_desc,
    gathered_desc,
    w_desc,
    out_desc,
    bias,
    turn,
    ch,
    offsets,
    own,
    M,
    N,
    K,
    WORKERS: tl.constexpr,
    BM: tl.constexpr,
    BN: tl.constexpr,
    BK: tl.constexpr,
    GROUP_M: tl.constexpr,
    BIAS: tl.constexpr,
    GATED: tl.constexpr,
    FLATTEN: tl.constexpr,
):
    """The GEMM alone, over x_desc [m_r, K] and, for the peers' rows, gathered_desc [M, K] that a copy engine fills:
    channel r stands for rank r's rows and is set by the copy engine behind them; the own rows are there when this
    starts."""
    me = rank_of(ch)
    pid = tl.program_id(0)
    if pid == 0:
        tl.atomic_add(ch.counters + me, 1, sem="relaxed", scope="gpu")
    gated_tiles(
        x_desc,
        gathered_desc,
        w_desc,
        out_desc,
        bias,
        ch,
        pid,
        own,
        tl.load(offsets + me),
        0,
        M,
        N,
        K,
        WORKERS,
        BM,
        BN,
        BK,
        GROUP_M,
        BIAS,
        GATED,
        FLATTEN,
    )
    end_call(ch, turn, WORKERS)
