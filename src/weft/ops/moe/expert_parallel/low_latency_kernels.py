"""An MoE layer's experts for a few tokens, in three launches on one stream, without tables.

    few_gemm, first    routes and tokens to the other ranks, flags | GEMM 1 of every expert with rows, activation
    few_gemm           GEMM 2
    few_sums           weighted sums to the other ranks, flags | the own tokens' sums

A route (s * C + t) * K + i has a place of its own in everything: its id, its weight, its row of hidden and of y. So
nobody counts rows, and no rank tells how many there are. Every program looks the routes of an expert up by itself,
among all of them, which few tokens allow; that an expert's weights are read once is what takes the time. A program
takes an expert's columns, and all its rows in turn, so that what is read again is read from L2.

Order of accesses. In a call a rank's flags come twice from every other: with its tokens, and with its sums. Who has
sent its sums has ended its first GEMM, the only reader of the inbox; its second, which reads the ids, too; and has read
the weights of that rank. From then on the other may send the next call's. As in kernels.py, whose inbox and outbox
these are.
"""

from typing import NamedTuple

import torch
import triton.language as tl

from ....compute.gemm import column_halves
from ....lang.channel import BlockChannel, calls_of, end_call, rank_of
from ....lang.intrinsics import same_call, wait_until
from ....lang.jit import jit
from ..routing.kernels import push_routes
from .fused_kernels import send_tokens, sum_own, sum_wave, token_rows, wait_for_sums
from .kernels import GELU, add_bias, gated, gathered_tile, gelu


class FewPlaces(NamedTuple):
    """Memory of one kind of call, as in kernels.py. ids int32, weights float32 [W, C, K], of all ranks, and their
    addresses by rank; slots int32 [W, C, K]: a route to this rank's experts, or -1; hidden [W C K, I], y [W C K, H];
    received int32 [LOCAL], rows of every own expert, for the caller, or None.
    calls: of `same_call`. LOOK: routes that are looked through at a time."""

    inbox: torch.Tensor
    inboxes: torch.Tensor
    outbox: torch.Tensor
    outboxes: torch.Tensor
    ids: torch.Tensor
    all_ids: torch.Tensor
    weights: torch.Tensor
    all_weights: torch.Tensor
    slots: torch.Tensor
    hidden: torch.Tensor
    y: torch.Tensor
    movers: int
    received: torch.Tensor | None
    calls: BlockChannel
    LOOK: tl.constexpr


@jit
def experts_of(ids, at, r, me, T, C, s, W: tl.constexpr):
    """int32: number among the own experts of the expert of routes r; -1: another rank's, or none. Own ids are read
    where they are."""
    given = r - me * C * s.K
    own = (given >= 0) & (given < C * s.K)
    here = tl.where(own, ids + given, at.ids + r)
    e = tl.load(here, mask=(r < W * C * s.K) & ((given < T * s.K) | (given >= C * s.K)), other=-1) - me * s.LOCAL
    return tl.where((e >= 0) & (e < s.LOCAL), e, -1)


@jit
def rows_of_experts(ids, at, me, T, C, s, W: tl.constexpr, ELP: tl.constexpr, LOOK: tl.constexpr):
    """int32 [ELP]: how many rows each own expert has. LOOK routes at a time."""
    found = tl.zeros((ELP,), tl.int32)
    for lo in range(0, W * C * s.K, LOOK):
        e = experts_of(ids, at, lo + tl.arange(0, LOOK), me, T, C, s, W)
        found += tl.histogram(tl.maximum(e, 0), ELP, mask=e >= 0)
    return found


@jit
def routes_of(ids, at, expert, first, me, T, C, s, W: tl.constexpr, LOOK: tl.constexpr):
    """int32 [BM]: an expert's routes from its row `first` on, by source, token and slot; -1 behind the last."""
    j = first + tl.arange(0, s.BM)
    routes = tl.full((s.BM,), -1, tl.int32)
    before = 0
    for lo in range(0, W * C * s.K, LOOK):
        r = lo + tl.arange(0, LOOK)
        mine = (experts_of(ids, at, r, me, T, C, s, W) == expert).to(tl.int32)
        place = tl.where(mine > 0, before + tl.cumsum(mine, 0) - 1, -1)
        routes = tl.maximum(routes, tl.max(tl.where(place[None, :] == j[:, None], r[None, :], -1), 1))
        before += tl.sum(mine, 0)
    return routes


