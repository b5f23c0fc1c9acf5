"""The kernels that only the backward pass of an MoE layer needs. The backward pass also uses the kernels of the forward
pass (kernels.py, place_rows_kernels.py).

    activation_gradient  computes, from a row's dy @ w2, the gradient before the activation, the activation times the
                         route's weight, and the gradient of that weight, which it stores on the token's rank
    grouped_wgrad        computes a^T b over the rows of each expert: the gradients of w13 and w2
    row_sums             sums each expert's rows: the gradients of the biases
    take_gradients       copies the arrived gradients of the routing weights

    side stream  | dispatch_rows       |                                | combine_rows             |
    main stream  | tables | place_rows | grouped_gemm_out, its activation | grouped_gemm_out, ..wgrad | sum_ranks

Memory order. Inbox and outbox are used as in the forward pass: `combine_rows` announces its sums after `place_rows`,
the last reader of the inbox. `activation_gradient` stores gradients of routing weights on the ranks of their tokens. By
then `place_rows` has waited for the rows of such a rank, which sends them after its `take_gradients` of the previous
call. `combine_rows`, which runs later on the stream, announces these gradients. `sum_ranks` waits for this
announcement, and `take_gradients` runs after `sum_ranks`. A route belongs to one expert, so only one rank writes its
word. No rank writes the word of a route without a row, in which `take_gradients` has left a zero.
"""

from typing import NamedTuple

import triton.language as tl

from ....compute.gemm import column_halves, grouped_tile
from ....lang.channel import address_of
from ....lang.jit import jit
from ..activations import CLAMPED, GELU

IDENTITY = tl.constexpr(3)  # an activation that returns its input unchanged


class GradientSizes(NamedTuple):
    """The sizes of the gradient kernels for a layer and plan. The kernels process ROWS rows of COLS elements at once.
    BM, the number of rows in a tile, is a multiple of ROWS. W = 0 means that gradients of routing weights stay on this
    rank. GATE_BLOCK = 0 means that the activation has no gate."""

    W: tl.constexpr
    K: tl.constexpr
    BM: tl.constexpr
    ROWS: tl.constexpr
    COLS: tl.constexpr
    ACT: tl.constexpr
    GATE_BLOCK: tl.constexpr


# -- the activation ----------------------------------------------------------------------------------------------------


@jit
def gelu_gradient(x):
    """Return gelu(x) and its derivative, which is the cumulative normal distribution at x (as `gelu` computes it) plus
    x times the normal density at x."""
    t = 1.0 / (1.0 + 0.2316418837 * tl.abs(x))
    tail = t * (0.127414796 + t * (-0.142248368 + t * (0.7107068705 + t * (-0.7265760135 + t * 0.5307027145))))
    density = tl.exp(-0.5 * x * x)
    below = tl.where(x >= 0.0, 1.0 - tail * density, tail * density)
    return x * below, below + x * density * 0.3989422804


@jit
def gated_gradient(gate, up, ACT: tl.constexpr):
    """Return the activation, and its derivatives with respect to gate and to up."""
    if ACT == CLAMPED:
        gate_in_range = gate <= 7.0
        up_in_range = (up >= -7.0) & (up <= 7.0)
        gate = tl.minimum(gate, 7.0)
        up = tl.minimum(tl.maximum(up, -7.0), 7.0) + 1.0
        s = 1.0 / (1.0 + tl.exp(-1.702 * gate))
        dgate = tl.where(gate_in_range, up * s * (1.0 + 1.702 * gate * (1.0 - s)), 0.0)
        dup = tl.where(up_in_range, gate * s, 0.0)
    else:
        s = 1.0 / (1.0 + tl.exp(-gate))
        dgate = up * s * (1.0 + gate * (1.0 - s))
        dup = gate * s
    return up * gate * s, dgate, dup


@jit
def route_of(route_rows, sources, row, K: tl.constexpr):
    """Return int32 [rows]: the index of each row's route among the routes of all ranks; -1 for a row without a
    route."""
    source = tl.load(sources + row)
    route = source * 0 - 1
    for i in tl.static_range(K):
        candidate = source * K + i
        is_route = tl.load(route_rows + candidate, mask=source >= 0, other=-1) == row
        route = tl.where(is_route, candidate, route)
    return route


