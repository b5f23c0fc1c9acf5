"""Head-parallel attention (DeepSpeed-Ulysses): every rank computes some of the heads over the whole sequence.

    push q, k, v | barrier | attention of 1 / W of the heads over the whole sequence | push out, lse | barrier | copy

A push stores each block of a matrix where its reader needs it, so that rows of all heads become whole sequences of some
heads on the way, and rows of all heads again on the way back. A causal mask is then one causal block, which is the same
work for all ranks in any layout, and no partial results are merged.

What the barriers order: after the first one, all rows have arrived, and no rank still reads the results of the previous
call. After the second one, all results have arrived, and no rank still reads queries or keys. Each tensor has a buffer
of its own, because a rank may still copy results while another one pushes the queries of the next call, whose sizes may
differ.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import accumulate

import torch
from torch import Tensor

from ...backends.base import SymmetricTensor
from ...kernel_launch import Launch, prepared
from ...plans import HeadParallel
from ...transport.memory import lock, workspace
from ...transport.sm_push import PushBlock, block_launch
from ...world import World
from .key_ranges import KeyRanges, zigzag_chunks
from .segmented import AttentionConfig, KeyValues, Partial, attend, merge_partials

MEMORY = "attention heads"


@dataclass(frozen=True)
class HeadSplit:
    """The split of heads and rows over the ranks. `chunks` has, for each rank, (first row in its shard, first row in
    the sequence, rows) of every run of rows that is contiguous in both."""

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
        """Return the attention that one rank computes: some heads over the whole sequence."""
        config, size = self.config, len(self.config.shards)
        heads, kv_heads = config.heads // size, config.kv_heads // size
        return replace(config, shards=(sum(config.shards),), heads=heads, kv_heads=kv_heads)

    def dispatch_blocks(self, rank: int, heads: int) -> list[PushBlock]:
        """Return the blocks that take rows [n, W heads, D] of `rank` to the [S, heads, D] of every reader."""
        size, width = len(self.chunks), heads * self.config.dim
        return [
            PushBlock(reader, rows, width, in_sequence * width, width, (in_shard * size + reader) * width, size * width)
            for reader in ring(rank, size)
            for in_shard, in_sequence, rows in self.chunks[rank]
        ]

    def combine_blocks(self, rank: int) -> list[PushBlock]:
        """Return the blocks that take results [S, heads of `rank`, D] back to the [n, heads, D] of the rows' ranks."""
        size, width = len(self.chunks), self.rank_config.heads * self.config.dim
        return [
            PushBlock(reader, rows, width, (in_shard * size + rank) * width, size * width, in_sequence * width, width)
            for reader in ring(rank, size)
            for in_shard, in_sequence, rows in self.chunks[reader]
        ]

    def lse_blocks(self, rank: int) -> list[PushBlock]:
        """Return the blocks that take lse [heads of `rank`, S] back to the [heads, n] of the rows' ranks."""
        heads, total, shards = self.rank_config.heads, sum(self.config.shards), self.config.shards
        return [
            PushBlock(reader, heads, rows, rank * heads * shards[reader] + in_shard, shards[reader], in_sequence, total)
            for reader in ring(rank, len(self.chunks))
            for in_shard, in_sequence, rows in self.chunks[reader]
        ]


def ring(rank: int, size: int) -> list[int]:
    """Return all ranks, beginning with the one after `rank`."""
    return [(rank + step) % size for step in range(1, size + 1)]


def forward(
    world: World,
    config: AttentionConfig,
    plan: HeadParallel,
    key_ranges: KeyRanges,
    zigzag: bool,
    q: Tensor,
    local_kv: KeyValues,
    sinks: Tensor | None,
    out: Tensor,
) -> Tensor:
    """Write out [m, heads, D] and return lse float32 [heads, m]. `key_ranges` are those of a single rank with the whole
    sequence. The queries are those of the last m rows of this rank's shard."""
    stream, rank, n, m = world.current_stream(), world.rank, len(local_kv.k), len(q)
    split = world.cached((MEMORY, "split", config, zigzag), lambda: HeadSplit.over(config, zigzag))
    rank_config = split.rank_config
    q_memory, k_memory, v_memory, out_memory, lse_memory = symmetric_tensors(world, split)
    world.order(lock(world, MEMORY), stream)
    if m < n:  # the other ranks read as many queries as keys
        padded = world.zeros((n, config.heads, config.dim), config.dtype)
        world.copy(padded[n - m :], q, stream)
        q = padded

    def push(t: Tensor, memory: SymmetricTensor, method: str, *args: int) -> None:
        """Push the blocks that this method of the split returns, given the rank and `args`."""
        _push(world, plan.programs, (split, method, *args), t.dtype)(stream, x=t, memory=memory.addresses)

    push(q, q_memory, "dispatch_blocks", rank_config.heads)
    push(local_kv.k, k_memory, "dispatch_blocks", rank_config.kv_heads)
    push(local_kv.v, v_memory, "dispatch_blocks", rank_config.kv_heads)
    world.barrier(stream, MEMORY)
    sequence_kv, block = KeyValues(k_memory.local, v_memory.local), key_ranges.local[0]
    result = attend(world, rank_config, 0, q_memory.local, sequence_kv, key_ranges.packed or block.causal)
    if sinks is not None:
        partial = result
        result = Partial(0, world.empty(partial.out.shape, config.dtype), world.empty(partial.lse.shape, torch.float32))
        rank_sinks = sinks[rank * rank_config.heads : (rank + 1) * rank_config.heads]
        merge_partials(world, [partial], rank_sinks, result.out, result.lse)
    push(result.out, out_memory, "combine_blocks")
    push(result.lse, lse_memory, "lse_blocks")
    world.barrier(stream, MEMORY)
    lse = world.empty((config.heads, m), torch.float32)
    received_out = out_memory.local[n - m : n]
    received_lse = lse_memory.local[: config.heads * n].view(config.heads, n)[:, n - m :]

    def copy() -> None:
        out.copy_(received_out)
        lse.copy_(received_lse)

    world.call(copy, [received_out, received_lse], [out, lse], stream)
    return lse


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


@prepared
def _push(
    world: World, programs: int, block_source: tuple[HeadSplit, str, *tuple[int, ...]], dtype: torch.dtype
) -> Launch:
    split, method, *args = block_source
    return block_launch(world, programs, block_source, getattr(split, method)(world.rank, *args), dtype)
