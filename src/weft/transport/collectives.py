"""NCCL's all-gather and reduce-scatter for shards of equal or unequal length, and transports (interfaces.py): an
all-gather with one arrival, and an all-reduce of several parts."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager

import torch

from ..backends.base import Stream
from ..plans import Decomposed, Plan
from ..world import World
from .interfaces import (
    ArrivedRows,
    GatheredTensors,
    GatherRows,
    GatherTransport,
    PartialRows,
    ReduceRows,
    TensorList,
    TensorSpecs,
)
from .order import group_steps


def gather(x: torch.Tensor, world: World, shards: Sequence[int], stream: Stream) -> torch.Tensor:
    """Return all_gather(x) [M, K], computed by NCCL. `shards` contains every rank's number of rows. Unequal shards are
    padded to the length of the longest shard."""
    k, longest = x.shape[1], max(shards)
    if world.size == 1:
        return x
    if min(shards) == longest:
        full = world.empty((sum(shards), k), x.dtype)
        world.all_gather(full, x, stream)
        return full
    padded, full = world.empty((longest, k), x.dtype), world.empty((world.size * longest, k), x.dtype)
    world.copy(padded[: x.shape[0]], x, stream)
    if x.shape[0] < longest:
        world.call(lambda: padded[x.shape[0] :].zero_(), [], [padded[x.shape[0] :]], stream)
    world.all_gather(full, padded, stream)
    compact = world.empty((sum(shards), k), x.dtype)
    for rows, padded_rows in zip(compact.split(list(shards)), full.split(longest), strict=True):
        if len(rows):
            world.copy(rows, padded_rows[: len(rows)], stream)
    return compact


def reduce_scatter(
    x: torch.Tensor, world: World, shards: Sequence[int], stream: Stream, out: torch.Tensor | None = None
) -> torch.Tensor:
    """Sum x [M, N] over the ranks by NCCL's reduce-scatter, and return this rank's rows, in `out` if it is not None.
    `shards` contains every rank's number of rows. Unequal shards are padded to the length of the longest shard."""
    n, longest, count = x.shape[1], max(shards), shards[world.rank]
    if min(shards) < longest:
        padded = world.zeros((world.size * longest, n), x.dtype)
        for padded_rows, rows in zip(padded.split(longest), x.split(list(shards)), strict=True):
            if len(rows):
                world.copy(padded_rows[: len(rows)], rows, stream)
        x = padded
    total = world.empty((longest, n), x.dtype) if out is None or longest > count else out
    world.reduce_scatter(total, x, stream)
    if total is out or out is None:
        return total[:count] if longest > count else total
    if count:
        world.copy(out, total[:count], stream)
    return out


def reduce_all_rows(world: World, plan: Decomposed, shards: tuple[int, ...], n: int, dtype: torch.dtype) -> ReduceRows:
    """Prepare parts of `out` [M, N], one for each group of shards. The op computes each part in place, and NCCL then
    sums it over the ranks, also in place, while the op computes the next part. The environment variable NCCL_MAX_CTAS
    limits the number of NCCL's CTAs."""
    comm, groups = world.side_stream("comm"), group_steps(plan, world.size)
    parts = [slice(group.start * shards[0], group.stop * shards[0]) for group in groups]

    @contextmanager
    def reduce(out: torch.Tensor, bias: torch.Tensor | None) -> Iterator[Iterable[PartialRows]]:
        stream = world.current_stream()

        def send(partial: torch.Tensor) -> None:
            world.wait_event(comm, world.record(stream))
            world.all_reduce(partial, comm)

        yield [PartialRows(rows, out[rows], stream, send) for rows in parts]
        world.wait_event(stream, world.record(comm))
        add_bias(world, out, bias, stream)

    return reduce


def add_bias(world: World, out: torch.Tensor, bias: torch.Tensor | None, stream: Stream) -> None:
    if bias is not None:
        world.call(lambda: out.add_(bias), [out, bias], [out], stream)


def gather_at_once(gather: Callable[..., list[torch.Tensor]]) -> GatherTransport:
    """Return the transport with one arrival, which calls gather(tensors, world, plan, shards, stream)."""

    def gather_rows(world: World, plan: Plan, shards: tuple[int, ...], specs: TensorSpecs, keep: bool) -> GatherRows:
        @contextmanager
        def gather_tensors(tensors: TensorList) -> Iterator[GatheredTensors]:
            stream = world.current_stream()
            full = gather(tensors, world, plan, shards, stream)
            yield GatheredTensors(full, [ArrivedRows(slice(None), full, stream)])

        return gather_tensors

    return gather_rows


def gather_all(tensors: TensorList, world: World, shards: tuple[int, ...], stream: Stream) -> list[torch.Tensor]:
    """Gather each tensor's rows from all ranks by NCCL. NCCL does not support 8-bit floats, so they are sent as bytes.
    If the shards have equal lengths, all tensors are sent in the same launch, scales as bytes: a sequential call of
    8-bit operands is up to 4% faster with one launch than with two (bench/measure/fp8_ranks.py)."""
    as_bytes = tensors[0].itemsize == 1
    sent = [t.view(torch.uint8) for t in tensors] if as_bytes else [*tensors]
    if world.size > 1 and len(sent) > 1 and min(shards) == max(shards):
        full = [world.empty((sum(shards), t.shape[1]), t.dtype) for t in sent]
        world.backend.all_gather_together(full, sent, stream)
    else:
        full = [gather(t, world, shards, stream) for t in sent]
    return [gathered.view(t.dtype) for gathered, t in zip(full, tensors, strict=True)]


gather_rows = gather_at_once(lambda tensors, world, plan, *arguments: gather_all(tensors, world, *arguments))


def gather_in_backward(world: World, x: torch.Tensor, shards: Sequence[int]) -> torch.Tensor:
    """Return `gather` of x, which need not be contiguous. If no rank has rows, as in some backward passes, return x."""
    return gather(x.contiguous(), world, shards, world.current_stream()) if any(shards) else x


def reduce_scatter_in_backward(world: World, x: torch.Tensor, shards: Sequence[int]) -> torch.Tensor:
    """Return `reduce_scatter` of x, which need not be contiguous. If no rank has rows or there is only one rank, return
    x."""
    if world.size == 1 or not any(shards):
        return x
    return reduce_scatter(x.contiguous(), world, shards, world.current_stream())
