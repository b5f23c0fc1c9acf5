"""Kernels in plain Triton over torch's symmetric memory, in the style of public projects. Each barrier is an option,
and the check must find the fault when a barrier is removed."""

from __future__ import annotations

import torch
import torch.distributed as dist
import torch.distributed._symmetric_memory as symm_mem
import triton
import triton.language as tl

# -- the barrier of a block with the same block of every rank, by compare-and-swap on signal pads ---------------------------


@triton.jit
def thread_number():
    x, y, z = tl.inline_asm_elementwise(
        "mov.u32 $0, %tid.x; mov.u32 $1, %tid.y; mov.u32 $2, %tid.z;",
        "=r,=r,=r",
        [],
        dtype=(tl.uint32, tl.uint32, tl.uint32),
        is_pure=True,
        pack=1,
    )
    nx, ny, nz = tl.inline_asm_elementwise(
        "mov.u32 $0, %ntid.x; mov.u32 $1, %ntid.y; mov.u32 $2, %ntid.z;",
        "=r,=r,=r",
        [],
        dtype=(tl.uint32, tl.uint32, tl.uint32),
        is_pure=True,
        pack=1,
    )
    return (z * ny + y) * nx + x


@triton.jit
def swap(addresses, OLD: tl.constexpr, NEW: tl.constexpr, ORDER: tl.constexpr, SCOPE: tl.constexpr = "sys"):
    """Replace OLD by NEW in each word, as soon as the word is OLD."""
    tl.inline_asm_elementwise(
        f"""
        {{
            .reg .u32 %seen;
            .reg .pred %done;
            spin:
                atom.global.{ORDER}.{SCOPE}.cas.b32 %seen, [$1], {OLD}, {NEW};
                setp.eq.u32 %done, %seen, {OLD};
                @!%done bra spin;
        }}
        """,
        "=r, l",
        [addresses],
        dtype=tl.int32,
        is_pure=False,
        pack=1,
    )


@triton.jit
def sync_blocks(
    pads, rank: tl.constexpr, W: tl.constexpr, BEFORE: tl.constexpr, AFTER: tl.constexpr, FENCED: tl.constexpr = True
):
    """Synchronise with the same block of every rank. BEFORE: the barrier releases this block's earlier accesses. AFTER:
    the barrier acquires the other ranks' accesses for later accesses of this block. FENCED: the block's own threads
    also meet at barriers."""
    block, peers = tl.program_id(0), tl.arange(0, W)
    pads = pads.to(tl.pointer_type(tl.uint64))
    remote_words = tl.load(pads + peers).to(tl.pointer_type(tl.uint32)) + block * W + rank
    local_words = tl.load(pads + rank).to(tl.pointer_type(tl.uint32)) + block * W + peers
    if BEFORE and FENCED:
        tl.debug_barrier()
    if thread_number() < W:
        swap(remote_words, 0, 1, "release" if BEFORE else "relaxed")
        swap(local_words, 1, 0, "acquire" if AFTER else "relaxed")
    if AFTER and FENCED:
        tl.debug_barrier()


@triton.jit
def one_shot_kernel(
    buffers, pads, out, n, rank: tl.constexpr, W: tl.constexpr, B: tl.constexpr, FIRST: tl.constexpr, LAST: tl.constexpr,
    FENCED: tl.constexpr,
):  # fmt: skip
    if FIRST:
        sync_blocks(pads, rank, W, False, True, FENCED)
    buffers = buffers.to(tl.pointer_type(tl.uint64))
    start = tl.program_id(0) * B
    while start < n:
        offsets = start + tl.arange(0, B)
        total = tl.zeros((B,), tl.float32)
        for r in tl.static_range(W):
            x = tl.load(buffers + r).to(tl.pointer_type(tl.float32))
            total += tl.load(x + offsets, mask=offsets < n, other=0.0)
        tl.store(out + offsets, total, mask=offsets < n)
        start += tl.num_programs(0) * B
    if LAST:
        sync_blocks(pads, rank, W, True, False, FENCED)


