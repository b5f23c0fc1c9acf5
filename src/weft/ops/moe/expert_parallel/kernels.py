"""An MoE layer's experts over ranks: rows go to the ranks of their experts, two grouped GEMMs, weighted sums come back.

    dispatch_rows     stores each token once in the inbox of every rank that has one of its experts: own rank first,
        then me + 1, ..
    grouped_gemm_in   rows of the inbox, gathered by the table of sources, @ w13, and the activation: tiles in the order
                      in which their rows come, each once the ranks have sent that it needs
    grouped_gemm_out  @ w2, tiles in the other order, so that what other ranks wait for is done first; counts finished
    tiles by wave
    combine_rows      another rank's token's rows summed, weighted, into the outbox of its rank, farthest rank first,
                      once their tiles are done
    sum_ranks         the token's rank sums its own rows, and what the other ranks sent

    side stream   | dispatch_rows                     |         | combine_rows                   |
    main stream   | tables        | grouped_gemm_in   | grouped_gemm_out           |               | sum_ranks

Wave j is what comes from rank me - j: a rank sends to me + j as its j-th, so waves come about in their order. The table
of tiles (int32 [.., 4]: first row, expert, first wave, last wave) is sorted by last wave.

Order of accesses. A rank begins a call when it has heard of the end of every rank's sums in the call before
(`sum_ranks` waits for all, at the end of the stream's work). A rank tells of its sums behind its first GEMM, the only
reader of its inbox. So nobody reads what `dispatch_rows` writes over. And a rank's outbox is written for rows that it
has sent in this call, behind its reads of the call before. So inbox and outbox need no halves, and every counter that
crosses ranks is counted by one rank alone.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl

from ....compute.gemm import FLUSHED, column_halves, grouped_tile, silu
from ....lang.channel import address_of, calls_of, end_call, rank_of
from ....lang.intrinsics import flush_stores, same_call, wait_until
from ....lang.jit import jit
from ....lang.primitives import channel_notify

# Activations: silu(gate) * up; gelu; (up + 1) * gate * sigmoid(1.702 gate), gate at most 7, up from -7 to 7.
SWIGLU, GELU, CLAMPED = tl.constexpr(0), tl.constexpr(1), tl.constexpr(2)

# What the tiles of a row of tiles count together, of however many columns: waits need not know how wide a layer is.
ROW_OF_TILES = tl.constexpr(4096)


class GatheredSizes(NamedTuple):
    """Sizes of `grouped_gemm_in`. ARRIVALS: arrivals at a wave's counter in a call; OTHERS: programs that count `turn`
    together with these. WHOLE as in `gathered_tile`, ACT, GATED as in `store_activated`. FLATTEN: whether the loop over
    tiles is flattened."""

    ARRIVALS: tl.constexpr
    OTHERS: tl.constexpr
    BM: tl.constexpr
    BN: tl.constexpr
    BK: tl.constexpr
    GROUP_M: tl.constexpr
    WHOLE: tl.constexpr
    ACT: tl.constexpr
    GATED: tl.constexpr
    FLATTEN: tl.constexpr


class Routed(NamedTuple):
    """Rows y [rows, H] of all tokens' routes; by route [W, C, K], int32 its row of y, -1 for none, -2 for one left out,
    and its float32 weight."""

    y: torch.Tensor
    slots: torch.Tensor
    weights: torch.Tensor


class RankSums(NamedTuple):
    """Sizes of `sum_ranks`: H columns, K routes a token, LOCAL experts on a rank, which SHARING neighbours share,
    blocks of COLS columns of ROWS tokens."""

    H: tl.constexpr
    K: tl.constexpr
    LOCAL: tl.constexpr
    SHARING: tl.constexpr
    ROWS: tl.constexpr
    COLS: tl.constexpr


@jit
def half_of(turn, half):
    """Return where the half of this call begins: the second after `half` elements. turn: the word that says which it
    is, or None where there are no halves."""
    return 0 if turn is None else (tl.load(turn) & 1).to(tl.int64) * half  # also of one past 2^31


@jit
def goes_to(ids, t, there, rank, K: tl.constexpr, KP: tl.constexpr, LOCAL: tl.constexpr):
    """Return which of the tokens `t`, where `there`, have one of their K experts on `rank`, of LOCAL experts. ids [..,
    K]; -1: none."""
    slots = tl.arange(0, KP)[None, :]
    expert = tl.load(ids + t[:, None] * K + slots, mask=there[:, None] & (slots < K), other=-1)
    return tl.max(((expert >= 0) & (expert // LOCAL == rank)).to(tl.int32), axis=1) > 0


@jit
def send_rows(
    x,
    ids,
    to,
    rank,
    T,
    first,
    H: tl.constexpr,
    P: tl.constexpr,
    K: tl.constexpr,
    KP: tl.constexpr,
    LOCAL: tl.constexpr,
    ROWS: tl.constexpr,
    STAGES: tl.constexpr,
    PROGRAMS,
):
    """Copy the tokens of x [T, H] that `rank` has an expert of to the same rows from `to` on: this program's share of
    them, it being number `first` of PROGRAMS. The other arguments are as in `dispatch_rows`."""
    cols = tl.arange(0, P)[None, :]
    for block in tl.range(first, tl.cdiv(T, ROWS), PROGRAMS, num_stages=STAGES):
        t = block * ROWS + tl.arange(0, ROWS)
        ok = goes_to(ids, t, t < T, rank, K, KP, LOCAL)[:, None] & (cols < H)
        at = t.to(tl.int64)[:, None] * H + cols
        tl.store(to + at, tl.load(x + at, mask=ok, other=0.0), mask=ok)


@jit(do_not_specialize=("T", "C"))
def dispatch_rows(
    x, ids, inboxes, ch, T, C,
    DTYPE: tl.constexpr, H: tl.constexpr, P: tl.constexpr, K: tl.constexpr, KP: tl.constexpr, LOCAL: tl.constexpr,
    ROWS: tl.constexpr, STAGES: tl.constexpr, PROGRAMS: tl.constexpr,
):  # fmt: skip
    """x [T, H], ids int32 [T, K]; inboxes: address by rank of [W, C, H]. P, KP: H, K rounded up to a power of two. ROWS
    rows a block, STAGES blocks under way. Counter j of rank me + j: its wave j, PROGRAMS arrivals, by this rank."""
    W: tl.constexpr = ch.world
    me = rank_of(ch)
    for j in range(0, W):
        rank = (me + j) % W
        to = address_of(inboxes, rank, DTYPE) + (me * C).to(tl.int64) * H
        send_rows(x, ids, to, rank, T, tl.program_id(0), H, P, K, KP, LOCAL, ROWS, STAGES, PROGRAMS)
        channel_notify(ch, j, rank, False)  # also of no rows: a wait counts calls


@jit
def gelu(x):
    """Return x times the normal distribution up to x, to 2e-7 of |x|: the tail beyond |x| is erfc by Abramowitz and
    Stegun, 7.1.26. `tl.erf` takes registers that a tile of 128 x 256 does not leave."""
    t = 1.0 / (1.0 + 0.2316418837 * tl.abs(x))
    tail = t * (0.127414796 + t * (-0.142248368 + t * (0.7107068705 + t * (-0.7265760135 + t * 0.5307027145))))
    return tl.maximum(x, 0.0) - tl.abs(x) * (tail * tl.exp(-0.5 * x * x))


@jit
def gated(gate, up, ACT: tl.constexpr):
    if ACT == CLAMPED:
        gate = tl.minimum(gate, 7.0)
        up = tl.minimum(tl.maximum(up, -7.0), 7.0)
        out = (up + 1.0) * gate / (1.0 + tl.exp(-1.702 * gate))
    else:
        out = silu(gate) * up
    return out


@jit
def store_activated(
    out_desc, acc, row, col, BM: tl.constexpr, BN: tl.constexpr, ACT: tl.constexpr, GATED: tl.constexpr
):
    """Store a tile's activation by TMA. Without a gate (GELU) out_desc has [BM, BN / 2] blocks; else [BM, GATED], as
    `store_halves`, whose order of gate and up columns this is."""
    HALF: tl.constexpr = BN // 2
    left, right = column_halves(acc, BM, BN)
    if ACT == GELU:
        out_desc.store([row, col], gelu(left).to(out_desc.dtype))
        out_desc.store([row, col + HALF], gelu(right).to(out_desc.dtype))
    elif GATED == HALF:
        out_desc.store([row, col // 2], gated(left, right, ACT).to(out_desc.dtype))
    else:
        gate, up = column_halves(left, BM, HALF)
        out_desc.store([row, col // 2], gated(gate, up, ACT).to(out_desc.dtype))
        gate, up = column_halves(right, BM, HALF)
        out_desc.store([row, col // 2 + GATED], gated(gate, up, ACT).to(out_desc.dtype))


@jit
def add_bias(acc, bias, expert, col, N, BN: tl.constexpr):
    """Return acc plus the expert's row of bias [experts, N], or acc alone where bias is None."""
    if bias is not None:
        c = col + tl.arange(0, BN)
        acc += tl.load(bias + expert * N + c, mask=c < N, other=0.0).to(tl.float32)[None, :]
    return acc


