"""Kernels of expert parallelism. Each rank sends rows to the ranks that hold their experts. Two grouped GEMMs run
there, and weighted sums are sent back.

    dispatch_rows     stores each token once in the inbox of every rank that holds one of its experts, beginning with
                      this rank, then me + 1, ..
    grouped_gemm_in   gathers rows of the inbox by the table of sources, multiplies them by w13, and applies the
                      activation. Tiles are computed in the order in which their rows arrive, and each tile waits for
                      the ranks whose rows it needs
    grouped_gemm_out  multiplies by w2, with the tiles in reverse order, so that the tiles for which other ranks wait
                      are finished first. It counts finished tiles by source step
    local_first       moves each token's routes to this rank's experts before its other routes
    combine_rows      sums the weighted rows of another rank's tokens into the outbox of that rank once their tiles are
                      finished, beginning with the farthest rank
    sum_ranks         on the token's rank, adds this rank's own rows and the sums that the other ranks sent

    side stream   | dispatch_rows         | local_first |         | combine_rows               |
    main stream   | tables        | grouped_gemm_in     | grouped_gemm_out           |           | sum_ranks

Source step j contains the rows from rank me - j. The j-th destination of a rank is me + j, so the rows arrive roughly
in the order of the source steps. The table of tiles (int32 [.., 4]: first row, expert, first and last source step) is
sorted by last source step.

Memory order. A rank begins a call after every rank has sent its sums of the previous call, because `sum_ranks`, the
last kernel of a call, waits for all ranks. A rank announces its sums after its first GEMM and, if the backward pass
needs the received tokens, after their copy: nothing else reads its inbox. So no rank still reads rows that
`dispatch_rows` overwrites. Other ranks write to a rank's outbox only for rows that this rank has sent in the current
call, and by then it has read the sums of the previous call. So inbox and outbox need no second half. Each counter that
another rank increments is incremented by one rank only.

Symbols of shapes:

    T, H       T tokens on this rank, of H columns each
    K, KP      K routes per token, and K rounded up to a power of two; in a GEMM, K columns of the input
    N          the number of columns of a GEMM's result
    P          H rounded up to a power of two; in a GEMM, the number of programs
    W, EL      the number of ranks, and the number of experts on a rank
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl

from ....compute.gemm import FLUSHED, column_halves, grouped_tile, silu, whole_tiles
from ....lang.channel import address_of, calls_of, end_call, rank_of
from ....lang.intrinsics import flush_stores, same_call, wait_until
from ....lang.jit import jit
from ....lang.primitives import channel_notify
from ..activations import CLAMPED, GELU
from ..routing.kernels import take_left_out

# The total that a row of tiles adds to a counter. The total does not depend on the number of columns, so that waits do
# not depend on the width of a layer.
ROW_OF_TILES = tl.constexpr(4096)
ROUTES_TOGETHER = tl.constexpr(4)  # the routes of a token whose rows `weighted_sum` loads together if it has counts


class GatheredSizes(NamedTuple):
    """The sizes of `grouped_gemm_in`.

    ARRIVALS: the number of arrivals at the counter of a source step in each call. OTHER_PROGRAMS: the number of
    programs in a second launch that also advance `epoch`. EVEN_K as in `gathered_tile`; ACT, BLOCK as in
    `store_activated`. FLATTEN: whether the loop over tiles is flattened. HALVES: whether tiles of the last round are
    split (`whole_tiles`), which requires that half of a tile consists of two blocks.
    """

    ARRIVALS: tl.constexpr
    OTHER_PROGRAMS: tl.constexpr
    BM: tl.constexpr
    BN: tl.constexpr
    BK: tl.constexpr
    GROUP_M: tl.constexpr
    EVEN_K: tl.constexpr
    ACT: tl.constexpr
    BLOCK: tl.constexpr
    FLATTEN: tl.constexpr
    HALVES: tl.constexpr


class RoutedRows(NamedTuple):
    """The rows y [rows, H] of all tokens' routes. For each route [W, max_tokens, K] there are also the int32 index of
    its row of y (-1 for none, -2 for a row that was left out) and its float32 weight.

    counts int32 [W, max_tokens]: the number of each token's routes to this rank's experts, which then come before its
    other routes (`local_first`). None: all routes are in the order of the slots."""

    y: torch.Tensor
    route_rows: torch.Tensor
    weights: torch.Tensor
    counts: torch.Tensor | None = None


class RankSumSizes(NamedTuple):
    """The sizes that `sum_ranks` needs: H columns, K routes per token, and EL experts on each rank, whose columns
    TP_SIZE neighbouring ranks share. A block consists of COLS columns of ROWS tokens."""

    H: tl.constexpr
    K: tl.constexpr
    EL: tl.constexpr
    TP_SIZE: tl.constexpr
    ROWS: tl.constexpr
    COLS: tl.constexpr


@jit
def half_offset(epoch, half_size):
    """Return the first element of the half that this call uses; the second half begins after `half_size` elements.
    epoch: the word whose parity selects the half, or None if there is no second half."""
    # The parity remains right after the word has wrapped past 2^31.
    return 0 if epoch is None else (tl.load(epoch) & 1).to(tl.int64) * half_size


@jit
def has_expert_on(ids, t, valid, rank, K: tl.constexpr, KP: tl.constexpr, EL: tl.constexpr):
    """Return which of the tokens `t`, where `valid`, have one of their K experts on `rank`. Each rank has EL experts.
    An id of -1 in ids [.., K] means no expert."""
    topk_slot = tl.arange(0, KP)[None, :]
    expert = tl.load(ids + t[:, None] * K + topk_slot, mask=valid[:, None] & (topk_slot < K), other=-1)
    return tl.max(((expert >= 0) & (expert // EL == rank)).to(tl.int32), axis=1) > 0


@jit
def send_rows(
    x,
    ids,
    dst,
    rank,
    T,
    program,
    H: tl.constexpr,
    P: tl.constexpr,
    K: tl.constexpr,
    KP: tl.constexpr,
    EL: tl.constexpr,
    ROWS: tl.constexpr,
    STAGES: tl.constexpr,
    PROGRAMS,
):
    """Copy the tokens of x [T, H] that have an expert on `rank` to the same rows of dst. PROGRAMS programs share the
    work; this one copies the part with the index `program`. All further arguments are as in `dispatch_rows`."""
    cols = tl.arange(0, P)[None, :]
    for block in tl.range(program, tl.cdiv(T, ROWS), PROGRAMS, num_stages=STAGES):
        t = block * ROWS + tl.arange(0, ROWS)
        mask = has_expert_on(ids, t, t < T, rank, K, KP, EL)[:, None] & (cols < H)
        offsets = t.to(tl.int64)[:, None] * H + cols
        tl.store(dst + offsets, tl.load(x + offsets, mask=mask, other=0.0), mask=mask)


@jit(do_not_specialize=("T", "max_tokens"))
def dispatch_rows(
    x, ids, inboxes, ch, T, max_tokens,
    DTYPE: tl.constexpr, H: tl.constexpr, P: tl.constexpr, K: tl.constexpr, KP: tl.constexpr, EL: tl.constexpr,
    ROWS: tl.constexpr, STAGES: tl.constexpr, PROGRAMS: tl.constexpr,
):  # fmt: skip
    """Send every token of x [T, H] to the ranks that hold its experts, ids int32 [T, K].

    inboxes: the address of every rank's inbox [W, max_tokens, H]. P, KP: H and K rounded up to powers of two. A block
    consists of ROWS rows, and STAGES blocks are in flight. Counter j of rank me + j belongs to source step j of that
    rank, and receives PROGRAMS arrivals from this rank.
    """
    W: tl.constexpr = ch.world
    me = rank_of(ch)
    for j in range(0, W):
        rank = (me + j) % W
        dst = address_of(inboxes, rank, DTYPE) + (me * max_tokens).to(tl.int64) * H
        send_rows(x, ids, dst, rank, T, tl.program_id(0), H, P, K, KP, EL, ROWS, STAGES, PROGRAMS)
        channel_notify(ch, j, rank, False)  # a rank that receives no rows is notified too, because waits count calls


@jit
def gelu(x):
    """Return x times the cumulative normal distribution at x, with an error of at most 2e-7 |x|: the tail beyond |x| is
    erfc by Abramowitz and Stegun, 7.1.26. `tl.erf` needs more registers than a tile of 128 x 256 leaves."""
    t = 1.0 / (1.0 + 0.2316418837 * tl.abs(x))
    tail = t * (0.127414796 + t * (-0.142248368 + t * (0.7107068705 + t * (-0.7265760135 + t * 0.5307027145))))
    return tl.maximum(x, 0.0) - tl.abs(x) * (tail * tl.exp(-0.5 * x * x))


@jit
def gated(gate, up, ACT: tl.constexpr):
    """Return the gated activation of gate and up."""
    if ACT == CLAMPED:
        gate = tl.minimum(gate, 7.0)
        up = tl.minimum(tl.maximum(up, -7.0), 7.0)
        out = (up + 1.0) * gate / (1.0 + tl.exp(-1.702 * gate))
    else:
        out = silu(gate) * up
    return out


@jit
def add_bias(acc, bias, expert, col, N, BN: tl.constexpr):
    """Return acc plus the expert's row of bias [experts, N], or acc if bias is None."""
    if bias is not None:
        c = col + tl.arange(0, BN)
        acc += tl.load(bias + expert * N + c, mask=c < N, other=0.0).to(tl.float32)[None, :]
    return acc


