"""Kernels of one program that order streams: a wait for one word, a wait for a group of tiles, a check that all ranks
make the same call, and a barrier of all ranks."""

import triton.language as tl

from ..lang.channel import CALLS, calls_of, rank_of
from ..lang.intrinsics import release_fence, same_call, wait_until
from ..lang.jit import jit
from ..lang.primitives import channel_wait


@jit
def wait_word(word, value, guard):
    """Make the stream wait until int32 `*word >= *value` (acquire)."""
    wait_until(word, tl.load(value), guard, -1, -1, "sys")


@jit(do_not_specialize=("number",))
def barrier(calls, epoch, number):
    """Wait for all ranks: `same_call` stores a word to every rank and waits for the words of all ranks. The wait raises
    Mismatch unless every rank is in call number `number`. The fence turns the stores into releases, and the wait is an
    acquire. Stream order covers the work before and after this kernel. `epoch` int32 [1] counts the calls of the
    barrier."""
    release_fence("sys")
    same_call(calls, number)
    tl.store(epoch, tl.load(epoch) + 1)


@jit(do_not_specialize=("number",))
def compare(calls, number):
    """Make the stream wait until every rank has reached this launch. All ranks must be in call `number`."""
    same_call(calls, number)


@jit(do_not_specialize=("group", "arrivals", "last"))
def wait_group(ch, group, arrivals, last):
    """Make the stream wait until all `arrivals` programs of this GPU's signaled GEMM that compute tiles of `group` have
    notified the group in this call.

    Only these waits read the number of the call. The waits for a group run in order on one stream, and the wait with
    `last` != 0 increments the number. The GEMM neither reads nor increments the number, because the GEMM may end before
    the wait runs, or begin after it."""
    channel_wait(ch, group, arrivals, group, rank_of(ch), "gpu")
    if last != 0:
        tl.store(ch.state + CALLS, calls_of(ch))
