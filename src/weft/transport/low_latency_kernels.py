"""All-gather and reduce-scatter of a few rows whose data are their own flags. In NCCL's LL protocol half of every 8
bytes is a flag; here, as in Lamport buffers, no byte is a flag.

There are no counters. A word of staging memory is EMPTY until a rank posts data there, and no rank posts EMPTY. A
reader polls a row until no word of the row is EMPTY. Polling the data avoids the fence of a notification, which waits
until the peers have acknowledged every store, and the subsequent transfer of the counter to the peer.

Order of accesses. Calls rotate through three thirds of the memory: call n fills and reads one third, and clears the
third of call n - 1, from which this rank's kernel has already read everything. Peers fill the cleared third again in
call n + 2, after their call n + 1. A peer's call n + 1 waits for rows that this rank posted in its own call n + 1, or
for a sum that includes these rows. By then this rank's call n had ended, so it had cleared the third. So every rank
must wait for data of every other rank in every call, and no rank's part may be empty.
"""

from typing import NamedTuple

import torch
import triton.language as tl

from ..lang.channel import address_of, rank_of
from ..lang.intrinsics import flush_stores, globaltimer, look_again, peek, post, same_call
from ..lang.jit import jit

EMPTY = tl.constexpr(-1)  # two NaNs of 16 bits, or one NaN of 32 bits, which no arithmetic returns


class PostingMemory(NamedTuple):
    """The memory for low-latency rows. `words`, int32, contains this rank's three thirds, and `addresses` the address
    of every rank's thirds. `state`, int32 [MAX_PROGRAMS, 2], contains two numbers for each program: the index of the
    third that this call uses, and the number of vectors that the previous call filled in the previous third."""

    words: torch.Tensor
    addresses: torch.Tensor
    state: torch.Tensor


@jit
def replace_empty(words):
    """Return the words with EMPTY replaced by a different NaN. All numbers stay unchanged. Every rank replaces the same
    words, so the results are the same on every rank."""
    return tl.where(words == EMPTY, words ^ 0x8000, words)


@jit
def post_row(dst, src, count, VECTORS: tl.constexpr):
    """Post `count` vectors of 16 bytes, at most VECTORS, from `src` to `dst` in a peer's memory, with EMPTY
    replaced."""
    v = tl.arange(0, VECTORS)
    ok = v < count
    w0 = replace_empty(tl.load(src + 4 * v, mask=ok, other=0))
    w1 = replace_empty(tl.load(src + 4 * v + 1, mask=ok, other=0))
    w2 = replace_empty(tl.load(src + 4 * v + 2, mask=ok, other=0))
    w3 = replace_empty(tl.load(src + 4 * v + 3, mask=ok, other=0))
    post(dst + 4 * v, w0, w1, w2, w3, ok)


@jit
def to_fp32(words, DTYPE: tl.constexpr, P: tl.constexpr):
    """Return fp32 [P], converted from the elements of DTYPE in int32 words."""
    if DTYPE == tl.float32:
        elements = words.to(tl.float32, bitcast=True)
    elif DTYPE == tl.bfloat16:
        low = (words << 16).to(tl.float32, bitcast=True)
        elements = tl.reshape(tl.join(low, (words & -65536).to(tl.float32, bitcast=True)), (P,))
    else:
        low = words.to(tl.int16).to(tl.float16, bitcast=True)
        high = (words >> 16).to(tl.int16).to(tl.float16, bitcast=True)
        elements = tl.reshape(tl.join(low, high), (P,)).to(tl.float32)
    return elements


@jit
def round_without_empty(y, DTYPE: tl.constexpr):
    """Return y rounded to DTYPE, with every NaN replaced by one fixed NaN, so that no word of the result is EMPTY."""
    return tl.where(y == y, y, float("nan")).to(DTYPE)


