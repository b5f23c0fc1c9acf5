"""The kernels around a library's attention: one that merges partial results, and two that push rows to their readers.

merge        out_i = softmax over some of the keys, lse_i = log of its sum of exponentials (natural), so that over
             all keys out = sum exp(lse_i - lse) out_i with lse = log sum exp(lse_i): in float32, of all partial
             results at once, each read once. Partial results are of 16 bits, one rounding each
push_rows    where copy engines are slow, below some 16 MB: a few programs on a stream of their own, behind the
             barrier that says that nobody reads there
push_blocks  parts of a matrix to several readers, each to its own place with its own length of a row, so that they are
             rearranged on the way
"""

import triton.language as tl

from ...lang.channel import address_of
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


@jit(do_not_specialize=("reader", "start", "plane", "count"))
def push_rows(memory, k, v, reader, start, plane, count, DTYPE: tl.constexpr, BLOCK: tl.constexpr):
    """Store k [count] in rank `reader`'s memory from element `start` on, and v [count] from element `start + plane` on.
    start, plane and count are multiples of 8."""
    start, plane, count = start.to(tl.int64) // 8 * 8, plane.to(tl.int64) // 8 * 8, count.to(tl.int64) // 8 * 8
    to = address_of(memory, reader, DTYPE) + start
    i = tl.arange(0, BLOCK)
    for b in range(tl.program_id(0), tl.cdiv(count, BLOCK), tl.num_programs(0)):
        here = b.to(tl.int64) * BLOCK
        ok = i < count - here
        tl.store(to + here + i, tl.load(k + here + i, mask=ok), mask=ok)
        tl.store(to + plane + here + i, tl.load(v + here + i, mask=ok), mask=ok)


@jit(do_not_specialize=("blocks", "across", "down"))
def push_blocks(
    x,
    memory,
    table,
    blocks,
    across,
    down,
    DTYPE: tl.constexpr,
    ALIGN: tl.constexpr,
    ROWS: tl.constexpr,
    COLS: tl.constexpr,
):
    """table, int64 [blocks, 7]: of a block of x its reader, rows and columns; and its first element and the length of a
    row, in the reader's memory and in x, multiples of ALIGN. In tiles of ROWS x COLS, of which the longest block has
    down x across; blocks take turns, so that not all ranks push to one."""
    i, j = tl.arange(0, ROWS), tl.arange(0, COLS)
    for t in range(tl.program_id(0), blocks * across * down, tl.num_programs(0)):
        block, tile = table + t % blocks * 7, t // blocks
        rows, cols = tl.load(block + 1), tl.load(block + 2) // ALIGN * ALIGN
        row, col = (tile // across).to(tl.int64) * ROWS + i, tile % across * COLS + j
        there, here = tl.load(block + 3) // ALIGN * ALIGN, tl.load(block + 5) // ALIGN * ALIGN
        long_there, long_here = tl.load(block + 4) // ALIGN * ALIGN, tl.load(block + 6) // ALIGN * ALIGN
        ok = (row < rows)[:, None] & (col < cols)[None, :]
        part = tl.load(x + here + row[:, None] * long_here + col[None, :], mask=ok)
        to = address_of(memory, tl.load(block), DTYPE) + there
        tl.store(to + row[:, None] * long_there + col[None, :], part, mask=ok)
