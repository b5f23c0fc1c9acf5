"""The kernel that pushes blocks of a matrix into other ranks' memory. The kernel runs after a barrier, which ensures
that no reader still reads that memory. Each block has its own start and row stride, so that the push rearranges the
matrix. The kernel itself notifies no rank; a barrier after it on the same stream notifies the readers.
"""

import triton.language as tl

from ..lang.channel import address_of
from ..lang.jit import jit


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

    table int64 [blocks, 7] contains for each block its reader, its numbers of rows and columns, its start and row
    stride in the reader's memory, and its start and row stride in x. Starts and strides are in elements. All entries
    except the reader and the number of rows are multiples of ALIGN. A tile is ROWS x COLS, and the largest block has
    tiles_down x tiles_across tiles. Consecutive tiles belong to different blocks, so that the programs do not all push
    to the same reader at the same time.
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