@jit
def post_result(
    addresses,
    offset,
    y,
    me,
    DTYPE: tl.constexpr,
    W: tl.constexpr,
    VECTORS: tl.constexpr,
    ROW: tl.constexpr,
    P: tl.constexpr,
):
    """Post the first ROW words of y to all other ranks, at word `offset` of their memory. y has P elements of DTYPE,
    and was returned by `round_without_empty`."""
    if DTYPE == tl.float32:
        even, odd = tl.split(tl.reshape(y.to(tl.int32, bitcast=True), (VECTORS, 2, 2)))
    else:
        low, high = tl.split(tl.reshape(y.to(tl.int16, bitcast=True), (VECTORS, 2, 2, 2)))
        even, odd = tl.split((low.to(tl.int32) & 0xFFFF) | (high.to(tl.int32) << 16))
    w0, w2 = tl.split(even)
    w1, w3 = tl.split(odd)
    v = tl.arange(0, VECTORS)
    for k in tl.static_range(1, W):
        dst = address_of(addresses, (me + k) % W, tl.int32) + offset + 4 * v
        post(dst, w0, w1, w2, w3, v < ROW // 4)


@jit
def clear(third, count, pid, VECTORS: tl.constexpr, PROGRAMS: tl.constexpr):
    """Store EMPTY in this program's part of the first `count` vectors of a third."""
    for start in range(pid * VECTORS, count, PROGRAMS * VECTORS):
        v = start + tl.arange(0, VECTORS)
        empty = tl.full((VECTORS,), EMPTY, tl.int32)
        post(third + 4 * v, empty, empty, empty, empty, v < count)


@jit
def compare_calls(calls, number, pid, PROGRAMS: tl.constexpr):
    """Check that all ranks make the same call. The check is necessary because posted rows do not contain the number of
    the call. The last program, which has the fewest rows, performs the check after it has posted its rows and before it
    waits for other ranks."""
    if pid == PROGRAMS - 1:
        same_call(calls, number)


@jit
def rotate_thirds(state, pid, third_index, filled, PROGRAMS: tl.constexpr, MAX_PROGRAMS: tl.constexpr):
    """Store the state for the next call, which may have more programs. The state is the index of the next call's third,
    and the number of vectors that this call filled."""
    flush_stores(False)  # from here on every thread has read the program's state
    p = tl.arange(0, MAX_PROGRAMS)
    tl.store(state + 2 * p, (third_index + 1) % 3, mask=p % PROGRAMS == pid)
    tl.store(state + 2 * p + 1, filled, mask=p % PROGRAMS == pid)


@jit
def load_state(state, pid, third):
    """Return the index of this call's third, the offsets in words of this third and of the previous third, and the
    number of vectors that the previous call filled. A third has `third` words."""
    third_index = tl.load(state + 2 * pid)
    words = (third // 4 * 4).to(tl.int64)  # a hint for the compiler that rows begin at multiples of 16 bytes
    return third_index, third_index * words, (third_index + 2) % 3 * words, tl.load(state + 2 * pid + 1)


@jit
def zeros(W: tl.constexpr, WORDS: tl.constexpr, P: tl.constexpr):
    return tl.zeros((P,), tl.float32) if W > 0 else tl.zeros((WORDS,), tl.int32)


@jit
def sum_low_latency(
    parts,
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
    """Wait until all ranks have posted row t, and return fp32 [P], the sum of the row over the ranks in rank order. The
    row has `row` words, at most WORDS. The other ranks' rows are at `parts`, `stride` words apart; this rank's row is
    at `x`.

    If SOURCES is W + 1, the residual is added too. On the owner of the row, the residual is at `residual`; on the other
    ranks, it follows `parts`, where the owner has posted it. If W is 0, only the row at `parts`, which a remote owner
    has posted, is returned as int32 [WORDS]."""
    c = tl.arange(0, WORDS)
    start_time = globaltimer()
    polls = 0
    missing = 1  # 0, or 1 + a rank whose row has not arrived
    acc = zeros(W, WORDS, P)
    while missing > 0:
        go_on = 1
        if polls > 0:
            go_on = look_again(polls, start_time, ch.guard, ch.counters, t, missing - 1)
        acc = zeros(W, WORDS, P)
        empty = tl.zeros((WORDS,), tl.int32)
        # The loop is unrolled if there are enough registers, so that the loads of all sources are in flight at once.
        for k in tl.range(0, SOURCES, loop_unroll_factor=SOURCES if P <= 8192 else 1):
            source = parts + k * stride
            awaited = k + 1
            if SOURCES > W:
                if k == W:
                    awaited = owner + 1
                    if owner == me:
                        source = residual
                        awaited = 0
            if W > 0:
                if k == me:
                    source = x
                    awaited = 0
            words = peek(tl.multiple_of(source, 16) + c, c < row)
            empty = tl.maximum(empty, tl.where(words == EMPTY, awaited, 0))
            if W > 0:
                acc += to_fp32(replace_empty(words), DTYPE, P)
            else:
                acc = words
        missing = tl.max(empty) * go_on
        polls += 1
    return acc


@jit
def row_low_latency(src, owner, me, t, row, ch, WORDS: tl.constexpr):
    """Wait until the owner of the row at `src`, a remote rank, has posted the row. Return the row, int32 [WORDS]. It
    has `row` words."""
    return sum_low_latency(src, 0, src, src, owner, me, t, row, ch, tl.int32, 0, 1, WORDS, WORDS)


@jit(do_not_specialize=("longest", "third", "number"))
def gather_low_latency(
    x,
    memory,
    out,
    starts,
    ch,
    calls,
    number,
    longest,
    third,
    WORDS: tl.constexpr,
    PROGRAMS: tl.constexpr,
    MAX_PROGRAMS: tl.constexpr,
):
    """Store the x of all ranks, one after another, in `out` on every rank. x and out are int32 words.

    memory is a `PostingMemory`, in which each third has `third` words and the layout of `out`. starts, int32 [W + 1],
    contains the index at which each rank's part begins in `out`, in vectors of 16 bytes. The longest part has `longest`
    vectors. A block, which is the unit of work, has WORDS words."""
    W: tl.constexpr = ch.world
    VECTORS: tl.constexpr = WORDS // 4
    local, addresses, state = memory
    pid = tl.program_id(0)
    me = rank_of(ch)
    third_index, offset, previous, filled = load_state(state, pid, third)
    lo = tl.load(starts + me)
    count = tl.load(starts + me + 1) - lo
    units = tl.cdiv(longest, VECTORS) * (W - 1)
    for unit in range(pid, units, PROGRAMS):
        b = unit // (W - 1) * VECTORS
        if b < count:
            remote = address_of(addresses, (me + 1 + unit % (W - 1)) % W, tl.int32) + offset
            post_row(remote + 4 * (lo + b).to(tl.int64), x + 4 * b.to(tl.int64), count - b, VECTORS)
    clear(local + previous, filled, pid, VECTORS, PROGRAMS)
    compare_calls(calls, number, pid, PROGRAMS)

    c = tl.arange(0, WORDS)
    for b in range(pid * VECTORS, count, PROGRAMS * VECTORS):
        ok = c < 4 * (count - b)
        words = replace_empty(tl.load(x + 4 * b.to(tl.int64) + c, mask=ok, other=0))  # for the same bits on all ranks
        tl.store(out + 4 * (lo + b).to(tl.int64) + c, words, mask=ok)
    for unit in range(pid, units, PROGRAMS):  # the loop begins with the next rank
        owner = (me + 1 + unit % (W - 1)) % W
        b = tl.load(starts + owner) + unit // (W - 1) * VECTORS
        width = 4 * (tl.load(starts + owner + 1) - b)
        if width > 0:
            start = 4 * b.to(tl.int64)
            words = row_low_latency(local + offset + start, owner, me, unit, width, ch, WORDS)
            tl.store(out + start + c, words, mask=c < width)
    rotate_thirds(state, pid, third_index, tl.load(starts + W), PROGRAMS, MAX_PROGRAMS)


@jit(do_not_specialize=("longest", "third", "number"))
def scatter_low_latency(
    x,
    memory,
    out,
    starts,
    ch,
    calls,
    number,
    longest,
    third,
    DTYPE: tl.constexpr,
    WORDS: tl.constexpr,
    P: tl.constexpr,
    PROGRAMS: tl.constexpr,
    MAX_PROGRAMS: tl.constexpr,
):
    """Sum x over the ranks in rank order, and store this rank's part of the sum in out. x has int32 words, and out has
    elements of DTYPE. A third is [W, longest] and contains every rank's addend for this rank's part. A block has P
    elements. All further arguments are as in `gather_low_latency`."""
    W: tl.constexpr = ch.world
    VECTORS: tl.constexpr = WORDS // 4
    local, addresses, state = memory
    pid = tl.program_id(0)
    me = rank_of(ch)
    third_index, offset, previous, filled = load_state(state, pid, third)
    for unit in range(pid, tl.cdiv(longest, VECTORS) * (W - 1), PROGRAMS):
        owner = (me + 1 + unit % (W - 1)) % W
        b = unit // (W - 1) * VECTORS
        lo = tl.load(starts + owner)
        if lo + b < tl.load(starts + owner + 1):
            remote = address_of(addresses, owner, tl.int32) + offset
            start = 4 * (me * longest + b).to(tl.int64)
            post_row(remote + start, x + 4 * (lo + b).to(tl.int64), tl.load(starts + owner + 1) - lo - b, VECTORS)
    clear(local + previous, filled, pid, VECTORS, PROGRAMS)
    compare_calls(calls, number, pid, PROGRAMS)

    lo = tl.load(starts + me)
    count = tl.load(starts + me + 1) - lo
    e = tl.arange(0, P)
    for b in range(pid * VECTORS, count, PROGRAMS * VECTORS):
        addend = x + 4 * (lo + b).to(tl.int64)
        acc = sum_low_latency(
            local + offset + 4 * b.to(tl.int64),
            4 * longest.to(tl.int64),
            addend,
            addend,
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
    rotate_thirds(state, pid, third_index, W * longest, PROGRAMS, MAX_PROGRAMS)
