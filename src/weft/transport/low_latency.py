"""Launches of the kernels of low-latency rows (low_latency_kernels.py), and the all-gather and reduce-scatter of a few
rows as transports with one arrival, or one part (interfaces.py)."""

from __future__ import annotations

import functools
import itertools
from dataclasses import dataclass
from typing import Any

import torch
from triton import JITFunction

from ..backends.base import Stream, SymmetricTensor
from ..kernel_launch import Launch, Moved, Words, prepared
from ..plans import LowLatencyShot
from ..tensor_checks import DTYPES
from ..world import World
from .collectives import gather_at_once, reduce_at_once
from .low_latency_kernels import EMPTY, Slots, gather_low_latency, scatter_low_latency

PROGRAMS = 1024  # the most programs that post
VECTOR = 16  # bytes
_NAME = "low-latency rows"


@dataclass(eq=False)
class Thirds:
    """Three thirds for low-latency rows, and what the calls that share it keep on the device
    (transport/low_latency_kernels.py). All calls of a World share it: in each of them every rank waits for something of
    every other, which is all that their order rests on."""

    held: SymmetricTensor
    words: torch.Tensor
    turns: torch.Tensor
    last_stream: Stream = None
    last_captured: Stream = None


@dataclass(eq=False)
class Posting:
    """What the calls of one kernel, of one shape and plan, have in common. nbytes: what a call fills of its third;
    constants: of the kernel's arguments those that do not change."""

    kernel: JITFunction
    name: str
    plan: LowLatencyShot
    nbytes: int
    options: dict[str, int]
    constants: dict[str, Any]


def memory(world: World, nbytes: int, stream: Stream) -> Thirds:
    """Return memory whose thirds have at least `nbytes`, a power of two: batches grow row by row, and what graphs hold
    stays. Collective when it has to grow."""
    held = world.buffer(_NAME, 3 * max(1 << (nbytes - 1).bit_length(), world.scale.staging_bytes))

    def make() -> Thirds:
        words = held.local.view(torch.int32)
        world.call(lambda: words.fill_(EMPTY.value), [], [words], stream)
        world.wait_for_streams()
        world.exchange(_NAME)  # nobody posts before all have filled theirs
        return Thirds(held, words, world.zeros((PROGRAMS, 2), torch.int32))

    return world.cached((_NAME, held.local.data_ptr()), make)


@prepared
def _launch(world: World, posting: Posting, thirds: Thirds) -> Launch:
    # Nothing counts in this channel: it brings rank, world and guard, and its address the name that a Timeout says.
    ch = world.channel(f"{posting.name} {posting.plan}", 1, None)
    programs = min(PROGRAMS, posting.plan.programs or world.sm_count)
    return Launch(
        world,
        posting.kernel,
        programs,
        posting.options,
        slots=Slots(thirds.words, thirds.held.addresses, thirds.turns),
        ch=ch,
        calls=world.calls(_NAME),
        third=thirds.words.numel() // 192 * 64,
        PROGRAMS=programs,
        TURNS=PROGRAMS,
        **posting.constants,
    )


def launch(world: World, posting: Posting, stream: Stream, **moving: Moved) -> None:
    thirds = memory(world, posting.nbytes, stream)
    world.order(thirds, stream)
    _launch(world, posting, thirds)(stream, **moving, number=world.number)


def _posting(
    kernel: JITFunction,
    name: str,
    x: torch.Tensor,
    world: World,
    plan: LowLatencyShot,
    shards: tuple[int, ...],
) -> Posting:
    """Make the Posting of a kernel for `shards[r]` rows of rank r, each as wide as a row of x. A block is 16 KiB, or
    less so that all programs have some."""
    row = x.shape[1] * x.element_size() // VECTOR
    starts = list(itertools.accumulate((n * row for n in shards), initial=0))
    most, block = max(shards) * row, 1024
    peers = 1 if kernel is scatter_low_latency else world.size - 1  # a sum has one part
    while block > 128 and -(-most // block) * peers < world.sm_count:
        block //= 2
    warps = min(plan.warps, block // 32)  # these warps have all registers of the SM
    constants = dict(x=Words(), starts=world.tensor(starts, torch.int32), most=most, WORDS=4 * block)
    if kernel is gather_low_latency:
        constants |= dict(out=Words())
    filled = starts[-1]
    if kernel is scatter_low_latency:
        constants |= dict(DTYPE=DTYPES[x.dtype], P=block * VECTOR // x.element_size())
        filled = world.size * most
    name = f"{name} {list(shards)} x {x.shape[1]} {x.dtype}"
    options = dict(num_warps=warps, maxnreg=min(255, 2048 // warps))
    return Posting(kernel, name, plan, filled * VECTOR, options, constants)


def _post(
    kernel: JITFunction,
    name: str,
    x: torch.Tensor,
    world: World,
    plan: LowLatencyShot,
    shards: tuple[int, ...],
    stream: Stream,
    out: torch.Tensor,
) -> None:
    key = kernel, shards, x.shape[1], x.dtype, plan
    launch(world, world.cached(key, lambda: _posting(kernel, name, x, world, plan, shards)), stream, x=x, out=out)


def gather(
    x: torch.Tensor, world: World, plan: LowLatencyShot, shards: tuple[int, ...], stream: Stream
) -> torch.Tensor:
    """Return all_gather(x) [M, K]. Every rank has some rows; `plan` has programs and warps. Rows that are no whole
    16-byte words travel padded to these."""
    (rows, columns), word = x.shape, VECTOR // x.itemsize
    out = world.empty((sum(shards), columns), x.dtype)
    if columns % word == 0:
        _post(gather_low_latency, "all_gather", x, world, plan, shards, stream, out)
        return out
    padded = world.zeros((rows, columns + -columns % word), x.dtype)
    world.call(lambda: padded[:, :columns].copy_(x), [x], [padded], stream)
    arrived = gather(padded, world, plan, shards, stream)
    world.call(lambda: out.copy_(arrived[:, :columns]), [arrived], [out], stream)
    return out


# Stores this rank's rows of the sum over ranks of x [M, N] in `out`. Rows are whole 16-byte words, and every rank has
# some; the arguments are x, world, plan, shards, stream and out.
scatter = functools.partial(_post, scatter_low_latency, "reduce_scatter")
gather_rows, reduce_rows = gather_at_once(gather), reduce_at_once(scatter)
