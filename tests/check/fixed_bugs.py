"""Eleven faults of multi-GPU kernels that public projects found and fixed. Each fault is reproduced by a small kernel
over torch's symmetric memory, with the function main(rank, world_size, mended). The docstrings name the fault and the
projects that had it.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
import triton
import triton.language as tl

from .symmetric_kernels import Memory, one_shot, push, same, swap, thread_number

N = 256


@triton.jit
def pointer(pointers, rank, dtype: tl.constexpr):
    return tl.load(pointers.to(tl.pointer_type(tl.uint64)) + rank).to(tl.pointer_type(dtype))


def no_last_barrier(rank: int, world_size: int, mended: bool) -> None:
    """A one-shot all-reduce ends before its peers have read its buffer, which the caller then writes (pytorch #137257, aiter
    #3514, #4082, #4346)."""
    one_shot(rank, world_size, LAST=mended)


@triton.jit
def signal_after_stores(buffers, pads, out, n: tl.constexpr, rank: tl.constexpr, W: tl.constexpr, MENDED: tl.constexpr, SCOPE: tl.constexpr,
                        FENCED: tl.constexpr):  # fmt: skip
    """Each rank stores a row, signals its neighbour, waits for its other neighbour's signal, and reads that neighbour's
    row."""
    offsets = tl.arange(0, n)
    local = pointer(buffers, rank, tl.float32)
    tl.store(local + offsets, tl.full((n,), rank + 1, tl.float32))
    if MENDED:
        tl.debug_barrier()
    if thread_number() == 0:
        swap(pointer(pads, (rank + 1) % W, tl.uint32) + rank, 0, 1, "release" if MENDED else "relaxed")
        swap(pointer(pads, rank, tl.uint32) + (rank + W - 1) % W, 1, 0, "acquire", SCOPE)
    if FENCED:
        tl.debug_barrier()
    neighbour = pointer(buffers, (rank + W - 1) % W, tl.float32)
    tl.store(out + offsets, tl.load(neighbour + offsets))


def _signalled(rank: int, world_size: int, **options: object) -> None:
    memory = Memory(rank, world_size, N)
    out = torch.empty(N, device="cuda")
    signal_after_stores[(1,)](*memory.pointers, out, N, rank, world_size, **options)
    same(out, (rank - 1) % world_size + 1)


def relaxed_signal(rank: int, world_size: int, mended: bool) -> None:
    """The signal after the stores is relaxed, and no barrier of the block's threads precedes it (aiter #2890)."""
    _signalled(rank, world_size, MENDED=mended, SCOPE="sys", FENCED=True)


def gpu_scope(rank: int, world_size: int, mended: bool) -> None:
    """The wait for another GPU's signal has the scope of one GPU (aiter #2890)."""
    _signalled(rank, world_size, MENDED=True, SCOPE="sys" if mended else "gpu", FENCED=True)


def only_one_thread_acquires(rank: int, world_size: int, mended: bool) -> None:
    """One thread waits, and the other threads read without a barrier after the wait (aiter #2890)."""
    _signalled(rank, world_size, MENDED=True, SCOPE="sys", FENCED=mended)


@triton.jit
def count_in_graph(
    buffers, pads, out, n: tl.constexpr, number, calls, rank: tl.constexpr, W: tl.constexpr, BAKED: tl.constexpr
):
    """Each rank stores a row with new values in every call, counts its calls in a neighbour's flag, and waits for its
    other neighbour's count. `number` is the call's number as the host counts it; `calls` is the same number, counted on
    the device."""
    offsets = tl.arange(0, n)
    call = tl.load(calls) + 1
    half = (call % 2) * n
    tl.store(pointer(buffers, rank, tl.float32) + half + offsets, tl.zeros((n,), tl.float32) + call.to(tl.float32))
    tl.debug_barrier()
    tl.atomic_add(pointer(pads, (rank + 1) % W, tl.int32) + rank, 1, sem="release", scope="sys")
    awaited = number if BAKED else call
    flag = pointer(pads, rank, tl.int32) + (rank + W - 1) % W
    while tl.atomic_add(flag, 0, sem="acquire", scope="sys") < awaited:
        pass
    tl.store(out + offsets, tl.load(pointer(buffers, (rank + W - 1) % W, tl.float32) + half + offsets))
    tl.debug_barrier()
    tl.store(calls, call)


def flag_baked_into_graph(rank: int, world_size: int, mended: bool) -> None:
    """The wait compares with a number that was an argument when the graph was captured, so replays do not wait (aiter
    #3928, mscclpp #502)."""
    memory = Memory(rank, world_size, 2 * N)
    out, calls = torch.empty(N, device="cuda"), torch.zeros(1, dtype=torch.int32, device="cuda")
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        count_in_graph[(1,)](*memory.pointers, out, N, 1, calls, rank, world_size, BAKED=not mended)
    for call in range(1, 4):
        graph.replay()
        same(out, call)
        memory.handle.barrier(channel=1)  # the kernel increments the words of channel 0


@triton.jit
def stage_and_read(buffers, pads, x, out, n: tl.constexpr, slot, rank: tl.constexpr, W: tl.constexpr):
    """Stage x, wait for all ranks, and sum the staged rows."""
    offsets = tl.arange(0, n)
    tl.store(pointer(buffers, rank, tl.float32) + slot * n + offsets, tl.load(x + offsets))
    tl.debug_barrier()
    peers = tl.arange(0, W)
    remote_words = tl.load(pads.to(tl.pointer_type(tl.uint64)) + peers).to(tl.pointer_type(tl.uint32)) + rank
    if thread_number() < W:
        swap(remote_words, 0, 1, "release")
        swap(pointer(pads, rank, tl.uint32) + peers, 1, 0, "acquire")
    tl.debug_barrier()
    total = tl.zeros((n,), tl.float32)
    for r in tl.static_range(W):
        total += tl.load(pointer(buffers, r, tl.float32) + slot * n + offsets)
    tl.store(out + offsets, total)


def one_staging_slot(rank: int, world_size: int, mended: bool) -> None:
    """Successive calls stage in the same slot, so a fast rank's next call overwrites rows that a slow rank is still
    reading. Alternating between two slots fixes this (tokenspeed #1356)."""
    memory = Memory(rank, world_size, 2 * N)
    for call in range(3):
        x, out = torch.full((N,), rank + 1.0 + call, device="cuda"), torch.empty(N, device="cuda")
        stage_and_read[(1,)](*memory.pointers, x, out, N, call % 2 if mended else 0, rank, world_size)
        same(out, sum(r + 1 + call for r in range(world_size)))


@triton.jit
def signal_neighbour(pads, rank: tl.constexpr, W: tl.constexpr):
    tl.atomic_add(pointer(pads, (rank + 1) % W, tl.int32) + rank, 1, sem="release", scope="sys")
    while tl.atomic_add(pointer(pads, rank, tl.int32) + (rank + W - 1) % W, 0, sem="acquire", scope="sys") < 1:
        pass


def pad_cleared_too_late(rank: int, world_size: int, mended: bool) -> None:
    """A rank clears its pad after a peer may already have signalled. A barrier after the clearing fixes this fault
    (pytorch #195761, in `test_triton_signal_wait_until`)."""
    memory = Memory(rank, world_size, N)
    memory.handle.get_signal_pad(rank, (world_size,), torch.int32).fill_(0)
    if mended:
        dist.barrier()
    signal_neighbour[(1,)](memory.pointers[1], rank, world_size)


@triton.jit
def locked_sum(total, lock, count, MENDED: tl.constexpr):
    """Each program adds its number to a sum that a lock guards."""
    while tl.atomic_cas(lock, 0, 1, sem="acquire" if MENDED else "relaxed", scope="gpu") != 0:
        pass
    tl.store(total, tl.load(total) + tl.program_id(0) + 1)
    if MENDED:
        tl.debug_barrier()
    tl.atomic_xchg(lock, 0, sem="release" if MENDED else "relaxed", scope="gpu")


def lock_without_order(rank: int, world_size: int, mended: bool) -> None:
    """Relaxed atomics acquire and release a spin lock, so a program reads a stale sum (ROCm/iris #296, tritonBLAS
    #61)."""
    total, lock = (torch.zeros(1, dtype=torch.int32, device="cuda") for _ in range(2))
    locked_sum[(3,)](total, lock, 3, MENDED=mended)
    assert total.item() == 6


@triton.jit
def publish_rows(
    buffers, pads, x, out, n: tl.constexpr, programs, rank: tl.constexpr, W: tl.constexpr, MENDED: tl.constexpr
):
    """Programs push rows of x to a neighbour, and one of them publishes the number of rows; the neighbour's program 0
    reads the rows."""
    program, to, offsets = tl.program_id(0), (rank + 1) % W, tl.arange(0, n)
    row = program * n + offsets
    tl.store(pointer(buffers, to, tl.float32) + row, tl.load(x + row))
    tl.debug_barrier()
    tail = pointer(pads, to, tl.int32)
    if MENDED:
        tl.atomic_add(tail, 1, sem="release", scope="sys")
    elif program == 0:
        tl.atomic_xchg(tail, programs, sem="release", scope="sys")
    if program == 0:
        while tl.atomic_add(pointer(pads, rank, tl.int32), 0, sem="acquire", scope="sys") < programs:
            pass
        for p in range(programs):
            tl.store(out + p * n + offsets, tl.load(pointer(buffers, rank, tl.float32) + p * n + offsets))


def published_before_all_sent(rank: int, world_size: int, mended: bool) -> None:
    """One sender publishes the tail of a queue before the other senders have stored their rows (FlashInfer #4092)."""
    memory = Memory(rank, world_size, 2 * N)
    x, out = torch.full((2 * N,), rank + 1.0, device="cuda"), torch.empty(2 * N, device="cuda")
    publish_rows[(2,)](*memory.pointers, x, out, N, 2, rank, world_size, MENDED=mended)
    same(out, (rank - 1) % world_size + 1)


def order_of_peers_differs(rank: int, world_size: int, mended: bool) -> None:
    """Ranks wait for their neighbours in different orders before they signal, so all ranks deadlock (rocm-libraries
    #5776)."""
    memory = Memory(rank, world_size, N)
    signal_neighbour[(1,)](memory.pointers[1], rank, world_size)  # a kernel, so that the check has something to run
    before, after = (rank - 1) % world_size, (rank + 1) % world_size
    if mended:
        memory.handle.put_signal(after, channel=1)
    memory.handle.wait_signal(before, channel=1)
    if not mended:
        memory.handle.put_signal(after, channel=1)


def two_generations(rank: int, world_size: int, mended: bool) -> None:
    """A rank clears data that doubles as its own flag one call too early. Two generations of data are too few, since a
    rank may be one call ahead (tokenspeed #351)."""
    push(rank, world_size, clear=2 if mended else 1)
