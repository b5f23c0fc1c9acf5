"""NCCL's collectives, for shards of unequal length too, and the transports by them, which have one arrival or one part
(interfaces.py)."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager

import torch

from ..backends.base import Stream
from ..plans import Decomposed, Plan
from ..world import World
from .interfaces import ArrivedRows, GatheredTensors, GatherTransport, PartialRows, ReduceTransport, TensorList
from .order import group_steps


def gather(x: torch.Tensor, world: World, shards: Sequence[int], stream: Stream) -> torch.Tensor:
    """all_gather(x) [M, K] by the library's collective; shards of unequal length travel padded to the longest."""
    k, most = x.shape[1], max(shards)
    if world.size == 1:
        return x
    if min(shards) == most:
        full = world.empty((sum(shards), k), x.dtype)
        world.all_gather(full, x, stream)
        return full
    padded, full = world.empty((most, k), x.dtype), world.empty((world.size * most, k), x.dtype)
    world.copy(padded[: x.shape[0]], x, stream)
    if x.shape[0] < most:
        world.call(lambda: padded[x.shape[0] :].zero_(), [], [padded[x.shape[0] :]], stream)
    world.all_gather(full, padded, stream)
    compact = world.empty((sum(shards), k), x.dtype)
    for to, part in zip(compact.split(list(shards)), full.split(most), strict=True):
        if len(to):
            world.copy(to, part[: len(to)], stream)
    return compact


def scattered_sum(
    x: torch.Tensor, world: World, shards: Sequence[int], stream: Stream, out: torch.Tensor | None = None
) -> torch.Tensor:
    """This rank's rows of the sum over ranks of x [M, N], by the library's collective; shards of unequal length travel
    padded to the longest."""
    n, most, rows = x.shape[1], max(shards), shards[world.rank]
    if min(shards) < most:
        padded = world.zeros((world.size * most, n), x.dtype)
        for to, part in zip(padded.split(most), x.split(list(shards)), strict=True):
            if len(part):
                world.copy(to[: len(part)], part, stream)
        x = padded
    total = world.empty((most, n), x.dtype) if out is None or most > rows else out
    world.reduce_scatter(total, x, stream)
    if total is out or out is None:
        return total[:rows] if most > rows else total
    if rows:
        world.copy(out, total[:rows], stream)
    return out


@contextmanager
def reduce_all_rows(
    world: World, plan: Plan, shards: Sequence[int], out: torch.Tensor, bias: torch.Tensor | None
) -> Iterator[Iterable[PartialRows]]:
    """Sum all rows in `out` [M, N], into which this rank's parts are computed: all at once, or, if decomposed, group by
    group of the shards, each all-reduced under the computation of the next. NCCL_MAX_CTAS leaves NCCL fewer CTAs."""
    stream = world.current_stream()
    if not isinstance(plan, Decomposed):
        yield [PartialRows(None, out, stream, lambda partial: world.all_reduce(partial, stream))]
    else:
        comm = world.side_stream("comm")

        def send(partial: torch.Tensor) -> None:
            world.wait_event(comm, world.record(stream))
            world.all_reduce(partial, comm)

        groups = group_steps(plan, world.size)
        parts = [slice(group.start * shards[0], group.stop * shards[0]) for group in groups]
        yield [PartialRows(rows, out[rows], stream, send) for rows in parts]
        world.wait_event(stream, world.record(comm))
    add_bias(world, out, bias, stream)


def add_bias(world: World, out: torch.Tensor, bias: torch.Tensor | None, stream: Stream) -> None:
    if bias is not None:
        world.call(lambda: out.add_(bias), [out, bias], [out], stream)


def gather_at_once(gather: Callable[..., torch.Tensor]) -> GatherTransport:
    """Return the transport with one arrival, which calls gather(tensor, world, plan, shards, stream)."""

    @contextmanager
    def gather_rows(
        world: World, plan: Plan, shards: tuple[int, ...], tensors: TensorList, keep: bool
    ) -> Iterator[GatheredTensors]:
        stream = world.current_stream()
        full = [gather(t, world, plan, shards, stream) for t in tensors]
        yield GatheredTensors(full, [ArrivedRows(slice(None), full, stream)])

    return gather_rows


def reduce_at_once(reduce: Callable[..., object]) -> ReduceTransport:
    """Return the transport with one part, which calls reduce(partial, world, plan, shards, stream, out)."""

    @contextmanager
    def reduce_rows(
        world: World, plan: Plan, shards: tuple[int, ...], out: torch.Tensor, bias: torch.Tensor | None
    ) -> Iterator[Iterable[PartialRows]]:
        stream = world.current_stream()
        yield [PartialRows(None, None, stream, lambda partial: reduce(partial, world, plan, shards, stream, out))]
        add_bias(world, out, bias, stream)

    return reduce_rows


@gather_at_once
def gather_rows(x: torch.Tensor, world: World, plan: Plan, shards: Sequence[int], stream: Stream) -> torch.Tensor:
    """Gather x with NCCL, to which 8-bit floats are bytes."""
    return gather(x.view(torch.uint8) if x.itemsize == 1 else x, world, shards, stream).view(x.dtype)


reduce_rows = reduce_at_once(lambda partial, world, plan, *to: scattered_sum(partial, world, *to))


def regathered(world: World, x: torch.Tensor, shards: Sequence[int]) -> torch.Tensor:
    """`gather` for a backward pass: also of what is not contiguous, and of no rows at all."""
    return gather(x.contiguous(), world, shards, world.current_stream()) if any(shards) else x


def summed(world: World, x: torch.Tensor, shards: Sequence[int]) -> torch.Tensor:
    """`scattered_sum`, likewise."""
    if world.size == 1 or not any(shards):
        return x
    return scattered_sum(x.contiguous(), world, shards, world.current_stream())
