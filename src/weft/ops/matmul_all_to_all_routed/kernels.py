"""GEMM + all-to-all with a routing that is known only on the device, and the kernel that sends the gradient back.

    number_rows      numbers the rows for each destination in the order that they have here, and stores the count on
                     each destination rank
    gemm_to_ranks    runs a persistent GEMM whose epilogue stores each row of a tile in the inbox of the row's
                     destination rank. A program that has no tiles left notifies all ranks
    receive_rows     waits for one source after another, and copies the rows of each source to the output, followed by
                     zeros

    stream   | number_rows | gemm_to_ranks: tiles, and their rows to all inboxes | receive_rows: wait, copy |

    return_rows      runs in the backward pass: it pushes the gradients of received rows to their source ranks, notifies
                     these ranks, waits for all ranks, and stores the gradients that came back in the order of the
                     forward pass

A GEMM program stores rows for other ranks in the same way as rows for its own rank, so nothing remains to be sent when
the GEMM ends. The host needs no counts, because an inbox has room for all m rows of every source: a row is stored at
source * m + its number.

Who waits for whom. Counter s of a rank counts the notifications from source s. For any routing, every program sends one
notification, so the number of arrivals in a call is always the same. Only one rank increments a counter. A notification
releases, at scope sys, the program's stores to the inboxes, and the counts that `number_rows` has stored earlier on the
stream. GEMM programs do not wait. `return_rows` first sends all rows, then waits, and its programs are all resident, so
every wait ends.

Why memory may be written again. Calls alternate between two halves of the arena. A rank that writes a half in call n +
2 has ended its call n + 1, in which it acquired a notification from every rank. By stream order, each rank sent this
notification after it had read the half in call n. Only later launches of the same stream read the tables of a call.

Symbols of shapes:

    m          the number of rows of x on this rank, each of which has one destination rank
    N, K       N columns of the result, and K columns of x
    W          ranks
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl

from ...compute.gemm import column_halves, grouped_tile
from ...lang.channel import calls_of, end_call, rank_of
from ...lang.descriptors import tiles_of
from ...lang.intrinsics import wait_until
from ...lang.jit import jit
from ...lang.primitives import channel_broadcast

ELEMENT_BYTES = tl.constexpr(2)


class Inbox(NamedTuple):
    """An arena for these kernels. The memory of every rank has two halves. A half contains W m rows of N 16-bit
    elements, followed by int32 [W], the number of rows from each source."""

    addresses: torch.Tensor  # int64 [W], the address of every rank's memory
    epoch: torch.Tensor  # int32 [1]; the parity of the word selects the half
    half: int  # the distance in bytes from the first half to the second


class BlockShape(NamedTuple):
    """The block of a matrix that a program copies at once, and the number of such blocks in flight."""

    ROWS: tl.constexpr
    COLS: tl.constexpr
    STAGES: tl.constexpr


@jit
def half_address(inbox, rank):
    """Return the address of this call's half in the memory of `rank`, which may be a block of ranks."""
    return tl.load(inbox.addresses + rank) + (tl.load(inbox.epoch) & 1).to(tl.int64) * inbox.half


@jit
def inbox_rows(inbox, rank, DTYPE: tl.constexpr):
    """Return a pointer to the rows in this call's half of the memory of `rank`."""
    return tl.multiple_of(half_address(inbox, rank).to(tl.pointer_type(DTYPE)), 16)


@jit
def inbox_counts(inbox, rank, m, N, W: tl.constexpr):
    """Return pointers to the counts in this call's half of the memory of `rank`."""
    return (half_address(inbox, rank) + W * m * N.to(tl.int64) * ELEMENT_BYTES).to(tl.pointer_type(tl.int32))


@jit
def rows_by_rank(destinations, i, m, WP: tl.constexpr, W: tl.constexpr):
    """Return the destinations of the rows i, and int32 [.., WP], which is 1 at the destination of each row and 0
    elsewhere. For a row that is not sent, all elements are 0."""
    rank = tl.load(destinations + i, mask=i < m, other=-1)
    r = tl.arange(0, WP)[None, :]
    return rank, ((rank[:, None] == r) & (r < W)).to(tl.int32)


