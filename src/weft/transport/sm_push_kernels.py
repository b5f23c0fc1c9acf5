"""Programs that push rows to their readers' memory, behind a barrier that says that nobody reads there.

push_rows    a few programs on a stream of their own
push_blocks  parts of a matrix to several readers, each to its own place with its own length of a row, so that they are
             rearranged on the way
"""

import triton.language as tl

from ..lang.channel import address_of
from ..lang.jit import jit


@jit(do_not_specialize=("reader", "start", "plane", "count"))
def push_rows(memory, x, y, reader, start, plane, count, DTYPE: tl.constexpr, BLOCK: tl.constexpr):
    """Store x [count] in rank `reader`'s memory from element `start` on, and y [count] from element `start + plane` on.
    start, plane and count are multiples of 8."""
    start, plane, count = start.to(tl.int64) // 8 * 8, plane.to(tl.int64) // 8 * 8, count.to(tl.int64) // 8 * 8
    to = address_of(memory, reader, DTYPE) + start
    i = tl.arange(0, BLOCK)
    for b in range(tl.program_id(0), tl.cdiv(count, BLOCK), tl.num_programs(0)):
        here = b.to(tl.int64) * BLOCK
        ok = i < count - here
        tl.store(to + here + i, tl.load(x + here + i, mask=ok), mask=ok)
        tl.store(to + plane + here + i, tl.load(y + here + i, mask=ok), mask=ok)


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
