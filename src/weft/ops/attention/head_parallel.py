"""Head-parallel attention (DeepSpeed-Ulysses): every rank computes attention for some of the heads over the whole
sequence.

    push q, k, v | barrier | attention of 1 / W of the heads over the whole sequence | push out, lse | barrier | copy

A push stores each block of a matrix where its reader needs the block. The first push converts rows of all heads into
whole sequences of some heads, and the push of the results reverses this. A causal mask then covers one causal block, so
all ranks have equal work in any layout, and no partial results are merged.

The barriers ensure the order of accesses. After the first barrier, all rows have arrived, and no rank still reads the
results of the previous call. After the second barrier, all results have arrived, and no rank still reads queries or
keys. Each tensor has a separate buffer, because one rank may still copy results while a faster rank pushes the queries
of the next call, whose sizes may differ.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from itertools import accumulate

import torch
from torch import Tensor

from ...backends.base import SymmetricTensor
from ...plans import HeadParallel
from ...transport.memory import lock, workspace
from ...transport.sm_push import PushBlock, block_launch
from ...world import World
from .key_ranges import KeyRanges, zigzag_chunks
from .segmented import AttentionConfig, KeyValues, Partial, attend, merge_partials

MEMORY = "attention heads"


@dataclass(frozen=True)
class HeadSplit:
    """The split of heads and rows over the ranks. For each rank, `chunks` lists (first row in its shard, first row in
    the sequence, number of rows) of every run of rows that is contiguous in both."""

    config: AttentionConfig
    chunks: tuple[tuple[tuple[int, int, int], ...], ...]

    @staticmethod
    def over(config: AttentionConfig, zigzag: bool) -> HeadSplit:
        if zigzag:
            return HeadSplit(config, zigzag_chunks(config.shards))
        starts = accumulate(config.shards, initial=0)
        return HeadSplit(config, tuple(((0, start, n),) for start, n in zip(starts, config.shards, strict=False)))

    @property
    def rank_config(self) -> AttentionConfig:
        """Return the sizes of the attention that one rank computes: some heads over the whole sequence."""
        config, size = self.config, len(self.config.shards)
        heads, kv_heads = config.heads // size, config.kv_heads // size
        return replace(config, shards=(sum(config.shards),), heads=heads, kv_heads=kv_heads)

    def dispatch_blocks(self, rank: int, heads: int) -> list[PushBlock]:
        """Return the blocks that move rows [n, W heads, D] of `rank` to every reader's tensor [S, heads, D]."""
        size, width = len(self.chunks), heads * self.config.dim
        return [
            PushBlock(reader, rows, width, in_sequence * width, width, (in_shard * size + reader) * width, size * width)
            for reader in ring(rank, size)
            for in_shard, in_sequence, rows in self.chunks[rank]
        ]

    def combine_blocks(self, rank: int) -> list[PushBlock]:
        """Return the blocks that move results [S, heads of `rank`, D] back to the tensors [n, heads, D] on the ranks of
        the rows."""
        size, width = len(self.chunks), self.rank_config.heads * self.config.dim
        return [
            PushBlock(reader, rows, width, (in_shard * size + rank) * width, size * width, in_sequence * width, width)
            for reader in ring(rank, size)
            for in_shard, in_sequence, rows in self.chunks[reader]
        ]

    def lse_blocks(self, rank: int) -> list[PushBlock]:
        """Return the blocks that move lse [heads of `rank`, S] back to the tensors [heads, n] on the ranks of the
        rows."""
        heads, total, shards = self.rank_config.heads, sum(self.config.shards), self.config.shards
        return [
            PushBlock(reader, heads, rows, rank * heads * shards[reader] + in_shard, shards[reader], in_sequence, total)
            for reader in ring(rank, len(self.chunks))
            for in_shard, in_sequence, rows in self.chunks[reader]
        ]


def ring(rank: int, size: int) -> list[int]:
    """Return all ranks, beginning with the one after `rank`."""
    return [(rank + step) % size for step in range(1, size + 1)]


