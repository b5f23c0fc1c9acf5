"""The library's collectives for shards of unequal length."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from ..backends.base import Stream
from ..world import World


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
    compact, at = world.empty((sum(shards), k), x.dtype), 0
    for r, n in enumerate(shards):
        if n:
            world.copy(compact[at : at + n], full[r * most : r * most + n], stream)
        at += n
    return compact


def scattered_sum(
    x: torch.Tensor, world: World, shards: Sequence[int], stream: Stream, out: torch.Tensor | None = None
) -> torch.Tensor:
    """This rank's rows of the sum over ranks of x [M, N], by the library's collective; shards of unequal length travel
    padded to the longest."""
    n, most, rows = x.shape[1], max(shards), shards[world.rank]
    if min(shards) < most:
        padded, at = world.zeros((world.size * most, n), x.dtype), 0
        for r, count in enumerate(shards):
            if count:
                world.copy(padded[r * most : r * most + count], x[at : at + count], stream)
            at += count
        x = padded
    mine = world.empty((most, n), x.dtype) if out is None or most > rows else out
    world.reduce_scatter(mine, x, stream)
    if mine is out or out is None:
        return mine[:rows] if most > rows else mine
    if rows:
        world.copy(out, mine[:rows], stream)
    return out


def regathered(world: World, x: torch.Tensor, shards: Sequence[int]) -> torch.Tensor:
    """`gather` for a backward pass: also of what is not contiguous, and of no rows at all."""
    return gather(x.contiguous(), world, shards, world.current_stream()) if any(shards) else x


def summed(world: World, x: torch.Tensor, shards: Sequence[int]) -> torch.Tensor:
    """`scattered_sum`, likewise."""
    if world.size == 1 or not any(shards):
        return x
    return scattered_sum(x.contiguous(), world, shards, world.current_stream())
