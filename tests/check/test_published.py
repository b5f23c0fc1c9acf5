"""Published programs from installed packages: torch's pipelines over symmetric memory, which its wheel contains.
docs/published-kernels.md covers further programs.
"""

from __future__ import annotations

import functools

import pytest
import torch
import torch.distributed as dist
import torch.distributed._symmetric_memory as symm_mem
import triton
import triton.language as tl

from tests.check.symmetric_kernels import same
from weft.check import search
from weft.check.torch_ranks.symmetric import SymmetricHandle
from weft.errors import Race

N = 64


@triton.jit
def double_kernel(x, out, n: tl.constexpr):
    offsets = tl.arange(0, n)
    tl.store(out + offsets, tl.load(x + offsets) * 2)


def start(rank: int) -> str:
    torch.cuda.set_device(rank)
    dist.init_process_group("nccl")
    return dist.group.WORLD.group_name


def produce(rank: int, world_size: int) -> None:
    """Compute a chunk for each rank and send it there, as torch's fused matmul and reduce-scatter does."""
    group_name = start(rank)
    for call in range(2):
        x, out = torch.full((N,), rank + 1.0 + call, device="cuda"), torch.empty(world_size * N, device="cuda")
        symm_mem._pipelined_produce_and_all2all(
            lambda to, chunk, x=x: double_kernel[(1,)](x, chunk, N), out, group_name
        )
        for sender, chunk in enumerate(out.chunk(world_size)):
            same(chunk, 2 * (sender + 1 + call))


def consume(rank: int, world_size: int) -> None:
    """Fetch each rank's shard and compute with it, as torch's fused all-gather and matmul does."""
    group_name = start(rank)
    for call in range(2):
        shard = torch.full((N,), rank + 1.0 + call, device="cuda")
        gathered, out = (torch.empty(world_size * N, device="cuda") for _ in range(2))
        chunks = out.chunk(world_size)
        symm_mem._pipelined_all_gather_and_consume(
            shard, lambda x, sender, chunks=chunks: double_kernel[(1,)](x, chunks[sender], N), gathered, group_name
        )
        for sender, chunk in enumerate(chunks):
            same(chunk, 2 * (sender + 1 + call))


@pytest.mark.parametrize("ranks", [2, 3])
@pytest.mark.parametrize("main", [produce, consume])
def test_pipelines_of_torch_are_clean(main, ranks):
    exploration = search(main, ranks, range(3))
    assert exploration.programs and not exploration.findings


@pytest.mark.parametrize("channel", [0, 1])
@pytest.mark.parametrize("main", [produce, consume])
def test_no_barrier_of_the_pipelines_is_for_nothing(main, channel, monkeypatch):
    barrier = SymmetricHandle.barrier

    def other_channels(handle: SymmetricHandle, channel_of_call: int = 0, **options: object) -> None:
        if channel_of_call != channel:
            barrier(handle, channel_of_call, **options)

    monkeypatch.setattr(
        SymmetricHandle, "barrier", functools.partialmethod(lambda h, channel=0: other_channels(h, channel))
    )
    assert any(isinstance(error, Race) for _, error in search(main, 3, range(6)).findings)
