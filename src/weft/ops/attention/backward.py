"""Gradients of gathered attention.

    main stream  barrier | gradients of local keys | gradients of remote keys .. | all-to-all of dk, dv | sums
    copy stream           | push | push | push

The library's backward pass recomputes the probabilities as exp(score - lse). If it receives the lse and the output over
all keys, its results are exact for any range of keys. So each call returns dk and dv of its own keys, and dq is the sum
over all calls. The gradients of remote keys are sent back to their rank, which sums them in float32 in rank order. Each
gradient is rounded once before it is sent.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from ...plans import Plan
from ...tensor_checks import dense
from ...world import World
from .key_ranges import KeyRanges
from .libraries import AttentionLibrary, BackwardOperands, Packed
from .segmented import AttentionConfig, GroupsByRank, KeyValues, prepare_fetch, sequence_offsets


def backward(
    world: World,
    config: AttentionConfig,
    plan: Plan,
    key_ranges: KeyRanges,
    groups_by_rank: GroupsByRank,
    operands: BackwardOperands,
    needs: Sequence[bool],
) -> list[Tensor | None]:
    """Return dq, dk and dv of this rank's q, k and v. A gradient that is not needed is None."""
    # cuDNN reads aligned 16-byte words, and a gradient may begin at any address.
    operands = BackwardOperands(*map(dense, operands))
    q, k, v, *_ = operands
    stream, m, n, packed = world.current_stream(), len(q), len(k), key_ranges.packed
    kv_shape = (2, config.kv_heads, config.dim)
    remote, end = prepare_fetch(world, config, plan, key_ranges, groups_by_rank)(KeyValues(k, v))
    local_dkv = world.zeros((n, *kv_shape), torch.float32)
    dqs: list[tuple[int, Tensor]] = []
    dkv_by_rank: dict[int, Tensor] = {}
    for block in key_ranges.local if m else ():
        local_operands = operands.part(0, k[block.lo : block.hi], v[block.lo : block.hi])
        dq, *dkv = gradients(world, config, local_operands, packed or block.causal)
        dqs.append((0, dq))
        add(world, local_dkv[block.lo : block.hi].unbind(1), dkv)
    for group, (remote_k, remote_v, wait) in remote:
        if m > group.first_query:
            if wait is not None:
                wait()
            remote_operands = operands.part(group.first_query, remote_k, remote_v)
            dq, *dkv = gradients(world, config, remote_operands, packed or False)
            dqs.append((group.first_query, dq))
            group_dkv = stack_dkv(world, dkv)
        else:
            group_dkv = world.zeros((group.rows, *kv_shape), config.dtype)
        rows = [key_range.hi - key_range.lo for key_range in group.ranges]
        for key_range, range_dkv in zip(group.ranges, group_dkv.split(rows), strict=True):
            if key_range.source == world.rank:  # in packed sequences, local and remote keys form one run
                add(world, [local_dkv[key_range.lo : key_range.hi]], [range_dkv])
            else:
                dkv_by_rank[key_range.source] = range_dkv
    if end is not None:
        world.wait_event(stream, end)
    if needs[1] or needs[2]:
        local_dkv = sum_over_ranks(world, config, groups_by_rank, dkv_by_rank, local_dkv)
    dk, dv = (
        rounded(world, t, config.dtype) if need else None
        for t, need in zip(local_dkv.unbind(1), needs[1:3], strict=True)
    )
    return [sum_dq(world, dqs, q) if needs[0] else None, dk, dv]


def gradients(
    world: World, config: AttentionConfig, operands: BackwardOperands, mask: bool | Packed
) -> Sequence[Tensor]:
    """Return the dq, dk and dv that these keys and values contribute."""
    q, k, v, *_ = operands
    use, sizes = "packed_backward" if isinstance(mask, Packed) else "backward", (len(q), len(k), mask is True)
    outputs = [(t.shape, config.dtype) for t in (q, k, v)]
    offsets = sequence_offsets(world, mask)

    def attention(library: AttentionLibrary) -> Sequence[Tensor]:
        return library.function(use)(operands, mask, offsets, config.scale)

    library = config.library(world, use, sizes, attention)
    reads = [*operands, *(offsets or ())]
    return world.backend.results(lambda: attention(library), outputs, reads, world.current_stream())