@triton.jit
def two_shot_kernel(
    buffers, pads, n, rank: tl.constexpr, W: tl.constexpr, B: tl.constexpr, FIRST: tl.constexpr, LAST: tl.constexpr
):  # fmt: skip
    """Each rank sums its part of the rows and writes the sums to every rank."""
    if FIRST:
        sync_blocks(pads, rank, W, False, True)
    buffers = buffers.to(tl.pointer_type(tl.uint64))
    part = n // W
    start = tl.program_id(0) * B
    while start < part:
        offsets = rank * part + start + tl.arange(0, B)
        mask = start + tl.arange(0, B) < part
        total = tl.zeros((B,), tl.float32)
        for r in tl.static_range(W):
            x = tl.load(buffers + r).to(tl.pointer_type(tl.float32))
            total += tl.load(x + offsets, mask=mask, other=0.0)
        for r in tl.static_range(W):
            x = tl.load(buffers + r).to(tl.pointer_type(tl.float32))
            tl.store(x + offsets, total, mask=mask)
        start += tl.num_programs(0) * B
    if LAST:
        sync_blocks(pads, rank, W, True, True)


class Memory:
    """A symmetric buffer of n float32 elements for the `main` functions."""

    def __init__(self, rank: int, world_size: int, n: int) -> None:
        torch.cuda.set_device(rank)
        dist.init_process_group("nccl")
        self.buffer = symm_mem.empty(n, dtype=torch.float32, device=f"cuda:{rank}")
        self.handle = symm_mem.rendezvous(self.buffer, dist.group.WORLD)
        self.pointers = self.handle.buffer_ptrs_dev, self.handle.signal_pad_ptrs_dev


def same(actual: torch.Tensor, expected: float) -> None:
    torch.testing.assert_close(actual, torch.full_like(actual, expected))


def one_shot(rank: int, world_size: int, n: int = 1024, grid: int = 2, calls: int = 2, **left_out: bool) -> None:
    options = dict(FIRST=True, LAST=True, FENCED=True) | left_out
    memory = Memory(rank, world_size, n)
    for call in range(calls):
        memory.buffer.fill_(rank + 1 + call)
        out = torch.empty(n, device="cuda")
        one_shot_kernel[(grid,)](*memory.pointers, out, n, rank, world_size, B=256, num_warps=4, **options)
        same(out, sum(r + 1 + call for r in range(world_size)))
    dist.destroy_process_group()


def two_shot(rank: int, world_size: int, n: int = 1024, grid: int = 2, calls: int = 2, **left_out: bool) -> None:
    options = dict(FIRST=True, LAST=True) | left_out
    memory = Memory(rank, world_size, n)
    for call in range(calls):
        memory.buffer.copy_(torch.full((n,), rank + 1.0 + call, device="cuda"))
        two_shot_kernel[(grid,)](*memory.pointers, n, rank, world_size, B=128, **options)
        same(memory.buffer, sum(r + 1 + call for r in range(world_size)))


# -- all-gather + matmul: tiles wait for the flag of their rows, which a copy's stream sets ----------------------------------


