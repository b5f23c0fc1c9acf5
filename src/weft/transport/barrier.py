"""One-program kernels that order streams: a wait for one word, for a group of tiles, for all ranks to be in one call,
and a barrier of all ranks."""

import triton.language as tl

from ..lang.channel import CALLS, calls_of, end_call, rank_of
from ..lang.intrinsics import same_call, wait_until
from ..lang.jit import jit
from ..lang.primitives import channel_broadcast, channel_wait


@jit
def wait_word(word, value, guard):
    """The stream goes on once int32 `*word >= *value` (acquire)."""
    wait_until(word, tl.load(value), guard, -1, -1, "sys")


@jit(do_not_specialize=("number",))
def barrier(ch, calls, turn, number):
    """Barrier: tell every rank, then wait for every rank, which must have come here in the same call. Stream order does
    the rest on both sides. The fence of the notify releases the words that are compared too: to wait for them is to
    wait for all ranks."""
    channel_broadcast(ch, rank_of(ch), False)
    same_call(calls, number)
    end_call(ch, turn, 1)


@jit(do_not_specialize=("number",))
def compare(calls, number):
    """The stream goes on once every rank is in this call."""
    same_call(calls, number)


@jit(do_not_specialize=("group", "arrivals", "last"))
def wait_group(ch, group, arrivals, last):
    """The stream goes on once every program of this GPU's signaled GEMM has counted `group` up in this call.

    The number of the call is read by these waits alone. They run in order on one stream, and the last one counts it:
    the GEMM, which may long have ended by then, or not begun, neither reads nor counts it."""
    channel_wait(ch, group, arrivals, group, rank_of(ch), "gpu")
    if last != 0:
        tl.store(ch.state + CALLS, calls_of(ch))
