"""Both halves of a layer whose experts' columns are split over ranks: every rank has some columns of every expert, so
every token goes to every rank, and every rank sends a part of every token's sum.

    push_shard        stores this rank's rows in the inbox of every rank: own rank first, then me + 1, ..
    grouped_gemm_in   (kernels.py) as in a layer of whole experts: tiles in the order in which their rows come

    grouped_gemm_out  (kernels.py) tiles in the other order
    combine_parts     of another rank's token the rows summed, weighted, to that rank's outbox, under grouped_gemm_out
    sum_parts         the token's rank sums its own rows, and what the others sent

    side stream   | push_shard                        |         | combine_parts                  |
    main stream   | tables        | grouped_gemm_in   |         | grouped_gemm_out               | sum_parts

A tile's place in all this is read from tables that the device fills in every call (`place_routes`): its rows and its
expert, and the range of channels that it waits for, its waves.

Order of accesses. Inbox and outbox are the arena's two halves, which all calls take in turn. Who has ended a call of
either kind has heard from every rank in it: in the first of its routes, which a rank shares as its first act, in the
second of its sums. So every rank has ended its call before that one, and nobody reads the half that a call writes.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl

from ...lang.channel import address_of, calls_of, end_call, rank_of
from ...lang.intrinsics import wait_until
from ...lang.jit import jit
from ...lang.primitives import channel_notify
from .exchange_kernels import has_row
from .kernels import ROW_OF_TILES, goes_to, half_of, send_sums, weighted_sum


@jit(do_not_specialize=("T", "C"))
def push_shard(
    x,
    inboxes,
    ch,
    turn,
    half,
    T,
    C,
    DTYPE: tl.constexpr,
    H: tl.constexpr,
    BLOCK: tl.constexpr,
    STAGES: tl.constexpr,
    PROGRAMS: tl.constexpr,
    OTHERS: tl.constexpr,
):
    """x [T, H]; inboxes: address by rank of two halves of [W, C, H], `half` elements apart; turn as in
    `grouped_gemm_in`, whose OTHERS programs count the call with these. BLOCK elements at a time, STAGES of them under
    way. Counter j of rank me + j: its wave j, PROGRAMS arrivals, by this rank."""
    W: tl.constexpr = ch.world
    me = rank_of(ch)
    begin = half_of(turn, half) + (me * C).to(tl.int64) * H
    count = T.to(tl.int64) * H
    for j in range(0, W):
        rank = (me + j) % W
        to = address_of(inboxes, rank, DTYPE) + begin
        for block in tl.range(tl.program_id(0), tl.cdiv(count, BLOCK), PROGRAMS, num_stages=STAGES):
            i = block.to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
            tl.store(to + i, tl.load(x + i, mask=i < count, other=0.0), mask=i < count)
        channel_notify(ch, j, rank, False)  # also of no rows: a wait counts calls
    end_call(ch, turn, PROGRAMS + OTHERS)


@jit(do_not_specialize=("tokens",))
def keep_shards(
    inbox, kept, slots, turn, half, tokens,
    H: tl.constexpr, COLS: tl.constexpr, K: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """kept [tokens, H] = the half of inbox that was used last, of tokens that have rows here: for these somebody has
    waited. slots as in `ExpertOrder`. COLS columns of ROWS tokens a block."""
    PARTS: tl.constexpr = (H + COLS - 1) // COLS
    first = inbox + half - half_of(turn, half)
    for block in range(tl.program_id(0), tl.cdiv(tokens, ROWS) * PARTS, tl.num_programs(0)):
        token = block // PARTS * ROWS + tl.arange(0, ROWS)
        cols = block % PARTS * COLS + tl.arange(0, COLS)[None, :]
        ok = has_row(slots, token, token < tokens, K)[:, None] & (cols < H)
        at = token.to(tl.int64)[:, None] * H + cols
        tl.store(kept + at, tl.load(first + at, mask=ok), mask=ok)


class Routed(NamedTuple):
    """Rows y [rows, H] of all tokens' routes; by route [W, C, K], its row, as `combine_rows` has it, and weight."""

    y: torch.Tensor
    slots: torch.Tensor
    weights: torch.Tensor


class PartSums(NamedTuple):
    """H columns, K routes a token, LOCAL experts on a rank, which SHARING neighbours share, ROWS tokens a block."""

    H: tl.constexpr
    K: tl.constexpr
    LOCAL: tl.constexpr
    SHARING: tl.constexpr
    ROWS: tl.constexpr


@jit(do_not_specialize=("C",))
def combine_parts(
    of, targets, counters, outboxes, ch, turn, half, C,
    DTYPE: tl.constexpr, H: tl.constexpr, COLS: tl.constexpr, K: tl.constexpr, ROWS: tl.constexpr,
    PROGRAMS: tl.constexpr,
):  # fmt: skip
    """As `combine_rows`, of `Routed` rows, for all ranks but this one, whose wave `sum_parts` reads itself. Counter r
    of a rank: rank r has combined its tokens, PROGRAMS arrivals; of the rank itself they say nothing."""
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
        channel_notify(ch, me, rank, False)  # also of no rows: a wait counts calls


@jit(do_not_specialize=("T", "C"))
def sum_parts(of, outbox, ids, shared, out, counters, ch, turn, half, T, C, ARRIVALS: tl.constexpr, by):
    """out [T, H] = the sum in the order of the ranks over those that have columns of an expert of the token, + shared
    [T, H], in fp32: of the other ranks what they sent to a half of outbox [W, C, H], of this one the weighted rows
    themselves, `Routed`, which are there by the stream's order; ids int32 [T, K]; by: `PartSums`. Waits for all other
    ranks. Clears the counters of `grouped_gemm_out`. That has ended, by the stream's order; and so must this rank's
    `combine_parts`, which reads them: the wait here does not say it, since it tells its own rank at its start."""
    W: tl.constexpr = ch.world
    P: tl.constexpr = triton.next_power_of_2(by.H)
    KP: tl.constexpr = triton.next_power_of_2(by.K)
    me = rank_of(ch)
    cols = tl.arange(0, P)[None, :]
    first = outbox + half_of(turn, half)
    wait_until(ch.counters, calls_of(ch) * ARRIVALS, ch.guard, -1, 0, "sys", W)
    for block in range(tl.program_id(0), tl.cdiv(T, by.ROWS), tl.num_programs(0)):
        t = block * by.ROWS + tl.arange(0, by.ROWS)
        at = t.to(tl.int64)[:, None] * by.H + cols
        own, _ = weighted_sum(of.y, of.slots, of.weights, (me * C + t) * by.K, t < T, cols, by.H, by.K, by.ROWS, P)
        acc = tl.zeros((by.ROWS, P), tl.float32)
        for rank in tl.static_range(W):
            ok = goes_to(ids, t, t < T, rank // by.SHARING, by.K, KP, by.LOCAL)[:, None] & (cols < by.H) & (rank != me)
            part = tl.load(first + rank * C.to(tl.int64) * by.H + at, mask=ok, other=0.0).to(tl.float32)
            acc += tl.where(rank == me, own, part)
        ok = (t < T)[:, None] & (cols < by.H)
        if shared is not None:
            acc += tl.load(shared + at, mask=ok, other=0.0).to(tl.float32)
        tl.store(out + at, acc.to(out.dtype.element_ty), mask=ok)
    if tl.program_id(0) == 0:
        wave = tl.arange(0, triton.next_power_of_2(W))
        tl.store(counters + wave, tl.zeros_like(wave), mask=wave < W)
    end_call(ch, turn, tl.num_programs(0))
