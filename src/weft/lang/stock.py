"""The intrinsics of weft.lang, built from Triton 3.9's atomics with semantics and scope instead of assembly.

With WEFT_STOCK_TRITON=1 in the environment, they replace the functions in intrinsics.py, which documents them. These
functions are intended for checkers that cannot analyse assembly, such as Triton's GSan (docs/check.md), not for speed.
Stock Triton has no fences, so the atomics after `release_fence` are themselves releases (`AFTER_FENCE`). Its only means
to measure time is the time limit of `tl.atomic_poll`. Operations that stock Triton lacks remain assembly: the order of
bulk (TMA) and ordinary accesses, and accesses through multicast addresses.
"""

import os

import triton.language as tl

from .bulk import bulk_fence
from .jit import jit

IN_USE = os.environ.get("WEFT_STOCK_TRITON") == "1"
AFTER_FENCE = tl.constexpr("release" if IN_USE else "relaxed")  # the semantics of an atomic after `release_fence`
POLL_NS = tl.constexpr(1024)


@jit
def record(guard, kind, address, target, seen, tile, peer):
    """Record the first wait of this rank that failed. kind: 1 if the wait expired, 2 if the ranks make different
    calls."""
    if tl.atomic_xchg(guard + 1, 1, sem="relaxed", scope="gpu") == 0:
        words = tl.load(guard + 2).to(tl.pointer_type(tl.int64))
        tl.atomic_store(words + 1, address.to(tl.int64), sem="relaxed", scope="sys")
        tl.atomic_store(words + 2, target, sem="relaxed", scope="sys")
        tl.atomic_store(words + 3, seen, sem="relaxed", scope="sys")
        tl.atomic_store(words + 4, tile, sem="relaxed", scope="sys")
        tl.atomic_store(words + 5, peer, sem="relaxed", scope="sys")
        tl.atomic_store(words, kind, sem="release", scope="sys")


@jit
def pause(guard):
    """Return whether any wait of this rank has failed. If none has, sleep for POLL_NS."""
    return tl.atomic_poll(guard + 1, 1, sem="relaxed", scope="gpu", timeout_ns=POLL_NS)


@jit
def wait_until(
    ptr, target, guard, tile, peer, SCOPE: tl.constexpr = tl.constexpr("gpu"), MANY: tl.constexpr = tl.constexpr(1)
):
    seen = 0
    for i in range(MANY):
        word = ptr + i
        seen = tl.atomic_load(word, sem="acquire", scope=SCOPE)
        if seen - target < 0:
            left = tl.load(guard)
            while (seen - target < 0) & (left > 0):
                left = tl.where(pause(guard), 0, left - POLL_NS)
                seen = tl.atomic_load(word, sem="acquire", scope=SCOPE)
            if seen - target < 0:
                record(guard, 1, word, target, seen, tile, peer + i)
    bulk_fence()
    return seen


@jit
def same_call(calls, number):
    W: tl.constexpr = calls.world
    call = tl.load(calls.state + 1) + 1
    half = (call & 1) * W
    base = call << 20
    word = base | (number & 0xFFFFF)
    for rank in range(W):
        to = tl.load(calls.peers + rank).to(tl.pointer_type(tl.int32)) + half + tl.load(calls.state)
        tl.atomic_store(to, word, sem="release", scope="sys")
    for rank in range(W):
        arrived = calls.counters + half + rank
        seen = wait_until(arrived, base, calls.guard, -2, rank, "sys")
        if (seen - base >= 0) & (seen != word):
            record(calls.guard, 2, arrived, word, seen, -2, rank)
    tl.store(calls.state + 1, call)


@jit
def count_lost(guard, rank, rows):
    if rows > 0:
        lost = rows.to(tl.int64)
        words = tl.load(guard + 2).to(tl.pointer_type(tl.int64))
        of_rank = tl.atomic_add(guard + 4 + rank, lost, sem="relaxed", scope="gpu") + lost
        tl.atomic_store(words + 7 + rank, of_rank, sem="relaxed", scope="sys")
        of_all = tl.atomic_add(guard + 3, lost, sem="relaxed", scope="gpu") + lost
        tl.atomic_store(words + 6, of_all, sem="release", scope="sys")


@jit
def release_fence(SCOPE: tl.constexpr = tl.constexpr("sys")):
    pass


@jit
def post(ptr, w0, w1, w2, w3, ok):
    words = ptr.to(tl.pointer_type(tl.int32))
    tl.atomic_store(words, w0, mask=ok, sem="relaxed", scope="sys")
    tl.atomic_store(words + 1, w1, mask=ok, sem="relaxed", scope="sys")
    tl.atomic_store(words + 2, w2, mask=ok, sem="relaxed", scope="sys")
    tl.atomic_store(words + 3, w3, mask=ok, sem="relaxed", scope="sys")


@jit
def peek(ptr, ok):
    return tl.where(ok, tl.atomic_load(ptr, mask=ok, sem="relaxed", scope="sys"), 0)


@jit
def look_again(tries, began, guard, ptr, tile, peer):
    failed = pause(guard)
    expired = tries.to(tl.int64) * POLL_NS >= tl.load(guard)
    if expired:
        record(guard, 1, ptr, 0, 0, tile, peer)
    return (~(failed | expired)).to(tl.int32)


@jit
def globaltimer():
    return tl.full((), 0, tl.int64)


@jit
def store_pairs(ptr, x):
    tl.store(ptr, x)


@jit
def load_pairs(ptr, seen):
    return tl.load(ptr)


@jit
def keep_before(x):
    return x