@jit
def gradient_of_rows(
    preactivation, hidden, out, row, route, weight, N, inner,
    ACT: tl.constexpr, GATE_BLOCK: tl.constexpr, ROWS: tl.constexpr, COLS: tl.constexpr,
):  # fmt: skip
    """Compute the rows of `activation_gradient`, and return float32 [ROWS], the dot products of activation and
    gradient. Rows without a route, whose memory is undefined, are not read and become zeros."""
    dots = tl.zeros((ROWS,), tl.float32)
    columns = N if GATE_BLOCK == 0 else N // 2
    mask = (route >= 0)[:, None]
    for part in range(0, columns, COLS):
        c = part + tl.arange(0, COLS)[None, :]
        hidden_pointers = hidden + row.to(tl.int64)[:, None] * inner + c
        row_offset = row.to(tl.int64)[:, None] * N
        dy = tl.load(hidden_pointers, mask=mask & (c < inner), other=0.0).to(tl.float32)
        dx = dy * weight[:, None]
        if GATE_BLOCK == 0:
            offsets = row_offset + c
            x = tl.load(preactivation + offsets, mask=mask & (c < columns), other=0.0).to(tl.float32)
            if ACT == GELU:
                y, derivative = gelu_gradient(x)
            else:
                y = x
                derivative = 1.0
            tl.store(out + offsets, (dx * derivative).to(out.dtype.element_ty), mask=c < columns)
        else:
            offsets = row_offset + c // GATE_BLOCK * (2 * GATE_BLOCK) + c % GATE_BLOCK
            gate = tl.load(preactivation + offsets, mask=mask & (c < columns), other=0.0).to(tl.float32)
            up = tl.load(preactivation + offsets + GATE_BLOCK, mask=mask & (c < columns), other=0.0).to(tl.float32)
            y, dgate, dup = gated_gradient(gate, up, ACT)
            tl.store(out + offsets, (dx * dgate).to(out.dtype.element_ty), mask=c < columns)
            tl.store(out + offsets + GATE_BLOCK, (dx * dup).to(out.dtype.element_ty), mask=c < columns)
        y = y.to(hidden.dtype.element_ty).to(tl.float32)  # the forward pass rounds the second GEMM's input too
        dots += tl.sum(y * dy, 1)
        tl.store(hidden_pointers, (y * weight[:, None]).to(hidden.dtype.element_ty), mask=c < inner)
    return dots


