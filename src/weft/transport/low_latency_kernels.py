"""Rows with low-latency flags, and the all-gather and reduce-scatter of a few of them: the data is its own flag, as in
NCCL's LL protocol, where half of every 8 bytes is a flag, and in Lamport buffers, where none is (as here).

Nothing is counted. A word of staging memory is EMPTY until somebody posts there, and EMPTY is never posted: who needs a
row looks until no word of it is EMPTY. That spares a fence, which waits for the peers' answer to every store, and a
counter's own way to the peer behind it.

Order of accesses. Three thirds of the memory take turns: call n fills and reads one, and clears the one of call n - 1,
of which this rank's own kernel has read everything. Peers fill that again in call n + 2. They do so after their call n
+ 1, and so after rows that this rank posted in its own call n + 1, or a sum that took them in. By then its call n had
ended, which completes what it cleared. For this every rank needs something of every other rank in every call: nobody's
part may be empty.
"""

from typing import NamedTuple

import torch
import triton.language as tl

from ..lang.channel import address_of, rank_of
from ..lang.intrinsics import flush_stores, globaltimer, look_again, peek, post, same_call
from ..lang.jit import jit

EMPTY = tl.constexpr(-0x7FFF8000)  # 0x80008000: two negative zeros of 16 bits, or next to nothing of 32
TINY = tl.constexpr(2.0**-126)  # the smallest normal number of fp32 and bf16


class Slots(NamedTuple):
    """words: this rank's three thirds, int32; addresses: every rank's, by rank. turns: int32 [TURNS, 2], for a program
    the third whose turn it is, and the vectors that the last one filled of its third; at most TURNS programs."""

    words: torch.Tensor
    addresses: torch.Tensor
    turns: torch.Tensor


@jit
def full(words):
    """The words without EMPTY: of two zeros of 16 bits one gets the other sign, which it then has on every rank."""
    return tl.where(words == EMPTY, words ^ 0x8000, words)


@jit
def post_row(to, row, count, VECTORS: tl.constexpr):
    """`count` vectors of 16 bytes, at most VECTORS and no word of them EMPTY, from `row` to a peer."""
    v = tl.arange(0, VECTORS)
    ok = v < count
    w0 = full(tl.load(row + 4 * v, mask=ok, other=0))
    w1 = full(tl.load(row + 4 * v + 1, mask=ok, other=0))
    w2 = full(tl.load(row + 4 * v + 2, mask=ok, other=0))
    w3 = full(tl.load(row + 4 * v + 3, mask=ok, other=0))
    post(to + 4 * v, w0, w1, w2, w3, ok)


@jit
def numbers(words, DTYPE: tl.constexpr, P: tl.constexpr):
    """fp32 [P]: the elements in int32 words."""
    if DTYPE == tl.float32:
        found = words.to(tl.float32, bitcast=True)
    elif DTYPE == tl.bfloat16:
        low = (words << 16).to(tl.float32, bitcast=True)
        found = tl.reshape(tl.join(low, (words & -65536).to(tl.float32, bitcast=True)), (P,))
    else:
        low = words.to(tl.int16).to(tl.float16, bitcast=True)
        high = (words >> 16).to(tl.int16).to(tl.float16, bitcast=True)
        found = tl.reshape(tl.join(low, high), (P,)).to(tl.float32)
    return found


@jit
def solid(y, DTYPE: tl.constexpr):
    """y rounded to DTYPE, with a plain zero for what then is zero, or below TINY, so that no word of it is EMPTY."""
    rounded = y.to(DTYPE).to(tl.float32)
    return tl.where(tl.abs(rounded) < TINY, 0.0, rounded).to(DTYPE)


