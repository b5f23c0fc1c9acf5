"""The calls of both halves of a layer whose experts are split by columns over the ranks: their sizes and options, their
tensors, and the tables that the first half passes to the second.

The routes of a call are one int32 tensor, which consists of the parts in `RouteParts`. Each part begins at a multiple
of four words. Because this memory belongs to the caller, the second half may run at any later time. If an operand
requires a gradient, the tensor is float32 with the same bits.
"""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass
from typing import NamedTuple

import torch

from ....op import Call, Shapes
from ....world import World
from ..call import Layer, kept_shapes
from ..routing.route_tables import Tables, rows_of


@dataclass(frozen=True)
class Split(Layer):
    """A layer whose experts are split by columns: a rank holds `inner` columns of each of its experts, and `tp_size`
    neighbouring ranks hold columns of the same experts. tile: the number of rows in a tile; the first row of each
    expert is a multiple of this number."""

    tp_size: int = 1
    tile: int = 128

    def local(self, world: World) -> int:
        """Return the number of experts on each rank: a rank holds columns of each of them."""
        return self.experts * self.tp_size // world.size

    def rows(self, world: World) -> int:
        """Return the largest possible number of rows in expert order, in whole tiles."""
        return rows_of(world, self.max_tokens_per_rank, self.k, self.local(world), self.tile)


class GatherOperands(NamedTuple):
    """The operands of `all_gather_grouped_matmul`, with the first matrices and their biases flat: [El, N, H] and [El,
    N]."""

    x: torch.Tensor
    ids: torch.Tensor
    weights: torch.Tensor
    w13: torch.Tensor
    b13: torch.Tensor | None = None


class ScatterOperands(NamedTuple):
    """The operands of `grouped_matmul_reduce_scatter`."""

    hidden: torch.Tensor
    routes: torch.Tensor
    ids: torch.Tensor
    w2: torch.Tensor
    b2: torch.Tensor | None = None
    shared: torch.Tensor | None = None


@dataclass(frozen=True)
class GroupedCall(Call):
    """A checked call. tokens: the number of tokens of every rank. Each rank decides for itself whether there are
    biases, and the ranks do not compare this choice."""

    tokens: tuple[int, ...]
    layer: Split

    @property
    def rows(self) -> int:
        return sum(self.tokens)

    def same_on_all_ranks(self) -> dict[str, Hashable]:
        return dict(rows=self.tokens, tp_size=self.layer.tp_size) | self.layer.same_on_all_ranks()


@dataclass(frozen=True)
class FirstHalfCall(GroupedCall):
    """A checked call of the first half. keep: which tensors are saved for the backward pass; None means that no
    gradient is wanted."""

    keep: str | None = None

    def same_on_all_ranks(self) -> dict[str, Hashable]:
        values = super().same_on_all_ranks()
        return values if self.keep is None else dict(values, keep=self.keep)

    def outputs(self, world: World) -> Shapes:
        """Return the shapes and dtypes of hidden and of the routes."""
        layer, words = self.layer, sum(section_words(world, self.layer))
        routes = (words,), torch.int32 if self.keep is None else torch.float32
        return [((layer.rows(world), layer.inner), layer.dtype), routes]

    def saved_shapes(self, world: World) -> Shapes:
        """Return the shapes and dtypes of the tensors in `Kept`."""
        return kept_shapes(world, self.layer, self.keep, self.layer.rows(world))

    def routes(self, world: World) -> torch.Tensor:
        """Allocate memory for the routes and return it."""
        return world.empty(*world.cached(("routes", self), lambda: self.outputs(world)[1]))


class RouteParts(NamedTuple):
    """The parts of a call's routes: the weights, float32 [W * max_tokens * k], and the tables."""

    weights: torch.Tensor
    tables: Tables


def section_words(world: World, layer: Split) -> list[int]:
    """Return the number of words in each part of the routes."""
    w, rows, local = world.size, layer.rows(world), layer.local(world)
    routes = w * layer.max_tokens_per_rank * layer.k
    tables = routes, rows, local + 1, 4 * (rows // layer.tile), 1, w, local, w  # in the order of `Tables`
    return [-(-n // 4) * 4 for n in (routes, *tables)]


def route_parts(world: World, layer: Split, routes: torch.Tensor) -> RouteParts:
    """Return the parts of the routes as views."""
    weights, *tables = routes.view(torch.int32).split(
        world.cached(("sections", layer), lambda: section_words(world, layer))
    )
    return RouteParts(weights.view(torch.float32), Tables(*tables))
