"""All-reduce, residual add and norm of a few rows [M, H] in one launch, with low-latency flags.
transport/low_latency_kernels.py explains these flags, and when a third of the memory may be written again.

one shot    Every rank posts all its rows to all ranks. Each rank sums and normalises all rows itself.
two shots   Every rank posts each row to its owner. The owner sums and normalises it and posts the result to all ranks.
"""

import triton.language as tl

from ...compute.quantize import divide_by_scales
from ...lang.channel import address_of, rank_of
from ...lang.jit import jit
from ...lang.mapping import first_row
from ...transport.low_latency_kernels import (
    clear,
    compare_calls,
    load_state,
    post_result,
    post_row,
    rotate_thirds,
    round_without_empty,
    row_low_latency,
    sum_low_latency,
    to_fp32,
)
from .kernels import OWN, WHOLE, Affine, load_parameters, normalise, store_row, store_scales


@jit
def owner_of(t, M, W: tl.constexpr):
    """Return the rank that owns row t."""
    short = M // W
    longer = M % W * (short + 1)  # the number of rows that belong to ranks with short + 1 rows
    return tl.where(t < longer, t // (short + 1), M % W + (t - longer) // tl.maximum(short, 1))


@jit(do_not_specialize=("M", "third", "number"))
def one_shot(
    x, memory, out, residual, new_residual, weight, bias, scale, ch, calls, number, M, third, norm,
    PROGRAMS: tl.constexpr, MAX_PROGRAMS: tl.constexpr,
):  # fmt: skip
    """All-reduce x [M, H], this rank's part, in one shot, apply the norm, and store the result in out [M, H]. x and
    residual are passed as int32 words. A third of the memory is [W + 1, M, H]: it contains the parts of all ranks, and
    the owners' rows of the residual (RESIDUAL OWN)."""
    DTYPE: tl.constexpr = norm.DTYPE
    H: tl.constexpr = norm.H
    P: tl.constexpr = norm.P
    RESIDUAL: tl.constexpr = norm.RESIDUAL
    KEEP: tl.constexpr = norm.KEEP
    W: tl.constexpr = ch.world
    SOURCES: tl.constexpr = W + (RESIDUAL == OWN)
    WORDS: tl.constexpr = P * DTYPE.primitive_bitwidth // 32
    ROW: tl.constexpr = H * DTYPE.primitive_bitwidth // 32
    VECTORS: tl.constexpr = WORDS // 4
    local, addresses, state = memory
    weights = Affine(weight, bias, scale)
    pid = tl.program_id(0)
    me = rank_of(ch)
    third_index, offset, previous, filled = load_state(state, pid, third)
    lo = first_row(me, M, W)
    hi = first_row(me + 1, M, W)
    for unit in range(pid, M * (W - 1), PROGRAMS):
        t = unit // (W - 1)
        peer_third = address_of(addresses, (me + 1 + unit % (W - 1)) % W, tl.int32) + offset
        post_row(peer_third + (me * M + t).to(tl.int64) * ROW, x + t.to(tl.int64) * ROW, ROW // 4, VECTORS)
        if RESIDUAL == OWN:
            if (t >= lo) & (t < hi):
                own_residual = residual + (t - lo).to(tl.int64) * ROW
                post_row(peer_third + (W * M + t).to(tl.int64) * ROW, own_residual, ROW // 4, VECTORS)
    clear(local + previous, filled, pid, VECTORS, PROGRAMS)
    compare_calls(calls, number, pid, PROGRAMS)

    if P <= 8192:  # the parameters are loaded before the wait if there are enough registers
        w, b, divisor = load_parameters(weights, norm)
    for t in range(pid, M, PROGRAMS):
        owner = owner_of(t, M, W)
        row = t.to(tl.int64) * ROW
        acc = sum_low_latency(
            local + offset + row,
            M.to(tl.int64) * ROW,
            x + row,
            residual + row - lo.to(tl.int64) * ROW,
            owner,
            me,
            t,
            ROW,
            ch,
            DTYPE,
            W,
            SOURCES,
            WORDS,
            P,
        )
        if P > 8192:
            w, b, divisor = load_parameters(weights, norm)
        if RESIDUAL == WHOLE:
            c = tl.arange(0, WORDS)
            acc += to_fp32(tl.load(residual + row + c, mask=c < ROW, other=0), DTYPE, P)
        out_offset = t.to(tl.int64) * H
        if KEEP == WHOLE:
            store_row(new_residual + out_offset, acc.to(DTYPE), H, P)
        if KEEP == OWN:
            if owner == me:
                store_row(new_residual + out_offset - lo.to(tl.int64) * H, acc.to(DTYPE), H, P)
        y = normalise(acc, w, b, divisor, norm)
        if norm.GROUP:
            y, scales = divide_by_scales(y, P // norm.GROUP, norm.GROUP)
            store_scales(scale, t, scales, norm)
        store_row(out + out_offset, y.to(norm.OUT), H, P)
    rotate_thirds(state, pid, third_index, SOURCES * M * (ROW // 4), PROGRAMS, MAX_PROGRAMS)


@jit(do_not_specialize=("M", "third", "number"))
def two_shot_low_latency(
    x, memory, out, residual, new_residual, weight, bias, scale, ch, calls, number, M, third, norm,
    PROGRAMS: tl.constexpr, MAX_PROGRAMS: tl.constexpr,
):  # fmt: skip
    """All-reduce like `one_shot`, but in two shots and with an output of DTYPE. A third of the memory contains the
    parts of all ranks for this rank's rows, [W, max_rows, H], then the results [M, H] and, with KEEP WHOLE, the sums
    [M, H]."""
    DTYPE: tl.constexpr = norm.DTYPE
    H: tl.constexpr = norm.H
    P: tl.constexpr = norm.P
    RESIDUAL: tl.constexpr = norm.RESIDUAL
    KEEP: tl.constexpr = norm.KEEP
    W: tl.constexpr = ch.world
    WORDS: tl.constexpr = P * DTYPE.primitive_bitwidth // 32
    ROW: tl.constexpr = H * DTYPE.primitive_bitwidth // 32
    VECTORS: tl.constexpr = WORDS // 4
    local, addresses, state = memory
    weights = Affine(weight, bias, scale)
    pid = tl.program_id(0)
    me = rank_of(ch)
    third_index, offset, previous, filled = load_state(state, pid, third)
    max_rows = M // W + (M % W > 0).to(tl.int32)
    lo = first_row(me, M, W)
    hi = first_row(me + 1, M, W)
    for unit in range(pid, max_rows * (W - 1), PROGRAMS):
        owner = (me + 1 + unit % (W - 1)) % W
        i = unit // (W - 1)
        t = first_row(owner, M, W) + i
        if t < first_row(owner + 1, M, W):
            peer_third = address_of(addresses, owner, tl.int32) + offset
            post_row(peer_third + (me * max_rows + i).to(tl.int64) * ROW, x + t.to(tl.int64) * ROW, ROW // 4, VECTORS)
    clear(local + previous, filled, pid, VECTORS, PROGRAMS)
    compare_calls(calls, number, pid, PROGRAMS)

    if P <= 8192:
        w, b, divisor = load_parameters(weights, norm)
    c = tl.arange(0, WORDS)
    results = offset + (W * max_rows).to(tl.int64) * ROW
    sums = results + M.to(tl.int64) * ROW
    for t in range(lo + pid, hi, PROGRAMS):
        i = (t - lo).to(tl.int64) * ROW
        row = t.to(tl.int64) * ROW
        acc = sum_low_latency(
            local + offset + i, max_rows.to(tl.int64) * ROW, x + row, x, me, me, t, ROW, ch, DTYPE, W, W, WORDS, P
        )
        if P > 8192:
            w, b, divisor = load_parameters(weights, norm)
        if RESIDUAL == OWN:
            acc += to_fp32(tl.load(residual + i + c, mask=c < ROW, other=0), DTYPE, P)
        if RESIDUAL == WHOLE:
            acc += to_fp32(tl.load(residual + row + c, mask=c < ROW, other=0), DTYPE, P)
        y = round_without_empty(normalise(acc, w, b, 1.0, norm), DTYPE)
        total = round_without_empty(acc, DTYPE)
        store_row(out + t.to(tl.int64) * H, y, H, P)
        post_result(addresses, results + row, y, me, DTYPE, W, VECTORS, ROW, P)
        if KEEP == WHOLE:
            store_row(new_residual + t.to(tl.int64) * H, total, H, P)
            post_result(addresses, sums + row, total, me, DTYPE, W, VECTORS, ROW, P)
        if KEEP == OWN:
            store_row(new_residual + (t - lo).to(tl.int64) * H, total, H, P)
    for step in range(pid, M - (hi - lo), PROGRAMS):  # the rows of the other owners, beginning with the next rank
        t = (hi + step) % M
        owner = owner_of(t, M, W)
        row = t.to(tl.int64) * ROW
        words = row_low_latency(local + results + row, owner, me, t, ROW, ch, WORDS)
        tl.store(out.to(tl.pointer_type(tl.int32)) + row + c, words, mask=c < ROW)
        if KEEP == WHOLE:
            words = row_low_latency(local + sums + row, owner, me, t, ROW, ch, WORDS)
            tl.store(new_residual.to(tl.pointer_type(tl.int32)) + row + c, words, mask=c < ROW)
    filled = (W * max_rows + M * (1 + (KEEP == WHOLE))) * (ROW // 4)
    rotate_thirds(state, pid, third_index, filled, PROGRAMS, MAX_PROGRAMS)
