"""One-program kernels that order streams: a wait for one word, for a group of tiles, for all ranks to be in one call,
and a barrier of all ranks."""

import triton.language as tl

from ..lang.channel import CALLS, calls_of, rank_of
from ..lang.intrinsics import release_fence, same_call, wait_until
from ..lang.jit import jit
from ..lang.primitives import channel_wait


@jit
def wait_word(word, value, guard):
    """The stream goes on once int32 `*word >= *value` (acquire)."""
    wait_until(word, tl.load(value), guard, -1, -1, "sys")


@jit(do_not_specialize=("number",))
def barrier(calls, turn, number):
    """Barrier: tell every rank, then wait for every rank, which must have come here in the same call. The fence makes a
    release of the words that are compared, as their wait is an acquire; stream order does the rest on both sides."""
    release_fence("sys")
    same_call(calls, number)
    tl.store(turn, tl.load(turn) + 1)


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