@jit
def store_rows(to, values, routes, col, N, BN: tl.constexpr):
    """values [.., BN] to columns `col` on of the rows of N elements that the routes are."""
    c = col + tl.arange(0, BN)[None, :]
    at = to + routes.to(tl.int64)[:, None] * N + c
    tl.store(at, values.to(to.dtype.element_ty), mask=(routes >= 0)[:, None] & (c < N))


@jit
def store_hidden(to, acc, routes, tn, s):
    """A tile's activation, to hidden [.., I]. As `store_activated`, of BN = 2 GATED where there is a gate."""
    if s.ACT == GELU:
        store_rows(to, gelu(acc), routes, tn * s.BN, s.INNER, s.BN)
    else:
        gate, up = column_halves(acc, s.BM, s.BN)
        store_rows(to, gated(gate, up, s.ACT), routes, tn * s.GATED, s.INNER, s.GATED)


@jit
def note_slots(ids, at, ch, T, C, s, LOOK: tl.constexpr):
    """A program's share of the table of slots."""
    W: tl.constexpr = ch.world
    for lo in range(tl.program_id(0) * LOOK, W * C * s.K, tl.num_programs(0) * LOOK):
        r = lo + tl.arange(0, LOOK)
        e = experts_of(ids, at, r, rank_of(ch), T, C, s, W)
        tl.store(at.slots + r, tl.where(e >= 0, r, -1), mask=r < W * C * s.K)


@jit(do_not_specialize=("T", "C", "number"))
def few_gemm(
    x,
    ids,
    weights,
    at,
    w_desc,
    bias,
    ch,
    number,
    T,
    C,
    N,
    K,
    s,
    FIRST: tl.constexpr,
    WHOLE: tl.constexpr,
    ELP: tl.constexpr,
):
    """w_desc [experts N, K], bias [experts, N] or None. FIRST: rows of tokens, by way of the activation, to hidden [..,
    INNER]; else of hidden to y [.., N]. A task is BN columns of an expert with rows; tasks go round the programs."""
    W: tl.constexpr = ch.world
    pid = tl.program_id(0)
    me = rank_of(ch)
    K = K // 8 * 8  # rows are whole 16-byte words
    if FIRST:
        if pid < at.movers:
            push_routes(ids, weights, at.all_ids, at.all_weights, ch, 0, T * s.K, C * s.K, pid, at.movers, 128)
            send_tokens(x, ids, at, ch, T, C, s)
        if pid == tl.num_programs(0) - 1:  # all layers share counters and memory
            same_call(at.calls, number)
        for j in range(1, W):
            wait_until(ch.counters + j - 1, calls_of(ch) * at.movers, ch.guard, -1, (me - j + W) % W, "sys")
        note_slots(ids, at, ch, T, C, s, at.LOOK)
    found = rows_of_experts(ids, at, me, T, C, s, W, ELP, at.LOOK)
    e = tl.arange(0, ELP)
    if FIRST and at.received is not None:  # behind this rank's sums the ids may be the next call's
        if pid == 0:
            tl.store(at.received + e, found, mask=e < s.LOCAL)
    order = tl.cumsum((found > 0).to(tl.int32), 0)
    tiles_n = tl.cdiv(N, s.BN)
    for task in range(pid, tl.max(order, 0) * tiles_n, tl.num_programs(0)):
        tn = task % tiles_n
        this = (found > 0) & (order == task // tiles_n + 1)
        expert = tl.sum(tl.where(this, e, 0), 0)
        for first in range(0, tl.sum(tl.where(this, found, 0), 0), s.BM):
            routes = routes_of(ids, at, expert, first, me, T, C, s, W, at.LOOK)
            if FIRST:
                rows = token_rows(x, at.inbox, (routes // s.K)[:, None], me, C, K)
            else:
                rows = at.hidden + routes.to(tl.int64)[:, None] * K
            there = (routes >= 0)[:, None]
            acc = gathered_tile(rows, there, w_desc, expert * N + tn * s.BN, K, s.BM, s.BN, s.BK, WHOLE)
            acc = add_bias(acc, bias, expert, tn * s.BN, N, s.BN)
            if FIRST:
                store_hidden(at.hidden, acc, routes, tn, s)
            else:
                store_rows(at.y, acc, routes, tn * s.BN, N, s.BN)


@jit(do_not_specialize=("T", "C"))
def few_sums(ids, shared, out, at, ch, T, C, s):
    """out [T, H]: as `sum_ranks`, of what the ranks send here."""
    if tl.program_id(0) < at.movers:
        for j in range(1, ch.world):
            sum_wave(at, ch, j, C, s)
    wait_for_sums(ch, at)
    sum_own(ids, shared, out, at, ch, T, C, s)
    end_call(ch, None, tl.num_programs(0))
