"""The baseline for layers that train: NCCL's all-gather and reduce-scatter of rows under torch.autograd, with cuBLAS.
Also the same computation without communication, which is the limit of all overlap."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import torch

import weft
from weft.lang.mapping import balanced_rows
from weft.transport.collectives import gather, reduce_scatter

Tensor = torch.Tensor
T = TypeVar("T")


def norm_alone(
    x: Tensor, residual: Tensor, weight: Tensor, eps: float, *, world: weft.World, **_: object
) -> tuple[Tensor, Tensor]:
    """Compute `all_reduce_rms_norm` without the all-reduce: add this rank's partial sums to the residual and normalise
    the result."""
    return weft.rms_norm(x, weight, eps, world=world, residual=residual)


class Collectives:
    """NCCL's collectives on the caller's stream, over shards that are as even as possible."""

    def __init__(self, world: weft.World) -> None:
        self.world = world

    def gather(self, x: Tensor, rows: int) -> Tensor:
        """Return all ranks' x, which together have `rows` rows."""
        return self._on_stream(gather, x, rows)

    def sum(self, x: Tensor) -> Tensor:
        """Return this rank's rows of the sum over ranks."""
        return self._on_stream(reduce_scatter, x, x.shape[0])

    def _on_stream(self, collective: Callable[..., Tensor], x: Tensor, rows: int) -> Tensor:
        stream = self.world.current_stream()
        y = collective(x, self.world, balanced_rows(rows, self.world.size), stream)
        self.world.finish(stream)
        return y


class Elided(Collectives):
    """Stand-ins for the collectives, without communication. `sum` returns this rank's rows of its own partial sum.
    `gather` returns the result of the same call in the first pass. Each rank thus does the same computation as with
    NCCL, with the same routes to its experts."""

    def __init__(self, world: weft.World) -> None:
        super().__init__(world)
        self.kept: list[Tensor] = []
        self.next_kept = 0

    def passes(self, fn: Callable[[], T]) -> Callable[[], T]:
        """Return `fn` as one pass. Every call of the pass runs the same collectives in the same order."""

        def run() -> T:
            self.next_kept = 0
            return fn()

        return run

    def gather(self, x: Tensor, rows: int) -> Tensor:
        if self.next_kept == len(self.kept):
            self.kept.append(super().gather(x, rows))
        self.next_kept += 1
        return self.kept[self.next_kept - 1].detach()

    def sum(self, x: Tensor) -> Tensor:
        return x.split(balanced_rows(x.shape[0], self.world.size))[self.world.rank]


class Gathered(torch.autograd.Function):
    """The all-gather of rows for ranks with equally many rows; the backward pass is the reduce-scatter."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, collectives: Collectives) -> Tensor:
        ctx.collectives = collectives
        return collectives.gather(x, x.shape[0] * collectives.world.size)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, None]:
        return ctx.collectives.sum(dy.contiguous()), None


class Scattered(torch.autograd.Function):
    """The reduce-scatter of rows; the backward pass is the all-gather."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, collectives: Collectives) -> Tensor:
        ctx.collectives = collectives
        return collectives.sum(x)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, None]:
        return ctx.collectives.gather(dy.contiguous(), dy.shape[0] * ctx.collectives.world.size), None