def prepare_forward(
    world: World, config: AttentionConfig, plan: HeadParallel, key_ranges: KeyRanges, zigzag: bool, m: int
) -> Callable[[Tensor, KeyValues, Tensor | None, Tensor], Tensor]:
    """Return a function of q with m rows, local keys and values, sinks and `out`, which writes out [m, heads, D] and
    returns lse float32 [heads, m]. `key_ranges` are the key ranges that a single rank with the whole sequence would
    have. The queries belong to the last m rows of this rank's shard."""
    rank, n, holder, split = world.rank, config.shards[world.rank], lock(world, MEMORY), HeadSplit.over(config, zigzag)
    rank_config = split.rank_config
    q_memory, k_memory, v_memory, out_memory, lse_memory = symmetric_tensors(world, split)
    own_heads = slice(rank * rank_config.heads, (rank + 1) * rank_config.heads)
    sequence_kv, mask = KeyValues(k_memory.local, v_memory.local), key_ranges.packed or key_ranges.local[0].causal
    received_out = out_memory.local[n - m : n]
    received_lse = lse_memory.local[: config.heads * n].view(config.heads, n)[:, n - m :]

    def pushing(memory: SymmetricTensor, dtype: torch.dtype, method: str, *args: int) -> Callable[[Tensor], None]:
        """Return a function that pushes blocks of a tensor. The split's method named `method` returns these blocks for
        the rank and `args`."""
        blocks = getattr(split, method)(rank, *args)
        launch = block_launch(world, plan.programs, (split, method, *args), blocks, dtype)
        return lambda t: launch(world.current_stream(), x=t, memory=memory.addresses)

    push_q = pushing(q_memory, config.dtype, "dispatch_blocks", rank_config.heads)
    push_k = pushing(k_memory, config.dtype, "dispatch_blocks", rank_config.kv_heads)
    push_v = pushing(v_memory, config.dtype, "dispatch_blocks", rank_config.kv_heads)
    push_out = pushing(out_memory, config.dtype, "combine_blocks")
    push_lse = pushing(lse_memory, torch.float32, "lse_blocks")

    def forward(q: Tensor, local_kv: KeyValues, sinks: Tensor | None, out: Tensor) -> Tensor:
        stream = world.current_stream()
        world.order(holder, stream)
        if m < n:  # the other ranks always read n queries, so the missing rows are padded with zeros
            padded = world.zeros((n, config.heads, config.dim), config.dtype)
            world.copy(padded[n - m :], q, stream)
            q = padded
        push_q(q)
        push_k(local_kv.k)
        push_v(local_kv.v)
        world.barrier(stream, MEMORY)
        result = attend(world, rank_config, 0, q_memory.local, sequence_kv, mask)
        if sinks is not None:
            merged = world.empty(result.out.shape, config.dtype), world.empty(result.lse.shape, torch.float32)
            merge_partials(world, [result], sinks[own_heads], *merged)
            result = Partial(0, *merged)
        push_out(result.out)
        push_lse(result.lse)
        world.barrier(stream, MEMORY)
        lse = world.empty((config.heads, m), torch.float32)

        def copy() -> None:
            out.copy_(received_out)
            lse.copy_(received_lse)

        world.call(copy, [received_out, received_lse], [out, lse], stream)
        return lse

    return forward


def symmetric_tensors(world: World, split: HeadSplit) -> list[SymmetricTensor]:
    """Return the symmetric tensors of a call: q, k and v of this rank's heads, then out and lse of this rank's rows."""
    config, rank_config = split.config, split.rank_config
    total, max_rows = sum(config.shards), max(config.shards)
    heads = {"q": rank_config.heads, "k": rank_config.kv_heads, "v": rank_config.kv_heads}
    return [
        *(workspace(world, f"{MEMORY}, {name}", (total, n, config.dim), config.dtype) for name, n in heads.items()),
        workspace(world, f"{MEMORY}, out", (max_rows, config.heads, config.dim), config.dtype),
        workspace(world, f"{MEMORY}, lse", (max_rows * config.heads,), torch.float32),
    ]
