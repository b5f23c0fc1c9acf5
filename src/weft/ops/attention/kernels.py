"""The merge of a library's partial attention results: out_i = softmax over some of the keys, and lse_i = the log of its
sum of exponentials (natural), so that over all keys out = sum exp(lse_i - lse) out_i with lse = log sum exp(lse_i). It
is computed in float32, of all partial results at once, each read once. Partial results are of 16 bits, one rounding
each."""

import triton.language as tl

from ...lang.jit import jit


@jit(do_not_specialize=("M", "first"))
def merge(
    outs,
    lses,
    sinks,
    out,
    lse,
    M,
    first,
    HEADS: tl.constexpr,
    D: tl.constexpr,
    WHOLE: tl.constexpr,
    SINKS: tl.constexpr,
    ROWS: tl.constexpr,
    COLS: tl.constexpr,
):
    """out [M, HEADS, D], lse float32 [HEADS, M] of partial outs and lses, tuples: the first WHOLE of all M
    rows, the others of those from `first` on. sinks [HEADS]: logits that take part in every sum and have no value. ROWS
    rows of one head at a time; COLS: D, or the power of two above it."""
    i, d = tl.arange(0, ROWS), tl.arange(0, COLS)
    blocks = tl.cdiv(M, ROWS)
    for b in range(tl.program_id(0), blocks * HEADS, tl.num_programs(0)):
        head = b % HEADS
        row = b // HEADS * ROWS + i
        top = tl.full((ROWS,), float("-inf"), tl.float32)
        if SINKS:
            top = tl.maximum(top, tl.load(sinks + head).to(tl.float32))
        parts = ()
        for n in tl.static_range(len(outs)):
            start = 0 if n < WHOLE else first
            there = (row >= start) & (row < M)
            part = tl.load(lses[n] + head.to(tl.int64) * (M - start) + row - start, mask=there, other=float("-inf"))
            parts = parts + (part,)
            top = tl.maximum(top, part)
        top = tl.where(row < M, top, 0.0)
        total = tl.zeros((ROWS,), tl.float32)
        if SINKS:
            total += tl.exp(tl.load(sinks + head).to(tl.float32) - top)
        acc = tl.zeros((ROWS, COLS), tl.float32)
        for n in tl.static_range(len(outs)):
            start = 0 if n < WHOLE else first
            there = ((row >= start) & (row < M))[:, None] & (d < D)[None, :]
            at = ((row - start).to(tl.int64) * HEADS + head)[:, None] * D + d[None, :]
            weight = tl.exp(parts[n] - top)
            total += weight
            acc += weight[:, None] * tl.load(outs[n] + at, mask=there, other=0.0).to(tl.float32)
        at = (row.to(tl.int64) * HEADS + head)[:, None] * D + d[None, :]
        there = (row < M)[:, None] & (d < D)[None, :]
        tl.store(out + at, (acc / total[:, None]).to(out.dtype.element_ty), mask=there)
        tl.store(lse + head.to(tl.int64) * M + row, top + tl.log(total), mask=row < M)
