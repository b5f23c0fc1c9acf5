"""An MoE layer's experts in one persistent launch (FlashMoE, sections 3 and 4): programs draw tickets of one queue.

    movers       routes | tables | tokens to others | tickets | sums of wave 1 | tickets | sums of 2 | .. | own tokens
    the others          | tables | tickets ...                                                         | own tokens

    queue          GEMM 1 of wave 0 | of wave 1 | GEMM 2 of wave 1 | GEMM 1 of wave 2 | GEMM 2 of wave 2 | .. | GEMM 2
                   of wave 0

Tiles are those of the table, by the last wave of their rows (kernels.py has waves, table and the pieces that are put
together here). A wave's GEMM 2 comes right behind its GEMM 1, so that its sums travel under the next wave's GEMMs; wave
0, of the own tokens, whose sums go nowhere, is kept back for the end, where it covers the last wave's. Own tokens are
read where they are, not from the inbox; their sums, and those of all ranks, are the last thing that a program does.

Before all tickets every rank's routes go to every rank, and all programs of a rank together make its tables of them
(routing/kernels.py): each counts some blocks of routes, all meet, each places some, and all meet again.

Who waits for what. A tile of GEMM 1: for the rows of its waves, which a rank's movers send before they draw a ticket. A
tile of GEMM 2: for its row of tiles of GEMM 1, whose tickets are earlier. A mover sums a wave for its rank once it has
drawn a ticket behind all tiles that have rows of it. So a ticket waits for earlier tickets of this rank, or for what
another rank's movers did before all tickets; a mover's sums for tickets before the one that it holds; and the end for
tickets alone, and for other ranks' movers. Programs take their tickets in rising order: with all of them resident
something can always go on. There is no barrier between the phases.

Order of accesses, from call to call: as in kernels.py, but for the inbox, which is another. A rank that has sent a
wave's sums may still read other waves' rows, and where the next call is of another size a section of one rank lies
where another's was. So in this inbox rows are written behind the tables alone, for which a rank waits for the ids of
all others, and these for the end of their call before. `done`, tiles of GEMM 1 by row of tiles, has two halves, of
which one call fills one and clears the other.
"""

from typing import NamedTuple

import torch
import triton.language as tl

from ....compute.gemm import column_halves, gemm_tile, grouped_tile
from ....lang.channel import address_of, calls_of, end_call, rank_of, take_ticket
from ....lang.intrinsics import flush_stores, globaltimer, wait_until
from ....lang.jit import jit
from ....lang.primitives import channel_broadcast, channel_notify
from ..routing.kernels import clear_sources, count_block, place_units, push_routes
from ..routing.route_tables import Tables
from .kernels import (
    ROW_OF_TILES,
    add_bias,
    count_tiles,
    gathered_tile,
    send_rows,
    send_sums,
    shares_of,
    store_activated,
    store_sums,
    sum_of_ranks,
    weighted_sum,
)

# What a program's time goes to, waits not counted, and all of it: words of its line of stamps.
SENDING, INWARD, OUTWARD, SUMMING, ENDING, RUNNING = (tl.constexpr(i) for i in range(6))
STAMPS = tl.constexpr(6)


class LayerPlaces(NamedTuple):
    """The memory of one kind of call, as in kernels.py. ids, weights: those of all ranks [W, C, K], and their addresses
    by rank. made: the tables, of so many rows, whose slots these are; counts: as in `count_routes`; met: int32 [2],
    programs that met, in all calls. done: int32 [2, rows_of_tiles], counters int32 [W], of this GPU. stamps: int64
    [programs, STAMPS], or None: ns that each program has spent on what, of all calls."""

    inbox: torch.Tensor
    inboxes: torch.Tensor
    outbox: torch.Tensor
    outboxes: torch.Tensor
    y: torch.Tensor
    ids: torch.Tensor
    all_ids: torch.Tensor
    weights: torch.Tensor
    all_weights: torch.Tensor
    slots: torch.Tensor
    counts: torch.Tensor
    made: Tables
    rows: int
    met: torch.Tensor
    counters: torch.Tensor
    done: torch.Tensor
    rows_of_tiles: int
    movers: int
    turn: torch.Tensor
    stamps: torch.Tensor | None


class Given(NamedTuple):
    """What the caller gives. x, out [T, H]; shared likewise, or None; ids int32, weights float32 [T, K]; b13 [experts,
    N] and b2 [experts, H], or None."""

    x: torch.Tensor
    ids: torch.Tensor
    weights: torch.Tensor
    shared: torch.Tensor | None
    out: torch.Tensor
    b13: torch.Tensor | None
    b2: torch.Tensor | None


