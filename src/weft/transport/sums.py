"""Sums over ranks, one kernel for each location of the partial rows: staged on the owner, or where every rank computed
them.

Larger kernels contain further sums over ranks: of tiles in an arena (ops/matmul_reduce/kernels.py), of rows that are
then normalised in registers (`sum_rows`, ops/all_reduce/kernels.py), and of low-latency rows (low_latency_kernels.py).
"""

from __future__ import annotations

import triton.language as tl

from ..lang.channel import address_of
from ..lang.jit import jit
from ..lang.mapping import first_row


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
    """Compute out [rows, N] = the sum over ranks, in rank order and fp32, + bias [N] if BIAS. This rank's addend is x
    [rows, N]; the other ranks' addends are in staging [W, rows, N]. me: int32 [1], this rank. ALIGNED: N, like BLOCK,
    is a multiple of 8."""
    count = rows.to(tl.int64) * N
    rank = tl.load(me)
    i = tl.arange(0, BLOCK)
    for b in range(tl.program_id(0), tl.cdiv(count, BLOCK), tl.num_programs(0)):
        start = b.to(tl.int64) * BLOCK  # added to pointers: 64-bit indices of all elements would spill registers
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


@jit(do_not_specialize=("begin", "rows"))
def sum_partials(partials, out, sums, begin, rows, N, me, DTYPE: tl.constexpr, W: tl.constexpr, BLOCK: tl.constexpr):
    """Sum this rank's part of the rows from `begin` to `begin + rows` over all ranks, in rank order and fp32, and store
    it in out and in sums, which begin with that part. partials: the addresses, by rank, of [.., N]. N is a multiple of
    8. me: int32 [1], this rank."""
    N = N // 8 * 8
    rank = tl.load(me)
    lo = first_row(rank, rows, W)
    count = (first_row(rank + 1, rows, W) - lo).to(tl.int64) * N
    sources = ()
    for r in tl.static_range(W):
        sources = sources + (address_of(partials, r, DTYPE) + (begin + lo).to(tl.int64) * N,)
    i = tl.arange(0, BLOCK)
    for b in range(tl.program_id(0), tl.cdiv(count, BLOCK), tl.num_programs(0)):
        start = b.to(tl.int64) * BLOCK
        ok = i < (count - start)
        acc = tl.zeros((BLOCK,), tl.float32)
        for r in tl.static_range(W):
            acc += tl.load(sources[r] + start + i, mask=ok, other=0.0).to(tl.float32)
        total = acc.to(DTYPE)
        tl.store(out + start + i, total, mask=ok)
        tl.store(sums + start + i, total, mask=ok)