@jit
def post_result(
    stagings, at, y, me, DTYPE: tl.constexpr, W: tl.constexpr, VECTORS: tl.constexpr, ROW: tl.constexpr, P: tl.constexpr
):
    """The first ROW words of P `solid` elements of DTYPE to all other ranks, at word `at` of their memory."""
    if DTYPE == tl.float32:
        even, odd = tl.split(tl.reshape(y.to(tl.int32, bitcast=True), (VECTORS, 2, 2)))
    else:
        low, high = tl.split(tl.reshape(y.to(tl.int16, bitcast=True), (VECTORS, 2, 2, 2)))
        even, odd = tl.split((low.to(tl.int32) & 0xFFFF) | (high.to(tl.int32) << 16))
    w0, w2 = tl.split(even)
    w1, w3 = tl.split(odd)
    v = tl.arange(0, VECTORS)
    for k in tl.static_range(1, W):
        to = address_of(stagings, (me + k) % W, tl.int32) + at + 4 * v
        post(to, w0, w1, w2, w3, v < ROW // 4)


@jit
def clear(third, last, pid, VECTORS: tl.constexpr, PROGRAMS: tl.constexpr):
    """This program's part of the first `last` vectors."""
    for first in range(pid * VECTORS, last, PROGRAMS * VECTORS):
        v = first + tl.arange(0, VECTORS)
        none = tl.full((VECTORS,), EMPTY, tl.int32)
        post(third + 4 * v, none, none, none, none, v < last)


@jit
def compare_calls(calls, number, pid, PROGRAMS: tl.constexpr):
    """Rows carry nothing that says of which call they are. The last program, which has the fewest, compares behind what
    it posts and before it waits for rows."""
    if pid == PROGRAMS - 1:
        same_call(calls, number)


@jit
def end_turn(turns, pid, turn, filled, PROGRAMS: tl.constexpr, TURNS: tl.constexpr):
    """Whose turn it is next, and how many vectors this call filled, for all programs that a later call may have."""
    flush_stores(False)  # every thread has read the program's turn
    p = tl.arange(0, TURNS)
    tl.store(turns + 2 * p, (turn + 1) % 3, mask=p % PROGRAMS == pid)
    tl.store(turns + 2 * p + 1, filled, mask=p % PROGRAMS == pid)


@jit
def turn_of(turns, pid, third):
    """Whose turn it is, where its third begins and where the one begins that is cleared now, in words, and how many
    vectors of that the last call filled."""
    turn = tl.load(turns + 2 * pid)
    words = (third // 4 * 4).to(tl.int64)  # known to keep rows at 16-byte words
    return turn, turn * words, (turn + 2) % 3 * words, tl.load(turns + 2 * pid + 1)


@jit
def nothing(W: tl.constexpr, WORDS: tl.constexpr, P: tl.constexpr):
    return tl.zeros((P,), tl.float32) if W > 0 else tl.zeros((WORDS,), tl.int32)


@jit
def sum_low_latency(
    slots,
    stride,
    x,
    residual,
    owner,
    me,
    t,
    row,
    ch,
    DTYPE: tl.constexpr,
    W: tl.constexpr,
    SOURCES: tl.constexpr,
    WORDS: tl.constexpr,
    P: tl.constexpr,
):
    """fp32 [P]: the sum of one row of `row` words, at most WORDS, over the ranks, in their order, once all have posted
    it in their slots, `stride` words apart; this rank's is at `x`. SOURCES beyond W: and of the residual, which is at
    `residual` on its owner, who has posted it too. W 0: int32 [WORDS], the row that its owner, another rank, has
    posted."""
    c = tl.arange(0, WORDS)
    began = globaltimer()
    tries = 0
    missing = 1
    acc = nothing(W, WORDS, P)
    while missing > 0:
        go_on = 1
        if tries > 0:
            go_on = look_again(tries, began, ch.guard, ch.counters, t, missing - 1)
        acc = nothing(W, WORDS, P)
        empty = tl.zeros((WORDS,), tl.int32)
        for k in tl.range(0, SOURCES, loop_unroll_factor=SOURCES if P <= 8192 else 1):  # all on their way at once
            source = slots + k * stride
            waits = k + 1
            if SOURCES > W:
                if k == W:
                    waits = owner + 1
                    if owner == me:
                        source = residual
                        waits = 0
            if W > 0:
                if k == me:
                    source = x
                    waits = 0
            words = peek(tl.multiple_of(source, 16) + c, c < row)
            empty = tl.maximum(empty, tl.where(words == EMPTY, waits, 0))
            if W > 0:
                acc += numbers(full(words), DTYPE, P)
            else:
                acc = words
        missing = tl.max(empty) * go_on
        tries += 1
    return acc


@jit
def row_low_latency(slot, owner, me, t, row, ch, WORDS: tl.constexpr):
    """int32 [WORDS]: a row of `row` words, once its owner, another rank, has posted it."""
    return sum_low_latency(slot, 0, slot, slot, owner, me, t, row, ch, tl.int32, 0, 1, WORDS, WORDS)


@jit(do_not_specialize=("most", "third", "number"))
def gather_low_latency(
    x,
    slots,
    out,
    starts,
    ch,
    calls,
    number,
    most,
    third,
    WORDS: tl.constexpr,
    PROGRAMS: tl.constexpr,
    TURNS: tl.constexpr,
):
    """Every rank's x, one after the other, to `out` of every rank; int32 words. starts: int32 [W + 1], in vectors of 16
    bytes, where the ranks' parts begin in `out`; most: the longest of them. A third has `third` words, as `out`. WORDS:
    of a block, the unit of work."""
    W: tl.constexpr = ch.world
    VECTORS: tl.constexpr = WORDS // 4
    staging, stagings, turns = slots
    pid = tl.program_id(0)
    me = rank_of(ch)
    turn, at, before, filled = turn_of(turns, pid, third)
    lo = tl.load(starts + me)
    count = tl.load(starts + me + 1) - lo
    units = tl.cdiv(most, VECTORS) * (W - 1)
    for unit in range(pid, units, PROGRAMS):
        b = unit // (W - 1) * VECTORS
        if b < count:
            theirs = address_of(stagings, (me + 1 + unit % (W - 1)) % W, tl.int32) + at
            post_row(theirs + 4 * (lo + b).to(tl.int64), x + 4 * b.to(tl.int64), count - b, VECTORS)
    clear(staging + before, filled, pid, VECTORS, PROGRAMS)
    compare_calls(calls, number, pid, PROGRAMS)

    c = tl.arange(0, WORDS)
    for b in range(pid * VECTORS, count, PROGRAMS * VECTORS):
        ok = c < 4 * (count - b)
        own = full(tl.load(x + 4 * b.to(tl.int64) + c, mask=ok, other=0))  # the same bits as on other ranks
        tl.store(out + 4 * (lo + b).to(tl.int64) + c, own, mask=ok)
    for unit in range(pid, units, PROGRAMS):  # from the next rank on
        owner = (me + 1 + unit % (W - 1)) % W
        b = tl.load(starts + owner) + unit // (W - 1) * VECTORS
        words = 4 * (tl.load(starts + owner + 1) - b)
        if words > 0:
            place = 4 * b.to(tl.int64)
            found = row_low_latency(staging + at + place, owner, me, unit, words, ch, WORDS)
            tl.store(out + place + c, found, mask=c < words)
    end_turn(turns, pid, turn, tl.load(starts + W), PROGRAMS, TURNS)


@jit(do_not_specialize=("most", "third", "number"))
def scatter_low_latency(
    x,
    slots,
    out,
    starts,
    ch,
    calls,
    number,
    most,
    third,
    DTYPE: tl.constexpr,
    WORDS: tl.constexpr,
    P: tl.constexpr,
    PROGRAMS: tl.constexpr,
    TURNS: tl.constexpr,
):
    """The sum over ranks, in their order, of every rank's part of x; x in int32 words, out in elements of DTYPE. A
    third is [W, most], a slot for what every rank has of this rank's part. The rest as in `gather_low_latency`; P:
    elements of a block."""
    W: tl.constexpr = ch.world
    VECTORS: tl.constexpr = WORDS // 4
    staging, stagings, turns = slots
    pid = tl.program_id(0)
    me = rank_of(ch)
    turn, at, before, filled = turn_of(turns, pid, third)
    for unit in range(pid, tl.cdiv(most, VECTORS) * (W - 1), PROGRAMS):
        owner = (me + 1 + unit % (W - 1)) % W
        b = unit // (W - 1) * VECTORS
        lo = tl.load(starts + owner)
        if lo + b < tl.load(starts + owner + 1):
            theirs = address_of(stagings, owner, tl.int32) + at
            place = 4 * (me * most + b).to(tl.int64)
            post_row(theirs + place, x + 4 * (lo + b).to(tl.int64), tl.load(starts + owner + 1) - lo - b, VECTORS)
    clear(staging + before, filled, pid, VECTORS, PROGRAMS)
    compare_calls(calls, number, pid, PROGRAMS)

    lo = tl.load(starts + me)
    count = tl.load(starts + me + 1) - lo
    e = tl.arange(0, P)
    for b in range(pid * VECTORS, count, PROGRAMS * VECTORS):
        own = x + 4 * (lo + b).to(tl.int64)
        place = 4 * b.to(tl.int64)
        acc = sum_low_latency(
            staging + at + place,
            4 * most.to(tl.int64),
            own,
            own,
            me,
            me,
            b // VECTORS,
            4 * (count - b),
            ch,
            DTYPE,
            W,
            W,
            WORDS,
            P,
        )
        tl.store(out + b.to(tl.int64) * (4 * P // WORDS) + e, acc.to(DTYPE), mask=e < (count - b) * (4 * P // WORDS))
    end_turn(turns, pid, turn, W * most, PROGRAMS, TURNS)
