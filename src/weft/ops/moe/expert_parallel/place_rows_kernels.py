"""The kernels that only `weft.moe.dispatch` and `weft.moe.combine` need, in addition to the kernels of a whole layer.
These kernels store arrived rows in expert order, for the caller's own expert kernels.

    side stream  | dispatch_rows            |
    main stream  | share | tables | place_rows | the caller's experts .. | combine_rows | sum_ranks

`dispatch_rows` sends tokens to the inboxes of the ranks that hold their experts. `share` exchanges the routes, and the
tables list the rows of each expert. `place_rows` reads the tokens of one source rank after another as they arrive,
beginning with this rank, and stores each token in all of the token's rows on this rank. So `place_rows` reads the inbox
only once. In the masked layout, `mask_rows` runs after the tables are built and converts them. By stream order, the
experts' result is complete when `combine_rows` starts. `combine_rows` therefore waits for nothing: its counters and
their targets are zero. `combine_rows` stores weighted sums in the outboxes of the tokens' ranks, and `sum_ranks` adds
these sums.

Order of accesses. A call uses one of two buffers, from its dispatch to its combine. Each buffer has a separate copy of
all memory that other ranks write: routes, inbox, outbox, and their counters. So no order is needed between buffers, and
the calls of one buffer follow one another on a rank (`World.order`): with two microbatches, call n + 2 begins in the
buffer of call n after this rank's `sum_ranks` of call n. `sum_ranks` has waited for every rank's `combine_rows` of call
n. Each program of `combine_rows` notifies a rank after its last read of that rank's routes and tokens, and the tables
and `place_rows` come before it on the stream. So no rank still reads the routes and the inbox that call n + 2
overwrites. Programs that write to another rank's outbox run after `place_rows`. `place_rows` waits for each source
rank's dispatch of call n + 2, with or without rows, and a source rank dispatches after its `sum_ranks` of call n, which
is the last reader of its outbox. Combines run in the order of their dispatches, so a rank waits only for launches that
come earlier in an order which is the same on all ranks. Programs that wait leave room on their SM for programs that do
not wait.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl

from ....lang.channel import calls_of, end_call, rank_of
from ....lang.intrinsics import count_lost, wait_until
from ....lang.jit import jit
from ..expert_parallel.kernels import half_offset
from ..routing.kernels import LEFT_OUT, count_told, tell_sources

RANK_BINS = tl.constexpr(32)  # the largest number of ranks, and the number of bins in a histogram by rank


class ExpertOrder(NamedTuple):
    """The tables of rows in the order of this rank's EL experts (`route_tables.Tables`). All of them are int32."""

    ids: torch.Tensor  # [W, max_tokens, K], the ids of every rank's tokens
    route_rows: torch.Tensor  # [W * max_tokens * K]: the row of each route; -1: none, -2: left out
    sources: torch.Tensor
    offsets: torch.Tensor
    received: torch.Tensor


class Masked(NamedTuple):
    """The tables of the masked layout, in which every expert has MAX_M rows. `counts` contains the number of rows that
    each expert uses."""

    route_rows: torch.Tensor
    sources: torch.Tensor  # [EL, MAX_M]
    counts: torch.Tensor  # [EL]


@jit
def clear_padding(rows, order, expert, H: tl.constexpr, COLS: tl.constexpr, ROWS: tl.constexpr):
    """Store zeros in the rows between an expert's last row and the next expert's first."""
    end = tl.load(order.offsets + expert + 1)
    for lo in range(tl.load(order.offsets + expert) + tl.load(order.received + expert), end, ROWS):
        row = lo + tl.arange(0, ROWS)
        for column in range(0, H, COLS):
            cols = column + tl.arange(0, COLS)[None, :]
            offsets = row.to(tl.int64)[:, None] * H + cols
            zeros = tl.zeros((ROWS, COLS), rows.dtype.element_ty)
            tl.store(rows + offsets, zeros, mask=(row < end)[:, None] & (cols < H))


@jit
def list_masked(order, masked, expert, MAX_M, BLOCK: tl.constexpr):
    """Store an expert's number of rows, which is limited to MAX_M, and the sources of its MAX_M rows, -1 for none."""
    count = tl.minimum(tl.load(order.received + expert), MAX_M)
    tl.store(masked.counts + expert, count)
    first_row = tl.load(order.offsets + expert)
    for lo in range(0, MAX_M, BLOCK):
        i = lo + tl.arange(0, BLOCK)
        source = tl.load(order.sources + first_row + i, mask=i < count, other=-1)
        tl.store(masked.sources + expert.to(tl.int64) * MAX_M + i, source, mask=i < MAX_M)


@jit
def rows_by_source(order, max_tokens, MAX_M, EL: tl.constexpr, BLOCK: tl.constexpr):
    """Count an expert's rows beyond MAX_M by the rank of their tokens. Return the counts, int32 [RANK_BINS]."""
    rows = tl.zeros((RANK_BINS,), tl.int32)
    for expert in range(0, EL):
        first_row = tl.load(order.offsets + expert)
        end = first_row + tl.load(order.received + expert)
        for lo in range(first_row + MAX_M, end, BLOCK):
            row = lo + tl.arange(0, BLOCK)
            source = tl.load(order.sources + row, mask=row < end, other=0) // max_tokens
            rows += tl.histogram(source, RANK_BINS, mask=row < end)
    return rows


