"""One-program kernels that order streams of several ranks: a wait for one word, and a barrier of all ranks."""

import triton.language as tl

from ..lang.channel import calls_of, end_call, rank_of
from ..lang.intrinsics import wait_until
from ..lang.jit import jit
from ..lang.primitives import channel_broadcast


@jit
def wait_word(word, value, guard):
    """The stream goes on once int32 `*word >= *value` (acquire)."""
    wait_until(word, tl.load(value), guard, -1, -1, "sys")


@jit
def meet(ch, turn):
    """Barrier: tell every rank, then wait for every rank. Stream order does the rest on both sides."""
    channel_broadcast(ch, rank_of(ch), False)
    for r in range(ch.world):
        wait_until(ch.counters + r, calls_of(ch), ch.guard, -1, r, "sys")
    end_call(ch, turn, 1)
