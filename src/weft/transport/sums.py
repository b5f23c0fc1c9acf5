"""The kernel that sums rows over ranks, after all ranks have staged them on their owner.

Three larger kernels contain other sums over ranks: sums of tiles in an arena (ops/matmul_reduce/kernels.py), sums of
rows that are then normalised in registers (`sum_rows`, ops/all_reduce/kernels.py), and sums of low-latency rows
(low_latency_kernels.py).
"""

from __future__ import annotations

import triton.language as tl

from ..lang.jit import jit


@jit(do_not_specialize=("rows",))
def sum_staged(
    x,
    staging,
    out,
    bias,
    rows,
    N,
    me,
    W: tl.constexpr,
    BIAS: tl.constexpr,
    BLOCK: tl.constexpr,
    ALIGNED: tl.constexpr,
):
    """Compute out [rows, N] = the sum over ranks in fp32 and in rank order. If BIAS is set, bias [N] is added. This
    rank's addend is x [rows, N]; the other ranks' addends are in staging [W, rows, N]. me, int32 [1], contains the
    number of this rank. ALIGNED means that N, like BLOCK, is a multiple of 8."""
    count = rows.to(tl.int64) * N
    rank = tl.load(me)
    i = tl.arange(0, BLOCK)
    for b in range(tl.program_id(0), tl.cdiv(count, BLOCK), tl.num_programs(0)):
        start = b.to(tl.int64) * BLOCK  # a scalar, because 64-bit indices of all elements would spill registers
        ok = i < (count - start)
        acc = tl.zeros((BLOCK,), tl.float32)
        for r in tl.static_range(W):
            src = staging + r * count
            if r == rank:
                src = x
            acc += tl.load(src + start + i, mask=ok, other=0.0).to(tl.float32)
        if BIAS:
            column = (start % N).to(tl.int32)
            if ALIGNED:
                column = tl.multiple_of(column, 8)
            acc += tl.load(bias + (column + i) % N, mask=ok, other=0.0).to(tl.float32)
        tl.store(out + start + i, acc.to(out.dtype.element_ty), mask=ok)