@jit(do_not_specialize=("m",))
def number_rows(destinations, target_rows, row_addresses, inbox, ch, m, N, BLOCK: tl.constexpr):
    """Compute target_rows int32 [m] = destination * m + the number of earlier rows with the same destination, or -1 for
    a row whose destination (int32) is not a rank and which is therefore not sent. Compute row_addresses int64 [m] = the
    row's address in the inbox of its destination, or 0. The program of the last block stores in each inbox the number
    of rows that this rank sends to it.

    Each program itself counts the rows before its blocks, so that no program waits for another. For 65,536 rows, a
    program reads at most 256 KiB, from L2.
    """
    W: tl.constexpr = ch.world
    WP: tl.constexpr = triton.next_power_of_2(W)
    me = rank_of(ch)
    r = tl.arange(0, WP)
    for block in range(tl.program_id(0), tl.cdiv(m, BLOCK), tl.num_programs(0)):
        earlier = tl.zeros((BLOCK, WP), tl.int32)
        for lo in tl.range(0, block * BLOCK, BLOCK, loop_unroll_factor=4):
            _, goes = rows_by_rank(destinations, lo + tl.arange(0, BLOCK), m, WP, W)
            earlier += goes
        before = tl.sum(earlier, 0)
        i = block * BLOCK + tl.arange(0, BLOCK)
        rank, goes = rows_by_rank(destinations, i, m, WP, W)
        number = tl.sum(goes * (tl.cumsum(goes, 0) - goes + before[None, :]), 1)
        is_sent = tl.sum(goes, 1) > 0
        tl.store(target_rows + i, tl.where(is_sent, rank * m + number, -1), mask=i < m)
        address = half_address(inbox, tl.where(is_sent, rank, 0)) + (me * m + number).to(tl.int64) * N * ELEMENT_BYTES
        tl.store(row_addresses + i, tl.where(is_sent, address, 0), mask=i < m)
        if block == tl.cdiv(m, BLOCK) - 1:
            counts = inbox_counts(inbox, tl.minimum(r, W - 1), m, N, W)
            tl.store(counts + me, before + tl.sum(goes, 0), mask=r < W)


@jit
def store_rows(address, acc, bias, col, N, DTYPE: tl.constexpr, tile):
    """Add the bias to a tile, and store each row at its address. Rows with address 0 are not stored."""
    COLS: tl.constexpr = tile.BN // 2
    if bias is not None:
        c = col + tl.arange(0, tile.BN)
        acc += tl.load(bias + c, mask=c < N, other=0.0).to(tl.float32)[None, :]
    left, right = column_halves(acc, tile.BM, tile.BN)
    row = tl.multiple_of(address.to(tl.pointer_type(DTYPE))[:, None], (16, 16))
    is_sent = (address != 0)[:, None]
    c = col + tl.arange(0, COLS)[None, :]
    tl.store(row + c, left.to(DTYPE), mask=is_sent & (c < N))
    tl.store(row + (c + COLS), right.to(DTYPE), mask=is_sent & (c + COLS < N))


@jit(do_not_specialize=("m",))
def gemm_to_ranks(x_desc, w_desc, bias, row_addresses, ch, m, N, K, DTYPE: tl.constexpr, tile):
    """Compute x_desc [m, K] @ w_desc [N, K]^T + bias [N] (or None), and store the rows at row_addresses. Each program
    adds one arrival to counter `me` of every rank. N is a multiple of 8.

    The ranks begin at different rows: the starting rows of two successive ranks are a W-th of all rows apart. So even
    if rows are sorted by destination, the ranks do not all store to the same rank at the same time.
    """
    x_desc, w_desc = tiles_of(x_desc), tiles_of(w_desc)
    BM: tl.constexpr = tile.BM
    BN: tl.constexpr = tile.BN
    BK: tl.constexpr = tile.BK
    N = N // 8 * 8  # rows are whole 16-byte words; without this hint the compiler generates narrow stores
    PROGRAMS = tl.num_programs(0)
    me = rank_of(ch)
    tiles_m = tl.cdiv(m, BM)
    tiles_n = tl.cdiv(N, BN)
    start = me * tiles_m // ch.world
    k_steps = tl.cdiv(K, BK)
    t = tl.program_id(0) - PROGRAMS
    k_step, row, col = k_steps - 1, 0, 0
    acc = tl.zeros((BM, BN), tl.float32)
    for _ in tl.range(0, tl.cdiv(tiles_m * tiles_n - tl.program_id(0), PROGRAMS) * k_steps):
        k_step = tl.where(k_step == k_steps - 1, 0, k_step + 1)
        if k_step == 0:
            t += PROGRAMS
            tm, tn = grouped_tile(t, tiles_m, tiles_n, tile.GROUP_M)
            row = (tm + start) % tiles_m * BM
            col = tn * BN
        acc = tl.dot(x_desc.load([row, k_step * BK]), w_desc.load([col, k_step * BK]).T, acc)
        if k_step == k_steps - 1:
            r = row + tl.arange(0, BM)
            address = tl.load(row_addresses + r, mask=r < m, other=0)
            store_rows(address, acc, bias, col, N, DTYPE, tile)
            acc = tl.zeros((BM, BN), tl.float32)
    channel_broadcast(ch, me, False)


