"""The kernels around a library's attention: one merges partial results, two push rows into other ranks' memory.

merge        A partial result is out_i, the softmax over some of the keys, and lse_i, the natural logarithm of its sum
             of exponentials. Over all keys, lse = log sum exp(lse_i) and out = sum exp(lse_i - lse) out_i. The kernel
             computes in float32 and reads each partial result once; partial results have been rounded to 16 bits once
push_rows    pushes keys and values with a few programs on a side stream, which pays below some 16 MB, where a copy
             engine is bound by latency. The barrier before it says that no reader still reads that memory
push_blocks  pushes blocks of a matrix to several readers, each with its own start and row stride, so that the matrix
             is rearranged on the way

Both pushes only store. The reader learns of the rows from what follows on the same stream: a notification after
push_rows, a barrier after push_blocks.
"""

import triton.language as tl

from ...lang.channel import address_of
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
    """Merge partial results, tuples `outs` and `lses`, into out [M, HEADS, D] and lse float32 [HEADS, M].

    The first FULL of them have all M rows, the others those from `first_query` on. sinks [HEADS] are logits that take
    part in every sum and have no value. A block is ROWS rows of one head; COLS is D, or the power of two above it.
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


@jit(do_not_specialize=("reader", "start", "v_offset", "count"))
def push_rows(memory, k, v, reader, start, v_offset, count, DTYPE: tl.constexpr, BLOCK: tl.constexpr):
    """Store k [count] into the memory of rank `reader` from element `start` on, and v [count] from element
    `start + v_offset` on. start, v_offset and count are multiples of 8."""
    start, v_offset = start.to(tl.int64) // 8 * 8, v_offset.to(tl.int64) // 8 * 8
    count = count.to(tl.int64) // 8 * 8
    dst = address_of(memory, reader, DTYPE) + start
    i = tl.arange(0, BLOCK)
    for b in range(tl.program_id(0), tl.cdiv(count, BLOCK), tl.num_programs(0)):
        offset = b.to(tl.int64) * BLOCK
        mask = i < count - offset
        tl.store(dst + offset + i, tl.load(k + offset + i, mask=mask), mask=mask)
        tl.store(dst + v_offset + offset + i, tl.load(v + offset + i, mask=mask), mask=mask)


@jit(do_not_specialize=("blocks", "tiles_across", "tiles_down"))
def push_blocks(
    x,
    memory,
    table,
    blocks,
    tiles_across,
    tiles_down,
    DTYPE: tl.constexpr,
    ALIGN: tl.constexpr,
    ROWS: tl.constexpr,
    COLS: tl.constexpr,
):
    """Store blocks of the matrix x into the memory of their readers.

    table int64 [blocks, 7] has for each block its reader, rows and columns, its start and row stride in the reader's
    memory, and its start and row stride in x, in elements; all but the reader and the rows are multiples of ALIGN. A
    tile is ROWS x COLS, and the largest block has tiles_down x tiles_across of them. Consecutive tiles belong to
    different blocks, so that the programs do not all push to one reader at a time.
    """
    i, j = tl.arange(0, ROWS), tl.arange(0, COLS)
    for t in range(tl.program_id(0), blocks * tiles_across * tiles_down, tl.num_programs(0)):
        block, tile = table + t % blocks * 7, t // blocks
        rows, cols = tl.load(block + 1), tl.load(block + 2) // ALIGN * ALIGN
        row, col = (tile // tiles_across).to(tl.int64) * ROWS + i, tile % tiles_across * COLS + j
        dst_start, src_start = tl.load(block + 3) // ALIGN * ALIGN, tl.load(block + 5) // ALIGN * ALIGN
        dst_stride, src_stride = tl.load(block + 4) // ALIGN * ALIGN, tl.load(block + 6) // ALIGN * ALIGN
        mask = (row < rows)[:, None] & (col < cols)[None, :]
        values = tl.load(x + src_start + row[:, None] * src_stride + col[None, :], mask=mask)
        dst = address_of(memory, tl.load(block), DTYPE) + dst_start
        tl.store(dst + row[:, None] * dst_stride + col[None, :], values, mask=mask)
