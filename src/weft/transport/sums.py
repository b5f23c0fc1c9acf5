"""Sums over ranks, one kernel a layout of the partial rows: staged on the owner, or where every rank computed them.

Elsewhere, as part of a kernel that does more: tiles in an arena (ops/matmul_reduce/kernels.py), rows normalised
in registers (`sum_rows`, ops/all_reduce/kernels.py), and rows with low-latency flags (low_latency_kernels.py).
"""

from __future__ import annotations

import triton.language as tl

from ..lang.channel import address_of
from ..lang.jit import jit
from ..lang.mapping import first_row


@jit(do_not_specialize=("rows",))
def sum_staged(
    own,
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
    """out [rows, N] = sum over ranks in rank order, fp32: `own` for this rank, staging [W, rows, N] for the others.
    me: int32 [1], this rank. ALIGNED: N is a multiple of 8, as BLOCK is."""
    count = rows.to(tl.int64) * N
    rank = tl.load(me)
    i = tl.arange(0, BLOCK)
    for b in range(tl.program_id(0), tl.cdiv(count, BLOCK), tl.num_programs(0)):
        at = b.to(tl.int64) * BLOCK  # in the pointers: of every element it would take registers that are not there
        ok = i < (count - at)
        acc = tl.zeros((BLOCK,), tl.float32)
        for r in tl.static_range(W):
            src = staging + r * count
            if r == rank:
                src = own
            acc += tl.load(src + at + i, mask=ok, other=0.0).to(tl.float32)
        if BIAS:
            first = (at % N).to(tl.int32)
            if ALIGNED:
                first = tl.multiple_of(first, 8)
            acc += tl.load(bias + (first + i) % N, mask=ok, other=0.0).to(tl.float32)
        tl.store(out + at + i, acc.to(out.dtype.element_ty), mask=ok)


@jit(do_not_specialize=("first", "rows"))
def sum_partials(partials, out, sums, first, rows, N, me, DTYPE: tl.constexpr, W: tl.constexpr, BLOCK: tl.constexpr):
    """This rank's part of rows first .. first + rows, summed over all ranks' partials [.., N] (addresses) in rank
    order, fp32: to out and sums, which begin there. N is a multiple of 8. me: int32 [1], this rank."""
    N = N // 8 * 8
    rank = tl.load(me)
    lo = first_row(rank, rows, W)
    count = (first_row(rank + 1, rows, W) - lo).to(tl.int64) * N
    sources = ()
    for r in tl.static_range(W):
        sources = sources + (address_of(partials, r, DTYPE) + (first + lo).to(tl.int64) * N,)
    i = tl.arange(0, BLOCK)
    for b in range(tl.program_id(0), tl.cdiv(count, BLOCK), tl.num_programs(0)):
        at = b.to(tl.int64) * BLOCK
        ok = i < (count - at)
        acc = tl.zeros((BLOCK,), tl.float32)
        for r in tl.static_range(W):
            acc += tl.load(sources[r] + at + i, mask=ok, other=0.0).to(tl.float32)
        total = acc.to(DTYPE)
        tl.store(out + at + i, total, mask=ok)
        tl.store(sums + at + i, total, mask=ok)
