"""What the backward pass of an MoE layer needs beside the kernels of its forward pass (kernels.py,
place_rows_kernels.py).

    activation_gradient  of a row's dy @ w2: the gradient before the activation, the activation itself times the route's
                         weight, and the gradient of that weight, which goes home
    grouped_wgrad        a^T b over the rows of each expert: the gradients of w13 and w2
    row_sums             sums of each expert's rows: the gradients of the biases
    take_gradients       what came home of the weights' gradients

    side stream  | dispatch_rows       |                                | combine_rows             |
    main stream  | tables | place_rows | grouped_gemm_out, its activation | grouped_gemm_out, ..wgrad | sum_ranks

Order of accesses. Inbox and outbox are used as in the forward pass: `combine_rows` tells of its sums behind the last
read of the inbox, that of `place_rows`. The weights' gradients are stored at their tokens' rank by
`activation_gradient`, behind the wait of `place_rows` for that rank's rows, which it sends behind its `take_gradients`
of the call before; and told of by `combine_rows` later on the stream, for which `sum_ranks` waits before
`take_gradients`. A route belongs to one expert, so one rank writes a word. Routes that found no row are written by
nobody: `take_gradients` leaves zeros.
"""

from typing import NamedTuple

import triton.language as tl

from ....compute.gemm import column_halves, grouped_tile
from ....lang.channel import address_of
from ....lang.jit import jit
from .kernels import CLAMPED, GELU

IDENTITY = tl.constexpr(3)  # the activation that changes nothing


class GradientSizes(NamedTuple):
    """Sizes of the gradients' kernels for a layer and plan. They take ROWS rows of COLS elements at a time; BM rows of
    a tile are whole ROWS. W 0: gradients of weights stay here. GATED 0: the activation is of one matrix."""

    W: tl.constexpr
    K: tl.constexpr
    BM: tl.constexpr
    ROWS: tl.constexpr
    COLS: tl.constexpr
    ACT: tl.constexpr
    GATED: tl.constexpr


# -- the activation ----------------------------------------------------------------------------------------------------


@jit
def gelu_gradient(x):
    """Return gelu(x), and its derivative: the normal distribution up to x (as `gelu` has it), + x times its density."""
    t = 1.0 / (1.0 + 0.2316418837 * tl.abs(x))
    tail = t * (0.127414796 + t * (-0.142248368 + t * (0.7107068705 + t * (-0.7265760135 + t * 0.5307027145))))
    density = tl.exp(-0.5 * x * x)
    below = tl.where(x >= 0.0, 1.0 - tail * density, tail * density)
    return x * below, below + x * density * 0.3989422804


@jit
def gated_gradient(gate, up, ACT: tl.constexpr):
    """Return the activation, and its derivatives by gate and up."""
    if ACT == CLAMPED:
        inside = gate <= 7.0
        within = (up >= -7.0) & (up <= 7.0)
        gate = tl.minimum(gate, 7.0)
        up = tl.minimum(tl.maximum(up, -7.0), 7.0) + 1.0
        s = 1.0 / (1.0 + tl.exp(-1.702 * gate))
        by_gate = tl.where(inside, up * s * (1.0 + 1.702 * gate * (1.0 - s)), 0.0)
        by_up = tl.where(within, gate * s, 0.0)
    else:
        s = 1.0 / (1.0 + tl.exp(-gate))
        by_gate = up * s * (1.0 + gate * (1.0 - s))
        by_up = gate * s
    return up * gate * s, by_gate, by_up


@jit
def route_of(slots, sources, row, K: tl.constexpr):
    """Return int32 [rows]: the route, of all ranks', that has the row; -1: none."""
    source = tl.load(sources + row)
    route = source * 0 - 1
    for i in tl.static_range(K):
        at = source * K + i
        found = tl.load(slots + at, mask=source >= 0, other=-1) == row
        route = tl.where(found, at, route)
    return route


