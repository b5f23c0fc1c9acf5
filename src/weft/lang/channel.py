"""A BlockChannel contains the counters through which a kernel's tiles signal, and the mapping from tiles to counters.

A channel is a counter in symmetric memory that only grows. `state` is in this rank's own memory and counts finished
calls, so a wait compares with (calls + 1) x arrivals, nothing is reset between calls, and a CUDA graph that contains
the launch can be replayed. Kernels read all integers that differ between ranks from `state`, because Triton specialises
integers inside a NamedTuple.
"""

from typing import NamedTuple

import torch
import triton.language as tl

from .intrinsics import flush_stores
from .jit import jit

RANK = tl.constexpr(0)  # the number of this rank
CALLS = tl.constexpr(1)  # the number of finished calls
DONE = tl.constexpr(2)  # the number of programs that have finished the current call
TICKET = tl.constexpr(3)  # the next ticket of the current call
STATE_WORDS = 4


class BlockChannel(NamedTuple):
    """The kernel argument that programs use to notify and wait (`World.channel`)."""

    counters: torch.Tensor  # int32 [n], the counters of this rank
    peers: torch.Tensor  # int64 [world], the address of every rank's counters
    state: torch.Tensor  # int32 [STATE_WORDS], in local memory of this rank
    guard: torch.Tensor  # int64 [GUARD_WORDS], which bounds every wait (lang/intrinsics.py)
    mapping: tuple | None  # StaticMapping or TableMapping
    world: tl.constexpr


@jit
def rank_of(ch):
    """Return the number of this rank."""
    return tl.load(ch.state + RANK)


@jit
def calls_of(ch):
    """Return the number of this call. Calls are numbered from 1, with the same number on every rank."""
    return tl.load(ch.state + CALLS) + 1


@jit
def counters_of(ch, rank):
    """Return the pointer to a rank's counters."""
    return tl.load(ch.peers + rank).to(tl.pointer_type(tl.int32))


@jit
def address_of(addresses, rank, DTYPE: tl.constexpr):
    """Return the pointer to a rank's copy of a symmetric tensor (`SymmetricTensor.addresses`). The pointer is 16-byte
    aligned."""
    return tl.multiple_of(tl.load(addresses + rank).to(tl.pointer_type(DTYPE)), 16)


@jit
def select(values, index, N: tl.constexpr):
    """Return values[index] of N values without loading from memory, because a load in a pipelined loop would halve the
    pipeline's depth."""
    value = values[0]
    for i in tl.static_range(1, N):
        value = tl.where(index == i, values[i], value)
    return value


@jit
def take_ticket(ch, count):
    """Draw `count` tickets and return the first. Every call numbers its tickets from 0."""
    return tl.atomic_add(ch.state + TICKET, count, sem="relaxed", scope="gpu")


@jit
def end_call(ch, epoch, programs):
    """End the call for this program. This must be the last statement of the program. The last of `programs` programs
    clears the tickets and increments the number of calls and, unless it is None, the caller's word `epoch`.

    The count of finished programs is an acquire-release, so all uses of this call's numbers come before the last
    program's update. A later kernel on the stream starts only after this kernel has ended.
    """
    flush_stores(True)
    if tl.atomic_add(ch.state + DONE, 1, sem="acq_rel", scope="gpu") == programs - 1:
        tl.store(ch.state + DONE, 0)
        tl.store(ch.state + TICKET, 0)
        tl.store(ch.state + CALLS, tl.load(ch.state + CALLS) + 1)
        if epoch is not None:
            tl.store(epoch, tl.load(epoch) + 1)
