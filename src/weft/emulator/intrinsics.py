"""The emulated forms of weft.lang's intrinsics."""

from __future__ import annotations

from typing import Any

import numpy as np
import triton.language as tl

from ..lang.channel import CALLS, RANK
from ..lang.intrinsics import CALL, NUMBER_BITS
from ..lang.jit import Intrinsic
from . import interpret
from .interpret import Constant, Scalar, as_int, int32, plain
from .programs import WARP


def wait_until(
    ptr: tl.tensor,
    target: Scalar,
    guard: tl.tensor,
    tile: Scalar,
    peer: Scalar,
    SCOPE: Constant = "gpu",
    MANY: Constant = 1,
) -> tl.tensor:
    scope_sys, address, rank = _scope_sys("wait_until", SCOPE), as_int(ptr), as_int(peer)
    if as_int(MANY) > WARP:
        raise ValueError(f"wait_until: a warp polls at most {WARP} words, not {as_int(MANY)}")
    for i in range(as_int(MANY)):
        seen = interpret.hooks.wait_until(address + 4 * i, as_int(target), as_int(tile), rank + i, scope_sys)
    return int32(seen)


def same_call(calls: Any, number: Scalar) -> None:
    size, own_rank, state = as_int(calls.world), as_int(tl.load(calls.state + RANK)), calls.state + CALLS
    call = as_int(tl.load(state)) + 1
    base, half = (call << NUMBER_BITS) & 0xFFFFFFFF, call % 2 * size
    word = base | as_int(number) & ((1 << NUMBER_BITS) - 1)
    for rank in range(size):
        to = tl.load(calls.peers + rank).to(tl.pointer_type(tl.int32)) + half + own_rank
        tl.atomic_xchg(to, int32(_signed(word)), sem="relaxed", scope="sys")
    for rank in range(size):
        address = as_int(calls.counters + half + rank)
        seen = interpret.hooks.wait_until(address, _signed(base), CALL, rank, True) & 0xFFFFFFFF
        if seen != word:
            interpret.hooks.disagree(as_int(calls.guard), {own_rank: word, rank: seen})
    tl.store(state, int32(_signed(call)))


def _signed(word: int) -> int:
    return (word + (1 << 31)) % (1 << 32) - (1 << 31)


def count_lost(guard: tl.tensor, rank: Scalar, rows: tl.tensor) -> None:
    if as_int(rows) > 0:
        for word in (4 + as_int(rank), 3):
            tl.atomic_add(guard + word, rows.to(tl.int64), sem="relaxed", scope="gpu")


def flush_stores(BULK: Constant = True) -> None:
    interpret.hooks.flush_stores(bool(plain(BULK)))


def bulk_fence() -> None:
    interpret.hooks.bulk_fence()


def release_fence(SCOPE: Constant = "sys") -> None:
    interpret.hooks.release_fence(_scope_sys("release_fence", SCOPE))


def _scope_sys(intrinsic: str, scope: Constant) -> bool:
    """Return whether a scope is "sys". Raise ValueError for a scope that excludes other programs."""
    if plain(scope) not in ("gpu", "sys"):
        raise ValueError(f'{intrinsic}: SCOPE is "gpu" or "sys", not {plain(scope)!r}')
    return plain(scope) == "sys"


def post(ptr: tl.tensor, w0: tl.tensor, w1: tl.tensor, w2: tl.tensor, w3: tl.tensor, ok: tl.tensor) -> None:
    shape = ptr.handle.data.shape
    mask = np.broadcast_to(ok.handle.data, shape)
    words = [np.broadcast_to(w.handle.data, shape)[mask] for w in (w0, w1, w2, w3)]
    addresses = ptr.handle.data[mask].astype(np.uint64)[:, None] + np.arange(0, 16, 4, dtype=np.uint64)
    values = np.stack(words, 1).astype(np.int32)
    for part in interpret.hooks.halves(len(addresses)):  # a reader may observe some of the words before the others
        if addresses[part].size:
            interpret.hooks.store(addresses[part], values[part], None, low_latency=True)


def peek(ptr: tl.tensor, ok: tl.tensor) -> tl.tensor:
    kind, zero = np.dtype(np.int32), np.zeros((), np.int32)
    mask = np.broadcast_to(ok.handle.data, ptr.handle.data.shape)
    words = interpret.hooks.load(ptr.handle.data, mask, zero, kind, volatile=True, polls=False)
    return tl.tensor(interpret.TensorHandle(words, tl.int32), tl.block_type(tl.int32, list(words.shape)))


def store_pairs(ptr: tl.tensor, x: tl.tensor) -> None:
    tl.store(ptr, x)


def load_pairs(ptr: tl.tensor, seen: tl.tensor) -> tl.tensor:
    return tl.load(ptr)


def look_again(
    tries: Scalar, began: tl.tensor, guard: tl.tensor, ptr: tl.tensor, tile: Scalar, peer: Scalar
) -> tl.tensor:
    """Sleep if no word has changed since this program's previous call."""
    interpret.hooks.look_again()
    return int32(1)


def globaltimer() -> tl.tensor:
    return tl.tensor(interpret.TensorHandle(np.zeros(1, np.int64), tl.int64), tl.int64)


def keep_before(x: tl.tensor) -> tl.tensor:
    """Return x unchanged: the emulator reorders no operations."""
    return x


def window_fence() -> None:
    """Do nothing: addresses have no aliases in the emulator."""


def window_sum(row: tl.tensor, H: Constant, P: Constant, DTYPE: tl.constexpr | tl.dtype) -> tl.tensor:
    """Return the sum of every rank's row in fp32, in rank order."""
    width, padded, dtype = as_int(H), as_int(P), plain(DTYPE)
    kind = np.dtype(np.uint16 if dtype == tl.bfloat16 else np.float16)
    total = np.zeros(padded, np.float32)
    for start in interpret.hooks.machine.window(as_int(row)):
        part = interpret.hooks.load(_elements(start, width), None, None, kind, False)
        bits = (part.astype(np.uint32) << np.uint32(16)).view(np.float32) if kind == np.uint16 else part
        total[:width] += bits.astype(np.float32)
    return tl.tensor(interpret.TensorHandle(total, tl.float32), tl.block_type(tl.float32, [padded]))


def window_store(row: tl.tensor, y: tl.tensor, H: Constant, P: Constant) -> None:
    width = as_int(H)
    for start in interpret.hooks.machine.window(as_int(row)):
        interpret.hooks.store(_elements(start, width), y.handle.data[:width], None)


def _elements(start: int, width: int) -> np.ndarray:
    """Return the addresses of 16-bit elements."""
    return np.uint64(start) + np.arange(width, dtype=np.uint64) * np.uint64(2)


Intrinsic.emulated.update(
    wait_until=wait_until, flush_stores=flush_stores, bulk_fence=bulk_fence, release_fence=release_fence
)
Intrinsic.emulated.update(
    post=post, peek=peek, store_pairs=store_pairs, load_pairs=load_pairs, look_again=look_again, globaltimer=globaltimer
)
Intrinsic.emulated.update(count_lost=count_lost, same_call=same_call, keep_before=keep_before)
Intrinsic.emulated.update(window_fence=window_fence, window_sum=window_sum, window_store=window_store)
