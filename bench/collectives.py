"""The library's all-gather and reduce-scatter of rows, as torch.autograd has them beside cuBLAS: what layers that train are
compared with."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

import weft
from weft.lang.mapping import balanced_rows
from weft.transport.collectives import gather, scattered_sum

Tensor = torch.Tensor


class Gathered(torch.autograd.Function):
    """NCCL's all-gather of rows; backward its reduce-scatter."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, world: weft.World) -> Tensor:
        ctx.world = world
        return joined(gather, x, world, x.shape[0] * world.size)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, None]:
        return joined(scattered_sum, dy.contiguous(), ctx.world, dy.shape[0]), None


class Scattered(torch.autograd.Function):
    """NCCL's reduce-scatter of rows; backward its all-gather."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, world: weft.World) -> Tensor:
        ctx.world = world
        return joined(scattered_sum, x, world, x.shape[0])

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, None]:
        return joined(gather, dy.contiguous(), ctx.world, dy.shape[0] * ctx.world.size), None


def joined(collective: Callable[..., Tensor], x: Tensor, world: weft.World, rows: int) -> Tensor:
    stream = world.current_stream()
    y = collective(x, world, balanced_rows(rows, world.size), stream)
    world.finish(stream)
    return y
