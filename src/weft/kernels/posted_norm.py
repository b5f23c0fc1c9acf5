"""All-reduce, residual add and norm of a few rows [M, H] in one launch, by rows that say themselves that they are there.

    one shot    every rank posts all its rows on every rank, which sums and normalises all of them itself
    two shots   every rank posts a row on its owner, which sums it, normalises it and posts the result on all ranks

Nothing is counted. A word of staging memory is EMPTY until somebody posts there, and EMPTY is never posted: who needs a row looks
until no word of it is EMPTY. That spares a fence, which waits for the peers' answer to every store, and a counter's own way to the
peer behind it.

Order of accesses. Three thirds of the memory take turns: call n fills and reads one, and clears the one of call n - 1, of which this
rank's own kernel has read everything. Peers fill that again in call n + 2. They do so after their call n + 1, and so after rows that
this rank posted in its own call n + 1, or a sum that took them in. By then its call n had ended, which completes what it cleared.
"""

import triton.language as tl

from ..lang.channel import address_of, rank_of
from ..lang.intrinsics import look_again, now, peek, post, settle
from ..lang.jit import jit
from .reduce_norm import OWN, WHOLE, first_row, normalise, parameters, store_row

EMPTY = tl.constexpr(-0x7FFF8000)  # 0x80008000: two negative zeros of 16 bits, or next to nothing of 32
TINY = tl.constexpr(2.0**-126)  # the smallest normal number of fp32 and bf16