def add(world: World, totals: Sequence[Tensor], terms: Sequence[Tensor]) -> None:
    """Add each tensor in `terms` to the tensor in `totals` with the same index."""

    def add_all() -> None:
        for total, term in zip(totals, terms, strict=True):
            total.add_(term)

    world.call(add_all, [*totals, *terms], totals, world.current_stream())


def stack_dkv(world: World, dkv: list[Tensor]) -> Tensor:
    """Return dk and dv as one tensor [n, 2, kv heads, D]."""
    n, *row = dkv[0].shape
    stacked = world.empty((n, 2, *row), dkv[0].dtype)
    world.call(lambda: torch.stack(dkv, 1, out=stacked), dkv, [stacked], world.current_stream())
    return stacked


def sum_dq(world: World, dqs: Sequence[tuple[int, Tensor]], q: Tensor) -> Tensor:
    """Return dq in the dtype of q, summed in float32 and rounded once. `dqs` contains pairs of a term's first query and
    the term. Terms that cover all queries come first."""
    if len(dqs) == 2 and dqs[0][0] == 0:
        (_, total), (first_query, term) = dqs
        add(world, [total[first_query:]], [term])  # torch adds two 16-bit tensors in float32 and rounds once
        return total
    total = world.zeros(q.shape, torch.float32)
    for first_query, term in dqs:
        add(world, [total[first_query:]], [term])
    return rounded(world, total, q.dtype)


def rounded(world: World, t: Tensor, dtype: torch.dtype) -> Tensor:
    """Return a copy of t in `dtype`."""
    out = world.empty(t.shape, dtype)
    world.call(lambda: out.copy_(t), [t], [out], world.current_stream())
    return out


def sum_over_ranks(
    world: World,
    config: AttentionConfig,
    groups_by_rank: GroupsByRank,
    dkv_by_rank: dict[int, Tensor],
    local_dkv: Tensor,
) -> Tensor:
    """Return float32 [n, 2, kv heads, D], the gradients of this rank's keys and values, summed over the ranks in rank
    order. `dkv_by_rank` has this rank's gradients of every other rank's keys and values."""
    if world.size == 1:
        return local_dkv
    stream, row = world.current_stream(), (2, config.kv_heads, config.dim)
    groups_of_readers = [groups if r != world.rank else () for r, groups in enumerate(groups_by_rank)]
    ranges = [
        next((key_range for group in groups for key_range in group.ranges if key_range.source == world.rank), None)
        for groups in groups_of_readers
    ]
    sent = [dkv_by_rank[r] if r in dkv_by_rank else world.empty((0, *row), config.dtype) for r in range(world.size)]
    received = [world.empty((0 if r is None else r.hi - r.lo, *row), config.dtype) for r in ranges]
    world.backend.all_to_all(received, sent, stream)
    total = world.zeros(local_dkv.shape, torch.float32)

    def add_all() -> None:
        for rank, (key_range, term) in enumerate(zip(ranges, received, strict=True)):
            if rank == world.rank:
                total.add_(local_dkv)
            elif key_range is not None:
                total[key_range.lo : key_range.hi].add_(term)

    world.call(add_all, [local_dkv, *received], [total], stream)
    return total


def sinks_gradient(world: World, sinks: Tensor | None, out: Tensor, lse: Tensor, dout: Tensor) -> Tensor:
    """Return the gradient of `sinks` [heads]. A sink acts like a key with the weight exp(sink - lse) and the value
    0."""
    assert sinks is not None
    dsinks, logits = world.empty(sinks.shape, sinks.dtype), sinks

    def compute() -> None:
        delta = (dout.float() * out.float()).sum(-1)
        dsinks.copy_(-((logits.float() - lse.t()).exp() * delta).sum(0))

    world.call(compute, [sinks, out, lse, dout], [dsinks], world.current_stream())
    return dsinks
