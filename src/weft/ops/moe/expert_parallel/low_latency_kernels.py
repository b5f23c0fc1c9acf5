"""The kernels that run an MoE layer's experts for few tokens, in three launches on one stream, without tables.

    low_latency_gemm, FIRST_GEMM  send routes and tokens to the other ranks, flags | GEMM 1 of every expert with rows,
                                  activation
    low_latency_gemm              GEMM 2
    low_latency_sums              send weighted sums to the other ranks, flags | sum own tokens

Route (s * max_tokens + t) * K + i has the same fixed position in the ids, the weights, hidden and y, so no rank has to
count or announce rows. Every program finds the routes of an expert by scanning all routes. For few tokens the scan is
cheap, and most of the time is spent on reading each expert's weights once. A program computes some columns of an expert
for all of the expert's rows, so that repeated reads of the weights come from L2.

Memory order. In each call a rank receives two flags from every other rank: one with that rank's tokens and one with its
sums. A rank that has sent its sums has finished its first GEMM, the only reader of the inbox, and its second GEMM,
which reads the ids. The sending rank has also read the routing weights of the rank that receives the sums. The
receiving rank may therefore send the tokens of its next call. The same order holds in kernels.py, which uses the same
inbox and outbox.
"""

from typing import NamedTuple

import torch
import triton.language as tl

from ....compute.gemm import column_halves
from ....lang.channel import BlockChannel, calls_of, end_call, rank_of
from ....lang.intrinsics import same_call, wait_until
from ....lang.jit import jit
from ..activations import GELU
from ..routing.kernels import push_routes
from .fused_kernels import send_step_sums, send_tokens, sum_own_tokens, token_rows, wait_for_sums
from .kernels import add_bias, gated, gathered_tile, gelu


class LowLatencyMemory(NamedTuple):
    """The memory that all calls of one layer and plan use. The tensors correspond to the ones in kernels.py.

    ids int32 and weights float32 [W, max_tokens, K] hold the routes of all ranks; each rank has the address of every
    rank's tensors. route_rows int32 [W, max_tokens, K]: the index of each route to this rank's experts, -1 for other
    routes. hidden is [W max_tokens K, I], and y is [W max_tokens K, H]. received int32 [EL]: the number of rows of
    every own expert, for the caller, or None. calls: the channel of `same_call`. SCAN_BLOCK: the number of routes that
    are scanned at once.
    """

    inbox: torch.Tensor
    inboxes: torch.Tensor
    outbox: torch.Tensor
    outboxes: torch.Tensor
    ids: torch.Tensor
    all_ids: torch.Tensor
    weights: torch.Tensor
    all_weights: torch.Tensor
    route_rows: torch.Tensor
    hidden: torch.Tensor
    y: torch.Tensor
    copy_programs: int
    received: torch.Tensor | None
    calls: BlockChannel
    SCAN_BLOCK: tl.constexpr


@jit
def own_expert_of(ids, memory, r, me, T, max_tokens, s, W: tl.constexpr):
    """Return int32: which of this rank's experts the routes r select; -1 for an expert of another rank and for no
    expert. The ids of this rank's own tokens are read from `ids`."""
    own_route = r - me * max_tokens * s.K
    is_own = (own_route >= 0) & (own_route < max_tokens * s.K)
    id_addresses = tl.where(is_own, ids + own_route, memory.ids + r)
    exists = (r < W * max_tokens * s.K) & ((own_route < T * s.K) | (own_route >= max_tokens * s.K))
    e = tl.load(id_addresses, mask=exists, other=-1) - me * s.EL
    return tl.where((e >= 0) & (e < s.EL), e, -1)


@jit
def rows_of_experts(ids, memory, me, T, max_tokens, s, W: tl.constexpr, ELP: tl.constexpr, SCAN_BLOCK: tl.constexpr):
    """Return int32 [ELP]: the number of rows of each own expert. SCAN_BLOCK routes are scanned at once."""
    rows_per_expert = tl.zeros((ELP,), tl.int32)
    for lo in range(0, W * max_tokens * s.K, SCAN_BLOCK):
        e = own_expert_of(ids, memory, lo + tl.arange(0, SCAN_BLOCK), me, T, max_tokens, s, W)
        rows_per_expert += tl.histogram(tl.maximum(e, 0), ELP, mask=e >= 0)
    return rows_per_expert


@jit
def routes_of_expert(ids, memory, expert, first_row, me, T, max_tokens, s, W: tl.constexpr, SCAN_BLOCK: tl.constexpr):
    """Return int32 [BM]: the routes of an expert, beginning with its row `first_row`, in the order of source, token and
    top-k slot; -1 after the last route."""
    j = first_row + tl.arange(0, s.BM)
    routes = tl.full((s.BM,), -1, tl.int32)
    rows_before = 0
    for lo in range(0, W * max_tokens * s.K, SCAN_BLOCK):
        r = lo + tl.arange(0, SCAN_BLOCK)
        matches = (own_expert_of(ids, memory, r, me, T, max_tokens, s, W) == expert).to(tl.int32)
        row_of_route = tl.where(matches > 0, rows_before + tl.cumsum(matches, 0) - 1, -1)
        routes = tl.maximum(routes, tl.max(tl.where(row_of_route[None, :] == j[:, None], r[None, :], -1), 1))
        rows_before += tl.sum(matches, 0)
    return routes