class LayerSizes(NamedTuple):
    """Sizes of a layer and plan. P, KP: H, K rounded up to a power of two; INNER: the inner size. GATED, ACT: as in
    `store_activated`. A block that is sent has SEND rows of P elements, and STAGES of them are under way; a block that
    is summed has SUM rows of COLS elements."""

    H: tl.constexpr
    INNER: tl.constexpr
    P: tl.constexpr
    K: tl.constexpr
    KP: tl.constexpr
    LOCAL: tl.constexpr
    BM: tl.constexpr
    BN: tl.constexpr
    BK: tl.constexpr
    GROUP_M: tl.constexpr
    WHOLE: tl.constexpr
    ACT: tl.constexpr
    GATED: tl.constexpr
    SEND: tl.constexpr
    STAGES: tl.constexpr
    SUM: tl.constexpr
    COLS: tl.constexpr


@jit
def stamp(at, what, began):
    """Add the time since `began` to this program's time for `what`."""
    if at.stamps is not None:
        word = at.stamps + tl.program_id(0) * STAMPS + what
        tl.store(word, tl.load(word) + globaltimer() - began)


@jit
def clock(at):
    """Return the time in ns, where times are taken, else 0."""
    return 0 if at.stamps is None else globaltimer()


@jit
def send_tokens(x, ids, at, ch, T, C, s):
    """Send a mover's share of the tokens, to rank me + 1 first. Counter j - 1 of rank me + j: its wave j, `movers`
    arrivals."""
    W: tl.constexpr = ch.world
    me = rank_of(ch)
    for j in range(1, W):
        rank = (me + j) % W
        to = address_of(at.inboxes, rank, x.dtype.element_ty) + (me * C).to(tl.int64) * s.H
        send_rows(x, ids, to, rank, T, tl.program_id(0), s.H, s.P, s.K, s.KP, s.LOCAL, s.SEND, s.STAGES, at.movers)
        channel_notify(ch, j - 1, rank, False)  # also of no rows: a wait counts calls


@jit
def share_routes(ids, weights, at, ch, T, C, s):
    """Share a mover's part of the own routes with all ranks. Counter 2 W - 2 + r of a rank: rank r has shared, `movers`
    arrivals."""
    W: tl.constexpr = ch.world
    push_routes(ids, weights, at.all_ids, at.all_weights, ch, 0, T * s.K, C * s.K, tl.program_id(0), at.movers, 256)
    channel_broadcast(ch, 2 * W - 2 + rank_of(ch), False)


@jit
def meet_here(at, ch, step: tl.constexpr):
    """Wait until all programs of this launch have come here: what any of them stored before, all see behind it."""
    flush_stores(False)
    tl.atomic_add(at.met + step, 1, sem="release", scope="gpu")
    wait_until(at.met + step, (tl.load(at.turn) + 1) * tl.num_programs(0), ch.guard, -1, rank_of(ch), "gpu")


