"""Kernels that push rows into other ranks' memory, behind a barrier that says that no reader still reads there.

push_rows    pushes two tensors with a few programs on a side stream
push_blocks  pushes blocks of a matrix to several readers, each with its own start and row stride, so that the matrix is
             rearranged on the way

Both only store. The reader learns of the rows from what follows on the same stream: a notification after push_rows, a
barrier after push_blocks.
"""

import triton.language as tl

from ..lang.channel import address_of
from ..lang.jit import jit


@jit(do_not_specialize=("reader", "start", "y_offset", "count"))
def push_rows(memory, x, y, reader, start, y_offset, count, DTYPE: tl.constexpr, BLOCK: tl.constexpr):
    """Store x [count] into the memory of rank `reader` from element `start` on, and y [count] from element
    `start + y_offset` on. start, y_offset and count are multiples of 8."""
    start, y_offset = start.to(tl.int64) // 8 * 8, y_offset.to(tl.int64) // 8 * 8
    count = count.to(tl.int64) // 8 * 8
    dst = address_of(memory, reader, DTYPE) + start
    i = tl.arange(0, BLOCK)
    for b in range(tl.program_id(0), tl.cdiv(count, BLOCK), tl.num_programs(0)):
        offset = b.to(tl.int64) * BLOCK
        mask = i < count - offset
        tl.store(dst + offset + i, tl.load(x + offset + i, mask=mask), mask=mask)
        tl.store(dst + y_offset + offset + i, tl.load(y + offset + i, mask=mask), mask=mask)


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
