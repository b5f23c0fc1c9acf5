"""What one call of either half of a layer whose experts' columns are split over ranks computes, its tensors, and the
table that goes from the one half to the other.

The routes of a call are one int32 tensor: weights, slots, offsets, tiles, their number and the tiles of each wave, as
`routing.Tables` has them, each from a multiple of four words on. So the first half returns memory of its own, and the
second may run on it whenever the caller likes. Where an operand requires a gradient they are float32, of the same bits.
"""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass
from typing import NamedTuple

import torch

from ....op import Call
from ....world import World
from ..call import Kept, Layer, first_columns
from ..routing.route_tables import rows_of


@dataclass(frozen=True)
class Split(Layer):
    """A layer of which a rank has `inner` columns of its experts; those of one expert lie on `sharing` neighbouring
    ranks. tile: rows of a tile, from a multiple of which each expert's rows begin."""

    sharing: int = 1
    tile: int = 128

    def local(self, world: World) -> int:
        """Return the number of experts that a rank has columns of."""
        return self.experts * self.sharing // world.size

    def rows(self, world: World) -> int:
        """Return the most rows that expert order can have, in whole tiles."""
        return rows_of(world, self.capacity, self.k, self.local(world), self.tile)


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
    """tokens: of every rank. Whether there are biases is each rank's own, and not told."""

    tokens: tuple[int, ...]
    layer: Split

    @property
    def rows(self) -> int:
        return sum(self.tokens)

    def agreed(self) -> dict[str, Hashable]:
        layer = self.layer
        return dict(
            rows=self.tokens,
            experts=layer.experts,
            k=layer.k,
            H=layer.hidden,
            I=layer.inner,
            dtype=str(layer.dtype),
            activation=layer.activation,
            sharing=layer.sharing,
        )


@dataclass(frozen=True)
class FirstHalfCall(GroupedCall):
    """keep: what a call with a gradient keeps for its backward pass; None: there is none."""

    keep: str | None = None

    def agreed(self) -> dict[str, Hashable]:
        agreed = super().agreed()
        return agreed if self.keep is None else dict(agreed, keep=self.keep)

    def outputs(self, world: World) -> list[tuple[tuple[int, ...], torch.dtype]]:
        """Return the shapes and dtypes of hidden, the routes and what `Kept` has."""
        layer, words = self.layer, sum(sections(world, self.layer))
        hidden = (layer.rows(world), layer.inner), layer.dtype
        made = [hidden, ((words,), torch.int32 if self.keep is None else torch.float32)]
        if self.keep in ("rows", "activation"):
            made.append(((world.size, layer.capacity, layer.hidden), layer.dtype))
        if self.keep == "activation":
            made.append(((layer.rows(world), first_columns(world, layer)), layer.dtype))
        return made

    def buffers(self, world: World) -> tuple[torch.Tensor, Kept]:
        """Return memory for the routes, and for what is kept."""
        shapes = world.cached(("beside hidden", self), lambda: self.outputs(world)[1:])
        routes, *kept = (world.empty(shape, dtype) for shape, dtype in shapes)
        return routes, Kept(*kept)


class Parts(NamedTuple):
    """A call's routes by their parts, int32."""

    weights: torch.Tensor  # float32 [W * C * k]
    slots: torch.Tensor
    offsets: torch.Tensor
    tiles: torch.Tensor
    tile_count: torch.Tensor
    targets: torch.Tensor
    sources: torch.Tensor
    received: torch.Tensor


def sections(world: World, layer: Split) -> list[int]:
    """Return the number of words of each part of the routes."""
    routes, rows, local = world.size * layer.capacity * layer.k, layer.rows(world), layer.local(world)
    words = routes, routes, local + 1, 4 * (rows // layer.tile), 1, world.size, rows, local
    return [-(-n // 4) * 4 for n in words]


def parts(world: World, layer: Split, routes: torch.Tensor) -> Parts:
    weights, *others = routes.view(torch.int32).split(world.cached(("sections", layer), lambda: sections(world, layer)))
    return Parts(weights.view(torch.float32), *others)