@jit(do_not_specialize=("MAX_M",))
def mask_rows(
    order,
    masked,
    rank,
    guard,
    left_out,
    routes,
    max_tokens,
    MAX_M,
    EL: tl.constexpr,
    BLOCK: tl.constexpr,
    PROGRAMS: tl.constexpr,
):
    """Convert the tables of rows in expert order to tables of the masked layout. If an expert has more than MAX_M rows,
    the last rows are dropped. Dropped rows are counted unless guard is None, and are reported to the ranks of their
    tokens unless left_out is None. rank: int32 [1], this rank. routes: the number of all ranks' routes."""
    for expert in range(tl.program_id(0), EL, PROGRAMS):
        list_masked(order, masked, expert, MAX_M, BLOCK)
    if guard is not None:
        if tl.program_id(0) == 0:
            experts = tl.arange(0, triton.next_power_of_2(EL))
            received = tl.load(order.received + experts, mask=experts < EL, other=0)
            rows_lost = tl.sum(tl.maximum(received - MAX_M, 0), 0)
            if rows_lost > 0:
                me = tl.load(rank)
                count_lost(guard, me, rows_lost)
                if left_out is not None:
                    by_source = rows_by_source(order, max_tokens, MAX_M, EL, BLOCK)
                    tell_sources(left_out, me, tl.arange(0, RANK_BINS), by_source)
    first_expert = tl.load(rank) * EL
    for block in range(tl.program_id(0), tl.cdiv(routes, BLOCK), PROGRAMS):
        route = block * BLOCK + tl.arange(0, BLOCK)
        row = tl.load(order.route_rows + route, mask=route < routes, other=-1)
        e = tl.load(order.ids + route, mask=row >= 0, other=0) - first_expert
        row_in_expert = row - tl.load(order.offsets + e, mask=row >= 0, other=0)
        masked_row = tl.where(row_in_expert < MAX_M, e * MAX_M + row_in_expert, LEFT_OUT)
        tl.store(masked.route_rows + route, tl.where(row >= 0, masked_row, row), mask=route < routes)


@jit
def count_received(words, guard, W: tl.constexpr):
    """Count the rows [W] of this rank's tokens that other ranks left out, as `take_left_out` does."""
    count_told(words, guard, W)


@jit
def has_row(route_rows, token, valid, K: tl.constexpr):
    """Return a mask of the tokens that are `valid` and have a row for one of their K routes."""
    i = tl.arange(0, triton.next_power_of_2(K))[None, :]
    row = tl.load(route_rows + token[:, None] * K + i, mask=valid[:, None] & (i < K), other=-1)
    return tl.max(row, axis=1) >= 0


@jit(do_not_specialize=("max_tokens",))
def place_rows(
    inbox,
    rows,
    order,
    ch,
    epoch,
    half_size,
    max_tokens,
    ARRIVALS: tl.constexpr,
    H: tl.constexpr,
    COLS: tl.constexpr,
    K: tl.constexpr,
    EL: tl.constexpr,
    ROWS: tl.constexpr,
    STAGES: tl.constexpr,
    PADDED: tl.constexpr,
    PROGRAMS: tl.constexpr,
):
    """Copy inbox [W, max_tokens, H] to rows [.., H] in expert order.

    PADDED: whether rows between an expert's last row and the next expert's first row are set to zero. A block consists
    of COLS columns of ROWS tokens. Counter j of `ch` belongs to source step j and receives ARRIVALS arrivals. ARRIVALS
    = 0 means that all rows have already arrived, and that the kernel does not end a call. epoch, half_size: as in
    `grouped_gemm_in`; None and 0 if calls do not alternate between halves. If they alternate, the ARRIVALS dispatch
    programs advance the epoch together with the programs of this kernel.
    """
    W: tl.constexpr = ch.world
    PARTS: tl.constexpr = (H + COLS - 1) // COLS
    me = rank_of(ch)
    inbox += half_offset(epoch, half_size)
    if PADDED:
        for expert in range(tl.program_id(0), EL, PROGRAMS):
            clear_padding(rows, order, expert, H, COLS, ROWS)
    for source_step in range(0, W):
        source = (me - source_step + W) % W
        if ARRIVALS:
            wait_until(ch.counters + source_step, calls_of(ch) * ARRIVALS, ch.guard, source_step, source, "sys")
        for block in tl.range(tl.program_id(0), tl.cdiv(max_tokens, ROWS) * PARTS, PROGRAMS, num_stages=STAGES):
            t = block // PARTS * ROWS + tl.arange(0, ROWS)
            cols = block % PARTS * COLS + tl.arange(0, COLS)[None, :]
            token = source * max_tokens + t
            mask = has_row(order.route_rows, token, t < max_tokens, K)[:, None] & (cols < H)
            part = tl.load(inbox + token.to(tl.int64)[:, None] * H + cols, mask=mask, other=0.0)
            for i in tl.static_range(K):
                row = tl.load(order.route_rows + token * K + i, mask=t < max_tokens, other=-1)
                offsets = row.to(tl.int64)[:, None] * H + cols
                tl.store(rows + offsets, part, mask=(row >= 0)[:, None] & (cols < H))
    if ARRIVALS:
        end_call(ch, epoch, PROGRAMS if epoch is None else PROGRAMS + ARRIVALS)
