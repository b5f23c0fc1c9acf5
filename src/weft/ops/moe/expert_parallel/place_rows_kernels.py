"""What `dispatch` and `combine` by themselves need beside the kernels of a layer: rows that have come, put in the order
of their experts for kernels of somebody else's.

    side stream  | dispatch_rows            |
    main stream  | share | tables | place_rows | the caller's experts .. | combine_rows | sum_ranks

Where every expert has as many rows, `mask_rows` comes behind the tables and makes others of them.
`place_rows` takes a rank's tokens as they come, own tokens first, and stores each in all of its rows here, so it reads
the inbox once. y is there by the stream's order, so `combine_rows` finds its counters at their targets: both zero.

Order of accesses. A call takes one of two slots, from its dispatch to its combine. A slot has everything of its own
that ranks write on each other: routes, inbox, outbox, and their counters. So between slots nothing has to be ordered,
and a slot's calls follow one another on a rank (`World.order`): call n + 2 of two microbatches begins, in the slot of
call n, behind this rank's `sum_ranks` of call n. That has waited for every rank's `combine_rows` of call n, each
program of which tells a rank behind its last read of what that rank sent; `place_rows` and the tables came before it on
the stream. So nobody reads the routes and the inbox that call n + 2 writes over. And a rank's outbox is written by
programs behind `place_rows`, which has waited for rows (or for none of them) that this rank sends behind its
`sum_ranks` of call n, the last to read the outbox. Handles are combined in the order of their dispatches, so a rank
waits for launches only that come earlier in an order which all ranks share; and what waits here leaves room on its SM
for what does not.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl

from ....lang.channel import calls_of, end_call, rank_of
from ....lang.intrinsics import count_lost, wait_until
from ....lang.jit import jit
from ..expert_parallel.kernels import half_of


class ExpertOrder(NamedTuple):
    """Rows in the order of the EL experts (`routing.Tables`), all int32."""

    ids: torch.Tensor  # [W, C, K], of every rank
    slots: torch.Tensor  # [W * C * K]: a route's row, or -1, or -2: left out
    sources: torch.Tensor
    offsets: torch.Tensor
    received: torch.Tensor


class Masked(NamedTuple):
    """What is different where every expert has as many rows."""

    slots: torch.Tensor
    sources: torch.Tensor  # [EL, most]
    counts: torch.Tensor  # [EL]


@jit
def clear_padding(rows, order, expert, H: tl.constexpr, COLS: tl.constexpr, ROWS: tl.constexpr):
    """Zeros from an expert's last row to the next expert's first."""
    end = tl.load(order.offsets + expert + 1)
    for lo in range(tl.load(order.offsets + expert) + tl.load(order.received + expert), end, ROWS):
        row = lo + tl.arange(0, ROWS)
        for part in range(0, H, COLS):
            cols = part + tl.arange(0, COLS)[None, :]
            at = row.to(tl.int64)[:, None] * H + cols
            zeros = tl.zeros((ROWS, COLS), rows.dtype.element_ty)
            tl.store(rows + at, zeros, mask=(row < end)[:, None] & (cols < H))


@jit
def list_masked(order, masked, expert, MOST, BLOCK: tl.constexpr):
    """How many rows an expert has, of its MOST, and where they are from."""
    count = tl.minimum(tl.load(order.received + expert), MOST)
    tl.store(masked.counts + expert, count)
    first = tl.load(order.offsets + expert)
    for lo in range(0, MOST, BLOCK):
        i = lo + tl.arange(0, BLOCK)
        source = tl.load(order.sources + first + i, mask=i < count, other=-1)
        tl.store(masked.sources + expert.to(tl.int64) * MOST + i, source, mask=i < MOST)


@jit(do_not_specialize=("MOST",))
def mask_rows(order, masked, rank, guard, routes, MOST, EL: tl.constexpr, BLOCK: tl.constexpr, PROGRAMS: tl.constexpr):
    """Rows in order, of so many routes, each to its place among MOST rows of its expert; those past the last are left
    out. rank: the word of this one."""
    for expert in range(tl.program_id(0), EL, PROGRAMS):
        list_masked(order, masked, expert, MOST, BLOCK)
    if tl.program_id(0) == 0:
        each = tl.arange(0, triton.next_power_of_2(EL))
        received = tl.load(order.received + each, mask=each < EL, other=0)
        count_lost(guard, tl.sum(tl.maximum(received - MOST, 0), 0))
    first_expert = tl.load(rank) * EL
    for block in range(tl.program_id(0), tl.cdiv(routes, BLOCK), PROGRAMS):
        route = block * BLOCK + tl.arange(0, BLOCK)
        row = tl.load(order.slots + route, mask=route < routes, other=-1)
        e = tl.load(order.ids + route, mask=row >= 0, other=0) - first_expert
        at = row - tl.load(order.offsets + e, mask=row >= 0, other=0)
        there = tl.where(at < MOST, e * MOST + at, -2)
        tl.store(masked.slots + route, tl.where(row >= 0, there, -1), mask=route < routes)


@jit
def has_row(slots, token, there, K: tl.constexpr):
    """Which of the tokens, where `there`, have a row for one of their K routes."""
    i = tl.arange(0, triton.next_power_of_2(K))[None, :]
    row = tl.load(slots + token[:, None] * K + i, mask=there[:, None] & (i < K), other=-1)
    return tl.max(row, axis=1) >= 0


@jit(do_not_specialize=("C",))
def place_rows(
    inbox,
    rows,
    order,
    ch,
    turn,
    half,
    C,
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
    """inbox [W, C, H] to rows [.., H], in order. PADDED: behind an expert's rows are zeros up to the next expert's.
    COLS columns of ROWS tokens a block. Counter j of `ch`: wave j, ARRIVALS; 0: all has come, and no call ends. turn,
    half: as in `grouped_gemm_in`, None and 0 where calls do not take turns; with them senders, ARRIVALS of them, count
    the call too."""
    W: tl.constexpr = ch.world
    PARTS: tl.constexpr = (H + COLS - 1) // COLS
    me = rank_of(ch)
    inbox += half_of(turn, half)
    if PADDED:
        for expert in range(tl.program_id(0), EL, PROGRAMS):
            clear_padding(rows, order, expert, H, COLS, ROWS)
    for wave in range(0, W):
        source = (me - wave + W) % W
        if ARRIVALS:
            wait_until(ch.counters + wave, calls_of(ch) * ARRIVALS, ch.guard, wave, source, "sys")
        for block in tl.range(tl.program_id(0), tl.cdiv(C, ROWS) * PARTS, PROGRAMS, num_stages=STAGES):
            t = block // PARTS * ROWS + tl.arange(0, ROWS)
            cols = block % PARTS * COLS + tl.arange(0, COLS)[None, :]
            token = source * C + t
            ok = has_row(order.slots, token, t < C, K)[:, None] & (cols < H)
            part = tl.load(inbox + token.to(tl.int64)[:, None] * H + cols, mask=ok, other=0.0)
            for i in tl.static_range(K):
                row = tl.load(order.slots + token * K + i, mask=t < C, other=-1)
                at = row.to(tl.int64)[:, None] * H + cols
                tl.store(rows + at, part, mask=(row >= 0)[:, None] & (cols < H))
    if ARRIVALS:
        end_call(ch, turn, PROGRAMS if turn is None else PROGRAMS + ARRIVALS)