@jit
def gradient_of_rows(
    both, hidden, out, row, route, weight, N, inner,
    ACT: tl.constexpr, GATED: tl.constexpr, ROWS: tl.constexpr, COLS: tl.constexpr,
):  # fmt: skip
    """Compute rows of `activation_gradient`; return float32 [ROWS], the products of activation and gradient. Rows
    without a route, which may hold anything, are not read, and become zeros."""
    dots = tl.zeros((ROWS,), tl.float32)
    wide = N if GATED == 0 else N // 2
    ok = (route >= 0)[:, None]
    for part in range(0, wide, COLS):
        c = part + tl.arange(0, COLS)[None, :]
        here = hidden + row.to(tl.int64)[:, None] * inner + c
        there = row.to(tl.int64)[:, None] * N
        dy = tl.load(here, mask=ok & (c < inner), other=0.0).to(tl.float32)
        dx = dy * weight[:, None]
        if GATED == 0:
            at = there + c
            x = tl.load(both + at, mask=ok & (c < wide), other=0.0).to(tl.float32)
            if ACT == GELU:
                y, by = gelu_gradient(x)
            else:
                y = x
                by = 1.0
            tl.store(out + at, (dx * by).to(out.dtype.element_ty), mask=c < wide)
        else:
            at = there + c // GATED * (2 * GATED) + c % GATED
            gate = tl.load(both + at, mask=ok & (c < wide), other=0.0).to(tl.float32)
            up = tl.load(both + at + GATED, mask=ok & (c < wide), other=0.0).to(tl.float32)
            y, by_gate, by_up = gated_gradient(gate, up, ACT)
            tl.store(out + at, (dx * by_gate).to(out.dtype.element_ty), mask=c < wide)
            tl.store(out + at + GATED, (dx * by_up).to(out.dtype.element_ty), mask=c < wide)
        y = y.to(hidden.dtype.element_ty).to(tl.float32)  # as the second GEMM had it
        dots += tl.sum(y * dy, 1)
        tl.store(here, (y * weight[:, None]).to(hidden.dtype.element_ty), mask=c < inner)
    return dots


