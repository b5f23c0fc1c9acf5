"""The kernel that merges partial attention results of a library.

A partial result consists of out_i, the attention over some of the keys, and lse_i, the natural logarithm of the
softmax's denominator. Over all keys, lse = log sum exp(lse_i) and out = sum exp(lse_i - lse) out_i. The kernel computes
in float32 and reads each partial result once. Each partial result has been rounded to 16 bits once.

Symbols of shapes:

    M          the number of rows in the merged result
    D          the number of elements in a head
"""

import triton.language as tl

from ...lang.jit import jit


@jit(do_not_specialize=("M", "first_query"))
def merge(
    outs,
    lses,
    sinks,
    out,
    lse,
    M,
    first_query,
    HEADS: tl.constexpr,
    D: tl.constexpr,
    FULL: tl.constexpr,
    SINKS: tl.constexpr,
    ROWS: tl.constexpr,
    COLS: tl.constexpr,
):
    """Merge the partial results in the tuples `outs` and `lses` into out [M, HEADS, D] and lse float32 [HEADS, M].

    The first FULL results contain all M rows; the other results contain the rows from `first_query` on. sinks [HEADS]
    are logits that are terms of every sum of exponentials and have no value. A block consists of ROWS rows of one head.
    COLS is D rounded up to a power of two.
    """
    i, d = tl.arange(0, ROWS), tl.arange(0, COLS)
    blocks = tl.cdiv(M, ROWS)
    for b in range(tl.program_id(0), blocks * HEADS, tl.num_programs(0)):
        head = b % HEADS
        row = b // HEADS * ROWS + i
        max_lse = tl.full((ROWS,), float("-inf"), tl.float32)
        if SINKS:
            max_lse = tl.maximum(max_lse, tl.load(sinks + head).to(tl.float32))
        partial_lses = ()
        for n in tl.static_range(len(outs)):
            start = 0 if n < FULL else first_query
            mask = (row >= start) & (row < M)
            partial = tl.load(lses[n] + head.to(tl.int64) * (M - start) + row - start, mask=mask, other=float("-inf"))
            partial_lses = partial_lses + (partial,)
            max_lse = tl.maximum(max_lse, partial)
        max_lse = tl.where(row < M, max_lse, 0.0)
        total = tl.zeros((ROWS,), tl.float32)
        if SINKS:
            total += tl.exp(tl.load(sinks + head).to(tl.float32) - max_lse)
        acc = tl.zeros((ROWS, COLS), tl.float32)
        for n in tl.static_range(len(outs)):
            start = 0 if n < FULL else first_query
            mask = ((row >= start) & (row < M))[:, None] & (d < D)[None, :]
            offsets = ((row - start).to(tl.int64) * HEADS + head)[:, None] * D + d[None, :]
            weight = tl.exp(partial_lses[n] - max_lse)
            total += weight
            acc += weight[:, None] * tl.load(outs[n] + offsets, mask=mask, other=0.0).to(tl.float32)
        offsets = (row.to(tl.int64) * HEADS + head)[:, None] * D + d[None, :]
        mask = (row < M)[:, None] & (d < D)[None, :]
        tl.store(out + offsets, (acc / total[:, None]).to(out.dtype.element_ty), mask=mask)
        tl.store(lse + head.to(tl.int64) * M + row, max_lse + tl.log(total), mask=row < M)
