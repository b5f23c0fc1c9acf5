"""Both halves of a layer whose experts' columns are split over ranks: every rank has some columns of every expert, so
every token goes to every rank, and every rank sends a part of every token's sum.

    push_shard        stores this rank's rows in the inbox of every rank: own rank first, then me + 1, ..
    grouped_gemm_in   (kernels.py) as in a layer of whole experts: tiles in the order in which their rows come

    grouped_gemm_out, combine_rows, sum_ranks  (kernels.py) likewise

    side stream   | push_shard                        |         | combine_rows                   |
    main stream   | tables        | grouped_gemm_in   |         | grouped_gemm_out               | sum_ranks

A tile's place in all this is read from tables that the device fills in every call (`place_routes`): its rows and its
expert, and the range of channels that it waits for, its waves.

Order of accesses. Inbox and outbox are the arena's two halves, which all calls take in turn. Who has ended a call of
either kind has heard from every rank in it: in the first of its routes, which a rank shares as its first act, in the
second of its sums. So every rank has ended its call before that one, and nobody reads the half that a call writes.
"""

import triton.language as tl

from ....lang.channel import address_of, end_call, rank_of
from ....lang.jit import jit
from ....lang.primitives import channel_notify
from ..expert_parallel.kernels import half_of
from ..expert_parallel.place_rows_kernels import has_row


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