@jit
def owner_of(t, M, W: tl.constexpr):
    """The rank that owns row t."""
    short = M // W
    longer = M % W * (short + 1)  # rows of ranks that have one more
    return tl.where(t < longer, t // (short + 1), M % W + (t - longer) // tl.maximum(short, 1))


@jit
def full(words):
    """The words without EMPTY: of two zeros of 16 bits one gets the other sign, which it then has on every rank."""
    return tl.where(words == EMPTY, words ^ 0x8000, words)


@jit
def post_row(to, row, VECTORS: tl.constexpr, ROW: tl.constexpr):
    """ROW int32 words, no word of them EMPTY, from `row` to a peer."""
    v = tl.arange(0, VECTORS)
    ok = v < ROW // 4
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
        nothing = tl.full((VECTORS,), EMPTY, tl.int32)
        post(third + 4 * v, nothing, nothing, nothing, nothing, v < last)


@jit
def end_turn(turns, pid, turn, filled, PROGRAMS: tl.constexpr, TURNS: tl.constexpr):
    """Whose turn it is next, and how many vectors this call filled, for all programs that a later call may have."""
    settle(False)  # every thread has read the program's turn
    p = tl.arange(0, TURNS)
    tl.store(turns + 2 * p, (turn + 1) % 3, mask=p % PROGRAMS == pid)
    tl.store(turns + 2 * p + 1, filled, mask=p % PROGRAMS == pid)


@jit
def sum_posted(
    slots, stride, x, residual, owner, me, t, guard,
    DTYPE: tl.constexpr, W: tl.constexpr, SOURCES: tl.constexpr, ROW: tl.constexpr, WORDS: tl.constexpr, P: tl.constexpr,
):  # fmt: skip
    """fp32 [P]: the sum of one row over the ranks, in their order, once all have posted it in their slots, `stride` words apart; this
    rank's is at `x`. SOURCES beyond W: and of the residual, which is at `residual` on its owner, who has posted it too."""
    c = tl.arange(0, WORDS)
    began = now()
    tries = 0
    missing = 1
    acc = tl.zeros((P,), tl.float32)
    while missing > 0:
        go_on = 1
        if tries > 0:
            go_on = look_again(tries, began, guard, slots, t, missing - 1)
        acc = tl.zeros((P,), tl.float32)
        empty = tl.zeros((WORDS,), tl.int32)
        for k in tl.range(0, SOURCES, loop_unroll_factor=SOURCES if P <= 8192 else 1):  # all on their way at once
            source = slots + k * stride
            waits = k + 1
            if k == me:
                source = x
                waits = 0
            if SOURCES > W:
                if k == W:
                    waits = owner + 1
                    if owner == me:
                        source = residual
                        waits = 0
            words = peek(tl.multiple_of(source, 16) + c, c < ROW)
            empty = tl.maximum(empty, tl.where(words == EMPTY, waits, 0))
            acc += numbers(full(words), DTYPE, P)
        missing = tl.max(empty) * go_on
        tries += 1
    return acc


@jit
def row_posted(row, owner, t, guard, ROW: tl.constexpr, WORDS: tl.constexpr):
    """int32 [WORDS]: a row, once its owner has posted it."""
    c = tl.arange(0, WORDS)
    began = now()
    tries = 0
    missing = 1
    words = tl.zeros((WORDS,), tl.int32)
    while missing > 0:
        go_on = 1
        if tries > 0:
            go_on = look_again(tries, began, guard, row, t, missing - 1)
        words = peek(tl.multiple_of(row, 16) + c, c < ROW)
        missing = tl.max(tl.where(words == EMPTY, owner + 1, 0)) * go_on
        tries += 1
    return words


@jit(do_not_specialize=("M", "third"))
def one_shot(
    x, staging, stagings, out, residual, new_residual, weight, bias, scale, eps, turns, ch, M, third,
    DTYPE: tl.constexpr, OUT: tl.constexpr, H: tl.constexpr, P: tl.constexpr, PROGRAMS: tl.constexpr, TURNS: tl.constexpr,
    NORM: tl.constexpr, BIAS: tl.constexpr, SCALED: tl.constexpr, RESIDUAL: tl.constexpr, KEEP: tl.constexpr,
):  # fmt: skip
    """x [M, H], this rank's part, and residual as int32 words; out [M, H]. staging: three thirds of `third` words, each [W + 1, M, H]:
    a slot for every rank's part, and one for the owners' rows of the residual (RESIDUAL OWN). turns: int32 [TURNS, 2], for a
    program the third whose turn it is, and the vectors of 16 bytes that the last one filled of its third; at most TURNS programs."""
    W: tl.constexpr = ch.world
    SOURCES: tl.constexpr = W + (RESIDUAL == OWN)
    WORDS: tl.constexpr = P * DTYPE.primitive_bitwidth // 32
    ROW: tl.constexpr = H * DTYPE.primitive_bitwidth // 32
    VECTORS: tl.constexpr = WORDS // 4
    pid = tl.program_id(0)
    me = rank_of(ch)
    turn = tl.load(turns + 2 * pid)
    last = tl.load(turns + 2 * pid + 1)
    third = (third // 4 * 4).to(tl.int64)  # known to keep rows at 16-byte words
    at = turn * third
    lo = first_row(me, M, W)
    hi = first_row(me + 1, M, W)
    for unit in range(pid, M * (W - 1), PROGRAMS):
        t = unit // (W - 1)
        slots = address_of(stagings, (me + 1 + unit % (W - 1)) % W, tl.int32) + at
        post_row(slots + (me * M + t).to(tl.int64) * ROW, x + t.to(tl.int64) * ROW, VECTORS, ROW)
        if RESIDUAL == OWN:
            if (t >= lo) & (t < hi):
                own = residual + (t - lo).to(tl.int64) * ROW
                post_row(slots + (W * M + t).to(tl.int64) * ROW, own, VECTORS, ROW)
    clear(staging + (turn + 2) % 3 * third, last, pid, VECTORS, PROGRAMS)

    if P <= 8192:  # before the wait, where registers allow
        w, b, divisor = parameters(weight, bias, scale, H, P, NORM, BIAS, SCALED)
    for t in range(pid, M, PROGRAMS):
        owner = owner_of(t, M, W)
        row = t.to(tl.int64) * ROW
        acc = sum_posted(
            staging + at + row, M.to(tl.int64) * ROW, x + row, residual + row - lo.to(tl.int64) * ROW, owner, me, t, ch.guard,
            DTYPE, W, SOURCES, ROW, WORDS, P,
        )  # fmt: skip
        if P > 8192:
            w, b, divisor = parameters(weight, bias, scale, H, P, NORM, BIAS, SCALED)
        if RESIDUAL == WHOLE:
            c = tl.arange(0, WORDS)
            acc += numbers(tl.load(residual + row + c, mask=c < ROW, other=0), DTYPE, P)
        place = t.to(tl.int64) * H
        if KEEP == WHOLE:
            store_row(new_residual + place, acc.to(DTYPE), H, P)
        if KEEP == OWN:
            if owner == me:
                store_row(new_residual + place - lo.to(tl.int64) * H, acc.to(DTYPE), H, P)
        y = normalise(acc, w, b, divisor, eps, H, P, NORM, BIAS, SCALED)
        store_row(out + place, y.to(OUT), H, P)
    end_turn(turns, pid, turn, SOURCES * M * (ROW // 4), PROGRAMS, TURNS)


@jit(do_not_specialize=("M", "third"))
def two_shot_posted(
    x, staging, stagings, out, residual, new_residual, weight, bias, scale, eps, turns, ch, M, third,
    DTYPE: tl.constexpr, H: tl.constexpr, P: tl.constexpr, PROGRAMS: tl.constexpr, TURNS: tl.constexpr,
    NORM: tl.constexpr, BIAS: tl.constexpr, RESIDUAL: tl.constexpr, KEEP: tl.constexpr,
):  # fmt: skip
    """The same in two shots, to an output of DTYPE. A third is [W, most, H], a slot for every rank's part of the own rows, at most
    `most` of a rank, then the results [M, H] and, KEEP WHOLE, the sums [M, H]."""
    W: tl.constexpr = ch.world
    WORDS: tl.constexpr = P * DTYPE.primitive_bitwidth // 32
    ROW: tl.constexpr = H * DTYPE.primitive_bitwidth // 32
    VECTORS: tl.constexpr = WORDS // 4
    pid = tl.program_id(0)
    me = rank_of(ch)
    turn = tl.load(turns + 2 * pid)
    last = tl.load(turns + 2 * pid + 1)
    third = (third // 4 * 4).to(tl.int64)
    at = turn * third
    most = M // W + (M % W > 0).to(tl.int32)
    lo = first_row(me, M, W)
    hi = first_row(me + 1, M, W)
    for unit in range(pid, most * (W - 1), PROGRAMS):
        owner = (me + 1 + unit % (W - 1)) % W
        i = unit // (W - 1)
        t = first_row(owner, M, W) + i
        if t < first_row(owner + 1, M, W):
            slots = address_of(stagings, owner, tl.int32) + at
            post_row(slots + (me * most + i).to(tl.int64) * ROW, x + t.to(tl.int64) * ROW, VECTORS, ROW)
    clear(staging + (turn + 2) % 3 * third, last, pid, VECTORS, PROGRAMS)

    if P <= 8192:
        w, b, divisor = parameters(weight, bias, scale, H, P, NORM, BIAS, False)
    c = tl.arange(0, WORDS)
    results = at + (W * most).to(tl.int64) * ROW
    sums = results + M.to(tl.int64) * ROW
    for t in range(lo + pid, hi, PROGRAMS):
        i = (t - lo).to(tl.int64) * ROW
        row = t.to(tl.int64) * ROW
        acc = sum_posted(
            staging + at + i, most.to(tl.int64) * ROW, x + row, x, me, me, t, ch.guard, DTYPE, W, W, ROW, WORDS, P,
        )  # fmt: skip
        if P > 8192:
            w, b, divisor = parameters(weight, bias, scale, H, P, NORM, BIAS, False)
        if RESIDUAL == OWN:
            acc += numbers(tl.load(residual + i + c, mask=c < ROW, other=0), DTYPE, P)
        if RESIDUAL == WHOLE:
            acc += numbers(tl.load(residual + row + c, mask=c < ROW, other=0), DTYPE, P)
        y = solid(normalise(acc, w, b, 1.0, eps, H, P, NORM, BIAS, False), DTYPE)
        kept = solid(acc, DTYPE)
        store_row(out + t.to(tl.int64) * H, y, H, P)
        post_result(stagings, results + row, y, me, DTYPE, W, VECTORS, ROW, P)
        if KEEP == WHOLE:
            store_row(new_residual + t.to(tl.int64) * H, kept, H, P)
            post_result(stagings, sums + row, kept, me, DTYPE, W, VECTORS, ROW, P)
        if KEEP == OWN:
            store_row(new_residual + (t - lo).to(tl.int64) * H, kept, H, P)
    for step in range(pid, M - (hi - lo), PROGRAMS):  # the other owners' rows, from the next rank on
        t = (hi + step) % M
        owner = owner_of(t, M, W)
        row = t.to(tl.int64) * ROW
        words = row_posted(staging + results + row, owner, t, ch.guard, ROW, WORDS)
        store_row(out + t.to(tl.int64) * H, numbers(words, DTYPE, P).to(DTYPE), H, P)
        if KEEP == WHOLE:
            words = row_posted(staging + sums + row, owner, t, ch.guard, ROW, WORDS)
            store_row(new_residual + t.to(tl.int64) * H, numbers(words, DTYPE, P).to(DTYPE), H, P)
    end_turn(turns, pid, turn, (W * most + M * (1 + (KEEP == WHOLE))) * (ROW // 4), PROGRAMS, TURNS)
