"""The all-gather and reduce-scatter of a few rows (low_latency_kernels.py) as collectives and as a transport with one
arrival (interfaces.py), and the memory and launches of all kernels in which the data are their own flags."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from triton import JITFunction

from ..backends.base import Stream, SymmetricTensor
from ..kernel_launch import Launch, Moved, Words, prepared
from ..plans import LowLatencyShot
from ..tensor_checks import DTYPES
from ..world import World
from .collectives import gather_at_once
from .interfaces import CollectiveFunction
from .low_latency_kernels import EMPTY, PostingMemory, gather_low_latency, scatter_low_latency

MAX_PROGRAMS = 1024  # the largest number of programs in a launch
VECTOR = 16  # bytes
_NAME = "low-latency rows"


@dataclass(eq=False)
class Thirds:
    """Symmetric memory for low-latency rows, which consists of three thirds, and the state in
    `low_latency_kernels.PostingMemory`. All calls of a World share this memory. Accesses of different calls are ordered
    only because every rank waits for data of every other rank in each call."""

    memory: SymmetricTensor
    words: torch.Tensor
    state: torch.Tensor
    last_stream: Stream = None
    last_captured: Stream = None


def thirds_of(world: World, nbytes: int) -> Thirds:
    """Return thirds of at least `nbytes` each. The size of a third is a power of two, so that a batch that grows row by
    row rarely needs new memory. The old memory stays allocated for CUDA graphs that use it. The call is collective when
    the memory has to grow."""
    memory = world.buffer(_NAME, 3 * max(1 << (nbytes - 1).bit_length(), world.backend.scale.staging_bytes))

    def make() -> Thirds:
        words, stream = memory.local.view(torch.int32), world.current_stream()
        world.call(lambda: words.fill_(EMPTY.value), [], [words], stream)
        world.wait_for_streams()
        world.exchange(None, _NAME)  # no rank posts before all ranks have filled their words with EMPTY
        return Thirds(memory, words, world.zeros((MAX_PROGRAMS, 2), torch.int32))

    return world.cached((_NAME, memory.local.data_ptr()), make)


def prepare_posting(
    world: World,
    kernel: JITFunction,
    name: str,
    plan: LowLatencyShot,
    nbytes: int,
    options: dict[str, int],
    **constants: Any,
) -> Callable[..., None]:
    """Return a function that launches the kernel on a stream. The function receives the arguments that change from call
    to call, by name. A call fills `nbytes` bytes of its third. `constants` are the kernel's arguments that do not
    change."""
    thirds = thirds_of(world, nbytes)
    programs = min(MAX_PROGRAMS, plan.programs or world.sm_count)
    launch = Launch(
        world,
        kernel,
        programs,
        options,
        memory=PostingMemory(thirds.words, thirds.memory.addresses, thirds.state),
        # The kernel does not use the counter of this channel. The channel passes the rank, the world size and the guard
        # to the kernel, and the code that raises Timeout looks up the name by the channel's address.
        ch=world.channel(f"{name} {plan}", 1, None),
        calls=world.calls(_NAME),
        third=thirds.words.numel() // 192 * 64,
        PROGRAMS=programs,
        MAX_PROGRAMS=MAX_PROGRAMS,
        **constants,
    )

    def post(stream: Stream, **moving: Moved) -> None:
        world.order(thirds, stream)
        launch(stream, **moving, number=world.number)

    return post


@prepared
def _prepare_shards(
    world: World, kernel: JITFunction, plan: LowLatencyShot, shards: tuple[int, ...], columns: int, dtype: torch.dtype
) -> CollectiveFunction:
    """Return a function of out, x and a stream, which launches a kernel for shards[r] rows of rank r. A block is 16
    KiB, or smaller if some programs would otherwise have no block."""
    row_vectors, scatters = columns * dtype.itemsize // VECTOR, kernel is scatter_low_latency
    starts = tuple(itertools.accumulate((n * row_vectors for n in shards), initial=0))
    longest, block = max(shards) * row_vectors, 1024
    parts = 1 if scatters else world.size - 1  # the number of parts that a rank receives and stores
    while block > 128 and -(-longest // block) * parts < world.sm_count:
        block //= 2
    warps = min(plan.warps, block // 32)  # an SM runs one program, so the program's warps share all registers
    table = world.cached(("starts", starts), lambda: world.tensor(starts, torch.int32))
    constants = dict(x=Words(), starts=table, longest=longest, WORDS=4 * block)
    if scatters:
        constants |= dict(DTYPE=DTYPES[dtype], P=block * VECTOR // dtype.itemsize)
    else:
        constants |= dict(out=Words())
    nbytes = (world.size * longest if scatters else starts[-1]) * VECTOR
    name = f"{'reduce_scatter' if scatters else 'all_gather'} {list(shards)} x {columns} {dtype}"
    options = dict(num_warps=warps, maxnreg=min(255, 2048 // warps))
    post = prepare_posting(world, kernel, name, plan, nbytes, options, **constants)
    return lambda out, x, stream: post(stream, x=x, out=out)


def prepare_gather(
    world: World, plan: LowLatencyShot, shards: tuple[int, ...], columns: int, dtype: torch.dtype
) -> CollectiveFunction | None:
    """Return a function of out [M, columns], x and a stream, which stores all_gather(x) in `out`. Every rank must have
    rows. `plan` contains the numbers of programs and warps. Return None if rows are not whole 16-byte words."""
    if columns * dtype.itemsize % VECTOR:
        return None
    return _prepare_shards(world, gather_low_latency, plan, shards, columns, dtype)


def prepare_scatter(
    world: World, plan: LowLatencyShot, shards: tuple[int, ...], columns: int, dtype: torch.dtype
) -> CollectiveFunction:
    """Return a function of out, x [M, columns] and a stream, which stores this rank's rows of the sum over ranks of x
    in `out`. Rows are whole 16-byte words, and every rank must have rows."""
    return _prepare_shards(world, scatter_low_latency, plan, shards, columns, dtype)


def gather(
    x: torch.Tensor, world: World, plan: LowLatencyShot, shards: tuple[int, ...], stream: Stream
) -> torch.Tensor:
    """Return all_gather(x) [M, K]. Rows that are not whole 16-byte words are padded. Every rank must have rows."""
    rows, columns = x.shape
    out = world.empty((sum(shards), columns), x.dtype)
    if (gather_rows := prepare_gather(world, plan, shards, columns, x.dtype)) is not None:
        gather_rows(out, x, stream)
        return out
    padded = world.zeros((rows, columns + -columns % (VECTOR // x.itemsize)), x.dtype)
    world.call(lambda: padded[:, :columns].copy_(x), [x], [padded], stream)
    arrived = gather(padded, world, plan, shards, stream)
    world.call(lambda: out.copy_(arrived[:, :columns]), [arrived], [out], stream)
    return out


gather_rows = gather_at_once(lambda tensors, *arguments: [gather(t, *arguments) for t in tensors])