@jit(do_not_specialize=("C",))
def activation_gradient(
    both, hidden, out, dy, bias, by_row, tables, weights, home, C, N, H, inner, s, BIAS: tl.constexpr
):
    """both [rows, N]: what the activation was of, with bias; hidden [rows, inner]: dy @ w2, and in its place afterwards
    the activation times the route's weight; out [rows, N]: the gradient of `both`; dy [rows, H], bias [experts, H]:
    b2's share of the weights' gradients; by_row float32 [rows]: the rows' weights, for those of b2. tables: slots,
    sources, tiles, count (route_tables.py, `Tables`); weights float32 [W, C, K]; home: address by rank of float32
    [C, K], where a route's gradient goes, or (W 0) float32 [W, C, K], here. N: as `grouped_gemm_in` has them; s: sizes
    (`GradientSizes`)."""
    W: tl.constexpr = s.W
    K: tl.constexpr = s.K
    ROWS: tl.constexpr = s.ROWS
    COLS: tl.constexpr = s.COLS
    PER: tl.constexpr = s.BM // ROWS
    for unit in range(tl.program_id(0), tl.load(tables.count) * PER, tl.num_programs(0)):
        tile = tables.tiles + 4 * (unit // PER)
        row = tl.load(tile) + unit % PER * ROWS + tl.arange(0, ROWS)
        route = route_of(tables.slots, tables.sources, row, K)
        weight = tl.load(weights + route, mask=route >= 0, other=0.0)
        dots = gradient_of_rows(both, hidden, out, row, route, weight, N, inner, s.ACT, s.GATED, ROWS, COLS)
        if BIAS:
            tl.store(by_row + row, weight)
            expert = tl.load(tile + 1)
            for part in range(0, H, COLS):
                c = part + tl.arange(0, COLS)[None, :]
                gradient = tl.load(dy + row.to(tl.int64)[:, None] * H + c, mask=c < H, other=0.0).to(tl.float32)
                b = tl.load(bias + expert * H + c, mask=c < H, other=0.0).to(tl.float32)
                dots += tl.sum(gradient * b, 1)
        if W == 0:
            tl.store(home + route, dots, mask=route >= 0)
        for rank in tl.static_range(W):
            first = rank * C * K
            at = address_of(home, rank, tl.float32) + route - first
            tl.store(at, dots, mask=(route >= first) & (route < first + C * K))


@jit(do_not_specialize=("given",))
def take_gradients(home, ids, out, given, experts, BLOCK: tl.constexpr):
    """out = home, both float32, of the `given` routes to experts; 0 of others. Leaves zeros, for the next call."""
    for lo in range(tl.program_id(0) * BLOCK, given, tl.num_programs(0) * BLOCK):
        i = lo + tl.arange(0, BLOCK)
        e = tl.load(ids + i, mask=i < given, other=-1)
        there = (e >= 0) & (e < experts)
        tl.store(out + i, tl.load(home + i, mask=there, other=0.0), mask=i < given)
        tl.store(home + i, tl.zeros((BLOCK,), tl.float32), mask=i < given)


# -- sums over rows ----------------------------------------------------------------------------------------------------


@jit
def grouped_wgrad(
    a_desc, b_desc, out_desc, offsets, M, N,
    EL: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, GROUP_M: tl.constexpr,
    FLATTEN: tl.constexpr,
):  # fmt: skip
    """out_desc [EL, M, N], in blocks [1, BM, BN / 2], = a^T b over the rows of each expert: a_desc [rows, M] in blocks
    [BK, BM], b_desc [rows, N] in blocks [BK, BN]; an expert's rows from offsets[e] on, in whole BK. fp32 sums in the
    order of the rows."""
    tiles_m = tl.cdiv(M, BM)
    tiles_n = tl.cdiv(N, BN)
    per_expert = tiles_m * tiles_n
    for t in tl.range(tl.program_id(0), EL * per_expert, tl.num_programs(0), flatten=FLATTEN):
        expert = t // per_expert
        tm, tn = grouped_tile(t % per_expert, tiles_m, tiles_n, GROUP_M)
        acc = tl.zeros((BM, BN), tl.float32)
        for row in range(tl.load(offsets + expert), tl.load(offsets + expert + 1), BK):
            acc = tl.dot(a_desc.load([row, tm * BM]).T, b_desc.load([row, tn * BN]), acc)
        left, right = column_halves(acc, BM, BN)
        left = tl.reshape(left.to(out_desc.dtype), (1, BM, BN // 2))
        right = tl.reshape(right.to(out_desc.dtype), (1, BM, BN // 2))
        out_desc.store([expert, tm * BM, tn * BN], left)
        out_desc.store([expert, tm * BM, tn * BN + BN // 2], right)


@jit
def row_sums(
    rows, by_row, offsets, out, N, EL: tl.constexpr, ROWS: tl.constexpr, COLS: tl.constexpr, WEIGHTED: tl.constexpr
):
    """out [EL, N]: sums of each expert's rows [.., N], WEIGHTED: times by_row, fp32, in their order."""
    parts = tl.cdiv(N, COLS)
    for unit in range(tl.program_id(0), EL * parts, tl.num_programs(0)):
        expert = unit // parts
        c = unit % parts * COLS + tl.arange(0, COLS)
        end = tl.load(offsets + expert + 1)
        acc = tl.zeros((ROWS, COLS), tl.float32)
        for lo in range(tl.load(offsets + expert), end, ROWS):
            row = lo + tl.arange(0, ROWS)
            ok = (row < end)[:, None] & (c < N)[None, :]
            part = tl.load(rows + row.to(tl.int64)[:, None] * N + c[None, :], mask=ok, other=0.0).to(tl.float32)
            if WEIGHTED:
                part *= tl.load(by_row + row, mask=row < end, other=0.0)[:, None]
            acc += part
        tl.store(out + expert * N + c, tl.sum(acc, 0).to(out.dtype.element_ty), mask=c < N)