@jit
def store_blocks(out_desc, preactivation_desc, acc, bias, expert, row, col, N, COLS: tl.constexpr, s):
    """Store the activation of acc [BM, COLS] plus the bias by TMA and, unless preactivation_desc is None, this sum
    itself. Both have blocks [BM, COLS / 2]. Unless the activation is GELU, acc consists of a block of gate columns and
    one of up columns. All further arguments are as in `store_activated`.

    The bias is added to these columns and not to the whole tile, and the activation is stored first. Otherwise ptxas
    would spill: 1,756 bytes for GELU with a bias, up to 112 bytes for SwiGLU (sm_90a, Triton 3.6). With 8 ranks that
    share experts' columns, saved activations and a bias, it still spills 96 bytes for GELU and 52 for CLAMPED."""
    HALF: tl.constexpr = COLS // 2
    left, right = column_halves(add_bias(acc, bias, expert, col, N, COLS), s.BM, COLS)
    if s.ACT == GELU:
        out_desc.store([row, col], gelu(left).to(out_desc.dtype))
        out_desc.store([row, col + HALF], gelu(right).to(out_desc.dtype))
    else:
        out_desc.store([row, col // 2], gated(left, right, s.ACT).to(out_desc.dtype))
    if preactivation_desc is not None:
        preactivation_desc.store([row, col], left.to(preactivation_desc.dtype))
        preactivation_desc.store([row, col + HALF], right.to(preactivation_desc.dtype))


@jit
def store_activated(out_desc, preactivation_desc, acc, bias, expert, row, col, N, s):
    """Store the activation of a tile acc [BM, BN] plus the expert's row of bias [experts, N] (or None) and, unless
    preactivation_desc is None, this sum itself. Unless the activation is GELU, blocks of gate and of up columns
    alternate. s: sizes with BM, BN, ACT and BLOCK, which is half or a quarter of BN.

    Both have blocks [BM, BLOCK], so that Triton stores them through the same shared memory. If the sum had blocks of BN
    / 2 columns instead, three stages of a usual tile's operands would fit beside them, and not four."""
    HALF: tl.constexpr = s.BN // 2
    if s.BLOCK == HALF:
        store_blocks(out_desc, preactivation_desc, acc, bias, expert, row, col, N, s.BN, s)
    else:
        left, right = column_halves(acc, s.BM, s.BN)
        store_blocks(out_desc, preactivation_desc, left, bias, expert, row, col, N, HALF, s)
        store_blocks(out_desc, preactivation_desc, right, bias, expert, row, col + HALF, N, HALF, s)


@jit
def gathered_tile(
    row_pointers, valid, w_desc, col, K, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, EVEN_K: tl.constexpr
):
    """Return fp32 [BM, BN]: the rows of K elements at the pointers `row_pointers` [BM, 1], times the rows of w_desc
    from `col` on. Rows that are not `valid` count as zeros. EVEN_K: K is a multiple of BK."""
    c = tl.arange(0, BK)[None, :]
    pointers = row_pointers + c
    acc = tl.zeros((BM, BN), tl.float32)
    for k in range(0, K, BK):
        mask = valid if EVEN_K else valid & (k + c < K)
        acc = tl.dot(tl.load(pointers + k, mask=mask, other=0.0), w_desc.load([col, k]).T, acc)
    return acc


@jit
def store_plain(out_desc, acc, row, col, BM: tl.constexpr, BN: tl.constexpr):
    """Store a tile without an activation, by TMA, in blocks [BM, BN / 2]."""
    left, right = column_halves(acc, BM, BN)
    out_desc.store([row, col], left.to(out_desc.dtype))
    out_desc.store([row, col + BN // 2], right.to(out_desc.dtype))


@jit
def wait_for_rows(ch, me, waited_step, last_step, tile, ARRIVALS: tl.constexpr):
    """Wait for the rows of a tile, of the source steps after `waited_step` up to `last_step`. ARRIVALS: as in
    `GatheredSizes`."""
    for source_step in tl.static_range(ch.world):
        if (source_step > waited_step) & (source_step <= last_step):
            source = (me - source_step + ch.world) % ch.world
            wait_until(ch.counters + source_step, calls_of(ch) * ARRIVALS, ch.guard, tile, source, "sys")


# This kernel needs no guarded loads, because a tile waits before its own K loop, as in `all_gather_gemm`. Guarded loads
# would make ptxas spill 16 bytes for GELU at 1,032 x 520, because concurrent kernels limit the number of registers
# (sm_90a, Triton 3.6).
@jit(guard_loads=False)
def grouped_gemm_in(
    inbox, sources, w_desc, w_half_desc, hidden_desc, preactivation_desc, bias, tiles, tile_count, ch, epoch, half_size,
    N, K, s,
):  # fmt: skip
    """Compute hidden_desc [rows, I] = the activation of (rows of the inbox @ w_desc + bias), tile by tile as the rows
    arrive.

    inbox [.., K]; sources int32 [rows]: the inbox row of each row, or -1. w_desc is [experts N, K]; w_half_desc is the
    same in blocks of half as many rows. hidden_desc, preactivation_desc [rows, N]: as in `store_activated`. bias is
    [experts, N] or None. tiles is int32 [.., 4], and tile_count int32 [1]. epoch, half_size: as in `half_offset`; the
    last program of this launch and of the OTHER_PROGRAMS programs advances the epoch. s: `GatheredSizes`.

    A tile waits for all source steps up to its last one, except for the steps for which the program's previous tile has
    waited. Rows are stored and loaded by ordinary instructions, so no proxy fence is needed for them. No kernel writes
    w.
    """
    K = K // 8 * 8  # rows are whole 16-byte words
    P = tl.num_programs(0)
    tiles_m = tl.load(tile_count)
    tiles_n = tl.cdiv(N, s.BN)
    me = rank_of(ch)
    inbox += half_offset(epoch, half_size)
    whole = whole_tiles(tiles_m * tiles_n, P) if s.HALVES else tiles_m * tiles_n
    for t in tl.range(tl.program_id(0), whole, P, flatten=s.FLATTEN):
        i, tn = grouped_tile(t, tiles_m, tiles_n, s.GROUP_M)
        previous_tile, _ = grouped_tile(tl.maximum(t - P, 0), tiles_m, tiles_n, s.GROUP_M)
        waited_step = tl.load(tiles + 4 * previous_tile + 3, mask=t >= P, other=-1)
        wait_for_rows(ch, me, waited_step, tl.load(tiles + 4 * i + 3), i, s.ARRIVALS)
        row = tl.load(tiles + 4 * i)
        expert = tl.load(tiles + 4 * i + 1)
        source = tl.load(sources + row + tl.arange(0, s.BM))[:, None]
        row_pointers = inbox + source.to(tl.int64) * K
        acc = gathered_tile(row_pointers, source >= 0, w_desc, expert * N + tn * s.BN, K, s.BM, s.BN, s.BK, s.EVEN_K)
        store_activated(hidden_desc, preactivation_desc, acc, bias, expert, row, tn * s.BN, N, s)
    if s.HALVES:
        half = 2 * whole + tl.program_id(0)
        # K > 0 is always true; without this test ptxas cannot infer it, and serialises wgmmas.
        if (half < 2 * tiles_m * tiles_n) & (K > 0):
            HALF: tl.constexpr = s.BN // 2
            i, tn = grouped_tile(half // 2, tiles_m, tiles_n, s.GROUP_M)
            col = tn * s.BN + half % 2 * HALF
            wait_for_rows(ch, me, -1, tl.load(tiles + 4 * i + 3), i, s.ARRIVALS)
            row = tl.load(tiles + 4 * i)
            expert = tl.load(tiles + 4 * i + 1)
            source = tl.load(sources + row + tl.arange(0, s.BM))[:, None]
            row_pointers = inbox + source.to(tl.int64) * K
            w_row = expert * N + col
            half_acc = gathered_tile(row_pointers, source >= 0, w_half_desc, w_row, K, s.BM, HALF, s.BK, s.EVEN_K)
            store_blocks(hidden_desc, preactivation_desc, half_acc, bias, expert, row, col, N, HALF, s)
    end_call(ch, epoch, P + s.OTHER_PROGRAMS)


@jit
def step_increments(first_step, last_step, tn, tiles_n, half, W: tl.constexpr):
    """Return int32 by source step: the value that a tile in column tn adds to the counter of each step. The tile has
    rows of source steps `first_step` to `last_step`. half: 0 or 1 for half of a tile, -1 for a whole one."""
    source_step = tl.arange(0, triton.next_power_of_2(W))
    whole = tl.where(tn == tiles_n - 1, ROW_OF_TILES - 2 * (tiles_n - 1), 2)
    increment = tl.where(half < 0, whole, tl.where(half == 0, 1, whole - 1))
    return tl.where((source_step >= first_step) & (source_step <= last_step), increment, 0)


@jit
def count_tiles(counters, increments, W: tl.constexpr):
    """Release the stores of finished tiles to the programs that wait for their source steps. increments: the sum of
    these tiles' increments (`step_increments`)."""
    flush_stores(True)
    source_step = tl.arange(0, triton.next_power_of_2(W))
    tl.atomic_add(
        counters + source_step, increments, mask=(source_step < W) & (increments > 0), sem="release", scope="gpu"
    )


@jit
def grouped_gemm_out(
    hidden_desc, w_desc, w_half_desc, y_desc, bias, tiles, tile_count, counters, N, K,
    W: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, GROUP_M: tl.constexpr,
    KN_WEIGHT: tl.constexpr,
):  # fmt: skip
    """Compute y_desc [rows, N] = hidden_desc [rows, K] @ w_desc (+ bias), with the tiles in reverse order. Finished
    tiles are counted by source step.

    w_desc is [experts N, K], or, with KN_WEIGHT, [experts K, N]; w_half_desc is the same in blocks of half as many
    columns of y, for the tiles of a last round (`whole_tiles`). y_desc has blocks [BM, BN / 2]. bias, tiles and
    tile_count are as in `grouped_gemm_in`. counters int32 [W] are local to this GPU, one for each source step: a row of
    tiles adds ROW_OF_TILES to the counter of each of its source steps.

    One loop runs over the K steps of all tiles. A program counts all of its tiles with the same last source step
    together, FLUSHED K steps into the first tile of a later step (compute/gemm.py), or at its end. Counting them
    together delays no reader, because a reader of a source step waits for all tiles of the step, and it saves fences,
    because each release waits for one. Without counting, the kernel took 6% less time than with tiles counted one by
    one (Qwen3-30B, 1 H200, 2026-11).
    """
    tiles_m = tl.load(tile_count)
    tiles_n = tl.cdiv(N, BN)
    k_steps = tl.cdiv(K, BK)
    flush_step = min(FLUSHED, k_steps - 1)
    P = tl.num_programs(0)
    t = tl.program_id(0) - P
    pending_step = -1  # the last source step of the tiles in `increments`
    k_step, row, expert, tn, first_step, last_step = k_steps - 1, 0, 0, 0, 0, 0
    increments = tl.zeros((triton.next_power_of_2(W),), tl.int32)
    acc = tl.zeros((BM, BN), tl.float32)
    whole = whole_tiles(tiles_m * tiles_n, P)
    for _ in tl.range(0, tl.cdiv(whole - tl.program_id(0), P) * k_steps):
        k_step = tl.where(k_step == k_steps - 1, 0, k_step + 1)
        if k_step == 0:
            t += P
            i, tn = grouped_tile(t, tiles_m, tiles_n, GROUP_M)
            tile = tiles + 4 * (tiles_m - 1 - i)
            row = tl.load(tile)
            expert = tl.load(tile + 1)
            first_step = tl.load(tile + 2)
            last_step = tl.load(tile + 3)
        a = hidden_desc.load([row, k_step * BK])
        if KN_WEIGHT:
            acc = tl.dot(a, w_desc.load([expert * K + k_step * BK, tn * BN]), acc)
        else:
            acc = tl.dot(a, w_desc.load([expert * N + tn * BN, k_step * BK]).T, acc)
        if (k_step == flush_step) & (pending_step >= 0) & (pending_step != last_step):
            count_tiles(counters, increments, W)
            increments = tl.zeros_like(increments)
            pending_step = -1
        if k_step == k_steps - 1:
            acc = add_bias(acc, bias, expert, tn * BN, N, BN)
            store_plain(y_desc, acc, row, tn * BN, BM, BN)
            increments += step_increments(first_step, last_step, tn, tiles_n, -1, W)
            pending_step = last_step
            acc = tl.zeros((BM, BN), tl.float32)
    half = 2 * whole + tl.program_id(0)
    if (half < 2 * tiles_m * tiles_n) & (K > 0):  # K > 0: as in `grouped_gemm_in`
        HALF: tl.constexpr = BN // 2
        i, tn = grouped_tile(half // 2, tiles_m, tiles_n, GROUP_M)
        tile = tiles + 4 * (tiles_m - 1 - i)
        row = tl.load(tile)
        expert = tl.load(tile + 1)
        last_step = tl.load(tile + 3)
        if (pending_step >= 0) & (pending_step != last_step):
            count_tiles(counters, increments, W)
            increments = tl.zeros_like(increments)
        col = tn * BN + half % 2 * HALF
        half_acc = tl.zeros((BM, HALF), tl.float32)
        for k in range(0, K, BK):
            a = hidden_desc.load([row, k])
            if KN_WEIGHT:
                half_acc = tl.dot(a, w_half_desc.load([expert * K + k, col]), half_acc)
            else:
                half_acc = tl.dot(a, w_half_desc.load([expert * N + col, k]).T, half_acc)
        y_desc.store([row, col], add_bias(half_acc, bias, expert, col, N, HALF).to(y_desc.dtype))
        increments += step_increments(tl.load(tile + 2), last_step, tn, tiles_n, half % 2, W)
        pending_step = last_step
    if pending_step >= 0:
        count_tiles(counters, increments, W)


@jit
def local_first(route_rows, weights, routed, tokens, K: tl.constexpr, KP: tl.constexpr, BLOCK: tl.constexpr):
    """Fill the tables of `routed` (`RoutedRows`) with the counts: from route_rows and weights [tokens, K], each token's
    routes to this rank's experts before its other routes, both in the order of the slots. KP: K rounded up to a power
    of two."""
    for block in range(tl.program_id(0), tl.cdiv(tokens, BLOCK), tl.num_programs(0)):
        token = block * BLOCK + tl.arange(0, BLOCK)
        slot = tl.arange(0, KP)[None, :]
        mask = (token < tokens)[:, None] & (slot < K)
        route = token[:, None] * K
        row = tl.load(route_rows + route + slot, mask=mask, other=-1)
        weight = tl.load(weights + route + slot, mask=mask, other=0.0)
        is_local = (row != -1).to(tl.int32)
        local_until = tl.cumsum(is_local, 1)
        count = tl.sum(is_local, 1)
        new_slot = tl.where(row != -1, local_until - 1, count[:, None] + slot - local_until)
        tl.store(routed.route_rows + route + new_slot, row, mask=mask)
        tl.store(routed.weights + route + new_slot, weight, mask=mask)
        tl.store(routed.counts + token, count, mask=token < tokens)


@jit
def add_routes(
    acc, routed, tokens, valid, slot, cols, H: tl.constexpr, K: tl.constexpr, TOGETHER: tl.constexpr
):  # fmt: skip
    """Return acc plus the weighted rows of TOGETHER routes of each of the `tokens`, where `valid`, from slot `slot` on;
    and int32 [ROWS], how many of these routes have a row here or were left out. All further arguments are as in
    `weighted_sum`."""
    local_routes = tl.zeros_like(tokens)
    for i in tl.static_range(TOGETHER):
        route = tokens * K + slot + i
        is_route = valid & (slot + i < K)
        row = tl.load(routed.route_rows + route, mask=is_route, other=-1)
        weight = tl.load(routed.weights + route, mask=row >= 0, other=0.0)
        mask = (row >= 0)[:, None] & (cols < H)
        part = tl.load(routed.y + row.to(tl.int64)[:, None] * H + cols, mask=mask, other=0.0)
        acc += weight[:, None] * part.to(tl.float32)
        local_routes += (row != -1).to(tl.int32)
    return acc, local_routes


@jit
def weighted_sum(
    routed, first_token, tokens_left, cols, H: tl.constexpr, K: tl.constexpr, ROWS: tl.constexpr, COLS: tl.constexpr
):
    """Return two tensors: fp32 [ROWS, COLS], the weighted sum over the routes of the tokens from `first_token` on that
    have a row of y; and int32 [ROWS], 0 for a token without a route that has a row here or was left out, because the
    token's rank expects a sum in both cases.

    routed: `RoutedRows`. tokens_left: the number of tokens from `first_token` on. cols: the columns. All further
    arguments are as in `combine_rows`.

    Without counts, the rows of all K routes of a token are loaded together. On W ranks only K / W of them exist on
    average, and loads of the others occupy registers and issue slots too. With counts, therefore, a loop adds
    ROUTES_TOGETHER routes at a time until the last local route of these tokens. In a layer of Qwen3-30B with 8,192
    tokens on each of 4 H200s, `combine_rows` then ended 2 us after the GEMM instead of 90 us (2026-11).
    """
    TOGETHER: tl.constexpr = K if routed.counts is None else ROUTES_TOGETHER
    tokens = first_token + tl.arange(0, ROWS)
    valid = tl.arange(0, ROWS) < tokens_left
    acc = tl.zeros((ROWS, COLS), tl.float32)
    acc, local_routes = add_routes(acc, routed, tokens, valid, 0, cols, H, K, TOGETHER)
    if routed.counts is not None:
        most_routes = 0
        for i in tl.static_range(ROWS):
            count = tl.load(routed.counts + first_token + i, mask=i < tokens_left, other=0)
            most_routes = tl.maximum(most_routes, count)
        for slot in range(TOGETHER, most_routes, TOGETHER):
            acc, _ = add_routes(acc, routed, tokens, valid, slot, cols, H, K, TOGETHER)
    return acc, local_routes


@jit
def send_sums(
    routed,
    dst,
    rank,
    max_tokens,
    program,
    DTYPE: tl.constexpr,
    H: tl.constexpr,
    COLS: tl.constexpr,
    K: tl.constexpr,
    ROWS: tl.constexpr,
    PROGRAMS,
):
    """Store the weighted sums of the tokens of `rank` that have rows here, to the same rows of dst. PROGRAMS programs
    share the work; this one stores the part with the index `program`. All further arguments are as in
    `combine_rows`."""
    PARTS: tl.constexpr = (H + COLS - 1) // COLS
    for block in range(program, tl.cdiv(max_tokens, ROWS) * PARTS, PROGRAMS):
        first_token = block // PARTS * ROWS
        t = first_token + tl.arange(0, ROWS)
        cols = block % PARTS * COLS + tl.arange(0, COLS)[None, :]
        acc, local_routes = weighted_sum(
            routed, rank * max_tokens + first_token, max_tokens - first_token, cols, H, K, ROWS, COLS
        )
        tl.store(dst + t.to(tl.int64)[:, None] * H + cols, acc.to(DTYPE), mask=(local_routes > 0)[:, None] & (cols < H))


@jit(do_not_specialize=("max_tokens",))
def combine_rows(
    routed, targets, counters, outboxes, ch, epoch, half_size, max_tokens,
    DTYPE: tl.constexpr, H: tl.constexpr, COLS: tl.constexpr, K: tl.constexpr, ROWS: tl.constexpr,
    PROGRAMS: tl.constexpr,
):  # fmt: skip
    """Send the weighted sums of all other ranks' tokens to their outboxes. `sum_ranks` sums this rank's own tokens.

    routed: `RoutedRows`. targets int32 [W]: for each source step, the number of rows of tiles in all calls that
    `counters` has counted. counters: as in `grouped_gemm_out`. outboxes: the address of every rank's outbox [W,
    max_tokens, H]. epoch, half_size: as in `half_offset`. A block consists of COLS columns of ROWS tokens. When rank r
    has combined a rank's tokens, counter r of that rank has received PROGRAMS arrivals. A rank's own counter has no
    meaning.
    """
    W: tl.constexpr = ch.world
    me = rank_of(ch)
    channel_notify(ch, me, me, False)  # the rank notifies itself, so that one wait can cover all W counters
    offset = half_offset(epoch, half_size) + (me * max_tokens).to(tl.int64) * H
    for i in range(0, W - 1):
        source_step = W - 1 - i
        rank = (me - source_step + W) % W
        wait_until(
            counters + source_step, tl.load(targets + source_step) * ROW_OF_TILES, ch.guard, source_step, me, "gpu"
        )
        dst = address_of(outboxes, rank, DTYPE) + offset
        send_sums(
            routed,
            dst,
            rank,
            max_tokens,
            tl.program_id(0),
            DTYPE,
            H,
            COLS,
            K,
            ROWS,
            PROGRAMS,
        )
        channel_notify(ch, me, rank, False)  # even without rows this announces that the rank has read its inbox


@jit
def sum_of_ranks(
    outbox,
    ids,
    t,
    T,
    max_tokens,
    cols,
    own_sum,
    me,
    W: tl.constexpr,
    H: tl.constexpr,
    K: tl.constexpr,
    KP: tl.constexpr,
    EL: tl.constexpr,
    TP_SIZE: tl.constexpr,
    ROWS: tl.constexpr,
    COLS: tl.constexpr,
):
    """Return fp32 [ROWS, COLS]: columns `cols` of the tokens t below T, summed in rank order over the ranks that hold
    an expert of the token. The term of rank `me` is own_sum, which is float32 and is rounded like the sums that ranks
    send. The other ranks' terms are in outbox [W, max_tokens, H]. All further arguments are as in `sum_ranks`."""
    own_sum = own_sum.to(outbox.dtype.element_ty).to(tl.float32)
    acc = tl.zeros((ROWS, COLS), tl.float32)
    offsets = t.to(tl.int64)[:, None] * H + cols
    for rank in tl.static_range(W):
        mask = has_expert_on(ids, t, t < T, rank // TP_SIZE, K, KP, EL)[:, None] & (cols < H) & (rank != me)
        part = tl.load(outbox + rank * max_tokens.to(tl.int64) * H + offsets, mask=mask, other=0.0).to(tl.float32)
        acc += tl.where(rank == me, own_sum, part)
    return acc


@jit
def store_sums(acc, shared, out, t, T, cols, H: tl.constexpr):
    """Store acc in rows t below T of out. Unless shared is None, its rows are added. out and shared are [T, H]."""
    offsets = t.to(tl.int64)[:, None] * H + cols
    mask = (t < T)[:, None] & (cols < H)
    if shared is not None:
        acc += tl.load(shared + offsets, mask=mask, other=0.0).to(tl.float32)
    tl.store(out + offsets, acc.to(out.dtype.element_ty), mask=mask)


@jit(do_not_specialize=("T", "max_tokens", "number"))
def sum_ranks(
    routed, outbox, ids, shared, out, counters, ch, calls, left_out, number, epoch, half_size, T, max_tokens,
    ARRIVALS: tl.constexpr, s,
):  # fmt: skip
    """Compute out [T, H] = the sum over the ranks that hold an expert of the token, or some columns of one, in rank
    order and in fp32. If shared [T, H] is not None, it is added.

    The other ranks' sums are in outbox [W, max_tokens, H] (epoch and half_size as in `half_offset`); this rank sums its
    own weighted rows, `RoutedRows`, which are complete by stream order. ids int32 [T, K]; s: `RankSumSizes`. The kernel
    waits for all other ranks. Unless left_out (`LeftOut`) is None, the kernel also reads and clears the words of
    left_out.

    Unless `counters` is None, the kernel clears the counters. `grouped_gemm_out`, which writes them, has ended by
    stream order. This rank's `combine_rows`, which reads them, must also have ended. The wait in this kernel does not
    ensure that, because `combine_rows` notifies its own rank at its start.
    """
    W: tl.constexpr = ch.world
    PARTS: tl.constexpr = (s.H + s.COLS - 1) // s.COLS
    KP: tl.constexpr = triton.next_power_of_2(s.K)
    me = rank_of(ch)
    outbox += half_offset(epoch, half_size)
    if tl.program_id(0) == 0:
        same_call(calls, number)
    wait_until(ch.counters, calls_of(ch) * ARRIVALS, ch.guard, -1, 0, "sys", W)
    for block in range(tl.program_id(0), tl.cdiv(T, s.ROWS) * PARTS, tl.num_programs(0)):
        first_token = block // PARTS * s.ROWS
        t = first_token + tl.arange(0, s.ROWS)
        cols = block % PARTS * s.COLS + tl.arange(0, s.COLS)[None, :]
        own_sum, _ = weighted_sum(
            routed, me * max_tokens + first_token, T - first_token, cols, s.H, s.K, s.ROWS, s.COLS
        )
        acc = sum_of_ranks(
            outbox, ids, t, T, max_tokens, cols, own_sum, me, W, s.H, s.K, KP, s.EL, s.TP_SIZE, s.ROWS, s.COLS
        )
        store_sums(acc, shared, out, t, T, cols, s.H)
    if left_out is not None:
        if tl.program_id(0) == 0:
            take_left_out(left_out, ch.guard, W)
    if counters is not None:
        if tl.program_id(0) == 0:
            source_step = tl.arange(0, triton.next_power_of_2(W))
            tl.store(counters + source_step, tl.zeros_like(source_step), mask=source_step < W)
    end_call(ch, epoch, tl.num_programs(0))