@triton.jit
def gathered_matmul_kernel(
    x, w, out, flags, number, rows, M: tl.constexpr, N: tl.constexpr, K: tl.constexpr, BM: tl.constexpr, WAIT: tl.constexpr
):  # fmt: skip
    for tile in range(tl.program_id(0), M // BM, tl.num_programs(0)):
        source = tile * BM // rows
        if WAIT:
            while tl.atomic_add(flags + source, 0, sem="acquire", scope="sys") < number:
                pass
        m, n, k = tile * BM + tl.arange(0, BM), tl.arange(0, N), tl.arange(0, K)
        a = tl.load(x + m[:, None] * K + k[None, :])
        b = tl.load(w + k[:, None] * N + n[None, :])
        tl.store(out + m[:, None] * N + n[None, :], tl.dot(a, b, input_precision="ieee"))


def gathered_matmul(
    rank: int, world_size: int, rows: int = 32, k: int = 16, grid: int = 2, calls: int = 2, wait: bool = True,
    staged: bool = True, read: bool = True,
) -> None:  # fmt: skip
    """`staged` and `read` enable the barriers after staging all shards and after reading all of them."""
    memory = Memory(rank, world_size, rows * k)
    shard, m, n = memory.buffer.view(rows, k), rows * world_size, 16
    w, flags = torch.ones(k, n, device="cuda"), torch.zeros(world_size, dtype=torch.int32, device="cuda")
    full, out = torch.empty(m, k, device="cuda"), torch.empty(m, n, device="cuda")
    copies = torch.cuda.Stream()
    for call in range(1, calls + 1):
        shard.fill_(rank + call)
        if staged:
            memory.handle.barrier()
        copies.wait_stream(torch.cuda.current_stream())
        gathered_matmul_kernel[(grid,)](full, w, out, flags, call, rows, M=m, N=n, K=k, BM=16, WAIT=wait)
        with torch.cuda.stream(copies):
            for step in range(world_size):
                p = (rank + step) % world_size
                full[p * rows :][:rows].copy_(memory.handle.get_buffer(p, (rows, k), torch.float32))
                torch.ops.symm_mem.stream_write_value32_(flags, p, call)
        torch.cuda.current_stream().wait_stream(copies)
        if read:
            memory.handle.barrier(channel=1)
        for r in range(world_size):
            same(out[r * rows :][:rows], (r + call) * k)


# -- a push whose data says that it is there (Lamport): words that are no number yet are empty ------------------------------

EMPTY = tl.constexpr(-1.0)


@triton.jit
def store_relaxed(addresses, bits):
    tl.inline_asm_elementwise(
        "st.relaxed.sys.global.b32 [$1], $2;", "=r, l, r", [addresses, bits], dtype=tl.int32, is_pure=False, pack=1
    )


@triton.jit
def push_kernel(
    buffers, x, out, n, slot, rank: tl.constexpr, W: tl.constexpr, B: tl.constexpr, CLEAR: tl.constexpr, WAIT: tl.constexpr
):  # fmt: skip
    """Store x to every rank's `slot`, sum the values that all ranks stored to this rank's slot, and empty the next
    slot."""
    buffers = buffers.to(tl.pointer_type(tl.uint64))
    offsets = tl.program_id(0) * B + tl.arange(0, B)
    bits = tl.load(x + offsets).to(tl.int32, bitcast=True)
    for r in tl.static_range(W):
        store_relaxed(tl.load(buffers + r).to(tl.pointer_type(tl.float32)) + (slot * W + rank) * n + offsets, bits)
    local = tl.load(buffers + rank).to(tl.pointer_type(tl.float32))
    total = tl.zeros((B,), tl.float32)
    for r in tl.static_range(W):
        part = tl.load(local + (slot * W + r) * n + offsets, volatile=True)
        if WAIT:
            while tl.min(part, 0) == EMPTY:
                part = tl.load(local + (slot * W + r) * n + offsets, volatile=True)
        total += part
    tl.store(out + offsets, total)
    if CLEAR:
        # Empty the slot after the next one: a rank may be one call ahead and already fill the next one.
        for r in tl.static_range(W):
            empty = tl.full((B,), EMPTY, tl.float32).to(tl.int32, bitcast=True)
            store_relaxed(local + (((slot + CLEAR) % 3) * W + r) * n + offsets, empty)


def push(
    rank: int, world_size: int, n: int = 256, grid: int = 2, calls: int = 4, clear: int = 2, wait: bool = True
) -> None:
    """`clear` is the number of slots between this slot and the emptied one. With three slots, `clear` is 2: no rank
    fills the emptied slot before all ranks have filled the slot in between, and a rank fills the slot in between only
    after it has emptied that slot."""
    memory = Memory(rank, world_size, 3 * world_size * n)
    memory.buffer.fill_(EMPTY.value)
    memory.handle.barrier()
    for call in range(calls):
        x, out = torch.full((n,), rank + 1.0 + call, device="cuda"), torch.empty(n, device="cuda")
        push_kernel[(grid,)](
            memory.pointers[0], x, out, n, call % 3, rank, world_size, B=n // grid, CLEAR=clear, WAIT=wait
        )
        same(out, sum(r + 1 + call for r in range(world_size)))