@jit
def copy_rows(dst, src, count, end, N, program, PROGRAMS, shape):
    """Copy the first `count` rows of src [.., N] to dst, and store zeros in the following rows up to row `end`.
    PROGRAMS programs share the work; this one processes the part with the index `program`."""
    parts = tl.cdiv(N, shape.COLS)
    for block in tl.range(program, tl.cdiv(end, shape.ROWS) * parts, PROGRAMS, num_stages=shape.STAGES):
        r = (block // parts * shape.ROWS + tl.arange(0, shape.ROWS))[:, None]
        c = block % parts * shape.COLS + tl.arange(0, shape.COLS)[None, :]
        offsets = r.to(tl.int64) * N + c
        mask = (r < end) & (c < N)
        tl.store(dst + offsets, tl.load(src + offsets, mask=mask & (r < count), other=0.0), mask=mask)


@jit(do_not_specialize=("m",))
def receive_rows(out, counts, inbox, ch, m, N, ARRIVALS: tl.constexpr, shape):
    """Compute out [W, m, N] = the rows from each rank, followed by zeros, and counts int32 [W] = the number of rows
    from each rank. The rank's own rows are copied first, while other ranks' rows may still be in flight. ARRIVALS: the
    number of notifications from a source in each call.
    """
    W: tl.constexpr = ch.world
    N = N // 8 * 8
    me, program = rank_of(ch), tl.program_id(0)
    rows, counts_here = inbox_rows(inbox, me, out.dtype.element_ty), inbox_counts(inbox, me, m, N, W)
    for step in range(0, W):
        source = (me - step + W) % W
        wait_until(ch.counters + source, calls_of(ch) * ARRIVALS, ch.guard, source, source, "sys")
        count = tl.load(counts_here + source)
        if program == 0:
            tl.store(counts + source, count)
        offset = (source * m).to(tl.int64) * N
        copy_rows(out + offset, rows + offset, count, m, N, program, tl.num_programs(0), shape)
    end_call(ch, inbox.epoch, tl.num_programs(0))


@jit(do_not_specialize=("m",))
def return_rows(dout, counts, target_rows, returned, inbox, ch, m, N, ARRIVALS: tl.constexpr, shape):
    """Compute returned [m, N] = the gradients of the rows that this rank sent, with zeros for rows that were not sent.
    Row i comes from row target_rows[i] of the inbox, where its destination has stored it. dout [W, m, N]: the gradients
    of the received rows. Only the first counts[s] gradient rows of each source s are read; counts is int32 [W].
    """
    W: tl.constexpr = ch.world
    N = N // 8 * 8
    me, program, PROGRAMS = rank_of(ch), tl.program_id(0), tl.num_programs(0)
    sent_to = (me * m).to(tl.int64) * N
    for step in range(0, W):
        rank = (me + step) % W
        count = tl.minimum(tl.load(counts + rank), m)
        dst = inbox_rows(inbox, rank, dout.dtype.element_ty) + sent_to
        copy_rows(dst, dout + (rank * m).to(tl.int64) * N, count, count, N, program, PROGRAMS, shape)
    channel_broadcast(ch, me, False)
    wait_until(ch.counters, calls_of(ch) * ARRIVALS, ch.guard, -1, 0, "sys", W)
    rows = inbox_rows(inbox, me, dout.dtype.element_ty)
    parts = tl.cdiv(N, shape.COLS)
    for block in range(program, tl.cdiv(m, shape.ROWS) * parts, PROGRAMS):
        r = block // parts * shape.ROWS + tl.arange(0, shape.ROWS)
        c = block % parts * shape.COLS + tl.arange(0, shape.COLS)[None, :]
        target = tl.load(target_rows + r, mask=r < m, other=-1)[:, None]
        values = tl.load(rows + target.to(tl.int64) * N + c, mask=(target >= 0) & (c < N), other=0.0)
        tl.store(returned + r.to(tl.int64)[:, None] * N + c, values, mask=(r < m)[:, None] & (c < N))
    end_call(ch, inbox.epoch, PROGRAMS)