@jit
def make_tables(at, ch, C, s, p):
    """Make the tables as `count_routes` and `place_routes` do, by all programs together. p: `Placing`."""
    W: tl.constexpr = ch.world
    pid = tl.program_id(0)
    P = tl.num_programs(0)
    me = rank_of(ch)
    padded = C * s.K
    per_source = tl.cdiv(padded, p.BLOCK)
    clear_sources(at.made.sources, at.rows, pid, P, p.BLOCK)
    for block in range(pid, W * per_source, P):
        source = (me - block // per_source + W) % W
        wait_until(ch.counters + 2 * W - 2 + source, calls_of(ch) * at.movers, ch.guard, block, source, "sys")
        i = block % per_source * p.BLOCK + tl.arange(0, p.BLOCK)
        count_block(at.ids, at.counts, source, block, i, padded, me * p.EL, p.EL, p.ELP)
    meet_here(at, ch, 0)
    place_units(at.ids, at.counts, at.made, me, ch.guard, padded, at.rows, p)
    meet_here(at, ch, 1)


@jit
def tiles_done(at, i):
    """The counter of this call for the tiles of GEMM 1 in row of tiles i."""
    return at.done + (tl.load(at.turn) & 1) * at.rows_of_tiles + i


@jit
def clear_tiles(at):
    """Clear a program's share of the next call's counters of tiles."""
    other = at.done + (1 - (tl.load(at.turn) & 1)) * at.rows_of_tiles
    for lo in range(tl.program_id(0) * 128, at.rows_of_tiles, tl.num_programs(0) * 128):
        i = lo + tl.arange(0, 128)
        tl.store(other + i, tl.zeros((128,), tl.int32), mask=i < at.rows_of_tiles)


@jit
def token_rows(x, inbox, source, me, C, K):
    """Return pointers to the rows of tokens s * C + t: of own tokens in x, of the others in the inbox."""
    own = source // C == me
    return tl.where(own, x + (source - me * C).to(tl.int64) * K, inbox + source.to(tl.int64) * K)


@jit
def tile_in(given, at, w_desc, hidden_desc, ch, i, tn, N, K, C, s):
    """Compute GEMM 1 and activation of one tile, whose rows are there."""
    K = K // 8 * 8  # rows are whole 16-byte words
    me = rank_of(ch)
    row = tl.load(at.made.tiles + 4 * i)
    expert = tl.load(at.made.tiles + 4 * i + 1)
    source = tl.load(at.made.sources + row + tl.arange(0, s.BM))[:, None]
    rows = token_rows(given.x, at.inbox, source, me, C, K)
    acc = gathered_tile(rows, source >= 0, w_desc, expert * N + tn * s.BN, K, s.BM, s.BN, s.BK, s.WHOLE)
    acc = add_bias(acc, given.b13, expert, tn * s.BN, N, s.BN)
    store_activated(hidden_desc, acc, row, tn * s.BN, s.BM, s.BN, s.ACT, s.GATED)
    flush_stores(True)
    tl.atomic_add(tiles_done(at, i), 1, sem="release", scope="gpu")


@jit
def tile_out(given, at, hidden_desc, w_desc, y_desc, ch, i, tn, tiles_n, N, K, s):
    """Compute GEMM 2 of one tile, whose rows of hidden are there."""
    tile = at.made.tiles + 4 * i
    row = tl.load(tile)
    expert = tl.load(tile + 1)
    acc = gemm_tile(hidden_desc, w_desc, row, expert * N + tn * s.BN, K, s.BM, s.BN, s.BK)
    acc = add_bias(acc, given.b2, expert, tn * s.BN, N, s.BN)
    left, right = column_halves(acc, s.BM, s.BN)
    y_desc.store([row, tn * s.BN], left.to(y_desc.dtype))
    y_desc.store([row, tn * s.BN + s.BN // 2], right.to(y_desc.dtype))
    shares = shares_of(tl.load(tile + 2), tl.load(tile + 3), tn, tiles_n, ch.world)
    count_tiles(at.counters, shares, ch.world)


@jit
def last_wave_with(tiles, first, end, wave, BLOCK: tl.constexpr):
    """Return the last wave of the tiles from `first` to `end` that have rows of `wave`; without one, `wave`."""
    last = wave
    for lo in range(first, end, BLOCK):
        i = lo + tl.arange(0, BLOCK)
        begins = tl.load(tiles + 4 * i + 2, mask=i < end, other=0x7FFF)
        ends = tl.load(tiles + 4 * i + 3, mask=i < end, other=0)
        last = tl.maximum(last, tl.max(tl.where(begins <= wave, ends, 0)))
    return last


@jit
def wait_for_wave(at, ch, wave):
    """Wait until all tiles with rows of a wave are done."""
    wait_until(at.counters + wave, tl.load(at.made.targets + wave) * ROW_OF_TILES, ch.guard, wave, rank_of(ch), "gpu")


@jit
def sum_wave(at, ch, wave, C, s):
    """Send a mover's share of the sums of one wave to its rank. Counter W - 1 + j - 1 of a rank: rank me + j has summed
    its tokens, `movers` arrivals."""
    W: tl.constexpr = ch.world
    me = rank_of(ch)
    rank = (me - wave + W) % W
    to = address_of(at.outboxes, rank, at.y.dtype.element_ty) + (me * C).to(tl.int64) * s.H
    send_sums(
        at.y,
        at.slots,
        at.weights,
        to,
        rank,
        C,
        tl.program_id(0),
        at.y.dtype.element_ty,
        s.H,
        s.COLS,
        s.K,
        s.SUM,
        at.movers,
    )
    channel_notify(ch, W + wave - 2, rank, False)  # also of no rows: it says too that this rank's inbox is read


@jit
def wait_for_sums(ch, at):
    """Wait until all other ranks' movers have sent their sums of the own tokens."""
    W: tl.constexpr = ch.world
    for j in range(1, W):
        source = (rank_of(ch) + j) % W
        wait_until(ch.counters + W + j - 2, calls_of(ch) * at.movers, ch.guard, -1, source, "sys")


@jit
def sum_own(ids, shared, out, at, ch, T, C, s):
    """Sum a program's share of the own tokens: their sums here, rounded as those that travel, plus the other ranks'."""
    W: tl.constexpr = ch.world
    PARTS: tl.constexpr = (s.H + s.COLS - 1) // s.COLS
    me = rank_of(ch)
    for block in range(tl.program_id(0), tl.cdiv(T, s.SUM) * PARTS, tl.num_programs(0)):
        t = block // PARTS * s.SUM + tl.arange(0, s.SUM)
        cols = block % PARTS * s.COLS + tl.arange(0, s.COLS)[None, :]
        own, _ = weighted_sum(at.y, at.slots, at.weights, (me * C + t) * s.K, t < T, cols, s.H, s.K, s.SUM, s.COLS)
        acc = sum_of_ranks(at.outbox, ids, t, T, C, cols, own, me, W, s.H, s.K, s.KP, s.LOCAL, 1, s.SUM, s.COLS)
        store_sums(acc, shared, out, t, T, cols, s.H)


@jit(do_not_specialize=("T", "C"))
def moe_layer(given, at, w13_desc, w2_desc, hidden_in, hidden_out, y_desc, ch, T, C, N, H, K, s, p):
    """given: `Given`, at: `LayerPlaces`, s: `LayerSizes`, p: `Placing`. w13_desc [experts N, H], w2_desc [experts H,
    K], K the inner size; hidden [rows, K] as it is stored (`store_activated`) and as it is read, [BM, BK]; y_desc
    [rows, H] in blocks [BM, BN / 2]. N, H, K: as integers, for the loops."""
    W: tl.constexpr = ch.world
    pid = tl.program_id(0)
    start = clock(at)
    clear_tiles(at)
    if pid < at.movers:
        share_routes(given.ids, given.weights, at, ch, T, C, s)
    make_tables(at, ch, C, s, p)
    if pid < at.movers:
        began = clock(at)
        send_tokens(given.x, given.ids, at, ch, T, C, s)
        stamp(at, SENDING, began)
    ticket = take_ticket(ch, 1)
    begin = 0
    for phase in range(0, 2 * W):
        wave = (phase - phase // 2) % W
        inward = (phase == 0) | ((phase % 2 == 1) & (phase < 2 * W - 1))
        first = tl.load(at.made.listed + wave - 1, mask=wave > 0, other=0)
        tiles = tl.load(at.made.listed + wave) - first
        tiles_n = tl.where(inward, tl.cdiv(N, s.BN), tl.cdiv(H, s.BN))
        end = begin + tiles * tiles_n
        if inward & (ticket < end):
            for j in range(1, wave + 1):
                source = (rank_of(ch) - j + W) % W
                wait_until(ch.counters + j - 1, calls_of(ch) * at.movers, ch.guard, first, source, "sys")
        while ticket < end:
            i, tn = grouped_tile(ticket - begin, tiles, tiles_n, s.GROUP_M)
            i += first
            if inward:
                began = clock(at)
                tile_in(given, at, w13_desc, hidden_in, ch, i, tn, N, H, C, s)
                stamp(at, INWARD, began)
            else:
                wait_until(tiles_done(at, i), tl.cdiv(N, s.BN), ch.guard, i, rank_of(ch), "gpu")
                began = clock(at)
                tile_out(given, at, hidden_out, w2_desc, y_desc, ch, i, tn, tiles_n, H, K, s)
                stamp(at, OUTWARD, began)
            ticket = take_ticket(ch, 1)
        begin = end
        if (pid < at.movers) & (inward == 0):  # of wave 0 there is none to send
            for j in range(1, wave + 1):
                if last_wave_with(at.made.tiles, first, tl.load(at.made.listed + W - 1), j, 256) == wave:
                    wait_for_wave(at, ch, j)
                    began = clock(at)
                    sum_wave(at, ch, j, C, s)
                    stamp(at, SUMMING, began)
    wait_for_wave(at, ch, 0)
    wait_for_sums(ch, at)
    began = clock(at)
    sum_own(given.ids, given.shared, given.out, at, ch, T, C, s)
    stamp(at, ENDING, began)
    stamp(at, RUNNING, start)
    end_call(ch, at.turn, tl.num_programs(0))
