"""Kernels of both halves of a layer whose experts are split by columns over the ranks. Every rank holds some columns of
every expert. So every token is sent to every rank, and every rank sends a part of every token's sum.

    push_shard        stores this rank's rows in the inbox of every rank, beginning with this rank, then me + 1, ..
    grouped_gemm_in   (expert_parallel/kernels.py) works as in a layer of whole experts: it computes tiles in the order
                      in which rows arrive

    grouped_gemm_out, combine_rows, sum_ranks  (expert_parallel/kernels.py) likewise

    side stream   | push_shard                        |         | combine_rows                   |
    main stream   | tables        | grouped_gemm_in   |         | grouped_gemm_out               | sum_ranks

In every call the device builds the tables (`place_routes`). For each tile they contain its rows, its expert, and its
source steps, which are the range of counters for which the tile waits.

Memory order. Inbox and outbox are the arena's two halves, and all calls alternate between them. Before a rank ends a
call, every other rank has notified it in this call. In the layer's first half, the ranks notify each other of their
routes, which they share at the start; in the second half, of their sums. So every rank has ended its previous call, and
no rank still reads the half that the next call writes.

Symbols of shapes:

    T, H       T tokens on this rank, of H columns each
    K          the number of routes of a token, one for each expert that is chosen for it
    W          ranks
"""

import triton.language as tl

from ....lang.channel import address_of, end_call, rank_of
from ....lang.jit import jit
from ....lang.primitives import channel_notify
from ..expert_parallel.kernels import half_offset
from ..expert_parallel.place_rows_kernels import has_row


@jit(do_not_specialize=("T", "max_tokens"))
def push_shard(
    x,
    inboxes,
    ch,
    epoch,
    half_size,
    T,
    max_tokens,
    DTYPE: tl.constexpr,
    H: tl.constexpr,
    BLOCK: tl.constexpr,
    STAGES: tl.constexpr,
    PROGRAMS: tl.constexpr,
    OTHER_PROGRAMS: tl.constexpr,
):
    """Store x [T, H] in the inboxes of all ranks.

    inboxes: the address of every rank's inbox, which has two halves [W, max_tokens, H], `half_size` elements apart.
    epoch: as in `grouped_gemm_in`. OTHER_PROGRAMS: the number of programs in the launch that reads the rows,
    `grouped_gemm_in` or, in a backward pass, `place_rows`. These programs advance the epoch together with the programs
    of this kernel. BLOCK elements are stored at once, and STAGES blocks are in flight. Counter j of rank me + j belongs
    to source step j of that rank and receives PROGRAMS arrivals from this rank.
    """
    W: tl.constexpr = ch.world
    me = rank_of(ch)
    offset = half_offset(epoch, half_size) + (me * max_tokens).to(tl.int64) * H
    count = T.to(tl.int64) * H
    for j in range(0, W):
        rank = (me + j) % W
        dst = address_of(inboxes, rank, DTYPE) + offset
        for block in tl.range(tl.program_id(0), tl.cdiv(count, BLOCK), PROGRAMS, num_stages=STAGES):
            i = block.to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
            tl.store(dst + i, tl.load(x + i, mask=i < count, other=0.0), mask=i < count)
        channel_notify(ch, j, rank, False)  # a rank that receives no rows is notified too, because waits count calls
    end_call(ch, epoch, PROGRAMS + OTHER_PROGRAMS)


@jit(do_not_specialize=("tokens",))
def keep_shards(
    inbox, kept_rows, route_rows, epoch, half_size, tokens,
    H: tl.constexpr, COLS: tl.constexpr, K: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """Copy the half of inbox that was used last to kept_rows [tokens, H], for the tokens that have rows here. An
    earlier kernel has waited for these rows.

    route_rows: as in `ExpertOrder`. A block consists of COLS columns of ROWS tokens.
    """
    PARTS: tl.constexpr = (H + COLS - 1) // COLS
    last_half = inbox + half_size - half_offset(epoch, half_size)
    for block in range(tl.program_id(0), tl.cdiv(tokens, ROWS) * PARTS, tl.num_programs(0)):
        token = block // PARTS * ROWS + tl.arange(0, ROWS)
        cols = block % PARTS * COLS + tl.arange(0, COLS)[None, :]
        mask = has_row(route_rows, token, token < tokens, K)[:, None] & (cols < H)
        offsets = token.to(tl.int64)[:, None] * H + cols
        tl.store(kept_rows + offsets, tl.load(last_half + offsets, mask=mask), mask=mask)