@jit
def store_rows(dst, values, routes, col, N, BN: tl.constexpr):
    """Store values [.., BN] in the routes' rows, beginning at column `col`. A row has N elements."""
    c = col + tl.arange(0, BN)[None, :]
    addresses = dst + routes.to(tl.int64)[:, None] * N + c
    tl.store(addresses, values.to(dst.dtype.element_ty), mask=(routes >= 0)[:, None] & (c < N))


@jit
def store_hidden(dst, acc, routes, tn, s):
    """Store a tile's activation in hidden [.., I], as `store_activated` does. If there is a gate, BN = 2 BLOCK."""
    if s.ACT == GELU:
        store_rows(dst, gelu(acc), routes, tn * s.BN, s.INNER, s.BN)
    else:
        gate, up = column_halves(acc, s.BM, s.BN)
        store_rows(dst, gated(gate, up, s.ACT), routes, tn * s.BLOCK, s.INNER, s.BLOCK)


@jit
def store_route_rows(ids, memory, ch, T, max_tokens, s, SCAN_BLOCK: tl.constexpr):
    """Store this program's part of route_rows."""
    W: tl.constexpr = ch.world
    for lo in range(tl.program_id(0) * SCAN_BLOCK, W * max_tokens * s.K, tl.num_programs(0) * SCAN_BLOCK):
        r = lo + tl.arange(0, SCAN_BLOCK)
        e = own_expert_of(ids, memory, r, rank_of(ch), T, max_tokens, s, W)
        tl.store(memory.route_rows + r, tl.where(e >= 0, r, -1), mask=r < W * max_tokens * s.K)


@jit(do_not_specialize=("T", "max_tokens", "number"))
def low_latency_gemm(
    x,
    ids,
    weights,
    memory,
    w_desc,
    bias,
    ch,
    number,
    T,
    max_tokens,
    N,
    K,
    s,
    FIRST_GEMM: tl.constexpr,
    EVEN_K: tl.constexpr,
    ELP: tl.constexpr,
):
    """Compute one of the two grouped GEMMs. w_desc [experts N, K], bias [experts, N] or None.

    With FIRST_GEMM, the kernel multiplies rows of tokens and stores the activation in hidden [.., INNER]. Otherwise it
    multiplies hidden and stores y [.., N]. A task computes BN columns of an expert that has rows; the tasks are
    distributed over the programs in turn.
    """
    W: tl.constexpr = ch.world
    pid = tl.program_id(0)
    me = rank_of(ch)
    K = K // 8 * 8  # the length of a row is a multiple of 16 bytes
    if FIRST_GEMM:
        if pid < memory.copy_programs:
            push_routes(
                ids,
                weights,
                memory.all_ids,
                memory.all_weights,
                ch,
                0,
                T * s.K,
                max_tokens * s.K,
                pid,
                memory.copy_programs,
                128,
            )
            send_tokens(x, ids, memory, ch, T, max_tokens, s)
        if pid == tl.num_programs(0) - 1:  # all layers share counters and memory
            same_call(memory.calls, number)
        for j in range(1, W):
            wait_until(ch.counters + j - 1, calls_of(ch) * memory.copy_programs, ch.guard, -1, (me - j + W) % W, "sys")
        store_route_rows(ids, memory, ch, T, max_tokens, s, memory.SCAN_BLOCK)
    rows_per_expert = rows_of_experts(ids, memory, me, T, max_tokens, s, W, ELP, memory.SCAN_BLOCK)
    e = tl.arange(0, ELP)
    if FIRST_GEMM and memory.received is not None:  # the next call may overwrite the ids once sums are sent
        if pid == 0:
            tl.store(memory.received + e, rows_per_expert, mask=e < s.EL)
    order = tl.cumsum((rows_per_expert > 0).to(tl.int32), 0)
    tiles_n = tl.cdiv(N, s.BN)
    for task in range(pid, tl.max(order, 0) * tiles_n, tl.num_programs(0)):
        tn = task % tiles_n
        is_task_expert = (rows_per_expert > 0) & (order == task // tiles_n + 1)
        expert = tl.sum(tl.where(is_task_expert, e, 0), 0)
        for first_row in range(0, tl.sum(tl.where(is_task_expert, rows_per_expert, 0), 0), s.BM):
            routes = routes_of_expert(ids, memory, expert, first_row, me, T, max_tokens, s, W, memory.SCAN_BLOCK)
            if FIRST_GEMM:
                row_pointers = token_rows(x, memory.inbox, (routes // s.K)[:, None], me, max_tokens, K)
            else:
                row_pointers = memory.hidden + routes.to(tl.int64)[:, None] * K
            valid = (routes >= 0)[:, None]
            acc = gathered_tile(row_pointers, valid, w_desc, expert * N + tn * s.BN, K, s.BM, s.BN, s.BK, EVEN_K)
            acc = add_bias(acc, bias, expert, tn * s.BN, N, s.BN)
            if FIRST_GEMM:
                store_hidden(memory.hidden, acc, routes, tn, s)
            else:
                store_rows(memory.y, acc, routes, tn * s.BN, N, s.BN)


@jit(do_not_specialize=("T", "max_tokens"))
def low_latency_sums(ids, shared, out, memory, ch, T, max_tokens, s):
    """Send the weighted sums of other ranks' tokens to these ranks. Then compute out [T, H] as `sum_ranks` does."""
    if tl.program_id(0) < memory.copy_programs:
        for j in range(1, ch.world):
            send_step_sums(memory, ch, j, max_tokens, s)
    wait_for_sums(ch, memory)
    sum_own_tokens(ids, shared, out, memory, ch, T, max_tokens, s)
    end_call(ch, None, tl.num_programs(0))