@jit
def gathered_tile(
    rows, there, w_desc, col, K, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, WHOLE: tl.constexpr
):
    """Return fp32 [BM, BN]: the rows of K elements at the pointers `rows` [BM, 1], zeros but where `there`, times rows
    of w_desc from `col` on. WHOLE: K is a multiple of BK."""
    c = tl.arange(0, BK)[None, :]
    at = rows + c
    acc = tl.zeros((BM, BN), tl.float32)
    for k in range(0, K, BK):
        ok = there if WHOLE else there & (k + c < K)
        acc = tl.dot(tl.load(at + k, mask=ok, other=0.0), w_desc.load([col, k]).T, acc)
    return acc


@jit
def store_plain(out_desc, acc, row, col, BM: tl.constexpr, BN: tl.constexpr):
    """Store a tile as it is, by TMA, in blocks [BM, BN / 2]."""
    left, right = column_halves(acc, BM, BN)
    out_desc.store([row, col], left.to(out_desc.dtype))
    out_desc.store([row, col + BN // 2], right.to(out_desc.dtype))


@jit
def grouped_gemm_in(
    inbox, sources, w_desc, hidden_desc, kept_desc, bias, tiles, count, ch, turn, half, N, K, s
):  # fmt: skip
    """inbox [.., K], sources int32 [rows]: its row of each row, or -1; w_desc [experts N, K]; hidden_desc [rows, I], as
    in `store_activated`; kept_desc [rows, N] in blocks [BM, BN / 2], what the activation is of, or None; bias [experts,
    N] or None; tiles int32 [.., 4], count int32 [1] of them. turn, half: as in `half_of`; the last of these programs
    and OTHERS counts the turn. s: `GatheredSizes`.

    A tile waits for its waves up to the last, but for those that the program's tile before it has waited for. Rows are
    read by ordinary loads, as they were written, so no proxy fence is between; w nobody writes."""
    K = K // 8 * 8  # rows are whole 16-byte words
    P = tl.num_programs(0)
    tiles_m = tl.load(count)
    tiles_n = tl.cdiv(N, s.BN)
    me = rank_of(ch)
    inbox += half_of(turn, half)
    for t in tl.range(tl.program_id(0), tiles_m * tiles_n, P, flatten=s.FLATTEN):
        i, tn = grouped_tile(t, tiles_m, tiles_n, s.GROUP_M)
        before, _ = grouped_tile(tl.maximum(t - P, 0), tiles_m, tiles_n, s.GROUP_M)
        waited = tl.load(tiles + 4 * before + 3, mask=t >= P, other=-1)
        last = tl.load(tiles + 4 * i + 3)
        for wave in tl.static_range(ch.world):
            if (wave > waited) & (wave <= last):
                source = (me - wave + ch.world) % ch.world
                wait_until(ch.counters + wave, calls_of(ch) * s.ARRIVALS, ch.guard, i, source, "sys")
        row = tl.load(tiles + 4 * i)
        expert = tl.load(tiles + 4 * i + 1)
        source = tl.load(sources + row + tl.arange(0, s.BM))[:, None]
        rows = inbox + source.to(tl.int64) * K
        acc = gathered_tile(rows, source >= 0, w_desc, expert * N + tn * s.BN, K, s.BM, s.BN, s.BK, s.WHOLE)
        acc = add_bias(acc, bias, expert, tn * s.BN, N, s.BN)
        if kept_desc is not None:
            store_plain(kept_desc, acc, row, tn * s.BN, s.BM, s.BN)
        store_activated(hidden_desc, acc, row, tn * s.BN, s.BM, s.BN, s.ACT, s.GATED)
    end_call(ch, turn, P + s.OTHERS)


@jit
def shares_of(first, last, tn, tiles_n, W: tl.constexpr):
    """Return int32, by wave: what a tile in column tn, of waves `first` to `last`, adds to each."""
    wave = tl.arange(0, triton.next_power_of_2(W))
    share = tl.where(tn == tiles_n - 1, ROW_OF_TILES - tiles_n + 1, 1)
    return tl.where((wave >= first) & (wave <= last), share, 0)


@jit
def count_tiles(counters, shares, W: tl.constexpr):
    """Release the stores of tiles to whoever waits for their waves. shares: of these tiles together (`shares_of`)."""
    flush_stores(True)
    wave = tl.arange(0, triton.next_power_of_2(W))
    tl.atomic_add(counters + wave, shares, mask=(wave < W) & (shares > 0), sem="release", scope="gpu")


@jit
def grouped_gemm_out(
    hidden_desc, w_desc, y_desc, bias, tiles, count, counters, N, K,
    W: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, GROUP_M: tl.constexpr, BACK: tl.constexpr,
):  # fmt: skip
    """hidden_desc [rows, K]; w_desc [experts N, K], BACK: [experts K, N]; y_desc [rows, N] in blocks [BM, BN / 2]; bias
    as above; tiles, count too, taken from the last on. counters int32 [W], by wave, of this GPU: a row of tiles adds
    ROW_OF_TILES to each of its waves.

    One loop over the K steps of all tiles. A program counts its tiles of one last wave together, SETTLED steps into the
    first one of another (compute/gemm.py), or at its end: who waits for a wave waits for all its tiles, and each
    release waits for a fence (docs/design-notes.md)."""
    tiles_m = tl.load(count)
    tiles_n = tl.cdiv(N, BN)
    steps = tl.cdiv(K, BK)
    late = min(FLUSHED, steps - 1)
    P = tl.num_programs(0)
    t = tl.program_id(0) - P
    stored = -1  # the last wave of what is in `shares`
    step, row, expert, tn, first, last = steps - 1, 0, 0, 0, 0, 0
    shares = tl.zeros((triton.next_power_of_2(W),), tl.int32)
    acc = tl.zeros((BM, BN), tl.float32)
    for _ in tl.range(0, tl.cdiv(tiles_m * tiles_n - tl.program_id(0), P) * steps):
        step = tl.where(step == steps - 1, 0, step + 1)
        if step == 0:
            t += P
            i, tn = grouped_tile(t, tiles_m, tiles_n, GROUP_M)
            tile = tiles + 4 * (tiles_m - 1 - i)
            row = tl.load(tile)
            expert = tl.load(tile + 1)
            first = tl.load(tile + 2)
            last = tl.load(tile + 3)
        a = hidden_desc.load([row, step * BK])
        if BACK:
            acc = tl.dot(a, w_desc.load([expert * K + step * BK, tn * BN]), acc)
        else:
            acc = tl.dot(a, w_desc.load([expert * N + tn * BN, step * BK]).T, acc)
        if (step == late) & (stored >= 0) & (stored != last):
            count_tiles(counters, shares, W)
            shares = tl.zeros_like(shares)
            stored = -1
        if step == steps - 1:
            acc = add_bias(acc, bias, expert, tn * BN, N, BN)
            store_plain(y_desc, acc, row, tn * BN, BM, BN)
            shares += shares_of(first, last, tn, tiles_n, W)
            stored = last
            acc = tl.zeros((BM, BN), tl.float32)
    if stored >= 0:
        count_tiles(counters, shares, W)


@jit
def weighted_sum(
    y,
    slots,
    weights,
    route,
    there,
    cols,
    H: tl.constexpr,
    K: tl.constexpr,
    ROWS: tl.constexpr,
    COLS: tl.constexpr,
):
    """fp32 [ROWS, COLS]: columns `cols` of tokens, where `there`, whose K routes begin with `route`, summed over the
    routes that have a row of y; and int32 [ROWS], how many do or were left out: of these too the token's rank expects
    a sum. The rest as in `combine_rows`."""
    acc = tl.zeros((ROWS, COLS), tl.float32)
    rows = tl.zeros((ROWS,), tl.int32)
    for i in tl.static_range(K):
        slot = tl.load(slots + route + i, mask=there, other=-1)
        weight = tl.load(weights + route + i, mask=slot >= 0, other=0.0)
        ok = (slot >= 0)[:, None] & (cols < H)
        part = tl.load(y + slot.to(tl.int64)[:, None] * H + cols, mask=ok, other=0.0)
        acc += weight[:, None] * part.to(tl.float32)
        rows += (slot != -1).to(tl.int32)
    return acc, rows


@jit
def send_sums(
    y,
    slots,
    weights,
    to,
    rank,
    C,
    first,
    DTYPE: tl.constexpr,
    H: tl.constexpr,
    COLS: tl.constexpr,
    K: tl.constexpr,
    ROWS: tl.constexpr,
    PROGRAMS,
):
    """Weighted sums of the tokens of `rank` that have rows here, to the same rows from `to` on: this program's share,
    it being number `first` of PROGRAMS. The rest as in `combine_rows`."""
    PARTS: tl.constexpr = (H + COLS - 1) // COLS
    for block in range(first, tl.cdiv(C, ROWS) * PARTS, PROGRAMS):
        t = block // PARTS * ROWS + tl.arange(0, ROWS)
        cols = block % PARTS * COLS + tl.arange(0, COLS)[None, :]
        acc, rows = weighted_sum(y, slots, weights, (rank * C + t) * K, t < C, cols, H, K, ROWS, COLS)
        tl.store(to + t.to(tl.int64)[:, None] * H + cols, acc.to(DTYPE), mask=(rows > 0)[:, None] & (cols < H))


@jit(do_not_specialize=("C",))
def combine_rows(
    of, targets, counters, outboxes, ch, turn, half, C,
    DTYPE: tl.constexpr, H: tl.constexpr, COLS: tl.constexpr, K: tl.constexpr, ROWS: tl.constexpr,
    PROGRAMS: tl.constexpr,
):  # fmt: skip
    """of: `Routed` rows, of which those of all ranks but this one are summed here, its own by `sum_ranks`; targets
    int32 [W]: rows of tiles of each wave, of all calls that `counters` has counted; counters: those of
    `grouped_gemm_out`; outboxes: address by rank of [W, C, H], turn and half as above. COLS columns of ROWS tokens a
    block. Counter r of a rank: rank r has combined its tokens, PROGRAMS arrivals; of the rank itself they say
    nothing."""
    W: tl.constexpr = ch.world
    me = rank_of(ch)
    channel_notify(ch, me, me, False)  # so that one wait serves all counters
    begin = half_of(turn, half) + (me * C).to(tl.int64) * H
    for step in range(0, W - 1):
        wave = W - 1 - step
        rank = (me - wave + W) % W
        wait_until(counters + wave, tl.load(targets + wave) * ROW_OF_TILES, ch.guard, wave, me, "gpu")
        to = address_of(outboxes, rank, DTYPE) + begin
        send_sums(of.y, of.slots, of.weights, to, rank, C, tl.program_id(0), DTYPE, H, COLS, K, ROWS, PROGRAMS)
        channel_notify(ch, me, rank, False)  # also of no rows: it says too that this rank's inbox is read


@jit
def sum_of_ranks(
    outbox,
    ids,
    t,
    T,
    C,
    cols,
    own,
    me,
    W: tl.constexpr,
    H: tl.constexpr,
    K: tl.constexpr,
    KP: tl.constexpr,
    LOCAL: tl.constexpr,
    SHARING: tl.constexpr,
    ROWS: tl.constexpr,
    COLS: tl.constexpr,
):
    """fp32 [ROWS, COLS]: columns `cols` of the tokens t below T, summed in the order of the ranks over those that have
    an expert of the token; of rank `me` that is `own`, float32, rounded as what travels, of the others what outbox [W,
    C, H] has. The rest as in `sum_ranks`."""
    own = own.to(outbox.dtype.element_ty).to(tl.float32)
    acc = tl.zeros((ROWS, COLS), tl.float32)
    at = t.to(tl.int64)[:, None] * H + cols
    for rank in tl.static_range(W):
        ok = goes_to(ids, t, t < T, rank // SHARING, K, KP, LOCAL)[:, None] & (cols < H) & (rank != me)
        part = tl.load(outbox + rank * C.to(tl.int64) * H + at, mask=ok, other=0.0).to(tl.float32)
        acc += tl.where(rank == me, own, part)
    return acc


@jit
def store_sums(acc, shared, out, t, T, cols, H: tl.constexpr):
    """Store acc, plus rows of shared unless it is None, in rows t below T of out; both [T, H]."""
    at = t.to(tl.int64)[:, None] * H + cols
    ok = (t < T)[:, None] & (cols < H)
    if shared is not None:
        acc += tl.load(shared + at, mask=ok, other=0.0).to(tl.float32)
    tl.store(out + at, acc.to(out.dtype.element_ty), mask=ok)


@jit(do_not_specialize=("T", "C", "number"))
def sum_ranks(
    of, outbox, ids, shared, out, counters, ch, calls, number, turn, half, T, C, ARRIVALS: tl.constexpr, by
):  # fmt: skip
    """out [T, H] = the sum in the order of the ranks over those that have (columns of) an expert of the token, + shared
    [T, H] or None, in fp32: of the other ranks what they sent to outbox [W, C, H], turn and half as above, of this one
    the weighted rows themselves, `Routed`, which are there by the stream's order; ids int32 [T, K]; by: `RankSums`.
    Waits for all other ranks. Clears `counters`, of `grouped_gemm_out`, unless None: that has ended, by the stream's
    order; and so must this rank's `combine_rows`, which reads them: the wait here does not say it, since that kernel
    tells its own rank at its start."""
    W: tl.constexpr = ch.world
    PARTS: tl.constexpr = (by.H + by.COLS - 1) // by.COLS
    KP: tl.constexpr = triton.next_power_of_2(by.K)
    me = rank_of(ch)
    outbox += half_of(turn, half)
    if tl.program_id(0) == 0:
        same_call(calls, number)
    wait_until(ch.counters, calls_of(ch) * ARRIVALS, ch.guard, -1, 0, "sys", W)
    for block in range(tl.program_id(0), tl.cdiv(T, by.ROWS) * PARTS, tl.num_programs(0)):
        t = block // PARTS * by.ROWS + tl.arange(0, by.ROWS)
        cols = block % PARTS * by.COLS + tl.arange(0, by.COLS)[None, :]
        route = (me * C + t) * by.K
        own, _ = weighted_sum(of.y, of.slots, of.weights, route, t < T, cols, by.H, by.K, by.ROWS, by.COLS)
        acc = sum_of_ranks(
            outbox, ids, t, T, C, cols, own, me, W, by.H, by.K, KP, by.LOCAL, by.SHARING, by.ROWS, by.COLS
        )
        store_sums(acc, shared, out, t, T, cols, by.H)
    if counters is not None:
        if tl.program_id(0) == 0:
            wave = tl.arange(0, triton.next_power_of_2(W))
            tl.store(counters + wave, tl.zeros_like(wave), mask=wave < W)
    end_call(ch, turn, tl.num_programs(0))