@jit(do_not_specialize=("max_tokens",))
def activation_gradient(
    preactivation,
    hidden,
    out,
    dy,
    bias,
    row_weights,
    tables,
    weights,
    dweights_inbox,
    max_tokens,
    N,
    H,
    inner,
    s,
    BIAS: tl.constexpr,
):
    """Compute the gradient of the activation, and the outputs that depend on it.

    preactivation [rows, N]: the input of the activation, with bias. hidden [rows, inner]: at first dy @ w2; the kernel
    replaces it by the activation times the route's weight. out [rows, N]: the gradient of preactivation. dy [rows, H]
    and bias [experts, H]: with them the kernel computes b2's part of the routing weights' gradients. row_weights
    float32 [rows]: an output, the routing weight of each row, for the gradient of b2. tables: route_rows, sources,
    tiles, tile_count (`Tables` in route_tables.py). weights float32 [W, max_tokens, K]. dweights_inbox: the address of
    every rank's float32 [max_tokens, K], where the gradients of its routes are stored; with W = 0, a local float32 [W,
    max_tokens, K]. N: as in `grouped_gemm_in`; s: `GradientSizes`.
    """
    W: tl.constexpr = s.W
    K: tl.constexpr = s.K
    ROWS: tl.constexpr = s.ROWS
    COLS: tl.constexpr = s.COLS
    PER: tl.constexpr = s.BM // ROWS
    for unit in range(tl.program_id(0), tl.load(tables.tile_count) * PER, tl.num_programs(0)):
        tile = tables.tiles + 4 * (unit // PER)
        row = tl.load(tile) + unit % PER * ROWS + tl.arange(0, ROWS)
        route = route_of(tables.route_rows, tables.sources, row, K)
        weight = tl.load(weights + route, mask=route >= 0, other=0.0)
        dots = gradient_of_rows(
            preactivation, hidden, out, row, route, weight, N, inner, s.ACT, s.GATE_BLOCK, ROWS, COLS
        )
        if BIAS:
            tl.store(row_weights + row, weight)
            expert = tl.load(tile + 1)
            for part in range(0, H, COLS):
                c = part + tl.arange(0, COLS)[None, :]
                gradient = tl.load(dy + row.to(tl.int64)[:, None] * H + c, mask=c < H, other=0.0).to(tl.float32)
                b = tl.load(bias + expert * H + c, mask=c < H, other=0.0).to(tl.float32)
                dots += tl.sum(gradient * b, 1)
        if W == 0:
            tl.store(dweights_inbox + route, dots, mask=route >= 0)
        for rank in tl.static_range(W):
            first_route = rank * max_tokens * K
            address = address_of(dweights_inbox, rank, tl.float32) + route - first_route
            tl.store(address, dots, mask=(route >= first_route) & (route < first_route + max_tokens * K))


@jit(do_not_specialize=("num_routes",))
def take_gradients(dweights_inbox, ids, out, num_routes, experts, BLOCK: tl.constexpr):
    """Compute out for the first `num_routes` routes: dweights_inbox if the route has an expert, otherwise 0. Both
    tensors are float32. The kernel clears dweights_inbox for the next call."""
    for lo in range(tl.program_id(0) * BLOCK, num_routes, tl.num_programs(0) * BLOCK):
        i = lo + tl.arange(0, BLOCK)
        e = tl.load(ids + i, mask=i < num_routes, other=-1)
        valid = (e >= 0) & (e < experts)
        tl.store(out + i, tl.load(dweights_inbox + i, mask=valid, other=0.0), mask=i < num_routes)
        tl.store(dweights_inbox + i, tl.zeros((BLOCK,), tl.float32), mask=i < num_routes)


# -- sums over rows ----------------------------------------------------------------------------------------------------


@jit
def grouped_wgrad(
    a_desc, b_desc, out_desc, offsets, M, N,
    EL: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, GROUP_M: tl.constexpr,
    FLATTEN: tl.constexpr,
):  # fmt: skip
    """Compute out_desc [EL, M, N] = a^T b over the rows of each expert. out_desc has blocks [1, BM, BN / 2], a_desc
    [rows, M] blocks [BK, BM], and b_desc [rows, N] blocks [BK, BN]. The rows of expert e begin at offsets[e], and their
    number is a multiple of BK. Sums are computed in fp32 in the order of the rows."""
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
    rows, row_weights, offsets, out, N, EL: tl.constexpr, ROWS: tl.constexpr, COLS: tl.constexpr, WEIGHTED: tl.constexpr
):
    """Compute out [EL, N] = the sums of each expert's rows [.., N], in fp32 and in row order. With WEIGHTED, each row
    is multiplied by its row_weights value."""
    parts = tl.cdiv(N, COLS)
    for unit in range(tl.program_id(0), EL * parts, tl.num_programs(0)):
        expert = unit // parts
        c = unit % parts * COLS + tl.arange(0, COLS)
        end = tl.load(offsets + expert + 1)
        acc = tl.zeros((ROWS, COLS), tl.float32)
        for lo in range(tl.load(offsets + expert), end, ROWS):
            row = lo + tl.arange(0, ROWS)
            mask = (row < end)[:, None] & (c < N)[None, :]
            part = tl.load(rows + row.to(tl.int64)[:, None] * N + c[None, :], mask=mask, other=0.0).to(tl.float32)
            if WEIGHTED:
                part *= tl.load(row_weights + row, mask=row < end, other=0.0)[:, None]
            acc += part
        tl.store(out + expert * N + c, tl.sum(acc, 0).to(out.dtype.element_ty), mask=c < N)
